//! `ldconfig -p` lists the driver: Triton (torch.compile) and `ctypes.util.find_library` ask it. The images are
//! a whole Debian with its own ldconfig and dpkg, and this machine's own root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::cli;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::BareMachine];
const SOON: Duration = Duration::from_secs(20);
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
const CACHE: &str = "etc/ld.so.cache";
const PRINT: [&str; 2] = ["/sbin/ldconfig", "-p"];

/// A Debian root in a layer of an engine's.
fn debian() -> Bundle {
    Bundle::engines_layer(&artifacts::bare_machine())
}

/// A Debian root that is no layer of an engine's.
fn debian_elsewhere() -> Bundle {
    Bundle::over(&artifacts::bare_machine(), "upper")
}

fn asking(bundle: Bundle) -> Bundle {
    bundle.env("GPUSHARE_MEMORY", "4GiB")
}

/// Asserts that the output of `ldconfig -p` has each library once, at a path below a folder of libraries.
fn assert_listed(output: &str, what: &str) {
    assert!(output.contains("libc.so.6 "), "{what}: {output}");
    for library in LIBRARIES {
        let lines: Vec<&str> =
            output.lines().filter(|line| line.trim().starts_with(&format!("{library} "))).collect();
        let paths: Vec<&str> = lines.iter().filter_map(|line| line.split(" => ").nth(1)).collect();
        assert!(matches!(&paths[..], [path] if path.ends_with(library)), "{what}: {lines:?}");
    }
}

fn assert_lists(container: &Container<'_>, what: &str) {
    assert_listed(&container.exec(&PRINT).expect_success("ldconfig -p").stdout, what);
}

#[test]
#[ignore = "needs root, runc and a bare machine: runs containers"]
fn ldconfig_lists_the_driver_for_every_user_in_every_kind_of_root() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    type Make = fn() -> Bundle;
    let roots: [(&str, Make); 4] = [
        ("an engine's layer", debian),
        ("an engine's layer, read-only", || debian().read_only()),
        ("another overlay", debian_elsewhere),
        ("another overlay, read-only", || debian_elsewhere().read_only()),
    ];
    for (what, make) in roots {
        for user in [0, 1000] {
            let bundle = asking(make()).args(&PRINT).set("/process/user", json!({"uid": user, "gid": user}));
            let container = runtime.run(&bundle);
            assert!(container.wait_stopped(SOON), "{what}");
            assert_listed(&container.stdout(), &format!("{what}, user {user}"));
        }
    }
}

#[test]
#[ignore = "needs root, runc and a bare machine: runs containers and makes a package"]
fn a_containers_own_ldconfig_and_its_packages_replace_the_cache_and_keep_the_driver() {
    if !met(&[NEEDS, &[Need::Dpkg]].concat()) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = asking(debian());
    let scratch = Scratch::new("package");
    fs::copy(package(&scratch), bundle.root().join("root/local.deb")).expect("a package can be copied");
    {
        let container = runtime.run(&bundle);
        assert_lists(&container, "at first");
        let _ = container.exec(&["/sbin/ldconfig"]).expect_success("ldconfig");
        assert_lists(&container, "after ldconfig");
        let installed = container.exec(&["/usr/bin/dpkg", "-i", "/root/local.deb"]).expect_success("dpkg -i");
        assert!(installed.stdout.contains("Processing triggers for libc-bin"), "{}", installed.stdout);
        assert_lists(&container, "after a package");
    }
    // The engine starts the stopped container again, in the same root, and once without a share.
    let cache = || fs::read(bundle.root().join(CACHE)).expect("the cache can be read");
    bundle.write();
    assert_lists(&runtime.run(&bundle), "at a second start");
    let second = cache();
    bundle.write();
    assert_lists(&runtime.run(&bundle), "at a third start");
    assert_eq!(cache(), second, "each start adds to the cache");
    let plain = bundle.edit(|spec| spec["process"]["env"] = json!(["PATH=/usr/sbin:/usr/bin"]));
    let _ = runtime.run(&plain).exec(&["/sbin/ldconfig"]).expect_success("ldconfig without a share");
}

/// A package whose installation triggers ldconfig, as every library's does.
fn package(scratch: &Scratch) -> PathBuf {
    let folder = scratch.folder("local");
    fs::create_dir(folder.join("DEBIAN")).expect("a folder can be made");
    let control = "Package: gpushare-local\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.com>\n\
                   Description: triggers ldconfig\n";
    fs::write(folder.join("DEBIAN/control"), control).expect("a file can be written");
    fs::write(folder.join("DEBIAN/triggers"), "activate-noawait ldconfig\n").expect("a file can be written");
    let built = scratch.path().join("local.deb");
    let mut build = Command::new("dpkg-deb");
    let _ = command::run(build.args(["--root-owner-group", "--build"]).arg(folder).arg(&built))
        .expect_success("dpkg-deb");
    built
}

#[test]
#[ignore = "needs root, runc and a bare machine: runs containers"]
fn a_cache_that_is_mounted_over_is_named_by_plan_and_the_one_below_stays() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let (bundle, layer) = (asking(debian_elsewhere()), asking(debian()));
    let plan = |bundle: &Bundle| {
        let path = bundle.path().to_str().expect("paths are UTF-8");
        cli(runtime.config(), &["plan", "--bundle", path]).expect_success("plan").stdout
    };
    let (mounted, replaced) = (plan(&bundle), plan(&layer));
    assert!(mounted.contains("mount     /etc/ld.so.cache <- "), "{mounted}");
    assert!(mounted.contains("ldconfig in the container cannot replace it"), "{mounted}");
    assert!(!replaced.contains("mount     /etc/ld.so.cache") && replaced.contains("own layer"), "{replaced}");
    let before = fs::read(bundle.root().join(CACHE)).expect("the cache can be read");
    let container = runtime.run(&bundle);
    assert_lists(&container, "mounted");
    assert!(!container.exec(&["/sbin/ldconfig"]).success(), "a mount was replaced");
    drop(container);
    assert_eq!(fs::read(bundle.root().join(CACHE)).expect("the cache can be read"), before);
    assert_eq!(regions::left(&node.state()), Vec::<PathBuf>::new(), "what is left of the mounted file");
}

#[test]
#[ignore = "needs root, runc and a bare machine: runs containers"]
fn a_hook_lists_the_driver_too() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config().to_string_lossy().into_owned();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::V2);
    type Make = fn() -> Bundle;
    for (what, make) in [("an engine's layer", debian as Make), ("another overlay", debian_elsewhere as Make)]
    {
        let hook = artifacts::hook();
        let bundle = asking(make())
            .hook("createRuntime", &hook, &["createRuntime", "--config", &config])
            .hook("poststop", &hook, &["poststop", "--config", &config]);
        let container = runtime.run(&bundle);
        assert_lists(&container, what);
        let rebuilt = container.exec(&["/sbin/ldconfig"]).success();
        assert_eq!(rebuilt, what == "an engine's layer", "{what}");
        assert_lists(&container, what);
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn python_finds_the_driver_by_name() {
    if !met(&[Need::Root, Need::Runc]) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let find = "import ctypes.util as u; print(u.find_library('cuda'), u.find_library('nvidia-ml'))";
    let bundle = asking(Bundle::host_root()).args(&["/usr/bin/python3", "-c", find]);
    let container = runtime.run(&bundle);
    assert!(container.wait_stopped(SOON), "python goes on");
    assert_eq!(container.stdout().trim(), LIBRARIES.join(" "), "{}", container.stderr());
}
