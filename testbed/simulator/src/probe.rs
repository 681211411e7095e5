//! `probe`: an ordinary client of libcuda and libnvidia-ml that prints their answers.

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use crate::Probe;
use crate::library::Library;

/// Prints every answer, allocates the requested sizes, and holds them for the requested time.
///
/// # Errors
/// If the driver cannot be loaded or does not answer. A refused allocation is an answer, not an error.
pub fn run(probe: &Probe) -> Result<()> {
    let mut answers = Map::new();
    let cuda = Library::open("libcuda.so.1")?;
    let outcome = ask_cuda(&cuda, &mut answers).and_then(|()| {
        ask_nvml(&mut answers);
        allocate(&cuda, &probe.allocate, &mut answers)
    });
    print(&answers, probe.json);
    outcome?;
    std::thread::sleep(std::time::Duration::from_secs(probe.hold));
    Ok(())
}

fn print(answers: &Map<String, Value>, json: bool) {
    use std::io::Write;
    if json {
        println!("{}", Value::Object(answers.clone()));
    } else {
        for (key, value) in answers {
            for value in value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice) {
                println!("{key}: {}", line(value));
            }
        }
    }
    // The reader of a pipe waits for these lines while this process holds the memory.
    let _ = std::io::stdout().flush();
}

fn line(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(fields) => fields.values().map(line).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

fn checked(cuda: &Library, name: &str, code: u32) -> Result<()> {
    if code != 0 {
        bail!("{name}: {}", cuda.result_name(code));
    }
    Ok(())
}

fn ask_cuda(cuda: &Library, answers: &mut Map<String, Value>) -> Result<()> {
    let code = cuda.with_flags(c"cuInit", 0)?;
    answers.insert("init".into(), cuda.result_name(code).into());
    checked(cuda, "cuInit", code)?;
    let mut count = 0;
    checked(cuda, "cuDeviceGetCount", cuda.with_number(c"cuDeviceGetCount", &mut count)?)?;
    answers.insert("devices".into(), count.into());
    let mut version = 0;
    checked(cuda, "cuDriverGetVersion", cuda.with_number(c"cuDriverGetVersion", &mut version)?)?;
    answers.insert("cuda_version".into(), version.into());
    answers.insert("device_totals".into(), totals(cuda, count)?);
    let mut device = 0;
    checked(cuda, "cuDeviceGet", cuda.with_device(c"cuDeviceGet", &mut device, 0)?)?;
    let mut name = [0; 128];
    checked(cuda, "cuDeviceGetName", cuda.with_name(c"cuDeviceGetName", &mut name, 128, device)?)?;
    answers.insert("name".into(), text(&name).into());
    let mut total = 0;
    checked(cuda, "cuDeviceTotalMem", cuda.with_size(c"cuDeviceTotalMem_v2", &mut total, device)?)?;
    answers.insert("device_total".into(), total.into());
    let mut context = 0;
    let code = cuda.with_context(c"cuDevicePrimaryCtxRetain", &mut context, device)?;
    answers.insert("context".into(), cuda.result_name(code).into());
    if code != 0 {
        return Ok(());
    }
    checked(cuda, "cuCtxSetCurrent", cuda.with_handle(c"cuCtxSetCurrent", context)?)?;
    let (mut free, mut total) = (0, 0);
    checked(cuda, "cuMemGetInfo", cuda.with_sizes(c"cuMemGetInfo_v2", &mut free, &mut total)?)?;
    answers.insert("memory_free".into(), free.into());
    answers.insert("memory_total".into(), total.into());
    Ok(())
}

/// Returns the memory of each device in bytes, in the order of CUDA's ordinals.
fn totals(cuda: &Library, count: i32) -> Result<Value> {
    let mut totals = Vec::new();
    for ordinal in 0..count {
        let (mut device, mut total) = (0, 0);
        checked(cuda, "cuDeviceGet", cuda.with_device(c"cuDeviceGet", &mut device, ordinal)?)?;
        checked(cuda, "cuDeviceTotalMem", cuda.with_size(c"cuDeviceTotalMem_v2", &mut total, device)?)?;
        totals.push(total);
    }
    Ok(totals.into())
}

/// Queries NVML. Computing does not need it, so its absence is an answer and not an error.
fn ask_nvml(answers: &mut Map<String, Value>) {
    let outcome = nvml(answers);
    let told = outcome.map_or_else(|error| format!("{error:#}"), |()| "NVML_SUCCESS".to_owned());
    answers.insert("nvml".into(), told.into());
}

fn nvml(answers: &mut Map<String, Value>) -> Result<()> {
    let nvml = Library::open("libnvidia-ml.so.1")?;
    let check = |name: &str, code: u32| if code == 0 { Ok(()) } else { bail!("{name}: NVML error {code}") };
    check("nvmlInit", nvml.call(c"nvmlInit_v2")?)?;
    let mut count = 0;
    check("nvmlDeviceGetCount", nvml.with_number(c"nvmlDeviceGetCount_v2", &mut count)?)?;
    answers.insert("nvml_devices".into(), count.into());
    let mut device = 0;
    let mut uuids = Vec::new();
    for index in (0..count.cast_unsigned()).rev() {
        check(
            "nvmlDeviceGetHandleByIndex",
            nvml.with_nvml_device(c"nvmlDeviceGetHandleByIndex_v2", index, &mut device)?,
        )?;
        let mut uuid = [0; 128];
        check("nvmlDeviceGetUUID", nvml.with_nvml_text(c"nvmlDeviceGetUUID", device, &mut uuid, 128)?)?;
        uuids.insert(0, text(&uuid));
    }
    answers.insert("uuid".into(), uuids.first().cloned().into());
    answers.insert("uuids".into(), uuids.into());
    // The memory of a GPU in MIG mode belongs to its instance.
    let (mut instance, mut uuid) = (0, [0; 128]);
    if nvml.with_nvml_instance(c"nvmlDeviceGetMigDeviceHandleByIndex", device, 0, &mut instance)? == 0 {
        device = instance;
        check("nvmlDeviceGetUUID", nvml.with_nvml_text(c"nvmlDeviceGetUUID", device, &mut uuid, 128)?)?;
        answers.insert("instance".into(), text(&uuid).into());
    }
    let mut memory = [0; 3];
    check(
        "nvmlDeviceGetMemoryInfo",
        nvml.with_nvml_memory(c"nvmlDeviceGetMemoryInfo", device, &mut memory)?,
    )?;
    let [total, _, used] = memory;
    answers.insert("nvml_total".into(), total.into());
    answers.insert("nvml_used".into(), used.into());
    Ok(())
}

fn allocate(cuda: &Library, sizes: &[u64], answers: &mut Map<String, Value>) -> Result<()> {
    let mut results = Vec::new();
    for &size in sizes {
        let mut pointer = 0;
        let code = cuda.with_allocation(c"cuMemAlloc_v2", &mut pointer, usize::try_from(size)?)?;
        results.push(json!({"bytes": size, "result": cuda.result_name(code)}));
    }
    if !results.is_empty() {
        answers.insert("allocate".into(), Value::Array(results));
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
