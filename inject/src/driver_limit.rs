//! The driver's own limit of memory (from 615 on), as a second wall around a container: the kernel refuses
//! what goes past our libraries.
//!
//! It belongs to a GPU and the container's cgroup, so it is set once the cgroup exists and before the
//! container's program starts. NVML sets it, which a static program cannot load: the CLI does, as a child.
//! The soft limit stays 0, so nothing is kept in the cgroups above, and the limit goes with the cgroup
//! (nvml.h, nvmlSetMemoryLimits_v1_t).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_quota::{Grant, Holder, Lease, LeaseKey, Member, Store, StoreError};
use gpushare_request::Request;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::child::{self, Ended};
use crate::settings::{Programs, SETTINGS_VARIABLE};

/// First driver with nvmlDeviceSetMemoryLimits_v1 (CUDA 13.4).
const FIRST_DRIVER: u32 = 615;
/// Where the driver looks for cgroups (MPS guide, "MPS v3 Memory Partitioning").
const CGROUPS: &str = "/sys/fs/cgroup";

/// What the settings say of the driver's own limit (`inject.driver_limit`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimits {
    /// It is not used.
    Off,
    /// It is used where driver and system have it.
    Auto,
    /// A container that should have it and does not get it is refused.
    Required,
}

/// Why a container does not have the driver's own limit.
#[derive(Debug, thiserror::Error)]
pub enum DriverLimitError {
    /// The driver is too old.
    #[error(
        "driver {0} has no limits of its own, which inject.driver_limit asks for: they came with {FIRST_DRIVER}; update the \
         driver, or set it to auto"
    )]
    Driver(String),
    /// There is no cgroup v2.
    #[error(
        "the driver's own limits (inject.driver_limit) need cgroup v2 at {CGROUPS}; boot with it, or set that to auto"
    )]
    Cgroups,
    /// A MIG instance has none.
    #[error(
        "the driver has no limit of its own for a MIG instance; ask for a whole card's share, or set inject.driver_limit to auto"
    )]
    Instance,
    /// The container has no cgroup of its own: the limit would be others', too, and stay when it ends.
    #[error(
        "{}, so the driver cannot limit it alone; give it one of its own (cgroupsPath, no --cgroups=disabled), or set \
         inject.driver_limit to auto",
        match .0 {
            Some(path) => format!("others than this container are in its cgroup {}", path.display()),
            None => "it has no cgroup".to_owned(),
        }
    )]
    NoCgroup(Option<PathBuf>),
    /// The lease is gone, or cannot be read.
    #[error("its share cannot be read")]
    Lease(#[source] Option<StoreError>),
    /// The CLI cannot be run.
    #[error("cannot run {path}, which sets the driver's own limit (inject.driver_limit)")]
    Run {
        /// Path of the CLI's binary.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The CLI failed; this is the last line of its standard error.
    #[error("the driver's own limit cannot be set (inject.driver_limit): {0}; see `gpushare doctor`")]
    Refused(String),
    /// NVML hangs.
    #[error(
        "the driver's own limit cannot be set (inject.driver_limit): NVML gave no answer for {} seconds; persistence mode makes \
         it quick",
        child::DEADLINE.as_secs()
    )]
    NoAnswer,
}

/// Sets the driver's own limit of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLimiter {
    /// Path of the CLI's binary.
    pub cli: PathBuf,
    /// Absolute path of the settings file, if it is not the default one.
    pub settings: Option<PathBuf>,
    /// Whether a container goes without where the limit cannot be set.
    pub is_required: bool,
}

impl DriverLimiter {
    /// The first of a hook's arguments for it.
    pub const FLAG: &str = "--driver-limit";

    /// The one for a container with this request that gets `lease`; `None` if it has no use for the limit, or
    /// goes without.
    ///
    /// # Errors
    /// When the settings require the limit, and driver or system have none.
    pub fn of(
        programs: &Programs,
        driver: &str,
        lease: &Lease,
        request: &Request,
    ) -> Result<Option<Self>, DriverLimitError> {
        let is_limited = lease.enforcement_for(request).terms().has_region;
        if is_limited { Self::on(programs, driver, lease) } else { Ok(None) }
    }

    /// The one for a lease that has limits.
    ///
    /// # Errors
    /// As those of [`DriverLimiter::of`].
    pub fn on(programs: &Programs, driver: &str, lease: &Lease) -> Result<Option<Self>, DriverLimitError> {
        let is_required = match programs.driver_limits {
            DriverLimits::Off => return Ok(None),
            DriverLimits::Auto => false,
            DriverLimits::Required => true,
        };
        match Self::available(driver).and_then(|()| whole(lease)) {
            Ok(()) => {
                let settings = programs.settings.as_deref().map(absolute);
                Ok(Some(Self { cli: programs.cli.into(), settings, is_required }))
            }
            Err(why) if is_required => Err(why),
            Err(why) => {
                tracing::debug!(container = %lease.member.key, %why, "no limit of the driver's own");
                Ok(None)
            }
        }
    }

    /// Whether containers can have it with this driver on this system.
    ///
    /// # Errors
    /// What is missing.
    pub fn available(driver: &str) -> Result<(), DriverLimitError> {
        if !has_limits(driver) {
            return Err(DriverLimitError::Driver(driver.to_owned()));
        }
        let is_v2 = statfs(CGROUPS).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC);
        if is_v2 { Ok(()) } else { Err(DriverLimitError::Cgroups) }
    }

    /// Reads what [`DriverLimiter::arguments`] makes; `None` for anything else.
    pub fn from_arguments(words: &[String]) -> Option<Self> {
        let (is_required, cli, rest) = match words {
            [flag, word, cli, rest @ ..] if flag == Self::FLAG => (word, cli, rest),
            _ => return None,
        };
        let is_required = match is_required.as_str() {
            "require" => true,
            "auto" => false,
            _ => return None,
        };
        let settings = match rest {
            [] => None,
            [path] => Some(PathBuf::from(path)),
            _ => return None,
        };
        Some(Self { cli: cli.into(), settings, is_required })
    }

    /// Arguments by which a hook is told of it.
    pub fn arguments(&self) -> Vec<String> {
        let word = if self.is_required { "require" } else { "auto" };
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let words = [Self::FLAG.to_owned(), word.to_owned(), path(&self.cli)];
        words.into_iter().chain(self.settings.as_deref().map(path)).collect()
    }

    /// The one that keeps a limit in step with its lease that was set before, whatever the settings say now.
    pub fn following(programs: &Programs) -> Self {
        let is_required = programs.driver_limits == DriverLimits::Required;
        Self { cli: programs.cli.into(), settings: programs.settings.as_deref().map(absolute), is_required }
    }

    /// Limits the container `key`, whose first process is `init` and has not started its program, to what the
    /// lease `id` gives, or to what that may grow to. A failure is a line in the log where the limit is not
    /// required.
    ///
    /// # Errors
    /// When it is required and cannot be set.
    pub fn limit(
        &self,
        store: &Store,
        id: i64,
        key: &LeaseKey,
        init: &Holder,
    ) -> Result<(), DriverLimitError> {
        let own = init.cgroup_of_its_own();
        let own = own.ok_or_else(|| DriverLimitError::NoCgroup(init.cgroup.clone()));
        match own.and_then(|cgroup| self.hold(store, id, key, cgroup)) {
            Ok(()) => {
                tracing::debug!(container = %key, "the driver's own limit is set");
                Ok(())
            }
            Err(why) if self.is_required => Err(why),
            Err(why) => {
                tracing::warn!(container = %key, %why, "only the libraries limit it");
                Ok(())
            }
        }
    }

    /// Brings the limit of a living member of the lease `id` that has one in line with the lease. One whose
    /// cgroup is gone needs none.
    ///
    /// # Errors
    /// When it cannot be set.
    pub fn follow(&self, store: &Store, id: i64, member: &Member) -> Result<(), DriverLimitError> {
        let Some(cgroup) = member.holder.cgroup.as_deref().filter(|_| member.has_driver_limit) else {
            return Ok(());
        };
        match self.hold(store, id, &member.key, cgroup) {
            Err(_) if member.holder.is_gone() || !cgroup.exists() => Ok(()),
            done => done,
        }
    }

    /// Sets the limit until it is that of the lease: NVML takes its time, in which the lease may change, and who
    /// changes it may be quicker or slower than this.
    fn hold(&self, store: &Store, id: i64, key: &LeaseKey, cgroup: &Path) -> Result<(), DriverLimitError> {
        let lost = |error| DriverLimitError::Lease(error);
        let lease = store.lease(key).map_err(|error| lost(Some(error)))?;
        let mut lease = lease.filter(|lease| lease.id == id).ok_or(lost(None))?;
        loop {
            let limits = limits(&lease);
            self.set(cgroup, &limits)?;
            let now = store.note_driver_limit(id, key).map_err(|error| lost(Some(error)))?;
            lease = now.ok_or(lost(None))?;
            if self::limits(&lease) == limits {
                return Ok(());
            }
        }
    }

    fn set(&self, cgroup: &Path, limits: &[Limit]) -> Result<(), DriverLimitError> {
        let mut command = Command::new(&self.cli);
        command.args(["system", "driver-limit"]).arg(cgroup);
        command.args(limits.iter().map(ToString::to_string));
        if let Some(file) = &self.settings {
            command.env(SETTINGS_VARIABLE, file);
        }
        let run = |source| DriverLimitError::Run { path: self.cli.clone(), source };
        match child::run(command).map_err(run)? {
            Ended::Well => Ok(()),
            Ended::Failed(line) => Err(DriverLimitError::Refused(line)),
            Ended::NoAnswer => Err(DriverLimitError::NoAnswer),
        }
    }
}

/// What the driver limits the containers of `lease` to on each GPU.
fn limits(lease: &Lease) -> Vec<Limit> {
    let limit = |grant: &Grant| {
        let memory = lease.elastic.map_or(grant.memory, |bounds| bounds.most);
        Limit { gpu: grant.gpu, memory }
    };
    lease.grants.iter().map(limit).collect()
}

/// What a cgroup may hold on a GPU, in text as `GPU-…=BYTES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The GPU's UUID.
    pub gpu: GpuUuid,
    /// The most memory.
    pub memory: DeviceMemory,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.gpu, self.memory.bytes())
    }
}

impl std::str::FromStr for Limit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').and_then(|(gpu, bytes)| {
            Some(Self { gpu: gpu.parse().ok()?, memory: DeviceMemory::from_bytes(bytes.parse().ok()?) })
        });
        parts.ok_or("must be the UUID of a GPU, an equals sign, and bytes")
    }
}

/// Whether this driver has limits of its own.
pub fn has_limits(driver: &str) -> bool {
    driver.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|m| m >= FIRST_DRIVER)
}

fn whole(lease: &Lease) -> Result<(), DriverLimitError> {
    let is_divided = lease.grants.iter().any(|grant| grant.card.is_some());
    if is_divided { Err(DriverLimitError::Instance) } else { Ok(()) }
}

/// The child runs in /, so a relative path would name another file.
fn absolute(file: &Path) -> PathBuf {
    std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_reads_what_the_wrapper_wrote() {
        for settings in [None, Some(PathBuf::from("/etc/other.toml"))] {
            for is_required in [false, true] {
                let limiter = DriverLimiter {
                    cli: "/usr/bin/gpushare".into(),
                    settings: settings.clone(),
                    is_required,
                };
                assert_eq!(DriverLimiter::from_arguments(&limiter.arguments()), Some(limiter));
            }
        }
        for words in [&["--driver-limit"][..], &["--driver-limit", "auto"], &["--log", "auto", "/a"], &[]] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(DriverLimiter::from_arguments(&words), None, "{words:?}");
        }
    }

    #[test]
    fn a_limit_is_a_gpu_and_bytes() {
        let limit = Limit { gpu: GpuUuid::from_bytes([7; 16]), memory: DeviceMemory::from_bytes(1 << 40) };
        assert_eq!(limit.to_string().parse(), Ok(limit));
        for text in ["", "GPU-1=2", &format!("{}=", limit.gpu), &format!("{}=-1", limit.gpu), "=5"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }

    #[test]
    fn drivers_have_limits_from_615_on() {
        for (driver, want) in
            [("610.43", false), ("615.71.09", true), ("1000.1", true), ("", false), ("x.1", false)]
        {
            assert_eq!(has_limits(driver), want, "{driver}");
        }
    }
}
