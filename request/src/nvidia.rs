//! The plain NVIDIA dialect: `NVIDIA_VISIBLE_DEVICES` and `NVIDIA_DRIVER_CAPABILITIES`.
//!
//! docker appends its own entry behind the image's and the user's, so outside CRI the last one wins. Under CRI the
//! device plugin's entry may stand beside the pod's, and different ones are a conflict.

use gpushare_inventory::Capabilities;

use crate::cdi;
use crate::container::{Container, Engine};
use crate::error::{RequestError, shortened};
use crate::grammar::{Devices, GrammarError, MemoryAsk};
use crate::whole;
use crate::{NvidiaPolicy, Policy, Request};

pub(crate) const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// The annotation that keeps the list of a bundle whose list became `void` when its request was granted: run again without
/// being written anew, it asks for the same.
pub const GRANTED_LIST: &str = "granted.gpushare.io/nvidia-visible-devices";

/// What NVIDIA's variables say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nvidia {
    /// `None` for no request: absent, empty, `void` or `none`.
    pub devices: Option<Devices>,
    /// The list as written, for messages.
    pub devices_text: String,
    pub capabilities: Option<Capabilities>,
}

pub(crate) fn read(container: &Container) -> Result<Nvidia, RequestError> {
    let devices_text = devices_text(container)?.to_owned();
    let devices = match device_list(&devices_text) {
        None => None,
        Some(list) if list.starts_with(whole::VOLUMES) => {
            return Err(malformed(DEVICES, &devices_text)(GrammarError::VolumeMounts));
        }
        Some(list) => Some(list.parse().map_err(malformed(DEVICES, &devices_text))?),
    };
    // Without devices the list of capabilities is a property of the image, not a request: whatever it says is not ours.
    let capabilities = match value(container, CAPABILITIES)? {
        Some(text) if devices.is_some() => Some(text.parse().map_err(malformed(CAPABILITIES, text))?),
        Some(text) => text.parse().ok(),
        None => None,
    };
    Ok(Nvidia { devices, devices_text, capabilities })
}

fn malformed<E: Into<crate::error::ValueError>>(key: &str, value: &str) -> impl Fn(E) -> RequestError {
    move |source| RequestError::Malformed {
        key: key.to_owned(),
        value: shortened(value),
        source: source.into(),
    }
}

/// The list without its empty items; `None` when it asks for nothing. `void` anywhere wins; then the first of `all`
/// and `none`. Names of gpushare's own CDI devices are read elsewhere.
fn device_list(text: &str) -> Option<String> {
    match word(text) {
        Some("all") => return Some("all".to_owned()),
        Some(_) => return None,
        None => {}
    }
    let items: Vec<&str> = items(text).filter(|item| !item.is_empty() && !cdi::is_ours(item)).collect();
    (!items.is_empty()).then(|| items.join(","))
}

fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
}

/// The word in a list that counts for the whole of it.
fn word(text: &str) -> Option<&str> {
    let void = items(text).find(|item| *item == "void");
    void.or_else(|| items(text).find(|item| matches!(*item, "all" | "none")))
}

/// The names of gpushare's own CDI devices in the list. Where the settings have the list not read for them, a name is an
/// error: a container must not start without the GPU that it names, nor with all of another's.
pub(crate) fn our_devices<'a>(
    container: &'a Container,
    policy: &Policy,
) -> Result<Vec<&'a str>, RequestError> {
    let unread = match policy {
        Policy { ignore_env: true, .. } => Some("request.env"),
        Policy { nvidia: NvidiaPolicy::Ignore, .. } => Some("request.nvidia"),
        _ => None,
    };
    let text = match unread {
        // Nobody acts on it otherwise, so that it need not agree with other entries.
        Some(_) => container.env().filter(|(key, _)| *key == DEVICES).last().map_or("", |(_, value)| value),
        None => devices_text(container)?,
    };
    let ours: Vec<&str> = items(text).filter(|item| cdi::is_ours(item)).collect();
    let Some(first) = ours.first() else { return Ok(ours) };
    let name = shortened(first).escape_debug().to_string();
    match (unread, word(text)) {
        (Some(setting), _) => Err(RequestError::UnreadCdiDevice { name, setting }),
        (None, Some(word @ ("void" | "none"))) => Err(RequestError::Conflict {
            first: format!("{DEVICES}={word:?}"),
            second: format!("CDI device {name} in the same list"),
        }),
        _ => Ok(ours),
    }
}

/// The list that counts, as written; nothing when there is none.
pub(crate) fn devices_text(container: &Container) -> Result<&str, RequestError> {
    let text = value(container, DEVICES)?.unwrap_or_default();
    let granted = container.annotations().get(GRANTED_LIST).filter(|_| text == "void");
    Ok(granted.map_or(text, String::as_str))
}

fn value<'a>(container: &'a Container, name: &str) -> Result<Option<&'a str>, RequestError> {
    let mut values = container.env().filter(|(key, _)| *key == name).map(|(_, value)| value);
    let Some(first) = values.next() else { return Ok(None) };
    let last = values.last().unwrap_or(first);
    let mut all = container.env().filter(|(key, _)| *key == name);
    match all.find(|(_, value)| *value != last) {
        Some((_, other)) if container.engine() == Engine::Cri => Err(RequestError::Conflict {
            first: format!("{name}={:?}", shortened(other)),
            second: format!("{name}={:?}", shortened(last)),
        }),
        _ => Ok(Some(last)),
    }
}

impl Nvidia {
    /// Whether the list says that there shall be no GPU.
    pub fn wants_none(&self) -> bool {
        word(&self.devices_text) == Some("none")
    }

    /// The request of a container that has no key of gpushare's own.
    pub fn into_request(self, policy: &Policy) -> Result<Option<Request>, RequestError> {
        let Some(devices) = self.devices else { return Ok(None) };
        match policy.nvidia {
            NvidiaPolicy::Ignore => return Ok(None),
            NvidiaPolicy::Refuse => return Err(RequestError::NoShare),
            NvidiaPolicy::DefaultShare if policy.strict => {
                return Err(RequestError::Untrusted { key: DEVICES.to_owned() });
            }
            NvidiaPolicy::DefaultShare => {}
        }
        Ok(Some(Request {
            memory: policy.default_memory.map_or(MemoryAsk::Rest, MemoryAsk::Bytes),
            cores: policy.default_cores,
            devices,
            model: Default::default(),
            mode: Default::default(),
            compute_policy: Default::default(),
            capabilities: self.capabilities.unwrap_or_default(),
            priority: Default::default(),
        }))
    }
}
