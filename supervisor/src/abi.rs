//! The binary interface of NVIDIA's resource manager (RM) as programs call it by `ioctl`: numbers, sizes and
//! offsets.
//!
//! RM dispatches a call by its number and size alone and ignores its type and direction. Most structures are
//! the same in all releases from 515 to 595; [`Era`] has those that differ. The values come from the headers
//! of NVIDIA's open kernel modules. A test compares them with a table that a C compiler printed for each
//! release.

mod class;
mod era;
pub mod switches;
#[cfg(test)]
mod tests;

pub use class::{Class, Kind};
pub use era::{Era, Version};

/// Number of a call that RM serves (`_IOC_NR`).
pub mod number {
    /// NV_ESC_RM_ALLOC_OBJECT. Older libraries used it to make objects without parameters.
    pub const ALLOC_OBJECT: u8 = 0x28;
    /// NV_ESC_RM_FREE.
    pub const FREE: u8 = 0x29;
    /// NV_ESC_RM_CONTROL.
    pub const CONTROL: u8 = 0x2a;
    /// NV_ESC_RM_ALLOC.
    pub const ALLOC: u8 = 0x2b;
    /// NV_ESC_RM_DUP_OBJECT.
    pub const DUP_OBJECT: u8 = 0x34;
    /// NV_ESC_RM_VID_HEAP_CONTROL, which allocates as older drivers did.
    pub const VID_HEAP_CONTROL: u8 = 0x4a;
    /// NV_ESC_IOCTL_XFER_CMD, which carries another call in a structure of its own.
    pub const TRANSFER: u8 = 0xd3;
}

/// NVOS05_PARAMETERS, of [`number::ALLOC_OBJECT`].
pub mod alloc_object {
    /// Its size.
    pub const SIZE: usize = 20;
    /// hRoot, hObjectParent, hObjectNew, hClass and status, u32 each.
    pub const CLIENT: usize = 0;
    /// hClass: the class to allocate.
    pub const CLASS: usize = 12;
    /// status, which RM writes.
    pub const STATUS: usize = 16;
}

/// UVM_MAP_EXTERNAL_ALLOCATION of /dev/nvidia-uvm: a whole command, without a size.
pub const UVM_MAP_EXTERNAL: u32 = 33;

/// An RM status (`NV_STATUS`), 0 for success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// The call was done.
    pub const OK: Self = Self(0);
    /// NV_ERR_INSERT_DUPLICATE_NAME: the client has an object of this handle already.
    pub const DUPLICATE: Self = Self(0x19);
    /// NV_ERR_INSUFFICIENT_RESOURCES.
    pub const INSUFFICIENT_RESOURCES: Self = Self(0x1a);
    /// NV_ERR_INVALID_ADDRESS: a pointer in the parameters cannot be read.
    pub const INVALID_ADDRESS: Self = Self(0x1e);
    /// NV_ERR_INVALID_ARGUMENT.
    pub const INVALID_ARGUMENT: Self = Self(0x1f);
    /// NV_ERR_OBJECT_NOT_FOUND.
    pub const NOT_FOUND: Self = Self(0x57);
    /// NV_ERR_NOT_SUPPORTED.
    pub const NOT_SUPPORTED: Self = Self(0x56);
    /// NV_ERR_INSUFFICIENT_PERMISSIONS.
    pub const INSUFFICIENT_PERMISSIONS: Self = Self(0x1b);
    /// NV_ERR_NO_MEMORY. CUDA reports it as CUDA_ERROR_OUT_OF_MEMORY.
    pub const NO_MEMORY: Self = Self(0x51);
    /// NV_ERR_INVALID_OBJECT_PARENT.
    pub const INVALID_PARENT: Self = Self(0x36);
}

/// Sizes in bytes and offsets of NVOS21_PARAMETERS, the short form of [`number::ALLOC`], and of the fields
/// that the long form NVOS64_PARAMETERS has at the same offsets.
pub mod alloc {
    /// Size of the short form.
    pub const SHORT: usize = 32;
    /// hRoot, u32: the client.
    pub const CLIENT: usize = 0;
    /// hObjectParent, u32.
    pub const PARENT: usize = 4;
    /// hObjectNew, u32: 0 lets RM choose a handle.
    pub const HANDLE: usize = 8;
    /// hClass, u32.
    pub const CLASS: usize = 12;
    /// pAllocParms, u64: address of the class's own parameters, or 0.
    pub const PARAMETERS: usize = 16;
    /// pRightsRequested, u64: address of an RS_ACCESS_MASK, or 0. Only the long form has it.
    pub const RIGHTS: usize = 24;
    /// Size of RS_ACCESS_MASK.
    pub const RIGHTS_SIZE: usize = 4;
    /// Flag for serialised parameters, from 525 on.
    pub const SERIALISED: u32 = 1;
}

/// NVOS00_PARAMETERS, of [`number::FREE`].
pub mod free {
    /// Its size.
    pub const SIZE: usize = 16;
    /// hRoot, u32: the client.
    pub const CLIENT: usize = 0;
    /// hObjectParent, u32. RM ignores it.
    pub const PARENT: usize = 4;
    /// hObjectOld, u32.
    pub const HANDLE: usize = 8;
    /// status, u32.
    pub const STATUS: usize = 12;
}

/// NVOS54_PARAMETERS, of [`number::CONTROL`].
pub mod control {
    /// Its size.
    pub const SIZE: usize = 32;
    /// hClient, u32.
    pub const CLIENT: usize = 0;
    /// hObject, u32.
    pub const OBJECT: usize = 4;
    /// cmd, u32.
    pub const COMMAND: usize = 8;
    /// params, u64: address of the command's own parameters.
    pub const PARAMETERS: usize = 16;
    /// paramsSize, u32. RM refuses any size but its own.
    pub const PARAMETERS_SIZE: usize = 24;
    /// status, u32.
    pub const STATUS: usize = 28;
    /// The commands of a root client that hand objects to other processes by descriptor (0x3d01 and above).
    pub const EXPORTS: core::ops::RangeInclusive<u32> = 0x3d00..=0x3dff;
}

/// NVOS55_PARAMETERS, of [`number::DUP_OBJECT`].
pub mod duplicate {
    /// Its size.
    pub const SIZE: usize = 28;
    /// hClient, u32: the client that gets the duplicate.
    pub const CLIENT: usize = 0;
    /// hParent, u32.
    pub const PARENT: usize = 4;
    /// hObject, u32: the duplicate's handle; 0 lets RM choose.
    pub const HANDLE: usize = 8;
    /// hClientSrc, u32.
    pub const SOURCE_CLIENT: usize = 12;
    /// hObjectSrc, u32.
    pub const SOURCE: usize = 16;
    /// status, u32.
    pub const STATUS: usize = 24;
}

/// NVOS32_PARAMETERS, of [`number::VID_HEAP_CONTROL`]. `data` at 40 is a union by `function`.
pub mod heap {
    /// Its size.
    pub const SIZE: usize = 184;
    /// hRoot, u32: the client.
    pub const CLIENT: usize = 0;
    /// hObjectParent, u32.
    pub const PARENT: usize = 4;
    /// function, u32.
    pub const FUNCTION: usize = 8;
    /// status, u32.
    pub const STATUS: usize = 20;
    /// data.*.hMemory, u32, in all functions here.
    pub const HANDLE: usize = 44;
    /// data.*.flags, u32, in all allocating functions.
    pub const FLAGS: usize = 52;
    /// NVOS32_FUNCTION_ALLOC_SIZE.
    pub const ALLOC_SIZE: u32 = 2;
    /// NVOS32_FUNCTION_FREE.
    pub const FREE: u32 = 3;
    /// NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT. RM computes the size as height × pitch.
    pub const ALLOC_TILED_PITCH_HEIGHT: u32 = 6;
    /// NVOS32_FUNCTION_ALLOC_SIZE_RANGE.
    pub const ALLOC_SIZE_RANGE: u32 = 14;
    /// data.AllocSize.attr and data.AllocSizeRange.attr, u32.
    pub const ATTRIBUTES: usize = 56;
    /// data.AllocTiledPitchHeight.attr, u32.
    pub const PITCH_ATTRIBUTES: usize = 64;
    /// data.AllocSize.size and data.AllocTiledPitchHeight.size, u64.
    pub const LENGTH: usize = 88;
    /// data.AllocSizeRange.size, u64.
    pub const RANGE_LENGTH: usize = 80;
    /// NVOS32_FUNCTION_HW_FREE, which frees any object.
    pub const HW_FREE: u32 = 20;
    /// data.HwFree.hResourceHandle, u32.
    pub const HW_HANDLE: usize = 40;
    /// Functions that only query, or change the compression of existing memory: INFO, REACQUIRE_COMPR,
    /// RELEASE_COMPR, GET_MEM_ALIGNMENT.
    pub const HARMLESS: [u32; 4] = [5, 15, 16, 18];
    /// AllocTiledPitchHeight.height, u32.
    pub const HEIGHT: usize = 56;
    /// AllocTiledPitchHeight.pitch, i32.
    pub const PITCH: usize = 60;
}

/// nv_ioctl_xfer_t, of [`number::TRANSFER`].
pub mod transfer {
    /// Its size.
    pub const SIZE: usize = 16;
    /// cmd, u32: number of the call that it carries. RM compares all 32 bits.
    pub const COMMAND: usize = 0;
    /// size, u32: the size of that call's structure.
    pub const LENGTH: usize = 4;
    /// ptr, u64: address of the structure.
    pub const ADDRESS: usize = 8;
}

/// NV_MEMORY_ALLOCATION_PARAMS, for device memory and ranges of virtual memory.
pub mod memory {
    /// flags, u32.
    pub const FLAGS: usize = 8;
    /// size, u64, in bytes. RM writes the size that it really took.
    pub const LENGTH: usize = 64;
    /// NVOS32_ALLOC_FLAGS_LAZY: RM makes page tables when something is mapped.
    pub const LAZY: u32 = 0x400;
    /// NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED: the program chose [`super::heap::HANDLE`].
    pub const HANDLE_PROVIDED: u32 = 0x4000;
    /// NVOS32_ALLOC_FLAGS_VIRTUAL: the call makes a range of virtual memory.
    pub const VIRTUAL: u32 = 0x8_0000;
    /// NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED: RM does not make the page tables.
    pub const EXTERNALLY_MANAGED: u32 = 0x40_0000;
    /// Bits of `attr` for the location of the memory: 0 on the device.
    pub const LOCATION: u32 = 0x600_0000;
    /// The smallest piece that the driver's page allocator hands out, in bytes.
    pub const PIECE: u64 = 64 << 10;
}

/// NV2080_CTRL_GPU_GET_PIDS: the processes that use a GPU.
pub mod pids {
    /// NV2080_CTRL_CMD_GPU_GET_PIDS.
    pub const COMMAND: u32 = 0x2080_018d;
    /// Size of its parameters.
    pub const SIZE: usize = 3812;
    /// idType, u32: kind of `id`.
    pub const ID_TYPE: usize = 0;
    /// NV2080_CTRL_GPU_GET_PIDS_ID_TYPE_CLASS.
    pub const OF_CLASS: u32 = 0;
    /// id, u32. With [`Class::SUBDEVICE`](super::Class::SUBDEVICE), RM lists all processes that use the GPU.
    pub const ID: usize = 4;
    /// pidTblCount, u32.
    pub const COUNT: usize = 8;
    /// pidTbl: u32 each, in the caller's pid namespace.
    pub const TABLE: usize = 12;
    /// Most processes in one answer.
    pub const MOST: usize = 950;
}

/// NV2080_CTRL_GPU_GET_PID_INFO: memory that RM counts for processes on one GPU.
pub mod pid_info {
    /// NV2080_CTRL_CMD_GPU_GET_PID_INFO.
    pub const COMMAND: u32 = 0x2080_018e;
    /// Size of its parameters.
    pub const SIZE: usize = 14408;
    /// pidInfoListCount, u32.
    pub const COUNT: usize = 0;
    /// pidInfoList: entries of [`ENTRY`] bytes.
    pub const LIST: usize = 8;
    /// Size of an entry.
    pub const ENTRY: usize = 72;
    /// Most processes in one call.
    pub const MOST: usize = 200;
    /// pid, u32, in the caller's pid namespace.
    pub const PID: usize = 0;
    /// result, u32: status of this entry.
    pub const RESULT: usize = 8;
    /// data.vidMemUsage.memPrivate, u64: bytes with one handle in the whole system.
    pub const PRIVATE: usize = 16;
    /// data.vidMemUsage.memSharedOwned, u64: bytes that this process owns and that have duplicates.
    pub const SHARED: usize = 24;
}

/// NV2080_CTRL_CMD_FB_GET_INFO_V2: figures of the whole GPU. [`Era`] has the size.
pub mod framebuffer_info {
    /// NV2080_CTRL_CMD_FB_GET_INFO_V2.
    pub const COMMAND: u32 = 0x2080_1303;
    /// fbInfoListSize, u32.
    pub const COUNT: usize = 0;
    /// fbInfoList: pairs of index (u32) and data (u32, KiB).
    pub const LIST: usize = 4;
    /// NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE.
    pub const HEAP_SIZE: u32 = 0x9;
    /// NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE.
    pub const HEAP_FREE: u32 = 0x16;
}

/// NV0000_CTRL_GPU_GET_DEVICE_IDS_PARAMS: the devices that a client can make.
pub mod device_ids {
    /// NV0000_CTRL_CMD_GPU_GET_DEVICE_IDS, called on a root client.
    pub const COMMAND: u32 = 0x204;
    /// Size of its parameters.
    pub const SIZE: usize = 4;
    /// deviceIds, u32: one bit per device number.
    pub const MASK: usize = 0;
}

/// NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS: properties of a client's object.
pub mod handle_info {
    /// NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO, called on the client itself.
    pub const COMMAND: u32 = 0xd02;
    /// Size of its parameters.
    pub const SIZE: usize = 16;
    /// hObject, u32.
    pub const OBJECT: usize = 0;
    /// index, u32: the property to return.
    pub const ASKED: usize = 4;
    /// data, u64: the answer.
    pub const RESULT: usize = 8;
    /// The handle of the parent.
    pub const PARENT: u32 = 1;
    /// The class that was allocated.
    pub const CLASS: u32 = 2;
}

/// NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS: a child of a client's object.
pub mod child {
    /// NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE, called on the client itself.
    pub const COMMAND: u32 = 0xd05;
    /// Size of its parameters.
    pub const SIZE: usize = 12;
    /// hParent, u32.
    pub const PARENT: usize = 0;
    /// classId, u32: RM's internal number of the child's class.
    pub const CLASS: usize = 4;
    /// hObject, u32: the answer, or 0 for none.
    pub const RESULT: usize = 8;
    /// RM's internal class number of a subdevice, from driver 515 to 595 (`__nvoc_class_id_Subdevice`).
    pub const SUBDEVICE: u32 = 0x4b_01b3;
}

/// NV0000_CTRL_GPU_GET_ATTACHED_IDS_PARAMS: the GPUs in use.
pub mod attached_ids {
    /// NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS, called on a root client.
    pub const COMMAND: u32 = 0x201;
    /// Size of its parameters.
    pub const SIZE: usize = 128;
    /// Ends the list of ids.
    pub const END: u32 = u32::MAX;
}

/// NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS: the UUID of a GPU.
pub mod uuid_of_id {
    /// NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID, called on a root client.
    pub const COMMAND: u32 = 0x275;
    /// Size of its parameters.
    pub const SIZE: usize = 268;
    /// gpuId, u32.
    pub const ID: usize = 0;
    /// flags, u32.
    pub const FLAGS: usize = 4;
    /// NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID_FLAGS_FORMAT_BINARY.
    pub const BINARY: u32 = 2;
    /// gpuUuid.
    pub const DATA: usize = 8;
    /// uuidStrLen, u32.
    pub const LENGTH: usize = 264;
}

/// Control calls that stop and start channels, which they name by client and handle. RM lets any caller name
/// any client's channels.
pub mod channels {
    /// Number and byte offsets of one of these calls.
    #[derive(Clone, Copy, Debug)]
    pub struct List {
        /// Its number.
        pub command: u32,
        /// Size of its parameters, which are flat.
        pub size: usize,
        /// numChannels, u32.
        pub count: usize,
        /// hClientList: a u32 for each of [`MOST`] channels.
        pub clients: usize,
    }

    /// Most entries in the lists.
    pub const MOST: usize = 64;
    /// NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS.
    pub const STOP: List = List { command: 0x2080_110b, size: 536, count: 4, clients: 24 };
    /// NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION, from 550 on.
    pub const STOP_FOR_KEYS: List = List { command: 0x2080_111a, size: 520, count: 0, clients: 4 };
    /// NV2080_CTRL_CMD_FIFO_ROTATE_KEYS, from 595 on.
    pub const ROTATE_KEYS: List = List { command: 0x2080_111c, ..STOP_FOR_KEYS };
    /// All of them.
    pub const LISTS: [List; 3] = [STOP, STOP_FOR_KEYS, ROTATE_KEYS];
    /// bDisable of [`STOP`], u8: 0 starts the channels.
    pub const STOPS: usize = 0;
    /// NVA06C_CTRL_CMD_GPFIFO_SCHEDULE of a group, and NVA06F_CTRL_CMD_GPFIFO_SCHEDULE of a channel. They
    /// schedule it for the first time.
    pub const SCHEDULE: [u32; 2] = [0xa06c_0101, 0xa06f_0103];
}

/// NVA06C_CTRL_CMD_SET_TIMESLICE: how long a channel group runs before other work gets its turn.
pub mod slice {
    /// NVA06C_CTRL_CMD_SET_TIMESLICE, called on the group.
    pub const COMMAND: u32 = 0xa06c_0103;
    /// Size of its parameters.
    pub const SIZE: usize = 8;
    /// timesliceUs, u64: microseconds.
    pub const MICROSECONDS: usize = 0;
}

/// NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL: how often a channel group gets its turn.
pub mod interleave {
    /// NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL, called on the group.
    pub const COMMAND: u32 = 0xa06c_0107;
    /// Size of its parameters.
    pub const SIZE: usize = 4;
}

/// Calls by which a program changes the scheduling of its channels without stopping or starting them:
/// NVA06C_CTRL_CMD_SET_TIMESLICE, SET_INTERLEAVE_LEVEL and MAKE_REALTIME of a group, and
/// NVA06F_CTRL_CMD_SET_INTERLEAVE_LEVEL of a channel.
pub const SCHEDULINGS: [u32; 4] = [slice::COMMAND, interleave::COMMAND, 0xa06c_0110, 0xa06f_0109];

/// NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS.
pub mod channel_group {
    /// engineType, u32: the engine of its channels (NV2080_ENGINE_TYPE_*).
    pub const ENGINE: usize = 12;
    /// The first ten copy engines.
    pub const COPIES: core::ops::RangeInclusive<u32> = 9..=18;
}

/// NV2080_CTRL_CMD_GPU_GET_GID_INFO: a GPU's UUID.
pub mod gid_info {
    /// NV2080_CTRL_CMD_GPU_GET_GID_INFO.
    pub const COMMAND: u32 = 0x2080_014a;
    /// Size of its parameters.
    pub const SIZE: usize = 268;
    /// flags, u32.
    pub const FLAGS: usize = 4;
    /// NV2080_GPU_CMD_GPU_GET_GID_FLAGS: SHA1 in binary form.
    pub const BINARY: u32 = 2;
    /// length, u32.
    pub const LENGTH: usize = 8;
    /// data, the UUID's bytes from left to right.
    pub const DATA: usize = 12;
}

/// Returns the u32 at `offset`, or 0 if the bytes end before it.
pub fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_ne_bytes(*word))
}

/// Returns the u64 at `offset`, or 0 if the bytes end before it.
pub fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u64::from_ne_bytes(*word))
}

/// Writes `value` at `offset`. Writes nothing if it does not fit.
pub fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(room) = bytes.get_mut(offset..offset + value.len()) {
        room.copy_from_slice(value);
    }
}
