//! Errors: each says what was asked, what the limit or state was, and what to do. The cause is in `source()`.

use std::io;

pub use crate::provider::WcStatus;

/// An error and its causes in one line, for a log or a terminal: errors print one level each. A cause that the text before it has told
/// already is left out.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// A device could not be listed, opened or asked for a resource.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No device of that name.
    #[error("no device named {name:?}; there are: {available}")]
    NotFound {
        /// The name asked for.
        name: String,
        /// The names that exist, comma-separated.
        available: String,
    },
    /// A configuration (argument or environment variable) does not parse.
    #[error("{what}: {got:?} is not valid: {expected}")]
    Config {
        /// The option or the environment variable.
        what: &'static str,
        /// The value found.
        got: String,
        /// What is accepted.
        expected: String,
    },
    /// A request above a limit of the device.
    #[error("{what}: asked for {asked}, the device's limit is {limit}; {fix}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// The amount asked for.
        asked: u64,
        /// The most that the device gives.
        limit: u64,
        /// How to proceed.
        fix: &'static str,
    },
    /// The device lacks the feature.
    #[error("{what} is not supported by {device}; {fix}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// The device.
        device: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The address of a soft device is not one of this host.
    #[error("the soft device cannot use the address {address}; give one of this host's addresses")]
    Bind {
        /// The address asked for.
        address: std::net::IpAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// RDMA devices need a library that cannot be loaded here.
    #[error(
        "{library} cannot be loaded ({reason}); install rdma-core's libraries (Debian and Ubuntu: apt-get install libibverbs1 librdmacm1 ibverbs-providers)"
    )]
    Library {
        /// The library.
        library: &'static str,
        /// The loader's error.
        reason: String,
    },
    /// The kernel has the device, and libibverbs has nothing that can drive it.
    #[error(
        "the kernel has {device}, but libibverbs finds no provider for it; install the provider (Debian and Ubuntu: apt-get install ibverbs-providers, or the vendor's package), and check that /dev/infiniband is there"
    )]
    NoProvider {
        /// The device.
        device: String,
    },
    /// The device is there and cannot be opened.
    #[error("{device} cannot be opened; check that this user may read and write /dev/infiniband/uverbs*")]
    Open {
        /// The device.
        device: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The device's port carries no traffic now.
    #[error(
        "port {port} of {device} is {state}; bring its network interface up, check the cable, or open another port"
    )]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: &'static str,
    },
    /// No GID of the port can be used, or not the one asked for.
    #[error("port {port} of {device}: {reason}")]
    Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What its table has, and the fix.
        reason: String,
    },
    /// The device does not let queue pairs be connected by an out-of-band exchange.
    #[error(
        "{device} cannot be connected out of band, it refuses to move a queue pair to RTS: {cause}; {fix}"
    )]
    NoManualConnect {
        /// The device.
        device: String,
        /// Why.
        cause: String,
        /// How to proceed.
        fix: String,
    },
    /// The device was taken away, or has failed as a whole.
    #[error(
        "{device} is gone: it was removed, or has failed as a whole; drop what is of it and open it again"
    )]
    DeviceGone {
        /// The device.
        device: std::sync::Arc<str>,
    },
    /// A rail cannot be had, and [`KvConfig::strict_rails`](crate::kv::KvConfig::strict_rails) asks for every one.
    #[error(
        "the rail over {device} cannot be had: {reason}; mend it, leave the device out, or do not set strict_rails"
    )]
    Rail {
        /// The device of this side.
        device: String,
        /// What failed.
        reason: String,
    },
    /// No tokio runtime where one is needed.
    #[error("no tokio runtime with I/O and time enabled here; call this inside one")]
    NoRuntime,
    /// The system refused.
    #[error("{what} failed")]
    Os {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Why memory of a GPU was not registered as a dmabuf.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmabufError {
    /// The library is older than the call.
    #[error("libibverbs has no ibv_reg_dmabuf_mr")]
    NoCall,
    /// The GPU's driver exports none.
    #[error("the GPU's driver exports none: {0}")]
    Export(crate::cuda::CudaError),
    /// The network device, or the kernel, refused it.
    #[error("the device refused it: {0}")]
    Register(io::Error),
}

/// Memory could not be allocated, mapped, registered, or addressed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A length of zero, or one that does not fit.
    #[error("a region of {asked} bytes was asked for; {fix}")]
    Length {
        /// Bytes asked for.
        asked: u64,
        /// How to proceed.
        fix: &'static str,
    },
    /// Above the device's `max_mr_size`.
    #[error(
        "a memory region of {asked} bytes was asked for, the device's max_mr_size is {limit}; register it in pieces"
    )]
    TooLarge {
        /// Bytes asked for.
        asked: u64,
        /// The device's limit.
        limit: u64,
    },
    /// `offset + len` lies outside.
    #[error("bytes {offset}..+{len} are outside of a range of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes that there are.
        size: u64,
    },
    /// The system refused to allocate or map.
    #[error("{what} of {len} bytes failed")]
    Os {
        /// The operation.
        what: &'static str,
        /// Bytes.
        len: u64,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The device refused to register (for instance, above `RLIMIT_MEMLOCK`).
    #[error("registering {len} bytes failed (RLIMIT_MEMLOCK is {memlock}); raise it: ulimit -l unlimited")]
    Register {
        /// Bytes.
        len: u64,
        /// The soft limit, as `ulimit -l` prints it.
        memlock: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The network device can be given memory of a GPU in neither way: GPUDirect is not possible here.
    #[error(
        "registering {len} bytes of GPU memory with the network device failed, as a dmabuf: {dmabuf}; and through peer memory: {peer}; either load nvidia_peermem (modprobe nvidia_peermem), or have Linux 5.12, rdma-core 34 and NVIDIA's open kernel modules; or take a soft device, which stages"
    )]
    GpuDirect {
        /// Bytes.
        len: u64,
        /// Why it is not registered as a dmabuf.
        dmabuf: DmabufError,
        /// What the device says of its address.
        #[source]
        peer: io::Error,
    },
    /// Memory of a GPU could not be allocated, found or copied.
    #[error(transparent)]
    Gpu(#[from] crate::cuda::CudaError),
    /// The device lacks the kind of access that was asked for.
    #[error("{what} is not supported by {device}; {fix}")]
    Unsupported {
        /// The access.
        what: &'static str,
        /// The device.
        device: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The device was taken away, or has failed as a whole.
    #[error(
        "{device} is gone: it was removed, or has failed as a whole; drop what is of it and open it again"
    )]
    DeviceGone {
        /// The device.
        device: std::sync::Arc<str>,
    },
    /// There is no tokio runtime here, or it went away before the blocking part had run.
    #[error("no tokio runtime here, or it is shutting down; call this inside one")]
    RuntimeGone,
}

/// A queue pair or completion queue could not be created or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QpError {
    /// A request above a limit of the device.
    #[error("{what}: asked for {asked}, the limit is {limit}; {fix}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// The amount asked for.
        asked: u64,
        /// The limit.
        limit: u64,
        /// How to proceed.
        fix: &'static str,
    },
    /// The completion queue cannot hold the completions of one more queue pair (R4).
    #[error(
        "completion queue of {capacity} entries already serves {committed}; this queue pair adds {asked} (send {send} + receive {recv}): create it with at least {needed}"
    )]
    CqTooSmall {
        /// Entries of the queue.
        capacity: u32,
        /// Entries promised to other queue pairs.
        committed: u32,
        /// Entries that this one needs.
        asked: u32,
        /// Its send queue.
        send: u32,
        /// Its receive queue.
        recv: u32,
        /// The capacity that would do.
        needed: u32,
    },
    /// The transition is not possible in this state.
    #[error("queue pair {qp_num} is in state {state}, {wanted} was asked for; {fix}")]
    State {
        /// The queue pair.
        qp_num: u32,
        /// Its state.
        state: &'static str,
        /// The transition.
        wanted: &'static str,
        /// How to proceed.
        fix: &'static str,
    },
    /// The device lacks the feature.
    #[error("{what} is not supported by {device}; {fix}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// The device.
        device: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The queue pairs of the two sides do not go together.
    #[error("{what} is {ours} here and {theirs} at the peer; {fix}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// Our side.
        ours: &'static str,
        /// The peer's side.
        theirs: &'static str,
        /// How to proceed.
        fix: &'static str,
    },
    /// The transport that was asked for does not reach the peer.
    #[error("queue pair {qp_num}: {transport} was asked for and does not reach the peer: {cause}; {fix}")]
    NoPath {
        /// The queue pair.
        qp_num: u32,
        /// The transport.
        transport: &'static str,
        /// Why it does not.
        cause: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The device does not let queue pairs be connected by an out-of-band exchange.
    #[error("queue pair {qp_num}: {what} was refused: {cause}; {fix}")]
    ManualConnect {
        /// The queue pair.
        qp_num: u32,
        /// The step that was refused.
        what: &'static str,
        /// Why.
        cause: String,
        /// How to proceed.
        fix: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The device was taken away, or has failed as a whole.
    #[error(
        "{device} is gone: it was removed, or has failed as a whole; drop what is of it and open it again"
    )]
    DeviceGone {
        /// The device.
        device: std::sync::Arc<str>,
    },
    /// The shared receive queue takes no more queue pairs.
    #[error("the shared receive queue is closed; create another one")]
    SrqClosed,
    /// The completion queue takes no more queue pairs.
    #[error("the completion queue is closed, or its runtime is gone; create another one")]
    CqClosed,
    /// The resources are of different devices.
    #[error("{what} belong to different devices; use one device for both")]
    ForeignResource {
        /// The two resources.
        what: &'static str,
    },
    /// The device refused.
    #[error("{what} failed")]
    Os {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A post was refused. Requests before `index` are posted.
#[derive(Debug, thiserror::Error)]
#[error("work request {index} of the chain was not posted")]
pub(crate) struct PostError {
    pub(crate) index: usize,
    #[source]
    pub(crate) source: io::Error,
}

/// Why an operation ended without a value.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The device completed the request with an error status: this one is the cause of what follows it.
    #[error("queue pair {qp_num}: the request completed in error: {status} (vendor code {vendor_err})")]
    Status {
        /// The queue pair.
        qp_num: u32,
        /// The device's status.
        status: WcStatus,
        /// The driver's own code.
        vendor_err: u32,
    },
    /// Flushed, because something else had put the queue pair in the error state.
    #[error("queue pair {qp_num}: flushed, the queue pair had failed before")]
    Flushed {
        /// The queue pair.
        qp_num: u32,
        /// What failed first (R6). `None` when the queue pair was closed.
        #[source]
        cause: Option<std::sync::Arc<OpError>>,
    },
    /// The connection manager's connection has ended: by this side, by the peer or its death, or with the device.
    #[error(
        "queue pair {qp_num}: disconnected; see which side ended the connection, and connect another queue pair"
    )]
    Disconnected {
        /// The queue pair.
        qp_num: u32,
    },
    /// The queue pair was closed or dropped while the operation was outstanding.
    #[error("queue pair {qp_num} was closed")]
    Closed {
        /// The queue pair.
        qp_num: u32,
    },
    /// The shared receive queue was closed or dropped, and the last queue pair that received by it is gone.
    #[error("the shared receive queue was closed")]
    SrqClosed,
    /// The local queue is at its limit (non-waiting calls only).
    #[error(
        "the {queue} queue of queue pair {qp_num} is full ({depth} outstanding); await, or use the waiting call"
    )]
    Full {
        /// The queue pair.
        qp_num: u32,
        /// `"send"` or `"receive"`.
        queue: &'static str,
        /// Its depth.
        depth: u32,
    },
    /// Refused before it was posted (R10): bounds, access or a limit.
    #[error("{what}: asked for {asked}, the limit is {limit}; {fix}")]
    Refused {
        /// The quantity.
        what: &'static str,
        /// The amount asked for.
        asked: u64,
        /// The limit.
        limit: u64,
        /// How to proceed.
        fix: &'static str,
    },
    /// Refused before it was posted (R10): the device has no such operation.
    #[error("{what} is not supported by {device}; {fix}")]
    Unsupported {
        /// The operation.
        what: &'static str,
        /// The device.
        device: String,
        /// How to proceed.
        fix: &'static str,
    },
    /// The buffer's keys mean nothing to this queue pair.
    #[error("the buffer is registered in another protection domain; register it in the queue pair's own")]
    ForeignBuffer,
    /// A send, write or read before the queue pair was connected.
    #[error("queue pair {qp_num} is not connected; connect it first (receives can be posted before)")]
    NotConnected {
        /// The queue pair.
        qp_num: u32,
    },
    /// The device refused the post.
    #[error("queue pair {qp_num}: the device refused the post: {reason}")]
    Post {
        /// The queue pair.
        qp_num: u32,
        /// The driver's error.
        reason: String,
    },
    /// Its completion queue, or the channel of that, cannot be read any more. The queue pair is destroyed.
    #[error(
        "queue pair {qp_num}: its completion queue has failed: {reason}; create the queue and the queue pair anew"
    )]
    Queue {
        /// The queue pair.
        qp_num: u32,
        /// The driver's error.
        reason: String,
    },
    /// The device reported an error of the queue pair or of its completion queue, outside of any completion. What was
    /// outstanding is flushed, with this as its cause.
    #[error("queue pair {qp_num}: the device reported {event}")]
    DeviceEvent {
        /// The queue pair.
        qp_num: u32,
        /// libibverbs' name of the event.
        event: &'static str,
    },
    /// The device was taken away, or has failed as a whole.
    #[error(
        "{device} is gone: it was removed, or has failed as a whole; drop what is of it and open it again"
    )]
    DeviceGone {
        /// The device.
        device: std::sync::Arc<str>,
    },
    /// The runtime that drove this queue has gone away.
    #[error(
        "the tokio runtime that drove this queue is gone; keep it alive until close().await has returned"
    )]
    RuntimeGone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_was_told_is_not_told_again() {
        #[derive(Debug, thiserror::Error)]
        #[error("{text}")]
        struct Told {
            text: &'static str,
            #[source]
            source: Option<Box<Told>>,
        }
        let cause = Told { text: "no route", source: None };
        let twice = Told { text: "connecting failed (no route)", source: Some(Box::new(cause)) };
        assert_eq!(chain(&twice), "connecting failed (no route)");
        let cause = Told { text: "no route", source: None };
        let once = Told { text: "connecting failed", source: Some(Box::new(cause)) };
        assert_eq!(chain(&once), "connecting failed: no route");
    }
}
