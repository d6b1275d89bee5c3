//! A data channel at work: what it hears, what this end grants, and where this end starts transfers.
//!
//! Messages of a data channel begin with a byte that says what follows: [`GRANTS`] with their lengths, [`DATA`] to be answered, an
//! [`ANSWER`] with how many that was.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use landfall::kv::{ArrivalError, Grant, KvChannel, KvEndpoint};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::load::{Slot, Starter};
use super::talk::{Op, Shape};
use crate::output::Error;

const GRANTS: u8 = b'G';
const DATA: u8 = b'D';
const ANSWER: u8 = b'A';
/// Grants that a message carries, at most; and messages that are answered by one.
const BATCH: usize = 64;
/// Grants, and answers, that came and were not used. A peer that sends more has to wait.
const ROOM: usize = 1024;

/// What this end does beside starting transfers is done by tasks, which end with it.
pub(crate) struct Lane {
    pub(crate) starter: Starter,
    tasks: JoinSet<()>,
    /// It lives as long as its channel.
    _endpoint: KvEndpoint,
}

impl Lane {
    /// On a channel of `endpoint`, whose pool has room for it: see [`Shape::blocks`].
    pub(crate) fn new(
        endpoint: KvEndpoint,
        channel: KvChannel,
        shape: Shape,
        grants: bool,
        starts: bool,
    ) -> Result<Self, Error> {
        let mut slots = VecDeque::new();
        if starts && shape.op != Op::Send {
            for _ in 0..shape.in_flight {
                let blocks = channel.pool().try_alloc(shape.descriptors)?;
                slots.push_back(match shape.op {
                    Op::Read => Slot::Target(blocks),
                    _ => Slot::Source(Arc::new(blocks)),
                });
            }
        }
        let (to_grants, got_grants) = mpsc::channel(ROOM);
        // A count for each message of the peer, of which as many are under way as this end sends.
        let (to_answered, answered) = mpsc::channel(ROOM);
        let mut tasks = JoinSet::new();
        tasks.spawn(hear(channel.clone(), to_grants, to_answered));
        if grants {
            let granting = Granter { channel: channel.clone(), shape, ready: Vec::new() };
            tasks.spawn(async move {
                // It ends with the channel, of which whoever started a transfer learns.
                let _ = match shape.op {
                    Op::Write => granting.grant_writes().await,
                    Op::Read => granting.grant_reads().await,
                    Op::Send => Ok(()),
                };
            });
        }
        let qps = channel.path().qps.len().max(1);
        let starter = Starter { channel, shape, qps, slots, grants: got_grants, answered };
        Ok(Self { starter, tasks, _endpoint: endpoint })
    }

    pub(crate) fn channel(&self) -> &KvChannel {
        &self.starter.channel
    }

    /// Closes the channel, and waits until its memory is free.
    pub(crate) async fn close(mut self) {
        // However it ends: what was measured has been measured.
        let _ = self.starter.channel.close().await;
        self.tasks.shutdown().await;
    }
}

/// A message of so many bytes, at least 2.
pub(crate) fn payload(bytes: usize) -> Vec<u8> {
    let mut message = vec![0x5a; bytes];
    message[0] = DATA;
    message
}

/// Until the channel ends, or the peer says what is not understood: then whoever waits for grants or answers learns that none come.
async fn hear(channel: KvChannel, grants: mpsc::Sender<Grant>, answered: mpsc::Sender<u64>) {
    while let Ok(message) = channel.recv_message().await {
        let mut data = 0u64;
        let mut next = Some(message);
        while let Some(message) = next.take() {
            match message.split_first() {
                Some((&DATA, _)) => data += 1,
                Some((&ANSWER, count)) => {
                    let Ok(count) = count.try_into().map(u64::from_le_bytes) else { return };
                    // Nobody may want to know any more.
                    let _ = answered.send(count).await;
                }
                Some((&GRANTS, list)) => {
                    let Some(list) = unpack(list) else { return };
                    for grant in list {
                        if grants.send(grant).await.is_err() {
                            return;
                        }
                    }
                }
                _ => return,
            }
            // Those that are here already are answered together.
            if data > 0 && data < BATCH as u64 {
                next = now(channel.recv_message()).await.and_then(Result::ok);
            }
        }
        if data > 0 {
            let mut answer = vec![ANSWER];
            answer.extend(data.to_le_bytes());
            if channel.send_message(answer).await.is_err() {
                return;
            }
        }
    }
}

fn pack(grants: &[Grant]) -> Vec<u8> {
    let mut message = vec![GRANTS];
    for grant in grants {
        let bytes = grant.to_bytes();
        message.extend((bytes.len() as u32).to_le_bytes());
        message.extend(bytes);
    }
    message
}

fn unpack(mut rest: &[u8]) -> Option<Vec<Grant>> {
    let mut grants = Vec::new();
    while !rest.is_empty() {
        let (len, more) = rest.split_first_chunk::<4>()?;
        let (bytes, more) = more.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        grants.push(Grant::from_bytes(bytes).ok()?);
        rest = more;
        if grants.len() > BATCH {
            return None;
        }
    }
    Some(grants)
}

/// What is ready at this moment.
async fn now<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await
}

struct Granter {
    channel: KvChannel,
    shape: Shape,
    /// Not sent yet.
    ready: Vec<Grant>,
}

impl Granter {
    async fn tell(&mut self) -> Result<(), Error> {
        for some in self.ready.chunks(BATCH) {
            self.channel.send_message(pack(some)).await?;
        }
        self.ready.clear();
        Ok(())
    }

    async fn grant_writes(mut self) -> Result<(), Error> {
        for _ in 0..self.shape.open() {
            let blocks = self.channel.pool().try_alloc(self.shape.descriptors)?;
            self.ready.push(self.channel.grant(blocks)?);
        }
        loop {
            self.tell().await?;
            let mut next = Some(self.channel.next_arrival().await);
            while let Some(arrival) = next.take() {
                let blocks = match arrival {
                    Ok(arrival) => arrival.into_blocks(),
                    // They return to the pool when no late write can reach them.
                    Err(ArrivalError::Aborted { .. }) => {
                        self.channel.pool().alloc(self.shape.descriptors).await?
                    }
                    Err(closed) => return Err(closed.into()),
                };
                self.ready.push(self.channel.grant(blocks)?);
                if self.ready.len() < BATCH {
                    next = now(self.channel.next_arrival()).await;
                }
            }
        }
    }

    async fn grant_reads(mut self) -> Result<(), Error> {
        for _ in 0..self.shape.open() {
            let blocks = self.channel.pool().try_alloc(self.shape.descriptors)?;
            self.ready.push(self.channel.grant_read(blocks)?);
        }
        loop {
            self.tell().await?;
            let mut next = Some(self.channel.next_served().await);
            while let Some(served) = next.take() {
                self.ready.push(self.channel.grant_read(served?.into_blocks())?);
                if self.ready.len() < BATCH {
                    next = now(self.channel.next_served()).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_grants_that_are_none_are_not_taken() {
        assert!(unpack(&[]).is_some_and(|grants| grants.is_empty()));
        for wrong in [&[1][..], &[1, 0, 0, 0], &[255; 4], &[0; 4], &[4, 0, 0, 0, 1, 2, 3, 4]] {
            assert!(unpack(wrong).is_none(), "{wrong:?}");
        }
    }
}
