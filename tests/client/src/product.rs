//! Multiplies two matrices: checks the result, or measures how many products a second.

use std::ffi::CStr;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::driver::{Driver, SONAME, done};

/// Threads of a block in each of its two dimensions.
const TILE: u32 = 16;

/// One thread computes one element of the product of two square matrices of `n` rows.
const TEXT: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry product(.param .u64 left, .param .u64 right, .param .u64 result, .param .u32 size)
{
    .reg .u64 %a, %b, %c, %offset, %stride;
    .reg .u32 %n, %row, %column, %width, %thread, %index, %k;
    .reg .f32 %x, %y, %sum;
    .reg .pred %over, %more;
    ld.param.u64 %a, [left];
    ld.param.u64 %b, [right];
    ld.param.u64 %c, [result];
    ld.param.u32 %n, [size];
    cvta.to.global.u64 %a, %a;
    cvta.to.global.u64 %b, %b;
    cvta.to.global.u64 %c, %c;
    mov.u32 %width, %ntid.y;
    mov.u32 %thread, %tid.y;
    mov.u32 %row, %ctaid.y;
    mad.lo.u32 %row, %row, %width, %thread;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %column, %ctaid.x;
    mad.lo.u32 %column, %column, %width, %thread;
    setp.ge.u32 %over, %row, %n;
    @%over bra out;
    setp.ge.u32 %over, %column, %n;
    @%over bra out;
    mad.lo.u32 %index, %row, %n, %column;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %c, %c, %offset;
    mul.lo.u32 %index, %row, %n;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %a, %a, %offset;
    mul.wide.u32 %offset, %column, 4;
    add.u64 %b, %b, %offset;
    mul.wide.u32 %stride, %n, 4;
    mov.f32 %sum, 0f00000000;
    mov.u32 %k, 0;
again:
    ld.global.f32 %x, [%a];
    ld.global.f32 %y, [%b];
    fma.rn.f32 %sum, %x, %y, %sum;
    add.u64 %a, %a, 4;
    add.u64 %b, %b, %stride;
    add.u32 %k, %k, 1;
    setp.lt.u32 %more, %k, %n;
    @%more bra again;
    st.global.f32 [%c], %sum;
out:
    ret;
}
";

/// What to multiply.
#[derive(clap::Args)]
pub struct Product {
    /// Rows and columns
    #[arg(long, default_value_t = 96)]
    size: u32,
    /// Seconds for which to go on, if more than one product is wanted
    #[arg(long, default_value_t = 0.0)]
    seconds: f64,
    /// Sizes in MiB to allocate first, and to keep
    #[arg(long)]
    beside: Vec<usize>,
    /// Seconds for which all is kept after the line
    #[arg(long, default_value_t = 0)]
    hold: u64,
}

impl Product {
    /// Prints `right SUM`, or `rate PRODUCTS_A_SECOND` if `seconds` is not 0.
    ///
    /// # Errors
    /// When the driver refuses a call, or an element is wrong.
    pub fn run(&self) -> Result<()> {
        let driver = Driver::start(SONAME)?;
        let (mut module, mut function) = (0, 0);
        done((driver.module_load)(&mut module, TEXT.as_ptr()), "cuModuleLoadData")?;
        done((driver.function_get)(&mut function, module, c"product".as_ptr()), "cuModuleGetFunction")?;
        let n = usize::try_from(self.size)?;
        // Small whole numbers, so that a single-precision sum of their products is exact.
        let [left, right] = [(7, 3), (5, 11)].map(|(factor, modulus)| {
            (0_u8..modulus).cycle().step_by(factor).take(n * n).map(f32::from).collect::<Vec<_>>()
        });
        for mib in &self.beside {
            done((driver.allocate)(&mut 0, mib << 20), "cuMemAlloc")?;
        }
        let mut addresses = [0; 3];
        for address in &mut addresses {
            done((driver.allocate)(address, n * n * 4), "cuMemAlloc")?;
        }
        for (address, matrix) in addresses.iter().zip([&left, &right]) {
            done((driver.copy_in)(*address, matrix.as_ptr(), n * n * 4), "cuMemcpyHtoD")?;
        }
        let grid = self.size.div_ceil(TILE);
        let places = addresses.each_ref().map(|address| std::ptr::from_ref(address).expose_provenance());
        let parameters =
            [places[0], places[1], places[2], std::ptr::from_ref(&self.size).expose_provenance()];
        let parameters = parameters.as_ptr().expose_provenance();
        let launch = || {
            done(
                (driver.launch)(function, grid, grid, 1, TILE, TILE, 1, 0, 0, parameters, 0),
                "cuLaunchKernel",
            )
        };
        launch()?;
        done((driver.synchronize)(), "cuCtxSynchronize")?;
        if self.seconds > 0.0 {
            return self.rate(&driver, launch);
        }
        let mut result = vec![0.0_f32; n * n];
        done((driver.copy_out)(result.as_mut_ptr(), addresses[2], n * n * 4), "cuMemcpyDtoH")?;
        check(&left, &right, &result, n)?;
        println!("right {}", result.iter().sum::<f32>());
        addresses.iter().rev().try_for_each(|address| done((driver.free)(*address), "cuMemFree"))?;
        stdout().flush()?;
        std::thread::sleep(Duration::from_secs(self.hold));
        Ok(())
    }

    fn rate(&self, driver: &Driver, launch: impl Fn() -> Result<()>) -> Result<()> {
        let (start, time) = (Instant::now(), Duration::from_secs_f64(self.seconds));
        let mut count = 0_u32;
        while start.elapsed() < time {
            launch()?;
            count += 1;
            if count.is_multiple_of(16) {
                done((driver.synchronize)(), "cuCtxSynchronize")?;
            }
        }
        done((driver.synchronize)(), "cuCtxSynchronize")?;
        println!("rate {:.3}", f64::from(count) / start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn check(left: &[f32], right: &[f32], result: &[f32], n: usize) -> Result<()> {
    for row in 0..n {
        for column in 0..n {
            let want: f32 = (0..n).map(|k| left[row * n + k] * right[k * n + column]).sum();
            let got = result[row * n + column];
            if got != want {
                bail!("element {row}, {column} is {got}, not {want}");
            }
        }
    }
    Ok(())
}
