//! Shared memory with a peer of this host: the same frames as over TCP, in a ring that both processes have mapped, and large
//! payload not in them at all. **Who owns the target moves the data**: it copies from the source, of which it has been told
//! where it is, and the finished copy is the landing.
//!
//! ```text
//!   door.rs       the rendezvous: a socket with a name
//!   link.rs       a connection: rings, socket, whose memory is known to whom     borrowed.rs  the peer's
//!   words.rs      what is said over the socket     rights.rs  descriptors with it
//!   ring.rs       bytes in both directions         map.rs     their memory      fence.rs  the end, and sleep
//!   reference.rs  what travels instead of payload  refer.rs   made by the sender
//!   receive.rs    taken by the receiver, who copies     loans.rs  what it may be copying
//!   pages.rs      many pieces by one table, at both ends
//!   slots.rs      what memory of GPUs is staged through, where it is not lent itself
//!   peer_map.rs   a region of the peer, mapped read-only; one mapping a memfd in the process
//!   copy.rs       from such a mapping to registered memory      raw_copy.rs   the copy itself
//!   cross.rs      from memory that the peer has not shared, where the system permits it
//! ```

mod borrowed;
mod copy;
mod cross;
mod door;
mod fence;
mod link;
mod loans;
mod map;
mod pages;
mod peer_map;
mod raw_copy;
mod receive;
mod refer;
mod reference;
mod rights;
mod ring;
mod slots;
mod words;

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
pub(super) mod inspect;
#[cfg(all(test, landfall_loom))]
mod models;
#[cfg(any(test, fuzzing))]
#[cfg_attr(not(test), allow(dead_code))] // Some of it is for tests only.
pub(super) mod raw;

#[cfg(test)]
pub(super) use door::address;
pub(super) use door::{ShmDoor, Visit, dial};
pub(super) use link::{NoCopy, ShmLink};
pub(super) use loans::Lenders;
#[cfg(test)]
pub(super) use pages::encode as encode_table;
pub(super) use pages::{Incoming, table_bytes};
pub(super) use peer_map::PeerMap;
pub(super) use refer::Leaves;
pub(super) use reference::{MAX_REFERENCES, Reference};
pub(super) use ring::{Rings, WANTS_BYTES, WANTS_DONE, WANTS_END, WANTS_ROOM};
pub(super) use slots::{Lendable, SharedSlot};
