//! Measures the overhead that the interception library adds to a call, in nanoseconds. Run it where a
//! container's files are mounted (as the tests of `tests/driver` do). Calls alternate between `libcuda.so.1`
//! and the driver's file, and the program prints the median of the paired differences. It measures the books
//! alone first, which needs no driver. Other work on the machine adds to both sides, and more to ours:
//! compare only runs whose figures without the library agree.

#![allow(clippy::unwrap_used, reason = "a measurement that fails shall say so")]

use std::ffi::{CStr, CString};
use std::hint::black_box;
use std::time::Instant;

use gpushare_intercept::book::Book;
use gpushare_intercept::table::{Entry, Kind, Table};
use gpushare_region::path;

type Allocate = unsafe extern "C" fn(*mut u64, usize) -> i32;
type Free = unsafe extern "C" fn(u64) -> i32;
type Memory = unsafe extern "C" fn(*mut usize, *mut usize) -> i32;

const ROUNDS: usize = 201;

fn main() {
    table();
    let book = Book::open(path::LIMITS, path::USAGE);
    if book.limit(0) == 0 {
        println!("no container's files here: the rest is left out");
        return;
    }
    println!(
        "reserve + release: {:.0} ns",
        nanoseconds(100_000, || {
            black_box(book.reserve(0, 512));
            book.release(0, 512);
        })
    );
    driver();
}

/// Nanoseconds per call of `act`.
fn nanoseconds(calls: u32, mut act: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..calls).for_each(|_| act());
    start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
}

fn table() {
    for live in [0u64, 4_000, 100_000] {
        let table = Table::default();
        let entry = |key| Entry { key, size: 1, extra: 0, kind: Kind::Linear, device: 0, context: 0 };
        for index in 1..=live {
            let _ = table.put(entry(0x7f00_0000_0000 + index * 0x20_0000));
        }
        let cost = nanoseconds(1_000_000, || {
            let _ = black_box(table.put(entry(0x7e00_0000_0000)));
            black_box(table.take(Kind::Linear, 0x7e00_0000_0000));
        });
        println!("size table, {live} live: put + take {cost:.0} ns");
    }
}

/// The driver's functions, called directly or through our library.
struct Driver {
    allocate: Allocate,
    free: Free,
    memory: Memory,
}

fn symbol(library: &CStr, name: &CStr) -> *mut libc::c_void {
    // SAFETY: C strings; the libraries run their constructors.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "cannot open {library:?}");
    // SAFETY: an open handle and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "no {name:?}");
    address
}

impl Driver {
    fn open(library: &CStr) -> Self {
        let [allocate, free, memory] =
            [c"cuMemAlloc_v2", c"cuMemFree_v2", c"cuMemGetInfo_v2"].map(|name| symbol(library, name));
        Self {
            // SAFETY: the driver's signature of this name.
            allocate: unsafe { std::mem::transmute::<*mut libc::c_void, Allocate>(allocate) },
            // SAFETY: the driver's signature of this name.
            free: unsafe { std::mem::transmute::<*mut libc::c_void, Free>(free) },
            // SAFETY: the driver's signature of this name.
            memory: unsafe { std::mem::transmute::<*mut libc::c_void, Memory>(memory) },
        }
    }

    fn allocate(&self) -> u64 {
        let mut pointer = 0;
        // SAFETY: the pointer is written.
        assert_eq!(unsafe { (self.allocate)(&mut pointer, 512) }, 0);
        pointer
    }

    fn allocate_and_free(&self) {
        let pointer = self.allocate();
        // SAFETY: allocated above.
        assert_eq!(unsafe { (self.free)(pointer) }, 0);
    }

    fn memory(&self) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written.
        assert_eq!(unsafe { (self.memory)(&mut free, &mut total) }, 0);
        black_box((free, total));
    }
}

fn driver() {
    let real = CString::new(path::DRIVER_CUDA).unwrap();
    let (ours, bare) = (Driver::open(c"libcuda.so.1"), Driver::open(&real));
    start();
    compare("cuMemGetInfo", &ours, &bare, 2000, Driver::memory);
    compare("cuMemAlloc + cuMemFree", &ours, &bare, 200, Driver::allocate_and_free);
    {
        let _others = Others::start();
        compare("cuMemGetInfo, 64 processes", &ours, &bare, 2000, Driver::memory);
        compare("cuMemAlloc + cuMemFree, 64 processes", &ours, &bare, 200, Driver::allocate_and_free);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    ours.memory(); // a query that finds the slots of dead processes
    let mut live = 0;
    for more in [4_000, 96_000] {
        (0..more).for_each(|_| _ = ours.allocate()); // freed with the process
        live += more;
        let what = format!("cuMemAlloc + cuMemFree, {live} live");
        compare(&what, &ours, &bare, 200, Driver::allocate_and_free);
    }
}

/// 63 more processes of the container, each with its own slot; they end on drop.
struct Others(Vec<libc::pid_t>);

impl Others {
    fn start() -> Self {
        let others = Self((1..64).map(|_| fork(hold)).collect());
        let book = Book::open(path::LIMITS, path::USAGE);
        while book.used(0) < 64 << 20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        others
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for pid in &self.0 {
            // SAFETY: a child of ours that has not been reaped.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(*pid, std::ptr::null_mut(), 0) };
        }
    }
}

/// Runs `child` in a forked process.
fn fork(child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: this program has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: no process stays behind when the measurement is cut short.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    pid
}

fn hold() {
    let book = Book::open(path::LIMITS, path::USAGE);
    book.reserve(0, 1 << 20);
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Makes a context current.
fn start() {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
    type Current = unsafe extern "C" fn(usize) -> i32;
    let library = c"libcuda.so.1";
    // SAFETY: the driver's signature of this name.
    let init = unsafe { std::mem::transmute::<*mut libc::c_void, Init>(symbol(library, c"cuInit")) };
    let retain = symbol(library, c"cuDevicePrimaryCtxRetain");
    // SAFETY: the driver's signature of this name.
    let retain = unsafe { std::mem::transmute::<*mut libc::c_void, Retain>(retain) };
    let current = symbol(library, c"cuCtxSetCurrent");
    // SAFETY: the driver's signature of this name.
    let current = unsafe { std::mem::transmute::<*mut libc::c_void, Current>(current) };
    let mut context = 0;
    // SAFETY: no memory is touched.
    assert_eq!(unsafe { init(0) }, 0);
    // SAFETY: the context is written.
    assert_eq!(unsafe { retain(&mut context, 0) }, 0);
    // SAFETY: a context of this process.
    assert_eq!(unsafe { current(context) }, 0);
}

fn compare(what: &str, ours: &Driver, bare: &Driver, calls: u32, act: impl Fn(&Driver)) {
    let mut differences = Vec::with_capacity(ROUNDS);
    let mut without = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let straight = nanoseconds(calls, || act(bare));
        differences.push(nanoseconds(calls, || act(ours)) - straight);
        without.push(straight);
    }
    for list in [&mut differences, &mut without] {
        list.sort_by(f64::total_cmp);
    }
    let at = |list: &[f64], quarter: usize| list[list.len() * quarter / 4];
    println!(
        "{what}: {:.0} ns bare, {:+.0} ns added (quartiles {:+.0} to {:+.0})",
        at(&without, 2),
        at(&differences, 2),
        at(&differences, 1),
        at(&differences, 3)
    );
}
