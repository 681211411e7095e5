//! Makes the program a client of the GPU's MPS server if its container holds an MPS share.
//!
//! The driver reads the daemon's pipe folder and the client's limits from the environment at `cuInit`. This
//! module sets them from the limits file: a program that `exec` or a shell starts without them would get all
//! of the GPU's threads.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::Ordering::Relaxed;

use gpushare_region::{ComputePolicy, path};

use super::here;

const PIPE: &CStr = c"CUDA_MPS_PIPE_DIRECTORY";
const PERCENTAGE: &CStr = c"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const PINNED: &CStr = c"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn setenv(name: *const c_char, value: *const c_char, overwrite: c_int) -> c_int;
}

/// Sets the environment for the driver's `cuInit`, unless the container's share is not an MPS share. A
/// smaller percentage set by the program itself stays, so that a program can divide its container's share.
pub(super) fn join() {
    let Some(here) = here() else { return };
    // A container reaches one daemon, so its share has one line.
    let Some(line) = here.book().limits.and_then(|limits| limits.granted().first()) else { return };
    if ComputePolicy::from_number(line.policy.load(Relaxed)) != ComputePolicy::Mps {
        return;
    }
    set(PIPE, path::MPS_PIPE);
    let percent = line.cores_percent.load(Relaxed).clamp(1, 100);
    if own_percentage().is_none_or(|own| own == 0 || own >= percent) {
        let mut text = Text::default();
        text.number(percent.into());
        set(PERCENTAGE, text.as_c());
    }
    // Uses the client's own number of the GPU. The server rounds the limit and counts each process alone, so
    // the books enforce it.
    let mut text = Text::default();
    text.put(b"0=");
    // Only our books enforce a limit that may grow: MPS reads this once.
    text.number(line.memory_bytes.load(Relaxed).max(line.most_bytes.load(Relaxed)) >> 20);
    text.put(b"M");
    set(PINNED, text.as_c());
}

fn set(name: &CStr, value: &CStr) {
    // SAFETY: both are C strings, which the C library copies. A program that reads the environment in another
    // thread at the same time takes the same risk as with any library that calls it.
    let _ = unsafe { setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// The whole percents that the program itself chose; `None` if it chose none.
fn own_percentage() -> Option<u32> {
    // SAFETY: the name is a C string.
    let value = unsafe { getenv(PERCENTAGE.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: the environment's values are C strings, and this thread does not change them in the meantime.
    let value = unsafe { CStr::from_ptr(value) }.to_bytes();
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
    Some(digits.fold(0u32, |number, digit| number.saturating_mul(10).saturating_add((digit - b'0').into())))
}

/// A short C string.
#[derive(Default)]
struct Text {
    bytes: [u8; 32],
    length: usize,
}

impl Text {
    /// Adds bytes while there is room, leaving one zero byte.
    fn put(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.length + 1 < self.bytes.len()
                && let Some(place) = self.bytes.get_mut(self.length)
            {
                *place = *byte;
                self.length += 1;
            }
        }
    }

    fn number(&mut self, number: u64) {
        if number > 9 {
            self.number(number / 10);
        }
        self.put(&[b'0' + u8::try_from(number % 10).unwrap_or(0)]);
    }

    fn as_c(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_whole_or_cut_never_past_the_end() {
        for (number, want) in [(0, "0"), (7, "7"), (81_920, "81920"), (u64::MAX, "18446744073709551615")] {
            let mut text = Text::default();
            text.number(number);
            assert_eq!(text.as_c().to_str(), Ok(want));
        }
        let mut text = Text::default();
        text.put(&[b'x'; 40]);
        assert_eq!(text.as_c().to_bytes(), [b'x'; 31]);
    }
}
