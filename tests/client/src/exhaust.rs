//! Takes as much of one kind of thing as the kernel gives to anybody, and holds it: who looks at this process
//! has much to look at.

use std::fs::{self, File};
use std::io::Error;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

/// Take all that there is of something, below /tmp where it needs files, until killed
#[derive(Args)]
pub struct Exhaust {
    #[arg(value_enum)]
    what: What,
    /// The file on which record locks are taken
    #[arg(long, default_value = "/usr/lib/gpushare/usage")]
    file: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Children that wait
    Processes,
    /// Children that end, one after the other
    Pids,
    /// Threads that wait
    Threads,
    /// Open files
    Descriptors,
    /// Record locks on one file
    Locks,
    /// Leases on files
    Leases,
    /// Mappings of memory
    Mappings,
    /// Mounts in many mount namespaces
    Mounts,
    /// Watches of folders
    Watches,
    /// Keys
    Keys,
    /// Sockets
    Sockets,
    /// Folders in folders, and files with long names
    Paths,
}

impl Exhaust {
    /// Says how many it has, and never returns.
    ///
    /// # Errors
    /// When it gets none.
    pub fn run(&self) -> Result<()> {
        raise_limits();
        let count = match self.what {
            What::Processes => repeat(3_000, || fork(wait)),
            What::Pids => loop {
                let _ = fork(|| ());
                reap();
            },
            What::Threads => repeat(3_000, || {
                let started = Builder::new().stack_size(16 << 10).spawn(wait);
                started.is_ok()
            }),
            What::Descriptors => repeat(60, || {
                fork(|| said(repeat(20_000, || File::open("/proc/self/stat").map(std::mem::forget).is_ok())))
            }),
            What::Locks => self.locks()?,
            What::Leases => numbered(5_000, lease),
            What::Mappings => repeat(8, || fork(|| said(numbered(60_000, map)))),
            What::Mounts => repeat(200, || fork(|| said(mounts()))),
            What::Watches => watches(),
            What::Keys => keys(),
            What::Sockets => repeat(20_000, || UdpSocket::bind("127.0.0.1:0").map(std::mem::forget).is_ok()),
            What::Paths => paths(),
        };
        ensure!(count > 0, "none: {}", Error::last_os_error());
        said(count);
        wait();
        Ok(())
    }

    /// Each on a byte of its own, so that none can be joined with the next.
    fn locks(&self) -> Result<u64> {
        let file = File::options().read(true).write(true).open(&self.file)?;
        let mut at = 1 << 40;
        let count = repeat(400_000, || {
            at += 2;
            // SAFETY: all zeros is a lock.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            lock.l_type = i16::try_from(libc::F_WRLCK).unwrap_or_default();
            (lock.l_start, lock.l_len) = (at, 1);
            // SAFETY: an open descriptor, and a lock of ours.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) == 0 }
        });
        std::mem::forget(file);
        Ok(count)
    }
}

/// Makes as many as there are, for a few seconds at most, and returns how many that is.
fn repeat(most: u64, mut make: impl FnMut() -> bool) -> u64 {
    let until = Instant::now() + Duration::from_secs(3);
    (0..most).take_while(|_| make() && Instant::now() < until).count() as u64
}

/// The same of what is made by number.
fn numbered(most: u64, mut make: impl FnMut(u64) -> bool) -> u64 {
    let mut numbers = 0..most;
    repeat(most, || numbers.next().is_some_and(&mut make))
}

fn said(count: u64) {
    println!("holds {count}");
    wait();
}

fn wait() {
    loop {
        sleep(Duration::from_secs(1000));
    }
}

/// Whether there is a child that does this, and then ends.
fn fork(what: impl FnOnce()) -> bool {
    // SAFETY: one thread, and the child never returns from here.
    match unsafe { libc::fork() } {
        0 => {
            what();
            std::process::exit(0)
        }
        pid => pid > 0,
    }
}

fn reap() {
    // SAFETY: no status is asked for.
    let _ = unsafe { libc::waitpid(-1, null_mut(), 0) };
}

fn raise_limits() {
    for what in [libc::RLIMIT_NOFILE, libc::RLIMIT_NPROC, libc::RLIMIT_SIGPENDING] {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: room for one limit.
        if unsafe { libc::getrlimit(what, &raw mut limit) } == 0 {
            limit.rlim_cur = limit.rlim_max;
            // SAFETY: a limit of ours.
            let _ = unsafe { libc::setrlimit(what, &raw const limit) };
        }
    }
}

fn lease(number: u64) -> bool {
    let path = format!("/tmp/lease{number}");
    let Ok(file) = File::create(&path).and_then(|_| File::open(path)) else { return false };
    // SAFETY: an open descriptor, and a number.
    let has_one = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0 };
    std::mem::forget(file);
    has_one
}

/// A page with other rights than the last one's, with which it would be joined.
fn map(number: u64) -> bool {
    let protection = if number.is_multiple_of(2) { libc::PROT_READ } else { libc::PROT_WRITE };
    // SAFETY: new memory, where the kernel likes.
    let at =
        unsafe { libc::mmap(null_mut(), 4096, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    at != libc::MAP_FAILED
}

fn mounts() -> u64 {
    // SAFETY: no pointer is passed.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) } != 0 {
        return 0;
    }
    let (tmpfs, tmp) = (c"tmpfs", c"/tmp");
    repeat(500, || {
        // SAFETY: strings that end in zero, and none for the rest.
        unsafe { libc::mount(tmpfs.as_ptr(), tmp.as_ptr(), tmpfs.as_ptr(), 0, null_mut()) == 0 }
    })
}

fn watches() -> u64 {
    // SAFETY: no pointer is passed.
    let inotify = unsafe { libc::inotify_init() };
    numbered(20_000, |number| {
        let path = format!("/tmp/w{number}\0");
        let _ = fs::create_dir(path.trim_end_matches('\0'));
        // SAFETY: a string that ends in zero.
        unsafe { libc::inotify_add_watch(inotify, path.as_ptr().cast(), libc::IN_CREATE) >= 0 }
    })
}

fn keys() -> u64 {
    const SESSION: i64 = -3;
    numbered(1_000, |number| {
        let name = format!("gpushare{number}\0");
        // SAFETY: strings that end in zero, and one byte of data.
        unsafe {
            libc::syscall(libc::SYS_add_key, c"user".as_ptr(), name.as_ptr(), b"x".as_ptr(), 1, SESSION) >= 0
        }
    })
}

/// Down as far as it goes, from folder to folder: the whole path is longer than any call takes.
fn paths() -> u64 {
    let name = "d".repeat(255);
    if std::env::set_current_dir("/tmp").is_err() {
        return 0;
    }
    repeat(2_000, || {
        let file = File::create("f".repeat(255)).map(std::mem::forget);
        file.is_ok() && fs::create_dir(&name).is_ok() && std::env::set_current_dir(&name).is_ok()
    })
}
