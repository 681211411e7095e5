//! The linker of the driver. It joins texts; an image that is no text is taken as it is.

use std::ffi::c_char;
use std::sync::Mutex;

use crate::abi::{Code, Handle, In, Out, Result, bytes_at};
use crate::driver::{driver, locked};
use crate::registry::Registry;

#[derive(Default)]
struct Linking {
    image: Mutex<Vec<u8>>,
}

/// All links under way.
#[derive(Default)]
pub struct Links {
    registry: Registry<Linking>,
}

fn append(state: Handle, data: &[u8]) -> Result {
    let driver = driver()?;
    let linking = driver.links.registry.get(state)?;
    let mut image = locked(&linking.image);
    // Texts come with their end marks; the joined one gets a single mark at completion.
    let end = data.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    if !image.is_empty() {
        image.push(b'\n');
    }
    image.extend_from_slice(&data[..end]);
    Ok(())
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
        state: Handle, _kind: u32, data: u64, length: usize, _name: In<c_char>, _count: u32, _options: In<u32>,
        _values: In<usize>,
    ) {
        append(state, &bytes_at(data, length)?)
    }

    fn cuLinkAddFile_v2 also cuLinkAddFile
    (state: Handle, _kind: u32, path: In<c_char>, _count: u32, _options: In<u32>, _values: In<usize>) {
        append(state, &std::fs::read(path.text()?).map_err(|_| Code::FILE_NOT_FOUND)?)
    }

    fn cuLinkComplete(state: Handle, image: Out<*const u8>, length: Out<usize>) {
        let linking = driver()?.links.registry.get(state)?;
        let mut bytes = locked(&linking.image);
        if bytes.is_empty() {
            return Err(Code::INVALID_IMAGE);
        }
        if bytes.last() != Some(&0) {
            bytes.push(0);
        }
        length.set_if_given(bytes.len());
        image.set(bytes.as_ptr())
    }

    fn cuLinkDestroy(state: Handle) {
        driver()?.links.registry.remove(state).map(|_| ())
    }
}
