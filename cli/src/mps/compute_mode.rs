//! A GPU's compute mode. As shipped, only MPS' server may have a context while MPS runs, as NVIDIA advises
//! (CUDA's MPS guide, "Compute Modes"): a program that goes past the server fails, and meets nobody's work.
//! With `mps.compute_mode = "unchanged"` the mode stays as it is.
//!
//! A note in the GPU's folder says what was decided when MPS took the GPU. It stands until MPS has left, so
//! another setting counts from the next time on.

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

/// Notes the GPU's mode, unless one is noted, and lets only one process at a time have contexts. With
/// `is_exclusive` off, it notes that the mode stays, and leaves it.
pub fn take(node: &Node, folder: &MpsFolder, is_exclusive: bool) -> Result<()> {
    on(node, folder, |device| {
        let word = match noted(folder)? {
            Some(word) => word,
            None if is_exclusive => note(folder, word_of(device)?)?,
            None => {
                refuse_prohibited(device)?;
                note(folder, MpsFolder::UNCHANGED)?
            }
        };
        match word == MpsFolder::UNCHANGED {
            true => refuse_prohibited(device),
            false => set(device, ComputeMode::ExclusiveProcess),
        }
    })
}

/// Sets the mode that was noted, if one was.
pub fn give_back(node: &Node, folder: &MpsFolder) -> Result<()> {
    let Some(word) = noted(folder)? else { return Ok(()) };
    let path = folder.compute_mode();
    if word != MpsFolder::UNCHANGED {
        let Some((_, mode)) = MODES.iter().find(|(known, _)| *known == word) else {
            bail!("{} names no compute mode; set it with nvidia-smi -c, and remove the file", path.display())
        };
        match on(node, folder, |device| set(device, *mode)) {
            // A GPU that is gone has no mode, and gets its default when it comes back.
            Err(error) if matches!(error.downcast_ref(), Some(NvmlError::NotFound | NvmlError::GpuLost)) => {}
            other => other?,
        }
    }
    Ok(fs::remove_file(path)?)
}

/// The word in the note; `None` without one.
fn noted(folder: &MpsFolder) -> Result<Option<String>> {
    match fs::read_to_string(folder.compute_mode()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => Ok(Some(other?)),
    }
}

/// Writes the note, and returns its word.
fn note(folder: &MpsFolder, word: &str) -> Result<String> {
    let mut new = NamedTempFile::new_in(folder.path())?;
    new.write_all(word.as_bytes())?;
    new.persist(folder.compute_mode())?;
    Ok(word.to_owned())
}

/// The word of the GPU's mode.
fn word_of(device: &nvml_wrapper::Device) -> Result<&'static str> {
    let mode = device.compute_mode().context("cannot ask for the GPU's compute mode")?;
    match MODES.iter().find(|(_, known)| *known == mode) {
        Some((word, _)) => Ok(word),
        None => bail!("the GPU is in a compute mode that cannot be set again: {mode:?}"),
    }
}

/// Refuses a GPU on which nobody may have a context, if its mode is to stay.
fn refuse_prohibited(device: &nvml_wrapper::Device) -> Result<()> {
    if device.compute_mode().ok() == Some(ComputeMode::Prohibited) {
        bail!(
            "its compute mode is PROHIBITED, and mps.compute_mode = \"unchanged\" leaves that; run nvidia-smi -c DEFAULT"
        )
    }
    Ok(())
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
