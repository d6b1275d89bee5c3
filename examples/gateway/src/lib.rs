//! Disaggregated inference over landfall: a prompt goes to a prefill worker, its KV cache moves to a decode worker over
//! `KvChannel`, and the tokens are streamed to the client.
//!
//! ```text
//!   client ──HTTP──▶ gateway ──HTTP──▶ prefill          gateway/    admission, routing, attempts, the OpenAI-style API
//!                      ▲  └────HTTP──▶ decode           worker/     prefill, decode: HTTP in front, llama.cpp behind
//!                      │                 ▲              directory/  who is there: a static list, or etcd
//!                    tokens   prefill ───┘ KvChannel    model       llama.cpp
//! ```
//!
//! Each of the three is a process of its own. What they say to each other by HTTP, and in the channel's messages, is in
//! [`protocol`].

pub mod api;
pub mod bounded;
pub mod chat;
pub mod cluster;
pub mod directory;
pub mod fetch;
pub mod gateway;
pub mod load;
pub mod metrics;
pub mod model;
pub mod protocol;
pub mod worker;

/// A client for requests between the processes: a connection for each, so that hanging up is seen at once at the other end, and
/// none is left over from a worker that was restarted.
pub(crate) fn http_client() -> reqwest::Client {
    reqwest::Client::builder()
        .pool_max_idle_per_host(0)
        .connect_timeout(std::time::Duration::from_secs(1))
        // Nobody sends us elsewhere.
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()
        // Without TLS there is nothing that can be missing.
        .unwrap_or_default()
}
