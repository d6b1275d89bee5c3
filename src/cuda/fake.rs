//! A driver that records: its devices' memory is the host's, its streams run when they are looked at, and a call in the wrong
//! context is noted. For what has to be right without a GPU: contexts, order, lifetimes.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::ThreadId;

use super::context::{Cuda, lock};
use super::driver::{Driver, GatherArgs, PointerFacts};
use super::error::CudaError;
use super::gather::{End, Plan};
use super::sys::{IPC_HANDLE, Opaque};

thread_local! {
    static CONTEXTS: RefCell<Vec<Opaque>> = const { RefCell::new(Vec::new()) };
}

/// No two recorded drivers of a process have a context in common.
static NEXT_CONTEXT: AtomicUsize = AtomicUsize::new(0x1000);

static RECORDED: Mutex<Vec<Weak<Cuda>>> = Mutex::new(Vec::new());

/// Every recorded driver of the process.
pub(super) fn recorded() -> Vec<Arc<Cuda>> {
    lock(&RECORDED).iter().filter_map(Weak::upgrade).collect()
}

pub(crate) struct Fake {
    devices: u32,
    first: Opaque,
    state: Mutex<State>,
    /// Looks at an event until what is before it is done.
    lag: AtomicU64,
    /// The call that does not come back, and how many of it wait for that.
    stopped: Mutex<(Option<&'static str>, usize)>,
    go_on: Condvar,
}

#[derive(Default)]
struct State {
    memory: BTreeMap<u64, Allocation>,
    /// Pinned host memory, and what it is cut from: pieces lie side by side, as the driver's may.
    pinned: BTreeMap<u64, usize>,
    arenas: Vec<Vec<u128>>,
    /// What was opened, and how often.
    open: BTreeMap<u64, u32>,
    streams: BTreeMap<Opaque, Stream>,
    events: BTreeMap<Opaque, Event>,
    next: Opaque,
    held: bool,
    held_on: Option<Opaque>,
    /// What is queued from now on waits.
    held_new: bool,
    calls: Vec<&'static str>,
    wrong: Vec<String>,
    /// Where modules were made.
    modules: Vec<ThreadId>,
    /// Calls that fail, and how often from now on.
    refused: BTreeMap<&'static str, usize>,
}

struct Allocation {
    bytes: Vec<u128>,
    len: usize,
    context: Opaque,
    pooled: bool,
    mapped: bool,
    id: u64,
}

#[derive(Default)]
struct Stream {
    context: Opaque,
    queue: VecDeque<Work>,
    held: bool,
}

#[derive(Default)]
struct Event {
    context: Opaque,
    done: bool,
    looks: u64,
}

enum Work {
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
    /// Of ordinary host memory: copied already, as the driver does.
    Put {
        to: u64,
        bytes: Vec<u8>,
    },
    Gather(GatherArgs),
    Record(Opaque),
}

impl Fake {
    /// With so many devices.
    pub(crate) fn new(devices: u32) -> (Arc<Cuda>, Arc<Self>) {
        let first = NEXT_CONTEXT.fetch_add(0x100, Ordering::Relaxed);
        let (state, stopped) = (Mutex::default(), Mutex::default());
        let (lag, go_on) = (AtomicU64::new(0), Condvar::new());
        let this = Arc::new(Self { devices, first, state, lag, stopped, go_on });
        let cuda = Cuda::of(Driver::Fake(this.clone()));
        lock(&RECORDED).push(Arc::downgrade(&cuda));
        (cuda, this)
    }

    // What a test does and sees.

    /// Nothing that is queued happens until it is let go.
    pub(crate) fn hold(&self, held: bool) {
        lock(&self.state).held = held;
    }

    /// The same of the streams that something is queued in meanwhile; they stay so.
    pub(crate) fn hold_new(&self, held: bool) {
        lock(&self.state).held_new = held;
    }

    /// Freeing or pinning, by its name, does not come back until another is stopped, or none: as where a driver waits for its GPU.
    pub(crate) fn stop(&self, call: Option<&'static str>) {
        lock(&self.stopped).0 = call;
        self.go_on.notify_all();
    }

    /// Calls that wait for that.
    pub(crate) fn stopped(&self) -> usize {
        lock(&self.stopped).1
    }

    /// A test that has failed lets go of what it has.
    fn pass(&self, call: &str) {
        if std::thread::panicking() {
            return;
        }
        let mut stopped = lock(&self.stopped);
        stopped.1 += 1;
        let is_stopped = |stopped: &mut (Option<&'static str>, usize)| stopped.0 == Some(call);
        stopped = self.go_on.wait_while(stopped, is_stopped).unwrap_or_else(PoisonError::into_inner);
        stopped.1 -= 1;
    }

    /// The same on one device.
    pub(crate) fn hold_on(&self, device: u32, held: bool) {
        lock(&self.state).held_on = held.then_some(self.first + device as usize);
    }

    /// An event is seen after so many looks.
    pub(crate) fn lag(&self, looks: u64) {
        self.lag.store(looks, Ordering::Relaxed);
    }

    /// Calls in a context that is not that of what they name, and calls with none.
    pub(crate) fn wrong(&self) -> Vec<String> {
        lock(&self.state).wrong.clone()
    }

    /// The next `times` of `call` fail.
    pub(crate) fn refuse(&self, call: &'static str, times: usize) {
        lock(&self.state).refused.insert(call, times);
    }

    pub(super) fn refuses(&self, call: &str) -> bool {
        let mut state = lock(&self.state);
        state.refused.get_mut(call).is_some_and(|left| {
            let refuses = *left > 0;
            *left = left.saturating_sub(1);
            refuses
        })
    }

    /// How often `call` was made.
    pub(crate) fn count(&self, call: &str) -> usize {
        lock(&self.state).calls.iter().filter(|&&c| c == call).count()
    }

    /// Allocations, and opened ones of peers.
    pub(crate) fn in_use(&self) -> (usize, usize) {
        let state = lock(&self.state);
        // Lists of gathered copies are kept, and are the driver side's own.
        (state.memory.len(), state.open.len())
    }

    /// Pinned pieces of host memory.
    pub(crate) fn pinned(&self) -> usize {
        lock(&self.state).pinned.len()
    }

    /// Whether the driver has compiled something on that thread.
    pub(crate) fn made_modules_on(&self, thread: ThreadId) -> bool {
        lock(&self.state).modules.contains(&thread)
    }

    /// Copies that are queued and not made.
    pub(crate) fn queued(&self) -> usize {
        let state = lock(&self.state);
        let copies = |s: &Stream| s.queue.iter().filter(|w| !matches!(w, Work::Record(_))).count();
        state.streams.values().map(copies).sum()
    }

    /// Memory as another part of the program would have it, in the context of `device`.
    pub(crate) fn foreign(&self, device: u32, len: usize, pooled: bool) -> u64 {
        let at = self.allocate(len, self.first + device as usize);
        if let Some(allocation) = lock(&self.state).memory.get_mut(&at) {
            allocation.pooled = pooled;
        }
        at
    }

    /// Memory that another part of the program has mapped itself.
    pub(crate) fn mapped(&self, device: u32, len: usize) -> u64 {
        let at = self.allocate(len, self.first + device as usize);
        if let Some(allocation) = lock(&self.state).memory.get_mut(&at) {
            allocation.mapped = true;
        }
        at
    }

    /// A stream of the program's on `device`.
    pub(crate) fn stream_of(&self, device: u32) -> Opaque {
        let mut state = lock(&self.state);
        let stream = state.new_handle();
        let context = self.first + device as usize;
        state.streams.insert(stream, Stream { context, ..Stream::default() });
        stream
    }

    /// The program fills device memory, when its stream gets there.
    pub(crate) fn queue_fill(&self, stream: Opaque, to: u64, bytes: Vec<u8>) {
        lock(&self.state).queue(stream, Work::Put { to, bytes });
    }

    // The driver.

    pub(super) fn devices(&self) -> u32 {
        self.devices
    }

    /// Another one for each device of each recorded driver.
    pub(super) fn uuid(&self, device: u32) -> [u8; 16] {
        (self.first as u128 + u128::from(device)).to_le_bytes()
    }

    pub(super) fn primary(&self, device: i32) -> Opaque {
        self.first + device as usize
    }

    pub(super) fn push(&self, context: Opaque) {
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
    }

    pub(super) fn pop(&self) {
        CONTEXTS.with_borrow_mut(Vec::pop);
    }

    pub(super) fn current(&self) -> Option<Opaque> {
        CONTEXTS.with_borrow(|contexts| contexts.last().copied())
    }

    /// Notes a call, and whether it is made in the context of what it names.
    fn note(&self, state: &mut State, call: &'static str, of: Option<Opaque>) {
        state.calls.push(call);
        let current = self.current();
        if current.is_none() || (of.is_some() && of != current) {
            state.wrong.push(format!("{call} of context {of:x?} in {current:x?}"));
        }
    }

    fn allocate(&self, len: usize, context: Opaque) -> u64 {
        let mut state = lock(&self.state);
        let bytes = vec![0u128; len.div_ceil(16)];
        let at = bytes.as_ptr().expose_provenance() as u64;
        let id = state.new_handle() as u64;
        state.memory.insert(at, Allocation { bytes, len, context, pooled: false, mapped: false, id });
        at
    }

    pub(super) fn alloc(&self, len: usize) -> u64 {
        let context = self.current();
        self.note(&mut lock(&self.state), "cuMemAlloc", None);
        self.allocate(len, context.unwrap_or(0))
    }

    pub(super) fn free(&self, at: u64) {
        self.pass("cuMemFree");
        let mut state = lock(&self.state);
        let of = state.memory.get(&at).map(|a| a.context);
        self.note(&mut state, "cuMemFree", of);
        // As the driver does, it waits for what is queued.
        let streams: Vec<_> = state.streams.keys().copied().collect();
        streams.into_iter().for_each(|stream| state.run(stream));
        if let Some(allocation) = state.memory.remove(&at) {
            drop(allocation.bytes);
        } else {
            state.wrong.push(format!("cuMemFree of {at:#x}, which is no allocation"));
        }
    }

    pub(super) fn host_alloc(&self, len: usize) -> u64 {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuMemHostAlloc", None);
        let place = |arena: &Vec<u128>| {
            let (base, size) = (arena.as_ptr().expose_provenance() as u64, size_of_val(&arena[..]));
            (0..size / len).map(|n| base + (n * len) as u64).find(|at| !state.pinned.contains_key(at))
        };
        let at = state.arenas.iter().find_map(place).unwrap_or_else(|| {
            let arena = vec![0u128; 64 * len.div_ceil(16)];
            let base = arena.as_ptr().expose_provenance() as u64;
            state.arenas.push(arena);
            base
        });
        state.pinned.insert(at, len);
        at
    }

    pub(super) fn host_free(&self, at: u64) {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuMemFreeHost", None);
        state.run_all();
        if state.pinned.remove(&at).is_none() {
            state.wrong.push(format!("cuMemFreeHost of {at:#x}, which is not pinned"));
        }
    }

    pub(super) fn host_register(&self, at: u64, len: usize) {
        self.pass("cuMemHostRegister");
        let mut state = lock(&self.state);
        self.note(&mut state, "cuMemHostRegister", None);
        if state.is_pinned(at) {
            state.wrong.push(format!("cuMemHostRegister of {at:#x}, which is pinned already"));
        }
        state.pinned.insert(at, len);
    }

    pub(super) fn host_unregister(&self, at: u64) {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuMemHostUnregister", None);
        state.run_all();
        if state.pinned.remove(&at).is_none() {
            state.wrong.push(format!("cuMemHostUnregister of {at:#x}, which is not pinned"));
        }
    }

    pub(super) fn zero(&self, at: u64, len: usize, stream: Opaque) {
        let mut state = lock(&self.state);
        self.note_stream(&mut state, "cuMemsetD8Async", stream);
        state.queue(stream, Work::Put { to: at, bytes: vec![0; len] });
    }

    pub(super) fn range(&self, at: u64) -> Option<(u64, u64)> {
        let mut state = lock(&self.state);
        let found = state.find(at).map(|(base, a)| (base, a.len as u64, a.context));
        // One that a peer has lent belongs to the context that opened it.
        let of = found.filter(|f| !state.open.contains_key(&f.0)).map(|f| f.2);
        self.note(&mut state, "cuMemGetAddressRange", of);
        found.map(|(base, len, _)| (base, len))
    }

    pub(super) fn pointer(&self, at: u64) -> Option<PointerFacts> {
        let state = lock(&self.state);
        let (_, a) = state.find(at)?;
        let context = if a.pooled || a.mapped { 0 } else { a.context };
        let ordinal = (a.context - self.first) as i32;
        Some(PointerFacts {
            context,
            ordinal,
            managed: false,
            ipc_capable: !a.pooled && !a.mapped,
            pooled: a.pooled,
            buffer_id: a.id,
        })
    }

    pub(super) fn dma_buf(&self, at: u64, len: usize) -> Result<OwnedFd, CudaError> {
        self.note(&mut lock(&self.state), "cuMemGetHandleForAddressRange", None);
        let _ = (at, len);
        let null = std::fs::File::open("/dev/null").map(OwnedFd::from);
        null.map_err(|e| CudaError::NoDriver { reason: e.to_string() })
    }

    pub(super) fn flush_direct_writes(&self) {
        self.note(&mut lock(&self.state), "cuFlushGPUDirectRDMAWrites", None);
    }

    pub(super) fn stream(&self) -> Opaque {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuStreamCreate", None);
        let stream = state.new_handle();
        state.streams.insert(stream, Stream { context: self.current().unwrap_or(0), ..Stream::default() });
        stream
    }

    pub(super) fn event(&self) -> Opaque {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuEventCreate", None);
        let event = state.new_handle();
        state.events.insert(event, Event { context: self.current().unwrap_or(0), ..Event::default() });
        event
    }

    fn note_stream(&self, state: &mut State, call: &'static str, stream: Opaque) {
        let of = state.streams.get(&stream).map(|s| s.context);
        self.note(state, call, Some(of.unwrap_or(0)));
    }

    /// A call on a stream or an event.
    pub(super) fn used(&self, call: &'static str, handle: Opaque) {
        let mut state = lock(&self.state);
        let of =
            state.streams.get(&handle).map(|s| s.context).or(state.events.get(&handle).map(|e| e.context));
        self.note(&mut state, call, Some(of.unwrap_or(0)));
    }

    pub(super) fn record(&self, event: Opaque, stream: Opaque) {
        let mut state = lock(&self.state);
        self.note_stream(&mut state, "cuEventRecord", stream);
        let looks = self.lag.load(Ordering::Relaxed);
        if let Some(event) = state.events.get_mut(&event) {
            (event.done, event.looks) = (false, looks);
        }
        state.queue(stream, Work::Record(event));
    }

    pub(super) fn query(&self, event: Opaque) -> bool {
        let mut state = lock(&self.state);
        let of = state.events.get(&event).map(|e| e.context);
        self.note(&mut state, "cuEventQuery", of);
        if let Some(event) = state.events.get_mut(&event)
            && event.looks > 0
        {
            event.looks -= 1;
            return false;
        }
        if !state.held {
            let held = state.held_on;
            let runs = |(&at, stream): (&Opaque, &Stream)| {
                (Some(stream.context) != held && !stream.held).then_some(at)
            };
            let streams: Vec<_> = state.streams.iter().filter_map(runs).collect();
            streams.into_iter().for_each(|stream| state.run(stream));
        }
        state.events.get(&event).is_some_and(|e| e.done)
    }

    /// The GPU gets on with it, held or not: nobody waits here for a test.
    pub(super) fn finish(&self, stream: Opaque) {
        let mut state = lock(&self.state);
        self.note_stream(&mut state, "cuStreamSynchronize", stream);
        state.run(stream);
    }

    pub(super) fn finish_event(&self, event: Opaque) {
        let mut state = lock(&self.state);
        let of = state.events.get(&event).map(|e| e.context);
        self.note(&mut state, "cuEventSynchronize", of);
        state.run_all();
    }

    pub(super) fn copy(&self, to: u64, from: u64, len: usize, stream: Opaque) {
        let mut state = lock(&self.state);
        self.note_stream(&mut state, "cuMemcpyAsync", stream);
        for at in [to, from] {
            if !state.is_whole(at, len) {
                state
                    .wrong
                    .push(format!("a copy of {len} bytes at {at:#x}, which is in several allocations"));
            }
        }
        // What is read when the stream gets there, and not at once.
        let late = |at| state.find(at).is_some() || state.is_pinned(at);
        let work = if late(from) {
            Work::Copy { to, from, len }
        } else {
            let mut bytes = vec![0; len];
            // SAFETY: host memory of the caller's, which it promises to be readable.
            unsafe { std::ptr::copy_nonoverlapping(ptr(from), bytes.as_mut_ptr(), len) };
            Work::Put { to, bytes }
        };
        state.queue(stream, work);
    }

    pub(super) fn function(&self) -> Opaque {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuModuleLoadData", None);
        state.modules.push(std::thread::current().id());
        1
    }

    pub(super) fn gather(&self, args: GatherArgs, stream: Opaque) {
        let mut state = lock(&self.state);
        self.note_stream(&mut state, "cuLaunchKernel", stream);
        state.queue(stream, Work::Gather(args));
    }

    pub(super) fn ipc_export(&self, base: u64) -> [u8; IPC_HANDLE] {
        let mut state = lock(&self.state);
        let of = state.memory.get(&base).map(|a| a.context);
        self.note(&mut state, "cuIpcGetMemHandle", Some(of.unwrap_or(0)));
        let mut handle = [0; IPC_HANDLE];
        handle[..8].copy_from_slice(&base.to_le_bytes());
        handle
    }

    pub(super) fn ipc_open(&self, handle: [u8; IPC_HANDLE]) -> Option<u64> {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuIpcOpenMemHandle", None);
        let (base, _) = handle.split_first_chunk()?;
        let base = u64::from_le_bytes(*base);
        state.memory.contains_key(&base).then(|| {
            *state.open.entry(base).or_default() += 1;
            base
        })
    }

    pub(super) fn ipc_close(&self, at: u64) {
        let mut state = lock(&self.state);
        self.note(&mut state, "cuIpcCloseMemHandle", None);
        if !state.memory.contains_key(&at) {
            state.wrong.push(format!("cuIpcCloseMemHandle of {at:#x}, whose exporter has freed it"));
        }
        match state.open.get_mut(&at) {
            Some(1) => {
                state.open.remove(&at);
            }
            Some(n) => *n -= 1,
            None => state.wrong.push(format!("cuIpcCloseMemHandle of {at:#x}, which is not open")),
        }
    }
}

fn ptr(at: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}

impl State {
    fn new_handle(&mut self) -> Opaque {
        self.next += 1;
        self.next
    }

    fn find(&self, at: u64) -> Option<(u64, &Allocation)> {
        let (&base, allocation) = self.memory.range(..=at).next_back()?;
        (at < base + allocation.len as u64).then_some((base, allocation))
    }

    fn is_pinned(&self, at: u64) -> bool {
        let found = self.pinned.range(..=at).next_back();
        found.is_some_and(|(base, len)| at < base + *len as u64)
    }

    /// Whether it is all in one piece, of what the driver knows.
    fn is_whole(&self, at: u64, len: usize) -> bool {
        let pinned = self.pinned.range(..=at).next_back().map(|(base, size)| (*base, *size));
        let pieces = self.find(at).map(|(base, a)| (base, a.len)).into_iter().chain(pinned);
        let end = at + len as u64;
        pieces.filter(|(base, size)| at < base + *size as u64).all(|(base, size)| end <= base + size as u64)
    }

    fn queue(&mut self, stream: Opaque, work: Work) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.held |= self.held_new;
            stream.queue.push_back(work);
        }
    }

    fn run_all(&mut self) {
        let streams: Vec<_> = self.streams.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.run(stream));
    }

    fn run(&mut self, stream: Opaque) {
        while let Some(work) = self.streams.get_mut(&stream).and_then(|s| s.queue.pop_front()) {
            match work {
                Work::Record(event) => {
                    if let Some(event) = self.events.get_mut(&event) {
                        event.done = true;
                    }
                }
                // SAFETY: memory of this driver or of the caller's, which is promised to be there until the stream has passed; a
                // freed one waits for its streams, see `free`.
                Work::Copy { to, from, len } => unsafe { std::ptr::copy(ptr(from), ptr(to), len) },
                // SAFETY: as above.
                Work::Put { to, bytes } => unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr(to), bytes.len());
                },
                Work::Gather(args) => self.gather(args, stream),
            }
        }
    }

    /// What the kernel does, by its definition. It reaches memory of its context, what is open, and what is pinned.
    fn gather(&mut self, args: GatherArgs, stream: Opaque) {
        let context = self.streams.get(&stream).map(|s| s.context);
        let reached = |at| {
            let found = self.find(at);
            self.is_pinned(at)
                || found.is_some_and(|(base, a)| Some(a.context) == context || self.open.contains_key(&base))
        };
        let mut wrong = None;
        let Plan { to, from, per_piece, total, layers } = args.plan;
        for (layer, vector) in (0..layers).flat_map(|layer| (0..total).map(move |vector| (layer, vector))) {
            let (piece, inside) = (vector / per_piece, u64::from(vector % per_piece));
            let at = args.list + u64::from(piece) * 8;
            let place = |end: End, entry: u64| {
                let (layer, unit) = (u64::from(layer) * end.layer, entry * u64::from(end.unit));
                end.base.wrapping_add(layer).wrapping_add(unit) + inside * 16
            };
            // SAFETY: the list has an entry for each piece, and the pieces are promised to be there.
            unsafe {
                let entry = ptr(at).cast::<u64>().read_unaligned();
                let (to, from) = (place(to, entry & 0xffff_ffff), place(from, entry >> 32));
                wrong = [to, from].into_iter().find(|&at| !reached(at)).or(wrong);
                std::ptr::copy(ptr(from), ptr(to), 16);
            }
        }
        if let Some(at) = wrong {
            self.wrong.push(format!("a kernel in context {context:x?} for {at:#x}, which it does not reach"));
        }
    }
}
