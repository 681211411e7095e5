//! What is made of the command line's own description at build time: manual pages, completions for shells, and the
//! JSON Schemas of all answers.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::{Shell, generate, generate_to};

use crate::answer;

/// Folders below a prefix, as manual pages and shells look for them.
const MANUALS: &str = "man/man1";
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];
const SCHEMAS: &str = "gpushare/schemas";

/// Prints a completion for `shell`.
pub fn completion(shell: Shell, command: &Command) -> io::Result<()> {
    let mut script = Vec::new();
    generate(shell, &mut offered(command), "gpushare", &mut script);
    io::Write::write_all(&mut io::stdout().lock(), &script)
}

/// Writes everything below `share`, as it is installed below PREFIX/share.
///
/// # Errors
/// When a file cannot be written.
pub fn write(share: &Path, command: Command) -> Result<()> {
    let folder = |below: &str| -> Result<_> {
        let folder = share.join(below);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(folder)
    };
    for (shell, below) in COMPLETIONS {
        generate_to(shell, &mut offered(&command), "gpushare", folder(below)?)
            .with_context(|| format!("cannot write the completion for {shell}"))?;
    }
    // Bash finds a completion by the command's name alone.
    let bash = folder(COMPLETIONS[0].1)?;
    fs::rename(bash.join("gpushare.bash"), bash.join("gpushare"))
        .context("cannot name the completion for bash")?;
    clap_mangen::generate_to(without_help(command), folder(MANUALS)?)
        .context("cannot write the manual pages")?;
    let schemas = folder(SCHEMAS)?;
    for (name, schema) in answer::schemas() {
        let path = schemas.join(format!("{name}.json"));
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        serde_json::to_writer_pretty(BufWriter::new(file), &schema)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The command without those below it that help does not name either: the generators offer them all.
fn offered(command: &Command) -> Command {
    let named = command.get_subcommands().filter(|below| !below.is_hide_set()).cloned();
    Command::new("gpushare")
        .version(env!("CARGO_PKG_VERSION"))
        .args(command.get_arguments().cloned())
        .subcommands(named)
}

/// The command without `help` as a command, below which each other one would stand again.
fn without_help(command: Command) -> Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help)
}
