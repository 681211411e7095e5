//! The host's writer: changes grants in place, and compares a file with the grants to detect foreign changes.

use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use super::{
    DeviceLimits, FILE_SIZE, GRANT_LEN, HEADER_LEN, LIMITS_LEN, LIMITS_VERSION, LINE_LEN, LimitLine,
    LimitsFile, MAGIC,
};
use crate::MAX_DEVICES;

const SEQUENCE: core::ops::Range<usize> = 16..20;

const _: () = assert!(core::mem::offset_of!(super::LimitsHeader, sequence) == SEQUENCE.start);

impl LimitsFile {
    /// Overwrites the file with `grants`, `host_bytes` and `is_supervised`, and leaves the measurements
    /// alone. Only one writer may run at a time. A writer that died half-way leaves an odd sequence, from
    /// which the next writer continues. Each word is stored once, so a reader of a single word sees the old
    /// or the new value. Grants beyond the file's last line are not written.
    pub fn set_grants(&self, grants: &[DeviceLimits], host_bytes: u64, is_supervised: bool) {
        let header = &self.header;
        let writing = header.sequence.load(Relaxed) | 1;
        header.sequence.store(writing, Relaxed);
        fence(Release);
        for (word, bytes) in header.magic.iter().zip(MAGIC.chunks_exact(4)) {
            word.store(bytes.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes)), Relaxed);
        }
        header.version.store(LIMITS_VERSION, Relaxed);
        header.size.store(FILE_SIZE, Relaxed);
        header.supervised.store(u32::from(is_supervised), Relaxed);
        header.reserved.iter().for_each(|word| word.store(0, Relaxed));
        let host = self.devices.get(grants.len()).filter(|_| host_bytes > 0);
        for (index, line) in self.devices.iter().enumerate() {
            let bytes = if index == grants.len() { host_bytes } else { 0 };
            line.set(grants.get(index), bytes);
        }
        let after = u32::try_from(grants.len()).map_or(0, |count| count.saturating_add(1));
        header.host_line.store(host.map_or(0, |_| after), Relaxed);
        let limited = grants.iter().zip(&self.devices).filter(|(grant, _)| grant.limits_compute());
        header.compute_limited.store(limited.fold(0, |count, _| count + 1), Relaxed);
        header.devices.store(grants.iter().zip(&self.devices).fold(0, |count, _| count + 1), Relaxed);
        header.sequence.store(writing.wrapping_add(1), Release);
    }
}

impl LimitsFile {
    /// Writes only the memory limits of the first lines, each in one store, and makes them visible before the
    /// caller's next reads. Leaves the sequence unchanged: the account of compute goes on.
    pub fn set_memory(&self, limits: impl Iterator<Item = u64>) {
        for (line, bytes) in self.devices.iter().zip(limits) {
            line.memory_bytes.store(bytes, SeqCst);
        }
        fence(SeqCst);
    }
}

impl LimitLine {
    /// Writes the grant; without one, only `bytes`, which are the host's or 0.
    fn set(&self, grant: Option<&DeviceLimits>, bytes: u64) {
        let uuid = grant.map_or([0; 16], |grant| grant.uuid);
        for (word, bytes) in self.uuid.iter().zip(uuid.chunks_exact(4)) {
            word.store(bytes.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes)), Relaxed);
        }
        self.memory_bytes.store(grant.map_or(bytes, |grant| grant.memory_bytes), Relaxed);
        self.cores_percent.store(grant.map_or(0, |grant| grant.cores_percent), Relaxed);
        self.policy.store(grant.map_or(0, |grant| grant.policy.number()), Relaxed);
        self.priority.store(grant.map_or(0, |grant| grant.priority), Relaxed);
        self.ceiling_percent.store(grant.map_or(0, |grant| grant.ceiling_percent), Relaxed);
        self.most_bytes.store(grant.map_or(0, |grant| grant.most_bytes), Relaxed);
    }
}

/// Whether the bytes of a limits file grant the same as `granted`, the result of
/// [`encode_limits`](super::encode_limits). The host's figures may differ, and so may the sequence, but the
/// sequence must not indicate a write in progress.
pub fn grants_are(bytes: &[u8], granted: &[u8; LIMITS_LEN]) -> bool {
    let equal = |range: core::ops::Range<usize>| bytes.get(range.clone()) == granted.get(range);
    let sequence = bytes.get(SEQUENCE).and_then(|bytes| bytes.first_chunk());
    let at_rest = sequence.is_some_and(|bytes| u32::from_ne_bytes(*bytes).is_multiple_of(2));
    let mut lines = (0..MAX_DEVICES).map(|line| HEADER_LEN + line * LINE_LEN);
    bytes.len() == LIMITS_LEN
        && at_rest
        && equal(0..SEQUENCE.start)
        && equal(SEQUENCE.end..HEADER_LEN)
        && lines.all(|line| equal(line..line + GRANT_LEN))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::super::{ContextCost, Overhead};
    use super::*;
    use crate::encode_limits;
    use crate::limits::tests::{bytes_of, device, empty, mapped};
    use std::vec;

    const MEASURED: usize = core::mem::offset_of!(LimitsFile, measured);

    #[test]
    fn grants_written_in_place_are_those_of_a_new_file() {
        let wild = [0xa7; LIMITS_LEN];
        let few = [device(1, 4 << 30), device(2, u64::MAX)];
        let many = vec![device(9, 1); MAX_DEVICES];
        for (grants, host) in [(&few[..], 0), (&few[..], 3 << 30), (&many[..], 0), (&[], 0)] {
            let new = encode_limits(grants, host).unwrap();
            for old in [empty(), mapped(&wild), mapped(&encode_limits(&[device(7, 7)], 9).unwrap())] {
                old.set_grants(grants, host, false);
                assert!(grants_are(&bytes_of(&old), &new), "{} grants", grants.len());
                assert!(old.is_known());
            }
        }
    }

    #[test]
    fn every_byte_of_a_grant_is_compared_and_no_byte_of_the_hosts_figures() {
        let granted = encode_limits(&[device(1, 1)], 0).unwrap();
        for at in 0..LIMITS_LEN {
            let mut bytes = granted;
            bytes[at] ^= 2;
            let in_line = (at - HEADER_LEN.min(at)) % LINE_LEN;
            let free = SEQUENCE.contains(&at) || at >= MEASURED || at >= HEADER_LEN && in_line >= GRANT_LEN;
            assert_eq!(grants_are(&bytes, &granted), free, "byte {at} changed");
        }
        let mut writing = granted;
        writing[SEQUENCE.start] ^= 1;
        assert!(!grants_are(&writing, &granted), "a write is in progress");
        assert!(!grants_are(&granted[1..], &granted) && !grants_are(&[], &granted));
    }

    #[test]
    fn the_hosts_figures_survive_a_change_of_grants() {
        let file = empty();
        file.measured[0].until.store(5, Relaxed);
        let cost = ContextCost { bare: 1 << 20, most: 2 << 20 };
        file.devices[0].set_context_cost(cost);
        file.devices[0].set_overhead(Overhead::new(3, 2), 0);
        file.set_grants(&[device(1, 1)], 0, false);
        assert_eq!(file.measured[0].until.load(Relaxed), 5);
        assert_eq!(file.devices[0].context_cost(), cost);
        assert!(file.devices[0].is_beyond_cost());
    }

    #[test]
    fn a_writer_that_died_half_way_is_followed_by_a_whole_one() {
        let file = empty();
        file.set_grants(&[device(1, 1)], 0, false);
        file.header.sequence.fetch_add(1, Relaxed);
        file.set_grants(&[device(1, 2)], 0, false);
        assert_eq!(file.header.sequence.load(Relaxed) % 2, 0);
        assert_eq!(file.memory(0), 2);
    }
}
