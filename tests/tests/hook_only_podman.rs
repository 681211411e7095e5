//! Hook-only mode as podman runs it: the files of packaging/hooks.d, for an annotation, without gpushare's
//! runtime.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::hooked::{When, hooks_folder};
use gpushare_tests::image;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::scratch::Scratch;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Podman, Need::Busybox];
const IMAGE: &str = "gpushare-test:1";

/// A podman with storage, state and hooks of its own.
struct Podman {
    scratch: Scratch,
}

impl Podman {
    fn new(config: &Path) -> Self {
        let podman = Self { scratch: Scratch::new("podman") };
        let _ = hooks_folder(&podman.scratch, &artifacts::hook(), config, When::Annotated);
        let root = podman.scratch.folder("image");
        image::with_probe(&root);
        let archive = podman.scratch.path().join("image.tar");
        let mut tar = Command::new("tar");
        let _ =
            command::run(tar.arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".")).expect_success("tar");
        let archive = archive.to_string_lossy().into_owned();
        let _ = podman
            .call(&["import", "--change", "ENV PATH=/bin", &archive, IMAGE])
            .expect_success("podman import");
        podman
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn call(&self, args: &[&str]) -> Outcome {
        let mut podman = Command::new("/usr/bin/podman");
        for (flag, name) in
            [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp"), ("--hooks-dir", "hooks.d")]
        {
            podman.arg(flag).arg(self.folder(name));
        }
        podman.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]);
        podman.args(["--runtime", "/usr/bin/runc"]).args(args);
        command::run(&mut podman)
    }

    fn run(&self, flags: &[&str], args: &[&str]) -> Outcome {
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"];
        let words = [&["run", "--network", "none"], &limits[..], flags, &[IMAGE], args].concat();
        self.call(&words)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Best effort: the folder is removed next, with everything that podman wrote.
        let _ = self.call(&["rm", "--all", "--force", "--time", "0"]);
    }
}

#[test]
#[ignore = "needs root and podman: runs containers"]
fn podman_gives_shares_by_its_hooks_folder_and_takes_them_back() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let log = node.root().join("gpushare.log");
    let config = node.config_with("logged", &format!("[log]\nfile = \"{}\"", log.display()));
    let podman = Podman::new(&config);
    let probe = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];
    let share = ["--annotation", "gpushare.io/memory=4GiB"];
    let outcome = podman.run(&[&["--rm"], &share[..]].concat(), &probe).expect_success("podman run");
    let report = Report::parse(&outcome.stdout);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    assert_eq!(leases(&config), []);

    let flags = [&["--detach", "--name", "holder"], &share[..]].concat();
    let _ = podman.run(&flags, &["/bin/sleep", "1000"]).expect_success("podman run --detach");
    assert_eq!(leases(&config).len(), 1);
    let _ = podman.call(&["kill", "holder"]).expect_success("podman kill");
    let _ = podman.call(&["wait", "holder"]).expect_success("podman wait");
    let _ = podman.call(&["rm", "holder"]).expect_success("podman rm");
    assert_eq!(leases(&config), []);

    let told = fs::read_to_string(&log).expect("the hook has a log");
    let count = |part: &str| told.lines().filter(|line| line.contains(part)).count();
    assert_eq!((count("lease granted"), count("lease released")), (2, 2), "{told}");

    let refused = podman.run(&["--rm", "--annotation", "gpushare.io/memory=81GiB"], &["/bin/true"]);
    assert!(!refused.success() && refused.stderr.contains("81 GiB"), "{refused:?}");
    let told = fs::read_to_string(&log).expect("the hook has a log");
    assert_eq!(told.lines().filter(|line| line.contains("lease refused")).count(), 1, "{told}");
    let plain = podman.run(&["--rm"], &["/bin/ls", "/dev"]).expect_success("podman run without a request");
    assert!(!plain.stdout.contains("nvidia"), "{plain:?}");
    assert_eq!(leases(&config), []);
}
