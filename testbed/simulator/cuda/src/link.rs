//! The driver's linker. It joins the PTX among its inputs. It cannot parse machine code and keeps it only if
//! there is no PTX. It leaves libraries out.

use std::ffi::c_char;
use std::sync::Mutex;

use crate::abi::{Code, Handle, In, Out, Result, bytes_at};
use crate::driver::{driver, locked};
use crate::registry::Registry;

/// CUjitInputType: PTX.
const PTX: u32 = 1;
const LIBRARY: u32 = 4;
const KINDS: u32 = 6;

#[derive(Default)]
struct Inputs {
    /// All PTX so far, and the image once the link is complete.
    text: Vec<u8>,
    /// The first input of machine code, used if there is no PTX.
    code: Vec<u8>,
}

#[derive(Default)]
struct Linking {
    inputs: Mutex<Inputs>,
}

/// All links that were started and not destroyed.
#[derive(Default)]
pub struct Links {
    registry: Registry<Linking>,
}

impl Inputs {
    fn add(&mut self, kind: u32, data: &[u8]) -> Result {
        match kind {
            PTX => self.join(data),
            LIBRARY => {}
            KINDS.. => return Err(Code::INVALID_VALUE),
            _ if self.code.is_empty() => self.code.extend_from_slice(data),
            _ => {}
        }
        Ok(())
    }

    /// Adds PTX without its trailing zeros; `complete` adds one zero for all.
    fn join(&mut self, text: &[u8]) {
        let end = text.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        if !self.text.is_empty() {
            self.text.push(b'\n');
        }
        self.text.extend_from_slice(&text[..end]);
    }

    fn complete(&mut self) -> Result<&[u8]> {
        if self.text.is_empty() {
            return if self.code.is_empty() { Err(Code::INVALID_IMAGE) } else { Ok(&self.code) };
        }
        if self.text.last() != Some(&0) {
            self.text.push(0);
        }
        Ok(&self.text)
    }
}

fn append(state: Handle, kind: u32, data: &[u8]) -> Result {
    let linking = driver()?.links.registry.get(state)?;
    locked(&linking.inputs).add(kind, data)
}

fn create(out: Out<Handle>) -> Result {
    out.given()?;
    out.set(driver()?.links.registry.add(Linking::default()))
}

exports! {
    fn cuLinkCreate_v2 also cuLinkCreate (_count: u32, _options: In<u32>, _values: In<usize>, out: Out<Handle>) {
        create(out)
    }

    fn cuLinkAddData_v2 also cuLinkAddData (
        state: Handle, kind: u32, data: u64, length: usize, _name: In<c_char>, _count: u32, _options: In<u32>,
        _values: In<usize>,
    ) {
        append(state, kind, &bytes_at(data, length)?)
    }

    fn cuLinkAddFile_v2 also cuLinkAddFile
    (state: Handle, kind: u32, path: In<c_char>, _count: u32, _options: In<u32>, _values: In<usize>) {
        append(state, kind, &std::fs::read(path.text()?).map_err(|_| Code::FILE_NOT_FOUND)?)
    }

    fn cuLinkComplete(state: Handle, image: Out<*const u8>, length: Out<usize>) {
        let linking = driver()?.links.registry.get(state)?;
        let mut inputs = locked(&linking.inputs);
        let bytes = inputs.complete()?;
        length.set_if_given(bytes.len());
        image.set(bytes.as_ptr())
    }

    fn cuLinkDestroy(state: Handle) {
        driver()?.links.registry.remove(state).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_joined_and_other_inputs_stand_alone() {
        const ELF: &[u8] = b"\x7fELF\0\0";
        for (inputs, want) in [
            (&[(PTX, &b"a\0\0"[..]), (PTX, b"b")][..], Ok(&b"a\nb\0"[..])),
            (&[(PTX, b"a"), (LIBRARY, b"!<arch>\n")], Ok(b"a\0")),
            (&[(0, ELF), (PTX, b"a")], Ok(b"a\0")),
            (&[(0, ELF), (3, b"object")], Ok(ELF)),
            (&[(LIBRARY, b"!<arch>\n")], Err(Code::INVALID_IMAGE)),
            (&[], Err(Code::INVALID_IMAGE)),
        ] {
            let mut all = Inputs::default();
            inputs.iter().for_each(|(kind, data)| all.add(*kind, data).expect("a kind of input"));
            assert_eq!(all.complete(), want, "{inputs:?}");
        }
        assert_eq!(Inputs::default().add(KINDS, b""), Err(Code::INVALID_VALUE));
    }
}
