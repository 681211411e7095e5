//! Properties that the host's readers must have for any bytes that a container leaves. The bounded test next
//! to this folder and `testbed/fuzz` share them.

use gpushare_region::{
    LIMITS_LEN, MAX_DEVICES, SLOTS, USAGE_HEADER_LEN, USAGE_LEN, encode_limits, grants_are, measurements,
    processes, read_throttled, read_usage,
};

/// Checks the readers of a usage file with these bytes.
pub fn usage(bytes: &[u8]) {
    let read = read_usage(bytes);
    assert_eq!(read.is_ok(), processes(bytes).is_ok(), "the two readers disagree about damage");
    assert!(read.is_err() || bytes.len() >= USAGE_LEN, "a short file is damaged");
    if read_throttled(bytes).is_ok() {
        assert!(bytes.len() >= USAGE_HEADER_LEN, "a short header is damaged");
    } else {
        assert!(read.is_err(), "a file with a damaged header is damaged");
    }
    let Ok(read) = read else { return };
    let all: Vec<_> = processes(bytes).expect("read before").collect();
    assert!(all.len() <= SLOTS && read.processes as usize == all.len());
    assert!(all.windows(2).all(|pair| pair[0].slot < pair[1].slot), "each slot once, in order");
    for line in 0..MAX_DEVICES {
        let sum = |field: fn(&gpushare_region::DeviceUsage) -> u64| {
            all.iter().fold(0_u64, |sum, process| sum.saturating_add(field(&process.devices[line])))
        };
        let device = &read.devices[line];
        assert_eq!(device.bytes, sum(|device| device.bytes));
        assert_eq!(device.context_bytes, sum(|device| device.context_bytes));
        assert_eq!(device.launches, sum(|device| device.launches));
        assert_eq!(device.gpu_nanoseconds, sum(|device| device.gpu_nanoseconds));
    }
    // Bytes after the file are ignored.
    let longer = [bytes, &[0xff; 64]].concat();
    assert_eq!(read_usage(&longer), Ok(read));
}

/// Checks the readers of a limits file with these bytes. A container that may mount could have written them.
pub fn limits(bytes: &[u8]) {
    assert_eq!(measurements(bytes).is_some(), bytes.len() >= LIMITS_LEN);
    let none = encode_limits(&[], 0).expect("no GPU is not too many");
    if grants_are(bytes, &none) {
        assert_eq!(bytes.len(), LIMITS_LEN);
        let mut other = bytes.to_vec();
        other[12] ^= 1;
        assert!(!grants_are(&other, &none), "a changed grant is told from the right one");
    }
    if let Ok(whole) = <[u8; LIMITS_LEN]>::try_from(bytes) {
        let sequence = u32::from_ne_bytes([whole[16], whole[17], whole[18], whole[19]]);
        assert_eq!(
            grants_are(bytes, &whole),
            sequence.is_multiple_of(2),
            "a file at rest grants what it grants"
        );
    }
}
