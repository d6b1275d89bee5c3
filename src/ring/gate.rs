//! A gate that opens once and stays open.

use tokio::sync::Semaphore;

#[derive(Debug)]
pub(crate) struct Gate(Semaphore);

impl Gate {
    pub(crate) fn new() -> Self {
        Self(Semaphore::new(0))
    }

    /// Lets everybody through, also who comes later.
    pub(crate) fn open(&self) {
        self.0.close();
    }

    pub(crate) async fn wait(&self) {
        // A semaphore without permits: this ends, with an error, when it is closed.
        let _ = self.0.acquire().await;
    }
}
