//! The UUID of a GPU or of a MIG instance, which is the same for driver, NVML and CUDA.

use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The UUID of a GPU or of a MIG instance: `GPU-5f2e0a11-…` or `MIG-5f2e0a11-…` as text, or the 16 bytes of
/// `cuDeviceGetUuid_v2`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid {
    is_instance: bool,
    bytes: [u8; 16],
}

/// The text is not a GPU UUID; contains the text, cut to 64 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a UUID of the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, or MIG-… for an instance: {0:?}")]
pub struct GpuUuidError(String);

impl GpuUuid {
    /// The UUID of a GPU with these bytes, in the order of `cuDeviceGetUuid`.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self { is_instance: false, bytes }
    }

    /// The UUID of a MIG instance with these bytes, in the order of `cuDeviceGetUuid_v2`.
    pub const fn of_instance(bytes: [u8; 16]) -> Self {
        Self { is_instance: true, bytes }
    }

    /// Whether it is the UUID of a MIG instance.
    pub const fn is_instance(self) -> bool {
        self.is_instance
    }

    /// The 16 bytes, in the order of `cuDeviceGetUuid`.
    pub const fn bytes(self) -> [u8; 16] {
        self.bytes
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_instance { INSTANCE } else { GPU })?;
        for (position, byte) in self.bytes.iter().enumerate() {
            if matches!(position, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for GpuUuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GpuUuid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(Error::custom)
    }
}

impl FromStr for GpuUuid {
    type Err = GpuUuidError;

    fn from_str(text: &str) -> Result<Self, GpuUuidError> {
        parse(text).ok_or_else(|| GpuUuidError(text.chars().take(64).collect()))
    }
}

const GPU: &str = "GPU-";
const INSTANCE: &str = "MIG-";

fn parse(text: &str) -> Option<GpuUuid> {
    let is_instance = text.starts_with(INSTANCE);
    let hex = text.strip_prefix(if is_instance { INSTANCE } else { GPU })?;
    let groups: Vec<&str> = hex.split('-').collect();
    if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = groups.concat();
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(GpuUuid { is_instance, bytes })
}

#[cfg(test)]
mod tests {
    use super::GpuUuid;

    #[test]
    fn text_and_bytes_are_the_same_identity() {
        for text in ["GPU-5f2e0a11-0102-0304-0506-0708090a0bff", "MIG-5f2e0a11-0102-0304-0506-0708090a0bff"] {
            let uuid: GpuUuid = text.parse().unwrap();
            assert_eq!(uuid.to_string(), text);
            assert_eq!(uuid.bytes()[..4], [0x5f, 0x2e, 0x0a, 0x11]);
            assert_eq!(uuid.is_instance(), text.starts_with('M'), "another GPU than one with the same bytes");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "GPU-",
            "MIG-GPU-5f2e0a11-0102-0304-0506-0708090a0bff/1/0",
            "GPU-????????-????-????-????-????????????",
            "5f2e0a11-0102-0304-0506-0708090a0bff",
            "GPU-5f2e0a11-0102-0304-0506-0708090a0bfé",
            "GPU-5f2e0a1-10102-0304-0506-0708090a0bff",
        ] {
            assert!(text.parse::<GpuUuid>().is_err(), "{text:?}");
        }
    }
}
