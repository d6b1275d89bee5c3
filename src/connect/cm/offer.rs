//! What a side of the soft provider's manager says of itself, in the body of a request's or an acceptance's frame.
//!
//! A sequence of fields, as in a hello: unknown ones, and unknown bytes at the end of known ones, are ignored (B1).

use crate::connect::codec_rail::{put_qp, qp};
use crate::provider::QpAddress;
use crate::wire::{Malformed, Reader, Writer};

/// The longest body of a frame of the manager. An offer has about 300 bytes.
pub(super) const MAX_BODY: u32 = 1024;

mod tag {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const PATH: u16 = 2;
    pub(super) const PRIVATE: u16 = 3;
}

const ORDERED: u32 = 1;

/// A queue pair and what its side allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) address: QpAddress,
    /// Active MTU of the port, bytes.
    pub(super) mtu: u32,
    /// READs that this side serves, and that it may have outstanding.
    pub(super) serves: u8,
    pub(super) issues: u8,
    /// The device keeps the order of messages.
    pub(super) ordered: bool,
    pub(super) private: Vec<u8>,
}

impl Offer {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.field(tag::ADDRESS, |w| put_qp(w, &self.address));
        w.field(tag::PATH, |w| {
            w.u32(if self.ordered { ORDERED } else { 0 }).u32(self.mtu).u8(self.serves).u8(self.issues);
        });
        encode_private(&self.private, out);
    }

    /// Decodes a body whose private data has at most `max_private` bytes, and pads that with zeros to as many, as RDMA_CM
    /// does.
    pub(super) fn decode(body: &[u8], max_private: usize) -> Result<Self, Malformed> {
        let mut r = Reader::new(body, "offer");
        let (mut address, mut path) = (None, None);
        let mut private = Vec::new();
        while let Some((tag, mut f)) = r.field()? {
            match tag {
                tag::ADDRESS => address = Some(qp(&mut f)?),
                tag::PATH => path = Some((f.u32()?, f.u32()?, f.u8()?, f.u8()?)),
                tag::PRIVATE => private = decode_field(&mut f, max_private)?,
                _ => {}
            }
        }
        let (flags, mtu, serves, issues) = path.ok_or(r.malformed())?;
        private.resize(max_private, 0);
        Ok(Self {
            address: address.ok_or(r.malformed())?,
            mtu,
            serves,
            issues,
            ordered: flags & ORDERED != 0,
            private,
        })
    }
}

/// The body of a rejection: private data only.
pub(super) fn encode_private(private: &[u8], out: &mut Vec<u8>) {
    Writer(out).field(tag::PRIVATE, |w| {
        w.raw(private);
    });
}

/// The private data of a rejection, padded as in [`Offer::decode`].
pub(super) fn decode_private(body: &[u8], max: usize) -> Result<Vec<u8>, Malformed> {
    let mut r = Reader::new(body, "rejection");
    let mut private = Vec::new();
    while let Some((tag, mut f)) = r.field()? {
        if tag == tag::PRIVATE {
            private = decode_field(&mut f, max)?;
        }
    }
    private.resize(max, 0);
    Ok(private)
}

fn decode_field(f: &mut Reader<'_>, max: usize) -> Result<Vec<u8>, Malformed> {
    if f.remaining() > max {
        return Err(f.malformed());
    }
    f.take(f.remaining()).map(<[u8]>::to_vec)
}

/// What decodes must survive encoding and decoding again.
#[cfg(any(test, fuzzing))]
pub(in crate::connect) fn fuzz(kind: super::super::frame::Kind, body: &[u8]) {
    let mut again = Vec::new();
    if kind == super::super::frame::Kind::CmReject {
        let Ok(private) = decode_private(body, super::attr::MAX_REJECT) else { return };
        encode_private(&private, &mut again);
        assert_eq!(decode_private(&again, super::attr::MAX_REJECT), Ok(private));
    } else {
        let Ok(offer) = Offer::decode(body, super::attr::MAX_REPLY) else { return };
        offer.encode(&mut again);
        assert_eq!(Offer::decode(&again, super::attr::MAX_REPLY), Ok(offer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Offer {
        let address = QpAddress {
            qp_num: 7,
            psn: 9,
            lid: 0,
            gid: [3; 16],
            soft_port: 4000,
            soft_key: 0x1122_3344_5566_7788,
            soft_local: 9,
        };
        Offer { address, mtu: 4096, serves: 16, issues: 8, ordered: true, private: vec![5; 20] }
    }

    #[test]
    fn b5_an_offer_round_trips_with_its_private_data_padded() {
        let offer = sample();
        let mut body = Vec::new();
        offer.encode(&mut body);
        let got = Offer::decode(&body, 56).unwrap();
        assert_eq!((&got.private[..20], &got.private[20..]), (&[5; 20][..], &[0; 36][..]));
        assert_eq!(Offer { private: offer.private.clone(), ..got }, offer);
        assert!(body.len() < MAX_BODY as usize);
        // One byte more than a message holds.
        assert!(Offer::decode(&body, 19).is_err());
    }

    #[test]
    fn b1_an_offer_cut_anywhere_is_refused_and_unknown_fields_are_skipped() {
        let offer = Offer { private: Vec::new(), ..sample() };
        let mut body = Vec::new();
        offer.encode(&mut body);
        let fields = body.len() - 6;
        for cut in 0..fields {
            assert!(Offer::decode(&body[..cut], 56).is_err(), "cut at {cut}");
        }
        Writer(&mut body).field(77, |w| {
            w.u64(1);
        });
        assert_eq!(Offer::decode(&body, 56).unwrap().address, offer.address);
    }

    #[test]
    fn b5_a_rejection_round_trips_padded() {
        let mut body = Vec::new();
        encode_private(b"busy", &mut body);
        let got = decode_private(&body, 148).unwrap();
        assert_eq!((&got[..4], got.len()), (&b"busy"[..], 148));
        assert_eq!(decode_private(&[], 148).unwrap(), vec![0; 148]);
        assert!(decode_private(&body[..7], 148).is_err());
    }
}
