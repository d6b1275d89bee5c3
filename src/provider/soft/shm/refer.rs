//! The sender's side of a reference: payload is described by where it is, when the peer can copy it from there.

use std::sync::Arc;

use super::super::frame::Desc;
use super::super::link::{Link, Stream};
use super::super::qp::QpInner;
use super::super::sq::Piece;
use super::super::staging::Staged;
use super::super::tuning::{INLINE_BYTES, SHARED_SLOT_BYTES};
use super::reference::{MAX_REFERENCES, NO_MEMFD, Reference};
use crate::cuda::{CudaError, Gpu};
use crate::device::SoftTransport;
use crate::provider::{AccessFlags, Sge};

/// The end of a slot that is smaller is left empty, rather than cutting a message for less.
const WORTH: usize = 64 << 10;

/// How payload leaves.
#[derive(Clone, Debug)]
pub(in crate::provider::soft) enum Leaves {
    /// As the connection has it.
    Plainly,
    /// Some of it is memory of a GPU, which cannot travel itself: the peer is lent it.
    Lent,
    /// The same, and the GPU copies it to a slot that the peer is lent.
    Staged(Arc<Gpu>),
}

impl QpInner {
    /// How payload in memory of `keys` leaves.
    pub(in crate::provider::soft) fn leaves(&self, keys: impl Iterator<Item = u32>) -> Leaves {
        let Some(link) = self.link.shm() else { return Leaves::Plainly };
        let guard = self.device.mrs.read();
        let mut leaves = Leaves::Plainly;
        for memory in keys.filter_map(|key| guard.mapping(key)?.device_memory()) {
            if link.stages(memory) {
                return Leaves::Staged(memory.gpu().clone());
            }
            leaves = Leaves::Lent;
        }
        leaves
    }

    /// How much of `left` bytes goes to the slot of this frame. `None` where nothing does: another frame is for that, or it waits for a
    /// slot.
    pub(in crate::provider::soft) fn slot_room(
        &mut self,
        left: u32,
        gpu: &Arc<Gpu>,
    ) -> Result<Option<u32>, CudaError> {
        let (_, staged) = self.tx.parts();
        if let Some(staged) = staged {
            let room = staged.room();
            return Ok((room >= WORTH.min(left as usize)).then(|| left.min(room as u32)));
        }
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return Ok(None) };
        let shared = &mut self.staging.shared;
        shared.reclaim(link.rings().done());
        let Some(slot) = shared.take(gpu)? else { return Ok(None) };
        if !link.lend_slots(slot.slots()) {
            shared.wait();
            return Ok(None);
        }
        *staged = Some(Staged::shared(slot));
        Ok(Some(left.min(SHARED_SLOT_BYTES as u32)))
    }

    /// Lets references to `pieces` travel instead of the payload of `desc`, which `leaves` so. False, with nothing changed, where the
    /// payload has to travel itself: over TCP, when it is small, and when the peer cannot read it where it is. `request` is whose it is.
    pub(in crate::provider::soft) fn refer(
        &mut self,
        desc: &mut Desc,
        access: AccessFlags,
        (leaves, request): (&Leaves, Option<u32>),
        pieces: &[Piece],
    ) -> bool {
        let far = !matches!(leaves, Leaves::Plainly);
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return false };
        if desc.len == 0 || (desc.len <= INLINE_BYTES && !far) {
            return false;
        }
        let together = u32::try_from(self.sq.burst() >> 10).unwrap_or(u32::MAX);
        // Held until all is noted that a deregistration has to know.
        let guard = self.device.mrs.read();
        let next_piece = self.tx.next_piece();
        let (references, staged) = self.tx.parts();
        references.clear();
        for piece in pieces {
            let Piece::Memory { addr, len, key } = *piece else { return false };
            // One that is not registered any more is found by the ordinary way out.
            let Some(range) = guard.resolve(key, &self.reach, addr, len.into(), access) else { return false };
            let (memfd, offset) = match (range.device(), range.memfd()) {
                (Some(_), _) if matches!(leaves, Leaves::Staged(_)) => {
                    let copied = self.staging.copy_out(staged, range, request).map_err(|error| {
                        tracing::warn!(%error, "memory of a GPU could not be copied to send it");
                    });
                    let slot = staged.as_ref().and_then(Staged::shared_slot);
                    let (Ok(at), Some(slot)) = (copied, slot) else { return false };
                    (slot.slots().name(), slot.offset() + u64::from(at))
                }
                (Some(memory), _) if link.lend_memory(range.mapping(), memory) => {
                    (memory.name(), addr - memory.allocation().0)
                }
                (None, Some(memfd)) if link.lend(&memfd) => (memfd.id, memfd.offset),
                (None, None) if link.reads_us() => (NO_MEMFD, addr),
                _ => return false,
            };
            let next = Reference { memfd, offset, len, together };
            if !references.last_mut().is_some_and(|last| last.absorb(&next)) {
                references.push(next);
            }
        }
        let count = references.len();
        if !(1..=MAX_REFERENCES).contains(&count) {
            return false;
        }
        for piece in pieces {
            if let Piece::Memory { key, .. } = *piece
                // Of what is staged nobody reads the memory itself, once it is copied.
                && !(matches!(leaves, Leaves::Staged(_)) && guard.is_device(key))
            {
                link.rings().lend(key, next_piece);
            }
        }
        desc.set_references(count);
        if far {
            desc.set_far();
        }
        if matches!(leaves, Leaves::Lent) {
            self.landings.sent(desc.len, link.is_here());
        }
        self.tx.push_references(desc.len);
        true
    }

    /// Why a peer on this host cannot be given memory of a GPU in `elements`. `None` where it can, or there is none, or it is not known
    /// yet.
    pub(in crate::provider::soft) fn unlendable(
        &self,
        elements: &[Sge],
        access: AccessFlags,
    ) -> Option<String> {
        let guard = self.device.mrs.read();
        let memory = elements.iter().find_map(|e| {
            guard.resolve(e.lkey, &self.reach, e.addr, e.len.into(), access).and_then(|range| range.device())
        })?;
        match &self.link {
            Link::Up(Stream::Shm(link)) => link.why_not_give(memory).map(|why| why.to_string()),
            _ => None,
        }
    }

    /// Why payload in `elements` cannot be sent, where shared memory is asked for and the peer cannot read it where it is. Where
    /// TCP is allowed it travels, as it would there.
    pub(in crate::provider::soft) fn unreadable(
        &self,
        elements: &[Sge],
        access: AccessFlags,
    ) -> Option<String> {
        if let Some(why) = self.unlendable(elements, access) {
            return Some(why);
        }
        let why = self.link.shm()?.why_not_read()?;
        let bytes: u64 = elements.iter().map(|e| u64::from(e.len)).sum();
        if self.device.transport != SoftTransport::Shm || bytes <= INLINE_BYTES.into() {
            return None;
        }
        let guard = self.device.mrs.read();
        let brought = |e: &Sge| {
            let range = guard.resolve(e.lkey, &self.reach, e.addr, e.len.into(), access);
            range.is_some_and(|range| range.memfd().is_none() && range.device().is_none())
        };
        elements.iter().any(brought).then(|| {
            format!(
                "memory that the program brought cannot be copied by the peer: {why}; change that, let landfall allocate the memory, or allow TCP (transport=auto)"
            )
        })
    }
}
