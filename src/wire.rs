//! Encoding and decoding of what travels: little-endian integers, bounded, no panic on any input.
//!
//! Extensible parts are sequences of fields `{tag u16, length u32, bytes}`; a reader skips tags that it does not
//! know, so that a newer peer can say more (B1).

/// The input ended early, or a value is outside of what the format allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed {what} at byte {at}")]
pub(crate) struct Malformed {
    pub(crate) what: &'static str,
    pub(crate) at: usize,
}

/// A cursor over received bytes.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// `what` names the message in errors.
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, at: 0, what }
    }

    pub(crate) fn malformed(&self) -> Malformed {
        Malformed { what: self.what, at: self.at }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.checked_add(n).filter(|&e| e <= self.bytes.len()).ok_or(self.malformed())?;
        let out = &self.bytes[self.at..end];
        self.at = end;
        Ok(out)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.malformed())
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn bytes16(&mut self) -> Result<[u8; 16], Malformed> {
        self.array()
    }

    /// The next field `{tag, length, bytes}`, or `None` at the end.
    pub(crate) fn field(&mut self) -> Result<Option<(u16, Reader<'a>)>, Malformed> {
        if self.remaining() == 0 {
            return Ok(None);
        }
        let tag = self.u16()?;
        let len = self.u32()? as usize;
        let what = self.what;
        Ok(Some((tag, Reader::new(self.take(len)?, what))))
    }
}

/// Appends to a byte vector.
#[derive(Debug)]
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(crate) fn u8(&mut self, v: u8) -> &mut Self {
        self.0.push(v);
        self
    }

    pub(crate) fn u16(&mut self, v: u16) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, v: u32) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, v: u64) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    pub(crate) fn raw(&mut self, v: &[u8]) -> &mut Self {
        self.0.extend_from_slice(v);
        self
    }

    /// Writes a field `{tag, length, bytes}` whose bytes `fill` appends.
    pub(crate) fn field(&mut self, tag: u16, fill: impl FnOnce(&mut Writer<'_>)) -> &mut Self {
        self.u16(tag);
        let at = self.0.len();
        self.u32(0);
        fill(&mut Writer(self.0));
        let len = (self.0.len() - at - 4) as u32;
        self.0[at..at + 4].copy_from_slice(&len.to_le_bytes());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_unknown_fields_are_skipped_and_short_input_is_an_error() {
        let mut v = Vec::new();
        Writer(&mut v).field(1, |w| {
            w.u64(7);
        });
        Writer(&mut v).field(999, |w| {
            w.raw(&[1, 2, 3]);
        });
        let mut r = Reader::new(&v, "test");
        let (tag, mut f) = r.field().unwrap().unwrap();
        assert_eq!((tag, f.u64().unwrap()), (1, 7));
        assert_eq!(r.field().unwrap().unwrap().0, 999);
        assert!(r.field().unwrap().is_none());
        for cut in 1..v.len() {
            let mut r = Reader::new(&v[..cut], "test");
            let mut ended = false;
            while let Ok(f) = r.field() {
                if f.is_none() {
                    ended = true;
                    break;
                }
            }
            // A cut on a field boundary is a shorter message; anywhere else it is malformed.
            assert_eq!(ended, cut == 14, "cut at {cut}");
        }
    }
}
