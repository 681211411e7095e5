//! A container's view of a simulated GPU: a private mount namespace in which `/usr/lib/gpushare` holds the driver, the
//! two interception libraries, `limits` and `usage`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use gpushare_region::{
    ComputePolicy, DeviceLimits, USAGE_LEN, Usage, empty_usage_header, encode_limits, read_usage,
};

const INSIDE: &str = "GPUSHARE_TEST_INSIDE";
const HOME: &str = "/usr/lib/gpushare";
const MIB: u64 = 1 << 20;

/// What the container is given.
pub struct Share<'a> {
    /// GPUs of the node.
    pub gpus: u32,
    /// What each has, in MiB.
    pub memory: u64,
    /// The limit in MiB by GPU of the node; GPUs beyond the list are not granted.
    pub limits: &'a [u64],
    /// Version of the driver.
    pub driver: &'a str,
    /// What a context costs in MiB.
    pub context: u64,
    /// Variables of the program.
    pub variables: &'a [(&'a str, &'a str)],
}

impl Default for Share<'_> {
    fn default() -> Self {
        Self { gpus: 1, memory: 16384, limits: &[1344], driver: "580.65.06", context: 300, variables: &[] }
    }
}

/// True inside the container: the test's body follows. Outside, runs the test again inside and says false.
pub fn inside(test: &str, share: &Share<'_>) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("node");
    let uuids = make_node(&node, share);
    let home = folder.path().join("home");
    fill_home(&home, &node, &uuids, share);
    let _point = MountPoint::hold();
    let script = format!("mount --bind {} {HOME} && exec \"$@\"", home.display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]).arg(env::current_exe().unwrap());
    command.args(["--include-ignored", "--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, "1").env("GPUSHARE_SIMULATOR", node.join("shared"));
    command.env("LD_LIBRARY_PATH", format!("{HOME}/shim")).envs(share.variables.iter().copied());
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "inside: {}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("1 passed"), "{}", text(&output.stdout));
    print!("{}", text(&output.stdout));
    false
}

/// The mount point on the machine itself, which is to look the same afterwards: a folder that these tests made goes with
/// the last of them. Not earlier, since the removal of a folder ends the mounts on it in all namespaces.
struct MountPoint;

/// How many tests hold the mount point, and whether they made it.
static MOUNT_POINT: Mutex<(u32, bool)> = Mutex::new((0, false));

impl MountPoint {
    fn hold() -> Self {
        let mut point = MOUNT_POINT.lock().unwrap_or_else(PoisonError::into_inner);
        if point.0 == 0 {
            point.1 = !Path::new(HOME).is_dir();
            if point.1 {
                std::fs::create_dir(HOME).unwrap();
            }
        }
        point.0 += 1;
        Self
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let mut point = MOUNT_POINT.lock().unwrap_or_else(PoisonError::into_inner);
        point.0 -= 1;
        if *point == (0, true) {
            // One that somebody filled meanwhile stays: it is theirs now.
            let _ = std::fs::remove_dir(HOME);
        }
    }
}

/// What the books say.
pub fn books() -> Usage {
    read_usage(&std::fs::read(Path::new(HOME).join("usage")).unwrap()).unwrap()
}

/// What the books say of the first GPU, in MiB.
pub fn charged() -> u64 {
    books().devices[0].bytes / MIB
}

/// A build result of `make build`. Another build of the simulator can be named by its folder in GPUSHARE_TEST_SIMULATOR;
/// program and libraries must be of one build.
fn built(name: &str, profile: &str) -> PathBuf {
    if let Some(folder) = env::var_os("GPUSHARE_TEST_SIMULATOR").filter(|_| name == "gpushare-simulator") {
        return Path::new(&folder).join(name);
    }
    let path = env::current_exe().unwrap().ancestors().nth(3).unwrap().join(profile).join(name);
    assert!(path.exists(), "{name} is not built: run `make build` first");
    path
}

fn make_node(node: &Path, share: &Share<'_>) -> Vec<[u8; 16]> {
    let mut command = Command::new(built("gpushare-simulator", "release"));
    let memory = format!("{}MiB", share.memory);
    command.arg("create").arg(node).args(["--memory", &memory, "--plain-nodes", "--driver", share.driver]);
    command.args(["--gpus", &share.gpus.to_string(), "--context", &format!("{}MiB", share.context)]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()?.strip_prefix("GPU-").map(uuid)).collect()
}

fn uuid(text: &str) -> [u8; 16] {
    let digits: String = text.chars().filter(|digit| *digit != '-').collect();
    u128::from_str_radix(&digits, 16).unwrap().to_be_bytes()
}

fn fill_home(home: &Path, node: &Path, uuids: &[[u8; 16]], share: &Share<'_>) {
    for folder in ["driver", "shim"] {
        std::fs::create_dir_all(home.join(folder)).unwrap();
    }
    for (soname, shim) in [
        ("libcuda.so.1", "libgpushare_intercept_cuda.so"),
        ("libnvidia-ml.so.1", "libgpushare_intercept_nvml.so"),
    ] {
        let real = node.join("driver/usr/lib/x86_64-linux-gnu").join(soname);
        std::fs::copy(real, home.join("driver").join(soname)).unwrap();
        std::fs::copy(built(shim, "shim"), home.join("shim").join(soname)).unwrap();
    }
    let limit = |(uuid, mib): (&[u8; 16], &u64)| DeviceLimits {
        uuid: *uuid,
        memory_bytes: mib * MIB,
        cores_percent: 100,
        policy: ComputePolicy::None,
        priority: 5,
        ceiling_percent: 100,
    };
    let limits: Vec<_> = uuids.iter().zip(share.limits).map(limit).collect();
    std::fs::write(home.join("limits"), encode_limits(&limits).unwrap()).unwrap();
    let mut usage = empty_usage_header().to_vec();
    usage.resize(USAGE_LEN, 0);
    std::fs::write(home.join("usage"), usage).unwrap();
}
