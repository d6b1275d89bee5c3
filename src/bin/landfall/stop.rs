//! How a program that runs for ever is told to end: by its user, or by what supervises it.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM. The first process of a container does not end by signals that it does not handle.
pub(crate) struct Stop {
    interrupted: Signal,
    terminated: Signal,
}

impl Stop {
    /// From here on they are handled. Needs a runtime.
    pub(crate) fn watch() -> io::Result<Self> {
        Ok(Self {
            interrupted: signal(SignalKind::interrupt())?,
            terminated: signal(SignalKind::terminate())?,
        })
    }

    pub(crate) async fn told(mut self) {
        tokio::select! {
            _ = self.interrupted.recv() => {}
            _ = self.terminated.recv() => {}
        }
    }
}
