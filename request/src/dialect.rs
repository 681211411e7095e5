//! Defines what a dialect is: one system's way to write a request. Each dialect has a file below `dialects`
//! and an entry in the table there.

use gpushare_claims::{Claim, IndexMeaning, Library, NodeGpus, RequestError, Words};

/// Whether a bundle holds words of a dialect, and what those words do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speech {
    /// The bundle holds no word of the dialect.
    Silent,
    /// The words only bound what others ask for.
    Bounds,
    /// The words ask for a share.
    Asks,
    /// The words say that another container of the pod has the share and this one has none.
    Spares,
}

impl Speech {
    /// [`Speech::Asks`] where `asks` is true, else [`Speech::Silent`].
    pub fn asking(asks: bool) -> Self {
        if asks { Self::Asks } else { Self::Silent }
    }
}

/// One system's way to write a request.
pub(crate) struct Dialect {
    /// The name in settings and listings.
    pub name: &'static str,
    /// Whether the bundle has the dialect's words. It is called for every container, and most ask for
    /// nothing, so it reads only the bundle.
    pub speech: fn(&Words) -> Speech,
    /// The claims that the words make.
    pub read: for<'a> fn(&Words<'a>, NodeGpus<'a>) -> Result<Vec<Claim>, RequestError>,
    /// Whether a variable or annotation of this name belongs to the dialect.
    pub owns: fn(&str) -> bool,
    /// Names of the dialects from which this one's keys are hidden where this one asks, because it gives the
    /// keys another meaning.
    pub over: &'static [&'static str],
    /// What a number in the list of GPUs means where this dialect asks.
    pub numbers: fn(&Words) -> IndexMeaning,
    /// Whether its limits may belong to GPUs by their position in the list.
    pub by_position: bool,
    /// Whether its words in this bundle are for programs under MPS.
    pub is_mps: fn(&Words) -> bool,
    /// Variables with which its system turns limits off.
    pub switches: &'static [Switch],
    /// How to recognise its system's interception library.
    pub library: Option<Library>,
    /// Keys that look like a request of its system but are none, each with the text of a note that says what
    /// to write.
    pub near_misses: &'static [(&'static str, &'static str)],
}

impl Dialect {
    /// Defaults for the optional fields: a dialect without switches, library and exceptions.
    pub const PLAIN: Self = Self {
        name: "",
        speech: |_| Speech::Silent,
        read: |_, _| Ok(Vec::new()),
        owns: |_| false,
        over: &[],
        numbers: |_| IndexMeaning::Pci,
        by_position: false,
        is_mps: |_| false,
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

/// A variable with which a system turns its limits off, or lets memory spill to the host. Image and pod can
/// set it too, so it is not trusted.
pub(crate) struct Switch {
    pub key: &'static str,
    /// Whether its own system would take this value for on, in a container with these words.
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
    /// The hard memory limit: with the switch on, more memory is taken from the host. gpushare does not offer
    /// this, so such a switch is never honoured.
    Hardness,
}

/// The values for which Go's strconv.ParseBool returns true.
pub(crate) fn is_go_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "TRUE" | "true" | "True")
}

/// The values that vgpu-manager takes for on.
pub(crate) fn is_enabled(value: &str) -> bool {
    ["1", "true", "enabled"].iter().any(|on| value.eq_ignore_ascii_case(on))
}
