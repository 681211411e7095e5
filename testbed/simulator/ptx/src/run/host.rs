//! Functions that CUDA provides to a kernel outside its module: text output, failed assertions, clocks.

use std::io::Write;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::error::Fault;
use crate::memory;

/// Nanoseconds since 1970 with `wall`, else since the first call in this process.
pub(super) fn nanoseconds(wall: bool) -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let since = match wall {
        true => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        false => START.get_or_init(Instant::now).elapsed(),
    };
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The device's `vprintf`: prints a format with the values at `values`. Returns the number of values.
///
/// # Safety
/// `format` is the address of a text that ends with a zero; `values` holds what it asks for.
pub(super) unsafe fn print(format: u64, values: u64) -> Result<u64, Fault> {
    // SAFETY: the caller vouches for the text.
    let format = unsafe { memory::text(format) }?;
    let format = String::from_utf8_lossy(&format).into_owned();
    // SAFETY: the caller vouches for the values.
    let (text, count) = unsafe { formatted(&format, values) }?;
    let mut out = std::io::stdout().lock();
    // A closed standard output is not an error of the kernel.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    Ok(count)
}

/// Prints on standard error which assertion failed, as the device does.
///
/// # Safety
/// Both are addresses of texts that end with a zero.
pub(super) unsafe fn report_assertion(message: u64, file: u64) {
    // SAFETY: the caller vouches for the text.
    let message = unsafe { memory::text(message) }.unwrap_or_default();
    // SAFETY: the caller vouches for the text.
    let file = unsafe { memory::text(file) }.unwrap_or_default();
    let (message, file) = (String::from_utf8_lossy(&message), String::from_utf8_lossy(&file));
    let _ = writeln!(std::io::stderr(), "{file}: Assertion `{message}` failed.");
}

/// # Safety
/// `values` holds what the format asks for, each value aligned to its size.
unsafe fn formatted(format: &str, values: u64) -> Result<(String, u64), Fault> {
    let (mut text, mut rest, mut at, mut count) = (String::new(), format, values, 0);
    while let Some(start) = rest.find('%') {
        text.push_str(&rest[..start]);
        rest = &rest[start + 1..];
        let end =
            rest.find(|character: char| character.is_ascii_alphabetic() && !"hljzt".contains(character));
        let end = match rest.starts_with('%') {
            true => Some(0),
            false => end,
        };
        let Some(end) = end else { break };
        let (specification, conversion) = (&rest[..end], rest.as_bytes()[end]);
        rest = &rest[end + 1..];
        if conversion == b'%' {
            text.push('%');
            continue;
        }
        let long = specification.contains(['l', 'j', 'z', 't']);
        let wide = long || matches!(conversion, b's' | b'p' | b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a');
        let size: u8 = if wide { 8 } else { 4 };
        at = at.next_multiple_of(u64::from(size));
        // SAFETY: the caller vouches for the values.
        let value = unsafe { memory::load(at, size, 1) }?;
        at += u64::from(size);
        count += 1;
        // SAFETY: the caller vouches for a text where the format has `%s`.
        let shown = unsafe { shown(specification, conversion, value, size) }?;
        text.push_str(&padded(specification, &shown));
    }
    text.push_str(rest);
    Ok((text, count))
}

/// # Safety
/// With `%s`, `value` is the address of a text.
unsafe fn shown(specification: &str, conversion: u8, value: u64, size: u8) -> Result<String, Fault> {
    let unused = 64 - 8 * u32::from(size);
    let signed = i64::from_ne_bytes((value << unused).to_ne_bytes()) >> unused;
    let real = f64::from_bits(value);
    let precision = specification.split_once('.').map(|(_, digits)| digits.trim_end_matches(['h', 'l']));
    let precision = precision.map_or(6, |digits| digits.parse().unwrap_or(0));
    Ok(match conversion {
        b'd' | b'i' => signed.to_string(),
        b'u' => value.to_string(),
        b'x' => format!("{value:x}"),
        b'X' => format!("{value:X}"),
        b'o' => format!("{value:o}"),
        b'p' => format!("{value:#x}"),
        b'c' => String::from_utf8_lossy(&value.to_le_bytes()[..1]).into_owned(),
        // SAFETY: the caller vouches for the text.
        b's' => String::from_utf8_lossy(&unsafe { memory::text(value) }?).into_owned(),
        b'e' | b'E' => exponential(real, precision),
        b'g' | b'G' => general(real, precision.max(1)),
        _ => format!("{real:.precision$}"),
    })
}

/// Formats as C's `%e`: an exponent of at least two digits, with a sign.
fn exponential(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let exponent: i32 = exponent.parse().unwrap_or(0);
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        None => text,
    }
}

/// Formats as C's `%g`: the shorter of the two notations, without zeros at its end.
fn general(value: f64, precision: usize) -> String {
    let scientific = exponential(value, precision - 1);
    let exponent: i32 =
        scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let digits = i32::try_from(precision).unwrap_or(i32::MAX);
    if value.is_finite() && (exponent < -4 || exponent >= digits) {
        let (digits, tail) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{tail}", trim(digits));
    }
    let decimals = usize::try_from(digits.saturating_sub(1).saturating_sub(exponent)).unwrap_or(0);
    trim(&format!("{value:.decimals$}"))
}

/// Pads `shown` to the specification's width.
fn padded(specification: &str, shown: &str) -> String {
    let flags = specification.trim_start_matches(['+', ' ', '#']);
    let left = flags.starts_with('-');
    let zero = flags.starts_with('0');
    let digits = flags.trim_start_matches(['-', '0']);
    let end = digits.find(|character: char| !character.is_ascii_digit()).unwrap_or(digits.len());
    let width = digits[..end].parse().unwrap_or(0);
    match (left, zero, shown.strip_prefix('-')) {
        (true, _, _) => format!("{shown:<width$}"),
        (false, true, Some(positive)) => format!("-{positive:0>rest$}", rest = width.saturating_sub(1)),
        (false, true, None) => format!("{shown:0>width$}"),
        _ => format!("{shown:>width$}"),
    }
}
