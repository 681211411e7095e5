//! Finds the real driver's functions by name: finds the loaded object at the private path and reads its hash
//! tables. It uses neither `dlopen` nor `dlsym`: either could find our own exports.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ops::Range;

/// The part of `struct dl_phdr_info` that is the same in every C library.
#[repr(C)]
struct Object {
    base: usize,
    name: *const c_char,
    headers: *const ProgramHeader,
    header_count: u16,
}

#[repr(C)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: u64,
    address: usize,
    physical: u64,
    file_size: u64,
    memory_size: u64,
    align: u64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
/// Bytes of a page of memory.
const PAGE: usize = 4096;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;
/// Symbol type of a function. A function that the loader chooses (STT_GNU_IFUNC) would need a call to
/// resolve; no driver library has one.
const STT_FUNC: u8 = 2;

type Visit = unsafe extern "C" fn(*mut Object, usize, *mut c_void) -> c_int;

unsafe extern "C" {
    fn dl_iterate_phdr(visit: Visit, data: *mut c_void) -> c_int;
}

/// A loaded library, by its dynamic section.
pub struct Library {
    base: usize,
    /// Addresses at which its first part is mapped.
    mapped: Range<usize>,
    strings: usize,
    symbols: usize,
    gnu_hash: usize,
    hash: usize,
}

struct Search<'a> {
    path: &'a [u8],
    found: Option<Library>,
}

impl Library {
    /// The library that the loader opened under exactly the name `path`.
    pub fn loaded(path: &str) -> Option<Self> {
        let mut search = Search { path: path.as_bytes(), found: None };
        // SAFETY: `visit` gets `search` back as its data, and the call ends before `search` does.
        unsafe { dl_iterate_phdr(visit, core::ptr::from_mut(&mut search).cast()) };
        search.found
    }

    /// Addresses at which its first part is mapped, in whole pages.
    pub fn mapped(&self) -> Range<usize> {
        self.mapped.clone()
    }

    /// The address of the function `name`.
    pub fn function(&self, name: &str) -> Option<usize> {
        let found = if self.gnu_hash != 0 { self.by_gnu_hash(name) } else { self.by_hash(name) };
        found.map(|symbol| self.base.wrapping_add(symbol.value))
    }

    fn word(&self, address: usize) -> u32 {
        // SAFETY: the address lies in a hash table of a loaded, never unloaded library: we depend on it.
        unsafe { core::ptr::with_exposed_provenance::<u32>(address).read() }
    }

    /// The symbol `index`, if the library defines it and it is a function of this name.
    fn defined(&self, index: u32, name: &str) -> Option<&'static Symbol> {
        let address = self.symbols + index as usize * size_of::<Symbol>();
        // SAFETY: the hash table gave the index, so the symbol table has the entry; it is never unmapped.
        let symbol: &'static Symbol = unsafe { &*core::ptr::with_exposed_provenance(address) };
        let text = core::ptr::with_exposed_provenance::<c_char>(self.strings + symbol.name as usize);
        // SAFETY: names of the string table end in a zero byte.
        let text = unsafe { CStr::from_ptr(text) };
        let wanted = symbol.section != 0 && symbol.info & 0xf == STT_FUNC;
        (wanted && text.to_bytes() == name.as_bytes()).then_some(symbol)
    }

    fn by_hash(&self, name: &str) -> Option<&'static Symbol> {
        if self.hash == 0 {
            return None;
        }
        let mut hash = 0u32;
        for byte in name.bytes() {
            hash = (hash << 4).wrapping_add(u32::from(byte));
            hash ^= hash >> 24 & 0xf0;
            hash &= 0x0fff_ffff;
        }
        let buckets = self.word(self.hash);
        let chains = self.hash + 8 + buckets as usize * 4;
        let bucket = hash.checked_rem(buckets)?;
        let mut index = self.word(self.hash + 8 + bucket as usize * 4);
        while index != 0 {
            if let Some(symbol) = self.defined(index, name) {
                return Some(symbol);
            }
            index = self.word(chains + index as usize * 4);
        }
        None
    }

    fn by_gnu_hash(&self, name: &str) -> Option<&'static Symbol> {
        let hash =
            name.bytes().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        let [buckets, first, bloom] = [0, 4, 8].map(|offset| self.word(self.gnu_hash + offset));
        let table = self.gnu_hash + 16 + bloom as usize * 8;
        let chains = table + buckets as usize * 4;
        let bucket = hash.checked_rem(buckets)?;
        let mut index = self.word(table + bucket as usize * 4);
        if index < first {
            return None;
        }
        loop {
            let value = self.word(chains + (index - first) as usize * 4);
            if value | 1 == hash | 1
                && let Some(symbol) = self.defined(index, name)
            {
                return Some(symbol);
            }
            if value & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}

/// # Safety
/// Called by `dl_iterate_phdr` with the `Search` of [`Library::loaded`].
unsafe extern "C" fn visit(object: *mut Object, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description.
    let object = unsafe { &*object };
    // SAFETY: the data that `loaded` passed; nothing else borrows it in the meantime.
    let search = unsafe { &mut *search.cast::<Search<'_>>() };
    if object.name.is_null() {
        return 0;
    }
    // SAFETY: the loader's names are C strings.
    let name = unsafe { CStr::from_ptr(object.name) };
    if name.to_bytes() != search.path {
        return 0;
    }
    search.found = library(object);
    1
}

fn library(object: &Object) -> Option<Library> {
    // SAFETY: the loader passes the object's own program headers.
    let headers = unsafe { core::slice::from_raw_parts(object.headers, usize::from(object.header_count)) };
    let dynamic = headers.iter().find(|header| header.kind == PT_DYNAMIC)?;
    let mut at = object.base.wrapping_add(dynamic.address);
    let first = headers.iter().find(|header| header.kind == PT_LOAD)?;
    let begin = object.base.wrapping_add(first.address);
    let end = begin.wrapping_add(usize::try_from(first.file_size).ok()?);
    let mapped = begin & !(PAGE - 1)..end.checked_next_multiple_of(PAGE)?;
    let mut library = Library { base: object.base, mapped, strings: 0, symbols: 0, gnu_hash: 0, hash: 0 };
    loop {
        // SAFETY: the dynamic section is a list of pairs that ends with tag 0.
        let [tag, value] = unsafe { core::ptr::with_exposed_provenance::<[usize; 2]>(at).read() };
        // glibc has already added the base to these values; other loaders leave the values from the file.
        let address = if value < object.base { object.base.wrapping_add(value) } else { value };
        match tag {
            0 => break,
            DT_HASH => library.hash = address,
            DT_STRTAB => library.strings = address,
            DT_SYMTAB => library.symbols = address,
            DT_GNU_HASH => library.gnu_hash = address,
            _ => {}
        }
        at += size_of::<[usize; 2]>();
    }
    (library.strings != 0 && library.symbols != 0).then_some(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library that every test process has loaded, under the loader's name for it.
    fn libc_path() -> String {
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `info` holds one Dl_info.
        assert_ne!(unsafe { libc::dladdr(libc::getpid as *const libc::c_void, info.as_mut_ptr()) }, 0);
        // SAFETY: dladdr has filled it in.
        let info = unsafe { info.assume_init() };
        // SAFETY: the loader's names are C strings.
        unsafe { CStr::from_ptr(info.dli_fname) }.to_str().unwrap().to_owned()
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the dynamic loader")]
    fn functions_of_a_loaded_library_are_found_by_name() {
        let library = Library::loaded(&libc_path()).unwrap();
        assert_eq!(library.function("getpid"), Some((libc::getpid as *const ()).addr()));
        assert_eq!(library.function("no_such_function"), None);
        assert_eq!(library.function("environ"), None, "data is not a function");
        let mapped = library.mapped();
        let range = format!("{:x}-{:x}", mapped.start, mapped.end);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.lines().any(|line| line.starts_with(&range)), "{range} in {maps}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the dynamic loader")]
    fn a_path_that_nobody_opened_is_not_found() {
        assert!(Library::loaded("/usr/lib/gpushare/driver/cuda").is_none());
    }
}
