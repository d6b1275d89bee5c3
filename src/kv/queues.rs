//! One queue pair of a channel: what is posted on it, and the buffers of its control messages.
//!
//! The protocol writes through [`Outbox`] into a pending chain; [`Queue::flush`] posts the chain with one doorbell.
//! Payload never passes through here, only its addresses.

use std::io;
use std::sync::Arc;

use crate::cuda::{GpuTraffic, GpuWays};
use crate::error::{PostError, QpError};
use crate::memory::{Local, Slice};
use crate::pages::Checked;
use crate::provider::{self, QpInit, RecvWr, SendOp, Sge, WrChain};
use crate::ring::{Key, SendQueue, WrId, next_qp_generation};

use super::exposure::PoolExposure;
use super::path::QpReport;
use super::proto::{Piece, Sink, Token};

/// Payload between two completions: a part of what the protocol has in flight, so that it moves on before that is used up.
const SIGNAL: u64 = 1 << 20;
/// The same, where it has little in flight.
const OFTEN: u64 = 64 << 10;

/// No control buffer belongs to this work request.
const NO_BUFFER: u32 = u32::MAX;

/// A posted work request of ours.
#[derive(Clone, Copy, Debug)]
struct Posted {
    token: Token,
    buffer: u32,
}

/// A work request that waits for the doorbell.
#[derive(Clone, Debug)]
struct Pending {
    posted: Posted,
    op: SendOp,
    sge: Option<Sge>,
    inline: bool,
    /// What it is made of, and how many bytes that is.
    pages: Option<(Arc<Checked>, u32)>,
}

/// How many buffers a queue pair needs, and of which size; and where memory of GPUs may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueSizes {
    pub(crate) send_depth: u32,
    pub(crate) recv_depth: u32,
    pub(crate) control_bytes: usize,
    pub(crate) max_inline: u32,
    pub(crate) gpu_ways: GpuWays,
}

impl QueueSizes {
    /// Bytes of registered memory for one queue pair's control messages, both ways.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        (u64::from(self.send_depth) + u64::from(self.recv_depth)) * self.control_bytes as u64
    }

    pub(crate) fn init(&self) -> QpInit {
        QpInit {
            max_send_wr: self.send_depth,
            max_recv_wr: self.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: self.max_inline,
        }
    }
}

/// A queue pair, its accounting and its buffers.
#[derive(Debug)]
pub(crate) struct Queue {
    /// `None` once it has been destroyed.
    qp: Option<provider::Qp>,
    generation: u32,
    /// What was posted, but READs.
    sq: SendQueue<Posted>,
    /// READs, of which each completes by itself: siw completes what was posted behind a READ before it (the answer is awaited
    /// beside the send queue), so that no other completion says anything of them.
    reads: SendQueue<Posted>,
    pending: Vec<Pending>,
    chain: WrChain,
    keys: Vec<Key>,
    recv: Vec<Slice<Local>>,
    repost: Vec<RecvWr>,
    posted_recvs: u32,
    send: Vec<Slice<Local>>,
    free_send: Vec<u32>,
    max_inline: usize,
    /// A completion is asked for when this much payload was posted since the last one that was.
    signal_bytes: u64,
    /// Payload that was posted since then.
    silent_bytes: u64,
    report: QpReport,
    /// What carried its bytes, and why, once the queue pair is away.
    path: (&'static str, String),
    /// Of memory of GPUs: what those before it have carried, and it itself, once it is away.
    gpu: GpuTraffic,
}

impl Queue {
    /// Its peer reaches what `exposure` says, on a device that asks.
    pub(super) fn expose(&self, exposure: &Arc<PoolExposure>) {
        if let Some(qp) = &self.qp {
            qp.expose(exposure.clone());
        }
    }

    /// Takes a created queue pair and `sizes.buffer_bytes()` of memory, and posts every receive.
    pub(crate) fn new(
        qp: provider::Qp,
        sizes: &QueueSizes,
        ordered: bool,
        all_signaled: bool,
        mut memory: Slice<Local>,
    ) -> Result<Self, QpError> {
        let mut buffers = |count: u32| -> Vec<Slice<Local>> {
            (0..count)
                .map(|_| {
                    memory.split_to(sizes.control_bytes as u64).expect("the caller gives buffer_bytes()")
                })
                .collect()
        };
        let (recv, send) = (buffers(sizes.recv_depth), buffers(sizes.send_depth));
        let qp_num = qp.qp_num();
        let mut this = Self {
            qp: Some(qp),
            generation: next_qp_generation(),
            sq: SendQueue::new(sizes.send_depth, ordered, all_signaled),
            reads: SendQueue::new(sizes.send_depth, false, true),
            pending: Vec::with_capacity(sizes.send_depth as usize),
            chain: WrChain::default(),
            keys: Vec::with_capacity(sizes.send_depth as usize),
            free_send: (0..send.len() as u32).rev().collect(),
            repost: Vec::with_capacity(recv.len()),
            recv,
            posted_recvs: 0,
            send,
            max_inline: sizes.max_inline as usize,
            signal_bytes: SIGNAL,
            silent_bytes: 0,
            report: QpReport { qp_num, ..QpReport::default() },
            path: Default::default(),
            gpu: GpuTraffic::default(),
        };
        for slot in 0..this.recv.len() {
            this.repost(slot as u32);
        }
        this.flush_recvs().map_err(|e| QpError::Os { what: "posting receives", source: e.source })?;
        Ok(this)
    }

    /// The place of a queue pair that is to come: nothing can be posted.
    pub(crate) fn absent() -> Self {
        Self {
            qp: None,
            generation: next_qp_generation(),
            sq: SendQueue::new(0, true, false),
            reads: SendQueue::new(0, false, true),
            pending: Vec::new(),
            chain: WrChain::default(),
            keys: Vec::new(),
            recv: Vec::new(),
            repost: Vec::new(),
            posted_recvs: 0,
            send: Vec::new(),
            free_send: Vec::new(),
            max_inline: 0,
            signal_bytes: SIGNAL,
            silent_bytes: 0,
            report: QpReport::default(),
            path: Default::default(),
            gpu: GpuTraffic::default(),
        }
    }

    pub(crate) fn qp(&self) -> Option<&provider::Qp> {
        self.qp.as_ref()
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn set_peer(&mut self, peer_qp_num: u32) {
        self.report.peer_qp_num = peer_qp_num;
    }

    /// One of several rails: its completions have to come while there is still something under way, or it runs dry, and nobody
    /// sees what it achieves.
    pub(crate) fn signal_often(&mut self) {
        self.signal_bytes = OFTEN;
    }

    /// Counts on from what `before`, in whose place it comes, has carried.
    pub(crate) fn carry_on(&mut self, before: &Self) {
        let QpReport { transport, qp_num, peer_qp_num, .. } = self.report;
        self.report = QpReport { transport, qp_num, peer_qp_num, ..before.report };
        self.gpu = before.gpu_traffic();
    }

    /// What it carried. What carries it is not in there: that is asked of the queue pair.
    pub(crate) fn report(&self) -> QpReport {
        self.report
    }

    /// What went to and from memory of GPUs.
    pub(crate) fn gpu_traffic(&self) -> GpuTraffic {
        let mut all = self.gpu;
        if let Some(qp) = &self.qp {
            all.add(&qp.gpu_traffic());
        }
        all
    }

    pub(crate) fn report_ref(&self) -> &QpReport {
        &self.report
    }

    /// What carries its bytes, and why.
    pub(crate) fn path(&self) -> (&'static str, String) {
        self.qp.as_ref().map_or_else(|| self.path.clone(), provider::Qp::path)
    }

    /// Nothing is posted, so nothing can complete any more.
    pub(crate) fn is_drained(&self) -> bool {
        self.sq.is_empty() && self.reads.is_empty() && self.posted_recvs == 0
    }

    /// Work requests that the send queue can take now. Each READ takes an entry of it, too.
    fn room(&self) -> usize {
        let reads = (self.reads.depth() - self.reads.room()) as usize;
        (self.sq.room() as usize).saturating_sub(self.pending.len() + reads)
    }

    /// The bytes that receive `slot` holds. To be read before it is reposted.
    pub(crate) fn received(&mut self, slot: u32, len: u32) -> Option<&[u8]> {
        self.report.received += 1;
        self.recv.get(slot as usize)?.get(..len as usize)
    }

    /// A receive has completed.
    pub(crate) fn take_recv(&mut self) {
        self.posted_recvs = self.posted_recvs.saturating_sub(1);
    }

    /// Queues receive `slot` for posting again.
    pub(crate) fn repost(&mut self, slot: u32) {
        let buffer = self.recv[slot as usize].sge();
        let id = WrId { recv: true, key: Key { index: slot, generation: 0 }, qp_generation: self.generation };
        self.repost.push(RecvWr {
            wr_id: id.encode(),
            sge: Some(Sge { addr: buffer.addr, len: buffer.len as u32, lkey: buffer.lkey }),
        });
    }

    /// Posts the queued receives. Must come before the credits for them are given to the peer.
    pub(crate) fn flush_recvs(&mut self) -> Result<(), PostError> {
        if self.repost.is_empty() {
            return Ok(());
        }
        let Some(qp) = &self.qp else {
            self.repost.clear();
            return Ok(());
        };
        let result = qp.post_recv(&self.repost);
        self.posted_recvs += match &result {
            Ok(()) => self.repost.len(),
            Err(e) => e.index,
        } as u32;
        self.repost.clear();
        result
    }

    /// Posts the pending chain with one doorbell. Tokens of requests that could not be posted go to `unposted`.
    pub(crate) fn flush(&mut self, mut unposted: impl FnMut(Token)) -> Result<(), PostError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.chain.clear();
        self.keys.clear();
        let last = self.pending.iter().rposition(|pending| !is_read(pending.op));
        for (n, pending) in self.pending.drain(..).enumerate() {
            // `Outbox::room` counts what is pending, and there are as many numbers for READs as for all others.
            let (key, signaled) = if is_read(pending.op) {
                let key = self.reads.push(pending.posted, true).expect("room was asked for");
                // Behind those of the others.
                (Key { index: key.index + self.sq.depth(), ..key }, true)
            } else {
                let paged = pending.pages.as_ref().map(|(_, bytes)| u64::from(*bytes));
                self.silent_bytes += paged.or(pending.sge.map(|sge| sge.len.into())).unwrap_or(0);
                let much = self.silent_bytes >= self.signal_bytes;
                let signaled = self.sq.must_signal(Some(n) == last || much);
                if signaled {
                    self.silent_bytes = 0;
                }
                (self.sq.push(pending.posted, signaled).expect("room was asked for"), signaled)
            };
            self.keys.push(key);
            let id = WrId { recv: false, key, qp_generation: self.generation };
            self.chain.push(id.encode(), pending.op, pending.sge.as_slice(), signaled, pending.inline);
            if let Some((pages, _)) = pending.pages {
                self.chain.is_of(pages);
            }
        }
        let result = match &self.qp {
            Some(qp) => qp.post_send(&self.chain),
            None => Err(PostError { index: 0, source: io::ErrorKind::NotConnected.into() }),
        };
        if let Err(error) = &result {
            for &key in self.keys[error.index..].iter().rev() {
                let revoked = match key.index.checked_sub(self.sq.depth()) {
                    Some(index) => self.reads.revoke(Key { index, ..key }),
                    None => self.sq.revoke(key),
                };
                if let Some(posted) = revoked {
                    release(&mut self.free_send, posted);
                    unposted(posted.token);
                }
            }
        }
        result
    }

    /// A send completion: calls `retired` with the token of each request that it retires, and whether that one
    /// succeeded. False when it is not of this queue's outstanding requests.
    pub(crate) fn complete(&mut self, key: Key, ok: bool, mut retired: impl FnMut(Token, bool)) -> bool {
        if let Some(index) = key.index.checked_sub(self.sq.depth()) {
            return self.reads.complete(Key { index, ..key }, |posted, _| retired(posted.token, ok));
        }
        let free = &mut self.free_send;
        self.sq.complete(key, |posted, completed| {
            release(free, posted);
            // Those before it have succeeded, whatever it says itself.
            retired(posted.token, ok || !completed);
        })
    }

    /// Gives the queue pair away, to be destroyed. Nothing is posted from here on.
    pub(crate) fn take_qp(&mut self) -> Option<provider::Qp> {
        let qp = self.qp.take()?;
        self.path = qp.path();
        self.gpu.add(&qp.gpu_traffic());
        Some(qp)
    }

    /// The queue pair has been destroyed: its peer writes nothing here any more. Tokens that never completed go to `lost`.
    pub(crate) fn destroyed(&mut self, mut lost: impl FnMut(Token)) {
        let Self { sq, free_send, .. } = self;
        sq.drain(|posted| {
            release(free_send, posted);
            lost(posted.token);
        });
        self.reads.drain(|posted| lost(posted.token));
        self.posted_recvs = 0;
    }
}

fn is_read(op: SendOp) -> bool {
    matches!(op, SendOp::Read { .. })
}

fn release(free: &mut Vec<u32>, posted: Posted) {
    if posted.buffer != NO_BUFFER {
        free.push(posted.buffer);
    }
}

/// The protocol's way out: pending chains of all queue pairs of a channel.
pub(crate) struct Outbox<'a>(pub(crate) &'a mut [Queue]);

impl Sink for Outbox<'_> {
    fn room(&self, qp: usize) -> usize {
        self.0[qp].room()
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        let queue = &mut self.0[qp];
        queue.report.writes += 1;
        queue.report.bytes_written += u64::from(piece.len);
        let sge = (piece.len > 0).then_some(Sge { addr: piece.src_addr, len: piece.len, lkey: piece.lkey });
        let op = SendOp::Write { remote_addr: piece.dst_addr, rkey: piece.rkey, imm };
        let posted = Posted { token, buffer: NO_BUFFER };
        queue.pending.push(Pending { posted, op, sge, inline: false, pages: None });
    }

    fn takes_pages(&self, qp: usize, lkey: u32) -> u32 {
        self.0[qp].qp.as_ref().map_or(0, |qp| qp.takes_pages(lkey))
    }

    fn write_pages(&mut self, qp: usize, piece: &Piece, pages: Checked, imm: Option<u32>, token: Token) {
        let queue = &mut self.0[qp];
        queue.report.writes += 1;
        queue.report.bytes_written += u64::from(piece.len);
        let sge = Some(Sge { addr: piece.src_addr, len: 0, lkey: piece.lkey });
        let op = SendOp::Write { remote_addr: piece.dst_addr, rkey: piece.rkey, imm };
        let (posted, pages) = (Posted { token, buffer: NO_BUFFER }, Some((Arc::new(pages), piece.len)));
        queue.pending.push(Pending { posted, op, sge, inline: false, pages });
    }

    fn read(&mut self, qp: usize, piece: &Piece, token: Token) {
        let queue = &mut self.0[qp];
        queue.report.reads += 1;
        queue.report.bytes_read += u64::from(piece.len);
        let sge = Some(Sge { addr: piece.src_addr, len: piece.len, lkey: piece.lkey });
        let op = SendOp::Read { remote_addr: piece.dst_addr, rkey: piece.rkey };
        let posted = Posted { token, buffer: NO_BUFFER };
        queue.pending.push(Pending { posted, op, sge, inline: false, pages: None });
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        let queue = &mut self.0[qp];
        queue.report.controls += 1;
        // As many buffers as the send queue is deep, and each of its entries holds at most one.
        let buffer = queue.free_send.pop().expect("a buffer for each entry of the send queue");
        let slice = &mut queue.send[buffer as usize];
        slice[..bytes.len()].copy_from_slice(bytes);
        let at = slice.sge();
        queue.pending.push(Pending {
            posted: Posted { token, buffer },
            op: SendOp::Send { imm: None },
            sge: Some(Sge { addr: at.addr, len: bytes.len() as u32, lkey: at.lkey }),
            inline: bytes.len() <= queue.max_inline,
            pages: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k9_a_rail_that_comes_back_counts_on_from_all_that_it_had_carried() {
        let (mut before, mut queue) = (Queue::absent(), Queue::absent());
        (before.report.bytes_written, before.report.writes) = (1, 2);
        (before.report.bytes_read, before.report.reads) = (3, 4);
        (before.report.controls, before.report.received) = (5, 6);
        before.report.qp_num = 7;
        (queue.report.qp_num, queue.report.peer_qp_num) = (8, 9);
        queue.carry_on(&before);
        let QpReport {
            qp_num,
            peer_qp_num,
            bytes_written,
            writes,
            bytes_read,
            reads,
            controls,
            received,
            ..
        } = queue.report;
        assert_eq!([bytes_written, writes, bytes_read, reads, controls, received], [1, 2, 3, 4, 5, 6]);
        assert_eq!((qp_num, peer_qp_num), (8, 9), "it is another queue pair");
    }
}
