//! The encoding of rails: the fields of one, which stand in a hello for the first and in a field of their own for each of the
//! others; and what `Ready` adds.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::codec::{once, text};
use super::hello::{Credits, HelloCaps, HelloError, HelloRegion, MAX_NAME, MAX_TRANSPORT, NotifyModes};
use super::rail::{HelloRail, LateRail, MAX_RAILS, Others, check_qps, check_regions};
use crate::provider::QpAddress;
use crate::wire::{Malformed, Reader, Writer};

pub(super) mod tag {
    pub(in crate::connect) const QP: u16 = 3;
    pub(in crate::connect) const PATH: u16 = 4;
    pub(in crate::connect) const CAPS: u16 = 5;
    pub(in crate::connect) const CREDITS: u16 = 6;
    pub(in crate::connect) const REGION: u16 = 8;
    pub(in crate::connect) const TRANSPORT: u16 = 11;
    /// The name of the device.
    pub(in crate::connect) const DEVICE: u16 = 13;
    /// Where the rail with fields of its own stands, and what it is joined to. Says that the sender knows of rails.
    pub(in crate::connect) const PLACE: u16 = 14;
    /// Another rail.
    pub(in crate::connect) const RAIL: u16 = 15;
    /// Within a rail: the client's device that it is joined to.
    pub(in crate::connect) const WITH: u16 = 16;
    /// Within a rail: the address for a connection manager.
    pub(in crate::connect) const MANAGER: u16 = 17;
    /// Within a rail: how many queue pairs it will have.
    pub(in crate::connect) const LATER: u16 = 18;
    /// The same, of a rail whose regions come with it: peers that do not know of those take it for one that never comes.
    pub(in crate::connect) const LATER_KEYLESS: u16 = 19;
    /// In `Ready`: queue pairs of a rail.
    pub(in crate::connect) const LATE: u16 = 1;
}

// Bits of the capability field.
const ORDERED: u32 = 1;
const IMMEDIATE: u32 = 1 << 1;
const NOTIFY_IMM: u32 = 1 << 2;
const NOTIFY_SEND: u32 = 1 << 3;

/// The fields of one rail, but for its queue pairs and regions.
pub(super) fn put_path(w: &mut Writer<'_>, transport: &str, mtu: u32, rd_atomic: u8) {
    w.field(tag::TRANSPORT, |w| {
        w.raw(transport.as_bytes());
    });
    w.field(tag::PATH, |w| {
        w.u32(mtu).u8(rd_atomic);
    });
}

pub(super) fn put_limits(
    w: &mut Writer<'_>,
    caps: HelloCaps,
    notify: NotifyModes,
    credits: Credits,
    max_control: u32,
) {
    w.field(tag::CAPS, |w| {
        let bit = |on, bit| if on { bit } else { 0 };
        let flags = bit(caps.ordered, ORDERED)
            | bit(caps.immediate, IMMEDIATE)
            | bit(notify.imm, NOTIFY_IMM)
            | bit(notify.send, NOTIFY_SEND);
        w.u32(flags).u64(caps.max_msg);
    });
    w.field(tag::CREDITS, |w| {
        w.u32(credits.data).u32(credits.control).u32(max_control);
    });
}

pub(super) fn put_device(w: &mut Writer<'_>, device: &str) {
    if !device.is_empty() {
        w.field(tag::DEVICE, |w| {
            w.raw(device.as_bytes());
        });
    }
}

pub(super) fn put_qps(w: &mut Writer<'_>, qps: &[QpAddress]) {
    for qp in qps {
        w.field(tag::QP, |w| put_qp(w, qp));
    }
}

/// The address of a queue pair.
pub(in crate::connect) fn put_qp(w: &mut Writer<'_>, qp: &QpAddress) {
    w.u32(qp.qp_num).u32(qp.psn).u16(qp.lid).raw(&qp.gid);
    w.u16(qp.soft_port).u64(qp.soft_key).u64(qp.soft_local);
}

pub(super) fn put_regions(w: &mut Writer<'_>, regions: &[HelloRegion]) {
    for r in regions {
        w.field(tag::REGION, |w| {
            w.u64(r.addr).u64(r.len).u32(r.rkey);
        });
    }
}

pub(super) fn put_others(w: &mut Writer<'_>, others: &Others, max_control: u32) {
    w.field(tag::PLACE, |w| {
        w.u8(others.place).u8(others.with).u8(others.later.into()).u8(others.keyless.into());
    });
    for rail in &others.rails {
        w.field(tag::RAIL, |w| {
            put_device(w, &rail.device);
            put_path(w, &rail.transport, rail.mtu, rail.rd_atomic);
            put_limits(w, rail.caps, rail.notify, rail.credits, max_control);
            w.field(tag::WITH, |w| {
                w.u8(rail.with);
            });
            if rail.later > 0 {
                w.field(if rail.keyless { tag::LATER_KEYLESS } else { tag::LATER }, |w| {
                    w.u8(rail.later);
                });
            }
            if let Some(at) = rail.manager {
                w.field(tag::MANAGER, |w| put_socket(w, at));
            }
            put_qps(w, &rail.qps);
            put_regions(w, &rail.regions);
        });
    }
}

/// What has been read of one rail.
#[derive(Default)]
pub(super) struct RailFields {
    device: Option<String>,
    transport: Option<String>,
    path: Option<(u32, u8)>,
    caps: Option<(u32, u64)>,
    credits: Option<(u32, u32, u32)>,
    with: Option<u8>,
    later: Option<u8>,
    later_keyless: Option<u8>,
    manager: Option<SocketAddr>,
    qps: Vec<QpAddress>,
    regions: Vec<HelloRegion>,
}

impl RailFields {
    /// Takes a field, if it is one of a rail.
    pub(super) fn take(&mut self, tag: u16, f: &mut Reader<'_>) -> Result<bool, HelloError> {
        match tag {
            tag::DEVICE => once(&mut self.device, "device", text(f, MAX_NAME, "device")?)?,
            tag::TRANSPORT => once(&mut self.transport, "transport", text(f, MAX_TRANSPORT, "transport")?)?,
            tag::PATH => once(&mut self.path, "path", (f.u32()?, f.u8()?))?,
            tag::CAPS => once(&mut self.caps, "capabilities", (f.u32()?, f.u64()?))?,
            tag::CREDITS => once(&mut self.credits, "credits", (f.u32()?, f.u32()?, f.u32()?))?,
            tag::QP => self.qps.push(qp(f)?),
            tag::REGION => self.regions.push(region(f)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The rail, and the longest control message.
    pub(super) fn finish(self) -> Result<(HelloRail, u32), HelloError> {
        let (mtu, rd_atomic) = self.path.ok_or(HelloError::Missing("path"))?;
        let (flags, max_msg) = self.caps.ok_or(HelloError::Missing("capabilities"))?;
        let (data, control, max_control) = self.credits.ok_or(HelloError::Missing("credits"))?;
        let on = |bit| flags & bit != 0;
        // Whoever has queue pairs needs no others.
        let later = self.later.or(self.later_keyless).filter(|_| self.qps.is_empty()).unwrap_or_default();
        let rail = HelloRail {
            device: self.device.unwrap_or_default(),
            transport: self.transport.ok_or(HelloError::Missing("transport"))?,
            with: self.with.unwrap_or_default(),
            later,
            keyless: later > 0 && self.later.is_none(),
            qps: self.qps,
            manager: self.manager,
            mtu,
            rd_atomic,
            caps: HelloCaps { ordered: on(ORDERED), immediate: on(IMMEDIATE), max_msg },
            credits: Credits { data, control },
            notify: NotifyModes { imm: on(NOTIFY_IMM), send: on(NOTIFY_SEND) },
            regions: self.regions,
        };
        Ok((rail, max_control))
    }
}

/// Where the rail with fields of its own stands, what it is joined to, and what the sender knows of rails that come later.
pub(super) fn others(f: &mut Reader<'_>) -> Result<Others, Malformed> {
    let (place, with) = (f.u8()?, f.u8()?);
    let later = f.remaining() > 0 && f.u8()? == 1;
    let keyless = f.remaining() > 0 && f.u8()? == 1;
    Ok(Others { place, with, later, keyless, rails: Vec::new() })
}

/// One of the other rails.
pub(super) fn rail(f: &mut Reader<'_>) -> Result<HelloRail, HelloError> {
    let mut fields = RailFields::default();
    while let Some((tag, mut f)) = f.field()? {
        if fields.take(tag, &mut f)? {
            continue;
        }
        match tag {
            tag::WITH => once(&mut fields.with, "joined rail", f.u8()?)?,
            tag::LATER => once(&mut fields.later, "number of later queue pairs", f.u8()?)?,
            tag::LATER_KEYLESS => {
                once(&mut fields.later_keyless, "number of later queue pairs", f.u8()?)?;
            }
            tag::MANAGER => once(&mut fields.manager, "manager's address", socket(&mut f)?)?,
            _ => {}
        }
    }
    Ok(fields.finish()?.0)
}

fn region(f: &mut Reader<'_>) -> Result<HelloRegion, Malformed> {
    Ok(HelloRegion { addr: f.u64()?, len: f.u64()?, rkey: f.u32()? })
}

pub(in crate::connect) fn qp(f: &mut Reader<'_>) -> Result<QpAddress, Malformed> {
    Ok(QpAddress {
        qp_num: f.u32()?,
        psn: f.u32()?,
        lid: f.u16()?,
        gid: f.bytes16()?,
        soft_port: f.u16()?,
        soft_key: f.u64()?,
        soft_local: f.u64()?,
    })
}

/// An address and a port. (A scope has a meaning on its own host only.)
pub(crate) fn put_socket(w: &mut Writer<'_>, at: SocketAddr) {
    let ip = match at.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    w.raw(&ip.octets()).u16(at.port());
}

pub(crate) fn socket(f: &mut Reader<'_>) -> Result<SocketAddr, Malformed> {
    let ip = Ipv6Addr::from(f.bytes16()?);
    Ok(SocketAddr::new(ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4), f.u16()?))
}

/// What the drivers say to each other of a rail that comes, or comes back: its queue pairs, and its regions where they have to be said.
pub(crate) fn put_half(out: &mut Vec<u8>, qps: &[QpAddress], regions: &[HelloRegion]) {
    put_qps(&mut Writer(out), qps);
    put_regions(&mut Writer(out), regions);
}

/// What [`put_half`] has put: at most 64 queue pairs.
pub(crate) fn half(r: &mut Reader<'_>) -> Result<(Vec<QpAddress>, Vec<HelloRegion>), HelloError> {
    let (mut qps, mut regions) = (Vec::new(), Vec::new());
    while let Some((tag, mut f)) = r.field()? {
        match tag {
            tag::QP => {
                qps.push(qp(&mut f)?);
                check_qps(&qps)?;
            }
            tag::REGION => regions.push(region(&mut f)?),
            _ => {}
        }
    }
    check_regions(&regions)?;
    Ok((qps, regions))
}

/// The body of `Ready`.
pub(super) fn put_late(out: &mut Vec<u8>, late: &[LateRail]) {
    for rail in late {
        Writer(out).field(tag::LATE, |w| {
            w.u8(rail.rail);
            put_qps(w, &rail.qps);
        });
    }
}

pub(super) fn late(body: &[u8]) -> Result<Vec<LateRail>, HelloError> {
    let mut late: Vec<LateRail> = Vec::new();
    let mut r = Reader::new(body, "ready");
    while let Some((tag, mut f)) = r.field()? {
        if tag != tag::LATE {
            continue;
        }
        let rail = f.u8()?;
        if late.len() == MAX_RAILS || late.iter().any(|l| l.rail == rail) {
            return Err(HelloError::Twice("rail"));
        }
        late.push(LateRail { rail, qps: half(&mut f)?.0 });
    }
    Ok(late)
}

#[cfg(test)]
mod tests {
    use super::super::hello::Hello;
    use super::super::hello::tests::sample;
    use super::*;

    fn encoded(hello: &Hello) -> Vec<u8> {
        let mut out = Vec::new();
        hello.encode(&mut out);
        out
    }

    fn with_rails() -> Hello {
        let mut hello = sample();
        let own = HelloRail { device: "soft-default".into(), ..hello.rail_list().remove(0) };
        let failed = HelloRail { device: "mlx5_9".into(), qps: vec![], regions: vec![], ..own.clone() };
        let managed = HelloRail {
            device: "siw0".into(),
            transport: "verbs-iwarp".into(),
            with: 3,
            manager: Some("[2001:db8::7]:4791".parse().unwrap()),
            mtu: 512,
            ..own.clone()
        };
        let later = HelloRail { later: 3, qps: vec![], ..own.clone() };
        let keyless = HelloRail { keyless: true, regions: vec![], ..later.clone() };
        let fourth = HelloRail { manager: Some("10.0.0.1:7".parse().unwrap()), ..managed.clone() };
        hello.set_rails(vec![failed, own, managed, fourth, later, keyless], 1);
        hello
    }

    #[test]
    fn k10_rails_round_trip_and_keep_their_order() {
        let hello = with_rails();
        let read = Hello::decode(hello.epoch, &encoded(&hello)).unwrap();
        assert_eq!(read, hello);
        let devices: Vec<_> = read.rail_list().into_iter().map(|r| r.device).collect();
        assert_eq!(devices, ["mlx5_9", "soft-default", "siw0", "siw0", "soft-default", "soft-default"]);
        assert!(read.knows_later() && read.rail_list().iter().map(|r| r.later).eq([0, 0, 0, 0, 3, 3]));
        assert!(read.knows_keyless() && read.rail_list().iter().rposition(|r| r.keyless) == Some(5));
        assert_eq!(read.place(), 1);
    }

    /// What a peer that knows of no rails reads is the rail with fields of its own.
    #[test]
    fn k10_a_peer_without_rails_reads_the_first() {
        let hello = with_rails();
        let mut known = Vec::new();
        let bytes = encoded(&hello);
        let mut r = Reader::new(&bytes, "test");
        while let Some((t, mut f)) = r.field().unwrap() {
            if ![tag::PLACE, tag::RAIL, tag::DEVICE].contains(&t) {
                let rest = f.take(f.remaining()).unwrap();
                Writer(&mut known).field(t, |w| {
                    w.raw(rest);
                });
            }
        }
        let read = Hello::decode(hello.epoch, &known).unwrap();
        assert_eq!(read, Hello { others: None, device: String::new(), ..hello });
        assert_eq!(read.rail_list().len(), 1);
    }

    #[test]
    fn b1_wrong_values_of_rails_are_named() {
        let refused = |change: fn(&mut Others)| {
            let mut hello = with_rails();
            change(hello.others.as_mut().unwrap());
            Hello::decode(0, &encoded(&hello)).unwrap_err().to_string()
        };
        assert!(refused(|o| o.place = 6).contains("place"));
        assert!(refused(|o| o.rails = vec![o.rails[1].clone(); 16]).contains("16 rails"));
        assert!(refused(|o| o.rails[0].device = "n".repeat(65)).contains("device"));
        assert!(refused(|o| o.rails[0].transport = "a\nb".into()).contains("transport"));
        assert!(refused(|o| o.rails[1].qps = vec![QpAddress::default(); 65]).contains("1 to 64"));
        assert!(refused(|o| o.rails[1].qps[0].psn = 1 << 24).contains("24 bits"));
        assert!(refused(|o| o.rails[3].later = 65).contains("64 queue pairs"));
        assert!(refused(|o| o.rails[1].mtu = 1500).contains("MTU"));
        assert!(refused(|o| o.rails[1].credits.control = 0).contains("zero"));
        assert!(refused(|o| o.rails[1].regions[0].len = u64::MAX).contains("address space"));
    }

    #[test]
    fn k10_what_ready_adds_round_trips_cut_and_doubled() {
        let rails = vec![
            LateRail { rail: 2, qps: sample().qps },
            LateRail { rail: 0, qps: vec![] },
            LateRail { rail: 255, qps: vec![QpAddress::default()] },
        ];
        let mut body = Vec::new();
        put_late(&mut body, &rails);
        assert_eq!(late(&body).unwrap(), rails);
        for cut in 0..body.len() {
            if let Ok(some) = late(&body[..cut]) {
                assert!(some.len() < rails.len() && some == rails[..some.len()], "cut at {cut}");
            }
        }
        let twice = [&body[..], &body[..]].concat();
        assert_eq!(late(&twice), Err(HelloError::Twice("rail")));
    }
}
