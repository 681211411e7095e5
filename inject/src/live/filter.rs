//! The device filter of a cgroup v2. Reads back the one program that decides, changes it, and puts it in its
//! place.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;

use super::LiveError;
use super::program::{Device, Instruction, is_blank, with_grants};
use crate::sys;

// Commands, types and flags of linux/bpf.h.
const PROG_LOAD: i32 = 5;
const PROG_ATTACH: i32 = 8;
const PROG_GET_FD_BY_ID: i32 = 13;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const PROG_QUERY: i32 = 16;
const PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const ATTACH_TYPE_DEVICE: u32 = 6;
const ALLOW_MULTI: u32 = 2;
const REPLACE: u32 = 4;

/// More programs than anybody attaches. More than one is refused, so their ids only serve to count them.
const MAX_PROGRAMS: usize = 64;
/// More instructions than the kernel loads for a program without loops.
const MAX_INSTRUCTIONS: usize = 1 << 16;

#[repr(C)]
#[derive(Default)]
struct Query {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct GetInfo {
    fd: u32,
    length: u32,
    info: u64,
}

/// The first fields of bpf_prog_info.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_length: u32,
    translated_length: u32,
    jited: u64,
    translated: u64,
}

#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Attach {
    target: u32,
    program: u32,
    attach_type: u32,
    flags: u32,
    replaced: u32,
}

/// The program that decides now (`old`) and the one that shall replace it.
#[derive(Debug)]
pub(super) struct Filter {
    cgroup: OwnedFd,
    old: OwnedFd,
    new: OwnedFd,
}

impl Filter {
    /// Loads a program that also allows `devices`. `None` where no program decides, so that everything is
    /// allowed.
    pub fn prepare(cgroup: OwnedFd, devices: &[Device]) -> Result<Option<Self>, LiveError> {
        let rules = |reason| LiveError::Rules { reason };
        let no_multi = "the cgroup's device program does not let others replace it (no ALLOW_MULTI)";
        let Attached { ids, flags } = attached(&cgroup)?;
        let id = match ids[..] {
            [] => return Ok(None),
            _ if flags & ALLOW_MULTI == 0 => return Err(rules(no_multi)),
            [id] => id,
            _ => return Err(rules("more than one device program is attached to the cgroup")),
        };
        let old = sys::bpf_fd(PROG_GET_FD_BY_ID, &mut ById { id, ..ById::default() })
            .map_err(|errno| LiveError::kernel("open the device program", errno))?;
        let original = instructions(&old)?;
        if is_blank(&original) {
            return Err(rules("the kernel does not show the device program (net.core.bpf_jit_harden)"));
        }
        let changed =
            with_grants(devices, &original).ok_or_else(|| rules("the device program is too long"))?;
        let new =
            load(&changed).map_err(|errno| LiveError::kernel("load the changed device program", errno))?;
        Ok(Some(Self { cgroup, old, new }))
    }

    /// Replaces the old program by the new one.
    pub fn apply(&self) -> Result<(), LiveError> {
        self.put(&self.new, &self.old)
            .map_err(|errno| LiveError::kernel("replace the device program", errno))?;
        let wanted = info(&self.new, &mut [])?.id;
        if attached(&self.cgroup)?.ids[..] == [wanted] {
            return Ok(());
        }
        Err(LiveError::Rules { reason: "somebody else changes the cgroup's device programs at this moment" })
    }

    /// Puts the old program back.
    pub fn undo(&self) {
        let _ = self.put(&self.old, &self.new);
    }

    fn put(&self, program: &OwnedFd, replaced: &OwnedFd) -> Result<(), Errno> {
        let mut attach = Attach {
            target: number(&self.cgroup)?,
            program: number(program)?,
            attach_type: ATTACH_TYPE_DEVICE,
            flags: ALLOW_MULTI | REPLACE,
            replaced: number(replaced)?,
        };
        sys::bpf(PROG_ATTACH, &mut attach).map(drop)
    }
}

struct Attached {
    ids: Vec<u32>,
    flags: u32,
}

/// The device programs of this cgroup itself, without those of the cgroups above.
fn attached(cgroup: &OwnedFd) -> Result<Attached, LiveError> {
    let failed = |errno| LiveError::kernel("list the cgroup's device programs", errno);
    let mut ids = [0_u32; MAX_PROGRAMS];
    let mut query = Query {
        target: number(cgroup).map_err(failed)?,
        attach_type: ATTACH_TYPE_DEVICE,
        ids: address(ids.as_mut_ptr()),
        count: u32::try_from(ids.len()).unwrap_or(0),
        ..Query::default()
    };
    sys::bpf(PROG_QUERY, &mut query).map_err(failed)?;
    let count = usize::try_from(query.count).unwrap_or(0).min(ids.len());
    Ok(Attached { ids: ids[..count].to_vec(), flags: query.attach_flags })
}

/// The program as the kernel keeps it; only zeros where the kernel hides it.
fn instructions(program: &OwnedFd) -> Result<Vec<Instruction>, LiveError> {
    let bytes = usize::try_from(info(program, &mut [])?.translated_length).unwrap_or(0);
    let count = bytes / size_of::<Instruction>();
    if count > MAX_INSTRUCTIONS {
        return Err(LiveError::Rules { reason: "the device program is too long" });
    }
    let mut read = vec![Instruction::default(); count];
    info(program, &mut read)?;
    Ok(read)
}

fn info(program: &OwnedFd, read: &mut [Instruction]) -> Result<Info, LiveError> {
    let failed = |errno| LiveError::kernel("read the device program", errno);
    let mut info = Info::default();
    if !read.is_empty() {
        info.translated_length = u32::try_from(size_of_val(read)).unwrap_or(0);
        info.translated = address(read.as_mut_ptr());
    }
    let mut get = GetInfo {
        fd: number(program).map_err(failed)?,
        length: u32::try_from(size_of::<Info>()).unwrap_or(0),
        info: address(&raw mut info),
    };
    sys::bpf(OBJ_GET_INFO_BY_FD, &mut get).map_err(failed)?;
    Ok(info)
}

fn load(program: &[Instruction]) -> Result<OwnedFd, Errno> {
    let mut load = Load {
        kind: PROG_TYPE_CGROUP_DEVICE,
        count: u32::try_from(program.len()).map_err(|_| Errno::E2BIG)?,
        instructions: address(program.as_ptr()),
        license: address(c"Apache-2.0".as_ptr()),
        ..Load::default()
    };
    sys::bpf_fd(PROG_LOAD, &mut load)
}

fn address<T>(pointer: *const T) -> u64 {
    u64::try_from(pointer.expose_provenance()).unwrap_or(0)
}

fn number(fd: &OwnedFd) -> Result<u32, Errno> {
    u32::try_from(fd.as_raw_fd()).map_err(|_| Errno::EBADF)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileTypeExt;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::super::program::tests::{ALLOW, DENY};
    use super::*;

    const GRANTED: [Device; 1] = [Device { major: 195, minor: 0 }];

    /// A cgroup of version 2, removed on drop.
    struct Cgroup(PathBuf);

    impl Cgroup {
        fn new(name: &str) -> Self {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let line = table.lines().find(|line| line.contains(" - cgroup2 ")).expect("cgroup2 is mounted");
            let path = Path::new(line.split(' ').nth(4).unwrap());
            let path = path.join(format!("gpushare-test-{}-{name}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn open(&self) -> OwnedFd {
            fs::File::open(&self.0).unwrap().into()
        }

        fn attach(&self, program: &[Instruction], flags: u32) -> OwnedFd {
            let program = load(program).unwrap();
            let cgroup = self.open();
            let mut attach = Attach {
                target: number(&cgroup).unwrap(),
                program: number(&program).unwrap(),
                attach_type: ATTACH_TYPE_DEVICE,
                flags,
                replaced: 0,
            };
            sys::bpf(PROG_ATTACH, &mut attach).unwrap();
            program
        }

        /// What the kernel says to a process of this cgroup that opens the node.
        fn opens(&self, node: &Path) -> String {
            let script = format!("echo $$ >{}/cgroup.procs && cat {}", self.0.display(), node.display());
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            String::from_utf8_lossy(&output.stderr).into_owned()
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    fn node(folder: &Path, minor: u64) -> PathBuf {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let path = folder.join(format!("nvidia{minor}"));
        mknod(&path, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(195, minor)).unwrap();
        assert!(fs::metadata(&path).unwrap().file_type().is_char_device());
        path
    }

    #[test]
    #[ignore = "needs root: attaches programs to cgroups"]
    fn the_one_program_is_changed_for_the_granted_devices_and_can_be_put_back() {
        let folder = tempfile::tempdir().unwrap();
        let (granted, other) = (node(folder.path(), 0), node(folder.path(), 1));
        let cgroup = Cgroup::new("one");
        let original = cgroup.attach(&DENY, ALLOW_MULTI);
        assert!(cgroup.opens(&granted).contains("not permitted"));
        let filter = Filter::prepare(cgroup.open(), &GRANTED).unwrap().unwrap();
        assert!(cgroup.opens(&granted).contains("not permitted"), "preparing changes nothing");
        filter.apply().unwrap();
        assert!(cgroup.opens(&granted).contains("No such device"), "{}", cgroup.opens(&granted));
        assert!(cgroup.opens(&other).contains("not permitted"));
        filter.undo();
        assert!(cgroup.opens(&granted).contains("not permitted"));
        let ids = attached(&cgroup.open()).unwrap().ids;
        assert_eq!(ids, [info(&original, &mut []).unwrap().id]);
    }

    #[test]
    #[ignore = "needs root: attaches programs to cgroups"]
    fn programs_that_cannot_be_replaced_are_refused_and_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let granted = node(folder.path(), 0);
        let none = Cgroup::new("none");
        assert!(Filter::prepare(none.open(), &GRANTED).unwrap().is_none());

        let alone = Cgroup::new("alone");
        let _program = alone.attach(&DENY, 0);
        let error = Filter::prepare(alone.open(), &GRANTED).unwrap_err().to_string();
        assert!(error.contains("ALLOW_MULTI"), "{error}");

        let two = Cgroup::new("two");
        let _programs = [two.attach(&DENY, ALLOW_MULTI), two.attach(&ALLOW, ALLOW_MULTI)];
        let error = Filter::prepare(two.open(), &GRANTED).unwrap_err().to_string();
        assert!(error.contains("more than one"), "{error}");

        let changed = Cgroup::new("changed");
        let _first = changed.attach(&DENY, ALLOW_MULTI);
        let filter = Filter::prepare(changed.open(), &GRANTED).unwrap().unwrap();
        let _second = changed.attach(&DENY, ALLOW_MULTI);
        assert!(filter.apply().is_err(), "somebody else was there meanwhile");
        filter.undo();
        for cgroup in [alone, two, changed] {
            assert!(cgroup.opens(&granted).contains("not permitted"), "{}", cgroup.0.display());
        }
    }
}
