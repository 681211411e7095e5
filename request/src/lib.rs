//! What a container asks for: its bundle's annotations and environment in, a [`Request`] out.
//!
//! Pure: no file and no store is looked at, and of the node only the GPUs that the caller hands over. One file per dialect
//! ([`own`] is gpushare's, [`cdi`] the same by names of CDI devices, [`nvidia`] the plain NVIDIA variables, [`dialects`] those
//! of other systems); [`ask`] finds what a bundle speaks, and [`Asked::on`] makes one request of it. Nothing here falls back: a
//! malformed or contradictory request is an error that names the key, the value and the remedy.
#![forbid(unsafe_code)]

mod cards;
mod cdi;
mod ceiling;
mod cgpu;
mod channel;
mod claim;
mod container;
mod device_list;
mod dialects;
mod error;
mod grammar;
mod hints;
mod interceptor;
mod limit;
mod merge;
mod model;
mod mps;
mod nvidia;
mod own;
mod policy;
mod quantity;
mod reading;
mod requirement;
mod switches;
mod whole;

use channel::Trust;
use claim::Claim;
use gpushare_inventory::{Capabilities, Gpu, GpuUuid};

pub use cards::{IndexMeaning, SelectorError, find_gpu};
pub use cdi::{GPU_KIND, SHARE_KIND, ShareName, VARIABLE as CDI_VARIABLE};
pub use channel::KeyPatterns;
pub use container::{Container, Engine, ran_before};
pub use dialects::names as dialect_names;
pub use error::RequestError;
pub use grammar::{Cores, DeviceSelector, Devices, GrammarError, MemoryAsk, Mode, Priority};
pub use interceptor::{Interceptor, InterceptorPolicy};
pub use model::ModelFilter;
pub use nvidia::{GRANTED_LIST, Kept, kept_list};
pub use policy::{Ceilings, DialectSettings, NvidiaPolicy, Policy};
pub use requirement::{Offer, Requirements};
pub use switches::names as switch_names;

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

/// What one container asks for, dialect forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Memory on each GPU.
    pub memory: MemoryAsk,
    /// Compute on each GPU; `None` is no limit.
    pub cores: Option<Cores>,
    /// What differs from these two, by GPU.
    pub particular: Vec<(GpuUuid, Share)>,
    /// Which GPUs, or how many.
    pub devices: Devices,
    /// Which models will do.
    pub model: ModelFilter,
    /// How GPUs are given.
    pub mode: Mode,
    /// How the compute share is held.
    pub compute_policy: ComputePolicy,
    /// The most compute that [`ComputePolicy::Burst`] may use; `None` is all that is idle.
    pub burst: Option<Cores>,
    /// Parts of the driver.
    pub capabilities: Capabilities,
    /// 0 (low) to 9.
    pub priority: Priority,
    /// The other systems whose words these are, by the names of their dialects.
    pub dialects: Vec<&'static str>,
    /// Variables of theirs, each as it shall stand once in the container: with what was granted.
    pub variables: Vec<(String, String)>,
    /// Whether its GPUs are others than the list names, or in another order, beside limits that may count by position.
    pub moves_limits: bool,
    /// Another system's interception library in the bundle, and what becomes of it.
    pub interceptor: Option<(Interceptor, InterceptorPolicy)>,
    /// What was decided on the way that whoever asked may not expect, in words.
    pub notes: Vec<String>,
}

/// What a request wants of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Memory.
    pub memory: MemoryAsk,
    /// Compute; `None` is no limit.
    pub cores: Option<Cores>,
}

impl Request {
    /// This much memory on each of these GPUs, and everything else as it is when nobody says anything.
    pub fn new(devices: Devices, memory: MemoryAsk) -> Self {
        Self {
            memory,
            cores: None,
            particular: Vec::new(),
            devices,
            model: ModelFilter::default(),
            mode: Mode::Share,
            compute_policy: ComputePolicy::Fixed,
            burst: None,
            capabilities: Capabilities::default(),
            priority: Priority::default(),
            dialects: Vec::new(),
            variables: Vec::new(),
            moves_limits: false,
            interceptor: None,
            notes: Vec::new(),
        }
    }

    /// These GPUs whole, which nobody else gets a share of.
    pub fn whole(devices: Devices) -> Self {
        Self { mode: Mode::Exclusive, ..Self::new(devices, MemoryAsk::Percent(100)) }
    }

    /// What a bundle that is run again has for its list of GPUs.
    pub fn kept(&self) -> Kept {
        let Devices::These(list) = &self.devices else { return Kept::AsWritten };
        let uuid = |selector: &DeviceSelector| match selector {
            DeviceSelector::Uuid(uuid) => Some(*uuid),
            _ => None,
        };
        match list.iter().map(uuid).collect() {
            _ if self.moves_limits => Kept::Nothing,
            Some(gpus) => Kept::Granted(gpus),
            None => Kept::AsWritten,
        }
    }

    /// The most compute that may be used of a GPU, idle time included, where nothing particular is said of it.
    fn most_compute(&self) -> claim::Cap {
        match self.cores.filter(|_| self.mode == Mode::Share && self.compute_policy == ComputePolicy::Fixed) {
            Some(cores) => cores.into(),
            None => claim::Cap::Unlimited,
        }
    }

    /// What is wanted of this GPU.
    pub fn on(&self, gpu: GpuUuid) -> Share {
        let particular = self.particular.iter().find(|(other, _)| *other == gpu);
        particular.map_or(Share { memory: self.memory, cores: self.cores }, |(_, share)| *share)
    }
}

/// What a container asks for, before anybody looked at the node's GPUs.
#[derive(Debug)]
pub struct Asked<'a>(Inner<'a>);

/// The same on every node, but for what bounds it.
#[derive(Debug)]
struct OwnRequest {
    request: Request,
    /// Those of the channel that states memory.
    ceilings: Vec<ceiling::Ceiling>,
    /// The key that does; none where it is the node's default.
    stating: Option<String>,
}

#[derive(Debug)]
enum Inner<'a> {
    /// gpushare's own keys.
    Own(Box<OwnRequest>),
    /// Other systems' words, perhaps beside our own; without a dialect, a plain list of GPUs.
    Foreign { dialects: Vec<&'static dialects::Dialect>, container: &'a Container, policy: &'a Policy },
}

/// Finds what `container` asks for; `None` when it asks for nothing (or is a pod's sandbox), and its bundle must
/// reach the low-level runtime as it came.
///
/// # Errors
/// When the request is malformed, contradictory or asks by a channel that the policy does not let grant.
pub fn ask<'a>(container: &'a Container, policy: &'a Policy) -> Result<Option<Asked<'a>>, RequestError> {
    if container.is_sandbox() {
        return Ok(None);
    }
    let dialects = dialects::spoken(&mut reading::Reading::new(container, policy));
    let foreign = |dialects| Some(Asked(Inner::Foreign { dialects, container, policy }));
    if !dialects.is_empty() {
        return Ok(foreign(dialects));
    }
    let reading = reading::Reading::new(container, policy);
    if let Some(own) = by_own_keys(&reading)? {
        return Ok(Some(Asked(Inner::Own(Box::new(own)))));
    }
    let Some(carrier) = device_list::carrier(&reading) else { return Ok(None) };
    if policy.nvidia == NvidiaPolicy::Refuse {
        return Err(RequestError::NoShare);
    }
    // Nodes are there because the engine has acted on the rest already.
    if carrier == device_list::Carrier::List {
        whole::refuse_beside(nvidia::DEVICES, &reading)?;
    }
    Ok(foreign(Vec::new()))
}

impl Asked<'_> {
    /// The request on a node with these GPUs.
    ///
    /// # Errors
    /// As [`ask`], and when the request names what the node does not have.
    pub fn on(self, gpus: &[Gpu]) -> Result<Request, RequestError> {
        match self.0 {
            Inner::Own(own) => own.ceilings.iter().try_fold(own.request, |request, ceiling| {
                ceiling.hold(request, own.stating.as_deref(), cards::Cards(gpus))
            }),
            Inner::Foreign { dialects, container, policy } => {
                foreign(&dialects, container, policy, cards::Cards(gpus))
            }
        }
    }
}

/// [`ask`] and [`Asked::on`] in one.
///
/// # Errors
/// As both.
pub fn read(container: &Container, policy: &Policy, gpus: &[Gpu]) -> Result<Option<Request>, RequestError> {
    ask(container, policy)?.map(|asked| asked.on(gpus)).transpose()
}

/// The request by gpushare's own keys.
fn by_own_keys(reading: &reading::Reading) -> Result<Option<OwnRequest>, RequestError> {
    let Some(asked) = own::read(reading.container, reading.policy, false)? else { return Ok(None) };
    whole::refuse_beside(&asked.by, reading)?;
    let chosen = asked.chooses_capabilities();
    // podman passes what an image's author annotated as its caller's.
    let policy = reading.policy;
    let unchecked =
        policy.is_unchecked(asked.trust) && reading.container.writer() == container::Writer::Podman;
    let ceilings = policy.ceilings_of(asked.stating, unchecked).collect();
    let (by, stating) = (asked.by.clone(), asked.stated.clone());
    let request = asked.with_nvidia(nvidia::read(reading)?, policy)?;
    if unchecked {
        policy.refuse_unread(&by)?;
        policy.hold_compute(&by, request.most_compute())?;
    }
    let request = Request { notes: switches::ignored_all(reading), ..request };
    let request = allowed(request, chosen, policy)?;
    Ok(Some(OwnRequest { request, ceilings, stating }))
}

/// The request by other systems' words, or by a list of GPUs alone, and our own keys where there are some.
fn foreign(
    dialects: &[&'static dialects::Dialect],
    container: &Container,
    policy: &Policy,
    cards: cards::Cards,
) -> Result<Request, RequestError> {
    let mut reading = reading::Reading::new(container, policy);
    let mut claims = Vec::new();
    for dialect in dialects {
        claims.extend((dialect.read)(&reading, cards)?);
        reading.take(dialect.owns);
    }
    match claims.first() {
        Some(claim) => whole::refuse_beside(&claim.by, &reading)?,
        None if dialects.is_empty() => claims.push(nvidia::claim(&reading, cards)?),
        None => {}
    }
    hints::note(&reading);
    switches::apply(&reading, &mut claims);
    let asked = own::read(container, policy, !dialects.is_empty())?;
    let rank = claims.iter().map(|claim| claim.rank(policy)).max();
    let capped = claims.iter().any(Claim::caps_compute);
    if let Some(asked) = &asked {
        claims.extend(asked.claims(cards)?);
    }
    let naming = claims.iter().filter(|claim| claim.gpus.is_some()).map(|claim| claim.rank(policy)).max();
    let stands_down = policy.interceptor == InterceptorPolicy::StandDown && asked.is_none();
    let told = stands_down.then(|| claims.clone());
    let (mut request, notes) = merge::merge(claims, policy, cards)?;
    let alone = told.is_some_and(|claims| is_told(&request, claims, &reading, cards));
    let chosen = asked.as_ref().is_some_and(own::Asked::chooses_capabilities);
    request.variables = reading.standing();
    request.notes = reading.notes();
    request.notes.extend(notes);
    // Whoever may grant nothing adds no part of the driver.
    let capabilities = nvidia::capabilities(container)?.filter(|_| Trust::Environment.grants(policy));
    request.capabilities = capabilities.unwrap_or_default();
    if let Some(asked) = asked {
        let named = if let Devices::These(list) = &request.devices { list.len() } else { 0 };
        if asked.contradicts(named, policy.strict) {
            return Err(reading::conflict(&asked.by, format!("a list of {named} GPUs")));
        }
        // Of more GPUs than were counted who names them has a part in what is used of each.
        let by_list = named > asked.counted().unwrap_or(1)
            && naming.is_some_and(|(_, trust)| policy.is_unchecked(trust));
        if asked.lifts() && (by_list || policy.is_unchecked(asked.trust)) {
            policy.hold_compute(&asked.by, claim::Cap::Unlimited)?;
        }
        let outranked = rank > Some((asked.trust.grants(policy), asked.trust));
        asked.fill(&mut request, outranked, capped, policy.strict)?;
    }
    request.dialects = dialects.iter().map(|dialect| dialect.name).collect();
    // Beside a plain list the same mounts are the user's own.
    let interceptor = Interceptor::of(container).filter(|_| !dialects.is_empty());
    request.interceptor = interceptor.map(|found| {
        let ruled = Interceptor::ruled(policy.interceptor, container, &request.dialects, alone);
        if ruled != policy.interceptor {
            request.notes.push(interceptor::UNPROVED.to_owned());
        }
        (found, ruled)
    });
    if let Kept::Granted(gpus) = request.kept() {
        let again = reading::Reading::new(container, policy); // what it notes was noted before
        let by_position = dialects.iter().any(|dialect| dialect.by_position);
        // The mounts that a list names say nothing of another list beside it.
        let narrowed = device_list::is_in_mounts(&again) && device_list::lists(container).len() > 1;
        request.moves_limits = narrowed || by_position && !device_list::is_in_order(&again, cards, &gpus);
    }
    allowed(request, chosen, policy)
}

/// Whether variables alone, which other systems' libraries read, state all of the `request` that `claims` make together, and
/// no switch turns such a library off.
fn is_told(
    request: &Request,
    mut claims: Vec<Claim>,
    reading: &reading::Reading,
    cards: cards::Cards,
) -> bool {
    // podman's annotations have the trust of variables, and are none.
    if reading.container.writer() == container::Writer::Podman || switches::any_is_on(reading) {
        return false;
    }
    claims.retain(|claim| claim.trust == Trust::Environment);
    merge::merge(claims, reading.policy, cards).is_ok_and(|(told, _)| told == *request)
}

/// The request with the driver capabilities that this node gives; `chosen` is whether gpushare's own key names them.
fn allowed(mut request: Request, chosen: bool, policy: &Policy) -> Result<Request, RequestError> {
    if let Some(allowed) = &policy.capabilities {
        let asked = &request.capabilities;
        request.capabilities = if chosen { asked.within(allowed)? } else { asked.cut(allowed)? };
    }
    Ok(request)
}

#[cfg(test)]
mod tests;
