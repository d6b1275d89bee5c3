//! The thread that generates: sequences take turns, a token each, every one in a context of its own. Owns the contexts; knows
//! nothing of HTTP or channels.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use landfall::kv::Arrival;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

use super::memory;
use super::prefill_engine::{EngineError, StateSize};
use super::reservations::Taken;
use super::text::Text;
use crate::model::{Context, Model, Sampler};
use crate::protocol::{DecodeEvent, DecodeRequest, Fault, Finish, Token, words};

/// A sequence to go on with.
#[derive(Debug)]
struct Job {
    request: DecodeRequest,
    taken: Taken,
    /// Closed: nobody listens any more. As long as `max_tokens` says, and so bounded by the context.
    events: UnboundedSender<DecodeEvent>,
}

/// A handle to the thread, which ends with the last one.
#[derive(Clone, Debug)]
pub struct DecodeEngine {
    jobs: mpsc::Sender<Job>,
    size: StateSize,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    active: AtomicU32,
    abandoned: AtomicU64,
}

impl DecodeEngine {
    /// Starts the thread, and waits until it has its contexts. Blocks for that long.
    ///
    /// # Errors
    /// [`EngineError::Model`].
    pub fn start(model: Arc<Model>, (slots, tokens, threads): (u32, u32, u32)) -> Result<Self, EngineError> {
        let (jobs, todo) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        std::thread::spawn(move || {
            let contexts: Result<Vec<_>, _> = (0..slots).map(|_| model.context(tokens, threads)).collect();
            // There is a slot at least.
            let measured =
                contexts.and_then(|mut contexts| Ok((StateSize::measure(&mut contexts[0])?, contexts)));
            match measured {
                Ok((size, free)) => {
                    let engine = Engine {
                        model: &model,
                        free,
                        running: Vec::new(),
                        state: Vec::new(),
                        counts: shared,
                    };
                    if ready.send(Ok(size)).is_ok() {
                        engine.serve(&todo);
                    }
                }
                Err(error) => _ = ready.send(Err(error)),
            }
        });
        let size = started.recv().map_err(|_| EngineError::Gone)??;
        Ok(Self { jobs, size, counts })
    }

    /// Bytes of the state of a sequence of so many tokens.
    pub fn state_bytes(&self, tokens: usize) -> u64 {
        self.size.of(tokens)
    }

    /// Goes on from what has landed; each token goes to `events`, and last `Done` or `Failed`.
    ///
    /// # Errors
    /// [`EngineError::Gone`].
    pub fn generate(
        &self,
        request: DecodeRequest,
        taken: Taken,
        events: UnboundedSender<DecodeEvent>,
    ) -> Result<(), EngineError> {
        self.jobs.send(Job { request, taken, events }).map_err(|_| EngineError::Gone)
    }

    /// Sequences that are being generated.
    pub fn active(&self) -> u32 {
        self.counts.active.load(Ordering::Relaxed)
    }

    /// Sequences that were ended because nobody listened any more.
    pub fn abandoned(&self) -> u64 {
        self.counts.abandoned.load(Ordering::Relaxed)
    }
}

/// A sequence that is being generated.
struct Sequence<'a> {
    context: Context<'a>,
    /// Tokens in the cache.
    len: usize,
    last: Token,
    left: u32,
    sampler: Sampler,
    text: Text,
    events: UnboundedSender<DecodeEvent>,
    _slot: OwnedSemaphorePermit,
}

impl Sequence<'_> {
    fn finish(&self, finish: Finish) {
        let _ = self.events.send(DecodeEvent::Done { finish });
    }
}

struct Engine<'a> {
    model: &'a Model,
    free: Vec<Context<'a>>,
    running: Vec<Sequence<'a>>,
    /// Kept between sequences.
    state: Vec<u8>,
    counts: Arc<Counts>,
}

impl<'a> Engine<'a> {
    fn serve(mut self, todo: &mpsc::Receiver<Job>) {
        loop {
            // With nothing to generate it sleeps until there is something.
            let job = if self.running.is_empty() { todo.recv().ok() } else { todo.try_recv().ok() };
            match job {
                Some(job) => self.begin(job),
                None if self.running.is_empty() => return,
                None => self.round(),
            }
            self.counts.active.store(self.running.len() as u32, Ordering::Relaxed);
        }
    }

    fn begin(&mut self, job: Job) {
        let Job { request, taken, events } = job;
        if events.is_closed() {
            return self.abandon();
        }
        // There are as many contexts as slots, and the job holds a slot.
        let Some(mut context) = self.free.pop() else {
            let why = "no context is free, though a slot was; restart the worker".to_owned();
            let _ = events.send(failed(why));
            return;
        };
        if let Err(error) = self.restore(&mut context, &request, taken.arrival) {
            self.free.push(context);
            // What has landed is not what was said of it: that is the prefill worker's doing.
            let _ = events.send(DecodeEvent::Failed { fault: Fault::Peer, why: words(&error) });
            return;
        }
        let mut sequence = Sequence {
            context,
            len: request.prompt_tokens as usize,
            last: request.first,
            left: request.max_tokens,
            sampler: Sampler::new(&request.sampling, 1),
            text: Text::default(),
            events,
            _slot: taken.slot,
        };
        // The first token came from the prefill worker.
        if self.emit(&mut sequence, request.first) {
            self.running.push(sequence);
        } else {
            self.end(sequence);
        }
    }

    /// From the registered blocks to the context. The blocks go back to the pool.
    fn restore(
        &mut self,
        context: &mut Context<'_>,
        request: &DecodeRequest,
        arrival: Arrival,
    ) -> Result<(), EngineError> {
        memory::drain(arrival.blocks(), request.state_bytes, &mut self.state)?;
        drop(arrival);
        context.restore(&self.state, request.prompt_tokens as usize)?;
        Ok(())
    }

    /// A token for each sequence.
    fn round(&mut self) {
        for mut sequence in std::mem::take(&mut self.running) {
            if sequence.events.is_closed() {
                self.abandon();
                self.end(sequence);
                continue;
            }
            let next = sequence
                .context
                .compute(sequence.len, &[sequence.last])
                .and_then(|()| sequence.context.sample(&mut sequence.sampler));
            match next {
                Ok(token) => {
                    sequence.len += 1;
                    if self.emit(&mut sequence, token) {
                        self.running.push(sequence);
                    } else {
                        self.end(sequence);
                    }
                }
                Err(error) => {
                    let _ = sequence.events.send(failed(words(&error)));
                    self.end(sequence);
                }
            }
        }
    }

    /// Sends a token, or the end. Whether there is more to come.
    fn emit(&self, sequence: &mut Sequence<'_>, token: Token) -> bool {
        if self.model.is_end(token) {
            sequence.finish(Finish::Stop);
            return false;
        }
        sequence.last = token;
        sequence.left = sequence.left.saturating_sub(1);
        let text = sequence.text.push(&self.model.piece(token));
        // Whoever has hung up meanwhile is seen in the next round.
        let _ = sequence.events.send(DecodeEvent::Token { token, text });
        if sequence.left == 0 {
            sequence.finish(Finish::Length);
        }
        sequence.left > 0
    }

    fn abandon(&self) {
        self.counts.abandoned.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&mut self, mut sequence: Sequence<'a>) {
        // What is not forgotten here is when the next one is restored.
        let _ = sequence.context.truncate(0);
        self.free.push(sequence.context);
    }
}

fn failed(why: String) -> DecodeEvent {
    DecodeEvent::Failed { fault: Fault::Worker, why }
}
