//! The file system.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, IoctlFlags, LockOwner, MountOption, Notifier, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, Request, SessionACL,
};
use gpushare_supervisor::abi::switches::map;
use gpushare_supervisor::abi::{Status, control, number, put, u32_at, u64_at};
use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use crate::model::{Caller, Manager, Memory, ReadError};

const ROOT: u64 = 1;
const CONTROL_FILE: u64 = 2;
const UVM_FILE: u64 = 3;
/// File with RM's figures, for comparisons.
const FIGURES_FILE: u64 = 4;
const FIRST_GPU: u64 = 16;
/// First inode for open files of nvidiactl that a process may map. Each open file has its own, because the
/// kernel caches the bytes of a mapping by inode.
const FIRST_MAPPED: u64 = 1 << 32;
/// Size of such a file.
const MOST_MAPPED: u64 = 1 << 22;

/// Default interval at which RM writes the record of context switches.
const RECORD_EVERY: Duration = Duration::from_millis(33);

/// Attributes never change, so they may be cached for ever.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// A call of our own that returns the number of the file on which it is made.
const WHICH_FILE: u32 = 0x8008_4600;

/// The files of a simulated driver.
pub struct Files {
    manager: Arc<Mutex<Manager>>,
    gpus: u64,
    next_file: AtomicU64,
    next_mapped: AtomicU64,
    mappings: Arc<Mutex<Mappings>>,
}

/// State of mappings.
#[derive(Default)]
struct Mappings {
    /// Inodes of open files that can be mapped.
    opened: HashMap<u64, u64>,
    /// Memory behind an inode, by client and handle.
    memories: HashMap<u64, (u32, u32)>,
    /// The report that each open file of figures returns.
    reports: HashMap<u64, Vec<u8>>,
}

/// Mounts the files of `manager` at `folder` until the session is dropped.
///
/// # Errors
/// If the kernel refuses the mount.
pub fn mount(manager: Manager, gpus: u64, folder: &Path) -> io::Result<BackgroundSession> {
    let (manager, mappings) = (Arc::new(Mutex::new(manager)), Arc::default());
    let (recorded, mapped) = (Arc::downgrade(&manager), Arc::clone(&mappings));
    let (next_file, next_mapped) = (AtomicU64::new(1), AtomicU64::new(FIRST_MAPPED));
    let files = Files { manager, gpus, next_file, next_mapped, mappings };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("gpushare-simulated-manager".into()), MountOption::Dev];
    config.acl = SessionACL::All;
    config.n_threads = Some(2);
    let session = fuser::spawn_mount(files, folder, &config)?;
    let notifier = session.notifier();
    let _detached = std::thread::spawn(move || record(&recorded, &mapped, &notifier));
    Ok(session)
}

/// Writes the record of context switches while the files exist.
fn record(manager: &Weak<Mutex<Manager>>, mappings: &Mutex<Mappings>, notifier: &Notifier) {
    while let Some(manager) = manager.upgrade() {
        let mut manager = manager.lock().unwrap_or_else(PoisonError::into_inner);
        let is_read = manager.knows_host_memory();
        if is_read {
            manager.record_switches();
        }
        drop(manager);
        if is_read {
            let mapped: Vec<u64> = locked(mappings).memories.keys().copied().collect();
            for inode in mapped {
                let _gone = notifier.inval_inode(INodeNo(inode), 0, 0);
            }
        }
        std::thread::sleep(RECORD_EVERY);
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Task(Pid);

impl Memory for Task {
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), ReadError> {
        let base = usize::try_from(address).map_err(|_| ReadError)?;
        let len = to.len();
        let done = process_vm_readv(self.0, &mut [IoSliceMut::new(to)], &[RemoteIoVec { base, len }]);
        done.ok().filter(|done| *done == len).map(drop).ok_or(ReadError)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), ReadError> {
        let base = usize::try_from(address).map_err(|_| ReadError)?;
        let there = [RemoteIoVec { base, len: bytes.len() }];
        let done = process_vm_writev(self.0, &[IoSlice::new(bytes)], &there);
        done.ok().filter(|done| *done == bytes.len()).map(drop).ok_or(ReadError)
    }
}

/// Returns the process of a task; `None` if it has ended.
fn process_of(task: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{task}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Returns the process and capabilities of a task; `None` if it has ended.
fn caller(task: u32, file: u64) -> Option<Caller> {
    let status = fs::read_to_string(format!("/proc/{task}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let capabilities = u64::from_str_radix(field("CapEff:")?, 16).ok()?;
    const SYS_ADMIN: u64 = 1 << 21;
    let pid: u32 = field("Tgid:")?.parse().ok()?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let gpus = descriptors.filter_map(|one| minor(&fs::read_link(one.path()).ok()?));
    let gpus = gpus.fold(0, |all, minor| all | 1 << minor);
    Some(Caller { pid, is_admin: capabilities & SYS_ADMIN != 0, file, gpus })
}

/// Returns the number of the GPU whose own file has this path.
fn minor(path: &Path) -> Option<u32> {
    let number = path.file_name()?.to_str()?.strip_prefix("nvidia")?.parse().ok();
    number.filter(|number| *number < u32::BITS)
}

/// Returns the number of the file that the task has as descriptor `fd`.
fn file_of(pid: u32, fd: u32) -> Option<u64> {
    let taken = |number: libc::c_long| -> Option<OwnedFd> {
        let number = i32::try_from(number).ok().filter(|number| *number >= 0)?;
        // SAFETY: the kernel has just made this descriptor for us.
        Some(unsafe { OwnedFd::from_raw_fd(number) })
    };
    // SAFETY: two integers, and no memory.
    let process = taken(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: three integers, and no memory.
    let file = taken(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })?;
    let mut answer = 0u64;
    // SAFETY: by its number, the call writes 8 bytes, the size of `answer`.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), u64::from(WHICH_FILE), &raw mut answer) };
    (done == 0).then_some(answer)
}

/// NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, and the offset of the descriptor in its parameters.
const EXPORT: u32 = 0x3d05;
const EXPORT_FD: u64 = 24;

impl Files {
    fn locked(&self) -> MutexGuard<'_, Manager> {
        locked(&self.manager)
    }

    /// Returns the inode with which a task opens nvidiactl.
    fn control_file(&self, task: u32) -> u64 {
        let manager = self.locked();
        if manager.knows_host_memory() && process_of(task).is_some_and(|pid| manager.has_host_memory(pid)) {
            return self.next_mapped.fetch_add(1, Ordering::Relaxed);
        }
        CONTROL_FILE
    }

    fn attributes(&self, inode: u64) -> Option<FileAttr> {
        let is_file = matches!(inode, CONTROL_FILE | UVM_FILE | FIGURES_FILE)
            || (FIRST_GPU..FIRST_GPU + self.gpus).contains(&inode)
            || inode >= FIRST_MAPPED;
        let kind = match inode {
            ROOT => FileType::Directory,
            _ if is_file => FileType::RegularFile,
            _ => return None,
        };
        Some(FileAttr {
            ino: INodeNo(inode),
            size: if inode >= FIRST_MAPPED { MOST_MAPPED } else { 0 },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: if inode == ROOT { 0o755 } else { 0o666 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 512,
        })
    }
}

impl Filesystem for Files {
    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str().unwrap_or_default() {
            "nvidiactl" => self.control_file(request.pid()),
            "nvidia-uvm" => UVM_FILE,
            "figures" => FIGURES_FILE,
            name => match name.strip_prefix("nvidia").and_then(|minor| minor.parse::<u64>().ok()) {
                Some(minor) if minor < self.gpus => FIRST_GPU + minor,
                _ => return reply.error(Errno::ENOENT),
            },
        };
        match self.attributes(inode).filter(|_| parent.0 == ROOT) {
            Some(attributes) => {
                // The inode of nvidiactl depends on the task that opens it.
                let is_the_same = inode != CONTROL_FILE && inode < FIRST_MAPPED;
                let kept = if is_the_same { FOREVER } else { Duration::ZERO };
                reply.entry_with_ttls(&FOREVER, &kept, &attributes, Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode.0) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let file = self.next_file.fetch_add(1, Ordering::Relaxed);
        let mut flags = FopenFlags::FOPEN_DIRECT_IO;
        if inode.0 >= FIRST_MAPPED {
            flags = FopenFlags::empty();
            locked(&self.mappings).opened.insert(file, inode.0);
        }
        reply.opened(FileHandle(file), flags);
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.locked().close(file.0);
        let mut mappings = locked(&self.mappings);
        let _ = mappings.reports.remove(&file.0);
        if let Some(inode) = mappings.opened.remove(&file.0) {
            mappings.memories.remove(&inode);
        }
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        file: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mapped = locked(&self.mappings).memories.get(&inode.0).copied();
        let all = match (inode.0, mapped) {
            // All parts that a reader gets come from one text, although figures change meanwhile.
            (FIGURES_FILE, _) if offset > 0 => {
                locked(&self.mappings).reports.get(&file.0).cloned().unwrap_or_default()
            }
            (FIGURES_FILE, _) => {
                let report = self.locked().report().into_bytes();
                locked(&self.mappings).reports.insert(file.0, report.clone());
                report
            }
            (_, Some((client, handle))) => {
                let mut bytes = self.locked().host_memory(client, handle).unwrap_or_default().to_vec();
                bytes.resize(usize::try_from(MOST_MAPPED).unwrap_or(0), 0);
                bytes
            }
            _ => Vec::new(),
        };
        let rest = usize::try_from(offset).ok().and_then(|offset| all.get(offset..));
        let rest = rest.unwrap_or_default();
        reply.data(&rest[..rest.len().min(size as usize)]);
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let named = [(CONTROL_FILE, "nvidiactl"), (UVM_FILE, "nvidia-uvm"), (FIGURES_FILE, "figures")];
        let named = named.map(|(inode, name)| (inode, name.to_owned()));
        let gpus = (0..self.gpus).map(|minor| (FIRST_GPU + minor, format!("nvidia{minor}")));
        for ((inode, name), next) in named.into_iter().chain(gpus).zip(1..) {
            let is_due = next > offset;
            if is_due && reply.add(INodeNo(inode), next, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn ioctl(
        &self,
        request: &Request,
        inode: INodeNo,
        file: FileHandle,
        _flags: IoctlFlags,
        command: u32,
        input: &[u8],
        _output_size: u32,
        reply: ReplyIoctl,
    ) {
        if command == WHICH_FILE {
            return reply.ioctl(0, &file.0.to_ne_bytes());
        }
        let Some(caller) = caller(request.pid(), file.0) else { return reply.error(Errno::ESRCH) };
        let task = Task(Pid::from_raw(request.pid().cast_signed()));
        let number = (command & 0xff).to_ne_bytes()[0];
        if inode.0 == FIGURES_FILE || inode.0 == UVM_FILE {
            return reply.error(Errno::ENOTTY);
        }
        let is_export = number == number::CONTROL && u32_at(input, control::COMMAND) == EXPORT;
        let mut structure = input.to_vec();
        if number == map::NUMBER && structure.len() == map::SIZE {
            let (manager, mappings) = (Arc::clone(&self.manager), Arc::clone(&self.mappings));
            // The lookup of the descriptor's file is a call to this file system, so another thread must serve
            // it.
            let _detached = std::thread::spawn(move || {
                let status = map_memory(&manager, &mappings, caller, &structure);
                put(&mut structure, map::STATUS, &status.0.to_ne_bytes());
                reply.ioctl(0, &structure);
            });
            return;
        }
        if !is_export {
            return answer(&self.manager, caller, number, &mut structure, &task, reply);
        }
        // Another thread looks up this descriptor for the same reason.
        let manager = Arc::clone(&self.manager);
        let _detached = std::thread::spawn(move || {
            let at = u64_at(&structure, control::PARAMETERS) + EXPORT_FD;
            let mut fd = [0; 4];
            let exported = task.read(at, &mut fd).ok();
            let exported = exported.and_then(|()| file_of(caller.pid, u32::from_ne_bytes(fd)));
            let mapped = Exported { task: &task, at, file: exported.unwrap_or(0) };
            answer(&manager, caller, number, &mut structure, &mapped, reply);
        });
    }
}

/// Makes memory available through the file that a call names.
fn map_memory(
    manager: &Mutex<Manager>,
    mappings: &Mutex<Mappings>,
    caller: Caller,
    structure: &[u8],
) -> Status {
    let word = |at| u32_at(structure, at);
    let Some(file) = file_of(caller.pid, word(map::FD)) else { return Status::INVALID_ARGUMENT };
    let (client, handle) = (word(map::CLIENT), word(map::MEMORY));
    let status = locked(manager).may_map(caller, client, handle);
    let mut mappings = locked(mappings);
    match mappings.opened.get(&file).copied().filter(|_| status == Status::OK) {
        Some(inode) => drop(mappings.memories.insert(inode, (client, handle))),
        None if status == Status::OK => return Status::INVALID_ARGUMENT,
        None => {}
    }
    status
}

/// The task's memory, with the file's number in place of the program's descriptor.
struct Exported<'t> {
    task: &'t Task,
    at: u64,
    file: u64,
}

impl Memory for Exported<'_> {
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), ReadError> {
        self.task.read(address, to)?;
        if let Some(offset) = self.at.checked_sub(address).and_then(|offset| usize::try_from(offset).ok())
            && let Ok(file) = u32::try_from(self.file)
        {
            gpushare_supervisor::abi::put(to, offset, &file.to_ne_bytes());
        }
        Ok(())
    }

    fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), ReadError> {
        Ok(()) // the parameters return nothing
    }
}

fn answer(
    manager: &Mutex<Manager>,
    caller: Caller,
    number: u8,
    structure: &mut [u8],
    memory: &dyn Memory,
    reply: ReplyIoctl,
) {
    let mut manager = manager.lock().unwrap_or_else(PoisonError::into_inner);
    let done = manager.call(caller, number, structure, memory);
    drop(manager);
    match done {
        Ok(true) => reply.ioctl(0, structure),
        Ok(false) => reply.error(Errno::EINVAL),
        Err(ReadError) => reply.error(Errno::EFAULT),
    }
}
