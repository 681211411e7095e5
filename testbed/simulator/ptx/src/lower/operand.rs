//! Operands as they are written, before their names are looked up.

use crate::code::Slot;
use crate::error::PtxError;
use crate::lex::{Cursor, Token};
use crate::types::{Literal, Ty};

/// One operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'t> {
    Literal(Literal),
    /// A register, variable, label or `_`.
    Name(&'t str),
    /// One element of a vector register.
    Element(Slot, Ty),
    /// `name + number` outside of brackets, which is an address.
    Sum(&'t str, i64),
    /// `!p`
    Not(Box<Operand<'t>>),
    /// `p|q`, two destinations.
    Pair(&'t str, &'t str),
    /// `[base + offset]`
    Address(Box<Operand<'t>>, i64),
    /// `{a, b}`
    Vector(Vec<Operand<'t>>),
    /// `(a, b)`
    Group(Vec<Operand<'t>>),
}

/// Reads the operands up to the `;`.
pub(crate) fn operands<'t>(cursor: &mut Cursor<'_, 't>) -> Result<Vec<Operand<'t>>, PtxError> {
    let mut operands = Vec::new();
    if cursor.accept(';') {
        return Ok(operands);
    }
    loop {
        operands.push(operand(cursor)?);
        if cursor.accept(';') {
            return Ok(operands);
        }
        cursor.expect(',')?;
    }
}

fn operand<'t>(cursor: &mut Cursor<'_, 't>) -> Result<Operand<'t>, PtxError> {
    Ok(match cursor.peek() {
        Some(Token::Sign('[')) => {
            cursor.next();
            let base = match operand(cursor)? {
                Operand::Sum(name, offset) => Operand::Address(Box::new(Operand::Name(name)), offset),
                Operand::Literal(Literal::Int(address)) => {
                    Operand::Address(Box::new(Operand::Literal(Literal::Int(address))), 0)
                }
                name @ Operand::Name(_) => Operand::Address(Box::new(name), 0),
                _ => return Err(cursor.unexpected("an address")),
            };
            cursor.expect(']')?;
            base
        }
        Some(Token::Sign('{')) => Operand::Vector(list(cursor, '}')?),
        Some(Token::Sign('(')) => Operand::Group(list(cursor, ')')?),
        Some(Token::Sign('!')) => {
            cursor.next();
            Operand::Not(Box::new(operand(cursor)?))
        }
        Some(Token::Sign('-')) => {
            cursor.next();
            let literal = Literal::of(cursor.word()?).ok_or_else(|| cursor.unexpected("a number"))?;
            Operand::Literal(literal.negated())
        }
        _ => named(cursor)?,
    })
}

fn list<'t>(cursor: &mut Cursor<'_, 't>, end: char) -> Result<Vec<Operand<'t>>, PtxError> {
    cursor.next();
    let mut items = Vec::new();
    while !cursor.accept(end) {
        if !items.is_empty() {
            cursor.expect(',')?;
        }
        items.push(operand(cursor)?);
    }
    Ok(items)
}

fn named<'t>(cursor: &mut Cursor<'_, 't>) -> Result<Operand<'t>, PtxError> {
    let word = cursor.word()?;
    if let Some(literal) = Literal::of(word) {
        return Ok(Operand::Literal(literal));
    }
    if cursor.accept('|') {
        return Ok(Operand::Pair(word, cursor.word()?));
    }
    let negative = match cursor.peek() {
        Some(Token::Sign('+')) => {
            cursor.next();
            cursor.accept('-')
        }
        Some(Token::Sign('-')) => {
            cursor.next();
            true
        }
        _ => return Ok(Operand::Name(word)),
    };
    let Some(Literal::Int(distance)) = Literal::of(cursor.word()?) else {
        return Err(cursor.unexpected("a whole number"));
    };
    let distance = if negative { distance.wrapping_neg() } else { distance };
    Ok(Operand::Sum(word, i64::from_ne_bytes(distance.to_ne_bytes())))
}
