//! Which worker a request goes to: the hook for routing by prefix. Values only.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::protocol::{Prompt, Worker};

/// The beginning of a prompt, as a number: prompts that begin alike have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(u64);

/// Bytes of a text that count as its beginning.
const PREFIX_BYTES: usize = 256;

impl Prefix {
    /// Of a conversation, its first message; of a text, its first 256 bytes.
    pub fn of(prompt: &Prompt) -> Self {
        let mut hasher = DefaultHasher::new();
        match prompt {
            Prompt::Chat(messages) => messages.first().hash(&mut hasher),
            Prompt::Text(text) => text.as_bytes()[..text.len().min(PREFIX_BYTES)].hash(&mut hasher),
        }
        Self(hasher.finish())
    }
}

/// A worker that has a free slot.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    pub worker: &'a Worker,
    pub in_flight: u32,
}

/// Chooses among workers that have a free slot. Called with the fleet locked: it has to be quick.
pub trait Route: Send + Sync + std::fmt::Debug {
    /// The place of the prefill worker in `candidates`, which are never none.
    fn prefill(&self, prefix: Prefix, candidates: &[Candidate<'_>]) -> usize;

    /// The same for the decode worker.
    fn decode(&self, prefix: Prefix, candidates: &[Candidate<'_>]) -> usize;
}

/// Prompts that begin alike go to the same prefill worker, which has that beginning still; answers go where there is least to do.
///
/// By highest random weight: when a worker comes or goes, only the prompts of that worker move.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByPrefix;

impl Route for ByPrefix {
    fn prefill(&self, prefix: Prefix, candidates: &[Candidate<'_>]) -> usize {
        let weight = |candidate: &Candidate<'_>| {
            let mut hasher = DefaultHasher::new();
            (prefix.0, &candidate.worker.name).hash(&mut hasher);
            hasher.finish()
        };
        best(candidates, weight)
    }

    fn decode(&self, _: Prefix, candidates: &[Candidate<'_>]) -> usize {
        best(candidates, |candidate| u32::MAX - candidate.in_flight)
    }
}

/// The first of the greatest.
fn best<K: Ord>(candidates: &[Candidate<'_>], key: impl Fn(&Candidate<'_>) -> K) -> usize {
    candidates.iter().enumerate().rev().max_by_key(|(_, candidate)| key(candidate)).map_or(0, |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Role;

    fn worker(name: usize) -> Worker {
        Worker {
            name: format!("prefill-{name}"),
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

    fn choice(prefix: u64, workers: &[Worker]) -> String {
        let candidates: Vec<_> = workers.iter().map(|worker| Candidate { worker, in_flight: 0 }).collect();
        workers[ByPrefix.prefill(Prefix(prefix), &candidates)].name.clone()
    }

    #[test]
    fn prompts_that_begin_alike_stay_together_and_only_those_of_a_lost_worker_move() {
        let four: Vec<Worker> = (0..4).map(worker).collect();
        let three = &four[..3];
        let mut moved = 0;
        for prefix in 0..1000 {
            let before = choice(prefix, &four);
            assert_eq!(before, choice(prefix, &four));
            if before == "prefill-3" {
                moved += 1;
            } else {
                assert_eq!(before, choice(prefix, three));
            }
        }
        assert!((150..350).contains(&moved), "{moved} of 1000 prompts were the fourth worker's");
    }

    #[test]
    fn an_answer_goes_where_there_is_least_to_do() {
        let three: Vec<Worker> = (0..3).map(worker).collect();
        let candidates: Vec<_> =
            three.iter().zip([2, 0, 1]).map(|(worker, in_flight)| Candidate { worker, in_flight }).collect();
        assert_eq!(ByPrefix.decode(Prefix(7), &candidates), 1);
    }
}
