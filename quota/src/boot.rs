//! The running boot, and the namespaces in which containers' pids and start times are valid.

use std::fs;

use crate::error::StoreError;
use crate::pid_namespace::PidNamespace;

/// A boot of this machine, seen from this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Boot {
    pub id: String,
    /// The pid namespace, and the time namespace on which start times depend, formatted as by `ls -l
    /// /proc/PID/ns`.
    pub namespaces: String,
}

impl Boot {
    /// Returns the running boot and the namespaces of this process.
    pub fn here() -> Result<Self, StoreError> {
        let unknown = || "unknown".to_owned();
        let pid = PidNamespace::own().map_or_else(unknown, |own| own.to_string());
        // Kernels before 5.6 have no time namespaces.
        let time =
            fs::read_link("/proc/self/ns/time").map_or_else(|_| unknown(), |link| link.display().to_string());
        Ok(Self { id: gpushare_inventory::boot_id()?, namespaces: format!("{pid} {time}") })
    }
}
