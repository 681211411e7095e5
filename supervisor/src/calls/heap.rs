//! VID_HEAP_CONTROL: allocations and frees as older drivers made them.

use nix::errno::Errno;

use super::allocate::{give_back, padding, page_tables};
use super::{Answer, Call, Processes, Program, Supervisor};
use crate::abi::{Class, Status, heap, memory, number, put, u32_at, u64_at};
use crate::books::Object;
use crate::handles::Handles;
use crate::journal::Step;
use crate::manager::Manager;

/// Offsets of the fields of an allocating function.
struct Layout {
    attributes: usize,
    size: usize,
}

const fn layout(function: u32) -> Option<Layout> {
    match function {
        heap::ALLOC_SIZE => Some(Layout { attributes: heap::ATTRIBUTES, size: heap::LENGTH }),
        heap::ALLOC_TILED_PITCH_HEIGHT => {
            Some(Layout { attributes: heap::PITCH_ATTRIBUTES, size: heap::LENGTH })
        }
        heap::ALLOC_SIZE_RANGE => Some(Layout { attributes: heap::ATTRIBUTES, size: heap::RANGE_LENGTH }),
        _ => None,
    }
}

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    pub(super) fn heap(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut structure = [0; heap::SIZE];
        if program.read(call.address, &mut structure).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let function = u32_at(&structure, heap::FUNCTION);
        // Both free objects of any class.
        if let heap::FREE | heap::HW_FREE = function {
            let at = if function == heap::FREE { heap::HANDLE } else { heap::HW_HANDLE };
            let object = (u32_at(&structure, heap::CLIENT), u32_at(&structure, at));
            let parts = (number::VID_HEAP_CONTROL, &mut structure[..], heap::STATUS);
            return self.release(call, object, parts, program, file);
        }
        let Some(layout) = layout(function) else { return self.other(call, &mut structure, program, file) };

        let status_at = call.address + heap::STATUS as u64;
        let word = |at| u32_at(&structure, at);
        let (client, parent, flags) = (word(heap::CLIENT), word(heap::PARENT), word(heap::FLAGS));
        let is_chosen_by_rm = flags & memory::HANDLE_PROVIDED == 0 || word(heap::HANDLE) == 0;
        let asked = match function {
            heap::ALLOC_TILED_PITCH_HEIGHT => u64::from(word(heap::HEIGHT)) * u64::from(word(heap::PITCH)),
            _ => u64_at(&structure, layout.size),
        };
        let is_virtual = flags & memory::VIRTUAL != 0;
        let is_memory = !is_virtual && word(layout.attributes) & memory::LOCATION == 0;
        let mut object = Object {
            client,
            handle: word(heap::HANDLE),
            parent,
            class: match is_virtual {
                true => Class::VIRTUAL_RANGE,
                false if is_memory => Class::MEMORY,
                false => Class::HOST_MEMORY,
            },
            gpu: None,
            bytes: if is_memory { asked } else { 0 },
            cost: 0,
        };
        if is_virtual {
            object.cost = page_tables(flags, asked);
        } else if is_memory && asked <= i64::MAX as u64 {
            object.cost = padding(asked);
        }
        if !is_chosen_by_rm && self.books.get(client, object.handle).is_some() {
            return self.refuse(program, status_at, Status::DUPLICATE);
        }
        if let Err(status) = self.charge(&mut object, call, file) {
            return self.refuse(program, status_at, status);
        }
        if !program.waits() {
            self.uncharge(&object);
            return Answer::Gone;
        }
        let mut status = Status::DUPLICATE;
        for _ in 0..Handles::TRIES {
            if is_chosen_by_rm {
                object.handle = self.handles.draw();
                put(&mut structure, heap::FLAGS, &(flags | memory::HANDLE_PROVIDED).to_ne_bytes());
                put(&mut structure, heap::HANDLE, &object.handle.to_ne_bytes());
            }
            self.journal.begin(Step::Allocating { client, handle: object.handle });
            if let Err(errno) = self.manager.call(file, number::VID_HEAP_CONTROL, &mut structure, &mut []) {
                self.uncharge(&object);
                return Answer::Fail(errno);
            }
            status = Status(u32_at(&structure, heap::STATUS));
            if status != Status::DUPLICATE || !is_chosen_by_rm {
                break;
            }
        }
        put(&mut structure, heap::FLAGS, &flags.to_ne_bytes());
        if status != Status::OK {
            self.uncharge(&object);
            if is_chosen_by_rm {
                put(&mut structure, heap::HANDLE, &[0; 4]);
            }
            return give_back(program, &[(call.address, &structure)]);
        }
        if is_memory {
            object.bytes = u64_at(&structure, layout.size);
            object.cost = padding(object.bytes);
        }
        if let Err(refusal) = self.enter(&object, call, file) {
            return self.refuse(program, status_at, refusal);
        }
        let answer = give_back(program, &[(call.address, &structure)]);
        self.keep_if_received(&object, answer, call, file)
    }

    /// Performs functions that allocate and free nothing. If let through, they could turn into others after
    /// the check. Functions that carry addresses of the program are refused: CUDA calls none of them.
    fn other(&mut self, call: &Call, structure: &mut [u8], program: &impl Program, file: &M::File) -> Answer {
        let function = u32_at(structure, heap::FUNCTION);
        if !heap::HARMLESS.contains(&function) {
            return self.refuse(program, call.address + heap::STATUS as u64, Status::NOT_SUPPORTED);
        }
        if !program.waits() {
            return Answer::Gone;
        }
        match self.manager.call(file, number::VID_HEAP_CONTROL, structure, &mut []) {
            Ok(()) => give_back(program, &[(call.address, structure)]),
            Err(errno) => Answer::Fail(errno),
        }
    }
}
