//! Clocks, power, temperature and the like: constants of a healthy GPU, of which power and temperature follow
//! its load.

use std::sync::atomic::Ordering;

use crate::abi::{Code, Handle, Out, set_text};
use crate::node::{gpu, model_of};
use crate::samples::utilisation;

fn milliwatts(device: Handle) -> crate::abi::Result<u32> {
    let limit = model_of(device)?.power * 1000;
    Ok(limit / 8 + limit / 100 * utilisation(gpu(device)?)? * 3 / 4)
}

/// Highest clock of a domain in MHz. Domains: 0 graphics, 1 multiprocessors, 2 memory, 3 video.
fn clock(device: Handle, domain: u32) -> crate::abi::Result<u32> {
    let model = model_of(device)?;
    match domain {
        0 | 1 | 3 => Ok(model.core_clock),
        2 => Ok(model.memory_clock),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

macro_rules! constants {
    ($($name:ident = $value:expr),* $(,)?) => {
        $(exports! {
            fn $name(device: Handle, out: Out<u32>) {
                gpu(device)?;
                out.set($value)
            }
        })*
    };
}

constants! {
    nvmlDeviceGetFanSpeed = 0,
    nvmlDeviceGetNumFans = 0,
    nvmlDeviceGetPerformanceState = 0,
    nvmlDeviceGetPowerState = 0,
    nvmlDeviceGetPersistenceMode = 1,
    nvmlDeviceGetDisplayMode = 0,
    nvmlDeviceGetDisplayActive = 0,
    nvmlDeviceGetPowerManagementMode = 1,
    nvmlDeviceGetCurrPcieLinkGeneration = 4,
    nvmlDeviceGetMaxPcieLinkGeneration = 4,
    nvmlDeviceGetGpuMaxPcieLinkGeneration = 4,
    nvmlDeviceGetCurrPcieLinkWidth = 16,
    nvmlDeviceGetMaxPcieLinkWidth = 16,
    nvmlDeviceGetPcieReplayCounter = 0,
    nvmlDeviceGetPcieLinkMaxSpeed = 16000,
    nvmlDeviceGetPcieSpeed = 16000,
    nvmlDeviceGetInforomConfigurationChecksum = 0x1234_5678,
    nvmlDeviceGetIrqNum = 42,
}

exports! {
    fn nvmlDeviceGetComputeMode(device: Handle, out: Out<u32>) {
        out.set(gpu(device)?.compute_mode.load(Ordering::Relaxed))
    }

    fn nvmlDeviceSetComputeMode(device: Handle, mode: u32) {
        let gpu = gpu(device)?;
        if !nix::unistd::geteuid().is_root() {
            return Err(Code::NO_PERMISSION);
        }
        match mode {
            0 | 2 | 3 => {}
            1 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_ARGUMENT),
        }
        gpu.compute_mode.store(mode, Ordering::Relaxed);
        Ok(())
    }

    fn nvmlDeviceGetMemoryBusWidth(device: Handle, out: Out<u32>) {
        out.set(model_of(device)?.bus_width)
    }

    fn nvmlDeviceGetPowerUsage(device: Handle, out: Out<u32>) {
        out.set(milliwatts(device)?)
    }

    fn nvmlDeviceGetPowerManagementLimit also nvmlDeviceGetEnforcedPowerLimit
    also nvmlDeviceGetPowerManagementDefaultLimit (device: Handle, out: Out<u32>) {
        out.set(model_of(device)?.power * 1000)
    }

    fn nvmlDeviceGetTemperature(device: Handle, sensor: u32, out: Out<u32>) {
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        out.set(33 + utilisation(gpu(device)?)? / 3)
    }

    fn nvmlDeviceGetTemperatureThreshold(device: Handle, kind: u32, out: Out<u32>) {
        gpu(device)?;
        out.set(match kind {
            0 => 92,
            1 => 89,
            2 => 95,
            3 => 87,
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }

    fn nvmlDeviceGetClockInfo(device: Handle, domain: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetMaxClockInfo(device: Handle, domain: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetClock(device: Handle, domain: u32, _kind: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetApplicationsClock(device: Handle, domain: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetDefaultApplicationsClock(device: Handle, domain: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetMaxCustomerBoostClock(device: Handle, domain: u32, out: Out<u32>) {
        out.set(clock(device, domain)?)
    }

    fn nvmlDeviceGetSupportedMemoryClocks(device: Handle, count: Out<u32>, out: Out<u32>) {
        count.set(1)?;
        out.set(clock(device, 2)?)
    }

    fn nvmlDeviceGetSupportedGraphicsClocks(device: Handle, _memory: u32, count: Out<u32>, out: Out<u32>) {
        count.set(1)?;
        out.set(clock(device, 0)?)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(device: Handle, least: Out<u32>, most: Out<u32>) {
        let limit = model_of(device)?.power * 1000;
        least.set(limit / 2)?;
        most.set(limit)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, out: Out<u64>) {
        let watts = u64::from(model_of(device)?.power / 8);
        out.set(gpushare_simulator::clock::now() / 1_000_000 * watts)
    }

    fn nvmlDeviceGetCurrentClocksThrottleReasons also nvmlDeviceGetCurrentClocksEventReasons
    (device: Handle, out: Out<u64>) {
        out.set(u64::from(utilisation(gpu(device)?)? == 0))
    }

    fn nvmlDeviceGetSupportedClocksThrottleReasons also nvmlDeviceGetSupportedClocksEventReasons
    (device: Handle, out: Out<u64>) {
        gpu(device)?;
        out.set(0x1ff)
    }

    fn nvmlDeviceGetEccMode(device: Handle, current: Out<u32>, pending: Out<u32>) {
        gpu(device)?;
        current.set(1)?;
        pending.set(1)
    }

    fn nvmlDeviceGetDefaultEccMode(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(1)
    }

    fn nvmlDeviceGetTotalEccErrors(device: Handle, _kind: u32, _counter: u32, out: Out<u64>) {
        gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetMemoryErrorCounter(device: Handle, _kind: u32, _counter: u32, _place: u32, out: Out<u64>) {
        gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetRetiredPages(device: Handle, _cause: u32, count: Out<u32>, _addresses: Out<u64>) {
        gpu(device)?;
        count.set(0)
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: Handle, out: Out<u32>) {
        gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetRemappedRows(
        device: Handle, correctable: Out<u32>, uncorrectable: Out<u32>, pending: Out<u32>, failed: Out<u32>,
    ) {
        gpu(device)?;
        correctable.set(0)?;
        uncorrectable.set(0)?;
        pending.set(0)?;
        failed.set(0)
    }

    fn nvmlDeviceGetPcieThroughput(device: Handle, _counter: u32, out: Out<u32>) {
        out.set(utilisation(gpu(device)?)? * 1000)
    }

    fn nvmlDeviceGetVbiosVersion(device: Handle, out: Out<u8>, length: u32) {
        gpu(device)?;
        set_text(out, length, "96.00.61.00.01")
    }

    fn nvmlDeviceGetInforomImageVersion(device: Handle, out: Out<u8>, length: u32) {
        gpu(device)?;
        set_text(out, length, "G520.0200.00.05")
    }

    fn nvmlDeviceGetInforomVersion(device: Handle, object: u32, out: Out<u8>, length: u32) {
        gpu(device)?;
        let version = match object {
            0 => "2.1",
            1 => "7.16",
            _ => return Err(Code::NOT_SUPPORTED),
        };
        set_text(out, length, version)
    }

    fn nvmlDeviceGetBoardPartNumber(device: Handle, out: Out<u8>, length: u32) {
        gpu(device)?;
        set_text(out, length, "692-2G520-0200-000")
    }

    fn nvmlDeviceGetCpuAffinity(device: Handle, count: u32, out: Out<u64>) {
        gpu(device)?;
        (0..count as usize).try_for_each(|index| out.set_at(index, u64::from(index == 0)))
    }

    fn nvmlDeviceGetMemoryAffinity also nvmlDeviceGetCpuAffinityWithinScope
    (device: Handle, count: u32, out: Out<u64>, _scope: u32) {
        gpu(device)?;
        (0..count as usize).try_for_each(|index| out.set_at(index, u64::from(index == 0)))
    }

    fn nvmlDeviceGetGpuOperationMode(device: Handle, _current: Out<u32>, _pending: Out<u32>) {
        gpu(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetFieldValues(device: Handle, count: i32, values: Out<[u8; 40]>) {
        gpu(device)?;
        // Each entry has its own result at byte 28, at the end of its fixed head. None of the fields is
        // simulated.
        (0..usize::try_from(count).unwrap_or(0)).try_for_each(|index| {
            let result: Out<u32> = values.offset(index * 40 + 28);
            result.set(Code::NOT_SUPPORTED.0)
        })
    }
}
