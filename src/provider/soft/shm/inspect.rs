//! For tests: what a connection has done, and a moment in the middle of a copy.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::copy::CopyHint;
use crate::provider::Qp;

type Hook = Box<dyn FnOnce()>;

thread_local! {
    static AFTER_COPY: RefCell<Option<Hook>> = const { RefCell::new(None) };
    static TWO_PROCESSES: Cell<bool> = const { Cell::new(false) };
    static STREAMED: Cell<u64> = const { Cell::new(0) };
}

/// Runs `hook` on this thread between the next copy and the look at the peer. What it has given is in the cell then.
pub(in crate::provider::soft) fn after_next_copy<T: 'static>(
    hook: impl FnOnce() -> T + 'static,
) -> Rc<RefCell<Option<T>>> {
    let given = Rc::new(RefCell::new(None));
    let to = given.clone();
    AFTER_COPY.set(Some(Box::new(move || *to.borrow_mut() = Some(hook()))));
    given
}

/// Whether connections that this thread makes take their peer for another process.
pub(super) fn plays_two_processes() -> bool {
    TWO_PROCESSES.get()
}

/// See [`plays_two_processes`].
#[cfg(feature = "cuda")]
pub(in crate::provider::soft) fn play_two_processes() {
    TWO_PROCESSES.set(true);
}

/// Bytes that this thread has copied past the caches, since it was last asked.
pub(in crate::provider::soft) fn streamed() -> u64 {
    STREAMED.take()
}

/// A copy of so many bytes has been made.
pub(super) fn copied(bytes: u32, hint: CopyHint) {
    if hint.is_large() {
        STREAMED.set(STREAMED.get() + u64::from(bytes));
    }
    if let Some(hook) = AFTER_COPY.take() {
        hook();
    }
}

/// Wake-ups that a queue pair has sent to its peer.
pub(in crate::provider::soft) fn wakes(qp: &Qp) -> u64 {
    match qp {
        Qp::Soft(qp) => qp.inspect(|qp| qp.link.shm().map_or(0, |link| link.wakes())),
        #[cfg(feature = "verbs")]
        Qp::Verbs(_) => 0,
    }
}

/// Whether the peer of a queue pair may still copy from memory of `key`.
#[cfg(feature = "cuda")]
pub(in crate::provider::soft) fn lends(qp: &Qp, key: u32) -> bool {
    match qp {
        Qp::Soft(qp) => qp.inspect(|qp| qp.link.shm().is_some_and(|link| link.rings().lends(key))),
        #[cfg(feature = "verbs")]
        Qp::Verbs(_) => false,
    }
}

/// Memfds of its peer that a queue pair keeps.
pub(in crate::provider::soft) fn lent_to_us(qp: &Qp) -> usize {
    match qp {
        Qp::Soft(qp) => qp.inspect(|qp| qp.link.shm().map_or(0, |link| link.known_memfds())),
        #[cfg(feature = "verbs")]
        Qp::Verbs(_) => 0,
    }
}
