//! One attempt: a prompt through one prefill and one decode worker. Whatever ends it early frees what it has at both.

use std::time::Duration;

use futures_util::StreamExt;
use reqwest::Client;
use serde::Serialize;
use tokio::time::Instant;

use super::fleet::{Pair, Seat};
use crate::api::Wanted;
use crate::protocol::{
    DecodeEvent, DecodeRequest, Fault, Finish, PrefillReply, PrefillRequest, Refusal, Token, Worker, words,
};

/// Why an attempt ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The request cannot be served by anybody.
    #[error("{0}")]
    Refused(String),
    /// The workers had no room after all.
    #[error("no room: {0}")]
    Busy(String),
    /// A worker failed.
    #[error("{worker} failed: {why}")]
    Lost {
        worker: String,
        /// Its life.
        epoch: u64,
        /// Whether it still answers: then only this request is the worse for it.
        answers: bool,
        why: String,
    },
    /// What a worker says of the one at the other end of the channel.
    #[error("the worker at the other end of the channel failed: {0}")]
    Peer(String),
    /// The time was over.
    #[error("the time was over")]
    Deadline,
    /// Another attempt had given other tokens.
    #[error("the answer differs from what was sent of it")]
    Diverged,
    /// The client is gone.
    #[error("the client has hung up")]
    HungUp,
}

/// What an attempt tells while it runs.
pub trait Listener {
    /// It has landed, and generation begins.
    fn landed(&mut self, reply: &PrefillReply);

    /// A token.
    ///
    /// # Errors
    /// Ends the attempt.
    fn token(&mut self, token: Token, text: String) -> Result<(), AttemptError>;
}

/// Runs one. The answer's tokens go to `listener`; what is left of an unfinished character, and why it ended, come back.
///
/// # Errors
/// [`AttemptError`].
///
/// # Cancel safety
/// Dropped, it frees what it has at both workers.
pub async fn run(
    client: &Client,
    wanted: &Wanted,
    pair: Pair,
    deadline: Instant,
    listener: &mut impl Listener,
) -> Result<(Finish, String), AttemptError> {
    let Pair { prefill, decode } = pair;
    let Some(kv) = decode.worker.kv else {
        return Err(lost(&decode.worker, "it has no endpoint"));
    };
    let attempt = attempt_number()?;
    let left = || deadline.saturating_duration_since(Instant::now()).as_millis() as u64;
    let mut release = Release { client, worker: &decode.worker, attempt, armed: true };
    let request = PrefillRequest {
        attempt,
        prompt: wanted.prompt.clone(),
        max_tokens: wanted.max_tokens,
        sampling: wanted.sampling,
        decode: kv,
        decode_epoch: decode.worker.epoch,
        timeout_ms: left(),
    };
    let reply: PrefillReply = guarded(deadline, &[&prefill, &decode], async {
        let response = post(client, &prefill.worker, "prefill", &request).await?;
        let whole = response.json().await;
        whole.map_err(|error| lost(&prefill.worker, words(&error)))
    })
    .await
    // At fault is the worker at the other end of the channel.
    .map_err(|error| blame(error, &decode.worker))?;
    drop(prefill);
    let request = DecodeRequest {
        attempt,
        prompt_tokens: reply.prompt_tokens,
        state_bytes: reply.transfer.bytes,
        first: reply.first,
        max_tokens: wanted.max_tokens,
        sampling: wanted.sampling,
        timeout_ms: left(),
    };
    guarded(deadline, &[&decode], async {
        let response = post(client, &decode.worker, "decode", &request).await;
        let response = response.map_err(|error| blame(error, &decode.worker))?;
        // From here on the attempt's end is that of the connection.
        release.armed = false;
        listener.landed(&reply);
        let mut parts = response.bytes_stream();
        let mut buffer = Vec::new();
        while let Some(part) = parts.next().await {
            buffer.extend_from_slice(&part.map_err(|error| lost(&decode.worker, words(&error)))?);
            while let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(DecodeEvent::Token { token, text }) => listener.token(token, text)?,
                    Ok(DecodeEvent::Done { finish, rest }) => return Ok((finish, rest)),
                    Ok(DecodeEvent::Failed { fault: Fault::Deadline, .. }) => {
                        return Err(AttemptError::Deadline);
                    }
                    Ok(DecodeEvent::Failed { why, .. }) => return Err(failed(&decode.worker, why)),
                    Err(error) => return Err(lost(&decode.worker, words(&error))),
                }
            }
        }
        Err(lost(&decode.worker, "its answer was cut off"))
    })
    .await
}

/// Until the deadline, or until one of the workers' lives ends.
async fn guarded<T>(
    deadline: Instant,
    seats: &[&Seat],
    work: impl Future<Output = Result<T, AttemptError>>,
) -> Result<T, AttemptError> {
    let gone = futures_util::future::select_all(seats.iter().map(|seat| {
        Box::pin(async {
            seat.life.cancelled().await;
            lost(&seat.worker, "it has left the directory: it died, or was silent for too long")
        })
    }));
    tokio::select! {
        done = work => done,
        (error, ..) = gone => Err(error),
        // The worker's own deadline comes first, and says more.
        () = tokio::time::sleep_until(deadline + Duration::from_millis(200)) => Err(AttemptError::Deadline),
    }
}

async fn post(
    client: &Client,
    worker: &Worker,
    what: &str,
    body: &(impl Serialize + Sync),
) -> Result<reqwest::Response, AttemptError> {
    let sent = client.post(format!("http://{}/v1/{what}", worker.http)).json(body).send().await;
    let response = sent.map_err(|error| lost(worker, words(&error)))?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let refusal: Refusal = match response.json().await {
        Ok(refusal) => refusal,
        Err(_) => return Err(lost(worker, format!("it answers with status {status}"))),
    };
    Err(match refusal.fault {
        Fault::Request => AttemptError::Refused(refusal.message),
        Fault::Busy => AttemptError::Busy(refusal.message),
        Fault::Deadline => AttemptError::Deadline,
        Fault::Worker => failed(worker, refusal.message),
        Fault::Peer => AttemptError::Peer(refusal.message),
    })
}

fn lost(worker: &Worker, why: impl Into<String>) -> AttemptError {
    let (worker, epoch, why) = (worker.name.clone(), worker.epoch, why.into());
    AttemptError::Lost { worker, epoch, answers: false, why }
}

/// Of one that says so itself.
fn failed(worker: &Worker, why: impl Into<String>) -> AttemptError {
    let (worker, epoch, why) = (worker.name.clone(), worker.epoch, why.into());
    AttemptError::Lost { worker, epoch, answers: true, why }
}

/// Names the worker that a refusal for the peer's fault is about.
fn blame(error: AttemptError, worker: &Worker) -> AttemptError {
    match error {
        AttemptError::Peer(why) => lost(worker, why),
        other => other,
    }
}

fn attempt_number() -> Result<u64, AttemptError> {
    getrandom::u64()
        .map_err(|error| AttemptError::Refused(format!("the system gives no random numbers: {error}")))
}

/// Frees what the attempt has at the decode worker, unless generation has begun.
struct Release<'a> {
    client: &'a Client,
    worker: &'a Worker,
    attempt: u64,
    armed: bool,
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        if self.armed {
            let url = format!("http://{}/v1/attempts/{}", self.worker.http, self.attempt);
            let request = self.client.delete(url).timeout(Duration::from_secs(5));
            // If it does not get there, the reservation ends when its time is over.
            tokio::spawn(async move { request.send().await });
        }
    }
}
