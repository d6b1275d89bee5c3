//! The receiver's side: frames out of the ring, and payload from where it is to where it belongs.
//!
//! A copy is made in pieces of the size of a segment at most, so that a turn of progress ends in time (R9); but for those between
//! GPUs, which are only queued. After each piece the peer is looked at: when it has ended by then, the bytes may be of another use
//! of its memory, and nothing of them is executed.

use std::io;

use super::super::frame::{Desc, Opcode};
use super::super::link::{Link, Stream};
use super::super::qp::QpInner;
use super::super::rx::{Stop, Target, memory_of};
use super::super::tuning::{FAR_BYTES, SEGMENT_BYTES};
use super::copy::CopyHint;
use super::link::{NoCopy, ShmLink};
use super::reference::{REFERENCE, decode_all};

impl QpInner {
    /// Copies a piece of the payload that is referred to, or reads the ring, up to `limit` bytes. How many that were; 0 at the end.
    pub(in crate::provider::soft) fn read_shared(&mut self, limit: usize) -> io::Result<Result<usize, Stop>> {
        if self.rx.pages.is_some() {
            return Ok(self.copy_pages(limit));
        }
        if !self.rx.references.is_empty() {
            return Ok(self.copy_some(limit));
        }
        let Link::Up(Stream::Shm(link)) = &self.link else { return Err(io::ErrorKind::NotConnected.into()) };
        let rx = &mut self.rx;
        let room = (rx.stage.len() - rx.end).min(limit);
        let n = link.recv(&mut rx.stage[rx.end..][..room])?;
        rx.end += n;
        Ok(Ok(n))
    }

    /// Takes the references of a descriptor, once all of them are here. Their payload is copied by the next reads.
    pub(in crate::provider::soft) fn take_references(&mut self, desc: &Desc, n: usize) -> Result<(), Stop> {
        let rx = &mut self.rx;
        if !rx.references.is_empty() {
            return Ok(());
        }
        let Some(bytes) = rx.stage[rx.start..rx.end].get(..n * REFERENCE) else { return Ok(()) };
        decode_all(bytes, desc.len, &mut rx.references).ok_or(Stop::Nonsense)?;
        rx.start += n * REFERENCE;
        Ok(())
    }

    /// What comes of payload of `desc` that could not be copied: `looked_at` bytes count as read where the peer has gone.
    pub(super) fn not_copied(&mut self, why: NoCopy, desc: &Desc, looked_at: usize) -> Result<usize, Stop> {
        match why {
            NoCopy::Nonsense => Err(Stop::Nonsense),
            NoCopy::Unable => Err(Stop::unable(desc)),
            NoCopy::Later => {
                // As if nothing had come yet.
                self.landings.wait_for_driver();
                self.readable = false;
                Ok(1)
            }
            NoCopy::Gone => {
                self.connection_lost();
                Ok(looked_at)
            }
        }
    }

    fn copy_some(&mut self, limit: usize) -> Result<usize, Stop> {
        let Link::Up(Stream::Shm(link)) = &mut self.link else { return Err(Stop::Nonsense) };
        let rx = &mut self.rx;
        let (desc, skip) = (rx.descs[rx.at], rx.copied);
        let Some(reference) = rx.references.front().copied() else { return Err(Stop::Nonsense) };
        if link.rings().peer_closed() {
            self.discard();
            return Ok(1);
        }
        let mut copied = link.find(&reference);
        let (far, slots) = (link.is_of_device(&reference), link.is_of_slots(&reference));
        let guard = self.device.mrs.read();
        // From a GPU to ordinary host memory the driver copies in this thread.
        let beside = (far || slots)
            && match rx.targets[rx.at] {
                Target::Memory { key, .. } => guard.is_device(key),
                Target::Read => self
                    .sq
                    .get(desc.msn)
                    .is_some_and(|entry| self.sq.keys(entry).all(|key| guard.is_device(key))),
                Target::Nothing | Target::Operands | Target::Pages => true,
            };
        let most = if beside { limit } else { limit.min(SEGMENT_BYTES) };
        let take = (reference.len - skip).min(u32::try_from(most).unwrap_or(u32::MAX));
        // Of a READ, the one who asked knows how much comes together.
        let together = match desc.opcode {
            Opcode::ReadResponse => self.sq.burst(),
            _ => u64::from(reference.together) << 10,
        };
        let hint = CopyHint::part_of(together);
        let (mut at, landings) = (u64::from(skip), &mut self.landings);
        memory_of((&guard, &self.reach), &self.sq, &desc, &rx.targets[rx.at], rx.off, take, |range| {
            let next = at + range.len() as u64;
            if copied.is_ok() {
                copied = if far || range.device().is_some() {
                    landings.collect(link, &reference, at, range)
                } else {
                    link.copy(&reference, at, range, hint)
                };
            }
            at = next;
        })?;
        drop(guard);
        if let Err(why) = copied {
            return self.not_copied(why, &desc, take as usize);
        }
        #[cfg(test)]
        super::inspect::copied(take, hint);
        rx.copied += take;
        if rx.copied == reference.len {
            rx.references.pop_front();
            rx.copied = 0;
        }
        // Before anybody hears of it: whoever does may take the source away.
        self.free_ring();
        let sound = self.link.shm().is_some_and(ShmLink::is_sound);
        if sound {
            self.arrived(take)?;
        } else {
            self.discard();
        }
        if !far && !beside {
            return Ok(take as usize);
        }
        self.launch_if_much(slots);
        // It costs little to note a copy for a GPU, and much is queued together. Faults count bytes.
        Ok(if beside && self.faults.is_none() { (take as usize).min(FAR_BYTES) } else { take as usize })
    }

    /// The peer has ended, and with that its payload is gone that was not copied: the connection is about to end, too. What the
    /// peer has said of our requests before that still counts, as it would if it came by TCP.
    pub(super) fn discard(&mut self) {
        let rx = &mut self.rx;
        rx.references.clear();
        rx.pages = None;
        (rx.copied, rx.off, rx.at, rx.discarding) = (0, 0, rx.at + 1, true);
    }

    /// Passes over what travels for a descriptor, and executes it if it is an answer. False when more of it has to come.
    pub(in crate::provider::soft) fn discard_staged(&mut self, desc: &Desc) -> Result<bool, Stop> {
        let rx = &mut self.rx;
        let referred = desc.references().map_or(desc.len as usize, |n| n * REFERENCE);
        let travels = desc.table().unwrap_or(referred);
        let n = rx.staged().len().min(travels - rx.off as usize);
        rx.start += n;
        rx.off += n as u32;
        if (rx.off as usize) < travels {
            return Ok(false);
        }
        (rx.at, rx.off) = (rx.at + 1, 0);
        if matches!(desc.opcode, Opcode::Ack | Opcode::Nak) {
            self.execute(desc)?;
        }
        Ok(true)
    }
}
