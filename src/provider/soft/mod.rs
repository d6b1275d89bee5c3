//! The soft provider: RC queue pairs over TCP, without a device. (Bodies follow.)
#![allow(dead_code, unused_variables)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{
    AccessFlags, Armed, Cqe, QpAddress, QpConnect, QpInit, QpState, RecvWr, WrChain,
};
use crate::device::{Capabilities, SoftConfig};
use crate::error::{DeviceError, MemoryError, PostError, QpError};
use crate::memory::Mapping;

#[derive(Debug)]
pub(crate) struct SoftDevice {
    caps: Capabilities,
}
#[derive(Debug)]
pub(crate) struct SoftChannel {
    fd: OwnedFd,
}
#[derive(Debug)]
pub(crate) struct SoftPd {}
#[derive(Debug)]
pub(crate) struct SoftMr {}
#[derive(Debug)]
pub(crate) struct SoftCq {}
#[derive(Debug)]
pub(crate) struct SoftQp {}

impl SoftDevice {
    pub(crate) fn open(config: &SoftConfig) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self { caps: config.profile.capabilities() }))
    }
    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.caps
    }
    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Arc<SoftPd>, DeviceError> {
        Ok(Arc::new(SoftPd {}))
    }
    pub(crate) fn create_channel(self: &Arc<Self>) -> Result<Arc<SoftChannel>, DeviceError> {
        Err(DeviceError::NoRuntime)
    }
}

impl SoftPd {
    pub(crate) fn reg_mr(
        self: &Arc<Self>,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<SoftMr, MemoryError> {
        Ok(SoftMr {})
    }
    pub(crate) fn create_qp(self: &Arc<Self>, send: &SoftCq, recv: &SoftCq, init: QpInit) -> Result<SoftQp, QpError> {
        Ok(SoftQp {})
    }
}

impl SoftMr {
    pub(crate) fn lkey(&self) -> u32 {
        0
    }
    pub(crate) fn rkey(&self) -> u32 {
        0
    }
}

impl SoftChannel {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
    pub(crate) fn drain_events(&self) -> io::Result<()> {
        Ok(())
    }
    pub(crate) fn create_cq(self: &Arc<Self>, capacity: u32) -> Result<SoftCq, DeviceError> {
        Ok(SoftCq {})
    }
}

impl SoftCq {
    pub(crate) fn poll(&self, out: &mut [Cqe]) -> io::Result<usize> {
        Ok(0)
    }
    pub(crate) fn arm(&self) -> io::Result<Armed> {
        Ok(Armed::Armed)
    }
}

impl SoftQp {
    pub(crate) fn qp_num(&self) -> u32 {
        0
    }
    pub(crate) fn address(&self) -> QpAddress {
        QpAddress::default()
    }
    pub(crate) fn connect(&self, attr: &QpConnect) -> Result<(), QpError> {
        Ok(())
    }
    pub(crate) fn post_send(&self, chain: &WrChain) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn set_error(&self) -> Result<(), QpError> {
        Ok(())
    }
    pub(crate) fn state(&self) -> QpState {
        QpState::Init
    }
}
