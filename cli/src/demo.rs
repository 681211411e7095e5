//! `gpushare demo`: two containers share one GPU through a real low-level runtime, and a third is refused
//! until one of them ends. Every claim that it prints is checked. A claim that does not hold ends the demo
//! with an error.

mod container;
mod image;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use container::{Container, Seen};
use gpushare_config::{Config, ENVIRONMENT};
use gpushare_inventory::DeviceMemory;
use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

/// What the three containers ask for, in eighths of the GPU: 30, 40 and 20 GiB of 80.
const EIGHTHS: [u64; 3] = [3, 4, 2];

/// Where the demo runs: on this node's own GPUs, or on a simulated one.
struct Stage {
    /// Holds the bundles, and the simulated node if there is one.
    folder: TempDir,
    /// The settings file of a simulated node.
    config: Option<PathBuf>,
    programs: PathBuf,
}

/// Runs the demo from start to end.
pub fn demo(nvidia_smi: Option<&Path>) -> Result<()> {
    let stage = Stage::set(nvidia_smi)?;
    let total = stage.gpu_memory()?;
    let sizes = EIGHTHS.map(|eighths| mebibytes(total.bytes() / 8 * eighths));
    heading("Two containers share the GPU");
    let first = Container::make(&stage, "demo-a", sizes[0])?;
    let second = Container::make(&stage, "demo-b", sizes[1])?;
    first.start()?;
    check(&first, &first.seen()?)?;
    second.start()?;
    check(&second, &second.seen()?)?;
    for line in first.nvidia_smi()?.lines() {
        println!("  nvidia-smi: {line}");
    }
    stage.list()?;
    heading(&format!("A third container asks for {}", sizes[2]));
    let third = Container::make(&stage, "demo-c", sizes[2])?;
    match third.start() {
        Ok(()) => bail!("the third container was granted {} that nobody has", sizes[2]),
        Err(refusal) => {
            let refusal = refusal.to_string();
            println!("refused: {refusal}");
            let free = mebibytes(total.bytes().saturating_sub(sizes[0].bytes() + sizes[1].bytes()));
            let named = [sizes[2], free].iter().all(|size| refusal.contains(&size.to_string()));
            ensure!(named, "the refusal does not name {} asked and {free} free", sizes[2]);
        }
    }
    heading("The first container ends; the third one starts");
    first.end()?;
    third.start()?;
    check(&third, &third.seen()?)?;
    stage.list()?;
    heading("All end; every share is back");
    second.end()?;
    third.end()?;
    stage.list()?;
    ensure!(stage.held()? == 0, "shares are held although all containers ended");
    Ok(())
}

/// Whole mebibytes, so that the request's text says exactly what is meant.
fn mebibytes(bytes: u64) -> DeviceMemory {
    DeviceMemory::from_bytes(bytes >> 20 << 20)
}

fn heading(text: &str) {
    println!("\n== {text}");
}

/// Checks that the container sees a GPU of exactly its size and cannot allocate more.
fn check(container: &Container, seen: &Seen) -> Result<()> {
    let (id, size) = (container.id, container.size);
    println!("{id} was granted {size} and sees:");
    println!(
        "  cuDeviceTotalMem {}, cuMemGetInfo total {}, NVML {}",
        seen.device_total, seen.memory_total, seen.nvml_total
    );
    println!("  cuMemAlloc of {}: {}", container.within(), seen.within);
    println!("  cuMemAlloc of {} more: {}", container.beyond(), seen.beyond);
    let sizes = [seen.device_total, seen.memory_total, seen.nvml_total];
    ensure!(sizes.iter().all(|seen| *seen == size), "{id} sees another size than it was granted");
    ensure!(seen.within == "CUDA_SUCCESS", "{id} cannot allocate what it was granted");
    ensure!(seen.beyond == "CUDA_ERROR_OUT_OF_MEMORY", "{id} can allocate more than it was granted");
    Ok(())
}

impl Stage {
    fn set(nvidia_smi: Option<&Path>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpushare-demo-").tempdir()?;
        let programs = std::env::current_exe()?.parent().map(Path::to_path_buf).unwrap_or_default();
        let version = Config::load()?.roots.proc.join("proc/driver/nvidia/version");
        let simulated = (!version.exists()).then(|| simulate(&programs, folder.path(), nvidia_smi));
        let config = simulated.transpose()?;
        Ok(Self { folder, config, programs })
    }

    fn ours(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command("gpushare").args(arguments).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(text)
    }

    /// The size of the first GPU.
    fn gpu_memory(&self) -> Result<DeviceMemory> {
        print!("$ gpushare devices\n{}", self.ours(&["devices"])?);
        let devices: serde_json::Value = serde_json::from_str(&self.ours(&["devices", "--json"])?)?;
        let bytes = devices.pointer("/gpus/0/memory_bytes").and_then(serde_json::Value::as_u64);
        bytes
            .map(DeviceMemory::from_bytes)
            .context("the first GPU's memory size is unknown; see `gpushare doctor`")
    }

    fn list(&self) -> Result<()> {
        print!("$ gpushare ps\n{}", self.ours(&["ps"])?);
        Ok(())
    }

    fn held(&self) -> Result<usize> {
        let leases: serde_json::Value = serde_json::from_str(&self.ours(&["ps", "--json"])?)?;
        Ok(leases["shares"].as_array().map_or(0, Vec::len))
    }

    /// One of gpushare's programs, which looks at this stage's node.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        if let Some(config) = &self.config {
            command.env(ENVIRONMENT, config);
        }
        command
    }
}

impl Drop for Stage {
    /// Unmounts what is below the folder of a simulated node before that folder is removed.
    fn drop(&mut self) {
        if self.config.is_some() {
            let _ = self.ours(&["sweep"]);
            let _ = umount2(&self.folder.path().join("node/run/limits"), MntFlags::MNT_DETACH);
        }
    }
}

/// Makes a node with one simulated GPU, by default an H100 of 80 GiB, and returns its settings file.
fn simulate(programs: &Path, folder: &Path, nvidia_smi: Option<&Path>) -> Result<PathBuf> {
    println!("This node has no NVIDIA driver: simulating one GPU.");
    let mut command = Command::new(programs.join("gpushare-simulator"));
    command.arg("create").arg(folder.join("node"));
    if let Some(path) = nvidia_smi {
        command.arg("--nvidia-smi").arg(path);
    }
    let output =
        command.output().context("cannot run gpushare-simulator; is it installed beside gpushare?")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(text.lines().last().context("gpushare-simulator printed no settings file")?))
}
