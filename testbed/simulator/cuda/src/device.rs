//! Properties of the GPUs: attributes, names, addresses and peers.

use std::ffi::{CStr, c_char};
use std::sync::atomic::Ordering;

use gpushare_simulator::model::{self, Model};
use gpushare_simulator::state::Gpu;

use crate::abi::{Code, In, Out, Result, code_name, set_text};
use crate::bounds;
use crate::driver::driver;
use crate::entry::driver_version_on_disk;

fn model_of(gpu: &Gpu) -> Model {
    let cores = gpu.cores.load(Ordering::Relaxed);
    let client = driver().ok().and_then(|driver| driver.mps);
    Model { cores: client.map_or(cores, |client| client.cores(cores)), ..model::of(&gpu.model.get()) }
}

/// Returns a device attribute by its number in CUDA's list, or 0 for a number that is not here, because a
/// simulated GPU lacks that feature.
fn attribute(gpu: &Gpu, ordinal: i32, number: u32) -> i32 {
    let model = model_of(gpu);
    let of = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
    match number {
        1 | 39 => {
            if number == 1 {
                1024
            } else {
                2048
            }
        }
        2 | 3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => 49152,
        9 => 65536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 => of(model.core_clock * 1000),
        14 => 512,
        // These include overlap, mapped host memory, concurrent kernels, unified addresses, stream
        // priorities, managed memory and memory pools.
        15 | 19 | 31 | 41 | 78 | 83 | 89 | 90 | 115 | 116 => 1,
        16 => of(model.cores),
        // Virtual memory management, and its export as file descriptors.
        102 | 103 => 1,
        // Sparse and deferred arrays, events between processes, multicast.
        112 | 121 | 125 => 1,
        132 => i32::from(model.capability.0 >= 9),
        106 => 32,
        21 | 22 => of(bounds::LINE),
        23 => of(bounds::HEIGHT),
        24..=26 | 58..=60 => of(bounds::CUBE),
        27 | 28 | 42 | 52 | 53 | 55 | 61 | 63 | 64 | 66 | 67 | 73 | 74 | 77 => of(bounds::SIDE),
        29 | 43 | 62 | 65 => of(bounds::LAYERS),
        54 | 68 => of(bounds::FACES),
        56 => of(bounds::LINE),
        57 => of(bounds::HEIGHT),
        33 => of(gpu.bus.load(Ordering::Relaxed)),
        34 | 50 => 0,
        36 => of(model.memory_clock * 1000),
        37 => of(model.bus_width),
        38 => 50 << 20,
        40 => 3,
        75 => model.capability.0,
        76 => model.capability.1,
        81 => 233_472,
        84 => 0,
        85 => ordinal,
        86 => 1,
        87 => 2,
        95 | 96 => 1,
        97 => 232_448,
        111 => 1024,
        119 => 9,
        _ => 0,
    }
}

fn version() -> u32 {
    driver().map_or_else(|_| driver_version_on_disk().unwrap_or(0), |driver| driver.cuda_version())
}

fn error_text(code: u32, out: Out<*const c_char>, text: &'static CStr) -> Result {
    if code_name(code).is_none() {
        out.set(std::ptr::null())?;
        return Err(Code::INVALID_VALUE);
    }
    out.set(text.as_ptr())
}

fn total(ordinal: i32) -> Result<u64> {
    Ok(driver()?.gpu(ordinal)?.total())
}

exports! {
    fn cuDriverGetVersion(out: Out<i32>) {
        out.set(i32::try_from(version()).unwrap_or(0))
    }

    fn cuGetErrorName(code: u32, out: Out<*const c_char>) {
        error_text(code, out, code_name(code).unwrap_or(c""))
    }

    fn cuGetErrorString(code: u32, out: Out<*const c_char>) {
        error_text(code, out, match code {
            0 => c"no error",
            2 => c"out of memory",
            100 => c"no CUDA-capable device is detected",
            801 => c"operation not supported",
            _ => code_name(code).unwrap_or(c""),
        })
    }

    fn cuDeviceGetCount(out: Out<i32>) {
        out.set(i32::try_from(driver()?.devices.len()).unwrap_or(i32::MAX))
    }

    fn cuDeviceGet(out: Out<i32>, ordinal: i32) {
        driver()?.gpu(ordinal)?;
        out.set(ordinal)
    }

    fn cuDeviceGetName(out: Out<u8>, length: i32, ordinal: i32) {
        let name = driver()?.gpu(ordinal)?.model.get();
        set_text(out, usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?, &name)
    }

    fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, ordinal: i32) {
        out.set(driver()?.gpu(ordinal)?.uuid_bytes())
    }

    /// For a MIG instance the first form returns its card's UUID.
    fn cuDeviceGetUuid(out: Out<[u8; 16]>, ordinal: i32) {
        let driver = driver()?;
        let gpu = driver.gpu(ordinal)?;
        let card = gpu.card().and_then(|card| driver.session.state().gpus().get(card));
        out.set(card.unwrap_or(gpu).uuid_bytes())
    }

    fn cuDeviceGetLuid(_luid: Out<u8>, _mask: Out<u32>, ordinal: i32) {
        driver()?.gpu(ordinal)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(out: Out<usize>, ordinal: i32) {
        out.set(usize::try_from(total(ordinal)?).unwrap_or(usize::MAX))
    }

    /// The oldest form returns the size in 32 bits.
    fn cuDeviceTotalMem(out: Out<u32>, ordinal: i32) {
        out.set(u32::try_from(total(ordinal)?).unwrap_or(u32::MAX))
    }

    fn cuDeviceGetAttribute(out: Out<i32>, number: u32, ordinal: i32) {
        let gpu = driver()?.gpu(ordinal)?;
        if number == 0 || number > 200 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(attribute(gpu, ordinal, number))
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, ordinal: i32) {
        let (first, second) = model_of(driver()?.gpu(ordinal)?).capability;
        major.set(first)?;
        minor.set(second)
    }

    fn cuDeviceGetProperties(out: Out<[i32; 14]>, ordinal: i32) {
        let clock = i32::try_from(model_of(driver()?.gpu(ordinal)?).core_clock * 1000).unwrap_or(0);
        out.set([1024, 1024, 1024, 64, i32::MAX, 65535, 65535, 49152, 65536, 32, i32::MAX, 65536, clock, 512])
    }

    fn cuDeviceGetPCIBusId(out: Out<u8>, length: i32, ordinal: i32) {
        let address = driver()?.gpu(ordinal)?.address();
        set_text(out, usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?, &address)
    }

    fn cuDeviceGetByPCIBusId(out: Out<i32>, address: In<c_char>) {
        let driver = driver()?;
        let wanted = address.text()?.to_lowercase();
        let fits = |ordinal: &i32| driver.gpu(*ordinal).is_ok_and(|gpu| {
            let own = gpu.address();
            own == wanted || own.trim_start_matches("0000:") == wanted
        });
        let count = i32::try_from(driver.devices.len()).unwrap_or(0);
        out.set((0..count).find(fits).ok_or(Code::INVALID_DEVICE)?)
    }

    /// The simulated GPUs of a node reach each other's memory.
    fn cuDeviceCanAccessPeer(out: Out<i32>, ordinal: i32, peer: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        driver.gpu(peer)?;
        out.set(i32::from(ordinal != peer))
    }

    fn cuDeviceGetP2PAttribute(out: Out<i32>, number: u32, ordinal: i32, peer: i32) {
        let driver = driver()?;
        driver.gpu(ordinal)?;
        driver.gpu(peer)?;
        if ordinal == peer {
            return Err(Code::INVALID_DEVICE);
        }
        out.set(i32::from(matches!(number, 2 | 4)))
    }

    fn cuCtxEnablePeerAccess(peer: usize, _flags: u32) {
        driver()?.contexts.get(peer).map(|_| ())
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        driver()?.contexts.get(peer).map(|_| ())
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(out: Out<usize>, _format: u32, _channels: u32, ordinal: i32) {
        driver()?.gpu(ordinal)?;
        out.set(1 << 27)
    }

    fn cuFlushGPUDirectRDMAWrites(_target: u32, _scope: u32) {
        driver().map(|_| ())
    }

    fn cuProfilerStart() {
        driver().map(|_| ())
    }

    fn cuProfilerStop() {
        driver().map(|_| ())
    }
}
