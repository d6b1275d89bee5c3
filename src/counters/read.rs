//! One file of sysfs, read strictly: a decimal number, or the reason why there is none.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Twenty digits and a newline, and one byte more than that: who fills it is no counter.
const ROOM: u64 = 22;

/// Why a counter's value is unknown. That is never the same as 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// No such file.
    Missing,
    /// The device says that it does not count: `N/A (no PMA)`.
    NotOffered,
    Unreadable(io::ErrorKind),
    NotANumber,
    /// The counter has reached its greatest value and stays there.
    Stuck,
    /// The counter went back.
    Reset,
    /// The sum is beyond 64 bits.
    TooLarge,
    /// The port was not there at the first reading, or is not there now.
    Gone,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the device has no counter of its traffic"),
            Self::NotOffered => f.write_str("the device says N/A"),
            Self::Unreadable(kind) => write!(f, "it cannot be read ({kind})"),
            Self::NotANumber => f.write_str("it holds no number"),
            Self::Stuck => f.write_str("it has reached its greatest value and stays there until it is reset"),
            Self::Reset => f.write_str("it went back: the device was reset"),
            Self::TooLarge => f.write_str("its value is too large"),
            Self::Gone => f.write_str("the port was not there at both readings"),
        }
    }
}

/// The number in the file at `path`.
pub(super) fn counter(path: &Path) -> Result<u64, Unknown> {
    parse(&contents(path)?)
}

fn contents(path: &Path) -> Result<Vec<u8>, Unknown> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Unknown::Missing,
        kind => Unknown::Unreadable(kind),
    };
    let mut bytes = Vec::with_capacity(ROOM as usize);
    // Not to wait for ever for the other end of what is no file of sysfs but a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    file.take(ROOM).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Digits and at most one newline. No sign, no space, no second line.
fn parse(bytes: &[u8]) -> Result<u64, Unknown> {
    if bytes.starts_with(b"N/A") {
        return Err(Unknown::NotOffered);
    }
    let digits = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(Unknown::NotANumber);
    }
    // Digits alone: what fails now is the size.
    std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).ok_or(Unknown::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_a_counter_is_a_decimal_number_and_nothing_else() {
        assert_eq!(parse(b"250\n"), Ok(250));
        assert_eq!(parse(b"250"), Ok(250));
        assert_eq!(parse(b"0\n"), Ok(0));
        assert_eq!(parse(b"18446744073709551615\n"), Ok(u64::MAX));
        assert_eq!(parse(b"N/A (no PMA)\n"), Err(Unknown::NotOffered));
        assert_eq!(parse(b"18446744073709551616\n"), Err(Unknown::TooLarge));
        for text in [
            "", "\n", "-1\n", "+1\n", " 1\n", "1 \n", "1\n\n", "0x10\n", "1e3\n", "1.5\n", "12a\n", "NaN\n",
            "١\n",
        ] {
            assert_eq!(parse(text.as_bytes()), Err(Unknown::NotANumber), "{text:?}");
        }
        assert_eq!(parse(&[0xff, 0xfe, 0]), Err(Unknown::NotANumber));
        assert_eq!(parse(b"1\0\n"), Err(Unknown::NotANumber));
    }
}
