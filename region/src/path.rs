//! Fixed paths inside a container. The linker writes the driver's paths into our libraries: if the host
//! mounts the files elsewhere, every library that is already built breaks.

/// The folder of the driver's own files in the container.
///
/// No file in it has a name that a loader, `ldconfig` or a linker looks up: otherwise a program with this
/// folder in `LD_LIBRARY_PATH` would find the driver's library before ours.
pub const DRIVER_FOLDER: &str = "/usr/lib/gpushare/driver";
/// The driver's own `libcuda.so.1`, under the only name it has in the container.
pub const DRIVER_CUDA: &str = "/usr/lib/gpushare/driver/cuda";
/// The driver's own `libnvidia-ml.so.1`, under the only name it has in the container.
pub const DRIVER_NVML: &str = "/usr/lib/gpushare/driver/nvidia-ml";
/// The limits file, mounted read-only.
pub const LIMITS: &core::ffi::CStr = c"/usr/lib/gpushare/limits";
/// The pipe folder of the GPU's MPS control daemon, if the container is its client.
pub const MPS_PIPE: &core::ffi::CStr = c"/usr/lib/gpushare/mps";
/// The usage file, mounted read-write for every user of the container.
pub const USAGE: &core::ffi::CStr = c"/usr/lib/gpushare/usage";
