//! What the processes say to each other: JSON by HTTP between gateway and workers, and JSON in the messages of the channel
//! between a prefill and a decode worker. Values only.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use landfall::kv::Grant;
use serde::{Deserialize, Serialize};

use crate::api::ChatMessage;

/// A token of the model's vocabulary.
pub type Token = i32;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and writes their KV cache.
    Prefill,
    /// Grants blocks, and generates.
    Decode,
}

impl Role {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no role.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no role; prefill or decode is")]
pub struct UnknownRole(String);

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(word: &str) -> Result<Self, UnknownRole> {
        match word {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            _ => Err(UnknownRole(word.to_owned())),
        }
    }
}

/// What a worker says of itself: to the directory, and to whoever asks (`GET /v1/worker`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its name: the same after a restart.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// Where it takes requests.
    pub http: SocketAddr,
    /// Where a decode worker's endpoint listens.
    pub kv: Option<SocketAddr>,
    /// Its endpoint's epoch: another one after a restart.
    pub epoch: u64,
    /// The model: only workers of the same are put together.
    pub model: String,
    /// Tokens of a sequence, prompt and answer together.
    pub context: u32,
    /// Requests at once.
    pub slots: u32,
    /// Its pool: this many blocks,
    pub blocks: u32,
    /// each of so many bytes.
    pub block_bytes: u64,
    /// It finishes what it has and takes nothing new.
    pub draining: bool,
}

/// A worker's levels now (`GET /v1/load`): what a test, or a person, looks at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Blocks of its pool that nobody holds.
    pub free_blocks: u32,
    /// Requests that may still come in.
    pub free_slots: u32,
    /// Sequences that are being generated, or prompts that are being computed.
    pub computing: u32,
    /// Requests that have blocks granted, or landed, and are not generated yet.
    pub reserved: u32,
    /// Sequences, counted from the start, that were ended because nobody listened any more.
    pub abandoned: u64,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0: the most probable one.
    pub temperature: f32,
    /// Of the most probable tokens, as many as have this share together; 1: all.
    pub top_p: f32,
    /// The same seed gives the same answer.
    pub seed: u64,
}

impl Sampling {
    /// The most probable token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };
}

/// The text that is continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Prompt {
    /// As it is.
    Text(String),
    /// A conversation, to which the model's template is applied.
    Chat(Vec<ChatMessage>),
}

/// Gateway → prefill (`POST /v1/prefill`): compute this, and write its KV cache to that decode worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefillRequest {
    /// The attempt's number: a request that is tried again has another.
    pub attempt: u64,
    pub prompt: Prompt,
    pub max_tokens: u32,
    pub sampling: Sampling,
    /// The decode worker's endpoint,
    pub decode: SocketAddr,
    /// and the life of it that is meant.
    pub decode_epoch: u64,
    /// Tokens that it takes, prompt and answer together.
    pub decode_context: u32,
    /// The time that is left.
    pub timeout_ms: u64,
}

/// Prefill → gateway, an event a line. One that is silent for long is stuck.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillEvent {
    /// Something was computed since the last event, this prompt or those before it.
    Working,
    /// The end: it has landed.
    Done(PrefillReply),
    /// The end, and it has not.
    Failed(Refusal),
}

/// It has landed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefillReply {
    pub prompt_tokens: u32,
    /// Of those, the first so many were still there from an earlier prompt.
    pub cached_tokens: u32,
    /// The answer's first token.
    pub first: Token,
    /// Computing the prompt, without waiting for its turn.
    pub computed_us: u64,
    pub transfer: Transfer,
}

/// How a KV cache moved.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Transfer {
    pub bytes: u64,
    /// Work requests.
    pub wrs: u64,
    /// From the call to the last local completion.
    pub local_us: u64,
    /// From the call to the decode worker's confirmation.
    pub landed_us: u64,
    /// What carried it: `shm`, `tcp`, `verbs`.
    pub path: String,
    /// The device, and why that path.
    pub path_detail: String,
}

/// Gateway → decode (`POST /v1/decode`): go on from what has landed under `attempt`. The answer is a [`DecodeEvent`] a line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecodeRequest {
    pub attempt: u64,
    pub prompt_tokens: u32,
    /// Bytes of what has landed that are the state: the rest of the last block is not.
    pub state_bytes: u64,
    pub first: Token,
    pub max_tokens: u32,
    pub sampling: Sampling,
    /// The time that is left.
    pub timeout_ms: u64,
}

/// Decode → gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecodeEvent {
    /// One more token, and the whole characters that it completes.
    Token { token: Token, text: String },
    /// The end. An answer without it was cut off. Of a character that the last token does not finish, nothing was sent.
    Done { finish: Finish },
    /// The end, without an answer.
    Failed { fault: Fault, why: String },
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model was done.
    Stop,
    /// `max_tokens`.
    Length,
}

/// Prefill → decode, in the channel.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Blocks for up to `bytes` bytes, and a slot, until `timeout_ms` have passed.
    Reserve { attempt: u64, bytes: u64, timeout_ms: u64 },
    /// They are not needed any more.
    Release { attempt: u64 },
}

/// Decode → prefill, in the channel.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Granted {
        attempt: u64,
        grant: Grant,
    },
    /// There is no room now.
    Busy {
        attempt: u64,
        why: String,
    },
    /// There never is so much room.
    TooLarge {
        attempt: u64,
        why: String,
    },
}

impl Answer {
    /// Which attempt's.
    pub fn attempt(&self) -> u64 {
        let (Self::Granted { attempt, .. } | Self::Busy { attempt, .. } | Self::TooLarge { attempt, .. }) =
            self;
        *attempt
    }
}

/// Whose fault it is that a worker did not do what it was asked to, and so what the gateway does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The request cannot be served by anybody: it is refused.
    Request,
    /// It needs more tokens than these two workers take: tried with others that do.
    TooLong,
    /// No room here now, or draining: tried elsewhere, or later.
    Busy,
    /// No room at the worker at the other end of the channel.
    PeerBusy,
    /// The worker at the other end of the channel did not do its part: tried with another.
    Peer,
    /// This worker: tried elsewhere.
    Worker,
    /// The time was over.
    Deadline,
}

/// A worker's refusal, as the body of a response with an error status.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Refusal {
    pub fault: Fault,
    pub message: String,
    /// Tokens that are needed, where it is [`Fault::TooLong`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u32>,
}

impl Refusal {
    /// Of a `fault`, with the words of an error and its causes.
    pub fn new(fault: Fault, error: &dyn std::error::Error) -> Self {
        Self::of(fault, words(error))
    }

    /// Of a `fault`, in these words.
    pub fn of(fault: Fault, message: impl Into<String>) -> Self {
        Self { fault, message: message.into(), tokens: None }
    }
}

/// An error and its causes, in a line.
pub fn words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
