//! Payload that a GPU copies: collected while frames are read, queued together, and executed when the copies are over.
//!
//! What has arrived is executed in its order (RC), so that everything behind such payload waits in line with it. The peer is told that
//! its memory is free, and of what has landed, after that. Between GPUs nothing waits for the GPU: a turn of the queue pair asks
//! whether copies are over, and while some are not, the queue pair has a deadline after which to ask again (`looks.rs`).
//!
//! Where a queue pair fails, a request is refused, or an atomic comes behind them, the copies are waited for. They wait for nobody, and
//! end in milliseconds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::{Desc, Nak, Opcode};
use super::link::{Link, Stream};
use super::looks::{self, Looks};
use super::mr::{MemRange, Reach};
use super::qp::QpInner;
use super::rx::Stop;
use super::shm::{NoCopy, PeerMap, Reference, ShmLink};
use super::sq::Cause;
use super::tuning::SHARED_FLIGHT;
use crate::cuda::{Copier, CudaError, Flight, Gpu, GpuTraffic, Slot, Source};
use crate::memory::Mapping;
use crate::pages::{Checked, Pages};
use crate::provider::{AccessFlags, QpState, WcStatus};

/// Flights of a queue pair at a time: enough that one is queued while another is under way. Of pages the first ones are short, and there may
/// be more.
const FLIGHTS: usize = 4;
const FLIGHTS_OF_PAGES: usize = 8;
/// Pieces that are collected at most before they are queued.
const PIECES: usize = 4096;
/// Without order, messages that wait in line: they count as being in assembly.
const IN_LINE: usize = 256;
/// The first look at what is staged and was not over at once, and the longest time between two.
pub(super) const FIRST_LOOK: Duration = Duration::from_micros(10);
pub(super) const LAST_LOOK: Duration = Duration::from_millis(1);
/// Copies of up to so many bytes are over in less time than it takes to sleep, and are looked at until then.
const SHORT: u64 = 1 << 20;
const SHORT_STAGED: u64 = 64 << 10;
pub(super) const SHORT_LOOKS: Duration = Duration::from_micros(12);

/// How often to look whether a driver is there.
const DRIVER_LOOK: Duration = Duration::from_millis(1);

/// Where the bytes of a reference are, for a GPU.
pub(super) enum Way {
    /// In memory of a GPU: `here`, of this process.
    Device { gpu: Arc<Gpu>, from: u64, hold: Hold, here: bool },
    /// In a slot of the peer's, to which its GPU has copied.
    Slot { from: u64, hold: Hold, pinned: bool },
    /// In mapped memory of the peer.
    Host { from: u64, hold: Hold },
    /// Read already.
    Bytes(Vec<u8>),
}

/// What keeps a source where it is until it is copied.
#[derive(Debug)]
#[allow(dead_code)] // Held, and not looked at.
pub(super) enum Hold {
    Memory(Source),
    Map(Arc<PeerMap>),
    Slot(Arc<Slot>),
}

/// Copies for one GPU that are collected and not queued.
#[derive(Debug)]
struct Collected {
    copier: Copier,
    /// All of it is memory of GPUs that a kernel of this one reads.
    gathers: bool,
    bytes: u64,
    holds: Vec<Hold>,
    targets: Vec<Arc<Mapping>>,
    asked: Vec<(u64, u64)>,
}

/// Copies under way.
#[derive(Debug)]
struct InFlight {
    flight: Arc<Flight>,
    number: u64,
    bytes: u64,
    /// How much of the ring the peer may have back when it is over: of several of one number the last has it.
    mark: Option<u64>,
    _holds: Vec<Hold>,
    _targets: Vec<Arc<Mapping>>,
    /// What of it the peer writes, by addresses and bytes; and its pages, with the address of their first block.
    asked: Vec<(u64, u64)>,
    pages: Option<(u64, Pages)>,
}

/// What a queue pair has to do with GPUs.
#[derive(Debug, Default)]
pub(super) struct Landings {
    collected: Vec<Collected>,
    flights: VecDeque<InFlight>,
    /// The number of the flights that were queued last.
    launched: u64,
    /// Descriptors that are here when all flights up to that number are over, in their order.
    line: VecDeque<(Desc, u64)>,
    /// When the first of the flights was queued, or had its turn; and when to look at it again.
    since: Option<Instant>,
    next_look: Option<Instant>,
    /// The same for a thread that polls all the time: it costs no wake-up.
    next_glance: Option<Instant>,
    looks: Looks,
    /// Reading goes on with the next look: it waits for a driver.
    waits: bool,
    traffic: GpuTraffic,
}

impl Landings {
    pub(super) fn traffic(&self) -> GpuTraffic {
        self.traffic
    }

    /// `bytes` of memory of a GPU were referred to, for a peer that is this process (`here`) or not.
    pub(super) fn sent(&mut self, bytes: u32, here: bool) {
        let traffic = &mut self.traffic;
        let path = if here { &mut traffic.same_process } else { &mut traffic.ipc };
        path.sent(bytes.into());
    }

    /// A frame has left with `bytes` of memory of a GPU, in so many `pieces`, which were copied to host memory for that.
    pub(super) fn staged(&mut self, (bytes, pieces): (u64, u64)) {
        self.traffic.staged.sent_in(bytes, pieces);
    }

    /// `bytes` came in a frame for memory of a GPU, from a peer on this host.
    pub(super) fn received(&mut self, bytes: u64) {
        self.traffic.host.received(bytes);
    }

    /// Something is being copied, or waits in line.
    pub(super) fn is_busy(&self) -> bool {
        !self.line.is_empty() || !self.flights.is_empty() || self.has_collected()
    }

    fn has_collected(&self) -> bool {
        self.collected.iter().any(|c| !c.copier.is_empty())
    }

    /// All that is under way are pages.
    fn are_pages(&self) -> bool {
        self.flights.iter().all(|flight| flight.pages.is_some())
    }

    /// As much is under way as may be: nothing more is read.
    pub(super) fn is_full(&self, ordered: bool) -> bool {
        let most = if self.are_pages() { FLIGHTS_OF_PAGES } else { FLIGHTS };
        self.flights.len() >= most || (!ordered && self.line.len() >= IN_LINE)
    }

    /// Copies that were queued: the number of the last, and of the last before which all are over.
    fn numbers(&self) -> (u64, u64) {
        let landed = self.flights.front().map_or(self.launched, |first| first.number - 1);
        (self.launched + u64::from(self.has_collected()), landed)
    }

    /// Nothing can be read before a driver is loaded, or has pinned what the peer stages through.
    pub(super) fn wait_for_driver(&mut self) {
        self.waits = true;
        self.next_look.get_or_insert(Instant::now() + DRIVER_LOOK);
    }

    /// Whether it is waited for.
    pub(super) fn waits_for_driver(&self) -> bool {
        self.waits
    }

    /// When to ask whether the copies are over.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.next_look
    }

    /// When a thread that does not sleep asks.
    pub(super) fn next_glance(&self) -> Option<Instant> {
        self.next_glance
    }

    /// The first of the flights is to be asked about again. A glance before the time of a look leaves that as it is: whoever sleeps until
    /// then is not woken for a new one.
    fn ask_again(&mut self, bytes: u64, since: Instant, now: Instant) {
        if self.next_look.is_none_or(|at| at <= now) {
            self.next_look = Some(self.looks.next(bytes, since, now));
        }
        self.next_glance = Some(looks::next_glance(since, now));
    }

    /// The descriptor is here but for copies that are under way, its own or those before it.
    pub(super) fn wait_in_line(&mut self, desc: Desc) {
        let number = self.launched + u64::from(self.has_collected());
        self.line.push_back((desc, number));
    }

    /// Whether all that is being written for the peer is exposed to it still.
    pub(super) fn keeps_to(&self, reach: &Reach) -> bool {
        let collected = self.collected.iter().flat_map(|collected| &collected.asked);
        let mut asked = self.flights.iter().flat_map(|flight| &flight.asked).chain(collected);
        let mut pages = self.flights.iter().filter_map(|flight| flight.pages.as_ref());
        asked.all(|&(addr, len)| reach.exposes(addr, len, AccessFlags::REMOTE_WRITE))
            && pages.all(|(addr, pages)| reach.exposes_pages(*addr, pages, u64::MAX) != Some(false))
    }

    /// READs and atomics that wait in line.
    pub(super) fn answerable(&self) -> usize {
        self.line.iter().filter(|(desc, _)| desc.opcode.has_answer()).count()
    }

    /// Adds a copy from `reference`, from `skip` bytes into it on, to `range`: one of them is memory of a GPU.
    pub(super) fn collect(
        &mut self,
        link: &mut ShmLink,
        reference: &Reference,
        skip: u64,
        range: MemRange<'_>,
    ) -> Result<(), NoCopy> {
        let len = range.len() as u64;
        let target = range.device().map(|memory| memory.gpu());
        let way = link.way(reference, skip, len, target)?;
        // Kernels reach pinned memory, too.
        let reached = matches!(way, Way::Slot { pinned: true, .. });
        let (gpu, from, hold) = match (way, target) {
            (Way::Device { gpu, from, hold, here }, _) => {
                let traffic = &mut self.traffic;
                let path = if here { &mut traffic.same_process } else { &mut traffic.ipc };
                path.received(len);
                (gpu, from, hold)
            }
            (Way::Slot { from, hold, .. }, Some(gpu)) => {
                self.traffic.staged.received(len);
                (gpu.clone(), from, hold)
            }
            (Way::Host { from, hold }, Some(gpu)) => {
                self.traffic.host.received(len);
                (gpu.clone(), from, hold)
            }
            (Way::Bytes(bytes), Some(_)) => {
                self.traffic.host.received(len);
                return self.put(range, &bytes).map_err(unable_to_copy);
            }
            // Host memory to host memory is not for a GPU.
            (Way::Slot { .. } | Way::Host { .. } | Way::Bytes(_), None) => return Err(NoCopy::Unable),
        };
        // A copy finds its way between two GPUs, a kernel reads only what is of its context.
        let reads = |source: &Source| source.is_of(&gpu);
        let between_devices = target.is_some() && matches!(&hold, Hold::Memory(source) if reads(source));
        let collected = self.of(&gpu).map_err(unable_to_copy)?;
        collected.gathers &= between_devices || reached;
        collected.add(range, from, hold);
        Ok(())
    }

    /// Adds a copy to `range`, memory of a GPU, of what is in `slot` from `at` on.
    pub(super) fn collect_staged(
        &mut self,
        range: MemRange<'_>,
        slot: &Arc<Slot>,
        at: usize,
    ) -> Result<(), CudaError> {
        let Some(memory) = range.device() else { return Ok(()) };
        let len = range.len() as u64;
        let collected = self.of(memory.gpu())?;
        collected.add(range, slot.addr() + at as u64, Hold::Slot(slot.clone()));
        self.traffic.staged.received(len);
        Ok(())
    }

    /// Queues all of `pages` for a kernel: from `source`, where their span begins, to `range`, which is theirs of the target. They are
    /// `bytes`, and when they are copied the peer may have its ring back up to `mark`. False where a kernel is not for them.
    pub(super) fn collect_pages(
        &mut self,
        link: &mut ShmLink,
        source: &Reference,
        Checked { pages, spans }: &Checked,
        range: MemRange<'_>,
        (bytes, mark): (u32, u64),
    ) -> Result<bool, NoCopy> {
        let Some(gpu) = range.device().map(|memory| memory.gpu()) else { return Ok(false) };
        let len = spans.source.end - spans.source.start;
        let Way::Device { from, hold, here, .. } = link.way(source, 0, len, Some(gpu))? else {
            return Ok(false);
        };
        if !matches!(&hold, Hold::Memory(source) if source.is_of(gpu)) {
            return Ok(false);
        }
        // What was collected before them comes before them.
        self.launch(None).map_err(unable_to_copy)?;
        let (to, from) =
            (range.addr().wrapping_sub(spans.target.start), from.wrapping_sub(spans.source.start));
        let copier = &mut self.of(gpu).map_err(unable_to_copy)?.copier;
        // SAFETY: both spans were looked up, the target's in a registered mapping and the source's in opened or own memory, and
        // hold each piece. Both are held by what is kept beside the flight until it is over.
        let flight = unsafe { copier.launch_pages(pages, to, from) }.map_err(unable_to_copy)?;
        let Some(flight) = flight.map(Arc::new) else { return Ok(false) };
        range.mapping().written_by(&flight);
        let path = if here { &mut self.traffic.same_process } else { &mut self.traffic.ipc };
        path.received(bytes.into());
        self.traffic.calls += u64::from(flight.calls());
        self.launched += 1;
        let (number, targets) = (self.launched, vec![range.mapping().clone()]);
        let (mark, holds) = (Some(mark), vec![hold]);
        let bytes = bytes.into();
        let (asked, pages) = (Vec::new(), None);
        let (_holds, _targets) = (holds, targets);
        self.flights.push_back(InFlight { flight, number, bytes, mark, _holds, _targets, asked, pages });
        self.begun();
        Ok(true)
    }

    /// What was queued last are these pages, of which the first block is at `addr`.
    pub(super) fn are_of(&mut self, addr: u64, pages: Pages) {
        if let Some(last) = self.flights.back_mut() {
            last.pages = Some((addr, pages));
        }
    }

    /// Copies bytes that came with a frame to memory of a GPU, behind what was collected for it.
    pub(super) fn put(&mut self, range: MemRange<'_>, bytes: &[u8]) -> Result<(), CudaError> {
        let Some(memory) = range.device() else { return Ok(()) };
        let gpu = memory.gpu().clone();
        if self.of(&gpu)?.copier.pieces() > 0 {
            // What was collected before it comes before it.
            self.launch(None)?;
        }
        let collected = self.of(&gpu)?;
        collected.target(range.mapping());
        let (to, from) = (range.addr(), bytes.as_ptr().expose_provenance() as u64);
        collected.gathers = false;
        collected.asked.extend(range.asked());
        collected.bytes += bytes.len() as u64;
        collected.copier.push(to, from, bytes.len() as u64);
        // The driver has taken a copy of the bytes when they are queued.
        self.launch(None)
    }

    fn of(&mut self, gpu: &Arc<Gpu>) -> Result<&mut Collected, CudaError> {
        let at = match self.collected.iter().position(|c| Arc::ptr_eq(c.copier.gpu(), gpu)) {
            Some(at) => at,
            None => {
                let copier = Copier::new(gpu.clone())?;
                let (holds, targets, asked) = (Vec::new(), Vec::new(), Vec::new());
                self.collected.push(Collected { copier, gathers: true, bytes: 0, holds, targets, asked });
                self.collected.len() - 1
            }
        };
        Ok(&mut self.collected[at])
    }

    /// Queues what was collected. When it is over, the peer may have its ring back up to `mark`. After an error nothing is collected,
    /// and what waits in line for that is never executed: a later launch must not pass for it.
    fn launch(&mut self, mark: Option<u64>) -> Result<(), CudaError> {
        self.launch_all(mark).inspect_err(|_| self.collected.clear())
    }

    fn launch_all(&mut self, mark: Option<u64>) -> Result<(), CudaError> {
        if !self.has_collected() {
            return Ok(());
        }
        let number = self.launched + 1;
        for collected in self.collected.iter_mut().filter(|c| !c.copier.is_empty()) {
            // SAFETY: targets are parts of registered mappings, and sources of opened, own or mapped memory: both are held by
            // what is kept beside the flight until it is over. Bytes that came with a frame are the caller's until this returns.
            let flight = Arc::new(unsafe { collected.copier.launch(collected.gathers)? });
            self.traffic.calls += u64::from(flight.calls());
            let targets = std::mem::take(&mut collected.targets);
            targets.iter().for_each(|mapping| mapping.written_by(&flight));
            let holds = std::mem::take(&mut collected.holds);
            let bytes = std::mem::take(&mut collected.bytes);
            let asked = std::mem::take(&mut collected.asked);
            collected.gathers = true;
            self.flights.push_back(InFlight {
                flight,
                number,
                bytes,
                mark: None,
                _holds: holds,
                _targets: targets,
                asked,
                pages: None,
            });
        }
        if let Some(last) = self.flights.back_mut() {
            last.mark = mark;
        }
        self.launched = number;
        self.begun();
        Ok(())
    }

    /// Something was queued just now.
    fn begun(&mut self) {
        let now = Instant::now();
        let (Some(first), since) = (self.flights.front(), *self.since.get_or_insert(now)) else { return };
        self.ask_again(first.bytes, since, now);
    }

    /// The first of the flights is likely to be over in a moment.
    fn is_near(&self) -> bool {
        let (Some(first), Some(since)) = (self.flights.front(), self.since) else { return false };
        self.looks.is_near(first.bytes, since, Instant::now())
    }

    fn collected_bytes(&self) -> u64 {
        self.collected.iter().map(|c| c.bytes).sum()
    }

    /// Takes the flights that are over. The mark of the last of them.
    fn over(&mut self) -> Result<Option<u64>, CudaError> {
        let (mut mark, mut before) = (None, false);
        while let Some(first) = self.flights.front() {
            let done = first.flight.is_done()?;
            let now = Instant::now();
            let since = *self.since.get_or_insert(now);
            if !done {
                let bytes = first.bytes;
                self.looks.in_vain();
                self.ask_again(bytes, since, now);
                return Ok(mark);
            }
            let took = (!before).then(|| now.saturating_duration_since(since));
            self.looks.saw(first.bytes, took);
            before = true;
            mark = first.mark.or(mark);
            self.flights.pop_front();
            self.since = Some(now);
            // That of the next one is another.
            self.next_look = self.next_look.filter(|_| self.waits);
        }
        self.since = None;
        // Who waits for a driver looks for that.
        self.next_look = self.next_look.filter(|_| self.waits);
        self.next_glance = None;
        Ok(mark)
    }

    /// The next descriptor in line whose copies are over.
    fn next_landed(&mut self) -> Option<Desc> {
        let (_, landed) = self.numbers();
        self.line.pop_front_if(|(_, number)| *number <= landed).map(|(desc, _)| desc)
    }

    /// Waits for the copies under way, and forgets all that is not executed.
    pub(super) fn abandon(&mut self) {
        for in_flight in &self.flights {
            let _ = in_flight.flight.wait();
        }
        self.flights.clear();
        self.line.clear();
        self.collected.clear();
        (self.since, self.next_look, self.next_glance) = (None, None, None);
        self.waits = false;
    }
}

impl Collected {
    /// Adds a copy from `from`, of what is held, to `range`.
    fn add(&mut self, range: MemRange<'_>, from: u64, hold: Hold) {
        let len = range.len() as u64;
        self.bytes += len;
        match (range.asked(), self.asked.last_mut()) {
            (Some((addr, len)), Some((at, all))) if *at + *all == addr => *all += len,
            (asked, _) => self.asked.extend(asked),
        }
        // Neighbours in two allocations are no neighbours.
        if self.hold(hold) & self.target(range.mapping()) {
            self.copier.push(range.addr(), from, len);
        } else {
            self.copier.push_apart(range.addr(), from, len);
        }
    }

    /// Whether it is what was held last.
    fn hold(&mut self, hold: Hold) -> bool {
        let same = match (self.holds.last(), &hold) {
            (Some(Hold::Memory(last)), Hold::Memory(source)) => last.is_same(source),
            (Some(Hold::Map(last)), Hold::Map(map)) => Arc::ptr_eq(last, map),
            (Some(Hold::Slot(last)), Hold::Slot(slot)) => Arc::ptr_eq(last, slot),
            _ => false,
        };
        if !same {
            self.holds.push(hold);
        }
        same
    }

    /// Whether it is what was written to last.
    fn target(&mut self, mapping: &Arc<Mapping>) -> bool {
        let same = self.targets.last().is_some_and(|last| Arc::ptr_eq(last, mapping));
        if !same {
            self.targets.push(mapping.clone());
        }
        same
    }
}

fn unable_to_copy(error: CudaError) -> NoCopy {
    tracing::warn!(%error, "a copy to or from memory of a GPU failed");
    NoCopy::Unable
}

impl QpInner {
    /// Queues the copies that were collected.
    pub(super) fn launch(&mut self) {
        if !self.landings.has_collected() {
            return;
        }
        // What comes over TCP has more behind it, as a rule.
        let tcp = matches!(self.link, Link::Up(Stream::Tcp(_)));
        let short = self.landings.collected_bytes() <= if tcp { SHORT_STAGED } else { SHORT };
        // References that are taken and not copied yet are in front of what is staged.
        let mark = self.link.shm().filter(|_| !self.rx.is_copying()).map(|link| {
            let staged = self.rx.staged().len() as u64;
            link.rings().taken().wrapping_sub(staged)
        });
        if let Err(error) = self.landings.launch(mark) {
            return self.copies_failed(&error);
        }
        if short {
            let by = Instant::now() + SHORT_LOOKS;
            self.look_while(|_| Instant::now() < by);
        }
    }

    /// Looks at what is under way as long as that `pays`.
    fn look_while(&mut self, pays: impl Fn(&Landings) -> bool) {
        while self.landings.is_busy() && pays(&self.landings) {
            self.land();
        }
    }

    /// A turn's look.
    pub(super) fn look_at_landings(&mut self) {
        if std::mem::take(&mut self.landings.waits) {
            self.landings.next_look = None;
            self.readable = true;
        }
        if let Some(asked) = self.landings.next_look {
            self.landings.looks.looked(asked, Instant::now());
        }
        self.land();
        self.look_if_near();
    }

    /// Looks until the first of the copies is over, where that is likely in a moment. A table that is there to be read comes first: it is
    /// to be queued behind those that are under way.
    fn look_if_near(&mut self) {
        if !(self.landings.are_pages() && self.readable && self.may_read(self.held().1)) {
            self.look_while(Landings::is_near);
        }
    }

    /// The same behind what was read.
    pub(super) fn look_at_pages(&mut self) {
        if self.landings.are_pages() {
            self.look_if_near();
        }
    }

    /// More is collected than should wait. `slots`: it is of slots, for which the peer waits.
    pub(super) fn launch_if_much(&mut self, slots: bool) {
        let most = if slots { SHARED_FLIGHT } else { u64::MAX };
        if self.landings.collected.iter().any(|c| c.copier.pieces() >= PIECES || c.bytes >= most) {
            self.launch();
        }
    }

    /// Executes what has been copied by now.
    pub(super) fn land(&mut self) {
        if !self.landings.is_busy() {
            return;
        }
        let mark = match self.landings.over() {
            Ok(mark) => mark,
            Err(error) => return self.copies_failed(&error),
        };
        // Before anybody hears of it: whoever does may take the source away.
        if let (Some(mark), Some(link)) = (mark, self.link.shm()) {
            link.done_until(mark);
        }
        let sound = self.link.shm().is_none_or(ShmLink::is_sound);
        while let Some(desc) = self.landings.next_landed() {
            // As in `discard`: of a peer that has ended by then, what it has said of our requests still counts.
            if !sound && !matches!(desc.opcode, Opcode::Ack | Opcode::Nak) {
                continue;
            }
            if let Err(stop) = self.execute(&desc) {
                return self.stop(stop);
            }
        }
        self.free_ring();
        self.give_back();
    }

    /// Lets go of what the peer wants back, and nothing reads any more.
    pub(super) fn give_back(&mut self) {
        if let Link::Up(Stream::Shm(link)) | Link::Leaving(link) = &mut self.link
            && link.has_to_return()
        {
            let (latest, landed) = self.landings.numbers();
            link.give_back(landed, latest);
        }
    }

    /// Waits for the copies that are under way or collected, and executes what waits in line. For where something fails.
    pub(super) fn settle(&mut self) {
        if !self.landings.is_busy() {
            return;
        }
        if self.landings.launch(None).is_ok() {
            for in_flight in &self.landings.flights {
                // An error is found by the look.
                let _ = in_flight.flight.wait();
            }
        }
        self.land();
    }

    /// Waits as `settle` does where there is order: what `desc` does at once comes after all that was received before it, and its
    /// answer acknowledges that.
    pub(super) fn settle_before(&mut self, desc: &Desc) -> Result<(), Stop> {
        if !self.device.caps.ordered || !self.landings.is_busy() {
            return Ok(());
        }
        self.settle();
        if self.state == QpState::Err || self.refusal.is_some() || !matches!(self.link, Link::Up(_)) {
            return Err(Stop::NotReady);
        }
        if self.landings.is_busy() { Err(Stop::unable(desc)) } else { Ok(()) }
    }

    /// All that was received is done with, but for what is still in the staging buffer, and for references that are not copied.
    pub(super) fn free_ring(&self) {
        if let Link::Up(Stream::Shm(link)) = &self.link
            && !self.rx.is_copying()
            && self.landings.flights.is_empty()
            && !self.landings.has_collected()
        {
            link.done_but(self.rx.staged().len());
        }
    }

    /// The GPU has not copied: the first message in line is refused, or the request fails that it answers.
    fn copies_failed(&mut self, error: &CudaError) {
        tracing::warn!(%error, "copies to or from memory of a GPU failed");
        let first = self.landings.line.front().map(|(desc, _)| *desc);
        let first = first.or_else(|| self.rx.descs.get(self.rx.at).copied());
        self.landings.abandon();
        let Some(desc) = first else { return self.connection_lost() };
        let stop = match desc.opcode {
            Opcode::Send | Opcode::Write => Stop::refuse(&desc, Nak::Operation),
            _ => {
                let status = WcStatus::LocalQpOperation;
                Stop::Failed(Cause { msn: Some(desc.msn), status, vendor_err: 0 })
            }
        };
        self.stop(stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r8_who_waits_for_a_driver_looks_for_it_also_when_the_last_copy_is_over() {
        let mut landings = Landings::default();
        landings.wait_for_driver();
        assert_eq!(landings.over().unwrap(), None);
        assert!(landings.next_look().is_some());
    }
}
