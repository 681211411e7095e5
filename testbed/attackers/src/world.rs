//! Processes, their supervisor and RM in one program's memory, without a kernel between them, to test very
//! many calls.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gpushare_simulated_manager::{Caller, Manager, Memory, ReadError};
use gpushare_supervisor::abi::{Class, Era, Status, alloc, control, free, memory, number, put, u32_at};
use gpushare_supervisor::books::{Books, Gpu, Record};
use gpushare_supervisor::budget::{Budget, Page};
use gpushare_supervisor::calls::{Answer, Call, Compute, Engines, Processes, Program, Supervisor};
use gpushare_supervisor::journal::{Entry, Journal};
use gpushare_supervisor::manager::{self, Pointed};
use nix::errno::Errno;

/// The GPUs.
const UUIDS: [[u8; 16]; 2] = [[1; 16], [2; 16]];
/// The lease's limit on each GPU, in bytes.
pub const LIMITS: [u64; 2] = [512 << 20, 256 << 20];
/// The PID of the supervisor itself.
const OURS: u32 = 7;

/// Returns the driver's interface.
///
/// # Panics
/// Never, because the driver is known.
pub fn era() -> &'static Era {
    Era::for_version("580.142".parse().expect("a version")).expect("a known driver")
}

/// RM, shared by the supervisor and the programs.
pub type Shared = Rc<RefCell<Manager>>;

/// RM as the supervisor calls it.
#[derive(Clone)]
pub struct Performed {
    manager: Shared,
    /// GPUs whose own files were opened.
    opened: Rc<RefCell<Vec<Gpu>>>,
    /// A control call that RM refuses.
    refused: Option<u32>,
}

impl Performed {
    /// Wraps the RM of these programs.
    pub fn new(manager: &Shared) -> Self {
        Self { manager: Rc::clone(manager), opened: Rc::default(), refused: None }
    }

    /// Makes RM refuse this control call.
    #[must_use]
    pub fn refusing(self, command: u32) -> Self {
        Self { refused: Some(command), ..self }
    }
}

/// A few buffers with their addresses.
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
        if number == number::CONTROL && self.refused == Some(u32_at(structure, control::COMMAND)) {
            put(structure, control::STATUS, &Status::NOT_SUPPORTED.0.to_ne_bytes());
            return Ok(());
        }
        let address = |index: usize| 0x10_0000 * (index as u64 + 1);
        let buffers = pointed.iter().enumerate().map(|(index, one)| (address(index), one.bytes.to_vec()));
        let buffers = Buffers(RefCell::new(buffers.collect()));
        for (index, one) in pointed.iter().enumerate() {
            put(structure, one.offset, &address(index).to_ne_bytes());
        }
        let caller = Caller { pid: OURS, is_admin: false, file: *file, gpus: u32::MAX };
        let done = self.manager.borrow_mut().call(caller, number, structure, &buffers);
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

    fn copy(&self, file: &u64) -> Option<u64> {
        Some(*file)
    }

    fn open_gpu(&mut self, gpu: Gpu) -> Option<u64> {
        self.opened.borrow_mut().push(gpu);
        Some(u64::from(OURS))
    }

    fn open(&mut self) -> Option<u64> {
        Some(u64::from(OURS))
    }
}

/// The processes, and whether each lives. Forgotten ones are not included.
#[derive(Debug, Default)]
pub struct Pids {
    tracked: BTreeMap<u32, bool>,
    forgotten: BTreeSet<u32>,
    /// How many processes have had a PID, if more than one.
    births: BTreeMap<u32, u32>,
}

/// The processes. Descriptor 3 of each is its own file of RM, whose number is its PID.
pub struct Living(Rc<RefCell<Pids>>);

impl Processes for Living {
    type File = u64;

    fn tracked(&self) -> Vec<(u32, bool)> {
        self.0.borrow().tracked.iter().map(|(pid, lives)| (*pid, *lives)).collect()
    }

    fn lives(&self, pid: u32) -> bool {
        self.0.borrow().tracked.get(&pid).copied().unwrap_or(false)
    }

    fn file(&self, pid: u32, _fd: i32) -> Option<u64> {
        self.lives(pid).then_some(u64::from(pid))
    }

    fn watch(&self, pid: u32) -> Option<u64> {
        Some(u64::from(pid))
    }

    fn birth(&self, pid: u32) -> Option<u32> {
        Some(self.0.borrow().births.get(&pid).copied().unwrap_or(1))
    }

    fn prove(&mut self, _pid: u32) {}

    fn is_proved(&self, pid: u32) -> bool {
        self.lives(pid)
    }

    fn was_forgotten(&self, pid: u32) -> bool {
        self.0.borrow().forgotten.contains(&pid)
    }

    fn forget(&mut self, pid: u32, made_clients: bool) {
        let mut pids = self.0.borrow_mut();
        pids.tracked.remove(&pid);
        if made_clients {
            pids.forgotten.insert(pid);
        }
    }

    fn forgotten(&mut self, most: usize) -> Vec<u32> {
        self.0.borrow().forgotten.iter().take(most).copied().collect()
    }

    fn remember(&mut self, pid: u32) {
        let mut pids = self.0.borrow_mut();
        if pids.forgotten.remove(&pid) {
            pids.tracked.insert(pid, false);
        }
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

/// Address of a call's structure in a program's memory.
const STRUCTURE: u64 = 0x1_0000_0000;
/// Address of its parameters.
pub const PARAMETERS: u64 = 0x2_0000_0000;

/// Returns the parameters of memory or of a range of virtual memory.
pub fn of_bytes(bytes: u64) -> Vec<u8> {
    let mut parameters = vec![0; era().memory];
    put(&mut parameters, memory::LENGTH, &bytes.to_ne_bytes());
    parameters
}

/// Returns the parameters of a device.
pub fn of_device(gpu: u32) -> Vec<u8> {
    let mut parameters = vec![0; Class::DEVICE_PARAMETERS];
    put(&mut parameters, 0, &gpu.to_ne_bytes());
    parameters
}

/// Returns the structure of an allocation.
fn allocation(class: u32, place: [u32; 3], parameters: &[u8]) -> Vec<u8> {
    let mut structure = vec![0; era().long];
    let words = [(alloc::CLIENT, place[0]), (alloc::PARENT, place[1]), (alloc::HANDLE, place[2])];
    for (at, word) in words.into_iter().chain([(alloc::CLASS, class)]) {
        put(&mut structure, at, &word.to_ne_bytes());
    }
    let address = if parameters.is_empty() { 0 } else { PARAMETERS };
    put(&mut structure, alloc::PARAMETERS, &address.to_ne_bytes());
    structure
}

/// Returns the handle or the status of an allocation that RM answered.
fn made(structure: &[u8]) -> Result<u32, u32> {
    match u32_at(structure, era().long_status) {
        0 => Ok(u32_at(structure, alloc::HANDLE)),
        status => Err(status),
    }
}

/// State that outlives a worker.
pub struct Ground {
    records: Vec<Record>,
    page: Box<Page>,
    entry: Entry,
}

impl Ground {
    /// Creates state with room for `objects` objects.
    pub fn new(objects: usize) -> Self {
        let page = Page::new();
        for (gpu, (uuid, limit)) in UUIDS.iter().zip(LIMITS).enumerate() {
            page.grant(gpu, uuid, limit);
        }
        let records = (0..objects).map(|_| Record::default()).collect();
        Self { records, page, entry: Entry::default() }
    }
}

/// RM and the container's processes, which outlive a worker.
pub type Survivors = (Shared, Rc<RefCell<Pids>>);

/// Processes under one supervisor, and RM.
pub struct World<'g> {
    /// RM.
    pub manager: Shared,
    living: Rc<RefCell<Pids>>,
    /// The supervisor of all processes here.
    pub supervisor: Supervisor<'g, Performed, Living>,
    /// Processes that have the file of another one.
    pub files: BTreeMap<u32, u32>,
    /// How many calls were let through.
    pub passed: u64,
    now: u64,
}

impl<'g> World<'g> {
    /// Creates a world on this ground.
    pub fn on(ground: &'g mut Ground) -> Self {
        let gpus = UUIDS.map(|uuid| gpushare_simulated_manager::Gpu { uuid, memory: 80 << 30 }).to_vec();
        let manager = Rc::new(RefCell::new(Manager::new(era(), gpus)));
        let living = Rc::<RefCell<Pids>>::default();
        let parts = (
            Books::open(&mut ground.records, usize::MAX),
            Budget::new(&ground.page, 0),
            Journal::open(&mut ground.entry),
        );
        let supervisor =
            Supervisor::new(era(), parts, Performed::new(&manager), Living(Rc::clone(&living)), 42);
        Self { manager, living, supervisor, files: BTreeMap::new(), passed: 0, now: 0 }
    }

    /// Continues an earlier world, with a new worker on the ground of its last one.
    pub fn again(ground: &'g mut Ground, (manager, living): Survivors) -> Self {
        let fresh = Self::on(ground);
        let Supervisor { books, budget, journal, .. } = fresh.supervisor;
        let (performed, parts) = (Performed::new(&manager), (books, budget, journal));
        let supervisor = Supervisor::new(era(), parts, performed, Living(Rc::clone(&living)), 43);
        Self { manager, living, supervisor, ..fresh }
    }

    /// Returns the state that outlives its worker.
    pub fn survivors(&self) -> Survivors {
        (Rc::clone(&self.manager), Rc::clone(&self.living))
    }

    /// Creates a world whose supervisor also enforces compute shares. The engines are for a timekeeper.
    pub fn with_engines(ground: &'g mut Ground) -> (Self, Engines<u64>) {
        Self::on(ground).holding_compute()
    }

    /// Enforces compute shares from now on.
    pub fn holding_compute(self) -> (Self, Engines<u64>) {
        let (world, engines) = (self, Engines::default());
        let compute = Compute { engines: engines.clone(), wake: Box::new(|_| ()) };
        (Self { supervisor: world.supervisor.holding_compute(compute), ..world }, engines)
    }

    /// Makes a control call, and returns RM's status.
    pub fn control(
        &mut self,
        pid: u32,
        [client, object]: [u32; 2],
        command: u32,
        parameters: &[u8],
    ) -> Option<u32> {
        let mut structure = [0; control::SIZE];
        let size = u32::try_from(parameters.len()).unwrap_or(0);
        for (at, word) in [
            (control::CLIENT, client),
            (control::OBJECT, object),
            (control::COMMAND, command),
            (control::PARAMETERS_SIZE, size),
        ] {
            put(&mut structure, at, &word.to_ne_bytes());
        }
        put(&mut structure, control::PARAMETERS, &PARAMETERS.to_ne_bytes());
        let done = self.call(pid, number::CONTROL, &structure, parameters);
        done.map(|(structure, _)| u32_at(&structure, control::STATUS))
    }

    /// Makes a call of the process `pid`, as the kernel treats it under the filter. Returns the structure and
    /// the parameters as the program sees them afterwards; `None` if the kernel reported an error.
    pub fn call(
        &mut self,
        pid: u32,
        number: u8,
        structure: &[u8],
        parameters: &[u8],
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        self.living.borrow_mut().tracked.insert(pid, true);
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
                self.passed += 1;
                let caller = Caller { pid, is_admin: false, file, gpus: u32::MAX };
                let mut copy = program.0.0.borrow()[0].1.clone();
                let done = self.manager.borrow_mut().call(caller, number, &mut copy, &program.0);
                program.0.0.borrow_mut()[0].1 = copy;
                done
            }
        };
        let buffers = program.0.0.into_inner();
        matches!(done, Ok(true)).then(|| (buffers[0].1.clone(), buffers[1].1.clone()))
    }

    /// Ends a process whose file other processes still have.
    pub fn leave(&mut self, pid: u32) {
        if let Some(lives) = self.living.borrow_mut().tracked.get_mut(&pid) {
            *lives = false;
        }
    }

    /// Ends a process, and gives its PID to another one.
    pub fn replace(&mut self, pid: u32) {
        let mut living = self.living.borrow_mut();
        *living.births.entry(pid).or_insert(1) += 1;
    }

    /// Ends a process and its file.
    pub fn end(&mut self, pid: u32) {
        if let Some(lives) = self.living.borrow_mut().tracked.get_mut(&pid) {
            *lives = false;
        }
        self.manager.borrow_mut().close(u64::from(pid));
    }

    /// Allocates by the long form at `place`: client, parent and handle.
    ///
    /// # Errors
    /// RM's status, or `u32::MAX` for an error from the kernel.
    pub fn allocate(&mut self, pid: u32, class: u32, place: [u32; 3], parameters: &[u8]) -> Result<u32, u32> {
        let structure = allocation(class, place, parameters);
        let (structure, _) = self.call(pid, number::ALLOC, &structure, parameters).ok_or(u32::MAX)?;
        made(&structure)
    }

    /// Allocates without a supervisor, as a call does that was changed after it was let through. `file` is
    /// the process on whose file the call is made.
    ///
    /// # Errors
    /// The errors of [`World::allocate`].
    ///
    /// # Panics
    /// If RM does not know the call.
    pub fn slip(
        &mut self,
        [pid, file]: [u32; 2],
        class: u32,
        place: [u32; 3],
        parameters: &[u8],
    ) -> Result<u32, u32> {
        let mut structure = allocation(class, place, parameters);
        let program = Buffers(RefCell::new(vec![(PARAMETERS, parameters.to_vec())]));
        let caller = Caller { pid, is_admin: false, file: u64::from(file), gpus: u32::MAX };
        let done = self.manager.borrow_mut().call(caller, number::ALLOC, &mut structure, &program);
        assert!(matches!(done, Ok(true)), "{done:?}");
        made(&structure)
    }

    /// Calls FREE without a supervisor, and returns RM's status.
    ///
    /// # Panics
    /// If RM does not know the call.
    pub fn slip_free(&mut self, pid: u32, client: u32, handle: u32) -> u32 {
        let mut structure = [0; free::SIZE];
        put(&mut structure, free::CLIENT, &client.to_ne_bytes());
        put(&mut structure, free::HANDLE, &handle.to_ne_bytes());
        let caller = Caller { pid, is_admin: false, file: u64::from(pid), gpus: u32::MAX };
        let done = self.manager.borrow_mut().call(
            caller,
            number::FREE,
            &mut structure,
            &Buffers(RefCell::default()),
        );
        assert!(matches!(done, Ok(true)), "{done:?}");
        u32_at(&structure, free::STATUS)
    }

    /// Makes a client with a device on each GPU.
    ///
    /// # Panics
    /// If a call is refused.
    pub fn client(&mut self, pid: u32) -> u32 {
        let client = self.allocate(pid, 0x41, [0; 3], &[]).expect("a root client");
        for gpu in 0..2u32 {
            let place = [client, client, 0x80 + gpu];
            self.allocate(pid, Class::DEVICE.0, place, &of_device(gpu)).expect("a device");
            if pid.is_multiple_of(2) {
                let place = [client, 0x80 + gpu, 0x2080 + gpu];
                self.allocate(pid, 0x2080, place, &[0; 4]).expect("a subdevice");
            }
        }
        client
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// The errors of [`World::allocate`].
    pub fn memory(&mut self, pid: u32, client: u32, gpu: u32, bytes: u64) -> Result<u32, u32> {
        self.allocate(pid, Class::MEMORY.0, [client, 0x80 + gpu, 0], &of_bytes(bytes))
    }

    /// Calls FREE, and returns RM's status.
    pub fn free(&mut self, pid: u32, client: u32, handle: u32) -> Option<u32> {
        let mut structure = [0; free::SIZE];
        put(&mut structure, free::CLIENT, &client.to_ne_bytes());
        put(&mut structure, free::HANDLE, &handle.to_ne_bytes());
        self.call(pid, number::FREE, &structure, &[]).map(|(structure, _)| u32_at(&structure, free::STATUS))
    }

    /// Lists the GPUs whose own files the supervisor opened.
    pub fn opened(&self) -> Vec<Gpu> {
        self.supervisor.manager.opened.borrow().clone()
    }

    /// Returns the bytes in use on both GPUs.
    pub fn used(&self) -> u64 {
        (0..2).map(|gpu| self.manager.borrow().used(gpu)).sum()
    }

    /// Checks the invariants that must hold after every call.
    ///
    /// # Panics
    /// If one is violated, with the text `what`.
    pub fn check(&self, what: &str) {
        let manager = self.manager.borrow();
        for (gpu, limit) in LIMITS.into_iter().enumerate() {
            let sums = self.supervisor.books.sums(gpu);
            let figures =
                self.living.borrow().tracked.keys().map(|pid| manager.figure(gpu, *pid)).collect::<Vec<_>>();
            let counted: u64 = figures.iter().map(|(private, shared)| private + shared).sum();
            let used = manager.used(gpu);
            // Memory that a handle of another device holds counts as orphaned until the next check.
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
