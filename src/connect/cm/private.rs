//! Landfall's own private data (B5): magic, version and epoch, and a proof where queue pairs are connected for an authenticated
//! handshake. The rest of a hello travels in-band.

use super::super::admission::seal::PROOF;
use super::super::error::{ConnectError, Stage};
use super::super::frame::{VERSION, check_speaker};
use crate::wire::{Reader, Writer};

/// `"LFCM"`.
const MAGIC: u32 = u32::from_le_bytes(*b"LFCM");

/// The private data of an endpoint with this epoch: 16 bytes.
pub(crate) fn encode(epoch: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(16);
    Writer(&mut out).u32(MAGIC).u16(VERSION).u16(0).u64(epoch);
    out
}

/// The epoch of a peer that sent `private`. What follows is ignored: RDMA_CM pads with zeros, to 56 bytes in a request
/// and to 190 or 196 in a reply, and a later version may say more.
pub(crate) fn parse(private: &[u8], stage: Stage) -> Result<u64, ConnectError> {
    let mut r = Reader::new(private, "private data");
    let short = |e| ConnectError::malformed(stage, e);
    check_speaker(&mut r, MAGIC, stage)?;
    r.u16().map_err(short)?;
    r.u64().map_err(short)
}

/// The proof behind the epoch, if there is room for one.
pub(crate) fn proof(private: &[u8]) -> Option<&[u8]> {
    private.get(16..16 + PROOF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b5_private_data_is_parsed_whatever_zeros_follow() {
        let private = encode(0x1234_5678_9abc_def0);
        assert_eq!(private.len(), 16);
        for padded in [16, 56, 148, 190, 196, 255] {
            let mut p = private.clone();
            p.resize(padded, 0);
            assert_eq!(parse(&p, Stage::Request).unwrap(), 0x1234_5678_9abc_def0);
        }
        for cut in 0..16 {
            let e = parse(&private[..cut], Stage::Request).unwrap_err();
            assert!(matches!(e, ConnectError::Malformed { .. }), "{cut}: {e:?}");
        }
    }

    #[test]
    fn b5_other_programs_and_versions_are_told_apart() {
        let e = parse(&[0; 56], Stage::Request).unwrap_err();
        assert!(matches!(e, ConnectError::NotLandfall { got: 0 }), "{e:?}");
        let mut p = encode(1);
        p[4] = 9;
        let e = parse(&p, Stage::Request).unwrap_err();
        assert!(matches!(e, ConnectError::Version { ours: VERSION, theirs: 9 }), "{e:?}");
    }
}
