//! Memory of a peer on this host: opened once in a process, kept while somebody copies from it, closed after the last.

use std::sync::{Arc, OnceLock, Weak};

use super::Told;
use super::context::{Cuda, Gpu, lock};
use super::error::CudaError;
use super::memory::DeviceMemory;
use super::sys::DevicePtr;
use crate::background;

/// An allocation of another process, open in a context of this one.
#[derive(Debug)]
pub(crate) struct Opened {
    gpu: Arc<Gpu>,
    handle: [u8; 64],
    at: DevicePtr,
    len: u64,
}

impl Opened {
    fn open(gpu: &Arc<Gpu>, handle: [u8; 64]) -> Result<Arc<Self>, CudaError> {
        let key = (gpu.context(), handle);
        let mut opened = lock(&gpu.cuda().opened);
        if let Some(this) = opened.get(&key).and_then(Weak::upgrade) {
            return Ok(this);
        }
        let (at, len) = {
            let current = gpu.enter()?;
            let driver = current.driver();
            let at = driver.ipc_open(handle)?;
            match driver.address_range(at) {
                Ok((base, len)) => (at, len.saturating_sub(at - base)),
                Err(e) => {
                    driver.ipc_close(at);
                    return Err(e);
                }
            }
        };
        gpu.cuda().count_open();
        let this = Arc::new(Self { gpu: gpu.clone(), handle, at, len });
        opened.insert(key, Arc::downgrade(&this));
        Ok(this)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Under the lock, so that it is not opened again before it is closed.
        let mut opened = lock(&self.gpu.cuda().opened);
        let key = (self.gpu.context(), self.handle);
        if opened.get(&key).is_some_and(|other| other.strong_count() == 0) {
            opened.remove(&key);
        }
        if let Ok(current) = self.gpu.enter() {
            current.driver().ipc_close(self.at);
        }
    }
}

/// An allocation that a peer has lent.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    told: Told,
    /// The peer is this process.
    here: bool,
    /// The GPU that has it, once that was asked and is known.
    gpu: Option<Arc<OnceLock<Option<Arc<Gpu>>>>>,
    /// One for each context that has copied from it.
    opened: Vec<Arc<Opened>>,
}

/// What keeps a source there until a copy is over.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Opened(Arc<Opened>),
    Own(Arc<DeviceMemory>),
}

impl Source {
    /// Whether both keep the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Opened(a), Self::Opened(b)) => Arc::ptr_eq(a, b),
            (Self::Own(a), Self::Own(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Whether a kernel in the context of `gpu`, for which it was asked, may read it: opened there, which asks for access between
    /// GPUs where that is needed, or allocated there.
    pub(crate) fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        match self {
            Self::Opened(opened) => Arc::ptr_eq(&opened.gpu, gpu),
            Self::Own(memory) => Arc::ptr_eq(memory.gpu(), gpu),
        }
    }
}

impl PeerMemory {
    /// `here`: the peer is this process. `None` is for programs that know no GPUs.
    pub(crate) fn new(told: Told, here: bool) -> Option<Self> {
        Some(Self { told, here, gpu: None, opened: Vec::new() })
    }

    /// Whether the peer is this process, so that nothing is opened.
    pub(crate) fn is_own(&self) -> bool {
        self.here
    }

    /// The GPU of this process that has the memory; `None` until that is known. A driver that has to be loaded for it takes a good part
    /// of a second, which is nobody's turn.
    pub(crate) fn gpu(&mut self) -> Option<Option<Arc<Gpu>>> {
        let uuid = self.told.uuid;
        let gpu = self.gpu.get_or_insert_with(|| {
            let gpu: Arc<OnceLock<_>> = Arc::default();
            let found = gpu.clone();
            background::run_apart(move || {
                let _ = found.set(Cuda::that_has(uuid));
            });
            gpu
        });
        gpu.get().cloned()
    }

    /// The address of `offset..+len` of the allocation for copies by `gpu`. `Ok(None)` when the allocation has no such bytes.
    pub(crate) fn at(
        &mut self,
        gpu: &Arc<Gpu>,
        offset: u64,
        len: u64,
    ) -> Result<Option<(DevicePtr, Source)>, CudaError> {
        let inside = |size: u64| offset.checked_add(len).is_some_and(|end| end <= size);
        if !inside(self.told.bytes) {
            return Ok(None);
        }
        if self.here {
            // Found by its name in our own table: what the peer says of addresses counts for nothing.
            let at = self.told.base.checked_add(offset);
            let found = at.and_then(|at| Some((at, gpu.cuda().find(self.told.name, at, len)?)));
            return Ok(found.map(|(at, memory)| (at, Source::Own(memory))));
        }
        let opened = match self.opened.iter().find(|opened| Arc::ptr_eq(&opened.gpu, gpu)) {
            Some(opened) => opened.clone(),
            None => {
                let opened = Opened::open(gpu, self.told.handle)?;
                self.opened.push(opened.clone());
                opened
            }
        };
        if !inside(opened.len) {
            return Ok(None);
        }
        Ok(Some((opened.at + offset, Source::Opened(opened))))
    }
}
