//! Parses spans of time in human-readable form.

use std::fmt;

/// The text that is not a valid span.
#[derive(Debug, PartialEq, Eq)]
pub struct SpanError(String);

impl fmt::Display for SpanError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?} is not a span above zero; write 1s, 2ms, 0.5ms, 250us or 100ns", self.0)
    }
}

impl std::error::Error for SpanError {}

/// Parses `1s`, `2ms`, `0.5ms`, `250us`, `100ns` into nanoseconds. Fractions of a nanosecond are refused.
///
/// # Errors
/// If `text` has another form, is zero, or exceeds 64 bits.
pub fn parse(text: &str) -> Result<u64, SpanError> {
    let wrong = || SpanError(text.to_owned());
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(end);
    let digits = match unit {
        "ns" => 0,
        "us" => 3,
        "ms" => 6,
        "s" => 9,
        _ => return Err(wrong()),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    if part.is_empty() || part.contains('.') || part.trim_end_matches('0').len() > digits {
        return Err(wrong());
    }
    let padded = format!("{whole}{:0<digits$}", part.trim_end_matches('0'));
    padded.parse().ok().filter(|&ns| ns > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_a_number_and_a_unit() {
        for (text, want) in [
            ("2ms", Some(2_000_000)),
            ("0.5ms", Some(500_000)),
            ("2.25us", Some(2_250)),
            ("1.50s", Some(1_500_000_000)),
            ("100ns", Some(100)),
            ("0.5ns", None),
            ("0ms", None),
            ("1.ms", None),
            ("1.2.3ms", None),
            ("ms", None),
            ("5", None),
            ("99999999999999s", None),
        ] {
            assert_eq!(parse(text).ok(), want, "parsing {text:?}");
        }
    }
}
