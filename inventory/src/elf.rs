//! Edits the symbol names of a shared library: removes some, and shows linkers more names than the loader
//! finds.
//!
//! The loader finds names through the program headers, while a linker reads only the section headers. So one
//! file can offer every name of the driver to a program that is being *linked*. A program that *runs* finds
//! only the intercepted names in it. It finds all others in the driver itself, at the driver's own address,
//! or not at all.

mod interpreter;

use std::collections::BTreeMap;
use std::ops::Range;

use object::elf::{
    ELF_NOTE_GNU, ELFCLASS64, ELFDATA2LSB, ELFMAG, EM_AARCH64, EM_X86_64, FileHeader64, NT_GNU_BUILD_ID,
    SHF_EXECINSTR, SHN_UNDEF, SHT_DYNSYM, STB_LOCAL, STT_FUNC, STT_GNU_IFUNC, SectionHeader64, Sym64,
};
use object::pod::{bytes_of, bytes_of_slice, from_bytes_mut};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym, SymbolTable};
use object::{LittleEndian, U16, U32, U64};

pub use interpreter::interpreter;

const LE: LittleEndian = LittleEndian;
type Header = FileHeader64<LittleEndian>;
type Symbol = Sym64<LittleEndian>;
type Section = SectionHeader64<LittleEndian>;

/// Bytes from the beginning of a file that [`is_for_this_machine`] needs.
pub const HEADER_BYTES: usize = 20;

/// Whether a file that begins with `header` is a 64-bit little-endian ELF file for this processor.
pub fn is_for_this_machine(header: &[u8; HEADER_BYTES]) -> bool {
    let machine = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };
    let [magic @ .., low, high] = header;
    magic.starts_with(&ELFMAG)
        && magic.get(EI_CLASS) == Some(&ELFCLASS64)
        && magic.get(EI_DATA) == Some(&ELFDATA2LSB)
        && u16::from_le_bytes([*low, *high]) == machine
}

const EI_CLASS: usize = 4;
const EI_DATA: usize = 5;

/// Bytes from the beginning of a file that [`build_id`] needs. Linkers put the notes first.
pub const BUILD_ID_BYTES: usize = 4096;

/// The build id that the linker derived from the contents of an ELF file; `head` is the file's beginning.
/// `None` if the file has none, or has it later in the file.
pub fn build_id(head: &[u8]) -> Option<Vec<u8>> {
    let segments = Header::parse(head).ok()?.program_headers(LE, head).ok()?;
    let mut notes = segments.iter().filter_map(|segment| segment.notes(LE, head).ok()?);
    notes.find_map(|mut notes| {
        while let Ok(Some(note)) = notes.next() {
            if note.name() == ELF_NOTE_GNU && note.n_type(LE) == NT_GNU_BUILD_ID {
                return Some(note.desc().to_vec());
            }
        }
        None
    })
}

/// Why a library's names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file is not a 64-bit little-endian ELF file, or it is truncated.
    #[error("not a readable shared library of a 64-bit machine")]
    Format(#[from] object::read::Error),
    /// The section headers or the dynamic symbol table were stripped.
    #[error("no dynamic symbol table")]
    NoSymbols,
    /// The library has no code, or more names or sections than the format can count.
    #[error("no code, or more names or sections than fit")]
    Shape,
}

/// A library's sections and dynamic symbols, found through its section headers.
struct View<'a> {
    elf: &'a [u8],
    sections: SectionTable<'a, Header>,
    symbols: SymbolTable<'a, Header>,
}

impl<'a> View<'a> {
    fn read(elf: &'a [u8]) -> Result<Self, ElfError> {
        let sections = Header::parse(elf)?.sections(LE, elf)?;
        let symbols = sections.symbols(LE, elf, SHT_DYNSYM)?;
        if symbols.is_empty() {
            return Err(ElfError::NoSymbols);
        }
        Ok(Self { elf, sections, symbols })
    }

    fn name(&self, symbol: &Symbol) -> Result<&'a [u8], ElfError> {
        Ok(symbol.name(LE, self.symbols.strings())?)
    }

    /// Returns every exported name with its symbol.
    fn exports(&self) -> Result<BTreeMap<&'a [u8], &'a Symbol>, ElfError> {
        let exported = self.symbols.iter().filter(|symbol| is_export(symbol));
        exported.map(|symbol| Ok((self.name(symbol)?, symbol))).collect()
    }
}

fn is_export(symbol: &Symbol) -> bool {
    symbol.st_shndx(LE) != SHN_UNDEF && symbol.st_bind() != STB_LOCAL
}

fn is_function(symbol: &Symbol) -> bool {
    matches!(symbol.st_type(), STT_FUNC | STT_GNU_IFUNC)
}

/// Makes every name of the shared library `elf` undefined for which `absent` returns true, and returns their
/// number. The loader skips an undefined name, so the hash tables need no change.
///
/// # Errors
/// When `elf` has no readable dynamic symbol table.
pub fn undefine(elf: &mut [u8], absent: impl Fn(&[u8]) -> bool) -> Result<usize, ElfError> {
    let view = View::read(elf)?;
    let at = usize::try_from(view.sections.section(view.symbols.section())?.sh_offset(LE));
    let at = at.map_err(|_| ElfError::Shape)?;
    let mut gone = Vec::new();
    for (index, symbol) in view.symbols.iter().enumerate() {
        if is_export(symbol) && absent(view.name(symbol)?) {
            gone.push((at + index * size_of::<Symbol>(), undefined(symbol)));
        }
    }
    for (at, symbol) in &gone {
        let place = elf.get_mut(*at..at + size_of::<Symbol>()).ok_or(ElfError::Shape)?;
        place.copy_from_slice(bytes_of(symbol));
    }
    Ok(gone.len())
}

fn undefined(symbol: &Symbol) -> Symbol {
    Symbol {
        st_shndx: U16::new(LE, SHN_UNDEF),
        st_value: U64::new(LE, 0),
        st_size: U64::new(LE, 0),
        ..*symbol
    }
}

/// Fits the interception library `ours` to `driver`. A name of `ours` that the driver lacks becomes
/// undefined. A linker sees all functions of the driver; at run time a program finds them in the driver
/// itself.
///
/// # Errors
/// When one of the two has no readable dynamic symbol table.
pub fn fit(ours: &[u8], driver: &[u8]) -> Result<Vec<u8>, ElfError> {
    let driver = View::read(driver)?.exports()?;
    let view = View::read(ours)?;
    let mut fitted = ours.to_vec();
    undefine(&mut fitted, |name| !driver.contains_key(name))?;
    let (symbols, strings) = for_linkers(&view, &driver)?;
    show(&mut fitted, &view, &symbols, &strings)?;
    Ok(fitted)
}

/// The symbols for linkers, and their strings: the needs of `view`, the names that both `view` and `driver`
/// define, and the other functions of `driver`.
fn for_linkers(
    view: &View<'_>,
    driver: &BTreeMap<&[u8], &Symbol>,
) -> Result<(Vec<Symbol>, Vec<u8>), ElfError> {
    let own = view.exports()?;
    let mut symbols = Vec::new();
    for symbol in view.symbols.iter() {
        if !is_export(symbol) || driver.contains_key(view.name(symbol)?) {
            symbols.push(*symbol);
        }
    }
    // The old strings stay at the front: linkers look up SONAME and NEEDED in the same string table as the
    // symbols.
    let strings = view.sections.section(view.symbols.string_section())?;
    let mut strings = strings.data(LE, view.elf)?.to_vec();
    let (code, address) = code(view)?;
    for (name, symbol) in
        driver.iter().filter(|(name, symbol)| is_function(symbol) && !own.contains_key(*name))
    {
        symbols.push(Symbol {
            st_name: U32::new(LE, u32::try_from(strings.len()).map_err(|_| ElfError::Shape)?),
            st_info: symbol.st_bind() << 4 | STT_FUNC,
            st_other: 0,
            st_shndx: code,
            st_value: address,
            st_size: U64::new(LE, 0),
        });
        strings.extend_from_slice(name);
        strings.push(0);
    }
    Ok((symbols, strings))
}

/// The first section with code. The driver's functions are shown in it: linkers only check that the
/// section exists.
fn code(view: &View<'_>) -> Result<(U16<LittleEndian>, U64<LittleEndian>), ElfError> {
    let mut sections = view.sections.enumerate();
    let code = sections.find(|(_, section)| section.sh_flags(LE) & u64::from(SHF_EXECINSTR) != 0);
    let (index, section) = code.ok_or(ElfError::Shape)?;
    let index = u16::try_from(index.0).map_err(|_| ElfError::Shape)?;
    Ok((U16::new(LE, index), section.sh_addr))
}

/// Appends `symbols` to the library `elf`, and section headers that point to them. `view` has the library's
/// sections.
fn show(elf: &mut Vec<u8>, view: &View<'_>, symbols: &[Symbol], strings: &[u8]) -> Result<(), ElfError> {
    let mut sections: Vec<Section> = view.sections.iter().copied().collect();
    let count = u16::try_from(sections.len() + 1).map_err(|_| ElfError::Shape)?;
    let old = *view.sections.section(view.symbols.string_section())?;
    sections.push(moved(&old, append(elf, strings)));
    let table = sections.get_mut(view.symbols.section().0).ok_or(ElfError::Shape)?;
    *table = moved(table, append(elf, bytes_of_slice(symbols)));
    table.sh_link = U32::new(LE, u32::from(count) - 1);
    let headers = append(elf, bytes_of_slice(&sections));
    let (header, _) = from_bytes_mut::<Header>(elf).map_err(|()| ElfError::Shape)?;
    header.e_shoff = U64::new(LE, headers.start);
    header.e_shnum = U16::new(LE, count);
    Ok(())
}

/// Appends `bytes` at an offset where a table may begin, and returns their range in the file.
fn append(elf: &mut Vec<u8>, bytes: &[u8]) -> Range<u64> {
    elf.resize(elf.len().next_multiple_of(8), 0);
    let start = elf.len() as u64;
    elf.extend_from_slice(bytes);
    start..elf.len() as u64
}

/// The header of `section` for another place in the file. No program header loads that place.
fn moved(section: &Section, place: Range<u64>) -> Section {
    let none = U64::new(LE, 0);
    let (at, size) = (U64::new(LE, place.start), U64::new(LE, place.end - place.start));
    Section { sh_offset: at, sh_size: size, sh_addr: none, sh_flags: none, ..*section }
}

#[cfg(test)]
mod tests;
