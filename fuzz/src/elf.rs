//! The driver's library and ours, as the host reads their names.

use gpushare_inventory::elf::{fit, undefine};

const OURS: &[u8] = include_bytes!("../corpus/elf/ours.so");
const DRIVER: &[u8] = include_bytes!("../corpus/elf/driver.so");

/// Fits our library to a driver's file of the bytes `data`, and a library of ours of these bytes to the driver's.
pub fn elf(data: &[u8]) {
    for (ours, driver) in [(OURS, data), (data, DRIVER), (data, data)] {
        let Ok(fitted) = fit(ours, driver) else { continue };
        assert!(fitted.len() >= ours.len(), "nothing of ours is cut off");
        // Of ours, which nobody else can change, comes a library again.
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
