//! Host memory that is mapped already, pinned where it is: copies to and from it run beside the program, and kernels reach it.

use std::sync::Arc;

use super::context::Gpu;
use super::error::CudaError;

/// A mapping that is pinned, for every context, until this is dropped. The driver may take milliseconds for both.
#[derive(Debug)]
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    at: u64,
}

impl Pinned {
    /// Pins `at..+len`. `read_only`: it is mapped for reading, which not every driver takes.
    ///
    /// # Safety
    /// They are whole pages, and stay mapped until the value is dropped, which is after every copy that uses them.
    pub(crate) unsafe fn new(
        gpu: &Arc<Gpu>,
        at: u64,
        len: usize,
        read_only: bool,
    ) -> Result<Self, CudaError> {
        // SAFETY: by the caller's promise.
        unsafe { gpu.enter()?.driver().host_register(gpu.handle(), (at, len), read_only)? };
        Ok(Self { gpu: gpu.clone(), at })
    }

    /// On whose lane it is dropped.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(current) = self.gpu.enter() {
            current.driver().host_unregister(self.at);
        }
    }
}
