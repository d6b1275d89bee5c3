//! Peers that speak the bootstrap and then do as they like: each ends its own connection, with a typed cause, and the
//! next peer is served as if nothing had been.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use super::*;
use crate::connect::{
    ConnectError, Credits, Deadline, Expect, Framed, Hello, HelloCaps, HelloLayout, HelloRail, HelloRegion,
    HelloShape, LateRail, NotifyModes, client, dial,
};
use crate::device::{Device, SoftConfig, SoftTransport};
use crate::provider::QpAddress;

pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn endpoint(config: KvConfig) -> KvEndpoint {
    // The strangers speak to its data connections.
    let soft = SoftConfig::new().transport(SoftTransport::Tcp);
    let pd = Device::soft(soft).unwrap().alloc_pd().unwrap();
    KvEndpoint::new(KvPool::new(&pd, Layout::contiguous(2, 8, 64).unwrap()).await.unwrap(), config).unwrap()
}

pub(super) async fn server(config: KvConfig) -> (KvEndpoint, KvListener) {
    let server = endpoint(config).await;
    let listener = server.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.unwrap();
    (server, listener)
}

pub(super) fn hello(epoch: u64) -> Hello {
    let gid = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    Hello {
        epoch,
        name: "stranger".into(),
        device: String::new(),
        transport: "soft-tcp".into(),
        connection_id: epoch,
        qps: vec![QpAddress { qp_num: 77, gid, soft_port: 1, soft_key: 5, ..QpAddress::default() }],
        cm_port: 0,
        mtu: 4096,
        rd_atomic: 1,
        caps: HelloCaps { ordered: true, immediate: true, max_msg: 1 << 30 },
        credits: Credits { data: 8, control: 8 },
        max_control: 1024,
        notify: NotifyModes { imm: true, send: true },
        layout: Some(HelloLayout {
            layers: 2,
            blocks: 8,
            block_bytes: 64,
            layer_stride: 512,
            block_stride: 64,
            dtype: String::new(),
            shape: None,
        }),
        regions: vec![HelloRegion { addr: 4096, len: 1024, rkey: 1 }],
        others: None,
        writable: true,
        readable: false,
        dead: Vec::new(),
        auth: Vec::new(),
    }
}

/// Of a block of 64 bytes.
const SHAPE: HelloShape = HelloShape {
    planes: 1,
    tokens: 4,
    first_head: 2,
    heads: 2,
    total_heads: 8,
    head_bytes: 8,
    plane_stride: 0,
    token_stride: 16,
    head_stride: 8,
};

/// The whole handshake, as far as the server goes along. Answers its hello.
async fn shake(to: SocketAddr, hello: &Hello) -> Result<Hello, ConnectError> {
    let deadline = Deadline::after(PATIENCE);
    let stream = dial(&to.to_string(), deadline).await?;
    let reply = client(Framed::plain(stream), hello, &Expect::default(), deadline).await?;
    let theirs = reply.reply.clone();
    reply.ready(&[]).await?;
    Ok(theirs)
}

/// Every block comes back to the pool.
pub(super) async fn all_free(server: &KvEndpoint) {
    let alloc = tokio::time::timeout(PATIENCE, server.pool().alloc(8));
    alloc.await.expect("blocks are missing").unwrap();
}

/// One write lands, there and back.
pub(super) async fn check(listener: &mut KvListener, config: KvConfig) {
    let good = endpoint(config).await;
    let (ours, theirs) = tokio::join!(good.connect(listener.local_addr()), listener.accept());
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let grant = to.grant(to.pool().try_alloc(2).unwrap()).unwrap();
        from.write(WriteRequest::new(&grant, from.pool().try_alloc(2).unwrap())).await.0.unwrap();
        to.next_arrival().await.unwrap();
    }
    ours.close().await.unwrap();
}

#[tokio::test]
async fn b1_extreme_hellos_end_in_a_refusal_or_in_a_channel() {
    let (server, mut listener) = server(KvConfig::default()).await;
    type Extreme = (&'static str, bool, fn(&mut Hello));
    fn rails(h: &mut Hello, count: usize, change: fn(&mut HelloRail)) {
        let own = h.rail_list().remove(0);
        let mut other = own.clone();
        change(&mut other);
        let mut list = vec![other; count];
        list[count / 2] = own;
        h.set_rails(list, count / 2);
    }
    let extremes: [Extreme; 21] = [
        ("as it should be", true, |_| {}),
        ("64 queue pairs", true, |h| {
            h.qps = (0..64).map(|n| QpAddress { qp_num: n + 2, ..h.qps[0] }).collect();
        }),
        ("one queue pair 64 times", true, |h| h.qps = vec![h.qps[0]; 64]),
        ("all credits", true, |h| h.credits = Credits { data: u32::MAX, control: u32::MAX }),
        ("no credits to speak of", false, |h| h.credits = Credits { data: 1, control: 1 }),
        ("control messages of a byte", false, |h| h.max_control = 1),
        ("messages of a byte", true, |h| h.caps.max_msg = 1),
        ("endless messages", true, |h| (h.caps.max_msg, h.max_control) = (u64::MAX, u32::MAX)),
        ("a region of nearly everything", true, |h| {
            h.regions = vec![HelloRegion { addr: 1, len: u64::MAX - 1, rkey: 0 }; 1];
        }),
        ("regions of more than everything", false, |h| {
            h.regions = vec![HelloRegion { addr: 1, len: u64::MAX - 1, rkey: 0 }; 9];
        }),
        ("layers without end", false, |h| h.layout.as_mut().unwrap().layers = u32::MAX),
        ("16 rails", true, |h| rails(h, 16, |_| {})),
        ("16 rails, of which one is there", true, |h| rails(h, 16, |rail| rail.qps.clear())),
        ("a rail with less memory than its pool", false, |h| rails(h, 2, |rail| rail.regions[0].len = 1)),
        ("a rail that nobody speaks to", true, |h| {
            rails(h, 3, |rail| rail.transport = "carrier pigeon".into())
        }),
        ("blocks without end", false, |h| {
            let layout = h.layout.as_mut().unwrap();
            (layout.blocks, layout.block_stride, layout.layer_stride) = (u32::MAX, 1 << 40, u64::MAX);
        }),
        ("blocks with a shape", true, |h| h.layout.as_mut().unwrap().shape = Some(SHAPE)),
        ("a shape larger than its block", false, |h| {
            h.layout.as_mut().unwrap().shape = Some(HelloShape { tokens: 5, ..SHAPE });
        }),
        ("heads on top of each other", false, |h| {
            h.layout.as_mut().unwrap().shape = Some(HelloShape { head_stride: 0, ..SHAPE });
        }),
        ("heads that no model has", false, |h| {
            h.layout.as_mut().unwrap().shape = Some(HelloShape { first_head: u32::MAX, ..SHAPE });
        }),
        ("a shape without end", false, |h| {
            let most = u32::MAX;
            let shape = HelloShape { tokens: most, head_bytes: most, token_stride: u64::MAX, ..SHAPE };
            h.layout.as_mut().unwrap().shape = Some(shape);
        }),
    ];
    for (epoch, (what, fits, change)) in (1..).zip(extremes) {
        let mut hello = hello(epoch);
        change(&mut hello);
        match shake(listener.local_addr(), &hello).await {
            Ok(theirs) => {
                assert!(fits, "{what}: accepted");
                let channel = listener.accept().await.unwrap();
                let qps: usize = theirs.rail_list().iter().map(|rail| rail.qps.len()).sum();
                assert_eq!(channel.path().qps.len(), qps, "{what}");
                // What it says of itself is used for nothing before it is checked.
                let grant = channel.grant(channel.pool().try_alloc(1).unwrap()).unwrap();
                channel.revoke(&grant);
                channel.kill();
            }
            // Told, not only cut off.
            Err(ConnectError::Closed { .. } | ConnectError::Io { .. } | ConnectError::Timeout { .. }) => {
                panic!("{what}: no word of why")
            }
            Err(error) => assert!(!fits, "{what}: {error}"),
        }
    }
    check(&mut listener, KvConfig::default()).await;
    all_free(&server).await;
}

/// The peer's end of the data connection, after both have said who they are.
fn data_connection(ours: &Hello, theirs: &Hello) -> TcpStream {
    let (ours, theirs) = (&ours.qps[0], &theirs.qps[0]);
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, theirs.soft_port)).unwrap();
    let mut preamble = b"landfal1".to_vec();
    preamble.extend_from_slice(&theirs.qp_num.to_le_bytes());
    preamble.extend_from_slice(&ours.qp_num.to_le_bytes());
    preamble.extend_from_slice(&theirs.soft_key.to_le_bytes());
    preamble.extend_from_slice(&[0; 8]);
    stream.write_all(&preamble).unwrap();
    stream
}

/// A frame with one WRITE of `bytes`, the `msn`-th message.
fn write(msn: u32, region: HelloRegion, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = send(bytes);
    // Behind the header: the opcode, the message's number, the key and the address.
    out[16] = 2;
    out[20..24].copy_from_slice(&msn.to_le_bytes());
    out[28..32].copy_from_slice(&region.rkey.to_le_bytes());
    out[32..40].copy_from_slice(&(region.addr + offset).to_le_bytes());
    out
}

/// An admitted peer that does not use this library: what it was not granted it does not reach (the soft provider asks).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k6_a_hostile_peer_reaches_what_it_was_granted_and_nothing_else() {
    let (server, mut listener) = server(KvConfig::default()).await;
    // Two layers of eight blocks of 64 bytes; it is granted the second and the third block.
    for (epoch, (what, at, len)) in (1..).zip([
        ("the block before", 0, 64),
        ("the last byte before", 63, 65),
        ("one byte behind", 3 * 64, 1),
        ("into the block behind", 2 * 64, 65),
        ("the other layer", 512 + 4 * 64, 64),
        ("everything", 0, 1024),
    ]) {
        let ours = hello(epoch);
        let theirs = shake(listener.local_addr(), &ours).await.unwrap();
        let channel = listener.accept().await.unwrap();
        let first = server.pool().try_alloc(1).unwrap();
        let grant = channel.grant(server.pool().try_alloc(2).unwrap()).unwrap();
        assert!(grant.runs().eq([(1, 2)]));
        let mut stream = data_connection(&ours, &theirs);
        let region = theirs.regions[0];
        let mut bytes = write(0, region, 64, &[epoch as u8; 128]);
        bytes.extend(write(1, region, 512 + 64, &[epoch as u8; 64]));
        bytes.extend(write(2, region, at, &vec![0xee; len]));
        stream.write_all(&bytes).unwrap();
        let closed = tokio::time::timeout(PATIENCE, channel.closed()).await.expect(what);
        assert_eq!(closed.cause(), Cause::Transport, "{what}: {closed}");
        drop(first);
        all_free(&server).await;
        let blocks = server.pool().try_alloc(8).unwrap();
        for (layer, block) in (0..2).flat_map(|layer| (0..8).map(move |block| (layer, block))) {
            let mut seen = [0; 64];
            blocks.copy_out(layer, block, 0, &mut seen).unwrap();
            let granted = matches!((layer, block), (_, 1) | (0, 2));
            assert_eq!(
                seen,
                [if granted { epoch as u8 } else { 0 }; 64],
                "{what}: layer {layer}, block {block}"
            );
        }
    }
    check(&mut listener, KvConfig::default()).await;
}

/// A frame with one SEND of `bytes`, as the engine's own.
fn send(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u32).to_le_bytes();
    let mut out = vec![0x4c, 1, 1, 0];
    for word in [[0; 4], len, [0; 4]] {
        out.extend_from_slice(&word);
    }
    // SEND, its number, immediate, key; an address; the total, the offset and the length.
    for word in [[1, 0, 0, 0], [0; 4], [0; 4], [0; 4], [0; 4], [0; 4], len, [0; 4], len] {
        out.extend_from_slice(&word);
    }
    out.extend_from_slice(bytes);
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b1_a_peer_that_sends_garbage_on_the_data_connection_ends_its_channel_alone() {
    let (server, mut listener) = server(KvConfig::default()).await;
    type Words = (&'static str, Vec<u8>, fn(Cause) -> bool);
    let words: [Words; 4] = [
        ("no frame", vec![0xa5; 4096], |c| c == Cause::Transport),
        ("a message of zeros", send(&[0; 100]), |c| matches!(c, Cause::Violation(_))),
        ("a message of ones", send(&[0xff; 1024]), |c| matches!(c, Cause::Violation(_))),
        ("a message longer than its receive", send(&[1; 1025]), |c| c == Cause::Transport),
    ];
    for (epoch, (what, bytes, fits)) in (1..).zip(words) {
        let ours = hello(epoch);
        let theirs = shake(listener.local_addr(), &ours).await.unwrap();
        let channel = listener.accept().await.unwrap();
        let grant = channel.grant(channel.pool().try_alloc(3).unwrap()).unwrap();
        let mut stream = data_connection(&ours, &theirs);
        stream.write_all(&bytes).unwrap();
        let closed = tokio::time::timeout(PATIENCE, channel.closed()).await.expect(what);
        assert!(fits(closed.cause()), "{what}: {closed}");
        let aborted = channel.next_arrival().await;
        assert!(
            matches!(aborted, Err(ArrivalError::Aborted { grant: id, .. }) if id == grant.id()),
            "{what}"
        );
        assert!(matches!(channel.next_arrival().await, Err(ArrivalError::Closed(_))), "{what}");
        all_free(&server).await;
        // Its connection is closed: what was said before, then the end or a reset.
        let _ = tokio::task::spawn_blocking(move || stream.read_to_end(&mut Vec::new())).await.unwrap();
    }
    check(&mut listener, KvConfig::default()).await;
}

#[tokio::test]
async fn k5_a_peer_that_never_dials_or_never_reads_is_lost_by_the_deadline() {
    let config =
        KvConfig::default().heartbeat(Duration::from_millis(50)).peer_timeout(Duration::from_millis(200));
    let (server, mut listener) = server(config).await;
    for (epoch, dials) in [(1, false), (2, true)] {
        let ours = hello(epoch);
        let theirs = shake(listener.local_addr(), &ours).await.unwrap();
        let channel = listener.accept().await.unwrap();
        let stream = dials.then(|| data_connection(&ours, &theirs));
        let closed = tokio::time::timeout(PATIENCE, channel.closed()).await.expect("it ends");
        assert_eq!(closed.cause(), Cause::PeerLost, "{closed}");
        drop(stream);
    }
    all_free(&server).await;
}

/// What `Ready` says of rails is checked: the handshake ends with a reason, and the next peer is served.
#[tokio::test]
async fn b1_what_ready_says_of_rails_is_checked() {
    let (server, mut listener) = server(KvConfig::default()).await;
    let address = hello(1).qps[0];
    let lies = [
        ("a rail that there is not", vec![LateRail { rail: 7, qps: vec![address] }]),
        ("queue pairs of a rail that has some", vec![LateRail { rail: 0, qps: vec![address] }]),
        ("every rail is left out", vec![LateRail { rail: 0, qps: vec![] }]),
    ];
    for (epoch, (what, late)) in (1..).zip(lies) {
        let mut ours = hello(epoch);
        let rails = ours.rail_list();
        ours.set_rails(rails, 0);
        let deadline = Deadline::after(PATIENCE);
        let stream = dial(&listener.local_addr().to_string(), deadline).await.unwrap();
        let reply = client(Framed::plain(stream), &ours, &Expect::default(), deadline).await.unwrap();
        assert!(reply.ready(&late).await.is_err(), "{what}");
    }
    check(&mut listener, KvConfig::default()).await;
    all_free(&server).await;
}
