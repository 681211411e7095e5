//! The resource manager behind a trait, and the few calls that the supervisor makes on its own initiative.

use nix::errno::Errno;

use crate::abi::{
    Class, Era, Status, alloc, attached_ids, child, control, device_ids, framebuffer_info, free, gid_info,
    handle_info, number, pid_info, pids, put, u32_at, u64_at, uuid_of_id,
};
use crate::books::Gpu;

/// A buffer whose address a call's structure contains.
pub struct Pointed<'a> {
    /// Offset of the address in the structure.
    pub offset: usize,
    /// The buffer, which RM reads and writes.
    pub bytes: &'a mut [u8],
}

/// RM: NVIDIA's, or a simulated one.
pub trait Manager {
    /// An open file of one of its devices.
    type File;

    /// Makes the call `number` with this structure, whose size is part of the call. Addresses in it that are
    /// not in `pointed` are 0.
    ///
    /// # Errors
    /// The error of `ioctl`. RM's own status is in the structure.
    fn call(
        &mut self,
        file: &Self::File,
        number: u8,
        structure: &mut [u8],
        pointed: &mut [Pointed<'_>],
    ) -> Result<(), Errno>;

    /// Duplicates the descriptor of an open file.
    fn copy(&self, file: &Self::File) -> Option<Self::File>;

    /// Opens RM for the supervisor itself; `None` if there is no driver.
    fn open(&mut self) -> Option<Self::File>;

    /// Opens the own file of a GPU in the lease, by its line. Without this file RM makes no device for the
    /// GPU.
    fn open_gpu(&mut self, gpu: Gpu) -> Option<Self::File>;
}

/// The memory that RM counts for one process on one GPU, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figure {
    /// Memory that has one handle in the whole system.
    pub private: u64,
    /// Memory that the process owns and that has duplicates.
    pub shared: u64,
}

impl Figure {
    /// Returns all memory that the process owns.
    pub fn owned(&self) -> u64 {
        self.private.saturating_add(self.shared)
    }
}

/// A subdevice of a client, through which RM can be queried.
#[derive(Debug)]
pub struct Subdevice<'f, F> {
    /// The client's file.
    pub file: &'f F,
    /// The client's handle.
    pub client: u32,
    /// The subdevice's own handle.
    pub handle: u32,
}

impl<F> Subdevice<'_, F> {
    /// Makes a control call on the object. Returns `None` unless RM performs it.
    pub fn control<M: Manager<File = F>>(
        &self,
        manager: &mut M,
        command: u32,
        parameters: &mut [u8],
    ) -> Option<()> {
        let mut call = [0; control::SIZE];
        put(&mut call, control::CLIENT, &self.client.to_ne_bytes());
        put(&mut call, control::OBJECT, &self.handle.to_ne_bytes());
        put(&mut call, control::COMMAND, &command.to_ne_bytes());
        let size = u32::try_from(parameters.len()).ok()?;
        put(&mut call, control::PARAMETERS_SIZE, &size.to_ne_bytes());
        let pointed = &mut [Pointed { offset: control::PARAMETERS, bytes: parameters }];
        manager.call(self.file, number::CONTROL, &mut call, pointed).ok()?;
        (u32_at(&call, control::STATUS) == Status::OK.0).then_some(())
    }

    /// Returns RM's figures for these processes on the subdevice's GPU, in the same order; `None` if RM does
    /// not report. A process that RM does not know has no memory there.
    pub fn figures<M: Manager<File = F>>(&self, manager: &mut M, pids: &[u32]) -> Option<Vec<Figure>> {
        let mut figures = Vec::with_capacity(pids.len());
        let mut parameters = vec![0; pid_info::SIZE];
        for pids in pids.chunks(pid_info::MOST) {
            parameters.fill(0);
            put(&mut parameters, pid_info::COUNT, &u32::try_from(pids.len()).ok()?.to_ne_bytes());
            for (pid, entry) in
                pids.iter().zip(parameters[pid_info::LIST..].chunks_exact_mut(pid_info::ENTRY))
            {
                put(entry, pid_info::PID, &pid.to_ne_bytes());
            }
            self.control(manager, pid_info::COMMAND, &mut parameters)?;
            for entry in parameters[pid_info::LIST..].chunks_exact(pid_info::ENTRY).take(pids.len()) {
                let is_known = u32_at(entry, pid_info::RESULT) == Status::OK.0;
                let of = |offset| if is_known { u64_at(entry, offset) } else { 0 };
                figures.push(Figure { private: of(pid_info::PRIVATE), shared: of(pid_info::SHARED) });
            }
        }
        Some(figures)
    }

    /// Lists the processes that use the subdevice's GPU, up to the capacity of one answer; `None` if RM does
    /// not report.
    pub fn processes<M: Manager<File = F>>(&self, manager: &mut M) -> Option<Vec<u32>> {
        let mut parameters = vec![0; pids::SIZE];
        put(&mut parameters, pids::ID_TYPE, &pids::OF_CLASS.to_ne_bytes());
        put(&mut parameters, pids::ID, &Class::SUBDEVICE.0.to_ne_bytes());
        self.control(manager, pids::COMMAND, &mut parameters)?;
        let count = (u32_at(&parameters, pids::COUNT) as usize).min(pids::MOST);
        Some((0..count).map(|at| u32_at(&parameters, pids::TABLE + 4 * at)).collect())
    }

    /// Returns the bytes of the GPU in use by all processes; `None` if RM does not report.
    pub fn used<M: Manager<File = F>>(&self, manager: &mut M, era: &Era) -> Option<u64> {
        let mut parameters = vec![0; era.framebuffer_info];
        let asked = [2, framebuffer_info::HEAP_SIZE, 0, framebuffer_info::HEAP_FREE];
        for (word, at) in asked.into_iter().zip((framebuffer_info::COUNT..).step_by(4)) {
            put(&mut parameters, at, &word.to_ne_bytes());
        }
        self.control(manager, framebuffer_info::COMMAND, &mut parameters)?;
        let data = |entry: usize| u64::from(u32_at(&parameters, framebuffer_info::LIST + 8 * entry + 4));
        Some(data(0).saturating_sub(data(1)) << 10)
    }

    /// Returns the GPU's UUID; `None` if RM does not report, as for a handle that is not a subdevice.
    pub fn uuid<M: Manager<File = F>>(&self, manager: &mut M) -> Option<[u8; 16]> {
        let mut parameters = [0; gid_info::SIZE];
        put(&mut parameters, gid_info::FLAGS, &gid_info::BINARY.to_ne_bytes());
        self.control(manager, gid_info::COMMAND, &mut parameters)?;
        let is_whole = u32_at(&parameters, gid_info::LENGTH) >= 16;
        parameters[gid_info::DATA..].first_chunk().copied().filter(|_| is_whole)
    }
}

/// Asks a question through a client of the supervisor that exists only for this call. It therefore keeps no
/// GPU initialised, and never initialises an unused one. `is_it` recognises the GPU by its UUID.
pub fn ask_by_own_client<M: Manager, T>(
    manager: &mut M,
    era: &Era,
    gpu: Gpu,
    is_it: impl Fn(&[u8; 16]) -> bool,
    question: impl Fn(&Subdevice<'_, M::File>, &mut M) -> Option<T>,
) -> Option<T> {
    let (file, client) = own_client(manager, era)?;
    // Opening the file of an unused GPU would initialise it.
    let is_attached = is_attached(manager, &file, client, &is_it).unwrap_or(false);
    let _open = is_attached.then(|| manager.open_gpu(gpu));
    let found = is_attached.then(|| find_subdevice(manager, era, (&file, client), &is_it)).flatten();
    let answer = found.and_then(|handle| question(&Subdevice { file: &file, client, handle }, manager));
    let _ = free_object(manager, &file, client, client);
    answer
}

/// A client owned by this process, with a subdevice of a GPU. It ends with its file.
#[derive(Debug)]
pub struct OwnSubdevice<F> {
    /// The client's file.
    pub file: F,
    /// The client's handle.
    pub client: u32,
    /// The subdevice's own handle.
    pub handle: u32,
    /// The GPU's own file.
    _gpu: Option<F>,
}

impl<F> OwnSubdevice<F> {
    /// Returns the subdevice for queries and control calls.
    pub fn subdevice(&self) -> Subdevice<'_, F> {
        Subdevice { file: &self.file, client: self.client, handle: self.handle }
    }
}

/// Makes a client owned by this process, with a subdevice of the GPU that `is_it` recognises by its UUID.
/// This initialises an unused GPU. Returns `None` if RM refuses.
pub fn own_subdevice<M: Manager>(
    manager: &mut M,
    era: &Era,
    gpu: Gpu,
    is_it: impl Fn(&[u8; 16]) -> bool,
) -> Option<OwnSubdevice<M::File>> {
    let (file, client) = own_client(manager, era)?;
    let gpu = manager.open_gpu(gpu);
    let handle = find_subdevice(manager, era, (&file, client), is_it)?;
    Some(OwnSubdevice { file, client, handle, _gpu: gpu })
}

/// Makes a subdevice of the GPU that `is_it` recognises by its UUID, and returns its handle.
fn find_subdevice<M: Manager>(
    manager: &mut M,
    era: &Era,
    (file, client): (&M::File, u32),
    is_it: impl Fn(&[u8; 16]) -> bool,
) -> Option<u32> {
    const DEVICE: u32 = 1;
    const SUBDEVICE: u32 = 2;
    // RM logs each attempt with a device number that does not exist.
    let devices = devices(manager, file, client).unwrap_or(0);
    for device in (0..u32::BITS).filter(|device| devices >> device & 1 == 1) {
        let mut parameters = [0; Class::DEVICE_PARAMETERS];
        put(&mut parameters, 0, &device.to_ne_bytes());
        put(&mut parameters, Class::DEVICE_SHARE, &client.to_ne_bytes());
        if add_object(manager, file, Class::DEVICE, [client, client, DEVICE], &mut parameters, era).is_err() {
            continue; // not in use
        }
        let subdevice = Subdevice { file, client, handle: SUBDEVICE };
        let is_added = add_subdevice(manager, file, [client, DEVICE, SUBDEVICE], era).is_ok();
        if is_added && subdevice.uuid(manager).is_some_and(|uuid| is_it(&uuid)) {
            return Some(SUBDEVICE);
        }
        let _ = free_object(manager, file, client, DEVICE);
    }
    None
}

/// Returns the class of a client's object; `None` if RM knows no such object.
pub fn class_of<M: Manager>(manager: &mut M, file: &M::File, client: u32, handle: u32) -> Option<Class> {
    handle_info(manager, file, [client, handle], handle_info::CLASS).map(Class)
}

/// Returns the handle of an object's parent; `None` if RM knows no such object.
pub fn parent_of<M: Manager>(manager: &mut M, file: &M::File, client: u32, handle: u32) -> Option<u32> {
    handle_info(manager, file, [client, handle], handle_info::PARENT)
}

fn handle_info<M: Manager>(
    manager: &mut M,
    file: &M::File,
    [client, handle]: [u32; 2],
    what: u32,
) -> Option<u32> {
    let mut parameters = [0; handle_info::SIZE];
    put(&mut parameters, handle_info::OBJECT, &handle.to_ne_bytes());
    put(&mut parameters, handle_info::ASKED, &what.to_ne_bytes());
    let itself = Subdevice { file, client, handle: client };
    itself.control(manager, handle_info::COMMAND, &mut parameters)?;
    Some(u32_at(&parameters, handle_info::RESULT))
}

/// Whether RM reports that the GPU that `is_it` recognises by its UUID is unused, so that no process has
/// memory on it.
pub fn is_unused<M: Manager>(manager: &mut M, era: &Era, is_it: impl Fn(&[u8; 16]) -> bool) -> bool {
    let Some((file, client)) = own_client(manager, era) else { return false };
    let is_attached = is_attached(manager, &file, client, is_it);
    let _ = free_object(manager, &file, client, client);
    is_attached == Some(false)
}

/// Makes a client for the supervisor, and returns its file and handle.
fn own_client<M: Manager>(manager: &mut M, era: &Era) -> Option<(M::File, u32)> {
    let file = manager.open()?;
    let mut call = vec![0; era.long];
    put(&mut call, alloc::CLASS, &Class::CLIENT.0.to_ne_bytes());
    manager.call(&file, number::ALLOC, &mut call, &mut []).ok()?;
    let is_made = u32_at(&call, era.long_status) == Status::OK.0;
    is_made.then(|| (file, u32_at(&call, alloc::HANDLE)))
}

/// Returns the handle of a device's subdevice in the client; `None` if there is none, or RM does not report.
pub fn subdevice_of<M: Manager>(manager: &mut M, file: &M::File, client: u32, device: u32) -> Option<u32> {
    let mut parameters = [0; child::SIZE];
    put(&mut parameters, child::PARENT, &device.to_ne_bytes());
    put(&mut parameters, child::CLASS, &child::SUBDEVICE.to_ne_bytes());
    let itself = Subdevice { file, client, handle: client };
    itself.control(manager, child::COMMAND, &mut parameters)?;
    Some(u32_at(&parameters, child::RESULT)).filter(|handle| *handle != 0)
}

/// Whether any process uses the GPU that `is_it` recognises by its UUID; `None` if RM does not report.
fn is_attached<M: Manager>(
    manager: &mut M,
    file: &M::File,
    client: u32,
    is_it: impl Fn(&[u8; 16]) -> bool,
) -> Option<bool> {
    let itself = Subdevice { file, client, handle: client };
    let mut ids = [0; attached_ids::SIZE];
    itself.control(manager, attached_ids::COMMAND, &mut ids)?;
    let ids = ids.chunks_exact(4).map(|id| u32_at(id, 0)).take_while(|id| *id != attached_ids::END);
    for id in ids {
        let mut parameters = [0; uuid_of_id::SIZE];
        put(&mut parameters, uuid_of_id::ID, &id.to_ne_bytes());
        put(&mut parameters, uuid_of_id::FLAGS, &uuid_of_id::BINARY.to_ne_bytes());
        itself.control(manager, uuid_of_id::COMMAND, &mut parameters)?;
        let is_whole = u32_at(&parameters, uuid_of_id::LENGTH) >= 16;
        if is_it(parameters[uuid_of_id::DATA..].first_chunk().filter(|_| is_whole)?) {
            return Some(true);
        }
    }
    Some(false)
}

/// Returns the numbers of the devices that a client can make, as bits; `None` if RM does not report.
pub fn devices<M: Manager>(manager: &mut M, file: &M::File, client: u32) -> Option<u32> {
    let mut parameters = [0; device_ids::SIZE];
    // Query the client like one of its subdevices, by its own handle.
    let itself = Subdevice { file, client, handle: client };
    itself.control(manager, device_ids::COMMAND, &mut parameters)?;
    Some(u32_at(&parameters, device_ids::MASK))
}

/// Makes a subdevice `handle` under a device of the client.
///
/// # Errors
/// RM's status. A call that does not reach RM counts as [`Status::INVALID_ARGUMENT`].
pub fn add_subdevice<M: Manager>(
    manager: &mut M,
    file: &M::File,
    [client, device, handle]: [u32; 3],
    era: &Era,
) -> Result<(), Status> {
    let mut parameters = [0; Class::SUBDEVICE_PARAMETERS];
    add_object(manager, file, Class::SUBDEVICE, [client, device, handle], &mut parameters, era)
}

/// Makes an object `handle` of a class below `parent` in the client.
///
/// # Errors
/// The errors of [`add_subdevice`].
pub fn add_object<M: Manager>(
    manager: &mut M,
    file: &M::File,
    class: Class,
    [client, parent, handle]: [u32; 3],
    parameters: &mut [u8],
    era: &Era,
) -> Result<(), Status> {
    let mut call = vec![0; era.long];
    let words =
        [(alloc::CLIENT, client), (alloc::PARENT, parent), (alloc::HANDLE, handle), (alloc::CLASS, class.0)];
    for (at, word) in words {
        put(&mut call, at, &word.to_ne_bytes());
    }
    let pointed = &mut [Pointed { offset: alloc::PARAMETERS, bytes: parameters }];
    let done = manager.call(file, number::ALLOC, &mut call, pointed);
    match (done, Status(u32_at(&call, era.long_status))) {
        (Ok(()), Status::OK) => Ok(()),
        (Ok(()), status) => Err(status),
        (Err(_), _) => Err(Status::INVALID_ARGUMENT),
    }
}

/// Frees an object and everything below it.
///
/// # Errors
/// The errors of [`add_subdevice`].
pub fn free_object<M: Manager>(
    manager: &mut M,
    file: &M::File,
    client: u32,
    handle: u32,
) -> Result<(), Status> {
    let mut call = [0; free::SIZE];
    put(&mut call, free::CLIENT, &client.to_ne_bytes());
    put(&mut call, free::HANDLE, &handle.to_ne_bytes());
    match (manager.call(file, number::FREE, &mut call, &mut []), Status(u32_at(&call, free::STATUS))) {
        (Ok(()), Status::OK) => Ok(()),
        (Ok(()), status) => Err(status),
        (Err(_), _) => Err(Status::INVALID_ARGUMENT),
    }
}
