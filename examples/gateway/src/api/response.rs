//! Responses, whole and in parts, and the extension of `usage`. Values only.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Style;
use crate::protocol::{Finish, Token, Transfer};

/// `usage`, with what happened underneath.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    /// Not of OpenAI.
    pub landfall: Underneath,
}

/// How the answer came about.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
