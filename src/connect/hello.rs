//! The hello: what an endpoint says of itself, and of the queue pairs that it offers.
//!
//! A sequence of fields. Queue pairs, regions and dead connections are one field each, repeated, so that a later
//! version can add to their end. Unknown fields, and unknown bytes at the end of known ones, are ignored (B1).

use std::fmt;

use crate::provider::QpAddress;
use crate::wire::{Malformed, Reader, Writer};

/// Longest endpoint name, bytes.
pub(crate) const MAX_NAME: usize = 64;
/// Longest name of a transport, bytes.
pub(crate) const MAX_TRANSPORT: usize = 32;
/// Longest name of an element type, bytes.
pub(crate) const MAX_DTYPE: usize = 16;
/// Most queue pairs of a channel.
pub(crate) const MAX_QPS: usize = 64;
/// Longest authentication part, bytes.
pub(crate) const MAX_AUTH: usize = 4096;

/// Receives that the sender of the hello keeps posted on each of its queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credits {
    pub(crate) data: u32,
    pub(crate) control: u32,
}

/// How a transfer is announced to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notify {
    /// WRITE_WITH_IMM.
    Imm,
    /// WRITE, then SEND.
    Send,
}

/// The notifications that an endpoint can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotifyModes {
    pub(crate) imm: bool,
    pub(crate) send: bool,
}

/// What the other side must know of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HelloCaps {
    /// Messages of a queue pair are delivered in order.
    pub(crate) ordered: bool,
    /// Immediate data exists.
    pub(crate) immediate: bool,
    /// Largest message, bytes.
    pub(crate) max_msg: u64,
}

/// The layout of a pool of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelloLayout {
    pub(crate) layers: u32,
    pub(crate) blocks: u32,
    pub(crate) block_bytes: u64,
    pub(crate) layer_stride: u64,
    pub(crate) block_stride: u64,
    pub(crate) dtype: String,
}

/// One piece of the registered memory of a pool, in the order of the pool's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HelloRegion {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) rkey: u32,
}

/// What an endpoint says when it connects, and the reply to it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The sender's epoch: in the frame's header.
    pub(crate) epoch: u64,
    /// The endpoint's name.
    pub(crate) name: String,
    /// The transport, for instance `soft-tcp`. Both must use the same.
    pub(crate) transport: String,
    /// Chosen at random by the client, repeated by the server.
    pub(crate) connection_id: u64,
    pub(crate) qps: Vec<QpAddress>,
    /// The port's active MTU, bytes.
    pub(crate) mtu: u32,
    /// READs that a queue pair serves and may have outstanding.
    pub(crate) rd_atomic: u8,
    pub(crate) caps: HelloCaps,
    pub(crate) credits: Credits,
    /// Longest control message that the receives hold, bytes.
    pub(crate) max_control: u32,
    pub(crate) notify: NotifyModes,
    pub(crate) layout: Option<HelloLayout>,
    pub(crate) regions: Vec<HelloRegion>,
    /// Connections to this peer which the sender knows to be dead: the new one replaces them.
    pub(crate) dead: Vec<u64>,
    /// Room for authentication: opaque to this layer.
    pub(crate) auth: Vec<u8>,
}

impl fmt::Debug for Hello {
    /// Without keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hello")
            .field("name", &self.name)
            .field("epoch", &format_args!("{:#018x}", self.epoch))
            .field("transport", &self.transport)
            .field("connection_id", &format_args!("{:#018x}", self.connection_id))
            .field("qps", &self.qps.len())
            .field("mtu", &self.mtu)
            .field("caps", &self.caps)
            .field("credits", &self.credits)
            .field("layout", &self.layout)
            .field("regions", &self.regions.len())
            .finish_non_exhaustive()
    }
}

mod tag {
    pub(super) const NAME: u16 = 1;
    pub(super) const CONNECTION: u16 = 2;
    pub(super) const QP: u16 = 3;
    pub(super) const PATH: u16 = 4;
    pub(super) const CAPS: u16 = 5;
    pub(super) const CREDITS: u16 = 6;
    pub(super) const LAYOUT: u16 = 7;
    pub(super) const REGION: u16 = 8;
    pub(super) const DEAD: u16 = 9;
    pub(super) const AUTH: u16 = 10;
    pub(super) const TRANSPORT: u16 = 11;
}

// Bits of the capability field.
const ORDERED: u32 = 1;
const IMMEDIATE: u32 = 1 << 1;
const NOTIFY_IMM: u32 = 1 << 2;
const NOTIFY_SEND: u32 = 1 << 3;

impl Hello {
    /// Appends the fields.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.field(tag::NAME, |w| {
            w.raw(self.name.as_bytes());
        });
        w.field(tag::TRANSPORT, |w| {
            w.raw(self.transport.as_bytes());
        });
        w.field(tag::CONNECTION, |w| {
            w.u64(self.connection_id);
        });
        w.field(tag::PATH, |w| {
            w.u32(self.mtu).u8(self.rd_atomic);
        });
        w.field(tag::CAPS, |w| {
            let bit = |on, bit| if on { bit } else { 0 };
            let flags = bit(self.caps.ordered, ORDERED)
                | bit(self.caps.immediate, IMMEDIATE)
                | bit(self.notify.imm, NOTIFY_IMM)
                | bit(self.notify.send, NOTIFY_SEND);
            w.u32(flags).u64(self.caps.max_msg);
        });
        w.field(tag::CREDITS, |w| {
            w.u32(self.credits.data).u32(self.credits.control).u32(self.max_control);
        });
        for qp in &self.qps {
            w.field(tag::QP, |w| {
                w.u32(qp.qp_num).u32(qp.psn).u16(qp.lid).raw(&qp.gid).u16(qp.soft_port).u64(qp.soft_key);
            });
        }
        if let Some(l) = &self.layout {
            w.field(tag::LAYOUT, |w| {
                w.u32(l.layers).u32(l.blocks).u64(l.block_bytes).u64(l.layer_stride).u64(l.block_stride);
                // The name is preceded by its length: fields of a later version may follow.
                w.u16(l.dtype.len() as u16).raw(l.dtype.as_bytes());
            });
        }
        for r in &self.regions {
            w.field(tag::REGION, |w| {
                w.u64(r.addr).u64(r.len).u32(r.rkey);
            });
        }
        for id in &self.dead {
            w.field(tag::DEAD, |w| {
                w.u64(*id);
            });
        }
        if !self.auth.is_empty() {
            w.field(tag::AUTH, |w| {
                w.raw(&self.auth);
            });
        }
    }

    /// Decodes the fields of a frame whose header carried `epoch`.
    pub(crate) fn decode(epoch: u64, body: &[u8]) -> Result<Self, HelloError> {
        let mut name = None;
        let mut transport = None;
        let mut connection_id = None;
        let mut path = None;
        let mut caps = None;
        let mut credits = None;
        let mut layout = None;
        let mut auth = None;
        let (mut qps, mut regions, mut dead) = (Vec::new(), Vec::new(), Vec::new());

        let mut r = Reader::new(body, "hello");
        while let Some((tag, mut f)) = r.field()? {
            match tag {
                tag::NAME => once(&mut name, "name", text(&mut f, MAX_NAME, "name")?)?,
                tag::TRANSPORT => {
                    once(&mut transport, "transport", text(&mut f, MAX_TRANSPORT, "transport")?)?
                }
                tag::CONNECTION => once(&mut connection_id, "connection id", f.u64()?)?,
                tag::PATH => once(&mut path, "path", (f.u32()?, f.u8()?))?,
                tag::CAPS => once(&mut caps, "capabilities", (f.u32()?, f.u64()?))?,
                tag::CREDITS => once(&mut credits, "credits", (f.u32()?, f.u32()?, f.u32()?))?,
                tag::QP if qps.len() == MAX_QPS => return Err(HelloError::Value("more than 64 queue pairs")),
                tag::QP => qps.push(qp(&mut f)?),
                tag::LAYOUT => once(&mut layout, "layout", layout_of(&mut f)?)?,
                tag::REGION => regions.push(region(&mut f)?),
                tag::DEAD => dead.push(f.u64()?),
                tag::AUTH if f.remaining() > MAX_AUTH => {
                    return Err(HelloError::Value("authentication part too long"));
                }
                tag::AUTH => once(&mut auth, "authentication", f.take(f.remaining())?.to_vec())?,
                _ => {}
            }
        }

        let (mtu, rd_atomic) = path.ok_or(HelloError::Missing("path"))?;
        let (flags, max_msg) = caps.ok_or(HelloError::Missing("capabilities"))?;
        let (data, control, max_control) = credits.ok_or(HelloError::Missing("credits"))?;
        if !super::agree::is_mtu(mtu) {
            return Err(HelloError::Value("the MTU is none of 256, 512, 1024, 2048, 4096"));
        }
        if qps.is_empty() {
            return Err(HelloError::Missing("queue pair"));
        }
        if data == 0 || control == 0 || max_control == 0 || max_msg == 0 {
            return Err(HelloError::Value("a credit or a limit is zero"));
        }
        let on = |bit| flags & bit != 0;
        Ok(Self {
            epoch,
            name: name.ok_or(HelloError::Missing("name"))?,
            transport: transport.ok_or(HelloError::Missing("transport"))?,
            connection_id: connection_id.ok_or(HelloError::Missing("connection id"))?,
            qps,
            mtu,
            rd_atomic,
            caps: HelloCaps { ordered: on(ORDERED), immediate: on(IMMEDIATE), max_msg },
            credits: Credits { data, control },
            max_control,
            notify: NotifyModes { imm: on(NOTIFY_IMM), send: on(NOTIFY_SEND) },
            layout,
            regions,
            dead,
            auth: auth.unwrap_or_default(),
        })
    }
}

/// Why a hello was not accepted. Always a fault of its sender.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("no {0}")]
    Missing(&'static str),
    #[error("the {0} is there twice")]
    Twice(&'static str),
    #[error("{0}")]
    Value(&'static str),
    #[error("the {0} is too long, or not printable text")]
    Text(&'static str),
}

fn once<T>(slot: &mut Option<T>, what: &'static str, value: T) -> Result<(), HelloError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(HelloError::Twice(what)),
    }
}

/// Printable text: it goes into errors and logs.
pub(super) fn text(f: &mut Reader<'_>, max: usize, what: &'static str) -> Result<String, HelloError> {
    if f.remaining() > max {
        return Err(HelloError::Text(what));
    }
    let bytes = f.take(f.remaining())?;
    let s = std::str::from_utf8(bytes).map_err(|_| HelloError::Text(what))?;
    if s.chars().any(char::is_control) {
        return Err(HelloError::Text(what));
    }
    Ok(s.to_owned())
}

fn qp(f: &mut Reader<'_>) -> Result<QpAddress, HelloError> {
    let qp = QpAddress {
        qp_num: f.u32()?,
        psn: f.u32()?,
        lid: f.u16()?,
        gid: f.bytes16()?,
        soft_port: f.u16()?,
        soft_key: f.u64()?,
    };
    if qp.psn >> 24 != 0 || qp.qp_num >> 24 != 0 {
        return Err(HelloError::Value("a queue pair number or PSN has more than 24 bits"));
    }
    Ok(qp)
}

fn region(f: &mut Reader<'_>) -> Result<HelloRegion, HelloError> {
    let r = HelloRegion { addr: f.u64()?, len: f.u64()?, rkey: f.u32()? };
    if r.len == 0 || r.addr.checked_add(r.len).is_none() {
        return Err(HelloError::Value("a region is empty or passes the end of the address space"));
    }
    Ok(r)
}

fn layout_of(f: &mut Reader<'_>) -> Result<HelloLayout, HelloError> {
    let (layers, blocks) = (f.u32()?, f.u32()?);
    let (block_bytes, layer_stride, block_stride) = (f.u64()?, f.u64()?, f.u64()?);
    let len = usize::from(f.u16()?);
    let dtype = text(&mut Reader::new(f.take(len)?, "hello"), MAX_DTYPE, "dtype")?;
    Ok(HelloLayout { layers, blocks, block_bytes, layer_stride, block_stride, dtype })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn sample() -> Hello {
        Hello {
            epoch: 0x1122_3344_5566_7788,
            name: "decode-0".into(),
            transport: "soft-tcp".into(),
            connection_id: 42,
            qps: (0..4)
                .map(|i| QpAddress {
                    qp_num: 100 + i,
                    psn: 0x00ab_cdef,
                    lid: 7,
                    gid: [i as u8; 16],
                    soft_port: 4000,
                    soft_key: u64::MAX,
                })
                .collect(),
            mtu: 1024,
            rd_atomic: 128,
            caps: HelloCaps { ordered: true, immediate: true, max_msg: 0xffff_ffff },
            credits: Credits { data: 64, control: 16 },
            max_control: 512,
            notify: NotifyModes { imm: true, send: true },
            layout: Some(HelloLayout {
                layers: 27,
                blocks: 8192,
                block_bytes: 1152,
                layer_stride: 8192 * 1152,
                block_stride: 1152,
                dtype: "bf16".into(),
            }),
            regions: vec![
                HelloRegion { addr: 0x7f00_0000_0000, len: 1 << 30, rkey: 9 },
                HelloRegion { addr: u64::MAX - 5, len: 5, rkey: u32::MAX },
            ],
            dead: vec![1, 2, 3],
            auth: b"token".to_vec(),
        }
    }

    fn encoded(h: &Hello) -> Vec<u8> {
        let mut v = Vec::new();
        h.encode(&mut v);
        v
    }

    #[test]
    fn b1_a_hello_round_trips() {
        let full = sample();
        assert_eq!(Hello::decode(full.epoch, &encoded(&full)).unwrap(), full);
        let bare =
            Hello { layout: None, regions: vec![], dead: vec![], auth: vec![], name: String::new(), ..full };
        assert_eq!(Hello::decode(bare.epoch, &encoded(&bare)).unwrap(), bare);
    }

    #[test]
    fn b1_unknown_trailing_fields_and_bytes_are_ignored() {
        let h = sample();
        let mut v = encoded(&h);
        Writer(&mut v).field(9999, |w| {
            w.raw(b"from the future");
        });
        // A known field that has grown: the credits, with one more word.
        let mut grown = Vec::new();
        let mut r = Reader::new(&v, "test");
        while let Some((t, mut f)) = r.field().unwrap() {
            Writer(&mut grown).field(t, |w| {
                w.raw(f.take(f.remaining()).unwrap());
                if matches!(t, tag::CREDITS | tag::QP | tag::REGION | tag::LAYOUT | tag::PATH | tag::CAPS) {
                    w.u32(77);
                }
            });
        }
        assert_eq!(Hello::decode(h.epoch, &v).unwrap(), h);
        assert_eq!(Hello::decode(h.epoch, &grown).unwrap(), h);
    }

    #[test]
    fn b1_a_hello_cut_anywhere_is_an_error_or_a_shorter_list() {
        // Nothing optional at the end: `QP` fields are last, so that a cut on a field boundary loses queue pairs.
        let h = Hello { layout: None, regions: vec![], dead: vec![], auth: vec![], ..sample() };
        let v = encoded(&h);
        let qp_len = 6 + 36;
        let first_qp = v.len() - h.qps.len() * qp_len;
        for cut in 0..v.len() {
            let got = Hello::decode(0, &v[..cut]);
            let whole_qps = cut > first_qp && (cut - first_qp).is_multiple_of(qp_len);
            assert_eq!(got.is_ok(), whole_qps, "cut at {cut}: {got:?}");
        }
    }

    #[test]
    fn b1_wrong_values_are_named() {
        let refused = |change: fn(&mut Hello)| {
            let mut h = sample();
            change(&mut h);
            Hello::decode(0, &encoded(&h)).unwrap_err().to_string()
        };
        assert!(refused(|h| h.name = "n".repeat(65)).contains("name"));
        assert!(refused(|h| h.name = "a\nb".into()).contains("name"));
        assert!(refused(|h| h.layout.as_mut().unwrap().dtype = "d".repeat(17)).contains("dtype"));
        assert!(refused(|h| h.qps.clear()).contains("no queue pair"));
        assert!(refused(|h| h.qps = vec![QpAddress::default(); 65]).contains("64 queue pairs"));
        assert!(refused(|h| h.qps[0].psn = 1 << 24).contains("24 bits"));
        assert!(refused(|h| h.mtu = 1500).contains("MTU"));
        assert!(refused(|h| h.credits.control = 0).contains("zero"));
        assert!(refused(|h| h.regions[0].len = u64::MAX).contains("address space"));
        assert!(refused(|h| h.auth = vec![0; 4097]).contains("authentication"));
        let mut twice = encoded(&sample());
        twice.extend(encoded(&sample()));
        assert_eq!(Hello::decode(0, &twice), Err(HelloError::Twice("name")));
        assert_eq!(Hello::decode(0, &[]), Err(HelloError::Missing("path")));
    }

    #[test]
    fn b1_debug_shows_no_keys() {
        let s = format!("{:?}", sample());
        assert!(!s.contains("token") && !s.contains("rkey") && !s.contains("soft_key"), "{s}");
    }
}
