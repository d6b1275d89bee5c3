//! The first failure of a queue pair, kept for the operations that are flushed because of it (R6).

use std::sync::OnceLock;

use crate::error::OpError;
use crate::provider::WcStatus;
use crate::sync::Arc;

/// One a queue pair, shared by its send and its receive side.
#[derive(Debug, Default)]
pub(crate) struct FirstCause(OnceLock<Arc<OpError>>);

impl FirstCause {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// What failed first, once something has.
    pub(crate) fn get(&self) -> Option<&Arc<OpError>> {
        self.0.get()
    }

    /// Keeps `error` unless something had failed before.
    pub(crate) fn record(&self, error: OpError) {
        let _ = self.0.set(Arc::new(error));
    }

    /// The outcome of a request that completed with `status`. A failure other than a flush is recorded; a flush
    /// carries what was recorded.
    pub(crate) fn outcome(&self, qp_num: u32, status: WcStatus, vendor_err: u32) -> Result<(), OpError> {
        match status {
            WcStatus::Success => Ok(()),
            WcStatus::Flushed => Err(self.flushed(qp_num)),
            status => {
                let error = OpError::Status { qp_num, status, vendor_err };
                self.record(error.clone());
                Err(error)
            }
        }
    }

    /// The error of a request that was flushed, or of one that was never posted because of the failure. A device that is
    /// gone is the whole of the reason.
    pub(crate) fn flushed(&self, qp_num: u32) -> OpError {
        match self.0.get() {
            Some(cause) if matches!(**cause, OpError::DeviceGone { .. }) => (**cause).clone(),
            cause => OpError::Flushed { qp_num, cause: cause.cloned() },
        }
    }

    /// Whether what failed first is the device.
    pub(crate) fn is_device_gone(&self) -> bool {
        self.0.get().is_some_and(|cause| matches!(**cause, OpError::DeviceGone { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r6_the_first_failure_is_the_cause_of_the_flushes() {
        let first = FirstCause::new();
        assert!(matches!(first.outcome(7, WcStatus::Flushed, 0), Err(OpError::Flushed { cause: None, .. })));
        let failed = first.outcome(7, WcStatus::RemoteAccess, 5).unwrap_err();
        assert!(matches!(failed, OpError::Status { status: WcStatus::RemoteAccess, vendor_err: 5, .. }));
        first.outcome(7, WcStatus::RetryExceeded, 0).unwrap_err();
        match first.outcome(7, WcStatus::Flushed, 0).unwrap_err() {
            OpError::Flushed { cause: Some(cause), .. } => {
                assert!(matches!(*cause, OpError::Status { status: WcStatus::RemoteAccess, .. }));
            }
            other => panic!("{other:?}"),
        }
    }
}
