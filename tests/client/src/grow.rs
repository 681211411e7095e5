//! Fills the GPU and loads modules afterwards. A context grows with their code and data, and with the local
//! memory of their kernels.

use std::ffi::CString;
use std::io::{Write, stdout};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::driver::{Driver, SONAME, SUCCESS, done};
use crate::stores::{Family, MIB, Stores};

/// What to load.
#[derive(clap::Args)]
pub struct Grow {
    /// Modules
    #[arg(long, default_value_t = 8)]
    modules: u32,
    /// MiB of data that each brings
    #[arg(long, default_value_t = 16)]
    data: u64,
    /// Bytes of local memory that a thread of the last one's kernel needs
    #[arg(long, default_value_t = 4096)]
    local: u64,
    /// Largest allocation in MiB while the GPU is filled
    #[arg(long, default_value_t = 64)]
    largest: usize,
    /// Seconds between `held` and the first module, and after the last line
    #[arg(long, default_value_t = 3)]
    hold: u64,
}

impl Grow {
    /// Prints `held BYTES` once no allocation is granted any more. Then prints `loaded COUNT`, the modules
    /// whose kernel has run, and `refused STATUS`, the driver's answer to the next one, or 0.
    ///
    /// # Errors
    /// When the driver refuses a context, or an allocation by another status than out of memory.
    pub fn run(&self) -> Result<()> {
        ensure!(self.local >= 256, "--local is at least 256 bytes");
        let driver = Driver::start(SONAME)?;
        let held = Stores::new(&driver, Family::Linear, false)?.fill(self.largest * MIB)?;
        say(&format!("held {held}"))?;
        sleep(Duration::from_secs(self.hold));
        let (mut loaded, mut refused) = (0, SUCCESS);
        for number in 1..=self.modules {
            // Local memory is as large as the largest kernel needs, so it grows with each module.
            let local = (self.local * u64::from(number) / u64::from(self.modules)).next_multiple_of(16);
            refused = load_and_run(&driver, number, self.data, local.max(256))?;
            if refused != SUCCESS {
                break;
            }
            loaded += 1;
        }
        say(&format!("loaded {loaded}\nrefused {refused}"))?;
        sleep(Duration::from_secs(self.hold));
        Ok(())
    }
}

fn say(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Loads module `number` and runs its kernel. Returns the first status that is not success, or success.
fn load_and_run(driver: &Driver, number: u32, mib: u64, local: u64) -> Result<i32> {
    let (mut module, mut function) = (0, 0);
    let (name, text) = (CString::new(format!("grown_{number}"))?, CString::new(text_of(number, mib, local))?);
    let loaded = (driver.module_load)(&mut module, text.as_ptr());
    if loaded != SUCCESS {
        return Ok(loaded);
    }
    done((driver.function_get)(&mut function, module, name.as_ptr()), "cuModuleGetFunction")?;
    let launched = (driver.launch)(function, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0);
    Ok(if launched == SUCCESS { (driver.synchronize)() } else { launched })
}

/// PTX of a module with `mib` MiB of data and a kernel with `local` bytes of local memory a thread. The
/// kernel reads both at places that depend on data, so the compiler can drop neither.
fn text_of(number: u32, mib: u64, local: u64) -> String {
    let bytes = mib.max(1) << 20;
    let last = local - 4;
    format!(
        ".version 6.0\n.target sm_50\n.address_size 64\n\
         .visible .global .align 16 .b8 data_{number}[{bytes}];\n\
         .visible .entry grown_{number}()\n{{\n\
         .local .align 16 .b8 stack[{local}];\n\
         .reg .u32 %thread, %word;\n.reg .u64 %data, %stack, %place, %offset;\n\
         mov.u32 %thread, %tid.x;\nmov.u64 %data, data_{number};\nmov.u64 %stack, stack;\n\
         mul.wide.u32 %offset, %thread, 4;\nadd.u64 %place, %stack, %offset;\n\
         st.local.u32 [%place], %thread;\nst.local.u32 [%stack+{last}], %thread;\n\
         add.u64 %place, %data, %offset;\nld.global.u32 %word, [%place];\n\
         and.b32 %word, %word, 31;\nmul.wide.u32 %offset, %word, 4;\n\
         add.u64 %offset, %stack, %offset;\nld.local.u32 %word, [%offset];\n\
         st.global.u32 [%place], %word;\nret;\n}}\n"
    )
}
