//! The cache of glibc's loader, `/etc/ld.so.cache`: adds libraries to it. Bytes in, bytes out.
//!
//! The format is that of glibc's `sysdeps/generic/dl-cache.h`, version 1.1: a header, the entries in
//! descending order of their names, the strings, then an optional directory of extensions. All offsets count
//! from the header. glibc before 2.32 wrote an older cache before that header, which no loader since 2.2
//! reads; it is dropped.
//!
//! The cache comes from an image. Each offset in it is checked, and the work is linear in its size, which the
//! caller bounds.

use std::cmp::Ordering;
use std::ffi::{CStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

mod extension;

use extension::Extensions;

/// The first bytes of the old format.
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
/// Bytes before the entries of the old format, and of each of its entries.
const OLD_SIZES: (usize, usize) = (16, 12);
/// The first bytes of the present format.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Bytes before the entries. The number of entries, the length of the strings, the byte order and the offset
/// of the extensions are at 20, 24, 28 and 32.
const HEADER: usize = 48;
/// Bytes of an entry: flags, offset of the name, offset of the path, a word that nothing uses, and 64 bits of
/// required hardware.
const ENTRY: usize = 24;
/// Alignment of the header and of the extensions.
const ALIGNMENT: usize = 8;
/// The two low bits of byte 28: 0 in caches before glibc 2.33, and 2 for little-endian.
const BYTE_ORDER: [u8; 2] = [0, 2];

/// Flags of a glibc library of this machine's architecture (`FLAG_ELF_LIBC6` with `FLAG_X8664_LIB64` or
/// `FLAG_AARCH64_LIB64`).
const FLAGS: u32 = if cfg!(target_arch = "aarch64") { 0x0a03 } else { 0x0303 };
/// Flags of a library of any C library (`FLAG_ELF`). The loader takes it, too.
const ANY_FLAGS: u32 = 1;

/// Bytes of a library's name: it is the name of a file.
const MAX_NAME: usize = 255;
/// Bytes of a library's path.
const MAX_PATH: usize = 4096;

/// Why a cache cannot take further libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoaderCacheError {
    /// Neither the present format, nor the old one with the present one behind it.
    #[error("it is no cache of glibc's format 1.1")]
    Format,
    /// It was made on a machine whose numbers have another byte order.
    #[error("it has the byte order of another machine")]
    ByteOrder,
    /// Its entries or strings end behind its end.
    #[error("it is cut off")]
    CutOff,
    /// A name or a path begins or ends outside of the strings, or is too long.
    #[error("entry {0} leads out of its strings")]
    Entry(usize),
    /// The loader could not find this entry by its binary search.
    #[error("entry {0} is not in the loader's order")]
    Order(usize),
    /// It lists no library of this machine's architecture.
    #[error("it lists no library of this machine's architecture")]
    Architecture,
    /// The directory of extensions, or what it names, lies outside of the file.
    #[error("its extensions are malformed")]
    Extension,
    /// A library's path is no text of a sane length.
    #[error("a library's path does not fit in")]
    Path,
}

/// An entry of a cache.
#[derive(Clone, Copy, Debug)]
struct Entry<'a> {
    flags: u32,
    name: &'a [u8],
    /// Offsets of name and path.
    key: u32,
    value: u32,
    /// The last twelve bytes: the unused word and the required hardware.
    rest: [u8; 12],
}

/// The `cache` with each of `libraries` (paths in the container) listed under the name of its file, in place
/// of what is listed under that name. `None` when the cache lists them so already.
///
/// # Errors
/// When the cache is malformed, or of another machine.
pub fn with_libraries(cache: &[u8], libraries: &[PathBuf]) -> Result<Option<Vec<u8>>, LoaderCacheError> {
    let begin = present_format(cache)?;
    let listed = Listed::parse(cache, begin)?;
    let libraries = by_name(libraries)?;
    if libraries.iter().all(|(name, path)| listed.has_just(name, path)) {
        return Ok(None);
    }
    listed.with(&libraries).map(Some)
}

/// Where the header of the present format is.
fn present_format(cache: &[u8]) -> Result<usize, LoaderCacheError> {
    if cache.starts_with(MAGIC) {
        return Ok(0);
    }
    let old = cache.starts_with(OLD_MAGIC).then(|| word(cache, 12)).flatten();
    let end = old.and_then(|count| size(count).checked_mul(OLD_SIZES.1)?.checked_add(OLD_SIZES.0));
    let begin = end.and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
    let is_present = |begin: &usize| cache.get(*begin..).is_some_and(|cache| cache.starts_with(MAGIC));
    begin.filter(is_present).ok_or(LoaderCacheError::Format)
}

/// The libraries by name, the greatest name first, each name once.
fn by_name(libraries: &[PathBuf]) -> Result<Vec<(&[u8], &Path)>, LoaderCacheError> {
    let named = libraries.iter().map(|path| {
        let name = path.file_name().ok_or(LoaderCacheError::Path)?.as_bytes();
        let bytes = path.as_os_str().as_bytes();
        let fits = name.len() <= MAX_NAME && bytes.len() <= MAX_PATH && bytes.ends_with(name);
        if fits && !bytes.contains(&0) { Ok((name, path.as_path())) } else { Err(LoaderCacheError::Path) }
    });
    let mut named: Vec<_> = named.collect::<Result<_, _>>()?;
    named.sort_by(|one, other| compare(other.0, one.0));
    named.dedup_by(|one, other| compare(one.0, other.0).is_eq());
    Ok(named)
}

/// A cache whose header and entries are known to be sound.
struct Listed<'a> {
    /// The cache from the header of the present format on.
    cache: &'a [u8],
    /// Bytes of the older cache before that.
    before: usize,
    entries: Vec<Entry<'a>>,
    strings: Strings<'a>,
}

/// The strings of a cache.
#[derive(Clone, Copy)]
struct Strings<'a> {
    /// The cache up to the end of its strings.
    cache: &'a [u8],
    /// Where they begin.
    begin: usize,
}

impl<'a> Strings<'a> {
    /// The text at `offset`; `None` when that lies outside, or the text is longer than `most` bytes.
    fn text(self, offset: u32, most: usize) -> Option<&'a [u8]> {
        let at = size(offset);
        let end = at.saturating_add(most + 1).min(self.cache.len());
        let bytes = self.cache.get(at..end).filter(|_| at >= self.begin)?;
        Some(CStr::from_bytes_until_nul(bytes).ok()?.to_bytes())
    }
}

impl<'a> Listed<'a> {
    /// Reads the cache whose header is at the offset `before` of the file.
    fn parse(file: &'a [u8], before: usize) -> Result<Self, LoaderCacheError> {
        let cache = file.get(before..).ok_or(LoaderCacheError::CutOff)?;
        let header = |at| word(cache, at).map(size).ok_or(LoaderCacheError::CutOff);
        let (count, length) = (header(20)?, header(24)?);
        if !cache.get(28).is_some_and(|flags| BYTE_ORDER.contains(&(flags & 3))) {
            return Err(LoaderCacheError::ByteOrder);
        }
        let begin = count.checked_mul(ENTRY).and_then(|bytes| bytes.checked_add(HEADER));
        let begin = begin.ok_or(LoaderCacheError::CutOff)?;
        let end = begin.checked_add(length).ok_or(LoaderCacheError::CutOff)?;
        let strings = Strings { cache: cache.get(..end).ok_or(LoaderCacheError::CutOff)?, begin };
        let table = cache.get(HEADER..begin).ok_or(LoaderCacheError::CutOff)?;
        let entries = table.chunks_exact(ENTRY).enumerate();
        let entries = entries
            .map(|(number, entry)| Entry::parse(entry, strings).ok_or(LoaderCacheError::Entry(number)));
        let entries: Vec<Entry> = entries.collect::<Result<_, _>>()?;
        let is_behind =
            |pair: &[Entry]| matches!(pair, [one, other] if compare(one.name, other.name).is_lt());
        if let Some(number) = entries.windows(2).position(is_behind) {
            return Err(LoaderCacheError::Order(number + 1));
        }
        if !entries.iter().any(|entry| entry.flags == FLAGS) {
            return Err(LoaderCacheError::Architecture);
        }
        Ok(Self { cache, before, entries, strings })
    }

    /// Whether the library is listed under the name, and nothing else that the loader would take.
    fn has_just(&self, name: &[u8], path: &Path) -> bool {
        let mut same = self.entries.iter().filter(|entry| entry.competes_with(name));
        let is_it = |entry: &Entry| {
            let listed = self.strings.text(entry.value, MAX_PATH);
            let rest = (entry.name == name, entry.flags, entry.rest);
            rest == (true, FLAGS, [0; 12]) && listed == Some(path.as_os_str().as_bytes())
        };
        same.next().is_some_and(is_it) && same.next().is_none()
    }

    /// Lists `libraries`, which have the loader's order. Their strings come before all others, so that
    /// everything behind the entries moves by the same number of bytes.
    fn with(&self, libraries: &[(&[u8], &Path)]) -> Result<Vec<u8>, LoaderCacheError> {
        let is_replaced = |entry: &Entry| libraries.iter().any(|(name, _)| entry.competes_with(name));
        let mut entries: Vec<Entry> =
            self.entries.iter().filter(|entry| !is_replaced(entry)).copied().collect();
        let begin = HEADER + (entries.len() + libraries.len()) * ENTRY;
        let added: usize = libraries.iter().map(|(_, path)| path.as_os_str().len() + 1).sum();
        let added = added.next_multiple_of(ALIGNMENT);
        let shift = Shift { from: self.strings.begin, to: begin + added };
        for entry in &mut entries {
            (entry.key, entry.value) = (shift.offset(entry.key)?, shift.offset(entry.value)?);
        }
        let mut block = Vec::with_capacity(added);
        for (name, path) in libraries {
            let entry = Entry::new(name, path, begin + block.len())?;
            block.extend_from_slice(path.as_os_str().as_bytes());
            block.push(0);
            let at = entries.partition_point(|other| other.order(&entry).is_lt());
            entries.insert(at, entry);
        }
        block.resize(added, 0);
        let mut bytes = self.header(entries.len(), added)?;
        entries.iter().for_each(|entry| entry.write(&mut bytes));
        bytes.extend(block);
        bytes.extend_from_slice(self.cache.get(self.strings.begin..).unwrap_or_default());
        Extensions { cache: self.cache, before: self.before, strings: self.strings, shift }
            .write(&mut bytes)?;
        Ok(bytes)
    }

    /// The header for `count` entries and `added` further bytes of strings.
    fn header(&self, count: usize, added: usize) -> Result<Vec<u8>, LoaderCacheError> {
        let mut header = self.cache.get(..HEADER).unwrap_or_default().to_vec();
        let length = word(&header, 24).map_or(0, size) + added;
        set_word(&mut header, 20, short(count)?);
        set_word(&mut header, 24, short(length)?);
        Ok(header)
    }
}

impl<'a> Entry<'a> {
    /// Reads the bytes of an entry with these `strings`.
    fn parse(bytes: &[u8], strings: Strings<'a>) -> Option<Self> {
        let (flags, key, value) = (word(bytes, 0)?, word(bytes, 4)?, word(bytes, 8)?);
        strings.text(value, MAX_PATH)?;
        let name = strings.text(key, MAX_NAME)?;
        Some(Self { flags, name, key, value, rest: bytes.get(12..)?.try_into().ok()? })
    }

    /// The entry of a library whose path will be at the offset `at`. The name is the end of the path.
    fn new(name: &'a [u8], path: &Path, at: usize) -> Result<Self, LoaderCacheError> {
        let key = at + path.as_os_str().len() - name.len();
        Ok(Self { flags: FLAGS, name, key: short(key)?, value: short(at)?, rest: [0; 12] })
    }

    /// Whether the loader could take this entry for the library `name`.
    fn competes_with(&self, name: &[u8]) -> bool {
        [FLAGS, ANY_FLAGS].contains(&self.flags) && compare(self.name, name).is_eq()
    }

    /// The order of entries: the greatest name first, then the greatest flags (`compare` of glibc's
    /// elf/cache.c).
    fn order(&self, other: &Self) -> Ordering {
        compare(other.name, self.name).then(other.flags.cmp(&self.flags))
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        [self.flags, self.key, self.value].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(self.rest);
    }
}

/// Where the strings were and where they go, with all that lies behind them.
#[derive(Clone, Copy)]
struct Shift {
    from: usize,
    to: usize,
}

impl Shift {
    /// The new value of an offset into the strings or behind them.
    fn offset(self, offset: u32) -> Result<u32, LoaderCacheError> {
        self.place(size(offset)).and_then(|place| short(place).ok()).ok_or(LoaderCacheError::CutOff)
    }

    /// As [`Shift::offset`], of a place in the cache.
    fn place(self, at: usize) -> Option<usize> {
        at.checked_sub(self.from)?.checked_add(self.to)
    }
}

/// The loader's order of names (`_dl_cache_libcmp` of glibc's elf/dl-cache.c): digits count as a number.
fn compare(one: &[u8], other: &[u8]) -> Ordering {
    let (mut one, mut other) = (one.iter().copied().peekable(), other.iter().copied().peekable());
    while let Some(byte) = one.peek().copied() {
        let against = other.peek().copied().unwrap_or_default();
        match (byte.is_ascii_digit(), against.is_ascii_digit()) {
            (true, true) => {
                let (number, other_number) = (number(&mut one), number(&mut other));
                if number != other_number {
                    return number.wrapping_sub(other_number).cmp(&0);
                }
            }
            (true, false) => return Ordering::Greater,
            (false, true) => return Ordering::Less,
            (false, false) if byte != against => return signed(byte).cmp(&signed(against)),
            (false, false) => {
                one.next();
                other.next();
            }
        }
    }
    0.cmp(&signed(other.peek().copied().unwrap_or_default()))
}

/// The number whose digits are next. One that is too long wraps, as in the loader.
fn number(bytes: &mut std::iter::Peekable<impl Iterator<Item = u8>>) -> i32 {
    let mut number = 0i32;
    while let Some(digit) = bytes.next_if(u8::is_ascii_digit) {
        number = number.wrapping_mul(10).wrapping_add(i32::from(digit - b'0'));
    }
    number
}

/// The byte as the C compiler of this architecture takes a `char`.
fn signed(byte: u8) -> i32 {
    i32::from(c_char::from_ne_bytes([byte]))
}

/// The little-endian number at `at`.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

fn set_word(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(word) = bytes.get_mut(at..at.saturating_add(4)) {
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn size(word: u32) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

fn short(size: usize) -> Result<u32, LoaderCacheError> {
    u32::try_from(size).map_err(|_| LoaderCacheError::CutOff)
}

#[cfg(test)]
pub(crate) mod tests;
