//! The synchronisation primitives of the modules that import no tokio, in one place, so that the same code can run
//! under a model checker (`cfg(landfall_loom)` is reserved for that).
//!
//! The lock ignores poisoning: the data under our locks is changed by code that does not panic half-way, and a panic
//! elsewhere must not turn every later operation into another one.

use std::sync::{MutexGuard, PoisonError, TryLockError};

pub(crate) use std::sync::Arc;

/// A mutex without poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
