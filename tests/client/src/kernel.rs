//! Kernels of fixed work: each thread runs a chain of multiplications, each of which needs the last result.
//!
//! A kernel that waits for the GPU's clock also counts time in which another process had the GPU. A kernel of
//! fixed work takes longer then, and that is what a share of compute means.

use std::env;
use std::ffi::CString;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::driver::{Configuration, Driver, KernelNode, done};

/// Threads of a block: one warp for each of the four schedulers of a multiprocessor.
pub const THREADS: u32 = 128;
/// Steps of the chain between two looks at its counter.
const UNROLLED: u32 = 16;
/// Cycles of a multiprocessor for one step, on GPUs since Volta.
const CYCLES: f64 = 4.0;
/// `CU_DEVICE_ATTRIBUTE_CLOCK_RATE`, kHz.
const CLOCK: u32 = 13;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`: as many as the process may use, under MPS.
pub const MULTIPROCESSORS: u32 = 16;
/// The variable with what `calibrate` measured.
const MEASURED: &str = "GPUSHARE_TESTS_STEPS_PER_MS";

/// The driver's handle of a kernel of fixed work.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(usize);

impl Kernel {
    /// Loads a kernel that takes `duration`, such as `10ms`, `100us` or `1ns`, on a GPU that nothing else
    /// uses. The steps come from what `calibrate` measured, else from the GPU's clock.
    ///
    /// # Errors
    /// When `duration` cannot be read, or the driver refuses the kernel.
    pub fn working(driver: &Driver, duration: &str) -> Result<Self> {
        let steps_per_ms = match env::var(MEASURED) {
            Ok(text) => text.parse().with_context(|| format!("{MEASURED}={text:?} is no number"))?,
            Err(_) => estimated_steps_per_ms(driver)?,
        };
        Self::with_steps(driver, duration, steps_per_ms)
    }

    /// As [`Kernel::working`], with so many steps a millisecond.
    ///
    /// # Errors
    /// As [`Kernel::working`].
    pub fn with_steps(driver: &Driver, duration: &str, steps_per_ms: f64) -> Result<Self> {
        let time = duration_of(duration)?;
        let rounds = rounds_of(time, steps_per_ms);
        let name = CString::new(format!("work_{duration}"))?;
        let text = CString::new(text_of(duration, rounds)?)?;
        let (mut module, mut function) = (0, 0);
        done((driver.module_load)(&mut module, text.as_ptr()), "cuModuleLoadData")?;
        done((driver.function_get)(&mut function, module, name.as_ptr()), "cuModuleGetFunction")?;
        Ok(Self(function))
    }

    /// The driver's handle of the kernel's function.
    pub fn handle(self) -> usize {
        self.0
    }

    /// Launches `grid` blocks.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    pub fn launch(self, driver: &Driver, grid: u32, stream: usize) -> Result<()> {
        done((driver.launch)(self.0, grid, 1, 1, THREADS, 1, 1, 0, stream, 0, 0), "cuLaunchKernel")
    }

    /// A launch of `grid` blocks for `cuLaunchKernelEx`.
    pub fn configuration(grid: u32, stream: usize) -> Configuration {
        Configuration { extents: extents(grid), stream, attributes: 0, attribute_count: 0 }
    }

    /// Makes an executable graph of `nodes` launches, one after the other.
    ///
    /// # Errors
    /// When the driver makes none.
    pub fn graph(self, driver: &Driver, grid: u32, nodes: u32) -> Result<usize> {
        let (mut graph, mut node, mut executable) = (0, 0, 0);
        done((driver.graph_create)(&mut graph, 0), "cuGraphCreate")?;
        let kernel = KernelNode { function: self.0, extents: extents(grid), parameters: 0, extra: 0 };
        for index in 0..nodes {
            let before = node;
            let depends = usize::from(index > 0);
            let status = (driver.graph_add_kernel)(&mut node, graph, &before, depends, &kernel);
            done(status, "cuGraphAddKernelNode")?;
        }
        done((driver.graph_instantiate)(&mut executable, graph, 0), "cuGraphInstantiateWithFlags")?;
        Ok(executable)
    }
}

fn extents(grid: u32) -> [u32; 7] {
    [grid, 1, 1, THREADS, 1, 1, 0]
}

/// Blocks of a launch: `asked`, or one for each multiprocessor if that is 0.
///
/// # Errors
/// When the driver gives no number of multiprocessors.
pub fn blocks(driver: &Driver, asked: u32) -> Result<u32> {
    if asked > 0 {
        return Ok(asked);
    }
    u32::try_from(driver.property(MULTIPROCESSORS)?).context("the number of multiprocessors")
}

/// Steps that one thread does in a millisecond, by the GPU's highest clock.
///
/// # Errors
/// When the driver gives no clock.
pub fn estimated_steps_per_ms(driver: &Driver) -> Result<f64> {
    Ok(f64::from(driver.property(CLOCK)?) / CYCLES)
}

/// Reads a duration such as `100us`.
///
/// # Errors
/// When there is no number, or no unit that is known.
pub fn duration_of(text: &str) -> Result<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).context("a duration without a unit")?;
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        _ => bail!("{text:?} is no duration; write 100us or 10ms"),
    };
    Ok(Duration::from_nanos(number.parse::<u64>()?.saturating_mul(factor)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded below and above")]
fn rounds_of(time: Duration, steps_per_ms: f64) -> u64 {
    let steps = time.as_secs_f64() * 1e3 * steps_per_ms;
    (steps / f64::from(UNROLLED)).round().clamp(0.0, 1e15) as u64
}

/// PTX of a kernel of `rounds` times [`UNROLLED`] steps. The simulated GPU takes its time from the name.
fn text_of(duration: &str, rounds: u64) -> Result<String> {
    let mut text = format!(
        ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry work_{duration}()\n{{\n\
         .reg .f32 %value, %factor, %addend;\n.reg .u32 %thread;\n.reg .u64 %left;\n\
         .reg .pred %more, %kept;\n\
         .shared .align 4 .f32 sink;\n"
    );
    if rounds > 0 {
        // The factor is 1.0001.
        write!(
            text,
            "mov.u32 %thread, %tid.x;\ncvt.rn.f32.u32 %value, %thread;\n\
             mov.f32 %factor, 0f3F800347;\nmov.f32 %addend, 0f3F000000;\nmov.u64 %left, {rounds};\nagain:\n"
        )?;
        for _ in 0..UNROLLED {
            text.push_str("fma.rn.f32 %value, %value, %factor, %addend;\n");
        }
        // The compiler would drop a chain whose result is never used.
        text.push_str(
            "sub.u64 %left, %left, 1;\nsetp.ne.u64 %more, %left, 0;\n@%more bra again;\n\
             setp.eq.f32 %kept, %value, 0f42280000;\n@%kept st.volatile.shared.f32 [sink], %value;\n",
        );
    }
    text.push_str("ret;\n}\n");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_has_as_many_steps_as_its_time_and_the_rate_say() {
        for (duration, steps_per_ms, want) in
            [("1ns", 480_000.0, 0), ("100us", 480_000.0, 3_000), ("10ms", 400_000.0, 250_000)]
        {
            let time = duration_of(duration).expect("a duration");
            assert_eq!(rounds_of(time, steps_per_ms), want, "{duration}");
            let text = text_of(duration, want).expect("a text");
            assert_eq!(text.contains("fma"), want > 0, "{duration}: {text}");
        }
        for wrong in ["", "10", "ms", "10s", "1.5ms"] {
            assert!(duration_of(wrong).is_err(), "{wrong:?}");
        }
    }
}
