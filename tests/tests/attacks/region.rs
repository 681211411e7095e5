//! A27, A28 and A51: a container that spoils the one file that it may write, or attacks from there. On runc
//! alone: where crun runs in a view of its own, its regions are mounted there and cannot be seen here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, leases, shares, sweep};
use gpushare_tests::meter::{self, listed};
use gpushare_tests::needs::met;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use nix::sys::statvfs::statvfs;
use serde_json::{Value, json};

use crate::{NEEDS, compile, share};

fn books(config: &Path) -> Vec<(String, String)> {
    let start = Instant::now();
    let shares = shares(config);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let word = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    shares.iter().map(|entry| (word(entry, "id"), word(entry, "books"))).collect()
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a27_a_spoilt_usage_file_is_told_as_damaged_and_fills_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let (spoiler, neighbour) = (share(), share());
    let (container, other) = (runtime.run(&spoiler), runtime.run(&neighbour));
    let usage = "/usr/lib/gpushare/usage";
    let before = other.exec(&["/bin/busybox", "md5sum", usage]).stdout;
    for (attack, damaged) in [
        (format!("busybox truncate -s 1T {usage}; true"), false),
        (
            format!("busybox dd if=/dev/zero of={usage} bs=1M count=64 conv=notrunc,fsync 2>/dev/null; true"),
            true,
        ),
        (format!("busybox dd if=/dev/urandom of={usage} bs=64k count=4 2>/dev/null; true"), true),
        (format!("busybox truncate -s 0 {usage}"), true),
        (format!("busybox truncate -s 1 {usage}"), true),
        (format!("busybox truncate -s 1T {usage}; true"), true),
        (format!("busybox rm -f {usage}; busybox mv /tmp/x {usage}; busybox chmod 0 {usage}; true"), true),
    ] {
        let _ = container.exec(&["/bin/busybox", "sh", "-c", &attack]).expect_success(&attack);
        let want = |id: &str| if id == spoiler.id() && damaged { "damaged" } else { "ok" };
        for (id, books) in books(runtime.config()) {
            assert_eq!(books, want(&id), "{attack}");
        }
        for id in regions::ids(&node.state()) {
            let region = Path::new("/").join(id);
            let room = regions::within(&node.state(), || Ok(statvfs(&region)?)).expect("it is a file system");
            let bytes = room.blocks() * room.fragment_size();
            assert!(bytes < 1 << 20, "{attack}: a region of {bytes} bytes");
        }
    }
    // The container filled no more of the host than its region. The state folder itself is as large as
    // before.
    assert_eq!(other.exec(&["/bin/busybox", "md5sum", usage]).stdout, before);
    assert_eq!(leases(runtime.config()).len(), 2);
    drop((container, other));
    assert_eq!(regions::left(&node.state()), Vec::<PathBuf>::new());
}

/// How many processes a usage file has room for.
const SLOTS: usize = 256;

/// The usage file `whole`, with the process `pid` of the host in every slot, each of which holds a byte of
/// the first GPU. It follows the layout of version 2.
fn naming(whole: &[u8], pid: u32) -> Vec<u8> {
    const LIVE: usize = 128;
    const OWNERS: usize = 4096;
    const LINE: usize = 64;
    let lines = OWNERS + SLOTS * LINE;
    let mut bytes = whole.to_vec();
    bytes[LIVE..LIVE + SLOTS / 8].fill(0xff);
    for owner in bytes[OWNERS..lines].chunks_exact_mut(LINE) {
        owner[..4].copy_from_slice(&1_u32.to_ne_bytes());
        owner[4..8].copy_from_slice(&pid.to_ne_bytes());
        owner[8..16].copy_from_slice(&start_time(pid).to_ne_bytes());
    }
    bytes[lines..lines + SLOTS * LINE].chunks_exact_mut(LINE).for_each(|line| line[0] = 1);
    bytes
}

/// Start time of a process in clock ticks since boot.
fn start_time(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let behind_name = stat.rsplit_once(") ").expect("a name in parentheses").1;
    behind_name.split(' ').nth(19).and_then(|word| word.parse().ok()).expect("a number")
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a28_a_process_that_a_usage_file_names_is_left_alone() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let (bundle, other) = (share(), share());
    let (container, neighbour) = (runtime.run(&bundle), runtime.run(&other));
    let mut bystander =
        Command::new("/bin/sleep").arg("1000").stdin(Stdio::null()).spawn().expect("it starts");
    let usage = format!("/proc/{}/root{}", container.pid(), regions::USAGE);
    let whole = fs::read(&usage).expect("the file can be read");
    let meter = meter::start(runtime.config());
    for pid in [1, bystander.id(), neighbour.pid().unsigned_abs()] {
        fs::write(&usage, naming(&whole, pid)).expect("the file can be written");
        let used = listed(runtime.config(), bundle.id(), 0)["used_bytes"].clone();
        assert!(bystander.try_wait().expect("it can be asked").is_none(), "a bystander was ended");
        assert_eq!(neighbour.status().as_deref(), Some("running"));
        assert_eq!(used, SLOTS, "nobody reads who is named: {pid}");
        for verb in [&["ps"][..], &["ps", "--json"], &["devices"], &["doctor"], &["sweep"], &["history"]] {
            let _ = cli(runtime.config(), verb);
        }
    }
    container.stop();
    sweep(runtime.config());
    meter.kill();
    assert!(bystander.try_wait().expect("it can be asked").is_none(), "a bystander was ended");
    assert_eq!(neighbour.status().as_deref(), Some("running"));
    bystander.kill().expect("a child can be killed");
    bystander.wait().expect("a child can be waited for");
}

/// What the kernel answers when the container opens `file` for writing by its handle, through the mount of
/// `through`.
fn opened_by_handle(container: &Container<'_>, through: &str, file: &str) -> String {
    let words = ["/bin/by_handle", through, file];
    container.exec(&words).expect_success("by_handle").stdout.trim().to_owned()
}

#[test]
#[ignore = "needs root, runc and a C compiler: runs containers"]
fn a51_a_handle_through_the_file_that_is_written_leads_to_no_limits() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let reading = |bundle: Bundle| {
        compile("by_handle.c", &bundle.root().join("bin/by_handle"));
        bundle.edit(|spec| {
            for set in ["bounding", "effective", "permitted"] {
                let list = spec["process"]["capabilities"][set].as_array_mut().expect("a list");
                list.push(json!("CAP_DAC_READ_SEARCH"));
            }
        })
    };
    let (bundle, neighbour) = (reading(share()), reading(share()));
    let (container, _other) = (runtime.run(&bundle), runtime.run(&neighbour));
    let [limits, usage] = ["/usr/lib/gpushare/limits", "/usr/lib/gpushare/usage"];
    let sum = || container.exec(&["/bin/busybox", "md5sum", limits]).expect_success("md5sum").stdout;
    let before = sum();
    assert_eq!(opened_by_handle(&container, usage, limits), "Stale file handle");
    assert_eq!(opened_by_handle(&container, limits, limits), "Read-only file system");
    assert_eq!(sum(), before);
    // Through the mount of the file itself, the kernel allows this.
    assert_eq!(opened_by_handle(&container, usage, usage), "wrote");
}
