//! A6 to A12: hostile files that an image brings along.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::distribution;
use gpushare_tests::leases::{cli, leases, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

use crate::paths::link;
use crate::{NEEDS, asking, idle_config, on_both, outside, rounds, share, tree};

fn files(bundle: &Bundle) -> BTreeSet<PathBuf> {
    tree(&bundle.root()).into_keys().collect()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a06_an_image_that_lacks_folders_gets_mount_targets_and_nothing_else() {
    if !met(NEEDS) {
        return;
    }
    type Poor = fn(&Path);
    let images: [(&str, Poor, bool); 4] = [
        ("without /etc", |root| fs::remove_dir_all(root.join("etc")).expect("it can be removed"), false),
        (
            "without library folders",
            |root| {
                for folder in ["lib", "lib64"] {
                    fs::remove_file(root.join(folder)).expect("a link can be removed");
                    fs::remove_dir_all(root.join("usr").join(folder)).expect("it can be removed");
                }
            },
            false,
        ),
        ("read-only", |_| (), true),
        (
            "one static file",
            |root| {
                for folder in ["etc", "tmp", "run", "usr/lib", "usr/lib64"] {
                    fs::remove_dir_all(root.join(folder)).expect("it can be removed");
                }
            },
            false,
        ),
    ];
    on_both(|_, runtime, low_level| {
        let bare = Runtime::bare(low_level);
        for (what, poor, read_only) in images {
            let make = || {
                let bundle = Bundle::small().edit(|spec| spec["root"]["readonly"] = json!(read_only));
                poor(&bundle.root());
                bundle
            };
            // What the low-level runtime makes by itself does not count.
            let plain = make();
            drop(bare.run(&plain));
            let own: BTreeSet<PathBuf> = inner(&plain, files(&plain));
            let bundle = asking(make());
            let before = inner(&bundle, files(&bundle));
            let container = runtime.run(&bundle);
            assert_eq!(container.status().as_deref(), Some("running"), "{low_level:?}: {what}");
            drop(container);
            let targets = targets(&bundle);
            let after = inner(&bundle, files(&bundle));
            let more: Vec<_> = after.difference(&before).filter(|path| !own.contains(*path)).collect();
            let odd: Vec<_> =
                more.iter().filter(|path| !targets.iter().any(|target| target.starts_with(path))).collect();
            assert!(odd.is_empty() && !more.is_empty(), "{low_level:?}: {what}: {odd:?} of {more:?}");
        }
    });
}

/// The paths of `files` as the container sees them.
fn inner(bundle: &Bundle, files: BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let below = |path: PathBuf| Path::new("/").join(path.strip_prefix(bundle.root()).unwrap_or(&path));
    files.into_iter().map(below).collect()
}

/// The targets of the edited config.json's mounts and nodes, with the links of these images followed.
fn targets(bundle: &Bundle) -> Vec<PathBuf> {
    let json: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
    let mounts = json["mounts"].as_array().expect("a list").iter();
    let nodes =
        json["linux"]["devices"].as_array().expect("a list").iter().filter_map(|node| node["path"].as_str());
    let paths = mounts.filter_map(|mount| mount["destination"].as_str()).chain(nodes).map(PathBuf::from);
    paths.flat_map(|path| [Path::new("/usr").join(path.strip_prefix("/").unwrap_or(&path)), path]).collect()
}

#[test]
#[ignore = "needs root and runc: asks for a share"]
fn a07_loader_files_of_any_size_and_kind_cost_little() {
    if !met(NEEDS) {
        return;
    }
    type Spoil = fn(&Path, &Path);
    let images: [(&str, Spoil); 6] = [
        ("a cache of 1 GiB", |root, _| sparse(&root.join("etc/ld.so.cache"))),
        ("a malformed cache", |root, _| {
            let text = [b"glibc-ld.so.cache1.1".as_slice(), &[0xff; 4096]].concat();
            fs::write(root.join("etc/ld.so.cache"), text).expect("a file can be written");
        }),
        ("a cache that links to a host file", |root, outside| {
            symlink(outside.join("kept"), root.join("etc/ld.so.cache")).expect("a link can be made");
            symlink(outside.join("kept"), root.join("etc/ld.so.conf")).expect("a link can be made");
        }),
        ("a list of 1 GiB", |root, _| sparse(&root.join("etc/ld.so.conf"))),
        ("many lists", |root, _| {
            let folder = root.join("etc/ld.so.conf.d");
            fs::create_dir(&folder).expect("a folder can be made");
            for number in 0..3000 {
                let folders: String = (0..200).map(|line| format!("/x{number}/{line}\n")).collect();
                fs::write(folder.join(format!("{number}.conf")), folders).expect("a file can be written");
            }
        }),
        ("a folder full of copies", |root, _| {
            for number in 0..30_000 {
                fs::write(root.join(format!("usr/lib64/libcuda.so.{number}")), "")
                    .expect("a file can be written");
            }
        }),
    ];
    let node = SimulatedNode::one_gpu();
    drop(Runtime::wrapped(LowLevel::Runc, &node).run(&share())); // reads the node's inventory
    let scratch = Scratch::new("idle");
    let config = idle_config(&node, &scratch);
    for (what, spoil) in images {
        let (bundle, outside) = (share(), outside());
        spoil(&bundle.root(), outside.path());
        let before = tree(outside.path());
        let watch = Inotify::init(InitFlags::IN_NONBLOCK).expect("inotify can be used");
        let touched = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_ACCESS;
        watch.add_watch(&outside.path().join("kept"), touched).expect("a file can be watched");
        let start = Instant::now();
        // The wrapper becomes a runtime that does nothing, so all that is used is the wrapper's own.
        let mut create = Command::new("/usr/bin/prlimit");
        create.args(["--as=268435456", "--cpu=5"]).arg(gpushare_tests::artifacts::wrapper());
        create
            .args(["create", "--bundle"])
            .arg(bundle.path())
            .arg(bundle.id())
            .env("GPUSHARE_CONFIG", &config);
        let outcome = command::run(&mut create);
        assert!(outcome.success(), "{what}: {outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(5), "{what}: {:?}", start.elapsed());
        assert!(watch.read_events().is_err(), "{what}: a file of the host was opened");
        assert_eq!(tree(outside.path()), before, "{what}");
        sweep(&config);
    }
    assert_eq!(leases(&config), []);
}

/// Makes a file that claims a length of 1 GiB and holds nothing.
fn sparse(path: &Path) {
    let file = fs::File::create(path).expect("a file can be made");
    file.set_len(1 << 30).expect("a file can claim a length");
}

/// A library whose constructor makes the file `marker`.
pub fn library(scratch: &Scratch, marker: &Path) -> PathBuf {
    let text = format!(
        "#include <fcntl.h>\n__attribute__((constructor)) static void here(void) {{ open(\"{}\", O_CREAT | O_WRONLY, 0600); }}\n",
        marker.display()
    );
    let (source, path) = (scratch.file("x.c", text), scratch.path().join("x.so"));
    let mut compiler = Command::new("cc");
    let _ =
        command::run(compiler.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(source)).expect_success("cc");
    path
}

#[test]
#[ignore = "needs root, runc, crun and a C compiler: runs containers"]
fn a08_a_library_that_the_image_preloads_is_loaded_by_no_program_of_the_host() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let scratch = outside();
        let marker = scratch.path().join("marker");
        let x = library(&scratch, &marker);
        // Checks that the trap works when it is loaded.
        let _ = command::run(Command::new("/bin/true").env("LD_PRELOAD", &x))
            .expect_success("a preloaded program");
        fs::remove_file(&marker).expect("the trap left its mark");
        let bundle = asking(Bundle::with_probe())
            .env("LD_PRELOAD", "/proc/self/cwd/x.so")
            .env("LD_AUDIT", "/proc/self/cwd/x.so")
            .env("LD_LIBRARY_PATH", "/proc/self/cwd")
            .env("GCONV_PATH", "/proc/self/cwd")
            .env("GLIBC_TUNABLES", "glibc.malloc.check=3")
            .env("GODEBUG", "netdns=cgo")
            .env("LOCPATH", "/proc/self/cwd")
            .args(&["/bin/busybox", "sleep", "1000"]);
        // These are no names of the C library: a program that took the file for its C library would end
        // before the trap is loaded.
        for name in ["x.so", "usr/x.so"] {
            fs::copy(&x, bundle.root().join(name)).expect("a file can be copied");
            fs::copy(&x, bundle.path().join("x.so")).expect("a file can be copied");
        }
        // The first creation on a node also runs the command line, which is not linked statically.
        let created = runtime.create(&bundle);
        created.iter().for_each(Container::start);
        assert!(!marker.exists(), "{low_level:?}: a program of the host loaded the image's library");
        let container = created.expect("create was refused");
        assert_eq!(leases(runtime.config()).len(), 1);
        container.stop();
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
        assert!(!marker.exists(), "{low_level:?}: at its end");
    });
}

/// Adds files of the driver that lie in folders of their own. Returns their paths below the root.
pub fn put_driver_data(node: &SimulatedNode) -> [&'static str; 2] {
    let data = ["usr/share/nvidia/nvoptix.bin", "usr/share/glvnd/egl_vendor.d/10_nvidia.json"];
    for name in data {
        let path = node.root().join("driver").join(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("a folder can be made");
        fs::write(path, "of the driver").expect("a file can be written");
    }
    data
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a09_driver_folders_that_link_outside_stay_empty_there() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let data = put_driver_data(node);
        let outside = outside();
        let bundle = share().env("GPUSHARE_CAPABILITIES", "compute,utility,graphics");
        for at in ["usr/lib/firmware", "usr/lib/nvidia", "usr/share/nvidia", "usr/share/glvnd/egl_vendor.d"] {
            let path = bundle.root().join(at);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a folder can be made");
            symlink(outside.path(), path).expect("a link can be made");
        }
        let before = tree(outside.path());
        match runtime.create(&bundle) {
            Ok(container) => {
                container.start();
                for name in data {
                    let told = container.exec(&["/bin/cat", &format!("/{name}")]).stdout;
                    assert_eq!(told, "of the driver", "{low_level:?}: {name}");
                }
            }
            // crun mounts nothing at a link that leads nowhere inside the root.
            Err(refusal) => {
                assert_eq!((low_level, refusal.outcome.stderr.lines().count()), (LowLevel::Crun, 1))
            }
        }
        runtime.delete_force(bundle.id());
        assert_eq!(tree(outside.path()), before, "{low_level:?}");
        // The folders that the links name exist in the container as well.
        let inner = bundle.root().join(outside.path().strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(inner).expect("a folder can be made");
        let container = runtime.run(&bundle);
        assert_eq!(container.status().as_deref(), Some("running"), "{low_level:?}");
        drop(container);
        assert_eq!(tree(outside.path()), before, "{low_level:?}");
    });
}

#[test]
#[ignore = "needs root, runc and crun: mounts a shared volume"]
fn a10_a_volume_with_shared_propagation_carries_no_mount_to_the_host() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let scratch = Scratch::new("shared");
        let volume = scratch.folder("volume");
        let none: Option<&str> = None;
        mount(Some("tmpfs"), &volume, Some("tmpfs"), MsFlags::empty(), none).expect("a tmpfs can be mounted");
        mount(none, &volume, none, MsFlags::MS_SHARED, none).expect("it can be shared");
        let foreign = || -> Vec<String> {
            mounts().into_iter().filter(|point| !Path::new(point).starts_with(node.state())).collect()
        };
        for (destination, behind, runs) in
            [("/volume", None, true), ("/usr/lib64", None, false), ("/volume", Some("usr/lib64"), false)]
        {
            for propagation in ["shared", "rshared"] {
                let when = format!("{low_level:?}: {propagation} at {destination}, {behind:?} leads there");
                let bundle = share()
                    .mount(json!({
                        "destination": destination, "type": "bind", "source": volume,
                        "options": ["rbind", "rw", propagation]
                    }))
                    .edit(|spec| spec["linux"]["rootfsPropagation"] = json!("shared"));
                if let Some(folder) = behind {
                    fs::create_dir(bundle.root().join("volume")).expect("a folder can be made");
                    link(&bundle, folder, destination);
                }
                let before = foreign();
                let created = runtime.create(&bundle);
                assert_eq!(foreign(), before, "{when}: while it runs");
                assert_eq!(created.is_ok(), runs, "{when}");
                drop(created);
                assert_eq!(foreign(), before, "{when}: afterwards");
                assert_eq!(leases(runtime.config()), [], "{when}");
            }
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: mounts a shared folder"]
fn a10_what_a_container_mounts_over_our_files_does_not_appear_on_the_host() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        // The root is a shared mount, as everything is on most machines.
        let (root, none): (_, Option<&str>) = (node.root(), None);
        mount(Some(&root), &root, none, MsFlags::MS_BIND, none).expect("a folder can be bound");
        mount(none, &root, none, MsFlags::MS_SHARED, none).expect("it can be shared");
        let bundle = share().edit(|spec| {
            spec["linux"]["rootfsPropagation"] = json!("shared");
            for set in ["bounding", "effective", "permitted"] {
                let held = spec["process"]["capabilities"][set].as_array_mut().expect("a list");
                held.push(json!("CAP_SYS_ADMIN"));
            }
        });
        let container = runtime.run(&bundle);
        let before = mounts();
        for target in ["/usr/lib64/libcuda.so.1", "/usr/lib/gpushare/driver/cuda", "/usr/lib/gpushare/limits"]
        {
            let script = format!("mount -o bind /etc/passwd {target}");
            let _ = container.exec(&["/bin/sh", "-c", &script]).expect_success(target);
            assert_eq!(mounts(), before, "{low_level:?}: {target}");
        }
    });
}

/// The host's mount points.
pub fn mounts() -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the mount table can be read");
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect()
}

/// Adds programs that make the file `marker`, and the library `x`, under names that a host runs or loads.
pub fn put_programs(root: &Path, marker: &Path, x: &Path) {
    for name in
        ["ldconfig", "ldconfig.real", "gpushare", "gpushare-hook", "gpushare-runtime", "nvidia-modprobe"]
    {
        for folder in ["usr/bin", "usr/local/bin"] {
            fs::create_dir_all(root.join(folder)).expect("a folder can be made");
            let path = root.join(folder).join(name);
            fs::write(&path, format!("#!/bin/sh\n: >{}\n", marker.display())).expect("a file can be written");
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
        }
    }
    for name in ["libnvidia-ml.so.1", "libcuda.so.1", "libc.so.6"] {
        fs::copy(x, root.join("usr/lib64").join(name)).expect("a file can be copied");
    }
}

#[test]
#[ignore = "needs root, runc, crun and a C compiler: runs containers"]
fn a11_programs_and_libraries_of_the_image_are_never_run_by_the_host() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let scratch = outside();
        let marker = scratch.path().join("marker");
        let x = library(&scratch, &marker);
        let bundle = share();
        put_programs(&bundle.root(), &marker, &x);
        // The first creation on a node also loads NVML.
        let created = runtime.create(&bundle);
        created.iter().for_each(Container::start);
        assert!(!marker.exists(), "{low_level:?}: something of the image was run, or loaded, on the host");
        assert!(created.is_ok(), "{low_level:?}: {created:?}");
        drop(created);
        assert_eq!(leases(runtime.config()), []);
        assert!(!marker.exists(), "{low_level:?}: at its end");
    });
}

/// A sound cache of one library.
fn cache_of(flags: u32, name: &str, path: &str) -> Vec<u8> {
    let strings = format!("{name}\0{path}\0");
    let length = u32::try_from(strings.len()).expect("it is short");
    let at = u32::try_from(72 + name.len() + 1).expect("it is short");
    let header = [1, length, 2, 0, 0, 0, 0].into_iter().chain([flags, 72, at, 0, 0, 0]);
    let words = header.flat_map(u32::to_le_bytes);
    b"glibc-ld.so.cache1.1".iter().copied().chain(words).chain(strings.bytes()).collect()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a69_a_loaders_cache_of_any_kind_leads_nowhere_and_delays_no_start() {
    if !met(NEEDS) || !met(&[Need::Images]) {
        return;
    }
    type Spoil = fn(&Path, &Path);
    // What becomes of the cache: replaced (no reason), or left for the reason that `plan` gives.
    let caches: [(&str, Spoil, Option<&str>); 14] = [
        ("a sound one", |_, _| (), None),
        (
            "with another name",
            |cache, _| fs::hard_link(cache, cache.with_file_name("x")).expect("a link"),
            None,
        ),
        (
            "beside a link under ldconfig's other name",
            |cache, outside| lead(&outside.join("kept"), &cache.with_file_name("ld.so.cache~")),
            None,
        ),
        (
            "of the image's own libcuda",
            |cache, _| put(cache, &cache_of(0x303, "libcuda.so.1", "/opt/libcuda.so.1")),
            None,
        ),
        ("a link", |cache, outside| lead(&outside.join("kept"), &absent(cache)), Some("a link leads to it")),
        (
            "below a link",
            |cache, outside| {
                let folder = cache.parent().expect("it has a folder");
                fs::remove_dir_all(folder).expect("a folder can be removed");
                put(&outside.join("ld.so.cache"), b"as it was");
                lead(outside, folder);
            },
            Some("a link leads to it"),
        ),
        ("a FIFO", |cache, _| special(cache, SFlag::S_IFIFO), Some("no regular file")),
        ("a device", |cache, _| special(cache, SFlag::S_IFCHR), Some("no regular file")),
        ("a folder", |cache, _| fs::create_dir(absent(cache)).expect("a folder"), Some("no regular file")),
        (
            "of 100 MB",
            |cache, _| File::create(cache).and_then(|file| file.set_len(100 << 20)).expect("a file"),
            Some("more than 2 MiB"),
        ),
        ("half of one", |cache, _| put(cache, b"glibc-ld.so.cache1.1\xff\xff\xff\x7f"), Some("cut off")),
        ("a text", |cache, _| put(cache, b"nothing"), Some("no cache of glibc")),
        (
            "of another architecture",
            |cache, _| put(cache, &cache_of(0xa03, "libc.so.6", "/lib/libc.so.6")),
            Some("architecture"),
        ),
        (
            "with an offset out of range",
            |cache, _| {
                let mut bytes = cache_of(0x303, "libc.so.6", "/lib/libc.so.6");
                bytes[52] = 0xff;
                put(cache, &bytes);
            },
            Some("entry 0"),
        ),
    ];
    let scratch = Scratch::new("images");
    let lower = scratch.folder("root");
    distribution::ubuntu(&lower);
    // The container's first program.
    fs::copy("/bin/busybox", lower.join("usr/bin/sleep")).expect("busybox can be copied");
    on_both(|_, runtime, low_level| {
        for (what, spoil, reason) in caches {
            let (bundle, outside) = (asking(Bundle::engines_layer(&lower)), outside());
            let cache = bundle.root().join("etc/ld.so.cache");
            spoil(&cache, outside.path());
            let before = tree(outside.path());
            let bytes = |cache: &Path| cache.is_file().then(|| fs::read(cache).expect("it can be read"));
            let old = bytes(&cache);
            let path = bundle.path().to_str().expect("paths are UTF-8");
            let plan = cli(runtime.config(), &["plan", "--bundle", path]).expect_success("plan").stdout;
            assert!(plan.contains(reason.unwrap_or("own layer")), "{low_level:?}: {what}: {plan}");
            drop(runtime.create(&bundle).unwrap_or_else(|refusal| panic!("{what}: {}", refusal.line())));
            assert_eq!(tree(outside.path()), before, "{low_level:?}: {what}");
            let is_same = bytes(&cache) == old;
            assert_eq!(is_same, reason.is_some(), "{low_level:?}: {what}");
            if reason.is_none() {
                let mut list = Command::new("/sbin/ldconfig");
                let list = list.arg("-p").arg("-C").arg(&cache);
                let listed = command::run(list).expect_success("ldconfig -p").stdout;
                assert_eq!(listed.matches("libcuda.so.1 (").count(), 1, "{low_level:?}: {what}: {listed}");
            }
            let unfinished = cache.with_file_name("ld.so.cache~");
            assert!(reason.is_some() || !unfinished.is_symlink(), "{low_level:?}: {what}");
        }
    });
}

/// The path, at which nothing is any more.
fn absent(path: &Path) -> PathBuf {
    fs::remove_file(path).expect("a file can be removed");
    path.to_owned()
}

fn lead(target: &Path, from: &Path) {
    symlink(target, from).expect("a link can be made");
}

fn put(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("a file can be written");
}

fn special(path: &Path, kind: SFlag) {
    mknod(&absent(path), kind, Mode::S_IRWXU, makedev(1, 5)).expect("a node can be made");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a12_a_hundredth_start_leaves_what_the_first_left() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let bundle = share();
        drop(runtime.run(&bundle));
        let first = files(&bundle);
        for _ in 0..rounds(15) {
            drop(runtime.run(&bundle));
        }
        assert_eq!(files(&bundle), first, "{low_level:?}");
        // A config.json that nobody writes anew does not grow either.
        let edited: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
        for _ in 0..3 {
            drop(runtime.create_as_it_is(&bundle).expect("a bundle can be run again"));
            let again: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
            for part in ["/mounts", "/linux/devices", "/linux/resources/devices", "/hooks/prestart"] {
                let length = |json: &Value| json.pointer(part).and_then(Value::as_array).map(Vec::len);
                assert_eq!(length(&again), length(&edited), "{low_level:?}: {part}");
            }
        }
        assert_eq!(files(&bundle), first, "{low_level:?}");
    });
}
