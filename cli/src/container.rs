//! Containers as commands name them: by their ids, or the beginning of one.

use anyhow::{Result, bail};
use gpushare_quota::{Lease, LeaseKey, Store};

/// The living lease of the container whose id is `id` or begins with it, with that container as
/// [`Lease::member`]. Fails if no container fits, or several do.
pub fn find(store: &Store, id: &str, root: Option<&str>) -> Result<Lease> {
    let fits = |key: &LeaseKey| {
        !id.is_empty() && key.container.starts_with(id) && root.is_none_or(|root| key.root == root)
    };
    let leases = store.leases()?;
    let all = leases.iter().flat_map(|lease| lease.members().map(move |member| (lease, &member.key)));
    let mut found: Vec<(&Lease, &LeaseKey)> = all.filter(|(_, key)| fits(key)).collect();
    if found.iter().any(|(_, key)| key.container == id) {
        found.retain(|(_, key)| key.container == id);
    }
    let asked = found.pop().and_then(|(lease, key)| lease.clone().asked_by(|other| other == key));
    match (asked, found.len()) {
        (Some(lease), 0) => Ok(lease),
        (Some(_), _) => {
            bail!("several containers fit {id:?}; give more of the id, or --root (`gpushare ps --json`)")
        }
        (None, _) => bail!(
            "no container {id:?} holds a share; give its id or the beginning of it, as `gpushare ps` shows it, and no name of \
             docker's"
        ),
    }
}

/// The ids of all containers that hold a lease.
pub fn ids(lease: &Lease) -> Vec<&str> {
    lease.members().map(|member| member.key.container.as_str()).collect()
}

/// The ids of all containers that hold a lease, as people read them.
pub fn containers(lease: &Lease) -> String {
    listed(ids(lease))
}

/// Ids as people read them: shortened, with commas between them.
pub fn listed<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    ids.into_iter().map(short).collect::<Vec<_>>().join(", ")
}

/// Shortens an id: engines' ids have 64 digits, of which people use the first 12.
pub fn short(id: &str) -> String {
    if id.len() == 64 { id.chars().take(12).collect() } else { id.to_owned() }
}
