//! The modifiers of an instruction. The code that honours a modifier takes it. A modifier that is left over
//! makes the instruction unknown, so none is ignored by accident.

use crate::alu::half::Rounding;
use crate::error::PtxError;
use crate::types::Ty;

/// `name.modifier.modifier…`, without the modifiers that were taken.
pub(crate) struct Modifiers<'t> {
    whole: &'t str,
    pub(crate) name: &'t str,
    rest: Vec<&'t str>,
    line: u32,
}

impl<'t> Modifiers<'t> {
    pub(crate) fn new(whole: &'t str, line: u32) -> Self {
        let mut parts = whole.split('.');
        let name = parts.next().unwrap_or_default();
        Self { whole, name, rest: parts.collect(), line }
    }

    /// Whether `modifier` is there. If it is, it is taken.
    pub(crate) fn take(&mut self, modifier: &str) -> bool {
        self.take_one(&[modifier]).is_some()
    }

    /// Takes and returns the first modifier that is one of `modifiers`.
    pub(crate) fn take_one(&mut self, modifiers: &[&str]) -> Option<&'t str> {
        let at = self.rest.iter().position(|part| modifiers.contains(part))?;
        Some(self.rest.remove(at))
    }

    /// Takes and returns the first modifier, whatever it is.
    pub(crate) fn take_first(&mut self) -> Option<&'t str> {
        if self.rest.is_empty() { None } else { Some(self.rest.remove(0)) }
    }

    /// Takes modifiers that do not change what a simulation computes, if they are there.
    pub(crate) fn ignore(&mut self, modifiers: &[&str]) {
        self.rest.retain(|part| !modifiers.contains(part));
    }

    /// Takes cache hints, as [`Self::ignore`] does.
    pub(crate) fn ignore_cache_hints(&mut self) {
        self.rest.retain(|part| !(part.starts_with("L1::") || part.starts_with("L2::")));
    }

    /// Takes and returns the first modifier that is a type.
    pub(crate) fn ty(&mut self) -> Result<Ty, PtxError> {
        let found = self.rest.iter().enumerate().find_map(|(at, part)| Some((at, Ty::of(part)?)));
        let (at, ty) = found.ok_or_else(|| self.unknown())?;
        self.rest.remove(at);
        Ok(ty)
    }

    /// Takes `.v2` or `.v4` and returns its number; 1 if there is none.
    pub(crate) fn lanes(&mut self) -> u8 {
        match self.take_one(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        }
    }

    /// Takes `.rn`, `.rz`, `.rm` or `.rp`.
    pub(crate) fn rounding(&mut self) -> Option<Rounding> {
        self.take_one(&["rn", "rz", "rm", "rp"]).map(|name| match name {
            "rn" => Rounding::Nearest,
            "rz" => Rounding::Zero,
            "rm" => Rounding::Down,
            _ => Rounding::Up,
        })
    }

    /// Takes `.rni`, `.rzi`, `.rmi` or `.rpi`: rounding to a whole number.
    pub(crate) fn whole_rounding(&mut self) -> Option<Rounding> {
        self.take_one(&["rni", "rzi", "rmi", "rpi"]).map(|name| match name {
            "rni" => Rounding::Nearest,
            "rzi" => Rounding::Zero,
            "rmi" => Rounding::Down,
            _ => Rounding::Up,
        })
    }

    /// An error if a modifier is left over.
    pub(crate) fn finish(&self) -> Result<(), PtxError> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.unknown()) }
    }

    pub(crate) fn unknown(&self) -> PtxError {
        PtxError::UnknownInstruction { line: self.line, name: self.whole.to_owned() }
    }
}
