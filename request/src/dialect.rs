//! What a dialect is: one system's way to write a request. Each has a file below `dialects`, and a line in their table.

use gpushare_claims::{Claim, IndexMeaning, Library, NodeGpus, RequestError, Words};

/// Whether a bundle holds a dialect's words, and what they are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speech {
    /// It holds none.
    Silent,
    /// They bound what others ask for.
    Bounds,
    /// They ask for a share.
    Asks,
    /// They say that another container of the pod has the share, and this one has none.
    Spares,
}

impl Speech {
    /// A dialect that asks where `asks`, else is silent.
    pub fn asking(asks: bool) -> Self {
        if asks { Self::Asks } else { Self::Silent }
    }
}

/// One way to write a request.
pub(crate) struct Dialect {
    /// Its name in settings and listings.
    pub name: &'static str,
    /// Whether the bundle speaks it. Looks at nothing but the bundle: most containers ask for nothing.
    pub speech: fn(&Words) -> Speech,
    /// What it says.
    pub read: for<'a> fn(&Words<'a>, NodeGpus<'a>) -> Result<Vec<Claim>, RequestError>,
    /// The keys, of variables and annotations, that are its own.
    pub owns: fn(&str) -> bool,
    /// Other dialects that do not see these keys where this one asks: it writes them in another sense.
    pub over: &'static [&'static str],
    /// What numbers mean in the list of GPUs beside its words.
    pub numbers: fn(&Words) -> IndexMeaning,
    /// Whether its limits may count by a GPU's place in the list.
    pub by_position: bool,
    /// Variables by which its system turns limits off.
    pub switches: &'static [Switch],
    /// Its system's interception library.
    pub library: Option<Library>,
    /// Keys that look like a request of its system and are none, each with what to write.
    pub near_misses: &'static [(&'static str, &'static str)],
}

impl Dialect {
    /// A dialect with nothing beside its words.
    pub const PLAIN: Self = Self {
        name: "",
        speech: |_| Speech::Silent,
        read: |_, _| Ok(Vec::new()),
        owns: |_| false,
        over: &[],
        numbers: |_| IndexMeaning::Pci,
        by_position: false,
        switches: &[],
        library: None,
        near_misses: &[],
    };
}

impl std::fmt::Debug for Dialect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// A variable by which a system turns its limits off, or lets memory spill to the host. It is anybody's word.
pub(crate) struct Switch {
    pub key: &'static str,
    /// Whether this value of it means on, in a container with these words.
    pub is_on: fn(&str, &Words) -> bool,
    pub turns_off: Off,
}

/// What a switch turns off in its own system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Off {
    /// Every limit.
    Limits,
    /// The limit on compute.
    Compute,
    /// The limit's hardness: what is too much lies in the host's memory. There is no such memory here to be honoured.
    Hardness,
}

/// Go's strconv.ParseBool.
pub(crate) fn is_go_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "TRUE" | "true" | "True")
}

/// The word that vgpu-manager takes for on.
pub(crate) fn is_enabled(value: &str) -> bool {
    ["1", "true", "enabled"].iter().any(|on| value.eq_ignore_ascii_case(on))
}
