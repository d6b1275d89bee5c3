//! Responses that are read no further than they may be long, and not waited for longer than they may be silent: whoever answers
//! may be broken, or lie.

use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::protocol::words;

/// Bytes of a line, and of a response that is read whole.
pub const LIMIT: usize = 1 << 20;

/// Why a response is of no use.
#[derive(Debug, thiserror::Error)]
pub enum BadResponse {
    #[error("{}", words(.0))]
    Broken(#[from] reqwest::Error),
    #[error("it says more than {LIMIT} bytes at once")]
    Endless,
    #[error("it was silent for {0:?}")]
    Silent(Duration),
    #[error("it says what is not understood: {0}")]
    Words(#[from] serde_json::Error),
}

/// All of a response.
///
/// # Errors
/// [`BadResponse`].
pub async fn whole<T: DeserializeOwned>(
    mut response: reqwest::Response,
    patience: Duration,
) -> Result<T, BadResponse> {
    let mut body = Vec::new();
    while let Some(part) = next(&mut response, patience).await? {
        if body.len() + part.len() > LIMIT {
            return Err(BadResponse::Endless);
        }
        body.extend_from_slice(&part);
    }
    Ok(serde_json::from_slice(&body)?)
}

/// A response that comes a line at a time.
#[derive(Debug)]
pub struct Lines {
    response: reqwest::Response,
    /// What has come of the next lines; looked through as far as `seen`.
    buffer: Vec<u8>,
    seen: usize,
    patience: Duration,
}

impl Lines {
    pub fn new(response: reqwest::Response, patience: Duration) -> Self {
        Self { response, buffer: Vec::new(), seen: 0, patience }
    }

    /// The next line; `None` at the end. What has no end of line is none.
    ///
    /// # Errors
    /// [`BadResponse`].
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, BadResponse> {
        loop {
            if let Some(end) = self.buffer[self.seen..].iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=self.seen + end).collect();
                self.seen = 0;
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            self.seen = self.buffer.len();
            if self.seen > LIMIT {
                return Err(BadResponse::Endless);
            }
            match next(&mut self.response, self.patience).await? {
                Some(part) => self.buffer.extend_from_slice(&part),
                None => return Ok(None),
            }
        }
    }
}

async fn next(
    response: &mut reqwest::Response,
    patience: Duration,
) -> Result<Option<bytes::Bytes>, BadResponse> {
    let part = tokio::time::timeout(patience, response.chunk()).await;
    Ok(part.map_err(|_| BadResponse::Silent(patience))??)
}
