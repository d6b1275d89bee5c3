//! Measuring between two processes: what `bench`, `sweep` and `verify` share.
//!
//! ```text
//!   client   asks            talk      what is said, on a control channel      histogram   durations in bounded memory
//!   server   answers         lane      a data channel at work                  progress    a line that is drawn over itself
//!   data     endpoints       load      transfers for a time, summed up         plot        SVG       units   sizes, times
//! ```

pub(crate) mod client;
pub(crate) mod data;
pub(crate) mod histogram;
pub(crate) mod lane;
pub(crate) mod load;
pub(crate) mod plot;
pub(crate) mod progress;
pub(crate) mod server;
pub(crate) mod talk;
pub(crate) mod units;
