//! The host's reader and writer of the loader's cache, which is an image's.

use std::path::PathBuf;

use gpushare_inject::with_libraries;

/// Libraries that are added, the greatest name first.
const LIBRARIES: [&str; 3] =
    ["/usr/lib64/libnvidia-ml.so.1", "/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so"];
/// Bytes before the entries, and of each entry.
const SIZES: (usize, usize) = (48, 24);

/// Adds libraries to the cache `data`. A loader then finds each of them under its name, and to add them again
/// changes nothing.
pub fn loader_cache(data: &[u8]) {
    let libraries = LIBRARIES.map(PathBuf::from);
    let Ok(Some(with)) = with_libraries(data, &libraries) else { return };
    assert!(with.len() <= data.len() + 512, "it grows by what is added alone");
    assert_eq!(with_libraries(&with, &libraries), Ok(None), "a second time");
    for library in LIBRARIES {
        let name = library.rsplit('/').next().unwrap_or_default();
        assert_eq!(found(&with, name), Some(library.as_bytes()), "{name}");
    }
}

/// The path that a loader takes for `name`: the first entry of that name with the flags of this machine. None
/// of the names that are looked for here has a twin with other digits.
fn found<'c>(cache: &'c [u8], name: &str) -> Option<&'c [u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(cache.get(at..at + 4)?.try_into().ok()?));
    let text = |at: u32| cache.get(usize::try_from(at).ok()?..)?.split(|byte| *byte == 0).next();
    let flags = if cfg!(target_arch = "aarch64") { 0x0a03 } else { 0x0303 };
    let count = usize::try_from(word(20)?).ok()?;
    let entries = (0..count).map(|number| SIZES.0 + number * SIZES.1);
    let mut same = entries.filter(|at| word(at + 4).and_then(text) == Some(name.as_bytes()));
    let at = same.find(|at| word(*at).is_some_and(|its| [1, flags].contains(&its)))?;
    text(word(at + 8)?)
}
