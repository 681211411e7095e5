//! A program that looks up a hooked function by name gets our hook, also for its newest version.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

use gpushare_intercept::cuda::HOOKED;

use crate::client::{Cuda, bytes, call, out, really_held};
use crate::place::{CONTEXT, Share, charged, inside};

/// Path of the library that contains `address`.
fn library_of(address: usize) -> String {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the loader searches for the address without accessing it, and writes one structure.
    let known = unsafe { libc::dladdr(std::ptr::without_provenance(address), found.as_mut_ptr()) };
    assert_ne!(known, 0, "{address:#x} is in no library");
    // SAFETY: zeroed above, which is valid for null pointers, or written by the loader.
    let found = unsafe { found.assume_init() };
    // SAFETY: the loader found the library, whose name is a C string.
    unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy().into_owned()
}

/// The name under which programs look up `export`: without its version and the suffix of the default stream.
fn base_name(export: &str) -> &str {
    let name = export.strip_suffix("_ptsz").unwrap_or(export);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u32>().is_ok() => base,
        _ => name,
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_49_the_newest_version_of_every_hooked_name_is_ours() {
    if !inside("names::case_49_the_newest_version_of_every_hooked_name_is_ours", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut newest = 0i32;
    assert_eq!(cuda.call("cuDriverGetVersion", &[out(&mut newest)]), 0);
    assert!(newest >= 13000, "{newest}");
    let newest = usize::try_from(newest).unwrap();
    let names: BTreeSet<&str> = HOOKED.iter().map(|export| base_name(export)).collect();
    let ask = |base: &str, version: usize, flags: usize| {
        let (name, mut address, mut found) = (CString::new(base).unwrap(), 0usize, 0i32);
        let name = name.as_ptr().expose_provenance();
        let arguments = [name, out(&mut address), version, flags, out(&mut found)];
        assert_eq!(cuda.call("cuGetProcAddress_v2", &arguments), 0, "{base}");
        address
    };
    let mut missed = Vec::new();
    for base in names {
        for (version, flags) in [(newest, 0), (newest, 2), (12000, 0), (12000, 2)] {
            let address = ask(base, version, flags);
            if address != 0 && !library_of(address).contains("/shim/") {
                missed.push((base, version, flags));
            }
        }
    }
    assert!(missed.is_empty(), "not ours: {missed:?}");
    let mut pointer = 0usize;
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(640), 0]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    assert_eq!(call(ask("cuCtxSynchronize", newest, 0), &[0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT), "its newest form settles pools");
}
