//! A52 and A53: variables of the loader that name the driver's own files, and every right by which a
//! container could undo its limit.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use gpushare_inject::RIGHTS;
use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::met;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

use crate::table::tests;
use crate::{NEEDS, compile, on_both, share};

const FOLDER: &str = "/usr/lib/gpushare/driver";

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a52_with_the_drivers_folder_in_the_loaders_path_the_limit_holds() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
    let container = runtime.run(&bundle);
    // The variable is given to the program alone, as by `docker exec -e`, which calls no runtime of ours.
    let probe = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "9GiB", "--allocate", "7GiB"];
    for variable in
        [format!("LD_LIBRARY_PATH={FOLDER}"), format!("LD_LIBRARY_PATH={FOLDER}:/usr/lib/gpushare")]
    {
        let words = [&["/bin/env", &variable][..], &probe].concat();
        let report = Report::parse(&container.exec(&words).expect_success(&variable).stdout);
        report.assert_size(8 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{variable}");
    }
    // The names are not those that a loader's cache or a linker's link would use.
    let names = container.exec(&["/bin/ls", FOLDER]).expect_success("ls").stdout;
    assert_eq!(names.split_whitespace().collect::<Vec<_>>(), ["cuda", "nvidia-ml"]);
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a52_an_environment_that_names_the_drivers_folder_is_refused() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        for (name, value) in [
            ("LD_LIBRARY_PATH", FOLDER.to_owned()),
            ("LD_LIBRARY_PATH", format!("/opt/lib:/usr/lib/../lib/gpushare//driver/:{FOLDER}s")),
            ("LD_PRELOAD", format!("{FOLDER}/cuda")),
            ("LD_AUDIT", format!("{FOLDER}/cuda")),
        ] {
            let bundle = share().env(name, &value);
            let line = runtime.create(&bundle).map(drop).expect_err("the driver is named").line();
            assert!(line.contains(name) && line.contains(FOLDER), "{low_level:?}: {line}");
            assert_eq!(leases(runtime.config()), [], "{low_level:?}: {value}");
        }
        drop(runtime.run(&share().env("LD_LIBRARY_PATH", "/usr/lib/gpushare:/opt/lib")));
    });
}

/// What a bundle can name on the host.
struct Place<'a> {
    node: &'a SimulatedNode,
    scratch: &'a Scratch,
}

/// A change of config.json.
type Give = fn(&mut Value, &Place<'_>);

fn hold(spec: &mut Value, capability: &str) {
    for set in ["bounding", "effective", "permitted"] {
        spec["process"]["capabilities"][set].as_array_mut().expect("a list").push(json!(capability));
    }
}

fn bind(spec: &mut Value, source: &Path, options: &[&str]) {
    bind_at(spec, "/mnt", source, options);
}

fn bind_at(spec: &mut Value, target: &str, source: &Path, options: &[&str]) {
    let mount = json!({"destination": target, "type": "bind", "source": source, "options": options});
    spec["mounts"].as_array_mut().expect("a list").push(mount);
}

fn rule(spec: &mut Value, rule: Value) {
    spec["linux"]["resources"]["devices"].as_array_mut().expect("a list").push(rule);
}

fn without_namespace(spec: &mut Value, kind: &str) {
    let list = spec["linux"]["namespaces"].as_array_mut().expect("a list");
    list.retain(|namespace| namespace["type"] != kind);
}

/// Each right of the table, and how a bundle gets it.
const GIVEN: [(&str, Give); 21] = [
    ("CAP_SYS_ADMIN", |spec, _| hold(spec, "CAP_SYS_ADMIN")),
    ("CAP_DAC_READ_SEARCH", |spec, _| hold(spec, "CAP_DAC_READ_SEARCH")),
    ("CAP_SYS_MODULE", |spec, _| hold(spec, "CAP_SYS_MODULE")),
    ("CAP_SYS_RAWIO", |spec, _| hold(spec, "CAP_SYS_RAWIO")),
    ("CAP_SYS_BOOT", |spec, _| hold(spec, "CAP_SYS_BOOT")),
    ("CAP_BPF", |spec, _| hold(spec, "CAP_BPF")),
    ("CAP_PERFMON", |spec, _| hold(spec, "CAP_PERFMON")),
    ("the machine's memory", |spec, _| {
        spec["linux"]["devices"] = json!([{"path": "/dev/mem", "type": "c", "major": 1, "minor": 1}]);
    }),
    ("SCSI commands", |spec, _| rule(spec, json!({"allow": true, "type": "c", "major": 21, "access": "rw"}))),
    ("a disk of the host", |spec, _| rule(spec, json!({"allow": true, "type": "b", "access": "rw"}))),
    ("the host's pid namespace", |spec, _| without_namespace(spec, "pid")),
    ("the host's mount namespace", |spec, _| without_namespace(spec, "mount")),
    ("the state folder", |spec, place| {
        // The path leads through a link of the host.
        let link = place.scratch.path().join("link");
        let _ = std::os::unix::fs::symlink(place.node.state(), &link);
        bind(spec, &link, &["rbind", "rw"]);
    }),
    ("gpushare's files", |spec, _| {
        bind(spec, artifacts::hook().parent().expect("a folder"), &["rbind", "rw"]);
    }),
    ("the driver's files", |spec, place| bind(spec, &place.node.root().join("driver"), &["rbind", "rw"])),
    ("an engine's socket", |spec, place| {
        let socket = place.scratch.path().join("docker.sock");
        let _ = UnixListener::bind(&socket);
        bind_at(spec, "/run/d.sock", &socket, &["bind", "ro"]);
    }),
    ("the host's /proc", |spec, _| bind(spec, Path::new("/proc"), &["rbind", "ro"])),
    ("the host's /sys", |spec, _| bind(spec, Path::new("/sys/kernel"), &["bind", "rw"])),
    ("the host's cgroups", |spec, _| {
        let mount =
            json!({"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["rw"]});
        spec["mounts"].as_array_mut().expect("a list").push(mount);
    }),
    ("the host's /dev", |spec, _| bind(spec, Path::new("/dev"), &["bind", "rw"])),
    ("shared propagation", |spec, place| bind(spec, place.scratch.path(), &["rbind", "ro", "rshared"])),
];

/// The settings of `node` under `request.strict`, where variables may ask for a whole GPU.
fn strict(node: &SimulatedNode) -> PathBuf {
    let strict = "[request]\nstrict = true\nenv_ceiling = \"100%\"";
    node.config_with("strict", &format!("{}\n{strict}", LowLevel::Runc.settings()))
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a53_a_right_over_the_limit_is_refused_under_strict_and_by_no_other_node() {
    if !met(NEEDS) {
        return;
    }
    assert_eq!(GIVEN.map(|(name, _)| name), RIGHTS.map(|right| right.name));
    let node = SimulatedNode::one_gpu();
    let strict = Runtime::with_config(LowLevel::Runc, &strict(&node));
    let lenient = Runtime::wrapped(LowLevel::Runc, &node);
    drop(strict.run(&share()));
    for (right, (name, give)) in RIGHTS.iter().zip(GIVEN) {
        let scratch = Scratch::new("given");
        let bundle = share().edit(|spec| give(spec, &Place { node: &node, scratch: &scratch }));
        let line = strict.create(&bundle).map(drop).expect_err(name).line();
        for part in [name, right.reason, right.remedy, "request.strict"] {
            assert!(line.contains(part), "{name}: {part:?} is not in: {line}");
        }
        assert_eq!(leases(strict.config()), [], "{name}");
        match lenient.create(&bundle) {
            // runc would mount on this machine, so this container is refused.
            created if name == "the host's mount namespace" => {
                let line = created.map(drop).expect_err(name).line();
                assert!(line.contains("mounted on the host"), "{line}");
            }
            created => drop(created.unwrap_or_else(|refusal| panic!("{name}: {refusal:?}"))),
        }
        assert_eq!(leases(lenient.config()), [], "{name}");
    }
}

/// Root of the host can bind the state folder elsewhere, where no path leads to it from the configured name.
#[test]
#[ignore = "needs root and runc: binds a folder"]
fn a53_the_state_folder_is_known_under_another_name() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::with_config(LowLevel::Runc, &strict(&node));
    drop(runtime.run(&share()));
    let scratch = Scratch::new("bound");
    let bound = scratch.folder("elsewhere");
    for name in ["", "regions", "limits"] {
        let (source, none): (_, Option<&str>) = (node.state().join(name), None);
        mount(Some(&source), &bound, none, MsFlags::MS_BIND, none).expect("a folder can be bound");
        let bundle = share().edit(|spec| bind(spec, &bound, &["bind", "rw"]));
        let line = runtime.create(&bundle).map(drop).expect_err(name).line();
        assert!(line.contains("the state folder"), "{name:?}: {line}");
        umount2(&bound, MntFlags::MNT_DETACH).expect("it can be taken away");
    }
    assert_eq!(leases(runtime.config()), []);
}

/// A process of the host that belongs to an ordinary user. It is ended on drop.
struct OfUser(Child);

impl OfUser {
    fn start() -> Self {
        let mut sleep = Command::new("/bin/sleep");
        sleep.arg("1000").uid(65534).gid(65534);
        sleep.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(sleep.spawn().expect("it starts"))
    }
}

impl Drop for OfUser {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
#[ignore = "needs root, runc and a C compiler: runs a container in the host's PID namespace"]
fn a53_in_the_hosts_pid_namespace_dockers_capabilities_open_the_hosts_files() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let scratch = Scratch::new("hosts");
    let secret = scratch.file("secret", "of the host");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("a mode can be set");
    let user = OfUser::start();
    let pid = user.0.id().to_string();
    let words = ["/bin/root_of", &pid, "65534", secret.to_str().expect("UTF-8")];
    for (namespace, opens) in [("ipc", false), ("pid", true)] {
        let bundle = Bundle::small().edit(|spec| without_namespace(spec, namespace));
        compile("root_of.c", &bundle.root().join("bin/root_of"));
        let told = runtime.run(&bundle).exec(&words);
        assert_eq!(told.stdout == "of the host", opens, "without a namespace of kind {namespace}: {told:?}");
    }
}

#[test]
fn the_page_of_rights_is_the_table_in_the_code() {
    let text =
        fs::read_to_string(artifacts::checkout().join("docs/rights.md")).expect("docs/rights.md can be read");
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    let rows: Vec<Vec<&str>> =
        rows.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    let told: Vec<_> = rows.iter().map(|row| (row[0].to_owned(), row[2].to_owned())).collect();
    let want: Vec<_> = RIGHTS.iter().map(|right| (right.name.to_owned(), right.reason.to_owned())).collect();
    assert_eq!(told, want);
    let tests = tests();
    for row in rows {
        let held = row[3].trim_matches('`');
        assert!(tests.contains(held), "{}: no such test: {held}", row[0]);
    }
}
