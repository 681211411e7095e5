//! Handles for objects that the supervisor makes, and for those whose handle a program lets RM choose.

use crate::abi::Status;

/// Random handles: a program that knew the next one could take it.
#[derive(Clone, Debug)]
pub struct Handles(u64);

/// They begin here, and are drawn from 2^24.
const OWN: u32 = 0xe500_0000;
impl Handles {
    /// How often a handle may be taken already.
    pub const TRIES: usize = 8;

    /// A sequence that begins with this random number.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A random number.
    pub fn random(&mut self) -> u64 {
        // xorshift64 (Marsaglia, 2003).
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A handle.
    pub fn draw(&mut self) -> u32 {
        let [_, low, middle, high, ..] = self.random().to_le_bytes();
        OWN | u32::from_le_bytes([low, middle, high, 0])
    }

    /// Whether a handle is of those that are drawn.
    pub fn is_own(handle: u32) -> bool {
        handle & 0xff00_0000 == OWN
    }

    /// Lets `make` make an object under a handle that the client does not have yet, and returns it.
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
