//! Calls that few programs make: the oldest forms and the newest ones.

#[macro_use]
mod support;

use std::ffi::{CStr, c_char, c_void};
use std::time::Duration;

use support::client::Library;
use support::{Node, Running};

const MIB: usize = 1 << 20;

/// The body of the client processes; see [`support::Node::run`]. Each script prints `done` after its last
/// assertion.
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    let Ok(script) = std::env::var("SCRIPT") else { return };
    let cuda = Cuda::start();
    match script.as_str() {
        "narrow" => cuda.narrow(),
        "detach" => cuda.detach(),
        "limits" => cuda.limits(),
        "green" => cuda.green(),
        "multicast" => cuda.multicast(),
        "sparse" => cuda.sparse(),
        "ipc-owner" => cuda.own_event(),
        "ipc-other" => cuda.follow_event(),
        other => panic!("no such client: {other}"),
    }
    println!("done: 1");
}

const PTX: &CStr = c"
.version 8.0
.target sm_80
.address_size 64
.visible .entry plain() { ret; }
.visible .entry busy_300ms() { ret; }
";

/// The driver, with a current context that `cuCtxCreate` made.
struct Cuda {
    library: Library,
    context: usize,
}

macro_rules! cu {
    ($cuda:expr, $name:expr $(, $value:expr => $kind:ty)* $(,)?) => {
        call!($cuda.library, $name, $($value => $kind),*)
    };
}

impl Cuda {
    fn start() -> Self {
        let mut cuda = Self { library: Library::open(c"libcuda.so.1"), context: 0 };
        assert_eq!(cu!(cuda, c"cuInit", 0 => u32), 0);
        let created = cu!(cuda, c"cuCtxCreate_v2", &mut cuda.context => &mut usize, 0 => u32, 0 => i32);
        assert_eq!(created, 0);
        cuda
    }

    fn free(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        assert_eq!(cu!(self, c"cuMemGetInfo_v2", &mut free => &mut usize, &mut total => &mut usize), 0);
        free
    }

    fn function(&self, name: &CStr) -> usize {
        let (mut module, mut function) = (0_usize, 0_usize);
        let loaded = cu!(self, c"cuModuleLoadData", &mut module => &mut usize, PTX.as_ptr() => *const c_char);
        assert_eq!(loaded, 0);
        let found = cu!(
            self, c"cuModuleGetFunction",
            &mut function => &mut usize, module => usize, name.as_ptr() => *const c_char,
        );
        assert_eq!(found, 0);
        function
    }

    fn launch(&self, function: usize, blocks: u32, stream: usize) -> u32 {
        cu!(
            self, c"cuLaunchKernel",
            function => usize, blocks => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, stream => usize,
            std::ptr::null_mut() => *mut *mut c_void, 0 => usize,
        )
    }

    fn event(&self, flags: u32) -> usize {
        let mut event = 0;
        assert_eq!(cu!(self, c"cuEventCreate", &mut event => &mut usize, flags => u32), 0);
        event
    }

    fn narrow(&self) {
        let before = self.free();
        let (mut start, mut pitch) = (0_u32, 0_u32);
        assert_eq!(cu!(self, c"cuMemAlloc", &mut start => &mut u32, 3 * 1024 * 1024 => u32), 0);
        assert_eq!(before - self.free(), 4 * MIB);
        let mut back = [0_u32; 2];
        let data = [7_u32, 8];
        let address = u64::from(start) + 4096;
        assert_eq!(cu!(self, c"cuMemcpyHtoD_v2", address => u64, data.as_ptr() => *const u32, 8 => usize), 0);
        assert_eq!(
            cu!(self, c"cuMemcpyDtoH_v2", back.as_mut_ptr() => *mut u32, address => u64, 8 => usize),
            0
        );
        assert_eq!(back, data);
        let (mut base, mut length) = (0_u32, 0_u32);
        let asked = cu!(
            self, c"cuMemGetAddressRange",
            &mut base => &mut u32, &mut length => &mut u32, start + 100 => u32,
        );
        assert_eq!((asked, base, length), (0, start, 3 << 20));
        let mut second = 0_u32;
        let pitched = cu!(
            self, c"cuMemAllocPitch",
            &mut second => &mut u32, &mut pitch => &mut u32, 1000 => u32, 4096 => u32, 4 => u32,
        );
        assert_eq!((pitched, pitch), (0, 1024));
        assert_eq!(before - self.free(), 8 * MIB);
        // Each form frees what either of them allocated.
        assert_eq!(cu!(self, c"cuMemFree", start => u32), 0);
        assert_eq!(cu!(self, c"cuMemFree_v2", second.into() => u64), 0);
        assert_eq!(cu!(self, c"cuMemFree", start => u32), 1);
        assert_eq!(before, self.free());
    }

    fn detach(&self) {
        let mut same = 0_usize;
        assert_eq!(cu!(self, c"cuCtxAttach", &mut same => &mut usize, 1 => u32), 1);
        assert_eq!(cu!(self, c"cuCtxAttach", &mut same => &mut usize, 0 => u32), 0);
        assert_eq!(same, self.context);
        assert_eq!(cu!(self, c"cuCtxDetach", same => usize), 0);
        assert!(self.free() > 0, "one user is left");
        assert_eq!(cu!(self, c"cuCtxDetach", same => usize), 0);
        assert_eq!(cu!(self, c"cuCtxSynchronize"), 201);
        assert_eq!(cu!(self, c"cuCtxDetach", same => usize), 201);
        let mut primary = 0_usize;
        assert_eq!(cu!(self, c"cuDevicePrimaryCtxRetain", &mut primary => &mut usize, 0 => i32), 0);
        assert_eq!(cu!(self, c"cuCtxSetCurrent", primary => usize), 0);
        assert_eq!(cu!(self, c"cuCtxDetach", primary => usize), 201);
    }

    fn limit(&self, limit: u32, value: usize) -> u32 {
        cu!(self, c"cuCtxSetLimit", limit => u32, value => usize)
    }

    fn limits(&self) {
        let before = self.free();
        for (limit, value, cost) in [
            // 132 multiprocessors with 2048 threads each.
            (0, 1024, 0),
            (0, 5120, 4096 * 132 * 2048),
            (0, 512, 0),
            (1, 8 * MIB, 0),
            (1, 72 * MIB, 64 * MIB),
            (2, 1032 * MIB, (1024 + 64) * MIB),
            (1, MIB, 1024 * MIB),
            (3, 5, 1024 * MIB),
        ] {
            assert_eq!(self.limit(limit, value), 0, "limit {limit} = {value}");
            let mut told = 0_usize;
            cu!(self, c"cuCtxGetLimit", &mut told => &mut usize, limit => u32);
            assert_eq!((told, before - self.free()), (value, cost), "limit {limit} = {value}");
        }
        assert_eq!(self.limit(0, (512 << 10) + 1), 1);
        assert_eq!(self.limit(8, 1), 1);
        // A limit for which there is no room changes nothing.
        assert_eq!(self.limit(2, 100 << 30), 2);
        assert_eq!(before - self.free(), 1024 * MIB);
        assert_eq!(cu!(self, c"cuCtxDestroy_v2", self.context => usize), 0);
        let mut again = 0_usize;
        assert_eq!(cu!(self, c"cuCtxCreate_v2", &mut again => &mut usize, 0 => u32, 0 => i32), 0);
        assert_eq!(before, self.free());
    }

    fn green(&self) {
        let before = self.free();
        let (mut whole, mut parts, mut rest) = ([0_u32; 36], [[0_u32; 36]; 2], [0_u32; 36]);
        let asked = cu!(self, c"cuDeviceGetDevResource", 0 => i32, &mut whole => &mut [u32; 36], 1 => u32);
        assert_eq!((asked, whole[0], whole[24]), (0, 1, 132));
        let mut count = 2_u32;
        let split = cu!(
            self, c"cuDevSmResourceSplitByCount",
            &mut parts => &mut [[u32; 36]; 2], &mut count => &mut u32, &whole => &[u32; 36], &mut rest => &mut [u32; 36],
            0 => u32, 30 => u32,
        );
        assert_eq!((split, count, parts[0][24], parts[1][24], rest[24]), (0, 2, 32, 32, 132 - 64));
        let (mut description, mut green, mut context, mut stream) = (0_usize, 0_usize, 0_usize, 0_usize);
        let described = cu!(
            self, c"cuDevResourceGenerateDesc",
            &mut description => &mut usize, &parts[0] => &[u32; 36], 1 => u32,
        );
        assert_eq!(described, 0);
        let create = |flags| {
            let mut green = 0_usize;
            let code = cu!(
                self, c"cuGreenCtxCreate",
                &mut green => &mut usize, description => usize, 0 => i32, flags => u32,
            );
            (code, green)
        };
        assert_eq!(create(0).0, 1);
        (_, green) = (green, create(1).1);
        assert_eq!(cu!(self, c"cuCtxFromGreenCtx", &mut context => &mut usize, green => usize), 0);
        assert_eq!(cu!(self, c"cuCtxDestroy_v2", context => usize), 201);
        let made = cu!(
            self, c"cuGreenCtxStreamCreate",
            &mut stream => &mut usize, green => usize, 1 => u32, 0 => i32,
        );
        let mut owner = 0_usize;
        assert_eq!(
            (made, cu!(self, c"cuStreamGetGreenCtx", stream => usize, &mut owner => &mut usize)),
            (0, 0)
        );
        assert_eq!(owner, green);
        // The stream's context has a quarter of the multiprocessors, so 1056 blocks take more than four
        // rounds of 256.
        let plain = self.function(c"plain");
        assert_eq!(self.time_in(plain, 0), 1_000);
        assert_eq!(self.time_in(plain, stream), 5_000);
        // Memory belongs to the primary context and outlives the green one.
        let (mut primary, mut start) = (0_usize, 0_u64);
        cu!(self, c"cuDevicePrimaryCtxRetain", &mut primary => &mut usize, 0 => i32);
        cu!(self, c"cuCtxPushCurrent_v2", context => usize);
        assert_eq!(cu!(self, c"cuMemAlloc_v2", &mut start => &mut u64, 64 * MIB => usize), 0);
        cu!(self, c"cuCtxPopCurrent_v2", &mut context => &mut usize);
        assert_eq!(cu!(self, c"cuGreenCtxDestroy", green => usize), 0);
        assert_eq!(cu!(self, c"cuGreenCtxDestroy", green => usize), 400);
        assert_eq!(before - self.free(), 64 * MIB);
        assert_eq!(cu!(self, c"cuDevicePrimaryCtxRelease_v2", 0 => i32), 0);
        assert_eq!(before, self.free());
    }

    /// Microseconds of a launch of 1056 blocks. Another launch runs before, so that the GPU never waits for
    /// the client.
    fn time_in(&self, function: usize, stream: usize) -> u64 {
        let (begin, end) = (self.event(0), self.event(0));
        let record = |event| cu!(self, c"cuEventRecord", event => usize, stream => usize);
        assert_eq!(self.launch(function, 10_560, stream), 0);
        assert_eq!([record(begin), self.launch(function, 1056, stream), record(end)], [0; 3]);
        let mut milliseconds = 0.0_f32;
        assert_eq!(cu!(self, c"cuEventSynchronize", end => usize), 0);
        let told = cu!(
            self, c"cuEventElapsedTime", &mut milliseconds => &mut f32, begin => usize, end => usize,
        );
        assert_eq!(told, 0);
        Duration::from_secs_f32(milliseconds / 1000.0).as_micros().try_into().expect("a short time")
    }

    /// An allocation handle of `bytes` bytes on the GPU `ordinal`.
    fn memory(&self, ordinal: i32, bytes: usize) -> usize {
        let properties = [1_u32, 1, 1, ordinal.cast_unsigned(), 0, 0, 0, 0];
        let mut handle = 0;
        let made = cu!(
            self, c"cuMemCreate",
            &mut handle => &mut usize, bytes => usize, &properties => &[u32; 8], 0 => u64,
        );
        assert_eq!(made, 0);
        handle
    }

    fn multicast(&self) {
        let before = self.free();
        let (mut object, properties) = (0_usize, [2_u64, 4 << 20, 1, 0]);
        assert_eq!(cu!(self, c"cuMulticastCreate", &mut object => &mut usize, &properties => &[u64; 4]), 0);
        assert_eq!(before, self.free(), "the object itself costs nothing");
        let memory = self.memory(0, 4 * MIB);
        let bind = |place: usize, length: usize| {
            cu!(
                self, c"cuMulticastBindMem",
                object => usize, place => usize, memory => usize, 0 => usize, length => usize, 0 => u64,
            )
        };
        let add = |ordinal| cu!(self, c"cuMulticastAddDevice", object => usize, ordinal => i32);
        assert_eq!([add(0), bind(0, 2 * MIB), add(0), add(1), add(1)], [0, 1, 1, 0, 1]);
        assert_eq!(
            [bind(0, 2 * MIB), bind(0, 2 * MIB), bind(1, 2 * MIB), bind(2 * MIB, 4 * MIB)],
            [0, 1, 1, 1]
        );
        assert_eq!(cu!(self, c"cuMemRelease", memory => usize), 0);
        assert_eq!(before - self.free(), 4 * MIB, "what is bound stays");
        let unbind = || {
            cu!(
                self, c"cuMulticastUnbind", object => usize, 0 => i32, 0 => usize, 2 * MIB => usize,
            )
        };
        assert_eq!([unbind(), unbind()], [0, 1]);
        assert_eq!(before, self.free());
        // Memory that is still bound goes with the object.
        let memory = self.memory(1, 2 * MIB);
        let bound = cu!(
            self, c"cuMulticastBindMem",
            object => usize, 0 => usize, memory => usize, 0 => usize, 2 * MIB => usize, 0 => u64,
        );
        assert_eq!((bound, cu!(self, c"cuMemRelease", memory => usize)), (0, 0));
        assert_eq!(cu!(self, c"cuMemRelease", object => usize), 0);
        assert_eq!(cu!(self, c"cuMulticastAddDevice", object => usize, 0 => i32), 1);
    }

    fn sparse(&self) {
        let before = self.free();
        // 1024 x 1024 pixels of 4 bytes, sparse.
        let description = [1024_u64, 1024, 0, 0x1_0000_0020, 0x40];
        let mut array = 0_usize;
        let made = cu!(self, c"cuArray3DCreate_v2", &mut array => &mut usize, &description => &[u64; 5]);
        assert_eq!((made, before), (0, self.free()));
        let memory = self.memory(0, 4 * MIB);
        let change = |operation: u64, layer: u64| {
            let piece = [0, array as u64, 0, layer << 32, 0, 0, 0, operation, memory as u64, 0, 1, 0];
            cu!(self, c"cuMemMapArrayAsync", &piece => &[u64; 12], 1 => u32, 0 => usize)
        };
        assert_eq!([change(1, 0), change(1, 1), change(3, 0)], [0, 0, 1]);
        assert_eq!(cu!(self, c"cuMemRelease", memory => usize), 0);
        assert_eq!([change(2, 0), change(2, 0)], [0, 0]);
        assert_eq!(before - self.free(), 4 * MIB, "one piece is left");
        assert_eq!(cu!(self, c"cuArrayDestroy", array => usize), 0);
        assert_eq!(before, self.free());
    }

    /// Shares an event, records it after a long kernel, and keeps everything until the process is killed.
    fn own_event(&self) {
        let mut handle = [0_u8; 64];
        let mut timed = 0_usize;
        assert_eq!(cu!(self, c"cuEventCreate", &mut timed => &mut usize, 4 => u32), 1);
        let private = self.event(2);
        assert_eq!(cu!(self, c"cuIpcGetEventHandle", &mut handle => &mut [u8; 64], private => usize), 400);
        let event = self.event(2 | 4);
        assert_eq!(cu!(self, c"cuIpcGetEventHandle", &mut handle => &mut [u8; 64], event => usize), 0);
        println!("handle: {}", handle.map(|byte| format!("{byte:02x}")).concat());
        let mut line = String::new();
        assert!(std::io::stdin().read_line(&mut line).is_ok());
        assert_eq!(self.launch(self.function(c"busy_300ms"), 1, 0), 0);
        assert_eq!(cu!(self, c"cuEventRecord", event => usize, 0 => usize), 0);
        println!("recorded: 1");
        std::thread::sleep(Duration::from_secs(60));
    }

    fn follow_event(&self) {
        let text = std::env::var("HANDLE").expect("a handle");
        let bytes = (0..64).map(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16));
        let bytes: Vec<u8> = bytes.map(|byte| byte.expect("a byte")).collect();
        let handle: [u8; 64] = bytes.try_into().expect("64 bytes");
        let mut event = 0_usize;
        // A structure of this size is passed on the stack.
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Ipc([u8; 64]);
        assert_eq!(cu!(self, c"cuIpcOpenEventHandle", &mut event => &mut usize, Ipc(handle) => Ipc), 0);
        let query = || cu!(self, c"cuEventQuery", event => usize);
        println!("first: {}", query());
        let mut line = String::new();
        assert!(std::io::stdin().read_line(&mut line).is_ok());
        println!("then: {}", query());
        let begin = std::time::Instant::now();
        let mut stream = 0_usize;
        assert_eq!(cu!(self, c"cuStreamCreate", &mut stream => &mut usize, 1 => u32), 0);
        assert_eq!(cu!(self, c"cuStreamWaitEvent", stream => usize, event => usize, 0 => u32), 0);
        assert_eq!(self.launch(self.function(c"plain"), 1, stream), 0);
        assert_eq!(cu!(self, c"cuStreamSynchronize", stream => usize), 0);
        println!("waited: {}", begin.elapsed().as_millis());
        println!("last: {}", query());
    }
}

fn passes(node: &Node, client: &str) {
    let variables = [("GPUSHARE_SIMULATOR_KERNEL_NS", "1000000")];
    node.run_with(client, &variables).number("done");
}

#[test]
fn the_oldest_memory_calls_give_addresses_of_32_bits() {
    passes(&Node::new(&[]), "narrow");
}

#[test]
fn a_context_ends_with_its_last_user() {
    passes(&Node::new(&[]), "detach");
}

#[test]
fn limits_above_the_drivers_own_cost_memory() {
    passes(&Node::new(&["--memory", "16GiB"]), "limits");
}

#[test]
fn a_green_context_is_a_part_of_the_multiprocessors() {
    for device in ["fifo", "slices"] {
        passes(&Node::new(&["--driver", "580.65.06", "--device", device]), "green");
    }
}

#[test]
fn memory_bound_to_a_multicast_object_stays_charged() {
    passes(&Node::new(&["--gpus", "2"]), "multicast");
}

#[test]
fn memory_mapped_to_a_sparse_array_stays_charged() {
    passes(&Node::new(&[]), "sparse");
}

#[test]
fn an_event_of_another_process_is_waited_for() {
    for device in ["fifo", "slices"] {
        let node = Node::new(&["--device", device]);
        let mut owner = node.run("ipc-owner");
        let handle = owner.value("handle");
        let mut other = node.run_with("ipc-other", &[("HANDLE", &handle)]);
        assert_eq!(other.number("first"), 0, "before the first record, {device}");
        owner.send();
        owner.number("recorded");
        other.send();
        assert_eq!(other.number("then"), 600, "{device}");
        let waited = other.number("waited");
        assert!((150..2000).contains(&waited), "{waited} ms, {device}");
        assert_eq!(other.number("last"), 0, "{device}");
        Running::kill(owner);
        other.finish();
        assert_eq!(node.run("detach").number("done"), 1);
        let left = std::fs::read_dir(node.path("shared")).expect("the shared folder").count();
        assert_eq!(left, 2, "the file of the event went with its owner");
    }
}
