//! Handles and identities of the GPUs.

use std::sync::atomic::Ordering;

use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, Out, Result, Text, padded, set_text};
use crate::node::{gpu, model_of, node};

/// nvmlPciInfo_t. The oldest form has the short address only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pci {
    short_address: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device: u32,
    subsystem: u32,
    address: [u8; 32],
}

fn bus(gpu: &Gpu) -> u32 {
    gpu.bus.load(Ordering::Relaxed)
}

fn pci(device: Handle) -> Result<Pci> {
    let gpu = gpu(device)?;
    let bus = bus(gpu);
    Ok(Pci {
        short_address: padded(&format!("0000:{bus:02X}:00.0")),
        domain: 0,
        bus,
        device: 0,
        pci_device: model_of(device)?.pci_device,
        subsystem: model_of(device)?.pci_device,
        address: padded(&format!("00000000:{bus:02X}:00.0")),
    })
}

/// NVML_NVLINK_MAX_LINKS of nvml.h.
const LINKS: u32 = 18;

/// The index of the GPU at the other end of a GPU's link; `None` where nothing is linked. Links are counted
/// in the order of the GPUs at their other ends.
fn linked(device: Handle, link: u32) -> Result<Option<usize>> {
    let ends = gpu(device)?.nvlinks.load(Ordering::Relaxed);
    if ends == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    if link >= LINKS {
        return Err(Code::INVALID_ARGUMENT);
    }
    let ends = (0..u64::BITS).filter(|index| ends & (1 << index) != 0);
    Ok(ends.map(|index| index as usize).nth(link as usize))
}

/// Whether `text` is the PCI address of `gpu`, by value: the domain may have four or eight digits or be left
/// out, and letters may be of either case.
fn same_address(text: &str, gpu: &Gpu) -> bool {
    let mut parts = text.rsplit(':');
    let slot = parts.next() == Some("00.0");
    let number = |part: Option<&str>| part.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    let same_bus = number(parts.next()) == Some(bus(gpu));
    let domain = parts.next();
    slot && same_bus && (domain.is_none() || number(domain) == Some(0))
}

exports! {
    fn nvmlDeviceGetCount_v2 also nvmlDeviceGetCount (out: Out<u32>) {
        out.set(u32::try_from(node()?.whole).unwrap_or(u32::MAX))
    }

    fn nvmlDeviceGetHandleByIndex_v2 also nvmlDeviceGetHandleByIndex (index: u32, out: Out<Handle>) {
        let node = node()?;
        if index as usize >= node.whole {
            return Err(Code::INVALID_ARGUMENT);
        }
        out.set(node.handle(index as usize)?)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<Handle>) {
        let wanted = uuid.get()?;
        out.set(node()?.find(|gpu| gpu.uuid_text() == wanted)?)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2 also nvmlDeviceGetHandleByPciBusId (address: Text, out: Out<Handle>) {
        let wanted = address.get()?;
        out.set(node()?.find(|gpu| same_address(&wanted, gpu))?)
    }

    fn nvmlDeviceGetHandleBySerial(serial: Text, out: Out<Handle>) {
        let wanted = serial.get()?;
        out.set(node()?.find(|gpu| serial_of(gpu) == wanted)?)
    }

    fn nvmlDeviceGetIndex(device: Handle, out: Out<u32>) {
        out.set(u32::try_from(node()?.index(device)?).unwrap_or(0))
    }

    fn nvmlDeviceGetName(device: Handle, out: Out<u8>, length: u32) {
        set_text(out, length, &gpu(device)?.model.get())
    }

    fn nvmlDeviceGetUUID(device: Handle, out: Out<u8>, length: u32) {
        set_text(out, length, &gpu(device)?.uuid_text())
    }

    fn nvmlDeviceGetSerial(device: Handle, out: Out<u8>, length: u32) {
        set_text(out, length, &serial_of(gpu(device)?))
    }

    fn nvmlDeviceGetMinorNumber(device: Handle, out: Out<u32>) {
        out.set(gpu(device)?.minor.load(Ordering::Relaxed))
    }

    fn nvmlDeviceGetPciInfo_v3 also nvmlDeviceGetPciInfo_v2 (device: Handle, out: Out<Pci>) {
        out.set(pci(device)?)
    }

    /// The oldest form ends before the long address; four reserved words stand in its place.
    fn nvmlDeviceGetPciInfo(device: Handle, out: Out<[u32; 13]>) {
        let pci = pci(device)?;
        let place: Out<[u8; 16]> = out.offset(0);
        place.set(pci.short_address)?;
        let numbers: Out<[u32; 9]> = out.offset(16);
        numbers.set([pci.domain, pci.bus, pci.device, pci.pci_device, pci.subsystem, 0, 0, 0, 0])
    }

    fn nvmlDeviceGetBrand(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(14)
    }

    fn nvmlDeviceGetArchitecture(device: Handle, out: Out<u32>) {
        out.set(model_of(device)?.architecture)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<i32>, minor: Out<i32>) {
        let (first, second) = model_of(device)?.capability;
        major.set(first)?;
        minor.set(second)
    }

    fn nvmlDeviceGetNumGpuCores(device: Handle, out: Out<u32>) {
        out.set(model_of(device)?.cores * 128)
    }

    fn nvmlDeviceGetBoardId(device: Handle, out: Out<u32>) {
        out.set(bus(gpu(device)?) << 8)
    }

    fn nvmlDeviceGetMultiGpuBoard(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(0)
    }


    fn nvmlDeviceGetVirtualizationMode(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetHostVgpuMode(device: Handle, _out: Out<u32>) {
        gpu(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceValidateInforom(device: Handle) {
        gpu(device).map(|_| ())
    }

    fn nvmlDeviceOnSameBoard(first: Handle, second: Handle, out: Out<i32>) {
        gpu(second)?;
        gpu(first)?;
        out.set(i32::from(first == second))
    }

    fn nvmlDeviceGetNvLinkState(device: Handle, link: u32, out: Out<u32>) {
        out.set(u32::from(linked(device, link)?.is_some()))
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2 also nvmlDeviceGetNvLinkRemotePciInfo (device: Handle, link: u32, out: Out<Pci>) {
        let other = linked(device, link)?.ok_or(Code::NOT_SUPPORTED)?;
        out.set(pci(node()?.handle(other)?)?)
    }

    /// Type 0: another GPU.
    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: u32, out: Out<u32>) {
        linked(device, link)?.ok_or(Code::NOT_SUPPORTED)?;
        out.set(0)
    }

    /// All GPUs of a node are on one host bridge: level 30.
    fn nvmlDeviceGetTopologyCommonAncestor(first: Handle, second: Handle, out: Out<u32>) {
        gpu(second)?;
        gpu(first)?;
        out.set(if first == second { 0 } else { 30 })
    }

    /// At level 30 all other GPUs, which are one host bridge away; at other levels none.
    fn nvmlDeviceGetTopologyNearestGpus(device: Handle, level: u32, count: Out<u32>, out: Out<Handle>) {
        let node = node()?;
        let own = node.index(device)?;
        let others = (0..node.whole).filter(|&index| index != own && level == 30);
        write_handles(others.map(|index| node.handle(index)).collect::<Result<Vec<_>>>()?, count, out)
    }

    /// The GPUs near a processor: always all of them.
    fn nvmlSystemGetTopologyGpuSet(_processor: u32, count: Out<u32>, out: Out<Handle>) {
        let node = node()?;
        let all = (0..node.whole).map(|index| node.handle(index));
        write_handles(all.collect::<Result<Vec<_>>>()?, count, out)
    }

    fn nvmlDeviceGetP2PStatus(first: Handle, second: Handle, _capability: u32, out: Out<u32>) {
        gpu(second)?;
        gpu(first)?;
        out.set(0)
    }
}

/// Writes a list by NVML's protocol of two calls: with a null list, its length only.
fn write_handles(list: Vec<Handle>, count: Out<u32>, out: Out<Handle>) -> Result {
    let room = count.get()? as usize;
    count.set(u32::try_from(list.len()).unwrap_or(u32::MAX))?;
    if out.is_null() {
        return Ok(());
    }
    list.into_iter().take(room).enumerate().try_for_each(|(index, handle)| out.set_at(index, handle))
}

fn serial_of(gpu: &Gpu) -> String {
    let [a, b, c, d, ..] = gpu.uuid_bytes();
    format!("1{:012}", u32::from_be_bytes([a, b, c, d]))
}
