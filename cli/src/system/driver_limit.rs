//! Sets the driver's own limits of a cgroup (nvmlDeviceSetMemoryLimits_v1, driver 615 and newer), and reads
//! them back.
#![allow(unsafe_code, reason = "neither nvml-wrapper nor its bindings know the two functions")]

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gpushare_config::Config;
use gpushare_inject::{Limit, has_limits};
use gpushare_inventory::Node;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};

use crate::inventory;

/// nvmlSetMemoryLimits_v1_t (nvml.h of CUDA 13.4).
#[repr(C)]
struct SetMemoryLimits {
    /// Path of the cgroup's folder.
    name_space: *const c_char,
    /// What is kept for the cgroup, in bytes. It would have to be given back in every cgroup above before the
    /// folder goes, so gpushare leaves that to its ledger.
    soft: u64,
    /// The most that the cgroup may hold, in bytes.
    hard: u64,
}

/// nvmlGetMemoryLimits_v1_t.
#[repr(C)]
struct GetMemoryLimits {
    limits: SetMemoryLimits,
    used: u64,
}

type Set = unsafe extern "C" fn(*mut c_void, *mut SetMemoryLimits) -> u32;
type Get = unsafe extern "C" fn(*mut c_void, *mut GetMemoryLimits) -> u32;

/// Sets each limit on the cgroup whose folder is `cgroup`, and reads it back.
///
/// # Errors
/// When the driver has no such limits, refuses one, or holds another than it was told.
pub fn set(cgroup: &Path, limits: &[Limit]) -> Result<()> {
    let config = Config::load()?;
    let node = Node::open(&config.roots)?;
    let version = &node.driver.version;
    ensure!(has_limits(version), "driver {version} has no limits by cgroup: they came with 615");
    let kind = statfs(cgroup).with_context(|| format!("cannot look at the cgroup {}", cgroup.display()))?;
    ensure!(kind.filesystem_type() == CGROUP2_SUPER_MAGIC, "{} is no folder of cgroup v2", cgroup.display());
    let nvml = inventory::nvml_of(&node)?;
    let functions = Functions::of(&nvml)?;
    let name_space = CString::new(cgroup.as_os_str().as_bytes()).context("the cgroup's path")?;
    for limit in limits {
        let set = || -> Result<u64, NvmlError> {
            let gpu = nvml.device_by_uuid(limit.gpu.to_string())?;
            functions.set(&gpu, &name_space, units(limit.memory.bytes()))
        };
        let held = set().with_context(|| format!("NVML sets no limit on GPU {}", limit.gpu))?;
        // The driver may count in other units.
        ensure!(
            held.abs_diff(units(limit.memory.bytes())) < COARSEST,
            "NVML was told to limit GPU {} to {} bytes, and holds {held}",
            limit.gpu,
            limit.memory.bytes()
        );
    }
    Ok(())
}

/// The largest unit of memory that a driver rounds to: its pages have 2 MiB at most.
const COARSEST: u64 = 2 << 20;

/// Whole units of `bytes`, so that a driver that rounds up gives no more; a smaller limit stays as it is.
fn units(bytes: u64) -> u64 {
    if bytes < COARSEST { bytes } else { bytes - bytes % COARSEST }
}

struct Functions {
    set: Set,
    get: Get,
}

impl Functions {
    fn of(nvml: &Nvml) -> Result<Self> {
        let library = &nvml.lib().__library;
        // SAFETY: the function has this type in nvml.h, and is called only while `nvml` holds the library.
        let set = unsafe { library.get::<Set>(b"nvmlDeviceSetMemoryLimits_v1\0") }.map(|symbol| *symbol);
        // SAFETY: as above.
        let get = unsafe { library.get::<Get>(b"nvmlDeviceGetMemoryLimits_v1\0") }.map(|symbol| *symbol);
        let missing = "the driver's NVML has no nvmlDeviceSetMemoryLimits_v1";
        Ok(Self { set: set.context(missing)?, get: get.context(missing)? })
    }

    /// Limits the cgroup `name_space` to `hard` bytes. Returns what the driver holds then.
    fn set(&self, gpu: &Device<'_>, name_space: &CString, hard: u64) -> Result<u64, NvmlError> {
        // SAFETY: the handle is used while `gpu` lives, which holds NVML open.
        let handle = unsafe { gpu.handle() }.cast();
        let mut limits = SetMemoryLimits { name_space: name_space.as_ptr(), soft: 0, hard };
        // SAFETY: NVML reads the structure and the text, which outlive the call.
        nvml_try(unsafe { (self.set)(handle, &raw mut limits) })?;
        let mut found = GetMemoryLimits { limits: SetMemoryLimits { hard: 0, ..limits }, used: 0 };
        // SAFETY: as above; it writes three numbers.
        nvml_try(unsafe { (self.get)(handle, &raw mut found) })?;
        Ok(found.limits.hard)
    }
}
