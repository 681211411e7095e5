//! `gpushare config check` and `show`.

use std::io::{self, Write};

use anyhow::Result;
use gpushare_config::Config;

/// Reads all settings and names the files they came from.
pub fn check() -> Result<()> {
    Config::load()?;
    let files = Config::files()?;
    let mut out = io::stdout().lock();
    if files.is_empty() {
        writeln!(out, "ok: no settings file, the shipped settings are in force")?;
    }
    for file in files {
        writeln!(out, "ok: {}", file.display())?;
    }
    Ok(())
}

/// Prints the settings in force.
pub fn show() -> Result<()> {
    Ok(write!(io::stdout().lock(), "{}", Config::show()?)?)
}
