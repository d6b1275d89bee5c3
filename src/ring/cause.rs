//! The first failure of a queue pair, kept for the operations that are flushed because of it (R6).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::OpError;
use crate::provider::WcStatus;
use crate::sync::Arc;

/// One a queue pair, shared by its send and its receive side.
#[derive(Debug, Default)]
pub(crate) struct FirstCause {
    first: OnceLock<Arc<OpError>>,
    /// A connection manager watches the connection.
    managed: AtomicBool,
}

impl FirstCause {
    pub(crate) const fn new() -> Self {
        Self { first: OnceLock::new(), managed: AtomicBool::new(false) }
    }

    /// What failed first, once something has.
    pub(crate) fn get(&self) -> Option<&Arc<OpError>> {
        self.first.get()
    }

    /// Keeps `error` unless something had failed before.
    pub(crate) fn record(&self, error: OpError) {
        let _ = self.first.set(Arc::new(error));
    }

    /// From now on requests are flushed by the end of the connection, when nothing has failed.
    pub(crate) fn set_managed(&self) {
        self.managed.store(true, Ordering::Release);
    }

    /// A flush without a failure, on a queue pair that this side has not closed. The end of the connection can be seen
    /// here before the manager tells of it.
    pub(crate) fn flushed_alone(&self, qp_num: u32) -> OpError {
        if self.managed.load(Ordering::Acquire) {
            self.record(OpError::Disconnected { qp_num });
        }
        self.flushed(qp_num)
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
        match self.first.get() {
            Some(cause) if matches!(**cause, OpError::DeviceGone { .. }) => (**cause).clone(),
            cause => OpError::Flushed { qp_num, cause: cause.cloned() },
        }
    }

    /// Whether what failed first is the device.
    pub(crate) fn is_device_gone(&self) -> bool {
        self.first.get().is_some_and(|cause| matches!(**cause, OpError::DeviceGone { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r6_the_end_of_a_managed_connection_is_the_cause_when_nothing_had_failed() {
        let first = FirstCause::new();
        assert!(matches!(first.flushed_alone(7), OpError::Flushed { cause: None, .. }));
        first.set_managed();
        let OpError::Flushed { cause: Some(cause), .. } = first.flushed_alone(7) else { panic!() };
        assert!(matches!(*cause, OpError::Disconnected { qp_num: 7 }));
        let failed = FirstCause::new();
        failed.set_managed();
        failed.outcome(7, WcStatus::RetryExceeded, 0).unwrap_err();
        let OpError::Flushed { cause: Some(cause), .. } = failed.flushed_alone(7) else { panic!() };
        assert!(matches!(*cause, OpError::Status { .. }));
    }

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
