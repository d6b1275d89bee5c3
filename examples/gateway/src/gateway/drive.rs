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
use super::attempt::{self, AttemptError, Limits, Listener};
use super::fleet::{Need, NoSeat, Pair, Place};
use super::route::Prefix;
use crate::api::{ApiError, Underneath, Usage, Wanted};
use crate::protocol::{Finish, PrefillReply, Role, Token, Transfer, Worker};

/// Attempts of a request. What fails so often is not the workers' bad luck.
const MAX_ATTEMPTS: u32 = 5;

/// After workers have accused each other: nothing is known to be broken, and at once it would be the same again.
const PAUSE: Duration = Duration::from_millis(100);

/// What a handler is told. The first is `Begun` or `Failed`; the last is `Done` or `Failed`.
#[derive(Debug)]
pub enum Event {
    /// There is a token, by this model.
    Begun(String),
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
        queued: Duration::ZERO,
        answer: Answer::new(events.clone()),
    };
    let end = tokio::select! {
        end = request.serve() => Some(end),
        () = gateway.over.cancelled() => Some(Err(ApiError::unavailable("the gateway is shutting down", 1))),
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
    /// Waiting for a place, until the first token.
    queued: Duration,
    answer: Answer,
}

impl Request<'_> {
    async fn serve(&mut self) -> Result<(Finish, Box<Usage>), ApiError> {
        let mut need = Need {
            prefix: Prefix::of(&self.wanted.prompt),
            model: self.wanted.model.clone(),
            // A token of the prompt there is.
            tokens: self.wanted.max_tokens.saturating_add(1),
            avoid: Vec::new(),
        };
        let (mut attempts, mut place) = (0, Place::Back);
        loop {
            let waiting = Instant::now();
            let pair = self.pair(&need, place).await?;
            let (prefill, decode) = (pair.prefill.worker.clone(), pair.decode.worker.clone());
            let (gateway, limits) = (self.gateway, self.limits());
            place = Place::Front;
            self.answer.again();
            let ran = attempt::run(&gateway.client, self.wanted, pair, limits, &mut self.answer).await;
            // Tokens that the client has are this model's.
            need.model = self.answer.model.clone().or(need.model);
            let full = matches!(ran, Err(AttemptError::Busy { .. } | AttemptError::TooLong(_)));
            if !full {
                attempts += 1;
            }
            if self.answer.first.is_none() && full {
                self.queued += waiting.elapsed();
            }
            let why = match ran {
                // The client has more of it than there is.
                Ok(_) if self.answer.given < self.answer.tokens.len() => return Err(ApiError::diverged()),
                Ok(finish) => {
                    self.answer.begin().map_err(|_| ApiError::lost("the client has hung up"))?;
                    gateway.fleet.well(&prefill);
                    gateway.fleet.well(&decode);
                    return Ok((finish, self.usage((&prefill, &decode), attempts)));
                }
                Err(AttemptError::Refused(message)) => return Err(ApiError::bad(message)),
                Err(AttemptError::Deadline) => return Err(ApiError::deadline(self.seconds)),
                Err(AttemptError::HungUp) => return Err(ApiError::lost("the client has hung up")),
                Err(AttemptError::Diverged) => return Err(ApiError::diverged()),
                Err(AttemptError::TooLong(tokens)) if tokens > prefill.context.min(decode.context) => {
                    need.tokens = tokens;
                    continue;
                }
                Err(AttemptError::TooLong(tokens)) => {
                    attempts += 1;
                    need.avoid.push(prefill.epoch);
                    format!("{} says that {tokens} tokens are too many, and it takes them", prefill.name)
                }
                Err(AttemptError::Busy { role, why }) => {
                    // The gateway's count is behind the worker's, or another gateway has the place.
                    let worker = if role == Role::Prefill { &prefill } else { &decode };
                    tracing::debug!(worker = worker.name, why, "no room after all");
                    self.look_again(gateway.fleet.full(worker));
                    continue;
                }
                Err(AttemptError::Accused { by, why }) => {
                    let (accuser, accused) =
                        if by == Role::Prefill { (&prefill, &decode) } else { (&decode, &prefill) };
                    tracing::warn!(
                        accuser = accuser.name,
                        accused = accused.name,
                        why,
                        "one accuses the other"
                    );
                    // Which of them it is is not known, unless the one is dead.
                    if !attempt::answers(&gateway.client, accused).await {
                        self.look_again(gateway.fleet.suspect(accused));
                        gateway.metrics.lost(accused.role);
                    }
                    need.avoid.extend([accuser.epoch, accused.epoch]);
                    let _ = timeout_at(self.deadline, tokio::time::sleep(PAUSE * attempts)).await;
                    format!("{} says of {}: {why}", accuser.name, accused.name)
                }
                Err(AttemptError::Lost { worker, epoch, answers, why }) => {
                    tracing::warn!(worker, why, "lost a worker under a request");
                    let failed = if epoch == prefill.epoch { &prefill } else { &decode };
                    if !answers {
                        self.look_again(gateway.fleet.suspect(failed));
                    }
                    gateway.metrics.lost(failed.role);
                    need.avoid.push(epoch);
                    format!("{worker}: {why}")
                }
            };
            if attempts >= MAX_ATTEMPTS {
                return Err(ApiError::lost(format!("{attempts} attempts failed; the last: {why}")));
            }
        }
    }

    fn limits(&self) -> Limits {
        Limits { deadline: self.deadline, stall: self.gateway.stall() }
    }

    /// A worker that is left alone is asked again when its time is over, whoever waits by then.
    fn look_again(&self, after: Duration) {
        let fleet = self.gateway.fleet.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            fleet.tick();
        });
    }

    async fn pair(&mut self, need: &Need, place: Place) -> Result<Pair, ApiError> {
        let (fleet, begun) = (&self.gateway.fleet, Instant::now());
        let got = match fleet.acquire(need.clone(), place) {
            Ok(turn) => timeout_at(self.deadline, turn).await,
            Err(error) => Ok(Err(error)),
        };
        if self.answer.first.is_none() {
            self.queued += begun.elapsed();
        }
        let nobody = |prefill, decode| {
            let of = need.model.as_ref().map_or(String::new(), |model| format!(" of {model}"));
            ApiError::unavailable(
                format!(
                    "there are no prefill and decode workers{of} that fit together: {prefill} and {decode} are \
                     there in all, and none came within the time that is waited for one"
                ),
                fleet.retry_after(),
            )
        };
        match got {
            Ok(Ok(pair)) => Ok(pair),
            Ok(Err(NoSeat::Full { waiting, retry_after })) => Err(ApiError::overloaded(waiting, retry_after)),
            Ok(Err(NoSeat::TooLong { limit })) => {
                Err(ApiError::too_long(self.wanted.style.prompt(), need.tokens, limit))
            }
            Ok(Err(NoSeat::Nobody { prefill, decode })) => Err(nobody(prefill, decode)),
            Err(_) if !fleet.has(need) => {
                let levels = fleet.levels();
                Err(nobody(levels.prefill_workers, levels.decode_workers))
            }
            Err(_) => Err(ApiError::deadline_in_queue(self.seconds)),
        }
    }

    fn usage(&self, (prefill, decode): (&Worker, &Worker), attempts: u32) -> Box<Usage> {
        let answer = &self.answer;
        let first = answer.first.unwrap_or_else(Instant::now);
        let (prompt_tokens, completion_tokens) = (answer.prompt_tokens, answer.tokens.len() as u32);
        Box::new(Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            landfall: Underneath {
                ttft_ms: milliseconds(first - self.begun),
                queued_ms: milliseconds(self.queued),
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
    /// Of the first token.
    model: Option<String>,
    /// Of this attempt.
    landed: String,
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
            model: None,
            landed: String::new(),
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

    /// There is an answer, be it an empty one.
    fn begin(&mut self) -> Result<(), AttemptError> {
        if self.model.is_some() {
            return Ok(());
        }
        (self.model, self.first) = (Some(self.landed.clone()), Some(Instant::now()));
        self.events.send(Event::Begun(self.landed.clone())).map_err(|_| AttemptError::HungUp)
    }
}

impl Listener for Answer {
    fn landed(&mut self, model: &str, reply: &PrefillReply) {
        self.landed = model.to_owned();
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
        self.begin()?;
        self.tokens.push(token);
        self.events.send(Event::Text(text)).map_err(|_| AttemptError::HungUp)
    }
}
