//! The physics of a simulated GPU: the memory of a context, how processes share the GPU's time, how NVML
//! measures it, and which memory and arrays the driver refuses. A profile names one set of such values. It is
//! independent of the driver version, the model and the size of the memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const MIB: u64 = 1 << 20;
const MILLISECOND: u64 = 1_000_000;

/// Memory that NVML and CUDA count as the GPU's and that no program can allocate, in bytes. An H200 kept 9
/// MiB.
pub const UNUSABLE: u64 = 16 * MIB;

/// One set of physics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Physics {
    /// Bytes that the first context of a process takes.
    pub context: u64,
    /// Bytes by which a process's first and second loaded module make its context grow.
    pub modules: [u64; 2],
    /// Length of a turn in nanoseconds; 0: work runs to its end in the order of submission.
    pub slice: u64,
    /// Nanoseconds in which nothing runs when the GPU switches to another process.
    pub switch: u64,
    /// Length of NVML's sampling windows in nanoseconds.
    pub period: u64,
    /// How long after its end a window becomes readable, in nanoseconds: the minimum, and the maximum beyond
    /// it.
    pub delay: [u64; 2],
    /// How many windows NVML keeps.
    pub kept: u32,
    /// Whether a window names only one process, the one that ran at a random moment of the GPU's work. It
    /// gets all of the GPU's work in the window, at most [`DRAWN_PERCENT`]. Otherwise the window has the
    /// exact part of each process.
    pub draws: bool,
    /// Bytes that NVML reports as reserved for the driver, above what CUDA reports as the total.
    pub reserved: u64,
    /// Whether arrays are limited by the device's attributes.
    pub bounds_arrays: bool,
}

/// The most that NVML reports for the process that a window names.
pub const DRAWN_PERCENT: u32 = 99;

/// An NVIDIA H200 with driver 580, as in docs/measured.md.
pub const H200_580: Physics = Physics {
    context: 520 * MIB,
    modules: [90 * MIB, 66 * MIB],
    slice: 2_080_000,
    switch: 130_000,
    period: 200 * MILLISECOND,
    delay: [MILLISECOND, 7 * MILLISECOND],
    kept: 16,
    draws: true,
    reserved: 616 * MIB,
    bounds_arrays: true,
};

/// A GPU without the real one's quirks: exact windows, and work in the order of submission.
pub const IDEAL: Physics = Physics {
    context: 300 * MIB,
    modules: [0; 2],
    slice: 0,
    switch: 0,
    period: 1_000 * MILLISECOND / 6,
    delay: [0; 2],
    kept: 6,
    draws: false,
    reserved: 0,
    bounds_arrays: false,
};

/// The part of a node's physics that is the same for all its GPUs, in the state file.
#[repr(C)]
pub struct NodePhysics {
    /// [`Physics::context`].
    pub context: AtomicU64,
    /// [`Physics::modules`].
    pub modules: [AtomicU64; 2],
    /// [`Physics::period`].
    pub period: AtomicU64,
    /// [`Physics::delay`].
    pub delay: [AtomicU64; 2],
    /// [`Physics::reserved`].
    pub reserved: AtomicU64,
    /// [`Physics::kept`].
    pub kept: AtomicU32,
    /// 1 for [`Physics::draws`].
    pub draws: AtomicU32,
    /// 1 for [`Physics::bounds_arrays`].
    pub bounds_arrays: AtomicU32,
    /// Padding, zero.
    pub padding: AtomicU32,
}

impl NodePhysics {
    /// Writes `physics` into the state file.
    pub fn set(&self, physics: &Physics) {
        let long = |cell: &AtomicU64, value| cell.store(value, Ordering::Relaxed);
        long(&self.context, physics.context);
        self.modules.iter().zip(physics.modules).for_each(|(cell, value)| long(cell, value));
        long(&self.period, physics.period);
        self.delay.iter().zip(physics.delay).for_each(|(cell, value)| long(cell, value));
        long(&self.reserved, physics.reserved);
        self.kept.store(physics.kept, Ordering::Relaxed);
        self.draws.store(physics.draws.into(), Ordering::Relaxed);
        self.bounds_arrays.store(physics.bounds_arrays.into(), Ordering::Relaxed);
    }

    /// Returns the bytes that a process takes for its contexts once it has loaded `modules` modules.
    #[must_use]
    pub fn context_with(&self, modules: usize) -> u64 {
        let grown = self.modules.iter().take(modules).map(|cell| cell.load(Ordering::Relaxed));
        self.context.load(Ordering::Relaxed) + grown.sum::<u64>()
    }

    /// Returns how long after its end window `number` becomes readable, in nanoseconds.
    #[must_use]
    pub fn delay_of(&self, number: u64) -> u64 {
        let [least, spread] = [0, 1].map(|at: usize| self.delay[at].load(Ordering::Relaxed));
        least + part_of(spread, hash(number ^ 0x5eed))
    }

    /// Returns the moment in window `number` for which a process is drawn, in nanoseconds from the window's
    /// begin.
    #[must_use]
    pub fn moment_of(&self, number: u64) -> u64 {
        part_of(self.period.load(Ordering::Relaxed), hash(number))
    }
}

/// Returns the part of `whole` selected by `bits`, from 0 to below `whole`.
fn part_of(whole: u64, bits: u64) -> u64 {
    let product = u128::from(bits) * u128::from(whole);
    u64::try_from(product >> 64).unwrap_or(0)
}

/// Returns 64 well-mixed bits for `number`, by splitmix64.
fn hash(number: u64) -> u64 {
    let mut word = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(physics: &Physics) -> NodePhysics {
        let zero = || AtomicU64::new(0);
        let node = NodePhysics {
            context: zero(),
            modules: [zero(), zero()],
            period: zero(),
            delay: [zero(), zero()],
            reserved: zero(),
            kept: AtomicU32::new(0),
            draws: AtomicU32::new(0),
            bounds_arrays: AtomicU32::new(0),
            padding: AtomicU32::new(0),
        };
        node.set(physics);
        node
    }

    #[test]
    fn a_context_grows_with_the_first_two_modules() {
        let sizes = |physics| [0, 1, 2, 9].map(|modules| node(physics).context_with(modules) / MIB);
        assert_eq!(sizes(&H200_580), [520, 610, 676, 676]);
        assert_eq!(sizes(&IDEAL), [300; 4]);
    }

    #[test]
    fn moments_and_delays_are_spread_evenly_and_the_same_each_time() {
        let node = node(&H200_580);
        let mean = |of: &dyn Fn(u64) -> u64| (0..1000).map(of).sum::<u64>() / 1000;
        let moments = mean(&|number| node.moment_of(number));
        assert!((95 * MILLISECOND..105 * MILLISECOND).contains(&moments), "{moments}");
        let delays = mean(&|number| node.delay_of(number));
        assert!((4_200_000..4_800_000).contains(&delays), "{delays}");
        for number in 0..1000 {
            assert!((MILLISECOND..=8 * MILLISECOND).contains(&node.delay_of(number)));
            assert_eq!(node.moment_of(number), node.moment_of(number));
        }
    }
}
