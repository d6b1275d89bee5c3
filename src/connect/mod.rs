//! Bootstrap: how two endpoints find each other and exchange what their queue pairs need.
//!
//! Used through [`KvEndpoint::listen`](crate::kv::KvEndpoint::listen) and
//! [`KvEndpoint::connect`](crate::kv::KvEndpoint::connect); what is public here is how it fails. Queue pairs of the
//! [`ring`](crate::ring) are connected by an exchange of the user's own, see
//! [`QpEndpoint`](crate::ring::QpEndpoint), or by the connection manager, see [`cm`]. [`Admission`] says who may connect.
//!
//! Out of band (`oob`): a listener and a dial over TCP, then four frames, after two with a pre-shared key. By a connection manager (`cm_stream`): a small
//! queue pair is connected first, and the same frames run over it.
//!
//! ```text
//!   client                          server
//!   AuthStart   ─────────────────►  with a pre-shared key only: both sides show that they
//!               ◄─────────────────  AuthChallenge                hold it, and seal what follows
//!   Hello       ─────────────────►  checks it, builds its queue pairs (and connects them, out of band)
//!   connects    ◄─────────────────  HelloReply, or Reject with both values
//!   Ready       ─────────────────►  knows that the client can receive
//!   may send    ◄─────────────────  ReadyAck
//! ```
//!
//! `frame` is the framing, `hello` (with `rail`, `codec` and `codec_rail`) and `reject` are what travels, `pairing` is which
//! devices make a rail together, and `agree` what two hellos do; `framed` is a stream that carries frames, `admission` who is
//! let in and how frames are sealed then; `handshake` drives the four frames over any stream; `gate` bounds how many at once.
//! Which of two connections is kept is decided by the caller (`kv::peers`), between the steps; so are the queue pairs built.
//! [`cm`] is the connection manager, and `lines` its connections under the queue pairs of a channel. `inband`, the stream over a queue pair, and [`cm`] touch a provider; nothing else here does.

mod admission;
mod agree;
pub mod cm;
mod cm_stream;
mod codec;
mod codec_rail;
mod deadline;
mod error;
mod frame;
mod framed;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod gate;
mod handshake;
mod hello;
mod inband;
mod lines;
mod oob;
mod pairing;
mod rail;
mod reject;
#[cfg(test)]
mod tests;

pub use admission::{Admission, PeerAuth, Psk, PskError, SecretFileError};
#[cfg(feature = "tls")]
#[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
pub use admission::{Tls, TlsError};
pub use error::{ConnectError, Fault, Stage};
#[cfg(test)]
pub(crate) use frame::MAX_BODY as MAX_FRAME_BODY;
pub(crate) use inband::Inband;

pub(crate) use self::{
    admission::{Binding, TO_ITSELF},
    agree::{Agreed, AgreedRail, Role, agree, meet, path_mtu},
    cm_stream::{CmListener, Knock, dial_cm},
    codec_rail::{half, put_half, put_socket, socket},
    deadline::Deadline,
    framed::Framed,
    handshake::{Expect, Incoming, Offer, authenticate, client, part, see_off},
    hello::{Credits, Hello, HelloCaps, HelloLayout, HelloRegion, HelloShape, MAX_NAME, Notify, NotifyModes},
    lines::Lines,
    oob::{OobListener, dial},
    pairing::{Pair, pair},
    rail::{HelloRail, LateRail, MAX_RAILS},
    reject::Reject,
};
