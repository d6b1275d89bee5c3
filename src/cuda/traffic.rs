//! What went to and from memory of GPUs, by the path that it took.

use serde::Serialize;

/// What one path of GPU memory has carried on a queue pair, or on all of a channel's, from this side's view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PathTraffic {
    /// Payload bytes that this side sent from memory of a GPU.
    pub bytes_out: u64,
    /// Requests, or parts of them, that carried those.
    pub operations_out: u64,
    /// Payload bytes that have arrived here, from or in memory of a GPU.
    pub bytes_in: u64,
    /// Requests, or parts of them, that carried those.
    pub operations_in: u64,
}

/// The paths of GPU memory, counted separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GpuTraffic {
    /// CUDA IPC: the receiver's GPU copied from the sender's memory, in another process of this host.
    pub ipc: PathTraffic,
    /// The same where both ends are in one process, so that nothing is opened.
    pub same_process: PathTraffic,
    /// Between memory of a GPU and host memory of a peer on this host. Counted by the receiver alone where the GPU is there.
    pub host: PathTraffic,
    /// Through host memory: copied there by the sender, sent over TCP or mapped by both, and copied to the GPU by the receiver; or only one
    /// of the two, where the other end is in host memory.
    pub staged: PathTraffic,
    /// GPUDirect: a network device has read and written the memory itself. Counted where a WRITE or a READ is posted.
    pub gpudirect: PathTraffic,
    /// Calls of the driver that queued copies of what came, of all paths. A gathered copy is one, and one for its list.
    pub calls: u64,
}

impl PathTraffic {
    pub(crate) fn sent(&mut self, bytes: u64) {
        self.sent_in(bytes, 1);
    }

    pub(crate) fn sent_in(&mut self, bytes: u64, operations: u64) {
        self.bytes_out += bytes;
        self.operations_out += operations;
    }

    pub(crate) fn received(&mut self, bytes: u64) {
        self.bytes_in += bytes;
        self.operations_in += 1;
    }

    fn add(&mut self, other: &Self) {
        self.bytes_out += other.bytes_out;
        self.operations_out += other.operations_out;
        self.bytes_in += other.bytes_in;
        self.operations_in += other.operations_in;
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl GpuTraffic {
    pub(crate) fn add(&mut self, other: &Self) {
        self.ipc.add(&other.ipc);
        self.same_process.add(&other.same_process);
        self.host.add(&other.host);
        self.staged.add(&other.staged);
        self.gpudirect.add(&other.gpudirect);
        self.calls += other.calls;
    }

    /// The paths that carried something, by name.
    pub fn used(&self) -> impl Iterator<Item = (&'static str, PathTraffic)> {
        let (ipc, same, host) = (("ipc", self.ipc), ("same process", self.same_process), ("host", self.host));
        let all = [ipc, same, host, ("staging", self.staged), ("gpudirect", self.gpudirect)];
        all.into_iter().filter(|(_, traffic)| !traffic.is_empty())
    }
}
