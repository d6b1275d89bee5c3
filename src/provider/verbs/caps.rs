//! What a device can do: asked of it, tried out where no flag tells, and one table for what is known by driver only.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::calls::{self, check};
use super::context::{Context, RawPd};
use super::cq::RawCq;
use super::device::{Fabric, Port};
use super::map;
use super::qp::RawQp;
use super::sys::*;
use crate::device::Capabilities;
use crate::device::profile::ERDMA_COMPAT_MODE;
use crate::provider::{QpAddress, QpConnect, QpInit};

/// Alibaba's PCI vendor number: `erdma_query_device` in drivers/infiniband/hw/erdma/erdma_verbs.c of the kernel.
const ALIBABA: u32 = 0x1ded;

/// iWARP devices that have WRITE_WITH_IMM and SEND_WITH_IMM. No attribute tells, and a post in the wrong state fails in
/// any case, so that it cannot be tried before there is a connection. The others notify by SEND, which all can.
///
/// erdma: `erdma_push_one_sqe` in providers/erdma/erdma_verbs.c of rdma-core takes both. siw takes neither:
/// `map_send_opcode` in providers/siw/siw.c.
const IWARP_WITH_IMMEDIATE: [u32; 1] = [ALIBABA];

/// Inline sizes that are tried, the largest first. No attribute tells; creating a queue pair does.
const INLINE: [u32; 7] = [512, 256, 128, 96, 64, 32, 16];

pub(super) fn query_device(context: &Context) -> io::Result<ibv_device_attr> {
    let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the context is open; the call fills the struct.
    check(unsafe { context.lib.ibv_query_device(context.raw(), attr.as_mut_ptr()) })?;
    // SAFETY: plain integers, for which zero is a value.
    Ok(unsafe { attr.assume_init() })
}

pub(super) fn query_port(context: &Context, port: u8) -> io::Result<ibv_port_attr> {
    // SAFETY: the context is open.
    unsafe { calls::query_port(context.lib, context.raw(), port) }
}

/// `None` for what has no reliable connected queue pairs.
pub(super) fn fabric(context: &Context, port: &ibv_port_attr) -> Option<Fabric> {
    // SAFETY: an open context points to its device.
    let transport = unsafe { (*(*context.raw()).device).transport_type };
    fabric_of(transport, port.link_layer)
}

fn fabric_of(transport: ibv_transport_type, link_layer: u8) -> Option<Fabric> {
    match transport {
        IBV_TRANSPORT_IB if u32::from(link_layer) == IBV_LINK_LAYER_ETHERNET => Some(Fabric::Roce),
        IBV_TRANSPORT_IB => Some(Fabric::InfiniBand),
        IBV_TRANSPORT_IWARP => Some(Fabric::Iwarp),
        _ => None,
    }
}

pub(super) fn ask(
    context: &Arc<Context>,
    port_number: u8,
    fabric: Fabric,
    device: &ibv_device_attr,
    port: &ibv_port_attr,
) -> io::Result<Capabilities> {
    let trial = Trial::new(context)?;
    let mut caps = limits(device, port);
    caps.immediate = has_immediate(fabric, device.vendor_id);
    caps.max_inline = INLINE.into_iter().find(|&bytes| trial.queue_pair(bytes).is_ok()).unwrap_or(0);
    // IB's connection is a matter of attributes, iWARP's of a protocol that the driver may keep to RDMA_CM.
    caps.oob = fabric != Fabric::Iwarp || trial.connects_by_hand(port_number);
    Ok(caps)
}

/// What the attributes say. Drivers report in `int`s.
fn limits(device: &ibv_device_attr, port: &ibv_port_attr) -> Capabilities {
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    let rd_atomic = device.max_qp_rd_atom.min(device.max_qp_init_rd_atom).clamp(0, 255);
    Capabilities {
        max_qp_wr: count(device.max_qp_wr),
        max_cqe: count(device.max_cqe),
        max_send_sge: count(device.max_sge),
        max_recv_sge: count(device.max_sge),
        max_inline: 0,
        // 2^31 is what the InfiniBand specification gives a message; a driver that says nothing has that.
        max_msg_size: if port.max_msg_sz == 0 { 1 << 31 } else { port.max_msg_sz.into() },
        max_mr_size: device.max_mr_size,
        max_rd_atomic: u8::try_from(rd_atomic).unwrap_or(u8::MAX),
        max_srq: count(device.max_srq),
        max_srq_wr: count(device.max_srq_wr),
        immediate: false,
        atomics: device.atomic_cap != IBV_ATOMIC_NONE,
        ordered: true,
        all_signaled: false,
        oob: false,
        active_mtu: map::mtu_bytes(port.active_mtu),
    }
}

fn has_immediate(fabric: Fabric, vendor_id: u32) -> bool {
    fabric != Fabric::Iwarp || IWARP_WITH_IMMEDIATE.contains(&vendor_id)
}

/// Why queue pairs of an iWARP device cannot be connected by hand, and the fix.
pub(super) fn no_manual_connect(vendor_id: u32) -> (String, String) {
    let cause = "the device's connections are made by RDMA_CM (iWARP)".to_owned();
    if vendor_id != ALIBABA {
        return (cause, "connect by RDMA_CM".to_owned());
    }
    let compat = match std::fs::read_to_string(ERDMA_COMPAT_MODE) {
        Ok(value) => format!("{ERDMA_COMPAT_MODE} is {}", value.trim()),
        Err(error) => format!("{ERDMA_COMPAT_MODE} is unknown: {error}"),
    };
    let fix = "connect by RDMA_CM, or set `options erdma compat_mode=Y` in /etc/modprobe.d and load the module again";
    (format!("{cause}; {compat}"), fix.to_owned())
}

/// What queue pairs are tried out with.
struct Trial {
    pd: Arc<RawPd>,
    cq: Arc<RawCq>,
}

impl Trial {
    fn new(context: &Arc<Context>) -> io::Result<Self> {
        let pd = Arc::new(RawPd::alloc(context)?);
        Ok(Self { pd, cq: Arc::new(RawCq::create(context, None, 4)?) })
    }

    fn queue_pair(&self, max_inline: u32) -> io::Result<RawQp> {
        let init = QpInit { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline };
        RawQp::create(&self.pd, &self.cq, &self.cq, init)
    }

    /// Whether INIT→RTR→RTS is allowed: a queue pair, to itself. Nothing is sent.
    fn connects_by_hand(&self, number: u8) -> bool {
        let Ok(qp) = self.queue_pair(0) else { return false };
        let port = Port {
            number,
            fabric: Fabric::Iwarp,
            lid: 0,
            gid: [0; 16],
            gid_index: 0,
            traffic_class: 0,
            service_level: 0,
            flow_label: 0,
        };
        let connect = QpConnect {
            remote: QpAddress { qp_num: qp.qp_num(), ..QpAddress::default() },
            path_mtu: 1024,
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            timeout: 14,
            retry_cnt: 6,
            rnr_retry: 6,
            min_rnr_timer: 12,
            active: true,
        };
        qp.init(number, false)
            .and_then(|()| qp.ready_to_receive(&port, &connect, IBV_MTU_1024))
            .and_then(|()| qp.ready_to_send(&connect, 0))
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k8_immediates_are_asked_by_fabric_and_table() {
        for (transport, link, fabric, vendor, immediate) in [
            (IBV_TRANSPORT_IB, IBV_LINK_LAYER_ETHERNET, Some(Fabric::Roce), 0, true),
            (IBV_TRANSPORT_IB, IBV_LINK_LAYER_INFINIBAND, Some(Fabric::InfiniBand), 0x15b3, true),
            // Drivers from before link layers say nothing.
            (IBV_TRANSPORT_IB, IBV_LINK_LAYER_UNSPECIFIED, Some(Fabric::InfiniBand), 0x15b3, true),
            (IBV_TRANSPORT_IWARP, IBV_LINK_LAYER_ETHERNET, Some(Fabric::Iwarp), 0x62_6d74, false),
            (IBV_TRANSPORT_IWARP, IBV_LINK_LAYER_ETHERNET, Some(Fabric::Iwarp), ALIBABA, true),
            (IBV_TRANSPORT_USNIC, IBV_LINK_LAYER_ETHERNET, None, 0, true),
            (IBV_TRANSPORT_UNSPECIFIED, IBV_LINK_LAYER_ETHERNET, None, 0, true),
        ] {
            assert_eq!(fabric_of(transport, link as u8), fabric);
            if let Some(fabric) = fabric {
                assert_eq!(has_immediate(fabric, vendor), immediate, "{fabric:?} {vendor:#x}");
            }
        }
    }

    #[test]
    fn k8_limits_are_what_the_attributes_say() {
        // SAFETY: plain integers, for which zero is a value.
        let (mut d, mut p): (ibv_device_attr, ibv_port_attr) = unsafe { std::mem::zeroed() };
        (d.max_qp_wr, d.max_cqe, d.max_sge, d.max_mr_size) = (1_048_576, 32_767, 32, u64::MAX);
        (d.max_qp_rd_atom, d.max_qp_init_rd_atom, d.max_srq) = (128, 16, -1);
        d.max_srq_wr = 4096;
        for (cap, atomics) in [(IBV_ATOMIC_NONE, false), (IBV_ATOMIC_HCA, true), (IBV_ATOMIC_GLOB, true)] {
            d.atomic_cap = cap;
            assert_eq!(limits(&d, &p).atomics, atomics);
        }
        (p.max_msg_sz, p.active_mtu) = (8 << 20, IBV_MTU_4096);
        let caps = limits(&d, &p);
        assert_eq!((caps.max_qp_wr, caps.max_cqe, caps.max_send_sge), (1_048_576, 32_767, 32));
        assert_eq!((caps.max_rd_atomic, caps.max_srq, caps.max_mr_size), (16, 0, u64::MAX));
        assert_eq!(caps.max_srq_wr, 4096);
        assert_eq!((caps.max_msg_size, caps.active_mtu), (8 << 20, 4096));
        d.max_qp_rd_atom = 1024;
        d.max_qp_init_rd_atom = 1024;
        assert_eq!(limits(&d, &p).max_rd_atomic, 255);
    }

    #[test]
    fn b2_the_refusal_of_a_manual_connect_names_the_fix() {
        let (cause, fix) = no_manual_connect(0x62_6d74);
        assert!(cause.contains("iWARP") && fix.contains("RDMA_CM"), "{cause} {fix}");
        let (cause, fix) = no_manual_connect(ALIBABA);
        assert!(cause.contains(ERDMA_COMPAT_MODE) && fix.contains("compat_mode=Y"), "{cause} {fix}");
    }
}
