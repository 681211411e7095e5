//! nvshare: mounts of its library and of its scheduler's socket, and a list of GPUs (nvshare
//! kubernetes/device-plugin/server.go). Its clients take turns with the whole memory, so it states no amount.

use crate::dialect::{Dialect, Off, Speech, Switch};
use crate::sources::handed::is_handed;
use crate::sources::list;
use gpushare_claims::{Claim, IndexMeaning, Library, NodeGpus, Rank, RequestError, Word, Words};

/// nvshare's library limits no memory. The switch is documented in its README.
pub(super) static DIALECT: Dialect = Dialect {
    name: "nvshare",
    speech,
    read,
    switches: &[Switch {
        key: "NVSHARE_ENABLE_SINGLE_OVERSUB",
        is_on: |value, _| !matches!(value, "" | "0"),
        turns_off: Off::Hardness,
    }],
    library: Some(Library {
        folders: &["/usr/lib/nvshare", "/var/run/nvshare"],
        files: &["libnvshare.so"],
        owner: None,
    }),
    ..Dialect::PLAIN
};

const LIBRARY: &str = "/usr/lib/nvshare/libnvshare.so";

/// The mount is required: an image that only preloads a library with that name does not ask.
fn speech(words: &Words) -> Speech {
    let has_library = words.container.mounts().iter().any(|mount| mount.target == LIBRARY);
    Speech::asking(has_library && (list::asks(words) || is_handed(words)))
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let mount = Word { key: "mount", value: LIBRARY, rank: Rank::Environment, is_variable: false };
    let Some((word, _)) = list::named(words, node, IndexMeaning::Pci)? else {
        return Err(mount.wrong("nvshare's library without a GPU: name one in NVIDIA_VISIBLE_DEVICES"));
    };
    let note = format!("{mount}: gpushare gives a share in place of nvshare's turns with the whole memory");
    Ok(vec![Claim::by(word).noting([note])])
}
