//! The listening side of either bootstrap: who comes in, one task each.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::bootstrap::{Chosen, Way};
use super::endpoint::Shared;
use super::handshake::{Accepted, Answered, answer};
use super::limits::ConnectRate;
#[cfg(feature = "tls")]
use crate::connect::Admission;
use crate::connect::{CmListener, ConnectError, Fault, Incoming, Knock, OobListener, Reject};

/// Where peers come in.
pub(super) struct Door {
    listener: Listener,
    chosen: Chosen,
}

enum Listener {
    Oob(OobListener),
    Cm(CmListener),
}

/// Who has come in.
enum Caller {
    Oob(Incoming<TcpStream>),
    Cm(Knock),
}

impl Door {
    pub(super) async fn open(
        shared: &Shared,
        chosen: Chosen,
        address: SocketAddr,
    ) -> Result<Self, ConnectError> {
        let listener = match chosen.way {
            Way::Oob => Listener::Oob(OobListener::bind(address).await?),
            Way::Cm => Listener::Cm(CmListener::bind(&shared.device, address).await?),
        };
        Ok(Self { listener, chosen })
    }

    /// The address, with the real port.
    pub(super) fn local_addr(&self) -> SocketAddr {
        match &self.listener {
            Listener::Oob(l) => l.local_addr(),
            Listener::Cm(l) => l.local_addr(),
        }
    }

    async fn next(&self, shared: &Shared) -> Result<Caller, ConnectError> {
        let limit = shared.config.connect_timeout;
        match &self.listener {
            Listener::Oob(l) => l.accept(limit).await.map(Caller::Oob),
            Listener::Cm(l) => l.accept(limit).await.map(Caller::Cm),
        }
    }

    /// Lets in whoever comes, until the listener fails or this is dropped.
    pub(super) async fn serve(self, shared: Arc<Shared>, channels: mpsc::Sender<Accepted>) {
        let (mut handshakes, mut rate) = (JoinSet::new(), ConnectRate::default());
        loop {
            let caller = self.next(&shared).await;
            // Those that have ended meanwhile.
            while handshakes.try_join_next().is_some() {}
            match caller {
                Ok(caller) => {
                    let limit = shared.config.limits.connects;
                    let too_often =
                        limit.filter(|most| !rate.admit(caller.peer().ip(), *most, Instant::now()));
                    let (shared, channels) = (shared.clone(), channels.clone());
                    let chosen = self.chosen.clone();
                    handshakes.spawn(async move {
                        let from = caller.peer();
                        if let Some(limit) = too_often {
                            let error = caller.turn_away(&shared, limit).await;
                            return tracing::debug!(%from, %error, "a peer was turned away");
                        }
                        match caller.answer(&shared, chosen, channels).await {
                            Ok((channel, place)) => drop(place.send(Ok(channel))),
                            // What this side lacks is for whoever runs it to mend.
                            Err(error) if error.fault() == Fault::Local => {
                                let why = error.source().map(ToString::to_string);
                                tracing::warn!(%from, %error, why, "a peer was turned away");
                            }
                            Err(error) => tracing::debug!(%from, %error, "a handshake failed"),
                        }
                    });
                }
                Err(error) => {
                    tracing::error!(%error, "the listener failed");
                    // The receiver is gone when the listener was dropped: then nobody wants to know.
                    let _ = channels.send(Err(error)).await;
                    return;
                }
            }
        }
    }
}

impl Caller {
    fn peer(&self) -> SocketAddr {
        match self {
            Self::Oob(incoming) => incoming.peer(),
            Self::Cm(knock) => knock.peer(),
        }
    }

    /// A connection manager's request is rejected by being dropped; it carries no reason.
    async fn turn_away(self, shared: &Shared, limit: u32) -> ConnectError {
        match self {
            // Words that are not TLS would say something else to its client.
            #[cfg(feature = "tls")]
            Self::Oob(_) if matches!(shared.config.admission, Admission::Tls(_)) => {
                ConnectError::TooOften { limit }
            }
            Self::Oob(incoming) => incoming.turn_away(shared.epoch, Reject::TooOften { limit }).await,
            Self::Cm(_) => ConnectError::TooOften { limit },
        }
    }

    async fn answer(
        self,
        shared: &Arc<Shared>,
        chosen: Chosen,
        channels: mpsc::Sender<Accepted>,
    ) -> Answered {
        match self {
            #[cfg(feature = "tls")]
            Self::Oob(incoming) if let Admission::Tls(tls) = &shared.config.admission => {
                let incoming = incoming.secure(tls, shared.epoch).await?;
                answer(shared, incoming, None, chosen, channels).await
            }
            Self::Oob(incoming) => answer(shared, incoming, None, chosen, channels).await,
            Self::Cm(knock) => {
                let local = knock.local();
                let incoming = knock.open(&shared.pd, shared.epoch).await?;
                answer(shared, incoming, Some(local), chosen, channels).await
            }
        }
    }
}
