//! A fixed list of addresses: each is asked who it is, again and again. Needs no service.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Directory, DirectoryError, HostPort, LEASE, Registration, Watch, Workers, task};
use crate::bounded::{self, BadResponse};
use crate::protocol::Worker;

/// From one question to the next.
const EVERY: Duration = Duration::from_millis(300);

/// The list.
#[derive(Clone, Debug)]
pub struct Fixed {
    addresses: Vec<HostPort>,
}

/// What is known of one address.
struct Known {
    address: HostPort,
    worker: Option<(Worker, Instant)>,
    /// Questions in a row that were not answered in time.
    late: u32,
}

/// So many questions in a row have to be unanswered, and for the time of a lease: one alone may be late because this process, or
/// the machine, stood still.
const LATE: u32 = 2;

impl Known {
    fn new(address: HostPort) -> Self {
        Self { address, worker: None, late: 0 }
    }

    /// It has answered.
    fn heard(&mut self, worker: Worker, now: Instant) {
        (self.worker, self.late) = (Some((worker, now)), 0);
    }

    /// It has not, in time.
    fn is_late(&mut self, now: Instant) {
        self.late = self.late.saturating_add(1);
        let silent =
            self.worker.as_ref().is_some_and(|(_, heard)| now.saturating_duration_since(*heard) >= LEASE);
        if silent && self.late >= LATE {
            self.worker = None;
        }
    }
}

impl Fixed {
    pub fn new(addresses: Vec<HostPort>) -> Self {
        Self { addresses }
    }
}

impl Directory for Fixed {
    async fn register(&self, _: Worker) -> Result<Registration, DirectoryError> {
        // It is asked.
        Ok(Registration { kept: None })
    }

    async fn watch(&self) -> Result<Watch, DirectoryError> {
        // A connection each time: whether somebody listens is a part of the answer.
        let client = crate::http_client();
        let mut known: Vec<Known> = self.addresses.iter().cloned().map(Known::new).collect();
        ask(&client, &mut known).await;
        let (sender, workers) = watch::channel(list(&known));
        let keep = task(async move {
            loop {
                tokio::time::sleep(EVERY).await;
                ask(&client, &mut known).await;
                let now = list(&known);
                sender.send_if_modified(|old| {
                    let other = *old != now;
                    *old = now;
                    other
                });
            }
        });
        Ok(Watch { workers, _keep: keep })
    }
}

fn list(known: &[Known]) -> Workers {
    known
        .iter()
        .filter_map(|known| known.worker.as_ref().map(|(worker, _)| worker.clone()))
        .collect::<Vec<_>>()
        .into()
}

/// Asks all, each within the time of a lease.
async fn ask(client: &reqwest::Client, known: &mut [Known]) {
    join_all(known.iter_mut().map(|known| async move {
        let url = format!("http://{}/v1/worker", known.address);
        let answer = async {
            let response = client.get(url).timeout(LEASE / 2).send().await?.error_for_status()?;
            bounded::whole(response, LEASE / 2).await
        };
        match answer.await {
            Ok(worker) => known.heard(worker, Instant::now()),
            // Nobody listens there: that needs no waiting.
            Err(BadResponse::Broken(error)) if error.is_connect() && !error.is_timeout() => {
                known.worker = None
            }
            Err(error) => {
                tracing::debug!(address = %known.address, %error, "a worker does not answer");
                known.is_late(Instant::now());
            }
        }
    }))
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Role;

    fn worker() -> Worker {
        Worker {
            name: "prefill-0".to_owned(),
            role: Role::Prefill,
            http: ([127, 0, 0, 1], 1).into(),
            kv: None,
            epoch: 1,
            model: String::new(),
            context: 1,
            slots: 1,
            blocks: 1,
            block_bytes: 1,
            draining: false,
        }
    }

    /// A process that stood still finds everybody silent for longer than a lease, and has asked once.
    #[test]
    fn k6_a_worker_is_out_after_a_lease_of_silence_and_two_questions_not_after_a_late_one() {
        let mut known = Known::new("127.0.0.1:1".parse().unwrap());
        let begun = Instant::now();
        known.heard(worker(), begun);
        known.is_late(begun + 10 * LEASE);
        assert!(known.worker.is_some());
        // An answer between two that are late: nothing has happened.
        known.heard(worker(), begun + 11 * LEASE);
        known.is_late(begun + 21 * LEASE);
        assert!(known.worker.is_some());
        known.is_late(begun + 22 * LEASE);
        assert!(known.worker.is_none());
        // Two within a lease are not silence.
        known.heard(worker(), begun + 30 * LEASE);
        known.is_late(begun + 30 * LEASE);
        known.is_late(begun + 30 * LEASE + LEASE / 2);
        assert!(known.worker.is_some());
    }
}
