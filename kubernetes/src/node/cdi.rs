//! The CDI files of claims, by which engines bring a claim's token into its containers. They lie in memory, as
//! leases do: after a restart of the node kubelet has every claim prepared anew.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result};
use gpushare_inject::CdiSpec;
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
    let path = path(agent, uid);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The UIDs of all claims that have a file.
pub fn existing(agent: &Agent) -> Vec<String> {
    let entries = fs::read_dir(&agent.options.cdi_dir).into_iter().flatten().flatten();
    let uid = |name: &str| Some(name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.to_owned());
    entries.filter_map(|entry| uid(entry.file_name().to_str()?)).collect()
}
