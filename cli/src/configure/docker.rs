//! docker: the member `runtimes` of daemon.json, and `default-runtime`.
//!
//! JSON has no comments, so what was replaced is kept in a small file beside daemon.json, which goes with the
//! runtime.

use std::path::Path;

use serde_json::{Value, json};

use super::json_text::Object;
use super::toml_text::Mistake;
use super::{Runtime, WRAPPER};

/// daemon.json and the file that remembers what was replaced in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// daemon.json; `None` is no file.
    pub settings: Option<String>,
    /// The file beside it: members as they were written before, and whether daemon.json was made by us.
    pub record: Option<String>,
}

const RUNTIMES: &str = "runtimes";
const DEFAULT: &str = "default-runtime";
const CREATED: &str = "created";
/// What a new daemon.json is before the runtime comes in.
const EMPTY: &str = "{\n}\n";

/// The files with the runtime in them.
pub fn with(files: &Files, runtime: &Runtime) -> Result<Files, Mistake> {
    let mut record = record(files)?;
    let old = files.settings.as_deref().unwrap_or(EMPTY);
    if files.settings.is_none() {
        record[CREATED] = json!(true);
    }
    let mut text = with_runtime(old, runtime, &mut record)?;
    if runtime.default {
        text = with_default(&text, runtime, &mut record)?;
    }
    check(old, &text, runtime)?;
    let remembers = record.as_object().is_some_and(|record| !record.is_empty());
    Ok(Files { settings: Some(text), record: remembers.then(|| format!("{record:#}\n")) })
}

fn with_runtime(text: &str, runtime: &Runtime, record: &mut Value) -> Result<String, Mistake> {
    let whole = Object::whole(text)?;
    let Some(runtimes) = whole.inner(RUNTIMES)? else {
        return Ok(whole.with_member(RUNTIMES, &json!({ &runtime.name: { "path": runtime.path } })));
    };
    let Some(entry) = runtimes.inner(&runtime.name)? else {
        if runtimes.is_empty() {
            record[RUNTIMES] = json!(whole.raw(RUNTIMES));
        }
        return Ok(runtimes.with_member(&runtime.name, &json!({ "path": runtime.path })));
    };
    let written = entry.raw("path").and_then(|raw| serde_json::from_str::<String>(raw).ok());
    match written {
        Some(path) if path == runtime.path => Ok(text.to_owned()),
        // Another installation of ours: its path is brought up to date; `runtimeArgs` and the like stay.
        Some(path) if Path::new(&path).file_name() == Path::new(&runtime.path).file_name() => {
            Ok(entry.with_value("path", &Value::from(runtime.path.as_str()).to_string()))
        }
        _ => Err(Mistake::at(
            text,
            runtimes.place(&runtime.name).unwrap_or(0),
            format!(
                "the runtime {:?} is another program already: take it out, or choose another name (--name)",
                runtime.name
            ),
        )),
    }
}

fn with_default(text: &str, runtime: &Runtime, record: &mut Value) -> Result<String, Mistake> {
    let whole = Object::whole(text)?;
    let name = Value::from(runtime.name.as_str());
    match whole.raw(DEFAULT) {
        None => Ok(whole.with_member(DEFAULT, &name)),
        Some(raw) if is_string(raw, &runtime.name) => Ok(text.to_owned()),
        Some(raw) => {
            record[DEFAULT] = json!(raw);
            Ok(whole.with_value(DEFAULT, &name.to_string()))
        }
    }
}

fn is_string(raw: &str, text: &str) -> bool {
    serde_json::from_str::<String>(raw).is_ok_and(|value| value == text)
}

/// Whether the runtime is the default one.
pub fn is_default(files: &Files, name: &str) -> bool {
    let text = files.settings.as_deref().unwrap_or(EMPTY);
    Object::whole(text).is_ok_and(|whole| whole.raw(DEFAULT).is_some_and(|raw| is_string(raw, name)))
}

/// The files without the runtime: as they were before, except for what others have changed since. While
/// another runtime of ours stays, so does what is remembered. The name is that of a default runtime of before
/// which is not put back, since docker does not know it any more and would not start.
pub fn without(files: &Files, name: &str) -> Result<(Files, Option<String>), Mistake> {
    let Some(text) = &files.settings else { return Ok(Default::default()) };
    let mut record = record(files)?;
    let mut text = text.clone();
    let mut gone = None;
    if is_default(files, name) {
        let whole = Object::whole(&text)?;
        let before = record.as_object_mut().and_then(|record| record.remove(DEFAULT));
        text = match before.as_ref().and_then(Value::as_str) {
            Some(raw) if is_known(&whole, raw)? => whole.with_value(DEFAULT, raw),
            Some(raw) => {
                gone = Some(raw.to_owned());
                whole.without_member(DEFAULT)
            }
            None => whole.without_member(DEFAULT),
        };
    }
    let whole = Object::whole(&text)?;
    let Some(runtimes) = whole.inner(RUNTIMES)? else {
        return Ok((Files { settings: Some(text), record: None }, gone));
    };
    if runtimes.raw(name).is_some() {
        text = runtimes.without_member(name);
        let whole = Object::whole(&text)?;
        if whole.inner(RUNTIMES)?.is_some_and(|runtimes| runtimes.is_empty()) {
            text = match record[RUNTIMES].as_str() {
                Some(raw) => whole.with_value(RUNTIMES, raw),
                None => whole.without_member(RUNTIMES),
            };
        }
    }
    let goes = record[CREATED] == json!(true) && text == EMPTY;
    let stays = !ours(&text).is_empty() && record.as_object().is_some_and(|record| !record.is_empty());
    let record = stays.then(|| format!("{record:#}\n"));
    Ok((Files { settings: (!goes).then_some(text), record }, gone))
}

/// Whether docker has a runtime of this name, a JSON text: in its settings, or by itself.
fn is_known(whole: &Object<'_>, raw: &str) -> Result<bool, Mistake> {
    let name: String = serde_json::from_str(raw).unwrap_or_default();
    let is_named = whole.inner(RUNTIMES)?.is_some_and(|runtimes| runtimes.raw(&name).is_some());
    Ok(is_named || name == "runc" || name.starts_with("io.containerd."))
}

/// What daemon.json says; null where it is no JSON.
fn value(text: &str) -> Value {
    serde_json::from_str(text.trim_start_matches('\u{feff}')).unwrap_or_default()
}

/// The names of our runtimes in daemon.json, whatever they are called.
fn ours(text: &str) -> Vec<String> {
    let value = value(text);
    let runtimes = value[RUNTIMES].as_object().into_iter().flatten();
    let is_ours = |entry: &Value| Path::new(entry["path"].as_str().unwrap_or_default()).ends_with(WRAPPER);
    runtimes.filter(|(_, entry)| is_ours(entry)).map(|(name, _)| name.clone()).collect()
}

/// Whether a runtime of ours is the default one in daemon.json.
pub fn has_our_default(text: &str) -> bool {
    value(text)[DEFAULT].as_str().is_some_and(|default| ours(text).iter().any(|name| name == default))
}

/// What is remembered. Only JSON texts are put back into daemon.json, so any other content is a mistake.
fn record(files: &Files) -> Result<Value, Mistake> {
    let Some(text) = &files.record else { return Ok(json!({})) };
    let record: Value = serde_json::from_str(text).unwrap_or_default();
    let sound = |name: &str| match &record[name] {
        Value::Null => true,
        raw => raw.as_str().is_some_and(|raw| serde_json::from_str::<Value>(raw).is_ok()),
    };
    match record.is_object() && sound(DEFAULT) && sound(RUNTIMES) {
        true => Ok(record),
        false => Err(Mistake::at(
            text,
            0,
            "what `gpushare configure` remembered beside it, in the file that ends in .before-gpushare, is \
             damaged: delete that one, and set \"default-runtime\" here by hand",
        )),
    }
}

/// Checks that nothing differs but the runtime and the default. Otherwise the edit is not made.
fn check(old: &str, new: &str, runtime: &Runtime) -> Result<(), Mistake> {
    let rest = |text: &str| {
        let mut value = value(text);
        let Some(members) = value.as_object_mut() else { return value };
        if runtime.default {
            members.shift_remove(DEFAULT);
        }
        if let Some(runtimes) = members.get_mut(RUNTIMES).and_then(Value::as_object_mut) {
            runtimes.shift_remove(&runtime.name);
            if runtimes.is_empty() {
                members.shift_remove(RUNTIMES);
            }
        }
        value
    };
    match rest(old) == rest(new) && !rest(new).is_null() {
        true => Ok(()),
        false => Err(Mistake::at(old, 0, "this file cannot be edited safely: add the runtime by hand")),
    }
}
