//! One deadline for a whole connect: every wait of its stages ends there.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::error::{ConnectError, Stage};
use crate::clock::later;

/// A point in time; the duration that the caller gave, and the address dialled, where there is one (for the error).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    after: Duration,
    to: Option<SocketAddr>,
}

impl Deadline {
    /// The deadline that lies `after` from now.
    pub(crate) fn after(after: Duration) -> Self {
        Self { at: later(Instant::now().into_std(), after).into(), after, to: None }
    }

    /// This deadline, or `cap` from now when that is earlier.
    pub(crate) fn capped(self, cap: Duration) -> Self {
        let other = Self::after(cap);
        if other.at < self.at { Self { to: self.to, ..other } } else { self }
    }

    /// An equal share of the time left for each of `parts`.
    pub(crate) fn share(self, parts: usize) -> Self {
        let share = self.left() / u32::try_from(parts.max(1)).unwrap_or(u32::MAX);
        Self { at: Instant::now() + share, ..self }
    }

    /// This deadline; its error names the address dialled.
    pub(crate) fn of(self, to: SocketAddr) -> Self {
        Self { to: Some(to), ..self }
    }

    /// The address dialled, where there is one.
    pub(crate) fn address(self) -> Option<IpAddr> {
        self.to.map(|to| to.ip())
    }

    /// The time left.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// The error of a `stage` that reached this deadline.
    pub(crate) fn timeout(self, stage: Stage) -> ConnectError {
        ConnectError::Timeout { stage, to: self.to, after: self.after }
    }

    /// Runs anything until the deadline. `None` when that has come.
    pub(crate) async fn within<T>(self, fut: impl Future<Output = T>) -> Option<T> {
        timeout_at(self.at, fut).await.ok()
    }

    /// Runs `io` until the deadline.
    pub(crate) async fn io<T>(
        self,
        stage: Stage,
        io: impl Future<Output = io::Result<T>>,
    ) -> Result<T, ConnectError> {
        match timeout_at(self.at, io).await {
            Ok(Ok(v)) => Ok(v),
            Ok(Err(source)) => Err(ConnectError::io(stage, source)),
            Err(_) => Err(self.timeout(stage)),
        }
    }

    /// Runs anything until the deadline.
    pub(crate) async fn run<T>(
        self,
        stage: Stage,
        fut: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        timeout_at(self.at, fut).await.unwrap_or(Err(self.timeout(stage)))
    }
}
