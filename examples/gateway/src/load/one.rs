//! One request of the load generator, and how it has ended.

use std::time::Duration;

use futures_util::{Stream, StreamExt};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::LoadArgs;
use super::prompts::Prompts;
use crate::api::Usage;
use crate::protocol::words;

/// How a request has ended. Everything from `Wrong` on is a fault of the gateway, and so are some of `Failed`.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Answered: with what was expected, as far as that is known.
    Answered {
        /// As the client sees it.
        ttft: Duration,
        took: Duration,
        usage: Box<Usage>,
    },
    /// Refused, with the time after which it may be otherwise.
    Refused { status: u16, retry_after: u64 },
    /// An error that says what it is: by status, or (0) as the end of a stream.
    Failed { status: u16, code: String, message: String },
    /// Answered with something else.
    Wrong { text: String, expected: String },
    /// A stream without an end, a response that is none, a connection that broke.
    Cut(String),
    /// Neither answered nor refused, long after its deadline.
    Hung,
}

/// Every third asks for the whole answer at once; the others for a stream.
pub(super) async fn request(
    client: &Client,
    url: &str,
    args: &LoadArgs,
    prompts: &Prompts,
    number: u64,
) -> Outcome {
    let (prompt, expected) = prompts.get(number);
    let stream = number % 3 != 2;
    let body = json!({
        "prompt": prompt,
        "max_tokens": args.max_tokens,
        "timeout": args.timeout,
        "stream": stream,
        "stream_options": { "include_usage": true },
    });
    let limit = Duration::from_secs_f64(args.timeout) + Duration::from_secs(20);
    match timeout(limit, send(client, url, &body)).await {
        Err(_) => Outcome::Hung,
        Ok(Err(outcome)) => outcome,
        Ok(Ok(Answer { text, usage, ttft, took })) => match expected {
            Some(expected) if expected != text => Outcome::Wrong { text, expected: expected.to_owned() },
            _ => Outcome::Answered { ttft, took, usage },
        },
    }
}

struct Answer {
    text: String,
    usage: Box<Usage>,
    ttft: Duration,
    took: Duration,
}

async fn send(client: &Client, url: &str, body: &Value) -> Result<Answer, Outcome> {
    let cut = |error: &dyn std::error::Error| Outcome::Cut(words(error));
    let begun = Instant::now();
    let response =
        client.post(format!("{url}/v1/completions")).json(body).send().await.map_err(|e| cut(&e))?;
    let status = response.status();
    let retry_after = response.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok());
    if !status.is_success() {
        let body: Value = response.json().await.map_err(|e| cut(&e))?;
        let Some((code, message)) = error(&body) else {
            return Err(Outcome::Cut(format!("status {status} without an error's body")));
        };
        return Err(match (status.as_u16(), retry_after) {
            (status @ (429 | 503), Some(retry_after)) => Outcome::Refused { status, retry_after },
            (429 | 503, None) => Outcome::Cut(format!("{status} without Retry-After")),
            (status, _) => Outcome::Failed { status, code, message },
        });
    }
    let usage = |value: &Value| {
        let usage = serde_json::from_value::<Usage>(value["usage"].clone());
        usage.map(Box::new).map_err(|error| cut(&error))
    };
    if body["stream"] == json!(false) {
        let whole: Value = response.json().await.map_err(|e| cut(&e))?;
        let text = whole["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
        let (usage, took) = (usage(&whole)?, begun.elapsed());
        return Ok(Answer { text, ttft: Duration::from_secs_f64(usage.landfall.ttft_ms / 1e3), usage, took });
    }
    let mut events = std::pin::pin!(sse(response.bytes_stream()));
    let (mut text, mut first, mut last) = (String::new(), None, None);
    while let Some(event) = events.next().await {
        let event = event.map_err(|e| cut(&e))?;
        if event == "[DONE]" {
            let Some(usage) = last else { return Err(Outcome::Cut("[DONE] without the usage".to_owned())) };
            return Ok(Answer { text, usage, ttft: first.unwrap_or_default(), took: begun.elapsed() });
        }
        let event: Value = serde_json::from_str(&event).map_err(|e| cut(&e))?;
        if let Some((code, message)) = error(&event) {
            return Err(Outcome::Failed { status: 0, code, message });
        }
        if let Some(part) = event["choices"][0]["text"].as_str() {
            first.get_or_insert_with(|| begun.elapsed());
            text.push_str(part);
        }
        if event["usage"].is_object() {
            last = Some(usage(&event)?);
        }
    }
    Err(Outcome::Cut("the stream ended without [DONE], and without an error".to_owned()))
}

/// The code and the message of an error's body.
fn error(body: &Value) -> Option<(String, String)> {
    let of = |name: &str| body["error"][name].as_str().map(str::to_owned);
    Some((of("code").unwrap_or_default(), of("message")?))
}

/// The data of server-sent events.
pub fn sse<B: AsRef<[u8]>, E>(
    parts: impl Stream<Item = Result<B, E>>,
) -> impl Stream<Item = Result<String, E>> {
    async_stream::stream! {
        let mut parts = std::pin::pin!(parts);
        let mut buffer = Vec::new();
        while let Some(part) = parts.next().await {
            match part {
                Ok(part) => buffer.extend_from_slice(part.as_ref()),
                Err(error) => {
                    yield Err(error);
                    return;
                }
            }
            while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = buffer.drain(..end + 2).collect();
                let event = String::from_utf8_lossy(&event);
                for data in event.lines().filter_map(|line| line.strip_prefix("data: ")) {
                    yield Ok(data.to_owned());
                }
            }
        }
    }
}
