//! Which way a read goes: by what the two ends can do, by what is known of the device, or by measuring (DESIGN.md,
//! section 7). Decides only; says why in words.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::read::ReadError;

/// How a read is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadStrategy {
    /// By what both ends can do, then by what is known of the device. [`ReadDone::why`](super::ReadDone::why) says it.
    #[default]
    Auto,
    /// As [`Auto`](Self::Auto) where there is only one way; where there are two, the first two reads of this channel of at
    /// least 1 MiB are done by one each and timed, and later ones by the faster of them.
    Measured,
    /// We read, by RDMA READs, many of them in flight. The owner's pool must be
    /// [readable](super::PoolAccess::peers_read).
    RdmaRead {
        /// READs in flight on a queue pair, at least 1. The devices' limits (`max_rd_atomic`) hold as well.
        depth: u32,
        /// Queue pairs of each rail to use, at least 1, as far as the channel has them.
        qps: usize,
    },
    /// The owner writes, by its library: nobody at its end has to do anything. Our pool must be one that
    /// [peers write to](super::PoolAccess::peers_write).
    RemoteWrite,
}

/// How a read was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ReadMethod {
    /// By RDMA READs: so many in flight on a queue pair at most, on so many queue pairs of each rail.
    RdmaRead {
        /// READs in flight on a queue pair.
        depth: u32,
        /// Queue pairs of each rail.
        qps: usize,
    },
    /// By the owner's WRITEs.
    RemoteWrite,
}

impl ReadMethod {
    /// `"rdma-read"` or `"remote-write"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::RdmaRead { .. } => "rdma-read",
            Self::RemoteWrite => "remote-write",
        }
    }
}

impl fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RdmaRead { depth, qps } => {
                write!(f, "{} ({depth} in flight on each of {qps} queue pairs)", self.name())
            }
            Self::RemoteWrite => f.write_str(self.name()),
        }
    }
}

/// What is known of a channel when it is connected.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The local device's name.
    pub(crate) device: String,
    /// READs that a queue pair may have in flight; 0 without READ.
    pub(crate) reads: u32,
    /// Queue pairs of a rail.
    pub(crate) qps: usize,
    /// The peer's pool can be read by READs.
    pub(crate) readable: bool,
    /// Our pool can be written to.
    pub(crate) writable: bool,
}

/// What was chosen, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) method: ReadMethod,
    pub(crate) why: &'static str,
    /// Its time is to be noted.
    pub(crate) trial: bool,
}

/// A row of what is known of devices: where the name of the local one contains `device`, READs are the slower way on fewer
/// than `qps` queue pairs.
struct Known {
    device: &'static str,
    qps: usize,
    write: &'static str,
    read: &'static str,
}

/// Sources:
/// - eRDMA (two hosts, one card of 25 Gb/s to two of 100): WRITE 19 to 20 GiB/s and READ 2.7 with one READ in flight on one queue
///   pair (UCX's way), 215 Gb/s by `ib_read_bw -q 4`; through another engine WRITE 19 and READ 12. So READs want four queue pairs.
///
/// Devices that are not in it get READs: they ask nothing of the owner's process.
const KNOWN: &[Known] = &[Known {
    device: "erdma",
    qps: 4,
    write: "eRDMA reads slowly on fewer than 4 queue pairs, and writes at full rate",
    read: "eRDMA reads at full rate on 4 queue pairs or more",
}];

/// Reads from this length on are worth being timed.
const TRIAL_BYTES: u64 = 1 << 20;

/// What the two ways have taken, in the trials of one channel.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trials {
    /// Bytes a second. `Some(None)` while it is under way.
    read: Option<Option<f64>>,
    write: Option<Option<f64>>,
}

impl Trials {
    /// A trial has ended; `took` is `None` when it failed, and it is tried again.
    pub(crate) fn ended(&mut self, method: ReadMethod, bytes: u64, took: Option<Duration>) {
        let rate = took.map(|took| Some(bytes as f64 / took.as_secs_f64().max(1e-9)));
        match method {
            ReadMethod::RdmaRead { .. } => self.read = rate,
            ReadMethod::RemoteWrite => self.write = rate,
        }
    }
}

/// Chooses the way of a read of `bytes`.
pub(crate) fn choose(
    strategy: ReadStrategy,
    facts: &Facts,
    bytes: u64,
    trials: &mut Trials,
) -> Result<Choice, ReadError> {
    let by_read = ReadMethod::RdmaRead { depth: facts.reads, qps: facts.qps };
    let choice = |method, why| Ok(Choice { method, why, trial: false });
    match strategy {
        ReadStrategy::RdmaRead { depth, qps } => {
            if depth == 0 || qps == 0 {
                let (what, limit) =
                    if depth == 0 { ("depth", facts.reads.into()) } else { ("qps", facts.qps as u64) };
                return Err(ReadError::Strategy { what, limit });
            }
            check_read(facts)?;
            let method = ReadMethod::RdmaRead { depth: depth.min(facts.reads), qps: qps.min(facts.qps) };
            choice(method, "it was asked for")
        }
        ReadStrategy::RemoteWrite if !facts.writable => Err(ReadError::NotWritable),
        ReadStrategy::RemoteWrite => choice(ReadMethod::RemoteWrite, "it was asked for"),
        ReadStrategy::Auto | ReadStrategy::Measured => match (check_read(facts), facts.writable) {
            (Ok(()), false) => choice(by_read, "our own pool is not one that the owner could write to"),
            (Err(why), false) => Err(why),
            (Err(ReadError::NoRead), true) => {
                choice(ReadMethod::RemoteWrite, "one of the devices has no READ")
            }
            (Err(_), true) => {
                choice(ReadMethod::RemoteWrite, "the owner's pool is not registered to be read")
            }
            (Ok(()), true) if strategy == ReadStrategy::Measured && bytes >= TRIAL_BYTES => {
                Ok(measured(by_read, trials))
            }
            (Ok(()), true) => known(by_read, facts),
        },
    }
}

/// Whether READs are possible.
fn check_read(facts: &Facts) -> Result<(), ReadError> {
    match (facts.reads, facts.readable) {
        (0, _) => Err(ReadError::NoRead),
        (_, false) => Err(ReadError::NotReadable),
        (_, true) => Ok(()),
    }
}

fn known(by_read: ReadMethod, facts: &Facts) -> Result<Choice, ReadError> {
    let row = KNOWN.iter().find(|known| facts.device.contains(known.device));
    let (method, why) = match row {
        Some(row) if facts.qps < row.qps => (ReadMethod::RemoteWrite, row.write),
        Some(row) => (by_read, row.read),
        None => (by_read, "both ways are possible, and READs ask nothing of the owner's process"),
    };
    Ok(Choice { method, why, trial: false })
}

fn measured(by_read: ReadMethod, trials: &mut Trials) -> Choice {
    let trial =
        |method| Choice { method, why: "it is measured: this read is one of the trials", trial: true };
    match (trials.read, trials.write) {
        (None, _) => {
            trials.read = Some(None);
            trial(by_read)
        }
        (_, None) => {
            trials.write = Some(None);
            trial(ReadMethod::RemoteWrite)
        }
        (Some(Some(read)), Some(Some(write))) if write > read => {
            let why = "it was measured: the owner's WRITEs were faster than READs on this channel";
            Choice { method: ReadMethod::RemoteWrite, why, trial: false }
        }
        (Some(Some(_)), Some(Some(_))) => {
            let why = "it was measured: READs were no slower than the owner's WRITEs on this channel";
            Choice { method: by_read, why, trial: false }
        }
        // The trials are under way.
        _ => Choice { method: by_read, why: "it is being measured, and READs come first", trial: false },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts { device: "rxe0".to_owned(), reads: 16, qps: 2, readable: true, writable: true }
    }

    fn method(strategy: ReadStrategy, facts: &Facts) -> Option<&'static str> {
        choose(strategy, facts, 4096, &mut Trials::default()).ok().map(|choice| choice.method.name())
    }

    #[test]
    fn k9_auto_goes_by_what_both_ends_can_do_then_by_the_device() {
        let auto = |facts: Facts| method(ReadStrategy::Auto, &facts);
        assert_eq!(auto(facts()), Some("rdma-read"));
        assert_eq!(auto(Facts { readable: false, ..facts() }), Some("remote-write"));
        assert_eq!(auto(Facts { reads: 0, ..facts() }), Some("remote-write"));
        assert_eq!(auto(Facts { writable: false, ..facts() }), Some("rdma-read"));
        assert_eq!(auto(Facts { writable: false, readable: false, ..facts() }), None);
        assert_eq!(auto(Facts { device: "erdma_0".to_owned(), ..facts() }), Some("remote-write"));
        assert_eq!(auto(Facts { device: "erdma_0".to_owned(), qps: 4, ..facts() }), Some("rdma-read"));
    }

    #[test]
    fn r10_what_was_asked_for_is_done_or_refused_with_the_reason() {
        let asked = ReadStrategy::RdmaRead { depth: 99, qps: 99 };
        let chosen = choose(asked, &facts(), 1, &mut Trials::default()).unwrap();
        assert_eq!(chosen.method, ReadMethod::RdmaRead { depth: 16, qps: 2 });
        let refused =
            |strategy, facts: Facts| choose(strategy, &facts, 1, &mut Trials::default()).unwrap_err();
        assert!(matches!(refused(asked, Facts { readable: false, ..facts() }), ReadError::NotReadable));
        assert!(matches!(refused(asked, Facts { reads: 0, ..facts() }), ReadError::NoRead));
        let shallow = ReadStrategy::RdmaRead { depth: 0, qps: 1 };
        assert!(matches!(refused(shallow, facts()), ReadError::Strategy { what: "depth", limit: 16 }));
        let remote = refused(ReadStrategy::RemoteWrite, Facts { writable: false, ..facts() });
        assert!(matches!(remote, ReadError::NotWritable));
    }

    #[test]
    fn k9_measured_tries_each_way_once_and_keeps_to_the_faster() {
        let mut trials = Trials::default();
        let next =
            |trials: &mut Trials, bytes| choose(ReadStrategy::Measured, &facts(), bytes, trials).unwrap();
        assert!(!next(&mut trials, 4096).trial);
        let (first, second) = (next(&mut trials, 1 << 20), next(&mut trials, 1 << 20));
        assert_eq!((first.method.name(), second.method.name()), ("rdma-read", "remote-write"));
        assert!(first.trial && second.trial && !next(&mut trials, 1 << 20).trial);
        trials.ended(first.method, 1 << 20, Some(Duration::from_millis(4)));
        // One that has failed is tried again.
        trials.ended(second.method, 1 << 20, None);
        let again = next(&mut trials, 1 << 20);
        assert!(again.trial && again.method == ReadMethod::RemoteWrite);
        trials.ended(again.method, 1 << 20, Some(Duration::from_millis(2)));
        assert_eq!(next(&mut trials, 1 << 20).method, ReadMethod::RemoteWrite);
        trials.ended(again.method, 1 << 20, Some(Duration::from_millis(9)));
        assert_eq!(next(&mut trials, 1 << 20).method.name(), "rdma-read");
    }
}
