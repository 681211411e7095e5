//! The client: a small CUDA and NVML program that loads the driver at run time.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::time::{Duration, Instant};

/// Calls a function of an open library by name, in the form that CUDA's or NVML's documentation gives.
#[macro_export]
macro_rules! call {
    ($library:expr, $name:expr, $($value:expr => $kind:ty),* $(,)?) => {{
        let address = $library.address($name).expect("a name of the library");
        // SAFETY: the form below is what the documentation gives for this name.
        let function = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($kind),*) -> u32>(address) };
        function($($value),*)
    }};
}

/// An open library, which is never closed.
pub struct Library(*mut c_void);

impl Library {
    /// Opens `name` by the loader's ordinary search.
    pub fn open(name: &CStr) -> Self {
        // SAFETY: the library's initialisers are what every program that links it runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{name:?} opens");
        Self(handle)
    }

    /// Address of a symbol; `None` if the library has none of this name.
    pub fn address(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open handle and a terminated name.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Kernels that only take time, one that writes its argument, and two that fail.
const PTX: &CStr = c"
.version 8.0
.target sm_80
.address_size 64
.visible .entry busy_1ms() { ret; }
.visible .entry busy_10ms() { ret; }
.visible .entry busy_50ms() { ret; }
.visible .entry plain() { ret; }
.visible .entry write(.param .u64 p, .param .u32 v) {
  .reg .b64 %rd<5>;
  .reg .b32 %r<5>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [v];
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd4, %rd1, %rd3;
  st.global.u32 [%rd4], %r1;
  ret;
}
.visible .entry trapped() { trap; }
.visible .entry misaligned(.param .u64 p) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [p];
  st.global.u32 [%rd1+2], 1;
  ret;
}";

struct Client {
    cuda: Library,
    module: usize,
    started: Instant,
    /// Events by name.
    events: BTreeMap<String, usize>,
    /// Number of blocks of a launch.
    grid: u32,
}

/// Runs the steps of `script`, one per line.
pub fn run(script: &str) {
    let cuda = Library::open(c"libcuda.so.1");
    let mut client = Client { cuda, module: 0, started: Instant::now(), events: BTreeMap::new(), grid: 1 };
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        client.step(&line.split(' ').collect::<Vec<_>>());
    }
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().ok().expect("a number in a script")
}

impl Client {
    fn step(&mut self, words: &[&str]) {
        match words {
            ["context"] => self.context(),
            ["count"] => {
                let mut count = 0;
                println!("init: {}", call!(self.cuda, c"cuInit", 0 => u32));
                call!(self.cuda, c"cuDeviceGetCount", &mut count => &mut i32);
                println!("count: {count}");
            }
            ["allocate", bytes] => {
                let mut pointer = 0;
                println!(
                    "allocate: {}",
                    call!(self.cuda, c"cuMemAlloc_v2", &mut pointer => &mut u64, number(bytes) => usize)
                );
            }
            ["free"] => {
                let (mut free, mut total) = (0, 0);
                call!(self.cuda, c"cuMemGetInfo_v2", &mut free => &mut usize, &mut total => &mut usize);
                println!("free: {free}");
            }
            ["clock"] => self.started = Instant::now(),
            ["elapsed"] => println!("elapsed: {}", self.started.elapsed().as_millis()),
            ["grid", blocks] => self.grid = number(blocks),
            ["graph", name, count] => self.graph(name, number(count)),
            ["launch", name, count] => (0..number(count)).for_each(|_| self.launch(name, &mut [])),
            ["synchronize"] => println!("synchronize: {}", call!(self.cuda, c"cuCtxSynchronize",)),
            ["event", name] => self.record(name),
            ["between", begin, end] => println!("between: {}", self.between(begin, end)),
            ["keep", name, milliseconds] => self.keep(name, number(milliseconds)),
            ["sleep", milliseconds] => std::thread::sleep(Duration::from_millis(number(milliseconds))),
            ["symbol", name] => {
                let name = CString::new(*name).expect("a name");
                let library = if name.as_bytes().starts_with(b"nvml") {
                    &Library::open(c"libnvidia-ml.so.1")
                } else {
                    &self.cuda
                };
                println!("symbol: {}", library.address(&name).is_some());
            }
            ["old-entry", name, version, flags] => self.old_entry(name, number(version), number(flags)),
            ["entry", name, version, flags] => self.entry(name, number(version), number(flags)),
            ["write"] => self.write(),
            ["link"] => self.link(),
            ["fault", name] => {
                let mut pointer = 0_u64;
                call!(self.cuda, c"cuMemAlloc_v2", &mut pointer => &mut u64, 16 => usize);
                println!("fault: {}", self.submit(name, &mut [(&raw mut pointer).cast()]));
            }
            ["pairs", count] => self.pairs(number(count)),
            ["fork"] => self.fork(),
            other => panic!("no such step: {other:?}"),
        }
    }

    fn context(&mut self) {
        let mut context = 0;
        assert_eq!(call!(self.cuda, c"cuInit", 0 => u32), 0);
        println!(
            "context: {}",
            call!(self.cuda, c"cuDevicePrimaryCtxRetain", &mut context => &mut usize, 0 => i32)
        );
        call!(self.cuda, c"cuCtxSetCurrent", context => usize);
        call!(self.cuda, c"cuModuleLoadData", &mut self.module => &mut usize, PTX.as_ptr() => *const c_char);
    }

    /// Takes the module through the linker, together with a library, as numba does.
    fn link(&mut self) {
        let (mut link, mut image, mut length) = (0_usize, 0_usize, 0_usize);
        let create =
            call!(self.cuda, c"cuLinkCreate_v2", 0 => u32, 0 => usize, 0 => usize, &mut link => &mut usize);
        let mut inputs = vec![create];
        for (kind, data) in [(1, PTX.to_bytes_with_nul()), (4, b"!<arch>\n\x01\xff\0")] {
            inputs.push(call!(
                self.cuda, c"cuLinkAddData_v2",
                link => usize, kind => u32, data.as_ptr() => *const u8, data.len() => usize, c"".as_ptr() => *const c_char,
                0 => u32, 0 => usize, 0 => usize,
            ));
        }
        inputs.push(call!(self.cuda, c"cuLinkComplete", link => usize, &mut image => &mut usize, &mut length => &mut usize));
        inputs.push(call!(self.cuda, c"cuModuleLoadData", &mut self.module => &mut usize, image => usize));
        inputs.push(call!(self.cuda, c"cuLinkDestroy", link => usize));
        println!("link: {inputs:?}");
    }

    fn launch(&self, name: &str, parameters: &mut [*mut c_void]) {
        assert_eq!(self.submit(name, parameters), 0, "launch of {name}");
    }

    /// Captures `count` launches into a graph, and launches the graph twice.
    fn graph(&self, name: &str, count: u32) {
        let (mut stream, mut graph, mut executable) = (0_usize, 0_usize, 0_usize);
        let mut codes = vec![
            call!(self.cuda, c"cuStreamCreate", &mut stream => &mut usize, 0 => u32),
            call!(self.cuda, c"cuStreamBeginCapture_v2", stream => usize, 0 => u32),
        ];
        codes.extend((0..count).map(|_| self.submit_to(stream, name, &mut [])));
        codes.push(call!(self.cuda, c"cuStreamEndCapture", stream => usize, &mut graph => &mut usize));
        codes.push(call!(
            self.cuda, c"cuGraphInstantiateWithFlags", &mut executable => &mut usize, graph => usize, 0 => u64,
        ));
        codes.extend([0, 1].map(|_| call!(self.cuda, c"cuGraphLaunch", executable => usize, 0 => usize)));
        assert!(codes.iter().all(|code| *code == 0), "graph: {codes:?}");
    }

    /// Records the event of this name, and creates it first if it is new.
    fn record(&mut self, name: &str) {
        let mut event = self.events.get(name).copied().unwrap_or(0);
        if event == 0 {
            assert_eq!(call!(self.cuda, c"cuEventCreate", &mut event => &mut usize, 0 => u32), 0);
            self.events.insert(name.to_owned(), event);
        }
        assert_eq!(call!(self.cuda, c"cuEventRecord", event => usize, 0 => usize), 0);
    }

    /// Microseconds between two recorded events.
    fn between(&self, begin: &str, end: &str) -> f32 {
        let mut milliseconds = 0.0;
        let (begin, end) = (self.events[begin], self.events[end]);
        assert_eq!(call!(self.cuda, c"cuEventSynchronize", end => usize), 0);
        let code = call!(
            self.cuda, c"cuEventElapsedTime", &mut milliseconds => &mut f32, begin => usize, end => usize,
        );
        assert_eq!(code, 0, "both events have come");
        (milliseconds * 1000.0_f32).round()
    }

    /// Launches a kernel and waits for it, again and again for this many milliseconds. Prints how often.
    fn keep(&self, name: &str, milliseconds: u64) {
        let end = Instant::now() + Duration::from_millis(milliseconds);
        let mut count = 0;
        while Instant::now() < end {
            self.launch(name, &mut []);
            call!(self.cuda, c"cuCtxSynchronize",);
            count += 1;
        }
        println!("keep: {count}");
    }

    fn submit(&self, name: &str, parameters: &mut [*mut c_void]) -> u32 {
        self.submit_to(0, name, parameters)
    }

    fn submit_to(&self, stream: usize, name: &str, parameters: &mut [*mut c_void]) -> u32 {
        let mut function = 0_usize;
        let text = CString::new(name).expect("a name");
        let found = call!(self.cuda, c"cuModuleGetFunction", &mut function => &mut usize, self.module => usize, text.as_ptr() => *const c_char);
        assert_eq!(found, 0, "kernel {name}");
        call!(
            self.cuda, c"cuLaunchKernel",
            function => usize, self.grid => u32, 1 => u32, 1 => u32, 4 => u32, 1 => u32, 1 => u32, 0 => u32, stream => usize,
            parameters.as_mut_ptr() => *mut *mut c_void, 0 => usize,
        )
    }

    fn write(&self) {
        let (mut pointer, mut value, mut back) = (0_u64, 42_u32, [0_u32; 4]);
        call!(self.cuda, c"cuMemAlloc_v2", &mut pointer => &mut u64, 16 => usize);
        let mut parameters = [(&raw mut pointer).cast(), (&raw mut value).cast()];
        self.launch("write", &mut parameters);
        call!(self.cuda, c"cuMemcpyDtoH_v2", &mut back => &mut [u32; 4], pointer => u64, 16 => usize);
        println!("write: {back:?}");
    }

    fn entry(&self, name: &str, version: i32, flags: u64) {
        let text = CString::new(name).expect("a name");
        let (mut pointer, mut status) = (1_usize, 9_u32);
        let code = call!(
            self.cuda, c"cuGetProcAddress_v2",
            text.as_ptr() => *const c_char, &mut pointer => &mut usize, version => i32, flags => u64, &mut status => &mut u32,
        );
        println!("entry: {code} {status} {}", self.export_at(name, pointer));
    }

    /// Looks the name up by the first form, which has no status and leaves the pointer alone if there is
    /// nothing to give.
    fn old_entry(&self, name: &str, version: i32, flags: u64) {
        let text = CString::new(name).expect("a name");
        let mut pointer = 1_usize;
        let code = call!(
            self.cuda, c"cuGetProcAddress",
            text.as_ptr() => *const c_char, &mut pointer => &mut usize, version => i32, flags => u64,
        );
        println!("old-entry: {code} {}", self.export_at(name, pointer));
    }

    /// Name of the export with this base name that lies at `address`.
    fn export_at(&self, name: &str, address: usize) -> String {
        let mut forms = ["", "_v2", "_v3", "_v4", "_ptsz", "_v2_ptsz", "_v2_ptds", "_v3_ptsz"].into_iter();
        let same = forms.find(|form| {
            let export = CString::new(format!("{name}{form}")).expect("a name");
            self.cuda.address(&export).is_some_and(|found| found.addr() == address)
        });
        match (same, address) {
            (Some(form), _) => format!("{name}{form}"),
            (None, 0) => "-".into(),
            (None, 1) => "untouched".into(),
            (None, _) => "?".into(),
        }
    }

    /// Allocates and frees until `count` is reached or this process is killed.
    fn pairs(&self, count: u64) {
        for _ in 0..count {
            let mut pointer = 0;
            if call!(self.cuda, c"cuMemAlloc_v2", &mut pointer => &mut u64, 64 << 20 => usize) == 0 {
                call!(self.cuda, c"cuMemFree_v2", pointer => u64);
            }
        }
    }

    fn fork(&self) {
        // SAFETY: the child only calls the driver, prints through write, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = call!(self.cuda, c"cuInit", 0 => u32);
            // SAFETY: leaves without running the parent's destructors.
            unsafe { libc::_exit(i32::try_from(code).unwrap_or(99)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child of the lines above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        println!("fork: {}", libc::WEXITSTATUS(status));
    }
}
