//! The encoding of a hello.
//!
//! A sequence of fields. Queue pairs, regions, dead connections and further rails are one field each, repeated, so that a
//! later version can add to their end. Unknown fields, and unknown bytes at the end of known ones, are ignored (B1). Those of a
//! rail are in `codec_rail`.

use super::codec_rail::{
    RailFields, others, put_device, put_limits, put_others, put_path, put_qps, put_regions, rail,
    tag as rail_tag,
};
use super::hello::{Hello, HelloError, HelloLayout, HelloShape, MAX_DTYPE, MAX_NAME, printable};
use super::rail::{MAX_RAILS, Others};
use crate::wire::{Reader, Writer};

mod tag {
    pub(super) const NAME: u16 = 1;
    pub(super) const CONNECTION: u16 = 2;
    pub(super) const LAYOUT: u16 = 7;
    pub(super) const DEAD: u16 = 9;
    pub(super) const AUTH: u16 = 10;
    pub(super) const CM_PORT: u16 = 12;
    /// What peers may do with the regions: 1 to write, 2 to read. To write where nothing is said.
    pub(super) const ACCESS: u16 = 18;
    pub(super) const SHAPE: u16 = 20;
}

impl Hello {
    /// Appends the fields.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.field(tag::NAME, |w| {
            w.raw(self.name.as_bytes());
        });
        w.field(tag::CONNECTION, |w| {
            w.u64(self.connection_id);
        });
        put_device(&mut w, &self.device);
        put_path(&mut w, &self.transport, self.mtu, self.rd_atomic);
        put_limits(&mut w, self.caps, self.notify, self.credits, self.max_control);
        if !self.writable || self.readable {
            w.field(tag::ACCESS, |w| {
                w.u8(u8::from(self.writable) | u8::from(self.readable) << 1);
            });
        }
        if self.cm_port != 0 {
            w.field(tag::CM_PORT, |w| {
                w.u16(self.cm_port);
            });
        }
        if let Some(others) = &self.others {
            put_others(&mut w, others, self.max_control);
        }
        put_qps(&mut w, &self.qps);
        if let Some(l) = &self.layout {
            w.field(tag::LAYOUT, |w| {
                w.u32(l.layers).u32(l.blocks).u64(l.block_bytes).u64(l.layer_stride).u64(l.block_stride);
                // The name is preceded by its length: fields of a later version may follow.
                w.u16(l.dtype.len() as u16).raw(l.dtype.as_bytes());
            });
            if let Some(s) = &l.shape {
                w.field(tag::SHAPE, |w| {
                    w.u32(s.planes).u32(s.tokens).u32(s.first_head).u32(s.heads).u32(s.total_heads);
                    w.u32(s.head_bytes).u64(s.plane_stride).u64(s.token_stride).u64(s.head_stride);
                });
            }
        }
        put_regions(&mut w, &self.regions);
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
        let (mut name, mut connection_id, mut cm_port, mut auth) = (None, None, None, None);
        let (mut access, mut shape) = (None, None);
        let mut layout: Option<HelloLayout> = None;
        let (mut own, mut place, mut rails, mut dead) = (RailFields::default(), None, Vec::new(), Vec::new());

        let mut r = Reader::new(body, "hello");
        while let Some((tag, mut f)) = r.field()? {
            if own.take(tag, &mut f)? {
                continue;
            }
            match tag {
                tag::NAME => once(&mut name, "name", text(&mut f, MAX_NAME, "name")?)?,
                tag::CONNECTION => once(&mut connection_id, "connection id", f.u64()?)?,
                tag::CM_PORT => once(&mut cm_port, "connection manager's port", f.u16()?)?,
                tag::ACCESS => once(&mut access, "access", f.u8()?)?,
                tag::LAYOUT => once(&mut layout, "layout", layout_of(&mut f)?)?,
                tag::SHAPE => once(&mut shape, "shape", shape_of(&mut f)?)?,
                tag::DEAD => dead.push(f.u64()?),
                tag::AUTH => once(&mut auth, "authentication", f.take(f.remaining())?.to_vec())?,
                rail_tag::PLACE => once(&mut place, "place among the rails", others(&mut f)?)?,
                // One too many is refused below: nobody is made to hold more.
                rail_tag::RAIL if rails.len() < MAX_RAILS => rails.push(rail(&mut f)?),
                _ => {}
            }
        }
        let (own, max_control) = own.finish()?;
        let access = access.unwrap_or(1);
        if shape.is_some() {
            layout.as_mut().ok_or(HelloError::Missing("layout"))?.shape = shape;
        }
        let hello = Self {
            epoch,
            name: name.ok_or(HelloError::Missing("name"))?,
            device: own.device,
            transport: own.transport,
            connection_id: connection_id.ok_or(HelloError::Missing("connection id"))?,
            qps: own.qps,
            cm_port: cm_port.unwrap_or_default(),
            mtu: own.mtu,
            rd_atomic: own.rd_atomic,
            caps: own.caps,
            credits: own.credits,
            max_control,
            notify: own.notify,
            layout,
            regions: own.regions,
            others: place.map(|others| Others { rails, ..others }),
            writable: access & 1 == 1,
            readable: access & 2 == 2,
            dead,
            auth: auth.unwrap_or_default(),
        };
        hello.validate()?;
        Ok(hello)
    }
}

pub(super) fn once<T>(slot: &mut Option<T>, what: &'static str, value: T) -> Result<(), HelloError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(HelloError::Twice(what)),
    }
}

/// The rest of a field, as short printable text.
pub(super) fn text(f: &mut Reader<'_>, max: usize, what: &'static str) -> Result<String, HelloError> {
    if f.remaining() > max {
        return Err(HelloError::Text(what));
    }
    let bytes = f.take(f.remaining())?;
    let s = std::str::from_utf8(bytes).map_err(|_| HelloError::Text(what))?;
    printable(s, max, what)?;
    Ok(s.to_owned())
}

fn layout_of(f: &mut Reader<'_>) -> Result<HelloLayout, HelloError> {
    let (layers, blocks) = (f.u32()?, f.u32()?);
    let (block_bytes, layer_stride, block_stride) = (f.u64()?, f.u64()?, f.u64()?);
    let len = usize::from(f.u16()?);
    let dtype = text(&mut Reader::new(f.take(len)?, "hello"), MAX_DTYPE, "dtype")?;
    Ok(HelloLayout { layers, blocks, block_bytes, layer_stride, block_stride, dtype, shape: None })
}

fn shape_of(f: &mut Reader<'_>) -> Result<HelloShape, HelloError> {
    Ok(HelloShape {
        planes: f.u32()?,
        tokens: f.u32()?,
        first_head: f.u32()?,
        heads: f.u32()?,
        total_heads: f.u32()?,
        head_bytes: f.u32()?,
        plane_stride: f.u64()?,
        token_stride: f.u64()?,
        head_stride: f.u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::hello::tests::{sample, shaped};
    use super::*;
    use crate::provider::QpAddress;

    fn encoded(h: &Hello) -> Vec<u8> {
        let mut v = Vec::new();
        h.encode(&mut v);
        v
    }

    #[test]
    fn b1_a_hello_round_trips() {
        let full = sample();
        for hello in [&full, &shaped()] {
            assert_eq!(Hello::decode(hello.epoch, &encoded(hello)).unwrap(), *hello);
        }
        let bare = Hello {
            cm_port: 0,
            layout: None,
            regions: vec![],
            writable: false,
            readable: false,
            dead: vec![],
            auth: vec![],
            name: String::new(),
            ..full
        };
        assert_eq!(Hello::decode(bare.epoch, &encoded(&bare)).unwrap(), bare);
    }

    #[test]
    fn b1_unknown_trailing_fields_and_bytes_are_ignored() {
        let h = shaped();
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
                if matches!(
                    t,
                    rail_tag::CREDITS
                        | rail_tag::QP
                        | rail_tag::REGION
                        | rail_tag::PATH
                        | rail_tag::CAPS
                        | rail_tag::PLACE
                        | tag::LAYOUT
                        | tag::SHAPE
                        | tag::CM_PORT
                ) {
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
        let qp_len = 6 + 44;
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
        assert!(refused(|h| h.qps.clear()).contains("1 to 64"));
        assert!(refused(|h| h.qps = vec![QpAddress::default(); 65]).contains("1 to 64"));
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
