//! The model: a GGUF file in llama.cpp, its tokeniser and chat template, and contexts that compute sequences. Blocks; the
//! workers' engines call it on threads of their own.
//!
//! A context holds one sequence. What comes out does then not depend on what else is being computed: the same prompt gives the
//! same tokens under any load. Computing several sequences in one batch would be faster, and rounds differently.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::context::session::LlamaStateSeqFlags;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::{LlamaChatMessage, LlamaChatTemplate, LlamaModel};
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;

use crate::api::ChatMessage;
use crate::chat::{self, Misplaced};
use crate::fetch::{self, FetchError};
use crate::protocol::{Sampling, Token};

/// Tokens of a prompt that are computed in one go. A prompt is always cut at multiples of this, so that a part which is
/// reused from an earlier prompt has the same bits as one that is computed again.
pub const CHUNK: usize = 64;

/// What the model cannot do, or llama.cpp did not.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FetchError),
    /// llama.cpp refused something.
    #[error("llama.cpp: {what}: {why}")]
    Llama { what: &'static str, why: String },
    /// A text with a NUL in it.
    #[error("a message has a NUL character in it; leave it out")]
    Nul,
    /// A state of another length than llama.cpp has announced.
    #[error("llama.cpp wrote {wrote} bytes of state and had announced {announced}")]
    State { wrote: usize, announced: usize },
    /// A state that llama.cpp does not take.
    #[error(
        "llama.cpp did not take a state of {bytes} bytes: it is of another model, or longer than the context"
    )]
    NotRestored { bytes: usize },
    /// A state of another length than was said of it.
    #[error("the state is one of {got} tokens, and {expected} were announced")]
    Tokens { got: i64, expected: usize },
    /// A template that is of no use.
    #[error(transparent)]
    Template(#[from] Misplaced),
    /// What the model makes of the tokens is no numbers.
    #[error("the model's logit of token {token} is {value}: its state, or its file, is damaged")]
    Logits { token: usize, value: f32 },
}

fn llama(what: &'static str) -> impl FnOnce(&dyn std::error::Error) -> ModelError {
    move |error| ModelError::Llama { what, why: error.to_string() }
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    // Dropped in this order: the model before the backend.
    model: LlamaModel,
    backend: LlamaBackend,
    template: LlamaChatTemplate,
    /// The control tokens, and their names.
    specials: Vec<(Token, String)>,
    id: String,
}

impl Model {
    /// Loads the model at `path`, or the one that [`fetch::model`] gives.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn load(path: Option<&Path>) -> Result<Self, ModelError> {
        let path: PathBuf = path.map_or_else(fetch::model, |path| Ok(path.to_owned()))?;
        let digest = fetch::sha256(&path)?;
        let mut backend = LlamaBackend::init().map_err(|e| llama("starting")(&e))?;
        backend.void_logs();
        let model = LlamaModel::load_from_file(&backend, &path, &LlamaModelParams::default())
            .map_err(|e| llama("loading the model")(&e))?;
        let template = model.chat_template(None).map_err(|e| llama("the chat template")(&e))?;
        let vocabulary = model.vocab();
        let control = vocabulary.tokens().filter(|&token| vocabulary.is_control(token));
        let named = control.filter_map(|token| {
            let name = vocabulary.text(token)?.to_str().ok().filter(|name| !name.is_empty())?;
            Some((token.0, name.to_owned()))
        });
        let specials = named.collect();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self { id: format!("{name}@{}", &digest[..12]), model, backend, template, specials })
    }

    /// The file's name, and the beginning of its SHA-256: workers of the same id fit together.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The tokens of a text, in which names of special tokens count as these: for who writes the whole prompt.
    pub fn tokens(&self, text: &str) -> Vec<Token> {
        self.tokenise(text, true)
    }

    fn tokenise(&self, text: &str, special: bool) -> Vec<Token> {
        self.model.vocab().tokenize(text.as_bytes(), false, special).into_iter().map(|t| t.0).collect()
    }

    /// The tokens of a conversation, as the model was taught it. What is written in a message is text, and no special token.
    ///
    /// # Errors
    /// [`ModelError::Nul`], and a template that llama.cpp does not know, or that is of no use.
    pub fn chat_tokens(&self, messages: &[ChatMessage]) -> Result<Vec<Token>, ModelError> {
        let apply = |marked: &[ChatMessage]| self.chat_prompt(marked);
        if messages.iter().any(|message| message.content.contains('\0')) {
            return Err(ModelError::Nul);
        }
        chat::tokens(messages, apply, &self.specials, |text| self.tokenise(text, false))
    }

    /// The prompt of a conversation as text.
    ///
    /// # Errors
    /// [`ModelError::Nul`], and a template that llama.cpp does not know.
    pub fn chat_prompt(&self, messages: &[ChatMessage]) -> Result<String, ModelError> {
        let messages: Result<Vec<_>, _> =
            messages.iter().map(|m| LlamaChatMessage::new(m.role.clone(), m.content.clone())).collect();
        let messages = messages.map_err(|_| ModelError::Nul)?;
        self.model
            .apply_chat_template(&self.template, &messages, true)
            .map_err(|e| llama("the chat template")(&e))
    }

    /// The bytes of a token: not always whole characters.
    pub fn piece(&self, token: Token) -> Vec<u8> {
        self.model.vocab().token_to_piece(LlamaToken(token), false, None)
    }

    /// Whether generation ends with this token.
    pub fn is_end(&self, token: Token) -> bool {
        self.model.vocab().is_eog(LlamaToken(token))
    }

    /// Tokens that the model was taught to look back at.
    pub fn context_limit(&self) -> u32 {
        self.model.n_ctx_train()
    }

    /// Tokens in the vocabulary: each is below.
    pub fn vocabulary(&self) -> i32 {
        self.model.n_vocab()
    }

    /// A context for a sequence of up to `tokens` tokens. Not from several threads at once: llama.cpp changes the model meanwhile.
    ///
    /// # Errors
    /// When llama.cpp has no memory for it.
    pub fn context(&self, tokens: u32, threads: u32) -> Result<Context<'_>, ModelError> {
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(tokens))
            .with_n_seq_max(1)
            .with_n_batch(CHUNK as u32)
            .with_n_ubatch(CHUNK as u32)
            .with_n_threads(threads as i32)
            .with_n_threads_batch(threads as i32);
        let inner =
            self.model.new_context(&self.backend, params).map_err(|e| llama("creating a context")(&e))?;
        Ok(Context { inner, batch: LlamaBatch::new(CHUNK, 1) })
    }
}

/// The KV cache of one sequence. Of one thread.
#[derive(Debug)]
pub struct Context<'a> {
    inner: LlamaContext<'a>,
    batch: LlamaBatch<'static>,
}

impl Context<'_> {
    /// Computes up to [`CHUNK`] tokens, from position `at` on. The next [`sample`](Self::sample) is about the last.
    ///
    /// # Errors
    /// What llama.cpp says: no room, or more tokens than a chunk.
    pub fn compute(&mut self, at: usize, tokens: &[Token]) -> Result<(), ModelError> {
        self.batch.clear();
        for (i, &token) in tokens.iter().enumerate() {
            let last = i + 1 == tokens.len();
            self.batch
                .add(LlamaToken(token), (at + i) as i32, &[0], last)
                .map_err(|e| llama("filling a batch")(&e))?;
        }
        self.inner.decode(&mut self.batch).map_err(|e| llama("computing tokens")(&e))
    }

    /// The next token, after the last one that was computed.
    ///
    /// # Errors
    /// [`ModelError::Logits`]: llama.cpp would choose some token all the same.
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<Token, ModelError> {
        check(self.inner.get_logits_ith(-1))?;
        Ok(sampler.0.sample(&self.inner, -1).0)
    }

    /// Forgets the sequence from position `from` on.
    ///
    /// # Errors
    /// A position beyond what llama.cpp counts.
    pub fn truncate(&mut self, from: usize) -> Result<(), ModelError> {
        self.inner
            .clear_kv_cache_seq(Some(0), Some(from as u32), None)
            .map(|_| ())
            .map_err(|e| llama("dropping a sequence")(&e))
    }

    /// Bytes of the sequence's state now.
    pub fn state_bytes(&self) -> usize {
        self.inner.state_seq_get_size_ext(0, LlamaStateSeqFlags::empty())
    }

    /// Writes the sequence's state to `into`, which becomes as long as it is.
    ///
    /// # Errors
    /// [`ModelError::State`].
    pub fn save(&self, into: &mut Vec<u8>) -> Result<(), ModelError> {
        let announced = self.state_bytes();
        into.clear();
        into.reserve(announced);
        // SAFETY: the vector has room for the `announced` bytes, which is what llama.cpp writes at most: nothing was computed
        // in between.
        let wrote =
            unsafe { self.inner.state_seq_get_data_ext(into.as_mut_ptr(), 0, LlamaStateSeqFlags::empty()) };
        if wrote != announced {
            return Err(ModelError::State { wrote, announced });
        }
        // SAFETY: llama.cpp has written `wrote` bytes from the vector's start on.
        unsafe { into.set_len(wrote) };
        Ok(())
    }

    /// Makes `state` the sequence's, which is to be one of `tokens` tokens.
    ///
    /// # Errors
    /// [`ModelError::NotRestored`], [`ModelError::Tokens`]; the sequence is empty then.
    pub fn restore(&mut self, state: &[u8], tokens: usize) -> Result<(), ModelError> {
        self.truncate(0)?;
        // SAFETY: llama.cpp reads within the slice's length and checks what it reads against its own shape. That the bytes are
        // a state is the peer's word: workers of one model trust each other.
        let taken = unsafe { self.inner.state_seq_set_data_ext(state, 0, LlamaStateSeqFlags::empty()) };
        if !taken {
            self.truncate(0)?;
            return Err(ModelError::NotRestored { bytes: state.len() });
        }
        let got = i64::from(self.inner.kv_cache_seq_pos_max(0)) + 1;
        if got != tokens as i64 {
            self.truncate(0)?;
            return Err(ModelError::Tokens { got, expected: tokens });
        }
        Ok(())
    }
}

/// Numbers all of them, one at least that is not −∞ (which some models have for tokens that are never to come).
fn check(logits: &[f32]) -> Result<(), ModelError> {
    let wrong = |value: f32| value.is_nan() || value == f32::INFINITY;
    match logits.iter().position(|&value| wrong(value)) {
        Some(token) => Err(ModelError::Logits { token, value: logits[token] }),
        None if logits.iter().any(|value| value.is_finite()) => Ok(()),
        None => Err(ModelError::Logits { token: 0, value: f32::NEG_INFINITY }),
    }
}

/// Below this a temperature is 0. Logits are divided by it: what differs in their last bits would decide, and, smaller still,
/// they would be infinite.
const COLDEST: f32 = 1e-5;

/// How the next token is chosen.
#[derive(Debug)]
pub struct Sampler(LlamaSampler);

impl Sampler {
    /// The most probable token at temperature 0; else by chance, the same for the same seed. `draw` is the number of tokens
    /// that were drawn before this sampler was made.
    pub fn new(sampling: &Sampling, draw: u32) -> Self {
        if sampling.temperature.is_nan() || sampling.temperature < COLDEST || sampling.top_p <= 0.0 {
            return Self(LlamaSampler::greedy());
        }
        let temperature = LlamaSampler::temp(sampling.temperature);
        let dist = LlamaSampler::dist(fold(sampling.seed, draw));
        if sampling.top_p < 1.0 {
            return Self(LlamaSampler::chain_simple([
                temperature,
                LlamaSampler::top_p(sampling.top_p, 1),
                dist,
            ]));
        }
        Self(LlamaSampler::chain_simple([temperature, dist]))
    }
}

/// A seed of llama.cpp's 32 bits; never the one that stands for a random seed there.
fn fold(seed: u64, draw: u32) -> u32 {
    let seed = (seed ^ (seed >> 32)) as u32;
    match seed.wrapping_add(draw) {
        u32::MAX => 0x5eed,
        seed => seed,
    }
}

/// One process computes it all: what the disaggregated way is compared with.
///
/// # Errors
/// [`ModelError`].
pub fn generate(
    model: &Model,
    prompt: &[Token],
    max_tokens: u32,
    sampling: &Sampling,
) -> Result<Vec<Token>, ModelError> {
    let mut context = model.context(prompt.len() as u32 + max_tokens, 1)?;
    for (n, chunk) in prompt.chunks(CHUNK).enumerate() {
        context.compute(n * CHUNK, chunk)?;
    }
    let mut out = vec![context.sample(&mut Sampler::new(sampling, 0))?];
    let mut sampler = Sampler::new(sampling, 1);
    while out.len() < max_tokens as usize {
        let last = out[out.len() - 1];
        if model.is_end(last) {
            break;
        }
        context.compute(prompt.len() + out.len() - 1, &[last])?;
        out.push(context.sample(&mut sampler)?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        assert!(check(&[0.0, -3.5, f32::NEG_INFINITY]).is_ok());
        for logits in [&[0.0, f32::NAN][..], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY; 2], &[]] {
            assert!(matches!(check(logits), Err(ModelError::Logits { .. })), "{logits:?}");
        }
    }

    #[test]
    fn no_seed_is_the_one_that_stands_for_chance() {
        let seeds = [0, 5, u64::from(u32::MAX), u64::MAX, u64::MAX - 2, 1 << 32];
        for seed in seeds {
            for draw in [0, 1] {
                assert_ne!(fold(seed, draw), u32::MAX, "{seed} {draw}");
            }
        }
        assert_eq!(fold(5, 1), 6);
    }
}
