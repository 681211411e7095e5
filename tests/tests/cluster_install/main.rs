//! The container image, and its installer on a node of a cluster: killed at each step it goes on where it was, and at
//! no moment does the engine's file name a runtime that is not there.

mod node;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::machine::entries;
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{SimulatedNode, ledger_in};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::Runtime;
use gpushare_tests::scratch::Scratch;
use gpushare_tests::shim::Shim;

use self::node::Node;

/// Two versions of the image, whose programs are the same.
const OLD: &str = "0.0.9";
const NEW: &str = "99.0.0";

/// What stands for the agent, which is built apart: it tells its version, and can run for long.
const AGENT: &str = "/usr/bin/sleep";

/// The engine's file, below the node's root.
const ENGINE_FILE: &str = "etc/containerd/config.toml";

/// A user who has no rights.
const NOBODY: u32 = 65_534;

/// How soon a process that waits for another has seen its end.
const SOON: Duration = Duration::from_secs(30);

/// Packs the image `version`, and returns its archive.
fn packed(version: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("images");
    let mut run = Command::new(artifacts::checkout().join("packaging/package.sh"));
    run.args(["image", version]).arg(folder).env("XZ_LEVEL", "1").env("AGENT", AGENT);
    PathBuf::from(command::run(&mut run).expect_success("package.sh").stdout.trim_end())
}

fn tar(args: &[&str], archive: &Path, folder: &Path) {
    fs::create_dir_all(folder).expect("a folder can be made below target");
    let _ =
        command::run(Command::new("tar").args(args).arg(archive).arg("-C").arg(folder)).expect_success("tar");
}

/// The blob that a descriptor of OCI names, in an unpacked image.
fn blob(image: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    image.join("blobs/sha256").join(digest.expect("each descriptor has a digest"))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("the file is there")).expect("it is JSON")
}

/// The root that containers of the image see, unpacked once for all tests here.
fn image(version: &'static str) -> &'static Path {
    static UNPACKED: LazyLock<BTreeMap<&str, PathBuf>> = LazyLock::new(|| {
        let unpack = |version| {
            let archive = packed(version);
            let folder = archive.with_extension("unpacked");
            // One of an earlier run may be there.
            let _ = fs::remove_dir_all(&folder);
            tar(&["-xf"], &archive, &folder.join("layout"));
            let index = json(&folder.join("layout/index.json"));
            let manifest = json(&blob(&folder.join("layout"), &index["manifests"][0]));
            tar(&["-xzf"], &blob(&folder.join("layout"), &manifest["layers"][0]), &folder.join("root"));
            (version, folder.join("root"))
        };
        [OLD, NEW].into_iter().map(unpack).collect()
    });
    &UNPACKED[version]
}

/// What the image `version` calls itself.
fn build(version: &'static str) -> String {
    let name = fs::read_to_string(image(version).join("opt/gpushare/BUILD")).expect("it is in each image");
    name.trim_end().to_owned()
}

const NEEDS: &[Need] = &[Need::Root, Need::Busybox, Need::Containerd];

#[test]
#[ignore = "needs root and the release build: unpacks an image"]
fn every_blob_of_the_image_has_its_digest_and_an_engine_takes_it() {
    if !met(&[Need::Root, Need::Busybox, Need::Podman]) {
        return;
    }
    let layout = image(NEW).parent().expect("it lies in a folder").join("layout");
    for path in entries(&layout.join("blobs/sha256")) {
        let told = command::run(Command::new("sha256sum").arg(layout.join("blobs/sha256").join(&path)));
        assert_eq!(told.stdout.split(' ').next(), path.to_str());
    }
    let manifest = json(&blob(&layout, &json(&layout.join("index.json"))["manifests"][0]));
    let unpack = format!("gzip -d <{} | sha256sum", blob(&layout, &manifest["layers"][0]).display());
    let told = command::run(Command::new("sh").args(["-c", &unpack])).stdout;
    let config = json(&blob(&layout, &manifest["config"]));
    assert_eq!(
        config["rootfs"]["diff_ids"][0].as_str(),
        told.split(' ').next().map(|sum| format!("sha256:{sum}")).as_deref()
    );

    let scratch = Scratch::new("podman");
    let podman = |args: &[&str]| {
        let mut run = Command::new("podman");
        run.arg("--root")
            .arg(scratch.path().join("root"))
            .arg("--runroot")
            .arg(scratch.path().join("runroot"));
        command::run(run.args(["--storage-driver", "vfs"]).args(args)).expect_success("podman")
    };
    let archive = layout.parent().expect("it lies in a folder").with_extension("tar");
    let _ = podman(&["load", "--input", &archive.to_string_lossy()]);
    let listed = podman(&["images", "--format", "{{.Repository}}:{{.Tag}}"]).stdout;
    assert_eq!(listed.trim_end(), format!("localhost/gpushare:{NEW}"));
    let _ = podman(&["rmi", "--all", "--force"]);
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn a_node_is_installed_in_the_image_and_told_once_and_later_builds_restart_nothing() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        // As in the container: its own programs alone, on a root that cannot be written.
        let inside = |version| {
            let root = Scratch::new("container");
            let bind = |from: &Path, to: &Path, flags| {
                mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>)
                    .expect("it can be bound");
            };
            bind(image(version), root.path(), MsFlags::empty());
            bind(root.path(), root.path(), MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY);
            bind(Path::new(&node.host()), &root.path().join("host"), MsFlags::MS_REC);
            bind(&node.machine.path("dev"), &root.path().join("dev"), MsFlags::empty());
            let mut run = Command::new("/usr/sbin/chroot");
            run.arg(root.path()).args(["/usr/lib/gpushare/node.sh", "install"]);
            run.env_clear().env("PATH", "/opt/gpushare/bin:/bin").env("ENGINE", "containerd");
            let _ = command::run(&mut run).expect_success("node.sh install");
        };
        inside(OLD);
        assert_eq!(node.current(), Some(build(OLD)));
        let told = node.read(ENGINE_FILE);
        assert!(told.contains("BinaryName = \"/opt/gpushare/current/bin/gpushare-runtime\""), "{told}");
        assert_eq!(node.read("run/restarts"), "restart containerd\n");
        node.assert_engine_finds_its_runtime("installed");
        let version = node.machine.run(&["/opt/gpushare/current/bin/gpushare", "--version"]);
        let _ = version.expect_success("gpushare --version");

        inside(OLD);
        inside(NEW);
        assert_eq!(node.current(), Some(build(NEW)));
        assert_eq!((node.read(ENGINE_FILE), node.restarts()), (told, 1));
        assert!(!node.has(OLD), "nobody used it");
        for path in entries(&node.machine.path("opt/gpushare")) {
            let file =
                fs::symlink_metadata(node.machine.path("opt/gpushare").join(&path)).expect("it is there");
            let safe = file.is_symlink() || file.uid() == 0 && file.mode() & 0o022 == 0;
            assert!(safe, "{}: {:o}", path.display(), file.mode());
        }
    });
}

#[test]
#[ignore = "needs root and the release build: kills installers on nodes of its own"]
fn an_installer_that_is_killed_at_any_step_goes_on() {
    if !met(NEEDS) {
        return;
    }
    // What is on the node before, and what is killed.
    for (before, version, verb) in
        [(None, NEW, "install"), (Some(OLD), NEW, "install"), (Some(NEW), NEW, "remove")]
    {
        let what = format!("{verb} on {before:?}");
        let node = || {
            let node = Node::new();
            if let Some(version) = before {
                node.install(version);
            }
            node
        };
        let (steps, want) = private(|| {
            let node = node();
            (node.killed(version, verb, 0, false), node.state())
        });
        assert!(steps.len() > 10, "{what}: {steps:?}");
        assert_eq!(want.2, want.3, "{what}: the engine has read its file");
        assert_eq!(want.1.is_some(), verb == "install", "{what}");
        let after = steps.iter().zip(1..).map(|(name, at)| (name, at, false));
        let within =
            steps.iter().zip(1..).filter(|(name, _)| *name == "cp").map(|(name, at)| (name, at, true));
        for (name, at, within) in after.chain(within) {
            let when =
                format!("{what}, killed {} step {at}, {name}", if within { "within" } else { "after" });
            let got = private(|| {
                let node = node();
                let _ = node.killed(version, verb, at, within);
                node.assert_engine_finds_its_runtime(&when);
                let _ = node.run(version, verb).expect_success(&when);
                node.assert_engine_finds_its_runtime(&when);
                node.state()
            });
            assert_eq!(got, want, "{when}");
        }
    }
}

fn end(mut process: Child) {
    process.kill().expect("one's own child can be ended");
    let _ = process.wait().expect("and waited for");
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn a_build_stays_while_a_container_or_a_process_or_a_device_needs_it() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("users");
        node.install(OLD);
        let of_old = format!("/opt/gpushare/{}", build(OLD));
        let config = format!(r#"{{"hooks":{{"poststop":[{{"path":"{of_old}/bin/gpushare-hook"}}]}}}}"#);

        let false_ones = [None, Some(NOBODY)].map(|user| Shim::false_one(&scratch, &config, user));
        let shim = Shim::start(&scratch, &node.machine, &[("config.json", config.clone())]);
        node.install(NEW);
        assert_eq!(node.current(), Some(build(NEW)));
        assert!(node.has(OLD), "a container's hook is in it");
        drop(shim);

        let agent = node.machine.path(&of_old[1..]).join("bin/gpushare-kube");
        // Anybody may run it, and keeps nobody by it.
        let by_anybody = Command::new(&agent).arg("1000").uid(NOBODY).spawn().expect("it starts");
        let agent = Command::new(agent).arg("1000").spawn().expect("it starts");
        node.install(NEW);
        assert!(node.has(OLD), "a process of root runs from it");
        end(agent);

        let device = node.machine.path("etc/cdi/gpushare-share.json");
        fs::create_dir_all(device.parent().expect("it has a folder"))
            .expect("a folder can be made in an overlay");
        fs::write(&device, &config).expect("a file can be written in an overlay");
        node.install(NEW);
        assert!(node.has(OLD), "a CDI device names its hook");
        fs::remove_file(device).expect("the file can be removed");

        node.install(NEW);
        assert!(!node.has(OLD), "nobody needs it any more, whatever others say");
        end(by_anybody);
        drop(false_ones);
    });
}

#[test]
#[ignore = "needs root and runc: installs on a node of its own, and runs a container"]
fn a_container_of_an_earlier_build_keeps_its_share_and_is_ended_by_the_later_one() {
    if !met(&[Need::Root, Need::Busybox, Need::Containerd, Need::Runc]) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("earlier");
        node.install(OLD);
        let gpus = SimulatedNode::one_gpu();
        let runtime =
            Runtime::installed(&node.machine.path("opt/gpushare/current/bin/gpushare-runtime"), &gpus);
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let container = runtime.run(&bundle);
        let config = fs::read_to_string(bundle.config_path()).expect("it is there");
        assert!(config.contains(&format!("/opt/gpushare/{}/bin/gpushare-hook", build(OLD))), "{config}");
        // On a node the paths begin at its own root.
        let shim = Shim::start(&scratch, &node.machine, &[("config.json", config.replace(&node.host(), ""))]);

        node.install(NEW);
        assert!(node.has(OLD), "the container's hook is in it");
        let report = Report::of(&container, &["5GiB", "3GiB"]);
        report.assert_size(4 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        let beside = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let beside_it = runtime.run(&beside);
        let config = fs::read_to_string(beside.config_path()).expect("it is there");
        assert!(config.contains(&format!("/opt/gpushare/{}/bin/gpushare-hook", build(NEW))), "{config}");
        assert_eq!(leases(runtime.config()).len(), 2);
        drop(container);
        assert_eq!(leases(runtime.config()).len(), 1);
        drop((beside_it, shim));
        assert_eq!(leases(runtime.config()), []);
        node.install(NEW);
        assert!(!node.has(OLD), "nobody needs it any more");
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn who_runs_programs_waits_for_their_build_and_the_keeper_removes_the_one_before() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("verbs");
        let spawn = |verb: &str| command::spawn(&mut node.installer(NEW, verb), &scratch.folder(verb));
        node.install(OLD);
        let mut waiting = spawn("wait");
        let said = || fs::read_to_string(scratch.path().join("wait/stdout")).unwrap_or_default();
        assert!(
            command::eventually(SOON, || said().contains("waits until the installer has made")),
            "{}",
            said()
        );
        let agent = node.machine.path("opt/gpushare/current/bin/gpushare-kube");
        let mut agent = Command::new(agent).arg("1000").spawn().expect("it starts");
        assert!(command::wait(&mut waiting, Duration::from_millis(1500)).is_none(), "{OLD} is not {NEW}");
        node.install(NEW);
        assert!(command::wait(&mut waiting, SOON).expect("it ends").success());
        agent.kill().expect("one's own child can be ended");
        let _ = agent.wait().expect("and waited for");

        assert!(node.has(OLD));
        let mut keeper = spawn("keep");
        assert!(command::eventually(SOON, || !node.has(OLD)), "nobody needs it any more");
        let pid = Pid::from_raw(i32::try_from(keeper.id()).expect("pids are small"));
        kill(pid, Signal::SIGTERM).expect("one's own child can be told");
        assert!(command::wait(&mut keeper, SOON).expect("it ends").success());
        assert!(
            node.current() == Some(build(NEW)) && !node.read(ENGINE_FILE).is_empty(),
            "nothing else goes"
        );
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn a_restart_that_was_due_is_made_up_for_but_not_after_a_reboot() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        node.install(NEW);
        let note = node.machine.path("opt/gpushare/restart");
        for (boot, restarts) in
            [("another-boot\n".to_owned(), 1), (node.read("proc/sys/kernel/random/boot_id"), 2)]
        {
            fs::write(&note, &boot).expect("a file can be written in an overlay");
            node.install(NEW);
            assert_eq!((node.restarts(), note.exists()), (restarts, false), "{boot}");
        }
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn a_removal_waits_for_containers_and_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("removal");
        let settings = scratch.file("settings.toml", "[request]\nstrict = true\n");
        let install = || {
            let mut run = node.installer(NEW, "install");
            let _ = command::run(run.env("SETTINGS", &settings)).expect_success("node.sh install");
        };
        install();
        let drop_in = "etc/gpushare/gpushare.toml.d/20-cluster.toml";
        assert!(node.read(drop_in).ends_with("[request]\nstrict = true\n"), "{}", node.read(drop_in));
        node.install(NEW);
        assert_eq!(node.read(drop_in), "", "settings that the chart has no more go");
        install();
        // It asked for nothing, so its config.json tells nothing; its shim calls the runtime to stop it.
        let runtime = r#"{"binary_name":"/opt/gpushare/current/bin/gpushare-runtime"}"#;
        let shim = Shim::start(&scratch, &node.machine, &[("options.json", runtime.to_owned())]);

        let outcome = command::run(node.installer(NEW, "remove").env("ENGINE", "none"));
        assert!(
            !outcome.success() && outcome.stderr.contains("containerd still has the runtime"),
            "{outcome:?}"
        );
        assert_eq!(node.current(), Some(build(NEW)), "somebody else has told containerd");

        let output = scratch.folder("output");
        let mut removal = command::spawn(&mut node.installer(NEW, "remove"), &output);
        let said = || fs::read_to_string(output.join("stdout")).unwrap_or_default();
        assert!(command::eventually(SOON, || said().contains("waits for the end of")), "{}", said());
        assert!(
            said().contains("waits for the end of container pod-1, which still uses /opt/gpushare"),
            "{}",
            said()
        );
        assert_eq!((node.read(ENGINE_FILE), node.restarts()), (String::new(), 2), "the engine is told first");
        assert_eq!(node.current(), Some(build(NEW)), "the container can still be stopped");
        drop(shim);
        let ended = command::wait(&mut removal, SOON).expect("it ends");
        assert!(ended.success(), "{}", fs::read_to_string(output.join("stderr")).unwrap_or_default());
        assert_eq!(node.state().0, Vec::<String>::new());
        // Where nothing is left there is nothing to do.
        let _ = node.run(NEW, "remove").expect_success("node.sh remove");
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn what_others_have_beside_it_stays_and_nothing_goes_while_nobody_can_tell() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("others");
        // The folder of a build system, and one with a point in front.
        let others = ["opt/gpushare/project/BUILD", "opt/gpushare/.old.backups/file"];
        for path in others {
            let path = node.machine.path(path);
            fs::create_dir_all(path.parent().expect("it has a folder"))
                .expect("a folder can be made in an overlay");
            fs::write(path, "cc_library()\n").expect("a file can be written in an overlay");
        }
        let drop_in = "etc/gpushare/gpushare.toml.d/20-cluster.toml";
        let own = node.machine.path(drop_in);
        fs::create_dir_all(own.parent().expect("it has a folder"))
            .expect("a folder can be made in an overlay");
        fs::write(&own, "[request]\nstrict = true\n").expect("a file can be written in an overlay");
        let settings = scratch.file("settings.toml", "[request]\nstrict = false\n");
        let told = command::run(node.installer(NEW, "install").env("SETTINGS", &settings));
        assert!(!told.success() && told.stderr.contains("is somebody's own"), "{told:?}");
        // A distribution's containerd, by whose template it is told.
        let template = "var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl";
        fs::create_dir_all(node.machine.path(template).parent().expect("it has a folder"))
            .expect("a folder can be made in an overlay");
        let of_k3s = |verb| {
            let mut run = node.installer(NEW, verb);
            command::run(run.env("ENGINE_CONFIG", format!("/{template}")).env("ENGINE_UNIT", "k3s"))
        };
        let _ = of_k3s("install").expect_success("node.sh install");
        assert!(node.read(template).contains("/opt/gpushare/current/bin/gpushare-runtime"));

        let ledger = ledger_in(&node.machine.path("run/gpushare"));
        fs::create_dir_all(ledger.parent().expect("it has a folder"))
            .expect("a folder can be made in an overlay");
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(node.machine.path("run/gpushare"), private).expect("it is private as gpushare's");
        fs::write(&ledger, "gpushare leases, version 9999: 0000000000 bytes, crc32 00000000\n")
            .expect("a file can be written in an overlay");
        let told = of_k3s("remove");
        assert!(
            !told.success() && told.stderr.contains("cannot tell whether containers hold shares"),
            "{told:?}"
        );
        assert_eq!(node.current(), Some(build(NEW)));
        fs::remove_file(ledger).expect("it can be removed");

        let _ = of_k3s("remove").expect_success("node.sh remove");
        assert_eq!(node.current(), None);
        assert_eq!(node.read(drop_in), "[request]\nstrict = true\n");
        for path in others {
            assert_eq!(node.read(path), "cc_library()\n", "{path}");
        }
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn what_cannot_be_installed_is_refused_in_one_line_and_changes_nothing() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        let scratch = Scratch::new("refused");
        let wrong = scratch.file("wrong.toml", "[reques]\n").to_string_lossy().into_owned();
        symlink("/opt", node.machine.path("srv/link")).expect("a link can be made in an overlay");
        fs::create_dir_all(node.machine.path("srv/open/below")).expect("a folder can be made in an overlay");
        fs::set_permissions(node.machine.path("srv/open"), fs::Permissions::from_mode(0o777))
            .expect("it is ours");
        for (name, value, want) in [
            ("FOLDER", "opt/gpushare", "FOLDER is an absolute path below another folder"),
            ("FOLDER", "/opt", "FOLDER is an absolute path below another folder"),
            ("FOLDER", "/opt/../etc", "FOLDER has no empty parts and no dots"),
            ("FOLDER", "/opt/a b", "FOLDER has letters, digits and ._- alone"),
            (
                "FOLDER",
                "/srv/link/gpushare",
                "/srv/link on the node is a link to /opt: name the folder behind it",
            ),
            ("FOLDER", "/srv/open/below", "/srv/open on the node can be written by others than root"),
            ("FOLDER", "/etc/passwd/gpushare", "/etc/passwd on the node is no folder"),
            ("ENGINE", "docker", "ENGINE is containerd, crio or none: docker"),
            ("HOST", "/nowhere", "/nowhere does not show the node's root"),
            ("SETTINGS", &wrong, "the settings are not taken (see above)"),
        ] {
            let outcome = command::run(node.installer(NEW, "install").env(name, value));
            let ours: Vec<&str> =
                outcome.stderr.lines().filter(|line| line.starts_with("gpushare-node: ")).collect();
            assert!(
                !outcome.success() && ours.len() == 1 && ours[0].contains(want),
                "{name}={value}: {outcome:?}"
            );
            assert_eq!((node.current(), node.read(ENGINE_FILE)), (None, String::new()), "{name}={value}");
        }
        assert_eq!(node.restarts(), 0);

        let state = node.machine.path("run/gpushare");
        fs::create_dir_all(&state).expect("a folder can be made in an overlay");
        fs::write(
            state.join("leases-newer"),
            "gpushare leases, version 9999: 0000000000 bytes, crc32 00000000\n",
        )
        .expect("a file can be written in an overlay");
        let outcome = node.run(NEW, "install");
        assert!(
            !outcome.success() && outcome.stderr.contains("has version 9999, this gpushare reads"),
            "{outcome:?}"
        );
        assert_eq!(node.current(), None);
    });
}

#[test]
#[ignore = "needs root and the release build: installs on a node of its own"]
fn a_build_that_lost_its_bytes_is_mended_where_it_is() {
    if !met(NEEDS) {
        return;
    }
    private(|| {
        let node = Node::new();
        node.install(NEW);
        let file = node.machine.path("opt/gpushare/current/bin/gpushare-hook");
        fs::write(&file, "power went").expect("a file can be written in an overlay");
        node.install(NEW);
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for (path, bytes) in [(&file, &mut got), (&artifacts::hook(), &mut want)] {
            let _ =
                fs::File::open(path).and_then(|mut file| file.read_to_end(bytes)).expect("it can be read");
        }
        assert!(got == want, "the hook is not the image's");
    });
}
