//! Runs the host's readers on files that a container may have written: random bytes, and correct files with a
//! few changed bytes. The number of rounds is bounded; `make fuzz` runs longer.

mod properties;

use gpushare_region::{
    ComputePolicy, DeviceLimits, LIMITS_LEN, USAGE_HEADER_LEN, USAGE_LEN, empty_usage_header, encode_limits,
};

/// Numbers that are the same in every run (a 64-bit xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("it is below a usize")
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        // Also generate long runs of one value: all bits set, all clear.
        let word = self.next();
        match word % 4 {
            0 => bytes.fill(0xff),
            1 => bytes.fill(0),
            _ => bytes.iter_mut().for_each(|byte| *byte = self.next().to_ne_bytes()[0]),
        }
    }

    /// Overwrites a few stretches of `bytes` from `first` on.
    fn spoil(&mut self, bytes: &mut [u8], first: usize) {
        for _ in 0..1 + self.below(8) {
            let start = first + self.below(bytes.len() - first);
            let length = 1 + self.below(256.min(bytes.len() - start));
            self.fill(&mut bytes[start..start + length]);
        }
    }
}

/// Number of rounds. Under miri each round takes seconds.
const ROUNDS: usize = if cfg!(miri) { 1 } else { 400 };

#[test]
fn no_usage_file_upsets_the_host() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut readable = 0;
    for round in 0..ROUNDS {
        let mut file = vec![0; USAGE_LEN];
        file[..USAGE_HEADER_LEN].copy_from_slice(&empty_usage_header());
        match round % 4 {
            // The header stays intact, so that the reader gets to the slots.
            0 | 1 => {
                random.fill(&mut file[USAGE_HEADER_LEN..]);
                random.fill(&mut file[128..192]);
                random.spoil(&mut file, 24);
            }
            2 => random.spoil(&mut file, 0),
            _ => random.fill(&mut file),
        }
        if round % 5 == 4 {
            file.truncate(random.below(USAGE_LEN));
        }
        properties::usage(&file);
        readable += usize::from(gpushare_region::read_usage(&file).is_ok());
    }
    assert!(cfg!(miri) || readable > ROUNDS / 4, "most files must get past the header: {readable}");
}

#[test]
fn no_limits_file_upsets_the_host() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for round in 0..ROUNDS * 10 {
        let devices: Vec<DeviceLimits> = (0..random.below(17)).map(|_| device(&mut random)).collect();
        let mut file = encode_limits(&devices, 0).unwrap().to_vec();
        assert!(gpushare_region::grants_are(&file, &encode_limits(&devices, 0).unwrap()), "round {round}");
        if round % 3 > 0 {
            random.spoil(&mut file, 0);
        }
        if round % 5 == 4 {
            file.truncate(random.below(LIMITS_LEN));
        }
        properties::limits(&file);
    }
}

fn device(random: &mut Random) -> DeviceLimits {
    let policies = [ComputePolicy::Fixed, ComputePolicy::Burst, ComputePolicy::None];
    let mut uuid = [0; 16];
    random.fill(&mut uuid);
    let number = |random: &mut Random| {
        u32::from_ne_bytes(*random.next().to_ne_bytes().first_chunk().expect("eight bytes begin with four"))
    };
    DeviceLimits {
        uuid,
        memory_bytes: random.next(),
        cores_percent: number(random),
        policy: policies[random.below(3)],
        priority: number(random),
        ceiling_percent: number(random),
        most_bytes: random.next(),
    }
}
