//! GPUs that NVIDIA's own CDI specification gave. The engine has put the whole GPU's nodes, driver files and
//! hooks into the bundle, and the share replaces them on the same GPU.

use std::fs;
use std::path::Path;

use gpushare_tests::leases::{cli, leases, shares};
use gpushare_tests::namespace;
use gpushare_tests::needs::met;
use gpushare_tests::node::{MODEL, SimulatedNode, driver_version};
use gpushare_tests::probe::{GIB, Report};
use gpushare_tests::runtime::LowLevel;
use serde_json::{Value, json};

use crate::{PODMAN, Podman, empty_cdi_folder};

/// The minor of each GPU's node, by index.
const MINORS: [u32; 4] = [2, 0, 3, 1];

/// What nvidia-ctk 1.20 writes for this node, by index and by UUID. It has nodes with a host path, those of
/// profilers among them; hooks of a program that does not exist here, so that a hook that is left makes the
/// start fail; and the driver's files by version.
fn specification(node: &SimulatedNode, uuids: &[String]) -> Value {
    let nodes = |names: &[String]| -> Value {
        let host = |name: &String| node.root().join("dev").join(name);
        let entry =
            |name| json!({"path": format!("/dev/{name}"), "hostPath": host(name), "permissions": "rwm"});
        names.iter().map(entry).collect()
    };
    let device = |name: &str, minors: &[u32]| {
        let names: Vec<String> = minors.iter().map(|minor| format!("nvidia{minor}")).collect();
        json!({"name": name, "containerEdits": {"deviceNodes": nodes(&names)}})
    };
    let single = MINORS
        .iter()
        .enumerate()
        .flat_map(|(index, minor)| [device(&index.to_string(), &[*minor]), device(&uuids[index], &[*minor])]);
    let hook = |verb: &str| json!({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", verb]});
    let file = |library: &str| {
        let name = format!("{library}.{}", driver_version());
        json!({
            "hostPath": node.libraries().join(&name),
            "containerPath": format!("/usr/lib/x86_64-linux-gnu/{name}"),
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    let control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned);
    let hooks = ["create-symlinks", "enable-cuda-compat", "update-ldcache"].map(hook);
    let files = ["libcuda.so", "libnvidia-ml.so"].map(file);
    json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": single.chain([device("all", &MINORS)]).collect::<Value>(),
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": nodes(&control),
            "hooks": hooks,
            "mounts": files,
        },
    })
}

fn uuids(config: &Path) -> Vec<String> {
    let told = cli(config, &["devices", "--json"]).expect_success("gpushare devices").stdout;
    let devices: Value = serde_json::from_str(&told).expect("gpushare devices --json prints JSON");
    let gpus = devices["gpus"].as_array().expect("a node has GPUs");
    gpus.iter().map(|gpu| gpu["uuid"].as_str().expect("a GPU has a UUID").to_owned()).collect()
}

/// The GPUs of the only lease, by index.
fn leased(config: &Path, uuids: &[String]) -> Vec<usize> {
    let shares = shares(config);
    let grants = shares.first().and_then(|lease| lease["gpus"].as_array()).expect("a lease");
    let index = |grant: &Value| uuids.iter().position(|uuid| grant["uuid"] == **uuid);
    grants.iter().filter_map(index).collect()
}

#[test]
#[ignore = "needs root, runc and podman: runs containers"]
fn podman_gives_the_share_of_the_gpu_that_nvidias_cdi_chose() {
    if !met(PODMAN) {
        return;
    }
    namespace::private(|| {
        empty_cdi_folder();
        let minors = MINORS.map(|minor| minor.to_string()).join(",");
        let node = SimulatedNode::with(4, MODEL, "80GiB", &["--minors", &minors]);
        let config = node.config_with("runc", &LowLevel::Runc.settings());
        let uuids = uuids(&config);
        let file = Path::new("/var/run/cdi/nvidia.json");
        fs::write(file, specification(&node, &uuids).to_string()).expect("a specification can be written");
        let podman = Podman::wrapped(&config);
        let second = format!("nvidia.com/gpu={}", uuids[2]);
        for (flags, gpus, bytes) in [
            (&["--device", "nvidia.com/gpu=1", "-e", "GPUSHARE_MEMORY=2GiB"][..], &[1][..], 2 * GIB),
            (&["--device", "nvidia.com/gpu=1"], &[1], 80 * GIB),
            (&["--device", &second, "-e", "GPUSHARE_MEMORY=2GiB"], &[2], 2 * GIB),
            (&["--device", "nvidia.com/gpu=all", "-e", "GPUSHARE_MEMORY=2GiB"], &[0, 1, 2, 3], 2 * GIB),
            (
                &[
                    "--device",
                    "nvidia.com/gpu=3",
                    "--device",
                    "nvidia.com/gpu=0",
                    "-e",
                    "GPUSHARE_MEMORY=2GiB",
                ],
                &[0, 3],
                2 * GIB,
            ),
            // Such a container can open every GPU. Its lease still has the GPU that it was given.
            (&["--privileged", "--device", "nvidia.com/gpu=3", "-e", "GPUSHARE_MEMORY=2GiB"], &[3], 2 * GIB),
            (&["--privileged", "--device", "nvidia.com/gpu=3"], &[3], 80 * GIB),
        ] {
            let run = [&["--detach", "--name", "one"], flags].concat();
            let _ = podman.run(&run, &["/bin/sleep", "1000"]).expect_success("podman run");
            let mut found = leased(&config, &uuids);
            found.sort_unstable();
            assert_eq!(found, gpus, "{flags:?}");
            let told = podman.call(&["exec", "one", "/bin/gpushare-simulator", "probe", "--json"]);
            Report::parse(&told.expect_success("podman exec").stdout).assert_size(bytes);
            let nodes = podman.call(&["exec", "one", "ls", "/dev"]).expect_success("podman exec").stdout;
            let given: Vec<u32> = nodes.lines().filter_map(super::minor_of).collect();
            let mut want: Vec<u32> = gpus.iter().map(|index| MINORS[*index]).collect();
            want.sort_unstable();
            assert_eq!(given, want, "{flags:?}");
            if !flags.contains(&"--privileged") {
                assert!(!nodes.contains("nvidia-uvm-tools"), "{flags:?}: {nodes}");
            }
            let _ = podman.call(&["rm", "--force", "--time", "0", "one"]).expect_success("podman rm");
            assert_eq!(leases(&config), [], "{flags:?}");
        }
        let strict =
            node.config_with("strict", &format!("{}\n[request]\nstrict = true\n", LowLevel::Runc.settings()));
        let podman = Podman::wrapped(&strict);
        let told = podman.run(&["--privileged", "--device", "nvidia.com/gpu=3"], &["/bin/true"]).stderr;
        assert!(told.contains("privileged"), "{told}");
    });
}
