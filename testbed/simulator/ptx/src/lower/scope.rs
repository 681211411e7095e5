//! Names inside a body. Braces open a scope, and a name means its innermost declaration. Labels in sibling
//! scopes do not collide, which inlined assembly relies on.

use std::collections::HashMap;

use crate::code::{LaneMask, Link, Place, Slot, Special};
use crate::error::PtxError;
use crate::lower::Lowering;
use crate::types::Ty;

/// A declared register; more than one slot for a vector.
#[derive(Debug, Clone)]
pub(super) struct Register {
    pub(super) ty: Ty,
    pub(super) slots: Vec<Slot>,
}

/// A variable in memory: how its address is found, and its place if it lies in the frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    pub(super) link: Link,
    pub(super) place: Option<Place>,
}

/// `.reg .b32 %r<count>`
#[derive(Debug, Clone, Copy)]
struct Family<'t> {
    prefix: &'t str,
    count: u32,
    ty: Ty,
    lanes: u8,
}

#[derive(Debug, Default)]
struct Scope<'t> {
    parent: Option<usize>,
    registers: HashMap<&'t str, Register>,
    families: Vec<Family<'t>>,
    memory: HashMap<&'t str, Memory>,
    labels: HashMap<&'t str, u32>,
    tables: HashMap<&'t str, Vec<&'t str>>,
    /// Bytes of frame memory in use when the scope began.
    memory_start: u32,
}

/// All scopes of a body; the first is the body itself.
#[derive(Debug)]
pub(super) struct Scopes<'t> {
    scopes: Vec<Scope<'t>>,
    current: usize,
}

impl Default for Scopes<'_> {
    fn default() -> Self {
        Self { scopes: vec![Scope::default()], current: 0 }
    }
}

impl<'t> Scopes<'t> {
    pub(super) fn open(&mut self, memory_start: u32) {
        self.scopes.push(Scope { parent: Some(self.current), memory_start, ..Scope::default() });
        self.current = self.scopes.len() - 1;
    }

    /// Leaves a scope and says how much frame memory was in use before it.
    pub(super) fn close(&mut self) -> Option<u32> {
        let closed = &self.scopes[self.current];
        self.current = closed.parent?;
        Some(closed.memory_start)
    }

    pub(super) fn current(&self) -> usize {
        self.current
    }

    pub(super) fn declare_register(&mut self, name: &'t str, register: Register) {
        self.scopes[self.current].registers.insert(name, register);
    }

    pub(super) fn declare_family(&mut self, prefix: &'t str, count: u32, ty: Ty, lanes: u8) {
        self.scopes[self.current].families.push(Family { prefix, count, ty, lanes });
    }

    pub(super) fn declare_memory(&mut self, name: &'t str, memory: Memory) {
        self.scopes[self.current].memory.insert(name, memory);
    }

    pub(super) fn declare_label(&mut self, name: &'t str, at: u32) {
        self.scopes[self.current].labels.insert(name, at);
    }

    pub(super) fn declare_table(&mut self, name: &'t str, targets: Vec<&'t str>) {
        self.scopes[self.current].tables.insert(name, targets);
    }

    pub(super) fn memory(&self, name: &str) -> Option<Memory> {
        self.outwards(self.current).find_map(|scope| self.scopes[scope].memory.get(name).copied())
    }

    pub(super) fn table(&self, name: &str) -> Option<Vec<&'t str>> {
        self.outwards(self.current).find_map(|scope| self.scopes[scope].tables.get(name).cloned())
    }

    pub(super) fn label(&self, scope: usize, name: &str) -> Option<u32> {
        self.outwards(scope).find_map(|scope| self.scopes[scope].labels.get(name).copied())
    }

    /// The scope and all scopes around it, innermost first.
    fn outwards(&self, from: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(from), |&scope| self.scopes[scope].parent)
    }
}

impl<'t> Lowering<'_, 't> {
    /// The register `name`, or the element of a vector that `name.x` names.
    pub(super) fn register(&mut self, name: &'t str) -> Result<Option<Register>, PtxError> {
        if let Some(register) = self.whole_register(name)? {
            return Ok(Some(register));
        }
        let Some((base, element)) = name.rsplit_once('.') else { return Ok(None) };
        let index = match element {
            "x" | "r" => 0,
            "y" | "g" => 1,
            "z" | "b" => 2,
            "w" | "a" => 3,
            _ => return Ok(None),
        };
        let vector = self.whole_register(base)?;
        Ok(vector.and_then(|Register { ty, slots }| Some(Register { ty, slots: vec![*slots.get(index)?] })))
    }

    fn whole_register(&mut self, name: &'t str) -> Result<Option<Register>, PtxError> {
        let scopes: Vec<usize> = self.scopes.outwards(self.scopes.current).collect();
        for scope in scopes {
            if let Some(register) = self.scopes.scopes[scope].registers.get(name) {
                return Ok(Some(register.clone()));
            }
            let belongs = |family: &Family<'t>| {
                let number = name.strip_prefix(family.prefix)?;
                let plain = number == "0" || !number.starts_with(['0', '+']);
                (plain && number.parse::<u32>().ok()? < family.count).then_some(*family)
            };
            let Some(family) = self.scopes.scopes[scope].families.iter().find_map(belongs) else { continue };
            let slots = (0..family.lanes).map(|_| self.slot(0)).collect::<Result<_, _>>()?;
            let register = Register { ty: family.ty, slots };
            self.scopes.scopes[scope].registers.insert(name, register.clone());
            return Ok(Some(register));
        }
        Ok(None)
    }

    /// The slot of a read-only register that the machine sets; `None` if `name` is none.
    pub(super) fn special_register(&mut self, name: &str) -> Result<Option<Slot>, PtxError> {
        let axis = match name.rsplit_once('.') {
            Some((_, "x")) => 0,
            Some((_, "y")) => 1,
            _ => 2,
        };
        let special = match name {
            "%tid.x" | "%tid.y" | "%tid.z" => Special::ThreadIndex(axis),
            "%ntid.x" | "%ntid.y" | "%ntid.z" => Special::BlockSize(axis),
            // Each block is a cluster of its own.
            "%ctaid.x" | "%ctaid.y" | "%ctaid.z" | "%clusterid.x" | "%clusterid.y" | "%clusterid.z" => {
                Special::BlockIndex(axis)
            }
            "%nctaid.x" | "%nctaid.y" | "%nctaid.z" | "%nclusterid.x" | "%nclusterid.y" | "%nclusterid.z" => {
                Special::GridSize(axis)
            }
            "%laneid" => Special::Lane,
            "%warpid" => Special::Warp,
            "%nwarpid" => Special::Warps,
            "%lanemask_eq" => Special::LaneMask(LaneMask::Equal),
            "%lanemask_lt" => Special::LaneMask(LaneMask::Less),
            "%lanemask_le" => Special::LaneMask(LaneMask::LessEqual),
            "%lanemask_gt" => Special::LaneMask(LaneMask::Greater),
            "%lanemask_ge" => Special::LaneMask(LaneMask::GreaterEqual),
            "%envreg1" => Special::WorkspaceHigh,
            "%envreg2" => Special::WorkspaceLow,
            "%dynamic_smem_size" => Special::SharedDynamic,
            "%total_smem_size" => Special::SharedTotal,
            "WARP_SZ" => return self.constant(32).map(Some),
            "%cluster_nctaid.x" | "%cluster_nctaid.y" | "%cluster_nctaid.z" | "%cluster_nctarank"
            | "%nsmid" => {
                return self.constant(1).map(Some);
            }
            "%smid"
            | "%gridid"
            | "%cluster_ctarank"
            | "%is_explicit_cluster"
            | "%cluster_ctaid.x"
            | "%cluster_ctaid.y"
            | "%cluster_ctaid.z"
            | "%tid.w"
            | "%ctaid.w" => return Ok(Some(0)),
            "%clock" | "%clock64" | "%clock_hi" | "%globaltimer" | "%globaltimer_lo" | "%globaltimer_hi" => {
                return self.clock(name).map(Some);
            }
            _ => return Ok(None),
        };
        self.special(special).map(Some)
    }

    fn clock(&mut self, name: &str) -> Result<Slot, PtxError> {
        let d = self.temporary()?;
        self.emit(crate::code::Op::Clock { d, wall: name.starts_with("%globaltimer") });
        match name {
            "%clock" | "%globaltimer_lo" => self.alu_temporary(|a, _, _| a & 0xffff_ffff, [d, 0, 0]),
            "%clock_hi" | "%globaltimer_hi" => self.alu_temporary(|a, _, _| a >> 32, [d, 0, 0]),
            _ => Ok(d),
        }
    }
}
