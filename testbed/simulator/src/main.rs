//! `gpushare-simulator`: makes nodes with simulated GPUs, and probes a node's driver.

mod change;
mod driver_mount;
mod library;
mod node;
mod probe;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpushare_inventory::GpuUuid;

// The unwinder comes from the static library, so that the program runs where only glibc is installed.
#[link(name = "gcc_eh", kind = "static", modifiers = "+whole-archive,-bundle")]
unsafe extern "C" {}

#[derive(Parser)]
#[command(name = "gpushare-simulator", version, about = "Nodes with simulated GPUs")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a node in a folder; the last line printed is the path of its gpushare.toml
    Create(Box<Create>),
    /// Remove a node, with gpushare's state of it; no container may hold a share any more
    Remove(Remove),
    /// Ask the installed driver what GPUs it shows and what memory it gives
    Probe(Probe),
    /// Replace a GPU by another of the same kind, with another UUID
    Replace(Change),
    /// Exclude a GPU, as a parameter of the kernel module does
    Exclude(Change),
    /// Destroy a MIG instance; instances are counted behind the node's GPUs
    Destroy(Change),
    /// Note the pids of a node's processes, as the caller's pid namespace has them, until killed
    Watch(Watch),
}

/// Parameters of a new node.
#[derive(clap::Args)]
struct Create {
    /// Folder of the node
    dir: PathBuf,
    /// Number of GPUs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    gpus: u32,
    /// Minor numbers of the GPUs, which on real nodes need not follow the PCI order; 0, 1, 2 … if not given
    #[arg(long, value_delimiter = ',')]
    minors: Vec<u32>,
    /// UUIDs of the GPUs; drawn if not given
    #[arg(long, value_delimiter = ',')]
    uuids: Vec<GpuUuid>,
    /// GPUs that are linked by NVLink, each with each, by index (0,1); may be given several times
    #[arg(long, value_name = "GPU,GPU…", value_parser = node::linked)]
    nvlink: Vec<u64>,
    /// Put a GPU into MIG mode, with instances of these sizes, as 0=3g.40gb,1g.10gb; may be given several
    /// times
    #[arg(long, value_name = "GPU=SIZE,SIZE…", value_parser = node::Divided::parse)]
    mig: Vec<node::Divided>,
    /// Model name of every GPU
    #[arg(long, default_value = "NVIDIA H100 80GB HBM3")]
    model: String,
    /// Memory that programs can allocate on every GPU; what NVML tells as the total lies above
    #[arg(long, default_value = "80GiB", value_parser = gpushare_simulator::size::parse)]
    memory: u64,
    /// Driver version, for example 535.309.01
    #[arg(long, default_value = "535.309.01", overrides_with = "driver")]
    driver: String,
    /// Multiprocessors of every GPU; the model's own number if not given
    #[arg(long)]
    cores: Option<u32>,
    /// The physics of every GPU; the options below change single values of it
    #[arg(long, value_enum, default_value_t = Profile::H200_580, overrides_with = "profile")]
    profile: Profile,
    /// Memory that each process's context costs
    #[arg(long, value_parser = gpushare_simulator::size::parse)]
    context: Option<u64>,
    /// How every GPU shares its time between processes
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Length of a turn on a GPU that slices
    #[arg(long, value_parser = gpushare_simulator::span::parse)]
    slice: Option<u64>,
    /// Length of NVML's windows of utilisation, milliseconds
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    sample_period: Option<u32>,
    /// How long after its end such a window can be read, milliseconds
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    sample_delay: Option<u32>,
    /// How NVML makes percents of utilisation whole
    #[arg(long, value_enum, default_value_t = Rounding::Down)]
    sample_rounding: Rounding,
    /// What NVML tells: all, nothing of single processes, or the library is not there
    #[arg(long, value_enum, default_value_t = Nvml::Full)]
    nvml: Nvml,
    /// Whose pids NVML tells in a pid namespace
    #[arg(long, value_enum, default_value_t = Pids::Namespace)]
    nvml_pids: Pids,
    /// A real nvidia-smi to put into the node
    #[arg(long)]
    nvidia_smi: Option<PathBuf>,
    /// Put the driver's libraries and programs into /usr/local/nvidia, which is a read-only mount of its own
    /// unless the node has plain files
    #[arg(long)]
    driver_mount: bool,
    /// Make /usr/bin/nvidia-smi a script that runs the program in that folder
    #[arg(long, requires = "driver_mount")]
    nvidia_smi_script: bool,
    /// Make ordinary files in place of device nodes, which only root can make; containers cannot use such a
    /// node
    #[arg(long)]
    plain_nodes: bool,
}

/// The GPU to take the physics from.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Profile {
    /// A real NVIDIA H200 with driver 580
    #[value(name = "h200-580")]
    H200_580,
    /// Exact windows of utilisation, work in the order of submission, contexts that do not grow
    Ideal,
}

/// How a GPU shares its time.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// Work of all processes runs to its end in the order of submission
    Fifo,
    /// Processes with work take turns; a kernel is cut where a turn ends
    Slices,
}

/// How percents are rounded to integers.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rounding {
    Down,
    Nearest,
}

/// How much NVML reports.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Nvml {
    Full,
    NoProcesses,
    Absent,
}

/// Pid namespace of the pids that NVML reports.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Pids {
    /// That of the process which asks
    Namespace,
    /// That in which the node was made; `watch` or another reader there must have seen a process
    Host,
}

/// The node to remove.
#[derive(clap::Args)]
struct Remove {
    /// Folder of the node
    dir: PathBuf,
}

/// The GPU to change.
#[derive(clap::Args)]
struct Change {
    /// Folder of the node
    dir: PathBuf,
    /// Index of the GPU
    gpu: usize,
}

/// The node to watch.
#[derive(clap::Args)]
struct Watch {
    /// Folder of the node
    dir: PathBuf,
    /// Look this often, milliseconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
}

/// Parameters of a probe.
#[derive(clap::Args)]
struct Probe {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Allocate this much and keep it; may be given several times
    #[arg(long, value_name = "SIZE", value_parser = gpushare_simulator::size::parse)]
    allocate: Vec<u64>,
    /// Keep everything for this many seconds after the last line
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    hold: u64,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Create(create) => node::create(&create),
        Command::Remove(it) => node::remove(&it.dir),
        Command::Probe(probe) => probe::run(&probe),
        Command::Replace(it) => change::replace(&it),
        Command::Exclude(it) => change::exclude(&it),
        Command::Destroy(it) => change::destroy(&it),
        Command::Watch(watch) => watch::run(&watch),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-simulator: {error:#}");
            ExitCode::FAILURE
        }
    }
}
