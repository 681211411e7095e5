//! Where everything stands inside a container. The linker writes the driver paths into our libraries, so they are
//! fixed: a host that mounts elsewhere breaks every library already built.

/// The driver's own `libcuda.so.1`, under the only name it has in the container.
pub const DRIVER_CUDA: &str = "/usr/lib/gpushare/driver/libcuda.so.1";
/// The driver's own `libnvidia-ml.so.1`, under the only name it has in the container.
pub const DRIVER_NVML: &str = "/usr/lib/gpushare/driver/libnvidia-ml.so.1";
/// The limits file, mounted read-only.
pub const LIMITS: &core::ffi::CStr = c"/usr/lib/gpushare/limits";
/// The usage file, mounted read-write for every user of the container.
pub const USAGE: &core::ffi::CStr = c"/usr/lib/gpushare/usage";
