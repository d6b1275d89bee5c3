//! Requests: each parameter is honoured, or taken because it asks for what happens anyway, or refused by its name. None is
//! ignored. Values only.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ApiError;
use crate::protocol::{Prompt, Sampling};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
}

/// Which of the two ways to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Chat,
    Text,
}

impl Style {
    /// The parameter that has the prompt.
    pub fn prompt(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Text => "prompt",
        }
    }
}

/// What is asked for, checked.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub style: Style,
    pub prompt: Prompt,
    /// `None`: any that there is.
    pub model: Option<String>,
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

/// A parameter of OpenAI that is taken where it asks for what happens anyway: its name, which values do, and those in words.
type Neutral = (&'static str, fn(&Value) -> bool, &'static str);

const NEUTRAL: &[Neutral] = &[
    ("n", |v| is(v, 1.0), "1; send as many requests as answers are wanted"),
    ("best_of", |v| is(v, 1.0), "1"),
    ("echo", |v| v == false, "false"),
    ("suffix", |v| v == "", "an empty one"),
    ("stop", empty, "an empty list; cut the answer at the client, which may hang up"),
    ("presence_penalty", |v| is(v, 0.0), "0"),
    ("frequency_penalty", |v| is(v, 0.0), "0"),
    ("logit_bias", empty, "an empty object"),
    ("logprobs", |v| v == false, "false"),
    ("top_logprobs", |v| is(v, 0.0), "0"),
    ("tools", empty, "an empty list"),
    ("functions", empty, "an empty list"),
    ("tool_choice", |v| v == "none" || v == "auto", "none or auto, as there are no tools"),
    ("function_call", |v| v == "none" || v == "auto", "none or auto, as there are no functions"),
    ("parallel_tool_calls", Value::is_boolean, "true or false, as there are no tools"),
    ("response_format", |v| *v == serde_json::json!({ "type": "text" }), "{\"type\": \"text\"}"),
    ("modalities", |v| *v == serde_json::json!(["text"]), "[\"text\"]"),
    ("store", |v| v == false, "false"),
    ("service_tier", |v| v == "auto" || v == "default", "auto or default"),
    // Of the caller's own affairs.
    ("user", Value::is_string, "a string"),
    ("safety_identifier", Value::is_string, "a string"),
    ("prompt_cache_key", Value::is_string, "a string"),
    ("metadata", Value::is_object, "an object"),
];

fn is(value: &Value, number: f64) -> bool {
    value.as_f64() == Some(number)
}

fn empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

impl Wanted {
    /// Of the body of `POST /v1/chat/completions`. `chance` is the seed where the body has none.
    ///
    /// # Errors
    /// [`ApiError`] of status 400, which names the parameter.
    pub fn chat(body: Value, chance: u64) -> Result<Self, ApiError> {
        let mut body = Body::new(body)?;
        let prompt = Prompt::Chat(messages(body.take("messages"))?);
        Self::new(Style::Chat, prompt, body, chance)
    }

    /// Of the body of `POST /v1/completions`.
    ///
    /// # Errors
    /// [`ApiError`] of status 400, which names the parameter.
    pub fn text(body: Value, chance: u64) -> Result<Self, ApiError> {
        let mut body = Body::new(body)?;
        let text = match body.take("prompt") {
            Some(Value::String(text)) => Some(text),
            Some(Value::Array(mut list)) if list.len() == 1 => match list.remove(0) {
                Value::String(text) => Some(text),
                _ => None,
            },
            _ => None,
        };
        let text = text.filter(|text| !text.is_empty());
        let text =
            text.ok_or_else(|| ApiError::value("prompt", "prompt is a text of at least a character"))?;
        Self::new(Style::Text, Prompt::Text(text), body, chance)
    }

    fn new(style: Style, prompt: Prompt, mut body: Body, chance: u64) -> Result<Self, ApiError> {
        let model = body.string("model")?;
        let (max, other) = (body.count("max_completion_tokens")?, body.count("max_tokens")?);
        if max.is_some() && other.is_some() && max != other {
            return Err(ApiError::value(
                "max_tokens",
                "max_tokens and max_completion_tokens are not the same",
            ));
        }
        let number = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
        let sampling = Sampling {
            temperature: number(body.number("temperature", 0.0, 2.0)?, 0.0),
            top_p: number(body.number("top_p", 0.0, 1.0)?, 1.0),
            seed: body.seed()?.unwrap_or(chance),
        };
        let wanted = Self {
            style,
            prompt,
            model,
            max_tokens: max.or(other).unwrap_or(DEFAULT_TOKENS),
            sampling,
            stream: body.boolean("stream")?.unwrap_or_default(),
            include_usage: body.include_usage()?,
            timeout: body.number("timeout", f64::MIN_POSITIVE, 86_400.0)?,
            token_ids: body.boolean("return_token_ids")?.unwrap_or_default(),
        };
        body.rest()?;
        if wanted.token_ids && wanted.stream && !wanted.include_usage {
            let message = "return_token_ids with stream needs stream_options.include_usage: the tokens come with the usage";
            return Err(ApiError::value("return_token_ids", message));
        }
        Ok(wanted)
    }
}

/// What is left of a body. `null` is the same as nothing.
struct Body(Map<String, Value>);

impl Body {
    fn new(body: Value) -> Result<Self, ApiError> {
        let Value::Object(mut map) = body else { return Err(ApiError::bad("the body is no JSON object")) };
        map.retain(|_, value| !value.is_null());
        Ok(Self(map))
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong = || ApiError::value(name, format!("{name} is {expected}"));
        read(&value).map(Some).ok_or_else(wrong)
    }

    fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.read(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    fn count(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        let read = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|&count| count > 0);
        self.read(name, "a whole number of at least 1, in 32 bits", read)
    }

    fn number(&mut self, name: &str, from: f64, to: f64) -> Result<Option<f64>, ApiError> {
        let expected =
            if from > 0.0 { format!("above 0, at most {to}") } else { format!("from {from} to {to}") };
        self.read(name, &format!("a number {expected}"), |value| {
            value.as_f64().filter(|number| (from..=to).contains(number))
        })
    }

    /// Any 64-bit number, with a sign or without.
    fn seed(&mut self) -> Result<Option<u64>, ApiError> {
        let read = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        self.read("seed", "a whole number in 64 bits", read)
    }

    fn include_usage(&mut self) -> Result<bool, ApiError> {
        let Some(options) = self.take("stream_options") else { return Ok(false) };
        let mut options = Self::new(options)
            .map_err(|_| ApiError::value("stream_options", "stream_options is an object"))?;
        let include = options.boolean("include_usage")?.unwrap_or_default();
        match options.0.keys().next() {
            None => Ok(include),
            Some(name) => {
                let name = format!("stream_options.{name}");
                let message = format!("{name} is not supported; leave it out");
                Err(ApiError::unsupported(name, message))
            }
        }
    }

    /// What nobody has taken.
    fn rest(self) -> Result<(), ApiError> {
        for (name, value) in self.0 {
            let message = match NEUTRAL.iter().find(|(neutral, ..)| *neutral == name) {
                Some((_, same, _)) if same(&value) => continue,
                Some((.., expected)) => format!("{name} is not supported, but for {expected}"),
                None => format!("{name} is no parameter here; leave it out"),
            };
            return Err(ApiError::unsupported(name, message));
        }
        Ok(())
    }
}

fn messages(value: Option<Value>) -> Result<Vec<ChatMessage>, ApiError> {
    let Some(Value::Array(list)) = value else {
        return Err(ApiError::value("messages", "messages is a list of messages"));
    };
    if list.is_empty() {
        return Err(ApiError::value("messages", "messages is empty; send at least one"));
    }
    list.into_iter().enumerate().map(|(n, value)| message(&format!("messages[{n}]"), value)).collect()
}

fn message(at: &str, value: Value) -> Result<ChatMessage, ApiError> {
    let mut body = Body::new(value).map_err(|_| ApiError::value(at, format!("{at} is no object")))?;
    let role = match body.take("role").as_ref().and_then(Value::as_str) {
        // As OpenAI has it: the same under another name.
        Some("developer") => "system".to_owned(),
        Some(role @ ("system" | "user" | "assistant")) => role.to_owned(),
        _ => {
            let message = format!("{at}.role is system, developer, user or assistant");
            return Err(ApiError::value(format!("{at}.role"), message));
        }
    };
    let content = content(&format!("{at}.content"), body.take("content"))?;
    // What an answer has beside its text is sent back by some clients, without anything in it.
    match body.0.into_iter().find(|(_, value)| !empty(value)) {
        None => Ok(ChatMessage { role, content }),
        Some((name, _)) => {
            let message = format!("{at}.{name} is not supported; leave it out");
            Err(ApiError::unsupported(format!("{at}.{name}"), message))
        }
    }
}

/// A text, or parts of one.
fn content(at: &str, value: Option<Value>) -> Result<String, ApiError> {
    let wrong = || ApiError::value(at, format!("{at} is a text, or a list of parts of type text"));
    match value {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (n, part) in parts.iter().enumerate() {
                let kind = part["type"].as_str().ok_or_else(wrong)?;
                if kind != "text" {
                    let name = format!("{at}[{n}].type");
                    let message = format!("{name} is {kind:?}, and only text is supported");
                    return Err(ApiError::unsupported(name, message));
                }
                text.push_str(part["text"].as_str().ok_or_else(wrong)?);
            }
            Ok(text)
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
