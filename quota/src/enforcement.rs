//! The ways to enforce a lease, and a table of the properties of each.

use gpushare_claims::{InterceptorPolicy, Mode, Request};
use gpushare_inventory::Extent;
use serde::{Deserialize, Serialize};

/// The component that enforces a container's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcement {
    /// gpushare's libraries, which intercept the driver's libraries.
    Intercepted,
    /// A supervisor outside of the container for memory, and gpushare's libraries for everything else.
    Supervised,
    /// A supervisor outside of the container for memory and compute, and gpushare's libraries for everything
    /// else.
    Scheduled,
    /// gpushare's libraries for memory, and NVIDIA's Multi-Process Service for compute.
    Mps,
    /// Another system's interception library. The request proved that the bundle contains it.
    Foreign,
    /// None: containers take turns on these GPUs, as scheduled by the driver.
    TimeSliced,
    /// None: no other container gets a share of these GPUs.
    WholeGpu,
}

/// Kinds of leases that can share a GPU with leases of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Shares with limits.
    Shares,
    /// Shares whose programs run concurrently, as clients of one MPS server.
    Mps,
    /// Time slices without limits.
    TimeSlices,
    /// A lease of whole GPUs, which shares with no other lease.
    Nobody,
}

impl Company {
    /// The mode in which such leases are requested.
    pub const fn mode(self) -> Mode {
        match self {
            Self::Shares => Mode::Share,
            Self::Mps => Mode::Mps,
            Self::TimeSlices => Mode::TimeSlice,
            Self::Nobody => Mode::Exclusive,
        }
    }
}

/// The component that enforces a container's memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBy {
    /// A supervisor outside of the container.
    Supervisor,
    /// A library in each of its processes, either ours or another system's.
    Library,
    /// The driver, through the container's cgroup.
    Driver,
    /// None: there is no limit.
    Nobody,
}

impl HeldBy {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Supervisor => "supervisor",
            Self::Library => "library",
            Self::Driver => "driver",
            Self::Nobody => "nobody",
        }
    }
}

/// The properties of one kind of enforcement.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The name in the quota store.
    pub name: &'static str,
    /// The kind of leases that may use the same GPUs.
    pub company: Company,
    /// The component that enforces its memory limit.
    pub held_by: HeldBy,
    /// Whether it has a region with limits, to which `update` writes limits and the meter writes
    /// measurements.
    pub has_region: bool,
    /// Whether the container gets our libraries instead of the driver's.
    pub is_intercepted: bool,
    /// Whether the memory limit depends on the usage files of our libraries: a process that did not load
    /// them, and memory without an entry, exceed the limit.
    pub is_held_by_books: bool,
    /// Whether a compute share is a share of the GPU's time, which is measured.
    pub shares_time: bool,
    /// The part of the driver that the container gets.
    pub extent: Extent,
    /// Whether the image may use its own newer libcuda (CUDA forward compatibility).
    pub forward_compatible: bool,
}

impl Enforcement {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Intercepted,
        Self::Supervised,
        Self::Scheduled,
        Self::Mps,
        Self::Foreign,
        Self::TimeSliced,
        Self::WholeGpu,
    ];

    /// Returns the enforcement for a lease with this request. Another system's library enforces it only if
    /// the request proved that it is in the bundle, and the settings allow it.
    pub fn of(request: &Request) -> Self {
        match (request.mode, &request.interceptor) {
            (Mode::Exclusive, _) => Self::WholeGpu,
            (Mode::TimeSlice, _) => Self::TimeSliced,
            (Mode::Mps, _) => Self::Mps,
            (Mode::Share, Some((_, InterceptorPolicy::StandDown))) => Self::Foreign,
            (Mode::Share, _) if request.is_supervised && request.is_scheduled => Self::Scheduled,
            (Mode::Share, _) if request.is_supervised => Self::Supervised,
            (Mode::Share, _) => Self::Intercepted,
        }
    }

    /// Returns the enforcement for a container that joins a lease with this enforcement: it gets no more than
    /// the lease allows.
    pub(crate) fn joined_by(self, request: &Request) -> Self {
        match (self, Self::of(request)) {
            (held @ (Self::WholeGpu | Self::TimeSliced | Self::Mps), _) => held,
            (_, Self::Foreign) => Self::Foreign,
            (held @ (Self::Supervised | Self::Scheduled), _) => held,
            (Self::Intercepted | Self::Foreign, _) => Self::Intercepted,
        }
    }

    /// Returns the enforcement of a reserved share from the moment a container with this request starts to
    /// use it, while no other container does. Only then is it known whether a supervisor can enforce it.
    pub fn begun_by(self, request: &Request) -> Self {
        let is_ours = |one: Self| matches!(one, Self::Intercepted | Self::Supervised | Self::Scheduled);
        let held = Self::of(request);
        if is_ours(self) && is_ours(held) { held } else { self }
    }

    /// Returns its properties.
    pub const fn terms(self) -> Terms {
        match self {
            Self::Intercepted => Terms {
                name: "intercepted",
                company: Company::Shares,
                held_by: HeldBy::Library,
                has_region: true,
                is_intercepted: true,
                is_held_by_books: true,
                shares_time: true,
                extent: Extent::Share,
                forward_compatible: false,
            },
            Self::Supervised => {
                let held_by = HeldBy::Supervisor;
                Terms { name: "supervised", held_by, is_held_by_books: false, ..Self::Intercepted.terms() }
            }
            // No container can exceed its time on the GPU.
            Self::Scheduled => Terms { name: "scheduled", shares_time: false, ..Self::Supervised.terms() },
            Self::Mps => {
                Terms { name: "mps", company: Company::Mps, shares_time: false, ..Self::Intercepted.terms() }
            }
            Self::Foreign => Terms {
                name: "foreign",
                company: Company::Shares,
                held_by: HeldBy::Library,
                has_region: true,
                is_intercepted: false,
                is_held_by_books: false,
                shares_time: true,
                extent: Extent::Whole,
                forward_compatible: false,
            },
            Self::TimeSliced => Terms {
                name: "time-sliced",
                company: Company::TimeSlices,
                held_by: HeldBy::Nobody,
                has_region: false,
                is_intercepted: false,
                is_held_by_books: false,
                shares_time: false,
                extent: Extent::Whole,
                forward_compatible: true,
            },
            Self::WholeGpu => Terms {
                name: "whole-gpu",
                company: Company::Nobody,
                held_by: HeldBy::Nobody,
                has_region: false,
                is_intercepted: false,
                is_held_by_books: false,
                shares_time: false,
                extent: Extent::Whole,
                forward_compatible: true,
            },
        }
    }

    /// Whether a supervisor enforces its memory limit.
    pub const fn is_supervised(self) -> bool {
        matches!(self.terms().held_by, HeldBy::Supervisor)
    }

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.terms().name == name)
    }
}

#[cfg(test)]
mod tests {
    use gpushare_claims::{Devices, Interceptor};

    use super::*;

    #[test]
    fn another_systems_library_holds_a_share_only_where_it_is_proved_and_let() {
        let share = crate::place::tests::request_on(&[], &["GPUSHARE_MEMORY=1GiB"]);
        let beside =
            |policy| Request { interceptor: Some((Interceptor::default(), policy)), ..share.clone() };
        for (request, want) in [
            (share.clone(), Enforcement::Intercepted),
            (beside(InterceptorPolicy::Replace), Enforcement::Intercepted),
            (beside(InterceptorPolicy::StandDown), Enforcement::Foreign),
            (Request { mode: Mode::TimeSlice, ..share.clone() }, Enforcement::TimeSliced),
            (Request { mode: Mode::Mps, ..beside(InterceptorPolicy::StandDown) }, Enforcement::Mps),
            (Request::whole(Devices::All), Enforcement::WholeGpu),
        ] {
            assert_eq!(Enforcement::of(&request), want, "{request:?}");
            assert_eq!(want.terms().company.mode(), request.mode);
        }
    }

    #[test]
    fn every_way_has_a_name_of_its_own() {
        for one in Enforcement::ALL {
            assert_eq!(Enforcement::named(one.terms().name), Some(one));
        }
        assert_eq!(Enforcement::named("Intercepted"), None);
    }
}
