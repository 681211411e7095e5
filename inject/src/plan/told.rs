//! Tells the container's programs what they have, in the words of the system whose resources their pod names.
//! The values are those of the grant. Who reads them may size its work by them; nothing depends on them.

use gpushare_inventory::Gpu;
use gpushare_quota::{Enforcement, Grant, Lease};
use gpushare_request::{Cores, Request, Told};

/// Variables for the container, by name and value.
pub(super) fn variables(request: &Request, lease: &Lease, gpus: &[Gpu]) -> Vec<(String, String)> {
    match request.told {
        // There is no limit to tell.
        _ if lease.enforcement == Enforcement::TimeSliced => Vec::new(),
        None => Vec::new(),
        Some(Told::Aliyun { unit }) => aliyun(lease, gpus, unit.max(1)),
        Some(Told::Hami) => hami(lease),
    }
}

/// Alibaba's plugin (gpushare-device-plugin, pkg/gpu/nvidia/allocate.go): numbers of its unit. Of several
/// GPUs each has as much. It tells what the whole pod has, too; here that is the container.
fn aliyun(lease: &Lease, gpus: &[Gpu], unit: u64) -> Vec<(String, String)> {
    let Some(first) = lease.grants.first() else { return Vec::new() };
    let gpu = gpus.iter().find(|gpu| gpu.uuid == first.gpu);
    let of = gpu.and_then(|gpu| gpu.memory).map_or(0, |memory| memory.bytes() / unit);
    let part = (first.memory.bytes() / unit).to_string();
    let index = gpu.map_or_else(String::new, |gpu| gpu.index.to_string());
    owned([
        ("ALIYUN_COM_GPU_MEM_IDX", index),
        ("ALIYUN_COM_GPU_MEM_POD", part.clone()),
        ("ALIYUN_COM_GPU_MEM_CONTAINER", part),
        ("ALIYUN_COM_GPU_MEM_DEV", of.to_string()),
    ])
}

/// HAMi's plugin (pkg/device-plugin/nvidiadevice, server.go): MiB by position, and the first GPU's compute
/// for all of them, 0 for no limit.
fn hami(lease: &Lease) -> Vec<(String, String)> {
    let limit = |(at, grant): (usize, &Grant)| {
        (format!("CUDA_DEVICE_MEMORY_LIMIT_{at}"), format!("{}m", grant.memory.bytes() >> 20))
    };
    let mut told: Vec<(String, String)> = lease.grants.iter().enumerate().map(limit).collect();
    let cores = lease.grants.first().and_then(|grant| grant.cores).map_or(0, Cores::percent);
    told.push(("CUDA_DEVICE_SM_LIMIT".to_owned(), cores.to_string()));
    told
}

fn owned<const N: usize>(pairs: [(&str, String); N]) -> Vec<(String, String)> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
