//! The card's record of context switches, and the buffer in which RM hands it out. They are the same in all
//! eras.

/// NV_ESC_RM_MAP_MEMORY with nv_ioctl_nvos33_parameters_with_fd, which prepares an open file of nvidiactl for
/// mmap(2).
pub mod map {
    /// Number of the call.
    pub const NUMBER: u8 = 0x4e;
    /// Size of its structure.
    pub const SIZE: usize = 56;
    /// hClient, u32.
    pub const CLIENT: usize = 0;
    /// hDevice, u32. For memory without a device this is the client.
    pub const DEVICE: usize = 4;
    /// hMemory, u32.
    pub const MEMORY: usize = 8;
    /// length, u64.
    pub const LENGTH: usize = 24;
    /// status, u32, which RM writes.
    pub const STATUS: usize = 40;
    /// flags, u32.
    pub const FLAGS: usize = 44;
    /// The flag for a read-only mapping.
    pub const READ_ONLY: u32 = 1;
    /// fd, u32: the file to map.
    pub const FD: usize = 48;
}

/// NV01_MEMORY_DEVICELESS with NV_MEMORY_ALLOCATION_PARAMS, whose size is in `Era`: host memory.
pub mod host_memory {
    use super::super::Class;

    /// Its class.
    pub const CLASS: Class = Class(0x90ce);
    /// attr, u32.
    pub const ATTRIBUTES: usize = 24;
    /// NVOS32_ATTR_COHERENCY_CACHED.
    pub const CACHED: u32 = 1 << 29;
    /// attr2, u32.
    pub const MORE_ATTRIBUTES: usize = 28;
    /// NVOS32_ATTR2_PROTECTION_USER_READ_ONLY.
    pub const READ_ONLY: u32 = 1 << 22;
}

/// NV_EVENT_BUFFER with NV_EVENT_BUFFER_ALLOC_PARAMETERS.
pub mod buffer {
    use super::super::Class;

    /// Its class.
    pub const CLASS: Class = Class(0x90cd);
    /// Size of its parameters.
    pub const SIZE: usize = 72;
    /// recordSize, u32.
    pub const RECORD_SIZE: usize = 16;
    /// recordCount, u32.
    pub const RECORDS: usize = 20;
    /// hSubDevice, u32.
    pub const SUBDEVICE: usize = 52;
    /// hBufferHeader, u32.
    pub const HEADER_MEMORY: usize = 60;
    /// hRecordBuffer, u32.
    pub const RECORD_MEMORY: usize = 64;

    /// NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS: an enable flag, u8, and flags, u32.
    pub const ENABLE: u32 = 0x90cd_0101;
    /// Size of its parameters.
    pub const ENABLE_SIZE: usize = 8;
    /// flags, u32.
    pub const ENABLE_FLAGS: usize = 4;
    /// NV_EVENT_BUFFER_FLAG_OVERFLOW_POLICY_KEEP_OLDEST.
    pub const KEEP_OLDEST: u32 = 1;
    /// NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET: index of the next record to read, u32.
    pub const UPDATE_GET: u32 = 0x90cd_0102;
    /// Size of its parameters.
    pub const UPDATE_GET_SIZE: usize = 8;
}

/// NV_EVENT_BUFFER_HEADER. recordGet, u32, is at 0.
pub mod header {
    /// Its size.
    pub const SIZE: usize = 32;
    /// recordPut, u32.
    pub const PUT: usize = 4;
    /// recordDropcount, u64.
    pub const DROPPED: usize = 16;
}

/// NV_EVENT_BUFFER_RECORD with NV_EVENT_BUFFER_FECS_RECORD_V2 after its header.
pub mod record {
    /// Size of the header. Its type, u16, is at 0.
    pub const HEADER: usize = 8;
    /// Its size.
    pub const SIZE: usize = HEADER + 24;
    /// The type of a record of this kind.
    pub const TYPE: u16 = 2;
    /// tag, u8.
    pub const TAG: usize = HEADER;
    /// seqno, u16.
    pub const SEQUENCE: usize = HEADER + 2;
    /// context_id, u32.
    pub const CONTEXT: usize = HEADER + 4;
    /// pid, u32, in the host's namespace.
    pub const PID: usize = HEADER + 8;
    /// timestamp, u64: nanoseconds of the card's clock.
    pub const TIME: usize = HEADER + 16;

    /// NV_EVENT_BUFFER_FECS_CTXSWTAG_CTXSW_REQ_BY_HOST, which does not say which context has the engine.
    pub const OTHER: u8 = 1;
    /// NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START: a context has the engine from now on.
    pub const START: u8 = 6;
    /// NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_END: the context has left the engine.
    pub const END: u8 = 7;
    /// NV_EVENT_BUFFER_FECS_CTXSWTAG_ENGINE_RESET.
    pub const RESET: u8 = 0xfe;
}

/// NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2: directs a user's switches to a buffer.
pub mod bind {
    /// Its number.
    pub const COMMAND: u32 = 0x2080_1238;
    /// Size of its parameters. hEventBuffer, u32, is at 0.
    pub const SIZE: usize = 24;
    /// recordSize, u32: size of the record without its header.
    pub const RECORD_SIZE: usize = 4;
    /// levelOfDetail, u32.
    pub const DETAIL: usize = 8;
    /// NV2080_CTRL_GR_FECS_BIND_EVTBUF_LOD_SIMPLE.
    pub const SIMPLE: u32 = 1;
    /// bAllUsers, u8.
    pub const ALL_USERS: usize = 16;
    /// reasonCode, u32, which RM writes.
    pub const REASON: usize = 20;
}

/// NV2080_CTRL_CMD_TIMER_GET_TIME: nanoseconds of the card's clock, u64.
pub mod time {
    /// Its number.
    pub const COMMAND: u32 = 0x2080_0403;
    /// Size of its parameters.
    pub const SIZE: usize = 8;
}
