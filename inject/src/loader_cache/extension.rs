//! The directory of extensions behind a cache's strings, which glibc writes since version 2.33: who made the
//! cache, and the subfolders of `glibc-hwcaps` that entries refer to by number.

use super::{LoaderCacheError, Shift, Strings, set_word, short, size, word};

/// The first word of the directory.
const MAGIC: u32 = 0xeaa4_2174;
/// Bytes of the directory before its sections, and of each section: tag, flags, offset and size.
const SIZES: (usize, usize) = (8, 16);
/// A section with the name of the program that made the cache.
const GENERATOR: u32 = 0;
/// A section with the offsets of the names of subfolders.
const HARDWARE: u32 = 1;
/// Sections that are read. glibc 2.41 knows two.
const MAX_SECTIONS: usize = 64;
/// Names of subfolders that are read. glibc 2.41 has at most five for a processor.
const MAX_NAMES: usize = 64;
/// Bytes of a subfolder's name.
const MAX_NAME: usize = 255;

/// The extensions of a cache whose strings have moved.
pub(super) struct Extensions<'a> {
    /// The cache from its header on.
    pub cache: &'a [u8],
    /// Bytes of the file before that.
    pub before: usize,
    pub strings: Strings<'a>,
    pub shift: Shift,
}

impl Extensions<'_> {
    /// Adapts the extensions, which lie behind the strings, to where they went in `bytes`, a file without
    /// anything before the header. Sections of other tags are taken out of the directory: what they refer to
    /// is not known.
    pub fn write(&self, bytes: &mut [u8]) -> Result<(), LoaderCacheError> {
        let Some(at) = word(self.cache, 32).filter(|at| *at != 0) else { return Ok(()) };
        self.rewrite(bytes, at).ok_or(LoaderCacheError::Extension)
    }

    /// As [`Extensions::write`], for a directory at the offset `at`. `None` when it is malformed.
    fn rewrite(&self, bytes: &mut [u8], at: u32) -> Option<()> {
        let at = self.place(at).filter(|at| at.is_multiple_of(4))?;
        let count = size(word(self.cache, at + 4)?);
        if word(self.cache, at)? != MAGIC || count > MAX_SECTIONS {
            return None;
        }
        let directory = self.shift.place(at)?;
        let (mut kept, mut has_names) = (0, false);
        for number in 0..count {
            let section = self.cache.get(at + SIZES.0 + number * SIZES.1..)?.get(..SIZES.1)?;
            let (tag, length) = (word(section, 0)?, size(word(section, 12)?));
            let from = self.place(word(section, 8)?)?;
            let contents = self.cache.get(from..)?.get(..length)?;
            let to = self.shift.place(from)?;
            if tag == HARDWARE {
                if std::mem::replace(&mut has_names, true) || length > MAX_NAMES * 4 {
                    return None;
                }
                self.rewrite_names(contents, bytes.get_mut(to..)?)?;
            }
            if [GENERATOR, HARDWARE].contains(&tag) {
                let entry = directory + SIZES.0 + kept * SIZES.1;
                bytes.get_mut(entry..)?.get_mut(..SIZES.1)?.copy_from_slice(section);
                set_word(bytes, entry + 8, short(to).ok()?);
                kept += 1;
            }
        }
        set_word(bytes, directory + 4, short(kept).ok()?);
        set_word(bytes, 32, short(directory).ok()?);
        Some(())
    }

    /// The place in the cache of what is at `offset` in the file; `None` when it is not behind the strings.
    fn place(&self, offset: u32) -> Option<usize> {
        size(offset).checked_sub(self.before).filter(|at| *at >= self.strings.cache.len())
    }

    /// Writes the offsets of names, which are `contents`, to the beginning of `bytes`.
    fn rewrite_names(&self, contents: &[u8], bytes: &mut [u8]) -> Option<()> {
        for (number, offset) in contents.chunks(4).enumerate() {
            let offset = word(offset, 0)?;
            self.strings.text(offset, MAX_NAME)?;
            set_word(bytes, number * 4, self.shift.offset(offset).ok()?);
        }
        Some(())
    }
}
