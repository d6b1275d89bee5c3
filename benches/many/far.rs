//! The process that is written to: grants blocks in turn, and grants them anew when they have arrived.

use std::collections::{HashMap, VecDeque};

use landfall::kv::{Arrival, ArrivalError, Blocks, Grant, KvChannel};

use crate::common::{self, Error};
use crate::{Args, endpoint};

/// What the near process asks of a channel: to keep `open` grants of `blocks` blocks each open, over `places` claims in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    pub kind: u8,
    pub open: usize,
    pub places: usize,
    pub blocks: u32,
}

/// No more grants; answered when all that were open are taken back.
pub const STOP: &[u8] = b"stop";

impl Ask {
    pub fn to_bytes(self) -> Vec<u8> {
        let Self { kind, open, places, blocks } = self;
        format!("{kind} {open} {places} {blocks}").into_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        let kind = words.next()?.parse().ok()?;
        let open = words.next()?.parse().ok()?;
        let places = words.next()?.parse().ok()?;
        Some(Self { kind, open, places, blocks: words.next()?.parse().ok()? })
    }
}

pub async fn serve(args: &Args) -> Result<(), Error> {
    let mut listener = common::listen(&endpoint(&args.pool().await?, args.mode)?).await?;
    let mut serving = tokio::task::JoinSet::new();
    for _ in 0..args.channels {
        let channel = listener.accept().await?;
        serving.spawn(async move { Granter { channel, kinds: HashMap::new() }.run().await });
    }
    while let Some(served) = serving.join_next().await {
        served??;
    }
    Ok(())
}

/// Claims of one kind that are not granted now, and grants that are open.
#[derive(Default)]
struct Kind {
    free: VecDeque<Blocks>,
    open: HashMap<u64, Grant>,
}

struct Granter {
    channel: KvChannel,
    kinds: HashMap<u8, Kind>,
}

impl Granter {
    async fn run(mut self) -> Result<(), Error> {
        let channel = self.channel.clone();
        loop {
            tokio::select! {
                // Arrivals are many, and what is asked comes between measurements.
                biased;
                arrival = channel.next_arrival() => match arrival {
                    Ok(arrival) => self.arrived(arrival).await?,
                    Err(ArrivalError::Closed(end)) if end.is_graceful() => return Ok(()),
                    Err(error) => return Err(error.into()),
                },
                asked = channel.recv_message() => match asked {
                    Ok(asked) if asked == STOP => self.stop().await?,
                    Ok(asked) => self.start(Ask::from_bytes(&asked).ok_or("not a request for grants")?).await?,
                    Err(end) if end.is_graceful() => return Ok(()),
                    Err(end) => return Err(end.into()),
                },
            }
        }
    }

    async fn start(&mut self, ask: Ask) -> Result<(), Error> {
        let kind = self.kinds.entry(ask.kind).or_default();
        for _ in 0..ask.places {
            kind.free.push_back(self.channel.pool().try_alloc(ask.blocks)?);
        }
        for _ in 0..ask.open {
            self.grant(ask.kind).await?;
        }
        Ok(())
    }

    /// Grants the claim whose turn it is.
    async fn grant(&mut self, kind: u8) -> Result<(), Error> {
        let of_kind = self.kinds.entry(kind).or_default();
        let Some(blocks) = of_kind.free.pop_front() else { return Ok(()) };
        let grant = self.channel.grant(blocks)?;
        let mut message = vec![kind];
        message.extend(grant.to_bytes());
        of_kind.open.insert(grant.id(), grant);
        Ok(self.channel.send_message(message).await?)
    }

    async fn arrived(&mut self, arrival: Arrival) -> Result<(), Error> {
        let kind = u8::try_from(arrival.tag())?;
        let of_kind = self.kinds.entry(kind).or_default();
        of_kind.open.remove(&arrival.grant());
        of_kind.free.push_back(arrival.into_blocks());
        self.grant(kind).await
    }

    /// The near process has no write under way: what is open has arrived, or nobody will use it.
    async fn stop(&mut self) -> Result<(), Error> {
        for (_, of_kind) in self.kinds.drain() {
            for grant in of_kind.open.values() {
                self.channel.revoke(grant);
            }
            for _ in of_kind.open {
                match self.channel.next_arrival().await {
                    Ok(_) | Err(ArrivalError::Aborted { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(self.channel.send_message(STOP.to_vec()).await?)
    }
}
