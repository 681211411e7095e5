//! Structures that differ between releases.

use std::fmt;
use std::str::FromStr;

use super::alloc;

/// A driver version: branch, minor and patch. A version of two numbers has patch 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u16, u16, u16);

impl FromStr for Version {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('.').map(|part| {
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse().ok().filter(|_| is_number)
        });
        let mut next = || parts.next().flatten();
        let version = Self(next().ok_or(())?, next().ok_or(())?, 0);
        match (parts.next(), parts.next()) {
            (None, _) => Ok(version),
            (Some(Some(patch)), None) => Ok(Self(version.0, version.1, patch)),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{:02}", self.0, self.1)?;
        if self.2 > 0 { write!(formatter, ".{:02}", self.2) } else { Ok(()) }
    }
}

/// Sizes and offsets, in bytes, that apply from one release on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Era {
    first: Version,
    /// Size of NVOS64_PARAMETERS, the long form of an allocation.
    pub long: usize,
    /// Offset of its flags; `None` if it has none.
    pub long_flags: Option<usize>,
    /// Offset of its status.
    pub long_status: usize,
    /// Offset of the status in the short form.
    pub short_status: usize,
    /// Size of NV_MEMORY_ALLOCATION_PARAMS.
    pub memory: usize,
    /// Size of NV_VASPACE_ALLOCATION_PARAMETERS.
    pub address_space: usize,
    /// Size of NV_CHANNELGPFIFO_ALLOCATION_PARAMETERS.
    pub channel: usize,
    /// Size of NV2080_CTRL_FB_GET_INFO_V2_PARAMS.
    pub framebuffer_info: usize,
}

const FIRST: Era = Era {
    first: Version(515, 43, 4),
    long: 40,
    long_flags: None,
    long_status: 32,
    short_status: 24,
    memory: 120,
    address_space: 48,
    channel: 304,
    framebuffer_info: 436,
};
const WITH_FLAGS: Era = Era { first: Version(525, 47, 4), long_flags: Some(32), long_status: 36, ..FIRST };
const WITH_SIZES: Era = Era {
    first: Version(535, 43, 2),
    long: 48,
    long_flags: Some(36),
    long_status: 40,
    short_status: 28,
    ..WITH_FLAGS
};
/// A developer release that precedes others of its branch but has the layout of later ones.
const EARLY_360: Era = Era { first: Version(535, 43, 8), channel: 360, ..WITH_SIZES };
const AFTER_EARLY: Era = Era { first: Version(535, 54, 3), ..WITH_SIZES };
const WITH_360: Era = Era { first: Version(535, 86, 5), channel: 360, ..WITH_SIZES };
const WITH_NUMA: Era = Era { first: Version(545, 23, 6), memory: 128, framebuffer_info: 444, ..WITH_360 };
const WITH_460: Era = Era { first: Version(560, 28, 3), framebuffer_info: 460, ..WITH_NUMA };
const WITH_368: Era = Era { first: Version(570, 86, 15), channel: 368, ..WITH_460 };
const WITH_1028: Era =
    Era { first: Version(580, 65, 6), address_space: 56, framebuffer_info: 1028, ..WITH_368 };

/// Sorted by first release, oldest first.
const ERAS: [Era; 10] = [
    FIRST,
    WITH_FLAGS,
    WITH_SIZES,
    EARLY_360,
    AFTER_EARLY,
    WITH_360,
    WITH_NUMA,
    WITH_460,
    WITH_368,
    WITH_1028,
];

/// Branches that have been compared. Within a branch nothing changed after its first releases, so later
/// releases of these branches are known too. Other branches are unknown.
const BRANCHES: [u16; 15] = [515, 520, 525, 530, 535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595];

impl Era {
    /// Returns the era of driver `version`, or `None` if its branch has not been compared.
    pub fn for_version(version: Version) -> Option<&'static Self> {
        let is_compared = BRANCHES.contains(&version.0);
        ERAS.iter().rev().find(|era| is_compared && era.first <= version)
    }

    /// Returns all known eras.
    pub const fn all() -> &'static [Self] {
        &ERAS
    }

    /// Whether RM accepts an allocation of `size` bytes.
    pub fn has_alloc_size(&self, size: usize) -> bool {
        size == alloc::SHORT || size == self.long
    }

    /// Returns the offset of the status in an allocation of `size` bytes.
    pub fn alloc_status(&self, size: usize) -> usize {
        if size == self.long { self.long_status } else { self.short_status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_two_or_three_numbers() {
        for (text, want) in [
            ("580.142", Some(Version(580, 142, 0))),
            ("535.309.01", Some(Version(535, 309, 1))),
            ("580", None),
            ("580.", None),
            ("580.142.1.1", None),
            ("580.+1", None),
            ("580.142x", None),
            ("580.142.x", None),
            ("", None),
            ("70000.1", None),
        ] {
            assert_eq!(text.parse().ok(), want, "{text:?}");
        }
    }

    #[test]
    fn a_driver_that_nobody_compared_has_no_era() {
        for (text, want) in [
            ("470.256.02", None),
            ("510.108.03", None),
            ("515.43.03", None),
            ("515.43.04", Some(FIRST)),
            ("520.61.07", Some(FIRST)),
            ("530.41.03", Some(WITH_FLAGS)),
            ("535.43.08", Some(EARLY_360)),
            ("535.54.03", Some(AFTER_EARLY)),
            ("535.309.01", Some(WITH_360)),
            ("540.4.0", None),
            ("555.58.02", Some(WITH_NUMA)),
            ("565.77", Some(WITH_460)),
            ("570.211.01", Some(WITH_368)),
            ("580.159.04", Some(WITH_1028)),
            ("595.45.04", Some(WITH_1028)),
            ("600.10", None),
            ("615.36", None),
        ] {
            assert_eq!(Era::for_version(text.parse().unwrap()).copied(), want, "{text}");
        }
    }
}
