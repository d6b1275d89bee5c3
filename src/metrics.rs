//! Numbers of all channels, for whoever operates them: the feature `metrics`.
//!
//! They go through the facade of the crate [`metrics`](https://docs.rs/metrics): the application chooses where they end
//! (Prometheus, OpenTelemetry, StatsD) by installing a recorder, and hands nothing to this library. A client of one exporter would have
//! been a registry to be passed through every constructor, and a second format beside the application's own; without a
//! recorder the facade costs a load and a branch.
//!
//! **Install the recorder before the first channel is connected**: a channel asks for its handles once, since that
//! look-up is what would be slow. [`describe`] gives the recorder units and help texts.
//!
//! # Names
//!
//! Of kind counter (`c`), gauge (`g`) and histogram (`h`). Times are in seconds, sizes in bytes.
//!
//! | name | | labels | what |
//! |---|---|---|---|
//! | `landfall_channels` | g | `peer` | open channels |
//! | `landfall_rails` | g | `peer`, `rail`, `device`, `state` | rails of open channels that are `up` or `down` |
//! | `landfall_transfers_total` | c | `peer`, `path`, `op`, `outcome` | transfers that have ended |
//! | `landfall_bytes_total` | c | `peer`, `path`, `op` | payload of those that ended well |
//! | `landfall_retries_total` | c | `peer`, `path` | further attempts of writes, on another rail |
//! | `landfall_landed_seconds` | h | `peer`, `path`, `op` | from the call to the confirmation (`write`), or to the data (`read`) |
//! | `landfall_local_to_landed_seconds` | h | `peer`, `path` | from the last local completion of a write to its confirmation |
//! | `landfall_credits_waited_seconds` | h | `peer`, `path` | each time that transfers waited because the peer had no receive posted |
//! | `landfall_rail_bytes_total` | c | `peer`, `rail`, `device`, `direction` | payload that this side posted on a rail: `written` or `read` |
//! | `landfall_gpu_bytes_total` | c | `peer`, `way`, `direction` | payload to and from a pool in memory of a GPU; only where there is one |
//!
//! | label | values |
//! |---|---|
//! | `peer` | the peer's name ([`KvEndpoint::named`](crate::kv::KvEndpoint::named)), or `unnamed` |
//! | `path` | what carries the channel: `tcp`, `shm`, `verbs` or `mixed` |
//! | `rail` | its number in the channel, from 0 |
//! | `device` | this side's device |
//! | `op` | `write` and `read`: ours. `arrive`: the peer's writes. `serve`: the peer's reads. `call`: a write or a read of ours |
//! | `direction` | of a rail, `written` or `read`; of memory of a GPU, `out` of this side's or `in` |
//! | `way` | how it went ([`GpuTraffic`](crate::cuda::GpuTraffic)): `ipc`, `same_process`, `host` (a peer in host memory of this host), `staged` through host memory, which is the slow one, or `gpudirect` |
//! | `outcome` | of `write`: `landed`, `not_delivered`, `in_doubt`; of `read`: `done`, `failed`; of `arrive`: `arrived`, `aborted`; of `serve`: `served`, `not_served`; of `call`: `refused`, a write or a read of ours with nothing posted |
//!
//! Two channels with the same labels add up. Peers without a name share theirs: give each a name that does not change with its
//! restarts, so that there are no more series than peers.
//!
//! # Spans
//!
//! Each write and read is a [`tracing`] span, `kv_write` or `kv_read`, at level DEBUG and with the target `landfall::kv`, inside the span
//! of whoever called. It ends when the result is taken, and by then has the fields `transfer`, `bytes`, `descriptors`, `tag`, `outcome`, `wrs`,
//! `attempts`, `local_us` and `landed_us`. They are there without this feature, too.

/// Every name, with its kind, its unit and what it says.
pub const NAMES: [(&str, Kind, &str); 10] = [
    ("landfall_channels", Kind::Gauge, "Open channels"),
    ("landfall_rails", Kind::Gauge, "Rails of open channels, by state"),
    ("landfall_transfers_total", Kind::Counter, "Transfers that have ended, by operation and outcome"),
    ("landfall_bytes_total", Kind::Counter, "Payload bytes of transfers that ended well"),
    ("landfall_retries_total", Kind::Counter, "Further attempts of writes, on another rail"),
    ("landfall_landed_seconds", Kind::Histogram, "From the call to the confirmation or the data"),
    (
        "landfall_local_to_landed_seconds",
        Kind::Histogram,
        "From the last local completion to the confirmation",
    ),
    ("landfall_credits_waited_seconds", Kind::Histogram, "Waits of transfers for the peer's receives"),
    ("landfall_rail_bytes_total", Kind::Counter, "Payload bytes that this side posted on a rail"),
    (
        "landfall_gpu_bytes_total",
        Kind::Counter,
        "Payload bytes to and from memory of a GPU, by the way they went",
    ),
];

/// What kind of number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// A distribution, of seconds.
    Histogram,
}

/// Tells the recorder that is installed what each name means.
pub fn describe() {
    for (name, kind, text) in NAMES {
        let unit = match name {
            _ if kind == Kind::Histogram => ::metrics::Unit::Seconds,
            _ if name.contains("bytes") => ::metrics::Unit::Bytes,
            _ => ::metrics::Unit::Count,
        };
        match kind {
            Kind::Counter => ::metrics::describe_counter!(name, unit, text),
            Kind::Gauge => ::metrics::describe_gauge!(name, unit, text),
            Kind::Histogram => ::metrics::describe_histogram!(name, unit, text),
        }
    }
}
