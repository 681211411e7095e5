//! Reads the module level: variables, and functions without their bodies. Bodies stay lists of words until
//! every name is known.

use std::ops::Range;

use crate::error::PtxError;
use crate::lex::{Cursor, Token};
use crate::types::{Literal, Ty};

/// Bytes of the largest variable that is accepted.
const LARGEST: usize = 1 << 30;

/// State space of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Const,
    Shared,
    Local,
    Param,
    Reg,
}

impl Space {
    pub(crate) fn of(directive: &str) -> Option<Self> {
        Some(match directive {
            ".global" => Self::Global,
            ".const" => Self::Const,
            ".shared" => Self::Shared,
            ".local" => Self::Local,
            ".param" => Self::Param,
            ".reg" => Self::Reg,
            _ => return None,
        })
    }
}

/// A declared variable, of a module or in a body.
#[derive(Debug, Clone)]
pub(crate) struct Variable<'t> {
    pub(crate) name: &'t str,
    pub(crate) space: Space,
    pub(crate) ty: Ty,
    /// Elements of a vector: 1, 2 or 4.
    pub(crate) lanes: u8,
    pub(crate) align: usize,
    /// Length in bytes; 0 for an array without a length.
    pub(crate) size: usize,
    /// The count in `name<count>`, which declares the registers `name0`, `name1` and so on.
    pub(crate) count: Option<u32>,
    pub(crate) external: bool,
    pub(crate) initial: Vec<Initial<'t>>,
    pub(crate) line: u32,
}

/// One element of an initialiser.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Initial<'t> {
    Value(Literal),
    Address { name: &'t str, offset: u64 },
}

/// A function or kernel.
#[derive(Debug)]
pub(crate) struct Header<'t> {
    pub(crate) name: &'t str,
    pub(crate) entry: bool,
    pub(crate) results: Vec<Variable<'t>>,
    pub(crate) formals: Vec<Variable<'t>>,
    /// Range of the lexemes between the braces; absent from a declaration.
    pub(crate) body: Option<Range<usize>>,
}

/// What a module declares at its top level.
#[derive(Debug, Default)]
pub(crate) struct Declarations<'t> {
    pub(crate) headers: Vec<Header<'t>>,
    pub(crate) variables: Vec<Variable<'t>>,
}

/// Reads the module level of `cursor`'s text.
pub(crate) fn declarations<'t>(mut cursor: Cursor<'_, 't>) -> Result<Declarations<'t>, PtxError> {
    let mut found = Declarations::default();
    let mut external = false;
    while cursor.peek().is_some() {
        let line = cursor.line();
        let word = cursor.word()?;
        let linkage = matches!(word, ".visible" | ".extern" | ".weak" | ".common");
        external |= word == ".extern";
        match word {
            _ if linkage => continue,
            ".version" | ".target" | ".file" | ".loc" => cursor.skip_line(line),
            ".address_size" if cursor.accept_word("64") => {}
            ".address_size" => return Err(syntax(line, "only 64-bit addresses are simulated")),
            ".section" => {
                cursor.word()?;
                cursor.skip_braces()?;
            }
            ".pragma" => cursor.skip_past(';')?,
            ".entry" | ".func" => found.headers.push(header(&mut cursor, word == ".entry")?),
            ".global" | ".const" | ".shared" => {
                let declared = variables(&mut cursor, word, external)?;
                found.variables.extend(declared);
            }
            _ => return Err(PtxError::UnknownInstruction { line, name: word.to_owned() }),
        }
        external = false;
    }
    Ok(found)
}

pub(crate) fn syntax(line: u32, what: &str) -> PtxError {
    PtxError::Syntax { line, what: what.to_owned() }
}

fn header<'t>(cursor: &mut Cursor<'_, 't>, entry: bool) -> Result<Header<'t>, PtxError> {
    cursor.accept_word(".attribute");
    let results = formals(cursor)?;
    let name = cursor.word()?;
    let formals = formals(cursor)?;
    // Launch bounds and other hints stand here; a declaration ends without a body.
    let body = loop {
        match cursor.peek() {
            Some(Token::Sign('{')) => {
                let start = cursor.at() + 1;
                cursor.skip_braces()?;
                break Some(start..cursor.at() - 1);
            }
            Some(Token::Sign(';')) => {
                cursor.next();
                break None;
            }
            Some(Token::Word(".pragma")) => cursor.skip_past(';')?,
            Some(_) => {
                cursor.next();
            }
            None => return Err(cursor.unexpected("a body or ';'")),
        }
    };
    Ok(Header { name, entry, results, formals, body })
}

fn formals<'t>(cursor: &mut Cursor<'_, 't>) -> Result<Vec<Variable<'t>>, PtxError> {
    let mut formals = Vec::new();
    if !cursor.accept('(') || cursor.accept(')') {
        return Ok(formals);
    }
    loop {
        let directive = cursor.word()?;
        let shape = Shape::read(cursor, directive, false)?;
        formals.push(shape.declarator(cursor)?);
        if cursor.accept(')') {
            return Ok(formals);
        }
        cursor.expect(',')?;
    }
}

/// Reads the variables of a declaration up to its `;`. The directive was read before.
pub(crate) fn variables<'t>(
    cursor: &mut Cursor<'_, 't>,
    directive: &str,
    external: bool,
) -> Result<Vec<Variable<'t>>, PtxError> {
    let shape = Shape::read(cursor, directive, external)?;
    let mut variables = Vec::new();
    loop {
        let mut variable = shape.declarator(cursor)?;
        if cursor.accept('=') {
            initial(cursor, &mut variable.initial)?;
            variable.size = variable.size.max(variable.initial.len() * usize::from(variable.ty.size()));
        }
        variables.push(variable);
        if cursor.accept(';') {
            return Ok(variables);
        }
        cursor.expect(',')?;
    }
}

/// The part of a declaration before its names.
struct Shape {
    space: Space,
    ty: Ty,
    lanes: u8,
    align: Option<usize>,
    external: bool,
}

impl Shape {
    fn read(cursor: &mut Cursor<'_, '_>, directive: &str, external: bool) -> Result<Self, PtxError> {
        let line = cursor.line();
        let space = Space::of(directive).ok_or_else(|| cursor.unexpected("a state space"))?;
        let (mut lanes, mut align) = (1, None);
        loop {
            let word = cursor.word()?;
            match word {
                ".align" => align = Some(number(cursor)?),
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".attribute" => {
                    cursor.skip_past(')')?;
                }
                _ => {
                    let ty = word.strip_prefix('.').and_then(Ty::of);
                    let ty =
                        ty.ok_or_else(|| PtxError::UnknownInstruction { line, name: word.to_owned() })?;
                    return Ok(Self { space, ty, lanes, align, external });
                }
            }
        }
    }

    fn declarator<'t>(&self, cursor: &mut Cursor<'_, 't>) -> Result<Variable<'t>, PtxError> {
        let line = cursor.line();
        let mut align = self.align;
        let mut name = cursor.word()?;
        while name.starts_with('.') {
            // `.ptr .global .align 16` describes what a pointer parameter points to.
            if name == ".align" {
                cursor.word()?;
            }
            name = cursor.word()?;
        }
        let unit = usize::from(self.ty.size()) * usize::from(self.lanes);
        let mut size = unit;
        let mut count = None;
        if cursor.accept('<') {
            count = Some(u32::try_from(number(cursor)?).map_err(|_| syntax(line, "too many registers"))?);
            cursor.expect('>')?;
        }
        while cursor.accept('[') {
            let length = if cursor.accept(']') { 0 } else { bracketed(cursor)? };
            let product = size.checked_mul(length).filter(|&size| size <= LARGEST);
            size = product.ok_or_else(|| syntax(line, "the array is too large"))?;
        }
        let align = *align.get_or_insert(unit);
        if !align.is_power_of_two() {
            return Err(syntax(line, "an alignment is a power of two"));
        }
        let Self { space, ty, lanes, external, .. } = *self;
        Ok(Variable { name, space, ty, lanes, align, size, count, external, initial: Vec::new(), line })
    }
}

fn bracketed(cursor: &mut Cursor<'_, '_>) -> Result<usize, PtxError> {
    let length = number(cursor)?;
    cursor.expect(']')?;
    Ok(length)
}

fn number(cursor: &mut Cursor<'_, '_>) -> Result<usize, PtxError> {
    let line = cursor.line();
    match Literal::of(cursor.word()?) {
        Some(Literal::Int(value)) => {
            usize::try_from(value).map_err(|_| syntax(line, "the number is too large"))
        }
        _ => Err(syntax(line, "a whole number expected")),
    }
}

/// Reads one value, or braces around values, into `into`.
fn initial<'t>(cursor: &mut Cursor<'_, 't>, into: &mut Vec<Initial<'t>>) -> Result<(), PtxError> {
    if cursor.accept('{') {
        while !cursor.accept('}') {
            initial(cursor, into)?;
            cursor.accept(',');
        }
        return Ok(());
    }
    let negative = cursor.accept('-');
    let line = cursor.line();
    let word = cursor.word()?;
    if let Some(literal) = Literal::of(word) {
        if cursor.peek() == Some(Token::Sign('(')) {
            return Err(syntax(line, "a masked address in an initialiser is not simulated"));
        }
        into.push(Initial::Value(if negative { literal.negated() } else { literal }));
        return Ok(());
    }
    let name = if word == "generic" && cursor.accept('(') {
        let name = cursor.word()?;
        cursor.expect(')')?;
        name
    } else {
        word
    };
    let mut offset = 0;
    if cursor.accept('+') {
        offset = u64::try_from(number(cursor)?).map_err(|_| syntax(line, "the number is too large"))?;
    }
    into.push(Initial::Address { name, offset });
    Ok(())
}
