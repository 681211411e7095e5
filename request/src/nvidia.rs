//! The plain NVIDIA dialect: `NVIDIA_VISIBLE_DEVICES`, alone or beside keys of gpushare's own, and
//! `NVIDIA_DRIVER_CAPABILITIES`. The list's grammar is [`crate::device_list`]'s.
//!
//! docker appends its own entry behind the image's and the user's, so outside CRI the last one wins. Under CRI the
//! device plugin's entry may stand beside the pod's, and beside keys of gpushare's own different ones are a conflict.

use gpushare_inventory::{Capabilities, CapabilityError, GpuUuid};

use crate::cards::{Cards, IndexMeaning};
use crate::cdi;
use crate::channel::Trust;
use crate::claim::Claim;
use crate::container::{Container, Engine};
use crate::device_list::{self, Listed, Named, items, word};
use crate::error::{RequestError, shortened};
use crate::grammar::Devices;
use crate::reading::{Reading, Said};
use crate::{NvidiaPolicy, Policy};

pub(crate) const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// The annotation that keeps the list of a bundle whose list became `void` when its request was granted: run again without
/// being written anew, it asks for the same.
pub const GRANTED_LIST: &str = "granted.gpushare.io/nvidia-visible-devices";

/// What a granted bundle keeps of its list, for when it is run again without being written anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kept {
    /// The list as it was written.
    #[default]
    AsWritten,
    /// The GPUs that were granted. Other sources had a say in it, and the numbers may have been minors by a mark that is
    /// gone: alone the list could mean more than was granted, or another GPU.
    Granted(Vec<GpuUuid>),
    /// Nothing: limits that count by the list's positions would be another GPU's.
    Nothing,
}

/// Stands in [`GRANTED_LIST`] for [`Kept::Nothing`].
pub(crate) const NOT_KEPT: &str = "write-the-bundle-anew";

/// What [`GRANTED_LIST`] has for a list as it was `written`. Names of gpushare's own CDI devices stay, which may state a limit.
pub fn kept_list(written: &str, kept: &Kept) -> String {
    match kept {
        Kept::AsWritten => written.to_owned(),
        // The mounts stay, too, and name the GPUs.
        Kept::Granted(_) if device_list::is_volumes(written) => written.to_owned(),
        Kept::Granted(gpus) => {
            let ours = items(written).filter(|item| cdi::is_ours(item)).map(str::to_owned);
            ours.chain(gpus.iter().map(GpuUuid::to_string)).collect::<Vec<_>>().join(",")
        }
        Kept::Nothing => NOT_KEPT.to_owned(),
    }
}

/// The list that an earlier grant kept. A pod can write the annotation, so it counts only beside the hook of that grant.
pub(crate) fn granted_list(container: &Container) -> Option<&str> {
    container.annotations().get(GRANTED_LIST).filter(|_| container.ran_before()).map(String::as_str)
}

/// What NVIDIA's variables say beside keys of gpushare's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nvidia {
    /// `None` for no request: absent, empty, `void` or `none`.
    pub devices: Option<Devices>,
    /// Whether the list says that there shall be no GPU.
    pub wants_none: bool,
    /// The list as written, for messages.
    pub devices_text: String,
    pub capabilities: Option<Capabilities>,
}

pub(crate) fn read(reading: &Reading) -> Result<Nvidia, RequestError> {
    let container = reading.container;
    let text = devices_text(container)?;
    let said = Said { key: DEVICES, value: text, trust: Trust::Environment };
    let listed = device_list::parsed(reading, said, IndexMeaning::Pci)?;
    let wants_none = listed == Listed::NoGpu;
    let devices = match listed {
        Listed::Nothing | Listed::NoGpu => None,
        Listed::All => Some(Devices::All),
        Listed::These(list) => Some(Devices::These(list)),
    };
    let capabilities = match &devices {
        Some(_) => capabilities(container)?,
        // Without devices the list of capabilities is a property of the image, not a request: whatever it says is not ours.
        None => value(container, CAPABILITIES)?.and_then(|text| text.parse().ok()),
    };
    Ok(Nvidia { devices, wants_none, devices_text: text.to_owned(), capabilities })
}

/// The GPUs of a list that stands alone: how much of them is the node's to say.
pub(crate) fn claim<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Claim, RequestError> {
    match device_list::named(reading, cards, IndexMeaning::Pci)? {
        Named::Gpus(said, gpus) => Ok(Claim::by(said).naming(&gpus)),
        Named::NoGpu(said) => Err(said.wrong("it names no GPU: name one, or leave the list out")),
        Named::Nothing => Err(RequestError::NoShare),
    }
}

/// The parts of the driver that the variable names.
pub(crate) fn capabilities(container: &Container) -> Result<Option<Capabilities>, RequestError> {
    let text = value(container, CAPABILITIES)?;
    let malformed = |text, source: CapabilityError| RequestError::Malformed {
        key: CAPABILITIES.to_owned(),
        value: shortened(text),
        source: source.into(),
    };
    text.map(|text| text.parse().map_err(|error| malformed(text, error))).transpose()
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
    let lists = device_list::lists(container);
    let first = lists.iter().flat_map(|said| items(said.value)).find(|item| cdi::is_ours(item));
    if let (Some(setting), Some(name)) = (unread, first) {
        return Err(RequestError::UnreadCdiDevice {
            name: shortened(name).escape_debug().to_string(),
            setting,
        });
    }
    let mut ours = Vec::new();
    for said in lists {
        let before = ours.len();
        ours.extend(items(said.value).filter(|item| cdi::is_ours(item)));
        if let (Some(name), Some(word @ ("void" | "none"))) = (ours.get(before), word(said.value)) {
            return Err(RequestError::Conflict {
                first: format!("{DEVICES}={word:?}"),
                second: format!("CDI device {} in the same list", shortened(name).escape_debug()),
            });
        }
    }
    Ok(ours)
}

/// The list that counts, as written; nothing when there is none.
pub(crate) fn devices_text(container: &Container) -> Result<&str, RequestError> {
    let text = value(container, DEVICES)?.unwrap_or_default();
    Ok(granted_list(container).filter(|_| text == "void").unwrap_or(text))
}

fn value<'a>(container: &'a Container, name: &str) -> Result<Option<&'a str>, RequestError> {
    let mut values = container.named(name).map(|(_, value)| value);
    let Some(last) = values.next_back() else { return Ok(None) };
    match values.find(|value| *value != last) {
        Some(other) if container.engine() == Engine::Cri => Err(RequestError::Conflict {
            first: format!("{name}={:?}", shortened(other)),
            second: format!("{name}={:?}", shortened(last)),
        }),
        _ => Ok(Some(last)),
    }
}
