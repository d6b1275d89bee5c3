//! Without the feature: the types that the providers name, of which there are no values.

use std::sync::Arc;

use super::{CudaError, Told};
use crate::background::Lane;
use crate::pages::Pages;

#[derive(Debug)]
pub(crate) enum Gpu {}

#[derive(Debug)]
pub(crate) enum DeviceMemory {}

#[derive(Debug)]
pub(crate) enum Copier {}

#[derive(Debug)]
pub(crate) enum Flight {}

#[derive(Debug)]
pub(crate) enum PeerMemory {}

#[derive(Debug)]
pub(crate) enum Pinned {}

#[derive(Debug)]
pub(crate) enum Event {}

#[derive(Debug)]
pub(crate) enum Slot {}

#[derive(Debug)]
pub(crate) enum SlotPool {}

#[derive(Clone, Debug)]
pub(crate) enum Source {}

impl Gpu {
    pub(crate) fn lane(&self) -> &Arc<Lane> {
        match *self {}
    }

    pub(crate) fn slots_made(&self, _error: Option<&CudaError>) {
        match *self {}
    }

    pub(crate) fn why_no_slots(&self) -> Option<CudaError> {
        match *self {}
    }
}

impl DeviceMemory {
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        match *self {}
    }

    pub(crate) fn addr(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn allocation(&self) -> (u64, u64) {
        match *self {}
    }

    pub(crate) fn name(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        match *self {}
    }

    pub(crate) fn not_exportable(&self) -> Option<CudaError> {
        match *self {}
    }

    pub(crate) fn export(&self) -> Result<[u8; 64], CudaError> {
        match *self {}
    }

    #[cfg(feature = "verbs")]
    pub(crate) fn dma_buf(&self) -> Result<(std::os::fd::OwnedFd, std::ops::Range<u64>), CudaError> {
        match *self {}
    }

    pub(crate) fn flush_direct_writes(&self) -> Result<(), CudaError> {
        match *self {}
    }

    pub(crate) fn copy_in(&self, _at: u64, _bytes: &[u8]) -> Result<(), CudaError> {
        match *self {}
    }

    pub(crate) fn copy_out(&self, _at: u64, _bytes: &mut [u8]) -> Result<(), CudaError> {
        match *self {}
    }
}

impl Event {
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        match *self {}
    }
}

impl Copier {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Result<Self, CudaError> {
        match *gpu {}
    }

    pub(crate) fn prepare(gpu: &Gpu) -> Result<(), CudaError> {
        match *gpu {}
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        match *self {}
    }

    pub(crate) fn is_empty(&self) -> bool {
        match *self {}
    }

    pub(crate) fn pieces(&self) -> usize {
        match *self {}
    }

    pub(crate) fn push(&mut self, _to: u64, _from: u64, _len: u64) {
        match *self {}
    }

    pub(crate) fn push_apart(&mut self, _to: u64, _from: u64, _len: u64) {
        match *self {}
    }

    pub(crate) unsafe fn launch(&mut self, _gathers: bool) -> Result<Flight, CudaError> {
        match *self {}
    }

    pub(crate) fn takes(_pages: &Pages) -> bool {
        false
    }

    pub(crate) unsafe fn launch_pages(
        &mut self,
        _pages: &Pages,
        _to: u64,
        _from: u64,
    ) -> Result<Option<Flight>, CudaError> {
        match *self {}
    }
}

impl Flight {
    pub(crate) fn calls(&self) -> u32 {
        match *self {}
    }

    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        match *self {}
    }

    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        match *self {}
    }
}

impl Source {
    pub(crate) fn is_same(&self, _other: &Self) -> bool {
        match *self {}
    }

    pub(crate) fn is_of(&self, _gpu: &Arc<Gpu>) -> bool {
        match *self {}
    }
}

impl PeerMemory {
    pub(crate) fn new(_told: Told, _here: bool) -> Option<Self> {
        None
    }

    pub(crate) fn is_own(&self) -> bool {
        match *self {}
    }

    pub(crate) fn gpu(&mut self) -> Option<Option<Arc<Gpu>>> {
        match *self {}
    }

    pub(crate) fn at(
        &mut self,
        _gpu: &Arc<Gpu>,
        _offset: u64,
        _len: u64,
    ) -> Result<Option<(u64, Source)>, CudaError> {
        match *self {}
    }
}

impl Pinned {
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        match *self {}
    }

    pub(crate) unsafe fn new(
        gpu: &Arc<Gpu>,
        _at: u64,
        _len: usize,
        _read_only: bool,
    ) -> Result<Self, CudaError> {
        match **gpu {}
    }
}

impl SlotPool {
    pub(crate) fn of(gpu: &Arc<Gpu>) -> Arc<Self> {
        match **gpu {}
    }

    pub(crate) fn prepare(&self, _count: usize) -> Result<(), CudaError> {
        match *self {}
    }
}

impl Slot {
    pub(crate) fn take(gpu: &Arc<Gpu>) -> Result<Arc<Self>, CudaError> {
        match **gpu {}
    }

    pub(crate) fn addr(&self) -> u64 {
        match *self {}
    }
}
