//! What a hostile peer can do to a connection in shared memory, as a list of operations in any bytes.
//!
//! It may write whatever it likes into its ring, its counts and its socket, and lend what it likes. Nothing of that may panic,
//! hang, or write outside of the memory that it was given a key for.

use std::os::fd::AsFd;

use socket2::{Domain, Socket, Type};

use super::super::SoftDevice;
use super::super::frame::{Desc, FLAG_IMM, Header, Opcode, Preamble};
use super::door;
use super::pages::encode;
use super::raw::RawPeer;
use crate::device::{Profile, SoftConfig, SoftTransport};
use crate::memory::{Exposed, Memory, Prefault, Region};
use crate::pages::{Pages, Strides, pair};
use crate::provider::{
    AccessFlags, Cqe, Device, QpAddress, QpConnect, QpInit, QpState, RecvWr, SendOp, Sge, WrChain,
};

const BYTES: u64 = 8192;
/// Beside the memory that the peer has a key for: none of it ever changes.
const OTHERS: u64 = 3 * BYTES;

const OPCODES: [Opcode; 9] = [
    Opcode::Send,
    Opcode::Write,
    Opcode::ReadRequest,
    Opcode::ReadResponse,
    Opcode::Ack,
    Opcode::Nak,
    Opcode::CompareSwap,
    Opcode::FetchAdd,
    Opcode::AtomicResponse,
];

/// The rest of the input, as numbers. Zeros at its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        self.number::<1>() as u8
    }

    fn short(&mut self) -> u16 {
        self.number::<2>() as u16
    }

    fn number<const N: usize>(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let n = N.min(self.0.len());
        bytes[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        u64::from_le_bytes(bytes)
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let (now, later) = self.0.split_at(n.min(self.0.len()));
        self.0 = later;
        now.to_vec()
    }
}

/// A frame that is almost right, of up to four descriptors.
fn frame(input: &mut Input<'_>, addr: u64, rkey: u32) -> Vec<u8> {
    let mut descs = Vec::new();
    let mut body = Vec::new();
    for _ in 0..input.byte() % 5 {
        let opcode = OPCODES[usize::from(input.byte()) % OPCODES.len()];
        let mut desc = Desc::new(opcode, input.byte().into());
        let how = input.byte();
        desc.total = input.short().into();
        let carries = matches!(opcode, Opcode::Send | Opcode::Write | Opcode::ReadResponse);
        (desc.addr, desc.rkey) = (addr.wrapping_add(input.short().into()), rkey);
        desc.flags = how & FLAG_IMM;
        if how & 4 != 0 {
            (desc.offset, desc.len) = (input.short().into(), input.short().into());
        } else if carries {
            desc.len = desc.total;
        }
        match opcode {
            Opcode::CompareSwap => (desc.total, desc.len) = (16, 16),
            Opcode::FetchAdd => (desc.total, desc.len) = (8, 8),
            _ => {}
        }
        if how & 8 != 0 {
            let n = usize::from(input.byte()) % 70;
            desc.set_references(n);
            let mut left = desc.len;
            for k in 0..n {
                let piece = if k + 1 == n && how & 16 != 0 { left } else { input.short().into() };
                left = left.wrapping_sub(piece);
                body.extend(u64::from(input.byte() % 4).to_le_bytes());
                body.extend(u64::from(input.short()).to_le_bytes());
                body.extend(piece.to_le_bytes());
                body.extend([0; 4]);
            }
        } else if how & 32 != 0 {
            // Blocks of 16 bytes, of a few layers.
            let pairs =
                (0..input.byte() % 9).map(|_| pair(input.byte().into(), input.byte().into())).collect();
            let strides =
                |input: &mut Input<'_>| Strides { layer: input.short().into(), block: input.byte().into() };
            let (source, target) = (strides(input), strides(input));
            let pages = Pages { piece: 16, layers: u32::from(input.byte() % 4), source, target, pairs };
            desc.total = pages.bytes().unwrap_or(0).wrapping_add((how >> 6).into());
            (desc.offset, desc.len) = (0, desc.total);
            desc.set_pages(pages.pairs.len());
            encode(&pages, u64::from(input.byte() % 4), input.short().into(), &mut body);
        } else {
            body.extend(vec![0xee; desc.len as usize]);
        }
        descs.push(desc);
    }
    let payload = descs.iter().map(Desc::counted).fold(0, u32::wrapping_add);
    let header = Header { descs: descs.len() as u16, ack: input.byte().into(), payload };
    let mut out = header.encode().to_vec();
    descs.iter().for_each(|desc| out.extend_from_slice(&desc.encode()));
    out.extend_from_slice(&body);
    out
}

/// The input as what a peer does, against a queue pair with requests and receives of its own.
pub(crate) fn queue(data: &[u8]) {
    let mut input = Input(data);
    let profile = if input.byte() % 2 == 0 { Profile::Default } else { Profile::Srd };
    let config = SoftConfig::new().profile(profile).transport(SoftTransport::Shm);
    let device = Device::Soft(SoftDevice::open(&config).expect("a soft device"));
    let pd = device.alloc_pd().expect("a domain");
    let channel = device.create_channel().expect("a channel");
    let cq = channel.create_cq(256).expect("a queue");
    let region = |len| {
        let memory = Memory::anonymous(len).prefault(Prefault::No).map_for(&pd).expect("memory");
        let atomic = if profile.capabilities().atomics { AccessFlags::REMOTE_ATOMIC.0 } else { 0 };
        let access = AccessFlags::LOCAL_WRITE.0 | AccessFlags::REMOTE_READ.0 | AccessFlags::REMOTE_WRITE.0;
        Region::<Exposed>::register(&pd, memory, AccessFlags(access | atomic)).expect("a region")
    };
    let (others, given) = (region(OTHERS), region(BYTES));
    let init = QpInit { max_send_wr: 32, max_recv_wr: 32, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let qp = pd.create_qp(&cq, &cq, init).expect("a queue pair");
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET.cloexec(), None).expect("a socket");
    let local = crate::random::random_u64().expect("random bytes") | 1;
    listener.bind(&door::address(local).expect("a name")).expect("bound");
    listener.listen(1).expect("listening");
    let (own, target) = (77, qp.qp_num());
    let remote = QpAddress { qp_num: own, soft_local: local, soft_key: 5, ..QpAddress::default() };
    let attr = QpConnect {
        remote,
        path_mtu: 4096,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        timeout: 14,
        retry_cnt: 1,
        rnr_retry: 0,
        min_rnr_timer: 1,
        active: true,
    };
    qp.connect(&attr).expect("a listener is there");
    let peer = RawPeer::accept(listener.accept().expect("it has dialled").0);
    if input.byte() % 8 != 7 {
        peer.put(&Preamble { target, own, key: qp.address().soft_key }.encode());
    }
    let poll = || {
        let mut out = [Cqe::default(); 16];
        cq.poll(&mut out).expect("a queue that is large enough");
    };
    let element = |at: u64, len: u64| {
        let sge = given.slice(at..at + len).expect("inside of the region").sge();
        Sge { addr: sge.addr, len: sge.len as u32, lkey: sge.lkey }
    };
    let mut lent = Vec::new();
    let mut posts = 0;
    while !input.is_empty() {
        match input.byte() % 10 {
            0 => {
                let n = input.byte().into();
                peer.put(&input.bytes(n));
            }
            1..=3 => {
                let remote = given.remote();
                peer.put(&frame(&mut input, remote.addr, remote.rkey));
            }
            4 => peer.set_head(input.number::<8>()),
            5 => peer.set_tail(input.number::<8>()),
            6 => {
                let n = input.byte().into();
                peer.say(&input.bytes(n));
            }
            7 => {
                let (name, pages, how) = (input.byte() % 4, input.byte() % 5, input.byte());
                let fd = RawPeer::memfd(u64::from(pages) * 4096, how & 1 == 0);
                peer.lend_fd(name.into(), u64::from(pages) * 4096 + u64::from(how >> 4), fd.as_fd());
                lent.push(fd);
            }
            8 if posts < 16 => {
                posts += 1;
                let (at, len) = (u64::from(input.short()) % 4096, u64::from(input.short()) % 4096);
                let (remote_addr, rkey) = (1 << 20, 1);
                let op = match input.byte() % 3 {
                    0 => SendOp::Send { imm: Some(1) },
                    1 => SendOp::Write { remote_addr, rkey, imm: None },
                    _ => SendOp::Read { remote_addr, rkey },
                };
                let mut chain = WrChain::default();
                chain.push(posts, op, &[element(at, len)], true, false);
                // Refused where it has failed already.
                let _ = qp.post_send(&chain);
                let _ = qp.post_recv(&[RecvWr { wr_id: posts, sge: Some(element(at, len)) }]);
            }
            9 if input.byte() % 8 == 0 => peer.close(),
            _ => poll(),
        }
        let _ = peer.take();
    }
    (0..3).for_each(|_| poll());
    drop(peer);
    // It ends, unless it waits for a receive, which the clock ends.
    for _ in 0..2000 {
        if qp.state() == QpState::Err {
            break;
        }
        poll();
    }
    drop(qp);
    let mut bytes = vec![0; OTHERS as usize];
    others.slice(..).expect("all of it").copy_out(0, &mut bytes).expect("as long");
    assert!(bytes.iter().all(|&byte| byte == 0), "memory that nobody was given a key for");
}
