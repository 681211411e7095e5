//! Makes CDI specifications: shares and whole GPUs as devices that an engine knows by name
//! (`--device gpushare.io/share=4GiB`).
//!
//! A CDI file is static, and a share is not. Its GPU is chosen when the container is created, and the image
//! decides which folder the loader searches. So a device of a share is a request in a variable of its own,
//! and our hook, which grants it and applies the plan. A whole GPU is known beforehand: the nodes of its plan
//! are in the file, so that the low-level runtime and systemd know their rules. Neither file lists files of
//! the driver: such a list would be stale after the next upgrade.
//!
//! The format is that of the Container Device Interface, specification 0.5.0 (device names may begin with a
//! digit; nodes have a host path). Where a node needs a group (`additionalGids`), it is 0.7.0. Engines refuse
//! fields that are newer than the version that a file names.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gpushare_inventory::GpuUuid;
use gpushare_quota::{Lease, ResourceClaim};
use gpushare_request::{CDI_VARIABLE, CLAIM_KIND, GPU_KIND, SHARE_KIND, claim_value};
use oci_spec::runtime::LinuxDevice;
use serde::Serialize;

use crate::host_files::{HostFileError, installed};
use crate::plan::{HOOK_ENVIRONMENT, Plan};

/// How the name of a file ends that is being written. It begins with a dot and the file's name.
pub const UNFINISHED: &str = ".new";

/// One CDI file: all devices of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiSpec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: Vec<CdiDevice>,
    /// What every device of the file brings, stated once.
    container_edits: Edits,
}

/// One device: its name, and what it puts into a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiDevice {
    name: String,
    container_edits: Edits,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    additional_gids: Vec<u32>,
}

/// A node by its paths. Engines look up its numbers, which differ between boots, when they apply it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_path: Option<PathBuf>,
    permissions: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Hook {
    hook_name: &'static str,
    path: PathBuf,
    args: Vec<String>,
    env: Vec<String>,
    timeout: i64,
}

impl CdiDevice {
    /// The device of a share, by its name as [`gpushare_request::ShareName`] reads it.
    pub fn share(name: &str) -> Self {
        Self { name: name.to_owned(), container_edits: requesting(SHARE_KIND, name) }
    }

    /// The device of the whole GPUs of `plan`, under an index, a UUID, or `all`.
    pub fn gpu(name: &str, plan: &Plan) -> Self {
        let container_edits = Edits {
            device_nodes: plan.devices.iter().map(|device| node(device, plan)).collect(),
            additional_gids: plan.additional_gids.clone(),
            ..requesting(GPU_KIND, name)
        };
        Self { name: name.to_owned(), container_edits }
    }

    /// The device of a resource claim's share on one GPU. The container joins the lease that was reserved for
    /// the claim, if it shows the claim's token.
    pub fn claim(claim: &ResourceClaim, gpu: GpuUuid) -> Self {
        let name = Self::claim_name(&claim.name.uid, gpu);
        let value = claim_value(claim.token.as_str(), gpu);
        let container_edits = Edits { env: vec![variable(CLAIM_KIND, &name, &value)], ..Edits::default() };
        Self { name, container_edits }
    }

    /// The name of a claim's device, by the claim's UID.
    pub fn claim_name(uid: &str, gpu: GpuUuid) -> String {
        format!("{uid}_{gpu}")
    }

    /// The device's name without its kind, such as `4GiB`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl CdiSpec {
    /// The file of shares. `hook` is the path of the hook's program, `settings` that of the settings file
    /// (`None`: the default one).
    ///
    /// # Errors
    /// When the hook is not installed.
    pub fn shares(
        devices: Vec<CdiDevice>,
        hook: &Path,
        settings: Option<&Path>,
    ) -> Result<Self, HostFileError> {
        Ok(Self::of(SHARE_KIND, devices, installed_hooks(hook, settings)?))
    }

    /// The file of whole GPUs, with the hook of [`CdiSpec::shares`].
    ///
    /// # Errors
    /// As [`CdiSpec::shares`].
    pub fn gpus(
        devices: Vec<CdiDevice>,
        hook: &Path,
        settings: Option<&Path>,
    ) -> Result<Self, HostFileError> {
        Ok(Self::of(GPU_KIND, devices, installed_hooks(hook, settings)?))
    }

    /// The file of a resource claim's shares, with the hook of [`CdiSpec::shares`]. Only root may read it: it
    /// holds the claim's token.
    ///
    /// # Errors
    /// As [`CdiSpec::shares`].
    pub fn claim(
        claim: &ResourceClaim,
        lease: &Lease,
        hook: &Path,
        settings: Option<&Path>,
    ) -> Result<Self, HostFileError> {
        let devices = lease.grants.iter().map(|grant| CdiDevice::claim(claim, grant.gpu)).collect();
        Ok(Self::of(CLAIM_KIND, devices, installed_hooks(hook, settings)?))
    }

    /// Writes the file by rename, since engines watch its folder. The temporary name has no ending that they
    /// read.
    ///
    /// # Errors
    /// When the folder cannot be made or written to.
    pub fn write(&self, path: &Path, mode: u32) -> io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = folder.join(format!(".{name}.{}{UNFINISHED}", std::process::id()));
        let _ = fs::remove_file(&temporary); // of a killed process that had our pid
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        let filled = file.write_all(&text).and_then(|()| file.set_permissions(Permissions::from_mode(mode)));
        let written = filled.and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn of(kind: &'static str, devices: Vec<CdiDevice>, hooks: Vec<Hook>) -> Self {
        let has_groups = devices.iter().any(|device| !device.container_edits.additional_gids.is_empty());
        Self {
            cdi_version: if has_groups { "0.7.0" } else { "0.5.0" },
            kind,
            devices,
            container_edits: Edits { hooks, ..Edits::default() },
        }
    }

    /// The kind of its devices, as `vendor/class`.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The devices, in the order of the file.
    pub fn devices(&self) -> &[CdiDevice] {
        &self.devices
    }
}

/// A variable that is unique to the device, with the device's qualified name as value.
fn requesting(kind: &str, name: &str) -> Edits {
    Edits { env: vec![variable(kind, name, &format!("{kind}={name}"))], ..Edits::default() }
}

/// The variable of the device `name`, with this value.
fn variable(kind: &str, name: &str, value: &str) -> String {
    let class = kind.rsplit('/').next().unwrap_or_default();
    let letters = format!("{class}_{name}");
    let letters =
        letters.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' });
    format!("{CDI_VARIABLE}{}={value}", letters.collect::<String>())
}

fn node(device: &LinuxDevice, plan: &Plan) -> Node {
    let path = device.path().clone();
    let mount = plan.device_mounts.iter().find(|mount| *mount.destination() == path);
    let host_path = mount.and_then(|mount| mount.source().clone()).filter(|source| *source != path);
    let numbers = (Some(device.major()), Some(device.minor()));
    let rule = plan.device_rules.iter().find(|rule| (rule.major(), rule.minor()) == numbers);
    // Without permissions a node would get all of them.
    let permissions = rule.and_then(|rule| rule.access().clone()).unwrap_or_else(|| "r".to_owned());
    Node { path, host_path, permissions }
}

/// As in the files for hooks.d: such a hook makes the whole grant, and may wait for NVML twice.
const TIMEOUT_SECONDS: i64 = 60;

fn installed_hooks(hook: &Path, settings: Option<&Path>) -> Result<Vec<Hook>, HostFileError> {
    Ok(hooks(&installed(hook.to_path_buf(), "hook")?, settings))
}

fn hooks(hook: &Path, settings: Option<&Path>) -> Vec<Hook> {
    let file = settings.map(|path| ["--config".to_owned(), path.to_string_lossy().into_owned()]);
    let stage = |stage: &'static str| Hook {
        hook_name: stage,
        path: hook.to_path_buf(),
        // `--cdi` tells the hook that nodes are in the bundle already, which may stay only with a lease.
        args: [&["gpushare-hook", stage, "--cdi"].map(str::to_owned)[..], file.as_slice().as_flattened()]
            .concat(),
        env: HOOK_ENVIRONMENT.map(str::to_owned).to_vec(),
        timeout: TIMEOUT_SECONDS,
    };
    ["createRuntime", "poststop"].map(stage).to_vec()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use oci_spec::runtime::{
        HookBuilder, LinuxDeviceBuilder, LinuxDeviceCgroupBuilder, LinuxDeviceType, MountBuilder,
    };
    use serde_json::{Value, json};

    use super::*;
    use crate::outside_plan::OutsidePlan;
    use crate::plan::CacheChange;

    /// A plan of one node, whose host path is `host_path`.
    fn plan(host_path: &str, gids: &[u32]) -> Plan {
        let hook = HookBuilder::default().path("/opt/gpushare-hook").build().unwrap();
        let device = LinuxDeviceBuilder::default().path("/dev/nvidia0").typ(LinuxDeviceType::C).major(195);
        let rule = LinuxDeviceCgroupBuilder::default().allow(true).typ(LinuxDeviceType::C).major(195);
        let mount = MountBuilder::default().source(host_path).destination("/dev/nvidia0");
        Plan {
            devices: vec![device.minor(0).build().unwrap()],
            device_mounts: vec![mount.build().unwrap()],
            device_rules: vec![rule.minor(0).access("rw").build().unwrap()],
            mounts: Vec::new(),
            prestart: hook.clone(),
            poststop: Some(hook),
            additional_gids: gids.to_vec(),
            variables: Vec::new(),
            told: Vec::new(),
            kept: gpushare_request::Kept::default(),
            handed: std::collections::BTreeSet::new(),
            handed_capabilities: std::collections::BTreeSet::new(),
            denies_user_namespaces: false,
            limiter: None,
            supervised: None,
            loader_cache: CacheChange::None,
            interpreters: Vec::new(),
            folders: BTreeSet::new(),
            outside: OutsidePlan::default(),
        }
    }

    fn written(kind: &'static str, devices: Vec<CdiDevice>) -> Value {
        let hooks = hooks(Path::new("/opt/gpushare-hook"), None);
        serde_json::to_value(CdiSpec::of(kind, devices, hooks)).unwrap()
    }

    #[test]
    fn a_share_is_a_variable_of_its_own_and_our_hooks() {
        let devices = ["4GiB", "25pct-30", "1.5GiB"].map(CdiDevice::share).to_vec();
        let hook_of = |stage: &str| {
            json!({
                "hookName": stage, "path": "/opt/gpushare-hook", "args": ["gpushare-hook", stage, "--cdi"], "timeout": 60,
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GPUSHARE_HOOK=1"]
            })
        };
        let device = |name: &str, variable: &str| json!({"name": name, "containerEdits": {"env": [format!("{variable}=gpushare.io/share={name}")]}});
        let want = json!({
            "cdiVersion": "0.5.0",
            "kind": "gpushare.io/share",
            "devices": [
                device("4GiB", "GPUSHARE_CDI_SHARE_4GIB"),
                device("25pct-30", "GPUSHARE_CDI_SHARE_25PCT_30"),
                device("1.5GiB", "GPUSHARE_CDI_SHARE_1_5GIB"),
            ],
            "containerEdits": {"hooks": [hook_of("createRuntime"), hook_of("poststop")]}
        });
        assert_eq!(written(SHARE_KIND, devices), want);
    }

    #[test]
    fn a_whole_gpu_has_the_nodes_of_its_plan_with_their_rules() {
        for (host_path, gids, want, version) in [
            ("/dev/nvidia0", &[][..], json!({"path": "/dev/nvidia0", "permissions": "rw"}), "0.5.0"),
            (
                "/node/dev/nvidia0",
                &[44],
                json!({"path": "/dev/nvidia0", "hostPath": "/node/dev/nvidia0", "permissions": "rw"}),
                "0.7.0",
            ),
        ] {
            let spec = written(GPU_KIND, vec![CdiDevice::gpu("0", &plan(host_path, gids))]);
            let edits = &spec["devices"][0]["containerEdits"];
            assert_eq!(spec["cdiVersion"], version);
            assert_eq!(edits["deviceNodes"], json!([want]));
            assert_eq!(edits["env"], json!(["GPUSHARE_CDI_GPU_0=gpushare.io/gpu=0"]));
            assert_eq!(edits.get("additionalGids").is_some(), !gids.is_empty());
        }
    }

    #[test]
    fn a_node_without_a_rule_is_not_given_all_permissions() {
        let bare = Plan { device_rules: Vec::new(), ..plan("/dev/nvidia0", &[]) };
        assert_eq!(CdiDevice::gpu("0", &bare).container_edits.device_nodes[0].permissions, "r");
    }

    #[test]
    fn a_file_whose_hook_is_missing_is_not_made() {
        let missing =
            CdiSpec::shares(vec![CdiDevice::share("4GiB")], Path::new("/nowhere/gpushare-hook"), None);
        assert!(matches!(missing, Err(HostFileError::NotInstalled { key: "hook", .. })), "{missing:?}");
    }

    #[test]
    fn the_hook_is_told_of_settings_that_are_not_at_their_place() {
        let hooks = hooks(Path::new("/opt/gpushare-hook"), Some(Path::new("/opt/gpushare.toml")));
        let args: Vec<String> = hooks.iter().map(|hook| hook.args.join(" ")).collect();
        let of = |stage: &str| format!("gpushare-hook {stage} --cdi --config /opt/gpushare.toml");
        assert_eq!(args, [of("createRuntime"), of("poststop")]);
    }
}
