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
use gpushare_inventory::{Faults, Gpu, Node, Roots, Xid, record_number};
use nix::libc;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// A record has at most 8 KiB (kernel, `PRINTKRB_RECORD_MAX` and `CONSOLE_EXT_LOG_MAX`).
const RECORD: usize = 8192;
/// The most errors that wait to be noted.
const MOST_OPEN: usize = 64;

/// The kernel's log as seen through the node's root of devices.
fn path(roots: &Roots) -> PathBuf {
    roots.dev.join("dev/kmsg")
}

/// The number of the newest record; 0 where there is none, or no log.
pub fn newest(config: &Config) -> u64 {
    let mut newest = 0;
    if let Ok(mut log) = Log::open(&path(&config.roots)) {
        let read = log.read(|line| newest = record_number(line).unwrap_or(newest));
        if let Err(error) = read {
            tracing::warn!(%error, "the kernel's log cannot be read to its end");
        }
    }
    newest
}

/// Reads on for as long as this process lives. Returns at once.
pub fn watch(config: &Config, state: &Path) {
    let path = path(&config.roots);
    let log = match Log::open(&path) {
        Ok(log) => log,
        Err(error) => {
            let path = path.display();
            return tracing::warn!(%path, %error, "the kernel's log cannot be read: no error of a GPU is noticed");
        }
    };
    let watch = Watch {
        log,
        roots: config.roots.clone(),
        state: state.to_owned(),
        xids: config.meter.xids.clone(),
        known: Vec::new(),
        open: Vec::new(),
    };
    // It ends with the process, which waits for nothing of it.
    drop(thread::spawn(move || watch.run()));
}

/// The log, which is read without waiting.
struct Log {
    file: File,
    /// The beginning of a line whose end was not read yet.
    left: String,
}

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        Ok(Self { file, left: String::new() })
    }

    /// Gives each line that there is to `each`.
    fn read(&mut self, mut each: impl FnMut(&str)) -> io::Result<()> {
        let mut buffer = [0; RECORD];
        loop {
            match self.file.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(length) => {
                    self.left += &String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
                    while let Some(end) = self.left.find('\n') {
                        let line: String = self.left.drain(..=end).collect();
                        each(line.trim_end());
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
}

struct Watch {
    log: Log,
    roots: Roots,
    state: PathBuf,
    xids: BTreeSet<u32>,
    /// Every GPU that the driver has shown: one that fails may not be shown any more.
    known: Vec<Gpu>,
    /// Errors that are not noted yet: of a GPU that was never shown, or because the state folder was full.
    open: Vec<Xid>,
}

impl Watch {
    fn run(mut self) {
        self.look();
        loop {
            let (mut found, xids) = (Vec::new(), &self.xids);
            let is_fault = |xid: &Xid| xids.contains(&xid.number);
            let read = self.log.read(|line| found.extend(Xid::parse(line).filter(is_fault)));
            if !found.is_empty() {
                self.look();
            }
            self.open.append(&mut found);
            self.settle();
            if let Err(error) = read {
                return tracing::warn!(%error, "the kernel's log is not read any more: no error of a GPU is noticed");
            }
            thread::sleep(PAUSE);
        }
    }

    /// Learns which GPUs there are.
    fn look(&mut self) {
        for gpu in Node::open(&self.roots).map(|node| node.gpus).unwrap_or_default() {
            self.known
                .retain(|known| known.uuid != gpu.uuid && known.place.pci_bus_id != gpu.place.pci_bus_id);
            self.known.push(gpu);
        }
    }

    /// Notes what can be noted, and keeps the rest for the next round.
    fn settle(&mut self) {
        let open = std::mem::take(&mut self.open);
        let from = open.len().saturating_sub(MOST_OPEN);
        for xid in open.into_iter().skip(from) {
            let Some(gpu) = xid.gpu(&self.known) else {
                self.open.push(xid);
                continue;
            };
            match Faults::note(&self.state, gpu.uuid, &xid) {
                Ok(true) => {
                    let (index, text) = (gpu.index, &xid.text);
                    tracing::error!(gpu = %gpu.uuid, index, xid = xid.number, text, "GPU out of service");
                }
                Ok(false) => {}
                Err(error) => {
                    let error = one_line(&error);
                    tracing::error!(gpu = %gpu.uuid, error, "a GPU's fault cannot be noted");
                    self.open.push(xid);
                }
            }
        }
    }
}
