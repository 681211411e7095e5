//! Lists the files of each driver capability: names only, of the drivers 470 to 580.

use crate::capability::Capability;

/// How much of a capability a container gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The minimum that works, for a share. Files that allocate without libcuda (OpenCL, the debugger) or let
    /// containers reach each other (MPS, daemons) stay out, because limits would not apply there.
    Share,
    /// Everything, for a container with whole GPUs.
    Whole,
}

/// A library, by the naming scheme of its file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Library {
    /// The file is `STEM.so.VERSION`; the SONAME is the stem and the second part.
    Short(&'static str, &'static str),
    /// Like `Short`, and programs also open `STEM.so`.
    Linked(&'static str, &'static str),
    /// The file is `STEM.so.VERSION`, which is also the SONAME.
    Full(&'static str),
    /// A file with exactly this name, with a version of its own or none. The second part is its folder below
    /// the container's library folder.
    Named(&'static str, &'static str),
}

use Library::{Full, Linked, Named, Short};

const COMPUTE: &[Library] = &[
    Short("libnvidia-ptxjitcompiler", ".so.1"),
    Short("libnvidia-nvvm", ".so.4"),
    Short("libnvidia-nvvm70", ".so.4"),
    Full("libnvidia-gpucomp"),
    Full("libnvidia-pkcs11"),
    Full("libnvidia-pkcs11-openssl3"),
    Full("libnvidia-tileiras"),
    Full("libnvidia-fatbinaryloader"),
];
const COMPUTE_WHOLE: &[Library] = &[
    Short("libcudadebugger", ".so.1"),
    Short("libnvidia-opencl", ".so.1"),
    Short("libnvidia-allocator", ".so.1"),
    Full("libnvidia-compiler"),
];
const UTILITY: &[Library] = &[Short("libnvidia-cfg", ".so.1")];
const UTILITY_WHOLE: &[Library] = &[Named("libnvidia-api.so.1", ""), Short("libnvidia-nscq", ".so.2")];
const VIDEO: &[Library] = &[
    Linked("libnvcuvid", ".so.1"),
    Linked("libnvidia-encode", ".so.1"),
    Linked("libnvidia-opticalflow", ".so.1"),
    Short("libvdpau_nvidia", ".so.1"),
];
const GRAPHICS: &[Library] = &[
    Short("libGLX_nvidia", ".so.0"),
    Short("libEGL_nvidia", ".so.0"),
    Short("libGLESv1_CM_nvidia", ".so.1"),
    Short("libGLESv2_nvidia", ".so.2"),
    Full("libnvidia-glcore"),
    Full("libnvidia-eglcore"),
    Full("libnvidia-glsi"),
    Full("libnvidia-tls"),
    Full("libnvidia-glvkspirv"),
    Full("libnvidia-rtcore"),
    Full("libnvidia-gpucomp"),
    Full("libnvidia-cbl"),
    Full("libnvidia-vulkan-producer"),
    Short("libnvidia-allocator", ".so.1"),
    Short("libnvidia-fbc", ".so.1"),
    Short("libnvidia-ifr", ".so.1"),
    Short("libnvoptix", ".so.1"),
    Named("libnvidia-egl-gbm.so.1", ""),
    Named("libnvidia-egl-wayland.so.1", ""),
    Named("libnvidia-egl-wayland2.so.1", ""),
    Named("libnvidia-egl-xcb.so.1", ""),
    Named("libnvidia-egl-xlib.so.1", ""),
    Named("nvidia-drm_gbm.so", "gbm"),
];
const NGX: &[Library] = &[Short("libnvidia-ngx", ".so.1")];

pub(super) fn libraries(capability: Capability, extent: Extent) -> impl Iterator<Item = Library> {
    let (always, whole): (&[Library], &[Library]) = match capability {
        Capability::Compute => (COMPUTE, COMPUTE_WHOLE),
        Capability::Utility => (UTILITY, UTILITY_WHOLE),
        Capability::Video => (VIDEO, &[]),
        Capability::Graphics | Capability::Display => (GRAPHICS, &[]),
        Capability::Ngx => (NGX, &[]),
    };
    let whole = if extent == Extent::Whole { whole } else { &[] };
    always.iter().chain(whole).copied()
}

/// Names of programs, which appear in the container's `/usr/bin`.
pub(super) fn programs(capability: Capability, extent: Extent) -> &'static [&'static str] {
    match (capability, extent) {
        (Capability::Compute, Extent::Whole) => &["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"],
        (Capability::Utility, Extent::Share) => &["nvidia-smi"],
        (Capability::Utility, Extent::Whole) => {
            &["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"]
        }
        (Capability::Display, _) => &["nvidia-xconfig"],
        _ => &[],
    }
}

const GRAPHICS_DATA: &[&str] = &[
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.x86_64.json",
    "vulkan/icd.d/nvidia_icd.aarch64.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
    "nvidia/nvoptix.bin",
];
const DISPLAY_DATA: &[&str] =
    &["X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf"];

/// Files that let programs find the driver, relative to `/etc` or `/usr/share`. Both are searched on the
/// host, and the file appears at the same place in the container.
pub(super) fn data(capability: Capability, extent: Extent) -> impl Iterator<Item = &'static str> {
    let (first, second): (&[&str], &[&str]) = match (capability, extent) {
        (Capability::Compute, Extent::Whole) => (&["OpenCL/vendors/nvidia.icd"], &[]),
        (Capability::Graphics, _) => (GRAPHICS_DATA, &[]),
        (Capability::Display, _) => (GRAPHICS_DATA, DISPLAY_DATA),
        _ => (&[], &[]),
    };
    first.iter().chain(second).copied()
}
