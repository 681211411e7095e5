//! Splits the text into words: an identifier, number or dotted name is one word, and every other character is
//! a sign. Comments and white space are dropped. Each word keeps its line, for messages and for directives
//! that end with their line.

use crate::error::PtxError;

/// One word, string or sign of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'t> {
    /// A name, number, directive or instruction with its modifiers.
    Word(&'t str),
    /// A string, without its quotes.
    Text(&'t str),
    /// One character of punctuation.
    Sign(char),
}

/// A token and its line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lexeme<'t> {
    pub(crate) token: Token<'t>,
    pub(crate) line: u32,
}

/// Splits `text` into lexemes.
pub(crate) fn lex(text: &str) -> Result<Vec<Lexeme<'_>>, PtxError> {
    let mut lexemes = Vec::with_capacity(text.len() / 4);
    let (mut rest, mut line) = (text, 1_u32);
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\n' => {
                line = line.saturating_add(1);
                1
            }
            '\0' => break, // CUDA hands PTX over as a C string
            _ if first.is_whitespace() => first.len_utf8(),
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").ok_or_else(|| open(line, "comment"))? + 2,
            '"' => {
                let end = rest[1..].find('"').ok_or_else(|| open(line, "string"))?;
                lexemes.push(Lexeme { token: Token::Text(&rest[1..=end]), line });
                end + 2
            }
            _ if is_word(first) => {
                let end = word_length(rest);
                lexemes.push(Lexeme { token: Token::Word(&rest[..end]), line });
                end
            }
            _ => {
                lexemes.push(Lexeme { token: Token::Sign(first), line });
                first.len_utf8()
            }
        };
        if first == '/' {
            let lines = rest[..length].matches('\n').count();
            line = line.saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
        }
        rest = &rest[length..];
    }
    Ok(lexemes)
}

fn open(line: u32, what: &str) -> PtxError {
    PtxError::Syntax { line, what: format!("the {what} has no end") }
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '$' | '%' | '.')
}

/// Bytes of the word that `text` begins with. `::` belongs to a modifier (`ld.shared::cta`). A sign after `e`
/// belongs to a decimal number (`1.5e-3`).
fn word_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let decimal = bytes[0].is_ascii_digit() && !text.starts_with("0x") && !text.starts_with("0X");
    let decimal = decimal && !matches!(bytes.get(1), Some(b'f' | b'F' | b'd' | b'D'));
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte == b'.' && at > 0 && bytes[0] == b'.' {
            break; // `.reg.b16` is two directives
        }
        if is_word(char::from(byte)) {
            at += 1;
        } else if byte == b':' && bytes.get(at + 1) == Some(&b':') && bytes[0].is_ascii_alphabetic() {
            at += 2;
        } else if decimal && matches!(byte, b'+' | b'-') && matches!(bytes[at - 1], b'e' | b'E') {
            at += 1;
        } else {
            break;
        }
    }
    at
}

/// A position in the list of lexemes, with the methods by which readers move on.
#[derive(Clone)]
pub(crate) struct Cursor<'a, 't> {
    lexemes: &'a [Lexeme<'t>],
    at: usize,
}

impl<'a, 't> Cursor<'a, 't> {
    pub(crate) fn new(lexemes: &'a [Lexeme<'t>]) -> Self {
        Self { lexemes, at: 0 }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn peek(&self) -> Option<Token<'t>> {
        self.lexemes.get(self.at).map(|lexeme| lexeme.token)
    }

    pub(crate) fn next(&mut self) -> Option<Token<'t>> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }

    /// Line of the next token, or of the last one.
    pub(crate) fn line(&self) -> u32 {
        self.lexemes.get(self.at).or_else(|| self.lexemes.last()).map_or(0, |lexeme| lexeme.line)
    }

    /// Takes the sign if it is next.
    pub(crate) fn accept(&mut self, sign: char) -> bool {
        let found = self.peek() == Some(Token::Sign(sign));
        if found {
            self.at += 1;
        }
        found
    }

    pub(crate) fn expect(&mut self, sign: char) -> Result<(), PtxError> {
        if self.accept(sign) { Ok(()) } else { Err(self.unexpected(&format!("{sign:?}"))) }
    }

    pub(crate) fn peek_word(&self) -> Option<&'t str> {
        match self.peek() {
            Some(Token::Word(word)) => Some(word),
            _ => None,
        }
    }

    pub(crate) fn word(&mut self) -> Result<&'t str, PtxError> {
        let word = self.peek_word().ok_or_else(|| self.unexpected("a word"))?;
        self.at += 1;
        Ok(word)
    }

    /// Takes the word if it is next.
    pub(crate) fn accept_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == Some(word);
        if found {
            self.at += 1;
        }
        found
    }

    /// Skips to the first token of a later line.
    pub(crate) fn skip_line(&mut self, line: u32) {
        while self.lexemes.get(self.at).is_some_and(|lexeme| lexeme.line == line) {
            self.at += 1;
        }
    }

    /// Skips past the sign.
    pub(crate) fn skip_past(&mut self, sign: char) -> Result<(), PtxError> {
        while let Some(token) = self.next() {
            if token == Token::Sign(sign) {
                return Ok(());
            }
        }
        Err(self.unexpected(&format!("{sign:?}")))
    }

    /// Skips a `{ … }` whose first brace is next.
    pub(crate) fn skip_braces(&mut self) -> Result<(), PtxError> {
        self.expect('{')?;
        let mut depth = 1_usize;
        while depth > 0 {
            match self.next() {
                Some(Token::Sign('{')) => depth += 1,
                Some(Token::Sign('}')) => depth -= 1,
                Some(_) => {}
                None => return Err(self.unexpected("'}'")),
            }
        }
        Ok(())
    }

    pub(crate) fn unexpected(&self, wanted: &str) -> PtxError {
        let found = match self.peek() {
            Some(Token::Word(word)) => format!("{word:?}"),
            Some(Token::Text(text)) => format!("the string {text:?}"),
            Some(Token::Sign(sign)) => format!("{sign:?}"),
            None => "the end".to_owned(),
        };
        PtxError::Syntax { line: self.line(), what: format!("{wanted} expected, {found} found") }
    }
}
