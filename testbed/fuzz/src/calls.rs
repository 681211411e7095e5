//! The supervisor's reader of calls to RM, which any program in a container may make as it likes.

use gpushare_attackers::world::{Ground, LIMITS, PARAMETERS, World, era};
use gpushare_supervisor::abi::{
    alloc, channels, control, duplicate, free, heap, memory, number, put, transfer,
};

/// Objects that the books have room for here.
const OBJECTS: usize = 128;
/// Calls of one sequence.
const CALLS: usize = 16;
/// Bytes of the parameters: more than any call has.
const MOST_PARAMETERS: usize = 600;
/// The class of each allocation that could be right.
const CLASSES: [u32; 8] = [0x40, 0x50a0, 0x90f1, 0xa06c, 0xc86f, 0x41, 0x80, 0x2080];

/// Makes the calls that the bytes `data` say, from two processes. Each begins with a call that could be right, in which
/// the bytes change words.
pub fn calls(data: &[u8]) {
    let mut ground = Ground::new(OBJECTS);
    let mut world = World::on(&mut ground);
    let clients = [world.client(100), world.client(101)];
    let mut bytes = data.iter().copied();
    for _ in 0..CALLS {
        let Some(first) = bytes.next() else { break };
        let process = usize::from(first >> 7);
        let (pid, client) = ([100, 101][process], clients[process]);
        let (number, mut structure, mut parameters) = right(first, client);
        for _ in 0..bytes.next().unwrap_or(0) % 5 {
            change(&mut bytes, &mut structure, &mut parameters, clients);
        }
        let _ = world.call(pid, number, &structure, &parameters);
        for (gpu, limit) in LIMITS.into_iter().enumerate() {
            let used = world.manager.borrow().used(gpu);
            assert!(used <= limit, "call {number:#x}: {used} of {limit} used");
        }
        assert_eq!(world.manager.borrow().privileged, 0, "call {number:#x}");
    }
    assert!(world.supervisor.look().is_empty(), "nothing was changed on its way");
}

/// A call that could be right.
fn right(selector: u8, client: u32) -> (u8, Vec<u8>, Vec<u8>) {
    let kind = usize::from(selector & 0x7f);
    let mut parameters = vec![0; MOST_PARAMETERS];
    put(&mut parameters, memory::LENGTH, &(32u64 << 20).to_ne_bytes());
    let (number, size) = [
        (number::ALLOC, era().long),
        (number::ALLOC, alloc::SHORT),
        (number::FREE, free::SIZE),
        (number::CONTROL, control::SIZE),
        (number::DUP_OBJECT, duplicate::SIZE),
        (number::VID_HEAP_CONTROL, heap::SIZE),
        (number::TRANSFER, transfer::SIZE),
    ][kind % 7];
    let mut structure = vec![0; size];
    let mut words = vec![(alloc::CLIENT, client), (alloc::PARENT, 0x80)];
    match number {
        number::ALLOC => {
            words.push((alloc::CLASS, CLASSES[kind / 7 % 8]));
            put(&mut structure, alloc::PARAMETERS, &PARAMETERS.to_ne_bytes());
        }
        number::CONTROL => {
            words = vec![
                (control::CLIENT, client),
                (control::OBJECT, 0x2080),
                (control::COMMAND, channels::STOP.command),
            ];
            words.push((control::PARAMETERS_SIZE, u32::try_from(channels::STOP.size).unwrap_or(0)));
            put(&mut structure, control::PARAMETERS, &PARAMETERS.to_ne_bytes());
        }
        number::VID_HEAP_CONTROL => {
            words.push((heap::FUNCTION, [2, 6, 14, 3, 20][kind / 7 % 5]));
            put(&mut structure, heap::LENGTH, &(16u64 << 20).to_ne_bytes());
        }
        number::TRANSFER => {
            words = vec![(transfer::COMMAND, u32::from(number::ALLOC)), (transfer::LENGTH, 48)];
            put(&mut structure, transfer::ADDRESS, &PARAMETERS.to_ne_bytes());
            for (at, word) in [(alloc::CLIENT, client), (alloc::PARENT, 0x80), (alloc::CLASS, 0x40)] {
                put(&mut parameters, at, &word.to_ne_bytes());
            }
            put(&mut parameters, alloc::PARAMETERS, &PARAMETERS.to_ne_bytes());
        }
        _ => {}
    }
    for (at, word) in words {
        put(&mut structure, at, &word.to_ne_bytes());
    }
    (number, structure, parameters)
}

/// Changes a word of the structure or of the parameters.
fn change(
    bytes: &mut impl Iterator<Item = u8>,
    structure: &mut [u8],
    parameters: &mut [u8],
    clients: [u32; 2],
) {
    let mut next = || bytes.next().unwrap_or(0);
    let (where_to, kind) = (next(), next());
    let word = match kind % 8 {
        0 => u32::MAX,
        1 => clients[0],
        2 => clients[1],
        3 => 0x80 + u32::from(kind >> 7),
        // Handles of the supervisor's own choice, and of RM's.
        4 => 0xe500_0000 | u32::from(next()),
        5 => 0xcaf0_0000 | u32::from(next()),
        6 => u32::from(next()),
        _ => u32::from_ne_bytes([next(), next(), next(), next()]),
    };
    let to = if where_to & 1 == 0 { structure } else { parameters };
    let at = usize::from(where_to >> 1) % (to.len() / 4) * 4;
    put(to, at, &word.to_ne_bytes());
}
