//! Sizes and durations as users write and read them.

use std::time::Duration;

/// What is measured takes at most.
pub(crate) const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Bytes: a number, or one with K, M or G for powers of 1024 (`64K`, `2MiB`).
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("bytes, as 4096, 64K, 2M or 1G (powers of 1024)".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "a number of bytes, as 4096, 64K, 2M or 1G".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "more bytes than 64 bits count".to_owned())
}

/// As [`bytes`], and some.
pub(crate) fn some_bytes(text: &str) -> Result<u64, String> {
    bytes(text)
        .and_then(|n| if n > 0 { Ok(n) } else { Err("at least one byte, as 64K, 2M or 1G".to_owned()) })
}

/// Seconds (`2`, `0.5`), or with a unit: `200ms`, `2s`, `1m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let scale = match unit.trim() {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        "m" => 60.0,
        _ => return Err("a time, as 2, 0.5, 200ms or 1m".to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| "a time, as 2, 0.5, 200ms or 1m".to_owned())?;
    match Duration::try_from_secs_f64(number * scale) {
        Ok(Duration::ZERO) => Err("a time above 0".to_owned()),
        Ok(time) if time > LONGEST => Err("a day at most".to_owned()),
        Ok(time) => Ok(time),
        Err(_) => Err("too long a time".to_owned()),
    }
}

/// `64 KiB` where it is a whole number of those, else `1000 B`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

/// `1 queue pair`, `2 queue pairs`.
pub(crate) fn many(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Three digits or so: 0.0123, 1.23, 12.3, 123.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v == 0.0 || v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.0995 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Operations a second, with k or M.
pub(crate) fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 999_500.0 => format!("{} M", digits(r / 1e6)),
        r if r >= 999.5 => format!("{} k", digits(r / 1e3)),
        r => digits(r),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(bytes("2"), Ok(2));
        assert_eq!(bytes("64K"), Ok(65_536));
        assert_eq!(bytes("8MiB"), Ok(8 << 20));
        assert_eq!(bytes("1 g"), Ok(1 << 30));
        for wrong in ["", "K", "-1", "1.5K", "12x", "99999999999999999999", "17179869184G"] {
            assert!(bytes(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(show_bytes(2), "2 B");
        assert_eq!(show_bytes(65_536), "64 KiB");
        assert_eq!(show_bytes(65_537), "65537 B");
        assert_eq!(show_bytes(8 << 20), "8 MiB");
    }

    #[test]
    fn times_are_read() {
        assert_eq!(duration("2"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(duration("1m"), Ok(Duration::from_secs(60)));
        for wrong in ["", "s", "-1", "1h", "1.2.3", "1e9"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
        // What is longer than anybody measures overflows nothing.
        for wrong in ["86401", "10000000000000000000", &"9".repeat(40)] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(duration("1440m"), Ok(LONGEST));
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.0, 0.01234, 0.1234, 1.234, 12.34, 123.4, 12_345.0].map(digits),
            ["0", "0.0123", "0.12", "1.23", "12.3", "123", "12345"]
        );
        assert_eq!([12.0, 1234.0, 1_234_567.0].map(rate), ["12.0", "1.23 k", "1.23 M"]);
    }
}
