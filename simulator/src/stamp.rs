//! Takes names out of a shared library's symbol table, so that an older driver lacks what a newer one has.
//!
//! A name whose section index is 0 is undefined, and the loader does not find it. Hash tables need no change.

use anyhow::{Context, Result, bail};

const SECTION_DYNSYM: u32 = 11;
const SYMBOL_SIZE: usize = 24;

/// Makes every name of the 64-bit ELF file `elf` for which `absent` holds undefined; says how many.
///
/// # Errors
/// When `elf` has no readable dynamic symbol table.
pub fn remove(elf: &mut [u8], absent: impl Fn(&str) -> bool) -> Result<usize> {
    if elf.get(..5) != Some(b"\x7fELF\x02") {
        bail!("not a 64-bit ELF file");
    }
    let sections = offset(elf, 0x28)?;
    let size = usize::from(half(elf, 0x3a)?);
    let count = usize::from(half(elf, 0x3c)?);
    let table = (0..count).map(|index| sections + index * size);
    let symbols = table
        .into_iter()
        .find(|&header| word(elf, header + 4).is_ok_and(|kind| kind == SECTION_DYNSYM))
        .context("no dynamic symbol table")?;
    let strings = sections + size * usize::try_from(word(elf, symbols + 40)?)?;
    let names = offset(elf, strings + 24)?;
    let (start, length) = (offset(elf, symbols + 24)?, offset(elf, symbols + 32)?);
    let mut removed = 0;
    for entry in (start..start + length).step_by(SYMBOL_SIZE) {
        let name = names + usize::try_from(word(elf, entry)?)?;
        if absent(&text(elf, name)?) && half(elf, entry + 6)? != 0 {
            elf.get_mut(entry + 6..entry + SYMBOL_SIZE).context("a symbol beyond the file")?.fill(0);
            removed += 1;
        }
    }
    Ok(removed)
}

fn bytes<const N: usize>(elf: &[u8], at: usize) -> Result<[u8; N]> {
    let found = elf.get(at..at + N).context("a table beyond the end of the file")?;
    Ok(found.try_into()?)
}

fn half(elf: &[u8], at: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(bytes(elf, at)?))
}

fn word(elf: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(bytes(elf, at)?))
}

fn offset(elf: &[u8], at: usize) -> Result<usize> {
    Ok(usize::try_from(u64::from_le_bytes(bytes(elf, at)?))?)
}

fn text(elf: &[u8], at: usize) -> Result<String> {
    let tail = elf.get(at..).context("a name beyond the end of the file")?;
    let end = tail.iter().position(|&byte| byte == 0).context("a name without end")?;
    Ok(String::from_utf8_lossy(&tail[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_elf_file_is_refused() {
        assert!(remove(&mut b"#!/bin/sh".to_vec(), |_| true).is_err());
        assert!(remove(&mut b"\x7fELF\x02".to_vec(), |_| true).is_err());
    }

    #[test]
    fn only_defined_names_are_removed_and_only_once() {
        let path = std::env::current_exe().expect("a test has a path");
        let mut elf = std::fs::read(path).expect("a test can read itself");
        assert_eq!(remove(&mut elf, |_| false).expect("readable"), 0);
        remove(&mut elf, |_| true).expect("readable");
        assert_eq!(remove(&mut elf, |_| true).expect("readable"), 0);
    }
}
