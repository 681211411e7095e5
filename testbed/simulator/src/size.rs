//! Parses sizes of memory in human-readable form.

use std::fmt;

/// The text that is not a valid size.
#[derive(Debug, PartialEq, Eq)]
pub struct SizeError(String);

impl fmt::Display for SizeError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?} is not a size; write 80GiB, 512MiB, 64KiB or 4096B", self.0)
    }
}

impl std::error::Error for SizeError {}

/// Parses `1TiB`, `80GiB`, `512MiB`, `64KiB`, `4096B` into bytes.
///
/// # Errors
/// If `text` has another form, or exceeds 64 bits.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let wrong = || SizeError(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err(wrong()),
    };
    number.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_whole_number_and_a_binary_unit() {
        for (text, want) in [
            ("80GiB", Some(80 << 30)),
            ("512MiB", Some(512 << 20)),
            ("1B", Some(1)),
            ("4096", None),
            ("GiB", None),
            ("4GB", None),
            ("-1GiB", None),
            ("99999999999TiB", None),
        ] {
            assert_eq!(parse(text).ok(), want, "parsing {text:?}");
        }
    }
}
