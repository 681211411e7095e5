//! Caches as the machine's ldconfig makes them, and damaged ones.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

const CUDA: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
const NVML: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";

fn libraries() -> [PathBuf; 3] {
    [NVML, CUDA, "/usr/lib/x86_64-linux-gnu/libcuda.so"].map(PathBuf::from)
}

/// What the machine's ldconfig lists of a cache: name, architecture and path in each line.
fn listed(cache: &[u8]) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), cache).unwrap();
    let listed = Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(file.path()).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let text = String::from_utf8(listed.stdout).unwrap();
    text.lines().filter(|line| line.starts_with('\t')).map(|line| line.trim().to_owned()).collect()
}

/// A cache that the machine's ldconfig makes of a few of its own libraries, in one of its formats. One
/// library has a version for newer processors.
fn made_by_ldconfig(format: &str) -> Vec<u8> {
    let root = tempfile::tempdir().unwrap();
    let hardware = if cfg!(target_arch = "aarch64") { "atomics" } else { "x86-64-v3" };
    let of_machine = crate::image::TRIPLET_FOLDERS[0];
    let folder = root.path().join(&of_machine[1..]);
    fs::create_dir_all(folder.join("glibc-hwcaps").join(hardware)).unwrap();
    fs::create_dir_all(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/ld.so.conf"), of_machine).unwrap();
    symlink("usr/lib", root.path().join("lib")).unwrap();
    for (from, to) in [
        ("libc.so.6", "libc.so.6"),
        ("libm.so.6", "libm.so.6"),
        ("libm.so.6", &format!("glibc-hwcaps/{hardware}/libm.so.6")),
        ("libdl.so.2", "libdl.so.2"),
        ("libpthread.so.0", "libpthread.so.0"),
    ] {
        fs::copy(Path::new(of_machine).join(from), folder.join(to)).unwrap();
    }
    let mut ldconfig = Command::new("/sbin/ldconfig");
    let made = ldconfig.args(["-X", "-c", format, "-r"]).arg(root.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::read(root.path().join("etc/ld.so.cache")).unwrap()
}

/// A cache of the present format: its entries with name and path, and what follows the strings.
fn cache(entries: &[(u32, &str, &str)], behind: &[u8]) -> Vec<u8> {
    let (mut table, mut strings) = (Vec::new(), Vec::new());
    let begin = HEADER + entries.len() * ENTRY;
    for (flags, name, path) in entries {
        let words = [*flags, short(begin + strings.len()).unwrap()];
        strings.extend(format!("{name}\0").bytes());
        let words = words.into_iter().chain([short(begin + strings.len()).unwrap(), 0, 0, 0]);
        strings.extend(format!("{path}\0").bytes());
        table.extend(words.flat_map(u32::to_le_bytes));
    }
    strings.resize(strings.len().next_multiple_of(ALIGNMENT), 0);
    let mut bytes = MAGIC.to_vec();
    bytes.resize(HEADER, 0);
    bytes[28] = 2;
    set_word(&mut bytes, 20, short(entries.len()).unwrap());
    set_word(&mut bytes, 24, short(strings.len()).unwrap());
    bytes.extend(table);
    bytes.extend(strings);
    if !behind.is_empty() {
        let at = short(bytes.len()).unwrap();
        set_word(&mut bytes, 32, at);
    }
    bytes.extend_from_slice(behind);
    bytes
}

/// A small cache.
pub(crate) fn plain() -> Vec<u8> {
    cache(&[(FLAGS, "libm.so.6", "/lib/libm.so.6"), (FLAGS, "libc.so.6", "/lib/libc.so.6")], &[])
}

#[test]
fn a_cache_of_ldconfigs_lists_the_libraries_and_keeps_all_others() {
    // ldconfig of glibc 2.36 shows a wrong subfolder where the older format comes first, so that of the present
    // one alone is what is compared with.
    let before = listed(&made_by_ldconfig("new"));
    for format in ["new", "compat"] {
        let made = made_by_ldconfig(format);
        let with = with_libraries(&made, &libraries()).unwrap().unwrap();
        let after = listed(&with);
        let is_ours = |line: &String| line.contains("libcuda.so") || line.contains("libnvidia-ml.so");
        let (ours, others): (Vec<_>, Vec<_>) = after.into_iter().partition(is_ours);
        assert_eq!(others, before, "{format}");
        assert!(before.iter().any(|line| line.contains("glibc-hwcaps")), "{before:?}");
        let paths: Vec<_> = ours.iter().filter_map(|line| line.split(" => ").nth(1)).collect();
        // ldconfig writes the greatest name first.
        assert_eq!(paths, [NVML, CUDA, "/usr/lib/x86_64-linux-gnu/libcuda.so"], "{format}");
        assert_eq!(with_libraries(&with, &libraries()), Ok(None), "{format}: a second time");
    }
}

#[test]
fn a_cache_of_the_old_format_alone_is_left_as_it_is() {
    let old = made_by_ldconfig("old");
    assert_eq!(with_libraries(&old, &libraries()), Err(LoaderCacheError::Format));
}

#[test]
fn an_images_own_library_gives_way_to_the_drivers() {
    let own = [
        (FLAGS, "libz.so.1", "/lib/libz.so.1"),
        (FLAGS, "libcuda.so.1", "/opt/cuda/compat/libcuda.so.1"),
        (FLAGS, "libcuda.so.01", "/opt/other/libcuda.so.01"),
        (3, "libcuda.so.1", "/usr/lib32/libcuda.so.1"),
        (ANY_FLAGS, "libcuda.so.1", "/opt/any/libcuda.so.1"),
    ];
    let with = with_libraries(&cache(&own, &[]), &[CUDA.into()]).unwrap().unwrap();
    let listed = Listed::parse(&with, 0).unwrap();
    let entries = listed.entries.iter().map(|entry| {
        let path = listed.strings.text(entry.value, MAX_PATH).unwrap();
        (entry.flags, std::str::from_utf8(path).unwrap())
    });
    let want = [(FLAGS, "/lib/libz.so.1"), (FLAGS, CUDA), (3, "/usr/lib32/libcuda.so.1")];
    assert_eq!(entries.collect::<Vec<_>>(), want);
}

#[test]
fn another_place_of_the_libraries_replaces_the_one_before() {
    let first = with_libraries(&plain(), &libraries()).unwrap().unwrap();
    let moved = [PathBuf::from("/usr/lib64/libcuda.so.1")];
    let second = with_libraries(&first, &moved).unwrap().unwrap();
    let count = |cache: &[u8]| Listed::parse(cache, 0).unwrap().entries.len();
    assert_eq!((count(&first), count(&second)), (5, 5));
    assert!(Listed::parse(&second, 0).unwrap().has_just(b"libcuda.so.1", &moved[0]));
}

#[test]
fn what_is_no_sound_cache_is_named() {
    let sound = plain();
    let other = if FLAGS == 0x0303 { 0x0a03 } else { 0x0303 };
    let set = |at: usize, value: u32| {
        let mut bytes = sound.clone();
        set_word(&mut bytes, at, value);
        bytes
    };
    let reversed = [(FLAGS, "libc.so.6", "/a"), (FLAGS, "libm.so.6", "/b")];
    let long = "l".repeat(MAX_NAME + 1);
    for (what, bytes, want) in [
        ("nothing", vec![], LoaderCacheError::Format),
        ("a text", b"glibc".to_vec(), LoaderCacheError::Format),
        ("old and endless", [OLD_MAGIC, &[0xff; 40]].concat(), LoaderCacheError::Format),
        ("a header alone", MAGIC.to_vec(), LoaderCacheError::CutOff),
        ("half of it", sound[..sound.len() / 2].to_vec(), LoaderCacheError::CutOff),
        ("endless entries", set(20, u32::MAX), LoaderCacheError::CutOff),
        ("endless strings", set(24, u32::MAX), LoaderCacheError::CutOff),
        ("big-endian", set(28, 3), LoaderCacheError::ByteOrder),
        ("a name in the header", set(HEADER + 4, 8), LoaderCacheError::Entry(0)),
        ("a name behind the end", set(HEADER + 4, u32::MAX), LoaderCacheError::Entry(0)),
        ("a path in the entries", set(HEADER + ENTRY + 8, 50), LoaderCacheError::Entry(1)),
        ("a name without an end", cache(&[(FLAGS, &long, "/a")], &[]), LoaderCacheError::Entry(0)),
        ("a wrong order", cache(&reversed, &[]), LoaderCacheError::Order(1)),
        ("of another machine", cache(&[(other, "libc.so.6", "/a")], &[]), LoaderCacheError::Architecture),
        ("no entries", cache(&[], &[]), LoaderCacheError::Architecture),
        ("extensions in the strings", set(32, 100), LoaderCacheError::Extension),
        ("extensions behind the end", set(32, 1 << 20), LoaderCacheError::Extension),
    ] {
        assert_eq!(with_libraries(&bytes, &libraries()), Err(want), "{what}");
    }
    for path in ["/usr/lib/libcuda.so.1\0", "/", &format!("/{long}")] {
        assert_eq!(with_libraries(&sound, &[path.into()]), Err(LoaderCacheError::Path), "{path:?}");
    }
}

#[test]
fn extensions_that_lead_outside_are_named_and_unknown_ones_go() {
    let entries = [(FLAGS, "libc.so.6", "/lib/libc.so.6")];
    let begin = cache(&entries, &[]).len();
    let directory = |count: u32, sections: &[[u32; 4]], data: &[u8]| {
        let words = [extension_magic(), count].into_iter().chain(sections.iter().flatten().copied());
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).chain(data.iter().copied()).collect();
        cache(&entries, &bytes)
    };
    let data = short(begin + 8 + 2 * 16).unwrap();
    let sound = directory(2, &[[7, 0, data, 3], [0, 0, data, 3]], b"abc");
    let with = with_libraries(&sound, &libraries()).unwrap().unwrap();
    let at = size(word(&with, 32).unwrap());
    let generator = size(word(&with, at + 16).unwrap());
    assert_eq!((word(&with, at + 4), word(&with, at + 8)), (Some(1), Some(0)), "the generator alone");
    assert_eq!(&with[generator..generator + 3], b"abc");
    for (what, bytes) in [
        ("more sections than bytes", directory(3, &[[0, 0, data, 3]; 2], b"abc")),
        ("endless sections", directory(u32::MAX, &[[0, 0, data, 3]; 2], b"abc")),
        ("a section behind the end", directory(2, &[[0, 0, data, 4]; 2], b"abc")),
        ("a section in the entries", directory(2, &[[0, 0, 48, 4]; 2], b"abc")),
        ("half a number", directory(2, &[[1, 0, data, 3]; 2], b"abc")),
        ("a name outside", directory(2, &[[1, 0, data, 4]; 2], &[0xff; 4])),
    ] {
        assert_eq!(with_libraries(&bytes, &libraries()), Err(LoaderCacheError::Extension), "{what}");
    }
}

fn extension_magic() -> u32 {
    0xeaa4_2174
}

#[test]
fn names_are_ordered_as_the_loader_orders_them() {
    for (one, other, want) in [
        ("libcuda.so.1", "libcuda.so", Ordering::Greater),
        ("libcuda.so.10", "libcuda.so.9", Ordering::Greater),
        ("libcuda.so.01", "libcuda.so.1", Ordering::Equal),
        ("libx1", "libxa", Ordering::Greater),
        ("libxa", "libx1", Ordering::Less),
        ("liba", "libb", Ordering::Less),
        ("lib", "lib", Ordering::Equal),
        ("lib", "liba", Ordering::Less),
        ("lib1", "lib", Ordering::Greater),
    ] {
        assert_eq!(compare(one.as_bytes(), other.as_bytes()), want, "{one} {other}");
    }
}
