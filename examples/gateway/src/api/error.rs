//! Answers that are none: a status, and the body that OpenAI's clients understand. Values only.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An answer that is not one, with its status. The body is OpenAI's.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    /// A word that a program can compare, and the outcome in the metrics.
    pub code: &'static str,
    /// The parameter that is at fault.
    pub param: Option<String>,
    pub message: String,
    /// Seconds, for 429 and 503.
    pub retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn of(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, param: None, message: message.into(), retry_after: None }
    }

    /// The request is wrong, whoever serves it.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::of(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// A parameter is missing, or has a value that it cannot have.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::of(StatusCode::BAD_REQUEST, "invalid_value", message);
        Self { param: Some(param.into()), ..error }
    }

    /// A parameter that OpenAI has, or nobody, and that is not done here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::of(StatusCode::BAD_REQUEST, "unsupported_parameter", message);
        Self { param: Some(param.into()), ..error }
    }

    /// The prompt and the answer are longer than any worker takes.
    pub fn too_long(param: &str, tokens: u32, limit: u32) -> Self {
        let message = format!(
            "{tokens} tokens are needed, for the prompt and max_tokens together, and the limit is {limit}; \
             shorten the prompt, or ask for fewer"
        );
        let error = Self::of(StatusCode::BAD_REQUEST, "context_length_exceeded", message);
        Self { param: Some(param.to_owned()), ..error }
    }

    /// There are no workers of that model.
    pub fn no_model(asked: &str, models: &[String]) -> Self {
        let message = format!("there is no model {asked:?}; there is {}", models.join(", "));
        let error = Self::of(StatusCode::NOT_FOUND, "model_not_found", message);
        Self { param: Some("model".to_owned()), ..error }
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

    /// It was tried again, and what came is not what had come: of a greedy or seeded answer, some worker's tokens are wrong.
    pub fn diverged() -> Self {
        let message =
            "a worker was lost, and the answer of another is a different one; send the request again";
        Self::of(StatusCode::BAD_GATEWAY, "diverged", message)
    }

    /// Its time was over while it was served.
    pub fn deadline(seconds: f64) -> Self {
        let message =
            format!("the answer was not there within {seconds} s; ask for fewer tokens, or for more time");
        Self::of(StatusCode::GATEWAY_TIMEOUT, "deadline", message)
    }

    /// Its time was over before there was a place for it.
    pub fn deadline_in_queue(seconds: f64) -> Self {
        let message = format!(
            "every worker was full for {seconds} s, and the request was not begun; try again later, or give it more time"
        );
        Self::of(StatusCode::GATEWAY_TIMEOUT, "deadline", message)
    }

    /// As OpenAI writes it.
    pub fn body(&self) -> Value {
        let kind = if self.status.is_client_error() && self.status != StatusCode::TOO_MANY_REQUESTS {
            "invalid_request_error"
        } else {
            self.code
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
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
