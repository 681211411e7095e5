//! Changes the GPUs of an existing node: replaces, excludes or destroys one.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use gpushare_simulator::state::{Gpu, State};

use crate::{Change, node};

/// Replaces a GPU with another of the same kind that has a different UUID. Work that runs on it continues.
pub fn replace(change: &Change) -> Result<()> {
    let gpu = gpu(change)?;
    node::draw_uuid(gpu)?;
    node::write_information(&change.dir.join("proc"), gpu)?;
    println!("{}", gpu.uuid_text());
    Ok(())
}

/// Excludes a GPU, as the kernel module's parameter NVreg_ExcludedGpus does: no new process gets it.
pub fn exclude(change: &Change) -> Result<()> {
    let gpu = gpu(change)?;
    gpu.excluded.store(1, Ordering::Relaxed);
    node::write_information(&change.dir.join("proc"), gpu)
}

/// Destroys a MIG instance, as `nvidia-smi mig -dci` and `-dgi` do.
pub fn destroy(change: &Change) -> Result<()> {
    let gpu = gpu(change)?;
    gpu.card().with_context(|| format!("GPU {} is no MIG instance", change.gpu))?;
    gpu.excluded.store(1, Ordering::Relaxed);
    let folder = node::capability_folder(&change.dir.join("proc"), gpu);
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    for minor in gpu.capabilities() {
        std::fs::remove_file(change.dir.join(format!("dev/nvidia-caps/nvidia-cap{minor}")))?;
    }
    Ok(())
}

fn gpu(change: &Change) -> Result<&'static Gpu> {
    let state = State::open(&change.dir.join("shared"))
        .with_context(|| format!("no node in {}", change.dir.display()))?;
    state.gpus().get(change.gpu).with_context(|| format!("the node has no GPU {}", change.gpu))
}
