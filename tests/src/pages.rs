//! The pages for people, by their lines: prose, and blocks of commands, settings and outputs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::artifacts::checkout;

/// A page: its path, and its lines.
#[derive(Clone, Debug)]
pub struct Page {
    /// Where it is.
    pub path: PathBuf,
    /// All of it.
    pub text: String,
}

/// A fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The words behind its first fence: the language, then for `sh` at most one mark that says why it is not
    /// run as it stands.
    pub kind: String,
    /// Its text, without the fence's indentation.
    pub text: String,
    /// The line of its first fence, counted from one.
    pub line: usize,
}

impl Block {
    /// Whether it is commands for a shell, whatever its mark.
    #[must_use]
    pub fn is_shell(&self) -> bool {
        self.kind.split(' ').next() == Some("sh")
    }
}

impl Page {
    /// Reads the page at `path`.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn read(path: PathBuf) -> Self {
        Self { text: fs::read_to_string(&path).expect("a page can be read"), path }
    }

    /// Its path below the checkout.
    #[must_use]
    pub fn name(&self) -> String {
        let path = self.path.strip_prefix(checkout()).unwrap_or(&self.path);
        path.to_string_lossy().into_owned()
    }

    /// Its fenced blocks, in order.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        blocks(&self.text)
    }
}

/// All pages: those of the root, of `docs`, and of `examples` with its folders, in the order of their paths.
#[must_use]
pub fn pages() -> Vec<Page> {
    let examples = checkout().join("examples");
    let mut folders = vec![checkout().to_path_buf(), checkout().join("docs"), examples.clone()];
    folders.extend(entries(&examples).into_iter().filter(|path| path.is_dir()));
    let files = folders.iter().flat_map(|folder| entries(folder));
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    files.sort();
    files.into_iter().map(Page::read).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).expect("the folder is there").flatten().map(|entry| entry.path()).collect()
}

/// The lines outside of fenced blocks and of indented code.
#[must_use]
pub fn prose(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let outside = |line: &&str| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced && !line.starts_with("    ")
    };
    text.lines().filter(outside).collect()
}

/// The fenced blocks of a page's text.
///
/// # Panics
/// Never: a line of a block follows the block's fence.
#[must_use]
pub fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut indent = None;
    for (number, line) in text.lines().enumerate() {
        let fence = line.trim_start().strip_prefix("```");
        match (indent, fence) {
            (None, Some(kind)) => {
                indent = Some(line.len() - line.trim_start().len());
                found.push(Block { kind: kind.to_owned(), text: String::new(), line: number + 1 });
            }
            (Some(_), Some(_)) => indent = None,
            (Some(indent), None) => {
                let block = found.last_mut().expect("a block has begun");
                block.text.push_str(line.get(indent..).unwrap_or_default());
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}
