//! A byte stream over a queue pair, for a bootstrap that has nothing else: SENDs on receives posted in advance (B5).
//!
//! The handshake runs over it as it does over a socket. It is half duplex and short, so that a small window is enough:
//! each side posts [`WINDOW`] receives of [`MESSAGE`] bytes, and a message says how many the sender of it has posted
//! again. A frame of any length passes, and nobody sends what the other has no receive for (K7).
//!
//! A message is `{ kind u8, zero u8 × 3, returned u32 }` and payload. One without payload gives receives back; the last
//! one of a direction says that its stream ends.
//!
//! Where a connection manager has connected the queue pair, its word that the peer is gone ends the stream, after
//! everything that has come.
//!
//! What it is to tokio is in `stream`. One task uses a stream at a time. It sleeps on the completion channel's descriptor, by the rules of `reactor` (R3).

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::task::spawn_blocking;

use super::cm::Connection;
use super::error::ConnectError;
use super::lines::Lines;
use crate::device::ProtectionDomain;
use crate::error::DeviceError;
use crate::memory::{Local, Memory, Slice};
use crate::provider::{self, Armed, Cq, Cqe, Qp, QpInit, RecvWr, SendOp, Sge, WcStatus, WrChain};
use crate::reactor::{self, ChannelFd};
use window::Window;

mod stream;
#[cfg(test)]
mod tests;
mod window;

/// Receives posted on each side, and sends that may be outstanding. Together within the shortest queues that there are.
const WINDOW: u32 = 8;
/// Bytes of a message.
const MESSAGE: usize = 4096;
/// Bytes before a message's payload.
const HEAD: usize = 8;
/// Marks the identifier of a receive.
const RECV: u64 = 1 << 63;
/// Rounds of polling and arming before a call gives way to other tasks (R9).
const ROUNDS: usize = 16;

/// What a message is.
const DATA: u8 = 0;
/// The last of its direction.
const END: u8 = 1;

/// The stream, or a queue pair that is going to carry one: it is connected by whoever opened it.
#[derive(Debug)]
pub(crate) struct Inband {
    // The queue pair goes first. On an RDMA device it is destroyed, and the memory deregistered, some time after the drop;
    // the buffers stay mapped until they are deregistered (R7).
    qp: Qp,
    /// Under the queue pair, and its end.
    line: Arc<Lines>,
    hung_up: Option<HungUp>,
    gone: bool,
    cq: Cq,
    events: AsyncFd<ChannelFd>,
    recv: Vec<Slice<Local>>,
    send: Vec<Slice<Local>>,
    /// Send buffers that no device reads.
    free: Vec<usize>,
    /// Payload that has come and was not read.
    unread: VecDeque<Unread>,
    window: Window,
    chain: WrChain,
    /// Our direction has ended, and the peer's.
    sent_end: bool,
    got_end: bool,
    failure: Option<Failure>,
}

/// Resolves when the connection manager says that the peer is gone.
struct HungUp(Pin<Box<dyn Future<Output = ()> + Send>>);

impl std::fmt::Debug for HungUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HungUp")
    }
}

#[derive(Debug)]
struct Unread {
    slot: usize,
    at: usize,
    end: usize,
}

#[derive(Debug)]
struct Failure {
    kind: io::ErrorKind,
    words: String,
}

impl Inband {
    /// A queue pair with a queue, memory and a protection domain of its own on the device of `pd`, with every receive posted, which
    /// is not connected. Whoever will be at the other end has shown nothing yet: the keys of `pd` open nothing to it.
    pub(crate) async fn open(pd: &ProtectionDomain) -> Result<Self, ConnectError> {
        let pd = &pd.device().alloc_pd().map_err(ConnectError::resources)?;
        let half = u64::from(WINDOW) * MESSAGE as u64;
        let mut memory = pd
            .register_local(Memory::anonymous(2 * half))
            .await
            .map_err(ConnectError::resources)?
            .into_slice();
        let mut buffers = || -> Vec<Slice<Local>> {
            let mut next = || memory.split_to(MESSAGE as u64).expect("as much as both halves need");
            (0..WINDOW).map(|_| next()).collect()
        };
        let (recv, send) = (buffers(), buffers());
        // A driver may take its time (R9).
        let pd = pd.clone();
        let (channel, cq, qp) = match spawn_blocking(move || create(&pd)).await {
            Ok(created) => created?,
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            // The runtime was shut down before this had run.
            Err(_) => return Err(ConnectError::resources(DeviceError::NoRuntime)),
        };
        let events = reactor::watch(&channel).map_err(ConnectError::resources)?;
        let this = Self {
            qp,
            line: Arc::default(),
            hung_up: None,
            gone: false,
            cq,
            events,
            recv,
            free: (0..send.len()).collect(),
            send,
            unread: VecDeque::new(),
            window: Window::new(WINDOW),
            chain: WrChain::default(),
            sent_end: false,
            got_end: false,
            failure: None,
        };
        for slot in 0..this.recv.len() {
            this.post_recv(slot).map_err(ConnectError::resources)?;
        }
        Ok(this)
    }

    /// The queue pair, to be connected.
    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// The connection manager's connection of the queue pair.
    pub(crate) fn attach(&mut self, connection: Connection) {
        let mut line = Lines::default();
        line.push(connection);
        self.line = Arc::new(line);
        let line = self.line.clone();
        self.hung_up = Some(HungUp(Box::pin(async move { line.any_ended().await })));
    }

    fn post_recv(&self, slot: usize) -> io::Result<()> {
        let at = self.recv[slot].sge();
        let sge = Some(Sge { addr: at.addr, len: at.len as u32, lkey: at.lkey });
        self.qp.post_recv(&[RecvWr { wr_id: RECV | slot as u64, sge }]).map_err(|e| e.source)
    }

    /// Posts a message. The caller has looked at the window, and that a buffer is free.
    fn post(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let slot = self.free.pop().ok_or(io::ErrorKind::WouldBlock)?;
        let buffer = &mut self.send[slot];
        buffer[..HEAD].copy_from_slice(&head(kind, self.window.report()));
        buffer[HEAD..HEAD + payload.len()].copy_from_slice(payload);
        let at = buffer.sge();
        let sge = Sge { addr: at.addr, len: (HEAD + payload.len()) as u32, lkey: at.lkey };
        self.chain.clear();
        self.chain.push(slot as u64, SendOp::Send { imm: None }, &[sge], true, false);
        self.window.on_sent();
        let posted = self.qp.post_send(&self.chain).map_err(|e| e.source);
        if let Err(error) = &posted {
            self.fail(error.kind(), format!("posting a message: {error}"));
        }
        posted
    }

    /// The first failure counts, except that a flush only says that there was one.
    fn fail(&mut self, kind: io::ErrorKind, words: String) {
        if self.failure.as_ref().is_none_or(|f| f.kind == io::ErrorKind::ConnectionReset) {
            self.failure = Some(Failure { kind, words });
        }
    }

    fn error(&self) -> Option<io::Error> {
        self.failure.as_ref().map(|f| io::Error::new(f.kind, f.words.clone()))
    }

    fn may_send(&self) -> bool {
        !self.free.is_empty() && self.window.may_send()
    }

    /// Takes what has completed. True if there was something.
    fn take(&mut self) -> bool {
        let mut cqes = [Cqe::default(); 2 * WINDOW as usize];
        let taken = match self.cq.poll(&mut cqes) {
            Ok(taken) => taken,
            Err(error) => {
                self.fail(error.kind(), format!("polling the completion queue: {error}"));
                return true;
            }
        };
        for cqe in &cqes[..taken] {
            self.completed(cqe);
        }
        if self.failure.is_none() && self.window.must_report() && !self.free.is_empty() {
            // Its failure is kept, and the next call reports it.
            let _ = self.post(DATA, &[]);
        }
        taken > 0
    }

    fn completed(&mut self, cqe: &Cqe) {
        let slot = (cqe.wr_id & !RECV) as usize;
        let is_recv = cqe.wr_id & RECV != 0;
        if cqe.status != WcStatus::Success {
            return self.fail(kind_of(cqe.status), format!("queue pair {}: {}", cqe.qp_num, cqe.status));
        }
        if !is_recv {
            self.free.push(slot);
            return;
        }
        if let Err(words) = self.received(slot, cqe.byte_len as usize) {
            self.fail(io::ErrorKind::InvalidData, words.to_owned());
        }
    }

    /// A message has come into receive `slot`.
    fn received(&mut self, slot: usize, len: usize) -> Result<(), &'static str> {
        let message = self.recv.get(slot).and_then(|r| r.get(..len)).ok_or("a completion of no receive")?;
        let head = message.first_chunk::<HEAD>().ok_or("a message without a head")?;
        let [kind, _, _, _, returned @ ..] = *head;
        if kind != DATA && kind != END {
            return Err("a message of an unknown kind");
        }
        self.window.on_returned(u32::from_le_bytes(returned))?;
        let has_payload = len > HEAD;
        if has_payload && self.got_end {
            return Err("a message after the last one");
        }
        self.got_end |= kind == END;
        if has_payload {
            self.unread.push_back(Unread { slot, at: HEAD, end: len });
            return Ok(());
        }
        self.repost(slot);
        Ok(())
    }

    /// The receive is free for the peer's next message.
    fn repost(&mut self, slot: usize) {
        match self.post_recv(slot) {
            Ok(()) => self.window.on_reposted(),
            Err(error) => self.fail(error.kind(), format!("posting a receive: {error}")),
        }
    }

    /// Ready after something has come; otherwise the queue is empty and armed, and the task is woken.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut armed = false;
        for _ in 0..ROUNDS {
            if self.take() {
                return Poll::Ready(());
            }
            // Poll, arm, poll again. On a software transport the second poll may have stopped in the middle of I/O that
            // raises no event any more; arming once more asks for that too.
            match self.cq.arm() {
                Ok(Armed::Armed) if !armed => {
                    armed = true;
                    continue;
                }
                Ok(Armed::Armed) => {}
                Ok(Armed::More) => break,
                Err(error) => {
                    self.fail(error.kind(), format!("arming the completion queue: {error}"));
                    return Poll::Ready(());
                }
            }
            if let Some(hung_up) = &mut self.hung_up
                && hung_up.0.as_mut().poll(cx).is_ready()
            {
                // What has come before that is taken first.
                (self.hung_up, self.gone, armed) = (None, true, false);
                continue;
            }
            if self.gone {
                self.fail(io::ErrorKind::ConnectionReset, "the peer has disconnected".to_owned());
                return Poll::Ready(());
            }
            let drained = match ready!(self.events.poll_read_ready(cx)) {
                Ok(mut guard) => {
                    let drained = self.events.get_ref().channel().drain_events();
                    // An edge that came since is a newer readiness, which this does not touch.
                    guard.clear_ready();
                    drained
                }
                Err(error) => Err(error),
            };
            if let Err(error) = drained {
                self.fail(error.kind(), format!("the completion channel: {error}"));
                return Poll::Ready(());
            }
            armed = false;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// May block.
fn create(pd: &ProtectionDomain) -> Result<(provider::Channel, Cq, Qp), ConnectError> {
    let channel = pd.device().provider().create_channel().map_err(ConnectError::resources)?;
    let cq = channel.create_cq(2 * WINDOW).map_err(ConnectError::resources)?;
    let init =
        QpInit { max_send_wr: WINDOW, max_recv_wr: WINDOW, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let qp = pd.provider().create_qp(&cq, &cq, init).map_err(ConnectError::resources)?;
    Ok((channel, cq, qp))
}

fn head(kind: u8, returned: u32) -> [u8; HEAD] {
    let [a, b, c, d] = returned.to_le_bytes();
    [kind, 0, 0, 0, a, b, c, d]
}

fn kind_of(status: WcStatus) -> io::ErrorKind {
    match status {
        // The peer's side of the connection is gone.
        WcStatus::Flushed => io::ErrorKind::ConnectionReset,
        WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded => io::ErrorKind::TimedOut,
        WcStatus::LocalLength => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    }
}
