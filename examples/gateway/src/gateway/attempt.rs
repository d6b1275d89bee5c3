//! One attempt: a prompt through one prefill and one decode worker. Whatever ends it early frees what it has at both.

use std::time::Duration;

use reqwest::Client;
use serde::Serialize;
use tokio::time::Instant;

use super::fleet::{Pair, Seat};
use crate::api::Wanted;
use crate::bounded::{self, BadResponse, Lines};
use crate::protocol::{
    DecodeEvent, DecodeRequest, Fault, Finish, PrefillEvent, PrefillReply, PrefillRequest, Refusal, Role,
    Token, Worker, words,
};

/// Why an attempt ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The request cannot be served by anybody.
    #[error("{0}")]
    Refused(String),
    /// It needs so many tokens, which these workers do not take.
    #[error("{0} tokens are needed")]
    TooLong(u32),
    /// A worker had no room after all.
    #[error("no room at a {role} worker: {why}")]
    Busy { role: Role, why: String },
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
    /// What a worker says of the one at the other end of the channel. Either may be at fault.
    #[error("the {by} worker says of the other: {why}")]
    Accused { by: Role, why: String },
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
    fn landed(&mut self, model: &str, reply: &PrefillReply);

    /// A token.
    ///
    /// # Errors
    /// Ends the attempt.
    fn token(&mut self, token: Token, text: String) -> Result<(), AttemptError>;
}

/// How long an attempt may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub deadline: Instant,
    /// A worker that is silent for so long in the middle of a request is stuck.
    pub stall: Duration,
}

/// Bytes of a token's text, at most. A model's longest are some tens, and what a worker has held back of a character comes with one.
const TOKEN_BYTES: usize = 4096;
/// A worker's deadline may be so much before the gateway's: it is told in whole milliseconds, and two clocks run.
const EARLY: Duration = Duration::from_secs(1);

/// Runs one. The answer's tokens go to `listener`; why it ended comes back.
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
    limits: Limits,
    listener: &mut impl Listener,
) -> Result<Finish, AttemptError> {
    let Pair { prefill, decode } = pair;
    let Some(kv) = decode.worker.kv else {
        return Err(failed(&decode.worker, "it has no endpoint"));
    };
    let attempt = attempt_number()?;
    let left = || limits.deadline.saturating_duration_since(Instant::now()).as_millis() as u64;
    let mut release = Release { client, worker: &decode.worker, attempt, armed: true };
    let request = PrefillRequest {
        attempt,
        prompt: wanted.prompt.clone(),
        max_tokens: wanted.max_tokens,
        sampling: wanted.sampling,
        decode: kv,
        decode_epoch: decode.worker.epoch,
        decode_context: decode.worker.context,
        timeout_ms: left(),
    };
    let worker = &*prefill.worker;
    let reply = guarded(limits.deadline, &[&prefill, &decode], async {
        let mut events = post(client, worker, "prefill", &request, limits).await?;
        loop {
            match events.next().await.map_err(|error| broken(worker, error))? {
                Some(PrefillEvent::Working) => {}
                Some(PrefillEvent::Done(reply)) => return Ok(reply),
                Some(PrefillEvent::Failed(refusal)) => return Err(refused(worker, refusal, limits.deadline)),
                None => return Err(lost(worker, "its answer was cut off")),
            }
        }
    })
    .await?;
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
    let worker = &*decode.worker;
    guarded(limits.deadline, &[&decode], async {
        let mut events = post(client, worker, "decode", &request, limits).await?;
        // From here on the attempt's end is that of the connection.
        release.armed = false;
        listener.landed(&worker.model, &reply);
        let mut more = wanted.max_tokens;
        loop {
            match events.next().await.map_err(|error| broken(worker, error))? {
                Some(DecodeEvent::Token { .. }) if more == 0 => {
                    return Err(failed(worker, format!("it gives more than {} tokens", wanted.max_tokens)));
                }
                Some(DecodeEvent::Token { text, .. }) if text.len() > TOKEN_BYTES => {
                    return Err(failed(worker, format!("it gives a token of {} bytes", text.len())));
                }
                Some(DecodeEvent::Token { token, text }) => {
                    more -= 1;
                    listener.token(token, text)?;
                }
                Some(DecodeEvent::Done { finish: Finish::Length }) if more > 0 => {
                    let max = wanted.max_tokens;
                    return Err(failed(
                        worker,
                        format!("it says that {max} tokens are there, and {more} are not"),
                    ));
                }
                Some(DecodeEvent::Done { finish }) => return Ok(finish),
                Some(DecodeEvent::Failed { fault, why }) => {
                    return Err(refused(worker, Refusal::of(fault, why), limits.deadline));
                }
                None => return Err(lost(worker, "its answer was cut off")),
            }
        }
    })
    .await
}

/// Whether a worker answers, in the life that is meant: what another says of it is not proof that it does not.
pub async fn answers(client: &Client, worker: &Worker) -> bool {
    let ask = async {
        let response = client.get(format!("http://{}/v1/worker", worker.http)).send().await.ok()?;
        bounded::whole::<Worker>(response, PROBE).await.ok()
    };
    matches!(tokio::time::timeout(PROBE, ask).await, Ok(Some(now)) if now.epoch == worker.epoch)
}

const PROBE: Duration = Duration::from_secs(1);

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
    limits: Limits,
) -> Result<Lines, AttemptError> {
    let Limits { deadline, stall } = limits;
    let sent = client.post(format!("http://{}/v1/{what}", worker.http)).json(body).send();
    let sent = tokio::time::timeout(stall, sent).await;
    let response = sent
        .map_err(|_| broken(worker, BadResponse::Silent(stall)))?
        .map_err(|error| lost(worker, words(&error)))?;
    let status = response.status();
    if status.is_success() {
        return Ok(Lines::new(response, stall));
    }
    match bounded::whole(response, stall).await {
        Ok(refusal) => Err(refused(worker, refusal, deadline)),
        Err(_) => Err(lost(worker, format!("it answers with status {status}"))),
    }
}

/// What a refusal means for the attempt.
fn refused(worker: &Worker, refusal: Refusal, deadline: Instant) -> AttemptError {
    let Refusal { fault, message: why, tokens } = refusal;
    let by = worker.role;
    let other = if by == Role::Prefill { Role::Decode } else { Role::Prefill };
    match (fault, tokens) {
        (Fault::Request, _) => AttemptError::Refused(why),
        (Fault::TooLong, Some(tokens)) => AttemptError::TooLong(tokens),
        (Fault::TooLong, None) => failed(worker, why),
        (Fault::Busy, _) => AttemptError::Busy { role: by, why },
        (Fault::PeerBusy, _) => AttemptError::Busy { role: other, why },
        (Fault::Peer, _) => AttemptError::Accused { by, why },
        (Fault::Worker, _) => failed(worker, why),
        (Fault::Deadline, _) => match deadline.saturating_duration_since(Instant::now()) {
            left if left > EARLY => {
                failed(worker, format!("it says that the time is over {left:?} before it is"))
            }
            _ => AttemptError::Deadline,
        },
    }
}

fn broken(worker: &Worker, error: BadResponse) -> AttemptError {
    lost(worker, words(&error))
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
