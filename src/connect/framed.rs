//! Frames on a stream, sealed once the two sides have shown that they hold a key.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::admission::seal::Seal;
use super::admission::{Binding, PeerAuth};
use super::deadline::Deadline;
use super::error::{ConnectError, Stage};
use super::frame::{self, Frame, Kind, MAX_BODY};
use super::handshake::{LINGER, LINGER_BYTES};
use super::reject::Reject;

/// A stream that carries frames, and who is at its other end.
#[derive(Debug)]
pub(crate) struct Framed<S> {
    stream: S,
    seal: Option<Box<Seal>>,
    identity: PeerAuth,
    /// The peer's epoch, where it is known.
    peer: Option<u64>,
}

impl<S> Framed<S> {
    /// Frames that are not sealed.
    pub(crate) fn plain(stream: S) -> Self {
        Self { stream, seal: None, identity: PeerAuth::Anonymous, peer: None }
    }

    /// The same, from a peer that has shown who it is before.
    #[cfg(feature = "tls")]
    pub(crate) fn known(stream: S, identity: PeerAuth) -> Self {
        Self { identity, ..Self::plain(stream) }
    }

    /// Frames that are.
    pub(super) fn sealed(stream: S, seal: Seal, identity: PeerAuth, peer: u64) -> Self {
        Self { stream, seal: Some(Box::new(seal)), identity, peer: Some(peer) }
    }

    /// From here on frames are sealed.
    pub(super) fn seal(&mut self, seal: Seal, identity: PeerAuth, peer: u64) {
        (self.seal, self.identity, self.peer) = (Some(Box::new(seal)), identity, Some(peer));
    }

    /// Who the peer has shown to be.
    pub(crate) fn identity(&self) -> &PeerAuth {
        &self.identity
    }

    /// What binds something else to this handshake, where there is a key.
    pub(crate) fn binding(&self) -> Option<Binding> {
        self.seal.as_ref().map(|seal| seal.binding().clone())
    }

    /// The stream, when the handshake is over, or before it has begun.
    pub(super) fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Framed<S> {
    pub(crate) async fn send(
        &mut self,
        kind: Kind,
        epoch: u64,
        fill: impl FnOnce(&mut Vec<u8>),
        stage: Stage,
        deadline: Deadline,
    ) -> Result<(), ConnectError> {
        let bytes = match &mut self.seal {
            None => frame::encode(kind, epoch, fill)?,
            Some(seal) => seal.encode(kind, epoch, fill)?,
        };
        frame::write(&mut self.stream, &bytes, stage, deadline).await
    }

    /// Reads the first frame of a connection: `limit` says how long one of this kind may be, or why it is not taken.
    pub(super) async fn first(
        &mut self,
        stage: Stage,
        deadline: Deadline,
        limit: impl FnOnce(Kind) -> Result<u32, ConnectError>,
    ) -> Result<Frame, ConnectError> {
        let head = frame::read_head(&mut self.stream, stage, deadline).await?;
        let limit = limit(head.kind)?;
        let frame = frame::read_body(&mut self.stream, head, limit, stage, deadline).await?;
        self.peer = Some(frame.epoch);
        Ok(frame)
    }

    /// Reads a frame that must be of `kind` and, where the peer's epoch is known, of that. A refusal becomes its error.
    pub(crate) async fn receive(
        &mut self,
        kind: Kind,
        stage: Stage,
        deadline: Deadline,
    ) -> Result<Frame, ConnectError> {
        let mut frame = frame::read_within(&mut self.stream, MAX_BODY, stage, deadline).await?;
        if let Some(seal) = &mut self.seal {
            frame = seal.open(frame, stage)?;
        }
        if let Some(expected) = self.peer.filter(|epoch| *epoch != frame.epoch) {
            return Err(ConnectError::IdentityMismatch {
                expected: format!("epoch {expected:#018x}"),
                got: format!("epoch {:#018x}", frame.epoch),
            });
        }
        match frame.kind {
            k if k == kind => {
                self.peer = Some(frame.epoch);
                Ok(frame)
            }
            // The first frame of a connection refuses nothing.
            Kind::Reject if kind != Kind::Hello => Err(match Reject::decode(&frame.body) {
                Ok(reject) => reject.remote_error(),
                Err(e) => ConnectError::malformed(stage, e),
            }),
            other => Err(ConnectError::Unexpected { stage, kind: other as u16 }),
        }
    }

    /// Sends a refusal, and waits a little for the peer to read it. Failures change nothing: the connection ends.
    pub(crate) async fn refuse(&mut self, epoch: u64, reject: &Reject, deadline: Deadline) {
        let stage = Stage::HelloReply;
        let deadline = deadline.capped(LINGER);
        let result = async {
            self.send(Kind::Reject, epoch, |b| reject.encode(b), stage, deadline).await?;
            deadline.io(stage, self.stream.shutdown()).await?;
            // Closing with unread input would reset the connection, and the refusal could be lost.
            let mut rest = (&mut self.stream).take(LINGER_BYTES);
            deadline.io(stage, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await
        };
        if let Err(e) = result.await {
            tracing::debug!(error = %e, ?reject, "a refusal may not have arrived");
        }
    }
}
