//! Calls to NVIDIA's resource manager (RM) without any library: those that a driver's library makes, and
//! those of programs that mean harm.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use gpushare_supervisor::abi::{
    Class, Era, Status, alloc, control, duplicate, free, heap, memory, number, pid_info, put, transfer,
    u32_at, u64_at,
};
use nix::errno::Errno;
use nix::libc;

/// In which way a call is made.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// The type byte of the command, which RM ignores.
    pub kind: u8,
    /// Whether the call is wrapped into another one.
    pub is_wrapped: bool,
    /// How the system call is made.
    pub entry: Entry,
}

/// The kernel's entries for system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The ordinary one.
    Native,
    /// That of x32 programs.
    X32,
}

impl Default for Way {
    fn default() -> Self {
        Self { kind: b'F', is_wrapped: false, entry: Entry::Native }
    }
}

/// A client of RM's, with a device and a subdevice on one GPU.
pub struct Client {
    /// nvidiactl.
    pub file: File,
    /// Its handle.
    pub handle: u32,
    /// The driver's interface.
    pub era: &'static Era,
    /// How calls are made.
    pub way: Way,
    folder: PathBuf,
    /// The device's number.
    number: u32,
    /// The GPU's own file, which keeps the driver's state of it.
    _gpu: Option<File>,
}

/// NV_ESC_REGISTER_FD of a GPU's file: which file of nvidiactl goes with it.
const REGISTER: libc::c_ulong = 0xc004_46c9;
/// NV0000_CTRL_CMD_GPU_GET_PROBED_IDS and the size of its parameters, which begin with ids.
const PROBED_IDS: (u32, usize) = (0x214, 256);
/// NV0000_CTRL_CMD_GPU_ATTACH_IDS, which takes 32 ids and tells of the one that failed.
const ATTACH_IDS: (u32, usize) = (0x215, 132);
/// NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, which begins with an id, and where the device's number stands.
const ID_INFO: (u32, usize, usize) = (0x205, 32, 8);
/// Where the owner stands in NVOS32_PARAMETERS' data.
const HEAP_OWNER: usize = 40;
/// Where attributes stand in NV_MEMORY_ALLOCATION_PARAMS, and NVOS32_ATTR_PHYSICALITY_ALLOW_NONCONTIGUOUS.
const ATTRIBUTES: (usize, u32) = (24, 3 << 27);

/// Handle of the device.
pub const DEVICE: u32 = 0xbeef_0080;
/// Handle of the subdevice.
pub const SUBDEVICE: u32 = 0xbeef_2080;

/// Makes RM's call `number` with this structure.
///
/// # Errors
/// What the kernel reports.
pub fn call(file: &File, number: u8, structure: &mut [u8], way: Way) -> Result<(), Errno> {
    if way.is_wrapped {
        let mut outer = [0; transfer::SIZE];
        put(&mut outer, transfer::COMMAND, &u32::from(number).to_ne_bytes());
        put(&mut outer, transfer::LENGTH, &u32::try_from(structure.len()).unwrap_or(0).to_ne_bytes());
        let address = structure.as_mut_ptr().expose_provenance() as u64;
        put(&mut outer, transfer::ADDRESS, &address.to_ne_bytes());
        return call(file, number::TRANSFER, &mut outer, Way { is_wrapped: false, ..way });
    }
    let size = u64::try_from(structure.len()).unwrap_or(0);
    let command = 0xc000_0000 | size << 16 | u64::from(way.kind) << 8 | u64::from(number);
    let entry = match way.entry {
        Entry::Native => libc::SYS_ioctl,
        Entry::X32 => 514 | 0x4000_0000,
    };
    // SAFETY: RM reads and writes `size` bytes, and what the addresses in them lead to, which the callers own.
    let done = unsafe { libc::syscall(entry, file.as_raw_fd(), command, structure.as_mut_ptr()) };
    Errno::result(done).map(drop)
}

/// Makes RM's call `number` with a structure of `size` bytes at an address of this process.
///
/// # Errors
/// What the kernel reports.
pub fn call_at(file: &File, number: u8, size: u64, address: usize) -> Result<(), Errno> {
    let command = 0xc000_4600 | size << 16 | u64::from(number);
    // SAFETY: whatever the address is, the kernel checks it.
    let done = unsafe { libc::syscall(libc::SYS_ioctl, file.as_raw_fd(), command, address) };
    Errno::result(done).map(drop)
}

/// The address of a page that never comes: whoever touches it waits for as long as this process lives.
///
/// # Errors
/// Where the kernel has no userfaultfd, or refuses it.
pub fn missing_page() -> Result<usize, Errno> {
    const PAGE: usize = 4096;
    const API: u64 = 0xc018_aa3f;
    const REGISTER: u64 = 0xc020_aa00;
    const MISSING: u64 = 1;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the place, so that nothing else of this process is touched.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    // SAFETY: one integer, and no memory. The descriptor stays open until the process ends.
    let faults = Errno::result(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) })?;
    let faults = i32::try_from(faults).map_err(|_| Errno::EBADF)?;
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: the kernel reads and writes three words.
    Errno::result(unsafe { libc::ioctl(faults, API, api.as_mut_ptr()) })?;
    let address = page.expose_provenance();
    let mut range = [address as u64, PAGE as u64, MISSING, 0];
    // SAFETY: the kernel reads and writes four words.
    Errno::result(unsafe { libc::ioctl(faults, REGISTER, range.as_mut_ptr()) })?;
    Ok(address)
}

/// Why a call got nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// RM's status.
    Status(Status),
    /// The kernel's.
    Errno(Errno),
}

fn judged(done: Result<(), Errno>, status: u32) -> Result<(), Refusal> {
    match (done, Status(status)) {
        (Ok(()), Status::OK) => Ok(()),
        (Ok(()), status) => Err(Refusal::Status(status)),
        (Err(errno), _) => Err(Refusal::Errno(errno)),
    }
}

/// Parameters of an allocation of `bytes`, in whatever pages.
pub fn memory_parameters(era: &Era, bytes: u64) -> Vec<u8> {
    let mut parameters = vec![0; era.memory];
    let (at, attributes) = ATTRIBUTES;
    put(&mut parameters, at, &attributes.to_ne_bytes());
    put(&mut parameters, memory::LENGTH, &bytes.to_ne_bytes());
    parameters
}

impl Client {
    /// Opens RM's files in `folder`, for the first GPU.
    ///
    /// # Errors
    /// When they are not there, or RM refuses.
    pub fn open(folder: &Path, era: &'static Era) -> io::Result<Self> {
        Self::open_on(folder, era, 0)
    }

    /// The same for the GPU of this number.
    ///
    /// # Errors
    /// As [`Client::open`].
    pub fn open_on(folder: &Path, era: &'static Era, gpu: u32) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(folder.join("nvidiactl"))?;
        let own = OpenOptions::new().read(true).write(true).open(folder.join(format!("nvidia{gpu}"))).ok();
        if let Some(own) = &own {
            let mut control = file.as_raw_fd();
            // SAFETY: RM reads one integer. A simulated one need not know the call.
            let _ = unsafe { libc::ioctl(own.as_raw_fd(), REGISTER, &raw mut control) };
        }
        let (way, folder) = (Way::default(), folder.to_owned());
        let mut client = Self { file, handle: 0, era, way, folder, number: gpu, _gpu: own };
        let refused = |what| move |refusal| io::Error::other(format!("{what}: {refusal:?}"));
        client.handle = client.root().map_err(refused("root client"))?;
        client.number = client.attach(gpu).unwrap_or(gpu);
        client.add_device(client.handle).map_err(refused("device"))?;
        let mut none = [0; Class::SUBDEVICE_PARAMETERS];
        let place = [client.handle, DEVICE, SUBDEVICE];
        client.allocate(Class::SUBDEVICE, place, &mut none).map_err(refused("subdevice"))?;
        Ok(client)
    }

    /// A further file of nvidiactl.
    ///
    /// # Errors
    /// When it is not there.
    pub fn another_file(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.folder.join("nvidiactl"))
    }

    /// Makes a root client, and returns its handle.
    ///
    /// # Errors
    /// When RM refuses.
    pub fn root(&self) -> Result<u32, Refusal> {
        let mut structure = vec![0; self.era.long];
        put(&mut structure, alloc::CLASS, &0x41u32.to_ne_bytes());
        let done = call(&self.file, number::ALLOC, &mut structure, Way::default());
        judged(done, u32_at(&structure, self.era.long_status))?;
        Ok(u32_at(&structure, alloc::HANDLE))
    }

    /// Lets RM attach the GPU of this number, and returns the number of its device. A simulated RM does not ask for it.
    fn attach(&self, gpu: u32) -> Result<u32, Refusal> {
        let at = usize::try_from(gpu).map_or(0, |gpu| 4 * gpu);
        let mut ids = [0xff; PROBED_IDS.1];
        self.control(self.handle, PROBED_IDS.0, &mut ids)?;
        let id = ids.get(at..at + 4).ok_or(Refusal::Errno(Errno::ENODEV))?;
        let mut attached = [0xff; ATTACH_IDS.1];
        put(&mut attached, 0, id);
        self.control(self.handle, ATTACH_IDS.0, &mut attached)?;
        let mut info = [0; ID_INFO.1];
        put(&mut info, 0, id);
        self.control(self.handle, ID_INFO.0, &mut info)?;
        Ok(u32_at(&info, ID_INFO.2))
    }

    /// Makes the device of a client, on the GPU.
    ///
    /// # Errors
    /// When RM refuses.
    pub fn add_device(&self, client: u32) -> Result<(), Refusal> {
        let mut parameters = [0; Class::DEVICE_PARAMETERS];
        put(&mut parameters, 0, &self.number.to_ne_bytes());
        put(&mut parameters, Class::DEVICE_SHARE, &client.to_ne_bytes());
        self.allocate(Class::DEVICE, [client, client, DEVICE], &mut parameters).map(drop)
    }

    /// Allocates an object by the long form, and returns its handle.
    ///
    /// # Errors
    /// When it is refused.
    pub fn allocate(
        &self,
        class: Class,
        [client, parent, handle]: [u32; 3],
        parameters: &mut [u8],
    ) -> Result<u32, Refusal> {
        let mut structure = vec![0; self.era.long];
        self.fill(&mut structure, class, [client, parent, handle], parameters);
        let done = call(&self.file, number::ALLOC, &mut structure, self.way);
        judged(done, u32_at(&structure, self.era.long_status))?;
        Ok(u32_at(&structure, alloc::HANDLE))
    }

    /// Writes an allocation's structure.
    pub fn fill(&self, structure: &mut [u8], class: Class, place: [u32; 3], parameters: &mut [u8]) {
        for (at, word) in [alloc::CLIENT, alloc::PARENT, alloc::HANDLE, alloc::CLASS]
            .into_iter()
            .zip(place.into_iter().chain([class.0]))
        {
            put(structure, at, &word.to_ne_bytes());
        }
        let address = if parameters.is_empty() { 0 } else { parameters.as_mut_ptr().expose_provenance() };
        put(structure, alloc::PARAMETERS, &(address as u64).to_ne_bytes());
    }

    fn parameters_of(&self, bytes: u64) -> Vec<u8> {
        let mut parameters = memory_parameters(self.era, bytes);
        put(&mut parameters, 0, &self.handle.to_ne_bytes()); // its owner
        parameters
    }

    /// Device memory by the long form.
    ///
    /// # Errors
    /// When it is refused.
    pub fn memory(&self, bytes: u64, handle: u32) -> Result<u32, Refusal> {
        let mut parameters = self.parameters_of(bytes);
        self.allocate(Class::MEMORY, [self.handle, DEVICE, handle], &mut parameters)
    }

    /// Device memory by the short form.
    ///
    /// # Errors
    /// When it is refused.
    pub fn memory_by_short_form(&self, bytes: u64, handle: u32) -> Result<u32, Refusal> {
        let mut parameters = self.parameters_of(bytes);
        let mut structure = [0; alloc::SHORT];
        self.fill(&mut structure, Class::MEMORY, [self.handle, DEVICE, handle], &mut parameters);
        let done = call(&self.file, number::ALLOC, &mut structure, self.way);
        judged(done, u32_at(&structure, self.era.short_status))?;
        Ok(u32_at(&structure, alloc::HANDLE))
    }

    /// Device memory by VID_HEAP_CONTROL.
    ///
    /// # Errors
    /// When it is refused.
    pub fn memory_by_heap(&self, function: u32, bytes: u64) -> Result<u32, Refusal> {
        let mut structure = [0; heap::SIZE];
        let attributes = match function {
            heap::ALLOC_TILED_PITCH_HEIGHT => heap::PITCH_ATTRIBUTES,
            _ => heap::ATTRIBUTES,
        };
        for (at, word) in [
            (heap::CLIENT, self.handle),
            (heap::PARENT, DEVICE),
            (heap::FUNCTION, function),
            (HEAP_OWNER, self.handle),
            (attributes, ATTRIBUTES.1),
        ] {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        match function {
            heap::ALLOC_TILED_PITCH_HEIGHT => {
                // The size field lies; RM does not read it.
                put(&mut structure, heap::HEIGHT, &u32::try_from(bytes >> 12).unwrap_or(0).to_ne_bytes());
                put(&mut structure, heap::PITCH, &4096u32.to_ne_bytes());
                put(&mut structure, 88, &4096u64.to_ne_bytes());
            }
            heap::ALLOC_SIZE_RANGE => put(&mut structure, 80, &bytes.to_ne_bytes()),
            _ => put(&mut structure, 88, &bytes.to_ne_bytes()),
        }
        let done = call(&self.file, number::VID_HEAP_CONTROL, &mut structure, self.way);
        judged(done, u32_at(&structure, heap::STATUS))?;
        Ok(u32_at(&structure, heap::HANDLE))
    }

    /// Frees an object.
    ///
    /// # Errors
    /// When it is refused.
    pub fn free(&self, client: u32, handle: u32) -> Result<(), Refusal> {
        let mut structure = [0; free::SIZE];
        put(&mut structure, free::CLIENT, &client.to_ne_bytes());
        put(&mut structure, free::HANDLE, &handle.to_ne_bytes());
        let done = call(&self.file, number::FREE, &mut structure, self.way);
        judged(done, u32_at(&structure, free::STATUS))
    }

    /// Duplicates an object into another client of this process, under a handle of RM's choice.
    ///
    /// # Errors
    /// When it is refused.
    pub fn duplicate(&self, client: u32, source: u32) -> Result<u32, Refusal> {
        let mut structure = [0; duplicate::SIZE];
        let words =
            [(duplicate::CLIENT, client), (duplicate::PARENT, DEVICE), (12, self.handle), (16, source)];
        for (at, word) in words {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        let done = call(&self.file, number::DUP_OBJECT, &mut structure, self.way);
        judged(done, u32_at(&structure, duplicate::STATUS))?;
        Ok(u32_at(&structure, duplicate::HANDLE))
    }

    /// Makes a control call.
    ///
    /// # Errors
    /// When it is refused.
    pub fn control(&self, object: u32, command: u32, parameters: &mut [u8]) -> Result<(), Refusal> {
        let mut structure = [0; control::SIZE];
        let size = u32::try_from(parameters.len()).unwrap_or(0);
        for (at, word) in [
            (control::CLIENT, self.handle),
            (control::OBJECT, object),
            (control::COMMAND, command),
            (control::PARAMETERS_SIZE, size),
        ] {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        let address = parameters.as_mut_ptr().expose_provenance() as u64;
        put(&mut structure, control::PARAMETERS, &address.to_ne_bytes());
        let done = call(&self.file, number::CONTROL, &mut structure, self.way);
        judged(done, u32_at(&structure, control::STATUS))
    }

    /// Lets a new file of nvidiactl hold a memory.
    ///
    /// # Errors
    /// When it is refused.
    pub fn export(&self, handle: u32) -> Result<File, Refusal> {
        let to = self.another_file().map_err(|_| Refusal::Errno(Errno::EMFILE))?;
        let mut parameters = [0; 32];
        // An object of RM's, by device, parent and handle.
        for (at, word) in [(0, 1), (4, DEVICE), (8, DEVICE), (12, handle)] {
            put(&mut parameters, at, &word.to_ne_bytes());
        }
        put(&mut parameters, 24, &to.as_raw_fd().to_ne_bytes());
        self.control(self.handle, 0x3d05, &mut parameters)?;
        Ok(to)
    }

    /// Bytes that RM counts for this process.
    ///
    /// # Errors
    /// When it is refused.
    pub fn counted(&self) -> Result<u64, Refusal> {
        let mut parameters = vec![0; pid_info::SIZE];
        put(&mut parameters, pid_info::COUNT, &1u32.to_ne_bytes());
        put(&mut parameters, pid_info::LIST + pid_info::PID, &std::process::id().to_ne_bytes());
        self.control(SUBDEVICE, pid_info::COMMAND, &mut parameters)?;
        let at = |offset| u64_at(&parameters, pid_info::LIST + offset);
        Ok(at(pid_info::PRIVATE) + at(pid_info::SHARED))
    }
}
