//! Compares the books with RM's own count, over random sequences of calls from several processes.

use gpushare_attackers::world::{Ground, LIMITS, PARAMETERS, World, era};
use gpushare_supervisor::abi::{
    Class, Status, alloc, control, duplicate, free, heap, memory, number, put, transfer, u32_at,
};
use gpushare_supervisor::books::MOST_OBJECTS;

const MIB: u64 = 1 << 20;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn the_books_are_never_below_what_the_card_has_in_use() {
    for seed in 1..40u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut ground = Ground::new(MOST_OBJECTS);
        let mut world = World::on(&mut ground);
        let mut clients: Vec<(u32, u32, Vec<u32>)> = Vec::new();
        let mut next_pid = 100;
        for step in 0..600 {
            let choice = random(&mut state) % 100;
            let what = format!("seed {seed}, step {step}, choice {choice}");
            if clients.is_empty() || choice < 4 {
                next_pid += 1;
                let client = world.client(next_pid);
                clients.push((next_pid, client, Vec::new()));
                continue;
            }
            let at = usize::try_from(random(&mut state)).expect("64 bits") % clients.len();
            let (pid, client, objects) = &mut clients[at];
            let (pid, client) = (*pid, *client);
            let gpu = u32::try_from(random(&mut state) % 2).expect("0 or 1");
            match choice {
                4..50 => {
                    let bytes = (random(&mut state) % 40 + 1) * MIB + random(&mut state) % 4096;
                    if let Ok(handle) = world.memory(pid, client, gpu, bytes) {
                        objects.push(handle);
                    }
                }
                50..60 => {
                    let mut structure = [0; heap::SIZE];
                    let function = [heap::ALLOC_SIZE, heap::ALLOC_TILED_PITCH_HEIGHT, heap::ALLOC_SIZE_RANGE]
                        [usize::try_from(random(&mut state) % 3).expect("small")];
                    let bytes = (random(&mut state) % 20 + 1) * MIB;
                    for (at, word) in
                        [(heap::CLIENT, client), (heap::PARENT, 0x80 + gpu), (heap::FUNCTION, function)]
                    {
                        put(&mut structure, at, &word.to_ne_bytes());
                    }
                    put(&mut structure, heap::RANGE_LENGTH, &bytes.to_ne_bytes());
                    if function != heap::ALLOC_SIZE_RANGE {
                        put(&mut structure, heap::LENGTH, &bytes.to_ne_bytes());
                    }
                    if function == heap::ALLOC_TILED_PITCH_HEIGHT {
                        let pitch = u32::try_from(bytes >> 10).expect("small");
                        put(&mut structure, heap::HEIGHT, &1024u32.to_ne_bytes());
                        put(&mut structure, heap::PITCH, &pitch.to_ne_bytes());
                    }
                    if let Some((done, _)) = world.call(pid, number::VID_HEAP_CONTROL, &structure, &[])
                        && u32_at(&done, heap::STATUS) == Status::OK.0
                    {
                        objects.push(u32_at(&done, heap::HANDLE));
                    }
                }
                60..80 if !objects.is_empty() => {
                    let index = usize::try_from(random(&mut state)).expect("64 bits") % objects.len();
                    let handle = objects.swap_remove(index);
                    assert_eq!(world.free(pid, client, handle), Some(0), "{what}");
                }
                80..86 if !objects.is_empty() => {
                    // Make a duplicate in the same client, then free the first handle.
                    let source = objects[0];
                    let mut structure = [0; duplicate::SIZE];
                    let words = [(duplicate::CLIENT, client), (duplicate::PARENT, 0x80 + gpu)];
                    for (at, word) in words.into_iter().chain([(12, client), (16, source)]) {
                        put(&mut structure, at, &word.to_ne_bytes());
                    }
                    if let Some((done, _)) = world.call(pid, number::DUP_OBJECT, &structure, &[])
                        && u32_at(&done, duplicate::STATUS) == Status::OK.0
                    {
                        objects[0] = u32_at(&done, duplicate::HANDLE);
                        assert_eq!(world.free(pid, client, source), Some(0), "{what}");
                    }
                }
                86..89 => {
                    // Free a whole device and everything below it.
                    assert_eq!(world.free(pid, client, 0x80 + gpu), Some(0), "{what}");
                    objects.clear();
                    let mut parameters = vec![0; 56];
                    put(&mut parameters, 0, &gpu.to_ne_bytes());
                    world
                        .allocate(pid, 0x80, [client, client, 0x80 + gpu], &parameters)
                        .expect("the device can be had again");
                }
                89..92 => {
                    world.end(pid);
                    clients.swap_remove(at);
                    let _ = world.supervisor.look();
                }
                // A channel without a group needs 4,480 KiB. Without that room the supervisor does not call
                // RM.
                92 if !objects.is_empty()
                    && world.supervisor.budget.charged(gpu as usize) + (4_480 << 10)
                        <= LIMITS[gpu as usize] =>
                {
                    // A channel with the handle of another object.
                    let taken = objects[0];
                    let done = world.allocate(pid, 0xc86f, [client, 0x80 + gpu, taken], &[]);
                    assert_eq!(done, Err(Status::DUPLICATE.0), "{what}");
                }
                93 if !objects.is_empty() => {
                    let mut structure = [0; heap::SIZE];
                    let words = [(heap::CLIENT, client), (heap::FUNCTION, heap::HW_FREE)];
                    for (at, word) in words.into_iter().chain([(heap::HW_HANDLE, objects.swap_remove(0))]) {
                        put(&mut structure, at, &word.to_ne_bytes());
                    }
                    let done = world.call(pid, number::VID_HEAP_CONTROL, &structure, &[]);
                    assert_eq!(done.map(|(done, _)| u32_at(&done, heap::STATUS)), Some(0), "{what}");
                }
                94 if !objects.is_empty() => {
                    // A file holds the memory, and the handle is freed.
                    let handle = objects.swap_remove(0);
                    let booked = world.supervisor.books.get(client, handle);
                    if booked.is_none_or(|booked| booked.class == Class::MEMORY) {
                        let _ = world.manager.borrow_mut().hold(1, client, handle);
                    }
                    assert_eq!(world.free(pid, client, handle), Some(0), "{what}");
                }
                95 => {
                    let mut parameters = vec![0; era().memory];
                    let bytes = (random(&mut state) % 8 + 1) << 30;
                    put(&mut parameters, memory::LENGTH, &bytes.to_ne_bytes());
                    let range = Class::VIRTUAL_RANGE.0;
                    if let Ok(handle) = world.allocate(pid, range, [client, 0x80 + gpu, 0], &parameters) {
                        objects.push(handle);
                    }
                }
                96 => {
                    let group = world.allocate(pid, 0xa06c, [client, 0x80 + gpu, 0], &[0; 20]);
                    objects.extend(group);
                }
                97 => world.manager.borrow_mut().close(1),
                // A handle without an object, such as the kernel's number of the process.
                98 => assert_eq!(world.free(pid, client, pid), Some(0), "{what}"),
                _ => {
                    let races = world.supervisor.look();
                    assert!(races.is_empty(), "{what}: {races:?}");
                }
            }
            world.check(&what);
        }
    }
}

#[test]
fn what_was_freed_can_be_had_again_and_what_a_dead_process_left_is_gone() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(100);
    for _ in 0..100 {
        let handle = world.memory(100, client, 0, LIMITS[0]).expect("all of it");
        assert_eq!(world.memory(100, client, 0, 4096), Err(Status::NO_MEMORY.0));
        assert_eq!(world.free(100, client, handle), Some(0));
    }
    for pid in 101..130 {
        let client = world.client(pid);
        let _ = world.memory(pid, client, 0, LIMITS[0]).expect("the last process's memory is gone");
        world.end(pid);
    }
    world.check("at the end");
}

/// A child makes calls with its parent's client, and RM counts the memory for the parent.
#[test]
fn memory_of_another_processs_client_is_charged_once_and_stays_charged() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(100);
    // The child has the parent's file.
    world.files.insert(101, 100);
    let whole = world.memory(101, client, 0, LIMITS[0]).expect("all of it");
    for _ in 0..5 {
        assert_eq!(world.memory(101, client, 0, 64 * MIB), Err(Status::NO_MEMORY.0));
        assert!(world.supervisor.look().is_empty());
        world.check("the child holds all");
    }
    assert_eq!(world.free(101, client, whole), Some(0));
    let _ = world.memory(101, client, 0, LIMITS[0]).expect("all of it again");
    // The parent ends, and the child keeps the client.
    world.leave(100);
    assert!(world.supervisor.look().is_empty());
    assert_eq!(world.memory(101, client, 0, 64 * MIB), Err(Status::NO_MEMORY.0));
    world.check("the parent has ended");
}

#[test]
fn a_subdevice_of_the_programs_own_can_be_had_at_any_time() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(101);
    let _ = world.memory(101, client, 0, MIB).expect("memory before the subdevice");
    let place = [client, 0x80, 0x2080];
    assert_eq!(world.allocate(101, 0x2080, place, &[0; 4]), Ok(0x2080));
    let _ = world.memory(101, client, 0, MIB).expect("and after it");
    world.check("at the end");
}

#[test]
fn wild_calls_are_answered_and_never_take_more_than_the_limit() {
    let mut state = 0x2545_f491_4f6c_dd1d;
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let mut client = world.client(100);
    let mut allocated = 0;
    let sizes = [
        (number::ALLOC, 32),
        (number::ALLOC, 48),
        (number::FREE, free::SIZE),
        (number::CONTROL, control::SIZE),
    ];
    let more = [
        (number::DUP_OBJECT, duplicate::SIZE),
        (number::VID_HEAP_CONTROL, heap::SIZE),
        (number::TRANSFER, transfer::SIZE),
    ];
    for step in 0..40_000 {
        if step % 200 == 0 {
            client = world.client(100); // the last one may have been freed
        }
        let all: Vec<(u8, usize)> = sizes.into_iter().chain(more).collect();
        let (number, size) = all[usize::try_from(random(&mut state)).expect("64 bits") % all.len()];
        // A call that could be valid, with up to three words changed.
        let mut structure = vec![0; size];
        let mut parameters = vec![0; 256];
        let bytes = random(&mut state) % (64 * MIB) + 1;
        put(&mut parameters, memory::LENGTH, &bytes.to_ne_bytes());
        let handle = 0xe500_0000 | u32::try_from(random(&mut state) % 64).expect("small");
        let mut words = vec![(alloc::CLIENT, client), (alloc::PARENT, 0x80)];
        match number {
            number::ALLOC => {
                words.push((alloc::CLASS, [0x40, 0x50a0, 0x90f1, 0xa06c, 0xc86f][step % 5]));
                put(&mut structure, alloc::PARAMETERS, &PARAMETERS.to_ne_bytes());
            }
            number::VID_HEAP_CONTROL => {
                words.push((heap::FUNCTION, [2, 6, 14, 3, 20][step % 5]));
                put(&mut structure, heap::RANGE_LENGTH, &bytes.to_ne_bytes());
                put(&mut structure, heap::LENGTH, &bytes.to_ne_bytes());
            }
            number::DUP_OBJECT => {
                words.extend([(duplicate::SOURCE_CLIENT, client), (duplicate::SOURCE, handle)]);
            }
            number::TRANSFER => {
                let carried = [u32::from(number::ALLOC), u32::from(number::FREE)][step % 2];
                words = vec![(transfer::COMMAND, carried), (transfer::LENGTH, [48, 16][step % 2])];
                put(&mut structure, transfer::ADDRESS, &PARAMETERS.to_ne_bytes());
                for (at, word) in [(alloc::CLIENT, client), (alloc::PARENT, 0x80), (alloc::CLASS, 0x40)] {
                    put(&mut parameters, at, &word.to_ne_bytes());
                }
                put(&mut parameters, alloc::PARAMETERS, &PARAMETERS.to_ne_bytes());
            }
            _ => words.push((free::HANDLE, handle)),
        }
        for (at, word) in words {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        for _ in 0..random(&mut state) % 4 {
            let at = usize::try_from(random(&mut state)).expect("64 bits") % (size / 4) * 4;
            let odd = match random(&mut state) % 6 {
                0 => u32::MAX,
                1 => client,
                2 => handle,
                3 => 0x80,
                _ => u32::try_from(random(&mut state) >> 32).expect("32 bits"),
            };
            put(&mut structure, at, &odd.to_ne_bytes());
            put(&mut parameters, at, &odd.to_ne_bytes());
        }
        let before = world.used();
        let _ = world.call(100, number, &structure, &parameters);
        allocated += u32::from(world.used() > before);
        for (gpu, limit) in LIMITS.into_iter().enumerate() {
            let used = world.manager.borrow().used(gpu);
            assert!(used <= limit, "step {step}, call {number:#x}: {used}");
        }
    }
    assert!(allocated > 100, "only {allocated} calls allocated anything");
}
