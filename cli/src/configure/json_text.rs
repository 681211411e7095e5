//! Adds members to an object in somebody else's JSON file and removes them, by splicing text. Order,
//! indentation and line endings of the rest stay as they are. JSON has no comments, so the caller keeps what
//! a member held before.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

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
        let members = members(text, brace)?;
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

/// The members of the object whose brace is at `brace`, in the order of the text. serde_json lends keys and
/// values as slices of the text, so their places are known.
fn members(text: &str, brace: usize) -> Result<Vec<Member>, Mistake> {
    let range = |raw: &RawValue| {
        let start = raw.get().as_ptr().addr() - text.as_ptr().addr();
        start..start + raw.get().len()
    };
    // Text follows the object, so the end is not asked for.
    let read = RawMembers::deserialize(&mut serde_json::Deserializer::from_str(&text[brace..]));
    let mistake = |error| Mistake::at(text, brace, format!("cannot be read: {error}"));
    let members = read.map_err(mistake)?.0.into_iter().map(|(key, value)| {
        let name = serde_json::from_str(key.get()).map_err(mistake)?;
        Ok(Member { name, key: range(key), value: range(value) })
    });
    members.collect()
}

/// Keys and values as the text writes them. A map would join two members of one name.
struct RawMembers<'a>(Vec<(&'a RawValue, &'a RawValue)>);

impl<'a> Deserialize<'a> for RawMembers<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'a> Visitor<'a> for Members {
            type Value = RawMembers<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(RawMembers(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}
