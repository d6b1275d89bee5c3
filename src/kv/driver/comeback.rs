//! A rail's way back: new queue pairs on both sides, connected while the other rails carry on. What the two drivers say to each
//! other is in [`Talk`]. The side that has connected the channel asks, again and again, at growing intervals.
//!
//! One that was left out at the start comes by the same way: with a completion queue of its own, and a task for that; and, where the
//! pool could not be registered on its device, with a registration, whose keys the two sides tell each other.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};

use super::after::Note;
use super::rail::Phase;
use super::{After, Inner, KvDriver, State};
use crate::connect::{ConnectError, Deadline, HelloRegion};
use crate::kv::lock;
use crate::kv::managed::{Entrance, ask};
use crate::kv::proto::{Cause, PlanError, ProtocolViolation, RailState, TalkRefused};
use crate::kv::rail::{
    BuiltRail, Link, QueuePairs, build_fitted, control_memory, off_workers, queues_on, sizes_on, why,
};
use crate::kv::rail_talk::{MAX_SAID, Talk};
use crate::provider::{self, Cq, QpAddress};
use crate::reactor;

/// Messages of the peer that wait for an attempt. It says three at most.
const EAR: usize = 4;
/// Attempts to bring back one rail that are answered at a time: the latest, and one that it has overtaken. Each has queue pairs of its
/// own, and the peer asks as often as it likes.
const ANSWERS: usize = 2;
/// How long an attempt may take in all, and no longer than a connect.
const PATIENCE: Duration = Duration::from_secs(5);
/// How soon after an attempt the peer's word begins another one, at the earliest, or after the first interval, if that is shorter: each
/// makes queue pairs, and the peer speaks as often as it likes.
const PEER_PACE: Duration = Duration::from_secs(1);

/// What an attempt works with.
struct Attempt {
    rail: usize,
    number: u32,
    ear: mpsc::Receiver<Talk>,
    // Before what they use (R7).
    pairs: QueuePairs,
    /// Of our pool on the device, where the peer does not know them.
    regions: Vec<HelloRegion>,
    /// What it completes on, where it has none yet.
    completions: Option<(Cq, provider::Channel)>,
    deadline: Deadline,
}

/// How an attempt has ended.
pub(super) enum End {
    /// There is nothing more to try: it is up, will never be, or the channel has ended.
    Over,
    /// Another one may do better.
    Failed(String),
}

impl From<TalkRefused> for End {
    fn from(refused: TalkRefused) -> Self {
        Self::Failed(refused.to_string())
    }
}

impl From<PlanError> for End {
    fn from(error: PlanError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<ConnectError> for End {
    fn from(error: ConnectError) -> Self {
        Self::Failed(why(&error))
    }
}

/// How long to wait after the next attempt, which begins when one of the three is there: by our own port's word as from the beginning,
/// and by the peer's, or when it is time, longer.
async fn sooner(
    mut own: Pin<&mut impl Future<Output = ()>>,
    mut peer: Pin<&mut impl Future<Output = ()>>,
    mut time: Pin<&mut impl Future<Output = ()>>,
    (first, longer): (Duration, Duration),
) -> Duration {
    poll_fn(|cx| {
        if own.as_mut().poll(cx).is_ready() {
            Poll::Ready(first)
        } else if peer.as_mut().poll(cx).is_ready() || time.as_mut().poll(cx).is_ready() {
            Poll::Ready(longer)
        } else {
            Poll::Pending
        }
    })
    .await
}

const NO_ANSWER: &str = "the peer does not answer";
const OVERTAKEN: &str = "the attempt was overtaken";

impl KvDriver {
    /// Tries to bring a rail back until it is, or the channel ends. There is one such task a rail.
    pub(super) fn probe(self: &Arc<Self>, rail: usize) {
        let (driver, (first, most)) = (Arc::downgrade(self), self.config.rail_probe);
        let (port_up, peer_port_up) = {
            let own = &mut lock(&self.inner).rails[rail];
            if std::mem::replace(&mut own.probing, true) {
                return;
            }
            (own.port_up.clone(), own.peer_port_up.clone())
        };
        self.runtime.spawn(async move {
            let mut wait = first;
            loop {
                let longer = wait.saturating_mul(2).min(most);
                let own = pin!(port_up.notified());
                let peer = pin!(peer_port_up.next(first.min(PEER_PACE)));
                wait = sooner(own, peer, pin!(tokio::time::sleep(wait)), (first, longer)).await;
                peer_port_up.begun();
                let Some(driver) = driver.upgrade() else { return };
                match driver.bring_back(rail).await {
                    Err(End::Failed(reason)) => {
                        tracing::debug!(rail, reason, "a rail does not come back yet");
                        driver.locked(|inner, after| {
                            inner.retreat(rail, &reason, Instant::now(), after);
                            inner.note(rail, &reason);
                            inner.rails[rail].attempt = None;
                        });
                    }
                    Ok(()) | Err(End::Over) => return,
                }
            }
        });
    }

    /// One attempt of the side that asks.
    async fn bring_back(self: &Arc<Self>, rail: usize) -> Result<(), End> {
        let mut attempt = self.prepare(rail, None).await?;
        let number = attempt.number;
        let (ours, regions) = attempt.half();
        self.say(rail, &Talk::Offer { attempt: number, qps: ours, regions })?;
        let (qps, regions, manager) = match attempt.hear().await? {
            Talk::Answer { qps, regions, manager, .. } => (qps, regions, manager),
            Talk::Refuse { reason, .. } => return Err(End::Failed(format!("the peer: {reason}"))),
            other => {
                return Err(End::Failed(format!("the peer said {other:?}, which does not belong there")));
            }
        };
        attempt.check(&qps)?;
        self.peer.learn(rail, &regions)?;
        let (link, device) = {
            let inner = lock(&self.inner);
            (inner.rails[rail].link, inner.rails[rail].pd.device().clone())
        };
        match manager {
            None => attempt.pairs = connect(self, attempt.pairs, link, qps).await?,
            Some(at) => {
                let pass = self.pass.of(rail, number);
                ask(&device, &mut attempt.pairs, &link, &pass, at, attempt.deadline).await?;
            }
        }
        self.install(&mut attempt, false)?;
        self.say(rail, &Talk::Ready { attempt: number })?;
        // `Go`, or what comes on the rail itself, ends the attempt: the ear closes.
        while attempt.hear().await.is_ok() {}
        let own = &mut lock(&self.inner).rails[rail];
        match own.phase {
            Phase::Coming => Err(End::Failed(NO_ANSWER.to_owned())),
            Phase::Up => {
                // Under the lock: its next failure starts another task.
                own.probing = false;
                Ok(())
            }
            // It has failed as it came, or again since: this task goes on.
            _ => Err(End::Failed(OVERTAKEN.to_owned())),
        }
    }

    /// The side that is asked: makes queue pairs, connects them to those of the offer, and waits for the peer.
    async fn answer(
        self: &Arc<Self>,
        rail: usize,
        number: u32,
        (qps, regions): (Vec<QpAddress>, Vec<HelloRegion>),
    ) -> Result<(), End> {
        let mut attempt = self.prepare(rail, Some(number)).await?;
        attempt.check(&qps)?;
        self.peer.learn(rail, &regions)?;
        let (link, device, managed) = {
            let inner = lock(&self.inner);
            let own = &inner.rails[rail];
            (own.link, own.pd.device().clone(), own.managed)
        };
        let (ours, regions) = attempt.half();
        if managed {
            let entrance = Entrance::on(&device).await?;
            let manager = Some(entrance.address());
            self.say(rail, &Talk::Answer { attempt: number, qps: ours, regions, manager })?;
            let pass = self.pass.of(rail, number);
            entrance.admit(&mut attempt.pairs, &link, &pass, attempt.deadline).await?;
        } else {
            attempt.pairs = connect(self, attempt.pairs, link, qps).await?;
            self.say(rail, &Talk::Answer { attempt: number, qps: ours, regions, manager: None })?;
        }
        let Talk::Ready { .. } = attempt.hear().await? else {
            return Err(End::Failed("the peer said something else".to_owned()));
        };
        self.install(&mut attempt, true)
    }

    /// Begins an attempt: `number` is the peer's, or the next one of ours. A rail that is not at rest has none.
    async fn prepare(self: &Arc<Self>, rail: usize, number: Option<u32>) -> Result<Attempt, End> {
        let (said, ear) = mpsc::channel(EAR);
        let (number, device, keyless, pd, cq, config, qps) = {
            let mut inner = lock(&self.inner);
            let open = inner.state == State::Open && !inner.closing;
            let resting = inner.conn.as_ref().is_some_and(|conn| conn.rail_state(rail) == RailState::Down);
            let own = &mut inner.rails[rail];
            // It came up behind the last attempt's back: the next failure starts another task.
            if own.phase == Phase::Up && number.is_none() {
                own.probing = false;
                return Err(End::Over);
            }
            if !open || own.lost {
                return Err(End::Over);
            }
            // Its last queue pairs may still be on their way down, on either side.
            if own.phase != Phase::Down || !resting {
                return Err(End::Failed("it has not come to rest on both sides".to_owned()));
            }
            own.attempts = number.unwrap_or(own.attempts.wrapping_add(1));
            own.attempt = Some((own.attempts, said));
            let (number, device, keyless) = (own.attempts, own.device, own.keyless);
            (number, device, keyless, own.pd.clone(), own.cq.clone(), own.config.clone(), own.qps.len())
        };
        let registered = self.pool.register(device).await.map_err(End::Failed)?;
        self.peer.ours.set(rail, registered.seams.clone());
        let regions = if keyless { registered.remote(&self.pool) } else { Vec::new() };
        if regions.len() > MAX_SAID {
            let (name, n) = (pd.device().name(), regions.len());
            return Err(End::Failed(format!(
                "{name} has the pool in {n} regions, and {MAX_SAID} can be told the peer while a channel lives; connect another one"
            )));
        }
        let (pairs, completions) = match cq {
            Some(cq) => {
                let sizes = sizes_on(pd.device(), &config);
                let memories = control_memory(&pd, &sizes, qps).await?;
                let pairs = off_workers(&self.runtime, move || queues_on(&pd, &cq, &sizes, memories)).await?;
                (pairs, None)
            }
            None => {
                let BuiltRail { pairs, cq, channel, .. } =
                    build_fitted(&self.runtime, &pd, config, qps).await?;
                (pairs, Some((cq, channel)))
            }
        };
        let deadline = Deadline::after(self.config.connect_timeout.min(PATIENCE));
        Ok(Attempt { rail, number, ear, pairs, regions, completions, deadline })
    }

    /// Puts new queue pairs in the place of those that failed. With `go` the peer is told to use them, and so do we.
    fn install(self: &Arc<Self>, attempt: &mut Attempt, go: bool) -> Result<(), End> {
        let (now, rail, number) = (Instant::now(), attempt.rail, attempt.number);
        let pairs = std::mem::take(&mut attempt.pairs);
        if let Some(exposure) = &self.exposure {
            pairs.queues.iter().for_each(|queue| queue.expose(exposure));
        }
        let channel = self.locked(|inner, after| {
            let own = &mut inner.rails[rail];
            let current = own.attempt.as_ref().is_some_and(|(n, _)| *n == number);
            if inner.state != State::Open || own.phase != Phase::Down || own.lost || !current {
                return Err(End::Failed(OVERTAKEN.to_owned()));
            }
            if go {
                // While nothing has changed yet, and before it is up: then there is nothing to say of it any more.
                inner.say(rail, &Talk::Go { attempt: number })?;
            }
            let own = &mut inner.rails[rail];
            let channel = attempt.completions.take().map(|(cq, channel)| {
                own.cq = Some(Arc::new(cq));
                channel
            });
            own.lines = Some(Arc::new(pairs.lines));
            own.phase = Phase::Coming;
            for (slot, mut queue) in inner.queues[own.qps.clone()].iter_mut().zip(pairs.queues) {
                queue.carry_on(slot);
                queue.signal_often();
                *slot = queue;
            }
            if go {
                inner.come_up(rail, now, after);
            }
            inner.turn(now, after);
            after.nudge = true;
            Ok(channel)
        })?;
        self.enrol(rail);
        self.watch(rail);
        match channel.map(|channel| reactor::spawn(&self.runtime, channel, Self::of_rail(self, rail))) {
            Some(Ok(task)) => self.set_task(rail, task),
            Some(Err(error)) => self.channel_failed(rail, &error.to_string()),
            None => {}
        }
        Ok(())
    }

    /// Begins to look for the rails that were left out at the start.
    pub(crate) fn probe_absent(self: &Arc<Self>) {
        let absent: Vec<usize> = {
            let inner = lock(&self.inner);
            let is_absent = |&rail: &usize| inner.client && inner.rails[rail].cq.is_none();
            (0..inner.rails.len()).filter(is_absent).collect()
        };
        absent.into_iter().for_each(|rail| self.probe(rail));
    }

    fn say(&self, rail: usize, talk: &Talk) -> Result<(), End> {
        let now = Instant::now();
        self.locked(|inner, after| {
            let said = inner.say(rail, talk);
            inner.turn(now, after);
            said
        })
    }

    /// The peer's driver speaks of a rail.
    pub(super) fn hear(self: &Arc<Self>, rail: usize, bytes: &[u8]) {
        let now = Instant::now();
        let heard = lock(&self.inner).rails[rail].ear.hear(bytes);
        let talk = match heard {
            Ok(Some(talk)) => talk,
            Ok(None) => return,
            Err(malformed) => {
                let cause = Cause::Violation(ProtocolViolation::from(malformed));
                return self
                    .locked(|inner, after| inner.fail(cause, "the peer broke the protocol", now, after));
            }
        };
        match talk {
            Talk::Offer { attempt, qps, regions } => return self.offered(rail, attempt, (qps, regions)),
            // Of no account on the side that does not ask, and while nobody waits: at most one attempt comes sooner.
            Talk::PortUp => return lock(&self.inner).rails[rail].peer_port_up.heard.notify_one(),
            _ => {}
        }
        self.locked(|inner, after| {
            let own = &mut inner.rails[rail];
            // Of an attempt that is over: late, and of no account.
            let Some((_, ear)) = own.attempt.as_ref().filter(|(n, _)| *n == talk.attempt()) else { return };
            match talk {
                Talk::Go { .. } if own.phase == Phase::Coming => inner.come_up(rail, now, after),
                // It says no more than there is room for.
                talk => _ = ear.try_send(talk),
            }
        });
    }

    fn offered(self: &Arc<Self>, rail: usize, attempt: u32, theirs: (Vec<QpAddress>, Vec<HelloRegion>)) {
        let refusal = {
            let mut inner = lock(&self.inner);
            let (client, open) = (inner.client, inner.state == State::Open);
            let own = &mut inner.rails[rail];
            match own.phase {
                _ if client => Some("the side that has connected the channel asks"),
                _ if own.lost => Some("its device or its completion queue is lost"),
                _ if own.answers >= ANSWERS => Some("it is being brought back already, more than once"),
                Phase::Down if open => {
                    own.answers += 1;
                    None
                }
                _ => Some("the rail has not come to rest here"),
            }
        };
        if let Some(reason) = refusal {
            // Where it cannot be said, the peer hears of it by its own patience.
            let _ = self.say(rail, &Talk::Refuse { attempt, reason: reason.to_owned() });
            return;
        }
        let answering = Answering { driver: self.clone(), rail };
        self.runtime.spawn(async move {
            let driver = &answering.driver;
            if let Err(End::Failed(reason)) = driver.answer(rail, attempt, theirs).await {
                driver.locked(|inner, _| inner.note(rail, &reason));
                let _ = driver.say(rail, &Talk::Refuse { attempt, reason });
            }
        });
    }
}

/// The peer's word that its port is up again, on the side that asks.
#[derive(Debug, Default)]
pub(super) struct PeerPortUp {
    heard: Notify,
    /// When an attempt last began, in this loss of the rail or an earlier one.
    last: Mutex<Option<Instant>>,
}

impl PeerPortUp {
    fn begun(&self) {
        *lock(&self.last) = Some(Instant::now());
    }

    /// The peer has said it, and the last attempt began `pace` ago or more. Cancel safe, but for a word that waits for that: it is
    /// forgotten when an attempt begins otherwise.
    async fn next(&self, pace: Duration) {
        self.heard.notified().await;
        let rest = lock(&self.last).map_or(Duration::ZERO, |last| pace.saturating_sub(last.elapsed()));
        tokio::time::sleep(rest).await;
    }
}

/// Counts as one of [`ANSWERS`].
struct Answering {
    driver: Arc<KvDriver>,
    rail: usize,
}

impl Drop for Answering {
    fn drop(&mut self) {
        lock(&self.driver.inner).rails[self.rail].answers -= 1;
    }
}

impl Attempt {
    /// What the peer is told of ours.
    fn half(&self) -> (Vec<QpAddress>, Vec<HelloRegion>) {
        (self.pairs.addresses(), self.regions.clone())
    }

    /// The peer's next word.
    async fn hear(&mut self) -> Result<Talk, End> {
        match self.deadline.within(self.ear.recv()).await {
            Some(Some(talk)) => Ok(talk),
            // Overtaken by another attempt, by the rail itself, or by the end of the channel.
            Some(None) => Err(End::Failed(OVERTAKEN.to_owned())),
            None => Err(End::Failed(NO_ANSWER.to_owned())),
        }
    }

    /// The peer's queue pairs: one for each of ours.
    fn check(&mut self, qps: &[QpAddress]) -> Result<(), End> {
        let (ours, theirs) = (self.pairs.queues.len(), qps.len());
        if ours != theirs {
            let rail = self.rail;
            return Err(End::Failed(format!(
                "rail {rail} has {ours} queue pairs, the peer speaks of {theirs}"
            )));
        }
        self.pairs.trim(ours, qps);
        Ok(())
    }
}

/// Connects out of band. A device may look up the peer's address: off the runtime's workers (R9).
async fn connect(
    driver: &KvDriver,
    pairs: QueuePairs,
    link: Link,
    qps: Vec<QpAddress>,
) -> Result<QueuePairs, ConnectError> {
    off_workers(&driver.runtime, move || {
        link.connect(&pairs.queues, &qps)?;
        Ok(pairs)
    })
    .await
}

impl Inner {
    /// Tells the peer's driver something about a rail that is down on both sides.
    pub(super) fn say(&mut self, rail: usize, talk: &Talk) -> Result<(), End> {
        let Some(conn) = &mut self.conn else { return Err(End::Over) };
        for piece in talk.pieces(conn.talk_limit()) {
            conn.rail_talk(rail, piece)?;
        }
        Ok(())
    }

    /// Both sides have connected a rail, and know it.
    pub(super) fn come_up(&mut self, rail: usize, now: Instant, after: &mut After) {
        let up = self.conn.as_mut().is_some_and(|conn| conn.rail_up(rail, now));
        if !up {
            return self.retreat(rail, OVERTAKEN, now, after);
        }
        let own = &mut self.rails[rail];
        own.phase = Phase::Up;
        own.fenced = false;
        (own.down, own.words, own.attempt) = (None, None, None);
        own.returns += 1;
        self.meter.rail(rail, true);
        after.notes.push(Note::RailBack { rail, device: own.pd.device().name().to_owned() });
        // It may have failed at the peer by now: the protocol says so, after it was up.
        self.events(now, after);
        after.nudge = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, SoftConfig};
    use crate::kv::{KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
    use crate::memory::Memory;

    async fn endpoint(config: &KvConfig) -> (KvEndpoint, Device) {
        let devices = [(); 2].map(|()| Device::soft(SoftConfig::new()).unwrap());
        let layout = Layout::contiguous(1, 4, 64).unwrap();
        let pds = devices.each_ref().map(|device| device.alloc_pd().unwrap());
        let pds: Vec<_> = pds.iter().collect();
        let memory = Memory::anonymous(layout.required_bytes());
        let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Target).await.unwrap();
        let [_, second] = devices;
        (KvEndpoint::new(pool, config.clone()).unwrap(), second)
    }

    /// A hostile peer, or one whose port flaps.
    #[tokio::test]
    async fn k10_the_peer_s_word_begins_attempts_no_faster_than_their_pace() {
        let (port, pace) = (PeerPortUp::default(), Duration::from_millis(20));
        port.heard.notify_one();
        // The first one at once.
        let first = tokio::time::timeout(Duration::from_secs(60), port.next(Duration::from_secs(36_000)));
        first.await.expect("nothing came before it");
        for _ in 0..3 {
            port.begun();
            let last = lock(&port.last).unwrap();
            port.heard.notify_one();
            port.next(pace).await;
            assert!(last.elapsed() >= pace);
        }
    }

    /// A hostile peer asks for the same rail again and again: what is built for it is bounded, and the rail comes back for an
    /// honest one.
    #[tokio::test]
    async fn k10_a_rail_is_brought_back_by_no_more_attempts_than_two_at_a_time() {
        let hours = Duration::from_secs(36_000);
        let config = KvConfig::default().rail_probe(hours, hours);
        let ((near, _near), (far, second)) = (endpoint(&config).await, endpoint(&config).await);
        let mut listener = far.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (client, server) = tokio::join!(near.connect(listener.local_addr()), listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());
        let driver = &server.inner.driver;
        let link = second.soft_link().unwrap();
        link.cut();
        let rail = |of: &Arc<KvDriver>| {
            let inner = lock(&of.inner);
            let at_rest = inner.conn.as_ref().is_some_and(|c| c.rail_state(1) == RailState::Down);
            let own = &inner.rails[1];
            (own.phase, at_rest, own.answers)
        };
        let until = async |what: &str, ready: &dyn Fn() -> bool| {
            let waiting = async {
                while !ready() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), waiting).await.expect(what);
        };
        until("it rests", &|| rail(driver) == (Phase::Down, true, 0)).await;
        link.mend();
        let qps = vec![QpAddress::default(); lock(&driver.inner).rails[1].qps.len()];
        for attempt in 1..=100 {
            for piece in (Talk::Offer { attempt, qps: qps.clone(), regions: vec![] }).pieces(500) {
                driver.hear(1, &piece);
            }
        }
        // No task has run since.
        assert_eq!(rail(driver).2, ANSWERS);
        until("they end", &|| rail(driver).2 == 0).await;
        // The honest one's attempt may have been one of them, and has failed then: the next one is hours away.
        until("it comes", &|| {
            lock(&client.inner.driver.inner).rails[1].port_up.notify_one();
            [driver, &client.inner.driver].into_iter().all(|of| rail(of).0 == Phase::Up)
        })
        .await;
        client.close().await.unwrap();
    }
}
