//! Driver capabilities: NVIDIA's names for the parts of the driver that a container can ask for.

use std::fmt;
use std::str::FromStr;

/// One part of the driver, by the name that `NVIDIA_DRIVER_CAPABILITIES` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    /// CUDA.
    Compute,
    /// nvidia-smi and NVML.
    Utility,
    /// Video decode and encode.
    Video,
    /// OpenGL, EGL and Vulkan.
    Graphics,
    /// X11 display.
    Display,
    /// NGX.
    Ngx,
    /// 32-bit libraries.
    Compat32,
}

const NAMES: [(&str, Capability); 7] = [
    ("compute", Capability::Compute),
    ("utility", Capability::Utility),
    ("video", Capability::Video),
    ("graphics", Capability::Graphics),
    ("display", Capability::Display),
    ("ngx", Capability::Ngx),
    ("compat32", Capability::Compat32),
];

/// A set of capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities(Vec<Capability>);

/// A name that is no driver capability.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no driver capability; known are all, compute, utility, video, graphics, display, ngx and compat32"
)]
pub struct UnknownCapability(String);

impl Capabilities {
    /// Whether `capability` is in the set.
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }

    /// The members, each once, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = Capability> + '_ {
        self.0.iter().copied()
    }
}

impl Default for Capabilities {
    /// NVIDIA's own default: compute and utility.
    fn default() -> Self {
        Self(vec![Capability::Compute, Capability::Utility])
    }
}

impl FromStr for Capabilities {
    type Err = UnknownCapability;

    /// A comma list of names; `all` is every one of them, an empty list the default.
    fn from_str(text: &str) -> Result<Self, UnknownCapability> {
        let mut set = Vec::new();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            if name == "all" {
                set.extend(NAMES.map(|(_, capability)| capability));
                continue;
            }
            let known = NAMES.iter().find(|(known, _)| *known == name);
            let (_, capability) = known.ok_or_else(|| UnknownCapability(name.chars().take(64).collect()))?;
            set.push(*capability);
        }
        if set.is_empty() {
            return Ok(Self::default());
        }
        set.sort_unstable();
        set.dedup();
        Ok(Self(set))
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.iter().filter(|(_, capability)| self.has(*capability)).map(|(name, _)| *name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_a_set_and_an_empty_one_is_the_default() {
        for (text, want) in [
            ("", "compute,utility"),
            ("utility, compute,compute", "compute,utility"),
            ("video", "video"),
            ("all", "compute,utility,video,graphics,display,ngx,compat32"),
        ] {
            assert_eq!(text.parse::<Capabilities>().unwrap().to_string(), want, "{text:?}");
        }
        assert_eq!("compute,cuda".parse::<Capabilities>(), Err(UnknownCapability("cuda".into())));
    }
}
