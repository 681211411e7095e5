//! `gpushare config`: the settings as they are in force, one by one or all, and changes of the settings file that
//! keep the comments around it.

use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::Subcommand;
use gpushare_config::Config;
use toml::{Table, Value};
use toml_edit::{DocumentMut, Item, TableLike};

use crate::configure::default_share;
use crate::doctor;
use crate::failure::Failure;
use crate::file::{self, FileChange};
use crate::table;

/// What to do about the settings.
#[derive(Subcommand)]
pub enum Command {
    /// Tells whether the settings are without mistakes.
    Check,
    /// Prints the settings in force.
    Show,
    /// Prints one setting as it is in force.
    Get {
        /// Its section and key, as quota.reserve.
        key: String,
    },
    /// Changes one setting in the settings file; what is wrong with it is told, and nothing is written then.
    Set {
        /// Its section and key, as quota.reserve.
        key: String,
        /// The value: 2GiB, 100, true, or a list as '["a", "b"]'.
        value: String,
    },
    /// Takes one setting out of the settings file with the comment above it, so that it is as shipped.
    Unset {
        /// Its section and key, as quota.reserve.
        key: String,
    },
}

/// Runs the command.
pub fn config(command: &Command) -> Result<()> {
    match command {
        Command::Check => check(),
        Command::Show => Ok(write!(io::stdout().lock(), "{}", Config::show()?)?),
        Command::Get { key } => get(key),
        Command::Set { key, value } => change(key, Some(value)),
        Command::Unset { key } => change(key, None),
    }
}

/// Reads all settings and names the files they came from.
fn check() -> Result<()> {
    Config::load()?;
    let files = Config::files()?;
    let mut out = io::stdout().lock();
    if files.is_empty() {
        writeln!(out, "ok: no settings file, the shipped settings are in force")?;
    }
    for file in files {
        writeln!(out, "ok: {}", file.display())?;
    }
    Ok(())
}

fn get(key: &str) -> Result<()> {
    known(key)?;
    let all: Table = toml::from_str(&Config::show()?).context("the settings cannot be read back")?;
    let value = at(&all, key).context("the setting is not shown")?;
    Ok(table::line(&match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })?)
}

/// Writes `value` at `key`, or takes the key out.
fn change(key: &str, value: Option<&str>) -> Result<()> {
    let shipped = known(key)?;
    let wanted = value.map(|value| parsed(key, value, &shipped)).transpose()?;
    let _turn = file::turn();
    let path = file::resolve(&file::settings())?;
    let before = file::read(&path)?;
    let text = before.clone().unwrap_or_default();
    let after =
        edited(&text, key, wanted.as_ref()).with_context(|| format!("{} is not TOML", path.display()))?;
    let in_force = Config::tried(&path, &after)?;
    let want = wanted.as_ref().unwrap_or(&shipped);
    if at(&in_force, key) != Some(want) {
        let other = Config::origin(key)?.map(|(path, line)| format!("{}:{line}", path.display()));
        let other = other.unwrap_or_else(|| "another file".to_owned());
        let how = match other.contains(default_share::NAME) {
            true => "change it by `gpushare configure ENGINE --default-share`",
            false => "change it there",
        };
        return Err(Failure::refused(format!("{other} sets {key} and wins: {how}")).into());
    }
    let is_new = before.as_deref() != Some(&after) && !(before.is_none() && after.is_empty());
    let is_made = is_new && before.is_none();
    if is_new {
        file::apply(&[FileChange { path: path.clone(), before, after: Some(after) }])?;
    }
    let state = if is_new { "is now" } else { "is already" };
    let made = if is_made { ", which is new" } else { "" };
    table::line(&format!("{key} {state} {want} ({}{made})", path.display()))?;
    if key.starts_with("supervisor.")
        && let Some(why) = doctor::misses_supervisors(&Config::load()?)
    {
        eprintln!("gpushare: a supervisor {why}");
    }
    Ok(())
}

/// The shipped value of a key that there is.
fn known(key: &str) -> Result<Value> {
    let shipped = Config::shipped()?;
    match at(&shipped, key) {
        Some(Value::Table(_)) => Err(Failure::not_found(format!(
            "{key} is a section: name a key of it, as {}",
            first(&shipped, key)
        ))
        .into()),
        Some(value) => Ok(value.clone()),
        None => {
            let near =
                keys(&shipped).into_iter().filter(|known| known.ends_with(key) || known.contains(last(key)));
            let mut near: Vec<String> = near.collect();
            near.sort_by_key(|known| known.len().abs_diff(key.len()));
            near.truncate(3);
            let meant = if near.is_empty() {
                String::new()
            } else {
                format!("; did you mean {}?", near.join(" or "))
            };
            Err(Failure::not_found(format!("there is no setting {key:?} (`gpushare config show`){meant}"))
                .into())
        }
    }
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

fn first(shipped: &Table, section: &str) -> String {
    let begin = format!("{section}.");
    keys(shipped).into_iter().find(|key| key.starts_with(&begin)).unwrap_or_default()
}

/// All keys with their sections.
fn keys(table: &Table) -> Vec<String> {
    let below = |(name, value): (&String, &Value)| match value {
        Value::Table(inner) => keys(inner).into_iter().map(|key| format!("{name}.{key}")).collect(),
        _ => vec![name.clone()],
    };
    table.iter().flat_map(below).collect()
}

/// The value at a path of names with dots between them.
fn at<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((section, rest)) => at(table.get(section)?.as_table()?, rest),
        None => table.get(key),
    }
}

/// What a word of the command line means for a setting of this kind. Text needs no quotes.
fn parsed(key: &str, word: &str, shipped: &Value) -> Result<Value> {
    let one = toml::from_str::<Table>(&format!("value = {word}")).ok().filter(|table| table.len() == 1);
    let value = one.and_then(|mut one| one.remove("value"));
    let kind = match shipped {
        Value::String(_) => "text",
        Value::Integer(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Array(_) => "a list, as '[\"a\", \"b\"]'",
        _ => "another kind of value",
    };
    match (value, shipped) {
        (Some(value), shipped) if value.same_type(shipped) => Ok(value),
        (_, Value::String(_)) => Ok(Value::String(word.to_owned())),
        _ => Err(Failure::usage(format!("{key} is {kind}, and {word:?} is none")).into()),
    }
}

/// `text` with `value` at `key`, or without the key and what is said about it. Everything else stays byte by
/// byte.
fn edited(text: &str, key: &str, value: Option<&Value>) -> Result<String> {
    let bare = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mark = text.strip_suffix(bare).unwrap_or_default();
    let new = edited_lines(bare, key, value)?;
    let has_returns = bare.contains('\n') && bare.matches('\n').count() == bare.matches("\r\n").count();
    // The parser writes line feeds alone.
    let new = if has_returns { new.replace("\r\n", "\n").replace('\n', "\r\n") } else { new };
    Ok(format!("{mark}{new}"))
}

fn edited_lines(text: &str, key: &str, value: Option<&Value>) -> Result<String> {
    let mut document: DocumentMut = text.parse()?;
    let (sections, name) = key.rsplit_once('.').unwrap_or(("", key));
    let mut place: &mut dyn TableLike = document.as_table_mut();
    for section in sections.split('.').filter(|section| !section.is_empty()) {
        if place.get(section).is_none() {
            if value.is_none() {
                return Ok(text.to_owned());
            }
            let mut table = toml_edit::Table::new();
            // A section of sections has no header of its own.
            table.set_implicit(section != last(sections));
            place.insert(section, Item::Table(table));
        }
        let found = place.get_mut(section).and_then(Item::as_table_like_mut);
        place = found.with_context(|| format!("{section} is no section there"))?;
    }
    match (value, place.get_mut(name)) {
        (None, _) => {
            place.remove(name);
            return Ok(without_empty(document, sections).to_string());
        }
        (Some(value), Some(Item::Value(old))) => {
            let mut new: toml_edit::Value = value.to_string().parse()?;
            // What is said about it in its line stays.
            *new.decor_mut() = old.decor().clone();
            let within = comments_within(old);
            *old = new;
            if let Some(mut name) = place.key_mut(name).filter(|_| !within.is_empty()) {
                let above = name.leaf_decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
                let above = format!("{above}{within}");
                name.leaf_decor_mut().set_prefix(above);
            }
        }
        (Some(value), _) => {
            place.insert(name, Item::Value(value.to_string().parse()?));
        }
    }
    Ok(document.to_string())
}

/// The comments between the elements of a list, a line each. A new list may have no place for them.
fn comments_within(list: &toml_edit::Value) -> String {
    let Some(list) = list.as_array() else { return String::new() };
    let around = list.iter().flat_map(|element| [element.decor().prefix(), element.decor().suffix()]);
    let texts = around.chain([Some(list.trailing())]).flatten().filter_map(|text| text.as_str());
    let comments = texts.flat_map(str::lines).map(str::trim).filter(|line| line.starts_with('#'));
    comments.map(|comment| format!("{comment}\n")).collect()
}

/// The document without the section, if nothing is left in it and nobody wrote a comment above it.
fn without_empty(mut document: DocumentMut, section: &str) -> DocumentMut {
    let found = document.get(section).and_then(Item::as_table);
    let comment = |table: &toml_edit::Table| {
        table.decor().prefix().and_then(|text| text.as_str()).map(str::trim).map(str::to_owned)
    };
    if found.is_some_and(|table| table.is_empty() && comment(table).unwrap_or_default().is_empty()) {
        document.remove(section);
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_changed_where_it_stands_and_nothing_else_is() {
        let text = "# ours\n[quota]\n# not much\nreserve = \"1GiB\" # for X\n\n[log]\nlevel = \"info\"\n";
        let value = Value::String("2GiB".to_owned());
        let set = |key: &str| edited(text, key, Some(&value)).unwrap();
        assert_eq!(set("quota.reserve"), text.replace("1GiB", "2GiB"));
        assert_eq!(
            edited(text, "quota.reserve", None).unwrap(),
            text.replace("# not much\nreserve = \"1GiB\" # for X\n", "")
        );
        assert_eq!(set("quota.host_memory"), text.replace("for X\n", "for X\nhost_memory = \"2GiB\"\n"));
        assert_eq!(set("dialects.aliyun.unit"), format!("{text}\n[dialects.aliyun]\nunit = \"2GiB\"\n"));
        assert_eq!(edited("", "quota.reserve", Some(&value)).unwrap(), "[quota]\nreserve = \"2GiB\"\n");
        assert_eq!(edited(text, "meter.xids", None).unwrap(), text);
        assert!(edited("quota = 4\n", "quota.reserve", Some(&value)).is_err());
        // A new list has no place for what is said of its elements.
        let list = "# all\nxids = [ # of ours\n    79, # fallen off\n    # and\n    48\n] # see above\n";
        assert_eq!(
            edited(list, "xids", Some(&Value::Array(vec![Value::Integer(79)]))).unwrap(),
            "# all\n# of ours\n# fallen off\n# and\nxids = [79] # see above\n"
        );
        let dotted = "# all\nmeter.xids = [\n    79, # fallen off\n]\n";
        assert_eq!(
            edited(dotted, "meter.xids", Some(&Value::Array(vec![]))).unwrap(),
            "# all\n# fallen off\nmeter.xids = []\n"
        );
        // As an editor elsewhere wrote it.
        let elsewhere = |text: &str| format!("\u{feff}{}", text.replace('\n', "\r\n"));
        let of_elsewhere = edited(&elsewhere(text), "quota.reserve", Some(&value)).unwrap();
        assert_eq!(of_elsewhere, elsewhere(&set("quota.reserve")));
    }

    #[test]
    fn a_word_means_what_the_setting_takes() {
        let of =
            |key: &str, word: &str| parsed(key, word, &known(key).unwrap()).map(|value| value.to_string());
        for (key, word, want) in [
            ("quota.reserve", "2GiB", "\"2GiB\""),
            ("quota.reserve", "", "\"\""),
            ("quota.reserve", "\"2GiB\"", "\"2GiB\""),
            ("log.level", "true", "\"true\""),
            ("quota.replicas", "4", "4"),
            ("request.strict", "true", "true"),
            ("meter.xids", "[79]", "[79]"),
        ] {
            assert_eq!(of(key, word).unwrap(), want, "{key} {word}");
        }
        for (key, word) in [
            ("quota.replicas", "four"),
            ("request.strict", "1"),
            ("meter.xids", "79"),
            ("quota.replicas", ""),
        ] {
            assert!(of(key, word).is_err(), "{key} {word}");
        }
        for (key, word) in
            [("reserve", "quota.reserve"), ("quota.reserv", ""), ("quota", "as quota."), ("", "")]
        {
            let error = known(key).unwrap_err().to_string();
            assert!(error.contains(word), "{key}: {error}");
        }
    }
}
