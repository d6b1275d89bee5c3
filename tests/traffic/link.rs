//! One channel in use, both ways: operations of the table, several at once, and what the peer's ask for.
//!
//! Messages: `ASK` with an [`Ask`] is answered by `GRANT id bytes`; `TEXT number bytes` is there to be checked. Numbers are
//! little-endian.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use landfall::kv::{Cause, ChannelClosed, Grant, KvChannel, Mapping, RailState, TokenSpan};
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinSet;

use super::arrivals::{Watched, take};
use super::content::{Rng, Wanted};
use super::grants::{Ask, Want, grant, serve};
use super::life::Life;
use super::mapped::Stretches;
use super::node::PATIENCE;
use super::operations::operate;
use super::outcome::{Doubt, resolve};
use super::process::{bad, say};

/// Operations at once on each side of a channel.
const AT_ONCE: usize = 4;

const ASK: u8 = 1;
const GRANT: u8 = 2;
const TEXT: u8 = 3;

pub struct Link {
    pub life: Rc<Life>,
    pub channel: KvChannel,
    /// Claims that have come back.
    pub watched: Watched,
    /// Grants to write at once.
    pub granted: Cell<u64>,
    /// Grants to read that have not ended: the tag of each, by its number.
    pub lent: RefCell<HashMap<u64, u64>>,
    /// What the peer writes by tokens: which ones, by tag.
    pub mapped: RefCell<HashMap<u64, Vec<TokenSpan>>>,
    /// From our blocks to the peer's, which may be unlike them, and from those to ours.
    pub to_peer: Mapping,
    pub from_peer: Mapping,
    /// The peer's life, which its endpoint is named after.
    peer: u64,
    asks: RefCell<HashMap<u64, oneshot::Sender<Grant>>>,
    asked: Cell<u64>,
    /// The number of the next text. Held while one is sent, so that they go in order.
    texts: Mutex<u64>,
}

impl Link {
    pub fn new(life: Rc<Life>, channel: KvChannel) -> Rc<Self> {
        say("linked");
        let peer = channel.peer_name().parse().unwrap_or(0);
        let one = "every pool has a shape, and a head that all have";
        let (to_peer, from_peer) =
            (channel.mapping_to_peer().expect(one), channel.mapping_from_peer().expect(one));
        Rc::new(Self {
            life,
            channel,
            watched: Watched::default(),
            granted: Cell::new(0),
            lent: RefCell::default(),
            mapped: RefCell::default(),
            to_peer,
            from_peer,
            peer,
            asks: RefCell::default(),
            asked: Cell::new(0),
            texts: Mutex::new(0),
        })
    }

    /// Until the channel has ended. Who `closes` ends it when the lap does, once its own operations are through. Whether its
    /// end was graceful.
    pub async fn run(self: Rc<Self>, closes: bool) -> bool {
        let ((), (), ended, ()) = tokio::join!(self.work(closes), self.listen(), take(&self), serve(&self));
        self.watched.end();
        let granted = self.granted.get();
        if granted != ended {
            bad(format_args!(
                "{granted} grants, and {ended} of them ended, each by an arrival or an abort (R2, K4)"
            ));
        }
        let lent = self.lent.borrow().len();
        if lent > 0 {
            bad(format_args!("{lent} grants to read have not ended with the channel (R2)"));
        }
        let end = self.channel.closed().await;
        if closes {
            self.tell(&end);
        }
        end.is_graceful()
    }

    /// What became of the rails.
    fn tell(&self, end: &ChannelClosed) {
        let rails = self.channel.path().rails;
        let sum = |of: fn(&landfall::kv::RailReport) -> u32| {
            rails.iter().map(|rail| u64::from(of(rail))).sum::<u64>()
        };
        say(format_args!("rails {} {}", sum(|rail| rail.failures), sum(|rail| rail.returns)));
        // A channel ends by its last rail, and the first one is whole; nobody is killed or stopped, and deadlines are long.
        if self.life.part().steady && !end.is_graceful() {
            let rails: Vec<_> = rails.iter().map(ToString::to_string).collect();
            bad(format_args!(
                "a channel ended though a rail of it was whole (K10): {end}; {}",
                rails.join("; ")
            ));
        }
        // Whatever ends a queue pair says what it was.
        if end.cause() == Cause::Transport && end.to_string() == end.cause().to_string() {
            bad(format_args!("a channel failed and does not say by what (R6): {end}"));
        }
        for rail in &rails {
            if let RailState::Down { cause, .. } = &rail.state
                && cause.is_empty()
            {
                bad(format_args!("a rail is down and does not say why (R6): {rail}"));
            }
        }
    }

    async fn work(self: &Rc<Self>, closes: bool) {
        let epoch = self.channel.peer_epoch();
        let mut doubts = self.life.take_doubts(epoch);
        resolve(&self.channel, &mut doubts).await;
        self.life.doubt(epoch, doubts);
        let mut running = JoinSet::new();
        for _ in 0..AT_ONCE {
            let (link, mut rng) = (self.clone(), Rng::new(self.life.draw()));
            running.spawn_local(async move {
                while link.life.goes_on() && operate(&link, &mut rng).await.is_some() {}
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

    /// Blocks can go from one end to the other as they are.
    pub fn is_alike(&self) -> bool {
        self.to_peer.source() == self.to_peer.target()
    }

    /// What is to have come for a tag: by these tokens, or block by block.
    pub fn wanted<'a>(&'a self, tag: u64, spans: Option<&'a [TokenSpan]>) -> Wanted<'a> {
        spans.map_or(Wanted::Filled(tag), |spans| Wanted::Mapped(tag, &self.from_peer, spans))
    }

    /// Of transfers on this channel.
    pub fn doubt(&self, more: impl IntoIterator<Item = Doubt>) {
        self.life.doubt(self.channel.peer_epoch(), more);
    }

    /// Has the peer grant so many blocks: the grant, and the tag of what is done under it. `None` when the channel has ended.
    pub async fn ask(&self, want: Want, blocks: u64) -> Option<(u64, Grant)> {
        self.ask_for(want, blocks, Vec::new()).await
    }

    /// The same for what is to be written by tokens.
    pub async fn ask_mapped(&self, want: Want, what: &Stretches) -> Option<(u64, Grant)> {
        self.ask_for(want, what.target_blocks.into(), what.spans.clone()).await
    }

    async fn ask_for(&self, want: Want, blocks: u64, spans: Vec<TokenSpan>) -> Option<(u64, Grant)> {
        let id = self.asked.get();
        self.asked.set(id + 1);
        let tag = self.life.next_tag(self.peer, blocks as u32);
        let (sender, granted) = oneshot::channel();
        self.asks.borrow_mut().insert(id, sender);
        self.send(ASK, &Ask { id, want, tag, spans }.to_bytes()).await?;
        tokio::select! {
            granted = granted => Some((tag, granted.ok()?)),
            _ = self.channel.closed() => None,
        }
    }

    /// Gives the peer what it has asked for by `id`.
    pub async fn answer(&self, id: u64, grant: &Grant) -> Option<()> {
        self.send(GRANT, &[&id.to_le_bytes()[..], &grant.to_bytes()].concat()).await
    }

    /// Sends a text that the peer can check.
    pub async fn text(&self, len: u64) -> Option<()> {
        let mut number = self.texts.lock().await;
        let text = [&number.to_le_bytes()[..], &words(*number, len)].concat();
        *number += 1;
        self.send(TEXT, &text).await
    }

    async fn send(&self, kind: u8, rest: &[u8]) -> Option<()> {
        self.channel.send_message([&[kind], rest].concat()).await.ok()
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
            match (*kind, rest.split_first_chunk()) {
                (ASK, _) => match Ask::from_bytes(rest) {
                    Some(ask) => {
                        let link = self.clone();
                        granting.spawn_local(async move { grant(&link, ask).await });
                    }
                    None => bad("a message that is cut"),
                },
                (GRANT, Some((id, bytes))) => self.granted(u64::from_le_bytes(*id), bytes),
                (TEXT, Some((number, text))) => {
                    let number = u64::from_le_bytes(*number);
                    if number != texts || text != words(number, text.len() as u64) {
                        bad(format_args!(
                            "text {number} of {} bytes in the place of text {texts}",
                            text.len()
                        ));
                    }
                    texts = number + 1;
                }
                _ => bad("a message that nobody sent"),
            }
        }
        self.asks.borrow_mut().clear();
        while let Some(ran) = granting.join_next().await {
            if let Err(error) = ran {
                bad(format_args!("a grant: {error}"));
            }
        }
    }

    fn granted(&self, id: u64, bytes: &[u8]) {
        match (Grant::from_bytes(bytes), self.asks.borrow_mut().remove(&id)) {
            // Whoever asked may have gone.
            (Ok(grant), Some(waits)) => drop(waits.send(grant)),
            (Ok(_), None) => bad("a grant that nobody asked for"),
            (Err(error), _) => bad(format_args!("a grant that does not decode: {error}")),
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
