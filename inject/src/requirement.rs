//! What an image requires of the node: `NVIDIA_REQUIRE_*`, or `CUDA_VERSION` in images older than those.
//!
//! Each variable is a list of alternatives, separated by spaces. An alternative is a comma list of conditions
//! such as `cuda>=12.4` or `brand=tesla`. All variables must hold, and one alternative of each. NVIDIA's CUDA
//! images state in this way which drivers they run on. If nobody checks it, their programs fail later with an
//! error of CUDA's.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use gpushare_claims::{Container, shortened};
use gpushare_inventory::{Gpu, GpuTotals, Node};
use gpushare_quota::{Grant, Lease};

const PREFIX: &str = "NVIDIA_REQUIRE_";
const CUDA: &str = "NVIDIA_REQUIRE_CUDA";
const OFF: &str = "NVIDIA_DISABLE_REQUIRE";
const OLD: &str = "CUDA_VERSION";

/// Why an image cannot run on what it was granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    /// A requirement does not follow the grammar.
    #[error(
        "{key}={value:?} is no requirement as cuda>=12.4 or brand=tesla,driver>=535; correct the image, or set \
         NVIDIA_DISABLE_REQUIRE=1"
    )]
    Unreadable {
        /// The variable that states it, shortened.
        key: String,
        /// The value, shortened.
        value: String,
    },
    /// The image requires another driver or GPU.
    #[error("the image requires {requirement}, and this node has {offer}; {remedy}")]
    Unmet {
        /// Variable and value, shortened.
        requirement: String,
        /// What the node has.
        offer: String,
        /// What may help.
        remedy: &'static str,
    },
}

/// What a node offers to one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The driver's version.
    pub driver: String,
    /// The highest CUDA version that the driver serves, as `12.2`; `None` when NVML did not tell.
    pub cuda: Option<String>,
    /// Brand and architecture (`tesla`, `8.0`) of each granted GPU.
    pub gpus: Vec<(String, String)>,
    /// Whether the image may use its own newer libcuda (forward compatibility). In a share it may not.
    pub forward_compatible: bool,
}

impl Offer {
    /// What `node` offers the container of `lease`.
    pub fn of(node: &Node, lease: &Lease) -> Self {
        let totals = node.totals.as_ref();
        let cuda = totals.map(|totals| totals.cuda_version.clone()).filter(|cuda| !cuda.is_empty());
        let known = |grant: &Grant| -> Option<&GpuTotals> {
            let card = node.gpus.iter().find(|gpu| gpu.uuid == grant.gpu).map_or(grant.gpu, Gpu::card);
            let uuid = card.to_string();
            totals?.gpus.iter().find(|gpu| gpu.uuid == uuid)
        };
        let gpus = lease.grants.iter().map(|grant| match known(grant) {
            Some(gpu) => (gpu.brand.clone(), gpu.architecture.clone()),
            None => ("unknown".to_owned(), String::new()),
        });
        Self {
            driver: node.driver.version.clone(),
            cuda,
            gpus: gpus.collect(),
            forward_compatible: lease.enforcement.terms().forward_compatible,
        }
    }
}

impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver {}", self.driver)?;
        if let Some(cuda) = &self.cuda {
            write!(f, " with CUDA {cuda}")?;
        }
        for (brand, arch) in &self.gpus {
            write!(f, ", GPU of brand {brand} and architecture {arch}")?;
        }
        Ok(())
    }
}

/// All requirements of one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requirements(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    text: String,
    alternatives: Vec<Vec<Condition>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Condition {
    property: Property,
    relation: Relation,
    value: String,
}

/// What may be found, in comparison with what is wanted.
type Relation = &'static [Ordering];

const AT_LEAST: Relation = &[Ordering::Greater, Ordering::Equal];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Property {
    Cuda,
    Driver,
    Arch,
    Brand,
}

const PROPERTIES: [(&str, Property); 4] = [
    ("cuda", Property::Cuda),
    ("driver", Property::Driver),
    ("arch", Property::Arch),
    ("brand", Property::Brand),
];

/// Signs of two characters come first, because the others are their beginnings.
const RELATIONS: [(&str, Relation); 6] = [
    (">=", AT_LEAST),
    ("<=", &[Ordering::Less, Ordering::Equal]),
    ("!=", &[Ordering::Less, Ordering::Greater]),
    ("<", &[Ordering::Less]),
    (">", &[Ordering::Greater]),
    ("=", &[Ordering::Equal]),
];

impl Requirements {
    /// Reads the requirements from the environment of `container`. There are none if `NVIDIA_DISABLE_REQUIRE`
    /// is true.
    ///
    /// # Errors
    /// When a requirement cannot be read.
    pub fn of(container: &Container) -> Result<Self, RequirementError> {
        let of_ours = |key: &str| key.starts_with(PREFIX) || [OFF, OLD].contains(&key);
        // The last value of each name counts.
        let mut last: BTreeMap<&str, &str> = container.env().filter(|(key, _)| of_ours(key)).collect();
        if last.remove(OFF).is_some_and(|value| matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True")) {
            return Ok(Self::default());
        }
        let old = last.remove(OLD).and_then(oldest_cuda).filter(|_| !last.contains_key(CUDA));
        let stated = last.into_iter().map(|(key, text)| (key, text.to_owned()));
        let all = stated.chain(old.map(|text| (OLD, text))).filter(|(_, text)| !text.trim().is_empty());
        all.map(|(key, text)| Requirement::parse(key, text)).collect::<Result<_, _>>().map(Self)
    }

    /// Checks that the node's offer meets every requirement.
    ///
    /// # Errors
    /// Names the first requirement that is not met.
    pub fn check(&self, offer: &Offer) -> Result<(), RequirementError> {
        let Some(unmet) = self.0.iter().find(|requirement| !requirement.is_met(offer)) else { return Ok(()) };
        let newer = Offer { forward_compatible: true, ..offer.clone() };
        let remedy = match unmet.is_met(&newer) {
            true => {
                "no share has forward compatibility: update the driver, or ask for GPUSHARE_MODE=exclusive"
            }
            false => "update the driver, take an image that fits, or set NVIDIA_DISABLE_REQUIRE=1",
        };
        let requirement = format!("{}={:?}", shortened(&unmet.key), shortened(&unmet.text));
        Err(RequirementError::Unmet { requirement, offer: offer.to_string(), remedy })
    }
}

/// `12.4.1` becomes the requirement `cuda>=12.4`; anything else becomes none.
fn oldest_cuda(version: &str) -> Option<String> {
    let mut numbers = version.split('.');
    let (major, minor): (u32, u32) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    Some(format!("cuda>={major}.{minor}"))
}

impl Requirement {
    fn parse(key: &str, text: String) -> Result<Self, RequirementError> {
        let alternative = |text: &str| text.split(',').map(Condition::parse).collect::<Option<Vec<_>>>();
        let alternatives: Option<Vec<_>> = text.split_whitespace().map(alternative).collect();
        match alternatives {
            Some(alternatives) => Ok(Self { key: key.to_owned(), text, alternatives }),
            None => Err(RequirementError::Unreadable { key: shortened(key), value: shortened(&text) }),
        }
    }

    /// Whether one alternative holds. An alternative without a CUDA condition accepts an older driver because
    /// the image has a newer libcuda of its own. Where that libcuda cannot serve and a newer CUDA is wanted,
    /// such an alternative does not count.
    fn is_met(&self, offer: &Offer) -> bool {
        // Computed once for all alternatives: an image may write a hundred thousand.
        let needs_newer_cuda = !offer.forward_compatible && self.wants_newer_cuda(offer);
        self.alternatives.iter().any(|conditions| {
            let met = conditions.iter().all(|condition| condition.holds(offer));
            met && (!needs_newer_cuda || conditions.iter().any(Condition::is_of_cuda))
        })
    }

    /// Whether an alternative wants a newer major version of CUDA. Within one major version CUDA needs no
    /// newer libcuda.
    fn wants_newer_cuda(&self, offer: &Offer) -> bool {
        let Some(cuda) = offer.cuda.as_deref() else { return false };
        let major = |text: &str| version(text).first().copied();
        let driver = major(cuda);
        let is_newer = |wanted: &Condition| wanted.relation == AT_LEAST && major(&wanted.value) > driver;
        self.alternatives.iter().flatten().any(|wanted| wanted.is_of_cuda() && is_newer(wanted))
    }
}

impl Condition {
    fn parse(text: &str) -> Option<Self> {
        let (name, property) = PROPERTIES.iter().find(|(name, _)| text.starts_with(name))?;
        let rest = text.strip_prefix(name)?;
        let (sign, relation) = RELATIONS.iter().find(|(sign, _)| rest.starts_with(sign))?;
        let value = rest.strip_prefix(sign)?;
        let fits = match property {
            Property::Brand => matches!(*sign, "=" | "!="),
            _ => value.split('.').all(|part| part.parse::<u32>().is_ok()),
        };
        let condition = Self { property: *property, relation: *relation, value: value.to_owned() };
        Some(condition).filter(|_| fits && !value.is_empty())
    }

    fn is_of_cuda(&self) -> bool {
        self.property == Property::Cuda
    }

    /// Whether the condition holds for every granted GPU. What NVML did not tell is not held against the
    /// node.
    fn holds(&self, offer: &Offer) -> bool {
        match self.property {
            Property::Cuda => offer.cuda.as_deref().is_none_or(|cuda| self.relates(cuda)),
            Property::Driver => self.relates(&offer.driver),
            Property::Arch => offer.gpus.iter().all(|(_, arch)| arch.is_empty() || self.relates(arch)),
            Property::Brand => {
                offer.gpus.iter().all(|(brand, _)| self.relation.contains(&brand.cmp(&self.value)))
            }
        }
    }

    fn relates(&self, found: &str) -> bool {
        // 12 equals 12.0, and 470 is less than 470.1.
        let (mut found, mut wanted) = (version(found), version(&self.value));
        let length = found.len().max(wanted.len());
        found.resize(length, 0);
        wanted.resize(length, 0);
        self.relation.contains(&found.cmp(&wanted))
    }
}

fn version(text: &str) -> Vec<u32> {
    text.split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn requirements(env: &[&str]) -> Result<Requirements, RequirementError> {
        let env = env.iter().map(|entry| (*entry).to_owned()).collect();
        Requirements::of(&Container::new(BTreeMap::new(), env))
    }

    fn offer(forward_compatible: bool) -> Offer {
        let gpus = vec![("tesla".to_owned(), "8.0".to_owned())];
        Offer { driver: "535.309.01".into(), cuda: Some("12.2".into()), gpus, forward_compatible }
    }

    #[test]
    fn a_requirement_holds_when_one_of_its_alternatives_does() {
        for (env, want) in [
            (&[][..], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12.2"], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12"], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda<=12"], false),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12.10"], false),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=535,driver<536"], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=geforce,driver>=535,driver<536"], false),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=470,driver<471"], false),
            (&["NVIDIA_REQUIRE_A=driver>535.309.0", "NVIDIA_REQUIRE_B=arch<8"], false),
            (&["NVIDIA_REQUIRE_A=driver>535.309.0", "NVIDIA_REQUIRE_B=arch=8,brand!=geforce"], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=13.0", "NVIDIA_DISABLE_REQUIRE=true"], true),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=13.0", "NVIDIA_DISABLE_REQUIRE=0"], false),
            (&["NVIDIA_REQUIRE_CUDA=cuda>=13.0", "NVIDIA_REQUIRE_CUDA=cuda>=11.0"], true),
            (&["NVIDIA_REQUIRE_CUDA="], true),
            (&["CUDA_VERSION=12.4.1"], false),
            (&["CUDA_VERSION=12.2.0"], true),
            (&["CUDA_VERSION=unknown"], true),
            (&["CUDA_VERSION=12.4.1", "NVIDIA_REQUIRE_CUDA=cuda>=11"], true),
        ] {
            assert_eq!(requirements(env).unwrap().check(&offer(true)).is_ok(), want, "{env:?}");
        }
    }

    #[test]
    fn a_share_needs_a_driver_of_the_images_major_version() {
        for (text, share, whole) in [
            ("cuda>=12.4 brand=tesla,driver>=535,driver<536", true, true),
            ("cuda>=13.0 brand=tesla,driver>=535,driver<536", false, true),
            ("cuda>=13.0 brand=tesla,driver>=580", false, false),
            ("driver>=535", true, true),
        ] {
            let requirements = requirements(&[&format!("NVIDIA_REQUIRE_CUDA={text}")]).unwrap();
            assert_eq!(requirements.check(&offer(false)).is_ok(), share, "a share with {text}");
            assert_eq!(requirements.check(&offer(true)).is_ok(), whole, "a whole card with {text}");
        }
        let text = "NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=tesla,driver>=535,driver<536";
        let error = requirements(&[text]).unwrap().check(&offer(false)).unwrap_err().to_string();
        for part in ["cuda>=13.0", "535.309.01", "CUDA 12.2", "tesla", "forward compatibility"] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }

    #[test]
    fn a_hundred_thousand_requirements_are_read_in_no_time() {
        let env = (0..100_000).map(|number| format!("NVIDIA_REQUIRE_X{number}=cuda>=11")).collect();
        let start = Instant::now();
        let requirements = Requirements::of(&Container::new(BTreeMap::new(), env)).unwrap();
        assert!(requirements.check(&offer(false)).is_ok());
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }

    #[test]
    fn a_hundred_thousand_alternatives_are_weighed_in_no_time() {
        let text = format!("NVIDIA_REQUIRE_CUDA={}cuda>=99", "driver>0 ".repeat(100_000));
        let start = Instant::now();
        let requirements = requirements(&[&text]).unwrap();
        assert!(requirements.check(&offer(false)).is_err());
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }

    #[test]
    fn what_nvml_did_not_tell_is_no_obstacle() {
        let offer = Offer { cuda: None, gpus: vec![("unknown".into(), String::new())], ..offer(false) };
        let told = requirements(&["NVIDIA_REQUIRE_CUDA=cuda>=13.0,arch>=9.0"]).unwrap();
        assert!(told.check(&offer).is_ok());
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_way_out() {
        for text in
            ["cuda", "cuda>=", "cuda>=x", "cuda>=12.", "brand>tesla", "os=linux", "cuda>=12,", "cuda=>12"]
        {
            let error = requirements(&[&format!("NVIDIA_REQUIRE_OWN={text}")]).unwrap_err().to_string();
            assert!(
                error.contains("NVIDIA_REQUIRE_OWN") && error.contains("NVIDIA_DISABLE_REQUIRE"),
                "{text}: {error}"
            );
        }
    }
}
