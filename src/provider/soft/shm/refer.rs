//! The sender's side of a reference: payload is described by where it is, when the peer can copy it from there.

use super::super::frame::Desc;
use super::super::link::{Link, Stream};
use super::super::qp::QpInner;
use super::super::sq::Piece;
use super::super::tuning::INLINE_BYTES;
use super::reference::{MAX_REFERENCES, NO_MEMFD, Reference};
use crate::device::SoftTransport;
use crate::provider::{AccessFlags, Sge};

impl QpInner {
    /// Lets references to `pieces` travel instead of the payload of `desc`. False, with nothing changed, where the payload has
    /// to travel itself: over TCP, when it is small, and when the peer cannot read it where it is. `far`: some of it is memory of a
    /// GPU, which cannot travel at all.
    pub(in crate::provider::soft) fn refer(
        &mut self,
        desc: &mut Desc,
        access: AccessFlags,
        far: bool,
        pieces: &[Piece],
    ) -> bool {
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return false };
        if desc.len == 0 || (desc.len <= INLINE_BYTES && !far) {
            return false;
        }
        let together = u32::try_from(self.sq.burst() >> 10).unwrap_or(u32::MAX);
        // Held until all is noted that a deregistration has to know.
        let guard = self.device.mrs.read();
        let next_piece = self.tx.next_piece();
        let references = &mut self.tx.references;
        references.clear();
        for piece in pieces {
            let Piece::Memory { addr, len, key } = *piece else { return false };
            // One that is not registered any more is found by the ordinary way out.
            let Some(range) = guard.resolve(key, &self.reach, addr, len.into(), access) else { return false };
            if let Some(memory) = range.device() {
                if !link.lend_memory(range.mapping(), memory) {
                    return false;
                }
                let offset = addr - memory.allocation().0;
                let next = Reference { memfd: memory.name(), offset, len, together };
                if !references.last_mut().is_some_and(|last| last.absorb(&next)) {
                    references.push(next);
                }
                continue;
            }
            let next = match range.memfd() {
                Some(memfd) if link.lend(&memfd) => {
                    Reference { memfd: memfd.id, offset: memfd.offset, len, together }
                }
                None if link.reads_us() => Reference { memfd: NO_MEMFD, offset: addr, len, together },
                _ => return false,
            };
            if !references.last_mut().is_some_and(|last| last.absorb(&next)) {
                references.push(next);
            }
        }
        if references.is_empty() || references.len() > MAX_REFERENCES {
            return false;
        }
        for piece in pieces {
            if let Piece::Memory { key, .. } = *piece {
                link.rings().lend(key, next_piece);
            }
        }
        desc.set_references(references.len());
        if far {
            desc.set_far();
            self.landings.sent(desc.len, link.is_here());
        }
        self.tx.push_references(desc.len);
        true
    }

    /// Whether `key` is of memory of a GPU.
    pub(in crate::provider::soft) fn is_device(&self, key: u32) -> bool {
        self.device.mrs.read().is_device(key)
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
            Link::Up(Stream::Shm(link)) => link.why_not_lend(memory).map(|why| why.to_string()),
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
