//! The `limits` file: the host's grants. The host writes the whole file before the container starts, and may
//! later change lines in place. Every field that a library reads by itself is one aligned word, so a single
//! load is never torn. A reader that needs several fields together reads `sequence` before and after them
//! (odd: a write is in progress).
//!
//! The host's measurements follow the grants: the GPU time of the container's processes from the driver's own
//! sampling, which no process inside the container can reliably see. Without a meter they are all zero.

mod context;
mod measured;
mod write;

use core::sync::atomic::{AtomicU32, AtomicU64};

pub use context::{ContextCost, Overhead};
pub use measured::{Measured, Measurement, measurements};
pub use write::grants_are;

use crate::MAX_DEVICES;

/// First eight bytes of the file.
const MAGIC: [u8; 8] = *b"GPUSHLIM";
/// Layout version of the file; a library rejects any other.
pub const LIMITS_VERSION: u32 = 2;
/// Size of the file in bytes.
pub const LIMITS_LEN: usize = size_of::<LimitsFile>();

const HEADER_LEN: usize = size_of::<LimitsHeader>();
const LINE_LEN: usize = size_of::<LimitLine>();

/// The mapped file. All fields are atomic because the host may write while we read.
#[repr(C, align(64))]
pub struct LimitsFile {
    /// Magic number, layout version, size and counts.
    pub header: LimitsHeader,
    /// One line per GPU; only the first `header.devices` lines are used.
    pub devices: [LimitLine; MAX_DEVICES],
    /// The measurements of the host's meter, in the same order.
    pub measured: [Measured; MAX_DEVICES],
}

/// Header of the file, 64 bytes.
#[repr(C, align(64))]
pub struct LimitsHeader {
    magic: [AtomicU32; 2],
    version: AtomicU32,
    size: AtomicU32,
    /// Odd while the host writes; a change of value means that lines may have changed.
    pub sequence: AtomicU32,
    /// Number of granted lines in `devices`.
    pub devices: AtomicU32,
    /// Number of these lines that limit compute. While it is 0, a launch checks nothing else.
    pub compute_limited: AtomicU32,
    /// 1 + the line of `devices` that limits host memory, which comes after the granted GPUs; 0: host memory
    /// may not be used.
    host_line: AtomicU32,
    /// 1: a supervisor outside of the container enforces its memory limit.
    supervised: AtomicU32,
    reserved: [AtomicU32; 7],
}

/// The grant on one GPU.
#[derive(Default)]
#[repr(C, align(64))]
pub struct LimitLine {
    /// The GPU's UUID from the driver, in four words of the machine's byte order.
    uuid: [AtomicU32; 4],
    /// Device memory in bytes that the container may use now. The host never grants 0; a library reads 0 as
    /// "nothing is granted".
    pub memory_bytes: AtomicU64,
    /// Share of compute in percent, 1 to 100.
    pub cores_percent: AtomicU32,
    /// A [`ComputePolicy`] as a number.
    pub policy: AtomicU32,
    /// 0 (low) to 9.
    pub priority: AtomicU32,
    /// Upper bound on the compute that `burst` may use on an idle GPU, in percent.
    pub ceiling_percent: AtomicU32,
    /// Upper bound to which `memory_bytes` may grow while the container runs; 0: it does not grow.
    pub most_bytes: AtomicU64,
    /// The charge for a process's contexts before anything is loaded, in MiB; 0: not set by the host. This
    /// word and the next two are the host's figures, not part of the grant.
    context_mebibytes: AtomicU32,
    /// Their total charge, in MiB.
    context_most_mebibytes: AtomicU32,
    /// Their real use, encoded as an [`Overhead`]: the time of the measurement in the upper half, the
    /// fraction in the lower. If a supervisor enforces the memory limit: the bytes that it has charged.
    overhead: AtomicU64,
}

const _: () = assert!(HEADER_LEN == 64);
const _: () = assert!(LINE_LEN == 64);
/// The part of a line with the grant.
const GRANT_LEN: usize = core::mem::offset_of!(LimitLine, context_mebibytes);
const _: () = assert!(LIMITS_LEN == 64 + 2 * 64 * MAX_DEVICES);

/// How strictly a compute limit is enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePolicy {
    /// The limit holds even while the GPU is otherwise idle.
    Fixed,
    /// The limit applies while other containers want the GPU.
    Burst,
    /// No compute limit.
    None,
    /// MPS enforces it, by the thread percentage of each client.
    Mps,
}

impl ComputePolicy {
    /// Converts from the number in the file. An unknown number is read as the strictest policy.
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::None,
            2 => Self::Burst,
            3 => Self::Mps,
            _ => Self::Fixed,
        }
    }

    /// Whether our library limits the container's time on the GPU.
    pub const fn limits_time(self) -> bool {
        matches!(self, Self::Fixed | Self::Burst)
    }

    /// Converts to the number in the file.
    pub const fn number(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Fixed => 1,
            Self::Burst => 2,
            Self::Mps => 3,
        }
    }
}

/// The host's grant on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The 16 raw bytes from `cuDeviceGetUuid`: the text `GPU-xxxxxxxx-…` from left to right.
    pub uuid: [u8; 16],
    /// Device memory in bytes, above 0.
    pub memory_bytes: u64,
    /// Share of compute in percent, 1 to 100.
    pub cores_percent: u32,
    /// How strictly the compute share is enforced.
    pub policy: ComputePolicy,
    /// 0 (low) to 9.
    pub priority: u32,
    /// Upper bound on the compute that `burst` may use, in percent, `cores_percent` to 100.
    pub ceiling_percent: u32,
    /// Upper bound to which `memory_bytes` may grow; 0: it does not grow.
    pub most_bytes: u64,
}

impl DeviceLimits {
    /// Whether our library limits launches on this GPU to a share.
    pub fn limits_compute(&self) -> bool {
        self.policy.limits_time() && self.cores_percent < 100
    }
}

/// More GPUs than the file has lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyDevices;

impl core::fmt::Display for TooManyDevices {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "more than {MAX_DEVICES} GPUs for one container")
    }
}

impl core::error::Error for TooManyDevices {}

/// The bytes of a limits file that grants `devices`, and `host_bytes` of host memory that may be used instead
/// of theirs. No supervisor enforces the memory limit.
///
/// # Errors
/// [`TooManyDevices`] above [`MAX_DEVICES`]; host memory counts as one device.
pub fn encode_limits(devices: &[DeviceLimits], host_bytes: u64) -> Result<[u8; LIMITS_LEN], TooManyDevices> {
    let count = u32::try_from(devices.len()).map_err(|_| TooManyDevices)?;
    let lines = devices.len() + usize::from(host_bytes > 0);
    if lines > MAX_DEVICES {
        return Err(TooManyDevices);
    }
    let mut file = [0; LIMITS_LEN];
    put(&mut file, 0, &MAGIC);
    put(&mut file, 8, &LIMITS_VERSION.to_ne_bytes());
    put(&mut file, 12, &FILE_SIZE.to_ne_bytes());
    put(&mut file, 20, &count.to_ne_bytes());
    let limited = devices.iter().filter(|device| device.limits_compute());
    let limited = limited.fold(0u32, |count, _| count.saturating_add(1));
    put(&mut file, 24, &limited.to_ne_bytes());
    if host_bytes > 0 {
        put(&mut file, 28, &(count + 1).to_ne_bytes());
        put(&mut file, HEADER_LEN + devices.len() * LINE_LEN + 16, &host_bytes.to_ne_bytes());
    }
    for (index, device) in devices.iter().enumerate() {
        let at = HEADER_LEN + index * LINE_LEN;
        put(&mut file, at, &device.uuid);
        put(&mut file, at + 16, &device.memory_bytes.to_ne_bytes());
        put(&mut file, at + 24, &device.cores_percent.to_ne_bytes());
        put(&mut file, at + 28, &device.policy.number().to_ne_bytes());
        put(&mut file, at + 32, &device.priority.to_ne_bytes());
        put(&mut file, at + 36, &device.ceiling_percent.to_ne_bytes());
        put(&mut file, at + 40, &device.most_bytes.to_ne_bytes());
    }
    Ok(file)
}

/// Marks the container in the bytes of a limits file as supervised: a supervisor enforces its memory limit.
pub fn set_supervised(file: &mut [u8; LIMITS_LEN]) {
    put(file, SUPERVISED, &1u32.to_ne_bytes());
}

const SUPERVISED: usize = core::mem::offset_of!(LimitsHeader, supervised);

/// Offset of the word with the bytes that a supervisor has charged on the GPU of line `line`, which must
/// exist.
pub const fn charged_at(line: usize) -> usize {
    HEADER_LEN + line * LINE_LEN + core::mem::offset_of!(LimitLine, overhead)
}

#[expect(clippy::cast_possible_truncation, reason = "a constant of 2112")]
const FILE_SIZE: u32 = LIMITS_LEN as u32;

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = file.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

impl LimitsFile {
    /// Whether this is a limits file with the layout compiled here.
    pub fn is_known(&self) -> bool {
        use core::sync::atomic::Ordering::Relaxed;
        let [a, b] = [0, 1].map(|word: usize| self.header.magic[word].load(Relaxed).to_ne_bytes());
        a == MAGIC[..4]
            && b == MAGIC[4..]
            && self.header.version.load(Relaxed) == LIMITS_VERSION
            && self.header.size.load(Relaxed) == FILE_SIZE
    }

    /// Whether this is a limits file of another layout version than the one compiled here.
    pub fn is_of_another_version(&self) -> bool {
        use core::sync::atomic::Ordering::Relaxed;
        let [a, b] = [0, 1].map(|word: usize| self.header.magic[word].load(Relaxed).to_ne_bytes());
        a == MAGIC[..4] && b == MAGIC[4..] && self.header.version.load(Relaxed) != LIMITS_VERSION
    }

    /// Bytes that a supervisor has charged on the GPU of line `device`; `None` if no supervisor enforces the
    /// container's memory limit.
    #[inline]
    pub fn charged(&self, device: usize) -> Option<u64> {
        use core::sync::atomic::Ordering::{Acquire, Relaxed};
        if self.header.supervised.load(Relaxed) != 1 {
            return None;
        }
        // The supervisor does not charge the line of host memory.
        Some(self.granted().get(device)?.overhead.load(Acquire))
    }

    /// The granted lines.
    pub fn granted(&self) -> &[LimitLine] {
        let count = self.header.devices.load(core::sync::atomic::Ordering::Relaxed);
        let count = usize::try_from(count).unwrap_or(0).min(MAX_DEVICES);
        self.devices.get(..count).unwrap_or(&[])
    }

    /// The line of the GPU `uuid`; `None` if nothing is granted on it.
    pub fn device(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.granted().iter().position(|line| line.uuid() == *uuid)
    }

    /// The line that limits host memory, under which its use is recorded; `None` if host memory may not be
    /// used.
    pub fn host_line(&self) -> Option<usize> {
        let line = self.header.host_line.load(core::sync::atomic::Ordering::Relaxed).checked_sub(1)?;
        usize::try_from(line).ok().filter(|line| *line < MAX_DEVICES)
    }

    /// The memory limit of line `device` in bytes; 0 if there is no such line. The load is ordered after
    /// everything that this thread did before, just as the host reads the usage after it lowered the limit.
    pub fn memory(&self, device: usize) -> u64 {
        match self.devices.get(device) {
            Some(line) => line.memory_bytes.load(core::sync::atomic::Ordering::SeqCst),
            None => 0,
        }
    }

    /// The limit to which the memory of line `device` may grow, in bytes; the current limit if it does not
    /// grow.
    pub fn most_memory(&self, device: usize) -> u64 {
        use core::sync::atomic::Ordering::Relaxed;
        let most = self.devices.get(device).map_or(0, |line| line.most_bytes.load(Relaxed));
        most.max(self.memory(device))
    }
}

impl LimitLine {
    /// The GPU's 16 raw bytes.
    pub fn uuid(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (word, place) in self.uuid.iter().zip(bytes.chunks_exact_mut(4)) {
            place.copy_from_slice(&word.load(core::sync::atomic::Ordering::Relaxed).to_ne_bytes());
        }
        bytes
    }
}

#[cfg(test)]
pub(crate) mod tests {
    extern crate std;
    use super::*;
    use std::boxed::Box;

    pub(crate) fn empty() -> Box<LimitsFile> {
        mapped(&[0; LIMITS_LEN])
    }

    /// The file's bytes, as the host reads them.
    pub(crate) fn bytes_of(file: &LimitsFile) -> [u8; LIMITS_LEN] {
        let mut bytes = [0; LIMITS_LEN];
        // SAFETY: every byte of the file belongs to an atomic integer, and no thread writes now.
        unsafe {
            core::ptr::copy_nonoverlapping(core::ptr::from_ref(file).cast(), bytes.as_mut_ptr(), LIMITS_LEN)
        };
        bytes
    }

    pub(crate) fn mapped(bytes: &[u8; LIMITS_LEN]) -> Box<LimitsFile> {
        let mut file: Box<core::mem::MaybeUninit<LimitsFile>> = Box::new_uninit();
        // SAFETY: the box holds LIMITS_LEN bytes, and nothing else refers to it.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), file.as_mut_ptr().cast(), LIMITS_LEN) };
        // SAFETY: every field is an atomic integer, and all bytes were just written.
        unsafe { file.assume_init() }
    }

    pub(crate) fn device(first: u8, memory_bytes: u64) -> DeviceLimits {
        let mut uuid = [0x5a; 16];
        uuid[0] = first;
        DeviceLimits {
            uuid,
            memory_bytes,
            cores_percent: 30,
            policy: ComputePolicy::Burst,
            priority: 5,
            ceiling_percent: 80,
            most_bytes: 0,
        }
    }

    #[test]
    fn what_the_host_writes_is_what_the_container_reads() {
        let bytes = encode_limits(&[device(1, 4 << 30), device(2, u64::MAX)], 0).unwrap();
        let file = mapped(&bytes);
        assert!(file.is_known());
        assert_eq!(file.granted().len(), 2);
        for (uuid, want) in [(1, Some(0)), (2, Some(1)), (3, None)] {
            assert_eq!(file.device(&device(uuid, 0).uuid), want, "uuid {uuid}");
        }
        assert_eq!([0, 1, 2, 99].map(|line| file.memory(line)), [4 << 30, u64::MAX, 0, 0]);
        use core::sync::atomic::Ordering::Relaxed;
        assert_eq!(file.devices[0].cores_percent.load(Relaxed), 30);
        assert_eq!(file.devices[0].policy.load(Relaxed), 2);
        assert_eq!(file.devices[0].priority.load(Relaxed), 5);
        assert_eq!(file.devices[0].ceiling_percent.load(Relaxed), 80);
        assert_eq!(file.measured[0].until.load(Relaxed), 0);
        assert_eq!(file.header.compute_limited.load(Relaxed), 2);
    }

    #[test]
    fn only_a_share_below_the_whole_limits_compute() {
        let whole = DeviceLimits { cores_percent: 100, ..device(1, 1) };
        let unlimited = DeviceLimits { policy: ComputePolicy::None, ..device(2, 1) };
        let bytes = encode_limits(&[whole, unlimited, device(3, 1)], 0).unwrap();
        assert_eq!(mapped(&bytes).header.compute_limited.load(core::sync::atomic::Ordering::Relaxed), 1);
    }

    #[test]
    fn host_memory_has_the_line_after_the_gpus() {
        let bytes = encode_limits(&[device(1, 1), device(2, 2)], 7 << 30).unwrap();
        let file = mapped(&bytes);
        assert_eq!((file.host_line(), file.granted().len(), file.memory(2)), (Some(2), 2, 7 << 30));
        assert_eq!(file.device(&[0; 16]), None, "it is no GPU");
        assert_eq!(mapped(&encode_limits(&[device(1, 1)], 0).unwrap()).host_line(), None);
        assert_eq!(encode_limits(&[device(1, 1); 16], 1), Err(TooManyDevices));
        let mut wild = bytes;
        wild[28..32].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(mapped(&wild).host_line(), None);
    }

    #[test]
    fn seventeen_gpus_are_refused() {
        assert_eq!(encode_limits(&[device(1, 1); 17], 0), Err(TooManyDevices));
        assert!(encode_limits(&[device(1, 1); 16], 0).is_ok());
    }

    #[test]
    fn a_foreign_file_is_not_known() {
        let good = encode_limits(&[device(1, 1)], 0).unwrap();
        for at in [0, 7, 8, 12] {
            let mut bytes = good;
            bytes[at] ^= 1;
            assert!(!mapped(&bytes).is_known(), "byte {at} changed");
        }
        assert!(!mapped(&[0; LIMITS_LEN]).is_known() && !mapped(&[0; LIMITS_LEN]).is_of_another_version());
        for (version, another) in [(LIMITS_VERSION, false), (LIMITS_VERSION + 1, true)] {
            let mut bytes = good;
            bytes[8..12].copy_from_slice(&version.to_ne_bytes());
            assert_eq!(mapped(&bytes).is_of_another_version(), another);
        }
    }

    #[test]
    fn a_wild_device_count_reads_no_line_too_many() {
        let mut bytes = encode_limits(&[device(1, 1)], 0).unwrap();
        bytes[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(mapped(&bytes).granted().len(), MAX_DEVICES);
    }
}
