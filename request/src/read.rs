//! Builds a bundle's request: collects the claims of every source and merges them.

use std::collections::BTreeMap;

use gpushare_inventory::{Capabilities, CapabilityError, Gpu};

use crate::dialect::Speech;
use crate::dialects::{self, Spoken};
use crate::sources::names::DEVICES;
use crate::sources::{allocated, cdi, handed, list, own, qualified, reserved};
use crate::switches;
use gpushare_claims::{
    Allocated, Amount, Claim, Container, Engine, IndexMeaning, Interceptor, InterceptorPolicy, Kept, Library,
    Mode, NodeGpus, Policy, Rank, Request, RequestError, UNPROVED, Words, Writer, conflict, merge, shortened,
};

const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// Whether `container` asks for anything. A container that does not, and a pod's sandbox, must reach the
/// low-level runtime unchanged. Reads only the bundle, because most containers ask for nothing.
pub fn is_request(container: &Container, policy: &Policy) -> bool {
    if container.is_sandbox() {
        return false;
    }
    let words = own::untold(Words::new(container, policy));
    asks(&words, &dialects::spoken(&words))
}

/// Whether a variable with this name may ask for a GPU, or change or turn off a limit, in any system's words.
#[must_use]
pub fn is_request_variable(name: &str) -> bool {
    name == DEVICES || own::is_variable(name) || name.starts_with(cdi::VARIABLE) || dialects::own(name)
}

/// Reads the request of `container` on a node with these GPUs; `None` if [`is_request`] returns false.
///
/// # Errors
/// If the request is malformed or contradictory, names something that the node does not have, or comes only
/// by channels that may not grant under the policy.
pub fn read(container: &Container, policy: &Policy, gpus: &[Gpu]) -> Result<Option<Request>, RequestError> {
    let policy = &*policy.within(container);
    let words = own::untold(Words::new(container, policy));
    let spoken = dialects::spoken(&words);
    if container.is_sandbox() || !asks(&words, &spoken) {
        return Ok(None);
    }
    if let [first, second] = container.engines()[..] {
        return Err(conflict(first, second));
    }
    refuse_unread(&words, &spoken)?;
    let denial = list::denial(&listing(&words, &spoken));
    if let Some(denial) = denial.filter(|_| asking(&spoken).next().is_some()) {
        let remedy = "asks for no GPU beside a request for a share: name its GPUs, or remove the request";
        return Err(denial.wrong(remedy));
    }
    let node = NodeGpus(gpus);
    let mut claims = claims(&words, &spoken, node)?;
    if let (Some(denial), Some(claim)) = (denial, claims.iter().find(|claim| claim.asks)) {
        return Err(conflict(&claim.by, denial));
    }
    refuse_without_allocation(&words, &claims)?;
    let mut notes = switches::apply(&words, &mut claims);
    notes.extend(near_misses(&words, &spoken));
    let mut request = merge(&claims, policy, node)?;
    reserved::join(&mut request, container)?;
    request.capabilities = capabilities(&words, &claims)?;
    request.interceptor = interceptor(&words, &spoken, &claims, &request, node);
    if matches!(request.interceptor, Some((_, ruled)) if ruled != policy.interceptor) {
        notes.push(UNPROVED.to_owned());
    }
    request.dialects = asking(&spoken).map(|spoken| spoken.dialect.name).collect();
    request.told = own::told(&words);
    request.variables = standing(&words, &spoken, &claims);
    request.handed = container.handed().into_iter().map(|(_, minor)| minor).collect();
    request.handed_capabilities = container.handed_capabilities();
    if request.handed.is_empty() {
        request.handed = container.specified_minors().collect();
    }
    request.moves_limits = moves_limits(&words, &spoken, &request, node);
    notes.append(&mut request.notes);
    Ok(Some(Request { notes, ..request }))
}

fn asking<'s, 'a>(spoken: &'s [Spoken<'a>]) -> impl Iterator<Item = &'s Spoken<'a>> {
    spoken.iter().filter(|spoken| spoken.speech == Speech::Asks)
}

/// Whether any source asks. Images set a list of all GPUs. It is not a request if a more trusted word says
/// that another container of the pod has the share.
fn asks(words: &Words, spoken: &[Spoken]) -> bool {
    let by_list = || {
        let spares = spoken.iter().any(|spoken| spoken.speech == Speech::Spares);
        list::asks(&listing(words, spoken)) && (!spares || list::names_particular_gpus(words))
    };
    asking(spoken).next().is_some() || asks_otherwise(words) || own::unread(words).is_some() || by_list()
}

fn asks_otherwise(words: &Words) -> bool {
    let by_name = cdi::is_named(words) || reserved::is_named(words) || qualified::asks(words);
    own::asks(words) || by_name || handed::is_handed(words)
}

/// Refuses a container that asks only through gpushare's variables on a node that does not read them. It must
/// not start without its GPU.
fn refuse_unread(words: &Words, spoken: &[Spoken]) -> Result<(), RequestError> {
    match own::unread(words) {
        Some(_) if asking(spoken).next().is_none() && !asks_otherwise(words) => {
            Err(RequestError::UnreadVariables)
        }
        _ => Ok(()),
    }
}

/// Refuses variables that are the only request for a GPU if kubelet allocated none (strict nodes).
fn refuse_without_allocation(words: &Words, claims: &[Claim]) -> Result<(), RequestError> {
    let is_empty = words.container.allocated().is_some_and(Allocated::is_empty);
    let mut asking = claims.iter().filter(|claim| claim.asks);
    let Some(first) = asking.clone().next() else { return Ok(()) };
    match words.policy.strict && is_empty && asking.all(|claim| claim.rank == Rank::Environment) {
        true => Err(RequestError::NotAllocated { key: first.by.clone() }),
        false => Ok(()),
    }
}

/// The words to search for the list of GPUs. Keys of a dialect that owns the list are hidden.
fn listing<'a>(words: &Words<'a>, spoken: &[Spoken]) -> Words<'a> {
    let over = asking(spoken).filter(|spoken| spoken.dialect.over.contains(&dialects::PLAIN_LIST));
    over.fold(words.clone(), |words, spoken| words.without(spoken.dialect.owns))
}

/// Ties an amount that a plugin wrote to one GPU, unless a word that is at least as trusted names GPUs or
/// their number. A list from the pod therefore cannot multiply the amount. A whole GPU counts as an amount.
fn bind_to_one(claims: &mut [Claim]) {
    let mut granted = claims.iter().filter(|claim| claim.rank >= Rank::Granted);
    if granted.any(|claim| claim.gpus.is_some() || claim.count.is_some()) {
        return;
    }
    let states = |claim: &Claim| claim.each != Amount::default() || claim.mode.is_some();
    let amount = |claim: &&mut Claim| claim.rank >= Rank::Granted && claim.asks && states(claim);
    if let Some(claim) = claims.iter_mut().find(amount) {
        claim.count = Some(1);
    }
}

/// The claims of every source.
fn claims<'a>(
    words: &Words<'a>,
    spoken: &[Spoken<'a>],
    node: NodeGpus<'a>,
) -> Result<Vec<Claim>, RequestError> {
    let mut claims = Vec::new();
    for spoken in spoken {
        let bounds = spoken.speech != Speech::Asks;
        let said = (spoken.dialect.read)(&spoken.words, node)?;
        let is_mps = words.policy.dialects.mps && (spoken.dialect.is_mps)(&spoken.words);
        let mode = |claim: &Claim| claim.mode.or((is_mps && claim.asks).then_some(Mode::Mps));
        let said = said.into_iter().map(|claim| Claim { mode: mode(&claim), ..claim });
        claims.extend(said.map(|claim| if bounds { claim.bounding() } else { claim }));
    }
    claims.extend(own::claims(words, node)?);
    claims.extend(qualified::claims(words, node)?);
    claims.extend(handed::claims(words, node)?);
    claims.extend(reserved::claims(words, node)?);
    claims.extend(allocated::claims(words, node)?);
    bind_to_one(&mut claims);
    let words = listing(words, spoken);
    let is_named = claims.iter().any(|claim| claim.gpus.is_some() && claim.rank > Rank::Environment);
    for (meaning, by) in meanings(spoken) {
        let lists = list::claims(&words, node, meaning, is_named)?.into_iter();
        claims.extend(lists.map(|claim| Claim { by: format!("{}{by}", claim.by), ..claim }));
    }
    Ok(claims)
}

/// The meanings of numbers in the list of GPUs, according to the dialects that ask. If they differ, each
/// meaning makes its own claim, and the text is added to the word in messages.
fn meanings(spoken: &[Spoken]) -> Vec<(IndexMeaning, String)> {
    let mut meanings: Vec<(IndexMeaning, String)> = Vec::new();
    for spoken in asking(spoken) {
        let meaning = (spoken.dialect.numbers)(&spoken.words);
        if !meanings.iter().any(|(known, _)| *known == meaning) {
            meanings.push((meaning, format!(" as {} has it", spoken.dialect.name)));
        }
    }
    match meanings.as_mut_slice() {
        [] => vec![(IndexMeaning::Pci, String::new())],
        [(_, by)] => {
            by.clear();
            meanings
        }
        _ => meanings,
    }
}

/// Notes about words that look like a request but are not. Skips keys that belong to an asking dialect.
fn near_misses(words: &Words, spoken: &[Spoken]) -> Vec<String> {
    let is_owned = |key: &str| asking(spoken).any(|spoken| (spoken.dialect.owns)(key));
    let mut notes = Vec::new();
    for (key, near_miss) in dialects::near_misses().filter(|(key, _)| !is_owned(key)) {
        let found = words.annotation(key).into_iter().chain(words.named(key)).take(1);
        notes.extend(found.map(|word| format!("{word} {near_miss}")));
    }
    notes
}

/// The driver capabilities: those of gpushare's own key, else those of NVIDIA's variable if variables may
/// grant.
fn capabilities(words: &Words, claims: &[Claim]) -> Result<Capabilities, RequestError> {
    let policy = words.policy;
    let within = |all: &Capabilities, part: &Capabilities| part.iter().all(|capability| all.has(capability));
    let stated = claims.iter().filter_map(|claim| Some((claim, claim.capabilities.as_ref()?)));
    let mut own: Vec<(&Claim, &Capabilities)> = stated.collect();
    own.sort_by_key(|(claim, _)| std::cmp::Reverse(claim.rank));
    let default = Capabilities::default();
    let mut chosen: Option<&Capabilities> = None;
    for (claim, wanted) in own {
        let bound = chosen.or((policy.authority(claim.rank).is_none()).then_some(&default));
        if bound.is_some_and(|bound| !within(bound, wanted)) {
            return Err(RequestError::AboveDefault { key: claim.by.clone() });
        }
        chosen = Some(wanted);
    }
    let wanted = match chosen {
        Some(wanted) => wanted.clone(),
        None if policy.authority(Rank::Environment).is_some() => nvidia_capabilities(words)?,
        None => default,
    };
    match &policy.capabilities {
        Some(allowed) if chosen.is_some() => Ok(wanted.within(allowed)?),
        Some(allowed) => Ok(wanted.cut(allowed)?),
        None => Ok(wanted),
    }
}

/// The capabilities in NVIDIA's variable, or the default. Outside CRI the last entry counts, as with the list
/// of GPUs.
fn nvidia_capabilities(words: &Words) -> Result<Capabilities, RequestError> {
    let mut all = words.named(CAPABILITIES);
    let Some(last) = all.next_back() else { return Ok(Capabilities::default()) };
    let other = all.find(|word| word.value != last.value);
    if let Some(other) = other.filter(|_| words.container.engine() == Engine::Cri) {
        return Err(conflict(other, last));
    }
    last.value.parse().map_err(|source: CapabilityError| RequestError::Malformed {
        key: CAPABILITIES.to_owned(),
        value: shortened(last.value),
        source: source.into(),
    })
}

/// Another system's library in the bundle, and how to treat it. It keeps the limit only if the owner's mounts
/// and a single dialect in the bundle prove its owner, and variables state all that was granted. A plain list
/// of GPUs does not prove an owner: the same mounts may be the user's own.
fn interceptor(
    words: &Words,
    spoken: &[Spoken],
    claims: &[Claim],
    request: &Request,
    node: NodeGpus,
) -> Option<(Interceptor, InterceptorPolicy)> {
    let dialects: Vec<_> = asking(spoken).map(|spoken| spoken.dialect).collect();
    let first = dialects.first()?;
    let known: Vec<Library> = dialects::libraries().collect();
    let found = Interceptor::of(words.container, &known)?;
    let holds = first
        .library
        .and_then(|library| library.owner)
        .is_some_and(|owner| dialects.len() == 1 && owner.holds(words.container));
    let stays = words.policy.interceptor == InterceptorPolicy::StandDown && holds;
    let ruled = match stays && is_told(words, claims, request, node) {
        true => InterceptorPolicy::StandDown,
        false => InterceptorPolicy::Replace,
    };
    Some((found, ruled))
}

/// Whether the variables that other systems' libraries read state the whole request by themselves, and no
/// switch turns such a library off.
fn is_told(words: &Words, claims: &[Claim], request: &Request, node: NodeGpus) -> bool {
    if words.container.writer() == Writer::Podman || switches::any_is_on(words) {
        return false;
    }
    let told: Vec<Claim> =
        claims.iter().filter(|claim| claim.variable.is_some() && claim.is_foreign()).cloned().collect();
    let is_ours = claims.iter().any(|claim| !claim.is_foreign());
    let same = |told: Request| {
        let amounts = |request: &Request| {
            (request.memory, request.cores, request.particular.clone(), request.devices.clone(), request.mode)
        };
        let held = |request: &Request| (request.compute_policy, request.burst, request.priority);
        amounts(&told) == amounts(request) && held(&told) == held(request)
    };
    !is_ours && merge(&told, words.policy, node).is_ok_and(same)
}

/// The dialects' variables as the container gets them, each once. A variable that states an amount gets the
/// smallest value among its words: those of its own name, and those that differ only by a position at the end
/// and cover its GPUs.
fn standing(words: &Words, spoken: &[Spoken], claims: &[Claim]) -> Vec<(String, String)> {
    let owned = |key: &str| asking(spoken).any(|spoken| (spoken.dialect.owns)(key));
    let mut standing: BTreeMap<&str, &str> = words.container.env().filter(|(key, _)| owned(key)).collect();
    let stated: Vec<(&Claim, &(String, String))> = claims
        .iter()
        .filter(|claim| claim.states_amounts())
        .filter_map(|claim| Some((claim, claim.variable.as_ref()?)))
        .collect();
    for (key, value) in &mut standing {
        let is_its = |(_, (name, _)): &&(&Claim, &(String, String))| name == key;
        let Some((own, _)) = stated.iter().find(is_its) else { continue };
        let family = stated
            .iter()
            .filter(|(claim, (name, _))| stem(name) == stem(key) && (name == key || claim.covers(own)));
        if let Some((_, (_, least))) = family.min_by_key(|(claim, _)| claim.size()) {
            *value = least;
        }
    }
    standing.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// The name of a variable without a position (`_N`) at the end.
fn stem(name: &str) -> &str {
    name.rsplit_once('_')
        .filter(|(_, rest)| rest.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(name, |(stem, _)| stem)
}

/// Whether limits that count by position would apply to another GPU if the bundle runs again with the granted
/// GPUs as its list.
fn moves_limits(words: &Words, spoken: &[Spoken], request: &Request, node: NodeGpus) -> bool {
    let Kept::Granted(gpus) = request.kept() else { return false };
    let lists = list::lists(words);
    // One list names the folder of mounts, and a second list narrowed what was granted.
    let narrowed = lists.len() > 1 && lists.iter().any(|list| list::is_volumes(list.value));
    let by_position = asking(spoken).any(|spoken| spoken.dialect.by_position);
    narrowed || by_position && !list::is_in_order(words, node, &gpus)
}
