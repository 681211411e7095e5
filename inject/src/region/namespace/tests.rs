use std::os::unix::fs::DirBuilderExt;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::*;

#[test]
fn a_mount_point_is_read_with_its_escapes() {
    let point = |line: &[u8]| mount_point(line).map(|point| String::from_utf8_lossy(&point).into_owned());
    assert_eq!(point(b"27 25 0:40 / /v rw shared:3 - tmpfs none rw").as_deref(), Some("/v"));
    assert_eq!(point(br"27 25 0:40 / /a\040b\134\011 rw").as_deref(), Some("/a b\\\t"));
    assert_eq!(point(br"27 25 0:40 / /odd\04 rw").as_deref(), Some("/odd\\04"));
    assert_eq!(point(b"27 25 0:40"), None);
}

/// Two processors that this process may run on, or one.
fn processors() -> Vec<usize> {
    let here = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..CpuSet::count()).filter(|one| here.is_set(*one) == Ok(true)).take(2).collect()
}

/// Runs `test` in a thread with mounts of its own, made on processor `made_on`, then kept to `runs_on`.
fn in_namespace<T: Send>(made_on: usize, runs_on: usize, test: impl FnOnce() -> T + Send) -> T {
    let keep_to = |processor| {
        let mut only = CpuSet::new();
        only.set(processor).unwrap();
        sched_setaffinity(Pid::from_raw(0), &only).unwrap();
    };
    let result = apart(|| {
        keep_to(made_on);
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
        keep_to(runs_on);
        Ok(test())
    });
    result.unwrap()
}

#[test]
#[ignore = "needs root: makes mount namespaces"]
fn it_is_made_whatever_processor_this_process_runs_on() {
    let processors = processors();
    for (made_on, runs_on) in
        processors.iter().flat_map(|one| processors.iter().map(move |other| (one, other)))
    {
        in_namespace(*made_on, *runs_on, || with_limits(made_once));
    }
}

/// Gives `test` a folder of limits files.
fn with_limits(test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let limits = folder.path().join("limits");
    fs::DirBuilder::new().mode(0o700).create(&limits).unwrap();
    mount(NONE, &limits, Some("tmpfs"), MsFlags::empty(), NONE).unwrap();
    test(&limits);
    umount2(&limits, MntFlags::MNT_DETACH).unwrap();
}

fn made_once(limits: &Path) {
    let namespace = Namespace::beside(limits);
    assert_eq!(namespace.enter(|| Ok(())).unwrap_err().kind(), ErrorKind::NotFound);
    namespace.ensure().unwrap();
    namespace.enter(|| fs::create_dir("/7")).unwrap();
    namespace.ensure().unwrap();
    assert_eq!(namespace.enter(|| Ok(fs::read_dir("/")?.count())).unwrap(), 1);
}

/// As from a pod that has the host's root as a volume. Nothing of the host is mounted here but /proc, since
/// what is below a temporary folder may be removed.
#[test]
#[ignore = "needs root: makes mount namespaces"]
fn its_root_is_empty_also_if_made_from_a_chroot() {
    let pod = tempfile::tempdir().unwrap();
    let root = pod.path().join("root");
    fs::create_dir(&root).unwrap();
    for is_mount_point in [true, false] {
        in_namespace(processors()[0], processors()[0], || {
            if is_mount_point {
                mount(NONE, &root, Some("tmpfs"), MsFlags::empty(), NONE).unwrap();
            }
            ["proc", "limits"].iter().try_for_each(|name| fs::create_dir_all(root.join(name))).unwrap();
            mount(NONE, &root.join("proc"), Some("proc"), MsFlags::MS_RDONLY, NONE).unwrap();
            mount(NONE, &root.join("limits"), Some("tmpfs"), MsFlags::empty(), NONE).unwrap();
            let inside = apart(|| {
                chroot(&root)?;
                chdir("/")?;
                made_once(Path::new("/limits"));
                Ok(())
            });
            inside.unwrap();
        });
    }
}
