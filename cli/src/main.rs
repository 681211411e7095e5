//! `gpushare`: what people and scripts ask of a node that shares GPUs.
//!
//! One file per command. Each reads the same settings, store and inventory as the runtime. `--json` prints an
//! object (`answer`), without it a command prints a table. A failure is one line on stderr, and an exit code
//! by its kind (`failure`).
#![deny(unsafe_code)]

mod answer;
mod cdi;
mod clock;
mod config;
mod configure;
mod container;
mod cordon;
mod demo;
mod describe;
mod devices;
mod doctor;
mod failure;
mod file;
mod filter;
mod history;
mod inventory;
mod leases;
mod lock;
mod logs;
mod meter;
mod metrics;
mod mps;
mod node;
mod overview;
mod page;
mod pages;
mod pause;
mod plan;
mod program;
mod ps;
mod serve;
mod system;
mod table;
mod top;
mod update;
mod violation;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use nix::sys::stat::{Mode, umask};

use self::failure::Failure;

/// Shares of GPUs for containers: what this node has, who holds what, and what a request would get.
///
/// Settings: /etc/gpushare/gpushare.toml and drop-ins in gpushare.toml.d, or the file that GPUSHARE_CONFIG
/// names. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 refused, 5 needs root, 6 mistake in the
/// settings, 7 request that cannot be met. With --json an error is JSON on stderr, too.
#[derive(Parser)]
#[command(name = "gpushare", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// GPUs of this node and what is free on them.
    Devices {
        /// How GPUs reach each other, as `nvidia-smi topo -m` tells it: NV (NVLink), PIX and PXB (one or
        /// several PCI switches), PHB (the host bridge), NODE (one NUMA node), SYS.
        #[arg(long)]
        topology: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Containers that hold a share, and what they use of it.
    Ps(ps::Ps),
    /// The node live: GPUs, shares and what they use.
    Top(top::Top),
    /// One share whole: who holds it, what it gives, what is used of it, and what would help.
    Describe(describe::Describe),
    /// What happened on this node, newest last: shares given and given back, refusals, GPUs that failed.
    Logs(logs::Logs),
    /// Shares that were given back, and containers that were refused.
    History(history::History),
    /// What a bundle would get and what would change in it; changes nothing.
    Plan {
        /// The OCI bundle.
        #[arg(long, default_value = ".")]
        bundle: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Gives back the shares of containers that are gone.
    Sweep(Output),
    /// Gives back one container's share, also while it lives (--force).
    Release {
        /// The container's name, its id or the beginning of that; in a cluster NAMESPACE/POD/CONTAINER.
        id: String,
        /// The runtime root, where the id alone is not unique.
        #[arg(long)]
        root: Option<String>,
        /// Release although the container lives: its memory may then be granted twice.
        #[arg(long)]
        force: bool,
    },
    /// Changes the share of a living container; what does not fit on the node is refused, and nothing is ever
    /// killed.
    Update(update::Update),
    /// Stops the programs of a container on its GPUs until they are resumed; they keep their memory.
    Pause(pause::Named),
    /// Lets the programs of a container that was paused run again.
    Resume(pause::Named),
    /// Gives no new share of GPUs; containers that hold one keep it.
    Cordon {
        /// GPUs by index, UUID or the beginning of one.
        #[arg(required = true)]
        gpus: Vec<String>,
    },
    /// Gives new shares of GPUs again.
    Uncordon {
        /// GPUs by index, UUID or the beginning of one.
        #[arg(required = true)]
        gpus: Vec<String>,
    },
    /// Measures each container's GPU time and memory for the libraries inside, and tells the figures to
    /// others; one process per node, in the foreground.
    Meter(meter::Telling),
    /// NVIDIA's Multi-Process Service, for shares in mode mps.
    #[command(subcommand)]
    Mps(mps::Mps),
    /// What is known of the GPUs beyond /proc.
    #[command(subcommand)]
    Inventory(Inventory),
    /// Shares and whole GPUs as CDI devices: `--device gpushare.io/share=4GiB`.
    #[command(subcommand)]
    Cdi(cdi::Cdi),
    /// Device nodes, and the links by which systemd finds them.
    #[command(subcommand)]
    System(system::System),
    /// The settings.
    #[command(subcommand)]
    Config(config::Command),
    /// Tells an engine of the runtime: docker, containerd, crio or podman; or takes it out again (--remove).
    Configure(configure::Configure),
    /// What is wrong with this node, and what to do.
    Doctor(doctor::Doctor),
    /// Two containers share one GPU (a simulated one where there is none): a tour in a minute.
    Demo {
        /// An nvidia-smi to run inside the containers on a simulated node.
        #[arg(long)]
        nvidia_smi: Option<PathBuf>,
    },
    /// Prints a completion script for a shell.
    Completion {
        /// The shell.
        shell: Shell,
    },
    /// Prints where engines' settings name a gpushare-runtime, and what takes it out; for the scripts that
    /// remove it.
    #[command(hide = true)]
    Registrations,
    /// Writes manual pages, completions and JSON Schemas, as they are installed below PREFIX/share.
    #[command(hide = true)]
    Pages {
        /// The folder.
        share: PathBuf,
    },
}

#[derive(Subcommand)]
enum Inventory {
    /// Asks NVML for the GPUs' memory sizes, kept for this boot, and fits our libraries to the driver.
    Refresh,
}

/// How answers are printed.
#[derive(clap::Args)]
struct Output {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    gpushare_inject::outlive_file_size_limit();
    let wants_json = failure::wants_json(std::env::args_os());
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::of_usage(&error, wants_json),
    };
    match run(cli.command) {
        Ok(code) => code,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => Failure::of(&error).tell(wants_json),
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match roots_deed(&command) {
        Some(deed) if !nix::unistd::geteuid().is_root() => {
            return Err(Failure::denied(format!("only root may {deed}: use sudo")).into());
        }
        _ => {}
    }
    // Others may read our files and folders, and only we write them, whatever the caller's mask.
    umask(Mode::from_bits_truncate(0o022));
    match command {
        Command::Devices { topology: false, output } => devices::devices(output.json)?,
        Command::Devices { topology: true, output } => devices::topology(output.json)?,
        Command::Ps(asked) => ps::ps(&asked)?,
        Command::Top(asked) => top::top(&asked)?,
        Command::Describe(asked) => describe::describe(&asked)?,
        Command::Logs(asked) => logs::logs(&asked)?,
        Command::History(asked) => history::history(&asked)?,
        Command::Plan { bundle, output } => plan::plan(&bundle, output.json)?,
        Command::Sweep(output) => leases::sweep(output.json)?,
        Command::Release { id, root, force } => leases::release(&id, root.as_deref(), force)?,
        Command::Update(update) => update::update(&update)?,
        Command::Pause(named) => pause::pause(&named, true)?,
        Command::Resume(named) => pause::pause(&named, false)?,
        Command::Cordon { gpus } => cordon::cordon(cordon::Change::Cordon, &gpus)?,
        Command::Uncordon { gpus } => cordon::cordon(cordon::Change::Uncordon, &gpus)?,
        Command::Meter(telling) => meter::meter(telling)?,
        Command::Mps(mps::Mps::Serve) => mps::serve()?,
        Command::Inventory(Inventory::Refresh) => inventory::refresh()?,
        Command::Cdi(cdi) => cdi::cdi(&cdi)?,
        Command::System(system) => return system::system(&system),
        Command::Config(asked) => config::config(&asked)?,
        Command::Configure(asked) => configure::configure(&asked)?,
        Command::Doctor(asked) => return doctor::doctor(&asked),
        Command::Demo { nvidia_smi } => demo::demo(nvidia_smi.as_deref())?,
        Command::Completion { shell } => pages::completion(shell, &Cli::command())?,
        Command::Registrations => configure::print_registrations()?,
        Command::Pages { share } => pages::write(&share, Cli::command())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What only root may do with this command; `None` if everybody may run it. The node's state belongs to root.
/// `doctor` itself says when it lacks rights, everybody may read the settings, and engines' files are guarded
/// by their own modes.
fn roots_deed(command: &Command) -> Option<&'static str> {
    Some(match command {
        Command::Config(_)
        | Command::Configure(_)
        | Command::Doctor(_)
        | Command::Completion { .. }
        | Command::Registrations
        | Command::Pages { .. } => return None,
        Command::Devices { .. }
        | Command::Ps(_)
        | Command::Top(_)
        | Command::Describe(_)
        | Command::Logs(_)
        | Command::History(_)
        | Command::Plan { .. } => "look at the node's shares",
        Command::Sweep(_) | Command::Release { .. } => "give back shares",
        Command::Update(_) | Command::Pause(_) | Command::Resume(_) => "change a share",
        Command::Cordon { .. } | Command::Uncordon { .. } => "cordon GPUs",
        Command::Meter(_) => "measure containers",
        Command::Mps(_) => "run MPS",
        Command::Inventory(Inventory::Refresh) => "renew what is known of the GPUs",
        Command::Cdi(_) => "look after CDI devices",
        Command::System(_) => "look after device nodes",
        Command::Demo { .. } => "run the demo's containers",
    })
}

/// Whether the reader of stdout has closed the pipe: `gpushare ps | head` is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
