//! Turns a function's body into code, in one pass over the words. Branches are patched at the end, when every
//! label is known.
//!
//! Some instructions (carry, `.ftz`, `.sat`, packed halves) have no single operation. They become several,
//! all under the same guard, with temporaries that are free again after the instruction.

mod arithmetic;
mod call;
mod compare;
mod control;
mod convert;
mod memory;
mod modifiers;
mod operand;
mod scope;
mod warp;

use std::collections::HashMap;

use crate::alu::Alu;
use crate::code::{Function, Guard, Instruction, Link, Op, Place, Slot, Special};
use crate::error::PtxError;
use crate::lex::{Cursor, Token};
use crate::parse::{Header, Space, Variable, syntax, variables};
use crate::types::Ty;
use crate::variables::{Name, Variables, function_value, number};
use modifiers::Modifiers;
use operand::Operand;
use scope::{Memory, Register, Scopes};

/// Most local memory in bytes that a GPU gives to a thread.
const LARGEST_FRAME: u32 = 512 << 10;

/// A function under construction.
pub(crate) struct Lowering<'m, 't> {
    names: &'m HashMap<&'t str, Name>,
    variables: &'m mut Variables,
    function: Function,
    scopes: Scopes<'t>,
    constants: HashMap<u64, Slot>,
    linked: HashMap<Link, Slot>,
    temporaries: Vec<Slot>,
    /// Temporaries taken by the current instruction.
    taken: usize,
    /// Bytes of frame memory in use in the current scope. The function's `memory` is the highest value that
    /// this had.
    memory_top: u32,
    carry: Option<Slot>,
    guard: Guard,
    line: u32,
    patches: Vec<Patch<'t>>,
}

/// A branch whose label is not resolved yet.
struct Patch<'t> {
    instruction: usize,
    /// Position in the list of an indexed branch.
    index: usize,
    scope: usize,
    label: &'t str,
    line: u32,
}

/// The code of the function with `header` and `body`.
pub(crate) fn lower<'t>(
    header: &Header<'t>,
    body: Cursor<'_, 't>,
    names: &HashMap<&'t str, Name>,
    variables: &mut Variables,
) -> Result<Function, PtxError> {
    let mut lowering = Lowering {
        names,
        variables,
        function: Function { slots: vec![0], ..Function::default() },
        scopes: Scopes::default(),
        constants: HashMap::from([(0, 0)]),
        linked: HashMap::new(),
        temporaries: Vec::new(),
        taken: 0,
        memory_top: 0,
        carry: None,
        guard: Guard::ALWAYS,
        line: 0,
        patches: Vec::new(),
    };
    lowering.formals(header)?;
    lowering.body(body)?;
    lowering.finish()
}

/// Offsets of a kernel's parameters in its parameter buffer.
pub(crate) fn parameters(header: &Header<'_>) -> Vec<crate::Parameter> {
    let mut end = 0_usize;
    let place = |formal: &Variable<'_>| {
        let offset = end.next_multiple_of(formal.align);
        end = offset + formal.size;
        crate::Parameter { offset, size: formal.size }
    };
    header.formals.iter().map(place).collect()
}

impl<'t> Lowering<'_, 't> {
    fn formals(&mut self, header: &Header<'t>) -> Result<(), PtxError> {
        if header.entry {
            for (formal, parameter) in header.formals.iter().zip(parameters(header)) {
                let offset = number(parameter.offset, formal.line)?;
                self.scopes
                    .declare_memory(formal.name, Memory { link: Link::Parameter(offset), place: None });
            }
            return Ok(());
        }
        for formal in &header.formals {
            let place = self.formal(formal)?;
            self.function.formals.push(place);
        }
        for result in &header.results {
            let place = self.formal(result)?;
            self.function.results.push(place);
        }
        Ok(())
    }

    fn formal(&mut self, formal: &Variable<'t>) -> Result<Place, PtxError> {
        if formal.space != Space::Reg {
            return self.frame_memory(formal);
        }
        let slot = self.slot(0)?;
        self.scopes.declare_register(formal.name, Register { ty: formal.ty, slots: vec![slot] });
        Ok(Place::Slot(slot))
    }

    fn body(&mut self, mut cursor: Cursor<'_, 't>) -> Result<(), PtxError> {
        while let Some(token) = cursor.peek() {
            self.line = cursor.line();
            match token {
                Token::Sign('{') => self.scopes.open(self.memory_top),
                Token::Sign('}') => {
                    self.memory_top =
                        self.scopes.close().ok_or_else(|| syntax(self.line, "'}' closes nothing"))?;
                }
                Token::Sign(';') => {}
                _ => {
                    self.statement(&mut cursor)?;
                    continue;
                }
            }
            cursor.next();
        }
        Ok(())
    }

    fn statement(&mut self, cursor: &mut Cursor<'_, 't>) -> Result<(), PtxError> {
        self.guard = Guard::ALWAYS;
        self.taken = 0;
        if cursor.accept('@') {
            let negated = cursor.accept('!');
            let name = cursor.word()?;
            self.guard = Guard::new(self.source(&Operand::Name(name), Ty::Pred)?, negated);
        }
        let word = cursor.word()?;
        if word.starts_with('.') {
            return self.directive(word, cursor);
        }
        if cursor.accept(':') {
            return self.label(word, cursor);
        }
        let mut modifiers = Modifiers::new(word, self.line);
        let operands = operand::operands(cursor)?;
        self.instruction(&mut modifiers, &operands)?;
        modifiers.finish()
    }

    fn directive(&mut self, word: &str, cursor: &mut Cursor<'_, 't>) -> Result<(), PtxError> {
        match word {
            ".loc" | ".file" => {
                cursor.skip_line(self.line);
                Ok(())
            }
            ".pragma" => cursor.skip_past(';'),
            _ => {
                for variable in variables(cursor, word, false)? {
                    self.declare(&variable)?;
                }
                Ok(())
            }
        }
    }

    fn declare(&mut self, variable: &Variable<'t>) -> Result<(), PtxError> {
        match variable.space {
            Space::Reg => match variable.count {
                Some(count) => self.scopes.declare_family(variable.name, count, variable.ty, variable.lanes),
                None => {
                    let slots = (0..variable.lanes).map(|_| self.slot(0)).collect::<Result<_, _>>()?;
                    self.scopes.declare_register(variable.name, Register { ty: variable.ty, slots });
                }
            },
            Space::Local | Space::Param => {
                self.frame_memory(variable)?;
            }
            Space::Shared | Space::Global | Space::Const => {
                let link = match self.variables.declare(variable)? {
                    Name::Shared(number) => Link::Shared(number),
                    Name::Variable(number) => {
                        self.variables.initialise(number, variable, self.names)?;
                        Link::Variable(number)
                    }
                    Name::Function(_) => return Err(syntax(variable.line, "a variable expected")),
                };
                self.scopes.declare_memory(variable.name, Memory { link, place: None });
            }
        }
        Ok(())
    }

    /// Places a `.local` or `.param` variable in the frame's memory.
    fn frame_memory(&mut self, variable: &Variable<'t>) -> Result<Place, PtxError> {
        let large = || syntax(variable.line, "the frame is too large");
        // A multiple of 8, because a scalar parameter is passed as a whole slot between memory and a
        // register.
        let align = u32::try_from(variable.align.clamp(8, 16)).map_err(|_| large())?;
        let size = number(variable.size, variable.line)?;
        let offset = self.memory_top.checked_next_multiple_of(align).ok_or_else(large)?;
        let room = size.checked_next_multiple_of(8).ok_or_else(large)?;
        self.memory_top = offset.checked_add(room).filter(|&top| top <= LARGEST_FRAME).ok_or_else(large)?;
        self.function.memory = self.function.memory.max(self.memory_top);
        let place = Place::Memory { offset, size };
        self.scopes.declare_memory(variable.name, Memory { link: Link::Frame(offset), place: Some(place) });
        Ok(place)
    }

    fn label(&mut self, name: &'t str, cursor: &mut Cursor<'_, 't>) -> Result<(), PtxError> {
        if cursor.accept_word(".callprototype") || cursor.accept_word(".calltargets") {
            return cursor.skip_past(';');
        }
        if cursor.accept_word(".branchtargets") {
            let mut targets = Vec::new();
            for operand in operand::operands(cursor)? {
                let Operand::Name(target) = operand else {
                    return Err(syntax(self.line, "a label expected"));
                };
                targets.push(target);
            }
            self.scopes.declare_table(name, targets);
            return Ok(());
        }
        let at = number(self.function.code.len(), self.line)?;
        self.scopes.declare_label(name, at);
        Ok(())
    }

    fn instruction(&mut self, m: &mut Modifiers<'t>, operands: &[Operand<'t>]) -> Result<(), PtxError> {
        match m.name {
            "mov" | "cvt" | "cvta" | "isspacep" => self.convert(m, operands),
            "selp" | "slct" | "setp" | "set" => self.compare(m, operands),
            "ld" | "ldu" | "st" | "atom" | "red" | "cp" => self.memory(m, operands),
            "call" => self.call(m, operands),
            "bar" | "barrier" | "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => {
                self.warp(m, operands)
            }
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" | "membar" | "fence" | "nanosleep"
            | "prefetch" | "prefetchu" | "discard" | "applypriority" | "griddepcontrol" => {
                self.control(m, operands)
            }
            _ => self.arithmetic(m, operands),
        }
    }

    /// Appends an operation under the current guard.
    fn emit(&mut self, op: Op) {
        self.function.code.push(Instruction { guard: self.guard, op });
        self.function.lines.push(self.line);
    }

    fn alu(&mut self, f: Alu, d: Slot, [a, b, c]: [Slot; 3]) {
        self.emit(Op::Alu { f, d, a, b, c });
    }

    /// Appends an operation whose result goes into a new temporary.
    fn alu_temporary(&mut self, f: Alu, operands: [Slot; 3]) -> Result<Slot, PtxError> {
        let d = self.temporary()?;
        self.alu(f, d, operands);
        Ok(d)
    }

    fn slot(&mut self, value: u64) -> Result<Slot, PtxError> {
        let slot = number(self.function.slots.len(), self.line)?;
        self.function.slots.push(value);
        Ok(slot)
    }

    /// A slot that stays taken until the next instruction of the text.
    fn temporary(&mut self) -> Result<Slot, PtxError> {
        if self.taken == self.temporaries.len() {
            let slot = self.slot(0)?;
            self.temporaries.push(slot);
        }
        self.taken += 1;
        Ok(self.temporaries[self.taken - 1])
    }

    fn constant(&mut self, bits: u64) -> Result<Slot, PtxError> {
        if let Some(slot) = self.constants.get(&bits) {
            return Ok(*slot);
        }
        let slot = self.slot(bits)?;
        self.constants.insert(bits, slot);
        Ok(slot)
    }

    fn link(&mut self, link: Link) -> Result<Slot, PtxError> {
        if let Some(slot) = self.linked.get(&link) {
            return Ok(*slot);
        }
        let slot = self.slot(0)?;
        self.linked.insert(link, slot);
        self.function.links.push((slot, link));
        Ok(slot)
    }

    fn special(&mut self, special: Special) -> Result<Slot, PtxError> {
        self.link(Link::Special(special))
    }

    /// The slot that holds an operand's value.
    fn source(&mut self, operand: &Operand<'t>, ty: Ty) -> Result<Slot, PtxError> {
        match operand {
            Operand::Literal(literal) => self.constant(literal.bits(ty)),
            Operand::Not(inner) => {
                let value = self.source(inner, ty)?;
                self.alu_temporary(|a, _, _| a ^ 1, [value, 0, 0])
            }
            Operand::Sum(name, offset) => {
                let base = self.source(&Operand::Name(name), ty)?;
                let distance = self.constant(u64::from_ne_bytes(offset.to_ne_bytes()))?;
                self.alu_temporary(|a, b, _| a.wrapping_add(b), [base, distance, 0])
            }
            Operand::Name(name) => self.named(name),
            Operand::Element(slot, _) => Ok(*slot),
            _ => Err(syntax(self.line, "this operand does not fit the instruction")),
        }
    }

    /// The slot of a register, or a slot with the address of a variable or function.
    fn named(&mut self, name: &'t str) -> Result<Slot, PtxError> {
        if let Some(register) = self.register(name)? {
            return match register.slots[..] {
                [slot] => Ok(slot),
                _ => Err(syntax(self.line, &format!("{name} is a vector"))),
            };
        }
        if let Some(slot) = self.special_register(name)? {
            return Ok(slot);
        }
        if let Some(memory) = self.scopes.memory(name) {
            return self.link(memory.link);
        }
        match self.names.get(name) {
            Some(Name::Variable(number)) => self.link(Link::Variable(*number)),
            Some(Name::Shared(number)) => self.link(Link::Shared(*number)),
            Some(Name::Function(number)) => {
                self.function.indirect = true;
                self.constant(function_value(*number))
            }
            None => Err(PtxError::UnknownSymbol { line: self.line, name: name.to_owned() }),
        }
    }

    /// The slot and type of the register that an instruction writes; `_` gets one that nothing reads.
    fn destination(&mut self, operand: &Operand<'t>) -> Result<(Slot, Ty), PtxError> {
        let name = match operand {
            Operand::Element(slot, ty) => return Ok((*slot, *ty)),
            Operand::Name(name) => name,
            _ => return Err(syntax(self.line, "a register expected")),
        };
        if *name == "_" {
            return Ok((self.temporary()?, Ty::B64));
        }
        match self.register(name)? {
            Some(Register { ty, slots }) if slots.len() == 1 => Ok((slots[0], ty)),
            Some(_) => Err(syntax(self.line, &format!("{name} is a vector"))),
            None => Err(PtxError::UnknownSymbol { line: self.line, name: (*name).to_owned() }),
        }
    }

    /// The elements of `{a, b}`, or of a vector register.
    fn elements(&mut self, operand: &Operand<'t>) -> Result<Option<Vec<Operand<'t>>>, PtxError> {
        match operand {
            Operand::Vector(elements) => Ok(Some(elements.clone())),
            Operand::Name(name) => match self.register(name)? {
                Some(Register { ty, slots }) if slots.len() > 1 => {
                    Ok(Some(slots.into_iter().map(|slot| Operand::Element(slot, ty)).collect()))
                }
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    fn finish(mut self) -> Result<Function, PtxError> {
        self.guard = Guard::ALWAYS;
        self.emit(Op::Return); // a body may end without one
        for patch in std::mem::take(&mut self.patches) {
            let target = self
                .scopes
                .label(patch.scope, patch.label)
                .ok_or_else(|| PtxError::UnknownSymbol { line: patch.line, name: patch.label.to_owned() })?;
            match &mut self.function.code[patch.instruction].op {
                Op::Branch(to) => *to = target,
                Op::BranchIndexed { targets, .. } => targets[patch.index] = target,
                _ => {}
            }
        }
        self.function.memory = self.function.memory.next_multiple_of(16);
        Ok(self.function)
    }
}
