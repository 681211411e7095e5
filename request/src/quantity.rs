//! Reads numbers as other systems write them. These readers are stricter than the systems' own, which treat
//! garbage as "no limit": a sign, a leading zero, a blank or an extra letter is an error (`None`).

pub(crate) use gpushare_claims::whole;
use gpushare_inventory::DeviceMemory;

/// Reads a whole number in bytes, or in the binary unit of a trailing k, m, g or t in either case.
pub(crate) fn binary(text: &str) -> Option<u64> {
    let power = match text.bytes().last()?.to_ascii_lowercase() {
        b'k' => 10,
        b'm' => 20,
        b'g' => 30,
        b't' => 40,
        _ => return whole(text),
    };
    whole::<u64>(&text[..text.len() - 1])?.checked_mul(1 << power)
}

/// A number with a decimal point, held exactly as a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decimal {
    pub numerator: u64,
    pub denominator: u64,
}

impl Decimal {
    /// `whole` times this fraction, rounded down.
    pub fn of(self, whole: u64) -> u64 {
        let part = u128::from(whole) * u128::from(self.numerator) / u128::from(self.denominator);
        u64::try_from(part).unwrap_or(u64::MAX)
    }

    /// This fraction of a GPU's memory, rounded down to bytes.
    pub fn of_memory(self, total: DeviceMemory) -> DeviceMemory {
        DeviceMemory::from_bytes(self.of(total.bytes()))
    }
}

/// Reads digits, optionally with a point and up to nine more digits. No sign and no exponent.
pub(crate) fn decimal(text: &str) -> Option<Decimal> {
    let (head, tail) = text.split_once('.').unwrap_or((text, "0"));
    let digits = !tail.is_empty() && tail.len() <= 9 && tail.bytes().all(|byte| byte.is_ascii_digit());
    let denominator = 10_u64.pow(u32::try_from(tail.len()).ok().filter(|_| digits)?);
    let numerator = whole::<u64>(head)?.checked_mul(denominator)?.checked_add(tail.parse().ok()?)?;
    Some(Decimal { numerator, denominator })
}

/// Reads a Kubernetes quantity in whole units, rounded up as Kubernetes does (k8s.io/apimachinery,
/// resource.Quantity): digits, an optional fraction, and an optional suffix: binary Ki to Pi, decimal m, k,
/// M, G, T, P, or an exponent (1e3).
pub fn kubernetes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (times, over): (u64, u64) = match suffix {
        "" => (1, 1),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ei" => (1 << 60, 1),
        exponent => match exponent.strip_prefix(['e', 'E'])?.parse::<i32>().ok()? {
            up @ 0..=18 => (10_u64.pow(up.unsigned_abs()), 1),
            down @ -18..=-1 => (1, 10_u64.pow(down.unsigned_abs())),
            _ => return None,
        },
    };
    let decimal = decimal(number)?;
    let units = u128::from(decimal.numerator).checked_mul(u128::from(times))?;
    u64::try_from(units.div_ceil(u128::from(decimal.denominator) * u128::from(over))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_plain_digits() {
        for text in ["", "-1", "+1", " 1", "1 ", "010", "0x10", "1e3", "1.0", "٤", "18446744073709551616"] {
            assert_eq!(whole::<u64>(text), None, "{text:?}");
        }
        assert_eq!((whole("0"), whole("18446744073709551615")), (Some(0_u64), Some(u64::MAX)));
    }

    #[test]
    fn one_letter_makes_a_binary_unit() {
        for (text, want) in [
            ("3000m", Some(3000 << 20)),
            ("1G", Some(1 << 30)),
            ("24152899584", Some(24_152_899_584)),
            ("2t", Some(2 << 40)),
            ("4k", Some(4 << 10)),
            ("3000mb", None),
            ("3Gi", None),
            ("1.5g", None),
            ("m", None),
            ("0x10m", None),
            ("010m", None),
            ("99999999999999999999g", None),
            ("17592186044416m", None),
            ("1ｍ", None),
        ] {
            assert_eq!(binary(text), want, "{text:?}");
        }
    }

    #[test]
    fn a_quantity_is_rounded_up_to_whole_units() {
        for (text, want) in [
            ("7680Mi", Some(7680 << 20)),
            ("4096M", Some(4_096_000_000)),
            ("1.5Gi", Some(3 << 29)),
            ("1500m", Some(2)),
            ("2k", Some(2_000)),
            ("2G", Some(2_000_000_000)),
            ("2T", Some(2_000_000_000_000)),
            ("2P", Some(2_000_000_000_000_000)),
            ("2Ti", Some(2 << 40)),
            ("2Pi", Some(2 << 50)),
            ("0", Some(0)),
            ("4GB", None),
            ("4GiB", None),
            ("-1Gi", None),
            ("1e3", Some(1000)),
            ("15e-1", Some(2)),
            ("2E", Some(2_000_000_000_000_000_000)),
            ("1e99", None),
            ("1e", None),
            ("", None),
            (".5Gi", None),
            ("1.Gi", None),
            ("99999999999Pi", None),
        ] {
            assert_eq!(kubernetes(text), want, "{text:?}");
        }
    }

    #[test]
    fn a_fraction_is_exact() {
        assert_eq!(decimal("0.125"), Some(Decimal { numerator: 125, denominator: 1000 }));
        assert_eq!(decimal("0.27").map(|part| part.of(15360 << 20)), Some((15360_u64 << 20) * 27 / 100));
        for text in ["50%", "500m", "NaN", "", ".5", "1e-1", "-0.5", "0.+5", "0.1234567890", "inf"] {
            assert_eq!(decimal(text), None, "{text:?}");
        }
    }
}
