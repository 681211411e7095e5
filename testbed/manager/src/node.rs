//! The resource manager of a simulated node.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use fuser::BackgroundSession;
use gpushare_simulator::clock;
use gpushare_simulator::lock::Owner;
use gpushare_simulator::session::Session;
use gpushare_supervisor::abi::Era;

use crate::{Began, Engine, Gpu, Manager, mount};

/// Nanoseconds of run time per microsecond of slice, on an H200 with driver 580.
const SLICE: u64 = 1_020;

/// Serves the resource manager of the node in the directory `node` until the session is dropped. Its files
/// are in `shared/manager` there, and it steers the work of the node's GPUs.
///
/// # Errors
/// If there is no node, its driver is unknown, it has MIG instances, or the kernel refuses the mount.
pub fn serve(node: &Path) -> Result<BackgroundSession> {
    let shared = node.join("shared");
    let card = Session::open(&shared).with_context(|| format!("no simulated node in {}", node.display()))?;
    let state = card.state();
    if state.gpus().iter().any(|gpu| gpu.card().is_some()) {
        bail!("{} has MIG instances, and this resource manager knows whole GPUs alone", node.display());
    }
    let version = state.driver.get();
    let era = version.parse().ok().and_then(Era::for_version);
    let era = era.with_context(|| format!("the calls of driver {version} are not known"))?;
    let gpus: Vec<Gpu> = state
        .gpus()
        .iter()
        .map(|gpu| Gpu { uuid: gpu.uuid_bytes(), memory: gpu.memory.load(Ordering::Relaxed) })
        .collect();
    let count = u64::try_from(gpus.len())?;
    let card = Arc::new(card);
    let engine = Card { next: vec![0; gpus.len()], card: Arc::clone(&card) };
    let steer = move |gpu, pid, runs, slice: u64| card.steer(gpu, pid, runs, slice.saturating_mul(SLICE));
    let folder = shared.join("manager");
    match fs::create_dir(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| folder.display().to_string());
        }
        _ => {}
    }
    let manager = Manager::new(era, gpus).steering(Box::new(steer)).recording(Box::new(engine));
    mount(manager, count, &folder).with_context(|| format!("cannot mount at {}", folder.display()))
}

/// The node's GPUs, and the next entry to read from each one's record.
struct Card {
    card: Arc<Session>,
    next: Vec<u64>,
}

impl Engine for Card {
    fn began(&mut self, gpu: usize) -> Vec<Began> {
        let Some(from) = self.next.get_mut(gpu) else { return Vec::new() };
        let (begun, next) = self.card.began(gpu, *from);
        *from = next;
        // All contexts of a process count as one context here.
        let number = |owner: Owner| owner.generation.wrapping_mul(1 << 10) | owner.slot;
        begun.into_iter().map(|(pid, owner, at)| Began { pid, context: number(owner), at }).collect()
    }

    fn now(&self) -> u64 {
        clock::now()
    }
}
