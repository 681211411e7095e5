//! Reads the ELF interpreter (PT_INTERP) of a program, mostly the dynamic loader. The kernel starts the
//! program with it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use object::elf::{PT_INTERP, ProgramHeader64};
use object::pod::slice_from_all_bytes;
use object::read::elf::FileHeader;

use super::{Header, LE};

/// Limit on the size of the program headers, in bytes. A program has about 15 headers of 56 bytes.
const MAX_HEADERS: u64 = 64 << 10;
/// The kernel's limit on a path in bytes, with the closing NUL.
const PATH_MAX: u64 = 4096;

/// The absolute path of the interpreter of an ELF file. `None` if the file has none, for example a static
/// program.
///
/// # Errors
/// When the file cannot be read, or is not a 64-bit little-endian ELF file with valid program headers.
pub fn interpreter(file: &File) -> io::Result<Option<PathBuf>> {
    let invalid = || io::Error::from(ErrorKind::InvalidData);
    let head = part(file, 0, size_of::<Header>() as u64, u64::MAX)?;
    let header = Header::parse(head.as_slice()).map_err(|_| invalid())?;
    let size = u64::from(header.e_phentsize(LE)) * u64::from(header.e_phnum(LE));
    let headers = part(file, header.e_phoff(LE), size, MAX_HEADERS)?;
    let headers: &[ProgramHeader64<_>] = slice_from_all_bytes(&headers).map_err(|()| invalid())?;
    let Some(named) = headers.iter().find(|header| header.p_type.get(LE) == PT_INTERP) else {
        return Ok(None);
    };
    let text = part(file, named.p_offset.get(LE), named.p_filesz.get(LE), PATH_MAX)?;
    let path = text.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(Some(Path::new(OsStr::from_bytes(path)).to_path_buf()).filter(|path| path.is_absolute()))
}

/// Reads `size` bytes at the offset `at`, at most `most` of them.
fn part(file: &File, at: u64, size: u64, most: u64) -> io::Result<Vec<u8>> {
    let size = Some(size).filter(|size| *size <= most).and_then(|size| usize::try_from(size).ok());
    let mut bytes = vec![0; size.ok_or(ErrorKind::InvalidData)?];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// Builds a program from C with these additional compiler arguments.
    fn program(folder: &Path, arguments: &[&str]) -> PathBuf {
        let (source, path) = (folder.join("source.c"), folder.join("program"));
        fs::write(&source, "int main(void) { return 0; }").unwrap();
        let mut compiler = Command::new("cc");
        assert!(compiler.args(arguments).arg("-o").arg(&path).arg(&source).status().unwrap().success());
        path
    }

    #[test]
    fn a_program_names_the_interpreter_that_it_was_linked_with() {
        let folder = tempfile::tempdir().unwrap();
        let own = "/usr/local/nvidia/glibc/ld-linux-x86-64.so.2";
        for (arguments, want) in [
            (&[&*format!("-Wl,--dynamic-linker={own}")][..], Some(own)),
            (&["-no-pie", "-Wl,--dynamic-linker=/lib/ld"], Some("/lib/ld")),
            (&["-Wl,--dynamic-linker=lib/ld"], None),
            (&["-static"], None),
        ] {
            let file = File::open(program(folder.path(), arguments)).unwrap();
            assert_eq!(interpreter(&file).unwrap(), want.map(PathBuf::from), "{arguments:?}");
        }
    }

    #[test]
    fn a_cut_or_damaged_program_is_refused_or_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = fs::read(program(folder.path(), &[])).unwrap();
        let path = folder.path().join("damaged");
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            interpreter(&File::open(&path).unwrap())
        };
        for text in [&b""[..], b"#!/bin/sh\nexit 0\n", &bytes[..63], &bytes[..64]] {
            assert!(read(text).is_err(), "{} bytes", text.len());
        }
        for at in 0..1024 {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = bytes[..4096].to_vec();
                damaged[at] = value;
                let _ = read(&damaged);
            }
        }
    }
}
