//! Device memory as a number of bytes, and its display format.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Device memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceMemory(u64);

impl DeviceMemory {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Converts from bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The sum. It saturates at `u64::MAX`, which exceeds any capacity, so such a request is always refused.
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This percentage of the size, rounded down to whole bytes.
    pub fn percent(self, percent: u8) -> Self {
        let bytes = u128::from(self.0) * u128::from(percent) / 100;
        Self(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for DeviceMemory {
    /// Writes GiB or MiB, the larger one that is exact, else MiB with one decimal (`30 GiB`, `1536 MiB`, `0.5
    /// MiB`).
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
        let most = DeviceMemory::from_bytes(u64::MAX);
        assert_eq!(most.saturating_add(most), most);
    }
}
