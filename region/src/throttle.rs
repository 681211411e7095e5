//! Reads what a container says about its compute share. The host shows it, and takes it as a hint which
//! container wants more.

use core::mem::offset_of;

use crate::MAX_DEVICES;
use crate::usage::{Bucket, Damaged, USAGE_HEADER_LEN, UsageHeader, check_header, long};

/// What a container says about its compute share on one device. The container can write any number here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttle {
    /// When a launch was last held back, as monotonic time in nanoseconds; 0: never.
    pub held_back: u64,
    /// How long launches were held back, in nanoseconds, summed over all threads.
    pub throttled: u64,
}

/// Reads the compute shares out of the header of a usage file, by line of the limits file.
///
/// # Errors
/// [`Damaged`] when the bytes are fewer than a header, or the header is not that of this layout.
pub fn read_throttles(bytes: &[u8]) -> Result<[Throttle; MAX_DEVICES], Damaged> {
    let header = bytes.get(..USAGE_HEADER_LEN).ok_or(Damaged)?;
    check_header(header)?;
    Ok(core::array::from_fn(|device| {
        let at = offset_of!(UsageHeader, buckets) + device * size_of::<Bucket>();
        Throttle {
            held_back: long(header, at + offset_of!(Bucket, held_back)),
            throttled: long(header, at + offset_of!(Bucket, throttled)),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::empty_usage_header;

    #[test]
    fn the_words_of_each_device_are_found_and_a_foreign_header_is_damaged() {
        let mut page = empty_usage_header();
        assert_eq!(read_throttles(&page), Ok([Throttle::default(); MAX_DEVICES]));
        let last = offset_of!(UsageHeader, buckets) + (MAX_DEVICES - 1) * size_of::<Bucket>();
        let word = |at| last + at..last + at + 8;
        page[word(offset_of!(Bucket, held_back))].copy_from_slice(&7_u64.to_ne_bytes());
        page[word(offset_of!(Bucket, throttled))].copy_from_slice(&u64::MAX.to_ne_bytes());
        let all = read_throttles(&page).unwrap();
        assert_eq!(all[MAX_DEVICES - 1], Throttle { held_back: 7, throttled: u64::MAX });
        assert_eq!(all[0], Throttle::default());
        assert_eq!(read_throttles(&page[1..]), Err(Damaged));
        page[0] ^= 1;
        assert_eq!(read_throttles(&page), Err(Damaged));
    }
}
