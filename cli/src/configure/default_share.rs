//! What a container gets that names no size: `--default-share` writes it into the node's own settings.

use std::path::Path;
use std::str::FromStr;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_request::{MemoryRequest, NvidiaPolicy};

use crate::file::{self, FileChange};

/// The drop-in's name.
pub const NAME: &str = "10-default-share.toml";
/// The first line of the drop-in, by which it is known as ours.
const MARK: &str =
    "# Made by `gpushare configure --default-share`: what a container gets that names no size.\n";

/// What `--default-share` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DefaultShare {
    /// All memory that is left on the GPU.
    Rest,
    /// Nothing: it is refused.
    Refuse,
    /// A share of this size, in the words of who asked.
    Share(String),
}

impl FromStr for DefaultShare {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "rest" => Ok(Self::Rest),
            "refuse" => Ok(Self::Refuse),
            _ => match text.parse::<MemoryRequest>() {
                Ok(MemoryRequest::Bytes(_) | MemoryRequest::Percent(_)) => Ok(Self::Share(text.to_owned())),
                _ => Err("must be a size as 8GiB or 25%, `rest` (all that is left) or `refuse`".to_owned()),
            },
        }
    }
}

impl DefaultShare {
    fn text(&self) -> String {
        let keys = match self {
            Self::Rest => "nvidia = \"default-share\"\ndefault_memory = \"\"\n".to_owned(),
            Self::Refuse => "nvidia = \"refuse\"\ndefault_memory = \"refuse\"\n".to_owned(),
            Self::Share(memory) => {
                format!("nvidia = \"default-share\"\ndefault_memory = \"{memory}\"\n")
            }
        };
        format!("{MARK}[request]\n{keys}")
    }
}

/// The change of the settings by which containers get `share`, and what the user is told where somebody
/// wrote the file by hand.
pub fn change(share: &DefaultShare) -> Result<(FileChange, Option<String>)> {
    let path = file::drop_in(NAME);
    let before = file::read(&path)?;
    if before.as_ref().is_some_and(|there| !there.starts_with(MARK)) {
        let note = format!("{} was written by hand and stays as it is", path.display());
        return Ok((FileChange { path, before: before.clone(), after: before }, Some(note)));
    }
    Ok((FileChange { path, before, after: Some(share.text()) }, None))
}

/// What the user is told while nobody has decided it.
pub fn undecided() -> Result<Option<String>> {
    let request = Config::load()?.request;
    let is_decided = request.default_memory.is_some()
        || request.needs_memory
        || request.nvidia != NvidiaPolicy::DefaultShare
        || file::drop_in(NAME).exists();
    let note = "a container that names no size gets all the memory that is left on its GPU, and the next one none: decide \
                it by --default-share 8GiB, 25%, refuse, or rest";
    Ok((!is_decided).then(|| note.to_owned()))
}

/// What the user is told who takes an engine's runtime out, while others may have it.
pub fn kept() -> Option<String> {
    let path = file::drop_in(NAME);
    path.exists().then(|| format!("the default share stays, for all engines: {}", path.display()))
}

/// What the user is told where other settings win over `share`.
pub fn overridden(share: &DefaultShare) -> Result<Option<String>> {
    let wanted =
        Config::from_text(Path::new("--default-share"), &share.text(), Path::new("/usr/bin"))?.request;
    let found = Config::load()?.request;
    let is_so = (wanted.default_memory, wanted.needs_memory) == (found.default_memory, found.needs_memory);
    let note = "other settings say otherwise, and win: look for default_memory in the files that `gpushare config check` names";
    Ok((!is_so).then(|| note.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_means_what_was_asked_for() {
        for (word, memory, policy) in [
            ("8GiB", Some("8 GiB"), NvidiaPolicy::DefaultShare),
            ("25%", Some("25%"), NvidiaPolicy::DefaultShare),
            ("rest", None, NvidiaPolicy::DefaultShare),
            ("refuse", None, NvidiaPolicy::Refuse),
        ] {
            let is_refused = word == "refuse";
            let text = word.parse::<DefaultShare>().unwrap().text();
            let read = Config::from_text(Path::new("a"), &text, Path::new("/usr/bin")).unwrap().request;
            assert_eq!(read.default_memory.map(|memory| memory.to_string()).as_deref(), memory, "{word}");
            assert_eq!((read.nvidia, read.needs_memory), (policy, is_refused), "{word}");
        }
        for wrong in ["", "all", "8", "0", "-1GiB", "101%"] {
            assert!(wrong.parse::<DefaultShare>().is_err(), "{wrong:?}");
        }
    }
}
