//! `gpushare mps serve` on a simulated node, with NVIDIA's own control daemon.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::artifacts;
use crate::node::SimulatedNode;
use crate::service::Service;

/// Puts NVIDIA's control daemon among the driver's files of the node.
///
/// # Panics
/// When it cannot be copied.
pub fn install(node: &SimulatedNode) {
    let target = node.root().join("driver/usr/bin/nvidia-cuda-mps-control");
    fs::copy(artifacts::mps_control(), target).expect("the program can be copied");
}

/// Starts serving under the settings file `config`.
#[must_use]
pub fn serve(config: &Path) -> Service {
    Service::start(&["mps", "serve"], config, "MPS is served")
}

/// The node's control daemons, by pid.
#[must_use]
pub fn daemons(node: &SimulatedNode) -> Vec<i32> {
    let folder = node.state().join("mps");
    let processes = procfs::process::all_processes().into_iter().flatten().flatten();
    let of_node = processes.filter(|process| {
        let pipe =
            process.environ().ok().and_then(|all| all.get(OsStr::new("CUDA_MPS_PIPE_DIRECTORY")).cloned());
        let is_alive =
            process.stat().is_ok_and(|stat| stat.state != 'Z' && stat.comm.starts_with("nvidia-cuda"));
        is_alive && pipe.is_some_and(|pipe| Path::new(&pipe).starts_with(&folder))
    });
    of_node.map(|process| process.pid()).collect()
}

/// What is left of MPS in the node's state folder: the folders of GPUs, and what is mounted there.
#[must_use]
pub fn left(node: &SimulatedNode) -> Vec<String> {
    let folder = node.state().join("mps");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mounts = mounts_below(&folder).into_iter().map(|path| path.display().to_string());
    names.filter(|name| name != "serve.lock").chain(mounts).collect()
}

fn mounts_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let table = procfs::process::Process::myself().and_then(|own| own.mountinfo());
    let points = table.into_iter().flatten().map(|mount| mount.mount_point);
    points.filter(|point| point.starts_with(folder)).collect()
}

/// Ends what a failed test leaves: its daemons and mounts.
#[derive(Debug)]
pub struct Cleared<'a>(pub &'a SimulatedNode);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        for pid in daemons(self.0) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        for point in mounts_below(&self.0.state().join("mps")) {
            let _ = umount2(&point, MntFlags::MNT_DETACH);
        }
    }
}
