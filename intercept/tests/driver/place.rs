//! A container's view of a simulated GPU: a private mount namespace in which `/usr/lib/gpushare` holds the
//! driver, the two interception libraries, `limits` and `usage`.

use std::env;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use gpushare_inventory::elf;
use gpushare_region::{
    ComputePolicy, DeviceLimits, USAGE_LEN, Usage, empty_usage_header, encode_limits, path, read_usage,
};

const INSIDE: &str = "GPUSHARE_TEST_INSIDE";
const HOME: &str = "/usr/lib/gpushare";
/// Names of the driver's libraries, and the names under which ours are built.
const LIBRARIES: [(&str, &str); 2] =
    [("libcuda.so", "libgpushare_intercept_cuda.so"), ("libnvidia-ml.so", "libgpushare_intercept_nvml.so")];
/// The paths where the libraries look for the driver's.
const DRIVER: [&str; 2] = [path::DRIVER_CUDA, path::DRIVER_NVML];
const MIB: u64 = 1 << 20;
/// The charge for contexts in MiB, and their use of the simulated GPU's memory before a module is loaded.
pub const CONTEXT: u64 = 520;

/// The container's grant.
pub struct Share<'a> {
    /// GPUs of the node.
    pub gpus: u32,
    /// Memory of each GPU, in MiB.
    pub memory: u64,
    /// The limit in MiB by GPU of the node; GPUs beyond the list are not granted.
    pub limits: &'a [u64],
    /// The compute share in percent by GPU of the node, with policy `fixed`; GPUs beyond the list are not
    /// limited.
    pub cores: &'a [u32],
    /// Version of the driver.
    pub driver: &'a str,
    /// The simulated GPU's physics, as the name of a profile.
    pub profile: &'a str,
    /// The GPU memory of a context in MiB, overriding the profile.
    pub context: Option<u64>,
    /// Additional environment variables of the program.
    pub variables: &'a [(&'a str, &'a str)],
}

impl Default for Share<'_> {
    fn default() -> Self {
        Self {
            gpus: 1,
            memory: 16384,
            limits: &[CONTEXT + 1024],
            cores: &[],
            driver: "580.65.06",
            profile: "h200-580",
            context: None,
            variables: &[],
        }
    }
}

/// True inside the container: the body of the test follows. Outside, it reruns the test inside and returns
/// false.
pub fn inside(test: &str, share: &Share<'_>) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("node");
    let uuids = make_node(&node, share);
    let home = folder.path().join("home");
    let driver = node.join("driver/usr/lib/x86_64-linux-gnu");
    fill_home(&home, &LIBRARIES.map(|(name, _)| driver.join(format!("{name}.1"))), &uuids, share);
    let mut variables = vec![("GPUSHARE_SIMULATOR", node.join("shared").display().to_string())];
    variables.extend(share.variables.iter().map(|(name, value)| (*name, (*value).to_owned())));
    enter(test, &home, "true", variables);
    false
}

/// The same with the libraries that `driver` creates in its own folder, libcuda first. They see an empty
/// `/dev`, since NVIDIA's own libraries create device nodes. `None` skips the test.
pub fn inside_over(test: &str, driver: impl FnOnce(&Path) -> Option<[PathBuf; 2]>) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(libraries) = driver(folder.path()) else { return false };
    let home = folder.path().join("home");
    fill_home(&home, &libraries, &[[7; 16]], &Share::default());
    enter(test, &home, "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3", Vec::new());
    false
}

/// NVIDIA's own libraries, as unpacked by `tests/setup/driver-libraries.sh`.
pub fn nvidias_own() -> Option<[PathBuf; 2]> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../.cache/driver-libraries/root/usr/lib/x86_64-linux-gnu/nvidia/current");
    let files = LIBRARIES.map(|(name, _)| folder.join(format!("{name}.1")));
    let missing = files.iter().any(|file| !file.exists());
    assert!(!missing || env::var("CI").is_err(), "no libraries of NVIDIA's in {}", folder.display());
    if missing {
        println!("skipped: no libraries of NVIDIA's: run tests/setup/driver-libraries.sh");
    }
    (!missing).then_some(files)
}

/// Reruns the test in its own mount namespace, after `prepare`.
fn enter(test: &str, home: &Path, prepare: &str, variables: Vec<(&str, String)>) {
    let _point = MountPoint::hold();
    let script = format!("{prepare} && mount --bind {} {HOME} && exec \"$@\"", home.display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]).arg(env::current_exe().unwrap());
    command.args(["--include-ignored", "--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, "1").env("LD_LIBRARY_PATH", format!("{HOME}/shim")).envs(variables);
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "inside: {}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("1 passed"), "{}", text(&output.stdout));
    print!("{}", text(&output.stdout));
}

/// The mount point on the machine itself, which must look the same afterwards. If these tests created the
/// folder, the last of them removes it. It is not removed earlier, since removing a folder ends the mounts on
/// it in all namespaces. A shared lock on one file also counts the tests of other checkouts.
struct MountPoint;

/// The number of tests in this process that hold the mount point, and the file that they have locked. The
/// file is not empty while a folder exists that tests created.
static MOUNT_POINT: Mutex<(u32, Option<File>)> = Mutex::new((0, None));

/// Locks the file. Every process that creates or removes the folder takes this lock.
fn lock(file: &File, how: i32) -> bool {
    // SAFETY: an open descriptor.
    unsafe { libc::flock(file.as_raw_fd(), how) == 0 }
}

impl MountPoint {
    fn hold() -> Self {
        let mut point = MOUNT_POINT.lock().unwrap_or_else(PoisonError::into_inner);
        if point.0 == 0 {
            let path = env::temp_dir().join("gpushare-test-mount-point");
            let mut file = File::options().append(true).create(true).open(path).unwrap();
            assert!(lock(&file, libc::LOCK_SH));
            if std::fs::create_dir(HOME).is_ok() {
                file.write_all(b"made").unwrap();
            }
            point.1 = Some(file);
        }
        point.0 += 1;
        Self
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let mut point = MOUNT_POINT.lock().unwrap_or_else(PoisonError::into_inner);
        point.0 -= 1;
        if point.0 > 0 {
            return;
        }
        let Some(file) = point.1.take() else { return };
        let last = lock(&file, libc::LOCK_EX | libc::LOCK_NB);
        if last && file.metadata().is_ok_and(|file| file.len() > 0) {
            // A folder that another process has filled in the meantime stays.
            let _ = std::fs::remove_dir(HOME);
            let _ = file.set_len(0);
        }
    }
}

/// The limits file, for changes in place: a new file would not reach the container.
pub fn limits_file() -> File {
    File::options().read(true).write(true).open(Path::new(HOME).join("limits")).unwrap()
}

/// The contents of the books.
pub fn books() -> Usage {
    read_usage(&std::fs::read(Path::new(HOME).join("usage")).unwrap()).unwrap()
}

/// The memory charged on the first GPU, in MiB.
pub fn charged() -> u64 {
    books().devices[0].bytes / MIB
}

/// A build result of `make build`. GPUSHARE_TEST_SIMULATOR can name the folder of another build of the
/// simulator. Its program and libraries must come from the same build.
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
    command.args(["--gpus", &share.gpus.to_string(), "--profile", share.profile]);
    if let Some(context) = share.context {
        command.args(["--context", &format!("{context}MiB")]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()?.strip_prefix("GPU-").map(uuid)).collect()
}

fn uuid(text: &str) -> [u8; 16] {
    let digits: String = text.chars().filter(|digit| *digit != '-').collect();
    u128::from_str_radix(&digits, 16).unwrap().to_be_bytes()
}

fn fill_home(home: &Path, driver: &[PathBuf; 2], uuids: &[[u8; 16]], share: &Share<'_>) {
    for folder in ["driver", "shim"] {
        std::fs::create_dir_all(home.join(folder)).unwrap();
    }
    for (((name, shim), private), real) in LIBRARIES.iter().zip(DRIVER).zip(driver) {
        let soname = format!("{name}.1");
        std::fs::copy(real, home.join(Path::new(private).strip_prefix(HOME).unwrap())).unwrap();
        let [ours, real] = [&built(shim, "shim"), real].map(|path| std::fs::read(path).unwrap());
        std::fs::write(home.join("shim").join(&soname), elf::fit(&ours, &real).unwrap()).unwrap();
        symlink(soname, home.join("shim").join(name)).unwrap();
    }
    let limit = |(index, (uuid, mib)): (usize, (&[u8; 16], &u64))| DeviceLimits {
        uuid: *uuid,
        memory_bytes: mib * MIB,
        cores_percent: share.cores.get(index).copied().unwrap_or(100),
        policy: if index < share.cores.len() { ComputePolicy::Fixed } else { ComputePolicy::None },
        priority: 5,
        ceiling_percent: 100,
        most_bytes: 0,
    };
    let limits: Vec<_> = uuids.iter().zip(share.limits).enumerate().map(limit).collect();
    let mut bytes = encode_limits(&limits, 0).unwrap();
    for line in 0..limits.len() {
        // `LimitLine::set_context_cost`, in a file that is not mapped yet.
        let at = 64 + 64 * line + 48;
        let mebibytes = u32::try_from(CONTEXT).unwrap().to_ne_bytes();
        bytes[at..at + 4].copy_from_slice(&mebibytes);
        bytes[at + 4..at + 8].copy_from_slice(&mebibytes);
    }
    std::fs::write(home.join("limits"), bytes).unwrap();
    let mut usage = empty_usage_header().to_vec();
    usage.resize(USAGE_LEN, 0);
    std::fs::write(home.join("usage"), usage).unwrap();
}
