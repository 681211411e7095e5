//! Takes file leases: whoever opens such a file afterwards has to wait.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

/// Take every lease that the kernel gives, again and again, until killed
#[derive(Args)]
pub struct Lease {
    /// Files
    files: Vec<PathBuf>,
    /// Become this user first
    #[arg(long)]
    uid: Option<u32>,
    /// Let a child take them, which then ends
    #[arg(long)]
    by_child: bool,
}

impl Lease {
    /// Never returns, unless the user id cannot be changed.
    pub fn run(&self) -> Result<()> {
        if let Some(uid) = self.uid {
            // SAFETY: no pointer is passed.
            anyhow::ensure!(unsafe { libc::setuid(uid) } == 0, "{}", std::io::Error::last_os_error());
        }
        // The kernel tells of the break of a lease by a signal, which would end this process.
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        if self.by_child {
            return self.keep_what_a_child_took();
        }
        let mut held: Vec<Option<File>> = self.files.iter().map(|_| None).collect();
        let mut said = false;
        loop {
            for (path, held) in self.files.iter().zip(&mut held) {
                if held.is_none() {
                    *held = File::open(path).ok().filter(|file| {
                        [libc::F_WRLCK, libc::F_RDLCK].iter().any(|kind| {
                            // SAFETY: an open descriptor, and a number.
                            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, *kind) == 0 }
                        })
                    });
                }
            }
            if !said {
                let count = held.iter().flatten().count();
                println!("leases {count}");
                said = true;
            }
            sleep(Duration::from_millis(1));
        }
    }

    fn keep_what_a_child_took(&self) -> Result<()> {
        let files = self.files.iter().map(File::open).collect::<std::io::Result<Vec<_>>>()?;
        // SAFETY: one thread, and the child only makes calls.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let took = files.iter().all(|file| {
                // SAFETY: an open descriptor, and a number.
                unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0 }
            });
            std::process::exit(i32::from(!took));
        }
        let mut status = 0;
        // SAFETY: room for a status.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        anyhow::ensure!(ended == child && status == 0, "the child took none");
        println!("leases {} of process {child}", files.len());
        loop {
            sleep(Duration::from_secs(1000));
        }
    }
}
