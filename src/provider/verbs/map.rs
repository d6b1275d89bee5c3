//! Tables between libibverbs' numbers and the boundary's types. Nothing here touches a device.

use super::sys::*;
use crate::provider::{Cqe, WcOpcode, WcStatus};

pub(super) fn status(status: ibv_wc_status) -> WcStatus {
    match status {
        IBV_WC_SUCCESS => WcStatus::Success,
        IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        IBV_WC_LOC_QP_OP_ERR => WcStatus::LocalQpOperation,
        IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
        IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        IBV_WC_BAD_RESP_ERR => WcStatus::BadResponse,
        IBV_WC_LOC_ACCESS_ERR => WcStatus::LocalAccess,
        IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
        IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        IBV_WC_REM_OP_ERR => WcStatus::RemoteOperation,
        IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExceeded,
        IBV_WC_FATAL_ERR => WcStatus::Fatal,
        IBV_WC_GENERAL_ERR => WcStatus::General,
        other => WcStatus::Other(other),
    }
}

/// An opcode that nobody here asks for counts as a send or a receive, by the bit that tells these apart.
fn opcode(opcode: ibv_wc_opcode) -> WcOpcode {
    match opcode {
        IBV_WC_RDMA_WRITE => WcOpcode::Write,
        IBV_WC_RDMA_READ => WcOpcode::Read,
        IBV_WC_FETCH_ADD => WcOpcode::FetchAdd,
        IBV_WC_COMP_SWAP => WcOpcode::CompareSwap,
        IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWriteWithImm,
        other if other & IBV_WC_RECV != 0 => WcOpcode::Recv,
        _ => WcOpcode::Send,
    }
}

/// Of a failed completion only `wr_id`, `status`, `qp_num` and `vendor_err` mean something.
pub(super) fn cqe(wc: &ibv_wc) -> Cqe {
    let status = status(wc.status);
    let with_imm = status == WcStatus::Success && wc.wc_flags & IBV_WC_WITH_IMM != 0;
    Cqe {
        wr_id: wc.wr_id,
        qp_num: wc.qp_num,
        status,
        vendor_err: wc.vendor_err,
        opcode: opcode(wc.opcode),
        byte_len: wc.byte_len,
        // SAFETY: both members are 32 plain bits. They come as they were on the wire, big-endian.
        imm: with_imm.then(|| u32::from_be(unsafe { wc.__bindgen_anon_1.imm_data })),
    }
}

/// A path MTU as verbs' code. `None` for what is no path MTU.
pub(super) fn mtu_code(bytes: u32) -> Option<ibv_mtu> {
    Some(match bytes {
        256 => IBV_MTU_256,
        512 => IBV_MTU_512,
        1024 => IBV_MTU_1024,
        2048 => IBV_MTU_2048,
        4096 => IBV_MTU_4096,
        _ => return None,
    })
}

/// Bytes of a port's MTU. A code from the future is taken as the largest known, which every such port can do.
pub(super) fn mtu_bytes(code: ibv_mtu) -> u32 {
    match code {
        IBV_MTU_256 => 256,
        IBV_MTU_512 => 512,
        IBV_MTU_1024 => 1024,
        IBV_MTU_2048 => 2048,
        0 => 256,
        _ => 4096,
    }
}

/// A port's state in the kernel's words.
pub(super) fn port_state(state: ibv_port_state) -> &'static str {
    match state {
        IBV_PORT_NOP => "NOP",
        IBV_PORT_DOWN => "DOWN",
        IBV_PORT_INIT => "INIT",
        IBV_PORT_ARMED => "ARMED",
        IBV_PORT_ACTIVE => "ACTIVE",
        IBV_PORT_ACTIVE_DEFER => "ACTIVE_DEFER",
        _ => "of an unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc() -> ibv_wc {
        // SAFETY: plain integers and a union of them, for which zero is a value.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn r6_every_status_of_verbs_has_its_meaning() {
        // The numbers of enum ibv_wc_status, which is ABI.
        let known = [
            (0, WcStatus::Success),
            (1, WcStatus::LocalLength),
            (2, WcStatus::LocalQpOperation),
            (4, WcStatus::LocalProtection),
            (5, WcStatus::Flushed),
            (7, WcStatus::BadResponse),
            (8, WcStatus::LocalAccess),
            (9, WcStatus::RemoteInvalidRequest),
            (10, WcStatus::RemoteAccess),
            (11, WcStatus::RemoteOperation),
            (12, WcStatus::RetryExceeded),
            (13, WcStatus::RnrRetryExceeded),
            (19, WcStatus::Fatal),
            (21, WcStatus::General),
        ];
        for code in 0..64 {
            let expected = known.iter().find(|(c, _)| *c == code).map_or(WcStatus::Other(code), |(_, s)| *s);
            assert_eq!(status(code), expected, "{code}");
        }
    }

    #[test]
    fn r2_completions_keep_their_identity_and_length() {
        for (code, expected) in [
            (IBV_WC_SEND, WcOpcode::Send),
            (IBV_WC_RDMA_WRITE, WcOpcode::Write),
            (IBV_WC_RDMA_READ, WcOpcode::Read),
            (IBV_WC_FETCH_ADD, WcOpcode::FetchAdd),
            (IBV_WC_COMP_SWAP, WcOpcode::CompareSwap),
            (IBV_WC_RECV, WcOpcode::Recv),
            (IBV_WC_RECV_RDMA_WITH_IMM, WcOpcode::RecvWriteWithImm),
        ] {
            let mut wc = wc();
            (wc.wr_id, wc.opcode, wc.qp_num, wc.byte_len, wc.vendor_err) = (u64::MAX, code, 7, 9, 11);
            let c = cqe(&wc);
            assert_eq!((c.wr_id, c.qp_num, c.byte_len, c.vendor_err), (u64::MAX, 7, 9, 11));
            assert_eq!((c.opcode, c.imm, c.status), (expected, None, WcStatus::Success));
        }
    }

    #[test]
    fn r2_an_immediate_is_big_endian_on_the_wire() {
        let mut wc = wc();
        wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.__bindgen_anon_1.imm_data = u32::from_ne_bytes([0x89, 0xab, 0xcd, 0xef]);
        assert_eq!(cqe(&wc).imm, Some(0x89ab_cdef));
        // A flushed completion has none, whatever its bits are.
        wc.status = IBV_WC_WR_FLUSH_ERR;
        assert_eq!(cqe(&wc).imm, None);
    }

    #[test]
    fn b2_mtus() {
        for bytes in [256, 512, 1024, 2048, 4096] {
            assert_eq!(mtu_bytes(mtu_code(bytes).unwrap()), bytes);
        }
        assert!([0, 255, 1500, 8192].into_iter().all(|bytes| mtu_code(bytes).is_none()));
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (256, 4096));
    }
}
