//! Allocates given sizes, in the ways in which programs reach the driver.

use std::ffi::c_void;
use std::io::{Write, stdout};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::driver::{Driver, OUT_OF_MEMORY, SONAME, SUCCESS, done};

const MIB: usize = 1 << 20;

/// What to allocate.
#[derive(clap::Args)]
pub struct Allocate {
    /// Sizes in MiB, in this order; all are kept
    #[arg(required = true)]
    mib: Vec<usize>,
    /// Seconds for which they are kept after the last line
    #[arg(long, default_value_t = 0)]
    hold: u64,
    /// A file of the driver, by its path
    #[arg(long, default_value = SONAME)]
    library: String,
    /// Ask cuGetProcAddress for cuMemAlloc
    #[arg(long)]
    entry: bool,
    /// Fork first, before the driver is used: both processes allocate, one after the other
    #[arg(long)]
    fork: bool,
    /// Allocate and free all sizes this often, then print `drift BYTES`, what free memory has lost
    #[arg(long, default_value_t = 0)]
    repeat: u32,
}

impl Allocate {
    /// Prints `granted MIB` or `refused MIB` for each size.
    ///
    /// # Errors
    /// When the driver answers anything else.
    pub fn run(&self) -> Result<()> {
        if self.fork && !self.first_of_two()? {
            return Ok(());
        }
        let driver = Driver::start(&self.library)?;
        let allocate = if self.entry { entry(&driver)? } else { driver.allocate };
        if self.repeat > 0 {
            return self.drift(&driver, allocate);
        }
        for mib in &self.mib {
            let word = match allocate(&mut 0, mib * MIB) {
                SUCCESS => "granted",
                OUT_OF_MEMORY => "refused",
                other => bail!("cuMemAlloc answered {other}"),
            };
            println!("{word} {mib}");
        }
        stdout().flush()?;
        std::thread::sleep(Duration::from_secs(self.hold));
        Ok(())
    }

    /// Forks. The child gets true, and holds what it allocates until its parent is done. The parent allocates
    /// second and then returns false.
    fn first_of_two(&self) -> Result<bool> {
        // SAFETY: there is one thread, and no driver yet.
        let child = unsafe { libc::fork() };
        if child < 0 {
            bail!("cannot fork");
        }
        if child == 0 {
            return Ok(true);
        }
        // The child has printed by then: it allocates at once.
        std::thread::sleep(Duration::from_secs(2));
        let second = Self {
            mib: self.mib.clone(),
            hold: 0,
            library: self.library.clone(),
            entry: self.entry,
            fork: false,
            repeat: 0,
        };
        second.run()?;
        let mut status = 0;
        // SAFETY: waits for our child; the status is ours.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if ended != child || status != 0 {
            bail!("the forked child ended with {status}");
        }
        Ok(false)
    }

    fn drift(&self, driver: &Driver, allocate: extern "C" fn(&mut u64, usize) -> i32) -> Result<()> {
        let (before, _) = driver.memory()?;
        for _ in 0..self.repeat {
            let mut pointers = vec![0; self.mib.len()];
            for (pointer, mib) in pointers.iter_mut().zip(&self.mib) {
                done(allocate(pointer, mib * MIB), "cuMemAlloc")?;
            }
            pointers.into_iter().try_for_each(|pointer| done((driver.free)(pointer), "cuMemFree"))?;
        }
        let (after, _) = driver.memory()?;
        println!("drift {}", i128::try_from(before)? - i128::try_from(after)?);
        Ok(())
    }
}

/// The cuMemAlloc that cuGetProcAddress returns.
fn entry(driver: &Driver) -> Result<extern "C" fn(&mut u64, usize) -> i32> {
    let mut address = std::ptr::null_mut();
    let status = (driver.entry)(c"cuMemAlloc".as_ptr(), &mut address, 11040, 0);
    done(status, "cuGetProcAddress")?;
    let address = (!address.is_null()).then_some(address).context("cuGetProcAddress gave no cuMemAlloc")?;
    // SAFETY: the form of cuMemAlloc since CUDA 3.2, which was asked for.
    Ok(unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(&mut u64, usize) -> i32>(address) })
}
