//! A WRITE of pages: a table of blocks travels, and the receiver copies each piece from where it is to where it belongs.
//!
//! ```text
//!   table  memory u64 · where the lowest piece begins in it u64 · bytes of a piece u32 · layers u32 ·
//!          strides of the source: layer u64, block u64 · of the target: layer u64, block u64        56 bytes
//!          pairs: block of the source in the upper half, of the target in the lower                 u64 each
//! ```
//! The memory is lent as for a reference (`reference.rs`). The address in the descriptor is that of the target's block 0 in the first
//! layer, wherever that is: what counts is what the pieces cover, and that is looked up by the key when the table is here. Between
//! GPUs one kernel copies all of it; elsewhere pieces are copied in turns, as large payload is.

use super::super::frame::{Desc, Nak};
use super::super::link::{Link, Stream};
use super::super::mr::MemfdOf;
use super::super::qp::QpInner;
use super::super::rx::Stop;
use super::super::tuning::{FAR_BYTES, SEGMENT_BYTES};
use super::copy::CopyHint;
use super::link::{NoCopy, ShmLink};
use super::reference::{NO_MEMFD, Reference};
use crate::cuda::Copier;
use crate::pages::{Checked, Pages, Strides};
use crate::provider::AccessFlags;

const HEAD: usize = 56;

/// What a piece counts for at least, in a turn: of mapped memory, and where it takes a call of the driver or of the kernel.
const LEAST_COPY: u32 = 512;
const LEAST_CALL: u32 = 4096;
/// Pieces that are looked at together, before a kernel copies them. More go one by one, in turns.
const LOOKED_AT: u64 = 16 << 10;

/// Bytes of a table.
pub(in crate::provider::soft) const fn table_bytes(pairs: usize) -> usize {
    HEAD + 8 * pairs
}

/// One of the peer's whose table is here, and checked.
#[derive(Debug)]
pub(in crate::provider::soft) struct Incoming {
    checked: Checked,
    /// The memory of the source, and where its span begins.
    memory: u64,
    offset: u64,
    /// Pieces are copied one by one: it was found out.
    by_piece: bool,
}

pub(in crate::provider::soft) fn encode(pages: &Pages, memory: u64, offset: u64, out: &mut Vec<u8>) {
    out.extend(memory.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out.extend(pages.piece.to_le_bytes());
    out.extend(pages.layers.to_le_bytes());
    for stride in [pages.source.layer, pages.source.block, pages.target.layer, pages.target.block] {
        out.extend(stride.to_le_bytes());
    }
    let at = out.len();
    out.resize(at + 8 * pages.pairs.len(), 0);
    let places = out[at..].as_chunks_mut::<8>().0;
    places.iter_mut().zip(&pages.pairs).for_each(|(place, pair)| *place = pair.to_le_bytes());
}

/// The pages, the memory of the source, and where their span begins in it.
fn decode(table: &[u8]) -> Option<(Pages, u64, u64)> {
    let (head, pairs) = table.split_first_chunk::<HEAD>()?;
    let (words, []) = head.as_chunks::<8>() else { return None };
    let (pairs, []) = pairs.as_chunks::<8>() else { return None };
    let [memory, offset, shape, sl, sb, tl, tb] = [0, 1, 2, 3, 4, 5, 6].map(|n| u64::from_le_bytes(words[n]));
    let pages = Pages {
        piece: shape as u32,
        layers: (shape >> 32) as u32,
        source: Strides { layer: sl, block: sb },
        target: Strides { layer: tl, block: tb },
        pairs: pairs.iter().map(|pair| u64::from_le_bytes(*pair)).collect(),
    };
    Some((pages, memory, offset))
}

impl QpInner {
    /// Bytes of the largest WRITE of pages from memory of `key` now. That memory is lent by the asking, so that nothing is promised
    /// that cannot be kept: what cannot be lent now, for a moment or for good, goes as other WRITEs do.
    pub(in crate::provider::soft) fn takes_pages(&mut self, key: u32) -> u32 {
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return 0 };
        let guard = self.device.mrs.read();
        let lent = guard.mapping(key).is_some_and(|mapping| match mapping.device_memory() {
            Some(memory) => {
                let lendable = !link.stages(memory) && link.why_not_give(memory).is_none();
                lendable && link.lend_memory(mapping, memory)
            }
            None => MemfdOf::of(mapping).is_some_and(|memfd| link.lend(&memfd)),
        });
        if lent { u32::try_from(self.device.caps.max_msg_size).unwrap_or(u32::MAX) } else { 0 }
    }

    /// Lets a table travel for the request `msn`, which `desc` is of. False where its memory cannot be lent.
    pub(in crate::provider::soft) fn refer_pages(&mut self, desc: &mut Desc, msn: u32) -> bool {
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return false };
        let Some(entry) = self.sq.get(msn) else { return false };
        let (Some(posted), Some(from)) = (&entry.pages, self.sq.first_element(entry)) else { return false };
        let span = &posted.spans.source;
        let at = from.addr.wrapping_add(span.start);
        // Held until all is noted that a deregistration has to know.
        let guard = self.device.mrs.read();
        let access = AccessFlags::default();
        let Some(range) = guard.resolve(from.lkey, &self.reach, at, span.end - span.start, access) else {
            return false;
        };
        let (memory, offset) = match (range.device(), range.memfd()) {
            (Some(memory), _) if link.lend_memory(range.mapping(), memory) => {
                self.landings.sent(desc.len, link.is_here());
                (memory.name(), at - memory.allocation().0)
            }
            (None, Some(memfd)) if link.lend(&memfd) => (memfd.id, memfd.offset),
            _ => return false,
        };
        link.rings().lend(from.lkey, self.tx.next_piece());
        desc.set_pages(posted.pages.pairs.len());
        self.tx.push_table(desc.len, |out| encode(&posted.pages, memory, offset, out));
        true
    }

    /// Takes as much of the table of a descriptor as is here. When that is all, it is checked, and the next reads copy.
    pub(in crate::provider::soft) fn take_table(&mut self, desc: &Desc, bytes: usize) -> Result<(), Stop> {
        let rx = &mut self.rx;
        if rx.pages.is_some() {
            return Ok(());
        }
        let take = (bytes - rx.table.len()).min(rx.end - rx.start);
        rx.table.extend_from_slice(&rx.stage[rx.start..][..take]);
        rx.start += take;
        if rx.table.len() < bytes {
            return Ok(());
        }
        let decoded = decode(&rx.table);
        rx.table.clear();
        let (pages, memory, offset) = decoded.ok_or(Stop::Nonsense)?;
        let checked = pages.check().filter(|checked| checked.pages.bytes() == Some(desc.total));
        let checked = checked.ok_or(Stop::refuse(desc, Nak::InvalidRequest))?;
        rx.pages = Some(Box::new(Incoming { checked, memory, offset, by_piece: false }));
        let incoming = rx.pages.as_deref();
        let sane = incoming.is_some_and(|incoming| {
            let guard = self.device.mrs.read();
            let (at, len) = incoming.target(desc);
            guard.registered(desc.rkey, self.reach.pd, at, len, AccessFlags::REMOTE_WRITE).is_some()
        });
        if sane { Ok(()) } else { Err(Stop::refuse(desc, Nak::Access)) }
    }

    /// Copies some of the pages of the current descriptor, up to about `limit` bytes. How many count as read.
    pub(super) fn copy_pages(&mut self, limit: usize) -> Result<usize, Stop> {
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return Err(Stop::Nonsense) };
        let rx = &mut self.rx;
        let desc = rx.descs[rx.at];
        let Some(incoming) = rx.pages.as_deref_mut() else { return Err(Stop::Nonsense) };
        if link.rings().peer_closed() {
            self.discard();
            return Ok(1);
        }
        let source = |at: u64, len: u32| {
            let offset = at.checked_sub(incoming.checked.spans.source.start)?.checked_add(incoming.offset)?;
            Some(Reference { memfd: incoming.memory, offset, len, together: 0 })
        };
        let first = source(incoming.checked.spans.source.start, 0).ok_or(Stop::Nonsense)?;
        let mut copied = link.find(&first);
        let far = link.is_of_device(&first);
        let span = &incoming.checked.spans.source;
        if copied.is_ok() && !link.may_hold(&first, span.end - span.start) {
            copied = Err(NoCopy::Nonsense);
        }
        let guard = self.device.mrs.read();
        let (at, len) = incoming.target(&desc);
        let Some(range) = guard.registered(desc.rkey, self.reach.pd, at, len, AccessFlags::REMOTE_WRITE)
        else {
            return Err(Stop::refuse(&desc, Nak::Access));
        };
        let (mut take, mut at_once) = (0u32, false);
        if copied.is_ok() && far && range.device().is_some() && !incoming.by_piece {
            let pages = &incoming.checked.pages;
            let kernel = Copier::takes(pages);
            match kernel.then(|| self.reach.exposes_pages(desc.addr, pages, LOOKED_AT)).flatten() {
                Some(true) => {}
                Some(false) => return Err(Stop::refuse(&desc, Nak::Access)),
                None => incoming.by_piece = true,
            }
        }
        if copied.is_ok() && far && range.device().is_some() && !incoming.by_piece {
            // What is staged has not been taken yet.
            let mark = link.rings().taken().wrapping_sub((rx.end - rx.start) as u64);
            let checked = &incoming.checked;
            let whole = self.landings.collect_pages(link, &first, checked, range, (desc.len, mark));
            match whole {
                Ok(true) => (take, at_once) = (desc.len, true),
                Ok(false) => incoming.by_piece = true,
                Err(e) => copied = Err(e),
            }
        }
        let most = u32::try_from(limit.clamp(1, SEGMENT_BYTES)).unwrap_or(u32::MAX);
        let hint = CopyHint::part_of(desc.total.into());
        let called = far || range.device().is_some() || incoming.memory == NO_MEMFD;
        let least = if called { LEAST_CALL } else { LEAST_COPY };
        let (ordered, mut spent) = (self.device.caps.ordered, take);
        while copied.is_ok() && spent < most {
            let Some((from, to, left)) = incoming.checked.pages.at(u64::from(rx.off + take)) else { break };
            let len = left.min(most - spent);
            let (Some(part), Some(reference)) =
                (range.within(to - incoming.checked.spans.target.start, len), source(from, len))
            else {
                return Err(Stop::Nonsense);
            };
            // The span may have more than what is exposed; its pieces may not.
            if !self.reach.exposes(part.addr(), len.into(), AccessFlags::REMOTE_WRITE) {
                return Err(Stop::refuse(&desc, Nak::Access));
            }
            copied = if far || part.device().is_some() {
                self.landings.collect(link, &reference, 0, part)
            } else {
                link.copy(&reference, 0, part, hint)
            };
            take += len;
            spent = spent.saturating_add(len.max(least));
            if called && self.landings.is_full(ordered) {
                break;
            }
        }
        drop(guard);
        if let Err(why) = copied {
            return self.not_copied(why, &desc, 1);
        }
        let whole = take == desc.len && far;
        if self.rx.off + take == desc.len
            && let Some(incoming) = self.rx.pages.take()
            && at_once
        {
            self.landings.are_of(desc.addr, incoming.checked.pages);
        }
        // Before anybody hears of it: whoever does may take the source away.
        self.free_ring();
        if self.link.shm().is_some_and(ShmLink::is_sound) {
            self.arrived(take)?;
        } else {
            self.discard();
        }
        self.launch_if_much(false);
        // Faults count bytes, whatever a turn spends on them.
        let counted = if self.faults.is_some() { take } else { spent };
        Ok(if whole && self.faults.is_none() { FAR_BYTES } else { counted as usize })
    }
}

impl Incoming {
    /// What its pieces cover of the target.
    fn target(&self, desc: &Desc) -> (u64, u64) {
        let span = &self.checked.spans.target;
        (desc.addr.wrapping_add(span.start), span.end - span.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::pair;

    #[test]
    fn b1_tables_travel_as_they_are_and_others_are_refused() {
        let (source, target) = (Strides { layer: 1 << 40, block: 3 }, Strides { layer: 5, block: 1 << 33 });
        let pages = Pages { piece: 7, layers: 9, source, target, pairs: vec![pair(1, u32::MAX), pair(2, 3)] };
        let mut bytes = Vec::new();
        encode(&pages, 11, 13, &mut bytes);
        assert_eq!(bytes.len(), table_bytes(2));
        assert_eq!(decode(&bytes), Some((pages, 11, 13)));
        assert_eq!(decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(decode(&bytes[..HEAD - 1]), None);
    }
}
