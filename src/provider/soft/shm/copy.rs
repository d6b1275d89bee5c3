//! From a peer's mapped region to registered memory: the copy that makes data land.
//!
//! The peer may write its memory at any time, also against the rules and while it is copied. Then what arrives is torn, which
//! is its own affair, as with a NIC that reads a source too late; nothing here depends on the values. See `raw_copy.rs`.
//!
//! Where both ends are in one process, source and target can be the same page by two addresses. That is defined, too: bytes of
//! the one or of the other, as after an RDMA operation over overlapping memory.
//!
//! A copy runs where the progress is made, at the speed of one core. Its pages are where their owners first touched them; the
//! copy of a peer on another NUMA node runs at the speed of the link between the nodes. Nothing is moved or bound here.

use super::super::mr::MemRange;
use super::peer_map::PeerMap;
use super::raw_copy::{self, Streams};

/// From this many bytes on, what is copied together is written past the caches: about an L2. By `benches/copy.rs`, on a core with
/// 2 MiB of L2: at 4 MiB such a copy is 1.6 × as fast as a plain one between warm buffers and 1.7 × between cold ones, at 1 MiB
/// 0.8 × and 1.6 ×. But who reads the target next finds it in memory then. Copying and reading together are 0.3 × as fast at
/// 1 MiB, 0.7 × at 4 MiB, and 1.1 to 1.3 × from 16 MiB on.
const STREAM_BYTES: u64 = 2 << 20;

/// How long the copies of safe code into the same memory are kept out at a time.
const LOCKED_BYTES: usize = 64 << 10;

/// What a copy is a part of.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::provider::soft) struct CopyHint {
    transfer: u64,
}

impl CopyHint {
    /// Part of `bytes` that are copied one after the other: all that is known to be coming. That says whether the caches will
    /// hold it; the size of a slice, or of one message of many, does not.
    pub(in crate::provider::soft) fn part_of(bytes: u64) -> Self {
        Self { transfer: bytes }
    }

    /// The caches would not hold it.
    pub(super) fn is_large(self) -> bool {
        self.transfer >= STREAM_BYTES
    }
}

/// Fills `target` from `source`, beginning at `offset` there. `None`, with nothing copied, when the source does not have those
/// bytes.
pub(in crate::provider::soft) fn copy_from(
    source: &PeerMap,
    offset: u64,
    target: MemRange<'_>,
    hint: CopyHint,
) -> Option<()> {
    let len = target.len();
    let from = source.at(offset, len as u64)?;
    let large = hint.is_large() || len as u64 >= STREAM_BYTES;
    let streams = if large { Streams::detect() } else { Streams::None };
    target.fill(LOCKED_BYTES, |at, to, n| {
        // SAFETY: `at + n` is at most `len`, and `at()` has checked `len` bytes against the mapping, which `source` keeps and
        // whose file cannot shrink. `to..+n` is a part of a live registration that is ours alone to write meanwhile (see
        // `MemRange::write`). The mapping is the kernel's choice of address, so the two do not overlap as addresses. `streams`
        // is what this processor has.
        unsafe { raw_copy::stream(from.wrapping_add(at), to, n, streams) }
    });
    Some(())
}

#[cfg(test)]
mod tests;
