//! Changes the shares of living containers: in the store, and in the files that hold the containers to them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use gpushare_inventory::{Gpu, Node};
use gpushare_quota::{Change, Done, Enforcement, Lease, LeaseKey, StateFolder, Store, UpdateError};
use gpushare_request::{
    Cores, Devices, MemoryRequest, NodeGpus, POD_ANNOTATION, Request, SelectorError, find_gpu,
};
use serde_json::{Value, json};

use crate::bundle::{Bundle, BundleError};
use crate::driver_limit::{DriverLimitError, DriverLimiter};
use crate::region::Region;
use crate::settings::Settings;

/// Files in which a low-level runtime records a container, in the container's folder below its root: crun
/// writes the first, runc and youki the second.
const RECORDS: [&str; 2] = ["status", "state.json"];

/// Why a container's share cannot follow the changed annotations of its pod. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum RestateError {
    /// Nobody knows where the bundle is.
    #[error(
        "the bundle of container {0} is not known, since a hook prepared it and no runtime root; change the share with \
         `gpushare update` on its node"
    )]
    NoRoot(LeaseKey),
    /// The low-level runtime's record of the container says nothing of a bundle.
    #[error("the low-level runtime's record of the container, {path}, cannot be read")]
    Record {
        /// The container's folder below the runtime root.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bundle cannot be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The annotations are longer than the store keeps.
    #[error(
        "its annotations {POD_ANNOTATION}* have {0} bytes, and at most {LONGEST} change a running container's share"
    )]
    Long(usize),
    /// The annotations name other GPUs, or another number of them.
    #[error("a running container keeps its GPUs; for others start the pod anew")]
    Devices,
    /// They name a GPU that is not there.
    #[error(transparent)]
    Selector(#[from] SelectorError),
    /// They ask for whole GPUs in place of a share or the other way round, or for the pod's in place of the
    /// container's.
    #[error(
        "a running container's share becomes no other kind of share (mode, scope, pod-memory); start the pod anew"
    )]
    Kind,
}

/// Why a share was not changed, or not wholly.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// It stays as it was.
    #[error(transparent)]
    Update(#[from] UpdateError),
    /// It stays as it was, since the driver's own limit cannot follow.
    #[error("its share stays as it was")]
    DriverLimit(#[source] DriverLimitError),
    /// The share is changed in all but the driver's own limit: others have got meanwhile what it had.
    #[error("its share is changed, and the driver's own limit is not; change it once more")]
    Partly(#[source] DriverLimitError),
}

impl RestateError {
    /// Whether the low-level runtime has no record of the container: not yet, or no more.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Record { source, .. } if source.kind() == ErrorKind::NotFound)
    }
}

/// Changes the share of `lease`, by all of `changes` or none. Returns the lease before and after. The driver's
/// own limit follows last: NVML may take long, and the store's turn must not. Where it is required and cannot
/// follow, the share becomes what it was.
///
/// # Errors
/// When the node has no room for what grows, the lease cannot be changed, or the store, the limits file or the
/// driver fails.
pub fn change_share(
    state: &StateFolder,
    store: &Store,
    lease: &Lease,
    changes: &[Change],
    node: &Node,
    settings: &Settings,
) -> Result<(Lease, Lease), ChangeError> {
    let asks_for_memory = changes.iter().any(|change| change.memory.is_some());
    if lease.elastic.is_some() && asks_for_memory {
        return Err(UpdateError::Elastic(lease.member.key.clone()).into());
    }
    let (gpus, rules) = (&node.gpus, settings.admission);
    let region = Region::of(state.path(), lease.id);
    let key = &lease.member.key;
    let write = |lease: &Lease| match region.set_grants(lease) {
        // A claim's region is made for its first container.
        Err(error) if error.kind() == ErrorKind::NotFound && !lease.has_containers() => Ok(()),
        done => done,
    };
    let (old, new) = store.update(lease.id, key, changes, gpus, rules, write)?;
    note(state, &old, &new);
    let memory = |lease: &Lease| lease.grants.iter().map(|grant| grant.memory).collect::<Vec<_>>();
    if memory(&old) == memory(&new) {
        return Ok((old, new));
    }
    let limiter = DriverLimiter::following(&settings.programs);
    match follow(&limiter, store, &new) {
        Ok(()) => Ok((old, new)),
        Err(why) if !limiter.is_required => {
            tracing::warn!(container = %key, %why, "the driver's own limit is that of before");
            Ok((old, new))
        }
        Err(why) => match store.update(lease.id, key, &back_to(&old), gpus, rules, write) {
            Ok((before, after)) => {
                note(state, &before, &after);
                // Some may have followed.
                let _ = follow(&limiter, store, &old);
                Err(ChangeError::DriverLimit(why))
            }
            Err(_) => Err(ChangeError::Partly(why)),
        },
    }
}

/// Notes for the history that a lease has other figures.
fn note(state: &StateFolder, old: &Lease, new: &Lease) {
    Done::resized(old, new).into_iter().for_each(|done| done.note(state.path(), new));
}

/// Brings the driver's own limit of each container of `lease` in line with the store, and returns the first
/// failure.
fn follow(limiter: &DriverLimiter, store: &Store, lease: &Lease) -> Result<(), DriverLimitError> {
    let done: Vec<_> = lease.members().map(|member| limiter.follow(store, lease.id, member)).collect();
    done.into_iter().collect()
}

/// What makes a changed lease what `old` is.
fn back_to(old: &Lease) -> Vec<Change> {
    let on_all = Change {
        compute_policy: (old.enforcement != Enforcement::Mps).then_some(old.compute_policy),
        priority: Some(old.priority),
        restated: Some(old.restated.clone()),
        ..Change::default()
    };
    let on_each = old.grants.iter().map(|grant| Change {
        memory: Some(MemoryRequest::Bytes(grant.memory)),
        cores: Some(grant.cores.into()),
        gpu: Some(grant.gpu),
        ..Change::default()
    });
    on_each.chain([on_all]).collect()
}

/// The configuration of the living container `key`, as its bundle has it.
///
/// # Errors
/// When the runtime root is not known, or record or bundle cannot be read.
pub fn living_configuration(key: &LeaseKey) -> Result<Value, RestateError> {
    if !Path::new(&key.root).is_absolute() {
        return Err(RestateError::NoRoot(key.clone()));
    }
    let folder = Path::new(&key.root).join(&key.container);
    let bundle = recorded_bundle(&folder).map_err(|source| RestateError::Record { path: folder, source })?;
    Ok(Bundle::open(&bundle, None)?.json()?)
}

fn recorded_bundle(folder: &Path) -> io::Result<PathBuf> {
    for name in RECORDS {
        let text = match fs::read(folder.join(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            other => other?,
        };
        let record: Value = serde_json::from_slice(&text)?;
        let labels = record["config"]["labels"].as_array().into_iter().flatten().filter_map(Value::as_str);
        // runc writes annotations as labels too, and its own label after them: an annotation `bundle` is a
        // tenant's word.
        let labelled = labels.filter_map(|label| label.strip_prefix("bundle=")).next_back();
        return match record["bundle"].as_str().or(labelled).map(PathBuf::from) {
            Some(path) if path.is_absolute() => Ok(path),
            _ => Err(io::Error::new(ErrorKind::InvalidData, "it names no bundle")),
        };
    }
    Err(ErrorKind::NotFound.into())
}

/// gpushare's own annotations of a pod's author in a container's configuration.
pub fn own_annotations(configuration: &Value) -> BTreeMap<String, String> {
    let all = configuration["annotations"].as_object().into_iter().flatten();
    let own = all.filter(|(key, _)| key.starts_with(POD_ANNOTATION));
    own.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

/// The longest keys and values of annotations, in bytes, by which a living share is changed: the store keeps
/// them.
pub const LONGEST: usize = 2048;

/// Checks that the store can keep these annotations.
///
/// # Errors
/// When they are too long.
pub fn fit(own: &BTreeMap<String, String>) -> Result<(), RestateError> {
    let length: usize = own.iter().map(|(key, value)| key.len() + value.len()).sum();
    if length > LONGEST { Err(RestateError::Long(length)) } else { Ok(()) }
}

/// Puts `own` in the place of [`own_annotations`].
pub fn restate(configuration: &mut Value, own: &BTreeMap<String, String>) {
    let Some(all) = configuration.as_object_mut() else { return };
    let annotations = all.entry("annotations").or_insert_with(|| json!({}));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.retain(|key, _| !key.starts_with(POD_ANNOTATION));
        annotations.extend(own.iter().map(|(key, value)| (key.clone(), json!(value))));
    }
}

/// What has to change of `lease` for a container that asked as in `before` and asks as in `after` now. What
/// both say alike stays as it is, since it may have been changed otherwise.
///
/// # Errors
/// When that is another kind of share, or one of other GPUs.
pub fn changes(
    lease: &Lease,
    before: &Request,
    after: &Request,
    gpus: &[Gpu],
) -> Result<Vec<Change>, RestateError> {
    // A burst's bound is not among the figures that a living lease changes.
    let kind = |request: &Request| (request.mode, request.scope, request.burst.unwrap_or(Cores::ALL));
    if kind(before) != kind(after) {
        return Err(RestateError::Kind);
    }
    if !are_its_gpus(lease, &after.devices, gpus)? {
        return Err(RestateError::Devices);
    }
    let mut changes = Vec::new();
    for gpu in lease.grants.iter().map(|grant| grant.gpu) {
        let (old, new) = (before.on(gpu), after.on(gpu));
        changes.push(Change {
            // All that is left was given when the container came.
            memory: Some(new.memory).filter(|memory| *memory != old.memory && *memory != MemoryRequest::Rest),
            cores: (new.cores != old.cores).then(|| new.cores.into()),
            gpu: Some(gpu),
            ..Change::default()
        });
    }
    let compute_policy = Some(after.compute_policy).filter(|policy| *policy != before.compute_policy);
    let priority = Some(after.priority).filter(|priority| *priority != before.priority);
    changes.push(Change { compute_policy, priority, ..Change::default() });
    changes.retain(|change| Change { gpu: None, ..change.clone() } != Change::default());
    Ok(changes)
}

fn are_its_gpus(lease: &Lease, devices: &Devices, gpus: &[Gpu]) -> Result<bool, SelectorError> {
    let count = lease.grants.len();
    let has = |uuid| lease.grants.iter().any(|grant| grant.gpu == uuid);
    Ok(match devices {
        Devices::Any(wanted) => usize::from(*wanted) == count,
        Devices::Among(wanted, of) => {
            usize::from(*wanted) == count && lease.grants.iter().all(|grant| of.contains(&grant.gpu))
        }
        Devices::All => NodeGpus(gpus).unnamed().len() == count,
        Devices::These(list) => {
            let named = list.iter().map(|one| Ok(find_gpu(one, gpus)?.uuid));
            let named = named.collect::<Result<Vec<_>, SelectorError>>()?;
            named.len() == count && named.into_iter().all(has)
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn recorded(name: &str, text: &str) -> io::Result<PathBuf> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), text).unwrap();
        recorded_bundle(folder.path())
    }

    #[test]
    fn a_bundle_is_where_the_low_level_runtime_says() {
        for (name, text, want) in [
            ("state.json", r#"{"config": {"labels": ["a=/b", "bundle=/c"]}}"#, Some("/c")),
            ("state.json", r#"{"config": {"labels": ["bundle=/tenants", "bundle=/c"]}}"#, Some("/c")),
            ("status", r#"{"bundle": "/c", "rootfs": "/d"}"#, Some("/c")),
            ("state.json", r#"{"bundle": "/c"}"#, Some("/c")),
            ("state.json", r#"{"config": {"labels": []}}"#, None),
            ("status", r#"{"bundle": "c"}"#, None),
            ("status", "{", None),
            ("other", r#"{"bundle": "/c"}"#, None),
        ] {
            assert_eq!(recorded(name, text).ok().as_deref(), want.map(Path::new), "{name}: {text}");
        }
    }

    #[test]
    fn a_pods_own_annotations_are_replaced_and_no_others() {
        let mut configuration = json!({"annotations": {
            "gpushare.io/memory": "4GiB", "gpushare.io/main.cores": "30", "alloc.gpushare.io/cores": "30",
            "other.io/memory": "1", "granted.gpushare.io/handed": "0",
        }});
        let own = BTreeMap::from([("gpushare.io/memory".to_owned(), "8GiB".to_owned())]);
        restate(&mut configuration, &own);
        assert_eq!(own_annotations(&configuration), own);
        assert_eq!(
            configuration,
            json!({"annotations": {
                "gpushare.io/memory": "8GiB", "alloc.gpushare.io/cores": "30",
                "other.io/memory": "1", "granted.gpushare.io/handed": "0",
            }})
        );
        let mut bare = json!({});
        restate(&mut bare, &own);
        assert_eq!(own_annotations(&bare), own);
    }
}
