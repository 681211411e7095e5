//! Handles for objects that the supervisor makes, and for those whose handle a program lets RM choose.

use crate::abi::Status;

/// Random handles. A program that could predict the next one could take it.
#[derive(Clone, Debug)]
pub struct Handles(u64);

/// First handle; all are drawn from a range of 2^24.
const OWN: u32 = 0xe500_0000;
impl Handles {
    /// How many taken handles to try.
    pub const TRIES: usize = 8;

    /// Creates a sequence from this random number.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Returns a random number.
    pub fn random(&mut self) -> u64 {
        // xorshift64 (Marsaglia, 2003).
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Draws a handle.
    pub fn draw(&mut self) -> u32 {
        let [_, low, middle, high, ..] = self.random().to_le_bytes();
        OWN | u32::from_le_bytes([low, middle, high, 0])
    }

    /// Whether a handle is in the drawn range.
    pub fn is_own(handle: u32) -> bool {
        handle & 0xff00_0000 == OWN
    }

    /// Calls `make` with handles until it finds one that the client does not have yet, and returns it.
    ///
    /// # Errors
    /// RM's status.
    pub fn first_free(&mut self, mut make: impl FnMut(u32) -> Result<(), Status>) -> Result<u32, Status> {
        let mut status = Status::DUPLICATE;
        for _ in 0..Self::TRIES {
            let handle = self.draw();
            match make(handle) {
                Ok(()) => return Ok(handle),
                Err(Status::DUPLICATE) => {}
                Err(other) => {
                    status = other;
                    break;
                }
            }
        }
        Err(status)
    }
}
