//! The synchronisation primitives of the modules that import no tokio, in one place, so that the same code can run
//! under a model checker: with `cfg(landfall_loom)` the lock is loom's. See `ring::models` and `tests/loom`. And
//! [`guarded`], by which they call the user's code.
//!
//! The lock ignores poisoning: the data under our locks is changed by code that does not panic half-way, and a panic
//! elsewhere must not turn every later operation into another one.

pub(crate) use std::sync::Arc;

#[cfg(landfall_loom)]
use loom::sync as imp;
#[cfg(not(landfall_loom))]
use std::sync as imp;

pub(crate) use imp::MutexGuard;

/// Calls what is the user's: a waker, the drop of a buffer. A panic of it, which the panic hook has told of, ends there:
/// what comes after it is owed to others.
#[cfg(not(landfall_loom))]
pub(crate) fn guarded(f: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err() {
        tracing::error!("a waker or a buffer's owner panicked; everything else goes on");
    }
}

/// Under the model checker a panic is what it looks for.
#[cfg(landfall_loom)]
pub(crate) fn guarded(f: impl FnOnce()) {
    f();
}

/// A mutex without poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    #[cfg(not(landfall_loom))]
    pub(crate) const fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    #[cfg(landfall_loom)]
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
