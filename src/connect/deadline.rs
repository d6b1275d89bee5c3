//! One deadline for a whole connect: every wait of its stages ends there.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::error::{ConnectError, Stage};
use crate::clock::later;

/// A point in time, and the duration that the caller gave (for the error).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    /// The deadline that lies `after` from now.
    pub(crate) fn after(after: Duration) -> Self {
        Self { at: later(Instant::now().into_std(), after).into(), after }
    }

    /// This deadline, or `cap` from now when that is earlier.
    pub(crate) fn capped(self, cap: Duration) -> Self {
        let other = Self::after(cap);
        if other.at < self.at { other } else { self }
    }

    /// An equal share of the time left for each of `parts`.
    pub(crate) fn share(self, parts: usize) -> Instant {
        Instant::now() + self.left() / u32::try_from(parts.max(1)).unwrap_or(u32::MAX)
    }

    /// The time left.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// The error of a `stage` that reached this deadline.
    pub(crate) fn timeout(self, stage: Stage) -> ConnectError {
        ConnectError::Timeout { stage, after: self.after }
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
