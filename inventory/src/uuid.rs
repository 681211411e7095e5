//! The UUID of a GPU, which is the same for driver, NVML and CUDA.

use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A GPU's UUID, as `GPU-5f2e0a11-…` in text and as the 16 bytes of `cuDeviceGetUuid`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid([u8; 16]);

/// The text is not a GPU UUID; it is kept, cut to 64 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a GPU UUID of the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx: {0:?}")]
pub struct GpuUuidError(String);

impl GpuUuid {
    /// The UUID with these bytes, in the order of `cuDeviceGetUuid`.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 bytes, in the order of `cuDeviceGetUuid`.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (position, byte) in self.0.iter().enumerate() {
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

fn parse(text: &str) -> Option<GpuUuid> {
    let hex = text.strip_prefix("GPU-")?;
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
    Some(GpuUuid(bytes))
}

#[cfg(test)]
mod tests {
    use super::GpuUuid;

    #[test]
    fn text_and_bytes_are_the_same_identity() {
        let text = "GPU-5f2e0a11-0102-0304-0506-0708090a0bff";
        let uuid: GpuUuid = text.parse().unwrap();
        assert_eq!(uuid.to_string(), text);
        assert_eq!(uuid.bytes()[..4], [0x5f, 0x2e, 0x0a, 0x11]);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "GPU-",
            "GPU-????????-????-????-????-????????????",
            "5f2e0a11-0102-0304-0506-0708090a0bff",
            "GPU-5f2e0a11-0102-0304-0506-0708090a0bfé",
            "GPU-5f2e0a1-10102-0304-0506-0708090a0bff",
        ] {
            assert!(text.parse::<GpuUuid>().is_err(), "{text:?}");
        }
    }
}
