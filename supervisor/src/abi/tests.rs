//! Compares the interface with a table that a C compiler printed from NVIDIA's own headers, for 23 releases.

use std::collections::HashMap;

use super::*;

const VALUES: &str = include_str!("../../fixtures/abi.tsv");
const CLASSES: &str = include_str!("../../fixtures/classes.tsv");

/// Lists this code's values by their names in the headers.
fn values(era: &Era) -> Vec<(&'static str, usize)> {
    let word = |value: u32| value as usize;
    let flags = era.long_flags.map(|flags| ("offsetof(NVOS64_PARAMETERS, flags)", flags));
    let mut values = vec![
        ("sizeof(NVOS21_PARAMETERS)", alloc::SHORT),
        ("sizeof(NVOS64_PARAMETERS)", era.long),
        ("sizeof(NVOS00_PARAMETERS)", free::SIZE),
        ("sizeof(NVOS54_PARAMETERS)", control::SIZE),
        ("sizeof(NVOS55_PARAMETERS)", duplicate::SIZE),
        ("sizeof(NVOS32_PARAMETERS)", heap::SIZE),
        ("sizeof(nv_ioctl_xfer_t)", transfer::SIZE),
        ("sizeof(NV_MEMORY_ALLOCATION_PARAMS)", era.memory),
        ("sizeof(NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS)", Class(0xa06c).performed(era).unwrap()),
        ("sizeof(NV_CHANNELGPFIFO_ALLOCATION_PARAMETERS)", Class(0xc86f).performed(era).unwrap()),
        ("sizeof(NVA06C_CTRL_TIMESLICE_PARAMS)", slice::SIZE),
        ("sizeof(NVA06C_CTRL_INTERLEAVE_LEVEL_PARAMS)", interleave::SIZE),
        ("sizeof(NV_VASPACE_ALLOCATION_PARAMETERS)", Class(0x90f1).performed(era).unwrap()),
        ("sizeof(NV0080_ALLOC_PARAMETERS)", Class::DEVICE_PARAMETERS),
        ("sizeof(NV2080_ALLOC_PARAMETERS)", Class::SUBDEVICE_PARAMETERS),
        ("sizeof(NV2080_CTRL_GPU_GET_PID_INFO_PARAMS)", pid_info::SIZE),
        ("sizeof(NV2080_CTRL_GPU_PID_INFO)", pid_info::ENTRY),
        ("sizeof(NV2080_CTRL_GPU_GET_PIDS_PARAMS)", pids::SIZE),
        ("offsetof(NV2080_CTRL_GPU_GET_PIDS_PARAMS, idType)", pids::ID_TYPE),
        ("offsetof(NV2080_CTRL_GPU_GET_PIDS_PARAMS, id)", pids::ID),
        ("offsetof(NV2080_CTRL_GPU_GET_PIDS_PARAMS, pidTblCount)", pids::COUNT),
        ("offsetof(NV2080_CTRL_GPU_GET_PIDS_PARAMS, pidTbl)", pids::TABLE),
        ("sizeof(NV2080_CTRL_FB_GET_INFO_V2_PARAMS)", era.framebuffer_info),
        ("sizeof(NV2080_CTRL_GPU_GET_GID_INFO_PARAMS)", gid_info::SIZE),
        ("sizeof(NV0000_CTRL_GPU_GET_DEVICE_IDS_PARAMS)", device_ids::SIZE),
        ("sizeof(NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS)", handle_info::SIZE),
        ("sizeof(NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS)", child::SIZE),
        ("sizeof(NV0000_CTRL_GPU_GET_ATTACHED_IDS_PARAMS)", attached_ids::SIZE),
        ("sizeof(NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS)", uuid_of_id::SIZE),
        ("sizeof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS)", channels::STOP.size),
        ("sizeof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION_PARAMS)", channels::STOP_FOR_KEYS.size),
        ("sizeof(NV2080_CTRL_CMD_FIFO_ROTATE_KEYS_PARAMS)", channels::ROTATE_KEYS.size),
        ("offsetof(NV2080_CTRL_CMD_FIFO_ROTATE_KEYS_PARAMS, numChannels)", channels::ROTATE_KEYS.count),
        ("offsetof(NV2080_CTRL_CMD_FIFO_ROTATE_KEYS_PARAMS, hClientList)", channels::ROTATE_KEYS.clients),
        ("sizeof(RS_ACCESS_MASK)", alloc::RIGHTS_SIZE),
        ("offsetof(NVOS21_PARAMETERS, hRoot)", alloc::CLIENT),
        ("offsetof(NVOS21_PARAMETERS, hObjectParent)", alloc::PARENT),
        ("offsetof(NVOS21_PARAMETERS, hObjectNew)", alloc::HANDLE),
        ("offsetof(NVOS21_PARAMETERS, hClass)", alloc::CLASS),
        ("offsetof(NVOS21_PARAMETERS, pAllocParms)", alloc::PARAMETERS),
        ("offsetof(NVOS21_PARAMETERS, status)", era.short_status),
        ("offsetof(NVOS64_PARAMETERS, hRoot)", alloc::CLIENT),
        ("offsetof(NVOS64_PARAMETERS, hObjectParent)", alloc::PARENT),
        ("offsetof(NVOS64_PARAMETERS, hObjectNew)", alloc::HANDLE),
        ("offsetof(NVOS64_PARAMETERS, hClass)", alloc::CLASS),
        ("offsetof(NVOS64_PARAMETERS, pAllocParms)", alloc::PARAMETERS),
        ("offsetof(NVOS64_PARAMETERS, pRightsRequested)", alloc::RIGHTS),
        ("offsetof(NVOS64_PARAMETERS, status)", era.long_status),
        ("offsetof(NVOS00_PARAMETERS, hRoot)", free::CLIENT),
        ("offsetof(NVOS00_PARAMETERS, hObjectParent)", free::PARENT),
        ("offsetof(NVOS00_PARAMETERS, hObjectOld)", free::HANDLE),
        ("offsetof(NVOS00_PARAMETERS, status)", free::STATUS),
        ("offsetof(NVOS54_PARAMETERS, hClient)", control::CLIENT),
        ("offsetof(NVOS54_PARAMETERS, hObject)", control::OBJECT),
        ("offsetof(NVOS54_PARAMETERS, cmd)", control::COMMAND),
        ("offsetof(NVOS54_PARAMETERS, params)", control::PARAMETERS),
        ("offsetof(NVOS54_PARAMETERS, paramsSize)", control::PARAMETERS_SIZE),
        ("offsetof(NVOS54_PARAMETERS, status)", control::STATUS),
        ("offsetof(NVOS55_PARAMETERS, hClient)", duplicate::CLIENT),
        ("offsetof(NVOS55_PARAMETERS, hParent)", duplicate::PARENT),
        ("offsetof(NVOS55_PARAMETERS, hObject)", duplicate::HANDLE),
        ("offsetof(NVOS55_PARAMETERS, status)", duplicate::STATUS),
        ("offsetof(nv_ioctl_xfer_t, cmd)", transfer::COMMAND),
        ("offsetof(nv_ioctl_xfer_t, size)", transfer::LENGTH),
        ("offsetof(nv_ioctl_xfer_t, ptr)", transfer::ADDRESS),
        ("offsetof(NV_MEMORY_ALLOCATION_PARAMS, flags)", memory::FLAGS),
        ("offsetof(NV_MEMORY_ALLOCATION_PARAMS, size)", memory::LENGTH),
        ("offsetof(NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS, engineType)", channel_group::ENGINE),
        ("offsetof(NV2080_CTRL_GPU_GET_PID_INFO_PARAMS, pidInfoListCount)", pid_info::COUNT),
        ("offsetof(NV2080_CTRL_GPU_GET_PID_INFO_PARAMS, pidInfoList)", pid_info::LIST),
        ("offsetof(NV2080_CTRL_GPU_PID_INFO, pid)", pid_info::PID),
        ("offsetof(NV2080_CTRL_GPU_PID_INFO, result)", pid_info::RESULT),
        ("offsetof(NV2080_CTRL_GPU_PID_INFO, data.vidMemUsage.memPrivate)", pid_info::PRIVATE),
        ("offsetof(NV2080_CTRL_GPU_PID_INFO, data.vidMemUsage.memSharedOwned)", pid_info::SHARED),
        ("offsetof(NV2080_CTRL_FB_GET_INFO_V2_PARAMS, fbInfoListSize)", framebuffer_info::COUNT),
        ("offsetof(NV2080_CTRL_FB_GET_INFO_V2_PARAMS, fbInfoList)", framebuffer_info::LIST),
        ("offsetof(NV2080_CTRL_GPU_GET_GID_INFO_PARAMS, flags)", gid_info::FLAGS),
        ("offsetof(NV2080_CTRL_GPU_GET_GID_INFO_PARAMS, length)", gid_info::LENGTH),
        ("offsetof(NV2080_CTRL_GPU_GET_GID_INFO_PARAMS, data)", gid_info::DATA),
        ("offsetof(NV0000_CTRL_GPU_GET_DEVICE_IDS_PARAMS, deviceIds)", device_ids::MASK),
        ("offsetof(NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS, hObject)", handle_info::OBJECT),
        ("offsetof(NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS, hParent)", child::PARENT),
        ("offsetof(NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS, classId)", child::CLASS),
        ("offsetof(NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS, hObject)", child::RESULT),
        ("offsetof(NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS, gpuId)", uuid_of_id::ID),
        ("offsetof(NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS, flags)", uuid_of_id::FLAGS),
        ("offsetof(NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS, gpuUuid)", uuid_of_id::DATA),
        ("offsetof(NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS, uuidStrLen)", uuid_of_id::LENGTH),
        ("offsetof(NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS, index)", handle_info::ASKED),
        ("offsetof(NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS, data)", handle_info::RESULT),
        ("offsetof(NVA06C_CTRL_TIMESLICE_PARAMS, timesliceUs)", slice::MICROSECONDS),
        ("offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS, bDisable)", channels::STOPS),
        ("offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS, numChannels)", channels::STOP.count),
        ("offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS, hClientList)", channels::STOP.clients),
        (
            "offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION_PARAMS, numChannels)",
            channels::STOP_FOR_KEYS.count,
        ),
        (
            "offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION_PARAMS, hClientList)",
            channels::STOP_FOR_KEYS.clients,
        ),
        (
            "offsetof(NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS, hChannelList)",
            channels::STOP.clients + 4 * channels::MOST,
        ),
        ("offsetof(NVOS32_PARAMETERS, hRoot)", heap::CLIENT),
        ("offsetof(NVOS32_PARAMETERS, hObjectParent)", heap::PARENT),
        ("offsetof(NVOS32_PARAMETERS, function)", heap::FUNCTION),
        ("offsetof(NVOS32_PARAMETERS, status)", heap::STATUS),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSize.hMemory)", heap::HANDLE),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.hMemory)", heap::HANDLE),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSizeRange.hMemory)", heap::HANDLE),
        ("offsetof(NVOS32_PARAMETERS, data.Free.hMemory)", heap::HANDLE),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSize.flags)", heap::FLAGS),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.flags)", heap::FLAGS),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSizeRange.flags)", heap::FLAGS),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSize.attr)", heap::ATTRIBUTES),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.attr)", heap::PITCH_ATTRIBUTES),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSizeRange.attr)", heap::ATTRIBUTES),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSize.size)", heap::LENGTH),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.size)", heap::LENGTH),
        ("offsetof(NVOS32_PARAMETERS, data.AllocSizeRange.size)", heap::RANGE_LENGTH),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.height)", heap::HEIGHT),
        ("offsetof(NVOS32_PARAMETERS, data.AllocTiledPitchHeight.pitch)", heap::PITCH),
        ("NV2080_CTRL_CMD_GPU_GET_PID_INFO", word(pid_info::COMMAND)),
        ("NV2080_CTRL_CMD_FB_GET_INFO_V2", word(framebuffer_info::COMMAND)),
        ("NV2080_CTRL_CMD_GPU_GET_GID_INFO", word(gid_info::COMMAND)),
        ("NV0000_CTRL_CMD_GPU_GET_DEVICE_IDS", word(device_ids::COMMAND)),
        ("NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO", word(handle_info::COMMAND)),
        ("NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE", word(child::COMMAND)),
        ("__nvoc_class_id_Subdevice", word(child::SUBDEVICE)),
        ("NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS", word(attached_ids::COMMAND)),
        ("NV0000_CTRL_GPU_INVALID_ID", word(attached_ids::END)),
        ("NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID", word(uuid_of_id::COMMAND)),
        ("NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID_FLAGS_FORMAT_BINARY", word(uuid_of_id::BINARY)),
        ("NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT", word(handle_info::PARENT)),
        ("NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID", word(handle_info::CLASS)),
        ("NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS", word(channels::STOP.command)),
        ("NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION", word(channels::STOP_FOR_KEYS.command)),
        ("NV2080_CTRL_CMD_FIFO_ROTATE_KEYS", word(channels::ROTATE_KEYS.command)),
        ("NVA06C_CTRL_CMD_GPFIFO_SCHEDULE", word(channels::SCHEDULE[0])),
        ("NVA06F_CTRL_CMD_GPFIFO_SCHEDULE", word(channels::SCHEDULE[1])),
        ("NVA06C_CTRL_CMD_SET_TIMESLICE", word(slice::COMMAND)),
        ("NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL", word(interleave::COMMAND)),
        ("NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT", pid_info::MOST),
        ("NV2080_CTRL_CMD_GPU_GET_PIDS", word(pids::COMMAND)),
        ("NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT", pids::MOST),
        ("NV2080_CTRL_GPU_GET_PIDS_ID_TYPE_CLASS", word(pids::OF_CLASS)),
        ("NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE", word(framebuffer_info::HEAP_SIZE)),
        ("NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE", word(framebuffer_info::HEAP_FREE)),
        ("NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY", word(gid_info::BINARY)),
        ("NV2080_ENGINE_TYPE_COPY0", word(*channel_group::COPIES.start())),
        ("NV2080_ENGINE_TYPE_COPY9", word(*channel_group::COPIES.end())),
        ("NVOS32_ALLOC_FLAGS_VIRTUAL", word(memory::VIRTUAL)),
        ("NVOS32_ALLOC_FLAGS_LAZY", word(memory::LAZY)),
        ("NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED", word(memory::EXTERNALLY_MANAGED)),
        ("NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED", word(memory::HANDLE_PROVIDED)),
        ("NV_ERR_NO_MEMORY", word(Status::NO_MEMORY.0)),
        ("NV_ERR_INVALID_OBJECT_PARENT", word(Status::INVALID_PARENT.0)),
        ("NV_ERR_INSUFFICIENT_PERMISSIONS", word(Status::INSUFFICIENT_PERMISSIONS.0)),
        ("NV_ERR_INSERT_DUPLICATE_NAME", word(Status::DUPLICATE.0)),
        ("NV_ERR_INSUFFICIENT_RESOURCES", word(Status::INSUFFICIENT_RESOURCES.0)),
        ("NV_ERR_INVALID_ARGUMENT", word(Status::INVALID_ARGUMENT.0)),
        ("NV_ERR_INVALID_ADDRESS", word(Status::INVALID_ADDRESS.0)),
        ("NV_ERR_OBJECT_NOT_FOUND", word(Status::NOT_FOUND.0)),
        ("sizeof(nv_ioctl_nvos33_parameters_with_fd)", switches::map::SIZE),
        ("offsetof(NVOS33_PARAMETERS, hClient)", switches::map::CLIENT),
        ("offsetof(NVOS33_PARAMETERS, hDevice)", switches::map::DEVICE),
        ("offsetof(NVOS33_PARAMETERS, hMemory)", switches::map::MEMORY),
        ("offsetof(NVOS33_PARAMETERS, length)", switches::map::LENGTH),
        ("offsetof(NVOS33_PARAMETERS, status)", switches::map::STATUS),
        ("offsetof(NVOS33_PARAMETERS, flags)", switches::map::FLAGS),
        ("offsetof(nv_ioctl_nvos33_parameters_with_fd, fd)", switches::map::FD),
        ("offsetof(NV_MEMORY_ALLOCATION_PARAMS, attr)", switches::host_memory::ATTRIBUTES),
        ("offsetof(NV_MEMORY_ALLOCATION_PARAMS, attr2)", switches::host_memory::MORE_ATTRIBUTES),
        ("NV01_MEMORY_DEVICELESS", word(switches::host_memory::CLASS.0)),
        ("NV_EVENT_BUFFER", word(switches::buffer::CLASS.0)),
        ("sizeof(NV_EVENT_BUFFER_ALLOC_PARAMETERS)", switches::buffer::SIZE),
        ("offsetof(NV_EVENT_BUFFER_ALLOC_PARAMETERS, recordSize)", switches::buffer::RECORD_SIZE),
        ("offsetof(NV_EVENT_BUFFER_ALLOC_PARAMETERS, recordCount)", switches::buffer::RECORDS),
        ("offsetof(NV_EVENT_BUFFER_ALLOC_PARAMETERS, hSubDevice)", switches::buffer::SUBDEVICE),
        ("offsetof(NV_EVENT_BUFFER_ALLOC_PARAMETERS, hBufferHeader)", switches::buffer::HEADER_MEMORY),
        ("offsetof(NV_EVENT_BUFFER_ALLOC_PARAMETERS, hRecordBuffer)", switches::buffer::RECORD_MEMORY),
        ("NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS", word(switches::buffer::ENABLE)),
        ("sizeof(NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS)", switches::buffer::ENABLE_SIZE),
        ("offsetof(NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS, flags)", switches::buffer::ENABLE_FLAGS),
        ("NV_EVENT_BUFFER_FLAG_OVERFLOW_POLICY_KEEP_OLDEST", word(switches::buffer::KEEP_OLDEST)),
        ("NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET", word(switches::buffer::UPDATE_GET)),
        ("sizeof(NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET_PARAMS)", switches::buffer::UPDATE_GET_SIZE),
        ("sizeof(NV_EVENT_BUFFER_HEADER)", switches::header::SIZE),
        ("offsetof(NV_EVENT_BUFFER_HEADER, recordPut)", switches::header::PUT),
        ("offsetof(NV_EVENT_BUFFER_HEADER, recordDropcount)", switches::header::DROPPED),
        ("sizeof(NV_EVENT_BUFFER_RECORD_HEADER)", switches::record::HEADER),
        ("sizeof(NV_EVENT_BUFFER_FECS_RECORD_V2)", switches::record::SIZE - switches::record::HEADER),
        (
            "offsetof(NV_EVENT_BUFFER_FECS_RECORD_V2, seqno)",
            switches::record::SEQUENCE - switches::record::HEADER,
        ),
        (
            "offsetof(NV_EVENT_BUFFER_FECS_RECORD_V2, context_id)",
            switches::record::CONTEXT - switches::record::HEADER,
        ),
        ("offsetof(NV_EVENT_BUFFER_FECS_RECORD_V2, pid)", switches::record::PID - switches::record::HEADER),
        (
            "offsetof(NV_EVENT_BUFFER_FECS_RECORD_V2, timestamp)",
            switches::record::TIME - switches::record::HEADER,
        ),
        ("NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START", usize::from(switches::record::START)),
        ("NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_END", usize::from(switches::record::END)),
        ("NV_EVENT_BUFFER_FECS_CTXSWTAG_ENGINE_RESET", usize::from(switches::record::RESET)),
        ("NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2", word(switches::bind::COMMAND)),
        ("sizeof(NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS)", switches::bind::SIZE),
        (
            "offsetof(NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS, recordSize)",
            switches::bind::RECORD_SIZE,
        ),
        (
            "offsetof(NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS, levelOfDetail)",
            switches::bind::DETAIL,
        ),
        ("offsetof(NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS, bAllUsers)", switches::bind::ALL_USERS),
        ("offsetof(NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS, reasonCode)", switches::bind::REASON),
        ("NV2080_CTRL_GR_FECS_BIND_EVTBUF_LOD_SIMPLE", word(switches::bind::SIMPLE)),
        ("NV2080_CTRL_CMD_TIMER_GET_TIME", word(switches::time::COMMAND)),
        ("sizeof(NV2080_CTRL_TIMER_GET_TIME_PARAMS)", switches::time::SIZE),
    ];
    if let Some(flags) = flags {
        values.extend([flags, ("NVOS64_FLAGS_FINN_SERIALIZED", word(alloc::SERIALISED))]);
    }
    values
}

#[test]
fn sizes_offsets_and_numbers_are_those_of_the_headers() {
    let mut lines = VALUES.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let releases = lines.next().unwrap();
    let table: HashMap<&str, Vec<&str>> = lines.map(|line| (line[0], line)).collect();
    assert!(releases.len() > 20);
    for (column, release) in releases.iter().enumerate().skip(1) {
        let era = Era::for_version(release.parse().unwrap()).unwrap();
        let values = values(era);
        for (name, value) in &values {
            let want = table.get(name).unwrap_or_else(|| panic!("{name} is in the table"))[column];
            // Some releases lack a structure.
            assert!(want == "-" || value.to_string() == want, "{release} {name}: {value} for {want}");
        }
        let is_compared = |name: &str| values.iter().any(|(compared, _)| *compared == name);
        let left_out: Vec<&str> = table
            .iter()
            .filter(|(name, line)| !is_compared(name) && line[column] != "-")
            .map(|(name, _)| *name)
            .collect();
        assert!(left_out.is_empty(), "{release}: {left_out:?}");
    }
}

#[test]
fn classes_are_of_the_kinds_that_the_driver_has_them_in() {
    for line in CLASSES.lines().skip(1) {
        let [class, internal, name] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let class = u32::from_str_radix(class.trim_start_matches("0x"), 16).unwrap();
        let want = match internal {
            "RmClientResource" => Kind::Client,
            "Device" => Kind::Device,
            "Subdevice" => Kind::Subdevice,
            "VirtualMemory" => Kind::VirtualRange,
            "VideoMemory" => Kind::Memory,
            "VaSpaceApi" => Kind::AddressSpace,
            "KernelChannelGroupApi" => Kind::ChannelGroup,
            "KernelChannel" => Kind::Channel,
            _ => panic!("{line}"),
        };
        assert_eq!(Class(class).kind(), want, "{name}");
    }
}
