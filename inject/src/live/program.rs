//! Device programs of cgroup v2 as instructions: puts the check for the granted devices before the program
//! that a runtime attached.

/// One BPF instruction as the kernel lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Instruction {
    code: u8,
    /// Number of the destination register in the low four bits, of the source register in the high four.
    registers: u8,
    offset: i16,
    immediate: i32,
}

// Opcodes of linux/bpf.h.
const LOAD_WORD: u8 = 0x61;
const MOVE_WORD: u8 = 0xbc;
const MOVE: u8 = 0xb7;
const AND_WORD: u8 = 0x54;
const SHIFT_RIGHT_WORD: u8 = 0x74;
const JUMP_IF_NOT_EQUAL: u8 = 0x55;
const EXIT: u8 = 0x95;

/// BPF_DEVCG_DEV_CHAR.
const CHARACTER: i32 = 2;
/// BPF_DEVCG_ACC_READ and _WRITE.
const READ_WRITE: i32 = 2 | 4;

/// Numbers of a character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub major: u32,
    pub minor: u32,
}

/// `original` with a prefix that allows to read and write `devices`, and leaves every other decision to it.
/// `None` when a jump would be too long. The prefix keeps the context in register 1, where the original
/// expects it: one word with the type in the low and the access in the high 16 bits, then major, then minor.
pub(super) fn with_grants(devices: &[Device], original: &[Instruction]) -> Option<Vec<Instruction>> {
    let grants: Vec<Instruction> = devices.iter().map(grant).collect::<Option<Vec<_>>>()?.concat();
    let behind = |more: usize| i16::try_from(grants.len() + more).ok();
    let mut program = vec![
        instruction(LOAD_WORD, 2, 1, 0, 0),
        instruction(MOVE_WORD, 3, 2, 0, 0),
        instruction(AND_WORD, 2, 0, 0, 0xffff),
        instruction(JUMP_IF_NOT_EQUAL, 2, 0, behind(5)?, CHARACTER),
        instruction(SHIFT_RIGHT_WORD, 3, 0, 0, 16),
        instruction(AND_WORD, 3, 0, 0, !READ_WRITE),
        instruction(JUMP_IF_NOT_EQUAL, 3, 0, behind(2)?, 0),
        instruction(LOAD_WORD, 2, 1, 4, 0),
        instruction(LOAD_WORD, 3, 1, 8, 0),
    ];
    program.extend(grants);
    program.extend(original);
    Some(program)
}

/// Instructions that return 1 if the numbers in registers 2 and 3 are this device's.
fn grant(device: &Device) -> Option<[Instruction; 4]> {
    // The comparison extends the number with its sign, so it must fit an i32. Linux has 12 bits of major and
    // 20 of minor.
    let (major, minor) = (i32::try_from(device.major).ok()?, i32::try_from(device.minor).ok()?);
    Some([
        instruction(JUMP_IF_NOT_EQUAL, 2, 0, 3, major),
        instruction(JUMP_IF_NOT_EQUAL, 3, 0, 2, minor),
        instruction(MOVE, 0, 0, 0, 1),
        instruction(EXIT, 0, 0, 0, 0),
    ])
}

const fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: destination | source << 4, offset, immediate }
}

/// Whether a dump is blank: the kernel hides the instructions of a program whose constants it blinded.
pub(super) fn is_blank(dump: &[Instruction]) -> bool {
    dump.iter().all(|instruction| *instruction == Instruction::default())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub const ALLOW: [Instruction; 2] = [instruction(MOVE, 0, 0, 0, 1), instruction(EXIT, 0, 0, 0, 0)];
    pub const DENY: [Instruction; 2] = [instruction(MOVE, 0, 0, 0, 0), instruction(EXIT, 0, 0, 0, 0)];

    /// Runs a program on the part of the BPF machine that these programs use.
    fn run(program: &[Instruction], context: [u32; 3]) -> u64 {
        let mut registers = [0_u64; 11];
        let mut at = 0;
        loop {
            let now = program[at];
            let (to, from) = (usize::from(now.registers & 15), usize::from(now.registers >> 4));
            let immediate = now.immediate as i64 as u64;
            let low = |value: u64| value & 0xffff_ffff;
            at += 1;
            match now.code {
                LOAD_WORD => registers[to] = u64::from(context[usize::try_from(now.offset).unwrap() / 4]),
                MOVE_WORD => registers[to] = low(registers[from]),
                MOVE => registers[to] = immediate,
                AND_WORD => registers[to] = low(registers[to]) & low(immediate),
                SHIFT_RIGHT_WORD => registers[to] = low(registers[to]) >> immediate,
                JUMP_IF_NOT_EQUAL if registers[to] != immediate => at += usize::try_from(now.offset).unwrap(),
                JUMP_IF_NOT_EQUAL => {}
                EXIT => return registers[0],
                code => panic!("opcode {code:#x}"),
            }
        }
    }

    #[test]
    fn granted_devices_may_be_read_and_written_and_nothing_else_changes() {
        let devices = [Device { major: 195, minor: 0 }, Device { major: 508, minor: 1 << 19 }];
        let program = with_grants(&devices, &DENY).unwrap();
        const MKNOD: u32 = 1;
        const READ: u32 = 2;
        const WRITE: u32 = 4;
        const BLOCK: u32 = 1;
        const CHAR: u32 = 2;
        for (kind, access, major, minor, want) in [
            (CHAR, READ, 195, 0, 1),
            (CHAR, WRITE, 195, 0, 1),
            (CHAR, READ | WRITE, 195, 0, 1),
            (CHAR, READ, 508, 1 << 19, 1),
            (CHAR, MKNOD, 195, 0, 0),
            (CHAR, READ | MKNOD, 195, 0, 0),
            (BLOCK, READ, 195, 0, 0),
            (CHAR, READ, 195, 1, 0),
            (CHAR, READ, 196, 0, 0),
            (CHAR, READ, 508, 0, 0),
            (CHAR, READ, 0, 195, 0),
        ] {
            let asked = run(&program, [access << 16 | kind, major, minor]);
            assert_eq!(asked, want, "type {kind} access {access} {major}:{minor}");
        }
    }

    #[test]
    fn a_blank_dump_is_no_program() {
        assert!(is_blank(&[]) && is_blank(&[Instruction::default(); 3]));
        assert!(!is_blank(&DENY));
        assert_eq!(size_of::<Instruction>(), 8);
    }
}
