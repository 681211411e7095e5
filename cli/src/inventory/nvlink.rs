//! Which GPUs reach each other by NVLink, directly or over other GPUs and switches.

use std::fmt::{self, Display, Formatter};

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::PciInfo;

/// The most links that NVML counts on one GPU (NVML_NVLINK_MAX_LINKS of nvml.h).
const MOST: u32 = 18;

/// A PCI address: domain, bus and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(u32, u32, u32);

impl From<PciInfo> for Address {
    fn from(pci: PciInfo) -> Self {
        Self(pci.domain, pci.bus, pci.device)
    }
}

impl Display for Address {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{:04x}:{:02x}:{:02x}.0", self.0, self.1, self.2)
    }
}

/// A GPU, and what its active links lead to: other GPUs and switches.
#[derive(Clone, Debug, Default)]
pub struct Links {
    own: Option<Address>,
    ends: Vec<Address>,
}

impl Links {
    /// What NVML tells. A GPU without NVLink, or one of which NVML does not tell, has no links.
    pub fn of(gpu: &Device<'_>) -> Self {
        let end = |link: u32| -> Result<Option<Address>, NvmlError> {
            let link = gpu.link_wrapper_for(link);
            Ok(if link.is_active()? { Some(link.remote_pci_info()?.into()) } else { None })
        };
        let ends = (0..MOST).filter_map(|link| end(link).ok().flatten()).collect();
        Self { own: gpu.pci_info().ok().map(Address::from), ends }
    }
}

/// For each GPU the name of its group; empty if it reaches no other GPU.
pub fn groups(gpus: &[Links]) -> Vec<String> {
    let of = |at: usize| -> String {
        let reached = reached(gpus, at);
        let others = reached.iter().filter(|other| **other != at).count();
        let first = reached.iter().filter_map(|at| gpus[*at].own).min();
        first.filter(|_| others > 0).map(|address| address.to_string()).unwrap_or_default()
    };
    (0..gpus.len()).map(of).collect()
}

/// The GPUs that one reaches, itself too.
fn reached(gpus: &[Links], from: usize) -> Vec<usize> {
    let mut reached = vec![from];
    let mut next = 0;
    while let Some(at) = reached.get(next).copied() {
        next += 1;
        let links =
            |one: usize, other: usize| gpus[other].own.is_some_and(|own| gpus[one].ends.contains(&own));
        let meets = |other: usize| gpus[at].ends.iter().any(|end| gpus[other].ends.contains(end));
        for other in 0..gpus.len() {
            if !reached.contains(&other) && (links(at, other) || links(other, at) || meets(other)) {
                reached.push(other);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(bus: u32, ends: &[u32]) -> Links {
        let at = |bus: &u32| Address(0, *bus, 0);
        Links { own: Some(at(&bus)), ends: ends.iter().map(at).collect() }
    }

    #[test]
    fn gpus_of_a_group_reach_each_other_directly_over_another_or_over_a_switch() {
        let pairs = [gpu(7, &[15]), gpu(15, &[7]), gpu(23, &[31, 31]), gpu(31, &[23])];
        let line = [gpu(23, &[15]), gpu(15, &[7, 23]), gpu(7, &[15]), gpu(31, &[])];
        let switched = [gpu(7, &[200]), gpu(15, &[200]), gpu(23, &[201]), gpu(31, &[202])];
        let unknown = [Links::default(), Links::default()];
        let (a, b, c) = ("0000:07:00.0", "0000:17:00.0", "");
        for (gpus, want) in [
            (&pairs[..], &[a, a, b, b][..]),
            (&line, &[a, a, a, c]),
            (&switched, &[a, a, c, c]),
            (&unknown, &[c, c]),
        ] {
            assert_eq!(groups(gpus), want, "{gpus:?}");
        }
    }
}
