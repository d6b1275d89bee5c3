//! How requests for queue pairs are known to come from the peer of a handshake: by its epoch, and where the handshake was
//! authenticated by a proof that only its two sides can make.
//!
//! It travels in a connection manager's private data, behind the epoch (B5).

use crate::connect::cm::private;
use crate::connect::{Binding, ConnectError, Stage};

/// Of one channel; [`Pass::of`] one rail of it.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    ours: u64,
    theirs: u64,
    binding: Option<Binding>,
    rail: u32,
    attempt: u32,
}

impl Pass {
    /// Between these two epochs.
    pub(super) fn new(ours: u64, theirs: u64, binding: Option<Binding>) -> Self {
        Self { ours, theirs, binding, rail: 0, attempt: 0 }
    }

    /// For a rail, and an attempt to connect it: 0 when the channel is connected.
    pub(super) fn of(&self, rail: usize, attempt: u32) -> Self {
        // At most 16 rails.
        Self { rail: rail as u32, attempt, ..self.clone() }
    }

    /// What we send with the request for the `n`-th queue pair.
    pub(super) fn request(&self, n: usize) -> Vec<u8> {
        self.private(REQUEST, n)
    }

    /// What we send with the answer to it.
    pub(super) fn reply(&self, n: usize) -> Vec<u8> {
        self.private(REPLY, n)
    }

    /// What we send to whoever else asks.
    pub(super) fn refusal(&self) -> Vec<u8> {
        private::encode(self.ours)
    }

    /// Whether a request for the `n`-th queue pair is the peer's.
    pub(super) fn takes(&self, n: usize, private: &[u8]) -> bool {
        matches!(private::parse(private, Stage::Request), Ok(epoch) if epoch == self.theirs)
            && self.verify(REQUEST, n, private)
    }

    /// Whoever answers has to be the peer: the port may be another process's by now (K6).
    pub(super) fn check_reply(&self, n: usize, private: &[u8]) -> Result<(), ConnectError> {
        let (theirs, epoch) = (self.theirs, private::parse(private, Stage::Reply)?);
        if epoch != theirs {
            return Err(ConnectError::IdentityMismatch {
                expected: format!("epoch {theirs:#018x}"),
                got: format!("epoch {epoch:#018x}"),
            });
        }
        match self.verify(REPLY, n, private) {
            true => Ok(()),
            false => Err(ConnectError::NotAuthentic { stage: Stage::Reply }),
        }
    }

    fn private(&self, what: &[u8], n: usize) -> Vec<u8> {
        let mut out = private::encode(self.ours);
        if let Some(binding) = &self.binding {
            out.extend(binding.prove(&[what, &self.place(n)]));
        }
        out
    }

    fn verify(&self, what: &[u8], n: usize, private: &[u8]) -> bool {
        let Some(binding) = &self.binding else { return true };
        private::proof(private).is_some_and(|proof| binding.verify(&[what, &self.place(n)], proof))
    }

    fn place(&self, n: usize) -> [u8; 12] {
        let mut out = [0; 12];
        out[..4].copy_from_slice(&self.rail.to_le_bytes());
        out[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        // At most 64 queue pairs.
        out[8..].copy_from_slice(&(n as u32).to_le_bytes());
        out
    }
}

const REQUEST: &[u8] = b"queue pair request";
const REPLY: &[u8] = b"queue pair reply";

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(secret: Option<(u8, u8)>) -> (Pass, Pass) {
        let binding = |n| secret.map(|(a, b)| Binding::of([if n == 0 { a } else { b }; 32]));
        (Pass::new(1, 2, binding(0)), Pass::new(2, 1, binding(1)))
    }

    #[test]
    fn b5_a_queue_pair_is_asked_for_by_the_peer_alone() {
        for (client, server) in [pair(None), pair(Some((7, 7)))] {
            let (client, server) = (client.of(3, 9), server.of(3, 9));
            for n in [0, 63] {
                // RDMA_CM pads with zeros.
                let (mut request, mut reply) = (client.request(n), server.reply(n));
                request.resize(56, 0);
                reply.resize(196, 0);
                assert!(server.takes(n, &request));
                client.check_reply(n, &reply).unwrap();
            }
        }
        let (_, stranger) = pair(None);
        assert!(!stranger.takes(0, &private::encode(3)));
    }

    #[test]
    fn b5_a_proof_is_of_one_queue_pair_one_attempt_one_direction_and_one_handshake() {
        let (client, server) = pair(Some((7, 7)));
        let (client, server) = (client.of(3, 9), server.of(3, 9));
        let good = client.request(1);
        assert!(server.takes(1, &good));
        assert!(
            !server.takes(2, &good) && !server.of(4, 9).takes(1, &good) && !server.of(3, 8).takes(1, &good)
        );
        assert!(!server.takes(1, &private::encode(1)), "the epoch alone");
        // What the server itself answers proves nothing to it.
        let mut reflected = server.reply(1);
        reflected[8..16].copy_from_slice(&1u64.to_le_bytes());
        assert!(!server.takes(1, &reflected));
        for at in 16..good.len() {
            let mut bent = good.clone();
            bent[at] ^= 0x10;
            assert!(!server.takes(1, &bent), "byte {at}");
        }
        let (_, other) = pair(Some((7, 8)));
        assert!(!other.of(3, 9).takes(1, &good));
        let refused = client.check_reply(1, &other.of(3, 9).reply(1));
        assert!(matches!(refused, Err(ConnectError::NotAuthentic { stage: Stage::Reply })), "{refused:?}");
    }
}
