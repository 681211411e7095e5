//! Reads, and sets, the driver's own limit of a cgroup on the first GPU (driver 615 and newer).

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::sizes::{NVML, first_gpu};

/// What to ask.
#[derive(clap::Args)]
pub struct Limits {
    /// Folder of the cgroup
    cgroup: PathBuf,
    /// Set this limit first, in MiB
    #[arg(long)]
    set: Option<u64>,
}

impl Limits {
    /// Prints NVML's status of each call as `set STATUS` and `get STATUS`, 0 for success, and what it told as
    /// `soft`, `hard` and `used`, in bytes.
    ///
    /// # Errors
    /// When there is no GPU to ask.
    pub fn run(&self) -> Result<()> {
        let (nvml, device) = first_gpu(NVML)?;
        let path = CString::new(self.cgroup.as_os_str().as_bytes()).context("the cgroup's path")?;
        let path = u64::try_from(path.as_ptr().addr())?;
        if let Some(mib) = self.set {
            let hard = mib.checked_mul(1 << 20).context("the limit is too large")?;
            println!("set {}", (nvml.set_limits)(device, &mut [path, 0, hard]));
        }
        let mut told = [path, 0, 0, 0];
        println!("get {}", (nvml.limits)(device, &mut told));
        let [_, soft, hard, used] = told;
        println!("soft {soft}\nhard {hard}\nused {used}");
        Ok(())
    }
}
