//! The location of GPUs in the machine, and the distance between two of them.

/// The location of a GPU in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// PCI address as the kernel writes it, `DOMAIN:BUS:DEVICE.FUNCTION` in lower case.
    pub pci_bus_id: String,
    /// The NUMA node; `None` if the kernel reports none (`numa_node` of sysfs is missing or -1).
    pub numa_node: Option<u32>,
    /// The PCI host bridge and the bridges and switches between it and the GPU, outermost first; empty if
    /// sysfs does not show them.
    pub bridges: Vec<String>,
    /// GPUs that are connected by NVLink have the same text here ([`GpuTotals::nvlink_group`]); empty if
    /// there are none, and before [`Node::with_totals`].
    ///
    /// [`GpuTotals::nvlink_group`]: crate::GpuTotals::nvlink_group
    /// [`Node::with_totals`]: crate::Node::with_totals
    pub nvlink_group: String,
}

/// The connection between two GPUs, nearest first: the levels of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// NVLink, directly or over other GPUs and switches.
    NvLink,
    /// One PCI switch.
    Switch,
    /// Several PCI switches.
    Switches,
    /// The PCI host bridge.
    HostBridge,
    /// Between host bridges of one NUMA node.
    NumaNode,
    /// Between NUMA nodes, or unknown.
    System,
}

impl Way {
    /// Its name in nvidia-smi.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NvLink => "NV",
            Self::Switch => "PIX",
            Self::Switches => "PXB",
            Self::HostBridge => "PHB",
            Self::NumaNode => "NODE",
            Self::System => "SYS",
        }
    }
}

impl Place {
    /// Returns the connection to `other`.
    pub fn way(&self, other: &Self) -> Way {
        if !self.nvlink_group.is_empty() && self.nvlink_group == other.nvlink_group {
            return Way::NvLink;
        }
        let common = self.bridges.iter().zip(&other.bridges).take_while(|(one, other)| one == other).count();
        match common {
            0 if self.numa_node.is_some() && self.numa_node == other.numa_node => Way::NumaNode,
            0 => Way::System,
            1 => Way::HostBridge,
            // Each GPU is behind its own port of the same switch.
            _ if self.bridges.len().max(other.bridges.len()) <= common + 1 => Way::Switch,
            _ => Way::Switches,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_between_two_gpus_is_that_of_nvidia_smi() {
        let at = |bridges: &str, numa_node, nvlink: &str| Place {
            numa_node,
            bridges: bridges.split_whitespace().map(str::to_owned).collect(),
            nvlink_group: nvlink.to_owned(),
            ..Place::default()
        };
        let here = at("pci0000:00 00:01.0 01:00.0 02:08.0", Some(0), "");
        for (there, want) in [
            (at("pci0000:00 00:01.0 01:00.0 02:09.0", Some(0), ""), Way::Switch),
            (at("pci0000:00 00:01.0 01:00.0 02:0a.0 03:00.0 04:01.0", Some(0), ""), Way::Switches),
            (at("pci0000:00 00:02.0 05:00.0 06:08.0", Some(0), ""), Way::HostBridge),
            (at("pci0000:80 80:01.0", Some(0), ""), Way::NumaNode),
            (at("pci0000:80 80:01.0", Some(1), ""), Way::System),
            (at("", None, ""), Way::System),
        ] {
            assert_eq!((here.way(&there), there.way(&here)), (want, want), "{there:?}");
        }
        let linked = |numa| at("", Some(numa), "0000:07:00.0");
        assert_eq!(linked(0).way(&linked(1)), Way::NvLink);
        assert_eq!(Place::default().way(&Place::default()), Way::System, "nothing is known");
    }
}
