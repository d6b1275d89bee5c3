//! Showing that both sides hold a key, before anything else is said: two frames, and the seal on all that follow.
//!
//! ```text
//!   client                           server
//!   AuthStart {id, nonce}     ─────►  knows the key; has done nothing yet
//!   knows that it is the      ◄─────  AuthChallenge {nonce}, sealed
//!   server: says hello, sealed ────►  knows that it is the client
//! ```
//!
//! The server shows that it holds the key first: a hello names keys of memory, which are for nobody else.

use tokio::io::{AsyncRead, AsyncWrite};

use super::super::codec::{once, text};
use super::super::deadline::Deadline;
use super::super::error::{ConnectError, Stage};
use super::super::frame::{self, Kind};
use super::super::framed::Framed;
use super::super::hello::HelloError;
use super::super::reject::Reject;
use super::psk::{MAX_ID, Psk, is_id};
use super::seal::{NONCE, Seal, Side};
use super::{Admission, PeerAuth};
use crate::random::random;
use crate::wire::{Reader, Writer};

/// The longest frame before a peer has shown that it holds a key.
pub(crate) const MAX_BODY: u32 = 1024;

mod tag {
    pub(super) const KEY: u16 = 1;
    pub(super) const NONCE: u16 = 2;
}

/// The client's first frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AuthStart {
    pub(crate) id: String,
    pub(crate) nonce: [u8; NONCE],
}

impl AuthStart {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        Writer(out).field(tag::KEY, |w| {
            w.raw(self.id.as_bytes());
        });
        put_nonce(out, &self.nonce);
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let (mut id, mut nonce) = (None, None);
        let mut r = Reader::new(body, "authentication");
        while let Some((tag, mut f)) = r.field()? {
            match tag {
                tag::KEY => once(&mut id, "key", text(&mut f, MAX_ID, "key")?)?,
                tag::NONCE => once(&mut nonce, "nonce", nonce_of(&mut f)?)?,
                _ => {}
            }
        }
        let id = id.filter(|id: &String| is_id(id)).ok_or(HelloError::Missing("key"))?;
        Ok(Self { id, nonce: nonce.ok_or(HelloError::Missing("nonce"))? })
    }
}

fn put_nonce(out: &mut Vec<u8>, nonce: &[u8; NONCE]) {
    Writer(out).field(tag::NONCE, |w| {
        w.raw(nonce);
    });
}

fn nonce_of(f: &mut Reader<'_>) -> Result<[u8; NONCE], HelloError> {
    let malformed = f.malformed();
    f.take(NONCE)?.try_into().map_err(|_| malformed.into())
}

/// The nonce of a server's answer, whose seal has not been looked at. What follows it is the seal's, or a later version's.
pub(crate) fn challenge(body: &[u8]) -> Result<[u8; NONCE], HelloError> {
    let mut r = Reader::new(body, "authentication");
    match r.field()? {
        Some((tag::NONCE, mut f)) => nonce_of(&mut f),
        _ => Err(HelloError::Missing("nonce")),
    }
}

fn nonce() -> Result<[u8; NONCE], ConnectError> {
    let mut nonce = [0; NONCE];
    random(&mut nonce).map_err(ConnectError::resources)?;
    Ok(nonce)
}

/// The client's side: shows that we hold the key, and finds that the server does. `epoch` is ours.
pub(crate) async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    psk: &Psk,
    epoch: u64,
    deadline: Deadline,
) -> Result<Framed<S>, ConnectError> {
    let stage = Stage::Challenge;
    let key = psk.first();
    let start = AuthStart { id: key.id.clone(), nonce: nonce()? };
    let start = frame::encode(Kind::AuthStart, epoch, |body| start.encode(body))?;
    frame::write(&mut stream, &start, stage, deadline).await?;
    let answer = frame::read_within(&mut stream, MAX_BODY, stage, deadline).await?;
    match answer.kind {
        Kind::AuthChallenge => {}
        Kind::Reject => {
            return Err(match Reject::decode(&answer.body) {
                // A channel of ours is named by nobody who has not shown the key.
                Ok(Reject::Duplicate { .. }) => ConnectError::Unexpected { stage, kind: Kind::Reject as u16 },
                Ok(reject) => reject.remote_error(),
                Err(e) => ConnectError::malformed(stage, e),
            });
        }
        other => return Err(ConnectError::Unexpected { stage, kind: other as u16 }),
    }
    let nonce = challenge(&answer.body).map_err(|e| ConnectError::malformed(stage, e))?;
    let server = answer.epoch;
    let mut seal = Seal::new(&key, &start, server, &nonce, Side::Client);
    if let Err(error) = seal.open(answer, stage) {
        // It holds no key in common with us: what it hears is not sealed.
        Framed::plain(stream).refuse(epoch, &Reject::NotAuthentic, deadline).await;
        return Err(error);
    }
    Ok(Framed::sealed(stream, seal, PeerAuth::Key(key.id), server))
}

/// The server's side: the client names a key that we hold, and is shown that we do. Whether it holds it, its hello tells.
pub(crate) async fn answer<S: AsyncRead + AsyncWrite + Unpin>(
    framed: &mut Framed<S>,
    psk: &Psk,
    epoch: u64,
    deadline: Deadline,
) -> Result<(), ConnectError> {
    let stage = Stage::Challenge;
    let frame = framed.first(stage, deadline, |kind| match kind {
        Kind::AuthStart => Ok(MAX_BODY),
        Kind::Hello => Err(mismatch(&Admission::Psk(psk.clone()), Admission::Open.name())),
        other => Err(ConnectError::Unexpected { stage, kind: other as u16 }),
    });
    let frame = frame.await?;
    let start = AuthStart::decode(&frame.body).map_err(|e| ConnectError::malformed(stage, e))?;
    if frame.epoch == epoch {
        // Our own words, or those of somebody who knows our epoch.
        return Err(ConnectError::Unsupported { what: super::TO_ITSELF.to_owned() });
    }
    let Some(key) = psk.find(&start.id) else {
        return Err(ConnectError::UnknownKey { id: start.id, by: "this side" });
    };
    let nonce = nonce()?;
    let seal = Seal::new(&key, &frame.bytes(), epoch, &nonce, Side::Server);
    framed.seal(seal, PeerAuth::Key(key.id), frame.epoch);
    framed.send(Kind::AuthChallenge, epoch, |body| put_nonce(body, &nonce), stage, deadline).await
}

/// The two sides admit peers in different ways.
pub(crate) fn mismatch(ours: &Admission, theirs: &str) -> ConnectError {
    ConnectError::AdmissionMismatch { ours: ours.name().to_owned(), theirs: theirs.to_owned() }
}
