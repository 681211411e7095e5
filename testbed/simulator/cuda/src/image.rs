//! Code images: the bytes that a program passes to cuModuleLoadData and similar functions.

use gpushare_simulator_ptx::{Fault, Global, Module, Parameter, PtxError};

use crate::abi::{Code, In, Result};
use crate::launch::Kernel;

/// An image, classified by what is known of its kernels.
pub enum Image {
    /// PTX that the interpreter can run.
    Program(Program),
    /// PTX that the interpreter cannot read. It has kernels of these names, which only take time.
    Named(Vec<String>),
    /// Machine code. Any name is a kernel, which only takes time.
    Opaque,
}

const ELF: [u8; 4] = *b"\x7fELF";
const FAT: u32 = 0xba55_ed50;
const FAT_WRAPPER: u32 = 0x4662_43b1;
/// Longest text that is read as PTX, in bytes.
const MOST: usize = 64 << 20;

impl Image {
    /// Reads an image from memory. PTX is zero-terminated text. Other images are recognised by their first
    /// word and not parsed.
    pub fn read(data: In<u8>) -> Result<Self> {
        let head: Vec<u8> =
            (0..4).map_while(|index| data.at(index).ok().filter(|&byte| index < 1 || byte != 0)).collect();
        let first = data.get()?;
        if head == ELF || first == 0x50 || first == 0xb1 {
            let word = head.try_into().map_or(0, u32::from_le_bytes);
            let known = word == u32::from_le_bytes(ELF) || word == FAT || word == FAT_WRAPPER;
            return if known { Ok(Self::Opaque) } else { Err(Code::INVALID_IMAGE) };
        }
        let text: Vec<u8> =
            (0..MOST).map_while(|index| data.at(index).ok().filter(|&byte| byte != 0)).collect();
        Self::of_text(&text)
    }

    /// Reads an image from a file.
    pub fn open(path: &str) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|_| Code::FILE_NOT_FOUND)?;
        let word = bytes.first_chunk().map_or(0, |head| u32::from_le_bytes(*head));
        if word == u32::from_le_bytes(ELF) || word == FAT {
            return Ok(Self::Opaque);
        }
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Self::of_text(&bytes[..end])
    }

    fn of_text(bytes: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(bytes).map_err(|_| Code::INVALID_IMAGE)?;
        if !text.contains(".version") {
            return Err(Code::INVALID_IMAGE);
        }
        Ok(Program::parse(text).map_or_else(|| Self::Named(entry_names(text)), Self::Program))
    }

    /// Whether the image has a kernel of this name.
    pub fn has(&self, name: &str) -> bool {
        matches!(self, Self::Opaque) || self.names().iter().any(|known| known == name)
    }

    /// Returns the names of the kernels; empty if they are unknown.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Program(program) => program.names(),
            Self::Named(names) => names.clone(),
            Self::Opaque => Vec::new(),
        }
    }

    /// Layout of a kernel's parameters, if it is known.
    pub fn parameters(&self, kernel: &str) -> Option<Vec<Parameter>> {
        if let Self::Program(program) = self { program.parameters(kernel) } else { None }
    }

    /// Returns the variables of the module; empty if they are unknown.
    pub fn globals(&self) -> Vec<Global> {
        if let Self::Program(program) = self { program.0.globals() } else { Vec::new() }
    }
}

/// Names after `.entry` in a PTX text.
fn entry_names(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$' | '%');
    let after = text.split(".entry").skip(1).map(str::trim_start);
    after.map(|rest| rest.split(|c| !is_name(c)).next().unwrap_or_default().to_owned()).collect()
}

/// PTX that the interpreter understands.
pub struct Program(Module);

impl Program {
    fn parse(text: &str) -> Option<Self> {
        Module::parse(text).ok().map(Self)
    }

    fn names(&self) -> Vec<String> {
        self.0.kernels().map(str::to_owned).collect()
    }

    fn parameters(&self, kernel: &str) -> Option<Vec<Parameter>> {
        self.0.parameters(kernel)
    }

    /// Runs the kernel `name` over its whole grid. `address` returns the address of a variable of the module.
    pub fn run(&self, name: &str, kernel: &Kernel, address: &dyn Fn(&str) -> Option<u64>) -> Result {
        let Kernel { grid, block, shared, parameters, .. } = kernel;
        // SAFETY: device memory stays mapped for the life of the process. Every CUDA program guarantees that
        // its kernels access only that memory. On a real GPU an invalid access faults the kernel, and here it
        // faults the process.
        let result = unsafe { self.0.run(name, *grid, *block, *shared, parameters, address) };
        result.map_err(|error| {
            if let PtxError::Fault { fault, .. } = error { code_of(fault) } else { Code::LAUNCH_FAILED }
        })
    }
}

/// The CUDA result for a fault of a kernel.
fn code_of(fault: Fault) -> Code {
    match fault {
        Fault::IllegalAddress(_) | Fault::OutsideShared(_) => Code::ILLEGAL_ADDRESS,
        Fault::MisalignedAddress(_) => Code::MISALIGNED_ADDRESS,
        Fault::Assertion => Code::ASSERT,
        // On a real GPU such a kernel hangs until the watchdog kills it.
        Fault::StepLimit(_) | Fault::Deadlock => Code::LAUNCH_TIMEOUT,
        Fault::StackOverflow => Code::HARDWARE_STACK_ERROR,
        Fault::NoFunction(_) | Fault::NoLabel(_) => Code::INVALID_PC,
        Fault::NoBarrier(_) => Code::ILLEGAL_INSTRUCTION,
        _ => Code::LAUNCH_FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_text_that_is_not_parsed() {
        let text = ".version 8.0\n.visible .entry busy_10ms(\n) { ret; }\n.entry  _Z3addPf ( ) {}";
        assert_eq!(entry_names(text), ["busy_10ms", "_Z3addPf"]);
    }

    #[test]
    fn a_fault_has_cudas_number() {
        for (fault, want) in [
            (Fault::Trap, 719),
            (Fault::Assertion, 710),
            (Fault::MisalignedAddress(1), 716),
            (Fault::IllegalAddress(0), 700),
            (Fault::OutsideShared(64), 700),
            (Fault::StepLimit(1), 702),
            (Fault::Deadlock, 702),
            (Fault::StackOverflow, 714),
            (Fault::NoFunction(0), 718),
            (Fault::NoLabel(3), 718),
            (Fault::NoBarrier(16), 715),
        ] {
            assert_eq!(code_of(fault), Code(want), "{fault}");
        }
    }

    #[test]
    fn what_is_neither_code_nor_text_is_refused() {
        assert!(matches!(Image::of_text(b"hello"), Err(Code::INVALID_IMAGE)));
    }
}
