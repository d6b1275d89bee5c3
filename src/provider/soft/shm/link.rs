//! A connection over shared memory, as one side has it: the rings, the socket beside them, and whose memory is known to whom.
//!
//! The socket says that the peer is there: it ends with the peer's process, however that ends. It wakes who sleeps, by one byte.
//! (An eventfd would do that a little faster. But it comes from the peer, who shares its flags and can fill it, so that a
//! write to it may block for ever; a message of a socket never does.) And it carries the descriptors of memory.
//!
//! Descriptors go out before the first reference to them is in the ring, and a socket within one host delivers at once. So a
//! reference to memory that is not known is looked up in the socket, and after that it is nonsense.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use socket2::Socket;

use super::super::landings::{Hold, Way};
use super::super::mr::{MemRange, MemfdOf};
use super::super::sys::{self, SendVecs};
use super::super::tuning::{LENT_BY_PEER, LENT_BYTES, WORDS_A_TURN};
use super::borrowed::{Borrowed, Lent};
use super::copy::{CopyHint, copy_from};
use super::cross::{self, CrossError, CrossReader};
use super::map::SharedMap;
use super::reference::{NO_MEMFD, Reference};
use super::rights;
use super::ring::{MAP_BYTES, Rings, Side};
use super::slots::{SLOTS_BYTES, Slots};
use super::words::{Hello, MAX_WORD, Probe, TOKEN, Verdict, Word};
use crate::cuda::{CudaError, DeviceMemory, Gpu, GpuWays, Told};
use crate::memory::Mapping;
use crate::provider::soft::frame::Preamble;
use crate::random::random;

/// An established connection.
#[derive(Debug)]
pub(in crate::provider::soft) struct ShmLink {
    rings: Arc<Rings>,
    socket: Socket,
    side: Side,
    /// What the peer is to find where our probe says.
    token: Box<[u8; TOKEN]>,
    /// Memfds that the peer has been sent, and how long they are.
    lent: BTreeMap<u64, u64>,
    /// The slots that the peer has been sent, by their name.
    slots: Option<u64>,
    /// Which ways memory of GPUs may take, either way.
    ways: GpuWays,
    /// Memory of GPUs that the peer has been lent, and has not given back: an exporter outlives its importers. It is given back as often
    /// as it was lent, in that order.
    kept: BTreeMap<u64, VecDeque<Arc<Mapping>>>,
    /// The peer is this process, so that it opens nothing.
    here: bool,
    /// Those of the peer.
    borrowed: Borrowed,
    /// Memory of GPUs that the peer wants back, and the number of the last copy that may read it, once that is known.
    returning: Vec<(u64, Lent, Option<u64>)>,
    /// For memory of the peer that it has not lent, from its first use on.
    cross: Option<CrossReader>,
    /// Whether the peer can read ours, once it has said so.
    reads_us: Option<Verdict>,
    /// Whether we could read the peer's.
    we_read: bool,
    ended: bool,
    /// The socket may have more to say than one turn takes.
    unread: bool,
    /// Wake-ups that the peer has been sent.
    #[cfg(test)]
    wakes: std::cell::Cell<u64>,
}

/// Why a reference cannot be copied.
#[derive(Debug)]
pub(in crate::provider::soft) enum NoCopy {
    /// No peer of ours refers to that.
    Nonsense,
    /// For a reason of this side.
    Unable,
    /// The peer is not there any more.
    Gone,
    /// Not yet: the driver is being loaded.
    Later,
}

impl ShmLink {
    /// Knocks at the door of that name with rings of our own making.
    pub(super) fn dial(socket: Socket, preamble: Preamble) -> io::Result<Self> {
        let (map, fd) = SharedMap::create(MAP_BYTES)?;
        let this = Self::new(socket, map, Side::Dialling)?;
        let hello = Hello { preamble, probe: this.probe() };
        rights::send(this.socket.as_fd(), &hello.encode(), Some(fd.as_fd()))?;
        Ok(this)
    }

    /// Lets in who has said `hello`, with rings of its making.
    pub(super) fn accept(socket: Socket, map: SharedMap, hello: &Hello) -> io::Result<Self> {
        let mut this = Self::new(socket, map, Side::Listening)?;
        this.answer_probe(&hello.probe);
        Ok(this)
    }

    fn new(socket: Socket, map: SharedMap, side: Side) -> io::Result<Self> {
        let mut token = Box::new([0; TOKEN]);
        random(&mut token[..])?;
        let here = cross::is_this_process(socket.as_fd());
        #[cfg(test)]
        let here = here && !super::inspect::plays_two_processes();
        Ok(Self {
            rings: Arc::new(Rings::new(map, side)),
            socket,
            side,
            token,
            lent: BTreeMap::new(),
            slots: None,
            ways: GpuWays::default(),
            kept: BTreeMap::new(),
            here,
            borrowed: Borrowed::default(),
            returning: Vec::new(),
            cross: None,
            reads_us: None,
            we_read: false,
            ended: false,
            unread: true,
            #[cfg(test)]
            wakes: Default::default(),
        })
    }

    pub(in crate::provider::soft) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(in crate::provider::soft) fn rings(&self) -> &Arc<Rings> {
        &self.rings
    }

    fn probe(&self) -> Probe {
        Probe { at: self.token.as_ptr().expose_provenance() as u64, token: *self.token }
    }

    /// Tries to read what the peer has put where it says, and tells the peer.
    fn answer_probe(&mut self, probe: &Probe) {
        let read = CrossReader::open(self.fd()).and_then(|reader| reader.probe(probe.at, &probe.token));
        let verdict = match &read {
            Ok(()) => Verdict::Yes,
            Err(CrossError::NotVisible) => Verdict::NotVisible,
            Err(CrossError::NotPermitted { .. }) => Verdict::NotPermitted,
            Err(_) => Verdict::Failed,
        };
        if let Err(e) = read {
            tracing::debug!(error = %e, "memory that the peer has not lent cannot be read from here");
        }
        self.we_read = verdict == Verdict::Yes;
        // Unheard, it means that we cannot read.
        self.say(&Word::Reads { verdict, probe: self.probe() });
    }

    /// False when the peer has not been told.
    fn say(&self, word: &Word) -> bool {
        self.say_with(word, None)
    }

    fn say_with(&self, word: &Word, fd: Option<BorrowedFd<'_>>) -> bool {
        let (bytes, len) = word.encode();
        rights::send(self.socket.as_fd(), &bytes[..len], fd).is_ok()
    }

    /// One that finds no room is not needed: there are messages before it that the peer has not taken.
    fn wake_peer(&self) {
        #[cfg(test)]
        self.wakes.set(self.wakes.get() + 1);
        self.say(&Word::Wake);
    }

    /// Takes what the socket has to say, up to a bound. An error is for nonsense.
    pub(in crate::provider::soft) fn attend(&mut self) -> io::Result<()> {
        self.unread = true;
        for _ in 0..WORDS_A_TURN {
            let mut bytes = [0; MAX_WORD];
            match rights::recv(self.socket.as_fd(), &mut bytes) {
                Ok(message) if message.len > 0 => {
                    let word = Word::decode(&bytes[..message.len]).ok_or(io::ErrorKind::InvalidData)?;
                    self.hear(word, message.fd)?;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.unread = false;
                    return Ok(());
                }
                // A reset is told before what was sent ahead of it, and once.
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionReset) => {
                }
                Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(e),
                _ => {
                    (self.ended, self.unread) = (true, false);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn hear(&mut self, word: Word, fd: Option<OwnedFd>) -> io::Result<()> {
        match (word, fd) {
            (Word::Wake, None) => Ok(()),
            (Word::Lend { name, bytes }, fd) => self.borrowed.add(name, bytes, fd),
            (Word::Slots { name, bytes }, fd) => self.borrowed.add_slots(name, bytes, fd),
            (Word::Memory(told), None) => self.borrowed.add_memory(told, self.here),
            (Word::Forget { name }, None) => {
                if let Some(lent @ Lent::Memory(_)) = self.borrowed.forget(name) {
                    self.returning.push((name, lent, None));
                }
                Ok(())
            }
            (Word::Returned { name }, None) => {
                if let Some(kept) = self.kept.get_mut(&name)
                    && let Some(memory) = kept.pop_front()
                {
                    if kept.is_empty() {
                        self.kept.remove(&name);
                    }
                    let_go(memory);
                }
                Ok(())
            }
            (Word::Reads { verdict, probe }, None) => {
                let first = self.reads_us.replace(verdict).is_none();
                if first && self.side == Side::Dialling {
                    self.answer_probe(&probe);
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// [`attend`](Self::attend) has not taken everything.
    pub(in crate::provider::soft) fn is_unread(&self) -> bool {
        self.unread
    }

    /// The peer is not there any more, by its own word or by the end of its socket.
    pub(in crate::provider::soft) fn has_ended(&self) -> bool {
        self.ended || self.rings.peer_closed()
    }

    /// Puts as much of a frame into the ring as there is room for.
    pub(in crate::provider::soft) fn send(&self, vecs: &SendVecs<'_>) -> io::Result<usize> {
        if self.has_ended() || self.rings.is_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // SAFETY: the elements of the list are readable as long as it lives.
        let (n, wake) = unsafe { self.rings.put(vecs.pieces())? };
        if wake {
            self.wake_peer();
        }
        Ok(n)
    }

    /// Takes bytes out of the ring. 0 at the end of the connection, when everything from before it was taken.
    pub(in crate::provider::soft) fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        match self.rings.take(into) {
            // The end is said after the last bytes, so that those are there once it is seen.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.has_ended() => {
                match self.rings.take(into) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
                    other => other,
                }
            }
            other => other,
        }
    }

    /// All that was received but the last `kept` bytes is done with.
    pub(in crate::provider::soft) fn done_but(&self, kept: usize) {
        if self.rings.free_all_but(kept) {
            self.wake_peer();
        }
    }

    /// Whether what was copied until now is what the peer meant, and may be executed.
    pub(in crate::provider::soft) fn is_sound(&self) -> bool {
        self.rings.is_sound()
    }

    /// Makes sure that the peer has been lent the memfd. False when it cannot be now.
    pub(in crate::provider::soft) fn lend(&mut self, memfd: &MemfdOf<'_>) -> bool {
        if self.lent.contains_key(&memfd.id) {
            return true;
        }
        // The peer would take more for nonsense.
        let bytes = self.lent.values().sum::<u64>().saturating_add(memfd.len);
        if self.lent.len() >= LENT_BY_PEER || bytes > LENT_BYTES {
            return false;
        }
        let said = self.say_with(&Word::Lend { name: memfd.id, bytes: memfd.len }, Some(memfd.fd));
        if said {
            self.lent.insert(memfd.id, memfd.len);
        }
        said
    }

    /// The same of memory of a GPU, which `mapping` is.
    pub(in crate::provider::soft) fn lend_memory(
        &mut self,
        mapping: &Arc<Mapping>,
        memory: &DeviceMemory,
    ) -> bool {
        let name = memory.name();
        if self.lent.contains_key(&name) {
            return true;
        }
        if self.lent.len() >= LENT_BY_PEER {
            return false;
        }
        let handle = match if self.here { Ok([0; 64]) } else { memory.export() } {
            Ok(handle) => handle,
            Err(error) => {
                tracing::warn!(%error, "memory of a GPU cannot be lent to a peer");
                return false;
            }
        };
        let ((base, bytes), uuid) = (memory.allocation(), memory.uuid());
        let said = self.say(&Word::Memory(Told { name, bytes, base, uuid, handle }));
        if said {
            self.lent.insert(name, 0);
            self.kept.entry(name).or_default().push_back(mapping.clone());
        }
        said
    }

    /// Makes sure that the peer has been lent the slots of this connection. False when it cannot be now.
    pub(super) fn lend_slots(&mut self, slots: &Slots) -> bool {
        if self.slots == Some(slots.name()) {
            return true;
        }
        // The peer takes one memfd of slots, and keeps it as long as this connection.
        let first = self.slots.is_none();
        let word = Word::Slots { name: slots.name(), bytes: SLOTS_BYTES };
        let said = first && self.say_with(&word, Some(slots.fd()));
        if said {
            self.slots = Some(slots.name());
        }
        said
    }

    /// From here on memory of GPUs takes these ways only.
    pub(in crate::provider::soft) fn set_ways(&mut self, ways: GpuWays) {
        self.ways = ways;
    }

    /// Whether memory of a GPU is staged to the peer, and not lent.
    pub(in crate::provider::soft) fn stages(&self, memory: &DeviceMemory) -> bool {
        self.ways.staged && (!self.ways.ipc || self.not_exportable(memory).is_some())
    }

    fn not_exportable(&self, memory: &DeviceMemory) -> Option<CudaError> {
        if self.here { None } else { memory.not_exportable() }
    }

    /// Why the peer cannot be given memory of a GPU.
    pub(in crate::provider::soft) fn why_not_give(&self, memory: &DeviceMemory) -> Option<CudaError> {
        if !self.ways.staged {
            return self.not_exportable(memory);
        }
        // Where there are slots already no new ones are made.
        let needs_slots = self.slots.is_none() && self.stages(memory);
        needs_slots.then(|| memory.gpu().why_no_slots()).flatten()
    }

    /// Whether the peer is this process.
    pub(in crate::provider::soft) fn is_here(&self) -> bool {
        self.here
    }

    /// Takes back those that are lent and not in `live`: nothing refers to them any more. The peer then lets go of their pages.
    /// This is a part of a turn of the queue pair, so that one where nothing happens keeps what it has borrowed.
    pub(in crate::provider::soft) fn take_back(&mut self, live: impl Fn(u64) -> bool) {
        let socket = &self.socket;
        self.lent.retain(|&name, _| {
            let (bytes, len) = Word::Forget { name }.encode();
            // One that cannot be said now is said next time.
            live(name) || rights::send(socket.as_fd(), &bytes[..len], None).is_err()
        });
    }

    /// Something is lent.
    pub(in crate::provider::soft) fn has_lent(&self) -> bool {
        !self.lent.is_empty()
    }

    #[cfg(test)]
    pub(super) fn wakes(&self) -> u64 {
        self.wakes.get()
    }

    /// Memfds of the peer that are known.
    #[cfg(test)]
    pub(super) fn known_memfds(&self) -> usize {
        self.borrowed.len()
    }

    /// Whether the peer reads memory of ours that is not lent.
    pub(in crate::provider::soft) fn reads_us(&self) -> bool {
        self.reads_us == Some(Verdict::Yes)
    }

    /// Why it does not. `None` when it does, or has not said.
    pub(in crate::provider::soft) fn why_not_read(&self) -> Option<&'static str> {
        self.reads_us.and_then(Verdict::why_not)
    }

    /// Finds the memory that `reference` is in, so that [`copy`](Self::copy) can be called.
    pub(in crate::provider::soft) fn find(&mut self, reference: &Reference) -> Result<(), NoCopy> {
        if reference.memfd == NO_MEMFD {
            if !self.we_read {
                return Err(NoCopy::Nonsense);
            }
            if self.cross.is_none() {
                self.cross = Some(CrossReader::open(self.fd()).map_err(no_copy)?);
            }
            return Ok(());
        }
        if self.borrowed.get(reference.memfd).is_none() {
            self.attend().map_err(|_| NoCopy::Nonsense)?;
        }
        match self.borrowed.get(reference.memfd) {
            Some(Lent::Map(_) | Lent::Memory(_)) => Ok(()),
            Some(Lent::Nothing) => Err(NoCopy::Unable),
            None if self.ended => Err(NoCopy::Gone),
            None => Err(NoCopy::Nonsense),
        }
    }

    /// Fills `target` from `reference`, from `skip` bytes into it on. It has been found.
    pub(in crate::provider::soft) fn copy(
        &self,
        reference: &Reference,
        skip: u64,
        target: MemRange<'_>,
        hint: CopyHint,
    ) -> Result<(), NoCopy> {
        let at = reference.offset.checked_add(skip).ok_or(NoCopy::Nonsense)?;
        match (self.borrowed.get(reference.memfd), &self.cross) {
            (Some(Lent::Map(map)), _) => copy_from(map, at, target, hint).ok_or(NoCopy::Nonsense),
            (_, Some(reader)) if reference.memfd == NO_MEMFD => {
                reader.read(&[(at, target.len() as u64)], target).map_err(no_copy)
            }
            _ => Err(NoCopy::Nonsense),
        }
    }

    /// Whether a mapping has `len` bytes from the beginning of `reference` on. Of other memory that is found out by who copies.
    pub(in crate::provider::soft) fn may_hold(&self, reference: &Reference, len: u64) -> bool {
        match self.borrowed.get(reference.memfd) {
            Some(Lent::Map(map)) => map.at(reference.offset, len).is_some(),
            _ => true,
        }
    }

    /// Whether `reference` is to the peer's slots.
    pub(in crate::provider::soft) fn is_of_slots(&self, reference: &Reference) -> bool {
        matches!(self.borrowed.get(reference.memfd), Some(Lent::Map(map)) if map.is_of_slots())
    }

    /// Whether `reference` is to memory of a GPU.
    pub(in crate::provider::soft) fn is_of_device(&self, reference: &Reference) -> bool {
        matches!(self.borrowed.get(reference.memfd), Some(Lent::Memory(_)))
    }

    /// How a GPU gets `len` bytes of `reference`, from `skip` bytes into it on: `gpu`, which has the target, or else the one that
    /// has the source. It has been found.
    pub(in crate::provider::soft) fn way(
        &mut self,
        reference: &Reference,
        skip: u64,
        len: u64,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<Way, NoCopy> {
        let at = reference.offset.checked_add(skip).ok_or(NoCopy::Nonsense)?;
        match (self.borrowed.get_mut(reference.memfd), &self.cross) {
            (Some(Lent::Memory(memory)), _) => {
                let gpu = match gpu {
                    Some(gpu) => gpu.clone(),
                    None => memory.gpu().ok_or(NoCopy::Later)?.ok_or(NoCopy::Unable)?,
                };
                if !self.ways.ipc {
                    tracing::warn!("a peer lends memory of a GPU, and this side has forbidden CUDA IPC");
                    return Err(NoCopy::Unable);
                }
                match memory.at(&gpu, at, len) {
                    Ok(Some((from, source))) => {
                        Ok(Way::Device { gpu, from, hold: Hold::Memory(source), here: memory.is_own() })
                    }
                    Ok(None) => Err(NoCopy::Nonsense),
                    Err(error) => {
                        tracing::warn!(%error, "memory of a GPU that a peer lends cannot be opened");
                        Err(NoCopy::Unable)
                    }
                }
            }
            (Some(Lent::Map(map)), _) if map.is_of_slots() => {
                let gpu = gpu.ok_or(NoCopy::Unable)?;
                if !self.ways.staged {
                    tracing::warn!("a peer stages memory of a GPU, and this side has forbidden that");
                    return Err(NoCopy::Unable);
                }
                let from = map.at(at, len).ok_or(NoCopy::Nonsense)?.expose_provenance() as u64;
                let pinned = map.is_pinned(gpu).ok_or(NoCopy::Later)?;
                Ok(Way::Slot { from, hold: Hold::Map(map.clone()), pinned })
            }
            (Some(Lent::Map(map)), _) => {
                let from = map.at(at, len).ok_or(NoCopy::Nonsense)?.expose_provenance() as u64;
                Ok(Way::Host { from, hold: Hold::Map(map.clone()) })
            }
            (_, Some(reader)) if reference.memfd == NO_MEMFD => {
                let mut bytes = vec![0; usize::try_from(len).map_err(|_| NoCopy::Nonsense)?];
                reader.read_bytes(at, &mut bytes).map_err(no_copy)?;
                Ok(Way::Bytes(bytes))
            }
            _ => Err(NoCopy::Nonsense),
        }
    }

    /// Lets go of what the peer wants back: all copies up to `landed` are over, and none after `latest` reads it.
    pub(in crate::provider::soft) fn give_back(&mut self, landed: u64, latest: u64) {
        let mut free = Vec::new();
        self.returning.retain_mut(|(name, lent, last)| {
            let over = *last.get_or_insert(latest) <= landed;
            if over {
                free.push((*name, std::mem::replace(lent, Lent::Nothing)));
            }
            !over
        });
        for (name, lent) in free {
            drop(lent);
            // Unheard, the peer keeps it as long as this connection.
            self.say(&Word::Returned { name });
        }
    }

    /// The peer wants something back.
    pub(in crate::provider::soft) fn has_to_return(&self) -> bool {
        !self.returning.is_empty()
    }

    /// What was taken of the ring until there had been `tail` bytes of it is done with.
    pub(in crate::provider::soft) fn done_until(&self, tail: u64) {
        if self.rings.free_until(tail) {
            self.wake_peer();
        }
    }
}

/// Freeing memory of a GPU waits for the GPU.
fn let_go(memory: Arc<Mapping>) {
    if let Some(lane) = memory.device_memory().map(|memory| memory.gpu().lane().clone()) {
        lane.run(move || drop(memory));
    }
}

/// Keeps memory that a peer has open until the peer has closed it, which it says by its own end: one that is frozen may take long.
fn keep_until_gone<T: Send + 'static>(socket: io::Result<Socket>, kept: T) {
    // Dropped by nobody, where it cannot be waited.
    let kept = ManuallyDrop::new(kept);
    let waiting = socket.and_then(|socket| {
        // It wakes the peer, and says that nothing more comes.
        let _ = socket.shutdown(Shutdown::Write);
        let wait = move || {
            sys::wait_for_hang_up(socket.as_fd());
            drop(ManuallyDrop::into_inner(kept));
        };
        std::thread::Builder::new().name("landfall-lent".to_owned()).stack_size(256 << 10).spawn(wait)
    });
    if let Err(error) = waiting {
        tracing::error!(%error, "memory of a GPU that a peer has open is never freed");
    }
}

fn no_copy(e: CrossError) -> NoCopy {
    match e {
        CrossError::Gone => NoCopy::Gone,
        CrossError::Fault { .. } | CrossError::NotThePeer => NoCopy::Nonsense,
        CrossError::NotVisible | CrossError::NotPermitted { .. } | CrossError::Os { .. } => {
            tracing::warn!(error = %e, "memory of a peer could be read and cannot be any more");
            NoCopy::Unable
        }
    }
}

impl Drop for ShmLink {
    /// Nobody copies any more.
    fn drop(&mut self) {
        // What is open of the peer's memory is closed before the peer hears of the end, and may free it.
        self.borrowed = Borrowed::default();
        self.returning.clear();
        // Before the socket closes, and before anybody is told that its sources are free.
        self.rings.close();
        let kept = std::mem::take(&mut self.kept);
        if kept.is_empty() {
            return;
        }
        if self.here || self.ended {
            kept.into_values().flatten().for_each(let_go);
        } else {
            keep_until_gone(self.socket.try_clone(), kept);
        }
    }
}
