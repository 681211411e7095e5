//! The CDI files of claims, by which engines bring a claim's token into its containers. They lie in memory,
//! as leases do: after a restart of the node kubelet has every claim prepared anew.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gpushare_inject::{CdiSpec, UNFINISHED};
use gpushare_quota::{Lease, ResourceClaim};

use super::Agent;

const PREFIX: &str = "gpushare.io-claim_";
const SUFFIX: &str = ".json";

fn path(agent: &Agent, uid: &str) -> PathBuf {
    agent.options.cdi_dir.join(format!("{PREFIX}{uid}{SUFFIX}"))
}

/// Writes the file of a claim.
///
/// # Errors
/// When the hook is not installed, or the folder cannot be written to.
pub fn write(agent: &Agent, claim: &ResourceClaim, lease: &Lease) -> Result<()> {
    let spec = CdiSpec::claim(claim, lease, &agent.config.paths.hook, agent.settings_file.as_deref())?;
    let path = path(agent, &claim.name.uid);
    spec.write(&path, 0o600).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes the file of a claim; it is no error if there is none.
///
/// # Errors
/// When it stays.
pub fn remove(agent: &Agent, uid: &str) -> Result<()> {
    // The UID comes from kubelet. One that is no name has no file.
    if uid.contains('/') {
        return Ok(());
    }
    gone(&path(agent, uid))
}

/// Removes the files of claims that `is_known` does not know, and what killed agents have not finished.
///
/// # Errors
/// When a file stays.
pub fn remove_others(agent: &Agent, is_known: impl Fn(&str) -> bool) -> Result<()> {
    let entries = fs::read_dir(&agent.options.cdi_dir).into_iter().flatten().flatten();
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
        let is_unfinished = || name.starts_with(&format!(".{PREFIX}")) && name.ends_with(UNFINISHED);
        let uid = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        if uid.is_some_and(|uid| !is_known(uid)) || is_unfinished() {
            gone(&agent.options.cdi_dir.join(&name))?;
        }
    }
    Ok(())
}

fn gone(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
