//! How a lease is held: one row for each way, of what it allows and needs.

use gpushare_claims::{InterceptorPolicy, Mode, Request};
use gpushare_inventory::Extent;
use serde::{Deserialize, Serialize};

/// Who keeps a container within what it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcement {
    /// gpushare's libraries, which intercept the driver's.
    Intercepted,
    /// A supervisor outside of the container for memory, and gpushare's libraries for all else.
    Supervised,
    /// A supervisor outside of the container for memory and compute, and gpushare's libraries for all else.
    Scheduled,
    /// gpushare's libraries for memory, and NVIDIA's Multi-Process Service for compute.
    Mps,
    /// Another system's interception library. The request proved that the bundle brings it.
    Foreign,
    /// Nobody: containers take turns on these GPUs, as the driver gives them.
    TimeSliced,
    /// Nobody: no other container gets a share of these GPUs.
    WholeGpu,
}

/// Leases of which several may stand on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Shares with limits.
    Shares,
    /// Shares whose programs run at once, as clients of one MPS server.
    Mps,
    /// Turns without limits.
    TimeSlices,
    /// None: a lease of whole GPUs.
    Nobody,
}

impl Company {
    /// The mode by which they were asked for.
    pub const fn mode(self) -> Mode {
        match self {
            Self::Shares => Mode::Share,
            Self::Mps => Mode::Mps,
            Self::TimeSlices => Mode::TimeSlice,
            Self::Nobody => Mode::Exclusive,
        }
    }
}

/// Who keeps a container's memory within its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBy {
    /// A supervisor outside of the container.
    Supervisor,
    /// A library in each of its processes: ours, or another system's.
    Library,
    /// The driver, by the container's cgroup.
    Driver,
    /// Nobody: there is no limit.
    Nobody,
}

impl HeldBy {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Supervisor => "supervisor",
            Self::Library => "library",
            Self::Driver => "driver",
            Self::Nobody => "nobody",
        }
    }
}

/// What one way of holding a lease allows and needs.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The word in the quota store.
    pub name: &'static str,
    /// Which other leases may stand on the same GPUs: those of the same company.
    pub company: Company,
    /// Who holds its memory.
    pub held_by: HeldBy,
    /// Whether it has a region with limits, which `update` writes and the meter measures into.
    pub has_region: bool,
    /// Whether the container gets our libraries in place of the driver's.
    pub is_intercepted: bool,
    /// Whether memory is held by the books that our libraries keep in each process: a process that did not
    /// load them, and memory without an entry, are past the limit.
    pub is_held_by_books: bool,
    /// Whether a part of compute is a part of the GPU's time, which is measured.
    pub shares_time: bool,
    /// How much of the driver the container gets.
    pub extent: Extent,
    /// Whether a newer libcuda of the image's own (CUDA's forward compatibility) may serve.
    pub forward_compatible: bool,
}

impl Enforcement {
    /// Every way.
    pub const ALL: [Self; 7] = [
        Self::Intercepted,
        Self::Supervised,
        Self::Scheduled,
        Self::Mps,
        Self::Foreign,
        Self::TimeSliced,
        Self::WholeGpu,
    ];

    /// How a lease for this request is held. Another system's library holds it only where the request proved
    /// that it is in the bundle, and the settings let it.
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

    /// How a container with this request is held that joins a lease held in this way: it gets no more than
    /// the lease gives.
    pub(crate) fn joined_by(self, request: &Request) -> Self {
        match (self, Self::of(request)) {
            (held @ (Self::WholeGpu | Self::TimeSliced | Self::Mps), _) => held,
            (_, Self::Foreign) => Self::Foreign,
            (held @ (Self::Supervised | Self::Scheduled), _) => held,
            (Self::Intercepted | Self::Foreign, _) => Self::Intercepted,
        }
    }

    /// Returns how a reserved share is held from when a container with this request begins to use it, while
    /// no other one does: only then is it known whether a supervisor can hold it.
    pub fn begun_by(self, request: &Request) -> Self {
        let is_ours = |one: Self| matches!(one, Self::Intercepted | Self::Supervised | Self::Scheduled);
        let held = Self::of(request);
        if is_ours(self) && is_ours(held) { held } else { self }
    }

    /// Its row.
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
            // Nobody can take more of the GPU's time than it is given.
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

    /// Whether a supervisor holds it.
    pub const fn is_supervised(self) -> bool {
        matches!(self.terms().held_by, HeldBy::Supervisor)
    }

    /// The way of this name.
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
