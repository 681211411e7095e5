//! `gpushare-tests-client`: a program that uses the CUDA driver in one way per verb, for benchmarks and for
//! tests on real GPUs. It knows nothing of gpushare. It opens libcuda by name as programs do, and prints
//! figures, one a line.
//!
//! The same program runs on a simulated and on a real GPU. Its kernels do as much work as takes the time in
//! their names, and the simulated GPU reads the time from the name.

mod allocate;
mod calibrate;
mod cost;
mod driver;
mod exhaust;
mod fill;
mod grow;
mod kernel;
mod launch;
mod lease;
mod library;
mod limits;
mod product;
mod serve;
mod sizes;
mod stores;
mod survive;
mod threads;
mod work;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

// The unwinder comes from the static library, so that the program runs where only glibc is.
#[link(name = "gcc_eh", kind = "static", modifiers = "+whole-archive,-bundle")]
unsafe extern "C" {}

#[derive(Parser)]
#[command(name = "gpushare-tests-client", version, about = "One way of using a GPU per verb")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Allocate sizes, and say which are granted
    Allocate(allocate::Allocate),
    /// Measure how much fixed work this GPU does in a millisecond
    Calibrate(calibrate::Calibrate),
    /// Time calls in rounds; one line a round, picoseconds a call
    Cost(cost::Cost),
    /// Take all that there is of something
    Exhaust(exhaust::Exhaust),
    /// Allocate until refused, in one or several processes at once
    Fill(fill::Fill),
    /// Fill the GPU, then load modules
    Grow(grow::Grow),
    /// Keep the GPU busy with kernels
    Launch(launch::Launch),
    /// Take every lease on files that the kernel gives, again and again
    Lease(lease::Lease),
    /// Read a cgroup's limit in the driver, or set it
    Limits(limits::Limits),
    /// Multiply matrices
    Product(product::Product),
    /// Answer requests of some kernels each, with pauses, and say how long they took
    Serve(serve::Serve),
    /// Say what CUDA and NVML tell of the GPU
    Sizes(sizes::Sizes),
    /// Kill processes at random moments and time the calls of those that live on
    Survive(survive::Survive),
    /// Use many threads and streams at once
    Threads(threads::Threads),
    /// Do fixed work and say how much of it was done in each second
    Work(work::Work),
}

fn main() -> ExitCode {
    let result: Result<()> = match Arguments::parse().verb {
        Verb::Allocate(allocate) => allocate.run(),
        Verb::Calibrate(calibrate) => calibrate.run(),
        Verb::Cost(cost) => cost.run(),
        Verb::Exhaust(exhaust) => exhaust.run(),
        Verb::Fill(fill) => fill.run(),
        Verb::Grow(grow) => grow.run(),
        Verb::Launch(launch) => launch.run(),
        Verb::Lease(lease) => lease.run(),
        Verb::Limits(limits) => limits.run(),
        Verb::Product(product) => product.run(),
        Verb::Serve(serve) => serve.run(),
        Verb::Sizes(sizes) => sizes.run(),
        Verb::Survive(survive) => survive.run(),
        Verb::Threads(threads) => threads.run(),
        Verb::Work(work) => work.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-tests-client: {error:#}");
            ExitCode::FAILURE
        }
    }
}
