//! The hello: what an endpoint says of itself, and of the queue pairs that it offers.
//!
//! Its encoding is in `codec`.

use std::fmt;

use super::agree::is_mtu;
use super::rail::{Others, check_qps, check_regions};
use crate::provider::QpAddress;
use crate::wire::Malformed;

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
    /// What is in a block, where its owner says so.
    pub(crate) shape: Option<HelloShape>,
}

/// What is in a block: planes × tokens × heads, at strides in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HelloShape {
    pub(crate) planes: u32,
    pub(crate) tokens: u32,
    pub(crate) first_head: u32,
    pub(crate) heads: u32,
    /// Heads of the model.
    pub(crate) total_heads: u32,
    pub(crate) head_bytes: u32,
    pub(crate) plane_stride: u64,
    pub(crate) token_stride: u64,
    pub(crate) head_stride: u64,
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
    /// The device that carries its first rail, as its side calls it. Empty when it does not say.
    pub(crate) device: String,
    /// What its queue pairs can be carried by, for instance `soft-tcp`, `soft-auto`, `verbs-roce`. Both must have one in common.
    pub(crate) transport: String,
    /// Chosen at random by the client, repeated by the server.
    pub(crate) connection_id: u64,
    pub(crate) qps: Vec<QpAddress>,
    /// Of a reply over a connection manager: the port on which the queue pairs' requests are awaited. 0 elsewhere.
    pub(crate) cm_port: u16,
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
    /// Further rails. What is said above is of one of them, for peers that know no others: those send `None` here.
    pub(crate) others: Option<Others>,
    /// The regions can be written to, and read.
    pub(crate) writable: bool,
    pub(crate) readable: bool,
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
            .field("device", &self.device)
            .field("transport", &self.transport)
            .field("connection_id", &format_args!("{:#018x}", self.connection_id))
            .field("qps", &self.qps.len())
            .field("mtu", &self.mtu)
            .field("caps", &self.caps)
            .field("credits", &self.credits)
            .field("layout", &self.layout)
            .field("regions", &self.regions.len())
            .field("other_rails", &self.others.as_ref().map_or(0, |o| o.rails.len()))
            .finish_non_exhaustive()
    }
}

impl Hello {
    /// What holds for every hello, sent or received.
    pub(crate) fn validate(&self) -> Result<(), HelloError> {
        printable(&self.name, MAX_NAME, "name")?;
        printable(&self.device, MAX_NAME, "device")?;
        printable(&self.transport, MAX_TRANSPORT, "transport")?;
        if let Some(layout) = &self.layout {
            printable(&layout.dtype, MAX_DTYPE, "dtype")?;
        }
        let wrong = |what| Err(HelloError::Value(what));
        if self.qps.is_empty() {
            return wrong("the number of queue pairs is not from 1 to 64");
        }
        check_qps(&self.qps)?;
        if !is_mtu(self.mtu) {
            return wrong("the MTU is none of 256, 512, 1024, 2048, 4096");
        }
        if [self.credits.data, self.credits.control, self.max_control].contains(&0) || self.caps.max_msg == 0
        {
            return wrong("a credit or a limit is zero");
        }
        check_regions(&self.regions)?;
        if let Some(others) = &self.others {
            others.validate()?;
        }
        if self.auth.len() > MAX_AUTH {
            return wrong("the authentication part is longer than 4096 bytes");
        }
        Ok(())
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

/// Short text without control characters: it goes into errors and logs.
pub(super) fn printable(s: &str, max: usize, what: &'static str) -> Result<(), HelloError> {
    if s.len() > max || s.chars().any(char::is_control) {
        return Err(HelloError::Text(what));
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn sample() -> Hello {
        Hello {
            epoch: 0x1122_3344_5566_7788,
            name: "decode-0".into(),
            device: "soft-default".into(),
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
                    soft_local: 5 << 40,
                })
                .collect(),
            cm_port: 4791,
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
                shape: None,
            }),
            regions: vec![
                HelloRegion { addr: 0x7f00_0000_0000, len: 1 << 30, rkey: 9 },
                HelloRegion { addr: u64::MAX - 5, len: 5, rkey: u32::MAX },
            ],
            others: None,
            writable: true,
            readable: true,
            dead: vec![1, 2, 3],
            auth: b"token".to_vec(),
        }
    }

    /// One that says what is in a block of [`sample`].
    pub(crate) fn shaped() -> Hello {
        let mut hello = sample();
        hello.layout.as_mut().unwrap().shape = Some(HelloShape {
            planes: 2,
            tokens: 16,
            first_head: 4,
            heads: 4,
            total_heads: 8,
            head_bytes: 9,
            plane_stride: 576,
            token_stride: 36,
            head_stride: 9,
        });
        hello
    }
}
