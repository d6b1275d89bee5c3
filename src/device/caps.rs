//! What a device can do, as its driver reports it.

/// Limits and features of an opened device. Asked of the driver, never assumed from a name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Most work requests of one queue (send or receive) of a queue pair.
    pub max_qp_wr: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Most scatter/gather elements of a send work request.
    pub max_send_sge: u32,
    /// Most scatter/gather elements of a receive work request.
    pub max_recv_sge: u32,
    /// Largest payload that a post can copy (`IBV_SEND_INLINE`), bytes.
    pub max_inline: u32,
    /// Largest message, bytes.
    pub max_msg_size: u64,
    /// Largest memory region, bytes.
    pub max_mr_size: u64,
    /// READs (and atomics) that a queue pair may have outstanding.
    pub max_rd_atomic: u8,
    /// Shared receive queues; 0 where there are none. landfall never needs one.
    pub max_srq: u32,
    /// Most receives of a shared receive queue; 0 where there are none.
    pub max_srq_wr: u32,
    /// WRITE_WITH_IMM and SEND_WITH_IMM are supported.
    pub immediate: bool,
    /// FETCH_ADD and CMP_SWAP on eight bytes are supported.
    pub atomics: bool,
    /// Messages of a queue pair arrive and complete in the order in which they were posted (RC). False on SRD.
    pub ordered: bool,
    /// Every work request must be signalled (EFA).
    pub all_signaled: bool,
    /// Manual INIT→RTR→RTS works, so that an out-of-band bootstrap can be used.
    pub oob: bool,
    /// Active MTU of the port, bytes.
    pub active_mtu: u32,
}
