//! Reads the driver's `/proc` files, in every format seen from driver 384 to 580.
//!
//! Labels may be missing, new ones may appear, dates may be localised, and spacing varies. So each reader
//! looks for whole words that it knows and ignores the rest.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::uuid::GpuUuid;

/// Why a file below `/proc` could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// The file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The file was read, but lacks what the driver always writes there.
    #[error(
        "{path} does not name {what}; the NVIDIA kernel module is not working properly: reload it or reboot"
    )]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// The expected text or label.
        what: &'static str,
    },
}

/// Initial size of the read buffer, in bytes: larger than most of the driver's files.
const PROC_FILE: usize = 1024;

/// Reads a whole file of `/proc` in few reads. Such a file does not report a size to allocate a buffer for.
pub(crate) fn read(path: &Path) -> Result<String, ProcError> {
    let mut bytes = Vec::with_capacity(PROC_FILE);
    let read = File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|source| ProcError::Read { path: path.into(), source })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads the number in a line `Name: number`.
pub(crate) fn number(text: &str, name: &str) -> Option<u32> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(found, _)| found.trim() == name).and_then(|(_, value)| value.trim().parse().ok())
}

/// Returns the id of the running boot, from `/proc/sys/kernel/random/boot_id`.
///
/// # Errors
/// When the kernel does not show it.
pub fn boot_id() -> Result<String, ProcError> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id.clone());
    }
    let id = read(Path::new("/proc/sys/kernel/random/boot_id"))?.trim().to_owned();
    Ok(ID.get_or_init(|| id).clone())
}

/// The driver's version in the text of `/proc/driver/nvidia/version`: the word of digits and dots after
/// `Kernel Module`, or after `Open Kernel Module for ARCH`.
pub fn driver_version(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let (_, behind) = line.split_once("Kernel Module")?;
    let mut words = behind.split_whitespace();
    let first = words.next()?;
    let version = if first == "for" { words.nth(1)? } else { first };
    let whole = version.starts_with(|c: char| c.is_ascii_digit())
        && version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    whole.then_some(version)
}

/// The content of `/proc/driver/nvidia/gpus/ADDRESS/information`. Every label may be missing.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Information {
    /// Model name.
    pub model: Option<String>,
    /// UUID; also missing while the driver shows question marks for it.
    pub uuid: Option<GpuUuid>,
    /// The N of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// Whether the driver is configured to exclude this GPU.
    pub excluded: bool,
}

/// Reads the text of a GPU's `information` file.
pub fn information(text: &str) -> Information {
    let mut found = Information::default();
    for (label, value) in text.lines().filter_map(|line| line.split_once(':')) {
        let value = value.trim();
        match label.trim() {
            "Model" => found.model = Some(value.to_owned()),
            "GPU UUID" => found.uuid = value.parse().ok(),
            "Device Minor" => found.minor = value.parse().ok(),
            "GPU Excluded" => found.excluded = value == "Yes",
            _ => {}
        }
    }
    found
}

/// Reads a PCI address as domain, bus, device and function. Folder names differ in case and in the number of
/// domain digits, so addresses are compared as numbers.
pub fn pci_address(name: &str) -> Option<(u32, u8, u8, u8)> {
    let (rest, function) = name.rsplit_once('.')?;
    let mut fields = rest.split(':');
    let domain = u32::from_str_radix(fields.next()?, 16).ok()?;
    let bus = u8::from_str_radix(fields.next()?, 16).ok()?;
    let device = u8::from_str_radix(fields.next()?, 16).ok()?;
    let function = u8::from_str_radix(function, 16).ok()?;
    fields.next().is_none().then_some((domain, bus, device, function))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_in_every_known_form() {
        for (text, want) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Tue Mar  3 10:11:12 UTC 2026\nGCC version:",
                Some("535.309.01"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)  mar 3 août",
                Some("580.65.06"),
            ),
            ("NVRM version: NVIDIA UNIX aarch64 Kernel Module\t470.256.02\t2024", Some("470.256.02")),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  Tue", None),
            ("GCC version: gcc 12", None),
            ("", None),
        ] {
            assert_eq!(driver_version(text), want, "{text:?}");
        }
    }

    #[test]
    fn information_takes_what_is_there_and_skips_the_unknown() {
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 55\nGPU UUID: \t GPU-5f2e0a11-0102-0304-0506-0708090a0bff\n\
                    Device Minor: \t 3\nGPU Excluded:\t No\nNew Label: x\n";
        let found = information(text);
        assert_eq!(found.model.as_deref(), Some("NVIDIA H100 80GB HBM3"));
        assert_eq!(found.minor, Some(3));
        assert!(found.uuid.is_some() && !found.excluded);
        assert_eq!(information(""), Information::default());
        assert_eq!(information("GPU UUID: GPU-????????-????-????-????-????????????").uuid, None);
        assert!(information("GPU Excluded: Yes").excluded);
    }

    #[test]
    fn pci_addresses_compare_by_value() {
        assert_eq!(pci_address("0000:0A:00.0"), pci_address("00000000:0a:00.0"));
        assert_eq!(pci_address("5c7d0001:00:00.0"), Some((0x5c7d_0001, 0, 0, 0)));
        assert_eq!(pci_address("information"), None);
    }
}
