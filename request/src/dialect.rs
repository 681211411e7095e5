//! Defines a dialect: one system's way to write a request. Each dialect has a file below `dialects` and an
//! entry in the table there.

use gpushare_claims::{Claim, IndexMeaning, Library, NodeGpus, RequestError, Words};

/// Whether a bundle holds words of a dialect, and their effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speech {
    /// The bundle holds no word of the dialect.
    Silent,
    /// The words only limit what others ask for.
    Bounds,
    /// The words ask for a share.
    Asks,
    /// The words say that another container of the pod has the share and this one does not.
    Spares,
}

impl Speech {
    /// [`Speech::Asks`] if `asks` is true, else [`Speech::Silent`].
    pub fn asking(asks: bool) -> Self {
        if asks { Self::Asks } else { Self::Silent }
    }
}

/// One system's way to write a request.
pub(crate) struct Dialect {
    /// The name in settings and listings.
    pub name: &'static str,
    /// Whether the bundle has the dialect's words. This runs for every container, and most ask for nothing,
    /// so it reads only the bundle.
    pub speech: fn(&Words) -> Speech,
    /// The claims that the words make.
    pub read: for<'a> fn(&Words<'a>, NodeGpus<'a>) -> Result<Vec<Claim>, RequestError>,
    /// Whether a variable or annotation of this name belongs to the dialect.
    pub owns: fn(&str) -> bool,
    /// Names of the dialects from which this dialect's keys are hidden when it asks, because it gives the
    /// keys another meaning.
    pub over: &'static [&'static str],
    /// The meaning of a number in the list of GPUs when this dialect asks.
    pub numbers: fn(&Words) -> IndexMeaning,
    /// Whether its limits may refer to GPUs by their position in the list.
    pub by_position: bool,
    /// Whether its words in this bundle are for programs under MPS.
    pub is_mps: fn(&Words) -> bool,
    /// Variables with which its system turns limits off.
    pub switches: &'static [Switch],
    /// How to recognise its system's interception library.
    pub library: Option<Library>,
    /// Keys that look like a request of this system but are not, each with a note that says what to write
    /// instead.
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
    /// Whether its own system would treat this value as on, in a container with these words.
    pub is_on: fn(&str, &Words) -> bool,
    pub turns_off: Off,
}

/// The limit that a switch turns off in its own system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Off {
    /// Every limit.
    Limits,
    /// The limit on compute.
    Compute,
    /// The hard memory limit: with the switch on, further memory comes from the host. gpushare does not offer
    /// this, so it never honours such a switch.
    Hardness,
}

/// The values for which Go's strconv.ParseBool returns true.
pub(crate) fn is_go_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "TRUE" | "true" | "True")
}

/// The values that vgpu-manager treats as on.
pub(crate) fn is_enabled(value: &str) -> bool {
    ["1", "true", "enabled"].iter().any(|on| value.eq_ignore_ascii_case(on))
}
