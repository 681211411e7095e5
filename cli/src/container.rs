//! Containers as commands name them: by the names that their users gave them, by their ids, or by the
//! beginning of an id.

use anyhow::{Context, Result};
use gpushare_quota::{Called, Lease, LeaseKey, Member, PodContainer, ResourceClaim, Store};
use schemars::JsonSchema;
use serde::Serialize;

use crate::failure::Failure;

/// What a cluster calls a container, in JSON.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PodName {
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The container's name in the pod.
    pub container: String,
}

impl PodName {
    pub fn of(name: &PodContainer) -> Self {
        Self {
            namespace: name.namespace.clone(),
            name: name.pod.clone(),
            uid: name.uid.clone(),
            container: name.container.clone(),
        }
    }
}

/// The living lease of the container that `asked` names, with that container as [`Lease::member`]: by its
/// id, by its name, or by the beginning of its id; in a cluster by `NAMESPACE/POD/CONTAINER`, `NAMESPACE/POD`
/// or the pod's name; a resource claim by its UID or `NAMESPACE/CLAIM`. A whole id counts before all else.
/// Fails if none fits, or several do: a container may be named as the beginning of another one's id.
pub fn find(store: &Store, asked: &str, root: Option<&str>) -> Result<Lease> {
    let leases = store.leases()?;
    let claims = store.claims()?;
    let of_claim = |member: &Member| {
        let its = claims.iter().find(|(claim, _)| is_claim(member, claim));
        its.is_some_and(|(claim, _)| claim.name.to_string() == asked)
    };
    let is_named = |member: &Member| {
        let of_pod = |name: &PodContainer| {
            name.to_string() == asked
                || format!("{}/{}", name.namespace, name.pod) == asked
                || name.pod == asked
        };
        let is_called = member.called.name.as_deref() == Some(asked);
        member.name.as_ref().is_some_and(of_pod) || is_called || of_claim(member)
    };
    let is_below = |member: &Member| root.is_none_or(|root| member.key.root == root);
    let all = || {
        let all = leases.iter().flat_map(|lease| lease.members().map(move |member| (lease, member)));
        all.filter(|(_, member)| is_below(member) && !asked.is_empty())
    };
    let by_id = all().filter(|(_, member)| member.key.container == asked);
    let mut found: Vec<(&Lease, &Member)> = by_id.collect();
    if found.is_empty() {
        let fits = |member: &Member| is_named(member) || member.key.container.starts_with(asked);
        found = all().filter(|(_, member)| fits(member)).collect();
    }
    match found[..] {
        [(lease, member)] => {
            let found = lease.clone().asked_by(|key| *key == member.key);
            found.with_context(|| format!("no container {asked:?} holds a share"))
        }
        [] => Err(Failure::not_found(format!(
            "no container {asked:?} holds a share; give its name, its id or the beginning of that, or in a cluster \
             NAMESPACE/POD/CONTAINER, as `gpushare ps` shows it"
        ))
        .into()),
        _ => {
            let fitting = |(_, member): &(&Lease, &Member)| match named(member) {
                name if name == member.key.container => name,
                name => format!("{name} ({})", short(&member.key.container)),
            };
            let fitting = found.iter().map(fitting).collect::<Vec<_>>().join(", ");
            Err(Failure::not_found(format!(
                "several containers fit {asked:?}: {fitting}; give the id, or --root (`gpushare ps --json`)"
            ))
            .into())
        }
    }
}

/// Whether the member is this resource claim, and no container of it.
pub fn is_claim(member: &Member, claim: &ResourceClaim) -> bool {
    member.key.root == LeaseKey::CLAIM && member.key.container == claim.name.uid
}

/// The ids of all containers that hold a lease.
pub fn ids(lease: &Lease) -> Vec<&str> {
    lease.members().map(|member| member.key.container.as_str()).collect()
}

/// All containers that hold a lease, as people read them.
pub fn containers(lease: &Lease) -> String {
    lease.members().map(named).collect::<Vec<_>>().join(", ")
}

/// A container as people read it: by its name, or by its shortened id where nobody gave it one.
pub fn named(member: &Member) -> String {
    member.title()
}

/// The same of a container that may have ended.
pub fn name(pod: Option<&PodContainer>, called: &Called, id: &str) -> String {
    match (pod, &called.name) {
        (Some(pod), _) => pod.to_string(),
        (None, Some(name)) => name.clone(),
        (None, None) => short(id),
    }
}

/// Ids as people read them: shortened, with commas between them.
pub fn listed<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    ids.into_iter().map(short).collect::<Vec<_>>().join(", ")
}

/// Shortens an id: engines' ids have 64 digits, of which people use the first 12.
pub fn short(id: &str) -> String {
    if id.len() == 64 { id.chars().take(12).collect() } else { id.to_owned() }
}
