use std::fs;
use std::os::unix::fs::symlink;

use gpushare_inventory::LeftOut;
use serde_json::json;

use super::*;
use crate::driver_limit::DriverLimits;
use crate::supervision::SupervisorSettings;

/// The folder with the files of a test's node.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        for folder in ["state/regions/7", "libraries", "cache", "driver/lib", "data", "bundle/volume"] {
            fs::create_dir_all(host.path(folder)).unwrap();
        }
        for file in ["hook", "driver/lib/libcuda.so.535", "state/regions/7/usage", "data/file"] {
            fs::write(host.path(file), "").unwrap();
        }
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The name of the right that the table finds, and where.
    fn right(&self, json: &Value) -> Option<(&'static str, String)> {
        let [hook, libraries, cache, state] =
            ["hook", "libraries", "cache", "state"].map(|name| self.path(name));
        let programs = Programs {
            hook: &hook,
            libraries: &libraries,
            cache: &cache,
            state: &state,
            extra_mounts: &[],
            left_out: LeftOut::default(),
            denies_user_namespaces: false,
            cli: Path::new("/bin/gpushare"),
            settings: None,
            supervisor: SupervisorSettings::off(),
            driver_limits: DriverLimits::Off,
            log: Vec::new(),
        };
        let driver = ["driver/lib", "driver/lib/libcuda.so.535"].map(|name| self.path(name));
        let found = right_over_limit(json, &self.path("bundle"), &programs, &driver)?;
        Some((found.right.name, found.place))
    }
}

/// A container with namespaces of its own and docker's capabilities.
fn ordinary() -> Value {
    let held = "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP \
                NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE SYS_PTRACE NET_ADMIN";
    let held: Vec<String> = held.split_whitespace().map(|name| format!("CAP_{name}")).collect();
    let kinds = ["pid", "mount", "ipc", "uts", "network"];
    let namespaces: Vec<Value> = kinds.iter().map(|kind| json!({"type": kind})).collect();
    json!({
        "process": {"capabilities": {"bounding": held, "effective": held, "permitted": held}},
        "linux": {"namespaces": namespaces, "devices": [], "resources": {"devices": [
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "access": "m"},
            {"allow": true, "type": "b", "access": "m"},
            {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
            {"allow": true, "type": "c", "major": 136, "minor": -1, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"},
        ]}},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        ],
    })
}

fn with(pointer: &str, entry: Value) -> Value {
    let mut json = ordinary();
    json.pointer_mut(pointer).and_then(Value::as_array_mut).unwrap().push(entry);
    json
}

fn name(host: &Host, json: &Value) -> Option<&'static str> {
    host.right(json).map(|(name, _)| name)
}

#[test]
fn an_ordinary_container_has_none_of_the_rights() {
    assert_eq!(name(&Host::new(), &ordinary()), None);
}

#[test]
fn a_capability_is_found_in_every_set_and_spelling() {
    let host = Host::new();
    for right in &RIGHTS {
        let Sign::Capability(plain) = right.sign else { continue };
        for spelling in [plain.to_owned(), format!("CAP_{plain}"), format!("cap_{}", plain.to_lowercase())] {
            for set in ["bounding", "effective", "inheritable", "permitted", "ambient"] {
                let json = json!({
                    "process": {"capabilities": {set: ["CAP_CHOWN", spelling]}},
                    "linux": ordinary()["linux"],
                });
                assert_eq!(name(&host, &json), Some(right.name), "{spelling} in {set}");
            }
        }
    }
}

#[test]
fn a_user_namespace_without_the_hosts_root_holds_every_right() {
    let host = Host::new();
    let own = json!({"type": "user"});
    let hosts = json!({"type": "user", "path": "/proc/self/ns/user"});
    for (namespace, first, want) in
        [(&own, 100_000, None), (&own, 0, Some("CAP_SYS_ADMIN")), (&hosts, 100_000, Some("CAP_SYS_ADMIN"))]
    {
        let mut json = with("/linux/namespaces", namespace.clone());
        json["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": first, "size": 65536}]);
        json["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
        assert_eq!(name(&host, &json), want, "{namespace} from {first}");
    }
    let mut json = ordinary();
    json["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
    json["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    assert_eq!(name(&host, &json), Some("CAP_SYS_ADMIN"), "mappings alone make no namespace");
}

#[test]
fn a_namespace_of_the_hosts_is_found_by_its_absence_and_by_its_path() {
    let host = Host::new();
    for (kind, file, want) in
        [("pid", "pid", "the host's pid namespace"), ("mount", "mnt", "the host's mount namespace")]
    {
        for (path, want) in [
            (None, Some(want)),
            (Some(format!("/proc/self/ns/{file}")), Some(want)),
            (Some(format!("/proc/thread-self/ns/{file}")), Some(want)),
            (Some(String::new()), None),
            (Some("/proc/self/ns/ipc".to_owned()), None),
            (Some("/proc/4194305/ns/pid".to_owned()), None),
        ] {
            let mut json = ordinary();
            let list = json.pointer_mut("/linux/namespaces").and_then(Value::as_array_mut).unwrap();
            list.retain(|one| one["type"] != kind);
            list.extend(path.iter().map(|path| json!({"type": kind, "path": path})));
            assert_eq!(name(&host, &json), want, "{kind} {path:?}");
        }
    }
}

#[test]
fn a_device_that_reaches_the_machine_is_found_as_a_node_and_as_a_rule() {
    let host = Host::new();
    for (kind, major, minor, want) in [
        ("c", 1, 1, Some("the machine's memory")),
        ("u", 1, 2, Some("the machine's memory")),
        ("c", 1, 4, Some("the machine's memory")),
        ("c", 1, -1, Some("the machine's memory")),
        ("c", 21, 0, Some("SCSI commands")),
        ("c", -1, 1, Some("the machine's memory")),
        ("c", 1, 5, None),
        ("c", 10, 229, None),
        ("c", 10, 232, None),
        ("b", -1, -1, Some("a disk of the host")),
        ("b", 4095, 0, None),
    ] {
        let rule = json!({"allow": true, "type": kind, "major": major, "minor": minor, "access": "rw"});
        assert_eq!(name(&host, &with("/linux/resources/devices", rule.clone())), want, "{rule}");
        let node = json!({"path": "/dev/x", "type": kind, "major": major, "minor": minor});
        assert_eq!(name(&host, &with("/linux/devices", node.clone())), want, "{node}");
        let mut making = rule;
        making["access"] = json!("m");
        assert_eq!(
            name(&host, &with("/linux/resources/devices", making)),
            None,
            "a node alone opens nothing"
        );
    }
}

#[test]
fn a_mount_is_judged_by_where_its_source_leads_and_whether_it_can_be_written() {
    let host = Host::new();
    symlink("/", host.path("root")).unwrap();
    symlink(host.path("state/regions"), host.path("data/link")).unwrap();
    symlink("../state", host.path("bundle/relative")).unwrap();
    let [state, programs, driver] = ["the state folder", "gpushare's files", "the driver's files"].map(Some);
    for (source, options, want) in [
        (host.path("state"), "rbind", state),
        (host.path("state"), "bind,rw", state),
        (host.path("state/../state/."), "bind", state),
        (host.path("state/regions/7/usage"), "bind", state),
        (host.path("data/link"), "rbind", state),
        (host.path("data/link/7"), "rbind", state),
        (host.path("data"), "rbind", None),
        (host.path("."), "rbind", state),
        (host.path("."), "rbind,ro", state),
        (host.path("."), "bind,ro", None),
        (host.path("."), "bind,ro,rw", state),
        (host.path("."), "rbind,rro", None),
        (host.path("."), "rbind,rro,rslave", state),
        (host.path("."), "rbind,ro,rw", state),
        (host.path("root"), "bind,ro", Some("an engine's socket")),
        (host.path("root"), "rbind", state),
        ("relative".into(), "bind", state),
        ("volume".into(), "bind", None),
        (host.path("hook"), "bind", programs),
        (host.path("libraries"), "bind", programs),
        (host.path("cache"), "bind", programs),
        (host.path("cache"), "bind,ro", None),
        (host.path("driver/lib/libcuda.so.535"), "bind", driver),
        (host.path("driver"), "bind", driver),
        (host.path("driver"), "bind,rro", None),
        ("/run".into(), "bind,ro", Some("an engine's socket")),
        ("/proc".into(), "bind,ro", Some("the host's /proc")),
        ("/proc/self".into(), "bind,ro", Some("the host's /proc")),
        ("/proc/sys".into(), "bind", Some("the host's /proc")),
        ("/proc/sys".into(), "bind,ro", None),
        ("/sys".into(), "bind", Some("the host's /sys")),
        ("/sys/devices".into(), "bind", Some("the host's /sys")),
        ("/sys/devices".into(), "bind,ro", None),
        ("/dev".into(), "rbind", Some("the host's /dev")),
        ("/dev/shm".into(), "rbind", None),
        (host.path("data"), "rbind,rshared", Some("shared propagation")),
        (host.path("data"), "rbind,ro,shared", Some("shared propagation")),
        (host.path("data"), "rbind,rslave", None),
        (host.path("nothing"), "rbind", None),
    ] {
        let options: Vec<&str> = options.split(',').collect();
        let mount = json!({"destination": "/x", "type": "none", "source": source, "options": options});
        assert_eq!(name(&host, &with("/mounts", mount.clone())), want, "{mount}");
    }
}

#[test]
fn file_systems_that_are_mounted_anew_are_judged_as_well() {
    let host = Host::new();
    let upper = format!("upperdir={}", host.path("state").display());
    for (kind, option, want) in [
        ("sysfs", "rw", Some("the host's /sys")),
        ("debugfs", "nosuid", Some("the host's /sys")),
        ("sysfs", "ro", None),
        ("cgroup", "rw", Some("the host's cgroups")),
        ("cgroup2", "nosuid", Some("the host's cgroups")),
        ("devtmpfs", "rw", Some("the host's /dev")),
        ("overlay", &upper, Some("the state folder")),
        ("tmpfs", "rw", None),
    ] {
        let mount = json!({"destination": "/x", "type": kind, "source": kind, "options": [option]});
        assert_eq!(name(&host, &with("/mounts", mount.clone())), want, "{mount}");
    }
    let mount = json!({"destination": "/x", "type": "cgroup", "source": "cgroup", "options": ["rw"]});
    let mut json = with("/mounts", mount);
    json["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "cgroup"}));
    assert_eq!(name(&host, &json), None, "its own cgroup alone is there");
}

#[test]
fn the_mounts_of_an_earlier_start_of_the_same_bundle_are_no_right() {
    let host = Host::new();
    fs::create_dir_all(host.path("state/regions/7.members/a")).unwrap();
    fs::write(host.path("state/regions/7.members/a/usage"), "").unwrap();
    let usage = |source: &str, target: &str| {
        let source = host.path(source);
        let options = ["rw", "rbind", "rprivate"];
        json!({"destination": target, "type": "bind", "source": source, "options": options})
    };
    for source in ["state/regions/7.members/a/usage", "state/regions/7/usage"] {
        assert_eq!(name(&host, &with("/mounts", usage(source, "/usr/lib/gpushare/usage"))), None);
        assert_eq!(name(&host, &with("/mounts", usage(source, "/x"))), Some("the state folder"));
    }
}

/// Containers as engines make them by default always held a share under `request.strict`.
#[test]
fn what_engines_make_without_being_told_more_stays_admitted() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let host = Host::new();
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.is_file());
    assert!(names.len() > 30, "{}", names.len());
    for path in names {
        let json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let found = host.right(&json);
        if json.pointer("/linux/namespaces").is_none() || name.contains("privileged") {
            continue;
        }
        let want = (name == "docker-pid-host.json").then_some("the host's pid namespace");
        assert_eq!(found.as_ref().map(|(name, _)| *name), want, "{name}: {found:?}");
    }
}
