//! One channel in use, both ways: grants for what the peer asks, checks of what comes, and operations of the table, several at once.
//!
//! Messages: `ASK id count` is answered by `GRANT id bytes`; `TEXT number bytes` is there to be checked. Numbers are little-endian.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use landfall::kv::{Grant, KvChannel, KvEndpoint, TransferId};
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinSet;

use crate::arrivals::{check, take};
use crate::content::Rng;
use crate::node::PATIENCE;
use crate::operations::operate;
use crate::outcome::resolve;
use crate::process::{bad, say};

/// Operations at once on each side of a channel.
const AT_ONCE: usize = 4;

const ASK: u8 = 1;
const GRANT: u8 = 2;
const TEXT: u8 = 3;

/// An endpoint from its start to the end of the lap, or to its death.
pub struct Life {
    endpoint: KvEndpoint,
    number: u64,
    rng: RefCell<Rng>,
    stopping: Cell<bool>,
    next: Cell<u64>,
    /// By the peer's epoch: what no channel to it has resolved yet.
    doubts: RefCell<HashMap<u64, Vec<(u64, TransferId)>>>,
}

impl Life {
    pub fn new(endpoint: KvEndpoint, number: u64, seed: u64) -> Self {
        Self {
            endpoint,
            number,
            rng: RefCell::new(Rng::new(seed)),
            stopping: Cell::new(false),
            next: Cell::new(0),
            doubts: RefCell::default(),
        }
    }

    pub fn endpoint(&self) -> &KvEndpoint {
        &self.endpoint
    }

    pub fn draw(&self) -> u64 {
        self.rng.borrow_mut().next()
    }

    pub fn stop(&self) {
        self.stopping.set(true);
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }
}

/// The tag of a transfer: from which life to which, its number there, and its blocks.
pub mod tag {
    pub fn of(from: u64, to: u64, number: u64, blocks: u32) -> u64 {
        (from & 0xffff) << 48 | (to & 0xffff) << 32 | (number & 0xff_ffff) << 8 | u64::from(blocks & 0xff)
    }

    pub fn receiver(tag: u64) -> u64 {
        tag >> 32 & 0xffff
    }

    pub fn blocks(tag: u64) -> u64 {
        tag & 0xff
    }
}

pub struct Link {
    pub life: Rc<Life>,
    pub channel: KvChannel,
    /// The peer's life, which its endpoint is named after.
    peer: u64,
    asks: RefCell<HashMap<u64, oneshot::Sender<Grant>>>,
    asked: Cell<u64>,
    granted: Cell<u64>,
    /// The number of the next text. Held while one is sent, so that they go in order.
    texts: Mutex<u64>,
}

impl Link {
    pub fn new(life: Rc<Life>, channel: KvChannel) -> Rc<Self> {
        say("linked");
        let peer = channel.peer_name().parse().unwrap_or(0);
        Rc::new(Self {
            life,
            channel,
            peer,
            asks: RefCell::default(),
            asked: Cell::new(0),
            granted: Cell::new(0),
            texts: Mutex::new(0),
        })
    }

    /// Until the channel has ended. Who `closes` ends it when the lap does, once its own operations are through.
    pub async fn run(self: Rc<Self>, closes: bool) {
        let watched = RefCell::new(VecDeque::new());
        let ((), (), ended) = tokio::join!(self.work(closes), self.listen(), take(&self.channel, &watched));
        for blocks in watched.borrow_mut().drain(..) {
            check(&blocks);
        }
        let granted = self.granted.get();
        if granted != ended {
            bad(format_args!(
                "{granted} grants, and {ended} of them ended, each by an arrival or an abort (R2, K4)"
            ));
        }
    }

    async fn work(self: &Rc<Self>, closes: bool) {
        let epoch = self.channel.peer_epoch();
        let mut doubts = self.life.doubts.borrow_mut().remove(&epoch).unwrap_or_default();
        resolve(&self.channel, &mut doubts).await;
        self.doubt(doubts);
        let mut running = JoinSet::new();
        for _ in 0..AT_ONCE {
            let (link, mut rng) = (self.clone(), Rng::new(self.life.draw()));
            running.spawn_local(async move {
                while !link.life.is_stopping() && operate(&link, &mut rng).await.is_some() {}
            });
        }
        while let Some(ran) = running.join_next().await {
            if let Err(error) = ran {
                bad(format_args!("an operation: {error}"));
            }
        }
        if closes && tokio::time::timeout(PATIENCE, self.channel.close()).await.is_err() {
            bad("a channel does not close (K5)");
            self.channel.kill();
        }
    }

    /// Of transfers on this channel.
    pub fn doubt(&self, more: impl IntoIterator<Item = (u64, TransferId)>) {
        self.life.doubts.borrow_mut().entry(self.channel.peer_epoch()).or_default().extend(more);
    }

    pub fn next_tag(&self, blocks: u32) -> u64 {
        let number = self.life.next.get();
        self.life.next.set(number + 1);
        tag::of(self.life.number, self.peer, number, blocks)
    }

    /// Has the peer grant so many blocks. `None` when the channel has ended.
    pub async fn ask(&self, blocks: u32) -> Option<Grant> {
        let id = self.asked.get();
        self.asked.set(id + 1);
        let (sender, granted) = oneshot::channel();
        self.asks.borrow_mut().insert(id, sender);
        let mut message = vec![ASK];
        message.extend(id.to_le_bytes());
        message.extend(blocks.to_le_bytes());
        self.channel.send_message(message).await.ok()?;
        tokio::select! {
            granted = granted => granted.ok(),
            _ = self.channel.closed() => None,
        }
    }

    /// Sends a text that the peer can check.
    pub async fn text(&self, len: u64) -> Option<()> {
        let mut number = self.texts.lock().await;
        let mut message = vec![TEXT];
        message.extend(number.to_le_bytes());
        message.extend(words(*number, len));
        *number += 1;
        self.channel.send_message(message).await.ok()
    }

    async fn listen(self: &Rc<Self>) {
        let mut granting = JoinSet::new();
        let mut texts = 0;
        while let Ok(message) = self.channel.recv_message().await {
            while granting.try_join_next().is_some() {}
            let Some((kind, rest)) = message.split_first() else {
                bad("a message that nobody sent");
                continue;
            };
            let number = rest.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let (Some(number), rest) = (number, rest.get(8..).unwrap_or_default()) else {
                bad("a message that is cut");
                continue;
            };
            match *kind {
                ASK => {
                    let Ok(blocks) = rest.try_into().map(u32::from_le_bytes) else {
                        bad("a message that is cut");
                        continue;
                    };
                    granting.spawn_local(self.clone().grant(number, blocks));
                }
                GRANT => match (Grant::from_bytes(rest), self.asks.borrow_mut().remove(&number)) {
                    // Whoever asked may have gone.
                    (Ok(grant), Some(waits)) => drop(waits.send(grant)),
                    (Ok(_), None) => bad("a grant that nobody asked for"),
                    (Err(error), _) => bad(format_args!("a grant that does not decode: {error}")),
                },
                TEXT => {
                    if number != texts || rest != words(number, rest.len() as u64) {
                        bad(format_args!(
                            "text {number} of {} bytes in the place of text {texts}",
                            rest.len()
                        ));
                    }
                    texts = number + 1;
                }
                _ => bad("a message that nobody sent"),
            }
        }
        self.asks.borrow_mut().clear();
        while granting.join_next().await.is_some() {}
    }

    /// Grants what was asked for; takes some grants back.
    async fn grant(self: Rc<Self>, id: u64, blocks: u32) {
        let blocks = tokio::select! {
            blocks = self.channel.pool().alloc(blocks) => blocks,
            _ = self.channel.closed() => return,
        };
        let Ok(blocks) = blocks else { return bad("more blocks were asked for than there are") };
        let Ok(grant) = self.channel.grant(blocks) else { return };
        self.granted.set(self.granted.get() + 1);
        let mut message = vec![GRANT];
        message.extend(id.to_le_bytes());
        message.extend(grant.to_bytes());
        let mut rng = Rng::new(self.life.draw());
        if self.channel.send_message(message).await.is_ok() && rng.one_in(30) {
            for _ in 0..rng.range(0, 20) {
                tokio::task::yield_now().await;
            }
            self.channel.revoke(&grant);
        }
    }
}

/// The words of a text.
fn words(number: u64, len: u64) -> Vec<u8> {
    let mut rng = Rng::new(number);
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        bytes.extend(rng.next().to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}
