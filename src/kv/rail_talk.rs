//! What the two drivers of a channel say to each other to bring a rail back, over one that works. The protocol carries it, opaque.
//!
//! ```text
//!   client (who connected the channel)          server
//!     Offer {queue pairs} ────────────────────▶ has put the rail to rest: makes queue pairs, connects them
//!     connects its own ◀───────────────────────  Answer {queue pairs}, or Refuse {why}
//!     Ready ──────────────────────────────────▶ uses the rail
//!     uses the rail ◀──────────────────────────  Go; or whatever comes first on the rail itself
//!     does not wait any longer to offer ◀──────  PortUp: what had kept the rail down here may be over
//! ```
//!
//! A kind that is not known is of a later version, and ignored. Every message but that last one names the attempt, which the client counts; what belongs to an earlier one is ignored. One that is longer than the
//! protocol carries at once travels in pieces, which may come in any order.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use crate::connect::{HelloRegion, half, put_half, put_socket, socket};
use crate::provider::QpAddress;
use crate::wire::{Malformed, Reader, Writer};

/// Longest reason, bytes.
const MAX_REASON: usize = 200;
/// Most regions of a pool that can be said of a rail.
pub(crate) const MAX_SAID: usize = 500;
/// Longest message, bytes: 64 addresses, so many regions, and a little.
const MAX_TALK: usize = 16 << 10;
/// Bytes of a piece before its part of the message: attempt, kind, total, offset.
const PIECE: usize = 9;
/// Most pieces of a message: each has more than a hundred bytes, but for the last.
const MAX_PIECES: usize = 64;

/// Those that are known.
const KINDS: RangeInclusive<u8> = 1..=6;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Talk {
    /// With the regions of the pool on this device, where the hello could not say them.
    Offer {
        attempt: u32,
        qps: Vec<QpAddress>,
        regions: Vec<HelloRegion>,
    },
    /// The same, and with the address of the server's connection manager, where there has to be one.
    Answer {
        attempt: u32,
        qps: Vec<QpAddress>,
        regions: Vec<HelloRegion>,
        manager: Option<SocketAddr>,
    },
    Refuse {
        attempt: u32,
        reason: String,
    },
    Ready {
        attempt: u32,
    },
    Go {
        attempt: u32,
    },
    PortUp,
}

impl Talk {
    pub(crate) fn attempt(&self) -> u32 {
        match *self {
            Self::Offer { attempt, .. }
            | Self::Answer { attempt, .. }
            | Self::Refuse { attempt, .. }
            | Self::Ready { attempt }
            | Self::Go { attempt } => attempt,
            Self::PortUp => 0,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Offer { .. } => 1,
            Self::Answer { .. } => 2,
            Self::Refuse { .. } => 3,
            Self::Ready { .. } => 4,
            Self::Go { .. } => 5,
            Self::PortUp => 6,
        }
    }

    /// In pieces of at most `limit` bytes, which is more than a hundred.
    pub(crate) fn pieces(&self, limit: usize) -> Vec<Vec<u8>> {
        let body = self.body();
        let room = limit.saturating_sub(PIECE).max(1);
        let piece = |offset: usize| {
            let mut out = Vec::with_capacity(limit);
            // At most MAX_TALK, both.
            Writer(&mut out).u32(self.attempt()).u8(self.kind()).u16(body.len() as u16).u16(offset as u16);
            out.extend_from_slice(&body[offset..body.len().min(offset + room)]);
            out
        };
        (0..body.len().max(1)).step_by(room).map(piece).collect()
    }

    fn body(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Offer { qps, regions, .. } => put_half(&mut out, qps, regions),
            Self::Answer { qps, regions, manager, .. } => {
                let mut w = Writer(&mut out);
                w.u8(u8::from(manager.is_some()));
                if let Some(at) = manager {
                    put_socket(&mut w, *at);
                }
                put_half(&mut out, qps, regions);
            }
            Self::Refuse { reason, .. } => {
                Writer(&mut out).raw(cut(reason).as_bytes());
            }
            Self::Ready { .. } | Self::Go { .. } | Self::PortUp => {}
        }
        out
    }

    fn decode(kind: u8, attempt: u32, body: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(body, "rail talk");
        let malformed = r.malformed();
        Ok(match kind {
            1 => {
                let (qps, regions) = half(&mut r).map_err(|_| malformed)?;
                Self::Offer { attempt, qps, regions }
            }
            2 => {
                let manager = match r.u8()? {
                    0 => None,
                    1 => Some(socket(&mut r)?),
                    _ => return Err(malformed),
                };
                let (qps, regions) = half(&mut r).map_err(|_| malformed)?;
                Self::Answer { attempt, qps, regions, manager }
            }
            3 => {
                let reason = std::str::from_utf8(r.take(r.remaining().min(MAX_REASON))?);
                let reason = reason.map_err(|_| malformed)?;
                Self::Refuse { attempt, reason: reason.chars().filter(|c| !c.is_control()).collect() }
            }
            4 => Self::Ready { attempt },
            5 => Self::Go { attempt },
            6 => Self::PortUp,
            _ => return Err(malformed),
        })
    }
}

/// Puts the pieces of the peer's messages about one rail together, one message at a time.
#[derive(Debug, Default)]
pub(crate) struct Ear {
    message: Option<(u32, u8)>,
    body: Vec<u8>,
    /// Where pieces begin that have come, and their lengths.
    have: Vec<(usize, usize)>,
}

impl Ear {
    /// Takes a piece. Everything is checked: the bytes are the peer's. One of another message gives an unfinished one up.
    pub(crate) fn hear(&mut self, piece: &[u8]) -> Result<Option<Talk>, Malformed> {
        let mut r = Reader::new(piece, "rail talk");
        let (attempt, kind, total, offset) =
            (r.u32()?, r.u8()?, usize::from(r.u16()?), usize::from(r.u16()?));
        let part = r.take(r.remaining())?;
        let fits = total <= MAX_TALK && offset + part.len() <= total && part.is_empty() == (total == 0);
        if !fits {
            return Err(r.malformed());
        }
        if !KINDS.contains(&kind) {
            // Nothing is kept of it, and it gives no other message up.
            return Ok(None);
        }
        if self.message != Some((attempt, kind)) || self.body.len() != total {
            *self = Self { message: Some((attempt, kind)), body: vec![0; total], have: Vec::new() };
        }
        let end = offset + part.len();
        let again = self.have.iter().any(|&(at, len)| offset < at + len && at < end);
        if again || self.have.len() >= MAX_PIECES {
            return Err(r.malformed());
        }
        self.body[offset..end].copy_from_slice(part);
        self.have.push((offset, part.len()));
        if self.have.iter().map(|&(_, len)| len).sum::<usize>() < total {
            return Ok(None);
        }
        let body = std::mem::take(self).body;
        Talk::decode(kind, attempt, &body).map(Some)
    }
}

/// Part of the fuzz target `hello`: pieces of any bytes, each preceded by its length.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(mut data: &[u8]) {
    let mut ear = Ear::default();
    while let Some((&len, rest)) = data.split_first() {
        let (piece, rest) = rest.split_at(rest.len().min(len.into()));
        data = rest;
        let Ok(Some(talk)) = ear.hear(piece) else { continue };
        let mut again = Ear::default();
        let heard = talk.pieces(120).iter().map(|piece| again.hear(piece)).last();
        assert_eq!(heard, Some(Ok(Some(talk))));
    }
}

/// As much as may be sent.
fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Talk> {
        let qps: Vec<_> = (0..3).map(|qp_num| QpAddress { qp_num, ..QpAddress::default() }).collect();
        let at = Some("[2001:db8::1]:4791".parse().unwrap());
        let regions = vec![HelloRegion { addr: 4096, len: 1 << 40, rkey: 7 }; 3];
        vec![
            Talk::Offer { attempt: 7, qps: qps.clone(), regions: vec![] },
            Talk::Offer { attempt: u32::MAX, qps: vec![], regions: regions.clone() },
            Talk::Answer { attempt: 7, qps: qps.clone(), regions, manager: None },
            Talk::Answer { attempt: 7, qps, regions: vec![], manager: at },
            Talk::Refuse { attempt: 7, reason: "nö".into() },
            Talk::Ready { attempt: 7 },
            Talk::Go { attempt: 0 },
            Talk::PortUp,
        ]
    }

    fn heard(talk: &Talk, limit: usize) -> Result<Option<Talk>, Malformed> {
        let (mut ear, mut heard) = (Ear::default(), None);
        // The last piece first.
        for piece in talk.pieces(limit).iter().rev() {
            assert!(piece.len() <= limit && heard.is_none());
            heard = ear.hear(piece)?;
        }
        Ok(heard)
    }

    #[test]
    fn k10_talk_round_trips_in_pieces_of_any_order() {
        let most = (0..64).map(|qp_num| QpAddress { qp_num, ..QpAddress::default() }).collect();
        let manager = Some("10.0.0.1:1".parse().unwrap());
        let most = Talk::Answer { attempt: 1, qps: most, regions: vec![], manager };
        for talk in samples().into_iter().chain([most.clone()]) {
            for limit in [120, 500, 4096] {
                assert_eq!(heard(&talk, limit), Ok(Some(talk.clone())));
            }
        }
        let Talk::Answer { attempt, qps, manager, .. } = most else { unreachable!() };
        let regions = vec![HelloRegion { addr: 1, len: 1, rkey: 1 }; MAX_SAID];
        let most = Talk::Answer { attempt, qps, regions, manager };
        assert_eq!(heard(&most, 500), Ok(Some(most.clone())), "with all the regions that can be said");
    }

    #[test]
    fn k10_a_message_that_is_not_finished_gives_way_to_the_next() {
        let (mut ear, long) = (Ear::default(), Talk::Refuse { attempt: 1, reason: "x".repeat(200) });
        assert_eq!(ear.hear(&long.pieces(120)[0]), Ok(None));
        for (attempt, last) in [(2, false), (1, true)] {
            let next = Talk::Refuse { attempt, reason: "y".repeat(200) };
            let mut pieces = next.pieces(120).into_iter();
            assert_eq!(ear.hear(&pieces.next().unwrap()), Ok(None));
            let end = ear.hear(&pieces.next().unwrap());
            assert_eq!((end, pieces.next().is_none()), (Ok(Some(next)), true), "{last}");
        }
    }

    #[test]
    fn b1_kinds_of_later_versions_are_ignored_and_take_nothing() {
        let (mut ear, long) = (Ear::default(), Talk::Refuse { attempt: 1, reason: "x".repeat(200) });
        let pieces = long.pieces(120);
        assert_eq!(ear.hear(&pieces[0]), Ok(None));
        for kind in [0, 7, 255] {
            for _ in 0..2 * MAX_PIECES {
                let mut later = Vec::new();
                Writer(&mut later).u32(9).u8(kind).u16(4096).u16(0).raw(b"later");
                assert_eq!(ear.hear(&later), Ok(None), "{kind}");
            }
        }
        assert_eq!(ear.hear(&pieces[1]), Ok(Some(long)), "it was not given up for them");
    }

    #[test]
    fn b1_hostile_talk_is_malformed() {
        let piece = |attempt: u32, kind: u8, total: u16, offset: u16, part: &[u8]| {
            let mut out = Vec::new();
            Writer(&mut out).u32(attempt).u8(kind).u16(total).u16(offset).raw(part);
            out
        };
        let refused = |piece: &[u8]| Ear::default().hear(piece).is_err();
        assert!(refused(&[]) && refused(&[0; 8]));
        assert!(refused(&piece(1, 9, 1, 1, &[0])), "beyond its end, of a kind that there is not");
        assert!(refused(&piece(1, 4, 1, 1, &[0])), "beyond its end");
        assert!(refused(&piece(1, 4, 1, 0, &[])), "no bytes");
        assert!(refused(&piece(1, 4, u16::MAX, 0, &[0])), "too long");
        assert!(refused(&piece(1, 2, 1, 0, &[7])), "no flag");
        assert!(refused(&piece(1, 3, 1, 0, &[0xff])), "no text");
        let mut ear = Ear::default();
        assert_eq!(ear.hear(&piece(1, 3, 4, 1, b"bc")), Ok(None));
        assert!(ear.hear(&piece(1, 3, 4, 2, b"c")).is_err(), "a piece twice");
        // Byte by byte: each would be held against all others.
        let mut ear = Ear::default();
        let bytewise = (0..4096).map(|at| ear.hear(&piece(1, 3, 4096, at, b"x")));
        assert_eq!(bytewise.take_while(Result::is_ok).count(), MAX_PIECES);
        let many = Talk::Offer { attempt: 1, qps: vec![QpAddress::default(); 65], regions: vec![] };
        assert!(heard(&many, 4096).is_err());
        let beyond = vec![HelloRegion { addr: 2, len: u64::MAX, rkey: 1 }];
        assert!(heard(&Talk::Offer { attempt: 1, qps: vec![], regions: beyond }, 4096).is_err());
        let long = Talk::Refuse { attempt: 1, reason: "ä".repeat(500) };
        let Ok(Some(Talk::Refuse { reason, .. })) = heard(&long, 120) else { panic!("refused") };
        assert_eq!(reason, "ä".repeat(100));
    }
}
