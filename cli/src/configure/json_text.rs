//! Adds members to an object in somebody else's JSON file and removes them, by splicing text. Order,
//! indentation and line endings of the rest stay as they are. JSON has no comments, so the caller keeps what
//! a member held before.

use std::ops::Range;

use super::toml_text::Mistake;

/// A member of an object, by its bytes in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: String,
    key: Range<usize>,
    value: Range<usize>,
}

/// An object of a text that has been checked to be JSON.
#[derive(Debug)]
pub struct Object<'a> {
    text: &'a str,
    /// The byte after the opening brace.
    open: usize,
    members: Vec<Member>,
}

impl<'a> Object<'a> {
    /// The object that the whole text is.
    pub fn whole(text: &'a str) -> Result<Self, Mistake> {
        let bare = text.strip_prefix('\u{feff}').unwrap_or(text);
        let shift = text.len() - bare.len();
        if bare.trim().is_empty() {
            return Err(Mistake::at(text, 0, "the file is empty: write {} into it, or delete it"));
        }
        let value: serde_json::Value = serde_json::from_str(bare).map_err(|error| {
            // serde_json names place and cause in one text; `Mistake` tells the place.
            let told = error.to_string();
            let cause = told.split(" at line ").next().unwrap_or(&told).to_owned();
            let comment = bare.lines().nth(error.line().saturating_sub(1)).unwrap_or_default().trim_start();
            let hint = if comment.starts_with("//") || comment.starts_with(['#', '/']) {
                " (JSON has no comments)"
            } else {
                ""
            };
            Mistake { line: error.line().max(1), message: format!("not JSON: {cause}{hint}") }
        })?;
        if !value.is_object() {
            return Err(Mistake::at(text, 0, "an object { ... } is expected"));
        }
        let start = shift + bare.find('{').unwrap_or(0);
        Self::at(text, start)
    }

    /// The object that is the value of the member `name`.
    pub fn inner(&self, name: &str) -> Result<Option<Object<'a>>, Mistake> {
        let Some(member) = self.member(name) else { return Ok(None) };
        if !self.text[member.value.clone()].starts_with('{') {
            return Err(Mistake::at(self.text, member.value.start, format!("{name:?} must be an object")));
        }
        Self::at(self.text, member.value.start).map(Some)
    }

    fn at(text: &'a str, brace: usize) -> Result<Self, Mistake> {
        let members = members(text, brace + 1);
        for (number, member) in members.iter().enumerate() {
            if members[..number].iter().any(|other| other.name == member.name) {
                return Err(Mistake::at(
                    text,
                    member.key.start,
                    format!("{:?} stands twice in one object: keep one", member.name),
                ));
            }
        }
        Ok(Self { text, open: brace + 1, members })
    }

    fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    /// The value of a member as the text writes it.
    pub fn raw(&self, name: &str) -> Option<&'a str> {
        self.member(name).map(|member| &self.text[member.value.clone()])
    }

    /// Whether the object has no member.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The byte at which a member begins.
    pub fn place(&self, name: &str) -> Option<usize> {
        self.member(name).map(|member| member.key.start)
    }

    /// The text with another value for a member that is there.
    pub fn with_value(&self, name: &str, value: &str) -> String {
        let mut text = self.text.to_owned();
        if let Some(member) = self.member(name) {
            text.replace_range(member.value.clone(), value);
        }
        text
    }

    /// The text with a new last member, written as the other members are: on a line of its own if they are,
    /// with their indentation.
    pub fn with_member(&self, name: &str, value: &serde_json::Value) -> String {
        let separator = match self.members.last() {
            Some(last) => self.whitespace_before(last.key.start),
            None => self.inside_of_empty(),
        };
        let unit = self.unit();
        let value = match separator.contains('\n') {
            true => written(value, &separator, &unit),
            false => one_line(value),
        };
        let name = serde_json::Value::from(name);
        let (at, comma) = self.members.last().map_or((self.open, ""), |last| (last.value.end, ","));
        let mut text = self.text.to_owned();
        text.insert_str(at, &format!("{comma}{separator}{name}: {value}"));
        text
    }

    /// The text without a member. Where [`Object::with_member`] put it, this is exactly the text from before.
    pub fn without_member(&self, name: &str) -> String {
        let Some(number) = self.members.iter().position(|member| member.name == name) else {
            return self.text.to_owned();
        };
        let member = &self.members[number];
        let range = match (number.checked_sub(1), self.members.get(number + 1)) {
            (Some(previous), _) => self.members[previous].value.end..member.value.end,
            (None, Some(next)) => member.key.start..next.key.start,
            (None, None) => self.open..member.value.end,
        };
        let mut text = self.text.to_owned();
        text.replace_range(range, "");
        text
    }

    fn whitespace_before(&self, at: usize) -> String {
        let before = &self.text[..at];
        before[before.trim_end().len()..].to_owned()
    }

    /// The whitespace before the first member of an empty object: a new line where the object spans lines,
    /// nothing for `{}`.
    fn inside_of_empty(&self) -> String {
        let rest = &self.text[self.open..];
        let white = &rest[..rest.len() - rest.trim_start().len()];
        if !white.contains('\n') {
            return String::new();
        }
        let outer = &self.text[..self.open];
        let line = outer.rsplit('\n').next().unwrap_or_default();
        let indent = &line[..line.len() - line.trim_start().len()];
        let newline = if white.contains("\r\n") { "\r\n" } else { "\n" };
        format!("{newline}{indent}{}", self.unit())
    }

    /// One level of the file's indentation: that of the first indented line, else four blanks.
    fn unit(&self) -> String {
        let indents = self.text.lines().map(|line| &line[..line.len() - line.trim_start().len()]);
        indents.into_iter().find(|indent| !indent.is_empty()).unwrap_or("    ").to_owned()
    }
}

/// The value as text, with nested objects on lines of their own, below a member that follows `separator`.
fn written(value: &serde_json::Value, separator: &str, unit: &str) -> String {
    let Some(object) = value.as_object() else { return one_line(value) };
    let inner = format!("{separator}{unit}");
    let members: Vec<String> = object
        .iter()
        .map(|(name, value)| {
            format!("{inner}{}: {}", serde_json::Value::from(name.as_str()), written(value, &inner, unit))
        })
        .collect();
    format!("{{{}{separator}}}", members.join(","))
}

fn one_line(value: &serde_json::Value) -> String {
    let Some(object) = value.as_object() else { return value.to_string() };
    let members: Vec<String> = object
        .iter()
        .map(|(name, value)| format!("{}: {}", serde_json::Value::from(name.as_str()), one_line(value)))
        .collect();
    format!("{{{}}}", members.join(", "))
}

/// The members of an object whose inside begins at `at`. The text is known to be JSON.
fn members(text: &str, mut at: usize) -> Vec<Member> {
    let bytes = text.as_bytes();
    let skip_white = |mut at: usize| {
        while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        at
    };
    let mut members = Vec::new();
    loop {
        at = skip_white(at);
        if bytes.get(at) == Some(&b',') {
            at = skip_white(at + 1);
        }
        if bytes.get(at) != Some(&b'"') {
            return members;
        }
        let key = at..end_of_value(bytes, at);
        let colon = skip_white(key.end);
        let start = skip_white(colon + 1);
        let value = start..end_of_value(bytes, start);
        at = value.end;
        let name = serde_json::from_str(&text[key.clone()]).unwrap_or_default();
        members.push(Member { name, key, value });
    }
}

fn end_of_value(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at = end_of_string(bytes, at) - 1,
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            b',' | b':' if depth == 0 => return at,
            byte if depth == 0 && byte.is_ascii_whitespace() => return at,
            _ => {}
        }
        at += 1;
        if depth == 0 && matches!(bytes.get(at - 1), Some(b'"' | b'}' | b']')) {
            return at;
        }
    }
    at
}

/// The byte after the closing quote of the string that begins at `start`.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    at
}
