//! Memory of a peer: what it shows of a region, and ranges of that. Plain data that travels in the user's messages.

use serde::{Deserialize, Serialize};

use crate::error::MemoryError;
use crate::provider::AccessFlags;

/// What a peer may do with an exposed region. Give the least that the job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    read: bool,
    write: bool,
    atomic: bool,
}

impl Access {
    /// The peer may READ.
    pub const READ: Self = Self { read: true, write: false, atomic: false };
    /// The peer may WRITE.
    pub const WRITE: Self = Self { read: false, write: true, atomic: false };
    /// The peer may READ and WRITE.
    pub const READ_WRITE: Self = Self { read: true, write: true, atomic: false };
    /// The peer may do atomics (FETCH_ADD, CMP_SWAP), on [devices that have them](crate::device::Capabilities::atomics).
    pub const ATOMIC: Self = Self { read: false, write: false, atomic: true };

    /// This and [`ATOMIC`](Self::ATOMIC).
    pub const fn with_atomics(self) -> Self {
        Self { atomic: true, ..self }
    }

    /// Whether a peer may READ.
    pub const fn allows_read(self) -> bool {
        self.read
    }

    /// Whether a peer may WRITE.
    pub const fn allows_write(self) -> bool {
        self.write
    }

    /// Whether a peer may do atomics.
    pub const fn allows_atomics(self) -> bool {
        self.atomic
    }

    /// As the provider's flags. REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE (verbs).
    pub(crate) const fn flags(self) -> AccessFlags {
        let mut flags = AccessFlags::LOCAL_WRITE;
        if self.read {
            flags = flags.union(AccessFlags::REMOTE_READ);
        }
        if self.write {
            flags = flags.union(AccessFlags::REMOTE_WRITE);
        }
        if self.atomic {
            flags = flags.union(AccessFlags::REMOTE_ATOMIC);
        }
        flags
    }
}

/// An exposed region as its owner describes it to a peer. Whoever has it, and a queue pair in the region's protection
/// domain, can do what the region's [`Access`] allows: it is a capability, not a secret kept by the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Virtual address of its first byte, in the owner's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key that goes with an access.
    pub rkey: u32,
}

/// A range of a peer's memory: the target of a WRITE or the source of a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteSlice {
    /// Virtual address of its first byte, in the owner's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key that goes with an access.
    pub rkey: u32,
}

impl RemoteRegion {
    /// `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<RemoteSlice, MemoryError> {
        let addr = range(self.addr, self.len, offset, len)?;
        Ok(RemoteSlice { addr, len, rkey: self.rkey })
    }

    /// The whole region.
    pub fn whole(&self) -> RemoteSlice {
        RemoteSlice { addr: self.addr, len: self.len, rkey: self.rkey }
    }
}

impl RemoteSlice {
    /// `len` bytes from `offset` of this range on.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<RemoteSlice, MemoryError> {
        let addr = range(self.addr, self.len, offset, len)?;
        Ok(RemoteSlice { addr, len, rkey: self.rkey })
    }
}

/// The address of `offset` when `offset..+len` is inside of `addr..+size`. A peer's description may be nonsense, so
/// the address is checked too.
fn range(addr: u64, size: u64, offset: u64, len: u64) -> Result<u64, MemoryError> {
    let error = MemoryError::OutOfRange { offset, len, size };
    let inside = offset.checked_add(len).is_some_and(|end| end <= size);
    match addr.checked_add(offset) {
        Some(at) if inside && at.checked_add(len).is_some() => Ok(at),
        _ => Err(error),
    }
}
