//! Shares and whole GPUs as CDI devices: the files, podman which reads them, and what may stand beside a
//! share.

mod nvidias;

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::leases::{cli, leases, told};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{artifacts, image, namespace};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

fn spec(node: &SimulatedNode, flags: &[&str]) -> Value {
    let outcome = cli(node.config(), &[&["cdi", "generate", "--output", "-"], flags].concat());
    let text = outcome.expect_success("gpushare cdi generate").stdout;
    serde_json::from_str(&text).expect("a specification is JSON")
}

/// Whether CDI lets a device have this name: letters and digits at both ends, between them also `_`, `-`, `.`
/// and `:`.
fn is_device_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric();
    name.starts_with(plain) && name.ends_with(plain) && name.chars().all(|c| plain(c) || "_-.:".contains(c))
}

fn names(spec: &Value) -> Vec<String> {
    let devices = spec["devices"].as_array().expect("a specification has devices");
    devices.iter().map(|device| device["name"].as_str().expect("a device has a name").to_owned()).collect()
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn the_files_keep_to_the_grammar_of_cdi_and_to_the_plan() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "20GiB");
    let hook = artifacts::hook();
    for (kind, wanted) in [("share", &["1GiB", "16GiB", "25pct-25"][..]), ("gpu", &["0", "1", "all"])] {
        let spec = spec(&node, &["--kind", kind]);
        assert_eq!(spec["cdiVersion"], "0.5.0");
        assert_eq!(spec["kind"], format!("gpushare.io/{kind}"));
        let names = names(&spec);
        assert!(names.iter().all(|name| is_device_name(name)), "{names:?}");
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
        assert!(wanted.iter().all(|name| names.iter().any(|found| found == name)), "{names:?}");
        let hooks = spec["containerEdits"]["hooks"].as_array().expect("every device has hooks");
        assert_eq!(
            hooks.iter().map(|hook| &hook["hookName"]).collect::<Vec<_>>(),
            ["createRuntime", "poststop"]
        );
        for entry in hooks {
            assert_eq!(entry["path"].as_str().map(Path::new), Some(hook.as_path()));
            let env = entry["env"].as_array().expect("a hook without env would get the runtime's");
            assert!(!env.is_empty() && entry["timeout"].as_i64().is_some_and(|seconds| seconds > 0));
        }
    }
    assert!(!names(&spec(&node, &["--kind", "share"])).contains(&"24GiB".to_owned()), "no GPU holds 24 GiB");
    let gpus = spec(&node, &["--kind", "gpu"]);
    let first = &gpus["devices"][0]["containerEdits"]["deviceNodes"];
    let nodes: Vec<_> = first.as_array().expect("a GPU has nodes").iter().map(|node| &node["path"]).collect();
    assert_eq!(nodes, ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
    for entry in first.as_array().expect("a GPU has nodes") {
        assert_eq!(entry["permissions"], "rw", "{entry}");
        assert!(entry["hostPath"].as_str().is_some_and(|path| Path::new(path).exists()), "{entry}");
    }
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn what_cannot_be_a_device_is_refused_and_writes_nothing() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::create(1, MODEL, "20GiB");
    let folder = Scratch::new("cdi");
    let output = folder.path().to_str().expect("a path in UTF-8");
    let strict = node.config_with("strict", "[request]\nstrict = true");
    let no_env = node.config_with("no-env", "[request]\nenv = false");
    let generate = ["cdi", "generate", "--output", output];
    for (config, flags, parts) in [
        (node.config(), &["--share", "25%"][..], &["25%", "25pct"][..]),
        (node.config(), &["--share", "4"], &["\"4\"", "4GiB"]),
        (node.config(), &["--share", "24GiB"], &["24GiB", "20 GiB"]),
        (node.config(), &["--output", "-"], &["--kind"]),
        (&strict, &[], &["request.strict", "annotations"]),
        (&no_env, &[], &["request.env", "annotations"]),
    ] {
        let words = if flags.first() == Some(&"--output") { &generate[..2] } else { &generate[..] };
        let outcome = cli(config, &[words, flags].concat());
        let missing = parts.iter().find(|part| !outcome.stderr.contains(*part));
        assert!(!outcome.success() && missing.is_none(), "{flags:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        assert_eq!(fs::read_dir(folder.path()).expect("the folder can be read").count(), 0, "{flags:?}");
    }
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn the_list_shows_what_engines_find_and_what_has_become_wrong() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let folder = Scratch::new("cdi");
    let output = folder.path().to_str().expect("a path in UTF-8");
    let _ = cli(node.config(), &["cdi", "generate", "--output", output, "--share", "4GiB"])
        .expect_success("generate");
    let _ = cli(node.config(), &["cdi", "generate", "--output", output, "--share", "4GiB"])
        .expect_success("again");
    folder.file("other.json", r#"{"kind": "vendor.org/nic", "devices": [{"name": "0"}]}"#);
    folder.file("broken.json", "{");
    let mut files: Vec<_> =
        fs::read_dir(output).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
    files.sort();
    assert_eq!(files, ["broken.json", "gpushare-gpu.json", "gpushare-share.json", "other.json"]);
    let mode = fs::metadata(folder.path().join("gpushare-gpu.json")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    let list = || {
        let list = told(node.config(), &["cdi", "list", "--json", "--folder", output]);
        let rows = list["devices"].as_array().expect("a list").iter();
        rows.map(|row| (row["device"].as_str().unwrap_or_default().to_owned(), row["missing"].clone()))
            .collect::<Vec<_>>()
    };
    let before = list();
    assert_eq!(before.len(), 4, "{before:?}");
    assert!(before.iter().all(|(_, missing)| *missing == json!([])), "{before:?}");
    assert!(before.iter().any(|(name, _)| name == "gpushare.io/share=4GiB"), "{before:?}");
    let uvm = node.root().join("dev/nvidia-uvm");
    fs::remove_file(&uvm).expect("a node can be removed");
    for (name, missing) in list() {
        let want = if name.contains("/gpu=") { json!([uvm]) } else { json!([]) };
        assert_eq!(missing, want, "{name}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_share_is_granted_by_its_cdi_name_in_an_annotation_and_in_nvidias_variable() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let names = |bundle: Bundle| {
            bundle.annotation("cdi.k8s.io/plugin_0", "gpushare.io/share=5GiB,gpushare.io/share=5GiB")
        };
        for bundle in [
            names(Bundle::with_probe()),
            names(Bundle::with_probe().env("GPUSHARE_CDI_SHARE_5GIB", "gpushare.io/share=5GiB")),
            Bundle::with_probe().env("NVIDIA_VISIBLE_DEVICES", "gpushare.io/share=5GiB"),
        ] {
            let container = runtime.run(&bundle);
            let report = Report::of(&container, &["6GiB", "4GiB"]);
            report.assert_size(5 * GIB);
            assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_device_that_no_engine_applied_is_the_gpu_of_its_specification() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::create(3, MODEL, "20GiB");
    let folder = Scratch::new("specifications");
    folder.file(
        "claim.yaml",
        "cdiVersion: 0.7.0\nkind: k8s.gpu.nvidia.com/claim\ndevices:\n- name: 0b5c-gpu-2\n  containerEdits:\n    \
         deviceNodes:\n    - path: /dev/nvidia2\ncontainerEdits:\n  deviceNodes:\n  - path: /dev/nvidiactl\n",
    );
    let own = json!({"cdiVersion": "0.5.0", "kind": "lab.example/card", "devices": [
        {"name": "left", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
        {"name": "nic", "containerEdits": {"deviceNodes": [{"path": "/dev/infiniband/uverbs0"}]}},
    ]});
    folder.file("lab.json", own.to_string());
    let specifications = format!("[cdi]\nspec_dirs = [{:?}]\n", folder.path());
    let config = node.config_with("specified", &format!("{}\n{specifications}", LowLevel::Runc.settings()));
    let runtime = Runtime::with_config(LowLevel::Runc, &config);
    let annotated = |name: &str| Bundle::with_probe().annotation("cdi.k8s.io/plugin_0", name);
    for (bundle, gpu) in [
        (annotated("k8s.gpu.nvidia.com/claim=0b5c-gpu-2"), 2),
        (annotated("lab.example/card=left").annotation("gpushare.io/memory", "5GiB"), 1),
        (Bundle::with_probe().env("NVIDIA_VISIBLE_DEVICES", "lab.example/card=left"), 1),
    ] {
        let container = runtime.run(&bundle);
        let nodes = container.exec(&["ls", "/dev"]).expect_success("ls").stdout;
        let gpus: Vec<&str> = nodes.lines().filter(|node| minor_of(node).is_some()).collect();
        assert_eq!(gpus, [format!("nvidia{gpu}")]);
    }
    // The device's name still means the same GPU when the bundle is run again, whatever has become of the
    // specification.
    let again =
        annotated("k8s.gpu.nvidia.com/claim=0b5c-gpu-2").annotation("alloc.gpushare.io/memory", "4GiB");
    drop(runtime.run(&again));
    fs::rename(folder.path().join("claim.yaml"), folder.path().join("claim.gone"))
        .expect("a file can be renamed");
    let container = runtime.create_as_it_is(&again).unwrap_or_else(|refusal| panic!("{refusal:?}"));
    container.start();
    assert!(container.exec(&["ls", "/dev"]).stdout.contains("nvidia2\n"));
    drop(container);
    let unknown = annotated("k8s.gpu.nvidia.com/claim=0b5c-gpu-9");
    let told = runtime.create(&unknown).expect_err("a claim that nobody specified").line();
    assert!(told.contains("0b5c-gpu-9") && told.contains("cdi.spec_dirs"), "{told}");
    let others = annotated("lab.example/card=nic");
    let container = runtime.run(&others);
    let nodes = container.exec(&["ls", "/dev"]).expect_success("ls").stdout;
    assert!(!nodes.contains("nvidia"), "{nodes}");
    drop(container);
    assert_eq!(leases(&config).len(), 0);
}

/// The minor number N in `nvidiaN`.
fn minor_of(node: &str) -> Option<u32> {
    node.strip_prefix("nvidia")?.parse().ok()
}

/// A podman with its own storage. It finds the CDI files of this mount namespace.
struct Podman {
    scratch: Scratch,
    runtime: PathBuf,
}

impl Podman {
    /// A podman whose runtime is the wrapper, under the settings file `config`.
    fn wrapped(config: &Path) -> Self {
        let scratch = Scratch::new("podman");
        // conmon does not pass our variable on to the runtime.
        let script = format!(
            "#!/bin/sh\nGPUSHARE_CONFIG='{}' exec '{}' \"$@\"\n",
            config.display(),
            artifacts::wrapper().display()
        );
        let runtime = scratch.file("gpushare", script);
        fs::set_permissions(&runtime, Permissions::from_mode(0o755))
            .expect("a script can be made executable");
        Self::with(scratch, runtime)
    }

    /// A podman whose runtime is runc, without gpushare.
    fn bare() -> Self {
        Self::with(Scratch::new("podman"), LowLevel::Runc.program().into())
    }

    fn with(scratch: Scratch, runtime: PathBuf) -> Self {
        let root = scratch.folder("image");
        image::with_probe(&root);
        let archive = scratch.path().join("image.tar");
        let mut tar = Command::new("tar");
        let _ =
            command::run(tar.arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".")).expect_success("tar");
        let podman = Self { scratch, runtime };
        let archive = archive.to_string_lossy().into_owned();
        let _ =
            podman.call(&["import", "--quiet", &archive, "gpushare-test:1"]).expect_success("podman import");
        podman
    }

    fn call(&self, args: &[&str]) -> Outcome {
        let mut podman = Command::new("/usr/bin/podman");
        for (flag, folder) in [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
            podman.arg(flag).arg(self.scratch.path().join(folder));
        }
        podman.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]);
        command::run(podman.arg("--runtime").arg(&self.runtime).args(args))
    }

    fn run(&self, flags: &[&str], args: &[&str]) -> Outcome {
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"];
        self.call(
            &[&["run", "--network", "none"], &limits[..], flags, &["localhost/gpushare-test:1"], args]
                .concat(),
        )
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.call(&["rm", "--all", "--force", "--time", "0"]);
    }
}

/// Empties the folders in which engines look, for programs that are started in this mount namespace.
fn empty_cdi_folder() {
    let folder = Path::new("/var/run/cdi");
    fs::create_dir_all(folder).expect("the folder of CDI can be made");
    for folder in [folder, Path::new("/etc/cdi")].into_iter().filter(|folder| folder.is_dir()) {
        mount(Some("none"), folder, Some("tmpfs"), MsFlags::empty(), None::<&str>)
            .expect("a tmpfs can be mounted");
    }
}

const PODMAN: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Podman];

#[test]
#[ignore = "needs root, runc and podman: runs containers"]
fn podman_gives_a_share_by_its_cdi_name() {
    if !met(PODMAN) {
        return;
    }
    namespace::private(|| {
        empty_cdi_folder();
        let node = SimulatedNode::one_gpu();
        let config = node.config_with("runc", &LowLevel::Runc.settings());
        let _ = cli(&config, &["cdi", "generate"]).expect_success("gpushare cdi generate");
        let podman = Podman::wrapped(&config);
        let probe =
            ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];
        let told = podman.run(&["--rm", "--device", "gpushare.io/share=4GiB"], &probe);
        let report = Report::parse(&told.expect_success("podman run").stdout);
        report.assert_size(4 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        assert_eq!(leases(&config), []);

        let run = ["--detach", "--name", "quarter", "--device", "gpushare.io/share=25pct-25"];
        let _ = podman.run(&run, &["/bin/sleep", "1000"]).expect_success("podman run");
        let shares = leases(&config);
        assert_eq!(shares.iter().map(|lease| lease.memory.clone()).collect::<Vec<_>>(), [vec![20 * GIB]]);
        let _ = podman.call(&["rm", "--force", "--time", "0", "quarter"]).expect_success("podman rm");
        assert_eq!(leases(&config), []);
    });
}

#[test]
#[ignore = "needs root, runc and podman: runs containers"]
fn podman_gives_whole_gpus_by_their_cdi_names_and_nobody_else_gets_them() {
    if !met(PODMAN) {
        return;
    }
    namespace::private(|| {
        empty_cdi_folder();
        let node = SimulatedNode::create(3, MODEL, "80GiB");
        let config = node.config_with("runc", &LowLevel::Runc.settings());
        let _ = cli(&config, &["cdi", "generate"]).expect_success("gpushare cdi generate");
        let podman = Podman::wrapped(&config);
        let two = ["--device", "gpushare.io/gpu=0", "--device", "gpushare.io/gpu=1"];
        let run = [&["--detach", "--name", "whole"], &two[..]].concat();
        let _ = podman.run(&run, &["/bin/sleep", "1000"]).expect_success("podman run");
        assert_eq!(leases(&config)[0].memory, [80 * GIB, 80 * GIB]);
        for (script, want) in [
            ("cat /dev/nvidia0", "No such device or address"),
            ("cat /dev/nvidia1", "No such device or address"),
            ("cat /dev/nvidia2", "No such file or directory"),
            ("busybox mknod /tmp/gpu c 195 2", "Operation not permitted"),
        ] {
            let told = podman.call(&["exec", "whole", "/bin/sh", "-c", script]).stderr;
            assert!(told.contains(want), "{script}: {told}");
        }
        let share = podman
            .run(&["--rm", "--device", "gpushare.io/share=4GiB", "-e", "GPUSHARE_DEVICES=0"], &["true"]);
        assert!(!share.success() && share.stderr.contains("cannot lease a GPU"), "{share:?}");
        let both = ["--rm", "--device", "gpushare.io/share=4GiB", "--device", "gpushare.io/gpu=2"];
        let both = podman.run(&both, &["true"]);
        for part in ["gpushare.io/share=4GiB", "gpushare.io/gpu=2", "contradict"] {
            assert!(both.stderr.contains(part), "no {part:?} in {}", both.stderr);
        }
        let _ = podman.call(&["rm", "--force", "--time", "0", "whole"]).expect_success("podman rm");
        assert_eq!(leases(&config), []);
    });
}

#[test]
#[ignore = "needs root, runc and podman: runs containers"]
fn podman_gives_shares_and_whole_gpus_without_gpushares_runtime() {
    if !met(PODMAN) {
        return;
    }
    namespace::private(|| {
        empty_cdi_folder();
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let config = node.config();
        let _ = cli(config, &["cdi", "generate"]).expect_success("gpushare cdi generate");
        let podman = Podman::bare();
        let probe =
            ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];
        let told = podman.run(&["--rm", "--device", "gpushare.io/share=4GiB"], &probe);
        let report = Report::parse(&told.expect_success("podman run").stdout);
        report.assert_size(4 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        assert_eq!(leases(config), []);

        let run = ["--detach", "--name", "whole", "--device", "gpushare.io/gpu=0"];
        let _ = podman.run(&run, &["/bin/sleep", "1000"]).expect_success("podman run");
        assert_eq!(
            leases(config).iter().map(|lease| lease.memory.clone()).collect::<Vec<_>>(),
            [vec![80 * GIB]]
        );
        let again = podman.run(&["--rm", "--device", "gpushare.io/gpu=0"], &["true"]);
        assert!(again.stderr.contains("gpushare-hook: cannot lease a GPU: "), "{again:?}");
        let _ = podman.call(&["rm", "--force", "--time", "0", "whole"]).expect_success("podman rm");
        assert_eq!(leases(config), []);
    });
}

/// Changes the bundle's config.json as an engine would have written it.
fn edit(bundle: &Bundle, change: impl FnOnce(&mut Value)) {
    let mut spec: Value = serde_json::from_slice(&bundle.write()).expect("config.json is JSON");
    change(&mut spec);
    fs::write(bundle.config_path(), spec.to_string()).expect("config.json can be written");
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_whole_gpu_beside_a_share_is_refused_whoever_brings_it() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    type Change = fn(&mut Value);
    let ways: [(&str, Change, &[&str]); 6] = [
        (
            "cdi",
            |spec| spec["annotations"]["cdi.k8s.io/x"] = json!("nvidia.com/gpu=1"),
            &["GPUSHARE_DEVICES", "nvidia.com/gpu=1"],
        ),
        (
            "volume mount",
            |spec| {
                mounts(spec).push(json!({"destination": "/var/run/nvidia-container-devices/GPU-a", "source": "/dev/null", "type": "bind", "options": ["bind"]}))
            },
            &["request.volume_mounts = true", "/var/run/nvidia-container-devices/GPU-a"],
        ),
        (
            "applied cdi",
            |spec| {
                mounts(spec).push(json!({"destination": "/usr/lib/libcuda.so.535.309.01", "source": "/bin/true", "type": "bind", "options": ["bind"]}))
            },
            &["/usr/lib/libcuda.so.535.309.01", "whole GPU"],
        ),
        (
            "device",
            |spec| {
                spec["linux"]["devices"] =
                    json!([{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}])
            },
            &["/dev/nvidia1", "GPUSHARE_DEVICES"],
        ),
        (
            "rule",
            |spec| spec["linux"]["resources"]["devices"] = json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "access": "rwm"}]),
            &["195:*", "GPUSHARE_DEVICES"],
        ),
        (
            "rule without a major",
            |spec| spec["linux"]["resources"]["devices"] = json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "minor": 1, "access": "rw"}]),
            &["*:1", "GPUSHARE_DEVICES"],
        ),
    ];
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let mut wrong = Vec::new();
    for (way, change, parts) in ways {
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "0");
        edit(&bundle, change);
        let told = match runtime.create_as_it_is(&bundle) {
            Ok(_) => "it was created".to_owned(),
            Err(refusal) => refusal.line(),
        };
        let folder = bundle.path().to_str().expect("a path in UTF-8");
        let planned = cli(runtime.config(), &["plan", "--bundle", folder]).stderr;
        for told in [told, planned] {
            let missing = parts.iter().find(|part| !told.contains(*part));
            wrong.extend(missing.map(|part| format!("{way}: no {part:?} in: {told}")));
        }
        runtime.delete_force(bundle.id());
        assert_eq!(leases(runtime.config()), [], "{way}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn mounts(spec: &mut Value) -> &mut Vec<Value> {
    spec["mounts"].as_array_mut().expect("the bundle has mounts")
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn nvidias_own_hook_never_runs_beside_a_share() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let folder = Scratch::new("hooks");
    let marker = folder.path().join("marker");
    let hook = |name: &str| {
        let path = folder.file(name, format!("#!/bin/sh\necho {name} >>{}\n", marker.display()));
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("a script can be made executable");
        json!({"path": path, "args": [name, "prestart"], "env": ["PATH=/bin"]})
    };
    let all = ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "another-hook"].map(hook);
    let bundle = Bundle::small();
    edit(&bundle, |spec| spec["hooks"]["prestart"] = json!(all));
    let Ok(container) = runtime.create_as_it_is(&bundle) else { panic!("no request, and yet refused") };
    drop(container);
    assert_eq!(
        fs::read_to_string(&marker).expect("hooks run").lines().count(),
        3,
        "the stand-ins do not work"
    );
    fs::remove_file(&marker).expect("the marker can be removed");
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    edit(&bundle, |spec| spec["hooks"]["prestart"] = json!(all));
    let Ok(_container) = runtime.create_as_it_is(&bundle) else { panic!("refused") };
    assert_eq!(fs::read_to_string(&marker).expect("hooks run"), "another-hook\n");
}
