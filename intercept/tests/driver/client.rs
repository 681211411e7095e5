//! A small CUDA and NVML client: opens the libraries by soname as programs do, and calls functions by name.

use std::ffi::CString;

use gpushare_region::path;

pub const MIB: u64 = 1 << 20;

/// A loaded library.
pub struct Library(usize);

impl Library {
    pub fn open(name: &str) -> Self {
        let text = CString::new(name).unwrap();
        // SAFETY: a C string; the libraries run their constructors.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "cannot open {name}");
        Self(handle.expose_provenance())
    }

    /// Address of `name`; 0 if there is none.
    pub fn symbol(&self, name: &str) -> usize {
        let text = CString::new(name).unwrap();
        // SAFETY: an open handle and a C string.
        unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(self.0), text.as_ptr()) }.addr()
    }

    /// Calls `name` with integers and addresses.
    pub fn call(&self, name: &str, arguments: &[usize]) -> i32 {
        let address = self.symbol(name);
        assert_ne!(address, 0, "no {name}");
        call(address, arguments)
    }
}

/// Calls the function at `address`. It ignores excess arguments: they are in registers.
pub fn call(address: usize, arguments: &[usize]) -> i32 {
    type Any = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> i32;
    let mut six = [0; 6];
    six[..arguments.len()].copy_from_slice(arguments);
    let [a, b, c, d, e, f] = six;
    let pointer = std::ptr::with_exposed_provenance::<()>(address);
    // SAFETY: every function that the tests call takes at most six integers or addresses and returns one.
    let function = unsafe { std::mem::transmute::<*const (), Any>(pointer) };
    // SAFETY: the tests pass the arguments of the function with this name.
    unsafe { function(a, b, c, d, e, f) }
}

/// Like [`call`], with up to eleven arguments.
pub fn call_long(address: usize, arguments: &[usize]) -> i32 {
    type Any = unsafe extern "C" fn(
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
    ) -> i32;
    let mut all = [0; 11];
    all[..arguments.len()].copy_from_slice(arguments);
    let [a, b, c, d, e, f, g, h, i, j, k] = all;
    let pointer = std::ptr::with_exposed_provenance::<()>(address);
    // SAFETY: as in `call`; excess arguments are on the stack and are not read.
    let function = unsafe { std::mem::transmute::<*const (), Any>(pointer) };
    // SAFETY: the tests pass the arguments of the function with this name.
    unsafe { function(a, b, c, d, e, f, g, h, i, j, k) }
}

/// Address of a place that the driver writes to.
pub fn out<T>(place: &mut T) -> usize {
    std::ptr::from_mut(place).expose_provenance()
}

/// A program with a context on the first GPU.
pub struct Cuda {
    pub library: Library,
    pub context: usize,
}

impl Cuda {
    /// Calls `cuInit`, then makes the primary context of device 0 current.
    pub fn start() -> Self {
        Self::start_on(0)
    }

    pub fn start_on(device: usize) -> Self {
        let mut cuda = Self { library: Library::open("libcuda.so.1"), context: 0 };
        assert_eq!(cuda.call("cuInit", &[0]), 0);
        let mut context = 0usize;
        assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), device]), 0, "context");
        assert_eq!(cuda.call("cuCtxSetCurrent", &[context]), 0);
        cuda.context = context;
        cuda
    }

    pub fn call(&self, name: &str, arguments: &[usize]) -> i32 {
        self.library.call(name, arguments)
    }

    /// `cuMemAlloc_v2`: the pointer, or the error.
    pub fn allocate(&self, mib: u64) -> Result<u64, i32> {
        let mut pointer = 0u64;
        match self.call("cuMemAlloc_v2", &[out(&mut pointer), bytes(mib)]) {
            0 => Ok(pointer),
            status => Err(status),
        }
    }

    pub fn free(&self, pointer: u64) -> i32 {
        self.call("cuMemFree_v2", &[usize::try_from(pointer).unwrap()])
    }

    /// Free and total MiB.
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0u64, 0u64);
        assert_eq!(self.call("cuMemGetInfo_v2", &[out(&mut free), out(&mut total)]), 0);
        (free / MIB, total / MIB)
    }
}

pub fn bytes(mib: u64) -> usize {
    usize::try_from(mib * MIB).unwrap()
}

/// The memory that the driver itself counts on GPU `index`, in MiB: of all processes, including contexts.
pub fn really_held(index: usize) -> u64 {
    let nvml = Library::open(path::DRIVER_NVML);
    let (mut device, mut memory) = (0usize, [0x0200_0028u64, 0, 0, 0, 0]);
    assert_eq!(nvml.call("nvmlInit_v2", &[]), 0);
    assert_eq!(nvml.call("nvmlDeviceGetHandleByIndex_v2", &[index, out(&mut device)]), 0);
    assert_eq!(nvml.call("nvmlDeviceGetMemoryInfo_v2", &[device, out(&mut memory)]), 0);
    memory[4] / MIB
}

/// Total, free and used bytes of GPU `index`.
pub fn memory_info(nvml: &Library, index: usize) -> [u64; 3] {
    let (mut device, mut memory) = (0usize, [0u64; 3]);
    assert_eq!(nvml.call("nvmlInit_v2", &[]), 0);
    assert_eq!(nvml.call("nvmlDeviceGetHandleByIndex_v2", &[index, out(&mut device)]), 0);
    assert_eq!(nvml.call("nvmlDeviceGetMemoryInfo", &[device, out(&mut memory)]), 0);
    memory
}
