//! The OpenAI-style API: requests, responses, errors, and the extension of `usage`. Values only.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::protocol::{Finish, Prompt, Sampling, Token, Transfer};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
}

/// `POST /v1/chat/completions`.
#[derive(Clone, Debug, Deserialize)]
pub struct ChatRequest {
    pub messages: Vec<ChatMessage>,
    #[serde(flatten)]
    pub options: Options,
}

/// `POST /v1/completions`.
#[derive(Clone, Debug, Deserialize)]
pub struct TextRequest {
    pub prompt: String,
    #[serde(flatten)]
    pub options: Options,
}

/// What both have. What a client of the original may send and this gateway does not do is refused, not ignored.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Options {
    pub model: Option<String>,
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub seed: Option<u32>,
    pub stream: bool,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<u32>,
    pub stop: Option<Value>,
    /// Not of OpenAI: the time that the answer may take in all, seconds.
    pub timeout: Option<f64>,
    /// Not of OpenAI: whether the usage names the answer's tokens.
    pub return_token_ids: bool,
}

/// `stream_options`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// Whether the last chunk carries the usage.
    pub include_usage: bool,
}

/// Which of the two ways to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Chat,
    Text,
}

/// What is asked for, checked.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub style: Style,
    pub prompt: Prompt,
    pub max_tokens: u32,
    pub sampling: Sampling,
    pub stream: bool,
    pub include_usage: bool,
    /// Seconds.
    pub timeout: Option<f64>,
    pub token_ids: bool,
}

/// Tokens of an answer that names no number.
const DEFAULT_TOKENS: u32 = 128;

impl Wanted {
    /// Of a conversation.
    ///
    /// # Errors
    /// [`ApiError`] of status 400.
    pub fn chat(request: ChatRequest) -> Result<Self, ApiError> {
        if request.messages.is_empty() {
            return Err(ApiError::bad("messages is empty; send at least one"));
        }
        Self::new(Style::Chat, Prompt::Chat(request.messages), &request.options)
    }

    /// Of a text.
    ///
    /// # Errors
    /// [`ApiError`] of status 400.
    pub fn text(request: TextRequest) -> Result<Self, ApiError> {
        if request.prompt.is_empty() {
            return Err(ApiError::bad("prompt is empty; send at least a character"));
        }
        Self::new(Style::Text, Prompt::Text(request.prompt), &request.options)
    }

    fn new(style: Style, prompt: Prompt, options: &Options) -> Result<Self, ApiError> {
        if options.n.is_some_and(|n| n != 1) {
            return Err(ApiError::bad("n is 1 here; send as many requests as answers are wanted"));
        }
        if options.stop.as_ref().is_some_and(|stop| !stop.is_null()) {
            return Err(ApiError::bad(
                "stop is not supported; cut the answer at the client, which may hang up",
            ));
        }
        let max_tokens = options.max_completion_tokens.or(options.max_tokens).unwrap_or(DEFAULT_TOKENS);
        if max_tokens == 0 {
            return Err(ApiError::bad("max_tokens is 0; ask for at least 1"));
        }
        let temperature = options.temperature.unwrap_or(0.0);
        if !(0.0..=2.0).contains(&temperature) {
            return Err(ApiError::bad("temperature is from 0 to 2"));
        }
        if options.timeout.is_some_and(|t| !(t.is_finite() && t > 0.0)) {
            return Err(ApiError::bad("timeout is a number of seconds above 0"));
        }
        let sampling = Sampling { temperature, seed: options.seed.unwrap_or(0) };
        Ok(Self {
            style,
            prompt,
            max_tokens,
            sampling,
            stream: options.stream,
            include_usage: options.stream_options.as_ref().is_some_and(|options| options.include_usage),
            timeout: options.timeout,
            token_ids: options.return_token_ids,
        })
    }
}

/// `usage`, with what happened underneath.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    /// Not of OpenAI.
    pub landfall: Underneath,
}

/// How the answer came about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Underneath {
    /// From the request to the first token, as it left the gateway.
    pub ttft_ms: f64,
    /// Of that, waiting for a place.
    pub queued_ms: f64,
    /// Computing the prompt.
    pub prefill_ms: f64,
    /// The prompt's first tokens that did not have to be computed.
    pub cached_tokens: u32,
    /// From the first token to the last.
    pub decode_ms: f64,
    /// The KV cache's way.
    pub kv: Transfer,
    pub prefill: String,
    pub decode: String,
    /// 1, and one more for each worker that was lost on the way.
    pub attempts: u32,
    /// The answer's tokens, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<Token>>,
}

/// An answer that is not one, with its status. The body is OpenAI's.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    /// A word that a program can compare.
    pub code: &'static str,
    pub message: String,
    /// Seconds, for 429 and 503.
    pub retry_after: Option<u64>,
}

impl ApiError {
    fn of(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), retry_after: None }
    }

    /// The request is wrong, whoever serves it.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::of(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// More requests wait than may.
    pub fn overloaded(waiting: usize, retry_after: u64) -> Self {
        let message =
            format!("{waiting} requests wait already, which is the limit; try again in {retry_after} s");
        let error = Self::of(StatusCode::TOO_MANY_REQUESTS, "overloaded", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Nobody can serve it now.
    pub fn unavailable(message: impl Into<String>, retry_after: u64) -> Self {
        let error = Self::of(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// It was tried, and workers failed under it.
    pub fn lost(message: impl Into<String>) -> Self {
        Self::of(StatusCode::BAD_GATEWAY, "worker_lost", message)
    }

    /// Its time was over.
    pub fn deadline(seconds: f64) -> Self {
        let message =
            format!("the answer was not there within {seconds} s; ask for fewer tokens, or for more time");
        Self::of(StatusCode::GATEWAY_TIMEOUT, "deadline", message)
    }

    /// As OpenAI writes it.
    pub fn body(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.code, "code": self.status.as_u16() } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// What is the same in all parts of a response.
#[derive(Clone, Debug)]
pub struct Head {
    pub id: String,
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    pub style: Style,
}

impl Head {
    fn object(&self, chunk: bool, choice: &Value) -> Value {
        let object = match (self.style, chunk) {
            (Style::Chat, false) => "chat.completion",
            (Style::Chat, true) => "chat.completion.chunk",
            (Style::Text, _) => "text_completion",
        };
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": [choice] })
    }

    /// The whole answer.
    pub fn whole(&self, text: &str, finish: Finish, usage: &Usage) -> Value {
        let choice = match self.style {
            Style::Chat => {
                json!({ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": finish })
            }
            Style::Text => json!({ "index": 0, "text": text, "finish_reason": finish }),
        };
        let mut whole = self.object(false, &choice);
        whole["usage"] = json!(usage);
        whole
    }

    /// A part of a stream: some text, or the end.
    pub fn chunk(&self, text: &str, first: bool, finish: Option<Finish>) -> Value {
        let choice = match self.style {
            Style::Chat => {
                let delta = match (first, finish) {
                    (true, _) => json!({ "role": "assistant", "content": text }),
                    (false, None) => json!({ "content": text }),
                    (false, Some(_)) => json!({}),
                };
                json!({ "index": 0, "delta": delta, "finish_reason": finish })
            }
            Style::Text => json!({ "index": 0, "text": text, "finish_reason": finish }),
        };
        self.object(true, &choice)
    }

    /// The last part of a stream that was asked for its usage.
    pub fn usage(&self, usage: &Usage) -> Value {
        let mut chunk = self.object(true, &Value::Null);
        chunk["choices"] = json!([]);
        chunk["usage"] = json!(usage);
        chunk
    }
}
