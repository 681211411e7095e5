//! Containers as commands name them: by their ids, the beginning of one, or their names in a cluster.

use anyhow::{Context, Result, bail};
use gpushare_quota::{Lease, LeaseKey, Member, PodContainer, ResourceClaim, Store};

/// The living lease of the container that `asked` names, with that container as [`Lease::member`]: by its id
/// or the beginning of one, or in a cluster by `NAMESPACE/POD/CONTAINER` or `NAMESPACE/POD`; a resource claim
/// by its UID or `NAMESPACE/CLAIM`. Fails if none fits, or several do.
pub fn find(store: &Store, asked: &str, root: Option<&str>) -> Result<Lease> {
    let leases = store.leases()?;
    let claims = store.claims()?;
    let of_claim = |member: &Member| {
        let its = claims.iter().find(|(claim, _)| is_claim(member, claim));
        its.is_some_and(|(claim, _)| claim.name.to_string() == asked)
    };
    let is_named = |member: &Member| {
        let of_pod = |name: &PodContainer| {
            name.to_string() == asked || format!("{}/{}", name.namespace, name.pod) == asked
        };
        member.name.as_ref().is_some_and(of_pod) || of_claim(member)
    };
    let fits = |member: &Member| {
        let by_name = member.key.container.starts_with(asked) || is_named(member);
        !asked.is_empty() && by_name && root.is_none_or(|root| member.key.root == root)
    };
    let all = leases.iter().flat_map(|lease| lease.members().map(move |member| (lease, member)));
    let mut found: Vec<(&Lease, &Member)> = all.filter(|(_, member)| fits(member)).collect();
    if found.iter().any(|(_, member)| member.key.container == asked) {
        found.retain(|(_, member)| member.key.container == asked);
    }
    match found[..] {
        [(lease, member)] => {
            let found = lease.clone().asked_by(|key| *key == member.key);
            found.with_context(|| format!("no container {asked:?} holds a share"))
        }
        [] => bail!(
            "no container {asked:?} holds a share; give its id or the beginning of it, or in a cluster \
             NAMESPACE/POD/CONTAINER, as `gpushare ps` shows it, and no name of docker's"
        ),
        _ => {
            let fitting = found.iter().map(|(_, member)| named(member)).collect::<Vec<_>>().join(", ");
            bail!(
                "several containers fit {asked:?} ({fitting}); give more of it, or --root (`gpushare ps --json`)"
            )
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

/// A container as people read it: by its name in a cluster, or by its shortened id.
pub fn named(member: &Member) -> String {
    member.name.as_ref().map_or_else(|| short(&member.key.container), ToString::to_string)
}

/// Ids as people read them: shortened, with commas between them.
pub fn listed<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    ids.into_iter().map(short).collect::<Vec<_>>().join(", ")
}

/// Shortens an id: engines' ids have 64 digits, of which people use the first 12.
pub fn short(id: &str) -> String {
    if id.len() == 64 { id.chars().take(12).collect() } else { id.to_owned() }
}
