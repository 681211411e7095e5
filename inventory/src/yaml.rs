//! Reads YAML documents as JSON values, within bounds, so that a file in a CDI folder cannot exhaust the
//! stack or memory while a container starts.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};

/// Limit on nested lists and mappings.
const MOST_DEPTH: usize = 64;
/// Limit on the values of a document, including copies by aliases.
const MOST_VALUES: usize = 200_000;

/// Reads the first document. All scalars become strings, including numbers. `None` if the text is not YAML or
/// exceeds the limits.
pub(crate) fn first_document(text: &str) -> Option<Value> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        match event.ok()?.0 {
            Event::Scalar(text, _, anchor, _) => builder.put(Value::String(text.into_owned()), anchor)?,
            Event::SequenceStart(anchor, _) => builder.begin(Value::Array(Vec::new()), anchor)?,
            Event::MappingStart(anchor, _) => builder.begin(Value::Object(Map::new()), anchor)?,
            Event::SequenceEnd | Event::MappingEnd => builder.end()?,
            Event::Alias(anchor) => {
                let (value, size) = builder.anchors.get(&anchor)?.clone();
                builder.count(size)?;
                builder.put(value, 0)?;
            }
            Event::DocumentEnd => break,
            _ => {}
        }
    }
    builder.done
}

/// A list or mapping whose end has not been read yet.
struct Open {
    value: Value,
    anchor: usize,
    /// In a mapping, the key of the next value; `Some(None)` if that key is not a string, and its value is
    /// dropped.
    key: Option<Option<String>>,
    /// The number of values when it began.
    since: usize,
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    /// The value of each anchor, and the number of values in it.
    anchors: HashMap<usize, (Value, usize)>,
    values: usize,
    done: Option<Value>,
}

impl Builder {
    fn count(&mut self, values: usize) -> Option<()> {
        self.values += values;
        (self.values <= MOST_VALUES).then_some(())
    }

    fn begin(&mut self, value: Value, anchor: usize) -> Option<()> {
        self.open.push(Open { value, anchor, key: None, since: self.values });
        (self.open.len() <= MOST_DEPTH).then_some(())
    }

    fn end(&mut self) -> Option<()> {
        let Open { value, anchor, since, .. } = self.open.pop()?;
        if anchor > 0 {
            self.anchors.insert(anchor, (value.clone(), self.values - since + 1));
        }
        self.put(value, 0)
    }

    fn put(&mut self, value: Value, anchor: usize) -> Option<()> {
        self.count(1)?;
        if anchor > 0 {
            self.anchors.insert(anchor, (value.clone(), 1));
        }
        let Some(open) = self.open.last_mut() else {
            self.done = Some(value);
            return Some(());
        };
        match &mut open.value {
            Value::Array(items) => items.push(value),
            Value::Object(entries) => match open.key.take() {
                None => open.key = Some(value.as_str().map(str::to_owned)),
                Some(Some(key)) if key == "<<" => merge(entries, value),
                Some(Some(key)) => drop(entries.insert(key, value)),
                Some(None) => {}
            },
            _ => {}
        }
        Some(())
    }
}

/// Handles the merge key `<<` (yaml.org/type/merge). The mapping's own entries override merged ones.
fn merge(entries: &mut Map<String, Value>, value: Value) {
    match value {
        Value::Object(others) => {
            for (key, value) in others {
                entries.entry(key).or_insert(value);
            }
        }
        Value::Array(list) => list.into_iter().for_each(|item| merge(entries, item)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_document_is_what_json_has_of_it() {
        for (text, want) in [
            ("a: 1\nb:\n- x\n- {c: 'd'}\n", Some(json!({"a": "1", "b": ["x", {"c": "d"}]}))),
            (
                "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\n",
                Some(json!({"base": {"x": "1", "y": "2"}, "own": {"x": "1", "y": "3"}})),
            ),
            ("{\"a\": [true, null]}", Some(json!({"a": ["true", "null"]}))),
            ("a: 1\n---\nb: 2\n", Some(json!({"a": "1"}))),
            ("? [x]\n: y\nz: 1\n", Some(json!({"z": "1"}))),
            ("", None),
            ("a: [", None),
            ("a: &a [*a]", None),
        ] {
            assert_eq!(first_document(text), want, "{text:?}");
        }
    }

    #[test]
    fn what_would_use_up_stack_or_memory_is_none() {
        let aliases = format!("a: &a [{}]\nb: [{}]\n", "x,".repeat(1000), "*a,".repeat(100_000));
        for text in [
            "- ".repeat(17_465) + "a",
            "? ".repeat(1_000_000),
            "[".repeat(100_000),
            "{a: ".repeat(100_000),
            aliases,
        ] {
            assert_eq!(first_document(&text), None, "{:.20}", text);
        }
    }
}
