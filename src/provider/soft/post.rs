//! Posting to the send queue: a request is checked and queued. Its payload is not touched, unless it is inline.
//!
//! The copy of inline payload is the only `unsafe` here.

use std::io;
use std::sync::Arc;

use super::atomic;
use super::faults::Posted;
use super::qp::{QpInner, refused};
use super::sq::Cause;
use crate::error::PostError;
use crate::pages::Checked;
use crate::provider::{AccessFlags, Cqe, QpState, SendOp, SendWr, Sge, WcStatus, WrChain};

impl QpInner {
    pub(super) fn post_chain(&mut self, chain: &WrChain) -> Result<(), PostError> {
        if self.state == QpState::Init {
            return Err(refused(0, libc::EINVAL));
        }
        for (index, wr) in chain.wrs.iter().enumerate() {
            let (sges, pages) = (chain.sges_of(wr), chain.pages_of(wr));
            self.post_one(wr, sges, pages).map_err(|source| PostError { index, source })?;
        }
        Ok(())
    }

    pub(super) fn post_one(
        &mut self,
        wr: &SendWr,
        sges: &[Sge],
        pages: Option<&Arc<Checked>>,
    ) -> io::Result<()> {
        let errno = |errno| Err(io::Error::from_raw_os_error(errno));
        let caps = &self.device.caps;
        let total: u64 = match pages {
            Some(checked) => checked.pages.bytes().unwrap_or(0).into(),
            None => sges.iter().map(|s| u64::from(s.len)).sum(),
        };
        // Our elements are written, and not read.
        let read = wr.op.has_answer();
        let imm = matches!(wr.op, SendOp::Send { imm: Some(_) } | SendOp::Write { imm: Some(_), .. });
        if sges.len() > self.init.max_send_sge as usize
            || (caps.all_signaled && !wr.signaled)
            || (imm && !caps.immediate)
            || (wr.inline && (read || total > self.init.max_inline.into()))
        {
            return errno(libc::EINVAL);
        }
        if wr.op.is_atomic() {
            if !caps.atomics {
                return errno(libc::EOPNOTSUPP);
            }
            if total != u64::from(atomic::WORD) {
                return errno(libc::EINVAL);
            }
        }
        if self.state == QpState::Err {
            let opcode = wr.op.opcode();
            let (status, qp_num) = (WcStatus::Flushed, self.qp_num);
            self.send_cq.push(Cqe { wr_id: wr.wr_id, qp_num, status, opcode, ..Cqe::default() });
            return Ok(());
        }
        if self.sq.is_full() {
            return errno(libc::ENOMEM);
        }
        if pages.is_some() {
            let ([from], false) = (sges, wr.inline) else { return errno(libc::EINVAL) };
            if self.takes_pages(from.lkey) == 0 {
                return errno(libc::EOPNOTSUPP);
            }
        } else if !read
            && !wr.inline
            && let Some(why) = self.unreadable(sges, AccessFlags::default())
        {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let mut failure = (total > self.device.caps.max_msg_size).then_some(WcStatus::LocalLength);
        let mut hold = None;
        if let Some(faults) = self.faults.as_deref_mut() {
            match faults.post() {
                Posted::Accepted(until) => hold = until,
                Posted::Refused => return errno(libc::EIO),
                Posted::Fails => failure = Some(WcStatus::LocalQpOperation),
            }
        }
        if failure.is_none() && !wr.inline {
            let access = if read { AccessFlags::LOCAL_WRITE } else { AccessFlags::default() };
            let guard = self.device.mrs.read();
            let covered = |s: &Sge| match pages.map(|checked| &checked.spans) {
                Some(spans) => {
                    let (start, end) = (spans.source.start, spans.source.end);
                    let at = s.addr.wrapping_add(start);
                    guard.resolve(s.lkey, &self.reach, at, end - start, access).is_some()
                }
                None => {
                    s.len == 0 || guard.resolve(s.lkey, &self.reach, s.addr, s.len.into(), access).is_some()
                }
            };
            failure = (!sges.iter().all(covered)).then_some(WcStatus::LocalProtection);
        }
        let msn = if wr.inline && failure.is_none() {
            self.copy_inline(sges);
            self.sq.push(wr.wr_id, wr.op, wr.signaled, total as u32, &[], Some(&self.inline))
        } else {
            self.sq.push(wr.wr_id, wr.op, wr.signaled, total.min(u32::MAX.into()) as u32, sges, None)
        };
        if let Some(pages) = pages {
            self.sq.is_of(msn, pages.clone());
        }
        if let Some(until) = hold {
            self.sq.hold(msn, until);
        }
        if let Some(status) = failure {
            // Found at the post. Like on a device it fails when its turn has come, and what was posted before ends first.
            let cause = Cause { msn: Some(msn), status, vendor_err: 0 };
            if self.sq.break_off(cause) {
                self.fail_and_close(Some(cause));
            }
        }
        Ok(())
    }

    pub(super) fn copy_inline(&mut self, sges: &[Sge]) {
        self.inline.clear();
        for s in sges.iter().filter(|s| s.len > 0) {
            let from = std::ptr::with_exposed_provenance::<u8>(s.addr as usize);
            self.inline.reserve(s.len as usize);
            // SAFETY: the boundary's contract for an inline request: its elements are readable memory of the poster
            // during the post. `reserve` made room for `s.len` bytes, which the copy initialises.
            unsafe {
                let to = self.inline.as_mut_ptr().add(self.inline.len());
                std::ptr::copy_nonoverlapping(from, to, s.len as usize);
                self.inline.set_len(self.inline.len() + s.len as usize);
            }
        }
    }
}
