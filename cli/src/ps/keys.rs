//! What leases are chosen by (`ps --filter`).

use std::path::Path;

use gpushare_quota::{Lease, Member};

use super::{is_paused, state};
use crate::filter::Key;
use crate::node::GpuNames;

/// The keys.
pub const KEYS: [Key; 8] = [
    ("name", &[]),
    ("id", &[]),
    ("image", &[]),
    ("namespace", &[]),
    ("project", &[]),
    ("gpu", &[]),
    ("mode", &["share", "mps", "time-slice", "exclusive"]),
    ("state", &["reserved", "active", "paused", "gone"]),
];

/// What `lease` has under one of [`KEYS`].
pub fn values(state_folder: &Path, lease: &Lease, key: &str, names: &GpuNames) -> Vec<String> {
    let of_members = |of: &dyn Fn(&Member) -> Vec<String>| lease.members().flat_map(of).collect();
    match key {
        "name" => of_members(&|member| {
            [Some(member.title()), member.called.name.clone()].into_iter().flatten().collect()
        }),
        "id" => of_members(&|member| vec![member.key.container.clone()]),
        "image" => of_members(&|member| member.called.image.iter().cloned().collect()),
        "namespace" => of_members(&|member| member.name.iter().map(|name| name.namespace.clone()).collect()),
        "project" => of_members(&|member| member.called.project.iter().cloned().collect()),
        "gpu" => lease.grants.iter().flat_map(|grant| names.words(grant.gpu)).collect(),
        "mode" => vec![lease.enforcement.terms().company.mode().name().to_owned()],
        "state" => vec![state(lease, is_paused(state_folder, lease)).to_owned()],
        _ => Vec::new(),
    }
}
