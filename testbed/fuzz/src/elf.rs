//! The host's reader and writer of the symbol names in the driver's library and ours.

use gpushare_inventory::elf::{fit, undefine};

const OURS: &[u8] = include_bytes!("../corpus/elf/ours.so");
const DRIVER: &[u8] = include_bytes!("../corpus/elf/driver.so");

/// Fits our library to a driver file with the bytes `data`, and a library with these bytes to the driver's.
pub fn elf(data: &[u8]) {
    for (ours, driver) in [(OURS, data), (data, DRIVER), (data, data)] {
        let Ok(fitted) = fit(ours, driver) else { continue };
        assert!(fitted.len() >= ours.len(), "nothing of ours is cut off");
        // Our own library, which nobody else can change, must become a readable library again.
        if ours == OURS {
            assert!(fit(&fitted, driver).is_ok(), "a fitted copy can be read");
        }
    }
    let mut changed = data.to_vec();
    if undefine(&mut changed, |_| true).is_ok() {
        assert_eq!(changed.len(), data.len());
        assert_eq!(undefine(&mut changed, |_| true).unwrap_or_default(), 0, "all names are gone");
    }
}
