//! Driver capabilities: NVIDIA's names for the parts of the driver that a container can request.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// One part of the driver, with the name that `NVIDIA_DRIVER_CAPABILITIES` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    /// `compute`: CUDA.
    Compute,
    /// `utility`: nvidia-smi and NVML.
    Utility,
    /// `video`: decoding and encoding.
    Video,
    /// `graphics`: OpenGL, EGL and Vulkan.
    Graphics,
    /// `display`: X11.
    Display,
    /// `ngx`: NVIDIA's NGX libraries.
    Ngx,
}

const NAMES: [(&str, Capability); 6] = [
    ("compute", Capability::Compute),
    ("utility", Capability::Utility),
    ("video", Capability::Video),
    ("graphics", Capability::Graphics),
    ("display", Capability::Display),
    ("ngx", Capability::Ngx),
];

/// NVIDIA's name for the 32-bit builds of the driver's libraries. Containers do not get them, because
/// gpushare's limits would not apply to them.
const COMPAT32: &str = "compat32";

/// A set of driver capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    members: BTreeSet<Capability>,
    /// Whether it was written as `all`, which requests as many as the node allows.
    all: bool,
}

/// Why a list of driver capabilities is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapabilityError {
    /// A name that is not a driver capability.
    #[error(
        "{0:?} is no driver capability; known are all, compute, utility, video, graphics, display and ngx"
    )]
    Unknown(String),
    /// The 32-bit libraries, by name. Within `all` the name is ignored, because CUDA images write it without
    /// needing it.
    #[error(
        "the driver's 32-bit libraries (compat32) are not given, as no limit would hold in them; leave it out"
    )]
    Compat32,
    /// A known capability that this node does not allow.
    #[error(
        "this node gives the driver capabilities {allowed}, not {asked} (request.capabilities); ask for fewer with \
         GPUSHARE_CAPABILITIES"
    )]
    NotAllowed {
        /// The requested capabilities that are not allowed.
        asked: Capabilities,
        /// The capabilities that the settings allow.
        allowed: Capabilities,
    },
}

impl Capabilities {
    /// Returns the set of all capabilities.
    pub fn all() -> Self {
        Self { members: NAMES.map(|(_, capability)| capability).into(), all: true }
    }

    /// Whether `capability` is in the set.
    pub fn has(&self, capability: Capability) -> bool {
        self.members.contains(&capability)
    }

    /// The members in the order of [`Capability`], each once.
    pub fn iter(&self) -> impl Iterator<Item = Capability> + '_ {
        self.members.iter().copied()
    }

    /// Limits the set to the capabilities that a node allows: `all` is cut to `allowed`, a single name beyond
    /// it is refused. For a set that a person chose.
    ///
    /// # Errors
    /// When the set has a name beyond `allowed`; the error lists them.
    pub fn within(&self, allowed: &Self) -> Result<Self, CapabilityError> {
        let (members, beyond): (BTreeSet<_>, _) = self.iter().partition(|member| allowed.has(*member));
        if beyond.is_empty() || self.all {
            return Ok(Self { members, all: self.all });
        }
        let asked = Self { members: beyond, all: false };
        Err(CapabilityError::NotAllowed { asked, allowed: allowed.clone() })
    }

    /// Cuts the set to the capabilities that a node allows. For a set that an image chose, or for the
    /// default.
    ///
    /// # Errors
    /// When no capability is left.
    pub fn cut(&self, allowed: &Self) -> Result<Self, CapabilityError> {
        let members: BTreeSet<_> = self.iter().filter(|member| allowed.has(*member)).collect();
        if members.is_empty() {
            return Err(CapabilityError::NotAllowed { asked: self.clone(), allowed: allowed.clone() });
        }
        Ok(Self { members, all: self.all })
    }
}

impl Default for Capabilities {
    /// NVIDIA's own default, compute and utility.
    fn default() -> Self {
        Self { members: [Capability::Compute, Capability::Utility].into(), all: false }
    }
}

impl FromStr for Capabilities {
    type Err = CapabilityError;

    /// Parses a comma-separated list of names. `all` stands for all of them, and an empty list for the
    /// default.
    fn from_str(text: &str) -> Result<Self, CapabilityError> {
        let names: Vec<&str> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        let all = names.contains(&"all");
        let mut members = BTreeSet::new();
        for name in names.into_iter().filter(|name| *name != "all") {
            match NAMES.iter().find(|(known, _)| *known == name) {
                Some((_, capability)) => members.extend([*capability]),
                None if name == COMPAT32 && all => {}
                None if name == COMPAT32 => return Err(CapabilityError::Compat32),
                None => return Err(CapabilityError::Unknown(name.chars().take(64).collect())),
            }
        }
        Ok(match (all, members.is_empty()) {
            (true, _) => Self::all(),
            (false, true) => Self::default(),
            (false, false) => Self { members, all },
        })
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
            ("all", "compute,utility,video,graphics,display,ngx"),
            ("compat32,all", "compute,utility,video,graphics,display,ngx"),
        ] {
            assert_eq!(text.parse::<Capabilities>().unwrap().to_string(), want, "{text:?}");
        }
    }

    #[test]
    fn a_name_that_cannot_be_given_is_refused_with_its_reason() {
        for (text, part) in [
            ("compute,cuda", "\"cuda\""),
            ("Compute", "\"Compute\""),
            ("cuda,all", "\"cuda\""),
            ("compute,compat32", "32-bit"),
        ] {
            let error = text.parse::<Capabilities>().unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    #[test]
    fn what_nobody_chose_is_cut_to_what_the_node_gives() {
        for (asked, allowed, want) in [
            ("", "compute", Some("compute")),
            ("compute,utility,graphics", "compute,utility", Some("compute,utility")),
            ("all", "video", Some("video")),
            ("graphics", "compute,utility", None),
        ] {
            let cut = asked.parse::<Capabilities>().unwrap().cut(&allowed.parse().unwrap());
            let told = cut.map(|given| given.to_string());
            assert_eq!(told.as_deref().ok(), want, "{asked:?} of {allowed:?}");
        }
    }

    #[test]
    fn a_node_may_give_fewer_than_there_are() {
        let allowed: Capabilities = "compute,utility,video".parse().unwrap();
        for (asked, want) in [
            ("", Ok("compute,utility")),
            ("video", Ok("video")),
            ("all", Ok("compute,utility,video")),
            ("compute,graphics,display", Err("graphics,display")),
        ] {
            match (asked.parse::<Capabilities>().unwrap().within(&allowed), want) {
                (Ok(given), want) => assert_eq!(Ok(given.to_string().as_str()), want, "{asked:?}"),
                (Err(error), want) => {
                    let text = error.to_string();
                    assert!(want.is_err_and(|beyond| text.contains(beyond)), "{asked:?}: {text}");
                }
            }
        }
    }
}
