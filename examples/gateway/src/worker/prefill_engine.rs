//! The thread that computes prompts, one after the other. Owns the context; knows nothing of HTTP or channels.
//!
//! The last prompt stays in the context. One that begins alike is computed from the first chunk on that differs, with the
//! same bits as from the beginning: see [`CHUNK`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use landfall::kv::{Blocks, PoolError};
use tokio::sync::oneshot;

use super::memory;
use crate::model::{CHUNK, Context, Model, ModelError, Sampler};
use crate::protocol::{Sampling, Token};

/// Why a prompt was not computed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the state did not fit into the blocks that were reserved for it")]
    Blocks(#[from] PoolError),
    #[error("the engine's thread has ended; restart the worker")]
    Gone,
    #[error("nobody waits for the answer any more")]
    Cancelled,
}

/// A prompt to compute.
#[derive(Debug)]
struct Job {
    prompt: Vec<Token>,
    sampling: Sampling,
    /// Where its state goes.
    blocks: Blocks,
    /// Closed: nobody waits any more.
    reply: oneshot::Sender<Result<Computed, EngineError>>,
}

/// A prompt that was computed.
#[derive(Debug)]
pub struct Computed {
    /// Full with its state; no more of them than it takes.
    pub blocks: Blocks,
    /// Bytes of the state.
    pub bytes: u64,
    pub first: Token,
    pub cached: u32,
    pub took: Duration,
}

/// A handle to the thread, which ends with the last one.
#[derive(Clone, Debug)]
pub struct PrefillEngine {
    jobs: mpsc::Sender<Job>,
    size: StateSize,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    abandoned: AtomicU64,
    chunks: AtomicU64,
}

/// Bytes of the state of a sequence: so many, and so many for each token.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateSize {
    fixed: usize,
    token: usize,
}

impl PrefillEngine {
    /// Starts the thread, and waits until it has its context. Blocks for that long.
    ///
    /// # Errors
    /// [`EngineError::Model`].
    pub fn start(model: Arc<Model>, context_tokens: u32, threads: u32) -> Result<Self, EngineError> {
        let (jobs, todo) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        std::thread::spawn(move || {
            let prepared = model.context(context_tokens, threads).and_then(|mut context| {
                let size = StateSize::measure(&mut context)?;
                Ok((context, size))
            });
            match prepared {
                Ok((context, size)) => {
                    if ready.send(Ok(size)).is_ok() {
                        serve(context, &todo, &shared);
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

    /// Chunks of prompts that were computed, counted from the start: it grows as long as the thread gets on.
    pub fn chunks(&self) -> u64 {
        self.counts.chunks.load(Ordering::Relaxed)
    }

    /// Prompts that were given up because nobody waited any more.
    pub fn abandoned(&self) -> u64 {
        self.counts.abandoned.load(Ordering::Relaxed)
    }

    /// Computes `prompt` and puts its state into `blocks`.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Cancel safety
    /// A dropped future ends the computation at the next chunk; the blocks return to the pool then.
    pub async fn compute(
        &self,
        prompt: Vec<Token>,
        sampling: Sampling,
        blocks: Blocks,
    ) -> Result<Computed, EngineError> {
        let (reply, computed) = oneshot::channel();
        self.jobs.send(Job { prompt, sampling, blocks, reply }).map_err(|_| EngineError::Gone)?;
        computed.await.map_err(|_| EngineError::Gone)?
    }
}

impl StateSize {
    /// Asks llama.cpp, by two sequences of different length.
    pub(super) fn measure(context: &mut Context<'_>) -> Result<Self, ModelError> {
        context.compute(0, &[0])?;
        let one = context.state_bytes();
        context.compute(1, &[0])?;
        let token = context.state_bytes() - one;
        context.truncate(0)?;
        Ok(Self { fixed: one - token, token })
    }

    /// Of so many tokens.
    pub(super) fn of(self, tokens: usize) -> u64 {
        (self.fixed + self.token * tokens) as u64
    }
}

fn serve(mut context: Context<'_>, todo: &mpsc::Receiver<Job>, counts: &Counts) {
    let (mut kept, mut state) = (Vec::new(), Vec::new());
    while let Ok(Job { prompt, sampling, blocks, reply }) = todo.recv() {
        let computed = (|| {
            let start = Instant::now();
            let cached = compute(&mut context, &mut kept, &prompt, counts, || reply.is_closed())?;
            let first = context.sample(&mut Sampler::new(&sampling, 0))?;
            context.save(&mut state)?;
            let mut blocks = blocks;
            memory::fill(&mut blocks, &state)?;
            let (bytes, took) = (state.len() as u64, start.elapsed());
            Ok(Computed { blocks, bytes, first, cached: cached as u32, took })
        })();
        // Whoever has asked may be gone: then the blocks go back to the pool.
        if reply.send(computed).is_err() {
            counts.abandoned.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Makes the context hold `prompt`. Gives the number of tokens that it held already.
fn compute(
    context: &mut Context<'_>,
    kept: &mut Vec<Token>,
    prompt: &[Token],
    counts: &Counts,
    cancelled: impl Fn() -> bool,
) -> Result<usize, EngineError> {
    let alike = kept.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    // The last token is computed in any case: what follows it is asked for.
    let cached = alike.min(prompt.len() - 1) / CHUNK * CHUNK;
    kept.truncate(cached);
    context.truncate(cached)?;
    for chunk in prompt[cached..].chunks(CHUNK) {
        if cancelled() {
            return Err(EngineError::Cancelled);
        }
        if let Err(error) = context.compute(kept.len(), chunk) {
            // What of it is there is not known.
            kept.clear();
            context.truncate(0)?;
            return Err(error.into());
        }
        kept.extend_from_slice(chunk);
        counts.chunks.fetch_add(1, Ordering::Relaxed);
    }
    Ok(cached)
}
