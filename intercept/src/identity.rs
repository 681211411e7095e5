//! Identifies a process and checks whether it still runs, using `/proc`.

use core::ffi::CStr;

use crate::sys;

/// The identity of a process of the container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Who {
    /// Process id in its pid namespace.
    pub pid: u32,
    /// Start time in clock ticks after boot; 0: unknown.
    pub start_time: u64,
    /// Inode of its pid namespace; 0: unknown, so that no other process can check whether it runs.
    pub namespace: u64,
    /// The start of its stack. `exec` changes it but keeps pid and start time.
    pub image: u64,
}

/// The parts of `/proc/PID/stat` that we use.
struct Stat {
    state: u8,
    threads: u64,
    start_time: u64,
    stack: u64,
}

impl Who {
    /// This process.
    pub fn this_process() -> Self {
        let pid = sys::pid();
        let Some(stat) = stat(pid) else { return Self { pid, ..Self::default() } };
        Self { pid, start_time: stat.start_time, namespace: namespace(pid), image: stat.stack }
    }

    /// Whether this process and `me` may number their pids in the same namespace. Containers of one pod share
    /// their books, and each of them numbers its processes from 1. An unknown namespace may be the same.
    pub fn is_counted_with(&self, me: &Self) -> bool {
        self.namespace == 0 || me.namespace == 0 || self.namespace == me.namespace
    }

    /// Whether this process has ended, as seen by `me`. A process that became another program by `exec` has
    /// ended. `None`: this cannot be checked from here.
    pub fn has_ended(&self, me: &Self) -> Option<bool> {
        if self == me {
            return Some(false); // another copy of this library in this process, with or without /proc
        }
        if self.namespace == 0 || self.namespace != me.namespace || self.start_time == 0 {
            return None;
        }
        if self.pid == me.pid && self.start_time == me.start_time {
            return Some(true); // this process before an exec
        }
        let Some(stat) = stat(self.pid) else { return Some(true) };
        // A process of which only the main thread has ended is a zombie with threads that still hold the GPU.
        let ended = matches!(stat.state, b'Z' | b'X') && stat.threads <= 1;
        // The kernel shows another process's stack to those who may trace it, and 0 to others.
        let executed = stat.stack != self.image && stat.stack != 0 && self.image != 0;
        Some(ended || executed || stat.start_time != self.start_time)
    }
}

/// Inode of the pid namespace; 0 unless `/proc` shows the namespace in which this process has the id `pid`.
fn namespace(pid: u32) -> u64 {
    let mut buffer = [0; 64];
    let here = sys::read_link(c"/proc/self", &mut buffer).and_then(number);
    if here != Some(u64::from(pid)) {
        return 0; // the /proc of another namespace: its pids are not ours
    }
    let link = sys::read_link(c"/proc/self/ns/pid", &mut buffer); // pid:[4026531836]
    link.and_then(|text| number(text.strip_prefix(b"pid:[")?.strip_suffix(b"]")?)).unwrap_or(0)
}

fn number(text: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u64::from(*byte - b'0'));
    text.iter().try_fold(0u64, |sum, byte| sum.checked_mul(10)?.checked_add(digit(byte)?))
}

/// Reads `/proc/PID/` + `name` into `buffer`.
pub fn read_proc<'a>(pid: u32, name: &[u8], buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut path = [0u8; 32];
    let mut end = 0;
    let mut put = |byte: u8| {
        if let Some(place) = path.get_mut(end) {
            *place = byte;
        }
        end += 1;
    };
    b"/proc/".iter().for_each(|byte| put(*byte));
    let mut divisor = 1_000_000_000;
    while divisor > 0 {
        let digit = pid / divisor;
        if digit > 0 || divisor == 1 {
            put(b'0' + u8::try_from(digit % 10).unwrap_or(0));
        }
        divisor /= 10;
    }
    put(b'/');
    name.iter().for_each(|byte| put(*byte));
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let file = sys::Fd::open(path, false).ok()?;
    let length = file.read(buffer).ok()?;
    buffer.get(..length)
}

fn stat(pid: u32) -> Option<Stat> {
    let mut buffer = [0; 512];
    let text = read_proc(pid, b"stat", &mut buffer)?;
    let end = text.iter().rposition(|byte| *byte == b')')?; // the name before it may hold anything
    let mut fields = text.get(end + 2..)?.split(|byte| *byte == b' ');
    let state = *fields.next()?.first()?; // field 3
    let threads = number(fields.nth(16)?)?; // field 20
    let start_time = number(fields.nth(1)?)?; // field 22
    let stack = fields.nth(5).and_then(number).unwrap_or(0); // field 28
    Some(Stat { state, threads, start_time, stack })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn this_process_runs_and_knows_its_namespace() {
        let me = Who::this_process();
        assert_eq!(me.pid, std::process::id());
        assert!(me.start_time > 0 && me.namespace > 0 && me.image > 0, "{me:?}");
        assert_eq!(me.has_ended(&me), Some(false));
        assert_eq!(Who { image: me.image + 16, ..me }.has_ended(&me), Some(true), "before an exec");
    }

    #[test]
    fn without_proc_a_process_still_knows_itself() {
        let me = Who { pid: 7, ..Who::default() };
        assert_eq!(me.has_ended(&me), Some(false));
        assert_eq!(Who { pid: 8, ..me }.has_ended(&me), None, "and nobody else");
    }

    #[test]
    fn a_pid_means_something_in_its_own_namespace_alone() {
        let of = |namespace| Who { pid: 7, namespace, ..Who::default() };
        for (one, other, same) in [(1, 1, true), (1, 2, false), (0, 2, true), (1, 0, true)] {
            assert_eq!(of(one).is_counted_with(&of(other)), same, "{one}, {other}");
        }
    }

    /// A program that has started to run. During its exec, when its parent already continues, the kernel does
    /// not show its stack or shows a different one.
    fn running_program() -> std::process::Child {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"?").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn a_zombie_and_a_reused_pid_have_ended() {
        let me = Who::this_process();
        let mut child = running_program();
        let Stat { start_time, stack, .. } = stat(child.id()).unwrap();
        let other = Who { pid: child.id(), start_time, image: stack, ..me };
        assert_eq!(other.has_ended(&me), Some(false));
        assert_eq!(Who { image: stack + 16, ..other }.has_ended(&me), Some(true), "became another program");
        assert_eq!(Who { image: 0, ..other }.has_ended(&me), Some(false), "its stack was not known");
        assert_eq!(Who { start_time: start_time - 1, ..other }.has_ended(&me), Some(true), "reused");
        assert_eq!(Who { namespace: 1, ..other }.has_ended(&me), None, "another namespace");
        child.kill().unwrap();
        while other.has_ended(&me) == Some(false) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(other.has_ended(&me), Some(true), "gone");
    }
}
