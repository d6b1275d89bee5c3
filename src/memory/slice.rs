//! Ranges of registered memory, moved by value into an operation and handed back with its result.
//!
//! The other file of `memory/` (besides `mapping.rs`) that turns an address into a pointer.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::{Arc, PoisonError};

use super::checksum::Checksum;
use super::{Exposed, Kind, Local, MrInner};
use crate::error::MemoryError;
use crate::provider;

/// A copy holds the mapping's copy lock for at most this many bytes at a time. A multiple of the checksum's stripe.
const PIECE: usize = 16 << 10;

/// Of memory of a GPU: the bytes of a copy.
const DEVICE_PIECE: usize = 256 * PIECE;

/// A range of a [`Region`](super::Region). A `Slice<Local>` is exclusive and is a `[u8]`; a `Slice<Exposed>` copies
/// in and out.
///
/// The bytes of an exposed region are no `[u8]` in safe code, since a peer may write them at any time. Its slices cannot
/// be indexed,
///
/// ```compile_fail,E0608
/// # use landfall::memory::{Exposed, Slice};
/// fn f(slice: &Slice<Exposed>) -> u8 {
///     slice[0]
/// }
/// ```
///
/// or dereferenced:
///
/// ```compile_fail,E0614
/// # use landfall::memory::{Exposed, Slice};
/// fn f(slice: &Slice<Exposed>) -> &[u8] {
///     &**slice
/// }
/// ```
///
/// Two halves of a local slice are disjoint, and can be in two operations at once:
///
/// ```
/// # use landfall::{device::Device, memory::Memory};
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pd = Device::open("soft-default")?.alloc_pd()?;
/// let mut whole = pd.register_local(Memory::anonymous(8192)).await?.into_slice();
/// let mut head = whole.split_to(4096)?;
/// (head[0], whole[0]) = (1, 2);
/// let whole = head.unsplit(whole).expect("neighbours");
/// assert_eq!((whole[0], whole[4096]), (1, 2));
/// # Ok(()) }
/// ```
pub struct Slice<K: Kind> {
    mr: Arc<MrInner>,
    /// From the start of the region.
    offset: u64,
    len: u64,
    kind: PhantomData<fn() -> K>,
}

/// Where a slice is, for a scatter/gather element. May be longer than one element can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceSge {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) lkey: u32,
}

impl<K: Kind> Slice<K> {
    /// Invariant: `offset + len <= mr.len`.
    pub(super) fn new(mr: Arc<MrInner>, offset: u64, len: u64) -> Self {
        debug_assert!(offset.checked_add(len).is_some_and(|end| end <= mr.len));
        Self { mr, offset, len, kind: PhantomData }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it starts in its region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn sge(&self) -> SliceSge {
        SliceSge { addr: self.addr(), len: self.len, lkey: self.mr.lkey() }
    }

    fn addr(&self) -> u64 {
        self.mr.addr() + self.offset
    }

    /// Whether it is memory of a GPU.
    fn is_device(&self) -> bool {
        self.mr.mapping.device_memory().is_some()
    }

    fn ptr(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.addr() as usize)
    }

    fn check(&self, at: u64, len: u64) -> Result<(), MemoryError> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(MemoryError::OutOfRange { offset: at, len, size: self.len }),
        }
    }
}

impl<K: Kind> fmt::Debug for Slice<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("offset", &self.offset).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Slice<Local> {
    /// Splits off the first `at` bytes; `self` keeps the rest.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when there are fewer, with `self` as it was.
    pub fn split_to(&mut self, at: u64) -> Result<Self, MemoryError> {
        self.check(at, 0)?;
        let head = Self::new(self.mr.clone(), self.offset, at);
        self.offset += at;
        self.len -= at;
        Ok(head)
    }

    /// Splits off what follows the first `at` bytes; `self` keeps those.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when there are fewer, with `self` as it was.
    pub fn split_off(&mut self, at: u64) -> Result<Self, MemoryError> {
        self.check(at, 0)?;
        let tail = Self::new(self.mr.clone(), self.offset + at, self.len - at);
        self.len = at;
        Ok(tail)
    }

    /// Joins `self` and `next` when `next` starts where `self` ends, in the same region.
    ///
    /// # Errors
    /// Both, as they were, when they are not neighbours in that order.
    pub fn unsplit(self, next: Self) -> Result<Self, (Self, Self)> {
        if !Arc::ptr_eq(&self.mr, &next.mr) || self.offset + self.len != next.offset {
            return Err((self, next));
        }
        let len = self.len + next.len;
        Ok(Self::new(self.mr, self.offset, len))
    }
}

impl Deref for Slice<Local> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside a mapping that `mr` keeps, is initialised (zeroed, or the user's promise), fits
        // an isize (`whole_pages`), and is exclusive to this value: a local region gives one slice, splits are
        // disjoint, and an operation owns the slice while a device may touch it.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len as usize) }
    }
}

impl DerefMut for Slice<Local> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len as usize) }
    }
}

impl Slice<Exposed> {
    /// Copies `src` to the bytes from `at` on.
    ///
    /// Copies of this process do not tear each other within 16 KiB; a peer's writes may fall in between.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], with nothing copied; [`MemoryError::Gpu`] of memory of a GPU.
    pub fn copy_in(&self, at: u64, src: &[u8]) -> Result<(), MemoryError> {
        self.check(at, src.len() as u64)?;
        if let Some(memory) = self.mr.mapping.device_memory() {
            return Ok(memory.copy_in(self.addr() + at, src)?);
        }
        let mut to = self.ptr().wrapping_add(at as usize);
        for piece in src.chunks(PIECE) {
            let _copying = self.mr.mapping.copies().write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `check` says that `to..+piece` is inside this slice; the copy lock keeps other CPU copies out,
            // and no reference to exposed memory exists in safe code. What a device or peer writes at the same time
            // is outside of the language: bytes end up as one or the other.
            unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len()) };
            to = to.wrapping_add(piece.len());
        }
        Ok(())
    }

    /// Copies the bytes from `at` on to `dst`, as many as `dst` has.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], with nothing copied; [`MemoryError::Gpu`] of memory of a GPU.
    pub fn copy_out(&self, at: u64, dst: &mut [u8]) -> Result<(), MemoryError> {
        self.check(at, dst.len() as u64)?;
        if let Some(memory) = self.mr.mapping.device_memory() {
            return Ok(memory.copy_out(self.addr() + at, dst)?);
        }
        let mut from = self.ptr().cast_const().wrapping_add(at as usize);
        for piece in dst.chunks_mut(PIECE) {
            let _copying = self.mr.mapping.copies().read().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `check` says that `from..+piece` is inside this slice; the copy lock keeps CPU writers out.
            unsafe { ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len()) };
            from = from.wrapping_add(piece.len());
        }
        Ok(())
    }

    /// The checksum of its bytes, by the function [`checksum`](super::checksum). It reads copies of small pieces, so
    /// that its answer is of bytes that were there, also while a peer writes.
    ///
    /// # Errors
    /// [`MemoryError::Gpu`], of memory of a GPU.
    pub fn checksum(&self) -> Result<u64, MemoryError> {
        let mut sum = Checksum::new();
        self.checksum_into(&mut sum)?;
        Ok(sum.finish())
    }

    /// Adds its bytes to `sum`.
    pub(crate) fn checksum_into(&self, sum: &mut Checksum) -> Result<(), MemoryError> {
        self.in_pieces(|bytes| {
            sum.update(bytes);
            Ok(())
        })
    }

    /// Hands copies of its bytes to `each`, in order. Each but the last has the same multiple of [`PIECE`] bytes.
    fn in_pieces<E: From<MemoryError>>(&self, mut each: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let (mut few, mut many) = ([0u8; PIECE], Vec::new());
        // A copy from a GPU costs as much for a few bytes as for many.
        let buf = if self.is_device() && self.len > PIECE as u64 {
            many.resize(self.len.min(DEVICE_PIECE as u64) as usize, 0);
            &mut many[..]
        } else {
            &mut few[..]
        };
        let mut at = 0;
        while at < self.len {
            let n = (self.len - at).min(buf.len() as u64) as usize;
            self.copy_out(at, &mut buf[..n])?;
            each(&buf[..n])?;
            at += n as u64;
        }
        Ok(())
    }

    /// Writes all of its bytes to `fd`, straight from the region. Blocks as `write(2)` does.
    ///
    /// # Errors
    /// The system's, after which a part may have been written: `WouldBlock` too, on a descriptor that does not block.
    pub fn write_to_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.is_device() {
            return self
                .in_pieces(|bytes| {
                    // SAFETY: `bytes` is readable while the call lasts.
                    unsafe { write_all(fd, bytes.as_ptr(), bytes.len() as u64) }.map_err(NotWritten)
                })
                .map_err(|NotWritten(e)| e);
        }
        // SAFETY: the range is this slice, whose mapping `mr` keeps; the kernel reads it.
        unsafe { write_all(fd, self.ptr(), self.len) }
    }

    /// The address of its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr()
    }

    /// Its bytes in place.
    ///
    /// # Safety
    /// It is not memory of a GPU, whose address this processor cannot reach.
    ///
    /// While the reference lives nothing writes these bytes: no peer, no operation, no `copy_in`. The protocol with
    /// the peer must say so; a registration does not.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: inside a mapping that `mr` keeps and initialised; the caller promises that nothing writes it.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len as usize) }
    }
}

/// Writes `from..+len` to `fd`.
///
/// # Safety
/// The kernel may read that.
unsafe fn write_all(fd: BorrowedFd<'_>, from: *const u8, len: u64) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let n = (len - done).min(1 << 30) as usize;
        // SAFETY: inside of what the caller promises.
        let rc = unsafe { libc::write(fd.as_raw_fd(), from.wrapping_add(done as usize).cast(), n) };
        match rc {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n if n > 0 => done += n as u64,
            _ => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
        }
    }
    Ok(())
}

/// Why bytes were not written to a descriptor: the system's reason, or the copy's.
struct NotWritten(io::Error);

impl From<MemoryError> for NotWritten {
    fn from(e: MemoryError) -> Self {
        Self(io::Error::other(e))
    }
}

impl Clone for Slice<Exposed> {
    fn clone(&self) -> Self {
        Self::new(self.mr.clone(), self.offset, self.len)
    }
}

/// A slice of either kind, as an operation holds it and a completion gives it back.
#[derive(Debug)]
pub enum AnySlice {
    /// Of a local region.
    Local(Slice<Local>),
    /// Of an exposed region.
    Exposed(Slice<Exposed>),
}

impl AnySlice {
    /// The slice, when it is of a local region.
    pub fn into_local(self) -> Option<Slice<Local>> {
        match self {
            Self::Local(s) => Some(s),
            Self::Exposed(_) => None,
        }
    }

    /// The slice, when it is of an exposed region.
    pub fn into_exposed(self) -> Option<Slice<Exposed>> {
        match self {
            Self::Local(_) => None,
            Self::Exposed(s) => Some(s),
        }
    }

    /// Whether it is registered in `pd`.
    pub(crate) fn is_of(&self, pd: &provider::Pd) -> bool {
        match self {
            Self::Local(s) => s.mr.pd.is_same(pd),
            Self::Exposed(s) => s.mr.pd.is_same(pd),
        }
    }

    /// Whether it is memory of a GPU.
    pub(crate) fn is_device(&self) -> bool {
        match self {
            Self::Local(s) => s.is_device(),
            Self::Exposed(s) => s.is_device(),
        }
    }

    pub(crate) fn sge(&self) -> SliceSge {
        match self {
            Self::Local(s) => s.sge(),
            Self::Exposed(s) => s.sge(),
        }
    }
}

impl From<Slice<Local>> for AnySlice {
    fn from(s: Slice<Local>) -> Self {
        Self::Local(s)
    }
}

impl From<Slice<Exposed>> for AnySlice {
    fn from(s: Slice<Exposed>) -> Self {
        Self::Exposed(s)
    }
}
