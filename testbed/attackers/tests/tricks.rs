//! Tricks to exceed the limit, each of which worked once.

use gpushare_attackers::world::{Ground, LIMITS, PARAMETERS, World, of_bytes, of_device};
use gpushare_supervisor::abi::{
    Class, Status, alloc_object, duplicate, heap, memory, number, put, transfer, u32_at,
};
use gpushare_supervisor::books::MOST_OBJECTS;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const DEVICE: u32 = Class::DEVICE.0;
const SUBDEVICE: u32 = Class::SUBDEVICE.0;
const RANGE: u32 = Class::VIRTUAL_RANGE.0;
const ADDRESS_SPACE: u32 = 0x90f1;

/// RM frees everything below a device, and other objects may get the handles. Objects below those handles are
/// then different ones.
#[test]
fn what_goes_with_a_device_leaves_the_books_and_nothing_else_does() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.allocate(101, 0x41, [0; 3], &[]).expect("a root client");
    world.allocate(101, DEVICE, [client, client, 1], &of_device(0)).expect("a device");
    world.allocate(101, SUBDEVICE, [client, 1, 2], &[0; 4]).expect("a subdevice");
    world.allocate(101, ADDRESS_SPACE, [client, 2, 3], &[0; 56]).expect("an address space below it");
    assert_eq!(world.free(101, client, 1), Some(0));
    assert!(world.supervisor.look().is_empty());
    assert_eq!(world.supervisor.books.sums(0).charged(), 0, "all of it is gone");

    // A handle of an address space is now that of a device.
    world.allocate(101, DEVICE, [client, client, 3], &of_device(0)).expect("a device");
    world.allocate(101, RANGE, [client, 3, 4], &of_bytes(128 * GIB)).expect("a range below it");
    world.allocate(101, DEVICE, [client, client, 2], &of_device(0)).expect("another");
    assert_eq!(world.free(101, client, 2), Some(0));
    world.check("the range is still there");
    assert!(world.supervisor.books.sums(0).charged() > 256 * MIB);
}

/// RM gives a client's handle to another one after some hundred thousand, and a client's file can be closed
/// without notice to the supervisor.
#[test]
fn memory_counts_on_the_gpu_where_it_is_and_not_where_a_former_client_had_it() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let former = world.client(102);
    let _ = world.memory(102, former, 0, 100 * MIB).expect("memory on the first GPU");
    world.manager.borrow_mut().close(102);
    world.manager.borrow_mut().reuse_handles();

    let client = world.allocate(102, 0x41, [0; 3], &[]).expect("a root client");
    assert_eq!(client, former);
    world.allocate(102, DEVICE, [client, client, 0x80], &of_device(1)).expect("the other GPU");
    world.allocate(102, SUBDEVICE, [client, 0x80, 0x2080], &[0; 4]).expect("its subdevice");
    let _ = world.memory(102, client, 0, LIMITS[1] - MIB).expect("memory on the second GPU");
    world.check("it has all of the second GPU");
    assert_eq!(world.memory(102, client, 0, 2 * MIB), Err(Status::NO_MEMORY.0));
    world.check("and no more");
}

/// RM counts memory for the process that made the client. If that belongs to another container, the
/// supervisor does not query it.
#[test]
fn a_client_that_somebody_else_made_gets_no_memory() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    // Its maker sends the file to a process of the container.
    let client = world.slip([900, 101], 0x41, [0; 3], &[]).expect("a root client");
    world.allocate(101, DEVICE, [client, client, 0x80], &of_device(0)).expect("a device");
    for _ in 0..3 {
        assert_eq!(world.memory(101, client, 0, MIB), Err(Status::NO_MEMORY.0));
    }
    assert_eq!(world.used(), 0);
    world.check("nothing was made");
    // Clients that it makes itself work.
    let client = world.client(101);
    let _ = world.memory(101, client, 0, LIMITS[0]).expect("all of it");
}

/// An honest case: a launcher makes the client and ends, and its child continues to use it.
#[test]
fn a_client_that_outlives_its_maker_gets_memory() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(101);
    let first = world.memory(101, client, 0, MIB).expect("memory of the maker's");
    world.files.insert(102, 101);
    assert_eq!(world.free(102, client, first), Some(0));
    world.leave(101);
    assert!(world.supervisor.look().is_empty());
    let _ = world.memory(102, client, 0, LIMITS[0] - 4 * MIB).expect("nearly all of it");
    world.check("the child has it");
    assert!(world.supervisor.look().is_empty(), "it is no race");
    assert_eq!(world.memory(102, client, 0, 8 * MIB), Err(Status::NO_MEMORY.0));
}

/// RM counts nothing for a channel group or for page tables, so a process that duplicates another container's
/// would get them for free.
#[test]
fn what_rm_does_not_count_is_not_duplicated_from_others() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(102);
    let theirs = world.slip([102, 900], 0x41, [0; 3], &[]).expect("another container's client");
    world.slip([102, 900], DEVICE, [theirs, theirs, 1], &of_device(0)).expect("its device");
    let range = world.slip([102, 900], RANGE, [theirs, 1, 0], &of_bytes(128 * GIB)).expect("its range");
    let memory = world.slip([102, 900], Class::MEMORY.0, [theirs, 1, 0], &of_bytes(MIB)).expect("its memory");
    let mut duplicate = |source: u32| {
        let mut structure = [0; duplicate::SIZE];
        for (at, word) in [
            (duplicate::CLIENT, client),
            (duplicate::PARENT, 0x80),
            (duplicate::SOURCE_CLIENT, theirs),
            (duplicate::SOURCE, source),
        ] {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        let (structure, _) = world.call(102, number::DUP_OBJECT, &structure, &[]).expect("a call of RM's");
        u32_at(&structure, duplicate::STATUS)
    };
    assert_eq!(duplicate(range), Status::INSUFFICIENT_PERMISSIONS.0);
    assert_eq!(duplicate(memory), 0, "RM counts memory for its owner");
    // A hint with that handle in the books changes nothing.
    let _refused = world.allocate(102, DEVICE, [theirs, theirs, range], &of_device(0));
    let mut structure = [0; duplicate::SIZE];
    let words = [(duplicate::CLIENT, client), (duplicate::PARENT, 0x80), (duplicate::SOURCE_CLIENT, theirs)];
    for (at, word) in words.into_iter().chain([(duplicate::SOURCE, range)]) {
        put(&mut structure, at, &word.to_ne_bytes());
    }
    let (structure, _) = world.call(102, number::DUP_OBJECT, &structure, &[]).expect("a call of RM's");
    assert_eq!(u32_at(&structure, duplicate::STATUS), Status::INSUFFICIENT_PERMISSIONS.0);
}

#[test]
fn a_program_may_let_rm_choose_its_subdevices_handle() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.allocate(101, 0x41, [0; 3], &[]).expect("a root client");
    let device = world.allocate(101, DEVICE, [client, client, 0], &of_device(1)).expect("a device");
    world.allocate(101, SUBDEVICE, [client, device, 0], &[0; 4]).expect("a subdevice");
    let place = [client, device, 0];
    world.allocate(101, Class::MEMORY.0, place, &of_bytes(LIMITS[1])).expect("all of the second GPU");
    world.check("it is charged there");
}

/// Host memory from the heap is not device memory, whatever its entry looks like.
#[test]
fn an_odd_parent_is_refused_and_leaves_the_books_as_they_are() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(102);
    let _ = world.memory(102, client, 0, MIB).expect("memory");
    let mut structure = vec![0; heap::SIZE];
    for (at, word) in [
        (heap::CLIENT, client),
        (heap::PARENT, 0x80),
        (heap::FUNCTION, heap::ALLOC_SIZE),
        (heap::ATTRIBUTES, memory::LOCATION), // not on the device
    ] {
        put(&mut structure, at, &word.to_ne_bytes());
    }
    put(&mut structure, heap::LENGTH, &MIB.to_ne_bytes());
    let (structure, _) = world.call(102, number::VID_HEAP_CONTROL, &structure, &[]).expect("a call of RM's");
    assert_eq!(u32_at(&structure, heap::STATUS), 0);
    let place = [client, u32_at(&structure, heap::HANDLE), 0];
    let _whatever_rm_says = world.allocate(102, Class::MEMORY.0, place, &of_bytes(MIB));
    let sums = world.supervisor.books.sums(0);
    assert_eq!((sums.passed, sums.orphaned), (0, 0), "{sums:?}");
}

/// A process can leave its file to another one, and end.
#[test]
fn what_a_race_takes_for_a_process_that_ended_is_found() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(101);
    let other = world.client(102);
    let _ = world.memory(102, other, 0, MIB).expect("the other one has a client, too");
    world.files.insert(102, 101);
    world.leave(101);
    assert!(world.supervisor.look().is_empty());
    world.slip([102, 101], Class::MEMORY.0, [client, 0x80, 0], &of_bytes(2 * LIMITS[0])).expect("memory");
    let races = world.supervisor.look();
    assert_eq!(races.len(), 1, "{races:?}");
    assert!(races[0].is_above);
    assert_eq!(races[0].processes, [102], "who lives answers for it");
}

/// A client and its memory live as long as any process has its file.
#[test]
fn who_keeps_what_a_race_took_is_ended_too() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let parent = world.client(104);
    let _ = world.memory(104, parent, 0, MIB).expect("the parent works, too");
    let client = world.client(101);
    assert!(world.supervisor.look().is_empty());
    world.slip([101; 2], Class::MEMORY.0, [client, 0x80, 0], &of_bytes(2 * LIMITS[0])).expect("memory");
    let races = world.supervisor.look();
    assert_eq!(races[0].processes, [101]);
    world.leave(101); // the parent has its file
    let races = world.supervisor.look();
    assert_eq!(races.len(), 1, "{races:?}");
    assert_eq!((races[0].bytes, &races[0].processes[..]), (0, &[104][..]));
    world.end(104);
    assert!(world.supervisor.look().is_empty(), "nobody is left");
    world.manager.borrow_mut().close(101);
    assert!(world.supervisor.look().is_empty());
}

/// Opening a GPU's file initialises the GPU, which takes seconds.
#[test]
fn a_gpu_that_nobody_uses_is_left_alone() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.allocate(101, 0x41, [0; 3], &[]).expect("a root client");
    world.allocate(101, DEVICE, [client, client, 0x80], &of_device(0)).expect("a device");
    let _ = world.memory(101, client, 0, MIB).expect("memory");
    world.end(101);
    let _ = world.supervisor.look();
    assert!(world.opened().is_empty(), "nobody uses any: {:?}", world.opened());
    let client = world.client(103);
    let _ = world.memory(103, client, 1, MIB).expect("memory");
    world.files.insert(104, 103);
    world.leave(103);
    let _ = world.supervisor.look();
    assert!(!world.opened().is_empty(), "one is used, and can be asked through no file of a program's");
    assert!(world.supervisor.has_clients());
}

#[test]
fn a_race_counts_where_the_lease_is_above_its_limit_already() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(102);
    let _ = world.memory(102, client, 0, LIMITS[0]).expect("all of it");
    for _ in 0..2 {
        world.slip([102; 2], Class::MEMORY.0, [client, 0x80, 0], &of_bytes(4 * MIB)).expect("more");
        let races = world.supervisor.look();
        assert!(races.iter().all(|race| race.is_above) && races.len() == 1, "{races:?}");
        assert_eq!(races[0].processes, [102]);
    }
}

/// The card allocates whole pieces, and RM does not report how many.
#[test]
fn small_memory_of_a_race_counts_as_the_pieces_that_it_may_be() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(102);
    let _ = world.memory(102, client, 0, MIB).expect("memory");
    for _ in 0..100 {
        world.slip([102; 2], Class::MEMORY.0, [client, 0x80, 0], &of_bytes(4096)).expect("a page");
    }
    assert_eq!(world.supervisor.look().len(), 1);
    world.check("each page takes a piece");
}

/// A call that is let through can become any other with the same number, so none is let through that could
/// free or allocate.
#[test]
fn no_call_is_let_through_that_could_become_a_free() {
    let mut ground = Ground::new(MOST_OBJECTS);
    let mut world = World::on(&mut ground);
    let client = world.client(102);
    // The sizes of a root client's allocation, which is let through unless another call carries it, and of a
    // control call.
    let sizes = [32, 48];
    for (carried, size) in (0..=u8::MAX).flat_map(|carried| sizes.map(|size| (carried, size))) {
        let mut structure = vec![0; transfer::SIZE];
        put(&mut structure, transfer::COMMAND, &u32::from(carried).to_ne_bytes());
        put(&mut structure, transfer::LENGTH, &u32::to_ne_bytes(size));
        put(&mut structure, transfer::ADDRESS, &PARAMETERS.to_ne_bytes());
        assert_eq!(world.call(102, number::TRANSFER, &structure, &[0; 64]), None, "{carried:#x}");
    }
    for function in 0..64u32 {
        let mut structure = vec![0; heap::SIZE];
        put(&mut structure, heap::CLIENT, &client.to_ne_bytes());
        put(&mut structure, heap::FUNCTION, &function.to_ne_bytes());
        let _ = world.call(102, number::VID_HEAP_CONTROL, &structure, &[]);
    }
    assert_eq!(world.passed, 5, "a client with its devices and subdevices, and nothing since");
}

/// A call of older libraries would make a client whose maker the supervisor does not query.
#[test]
fn no_client_is_made_by_a_call_that_nobody_follows() {
    let mut ground = Ground::new(1 << 10);
    let mut world = World::on(&mut ground);
    for class in [0u32, 0x41] {
        let mut structure = [0; alloc_object::SIZE];
        put(&mut structure, alloc_object::CLASS, &class.to_ne_bytes());
        let (after, _) = world.call(10, number::ALLOC_OBJECT, &structure, &[]).expect("RM's own status");
        assert_eq!(u32_at(&after, alloc_object::STATUS), Status::NOT_SUPPORTED.0);
        assert_eq!(u32_at(&after, alloc_object::CLIENT), 0, "a client's handle");
    }
}
