//! The opaque parameters of a claim or its device class: what a share has besides its size.

use gpushare_request::{ComputePolicy, Priority};
use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, DeviceAllocationResult};
use serde::Deserialize;

use super::DRIVER;

/// How a claim's shares are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// How their compute limit is enforced.
    pub compute_policy: ComputePolicy,
    /// Their priority.
    pub priority: Priority,
}

/// Parameters that cannot be read, or that ask for too much.
#[derive(Debug, thiserror::Error)]
#[error(
    "its parameters for driver {DRIVER} ({origin}) cannot be taken: {why}; write apiVersion: {API_VERSION}, kind: {KIND} and \
     computePolicy (fixed, burst, latency or none) or priority (0 to 9)"
)]
pub struct ParametersError {
    /// Whether they are the claim's or its class's.
    origin: &'static str,
    why: String,
}

const API_VERSION: &str = "gpu.gpushare.io/v1";
const KIND: &str = "ShareParameters";

/// The parameters as users write them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    api_version: String,
    kind: String,
    compute_policy: Option<String>,
    priority: Option<u8>,
}

impl Parameters {
    /// The parameters for the shares of these requests. All shares of a claim are one lease: the strictest
    /// policy and the lowest priority of its requests hold for all, or a request for a sliver of a generous
    /// class would lift the others out of theirs.
    pub fn of(
        allocated: &DeviceAllocationResult,
        requests: &[&str],
        strict: bool,
    ) -> Result<Self, ParametersError> {
        let each = requests.iter().map(|request| Self::of_request(allocated, request, strict));
        let strictest = |one: Self, other: Self| Self {
            compute_policy: match looseness(one.compute_policy) <= looseness(other.compute_policy) {
                true => one.compute_policy,
                false => other.compute_policy,
            },
            priority: one.priority.min(other.priority),
        };
        let all: Vec<Self> = each.collect::<Result<_, _>>()?;
        Ok(all.into_iter().reduce(strictest).unwrap_or_default())
    }

    /// The parameters for one request. Of several statements the last one counts; a class's come first.
    ///
    /// A class is the administrator's. What a claim says may only be less than what its class says, and on a
    /// strict node less than the node's default: a lower priority, a stricter policy.
    fn of_request(
        allocated: &DeviceAllocationResult,
        request: &str,
        strict: bool,
    ) -> Result<Self, ParametersError> {
        let mut found = Self::default();
        let (mut most_policy, mut most_priority) =
            (strict.then_some(found.compute_policy), strict.then_some(found.priority));
        let is_of_class = |config: &&DeviceAllocationConfiguration| config.source == "FromClass";
        let all = || allocated.config.iter().flatten().filter(|config| is_for(config, request));
        for config in all().filter(is_of_class).chain(all().filter(|config| !is_of_class(config))) {
            let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else {
                continue;
            };
            let is_class = is_of_class(&config);
            let origin = if is_class { "of its device class" } else { "of the claim" };
            let error = |why: String| ParametersError { origin, why };
            let written: Written =
                serde_json::from_value(opaque.parameters.0.clone()).map_err(|why| error(why.to_string()))?;
            if (written.api_version.as_str(), written.kind.as_str()) != (API_VERSION, KIND) {
                return Err(error(format!("{} {:?} is unknown", written.api_version, written.kind)));
            }
            if let Some(policy) = written.compute_policy {
                let policy: ComputePolicy =
                    policy.parse().map_err(|why| error(format!("computePolicy: {why}")))?;
                if is_class {
                    most_policy = Some(policy);
                } else if most_policy.is_some_and(|most| looseness(policy) > looseness(most)) {
                    return Err(error(format!("computePolicy: {} {ABOVE}", policy.name())));
                }
                found.compute_policy = policy;
            }
            if let Some(level) = written.priority {
                let priority: Priority =
                    level.to_string().parse().map_err(|why| error(format!("priority: {why}")))?;
                if is_class {
                    most_priority = Some(priority);
                } else if most_priority.is_some_and(|most| priority > most) {
                    return Err(error(format!("priority: {level} {ABOVE}")));
                }
                found.priority = priority;
            }
        }
        Ok(found)
    }
}

const ABOVE: &str = "is more than the device class, or this node (request.strict), gives";

/// The less a policy limits, the more it is.
fn looseness(policy: ComputePolicy) -> u8 {
    match policy {
        ComputePolicy::Fixed => 0,
        ComputePolicy::Burst => 1,
        ComputePolicy::Latency => 2,
        ComputePolicy::None => 3,
    }
}

/// Whether it is for this request, or for all.
fn is_for(config: &DeviceAllocationConfiguration, request: &str) -> bool {
    let named = config.requests.as_deref().unwrap_or_default();
    let main = |name: &String| name.split('/').next().is_some_and(|main| main == request);
    named.is_empty() || named.iter().any(main)
}
