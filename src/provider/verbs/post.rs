//! Posting: a chain of requests becomes verbs' linked list, in arrays that are kept, and rings one doorbell.

use std::ffi::c_int;
use std::io;
use std::ptr;
use std::sync::PoisonError;

use super::calls::{self, Refused};
use super::device::Fabric;
use super::qp::VerbsQp;
use super::sys::*;
use crate::error::PostError;
use crate::provider::{RecvWr, SendOp, SendWr, Sge, WrChain};

/// The arrays of a queue pair's posts. Reused, so that steady state allocates nothing.
#[derive(Default)]
pub(super) struct Scratch {
    sends: Vec<ibv_send_wr>,
    recvs: Vec<ibv_recv_wr>,
    sges: Vec<ibv_sge>,
}

// SAFETY: the pointers in these arrays are used during the post that has set them only, under the lock.
unsafe impl Send for Scratch {}

fn sge(s: &Sge) -> ibv_sge {
    ibv_sge { addr: s.addr, length: s.len, lkey: s.lkey }
}

impl Scratch {
    /// The chain as a list. What it points to stays until the next call.
    fn link_sends(&mut self, chain: &WrChain) -> *mut ibv_send_wr {
        self.sges.clear();
        self.sges.extend(chain.sges.iter().map(sge));
        let sges = self.sges.as_mut_ptr();
        self.sends.clear();
        self.sends.extend(chain.wrs.iter().map(|wr| send(wr, sges)));
        let first = self.sends.as_mut_ptr();
        for i in 1..self.sends.len() {
            // SAFETY: `i` and `i - 1` are inside of the array, which does not move any more.
            unsafe { (*first.add(i - 1)).next = first.add(i) };
        }
        first
    }

    /// The same of receives. siw refuses one without an element: there, it has an empty one. (That is for iWARP only: to
    /// other devices, 0 bytes can mean 2 GiB.)
    pub(super) fn link_recvs(&mut self, wrs: &[RecvWr], fabric: Fabric) -> *mut ibv_recv_wr {
        self.sges.clear();
        // One element a request, so that indices agree; not counted where there is none.
        let none = ibv_sge { addr: 0, length: 0, lkey: 0 };
        self.sges.extend(wrs.iter().map(|wr| wr.sge.as_ref().map_or(none, sge)));
        let sges = self.sges.as_mut_ptr();
        self.recvs.clear();
        self.recvs.extend(wrs.iter().enumerate().map(|(i, wr)| ibv_recv_wr {
            wr_id: wr.wr_id,
            next: ptr::null_mut(),
            sg_list: sges.wrapping_add(i),
            num_sge: (wr.sge.is_some() || fabric == Fabric::Iwarp).into(),
        }));
        let first = self.recvs.as_mut_ptr();
        for i in 1..self.recvs.len() {
            // SAFETY: `i` and `i - 1` are inside of the array, which does not move any more.
            unsafe { (*first.add(i - 1)).next = first.add(i) };
        }
        first
    }
}

fn send(wr: &SendWr, sges: *mut ibv_sge) -> ibv_send_wr {
    // SAFETY: plain integers, null pointers and unions of them, for which zero is a value.
    let mut out: ibv_send_wr = unsafe { std::mem::zeroed() };
    out.wr_id = wr.wr_id;
    out.sg_list = sges.wrapping_add(wr.sge_start as usize);
    out.num_sge = c_int::from(wr.sge_len);
    if wr.signaled {
        out.send_flags |= IBV_SEND_SIGNALED;
    }
    if wr.inline {
        out.send_flags |= IBV_SEND_INLINE;
    }
    let remote = |remote_addr, rkey| ibv_send_wr__bindgen_ty_2 {
        rdma: ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey },
    };
    let word = |remote_addr, rkey, compare_add, swap| ibv_send_wr__bindgen_ty_2 {
        atomic: ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey },
    };
    let (opcode, imm) = match wr.op {
        SendOp::Send { imm: None } => (IBV_WR_SEND, None),
        SendOp::Send { imm } => (IBV_WR_SEND_WITH_IMM, imm),
        SendOp::Write { remote_addr, rkey, imm } => {
            out.wr = remote(remote_addr, rkey);
            (if imm.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE }, imm)
        }
        SendOp::Read { remote_addr, rkey } => {
            out.wr = remote(remote_addr, rkey);
            (IBV_WR_RDMA_READ, None)
        }
        SendOp::FetchAdd { remote_addr, rkey, add } => {
            out.wr = word(remote_addr, rkey, add, 0);
            (IBV_WR_ATOMIC_FETCH_AND_ADD, None)
        }
        SendOp::CompareSwap { remote_addr, rkey, compare, swap } => {
            out.wr = word(remote_addr, rkey, compare, swap);
            (IBV_WR_ATOMIC_CMP_AND_SWP, None)
        }
    };
    out.opcode = opcode;
    if let Some(imm) = imm {
        out.__bindgen_anon_1.imm_data = imm.to_be();
    }
    out
}

/// Where `bad` is in the array at `first`. `None` for a pointer that is not into it.
pub(super) fn index_of<T>(first: *const T, len: usize, bad: *const T) -> Option<usize> {
    let offset = bad.addr().checked_sub(first.addr())?;
    let index = offset / size_of::<T>();
    (offset % size_of::<T>() == 0 && index < len).then_some(index)
}

impl VerbsQp {
    pub(crate) fn post_send(&self, chain: &WrChain) -> Result<(), PostError> {
        if chain.wrs.is_empty() {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let first = scratch.link_sends(chain);
        // SAFETY: the queue pair is live; the list and its elements are in `scratch`, which is locked. Their memory is
        // registered and kept until they complete by whoever built the chain (R1).
        let result = unsafe { calls::post_send(self.raw.raw(), first) };
        result.map_err(|refused| self.refused(first, chain.wrs.len(), refused))
    }

    pub(crate) fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let first = scratch.link_recvs(wrs, self.fabric());
        // SAFETY: as in `post_send`.
        let result = unsafe { calls::post_recv(self.raw.raw(), first) };
        result.map_err(|refused| self.refused(first, wrs.len(), refused))
    }

    fn refused<T>(&self, first: *const T, len: usize, refused: Refused<T>) -> PostError {
        let Refused { bad, error } = refused;
        match index_of(first, len, bad) {
            Some(index) => PostError { index, source: error },
            None => {
                // Nobody knows which requests the device has. They count as posted, so that their memory is kept,
                // and the queue pair ends, so that they do.
                tracing::error!(qp_num = self.qp_num(), %error, "a refused post does not say how far it came");
                if let Err(error) = self.set_error() {
                    tracing::error!(qp_num = self.qp_num(), %error, "moving to the error state failed");
                }
                PostError { index: len, source: io::Error::other(error) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_a_chain_is_one_list_with_its_flags_and_elements() {
        let mut chain = WrChain::default();
        let s = |addr| Sge { addr, len: 3, lkey: 5 };
        chain.push(1, SendOp::Send { imm: Some(0x89ab_cdef) }, &[s(10), s(11)], false, true);
        chain.push(2, SendOp::Write { remote_addr: 7, rkey: 8, imm: None }, &[], true, false);
        chain.push(3, SendOp::Write { remote_addr: 9, rkey: 8, imm: Some(1) }, &[s(12)], false, false);
        chain.push(4, SendOp::Read { remote_addr: 6, rkey: 4 }, &[s(13)], true, false);
        chain.push(5, SendOp::Send { imm: None }, &[s(14)], false, false);
        let mut scratch = Scratch::default();
        for _ in 0..2 {
            let mut at = scratch.link_sends(&chain);
            let mut seen = Vec::new();
            while !at.is_null() {
                // SAFETY: a list in `scratch`, of which each request has `num_sge` elements.
                let (wr, addrs) = unsafe {
                    let wr = &*at;
                    let addrs: Vec<u64> =
                        (0..wr.num_sge as usize).map(|i| (*wr.sg_list.add(i)).addr).collect();
                    (wr, addrs)
                };
                // SAFETY: both are plain integers.
                let (imm, raddr) = unsafe { (wr.__bindgen_anon_1.imm_data, wr.wr.rdma.remote_addr) };
                seen.push((wr.wr_id, wr.opcode, wr.send_flags, addrs, imm.to_ne_bytes(), raddr));
                at = wr.next;
            }
            let none = [0; 4];
            assert_eq!(
                seen,
                [
                    (1, IBV_WR_SEND_WITH_IMM, IBV_SEND_INLINE, vec![10, 11], [0x89, 0xab, 0xcd, 0xef], 0),
                    (2, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, vec![], none, 7),
                    (3, IBV_WR_RDMA_WRITE_WITH_IMM, 0, vec![12], [0, 0, 0, 1], 9),
                    (4, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, vec![13], none, 6),
                    (5, IBV_WR_SEND, 0, vec![14], none, 0),
                ]
            );
        }
    }

    #[test]
    fn r2_an_atomic_has_its_address_key_and_operands() {
        let (remote_addr, rkey) = (0x1000, 5);
        let mut chain = WrChain::default();
        let sge = [Sge { addr: 64, len: 8, lkey: 3 }];
        chain.push(1, SendOp::FetchAdd { remote_addr, rkey, add: 7 }, &sge, true, false);
        chain.push(2, SendOp::CompareSwap { remote_addr, rkey, compare: 7, swap: 9 }, &sge, true, false);
        let mut scratch = Scratch::default();
        let first = scratch.link_sends(&chain);
        for (i, expected) in
            [(IBV_WR_ATOMIC_FETCH_AND_ADD, 0x1000, 7, 0, 5), (IBV_WR_ATOMIC_CMP_AND_SWP, 0x1000, 7, 9, 5)]
                .into_iter()
                .enumerate()
        {
            // SAFETY: two requests in `scratch`; each member of the union is plain integers.
            let (wr, atomic) = unsafe { (&*first.add(i), (*first.add(i)).wr.atomic) };
            let seen = (wr.opcode, atomic.remote_addr, atomic.compare_add, atomic.swap, atomic.rkey);
            assert_eq!(seen, expected);
            assert_eq!((wr.num_sge, wr.send_flags), (1, IBV_SEND_SIGNALED));
        }
    }

    #[test]
    fn r2_a_receive_without_a_buffer_has_an_element_on_iwarp_only() {
        let sge = Some(Sge { addr: 64, len: 8, lkey: 3 });
        let wrs = [RecvWr { wr_id: 1, sge: None }, RecvWr { wr_id: 2, sge }];
        let mut scratch = Scratch::default();
        for (fabric, elements) in [(Fabric::Roce, 0), (Fabric::InfiniBand, 0), (Fabric::Iwarp, 1)] {
            let first = scratch.link_recvs(&wrs, fabric);
            // SAFETY: two requests in `scratch`, with an element each.
            let (a, b, ea, eb) = unsafe {
                let (a, b) = (&*first, &*(*first).next);
                (a, b, &*a.sg_list, &*b.sg_list)
            };
            assert_eq!((a.wr_id, a.num_sge, ea.length), (1, elements, 0));
            assert_eq!((b.wr_id, b.num_sge, eb.addr, eb.length), (2, 1, 64, 8));
            assert!(b.next.is_null());
        }
    }

    #[test]
    fn r10_the_refused_request_is_found_and_no_other_pointer_is_taken_for_one() {
        let wrs = [0u64; 4];
        let first = wrs.as_ptr();
        for i in 0..4 {
            assert_eq!(index_of(first, 4, first.wrapping_add(i)), Some(i));
        }
        for bad in [ptr::null(), first.wrapping_add(4), first.wrapping_sub(1), first.wrapping_byte_add(4)] {
            assert_eq!(index_of(first, 4, bad), None);
        }
    }
}
