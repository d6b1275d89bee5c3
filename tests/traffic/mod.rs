//! Processes that use channels in every way, under faults: what tests/chaos and tests/soak are made of.
//!
//! A worker process has a `Part`: it listens or dials, on one device or several, and does operations of a table on each channel,
//! several at once, while it serves those of the peer. What becomes of each is said to the coordinating process, which compares
//! what both ends have said; what can be seen at one end alone is checked there.
//!
//! ```text
//!   coordinating                                      a worker
//!   args.rs     arguments, and the program's start    process.rs     commands in, lines out
//!   node.rs     one worker, from outside              worker.rs      a part: listens or dials
//!   said.rs     what was said, and the verdict        devices.rs     its devices and endpoint; links cut and mended
//!   part.rs     what a worker is told                 life.rs        an endpoint's life, and the tags of its transfers
//!   rails.rs    devices, drawn                        link.rs        one channel in use, both ways
//!   faults.rs   faults of a device, drawn             grants.rs      what the peer asks for, and what comes of it
//!   blocks.rs   what blocks are like, drawn           operations.rs  the table
//!   content.rs  bytes that can be recognised          writes.rs, layers.rs, reads.rs, refusals.rs   its functions
//!   levels.rs   what must be back at its level        mapped.rs      what goes by tokens, and a naive copy of it
//!                                                     outcome.rs     what became of a write, a write by layer, a read
//!                                                     arrivals.rs    checks what comes, and what must not
//! ```

pub mod args;
mod arrivals;
mod blocks;
pub mod content;
mod devices;
mod faults;
mod grants;
mod layers;
mod levels;
mod life;
mod link;
mod mapped;
pub mod node;
mod operations;
mod outcome;
pub mod part;
pub mod process;
pub mod rails;
mod reads;
mod refusals;
pub mod said;
#[path = "../processes/tied.rs"]
mod tied;
pub mod worker;
mod writes;
