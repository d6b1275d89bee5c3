//! The seal of an authenticated handshake: each frame ends with an HMAC over everything that was said before it, and itself.
//!
//! ```text
//! master   = HMAC(key, "landfall psk 1" ‖ SHA-256(AuthStart) ‖ server's epoch ‖ server's nonce)
//! client's = HMAC(master, "client"), server's = HMAC(master, "server"), binding = HMAC(master, "binding")
//! mac      = HMAC(the sender's, SHA-256(all frames before) ‖ this frame without its mac)
//! ```
//!
//! AuthStart holds the client's epoch and nonce, and the id of the key. So a frame proves its sender's role, both epochs and
//! both nonces, that the sender has seen all frames before it as they were sent, and their order: one that was replayed,
//! reflected, changed, left out or taken from elsewhere does not verify. It hides nothing.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::super::error::{ConnectError, Stage};
use super::super::frame::{self, Frame, HEADER_LEN, Kind};
use super::psk::Key;

/// Bytes of a nonce.
pub(super) const NONCE: usize = 32;
/// Bytes of a seal.
pub(crate) const MAC: usize = 32;
/// Bytes of a proof of [`Binding`].
pub(crate) const PROOF: usize = 16;

type Secret = Zeroizing<[u8; 32]>;

/// Which side seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

/// Seals the frames of one handshake, and opens the peer's.
pub(crate) struct Seal {
    ours: Secret,
    theirs: Secret,
    transcript: Sha256,
    binding: Binding,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    /// After `start`, the bytes of the client's first frame, and what the server answers to it.
    pub(super) fn new(key: &Key, start: &[u8], epoch: u64, nonce: &[u8; NONCE], side: Side) -> Self {
        let digest = Sha256::digest(start);
        let master = hmac(
            &key.secret,
            &[b"landfall psk 1", digest.as_slice(), &epoch.to_le_bytes(), nonce.as_slice()],
        );
        let derive = |label: &[u8]| hmac(&*master, &[label]);
        let (client, server) = (derive(b"client"), derive(b"server"));
        let (ours, theirs) = match side {
            Side::Client => (client, server),
            Side::Server => (server, client),
        };
        let transcript = Sha256::new_with_prefix(start);
        Self { ours, theirs, transcript, binding: Binding(Arc::new(derive(b"binding"))) }
    }

    /// What binds something else to this handshake.
    pub(crate) fn binding(&self) -> &Binding {
        &self.binding
    }

    /// A frame of ours.
    pub(crate) fn encode(
        &mut self,
        kind: Kind,
        epoch: u64,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Vec<u8>, ConnectError> {
        let mut bytes = frame::encode(kind, epoch, |body| {
            fill(body);
            body.resize(body.len() + MAC, 0);
        })?;
        let at = bytes.len() - MAC;
        let mac = self.mac(&self.ours, &[&bytes[..at]]).finalize().into_bytes();
        bytes[at..].copy_from_slice(&mac);
        self.transcript.update(&bytes);
        Ok(bytes)
    }

    /// Takes the seal off a frame of the peer's.
    pub(crate) fn open(&mut self, mut frame: Frame, stage: Stage) -> Result<Frame, ConnectError> {
        let wrong = ConnectError::NotAuthentic { stage };
        let Some(at) = frame.body.len().checked_sub(MAC) else { return Err(wrong) };
        let head: [u8; HEADER_LEN] = frame.head();
        let mac = self.mac(&self.theirs, &[&head, &frame.body[..at]]);
        // In the same time, whichever byte differs.
        if mac.verify_slice(&frame.body[at..]).is_err() {
            return Err(wrong);
        }
        self.transcript.update(head);
        self.transcript.update(&frame.body);
        frame.body.truncate(at);
        Ok(frame)
    }

    fn mac(&self, key: &Secret, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = keyed(&**key);
        mac.update(&self.transcript.clone().finalize());
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

/// A secret of both sides of one handshake and of nobody else, by which what is connected later shows that it belongs to it.
#[derive(Clone)]
pub(crate) struct Binding(Arc<Secret>);

impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Binding")
    }
}

impl Binding {
    #[cfg(test)]
    pub(crate) fn of(secret: [u8; 32]) -> Self {
        Self(Arc::new(Zeroizing::new(secret)))
    }

    /// Shows `what`, and nothing else: it was never sent before.
    pub(crate) fn prove(&self, what: &[&[u8]]) -> [u8; PROOF] {
        let mut out = [0; PROOF];
        out.copy_from_slice(&hmac(&**self.0, what)[..PROOF]);
        out
    }

    /// Whether `proof` is of `what`. In the same time, whatever differs.
    pub(crate) fn verify(&self, what: &[&[u8]], proof: &[u8]) -> bool {
        subtle::ConstantTimeEq::ct_eq(&self.prove(what)[..], proof).into()
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    // RFC 2104: a key of any length.
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> Secret {
    let mut mac = keyed(key);
    parts.iter().for_each(|part| mac.update(part));
    Zeroizing::new(mac.finalize().into_bytes().into())
}

/// Both ends of a handshake that began with `start`, for the fuzz target `sealed`.
#[cfg(any(test, fuzzing))]
pub(crate) fn pair(start: &[u8]) -> (Seal, Seal) {
    let psk = super::Psk::new("fuzz", &[7; 32]).expect("a key");
    let end = |side| Seal::new(&psk.first(), start, 2, &[3; NONCE], side);
    (end(Side::Client), end(Side::Server))
}
