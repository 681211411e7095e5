//! Makes calls fail, or kills the process in a call, as configured in a client's environment.
//!
//! `GPUSHARE_SIMULATOR_FAIL=cuMemAlloc_v2:3:2` makes the third call of cuMemAlloc_v2 return 2 and do nothing.
//! In place of the result, `kill` kills the process before the call does anything, and `kill-after` kills it
//! before the call returns. Several faults are separated by commas. A name also stands for its synonyms and
//! for its form for the per-thread default stream.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Environment variable that lists the faults.
pub const VARIABLE: &str = "GPUSHARE_SIMULATOR_FAIL";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Answer(u32),
    Kill,
    KillAfter,
}

#[derive(Debug)]
struct Fault {
    name: String,
    call: u64,
    what: What,
    calls: AtomicU64,
}

/// The faults that a process's environment configures.
#[derive(Debug)]
pub struct Faults(Vec<Fault>);

static FAULTS: OnceLock<Option<Faults>> = OnceLock::new();

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split(':');
        let (name, call, what) = (parts.next()?, parts.next()?, parts.next()?);
        let what = match what {
            "kill" => What::Kill,
            "kill-after" => What::KillAfter,
            code => What::Answer(code.parse().ok()?),
        };
        let call = call.parse().ok().filter(|&call| call > 0)?;
        let complete = parts.next().is_none() && !name.is_empty();
        complete.then(|| Self { name: name.to_owned(), call, what, calls: AtomicU64::new(0) })
    }
}

impl Faults {
    fn parse(text: &str) -> Option<Self> {
        text.split(',').map(Fault::parse).collect::<Option<Vec<_>>>().map(Self)
    }

    /// Counts a call of `name`, and returns the fault that is due in it.
    fn next(&self, name: &str) -> Option<What> {
        let of_name = self.0.iter().filter(|fault| fault.name == name);
        let mut due = of_name.filter(|fault| fault.calls.fetch_add(1, Ordering::Relaxed) + 1 == fault.call);
        let first = due.next().map(|fault| fault.what);
        // Advances the iterator to its end, so that the other faults of this name count the call as well.
        due.for_each(drop);
        first
    }

    fn of_environment() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        let faults = Self::parse(&text);
        if faults.is_none() {
            // Without this check, a test whose fault has a typo would pass and prove nothing.
            eprintln!("gpushare-simulator: {VARIABLE}={text:?} is no list of NAME:CALL:RESULT");
            std::process::abort();
        }
        faults
    }
}

/// Runs `call`, which is the driver's function `name`, with the fault that is due in it.
pub fn around(name: &str, call: impl FnOnce() -> u32) -> u32 {
    let Some(faults) = FAULTS.get_or_init(Faults::of_environment) else { return call() };
    match faults.next(name) {
        None => call(),
        Some(What::Answer(code)) => code,
        Some(What::Kill) => die(),
        Some(What::KillAfter) => {
            call();
            die()
        }
    }
}

fn die() -> ! {
    // SAFETY: sends a signal to this process; nothing runs after it.
    unsafe { libc::raise(libc::SIGKILL) };
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_that_is_named_fails_and_no_other() {
        let faults =
            Faults::parse("cuMemAlloc_v2:2:2, cuInit:1:kill,cuMemAlloc_v2:3:kill-after").expect("a list");
        let told: Vec<_> = (0..4).map(|_| faults.next("cuMemAlloc_v2")).collect();
        assert_eq!(told, [None, Some(What::Answer(2)), Some(What::KillAfter), None]);
        assert_eq!(faults.next("cuMemFree_v2"), None);
        assert_eq!(faults.next("cuInit"), Some(What::Kill));
    }

    #[test]
    fn what_is_no_fault_is_refused() {
        for text in
            ["", "cuInit", "cuInit:1", "cuInit:0:2", "cuInit:1:two", "cuInit:1:2:3", ":1:2", "cuInit:1:2,"]
        {
            assert!(Faults::parse(text).is_none(), "{text:?}");
        }
    }
}
