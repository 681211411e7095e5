//! The seccomp filter that selects the calls to report.
//!
//! RM dispatches a call by its number and exact size, and so does the filter. Everything else passes, based
//! on the number of the system call alone, so kernels from 5.11 on run no filter instruction for it.

use std::mem::offset_of;

use nix::libc::{self, sock_filter};

use crate::abi::{
    Era, UVM_MAP_EXTERNAL, alloc, alloc_object, control, duplicate, free, heap, number, transfer,
};

/// The action for a call to RM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// The listener gets it. A program's own listener fails with EBUSY.
    Reported,
    /// It fails with ENOTTY. No process has to answer, and seccomp(2) stays available.
    Denied,
}

const ARCH_X86_64: u32 = 0xc000_003e;
const ARCH_I386: u32 = 0x4000_0003;
const X32: u32 = 0x4000_0000;
/// The numbers of ioctl(2) and seccomp(2): x86-64, x32 without its bit, i386.
const IOCTL: [u32; 3] = [16, 514, 54];
const SECCOMP: [u32; 2] = [317, 354];
const NEW_LISTENER: u32 = 8;
const _: () = assert!(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER == NEW_LISTENER as u64);

/// Target of a jump.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
    Next,
    I386,
    Ioctl,
    Seccomp,
    Allow,
    Refuse,
    Matched,
}

enum Line {
    At(Label),
    Load(usize),
    And(u32),
    JumpIfEqual(u32, Label, Label),
    Return(u32),
}

/// Returns the numbers and sizes of the calls that a driver of this era accepts, as `size << 16
///
/// number`.
fn matched(era: &Era) -> Vec<u32> {
    let calls = [
        (number::ALLOC_OBJECT, alloc_object::SIZE),
        (number::ALLOC, alloc::SHORT),
        (number::ALLOC, era.long),
        (number::FREE, free::SIZE),
        (number::CONTROL, control::SIZE),
        (number::DUP_OBJECT, duplicate::SIZE),
        (number::VID_HEAP_CONTROL, heap::SIZE),
        (number::TRANSFER, transfer::SIZE),
    ];
    calls
        .into_iter()
        .filter_map(|(number, size)| Some(u32::try_from(size).ok()? << 16 | u32::from(number)))
        .collect()
}

/// Builds the filter that reports the calls that a driver of this era accepts.
pub fn reported(era: &Era) -> Vec<sock_filter> {
    program(&matched(era), Variant::Reported)
}

/// Builds the filter that denies the calls of every known driver.
pub fn denied() -> Vec<sock_filter> {
    let mut calls: Vec<u32> = Era::all().iter().flat_map(matched).collect();
    calls.sort_unstable();
    calls.dedup();
    program(&calls, Variant::Denied)
}

fn program(calls: &[u32], variant: Variant) -> Vec<sock_filter> {
    const NUMBER_AND_SIZE: u32 = 0x3fff_00ff;
    let (nr, arch) = (offset_of!(libc::seccomp_data, nr), offset_of!(libc::seccomp_data, arch));
    // The lower halves of the first two arguments; the kernel ignores the upper half of an ioctl's number.
    let args = offset_of!(libc::seccomp_data, args);
    let (first, second) = (args, args + 8);
    let listens = match variant {
        Variant::Reported => Label::Seccomp,
        Variant::Denied => Label::Allow,
    };
    let mut lines = vec![
        Line::Load(arch),
        Line::JumpIfEqual(ARCH_I386, Label::I386, Label::Next),
        Line::JumpIfEqual(ARCH_X86_64, Label::Next, Label::Allow),
        Line::Load(nr),
        Line::And(!X32),
        Line::JumpIfEqual(IOCTL[0], Label::Ioctl, Label::Next),
        Line::JumpIfEqual(IOCTL[1], Label::Ioctl, Label::Next),
        Line::JumpIfEqual(SECCOMP[0], listens, Label::Allow),
        Line::At(Label::I386),
        Line::Load(nr),
        Line::JumpIfEqual(IOCTL[2], Label::Ioctl, Label::Next),
        Line::JumpIfEqual(SECCOMP[1], listens, Label::Allow),
        Line::At(Label::Seccomp),
        Line::Load(first),
        Line::JumpIfEqual(libc::SECCOMP_SET_MODE_FILTER, Label::Next, Label::Allow),
        Line::Load(second),
        Line::And(NEW_LISTENER),
        Line::JumpIfEqual(0, Label::Allow, Label::Refuse),
        Line::At(Label::Ioctl),
        Line::Load(second),
    ];
    if variant == Variant::Reported {
        lines.push(Line::JumpIfEqual(UVM_MAP_EXTERNAL, Label::Matched, Label::Next));
    }
    lines.push(Line::And(NUMBER_AND_SIZE));
    lines.extend(calls.iter().map(|call| Line::JumpIfEqual(*call, Label::Matched, Label::Next)));
    let errno = |errno: i32| libc::SECCOMP_RET_ERRNO | errno.cast_unsigned();
    let answer = match variant {
        Variant::Reported => libc::SECCOMP_RET_USER_NOTIF,
        Variant::Denied => errno(libc::ENOTTY),
    };
    lines.extend([
        Line::At(Label::Allow),
        Line::Return(libc::SECCOMP_RET_ALLOW),
        Line::At(Label::Matched),
        Line::Return(answer),
        Line::At(Label::Refuse),
        Line::Return(errno(libc::EBUSY)),
    ]);
    assemble(&lines)
}

fn assemble(lines: &[Line]) -> Vec<sock_filter> {
    let mut labels = Vec::new();
    let mut at = 0usize;
    for line in lines {
        match line {
            Line::At(label) => labels.push((*label, at)),
            _ => at += 1,
        }
    }
    let mut done: Vec<sock_filter> = Vec::with_capacity(at);
    for line in lines {
        let here = done.len();
        // All labels lie ahead, within 255 instructions; a test runs every path.
        let distance = |label: &Label| {
            let to = labels.iter().find(|(known, _)| known == label).map_or(here + 1, |(_, at)| *at);
            u8::try_from(to.saturating_sub(here + 1)).unwrap_or(u8::MAX)
        };
        let (code, k, jt, jf) = match line {
            Line::At(_) => continue,
            Line::Load(offset) => {
                (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, u32::try_from(*offset).unwrap_or(u32::MAX), 0, 0)
            }
            Line::And(mask) => (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, *mask, 0, 0),
            Line::JumpIfEqual(value, yes, no) => {
                (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *value, distance(yes), distance(no))
            }
            Line::Return(value) => (libc::BPF_RET | libc::BPF_K, *value, 0, 0),
        };
        done.push(sock_filter { code: u16::try_from(code).unwrap_or(u16::MAX), jt, jf, k });
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter on one call, as the kernel would.
    fn run(program: &[sock_filter], arch: u32, nr: u32, args: [u64; 2]) -> u32 {
        let mut data = [0u8; size_of::<libc::seccomp_data>()];
        data[..4].copy_from_slice(&nr.to_ne_bytes());
        data[4..8].copy_from_slice(&arch.to_ne_bytes());
        data[16..24].copy_from_slice(&args[0].to_ne_bytes());
        data[24..32].copy_from_slice(&args[1].to_ne_bytes());
        let (mut at, mut value) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            match u32::from(code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    value = u32::from_ne_bytes(*data[k as usize..].first_chunk().unwrap());
                }
                code if code == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => value &= k,
                code if code == libc::BPF_RET | libc::BPF_K => return k,
                _ => at += usize::from(if value == k { jt } else { jf }),
            }
        }
    }

    fn era(version: &str) -> &'static Era {
        Era::for_version(version.parse().unwrap()).unwrap()
    }

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;
    const BUSY: u32 = libc::SECCOMP_RET_ERRNO | 16;
    const NOTTY: u32 = libc::SECCOMP_RET_ERRNO | 25;

    #[test]
    fn calls_of_the_manager_are_matched_in_every_way_to_make_them() {
        let ways = [(ARCH_X86_64, 16), (ARCH_X86_64, 514 | X32), (ARCH_X86_64, 16 | X32), (ARCH_I386, 54)];
        for (version, long) in [("515.43.04", 40), ("530.41.03", 40), ("535.54.03", 48), ("580.142", 48)] {
            for (program, want) in [(reported(era(version)), NOTIFY), (denied(), NOTTY)] {
                let is_reported = want == NOTIFY;
                for (arch, nr) in ways {
                    let ask = |command: u64| run(&program, arch, nr, [3, command]);
                    for (number, size) in [
                        (0x2b, 32),
                        (0x2b, long),
                        (0x28, 20),
                        (0x29, 16),
                        (0x2a, 32),
                        (0x34, 28),
                        (0x4a, 184),
                        (0xd3, 16),
                    ] {
                        let command = u64::from(size as u32) << 16 | number;
                        for odd in [0xc000_4600, 0xc000_4700, 0, 0xffff_ffff_4000_4600] {
                            assert_eq!(ask(command | odd), want, "{version} {command:x} {odd:x}");
                        }
                    }
                    let map = if is_reported { NOTIFY } else { ALLOW };
                    assert_eq!(ask(33), map);
                    let other_long = if long == 40 { 48 } else { 40 };
                    let others = u64::from(other_long as u32) << 16 | 0x2b;
                    assert_eq!(ask(others), if is_reported { ALLOW } else { NOTTY }, "{version}");
                    for command in [
                        0x5401,      // TCGETS
                        0x802c_542a, // TCGETS2
                        0x402c_542b, // TCSETS2
                        0x541b,      // FIONREAD
                        0xc008_462b,
                    ] {
                        assert_eq!(ask(command), ALLOW, "{version} {command:x}");
                    }
                }
            }
        }
    }

    /// Other device drivers choose the numbers of their calls freely.
    #[test]
    fn of_the_kernels_own_calls_two_are_matched() {
        let text = include_str!("../fixtures/linux.tsv");
        let rows: Vec<(u32, &str)> = text
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .map(|(command, name)| (u32::from_str_radix(command, 16).unwrap(), name))
            .collect();
        let mut ends: Vec<u32> = rows.iter().map(|(command, _)| command & 0xff).collect();
        ends.sort_unstable();
        ends.dedup();
        let programs = Era::all().iter().map(reported).chain([denied()]);
        for (era, program) in Era::all().iter().map(Some).chain([None]).zip(programs) {
            let calls: Vec<u32> = era.map_or_else(|| Era::all().iter().flat_map(matched).collect(), matched);
            assert!(
                calls.iter().all(|call| ends.contains(&(call & 0xff))),
                "the list was made for other numbers"
            );
            let hits = |command: u32| run(&program, ARCH_X86_64, 16, [3, command.into()]) != ALLOW;
            let hit: Vec<&str> = rows.iter().filter(|row| hits(row.0)).map(|row| row.1).collect();
            let is_long = calls.contains(&(48 << 16 | u32::from(number::ALLOC)));
            let want: &[&str] = if is_long { &["XFS_IOC_UNRESVSP64", "BTRFS_IOC_QGROUP_LIMIT"] } else { &[] };
            assert_eq!(hit, want);
        }
    }

    #[test]
    fn a_listener_of_the_programs_own_is_refused_where_calls_are_reported_alone() {
        let set = u64::from(libc::SECCOMP_SET_MODE_FILTER);
        let listen = u64::from(NEW_LISTENER);
        let (reported, denied) = (reported(era("580.142")), denied());
        for (arch, nr) in [(ARCH_X86_64, 317), (ARCH_X86_64, 317 | X32), (ARCH_I386, 354)] {
            assert_eq!(run(&reported, arch, nr, [set, listen]), BUSY);
            assert_eq!(run(&reported, arch, nr, [set, listen | 1 << 5 | 0xffff_ffff_0000_0000]), BUSY);
            assert_eq!(run(&reported, arch, nr, [set, 0]), ALLOW);
            assert_eq!(run(&reported, arch, nr, [2, listen]), ALLOW);
            assert_eq!(run(&denied, arch, nr, [set, listen]), ALLOW);
        }
    }

    #[test]
    fn other_system_calls_and_other_machines_pass() {
        let program = reported(era("580.142"));
        for (arch, nr) in [(ARCH_X86_64, 0), (ARCH_X86_64, 54), (ARCH_I386, 16), (0xc000_00b7, 29)] {
            assert_eq!(run(&program, arch, nr, [3, 0xc030_462b]), ALLOW, "{arch:x} {nr}");
        }
    }
}
