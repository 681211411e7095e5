//! The values of gpushare's own dialect: each a type, parsed once.

use std::fmt;
use std::str::FromStr;

use gpushare_inventory::{DeviceMemory, GpuUuid};

/// What is wrong with a value, and which forms exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A size without a unit says nothing: other systems read it as bytes, MiB or GiB.
    #[error("a size needs a unit: write 4GiB, 4Gi, 4096MiB, 4G (10^9 bytes) or 25%")]
    NoUnit,
    /// Not a size at all.
    #[error("not a size: write 4GiB, 4Gi, 4096MiB, 4G (10^9 bytes) or 25%")]
    NotASize,
    /// A number and its unit apart, or blanks around them.
    #[error("a size has no blanks in it: write 4GiB")]
    Blanks,
    /// A unit nobody knows.
    #[error(
        "unknown unit, whose case counts: known are Ki, Mi, Gi, Ti, KiB, MiB, GiB, TiB, K, M, G, T, KB, MB, GB, TB, docker's k, m, g, t and %"
    )]
    UnknownUnit,
    /// More than fits into 64 bits.
    #[error("larger than any GPU: at most 16777215 TiB can be written")]
    TooLarge,
    /// Zero, or so little that nothing fits.
    #[error("a share is at least 1 MiB; to start without a GPU leave the request out")]
    TooSmall,
    /// A percentage outside 1 to 100.
    #[error("a percentage is a whole number from 1 to 100")]
    NotAPercentage,
    /// Not a count.
    #[error("a count of GPUs is a whole number from 1 to 16")]
    NotACount,
    /// Not a device list.
    #[error(
        "a device list holds indexes, UUIDs or unique beginnings of UUIDs (GPU-…), or is `all`, each device once"
    )]
    NotDevices,
    /// Not the name of a share.
    #[error(
        "a share's CDI name is its memory (4GiB, or 25pct of the GPU), and after a dash perhaps its compute in percent \
         (4GiB-30)"
    )]
    NotAShareName,
    /// Not a mode.
    #[error("unknown mode: known are share and exclusive")]
    UnknownMode,
    /// A mode of the design that this version does not enforce yet.
    #[error("this mode is not available in this version: use share or exclusive")]
    UnavailableMode,
    /// Not a scope.
    #[error("unknown scope: known are container and pod")]
    UnknownScope,
    /// Not a compute policy.
    #[error("unknown compute policy: known are fixed, burst and none")]
    UnknownPolicy,
    /// Not a priority.
    #[error("a priority is a whole number from 0 (low) to 9")]
    NotAPriority,
}

/// How a container's compute share is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputePolicy {
    /// A hard cap, also on an idle GPU.
    #[default]
    Fixed,
    /// The share is guaranteed; idle time may be used.
    Burst,
    /// No compute limit.
    None,
}

impl ComputePolicy {
    /// The word in requests, in the store and in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Burst => "burst",
            Self::None => "none",
        }
    }
}

/// Whose a share is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The container's own.
    #[default]
    Container,
    /// The pod's: its containers have one share together, which ends with the last of them.
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

/// How much memory is asked for on each GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRequest {
    /// Exactly this much.
    Bytes(DeviceMemory),
    /// Hundredths of the GPU's whole memory, 1 to 100.
    Percent(u8),
    /// All that is left on the GPU.
    Rest,
}

impl MemoryRequest {
    /// The amount, where it is one of bytes.
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

/// Digits without a leading zero (some read 010 as eight), perhaps a point and up to nine more digits, and a unit. Units
/// are the Kubernetes ones (Gi is 2^30, G is 10^9), each also with a B, and docker's: one lower-case letter, `4g` for 2^32.
/// Kubernetes' `m` for a thousandth has no use here.
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
    whole(text, 1..=100).ok_or(GrammarError::NotAPercentage)
}

/// A number written in plain digits, no sign, no leading zero, inside `range`.
fn whole(text: &str, range: std::ops::RangeInclusive<u8>) -> Option<u8> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    let number = text.parse().ok().filter(|_| plain)?;
    range.contains(&number).then_some(number)
}

/// A share of a GPU's compute time in percent, 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cores(u8);

impl Cores {
    /// `percent` of a GPU; `None` outside 1 to 100.
    pub const fn new(percent: u8) -> Option<Self> {
        match percent {
            1..=100 => Some(Self(percent)),
            _ => None,
        }
    }

    /// A whole GPU.
    pub const ALL: Self = Self(100);

    /// Percent, 1 to 100.
    pub const fn percent(self) -> u8 {
        self.0
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

/// How GPUs are given to a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// A share, limited by the interception library.
    #[default]
    Share,
    /// Whole cards, which nobody else gets a share of.
    Exclusive,
}

impl FromStr for Mode {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        match text {
            "share" => Ok(Self::Share),
            "exclusive" => Ok(Self::Exclusive),
            "mps" | "time-slice" => Err(GrammarError::UnavailableMode),
            _ => Err(GrammarError::UnknownMode),
        }
    }
}

impl FromStr for ComputePolicy {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        match text {
            "fixed" => Ok(Self::Fixed),
            "burst" => Ok(Self::Burst),
            "none" => Ok(Self::None),
            _ => Err(GrammarError::UnknownPolicy),
        }
    }
}

/// 0 (low) to 9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(u8);

impl Priority {
    /// The highest.
    pub const HIGHEST: Self = Self(9);

    /// `level`, or the highest where that is more.
    pub const fn at_most(level: u8) -> Self {
        if level < Self::HIGHEST.0 { Self(level) } else { Self::HIGHEST }
    }

    /// 0 to 9.
    pub const fn level(self) -> u8 {
        self.0
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(5)
    }
}

impl FromStr for Priority {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        whole(text, 0..=9).map(Self).ok_or(GrammarError::NotAPriority)
    }
}

/// Which GPUs a container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// So many, chosen by placement; 1 to 16.
    Any(u8),
    /// Exactly these.
    These(Vec<DeviceSelector>),
    /// So many of these, chosen by placement.
    Among(u8, Vec<GpuUuid>),
    /// Every GPU of the node.
    All,
}

/// One GPU, as users name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSelector {
    /// NVML's index: PCI order.
    Index(u32),
    /// The N of `/dev/nvidiaN`; not in gpushare's own grammar.
    Minor(u32),
    /// The whole UUID.
    Uuid(GpuUuid),
    /// A beginning of a UUID, `GPU-` and at least one more character.
    Prefix(String),
}

impl FromStr for DeviceSelector {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let plain = text == "0" || !text.starts_with('0');
            return text.parse().ok().filter(|_| plain).map(Self::Index).ok_or(GrammarError::NotDevices);
        }
        if let Ok(uuid) = text.parse() {
            return Ok(Self::Uuid(uuid));
        }
        let hex = text.strip_prefix("GPU-").filter(|hex| !hex.is_empty() && hex.len() < 36);
        let plain = hex.is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'));
        if plain { Ok(Self::Prefix(text.to_owned())) } else { Err(GrammarError::NotDevices) }
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Minor(minor) => write!(f, "/dev/nvidia{minor}"),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Prefix(prefix) => f.write_str(prefix),
        }
    }
}

impl FromStr for Devices {
    type Err = GrammarError;

    /// A comma list, or `all`. The count of GPUs has a key of its own: see [`count`].
    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if text == "all" {
            return Ok(Self::All);
        }
        let mut selectors: Vec<DeviceSelector> = Vec::new();
        for item in text.split(',').map(str::trim) {
            let selector = item.parse()?;
            if item.is_empty() || selectors.contains(&selector) || selectors.len() == 16 {
                return Err(GrammarError::NotDevices);
            }
            selectors.push(selector);
        }
        Ok(Self::These(selectors))
    }
}

/// How many GPUs a share spans, 1 to 16.
pub fn count(text: &str) -> Result<u8, GrammarError> {
    whole(text, 1..=16).ok_or(GrammarError::NotACount)
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
    fn devices_are_a_list_without_doubles_or_all() {
        assert_eq!("all".parse::<Devices>(), Ok(Devices::All));
        let list = Devices::These(vec![
            DeviceSelector::Index(0),
            DeviceSelector::Uuid("GPU-5f2e0a11-0102-0304-0506-0708090a0bff".parse().unwrap()),
            DeviceSelector::Prefix("GPU-5F".into()),
        ]);
        assert_eq!("0, GPU-5f2e0a11-0102-0304-0506-0708090a0bff,GPU-5F".parse::<Devices>(), Ok(list));
        for text in
            ["", "0,,1", "0,0", "00", "010", "all,0", "-1", "GPU-", "GPU-xyz", "99999999999", "0:1", "MIG-1"]
        {
            assert_eq!(text.parse::<Devices>(), Err(GrammarError::NotDevices), "parsing {text:?}");
        }
    }

    #[test]
    fn modes_that_nothing_enforces_yet_are_refused() {
        assert_eq!("mps".parse::<Mode>(), Err(GrammarError::UnavailableMode));
        assert_eq!("shared".parse::<Mode>(), Err(GrammarError::UnknownMode));
    }
}
