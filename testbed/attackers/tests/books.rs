//! The books beside RM's own count, over random sequences of calls from several processes: in memory, without a
//! kernel between them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use gpushare_simulated_manager::{Caller, Gpu, Manager, Memory, ReadError};
use gpushare_supervisor::abi::{
    Class, Era, Status, alloc, control, duplicate, free, heap, memory, number, put, transfer, u32_at,
};
use gpushare_supervisor::books::{Books, MOST_OBJECTS, Record};
use gpushare_supervisor::budget::{Budget, Page};
use gpushare_supervisor::calls::{Answer, Call, Processes, Program, Supervisor};
use gpushare_supervisor::journal::{Entry, Journal};
use gpushare_supervisor::manager::{self, Pointed};
use nix::errno::Errno;

const MIB: u64 = 1 << 20;
const UUIDS: [[u8; 16]; 2] = [[1; 16], [2; 16]];
const LIMITS: [u64; 2] = [512 * MIB, 256 * MIB];
/// The pid of the supervisor itself.
const OURS: u32 = 7;

fn era() -> &'static Era {
    Era::for_version("580.142".parse().expect("a version")).expect("a known driver")
}

type Shared = Rc<RefCell<Manager>>;

/// RM, as the supervisor calls it.
struct Performed(Shared);

/// A few buffers at addresses of their own.
struct Buffers(RefCell<Vec<(u64, Vec<u8>)>>);

impl Memory for Buffers {
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), ReadError> {
        let buffers = self.0.borrow();
        let found = buffers.iter().find_map(|(at, bytes)| {
            let offset = usize::try_from(address.checked_sub(*at)?).ok()?;
            bytes.get(offset..offset + to.len())
        });
        to.copy_from_slice(found.ok_or(ReadError)?);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), ReadError> {
        let mut buffers = self.0.borrow_mut();
        let found = buffers.iter_mut().find_map(|(at, bytes)| {
            let offset = usize::try_from(address.checked_sub(*at)?).ok()?;
            bytes.get_mut(offset..offset + from.len())
        });
        found.ok_or(ReadError)?.copy_from_slice(from);
        Ok(())
    }
}

impl manager::Manager for Performed {
    type File = u64;

    fn call(
        &mut self,
        file: &u64,
        number: u8,
        structure: &mut [u8],
        pointed: &mut [Pointed<'_>],
    ) -> Result<(), Errno> {
        let address = |index: usize| 0x10_0000 * (index as u64 + 1);
        let buffers = pointed.iter().enumerate().map(|(index, one)| (address(index), one.bytes.to_vec()));
        let buffers = Buffers(RefCell::new(buffers.collect()));
        for (index, one) in pointed.iter().enumerate() {
            put(structure, one.offset, &address(index).to_ne_bytes());
        }
        let caller = Caller { pid: OURS, is_admin: false, file: *file };
        let done = self.0.borrow_mut().call(caller, number, structure, &buffers);
        for (one, (_, bytes)) in pointed.iter_mut().zip(buffers.0.borrow().iter()) {
            one.bytes.copy_from_slice(bytes);
            put(structure, one.offset, &[0; 8]);
        }
        match done {
            Ok(true) => Ok(()),
            Ok(false) => Err(Errno::EINVAL),
            Err(ReadError) => Err(Errno::EFAULT),
        }
    }

    fn open(&mut self) -> Option<u64> {
        Some(u64::from(OURS))
    }
}

/// The processes: descriptor 3 of each is its own file of RM's, whose number is its pid.
struct Living(Rc<RefCell<BTreeMap<u32, bool>>>);

impl Processes for Living {
    type File = u64;

    fn pids(&self) -> Vec<u32> {
        self.0.borrow().keys().copied().collect()
    }

    fn lives(&self, pid: u32) -> bool {
        self.0.borrow().get(&pid).copied().unwrap_or(false)
    }

    fn file(&self, pid: u32, _fd: i32) -> Option<u64> {
        self.lives(pid).then_some(u64::from(pid))
    }

    fn forget(&mut self, pid: u32) {
        self.0.borrow_mut().remove(&pid);
    }
}

/// A program's memory: a few buffers.
struct Stopped(Buffers);

impl Program for Stopped {
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        self.0.read(address, to).map_err(|ReadError| Errno::EFAULT)
    }

    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), Errno> {
        parts.iter().try_for_each(|(at, bytes)| self.0.write(*at, bytes)).map_err(|ReadError| Errno::EFAULT)
    }

    fn waits(&self) -> bool {
        true
    }
}

const STRUCTURE: u64 = 0x1_0000_0000;
const PARAMETERS: u64 = 0x2_0000_0000;

struct World {
    manager: Shared,
    living: Rc<RefCell<BTreeMap<u32, bool>>>,
    supervisor: Supervisor<'static, Performed, Living>,
    /// The file of a process that has another's.
    files: BTreeMap<u32, u32>,
    now: u64,
}

impl World {
    fn new() -> Self {
        let gpus = UUIDS.map(|uuid| Gpu { uuid, memory: 80 << 30 }).to_vec();
        let manager = Rc::new(RefCell::new(Manager::new(era(), gpus)));
        let page: &'static Page = Box::leak(Page::new());
        for (gpu, (uuid, limit)) in UUIDS.iter().zip(LIMITS).enumerate() {
            page.grant(gpu, uuid, limit);
        }
        let living = Rc::default();
        let records: Vec<Record> = (0..MOST_OBJECTS).map(|_| Record::default()).collect();
        let parts = (
            Books::open(Vec::leak(records), usize::MAX),
            Budget::new(page, 0),
            Journal::open(Box::leak(Box::new(Entry::default()))),
        );
        let supervisor =
            Supervisor::new(era(), parts, Performed(Rc::clone(&manager)), Living(Rc::clone(&living)), 42);
        Self { manager, living, supervisor, files: BTreeMap::new(), now: 0 }
    }

    /// A call of the process `pid`, as the kernel treats it under the filter. Returns the structure and the
    /// parameters as the program has them afterwards; `None` if it failed with an error of the kernel's.
    fn call(
        &mut self,
        pid: u32,
        number: u8,
        structure: &[u8],
        parameters: &[u8],
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        self.living.borrow_mut().insert(pid, true);
        self.now += 100_000;
        let buffers = vec![(STRUCTURE, structure.to_vec()), (PARAMETERS, parameters.to_vec())];
        let program = Stopped(Buffers(RefCell::new(buffers)));
        let file = u64::from(self.files.get(&pid).copied().unwrap_or(pid));
        let call = Call {
            number,
            size: structure.len(),
            address: STRUCTURE,
            thread: pid,
            process: pid,
            fd: 3,
            at: self.now,
        };
        let answer = self.supervisor.handle(&call, &program, &file);
        let done = match answer {
            Answer::Done => Ok(true),
            Answer::Fail(_) | Answer::Gone => Ok(false),
            Answer::LetThrough => {
                let caller = Caller { pid, is_admin: false, file };
                let mut copy = program.0.0.borrow()[0].1.clone();
                let done = self.manager.borrow_mut().call(caller, number, &mut copy, &program.0);
                program.0.0.borrow_mut()[0].1 = copy;
                done
            }
        };
        let buffers = program.0.0.into_inner();
        matches!(done, Ok(true)).then(|| (buffers[0].1.clone(), buffers[1].1.clone()))
    }

    /// A process ends, and others have its file.
    fn leave(&mut self, pid: u32) {
        if let Some(lives) = self.living.borrow_mut().get_mut(&pid) {
            *lives = false;
        }
    }

    fn end(&mut self, pid: u32) {
        if let Some(lives) = self.living.borrow_mut().get_mut(&pid) {
            *lives = false;
        }
        self.manager.borrow_mut().close(u64::from(pid));
    }

    fn allocate(&mut self, pid: u32, class: u32, place: [u32; 3], parameters: &[u8]) -> Result<u32, u32> {
        let mut structure = vec![0; era().long];
        let words = [(alloc::CLIENT, place[0]), (alloc::PARENT, place[1]), (alloc::HANDLE, place[2])];
        for (at, word) in words.into_iter().chain([(alloc::CLASS, class)]) {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        let address = if parameters.is_empty() { 0 } else { PARAMETERS };
        put(&mut structure, alloc::PARAMETERS, &address.to_ne_bytes());
        let (structure, _) = self.call(pid, number::ALLOC, &structure, parameters).ok_or(u32::MAX)?;
        match u32_at(&structure, era().long_status) {
            0 => Ok(u32_at(&structure, alloc::HANDLE)),
            status => Err(status),
        }
    }

    /// A client with a device on each GPU.
    fn client(&mut self, pid: u32) -> u32 {
        let client = self.allocate(pid, 0x41, [0; 3], &[]).expect("a root client");
        for gpu in 0..2u32 {
            let mut parameters = vec![0; 56];
            put(&mut parameters, 0, &gpu.to_ne_bytes());
            self.allocate(pid, 0x80, [client, client, 0x80 + gpu], &parameters).expect("a device");
            if pid.is_multiple_of(2) {
                let place = [client, 0x80 + gpu, 0x2080 + gpu];
                self.allocate(pid, 0x2080, place, &[0; 4]).expect("a subdevice");
            }
        }
        client
    }

    fn memory(&mut self, pid: u32, client: u32, gpu: u32, bytes: u64) -> Result<u32, u32> {
        let mut parameters = vec![0; era().memory];
        put(&mut parameters, memory::LENGTH, &bytes.to_ne_bytes());
        self.allocate(pid, Class::MEMORY.0, [client, 0x80 + gpu, 0], &parameters)
    }

    fn free(&mut self, pid: u32, client: u32, handle: u32) -> Option<u32> {
        let mut structure = [0; free::SIZE];
        put(&mut structure, free::CLIENT, &client.to_ne_bytes());
        put(&mut structure, free::HANDLE, &handle.to_ne_bytes());
        self.call(pid, number::FREE, &structure, &[]).map(|(structure, _)| u32_at(&structure, free::STATUS))
    }

    /// Bytes in use on both GPUs.
    fn used(&self) -> u64 {
        (0..2).map(|gpu| self.manager.borrow().used(gpu)).sum()
    }

    /// What must hold after every call.
    fn check(&self, what: &str) {
        let manager = self.manager.borrow();
        for (gpu, limit) in LIMITS.into_iter().enumerate() {
            let sums = self.supervisor.books.sums(gpu);
            let figures =
                self.living.borrow().keys().map(|pid| manager.figure(gpu, *pid)).collect::<Vec<_>>();
            let counted: u64 = figures.iter().map(|(private, shared)| private + shared).sum();
            let used = manager.used(gpu);
            // What another device's handle holds counts as orphaned until the next look.
            assert!(
                counted <= sums.counted() + sums.orphaned,
                "{what}: RM counts {counted}, the books {sums:?}"
            );
            assert!(used <= limit, "{what}: {used} of {limit} used");
            assert!(used <= sums.charged(), "{what}: {used} used, {sums:?}");
            assert_eq!(self.supervisor.budget.charged(gpu), sums.charged(), "{what}");
        }
        assert_eq!(manager.privileged, 0, "{what}");
    }
}

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
        let mut world = World::new();
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
                    // A duplicate in the same client, and the first handle is freed.
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
                    // A whole device and all below it.
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
                92 if !objects.is_empty() => {
                    // A channel with the handle of something else.
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
                    // A file holds it, and the handle is freed.
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
                // What is no object's: the kernel's number of the process among them.
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
    let mut world = World::new();
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

/// A child makes calls with its parent's client, and RM counts for the parent.
#[test]
fn memory_of_another_processs_client_is_charged_once_and_stays_charged() {
    let mut world = World::new();
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
    // The parent goes, and the client stays with the child.
    world.leave(100);
    assert!(world.supervisor.look().is_empty());
    assert_eq!(world.memory(101, client, 0, 64 * MIB), Err(Status::NO_MEMORY.0));
    world.check("the parent has ended");
}

#[test]
fn a_subdevice_of_the_programs_own_can_be_had_at_any_time() {
    let mut world = World::new();
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
    let mut world = World::new();
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
        // A call that could be right, in which up to three words are changed.
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
