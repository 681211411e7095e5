//! Properties of GPU models by name. The figures are roughly those of the real GPUs; nothing depends on them.

/// Properties of a GPU model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Number of multiprocessors.
    pub cores: u32,
    /// Highest core clock, MHz.
    pub core_clock: u32,
    /// Highest memory clock, MHz.
    pub memory_clock: u32,
    /// Width of the memory bus, bits.
    pub bus_width: u32,
    /// Power limit, watts.
    pub power: u32,
    /// PCI device number in the upper 16 bits, vendor number in the lower 16.
    pub pci_device: u32,
    /// NVML's number of the architecture (nvmlDeviceArchitecture_t).
    pub architecture: u32,
}

const A100: Model = Model {
    capability: (8, 0),
    cores: 108,
    core_clock: 1410,
    memory_clock: 1593,
    bus_width: 5120,
    power: 400,
    pci_device: 0x20b2_10de,
    architecture: 7,
};

/// Returns the model whose keyword occurs in `name`, or an A100 if none does.
#[must_use]
pub fn of(name: &str) -> Model {
    let known = [
        ("H200", (9, 0), 132, 1980, 3201, 6144, 700, 0x2335_10de, 9),
        ("H100", (9, 0), 132, 1980, 2619, 5120, 700, 0x2330_10de, 9),
        ("B200", (10, 0), 148, 1965, 3996, 8192, 1000, 0x2901_10de, 10),
        ("L40", (8, 9), 142, 2490, 9001, 384, 300, 0x26b9_10de, 8),
        ("L4", (8, 9), 58, 2040, 6251, 192, 72, 0x27b8_10de, 8),
        ("A10", (8, 6), 72, 1695, 6251, 384, 150, 0x2236_10de, 7),
        ("V100", (7, 0), 80, 1530, 877, 4096, 300, 0x1db6_10de, 5),
        ("T4", (7, 5), 40, 1590, 5001, 256, 70, 0x1eb8_10de, 6),
    ];
    if name.contains("A100") {
        return A100;
    }
    let found = known.into_iter().find(|(mark, ..)| name.contains(mark));
    found.map_or(
        A100,
        |(_, capability, cores, core_clock, memory_clock, bus_width, power, pci_device, architecture)| {
            Model { capability, cores, core_clock, memory_clock, bus_width, power, pci_device, architecture }
        },
    )
}
