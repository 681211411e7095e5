//! `gpushare cdi`: writes and lists the CDI specifications by which engines know shares and whole GPUs as
//! devices.

mod generate;
mod list;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};
use gpushare_request::{GPU_KIND, SHARE_KIND};

pub use self::list::Devices;
use crate::Output;

/// Where engines look for CDI specifications. The second folder is empty after a boot.
const FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// What to do about CDI.
#[derive(Subcommand)]
pub enum Cdi {
    /// Writes the specifications, one file per kind of device.
    Generate(Generate),
    /// Devices of gpushare that engines find on this node.
    List {
        /// Look in this folder instead; may be given several times.
        #[arg(long, value_name = "FOLDER")]
        folder: Vec<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
}

/// Which specifications to write, and where.
#[derive(clap::Args)]
pub struct Generate {
    /// The folder; `-` prints the one specification that --kind names.
    #[arg(long, value_name = "FOLDER", default_value = FOLDERS[1])]
    output: PathBuf,
    /// Only devices of this kind.
    #[arg(long, value_enum)]
    kind: Option<Kind>,
    /// Offer this share instead of those of the settings (cdi.shares); may be given several times.
    #[arg(long, value_name = "NAME")]
    share: Vec<String>,
}

/// Kinds of devices.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Share,
    Gpu,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Share => SHARE_KIND,
            Self::Gpu => GPU_KIND,
        }
    }

    /// Name of the specification's file in its folder.
    const fn file(self) -> &'static str {
        match self {
            Self::Share => "gpushare-share.json",
            Self::Gpu => "gpushare-gpu.json",
        }
    }
}

/// Runs the command.
pub fn cdi(command: &Cdi) -> Result<()> {
    match command {
        Cdi::Generate(generate) => generate::generate(generate),
        Cdi::List { folder, output } => list::list(folder, output.json),
    }
}
