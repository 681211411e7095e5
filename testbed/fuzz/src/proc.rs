//! The readers of the driver's `/proc` files.

use gpushare_inventory::{driver_version, information, pci_address};

/// Reads `data` as each of the files, and each of its words as the name of a GPU's folder.
pub fn proc(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(version) = driver_version(&text) {
        // The version becomes a part of file names.
        assert!(version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'), "{version:?}");
        assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{version:?}");
    }
    let found = information(&text);
    assert!(found.model.is_none_or(|model| !model.contains('\n') && model.trim() == model));
    for word in text.split_whitespace() {
        if pci_address(word).is_some() {
            assert!(word.contains(':') && word.contains('.'), "{word:?}");
        }
    }
}
