//! Every size and bound of the engine, in one place.

use std::time::Duration;

/// Descriptors of one frame at most.
pub(super) const MAX_DESCS: usize = 64;
/// Payload of one frame at most: how long a response or an acknowledgement may wait behind data.
pub(super) const FRAME_BYTES: usize = 512 << 10;
/// Frames that are put together while a GPU copies their payload to slots, the one that is sent among them.
pub(super) const FRAMES_AHEAD: usize = 4;
/// Slots that are made when memory of a GPU is registered: for those frames, and as many that come.
pub(super) const SLOTS_AT_HAND: usize = 8;
/// Slots of a connection over shared memory, where memory of GPUs is staged: pieces of this size reach what a GPU copies to and from pinned
/// memory, and so many keep both GPUs copying while each side hears of the other.
pub(super) const SHARED_SLOT_BYTES: usize = 1 << 20;
pub(super) const SHARED_SLOTS: usize = 32;
/// As much of it is queued together by the receiver, at most: what is queued together is given back together.
pub(super) const SHARED_FLIGHT: u64 = 4 << 20;
/// Payload of one segment of a message at most, so that messages interleave.
pub(super) const SEGMENT_BYTES: usize = 256 << 10;
/// The same where a profile reorders: small, so that much interleaves.
pub(super) const SEGMENT_BYTES_UNORDERED: usize = 16 << 10;
/// Pieces of memory of one frame at most (plus one for the header block).
pub(super) const MAX_PIECES: usize = 126;
/// Elements of one gathered read or write.
pub(super) const MAX_IOVECS: usize = 128;
/// Where headers, and the few payload bytes that come with them, are received.
pub(super) const STAGE_BYTES: usize = 8 << 10;

/// What a post sends in the caller's thread.
pub(super) const DOORBELL_BYTES: usize = 256 << 10;
/// What one progress slice sends, and receives, on one queue pair.
pub(super) const QP_SLICE_BYTES: usize = 512 << 10;
/// When a progress slice ends.
pub(super) const SLICE_BYTES: usize = 1 << 20;
/// Up to this many queue pairs, a slice asks each socket directly instead of epoll.
pub(super) const DIRECT_QPS: usize = 4;

/// Connections that a listener keeps before they are accepted: strangers must not keep the peer out.
pub(super) const LISTEN_BACKLOG: i32 = 256;
/// Connections to a listener that have not shown who they are yet.
pub(super) const MAX_STRANGERS: usize = 16;
/// Messages in assembly at a receiver that reorders.
pub(super) const MAX_OPEN: usize = 512;
/// Bytes discarded while the last words of a failed connection travel.
pub(super) const DRAIN_BYTES: usize = 64 << 20;

/// Socket buffers. The system's limits apply.
pub(super) const SOCKET_BUFFER: usize = 4 << 20;
/// On one host, bbr paces a stream to about half of what reno does.
pub(super) const LOOPBACK_CONGESTION: &[u8] = b"reno";
/// A time-out of a device counts lost acknowledgements of a NIC. Here the peer's process has to read, so a shorter
/// one would take a busy peer for a dead one.
pub(super) const MIN_PEER_TIMEOUT: Duration = Duration::from_secs(3);

/// An unordered profile holds back one message in this many...
pub(super) const HOLD_ONE_IN: u64 = 4;
/// ...for at most this many progress slices.
pub(super) const HOLD_SLICES: u64 = 2;
/// ...and takes the next segment from one of this many messages.
pub(super) const PICK_WINDOW: usize = 32;

/// A rail whose pace is limited sends this often a second, if it has much to send.
pub(super) const PACED_SENDS_A_SECOND: u64 = 100;

/// Shared memory: bytes of the ring of one direction. A power of two, more than the staging buffer and a frame's descriptors. Tables of as
/// many pages as are copied at a time have room: it is given back when they are copied.
pub(super) const RING_BYTES: usize = 128 << 10;
/// Of the payload that a peer has at hand, this much is copied before it hears of it, or so many messages: about half of what a
/// send queue holds, so that it goes on posting meanwhile.
pub(super) const ACK_BYTES: u64 = 2 << 20;
pub(super) const ACK_MESSAGES: u32 = 128;
/// With less than this under way, what is posted next is not a part of what was before.
pub(super) const PAUSE_BYTES: u64 = 64 << 10;
/// Payload up to this size rides in the ring, which costs a copy more and looks up nothing.
pub(super) const INLINE_BYTES: u32 = 1 << 10;
/// What a reference to memory of a GPU counts in a turn, whatever it refers to: the GPU copies, not this thread.
pub(super) const FAR_BYTES: usize = 256;
/// Memfds of the peer that a connection keeps mapped.
pub(super) const LENT_BY_PEER: usize = 4096;
/// Their bytes, which cost address space: a peer can say any size.
pub(super) const LENT_BYTES: u64 = 4 << 40;
/// Messages taken from the socket beside the rings in one turn.
pub(super) const WORDS_A_TURN: usize = 64;
/// A poller that never sleeps asks once in this many slices whether the kernel has something to say of a peer in shared memory,
/// its death above all.
pub(super) const LOOKS_A_SYSTEM_CALL: usize = 256;
