//! One request, from admission to its end: as many attempts as it takes, within its deadline.
//!
//! A worker that is lost under a request costs the client nothing but time: the request is tried again elsewhere, and tokens that
//! the client has already are compared with those that come again, and not sent twice. If they differ (which greedy and seeded
//! answers do not), the stream ends with an error.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, timeout_at};

use super::Gateway;
use super::attempt::{self, AttemptError, Listener};
use super::fleet::{NoSeat, Pair};
use super::route::Prefix;
use crate::api::{ApiError, Underneath, Usage, Wanted};
use crate::protocol::{Finish, PrefillReply, Token, Transfer, Worker};

/// Attempts of a request. What fails so often is not the workers' bad luck.
const MAX_ATTEMPTS: u32 = 5;

/// What a handler is told. The first is `Text` or `Failed`; the last is `Done` or `Failed`.
#[derive(Debug)]
pub enum Event {
    Text(String),
    Done(Finish, Box<Usage>),
    Failed(ApiError),
}

/// Serves `wanted`, and tells `events`. When nobody listens any more, it ends, and with it everything that it has.
pub async fn run(gateway: Arc<Gateway>, wanted: Wanted, events: UnboundedSender<Event>) {
    let begun = Instant::now();
    let seconds = gateway.seconds(wanted.timeout);
    let deadline = begun + Duration::from_secs_f64(seconds);
    let mut request = Request {
        gateway: &gateway,
        wanted: &wanted,
        begun,
        deadline,
        seconds,
        answer: Answer::new(events.clone()),
    };
    let end = tokio::select! {
        end = request.serve() => Some(end),
        () = events.closed() => None,
    };
    let outcome = match end {
        Some(Ok((finish, usage))) => {
            gateway.metrics.answered(&usage);
            let _ = events.send(Event::Done(finish, usage));
            "ok"
        }
        Some(Err(error)) => {
            let code = error.code;
            let _ = events.send(Event::Failed(error));
            code
        }
        None => "hung_up",
    };
    gateway.metrics.ended(outcome);
}

struct Request<'a> {
    gateway: &'a Arc<Gateway>,
    wanted: &'a Wanted,
    begun: Instant,
    deadline: Instant,
    seconds: f64,
    answer: Answer,
}

impl Request<'_> {
    async fn serve(&mut self) -> Result<(Finish, Box<Usage>), ApiError> {
        let prefix = Prefix::of(&self.wanted.prompt);
        let (mut avoid, mut attempts, mut queued) = (Vec::new(), 0, None);
        loop {
            let pair = self.pair(prefix, &avoid).await?;
            queued.get_or_insert_with(|| self.begun.elapsed());
            attempts += 1;
            let (prefill, decode) = (pair.prefill.worker.clone(), pair.decode.worker.clone());
            let client = &self.gateway.client;
            self.answer.again();
            let ended = attempt::run(client, self.wanted, pair, self.deadline, &mut self.answer).await;
            let why = match ended {
                Ok((finish, rest)) => {
                    self.answer.rest(rest);
                    let names = (&*prefill, &*decode);
                    return Ok((finish, self.usage(names, attempts, queued.unwrap_or_default())));
                }
                Err(AttemptError::Refused(message)) => return Err(ApiError::bad(message)),
                Err(AttemptError::Deadline) => return Err(ApiError::deadline(self.seconds)),
                Err(AttemptError::HungUp) => return Err(ApiError::lost("the client has hung up")),
                Err(AttemptError::Diverged) => {
                    return Err(ApiError::lost(
                        "a worker was lost, and the answer of another is a different one; send the request again",
                    ));
                }
                Err(AttemptError::Busy(why)) => {
                    // The gateway's count is behind the worker's, for a moment.
                    attempts -= 1;
                    tracing::debug!(why, "no room after all");
                    if timeout_at(self.deadline, tokio::time::sleep(Duration::from_millis(20))).await.is_err()
                    {
                        return Err(ApiError::deadline(self.seconds));
                    }
                    continue;
                }
                Err(AttemptError::Peer(why)) => why,
                Err(AttemptError::Lost { worker, epoch, answers, why }) => {
                    tracing::warn!(worker, why, "lost a worker under a request");
                    let failed = if epoch == prefill.epoch { &prefill } else { &decode };
                    if !answers {
                        self.gateway.fleet.suspect(failed);
                    }
                    self.gateway.metrics.lost(failed.role);
                    avoid.push(epoch);
                    format!("{worker}: {why}")
                }
            };
            if attempts >= MAX_ATTEMPTS {
                return Err(ApiError::lost(format!("{attempts} attempts failed; the last: {why}")));
            }
        }
    }

    async fn pair(&self, prefix: Prefix, avoid: &[u64]) -> Result<Pair, ApiError> {
        if self.gateway.is_draining() {
            return Err(ApiError::unavailable("the gateway is shutting down", 1));
        }
        let turn = match self.gateway.fleet.acquire(prefix, avoid.to_vec()) {
            Ok(turn) => turn,
            Err(NoSeat::Full { waiting, retry_after }) => {
                return Err(ApiError::overloaded(waiting, retry_after));
            }
        };
        match timeout_at(self.deadline, turn).await {
            Ok(Some(pair)) => Ok(pair),
            _ => Err(ApiError::unavailable(
                format!("no prefill and decode worker had room within {} s", self.seconds),
                self.gateway.fleet.retry_after(),
            )),
        }
    }

    fn usage(&self, (prefill, decode): (&Worker, &Worker), attempts: u32, queued: Duration) -> Box<Usage> {
        let answer = &self.answer;
        let first = answer.first.unwrap_or_else(Instant::now);
        let (prompt_tokens, completion_tokens) = (answer.prompt_tokens, answer.tokens.len() as u32);
        Box::new(Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            landfall: Underneath {
                ttft_ms: milliseconds(first - self.begun),
                queued_ms: milliseconds(queued),
                prefill_ms: answer.computed_us as f64 / 1e3,
                cached_tokens: answer.cached_tokens,
                decode_ms: milliseconds(first.elapsed()),
                kv: answer.transfer.clone().unwrap_or_default(),
                prefill: prefill.name.clone(),
                decode: decode.name.clone(),
                attempts,
                token_ids: self.wanted.token_ids.then(|| answer.tokens.clone()),
            },
        })
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// The answer so far, over all attempts.
struct Answer {
    /// As long as the answer: `max_tokens` bounds it.
    events: UnboundedSender<Event>,
    tokens: Vec<Token>,
    /// How many of them this attempt has given.
    given: usize,
    first: Option<Instant>,
    prompt_tokens: u32,
    cached_tokens: u32,
    computed_us: u64,
    transfer: Option<Transfer>,
}

impl Answer {
    fn new(events: UnboundedSender<Event>) -> Self {
        Self {
            events,
            tokens: Vec::new(),
            given: 0,
            first: None,
            prompt_tokens: 0,
            cached_tokens: 0,
            computed_us: 0,
            transfer: None,
        }
    }

    /// Another attempt begins.
    fn again(&mut self) {
        self.given = 0;
    }

    fn rest(&self, text: String) {
        if !text.is_empty() {
            let _ = self.events.send(Event::Text(text));
        }
    }
}

impl Listener for Answer {
    fn landed(&mut self, reply: &PrefillReply) {
        (self.prompt_tokens, self.cached_tokens) = (reply.prompt_tokens, reply.cached_tokens);
        self.computed_us = reply.computed_us;
        self.transfer = Some(reply.transfer.clone());
    }

    fn token(&mut self, token: Token, text: String) -> Result<(), AttemptError> {
        let at = self.given;
        self.given += 1;
        if let Some(&had) = self.tokens.get(at) {
            return if had == token { Ok(()) } else { Err(AttemptError::Diverged) };
        }
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(token);
        self.events.send(Event::Text(text)).map_err(|_| AttemptError::HungUp)
    }
}
