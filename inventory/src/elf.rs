//! The names of a shared library: taking some away, and telling linkers of more than the loader finds.
//!
//! The loader looks names up through the program headers, a linker reads the section headers and nothing else. One
//! file can therefore offer a program that is *linked* every name of the driver, while a program that *runs* finds only
//! what is intercepted, and everything else in the driver itself: under its own address, or not at all.

use std::collections::BTreeMap;
use std::ops::Range;

use object::elf::{
    ELF_NOTE_GNU, ELFCLASS64, ELFDATA2LSB, ELFMAG, EM_AARCH64, EM_X86_64, FileHeader64, NT_GNU_BUILD_ID,
    SHF_EXECINSTR, SHN_UNDEF, SHT_DYNSYM, STB_LOCAL, STT_FUNC, STT_GNU_IFUNC, SectionHeader64, Sym64,
};
use object::pod::{bytes_of, bytes_of_slice, from_bytes_mut};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym, SymbolTable};
use object::{LittleEndian, U16, U32, U64};

const LE: LittleEndian = LittleEndian;
type Header = FileHeader64<LittleEndian>;
type Symbol = Sym64<LittleEndian>;
type Section = SectionHeader64<LittleEndian>;

/// How much of a file [`is_for_this_machine`] wants to see.
pub const HEADER_BYTES: usize = 20;

/// Whether a file that begins with `header` is an ELF file for this kind of machine.
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

/// How much of a file [`build_id`] wants to see: linkers put the notes first.
pub const BUILD_ID_BYTES: usize = 4096;

/// What the linker named an ELF file that begins with `head` by its contents; `None` where it did not, or not so early in
/// the file.
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
    /// No 64-bit little-endian ELF file, or one that is cut off.
    #[error("not a readable shared library of a 64-bit machine")]
    Format(#[from] object::read::Error),
    /// Section headers or the table of dynamic symbols were stripped.
    #[error("no dynamic symbol table")]
    NoSymbols,
    /// No code, or more of something than the format can count.
    #[error("no code, or more names or sections than fit")]
    Shape,
}

/// What the section headers of a library tell.
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

    /// Every name that others can link, and its symbol.
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

/// Makes every name of the shared library `elf` for which `absent` holds undefined; says how many. The loader passes over
/// an undefined name, so its hash tables need no change.
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

/// The interception library `ours` as it must look in front of `driver`. A name of ours that the driver lacks is
/// undefined; a linker sees all functions of the driver, and binds a program to them that finds them at run time in
/// the driver itself.
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

/// The symbols that a linker shall see, and their strings: what `view` needs, what it defines and `driver` has, and the
/// other functions of `driver`.
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
    // The old strings stay in front: linkers look SONAME and NEEDED up in the strings of whatever symbols they read.
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

/// The first section with code, where linkers are told that the driver's functions lie: they only ask whether it exists.
fn code(view: &View<'_>) -> Result<(U16<LittleEndian>, U64<LittleEndian>), ElfError> {
    let mut sections = view.sections.enumerate();
    let code = sections.find(|(_, section)| section.sh_flags(LE) & u64::from(SHF_EXECINSTR) != 0);
    let (index, section) = code.ok_or(ElfError::Shape)?;
    let index = u16::try_from(index.0).map_err(|_| ElfError::Shape)?;
    Ok((U16::new(LE, index), section.sh_addr))
}

/// Appends `symbols` to the library `elf`, which has the sections of `view`, and section headers that lead to them.
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

/// Puts `bytes` behind the library, where a table may begin; where they are.
fn append(elf: &mut Vec<u8>, bytes: &[u8]) -> Range<u64> {
    elf.resize(elf.len().next_multiple_of(8), 0);
    let start = elf.len() as u64;
    elf.extend_from_slice(bytes);
    start..elf.len() as u64
}

/// `section` at another place of the file, which no program header loads.
fn moved(section: &Section, place: Range<u64>) -> Section {
    let none = U64::new(LE, 0);
    let (at, size) = (U64::new(LE, place.start), U64::new(LE, place.end - place.start));
    Section { sh_offset: at, sh_size: size, sh_addr: none, sh_flags: none, ..*section }
}

#[cfg(test)]
mod tests;
