//! Device memory as a number of bytes, and how it is shown to people.

use std::fmt;
use std::iter::Sum;

/// Device memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceMemory(u64);

impl DeviceMemory {
    /// No memory.
    pub const ZERO: Self = Self(0);

    /// `bytes` bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `mib` mebibytes; `None` when the product exceeds `u64`.
    pub const fn from_mib(mib: u64) -> Option<Self> {
        match mib.checked_mul(1 << 20) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The sum, or `None` when it exceeds `u64`.
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    /// The difference, or nothing when `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `percent` hundredths of this size, rounded down to whole bytes.
    pub fn percent(self, percent: u8) -> Self {
        let bytes = u128::from(self.0) * u128::from(percent) / 100;
        Self(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

impl Sum for DeviceMemory {
    /// Saturates: a sum that exceeds `u64` can only be refused by whoever compares it with a capacity.
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        Self(sizes.fold(0, |sum, size| sum.saturating_add(size.0)))
    }
}

impl fmt::Display for DeviceMemory {
    /// The largest binary unit that shows the size exactly, else MiB with one decimal (`30 GiB`, `1536 MiB`, `0.5 MiB`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GIB: u64 = 1 << 30;
        const MIB: u64 = 1 << 20;
        match self.0 {
            0 => f.pad("0 MiB"),
            bytes if bytes % GIB == 0 => f.pad(&format!("{} GiB", bytes / GIB)),
            bytes if bytes % MIB == 0 => f.pad(&format!("{} MiB", bytes / MIB)),
            bytes => {
                let tenths = u128::from(bytes) * 10 / u128::from(MIB);
                f.pad(&format!("{}.{} MiB", tenths / 10, tenths % 10))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceMemory;

    #[test]
    fn a_size_is_shown_in_the_largest_unit_that_is_exact() {
        for (bytes, want) in [
            (0, "0 MiB"),
            (30 << 30, "30 GiB"),
            (1536 << 20, "1536 MiB"),
            (1 << 19, "0.5 MiB"),
            (u64::MAX, "17592186044415.9 MiB"),
        ] {
            assert_eq!(DeviceMemory::from_bytes(bytes).to_string(), want, "{bytes}");
        }
    }

    #[test]
    fn percent_and_sums_never_overflow() {
        assert_eq!(DeviceMemory::from_bytes(u64::MAX).percent(100).bytes(), u64::MAX);
        assert_eq!(DeviceMemory::from_bytes(10).percent(25).bytes(), 2);
        let sum: DeviceMemory =
            [DeviceMemory::from_bytes(u64::MAX), DeviceMemory::from_bytes(1)].into_iter().sum();
        assert_eq!(sum.bytes(), u64::MAX);
        assert_eq!(DeviceMemory::from_mib(u64::MAX), None);
    }
}
