//! The four frames of a connect, over any stream, in an order that the types enforce.
//!
//! Client: [`authenticate`] → [`client`] → [`ReplyReceived`] (connect the queue pairs) → [`ReplyReceived::ready`].
//! Server: [`Incoming::hello`] → [`Offer`] (check, build and connect the queue pairs) → [`Offer::accept`] →
//! [`Accepted`] (register the channel) → [`Accepted::finish`]. Dropping any of them closes the connection, and
//! nothing else is left of it (B4). The whole handshake has one deadline.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
#[cfg(feature = "tls")]
use tokio::net::TcpStream;
#[cfg(feature = "tls")]
use tokio_rustls::server::TlsStream as ServerStream;

#[cfg(feature = "tls")]
use super::admission::Tls;
use super::admission::{Admission, Binding, PeerAuth, challenge};
use super::agree::{Agreed, Role, agree};
use super::codec_rail::{late, put_late};
use super::deadline::Deadline;
use super::error::{ConnectError, Stage};
use super::frame::{Kind, MAX_BODY};
use super::framed::Framed;
use super::gate::Ticket;
use super::hello::Hello;
use super::rail::LateRail;
use super::reject::Reject;

/// How long a connection lingers for its refusal to arrive.
pub(super) const LINGER: Duration = Duration::from_secs(1);
/// How much unread input of a refused peer is taken, so that closing does not destroy the refusal on its way.
pub(super) const LINGER_BYTES: u64 = 2 * MAX_BODY as u64;

/// Whom the client wants to reach. Nothing given: whoever answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expect {
    pub(crate) epoch: Option<u64>,
    pub(crate) name: Option<String>,
}

impl Expect {
    /// Whether it is the endpoint of this name and epoch.
    pub(crate) fn check(&self, got: &str, got_epoch: u64) -> Result<(), ConnectError> {
        let wrong_epoch = self.epoch.is_some_and(|e| e != got_epoch);
        let wrong_name = self.name.as_ref().is_some_and(|n| *n != got);
        if !wrong_epoch && !wrong_name {
            return Ok(());
        }
        let name = self.name.as_deref().unwrap_or(got);
        let epoch = self.epoch.unwrap_or(got_epoch);
        Err(ConnectError::IdentityMismatch {
            expected: format!("{name:?} of epoch {epoch:#018x}"),
            got: format!("{got:?} of epoch {got_epoch:#018x}"),
        })
    }
}

/// The client's first words: shows that we may connect, as `admission` has it, and finds out who answers. `epoch` is ours.
pub(crate) async fn authenticate<S: AsyncRead + AsyncWrite + Unpin>(
    framed: Framed<S>,
    admission: &Admission,
    epoch: u64,
    deadline: Deadline,
) -> Result<Framed<S>, ConnectError> {
    match admission {
        Admission::Psk(psk) => challenge::ask(framed.into_inner(), psk, epoch, deadline).await,
        _ => Ok(framed),
    }
}

/// Sends `hello` and waits for the reply. The reply has been checked against the hello.
pub(crate) async fn client<S: AsyncRead + AsyncWrite + Unpin>(
    mut framed: Framed<S>,
    hello: &Hello,
    expect: &Expect,
    deadline: Deadline,
) -> Result<ReplyReceived<S>, ConnectError> {
    check_ours(hello)?;
    framed.send(Kind::Hello, hello.epoch, |b| hello.encode(b), Stage::Hello, deadline).await?;
    let stage = Stage::HelloReply;
    let frame = framed.receive(Kind::HelloReply, stage, deadline).await?;
    let reply = Hello::decode(frame.epoch, &frame.body).map_err(|e| ConnectError::malformed(stage, e))?;
    expect.check(&reply.name, reply.epoch)?;
    if reply.connection_id != hello.connection_id {
        return Err(ConnectError::malformed(stage, "the reply is to another connection"));
    }
    // The same number on each rail: that of the first is where a peer without rails looks.
    let offered = hello.rail_list().iter().map(|rail| rail.qps.len()).max().unwrap_or(0);
    if reply.rail_list().iter().any(|rail| rail.qps.len() > offered) {
        return Err(ConnectError::malformed(stage, "the reply has more queue pairs than were offered"));
    }
    match agree(hello, &reply, Role::Client) {
        Ok(agreed) => Ok(ReplyReceived { reply, agreed, framed, epoch: hello.epoch, deadline }),
        Err(reject) => {
            framed.refuse(hello.epoch, &reject, deadline).await;
            Err(reject.local_error())
        }
    }
}

/// The client has the reply, and connects its queue pairs.
#[derive(Debug)]
pub(crate) struct ReplyReceived<S> {
    pub(crate) reply: Hello,
    pub(crate) agreed: Agreed,
    framed: Framed<S>,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ReplyReceived<S> {
    /// Says that our queue pairs are connected, with those that the hello did not have, and waits until the server knows it.
    pub(crate) async fn ready(mut self, late: &[LateRail]) -> Result<S, ConnectError> {
        let (framed, deadline) = (&mut self.framed, self.deadline);
        framed.send(Kind::Ready, self.epoch, |body| put_late(body, late), Stage::Ready, deadline).await?;
        framed.receive(Kind::ReadyAck, Stage::ReadyAck, deadline).await?;
        Ok(self.framed.into_inner())
    }

    /// As [`Offer::binding`].
    pub(crate) fn binding(&self) -> Option<Binding> {
        self.framed.binding()
    }

    /// Gives up, and says why.
    pub(crate) async fn reject(mut self, reject: Reject) -> ConnectError {
        self.framed.refuse(self.epoch, &reject, self.deadline).await;
        reject.local_error()
    }
}

/// A connection that has not said hello.
#[derive(Debug)]
pub(crate) struct Incoming<S> {
    framed: Framed<S>,
    peer: SocketAddr,
    ticket: Ticket,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Incoming<S> {
    pub(super) fn new(stream: S, peer: SocketAddr, ticket: Ticket, deadline: Deadline) -> Self {
        Self { framed: Framed::plain(stream), peer, ticket, deadline }
    }

    /// The address it comes from.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Refuses before anything was said. `epoch` is ours.
    pub(crate) async fn turn_away(self, epoch: u64, reject: Reject) -> ConnectError {
        let Self { mut framed, mut ticket, deadline, .. } = self;
        ticket.standing().refused();
        ticket.unless_evicted(framed.refuse(epoch, &reject, deadline)).await;
        reject.local_error()
    }

    /// Reads the hello of one who may connect, as `admission` has it. `epoch` is ours. A peer that may not, or that breaks the
    /// format, is told so, when it can understand it.
    pub(crate) async fn hello(self, epoch: u64, admission: &Admission) -> Result<Offer<S>, ConnectError> {
        let Self { mut framed, mut ticket, deadline, .. } = self;
        let stage = Stage::Hello;
        let read = hear(&mut framed, epoch, admission, deadline);
        let read = ticket.unless_evicted(read).await.unwrap_or(Err(ConnectError::Evicted { stage }));
        let error = match read {
            Ok(hello) => {
                if *framed.identity() != PeerAuth::Anonymous {
                    ticket.standing().proven();
                }
                return Ok(Offer { hello, framed, ticket, epoch, deadline });
            }
            // The first bytes of TLS.
            Err(ConnectError::NotLandfall { got }) if got & 0xffff == 0x0316 => {
                challenge::mismatch(admission, "tls")
            }
            Err(e) => e,
        };
        if let Some(reject) = refusal_of(&error) {
            ticket.standing().refused();
            ticket.unless_evicted(framed.refuse(epoch, &reject, deadline)).await;
        }
        Err(error)
    }
}

#[cfg(feature = "tls")]
impl Incoming<TcpStream> {
    /// The TLS handshake, with a peer that speaks TLS and may connect. `epoch` is ours. Others are told why not.
    pub(crate) async fn secure(
        self,
        tls: &Tls,
        epoch: u64,
    ) -> Result<Incoming<ServerStream<TcpStream>>, ConnectError> {
        let Self { framed, peer, mut ticket, deadline } = self;
        let (stream, stage) = (framed.into_inner(), Stage::Tls);
        let standing = ticket.standing().clone();
        let securing = async {
            let mut first = [0];
            // A record of a TLS handshake.
            if deadline.io(stage, stream.peek(&mut first)).await? == 1 && first[0] != 0x16 {
                let mut framed = Framed::plain(stream);
                let admission = Admission::Tls(tls.clone());
                let theirs = |kind| match kind {
                    Kind::AuthStart => Err(challenge::mismatch(&admission, "psk")),
                    _ => Err(challenge::mismatch(&admission, Admission::Open.name())),
                };
                let error = match framed.first(stage, deadline, theirs).await {
                    Err(error) => error,
                    Ok(frame) => ConnectError::Unexpected { stage, kind: frame.kind as u16 },
                };
                if let Some(reject) = refusal_of(&error) {
                    standing.refused();
                    framed.refuse(epoch, &reject, deadline).await;
                }
                return Err(error);
            }
            let stream = tls.accept(stream, deadline).await?;
            let chain = stream.get_ref().1.peer_certificates();
            match tls.identity(chain) {
                Ok(identity) => {
                    standing.proven();
                    Ok(Framed::known(stream, identity))
                }
                Err(error) => {
                    if let Some(reject) = refusal_of(&error) {
                        standing.refused();
                        Framed::plain(stream).refuse(epoch, &reject, deadline).await;
                    }
                    Err(error)
                }
            }
        };
        let evicted = Err(ConnectError::Evicted { stage });
        let framed = ticket.unless_evicted(securing).await.unwrap_or(evicted)?;
        Ok(Incoming { framed, peer, ticket, deadline })
    }
}

/// Nothing is done for a peer before this has its hello.
async fn hear<S: AsyncRead + AsyncWrite + Unpin>(
    framed: &mut Framed<S>,
    epoch: u64,
    admission: &Admission,
    deadline: Deadline,
) -> Result<Hello, ConnectError> {
    let stage = Stage::Hello;
    let frame = match admission {
        Admission::Psk(psk) => {
            challenge::answer(framed, psk, epoch, deadline).await?;
            framed.receive(Kind::Hello, stage, deadline).await?
        }
        _ => {
            let limit = |kind| match kind {
                Kind::Hello => Ok(MAX_BODY),
                Kind::AuthStart => Err(challenge::mismatch(admission, "psk")),
                other => Err(ConnectError::Unexpected { stage, kind: other as u16 }),
            };
            framed.first(stage, deadline, limit).await?
        }
    };
    Hello::decode(frame.epoch, &frame.body).map_err(|e| ConnectError::malformed(stage, e))
}

/// A hello that was read: the server answers with its own, or refuses.
#[derive(Debug)]
pub(crate) struct Offer<S> {
    pub(crate) hello: Hello,
    framed: Framed<S>,
    ticket: Ticket,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Offer<S> {
    /// Sends the reply, after our queue pairs are connected, and waits for the client's. The reply repeats the
    /// hello's connection id, and has at most as many queue pairs.
    pub(crate) async fn accept(self, reply: &Hello) -> Result<Accepted<S>, ConnectError> {
        check_ours(reply)?;
        let Self { mut framed, mut ticket, epoch, deadline, .. } = self;
        let answer = async {
            let stage = Stage::HelloReply;
            framed.send(Kind::HelloReply, epoch, |b| reply.encode(b), stage, deadline).await?;
            framed.receive(Kind::Ready, Stage::Ready, deadline).await
        };
        let evicted = ConnectError::Evicted { stage: Stage::Ready };
        let ready = ticket.unless_evicted(answer).await.unwrap_or(Err(evicted))?;
        let late = late(&ready.body).map_err(|e| ConnectError::malformed(Stage::Ready, e))?;
        Ok(Accepted { late, framed, _ticket: ticket, epoch, deadline })
    }

    /// Refuses, and says why.
    pub(crate) async fn reject(mut self, reject: Reject) -> ConnectError {
        self.ticket.standing().refused();
        let refused = self.framed.refuse(self.epoch, &reject, self.deadline);
        self.ticket.unless_evicted(refused).await;
        reject.local_error()
    }

    /// Who the peer has shown to be.
    pub(crate) fn identity(&self) -> &PeerAuth {
        self.framed.identity()
    }

    /// What binds something else to this handshake, where there is a key.
    pub(crate) fn binding(&self) -> Option<Binding> {
        self.framed.binding()
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
    framed: Framed<S>,
    _ticket: Ticket,
    epoch: u64,
    deadline: Deadline,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Accepted<S> {
    /// Tells the client, and gives the stream back.
    pub(crate) async fn finish(mut self) -> Result<S, ConnectError> {
        self.framed.send(Kind::ReadyAck, self.epoch, |_| {}, Stage::ReadyAck, self.deadline).await?;
        Ok(self.framed.into_inner())
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

/// What to tell a peer whose hello failed with `e`. `None` where it would not understand, or is gone.
fn refusal_of(e: &ConnectError) -> Option<Reject> {
    match e {
        ConnectError::Version { ours, theirs } => Some(Reject::Version { ours: *ours, theirs: *theirs }),
        ConnectError::AdmissionMismatch { ours, theirs } => {
            Some(Reject::Admission { ours: ours.clone(), theirs: theirs.clone() })
        }
        ConnectError::UnknownKey { id, .. } => Some(Reject::UnknownKey { id: id.clone() }),
        ConnectError::NotAuthentic { .. } => Some(Reject::NotAuthentic),
        ConnectError::NotAdmitted { peer, .. } => Some(Reject::NotAdmitted { peer: peer.clone() }),
        ConnectError::Unsupported { what } => Some(Reject::Unsupported { what: what.clone() }),
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
