//! The refusal of a hello, with both sides' values, so that either log tells the whole story.

use super::codec::text;
use super::error::{ConnectError, Stage};
use super::hello::{HelloError, MAX_DTYPE, MAX_TRANSPORT};
use crate::wire::{Reader, Writer};

/// Longest explanation, bytes.
const MAX_TEXT: usize = 256;

/// The part of two layouts that must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayoutField {
    Layers,
    BlockBytes,
    Planes,
    HeadBytes,
    /// Of the model.
    Heads,
    /// One that a later version knows.
    Other(u16),
}

impl LayoutField {
    fn code(self) -> u16 {
        match self {
            Self::Layers => 1,
            Self::BlockBytes => 2,
            Self::Planes => 3,
            Self::HeadBytes => 4,
            Self::Heads => 5,
            Self::Other(c) => c,
        }
    }

    fn of(code: u16) -> Self {
        match code {
            1 => Self::Layers,
            2 => Self::BlockBytes,
            3 => Self::Planes,
            4 => Self::HeadBytes,
            5 => Self::Heads,
            c => Self::Other(c),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Layers => "the number of layers",
            Self::BlockBytes => "the block size in bytes",
            Self::Planes => "the number of planes in a block's shape",
            Self::HeadBytes => "the bytes of a head in a block's shape",
            Self::Heads => "the number of the model's heads in a block's shape",
            Self::Other(_) => "the layout",
        }
    }
}

/// Why a hello is refused. `ours` is the side that refuses, `theirs` the side that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reject {
    Layout {
        field: LayoutField,
        ours: u64,
        theirs: u64,
    },
    Dtype {
        ours: String,
        theirs: String,
    },
    Transport {
        ours: String,
        theirs: String,
    },
    /// The connection of this id is kept instead (B3).
    Duplicate {
        winner: u64,
    },
    Busy,
    Closing,
    /// More connects than the side that refuses takes in a second from one address.
    TooOften {
        limit: u32,
    },
    Version {
        ours: u16,
        theirs: u16,
    },
    Unsupported {
        what: String,
    },
    Malformed {
        what: String,
    },
    /// The two sides admit peers in different ways.
    Admission {
        ours: String,
        theirs: String,
    },
    /// The side that refuses has no key of this id.
    UnknownKey {
        id: String,
    },
    /// A frame's seal does not fit.
    NotAuthentic,
    /// The certificate of the side that is refused is for other names than may connect.
    NotAdmitted {
        peer: String,
    },
    /// A code of a later version.
    Other {
        code: u16,
        text: String,
    },
}

mod tag {
    pub(super) const CODE: u16 = 1;
    pub(super) const TEXT: u16 = 2;
    pub(super) const LAYOUT: u16 = 3;
    pub(super) const OUR_DTYPE: u16 = 4;
    pub(super) const THEIR_DTYPE: u16 = 5;
    pub(super) const WINNER: u16 = 6;
    pub(super) const VERSIONS: u16 = 7;
    pub(super) const OUR_TRANSPORT: u16 = 8;
    pub(super) const THEIR_TRANSPORT: u16 = 9;
    pub(super) const OUR_ADMISSION: u16 = 10;
    pub(super) const THEIR_ADMISSION: u16 = 11;
    pub(super) const LIMIT: u16 = 12;
}

impl Reject {
    /// The two sides connect queue pairs in different ways.
    pub(crate) fn other_bootstrap(listens: &str, dials: &str) -> Self {
        Self::Unsupported {
            what: format!(
                "the listening side connects queue pairs {listens}, the dialling side {dials}; choose the same \
                 bootstrap on both sides"
            ),
        }
    }

    fn code(&self) -> u16 {
        match self {
            Self::Layout { .. } => 1,
            Self::Dtype { .. } => 2,
            Self::Duplicate { .. } => 3,
            Self::Busy => 4,
            Self::Closing => 5,
            Self::Version { .. } => 6,
            Self::Unsupported { .. } => 7,
            Self::Malformed { .. } => 8,
            Self::Transport { .. } => 9,
            Self::Admission { .. } => 10,
            Self::UnknownKey { .. } => 11,
            Self::NotAuthentic => 12,
            Self::NotAdmitted { .. } => 13,
            Self::TooOften { .. } => 14,
            Self::Other { code, .. } => *code,
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.field(tag::CODE, |w| {
            w.u16(self.code());
        });
        match self {
            Self::Layout { field, ours, theirs } => {
                w.field(tag::LAYOUT, |w| {
                    w.u16(field.code()).u64(*ours).u64(*theirs);
                });
            }
            Self::Dtype { ours, theirs } => {
                w.field(tag::OUR_DTYPE, |w| {
                    w.raw(ours.as_bytes());
                });
                w.field(tag::THEIR_DTYPE, |w| {
                    w.raw(theirs.as_bytes());
                });
            }
            Self::Transport { ours, theirs } => {
                w.field(tag::OUR_TRANSPORT, |w| {
                    w.raw(ours.as_bytes());
                });
                w.field(tag::THEIR_TRANSPORT, |w| {
                    w.raw(theirs.as_bytes());
                });
            }
            Self::TooOften { limit } => {
                w.field(tag::LIMIT, |w| {
                    w.u32(*limit);
                });
            }
            Self::Admission { ours, theirs } => {
                w.field(tag::OUR_ADMISSION, |w| {
                    w.raw(ours.as_bytes());
                });
                w.field(tag::THEIR_ADMISSION, |w| {
                    w.raw(theirs.as_bytes());
                });
            }
            Self::Duplicate { winner } => {
                w.field(tag::WINNER, |w| {
                    w.u64(*winner);
                });
            }
            Self::Unsupported { what: s }
            | Self::Malformed { what: s }
            | Self::UnknownKey { id: s }
            | Self::NotAdmitted { peer: s }
            | Self::Other { text: s, .. } => {
                w.field(tag::TEXT, |w| {
                    w.raw(printable(s).as_bytes());
                });
            }
            Self::Version { ours, theirs } => {
                w.field(tag::VERSIONS, |w| {
                    w.u16(*ours).u16(*theirs);
                });
            }
            Self::Busy | Self::Closing | Self::NotAuthentic => {}
        }
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let (mut code, mut said, mut layout, mut winner) = (None, String::new(), None, None);
        let (mut our_dtype, mut their_dtype, mut versions) = (None, None, None);
        let (mut our_transport, mut their_transport) = (None, None);
        let (mut our_admission, mut their_admission, mut limit) = (None, None, None);
        let mut r = Reader::new(body, "refusal");
        while let Some((tag, mut f)) = r.field()? {
            match tag {
                tag::CODE => code = Some(f.u16()?),
                tag::TEXT => said = text(&mut f, MAX_TEXT, "explanation")?,
                tag::LAYOUT => layout = Some((LayoutField::of(f.u16()?), f.u64()?, f.u64()?)),
                tag::OUR_DTYPE => our_dtype = Some(text(&mut f, MAX_DTYPE, "dtype")?),
                tag::THEIR_DTYPE => their_dtype = Some(text(&mut f, MAX_DTYPE, "dtype")?),
                tag::OUR_TRANSPORT => our_transport = Some(text(&mut f, MAX_TRANSPORT, "transport")?),
                tag::THEIR_TRANSPORT => their_transport = Some(text(&mut f, MAX_TRANSPORT, "transport")?),
                tag::LIMIT => limit = Some(f.u32()?),
                tag::OUR_ADMISSION => our_admission = Some(text(&mut f, MAX_TRANSPORT, "admission")?),
                tag::THEIR_ADMISSION => their_admission = Some(text(&mut f, MAX_TRANSPORT, "admission")?),
                tag::WINNER => winner = Some(f.u64()?),
                tag::VERSIONS => versions = Some((f.u16()?, f.u16()?)),
                _ => {}
            }
        }
        Ok(match code.ok_or(HelloError::Missing("code"))? {
            1 => {
                let (field, ours, theirs) = layout.ok_or(HelloError::Missing("layout"))?;
                Self::Layout { field, ours, theirs }
            }
            2 => Self::Dtype {
                ours: our_dtype.ok_or(HelloError::Missing("dtype"))?,
                theirs: their_dtype.ok_or(HelloError::Missing("dtype"))?,
            },
            3 => Self::Duplicate { winner: winner.ok_or(HelloError::Missing("winner"))? },
            4 => Self::Busy,
            5 => Self::Closing,
            6 => {
                let (ours, theirs) = versions.ok_or(HelloError::Missing("versions"))?;
                Self::Version { ours, theirs }
            }
            7 => Self::Unsupported { what: said },
            8 => Self::Malformed { what: said },
            9 => Self::Transport {
                ours: our_transport.ok_or(HelloError::Missing("transport"))?,
                theirs: their_transport.ok_or(HelloError::Missing("transport"))?,
            },
            10 => Self::Admission {
                ours: our_admission.ok_or(HelloError::Missing("admission"))?,
                theirs: their_admission.ok_or(HelloError::Missing("admission"))?,
            },
            11 => Self::UnknownKey { id: said },
            12 => Self::NotAuthentic,
            14 => Self::TooOften { limit: limit.ok_or(HelloError::Missing("limit"))? },
            13 => Self::NotAdmitted { peer: said },
            code => Self::Other { code, text: said },
        })
    }

    /// The same refusal as the other side sees it.
    fn swapped(self) -> Self {
        match self {
            Self::Layout { field, ours, theirs } => Self::Layout { field, ours: theirs, theirs: ours },
            Self::Dtype { ours, theirs } => Self::Dtype { ours: theirs, theirs: ours },
            Self::Transport { ours, theirs } => Self::Transport { ours: theirs, theirs: ours },
            Self::Admission { ours, theirs } => Self::Admission { ours: theirs, theirs: ours },
            Self::Version { ours, theirs } => Self::Version { ours: theirs, theirs: ours },
            other => other,
        }
    }

    /// The error of the side that refuses.
    pub(crate) fn local_error(self) -> ConnectError {
        match self {
            Self::Layout { field, ours, theirs } => {
                ConnectError::LayoutMismatch { field: field.name(), ours, theirs }
            }
            Self::Dtype { ours, theirs } => ConnectError::DtypeMismatch { ours, theirs },
            Self::Transport { ours, theirs } => ConnectError::TransportMismatch { ours, theirs },
            Self::Admission { ours, theirs } => ConnectError::AdmissionMismatch { ours, theirs },
            Self::UnknownKey { id } => ConnectError::UnknownKey { id, by: "this side" },
            Self::NotAuthentic => ConnectError::NotAuthentic { stage: Stage::Hello },
            Self::NotAdmitted { peer } => ConnectError::NotAdmitted { peer, by: "this side" },
            Self::Version { ours, theirs } => ConnectError::Version { ours, theirs },
            Self::Duplicate { winner } => ConnectError::Duplicate { winner },
            Self::Busy => ConnectError::Busy,
            Self::Closing => ConnectError::Closing,
            Self::TooOften { limit } => ConnectError::TooOften { limit },
            Self::Unsupported { what } => ConnectError::Unsupported { what },
            Self::Malformed { what } => ConnectError::Malformed { stage: Stage::Hello, what },
            Self::Other { code, text } => ConnectError::Rejected { code, text },
        }
    }

    /// The error of the side that is refused.
    pub(crate) fn remote_error(self) -> ConnectError {
        match self {
            Self::Malformed { what } => ConnectError::RefusedAsMalformed { what },
            Self::UnknownKey { id } => ConnectError::UnknownKey { id, by: "the peer" },
            Self::NotAuthentic => ConnectError::RefusedAsNotAuthentic,
            Self::NotAdmitted { peer } => ConnectError::NotAdmitted { peer, by: "the peer" },
            other => other.swapped().local_error(),
        }
    }
}

/// At most [`MAX_TEXT`] bytes, without control characters.
fn printable(s: &str) -> String {
    let mut out = String::new();
    for c in s.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if out.len() + c.len_utf8() > MAX_TEXT {
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every() -> Vec<Reject> {
        vec![
            Reject::Layout { field: LayoutField::BlockBytes, ours: 32768, theirs: 16384 },
            Reject::Layout { field: LayoutField::Planes, ours: 1, theirs: 2 },
            Reject::Layout { field: LayoutField::HeadBytes, ours: 256, theirs: 128 },
            Reject::Layout { field: LayoutField::Heads, ours: 8, theirs: 4 },
            Reject::Layout { field: LayoutField::Other(99), ours: 1, theirs: 2 },
            Reject::Dtype { ours: "bf16".into(), theirs: "fp8".into() },
            Reject::Transport { ours: "soft-shm".into(), theirs: "soft-tcp".into() },
            Reject::Duplicate { winner: 77 },
            Reject::Busy,
            Reject::Closing,
            Reject::Version { ours: 1, theirs: 2 },
            Reject::Unsupported { what: "no notification in common".into() },
            Reject::Malformed { what: "no path".into() },
            Reject::Admission { ours: "psk".into(), theirs: "open".into() },
            Reject::UnknownKey { id: "2026-11".into() },
            Reject::NotAuthentic,
            Reject::NotAdmitted { peer: "prefill-7".into() },
            Reject::TooOften { limit: 5 },
            Reject::Other { code: 1000, text: "later".into() },
        ]
    }

    #[test]
    fn b1_every_refusal_round_trips_and_survives_cuts() {
        for reject in every() {
            let mut v = Vec::new();
            reject.encode(&mut v);
            assert_eq!(Reject::decode(&v).unwrap(), reject);
            for cut in 0..v.len() {
                // A cut can only lose the explanation; what a code needs is either there or an error.
                if let Ok(short) = Reject::decode(&v[..cut]) {
                    assert_eq!(short.code(), reject.code());
                }
            }
        }
    }

    #[test]
    fn b1_both_sides_name_both_values() {
        let reject = Reject::Layout { field: LayoutField::BlockBytes, ours: 32768, theirs: 16384 };
        let here = reject.clone().local_error().to_string();
        let there = reject.remote_error().to_string();
        assert!(here.contains("32768 on this side, 16384 on the peer's"), "{here}");
        assert!(there.contains("16384 on this side, 32768 on the peer's"), "{there}");
        let dtype = Reject::Dtype { ours: "bf16".into(), theirs: "fp8".into() }.remote_error().to_string();
        assert!(dtype.contains(r#""fp8" on this side, "bf16" on the peer's"#), "{dtype}");
        let reject = Reject::Transport { ours: "soft-shm".into(), theirs: "soft-tcp".into() };
        let there = reject.remote_error().to_string();
        assert!(there.contains("soft-tcp on this side, soft-shm on the peer's"), "{there}");
    }

    #[test]
    fn b1_an_explanation_is_cut_and_cleaned_by_its_sender() {
        let mut v = Vec::new();
        Reject::Malformed { what: format!("a\n{}", "\u{e9}".repeat(300)) }.encode(&mut v);
        let Ok(Reject::Malformed { what }) = Reject::decode(&v) else { panic!("not decoded") };
        assert!(what.starts_with("a \u{e9}") && what.len() <= MAX_TEXT);
    }
}
