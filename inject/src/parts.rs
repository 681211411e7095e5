//! Looks up parts of a config.json. What is not of the type that the runtime specification says counts as
//! absent.

use serde_json::Value;

/// The entries of the list at `pointer`.
pub(crate) fn entries<'a>(
    json: &'a Value,
    pointer: &str,
) -> impl Iterator<Item = &'a Value> + Clone + use<'a> {
    json.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// The texts in the list at `pointer`.
pub(crate) fn texts<'a>(json: &'a Value, pointer: &str) -> impl Iterator<Item = &'a str> + Clone + use<'a> {
    entries(json, pointer).filter_map(Value::as_str)
}

/// The text of a field; empty where there is none.
pub(crate) fn text<'a>(entry: &'a Value, field: &str) -> &'a str {
    entry.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// The number of a field. A negative one stands for none.
pub(crate) fn number(entry: &Value, field: &str) -> Option<u64> {
    entry.get(field).and_then(Value::as_u64)
}

/// Major and minor number of a device; `None` stands for every number, as -1 does in a bundle.
pub(crate) type DeviceNumbers = (Option<u64>, Option<u64>);

/// The numbers of a device node or device rule.
pub(crate) fn device_numbers(entry: &Value) -> DeviceNumbers {
    (number(entry, "major"), number(entry, "minor"))
}

/// These numbers as messages name them: `195:0`, with `*` for every number.
pub(crate) fn numbers_text((major, minor): DeviceNumbers) -> String {
    let [major, minor] =
        [major, minor].map(|part| part.map_or_else(|| "*".to_owned(), |part| part.to_string()));
    format!("{major}:{minor}")
}

/// Whether a node or a rule is for block devices.
pub(crate) fn is_block(entry: &Value) -> bool {
    text(entry, "type") == "b"
}
