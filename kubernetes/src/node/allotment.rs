//! What the cluster's scheduler allotted to a claim on this node, as a request for the quota store. Pure.

use std::collections::BTreeMap;

use gpushare_inject::CdiDevice;
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use gpushare_quota::Change;
use gpushare_request::{
    CLAIM_KIND, Cores, DeviceSelector, Devices, GrammarError, MemoryRequest, POD_ANNOTATION, Request, Share,
    kubernetes_quantity,
};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::DRIVER;
use super::messages::Device;
use super::parameters::{Parameters, ParametersError};
use super::slice::{CORES, MEMORY, device_name};

/// A claim's shares on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct Allotment {
    /// All shares of the claim as one request. Shares of one GPU are added up.
    pub request: Request,
    /// One entry for each share.
    pub devices: Vec<AllottedDevice>,
}

/// One share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllottedDevice {
    request: String,
    device: String,
    gpu: GpuUuid,
    share: Share,
    share_id: Option<String>,
}

/// Why a claim cannot be served here. Each message is shown in the pod's events.
#[derive(Debug, thiserror::Error)]
pub enum AllotmentError {
    /// The scheduler has not allocated the claim, or has taken the allocation back.
    #[error("the claim has no allocation; delete the pod, so that it is scheduled anew")]
    NotAllocated,
    /// The claim names a device that this node does not have.
    #[error(
        "device {device} is not on this node, or its driver does not show it (`gpushare devices`); where the GPU is gone for good, \
         delete the pod and the claim, so that it is scheduled anew"
    )]
    NoSuchDevice {
        /// Name of the device in its pool.
        device: String,
    },
    /// The allocation does not say how much of a device it takes.
    #[error(
        "the allocation of device {device} states no {capacity} consumed; the cluster's scheduler must know consumable \
         capacity (feature DRAConsumableCapacity, on by default from Kubernetes 1.36)"
    )]
    Unstated {
        /// Name of the device in its pool.
        device: String,
        /// Name of the capacity.
        capacity: &'static str,
    },
    /// The amount is none that this driver publishes.
    #[error("the allocation of device {device} states {capacity} {amount:?}, which is no amount of it")]
    Malformed {
        /// Name of the device in its pool.
        device: String,
        /// Name of the capacity.
        capacity: &'static str,
        /// The amount as written.
        amount: String,
    },
    /// Shares of one GPU that only fit next to each other.
    #[error(
        "the scheduler gave the claim {shares} shares of GPU {gpu}, {sum} in all, which is more than one container can have of it; \
         ask for different GPUs by the claim's constraint distinctAttribute: {DRIVER}/uuid, then delete pod and claim"
    )]
    OneGpu {
        /// How many they are.
        shares: usize,
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// What they have together.
        sum: DeviceMemory,
    },
    /// An annotation of the claim that says nothing about its shares.
    #[error(
        "annotation {key} says nothing about the claim's shares: write {POD_ANNOTATION}memory or cores, or \
         {POD_ANNOTATION}REQUEST.memory for those of one request"
    )]
    Annotation {
        /// Its key.
        key: String,
    },
    /// An annotation of the claim whose value is none.
    #[error("annotation {key}={value:?} cannot be read: {why}")]
    Restated {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// An annotation of the claim that asks for more than the scheduler allocated. The scheduler counts what
    /// it allocated: a share that grew beyond it would be given to others too.
    #[error(
        "annotation {key}={value:?} is more than the {most} that the scheduler allocated to the claim; for more make a claim \
         that asks for it"
    )]
    AboveAllotment {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
        /// What was allocated.
        most: String,
    },
    /// A limit of compute for a share that was allotted without one: what it would take of the GPU, the
    /// scheduler has perhaps given to others.
    #[error(
        "{key}={value:?}: the scheduler allotted no compute to this share, so it has no limit to lower; ask for cores in the claim"
    )]
    ComputeNotAllotted {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
    },
    /// Administrative access looks at devices without a share of them.
    #[error("request {request} asks for administrative access, which driver {DRIVER} does not give")]
    Administrative {
        /// Name of the request.
        request: String,
    },
    /// The claim's or its class's parameters for this driver.
    #[error(transparent)]
    Parameters(#[from] ParametersError),
}

impl Allotment {
    /// The shares that `claim` has of this driver's devices in the pool `pool`, on a node with these GPUs.
    /// `strict`: whether the node lets claims only lower its defaults.
    ///
    /// # Errors
    /// When the claim is not allocated, names a device or an amount that cannot be, or has parameters that
    /// are malformed.
    pub fn of(claim: &ResourceClaim, pool: &str, gpus: &[Gpu], strict: bool) -> Result<Self, AllotmentError> {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let allocated = allocation.and_then(|allocation| allocation.devices.as_ref());
        let allocated = allocated.ok_or(AllotmentError::NotAllocated)?;
        let is_ours =
            |result: &&DeviceRequestAllocationResult| result.driver == DRIVER && result.pool == pool;
        let mut shares: BTreeMap<GpuUuid, Share> = BTreeMap::new();
        let mut order = Vec::new();
        let mut devices = Vec::new();
        for result in allocated.results.iter().flatten().filter(is_ours) {
            let (gpu, share) = one(result, gpus)?;
            if !order.contains(&gpu) {
                order.push(gpu);
            }
            add(&mut shares, gpu, share);
            devices.push(AllottedDevice {
                request: result.request.clone(),
                device: result.device.clone(),
                gpu,
                share,
                share_id: result.share_id.clone(),
            });
        }
        for gpu in gpus {
            let count = devices.iter().filter(|device| device.gpu == gpu.uuid).count();
            let sum = shares.get(&gpu.uuid).map(|share| share.memory);
            if let (Some(MemoryRequest::Bytes(sum)), Some(whole)) = (sum, gpu.memory)
                && sum > whole
                && count > 1
            {
                return Err(AllotmentError::OneGpu { shares: count, gpu: gpu.uuid, sum });
            }
        }
        let requests: Vec<&str> = devices.iter().map(AllottedDevice::request).collect();
        let parameters = Parameters::of(allocated, &requests, strict)?;
        let first = order.first().map(|gpu| shares[gpu]);
        let named = order.iter().map(|gpu| DeviceSelector::Uuid(*gpu)).collect();
        let memory = first.map_or(MemoryRequest::Rest, |share| share.memory);
        let request = Request {
            cores: first.and_then(|share| share.cores),
            particular: order.iter().skip(1).map(|gpu| (*gpu, shares[gpu])).collect(),
            compute_policy: parameters.compute_policy,
            priority: parameters.priority,
            ..Request::new(Devices::These(named), memory)
        };
        Ok(Self { request, devices })
    }

    /// What each GPU's share is to be where annotations of the claim state less than was allocated:
    /// `gpushare.io/memory` and `cores` for each of its shares, `gpushare.io/REQUEST.memory` for those of one
    /// request. What they do not state is what was allocated.
    ///
    /// # Errors
    /// When an annotation is unknown or malformed, or states more than was allocated.
    pub fn restated(&self, own: &BTreeMap<String, String>) -> Result<Vec<Change>, AllotmentError> {
        let mut shares = BTreeMap::new();
        for device in &self.devices {
            add(&mut shares, device.gpu, device.restated(own)?);
        }
        let requests: Vec<&str> = self.devices.iter().map(AllottedDevice::request).collect();
        if let Some(key) = own.keys().find(|key| !is_known(key, &requests)) {
            return Err(AllotmentError::Annotation { key: key.clone() });
        }
        let change = |(gpu, share): (GpuUuid, Share)| Change {
            memory: Some(share.memory),
            cores: Some(share.cores.into()),
            gpu: Some(gpu),
            ..Change::default()
        };
        Ok(shares.into_iter().map(change).collect())
    }
}

/// Whether the annotation says something about the shares of these requests.
fn is_known(key: &str, requests: &[&str]) -> bool {
    let name = key.strip_prefix(POD_ANNOTATION).unwrap_or(key);
    match name.rsplit_once('.') {
        Some((request, name)) => requests.contains(&request) && [MEMORY, CORES].contains(&name),
        None => [MEMORY, CORES].contains(&name),
    }
}

impl AllottedDevice {
    /// The name of the claim's request that it is for; that of the main request, where it is one of several
    /// alternatives.
    fn request(&self) -> &str {
        self.request.split('/').next().unwrap_or(&self.request)
    }

    /// Its share with what the claim's annotations state.
    fn restated(&self, own: &BTreeMap<String, String>) -> Result<Share, AllotmentError> {
        let stated = |name: &str| {
            let keys = [format!("{}.{name}", self.request()), name.to_owned()];
            let keys = keys.map(|name| format!("{POD_ANNOTATION}{name}"));
            keys.into_iter().find_map(|key| own.get(&key).map(|value| (key, value)))
        };
        let mut share = self.share;
        if let Some((key, value)) = stated(MEMORY) {
            let malformed =
                |why: String| AllotmentError::Restated { key: key.clone(), value: value.clone(), why };
            let memory: MemoryRequest =
                value.parse().map_err(|why: GrammarError| malformed(why.to_string()))?;
            let (MemoryRequest::Bytes(asked), MemoryRequest::Bytes(most)) = (memory, self.share.memory)
            else {
                return Err(malformed("a claim's memory is stated in bytes, as 4GiB".to_owned()));
            };
            if asked > most {
                return Err(AllotmentError::AboveAllotment {
                    key,
                    value: value.clone(),
                    most: most.to_string(),
                });
            }
            share.memory = memory;
        }
        if let Some((key, value)) = stated(CORES) {
            let cores: Cores = value.parse().map_err(|why: GrammarError| AllotmentError::Restated {
                key: key.clone(),
                value: value.clone(),
                why: why.to_string(),
            })?;
            let Some(most) = self.share.cores else {
                return Err(AllotmentError::ComputeNotAllotted { key, value: value.clone() });
            };
            if cores > most {
                return Err(AllotmentError::AboveAllotment {
                    key,
                    value: value.clone(),
                    most: most.to_string(),
                });
            }
            share.cores = Some(cores);
        }
        Ok(share)
    }

    /// The share as kubelet is told of it. `uid` is the claim's.
    pub fn named(self, uid: &str, pool: &str) -> Device {
        Device {
            request_names: vec![self.request().to_owned()],
            pool_name: pool.to_owned(),
            cdi_device_ids: vec![format!("{CLAIM_KIND}={}", CdiDevice::claim_name(uid, self.gpu))],
            device_name: self.device,
            share_id: self.share_id,
        }
    }
}

/// What one result gives of which GPU.
fn one(result: &DeviceRequestAllocationResult, gpus: &[Gpu]) -> Result<(GpuUuid, Share), AllotmentError> {
    if result.admin_access == Some(true) {
        return Err(AllotmentError::Administrative { request: result.request.clone() });
    }
    let device = || result.device.clone();
    let gpu = gpus.iter().find(|gpu| device_name(gpu.uuid) == result.device);
    let gpu = gpu.ok_or_else(|| AllotmentError::NoSuchDevice { device: device() })?;
    let stated = |capacity: &'static str| {
        let amount = result.consumed_capacity.as_ref().and_then(|consumed| consumed.get(capacity));
        let Quantity(amount) =
            amount.ok_or_else(|| AllotmentError::Unstated { device: device(), capacity })?;
        let malformed = AllotmentError::Malformed { device: device(), capacity, amount: amount.clone() };
        Ok::<_, AllotmentError>((kubernetes_quantity(amount), malformed))
    };
    let (bytes, malformed) = stated(MEMORY)?;
    let whole = bytes.map(|bytes| bytes >> 20 << 20).filter(|bytes| *bytes > 0);
    let memory = whole.map(DeviceMemory::from_bytes).ok_or(malformed)?;
    let (percent, malformed) = stated(CORES)?;
    let cores = match percent {
        Some(0) => None, // nothing of it is consumed: compute has no limit
        percent => {
            let percent = percent.and_then(|percent| u8::try_from(percent).ok());
            Some(percent.and_then(Cores::new).ok_or(malformed)?)
        }
    };
    Ok((gpu.uuid, Share { memory: MemoryRequest::Bytes(memory), cores }))
}

/// Adds a share of `gpu` to those that are counted already.
fn add(shares: &mut BTreeMap<GpuUuid, Share>, gpu: GpuUuid, share: Share) {
    let all = shares.get(&gpu).map_or(share, |before| sum(*before, share));
    shares.insert(gpu, all);
}

/// Two shares of one GPU. Where one of them has no limit on compute, both together have none.
fn sum(one: Share, other: Share) -> Share {
    let memory = match (one.memory, other.memory) {
        (MemoryRequest::Bytes(one), MemoryRequest::Bytes(other)) => {
            MemoryRequest::Bytes(one.saturating_add(other))
        }
        (memory, _) => memory,
    };
    let cores = one.cores.zip(other.cores).and_then(|(one, other)| {
        let percent = one.percent().saturating_add(other.percent()).min(Cores::ALL.percent());
        Cores::new(percent)
    });
    Share { memory, cores }
}

#[cfg(test)]
pub mod tests {
    use gpushare_inventory::DeviceNode;
    use gpushare_request::{ComputePolicy, Priority};
    use serde_json::{Value, json};

    use super::*;

    /// A GPU of 80 GiB.
    pub fn gpu(number: u8) -> Gpu {
        Gpu {
            index: number.into(),
            uuid: GpuUuid::from_bytes([number; 16]),
            minor: number.into(),
            model: "H100".into(),
            memory: Some(DeviceMemory::from_bytes(80 << 30)),
            node: DeviceNode {
                path: "/dev/nvidia0".into(),
                host_path: "/dev/nvidia0".into(),
                major: 195,
                minor: 0,
                mode: 0o666,
                uid: 0,
                gid: 0,
            },
            place: gpushare_inventory::Place::default(),
            instance: None,
        }
    }

    fn result(request: &str, number: u8, memory: &str, cores: &str) -> Value {
        json!({
            "request": request, "driver": DRIVER, "pool": "node", "device": device_name(gpu(number).uuid),
            "consumedCapacity": {"memory": memory, "cores": cores},
        })
    }

    fn of(results: &[Value], config: &[Value]) -> Allotment {
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {}, "spec": {},
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        });
        let claim = serde_json::from_value(claim).expect("it is a claim");
        Allotment::of(&claim, "node", &[gpu(0), gpu(1)], false)
            .unwrap_or_else(|error| panic!("{results:?}: {error}"))
    }

    fn share(gib: u64, cores: Option<u8>) -> Share {
        let memory = MemoryRequest::Bytes(DeviceMemory::from_bytes(gib << 30));
        Share { memory, cores: cores.map(|percent| Cores::new(percent).expect("it is a percentage")) }
    }

    #[test]
    fn shares_of_one_gpu_are_added_up_and_others_stay_apart() {
        let (a, b) = (gpu(0).uuid, gpu(1).uuid);
        for (results, on_a, on_b) in [
            (vec![result("r", 0, "30Gi", "40")], Some(share(30, Some(40))), None),
            (vec![result("r", 0, "30Gi", "0")], Some(share(30, None)), None),
            (vec![result("r", 0, "30Gi", "40"), result("s", 0, "2Gi", "9")], Some(share(32, Some(49))), None),
            (vec![result("r", 0, "30Gi", "0"), result("s", 0, "2Gi", "9")], Some(share(32, None)), None),
            (vec![result("r", 0, "1Gi", "99"), result("s", 0, "1Gi", "99")], Some(share(2, Some(100))), None),
            (
                vec![result("r", 1, "30Gi", "40"), result("s", 0, "2Gi", "0"), result("t", 1, "1Gi", "1")],
                Some(share(2, None)),
                Some(share(31, Some(41))),
            ),
        ] {
            let allotment = of(&results, &[]);
            for (gpu, want) in [(a, on_a), (b, on_b)] {
                let Some(want) = want else { continue };
                assert_eq!(allotment.request.on(gpu), want, "{results:?}");
            }
            let count = usize::from(on_a.is_some()) + usize::from(on_b.is_some());
            assert!(matches!(&allotment.request.devices, Devices::These(list) if list.len() == count));
            assert_eq!(allotment.devices.len(), results.len());
        }
    }

    #[test]
    fn what_is_no_whole_mebibyte_is_rounded_down() {
        let mebibytes = |memory: &str| of(&[result("r", 0, memory, "0")], &[]).request.on(gpu(0).uuid).memory;
        for (memory, want) in [("1500M", 1430), ("1Mi", 1), ("2097151", 1), ("1Gi", 1024)] {
            assert_eq!(
                mebibytes(memory),
                MemoryRequest::Bytes(DeviceMemory::from_bytes(want << 20)),
                "{memory}"
            );
        }
    }

    #[test]
    fn shares_that_no_container_could_have_of_one_gpu_are_told_with_the_remedy() {
        let results = [result("r", 0, "50Gi", "0"), result("s", 0, "50Gi", "0"), result("t", 1, "1Gi", "0")];
        let claim =
            json!({"metadata": {}, "spec": {}, "status": {"allocation": {"devices": {"results": results}}}});
        let claim = serde_json::from_value(claim).expect("it is a claim");
        let error = Allotment::of(&claim, "node", &[gpu(0), gpu(1)], false).unwrap_err().to_string();
        assert!(error.contains("2 shares of GPU") && error.contains("100 GiB in all"), "{error}");
        assert!(error.contains("distinctAttribute: gpu.gpushare.io/uuid"), "{error}");
    }

    #[test]
    fn what_other_drivers_and_nodes_give_is_left_to_them() {
        let mut theirs = result("other", 0, "1Gi", "0");
        theirs["driver"] = json!("gpu.nvidia.com");
        let mut elsewhere = result("elsewhere", 0, "1Gi", "0");
        elsewhere["pool"] = json!("another");
        let allotment = of(&[theirs, result("r", 1, "30Gi", "0"), elsewhere], &[]);
        assert_eq!(allotment.devices.len(), 1);
        assert_eq!(allotment.request.on(gpu(1).uuid), share(30, None));
    }

    #[test]
    fn a_device_belongs_to_the_main_request_of_an_alternative() {
        let device = of(&[result("gpu/large", 0, "60Gi", "0")], &[]).devices.remove(0).named("uid", "node");
        assert_eq!(device.request_names, ["gpu"]);
        assert_eq!(device.cdi_device_ids, [format!("gpushare.io/claim=uid_{}", gpu(0).uuid)]);
    }

    #[test]
    fn parameters_are_the_claims_before_the_classs_and_those_of_its_requests_alone() {
        let config = |source: &str, requests: &[&str], policy: &str, priority: u8| {
            json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": {
                "apiVersion": "gpu.gpushare.io/v1", "kind": "ShareParameters",
                "computePolicy": policy, "priority": priority}}})
        };
        let class = config("FromClass", &[], "burst", 2);
        for (configs, want) in [
            (vec![], (ComputePolicy::Fixed, Priority::default().level())),
            (vec![class.clone()], (ComputePolicy::Burst, 2)),
            (vec![config("FromClaim", &["r"], "none", 7)], (ComputePolicy::None, 7)),
            (vec![class.clone(), config("FromClaim", &["r"], "fixed", 1)], (ComputePolicy::Fixed, 1)),
            (vec![class.clone(), config("FromClaim", &["r/small"], "fixed", 1)], (ComputePolicy::Fixed, 1)),
            (vec![config("FromClaim", &["r"], "fixed", 1), class.clone()], (ComputePolicy::Fixed, 1)),
            (vec![class, config("FromClaim", &["another"], "none", 7)], (ComputePolicy::Burst, 2)),
        ] {
            let request = of(&[result("r", 0, "30Gi", "40")], &configs).request;
            assert_eq!((request.compute_policy, request.priority.level()), want, "{configs:?}");
        }
    }

    #[test]
    fn a_sliver_of_a_generous_class_lifts_no_other_share() {
        let config = |source: &str, request: &str, policy: &str, priority: u8| {
            json!({"source": source, "requests": [request], "opaque": {"driver": DRIVER, "parameters": {
                "apiVersion": "gpu.gpushare.io/v1", "kind": "ShareParameters",
                "computePolicy": policy, "priority": priority}}})
        };
        let both = [result("large", 0, "40Gi", "0"), result("sliver", 0, "1Mi", "0")];
        let premium = config("FromClass", "sliver", "none", 9);
        for (configs, want) in [
            (vec![premium.clone()], (ComputePolicy::Fixed, Priority::default().level())),
            (vec![config("FromClass", "large", "burst", 1), premium.clone()], (ComputePolicy::Burst, 1)),
            (vec![config("FromClass", "large", "none", 9), premium], (ComputePolicy::None, 9)),
        ] {
            let request = of(&both, &configs).request;
            assert_eq!((request.compute_policy, request.priority.level()), want, "{configs:?}");
        }
    }

    #[test]
    fn annotations_take_no_compute_that_the_scheduler_did_not_allot() {
        let stated = |value: &str| BTreeMap::from([("gpushare.io/cores".to_owned(), value.to_owned())]);
        let limited = of(&[result("r", 0, "1Mi", "40")], &[]);
        assert!(limited.restated(&stated("40")).is_ok() && limited.restated(&stated("41")).is_err());
        let unlimited = of(&[result("r", 0, "1Mi", "0")], &[]);
        let error = unlimited.restated(&stated("1")).unwrap_err().to_string();
        assert!(error.contains("allotted no compute to this share"), "{error}");
    }
}
