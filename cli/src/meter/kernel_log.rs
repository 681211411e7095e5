//! Reads the kernel's log for errors of GPUs, and takes GPUs with such errors out of service.
//!
//! It runs beside the measurements, whether containers hold shares or not: a GPU that fails while nobody has
//! it is not given to the next one.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use gpushare_config::Config;
use gpushare_inject::one_line;
use gpushare_inventory::{Faults, Node, Roots, Xid};
use nix::libc;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// A record has at most 8 KiB (kernel, `PRINTKRB_RECORD_MAX` and `CONSOLE_EXT_LOG_MAX`).
const RECORD: usize = 8192;

/// The kernel's log as seen through the node's root of devices.
fn path(roots: &Roots) -> PathBuf {
    roots.dev.join("dev/kmsg")
}

/// Reads on for as long as this process lives. Returns at once.
pub fn watch(config: &Config, state: &Path) {
    let path = path(&config.roots);
    let log = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path) {
        Ok(log) => log,
        Err(error) => {
            let path = path.display();
            return tracing::warn!(%path, %error, "the kernel's log cannot be read, so errors of GPUs are not noticed");
        }
    };
    let watch = Watch {
        log,
        left: String::new(),
        roots: config.roots.clone(),
        state: state.to_owned(),
        xids: config.meter.xids.clone(),
        seen: Faults::seen(state).unwrap_or(0),
    };
    // It ends with the process, which waits for nothing of it.
    drop(thread::spawn(move || watch.run()));
}

struct Watch {
    log: File,
    /// The beginning of a line whose end was not read yet.
    left: String,
    roots: Roots,
    state: PathBuf,
    xids: BTreeSet<u32>,
    /// The last record that was acted on.
    seen: u64,
}

impl Watch {
    fn run(mut self) {
        loop {
            if let Err(error) = self.read() {
                return tracing::warn!(%error, "the kernel's log is not read any more: errors of GPUs are not noticed");
            }
            thread::sleep(PAUSE);
        }
    }

    /// Reads what there is.
    fn read(&mut self) -> io::Result<()> {
        let mut buffer = [0; RECORD];
        loop {
            match self.log.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(length) => {
                    self.left += &String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
                    while let Some(end) = self.left.find('\n') {
                        let line: String = self.left.drain(..=end).collect();
                        self.line(line.trim_end());
                    }
                    // No record is longer: what has no end is none.
                    if self.left.len() > RECORD {
                        self.left.clear();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Records were overwritten before they were read; the next read goes on after them.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn line(&mut self, line: &str) {
        let Some(xid) = Xid::parse(line).filter(|xid| xid.record > self.seen) else { return };
        self.seen = xid.record;
        if !self.xids.contains(&xid.number) {
            return;
        }
        let gpus = Node::open(&self.roots).map(|node| node.gpus).unwrap_or_default();
        let Some(gpu) = xid.gpu(&gpus) else {
            // One that has fallen off the bus may not be shown any more, and is not given either.
            return tracing::error!(
                xid = xid.number,
                text = xid.text,
                "a GPU that the driver does not show has failed"
            );
        };
        let noted = Faults::note(&self.state, gpu.uuid, &xid)
            .and_then(|is_new| Faults::note_seen(&self.state, xid.record).map(|()| is_new));
        match noted {
            Ok(true) => {
                tracing::error!(gpu = %gpu.uuid, index = gpu.index, xid = xid.number, text = xid.text, "GPU out of service");
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(gpu = %gpu.uuid, error = one_line(&error), "a GPU's fault cannot be noted")
            }
        }
    }
}
