//! Reads a container's own reports about its share: how long its compute was delayed, and whether it wants
//! more memory. The host displays them, and uses them as a hint as to which container wants more.

use core::mem::offset_of;

use crate::MAX_DEVICES;
use crate::usage::{Bucket, Damaged, USAGE_HEADER_LEN, UsageHeader, Wish, check_header, long};

/// Reads how long launches were delayed, in nanoseconds, summed over all threads, from the header of a usage
/// file, by line of the limits file. The container can write any number here.
///
/// # Errors
/// [`Damaged`] when the bytes are fewer than a header, or the header is not that of this layout.
pub fn read_throttled(bytes: &[u8]) -> Result<[u64; MAX_DEVICES], Damaged> {
    let header = bytes.get(..USAGE_HEADER_LEN).ok_or(Damaged)?;
    check_header(header)?;
    Ok(core::array::from_fn(|device| {
        let at = offset_of!(UsageHeader, buckets) + device * size_of::<Bucket>();
        long(header, at + offset_of!(Bucket, throttled))
    }))
}

/// Reads the requests for higher memory limits from the header of a usage file, by line of the limits file:
/// number and bytes. The container can write any number here.
///
/// # Errors
/// The same as for [`read_throttled`].
pub fn read_wishes(bytes: &[u8]) -> Result<[(u32, u64); MAX_DEVICES], Damaged> {
    let header = bytes.get(..USAGE_HEADER_LEN).ok_or(Damaged)?;
    check_header(header)?;
    Ok(core::array::from_fn(|device| {
        let at = offset_of!(UsageHeader, wishes) + device * size_of::<Wish>();
        let number = long(header, at + offset_of!(Wish, number)) & u64::from(u32::MAX);
        (u32::try_from(number).unwrap_or(0), long(header, at + offset_of!(Wish, bytes)))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::empty_usage_header;

    #[test]
    fn the_words_of_each_device_are_found_and_a_foreign_header_is_damaged() {
        let mut page = empty_usage_header();
        assert_eq!(read_throttled(&page), Ok([0; MAX_DEVICES]));
        let last = offset_of!(UsageHeader, buckets) + (MAX_DEVICES - 1) * size_of::<Bucket>();
        let word = |at| last + at..last + at + 8;
        page[word(offset_of!(Bucket, throttled))].copy_from_slice(&u64::MAX.to_ne_bytes());
        let all = read_throttled(&page).unwrap();
        assert_eq!((all[0], all[MAX_DEVICES - 1]), (0, u64::MAX));
        assert_eq!(read_throttled(&page[1..]), Err(Damaged));
        let last = offset_of!(UsageHeader, wishes) + (MAX_DEVICES - 1) * size_of::<Wish>();
        page[last..last + 16].copy_from_slice(&[7_u64 << 32 | 3, 9].map(u64::to_ne_bytes).concat());
        let wishes = read_wishes(&page).unwrap();
        assert_eq!((wishes[0], wishes[MAX_DEVICES - 1]), ((0, 0), (3, 9)));
        page[0] ^= 1;
        assert_eq!(read_throttled(&page), Err(Damaged));
    }
}
