//! Threads for calls of RDMA_CM that may block (R9).
//!
//! Each runs on a thread of its own: software iWARP's connect cannot be cancelled and can take minutes, and a runtime
//! that shuts down waits for its blocking pool, but not for this. What such a call needs it owns, so that it ends in good
//! order when nobody waits for it any more.

use std::io;

use tokio::sync::oneshot;

use super::super::error::{ConnectError, Stage};

const NAME: &str = "landfall-cm";

/// The result of `call`. Dropping the future only stops waiting.
pub(super) async fn run<T: Send + 'static>(
    stage: Stage,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ConnectError> {
    let failed = |source| ConnectError::Manager { stage, what: "starting a thread for RDMA_CM", source };
    let (tx, rx) = oneshot::channel();
    std::thread::Builder::new()
        .name(NAME.to_owned())
        // The receiver is gone when nobody waits.
        .spawn(move || drop(tx.send(call())))
        .map_err(failed)?;
    rx.await.map_err(|_| failed(io::Error::other("the thread ended early")))
}

/// Runs `call` without waiting for it. An error when there is no thread, and `call` was not run.
pub(super) fn detach(call: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(NAME.to_owned()).spawn(call).map(drop)
}
