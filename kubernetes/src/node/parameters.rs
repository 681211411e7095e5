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

/// Parameters that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "its parameters for driver {DRIVER} ({origin}) cannot be read: {why}; write apiVersion: {API_VERSION}, kind: {KIND} and \
     computePolicy (fixed, burst or none) or priority (0 to 9)"
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
    /// The parameters for the shares of these requests. All shares of a claim are one lease, so what is stated
    /// for one of them holds for all. Of several statements the last one counts; a class's come first.
    pub fn of(allocated: &DeviceAllocationResult, requests: &[&str]) -> Result<Self, ParametersError> {
        let mut found = Self::default();
        for config in allocated.config.iter().flatten().filter(|config| is_for(config, requests)) {
            let Some(opaque) = config.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else {
                continue;
            };
            let origin = if config.source == "FromClass" { "of its device class" } else { "of the claim" };
            let error = |why: String| ParametersError { origin, why };
            let written: Written =
                serde_json::from_value(opaque.parameters.0.clone()).map_err(|why| error(why.to_string()))?;
            if (written.api_version.as_str(), written.kind.as_str()) != (API_VERSION, KIND) {
                return Err(error(format!("{} {:?} is unknown", written.api_version, written.kind)));
            }
            if let Some(policy) = written.compute_policy {
                found.compute_policy =
                    policy.parse().map_err(|why| error(format!("computePolicy: {why}")))?;
            }
            if let Some(level) = written.priority {
                found.priority =
                    level.to_string().parse().map_err(|why| error(format!("priority: {why}")))?;
            }
        }
        Ok(found)
    }
}

/// Whether it is for one of these requests, or for all.
fn is_for(config: &DeviceAllocationConfiguration, requests: &[&str]) -> bool {
    let named = config.requests.as_deref().unwrap_or_default();
    let main = |name: &String| name.split('/').next().is_some_and(|main| requests.contains(&main));
    named.is_empty() || named.iter().any(main)
}
