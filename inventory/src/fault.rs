//! Faults of GPUs that the kernel log reports (Xid), recorded for this boot: a file for each faulty GPU.
//!
//! The driver writes `NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus.` (NVIDIA's guide to
//! Xid errors). Many numbers are a program's own mistakes; the settings define which of them make a GPU unfit
//! for new containers.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::gpu::{Gpu, PciAddress};
use crate::proc::{ProcError, boot_id, pci_address};
use crate::uuid::GpuUuid;

/// The folder in the state folder.
const FOLDER: &str = "faults";
/// An Xid of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// The GPU's PCI address; NVIDIA omits the function.
    address: PciAddress,
    /// The error's number.
    pub number: u32,
    /// The driver's text after the number.
    pub text: String,
    /// Number of the record in the kernel log.
    pub record: u64,
}

impl Xid {
    /// Parses a record of `/dev/kmsg`, such as `4,339,5140900,-;NVRM: Xid (PCI:0000:3b:00): 79, …` (kernel,
    /// Documentation/ABI/testing/dev-kmsg). Only the kernel's own records count, and only if they begin with
    /// the Xid: many records contain names of programs.
    pub fn parse(record: &str) -> Option<Self> {
        let number_in_log = record_number(record)?;
        let (prefix, message) = record.split_once(';')?;
        let message = &without_escapes(message);
        // Priority and facility in one number; the kernel's facility is 0.
        prefix.split(',').next()?.parse::<u32>().ok().filter(|priority| *priority < 8)?;
        let (address, rest) = message.strip_prefix("NVRM: Xid (PCI:")?.split_once("): ")?;
        let address = Some(address).filter(|address| is_whole_address(address))?;
        let whole = if address.contains('.') { address.to_owned() } else { format!("{address}.0") };
        let (number, text) = rest.split_once(',').unwrap_or((rest, ""));
        let text = if text.is_empty() { text } else { drivers_own(text.strip_prefix(' ')?)? };
        let text: String = text.trim().chars().filter(|c| !c.is_control()).take(200).collect();
        Some(Self {
            address: pci_address(&whole)?,
            number: number.trim().parse().ok()?,
            text,
            record: number_in_log,
        })
    }

    /// Returns the GPU that reported it.
    pub fn gpu<'a>(&self, gpus: &'a [Gpu]) -> Option<&'a Gpu> {
        let (domain, bus, device, _) = self.address;
        let is_it = |gpu: &&Gpu| {
            pci_address(&gpu.place.pci_bus_id).is_some_and(|(a, b, c, _)| (a, b, c) == (domain, bus, device))
        };
        gpus.iter().find(is_it)
    }
}

/// The faulty GPUs of this boot, each with the text from the kernel log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(BTreeMap<GpuUuid, String>);

impl Faults {
    /// Returns all faulty GPUs with the recorded text.
    pub fn all(&self) -> impl Iterator<Item = (GpuUuid, &str)> {
        self.0.iter().map(|(gpu, why)| (*gpu, why.as_str()))
    }

    /// The time at which the fault of `gpu` was recorded, in seconds since 1970; `None` if there is no fault.
    pub fn noted_at(state: &Path, gpu: GpuUuid) -> Option<u64> {
        let noted = fs::metadata(state.join(FOLDER).join(gpu.to_string())).ok()?.modified().ok()?;
        Some(noted.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs())
    }

    /// Loads the faults recorded in this boot. Ignores unreadable files.
    pub fn load(state: &Path) -> Self {
        let Ok(boot) = boot_id() else { return Self::default() };
        let entries = fs::read_dir(state.join(FOLDER)).into_iter().flatten().flatten();
        let noted = entries.filter_map(|entry| {
            let gpu = entry.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(entry.path()).ok()?;
            let (of, why) = text.split_once('\n')?;
            (of == boot).then(|| (gpu, why.trim().to_owned()))
        });
        Self(noted.collect())
    }

    /// Why the GPU is faulty; `None` if no fault was recorded.
    pub fn of(&self, gpu: GpuUuid) -> Option<&str> {
        self.0.get(&gpu).map(String::as_str)
    }

    /// Records that a GPU is faulty. Returns whether that is new: it was neither recorded before, nor
    /// forgotten after this record.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn note(state: &Path, gpu: GpuUuid, xid: &Xid) -> io::Result<bool> {
        let is_new = Self::load(state).of(gpu).is_none()
            && mended(state, gpu).is_none_or(|record| record < xid.record);
        if is_new {
            let why = format!("{}\nXid {}: {}\n", boot()?, xid.number, xid.text);
            write(state, &gpu.to_string(), &why)?;
        }
        Ok(is_new)
    }

    /// Forgets the fault of a GPU, and ignores all records of the kernel log up to `newest`. Returns whether
    /// a fault was recorded.
    ///
    /// # Errors
    /// When it cannot be written or removed.
    pub fn forget(state: &Path, gpu: GpuUuid, newest: u64) -> io::Result<bool> {
        write(state, &mended_name(gpu), &format!("{}\n{newest}\n", boot()?))?;
        match fs::remove_file(state.join(FOLDER).join(gpu.to_string())) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn mended_name(gpu: GpuUuid) -> String {
    format!(".mended-{gpu}")
}

/// The last record to ignore for the GPU in this boot.
fn mended(state: &Path, gpu: GpuUuid) -> Option<u64> {
    let text = fs::read_to_string(state.join(FOLDER).join(mended_name(gpu))).ok()?;
    let (of, record) = text.split_once('\n')?;
    (of == boot_id().ok()?).then(|| record.trim().parse().ok())?
}

/// Returns the driver's text after an error's number, or `None` if the driver would not write it. The kernel
/// logs packets too (net/netfilter/nf_log_syslog.c, ebt_log.c), under a prefix that the owner of a network
/// namespace chooses, followed by the interfaces, `IN=` and `OUT=`. Since release 450 the driver writes the
/// program's name first, at most 15 characters, which may be any text.
fn drivers_own(text: &str) -> Option<&str> {
    const NAME: usize = 15;
    /// How the rest of a packet's record begins, if its interfaces were mistaken for a program's name.
    const PACKETS: [&str; 6] = ["MAC", "SRC=", "ARP", "PHYS", "TRUNCATED", "proto"];
    let is_own = |text: &str| {
        !text.contains("IN=")
            && !text.contains("OUT=")
            && !PACKETS.iter().any(|word| text.trim_start().starts_with(word))
    };
    let Some((pid, named)) = text.strip_prefix("pid=").and_then(|rest| rest.split_once(", name=")) else {
        return is_own(text).then_some(text);
    };
    let mut ends = named.match_indices(", ").take_while(|(at, _)| *at <= NAME).map(|(at, _)| at);
    let is_number = pid.trim_matches('\'').chars().all(|c| c.is_ascii_digit()) || pid.contains("<unknown>");
    (is_number && ends.any(|at| is_own(&named[at + 2..]))).then_some(text)
}

/// Replaces each byte that the kernel escapes as `\xNN` with one character; the value does not matter here.
fn without_escapes(message: &str) -> String {
    let is_escape = |rest: &str| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let mut parts = message.split("\\x");
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match is_escape(part) {
            true => whole.extend(['?'].into_iter().chain(part[2..].chars())),
            false => whole.extend(["\\x", part]),
        }
    }
    whole
}

/// Whether it is the driver's format of a PCI address: domain, bus and device in full.
fn is_whole_address(address: &str) -> bool {
    let widths: Vec<usize> = address.split(['.', ':']).map(str::len).collect();
    matches!(widths[..], [4 | 8, 2, 2] | [4 | 8, 2, 2, 1])
}

/// Returns the number of a record of the kernel log.
pub fn record_number(record: &str) -> Option<u64> {
    record.split_once(';')?.0.split(',').nth(1)?.parse().ok()
}

fn boot() -> io::Result<String> {
    boot_id().map_err(|error: ProcError| io::Error::other(error))
}

/// Writes to a new file and renames it, so that readers never see a partial file.
fn write(state: &Path, name: &str, text: &str) -> io::Result<()> {
    let folder: PathBuf = state.join(FOLDER);
    DirBuilder::new().mode(0o700).recursive(true).create(&folder)?;
    let new = folder.join(format!(".new-{name}"));
    fs::write(&new, text)?;
    fs::rename(new, folder.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_records_of_the_drivers_form_are_xids() {
        let xid = Xid::parse("4,339,5140900,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n SUBSYSTEM=pci").unwrap();
        assert_eq!((xid.number, xid.record, xid.address), (79, 339, (0, 0x3b, 0, 0)));
        assert!(xid.text.ends_with("off the bus. SUBSYSTEM=pci") && !xid.text.contains('\n'), "{}", xid.text);
        let azure = Xid::parse("3,7,1,-;NVRM: Xid (PCI:00000001:00:00): 48, Double Bit ECC Error").unwrap();
        assert_eq!((azure.number, azure.address), (48, (1, 0, 0, 0)));
        assert_eq!(Xid::parse("3,7,1,-;NVRM: Xid (PCI:0000:01:00.0): 62").unwrap().number, 62);
        // A program's name cannot hide its GPU's errors.
        for name in [
            "IN= OUT=",
            "IN=OUT=SRC=DST=",
            "IN= OUT= SRC=a",
            "a, OUT=",
            ", , ",
            "a, MAC=",
            "<unknown>",
            r"\xd0\xbe\xd0\xb1\xd1\x83\xd1\x87\xd0\xb5\xd0\xbd\xd0\xb8\xd0",
            r"\x5cx",
        ] {
            let record = format!(
                "4,9,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name={name}, GPU has fallen off the bus."
            );
            assert_eq!(Xid::parse(&record).map(|xid| xid.number), Some(79), "{name}");
        }
        for none in [
            "",
            "NVRM: Xid (PCI:0000:3b:00): 79, x",
            "12,339,1,-;NVRM: Xid (PCI:0000:3b:00): 79, a program wrote it",
            "4,339,1,-;python3[1]: segfault NVRM: Xid (PCI:0000:3b:00): 79, x",
            "4,339,1,-;NVRM: Xid (PCI:0000:3b:00): many, x",
            "4,339,1,-;NVRM: Xid (PCI:zz): 79, x",
            "4,x,1,-;NVRM: Xid (PCI:0000:3b:00): 79, x",
            // Packets, with or without a space at the end of the prefix.
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, IN=eth0 OUT= MAC=00:11:22:33:44:55 SRC=10.0.0.1 DST=10.0.0.2 LEN=60 TOS=0x00 PREC=0x00 TTL=64 ID=0 DF PROTO=TCP SPT=1 DPT=2 WINDOW=0 RES=0x00 SYN URGP=0 ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79,IN= OUT=lo SRC=10.0.0.1 DST=10.0.0.2 LEN=84 TOS=0x00 PREC=0x00 TTL=64 ID=0 DF PROTO=ICMP TYPE=8 CODE=0 ID=1 SEQ=1 ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, name=IN=lo OUT= SRC=0000:0000:0000:0000:0000:0000:0000:0001 DST=0000:0000:0000:0000:0000:0000:0000:0001 LEN=64 ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79,IN=eth0 OUT= ARP HTYPE=1 PTYPE=0x0800 OPCODE=1 ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79,IN=eth0 OUT= MACSRC=00:11:22:33:44:55 MACDST=00:11:22:33:44:55 MACPROTO=88cc ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79,IN=eth0 OUT= TRUNCATED",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79,IN=veth0 OUT= MAC=ff:ff:ff:ff:ff:ff:00:11:22:33:44:55:88:b5 ",
            "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=IN=a, OUT=b, MAC=ff:ff ",
            "4,1,1,-;NVRM: Xid (PCI:0:3b:00): 79, IN=veth0 OUT= MAC source = 00:11 MAC dest = 00:22 proto = 0x88b5",
            "4,1,1,-;NVRM: Xid (PCI:0:3b:0): 79, GPU has fallen off the bus.",
            "4,1,1,-;NVRM: GPU at PCI:0000:3b:00: GPU-x",
        ] {
            assert_eq!(Xid::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_fault_is_noted_once_for_this_boot_and_forgotten() {
        let state = tempfile::tempdir().unwrap();
        let gpu = GpuUuid::from_bytes([3; 16]);
        let xid = Xid::parse("4,9,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.").unwrap();
        assert_eq!(Faults::load(state.path()), Faults::default());
        assert!(
            Faults::note(state.path(), gpu, &xid).unwrap() && !Faults::note(state.path(), gpu, &xid).unwrap()
        );
        assert_eq!(Faults::load(state.path()).of(gpu), Some("Xid 79: GPU has fallen off the bus."));
        let path = state.path().join(FOLDER).join(gpu.to_string());
        fs::write(&path, "another-boot\nXid 79: x\n").unwrap();
        assert_eq!(Faults::load(state.path()).of(gpu), None);
        assert!(
            Faults::forget(state.path(), gpu, 20).unwrap() && !Faults::forget(state.path(), gpu, 20).unwrap()
        );
        let again = |record| Faults::note(state.path(), gpu, &Xid { record, ..xid.clone() }).unwrap();
        assert!(!again(9) && !again(20), "what stood in the log before it was mended");
        assert!(again(21));
    }
}
