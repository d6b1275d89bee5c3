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
}

impl Fixed {
    pub fn new(addresses: Vec<HostPort>) -> Self {
        Self { addresses }
    }
}

impl Directory for Fixed {
    async fn register(&self, _: Worker) -> Result<Registration, DirectoryError> {
        // It is asked.
        Ok(Registration { _keep: None })
    }

    async fn watch(&self) -> Result<Watch, DirectoryError> {
        // A connection each time: whether somebody listens is a part of the answer.
        let client = crate::http_client();
        let mut known: Vec<Known> =
            self.addresses.iter().map(|address| Known { address: address.clone(), worker: None }).collect();
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
            Ok(worker) => known.worker = Some((worker, Instant::now())),
            // Nobody listens there: that needs no waiting.
            Err(BadResponse::Broken(error)) if error.is_connect() && !error.is_timeout() => {
                known.worker = None
            }
            Err(error) => {
                tracing::debug!(address = %known.address, %error, "a worker does not answer");
                if known.worker.as_ref().is_some_and(|(_, heard)| heard.elapsed() >= LEASE) {
                    known.worker = None;
                }
            }
        }
    }))
    .await;
}
