//! Pointers to libibverbs' objects, as `crate::raw` hands them out.

use std::ffi::c_void;

use super::{Cq, Device, Mr, Pd, Qp};

impl Device {
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        match self {
            Self::Soft(_) => None,
            Self::Verbs(d) => Some(d.as_raw()),
        }
    }
}

impl Pd {
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        match self {
            Self::Soft(_) => None,
            Self::Verbs(pd) => Some(pd.as_raw()),
        }
    }
}

impl Mr {
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        match self {
            Self::Soft(_) => None,
            Self::Verbs(mr) => mr.as_raw(),
        }
    }
}

impl Cq {
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        match self {
            Self::Soft(_) => None,
            Self::Verbs(cq) => Some(cq.as_raw()),
        }
    }
}

impl Qp {
    pub(crate) fn as_raw(&self) -> Option<*mut c_void> {
        match self {
            Self::Soft(_) => None,
            Self::Verbs(qp) => Some(qp.as_raw()),
        }
    }
}
