//! A GPU's compute mode: while MPS runs, only its server may have a context, as NVIDIA advises (CUDA's MPS
//! guide, "Compute Modes"). So a program that passes the server by fails, and nobody else's work meets it.

use std::fs;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result, bail};
use gpushare_inject::MpsFolder;
use gpushare_inventory::{Node, open_now};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use nvml_wrapper::error::NvmlError;
use tempfile::NamedTempFile;

use crate::inventory;

/// The modes by the words of `nvidia-smi -c`.
const MODES: [(&str, ComputeMode); 3] = [
    ("DEFAULT", ComputeMode::Default),
    ("PROHIBITED", ComputeMode::Prohibited),
    ("EXCLUSIVE_PROCESS", ComputeMode::ExclusiveProcess),
];

/// Notes the GPU's mode, unless one is noted, and lets only one process at a time have contexts.
pub fn take(node: &Node, folder: &MpsFolder) -> Result<()> {
    on(node, folder, |device| {
        let noted = folder.compute_mode();
        if !noted.exists() {
            let mode = device.compute_mode().context("cannot ask for the GPU's compute mode")?;
            let Some((word, _)) = MODES.iter().find(|(_, known)| *known == mode) else {
                bail!("the GPU is in a compute mode that cannot be set again: {mode:?}")
            };
            let mut new = NamedTempFile::new_in(folder.path())?;
            new.write_all(word.as_bytes())?;
            new.persist(&noted)?;
        }
        set(device, ComputeMode::ExclusiveProcess)
    })
}

/// Sets the mode that was noted, if one was.
pub fn give_back(node: &Node, folder: &MpsFolder) -> Result<()> {
    let noted = folder.compute_mode();
    let word = match fs::read_to_string(&noted) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let Some((_, mode)) = MODES.iter().find(|(known, _)| *known == word) else {
        bail!("{} names no compute mode; set it with nvidia-smi -c, and remove the file", noted.display())
    };
    match on(node, folder, |device| set(device, *mode)) {
        // A GPU that is gone has no mode, and gets its default when it comes back.
        Err(error) if matches!(error.downcast_ref(), Some(NvmlError::NotFound | NvmlError::GpuLost)) => {}
        other => other?,
    }
    Ok(fs::remove_file(noted)?)
}

fn set(device: &mut nvml_wrapper::Device, mode: ComputeMode) -> Result<()> {
    if device.compute_mode().ok() == Some(mode) {
        return Ok(());
    }
    device.set_compute_mode(mode).with_context(|| format!("cannot set the GPU's compute mode to {mode:?}"))
}

fn on(
    node: &Node,
    folder: &MpsFolder,
    act: impl FnOnce(&mut nvml_wrapper::Device) -> Result<()>,
) -> Result<()> {
    let library = node.driver.libnvidia_ml()?;
    // The loader would wait for a process that has a lease (fcntl(2)) on the file.
    let _held = open_now(&library).with_context(|| format!("cannot open {} now", library.display()))?;
    let nvml: Nvml = inventory::nvml(&library)?;
    let mut device = nvml.device_by_uuid(folder.gpu().to_string())?;
    act(&mut device)
}
