//! nvshare: its library and its scheduler's socket as mounts, and a list of GPUs (nvshare kubernetes/device-plugin/server.go).
//! Its clients take turns with the whole memory, and state no amount.

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::channel::Trust;
use crate::claim::Claim;
use crate::device_list::{self, Named, named};
use crate::error::RequestError;
use crate::reading::{Reading, Said};

pub(super) static DIALECT: Dialect = Dialect { name: "nvshare", detects, read, owns, by_position: false };

const LIBRARY: &str = "/usr/lib/nvshare/libnvshare.so";

/// An image that preloads a library of that name has no such mount.
fn detects(reading: &Reading) -> bool {
    let is_library = |mount: &crate::container::Mount| mount.target == LIBRARY;
    reading.container.mounts().iter().any(is_library) && device_list::carrier(reading).is_some()
}

fn owns(_: &str) -> bool {
    false
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let mount = Said { key: "mount", value: LIBRARY, trust: Trust::Environment };
    let Named::Gpus(said, gpus) = named(reading, cards, IndexMeaning::Pci)? else {
        return Err(mount.wrong("nvshare's library without a GPU: name one in NVIDIA_VISIBLE_DEVICES"));
    };
    reading
        .note(format!("{mount}: gpushare gives a share in place of nvshare's turns with the whole memory"));
    Ok(vec![Claim::by(said).naming(&gpus)])
}
