//! The values of gpushare's own keys. Each has a type and is parsed once, by `FromStr`.

use std::fmt;
use std::str::FromStr;

use gpushare_inventory::DeviceMemory;
use serde::{Deserialize, Serialize};

/// The reason why a value is refused; the message lists the accepted forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A size without a unit. It is refused because systems disagree whether such a number is bytes, MiB or
    /// GiB.
    #[error("a size needs a unit: write 4GiB, 4Gi, 4096MiB, 4G (10^9 bytes) or 25%")]
    NoUnit,
    /// The text does not begin with a number, or the number is badly formed.
    #[error("not a size: write 4GiB, 4Gi, 4096MiB, 4G (10^9 bytes) or 25%")]
    NotASize,
    /// Blanks in or around a size.
    #[error("a size has no blanks in it: write 4GiB")]
    Blanks,
    /// A unit that is not in the list below.
    #[error(
        "unknown unit, whose case counts: known are Ki, Mi, Gi, Ti, KiB, MiB, GiB, TiB, K, M, G, T, KB, MB, GB, TB, docker's k, m, g, t and %"
    )]
    UnknownUnit,
    /// A size that does not fit into 64 bits.
    #[error("larger than any GPU: at most 16777215 TiB can be written")]
    TooLarge,
    /// A size below 1 MiB.
    #[error("a share is at least 1 MiB; to start without a GPU leave the request out")]
    TooSmall,
    /// A percentage outside 1 to 100.
    #[error("a percentage is a whole number from 1 to 100")]
    NotAPercentage,
    /// A count of GPUs outside 1 to 16.
    #[error("a count of GPUs is a whole number from 1 to 16")]
    NotACount,
    /// The text is not a device list, or it names a device twice or more than 16 devices.
    #[error(
        "a device list holds indexes (0, and 0:1 for a MIG instance), UUIDs or unique beginnings of UUIDs (GPU-…, MIG-…), or is \
         `all`, each device once"
    )]
    NotDevices,
    /// The name of a CDI device of the kind gpushare.io/share is not of the form MEMORY or MEMORY-PERCENT.
    #[error(
        "a share's CDI name is its memory (4GiB, or 25pct of the GPU), and after a dash perhaps its compute in percent \
         (4GiB-30)"
    )]
    NotAShareName,
    /// A mode that does not exist.
    #[error("unknown mode: known are share, mps, time-slice and exclusive")]
    UnknownMode,
    /// A scope that does not exist.
    #[error("unknown scope: known are container and pod")]
    UnknownScope,
    /// A word about the supervisor that does not exist.
    #[error("unknown word; the only one is required, for a share that a supervisor must hold")]
    NotRequired,
    /// A compute policy that does not exist.
    #[error("unknown compute policy: known are fixed, burst, latency and none")]
    UnknownPolicy,
    /// A percentage where only bytes are accepted.
    #[error("it is an amount with a unit: write 4GiB, 4Gi, 4096MiB or 4G (10^9 bytes)")]
    NotAnAmount,
    /// A priority outside 0 to 9.
    #[error("a priority is a whole number from 0 (low) to 9")]
    NotAPriority,
}

/// How a container's compute share is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputePolicy {
    /// A hard limit, also while the GPU is otherwise idle.
    #[default]
    Fixed,
    /// The share is guaranteed, and the container may also use time that others leave idle.
    Burst,
    /// Like `Burst`, and the container runs ahead of others as long as it uses no more than its share.
    Latency,
    /// No compute limit.
    None,
}

impl ComputePolicy {
    /// The word for the policy in requests, in the quota store and in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Burst => "burst",
            Self::Latency => "latency",
            Self::None => "none",
        }
    }
}

/// A share that a supervisor outside the container must hold, regardless of the node's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorRequired;

impl FromStr for SupervisorRequired {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if text == "required" { Ok(Self) } else { Err(GrammarError::NotRequired) }
    }
}

/// The owner of a share: a container or its pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The container alone.
    #[default]
    Container,
    /// The pod: all its containers hold one share together. The lease ends with the last of them.
    Pod,
}

impl FromStr for Scope {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        match text {
            "container" => Ok(Self::Container),
            "pod" => Ok(Self::Pod),
            _ => Err(GrammarError::UnknownScope),
        }
    }
}

/// How much memory the request is for, on each GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRequest {
    /// An amount in bytes.
    Bytes(DeviceMemory),
    /// Percent of the GPU's whole memory, 1 to 100.
    Percent(u8),
    /// All memory that is left on the GPU at placement.
    Rest,
}

impl MemoryRequest {
    /// The amount if it was given in bytes, else `None`.
    pub const fn bytes(self) -> Option<DeviceMemory> {
        match self {
            Self::Bytes(memory) => Some(memory),
            Self::Percent(_) | Self::Rest => None,
        }
    }
}

impl FromStr for MemoryRequest {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if let Some(number) = text.strip_suffix('%') {
            return percentage(number).map(Self::Percent);
        }
        let bytes = size(text)?;
        if bytes < 1 << 20 {
            return Err(GrammarError::TooSmall);
        }
        Ok(Self::Bytes(DeviceMemory::from_bytes(bytes)))
    }
}

impl fmt::Display for MemoryRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(memory) => memory.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Rest => f.write_str("all that is left"),
        }
    }
}

const UNITS: [(&str, u64); 20] = [
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("K", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Reads a size in bytes: digits, optionally a point and up to nine more digits, and a unit. A leading zero
/// is refused, since some programs read 010 as eight. Units are those of Kubernetes (Gi is 2^30, G is 10^9),
/// optionally with a B, and docker's single lower-case letters (`4g` is 2^32). Kubernetes' `m` for a
/// thousandth has no use here; `m` is docker's 2^20.
fn size(text: &str) -> Result<u64, GrammarError> {
    if text.contains(char::is_whitespace) {
        return Err(GrammarError::Blanks);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let padded = whole.len() > 1 && whole.starts_with('0');
    if !digits(whole) || !digits(fraction) || fraction.len() > 9 || padded {
        return Err(GrammarError::NotASize);
    }
    if unit.is_empty() {
        let zero = number.bytes().all(|byte| matches!(byte, b'0' | b'.'));
        return Err(if zero { GrammarError::TooSmall } else { GrammarError::NoUnit });
    }
    let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(GrammarError::UnknownUnit)?;
    let whole: u128 = whole.parse().map_err(|_| GrammarError::TooLarge)?;
    let parts = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| GrammarError::NotASize)?);
    let fraction: u128 = fraction.parse().map_err(|_| GrammarError::NotASize)?;
    let scale = u128::from(*scale);
    let bytes = whole.checked_mul(scale).and_then(|bytes| bytes.checked_add(fraction * scale / parts));
    u64::try_from(bytes.ok_or(GrammarError::TooLarge)?).map_err(|_| GrammarError::TooLarge)
}

fn percentage(text: &str) -> Result<u8, GrammarError> {
    whole::<u8>(text).filter(|percent| (1..=100).contains(percent)).ok_or(GrammarError::NotAPercentage)
}

/// Reads digits without a sign and without a leading zero, since some programs read 010 as eight. `None` if
/// the type cannot hold the number.
pub fn whole<T: FromStr>(text: &str) -> Option<T> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let padded = text.len() > 1 && text.starts_with('0');
    text.parse().ok().filter(|_| plain && !padded)
}

/// A share of a GPU's compute time in percent, 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Cores(u8);

impl Cores {
    /// Returns `None` outside 1 to 100.
    pub const fn new(percent: u8) -> Option<Self> {
        match percent {
            1..=100 => Some(Self(percent)),
            _ => None,
        }
    }

    /// All of a GPU's compute time.
    pub const ALL: Self = Self(100);

    /// The percentage, 1 to 100.
    pub const fn percent(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Cores {
    type Error = GrammarError;

    fn try_from(percent: u8) -> Result<Self, GrammarError> {
        Self::new(percent).ok_or(GrammarError::NotAPercentage)
    }
}

impl From<Cores> for u8 {
    fn from(cores: Cores) -> Self {
        cores.percent()
    }
}

impl FromStr for Cores {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        percentage(text.strip_suffix('%').unwrap_or(text)).map(Self)
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

/// How a container gets its GPUs, ordered from least to most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// A part of each GPU; the interception library enforces the limit.
    #[default]
    Share,
    /// A part of one GPU whose programs run concurrently under NVIDIA's Multi-Process Service. The
    /// interception library enforces the memory limit, and MPS enforces the compute limit.
    Mps,
    /// Turns on each GPU, as the driver schedules all processes. Nothing limits memory or compute.
    TimeSlice,
    /// Whole GPUs, which are never shared with other containers.
    Exclusive,
}

impl Mode {
    /// The word for the mode in requests and listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Mps => "mps",
            Self::TimeSlice => "time-slice",
            Self::Exclusive => "exclusive",
        }
    }
}

impl FromStr for Mode {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        let mut all = [Self::Share, Self::Mps, Self::TimeSlice, Self::Exclusive].into_iter();
        all.find(|mode| mode.name() == text).ok_or(GrammarError::UnknownMode)
    }
}

impl FromStr for ComputePolicy {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        let mut all = [Self::Fixed, Self::Burst, Self::Latency, Self::None].into_iter();
        all.find(|policy| policy.name() == text).ok_or(GrammarError::UnknownPolicy)
    }
}

/// A share's priority, 0 (low) to 9; 5 is the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Priority(u8);

impl Priority {
    /// The highest priority, 9.
    pub const HIGHEST: Self = Self(9);

    /// Makes a priority of `level`; values above 9 become 9.
    pub const fn at_most(level: u8) -> Self {
        if level < Self::HIGHEST.0 { Self(level) } else { Self::HIGHEST }
    }

    /// The number, 0 to 9.
    pub const fn level(self) -> u8 {
        self.0
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(5)
    }
}

impl TryFrom<u8> for Priority {
    type Error = GrammarError;

    fn try_from(level: u8) -> Result<Self, GrammarError> {
        (0..=9).contains(&level).then_some(Self(level)).ok_or(GrammarError::NotAPriority)
    }
}

impl From<Priority> for u8 {
    fn from(priority: Priority) -> Self {
        priority.level()
    }
}

impl FromStr for Priority {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        whole::<u8>(text).filter(|level| *level <= 9).map(Self).ok_or(GrammarError::NotAPriority)
    }
}

/// Reads the number of GPUs that a share spans, 1 to 16.
pub fn count(text: &str) -> Result<u8, GrammarError> {
    whole::<u8>(text).filter(|count| (1..=16).contains(count)).ok_or(GrammarError::NotACount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_digits_and_a_known_unit() {
        use GrammarError as E;
        for (text, want) in [
            ("4GiB", Ok(4 << 30)),
            ("4Gi", Ok(4 << 30)),
            ("4096MiB", Ok(4 << 30)),
            ("4G", Ok(4_000_000_000)),
            ("1.5GiB", Ok(3 << 29)),
            ("1TiB", Ok(1 << 40)),
            ("17179869184", Err(E::NoUnit)),
            ("0", Err(E::TooSmall)),
            ("0GiB", Err(E::TooSmall)),
            ("1023KiB", Err(E::TooSmall)),
            ("-1GiB", Err(E::NotASize)),
            ("+1GiB", Err(E::NotASize)),
            ("4 GiB", Err(E::Blanks)),
            ("4GiB\n", Err(E::Blanks)),
            ("4g", Ok(4 << 30)),
            ("512m", Ok(512 << 20)),
            ("4gb", Err(E::UnknownUnit)),
            ("4kib", Err(E::UnknownUnit)),
            ("4GB ", Err(E::Blanks)),
            ("0x10GiB", Err(E::UnknownUnit)),
            ("1e3GiB", Err(E::UnknownUnit)),
            ("1e999", Err(E::UnknownUnit)),
            ("18446744073709551616KiB", Err(E::TooLarge)),
            ("99999999999999999999999999999999999999999GiB", Err(E::TooLarge)),
            ("16777216TiB", Err(E::TooLarge)),
            ("010GiB", Err(E::NotASize)),
            ("00", Err(E::NotASize)),
            ("0.5GiB", Ok(1 << 29)),
            ("1..5GiB", Err(E::NotASize)),
            (".5GiB", Err(E::NotASize)),
            ("5.GiB", Err(E::NotASize)),
            ("٤GiB", Err(E::NotASize)),
            ("4GiB\0", Err(E::UnknownUnit)),
            ("", Err(E::NotASize)),
            ("GiB", Err(E::NotASize)),
        ] {
            let want = want.map(|bytes| MemoryRequest::Bytes(DeviceMemory::from_bytes(bytes)));
            assert_eq!(text.parse::<MemoryRequest>(), want, "parsing {text:?}");
        }
    }

    #[test]
    fn a_percentage_is_a_whole_number_from_1_to_100() {
        for (text, want) in [
            ("1%", Some(1)),
            ("100%", Some(100)),
            ("0%", None),
            ("101%", None),
            ("010%", None),
            ("12.5%", None),
            ("%", None),
            ("-5%", None),
            ("256%", None),
        ] {
            let want = want.map(MemoryRequest::Percent).ok_or(GrammarError::NotAPercentage);
            assert_eq!(text.parse::<MemoryRequest>(), want, "parsing {text:?}");
        }
        assert_eq!("30".parse::<Cores>(), Ok(Cores(30)));
        assert_eq!("30%".parse::<Cores>(), Ok(Cores(30)));
        assert_eq!("0".parse::<Cores>(), Err(GrammarError::NotAPercentage));
        assert_eq!("30%%".parse::<Cores>(), Err(GrammarError::NotAPercentage));
    }

    #[test]
    fn modes_that_nothing_enforces_yet_are_refused() {
        assert_eq!("mps".parse::<Mode>(), Ok(Mode::Mps));
        assert_eq!("shared".parse::<Mode>(), Err(GrammarError::UnknownMode));
    }
}
