//! What a write of a GPU's memory waits for: the work of the program's streams that fills it.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::{Cuda, Gpu};
use super::error::CudaError;
use super::sys::Opaque;

/// A point in a stream of the program's: everything that was queued there before it was recorded.
///
/// [`WriteRequest::after`](crate::kv::WriteRequest::after) takes it. It is asked whether it has come, and never called back.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    event: Opaque,
}

impl Event {
    /// Records one in `stream` (a `CUstream` or `cudaStream_t`; null is the default stream) of the primary context of `device`.
    ///
    /// # Errors
    /// [`CudaError`].
    ///
    /// # Safety
    /// `stream` is one of the primary context of `device`, which the runtime API and frameworks use, and is not destroyed meanwhile.
    pub unsafe fn record(device: u32, stream: *mut c_void) -> Result<Self, CudaError> {
        // SAFETY: the caller's promise.
        unsafe { Self::record_in(&Cuda::system()?, device, stream.expose_provenance()) }
    }

    /// # Safety
    /// As for [`record`](Self::record).
    pub(crate) unsafe fn record_in(cuda: &Arc<Cuda>, device: u32, stream: Opaque) -> Result<Self, CudaError> {
        let gpu = cuda.gpu(device)?;
        let event = gpu.enter()?.driver().event()?;
        // From here on a failure drops it.
        let this = Self { gpu, event };
        this.gpu.enter()?.driver().record(this.event, stream)?;
        Ok(this)
    }

    /// Whether everything before it is done.
    ///
    /// # Errors
    /// [`CudaError`], of the event, or of the work before it.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.gpu.enter()?.driver().is_done(self.event)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(current) = self.gpu.enter() {
            current.driver().event_destroy(self.event);
        }
    }
}
