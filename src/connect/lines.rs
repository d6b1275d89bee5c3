//! The connection manager's connections under a set of queue pairs: their end is the peer's, or its process's.

use std::future::{Future, poll_fn};
use std::task::Poll;

use super::cm::Connection;

/// Connections that live as long as the queue pairs which they have connected. The owner drops the queue pairs first.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<Connection>);

impl Lines {
    pub(crate) fn push(&mut self, connection: Connection) {
        self.0.push(connection);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits until one of them has ended. Cancel safe.
    pub(crate) async fn any_ended(&self) {
        let mut ends: Vec<_> = self.0.iter().map(|line| Box::pin(line.disconnected())).collect();
        poll_fn(|cx| match ends.iter_mut().any(|end| end.as_mut().poll(cx).is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }
}
