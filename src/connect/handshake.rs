//! The four frames of a connect, over any stream, in an order that the types enforce.
//!
//! Client: [`client`] → [`ReplyReceived`] (connect the queue pairs) → [`ReplyReceived::ready`].
//! Server: [`Incoming::hello`] → [`Offer`] (check, build and connect the queue pairs) → [`Offer::accept`] →
//! [`Accepted`] (register the channel) → [`Accepted::finish`]. Dropping any of them closes the connection, and
//! nothing else is left of it (B4). The whole handshake has one deadline.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::agree::{Agreed, Role, agree};
use super::codec_rail::{late, put_late};
use super::deadline::Deadline;
use super::error::{ConnectError, Stage};
use super::frame::{self, Frame, Kind};
use super::gate::Ticket;
use super::hello::Hello;
use super::rail::LateRail;
use super::reject::Reject;

/// How long a connection lingers for its refusal to arrive.
const LINGER: Duration = Duration::from_secs(1);
/// How much unread input of a refused peer is taken, so that closing does not destroy the refusal on its way.
const LINGER_BYTES: u64 = 2 * frame::MAX_BODY as u64;

/// Whom the client wants to reach. Nothing given: whoever answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expect {
    pub(crate) epoch: Option<u64>,
    pub(crate) name: Option<String>,
}

impl Expect {
    fn check(&self, got: &Hello) -> Result<(), ConnectError> {
        let wrong_epoch = self.epoch.is_some_and(|e| e != got.epoch);
        let wrong_name = self.name.as_ref().is_some_and(|n| *n != got.name);
        if !wrong_epoch && !wrong_name {
            return Ok(());
        }
        let name = self.name.as_ref().unwrap_or(&got.name);
        let epoch = self.epoch.unwrap_or(got.epoch);
        Err(ConnectError::IdentityMismatch {
            expected: format!("{name:?} of epoch {epoch:#018x}"),
            got: format!("{:?} of epoch {:#018x}", got.name, got.epoch),
        })
    }
}

/// Sends `hello` and waits for the reply. The reply has been checked against the hello.
pub(crate) async fn client<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    hello: &Hello,
    expect: &Expect,
    deadline: Deadline,
) -> Result<ReplyReceived<S>, ConnectError> {
    check_ours(hello)?;
    let bytes = frame::encode(Kind::Hello, hello.epoch, |b| hello.encode(b))?;
    frame::write(&mut stream, &bytes, Stage::Hello, deadline).await?;
    let stage = Stage::HelloReply;
    let frame = receive(&mut stream, Kind::HelloReply, stage, None, deadline).await?;
    let reply = Hello::decode(frame.epoch, &frame.body).map_err(|e| ConnectError::malformed(stage, e))?;
    expect.check(&reply)?;
    if reply.connection_id != hello.connection_id {
        return Err(ConnectError::malformed(stage, "the reply is to another connection"));
    }
    // The same number on each rail: that of the first is where a peer without rails looks.
    let offered = hello.rail_list().iter().map(|rail| rail.qps.len()).max().unwrap_or(0);
    if reply.rail_list().iter().any(|rail| rail.qps.len() > offered) {
        return Err(ConnectError::malformed(stage, "the reply has more queue pairs than were offered"));
    }
    match agree(hello, &reply, Role::Client) {
        Ok(agreed) => Ok(ReplyReceived { reply, agreed, stream, epoch: hello.epoch, deadline }),
        Err(reject) => {
            refuse(&mut stream, hello.epoch, &reject, deadline).await;
            Err(reject.local_error())
        }
    }
}

/// The client has the reply, and connects its queue pairs.
#[derive(Debug)]
pub(crate) struct ReplyReceived<S> {
    pub(crate) reply: Hello,
    pub(crate) agreed: Agreed,
    stream: S,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ReplyReceived<S> {
    /// Says that our queue pairs are connected, with those that the hello did not have, and waits until the server knows it.
    pub(crate) async fn ready(mut self, late: &[LateRail]) -> Result<S, ConnectError> {
        let bytes = frame::encode(Kind::Ready, self.epoch, |body| put_late(body, late))?;
        frame::write(&mut self.stream, &bytes, Stage::Ready, self.deadline).await?;
        let peer = Some(self.reply.epoch);
        receive(&mut self.stream, Kind::ReadyAck, Stage::ReadyAck, peer, self.deadline).await?;
        Ok(self.stream)
    }

    /// Gives up, and says why.
    pub(crate) async fn reject(mut self, reject: Reject) -> ConnectError {
        refuse(&mut self.stream, self.epoch, &reject, self.deadline).await;
        reject.local_error()
    }
}

/// A connection that has not said hello.
#[derive(Debug)]
pub(crate) struct Incoming<S> {
    stream: S,
    peer: SocketAddr,
    ticket: Ticket,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Incoming<S> {
    pub(super) fn new(stream: S, peer: SocketAddr, ticket: Ticket, deadline: Deadline) -> Self {
        Self { stream, peer, ticket, deadline }
    }

    /// The address it comes from.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Reads the hello. `epoch` is ours. A peer that breaks the format is told so, when it can understand it.
    pub(crate) async fn hello(self, epoch: u64) -> Result<Offer<S>, ConnectError> {
        let Self { mut stream, mut ticket, deadline, .. } = self;
        let stage = Stage::Hello;
        let read = receive(&mut stream, Kind::Hello, stage, None, deadline);
        let read = ticket.unless_evicted(read).await.unwrap_or(Err(ConnectError::Evicted { stage }));
        let hello =
            read.and_then(|f| Hello::decode(f.epoch, &f.body).map_err(|e| ConnectError::malformed(stage, e)));
        let error = match hello {
            Ok(hello) => return Ok(Offer { hello, stream, ticket, epoch, deadline }),
            Err(e) => e,
        };
        if let Some(reject) = refusal_of(&error) {
            ticket.unless_evicted(refuse(&mut stream, epoch, &reject, deadline)).await;
        }
        Err(error)
    }
}

/// A hello that was read: the server answers with its own, or refuses.
#[derive(Debug)]
pub(crate) struct Offer<S> {
    pub(crate) hello: Hello,
    stream: S,
    ticket: Ticket,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Offer<S> {
    /// Sends the reply, after our queue pairs are connected, and waits for the client's. The reply repeats the
    /// hello's connection id, and has at most as many queue pairs.
    pub(crate) async fn accept(self, reply: &Hello) -> Result<Accepted<S>, ConnectError> {
        check_ours(reply)?;
        let bytes = frame::encode(Kind::HelloReply, self.epoch, |b| reply.encode(b))?;
        let Self { hello, mut stream, mut ticket, epoch, deadline, .. } = self;
        let answer = async {
            frame::write(&mut stream, &bytes, Stage::HelloReply, deadline).await?;
            receive(&mut stream, Kind::Ready, Stage::Ready, Some(hello.epoch), deadline).await
        };
        let evicted = ConnectError::Evicted { stage: Stage::Ready };
        let ready = ticket.unless_evicted(answer).await.unwrap_or(Err(evicted))?;
        let late = late(&ready.body).map_err(|e| ConnectError::malformed(Stage::Ready, e))?;
        Ok(Accepted { late, stream, _ticket: ticket, epoch, deadline })
    }

    /// Refuses, and says why.
    pub(crate) async fn reject(mut self, reject: Reject) -> ConnectError {
        self.ticket.unless_evicted(refuse(&mut self.stream, self.epoch, &reject, self.deadline)).await;
        reject.local_error()
    }

    /// When the handshake has to be done: what the caller does in between ends then too.
    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Does what has to be done before the answer, until the deadline, or until this handshake is evicted.
    pub(crate) async fn prepare<T>(
        &mut self,
        work: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let stage = Stage::Hello;
        let work = self.deadline.run(stage, work);
        self.ticket.unless_evicted(work).await.unwrap_or(Err(ConnectError::Evicted { stage }))
    }
}

/// Both sides' queue pairs are connected, but for those in `late`; the client does not know it yet.
#[derive(Debug)]
pub(crate) struct Accepted<S> {
    pub(crate) late: Vec<LateRail>,
    stream: S,
    _ticket: Ticket,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Accepted<S> {
    /// Tells the client, and gives the stream back.
    pub(crate) async fn finish(mut self) -> Result<S, ConnectError> {
        send(&mut self.stream, Kind::ReadyAck, self.epoch, Stage::ReadyAck, self.deadline).await?;
        Ok(self.stream)
    }
}

/// The client's end of a stream that has served, so that the server's can follow.
pub(crate) async fn part(mut stream: impl AsyncWrite + Unpin, deadline: Deadline) {
    let ended = deadline.capped(LINGER).io(Stage::ReadyAck, stream.shutdown()).await;
    if let Err(error) = ended {
        // The server may have been quicker.
        tracing::debug!(%error, "the end of a handshake");
    }
}

/// The server's end of it: the client has it all when it has parted, or a second has passed.
pub(crate) async fn see_off(stream: impl AsyncRead + Unpin, deadline: Deadline) {
    let (mut rest, mut sink) = (stream.take(LINGER_BYTES), tokio::io::sink());
    let ended = deadline.capped(LINGER).io(Stage::ReadyAck, tokio::io::copy(&mut rest, &mut sink)).await;
    if let Err(error) = ended {
        tracing::debug!(%error, "the end of a handshake");
    }
}

/// What the peer would refuse is not sent.
fn check_ours(hello: &Hello) -> Result<(), ConnectError> {
    hello.validate().map_err(|e| ConnectError::Invalid { what: e.to_string() })
}

/// Sends a frame without fields.
async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    epoch: u64,
    stage: Stage,
    deadline: Deadline,
) -> Result<(), ConnectError> {
    let bytes = frame::encode(kind, epoch, |_| {})?;
    frame::write(stream, &bytes, stage, deadline).await
}

/// Reads a frame that must be of `kind` and, where the peer's epoch is known, of that. A refusal becomes its error.
async fn receive(
    stream: &mut (impl AsyncRead + Unpin),
    kind: Kind,
    stage: Stage,
    peer: Option<u64>,
    deadline: Deadline,
) -> Result<Frame, ConnectError> {
    let frame = frame::read(stream, stage, deadline).await?;
    if let Some(expected) = peer.filter(|e| *e != frame.epoch) {
        return Err(ConnectError::IdentityMismatch {
            expected: format!("epoch {expected:#018x}"),
            got: format!("epoch {:#018x}", frame.epoch),
        });
    }
    match frame.kind {
        k if k == kind => Ok(frame),
        // The first frame of a connection refuses nothing.
        Kind::Reject if kind != Kind::Hello => Err(match Reject::decode(&frame.body) {
            Ok(reject) => reject.remote_error(),
            Err(e) => ConnectError::malformed(stage, e),
        }),
        other => Err(ConnectError::Unexpected { stage, kind: other as u16 }),
    }
}

/// What to tell a peer whose hello failed with `e`. `None` where it would not understand, or is gone.
fn refusal_of(e: &ConnectError) -> Option<Reject> {
    match e {
        ConnectError::Version { ours, theirs } => Some(Reject::Version { ours: *ours, theirs: *theirs }),
        ConnectError::Malformed { what, .. } => Some(Reject::Malformed { what: what.clone() }),
        ConnectError::Unexpected { kind, .. } if *kind == Kind::CmRequest as u16 => {
            Some(Reject::other_bootstrap("out of band", "by a connection manager"))
        }
        ConnectError::TooLarge { .. } | ConnectError::Unexpected { .. } => {
            Some(Reject::Malformed { what: e.to_string() })
        }
        _ => None,
    }
}

/// Sends a refusal, and waits a little for the peer to read it. Failures change nothing: the connection ends.
async fn refuse(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    epoch: u64,
    reject: &Reject,
    deadline: Deadline,
) {
    let stage = Stage::HelloReply;
    let deadline = deadline.capped(LINGER);
    let result = async {
        let bytes = frame::encode(Kind::Reject, epoch, |b| reject.encode(b))?;
        frame::write(stream, &bytes, stage, deadline).await?;
        deadline.io(stage, stream.shutdown()).await?;
        // Closing with unread input would reset the connection, and the refusal could be lost.
        deadline.io(stage, tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink())).await
    };
    if let Err(e) = result.await {
        tracing::debug!(error = %e, ?reject, "a refusal may not have arrived");
    }
}
