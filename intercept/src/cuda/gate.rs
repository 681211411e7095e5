//! The launches as programs call them. Two instructions check whether any GPU of the container is limited. If
//! none is, the driver gets the call unchanged, including arguments on the stack. For graphs, two more
//! instructions check whether any graph ever had memory nodes.

use core::ffi::c_void;

use super::functions::number;
use super::graph::limited as graphs;
use super::graph::nodes::MEMORY_NODES;
use super::launch::GATE;
use super::launch_entry::limited as kernels;
use super::{DRIVER, Status, Stream};

#[cfg(target_arch = "x86_64")]
macro_rules! gated {
    ($($other:ident::$name:ident($($argument:ident: $type:ty),* $(,)?) $(unless $word:ident)?;)*) => { $(
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
            core::arch::naked_asm!(
                "mov rax, qword ptr [rip + {gate}]",
                "cmp dword ptr [rax], 0",
                "jne 2f",
                $(concat!("cmp dword ptr [rip + {", stringify!($word), "}], 0"), "jne 2f",)?
                "mov rax, qword ptr [rip + {driver} + {offset}]",
                "test rax, rax",
                "jz 2f", // the driver lacks this name: the other path has the answer
                "jmp rax",
                "2:",
                "jmp {other}",
                gate = sym GATE,
                driver = sym DRIVER,
                offset = const number(stringify!($name)) * size_of::<usize>(),
                other = sym $other::$name,
                $($word = sym $word,)?
            )
        }
    )* };
}

/// Same as above. Between a call and its first instruction x16 and x17 are free to use (Procedure Call
/// Standard for the Arm 64-bit Architecture).
#[cfg(target_arch = "aarch64")]
macro_rules! gated {
    ($($other:ident::$name:ident($($argument:ident: $type:ty),* $(,)?) $(unless $word:ident)?;)*) => { $(
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
            core::arch::naked_asm!(
                "adrp x16, {gate}",
                "ldr x16, [x16, :lo12:{gate}]",
                "ldr w17, [x16]",
                "cbnz w17, 2f",
                $(
                    concat!("adrp x16, {", stringify!($word), "}"),
                    concat!("ldr w17, [x16, :lo12:{", stringify!($word), "}]"),
                    "cbnz w17, 2f",
                )?
                "adrp x16, {driver} + {offset}",
                "ldr x16, [x16, :lo12:{driver} + {offset}]",
                "cbz x16, 2f", // the driver lacks this name: the other path has the answer
                "br x16",
                "2:",
                "b {other}",
                gate = sym GATE,
                driver = sym DRIVER,
                offset = const number(stringify!($name)) * size_of::<usize>(),
                other = sym $other::$name,
                $($word = sym $word,)?
            )
        }
    )* };
}

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;

    gated! {
        kernels::cuLaunchKernel(
            function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared: u32, stream: Stream, parameters: *mut c_void, extra: *mut c_void,
        );
        kernels::cuLaunchKernel_ptsz(
            function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared: u32, stream: Stream, parameters: *mut c_void, extra: *mut c_void,
        );
        kernels::cuLaunchCooperativeKernel(
            function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared: u32, stream: Stream, parameters: *mut c_void,
        );
        kernels::cuLaunchCooperativeKernel_ptsz(
            function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared: u32, stream: Stream, parameters: *mut c_void,
        );
        kernels::cuLaunchKernelEx(
            configuration: *const c_void, function: usize, parameters: *mut c_void, extra: *mut c_void,
        );
        kernels::cuLaunchKernelEx_ptsz(
            configuration: *const c_void, function: usize, parameters: *mut c_void, extra: *mut c_void,
        );
        graphs::cuGraphLaunch(executable: usize, stream: Stream) unless MEMORY_NODES;
        graphs::cuGraphLaunch_ptsz(executable: usize, stream: Stream) unless MEMORY_NODES;
    }
}
