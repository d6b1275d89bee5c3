//! Shared memory with a peer of this host: its memory, seen from here.
//!
//! ```text
//!   peer_map.rs   a region of the peer, mapped read-only; one mapping a memfd in the process
//!   copy.rs       from such a mapping to registered memory      raw_copy.rs   the copy itself
//!   cross.rs      from memory that the peer has not shared, where the system permits it
//! ```

mod copy;
mod cross;
mod peer_map;
mod raw_copy;
