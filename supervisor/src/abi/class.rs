//! The classes of objects that take device memory.

use super::Era;

/// How a class takes device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A client, the root of all its objects. It belongs to the process that makes it, so no other process
    /// may make it.
    Client,
    /// NV01_DEVICE_0.
    Device,
    /// NV20_SUBDEVICE_0.
    Subdevice,
    /// Device memory (NV01_MEMORY_LOCAL_USER).
    Memory,
    /// A range of virtual memory, with page tables on the device (NV50_MEMORY_VIRTUAL).
    VirtualRange,
    /// An address space (FERMI_VASPACE_A).
    AddressSpace,
    /// A channel group (KEPLER_CHANNEL_GROUP_A).
    ChannelGroup,
    /// A channel of any GPU generation.
    Channel,
    /// An object that keeps a duplicate of memory passed to it.
    Duplicator,
    /// Any other class.
    Other,
}

/// A class by its number (`hClass`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(pub u32);

impl Class {
    /// NV01_ROOT_CLIENT.
    pub const CLIENT: Self = Self(0x41);
    /// NV01_MEMORY_LOCAL_USER.
    pub const MEMORY: Self = Self(0x40);
    /// NV01_DEVICE_0.
    pub const DEVICE: Self = Self(0x80);
    /// NV20_SUBDEVICE_0.
    pub const SUBDEVICE: Self = Self(0x2080);
    /// NV01_MEMORY_SYSTEM.
    pub const HOST_MEMORY: Self = Self(0x3e);
    /// NV50_MEMORY_VIRTUAL.
    pub const VIRTUAL_RANGE: Self = Self(0x50a0);
    /// Size in bytes of a device's parameters (NV0080_ALLOC_PARAMETERS). The first u32 is the device number.
    pub const DEVICE_PARAMETERS: usize = 56;
    /// hClientShare of a device's parameters, u32: the client that shares its address space with the device.
    pub const DEVICE_SHARE: usize = 4;
    /// Size in bytes of a subdevice's parameters (NV2080_ALLOC_PARAMETERS).
    pub const SUBDEVICE_PARAMETERS: usize = 4;

    /// Returns how the class takes device memory.
    pub const fn kind(self) -> Kind {
        match self.0 {
            0x0 | 0x1 | 0x41 => Kind::Client,
            0x80 => Kind::Device,
            0x2080 => Kind::Subdevice,
            0x40 => Kind::Memory,
            0x50a0 => Kind::VirtualRange,
            0x90f1 => Kind::AddressSpace,
            0xa06c => Kind::ChannelGroup,
            // Fermi and Kepler to Blackwell.
            0x906f | 0xa06f | 0xa16f | 0xb06f | 0xc06f | 0xc36f | 0xc46f | 0xc56f | 0xc86f | 0xc96f
            | 0xca6f => Kind::Channel,
            // Fabric memory, multicast, export, semaphore surface, event buffer, memory without a device.
            0xf8 | 0xfd | 0xe0 | 0xda | 0x90cd | 0x90ce => Kind::Duplicator,
            _ => Kind::Other,
        }
    }

    /// Returns the size in bytes of the class's parameters if the supervisor performs its allocation, or
    /// `None` if it lets the allocation through. All of these parameters are flat: RM does not follow the
    /// addresses in them for these classes.
    pub const fn performed(self, era: &Era) -> Option<usize> {
        match self.kind() {
            Kind::Memory | Kind::VirtualRange => Some(era.memory),
            Kind::AddressSpace => Some(era.address_space),
            Kind::ChannelGroup => Some(CHANNEL_GROUP),
            Kind::Channel => Some(era.channel),
            _ => None,
        }
    }
}

/// Size of NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS.
const CHANNEL_GROUP: usize = 20;
