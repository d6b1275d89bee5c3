//! The sending part: it writes, cancels, runs out of time, loses its channel, connects again and asks what became of what was
//! in doubt.

use std::collections::VecDeque;
use std::time::Duration;

use landfall::kv::{Grant, KvChannel, KvEndpoint, TransferId, Write, WriteRequest};

use crate::arrivals::come_back;
use crate::content::{Rng, fill_for};
use crate::node::PATIENCE;
use crate::outcome::{end, resolve};
use crate::process::bad;

/// Writes in flight at once.
const AHEAD: usize = 3;
/// Channels that a sender goes through before it gives up.
const CHANNELS: u32 = 3;
/// The most blocks of a write.
const MOST: u64 = 8;

struct Sender {
    endpoint: KvEndpoint,
    rng: Rng,
    /// Tags begin with it.
    base: u64,
    next: u64,
    last: u64,
    doubts: Vec<(u64, TransferId)>,
}

pub async fn run(
    endpoint: KvEndpoint,
    seed: u64,
    sender: u64,
    transfers: u64,
    to: &str,
) -> Result<(), String> {
    let mut this = Sender {
        endpoint,
        rng: Rng::new(seed),
        base: sender << 32,
        next: 0,
        last: transfers,
        doubts: Vec::new(),
    };
    for _ in 0..CHANNELS {
        // The receiver may be dead, or stopped.
        let Ok(channel) = this.endpoint.connect(to).await else { continue };
        resolve(&channel, &mut this.doubts).await;
        this.write_all(&channel).await;
        let graceful = match tokio::time::timeout(PATIENCE, channel.close()).await {
            Ok(end) => end.is_ok(),
            Err(_) => {
                bad("a channel does not close (K5)");
                break;
            }
        };
        if this.next == this.last && (graceful || this.doubts.is_empty()) {
            break;
        }
    }
    come_back(this.endpoint.pool()).await
}

impl Sender {
    async fn write_all(&mut self, channel: &KvChannel) {
        let mut writes: VecDeque<(u64, Write)> = VecDeque::new();
        while self.next < self.last {
            let count = self.rng.range(1, MOST) as u32;
            let Some(grant) = ask(channel, count).await else { break };
            let Ok(mut source) = channel.pool().alloc(count).await else { break };
            let tag = self.base | self.next;
            self.next += 1;
            // In order, which makes one large write of neighbours, or backwards, which makes one of each block.
            let backwards = self.rng.one_in(2);
            let to = |position: u32| if backwards { count - 1 - position } else { position };
            fill_for(&mut source, tag, to);
            let pairs = (0..count).map(|position| (position, to(position)));
            let mut request = WriteRequest::new(&grant, source).pairs(pairs).tag(tag);
            if self.rng.one_in(10) {
                request = request.deadline(Duration::from_micros(self.rng.range(1, 20_000)));
            }
            let write = channel.write(request);
            if self.rng.one_in(10) {
                for _ in 0..self.rng.range(0, 10) {
                    tokio::task::yield_now().await;
                }
                // Cancelled: it may arrive or not.
                drop(write);
            } else {
                writes.push_back((tag, write));
            }
            if writes.len() >= AHEAD
                && let Some((tag, write)) = writes.pop_front()
            {
                self.doubts.extend(end(tag, write).await);
            }
        }
        for (tag, write) in writes {
            self.doubts.extend(end(tag, write).await);
        }
    }
}

/// Has the receiver grant `count` blocks. `None` when the channel has ended.
async fn ask(channel: &KvChannel, count: u32) -> Option<Grant> {
    channel.send_message(count.to_le_bytes().to_vec()).await.ok()?;
    let answer = channel.recv_message().await.ok()?;
    match Grant::from_bytes(&answer) {
        Ok(grant) => Some(grant),
        Err(error) => {
            bad(format_args!("a grant that does not decode: {error}"));
            None
        }
    }
}
