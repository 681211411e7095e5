//! Initialisation, versions, error texts and events.

use std::ffi::c_char;
use std::sync::atomic::Ordering;

use crate::abi::{Code, Handle, Out, set_text, words};
use crate::node::{any_node, enter, gpu, leave, node};

exports! {
    fn nvmlInit_v2 also nvmlInit () {
        enter()
    }

    fn nvmlInitWithFlags(_flags: u32) {
        enter()
    }

    fn nvmlShutdown() {
        leave()
    }

    fn nvmlSystemGetDriverVersion(out: Out<u8>, length: u32) {
        set_text(out, length, &node()?.reader.state.driver.get())
    }

    /// NVML's version is made of CUDA's major version and the driver's version.
    fn nvmlSystemGetNVMLVersion(out: Out<u8>, length: u32) {
        let state = any_node()?.reader.state;
        let major = state.cuda.load(Ordering::Relaxed) / 1000;
        set_text(out, length, &format!("{major}.{}", state.driver.get()))
    }

    fn nvmlSystemGetCudaDriverVersion_v2 also nvmlSystemGetCudaDriverVersion (out: Out<i32>) {
        let version = any_node()?.reader.state.cuda.load(Ordering::Relaxed);
        out.set(i32::try_from(version).unwrap_or(0))
    }

    fn nvmlSystemGetProcessName(pid: u32, out: Out<u8>, length: u32) {
        node()?;
        let name = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| Code::NOT_FOUND)?;
        set_text(out, length, &name.display().to_string())
    }

    fn nvmlSystemGetHicVersion(count: Out<u32>, _entries: Out<u8>) {
        node()?;
        count.set(0)
    }

    fn nvmlUnitGetCount(count: Out<u32>) {
        node()?;
        count.set(0)
    }

    fn nvmlEventSetCreate(out: Out<Handle>) {
        node()?;
        out.set(0x5702_0000_0000)
    }

    fn nvmlEventSetFree(_set: Handle) {
        node().map(|_| ())
    }

    fn nvmlDeviceGetSupportedEventTypes(device: Handle, out: Out<u64>) {
        gpu(device)?;
        out.set(0x8)
    }

    fn nvmlDeviceRegisterEvents(device: Handle, _types: u64, _set: Handle) {
        gpu(device).map(|_| ())
    }

    /// No event ever happens to a simulated GPU, so this waits for the whole timeout.
    fn nvmlEventSetWait_v2 also nvmlEventSetWait (_set: Handle, _data: Out<u8>, timeout: u32) {
        node()?;
        std::thread::sleep(std::time::Duration::from_millis(u64::from(timeout)));
        Err(Code::TIMEOUT)
    }
}

/// The text for a result.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    words(code).as_ptr()
}
