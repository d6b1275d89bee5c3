//! KV channels between two devices, over the out-of-band bootstrap.

use landfall::error::chain;
use landfall::kv::{KvChannel, KvConfig, KvEndpoint, KvPool, Layout, WriteError, WriteRequest};

use crate::harness::*;

pub(crate) struct Channels {
    pub(crate) sender: KvChannel,
    pub(crate) receiver: KvChannel,
    pub(crate) ends: (KvEndpoint, KvEndpoint),
}

async fn endpoint(number: usize, layout: Layout, config: KvConfig) -> KvEndpoint {
    let pool = KvPool::new(&device(number).alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, config.require_rdma(true)).unwrap()
}

pub(crate) async fn channels(layout: Layout, config: KvConfig) -> Channels {
    let sending = endpoint(0, layout, config.clone()).await;
    let receiving = endpoint(1, layout, config).await;
    let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Channels { sender: sender.unwrap(), receiver: receiver.unwrap(), ends: (sending, receiving) }
}

/// The byte that belongs at `at` of block `position` in `layer` of transfer `tag`.
fn byte(tag: u64, layer: u32, position: u32, at: usize) -> u8 {
    (tag as usize * 31 + layer as usize * 7 + position as usize * 13 + at) as u8
}

/// Writes `count` blocks from one end to the other under `tag`, and checks every byte.
pub(crate) async fn transfer(from: &KvChannel, to: &KvChannel, count: u32, tag: u64) {
    let layout = *from.pool().layout();
    let mut bytes = vec![0; layout.block_bytes() as usize];
    let mut source = from.pool().alloc(count).await.unwrap();
    let grant = to.grant(to.pool().alloc(count).await.unwrap()).unwrap();
    for layer in 0..layout.layers() {
        for position in 0..count {
            bytes.iter_mut().enumerate().for_each(|(at, b)| *b = byte(tag, layer, position, at));
            source.copy_in(layer, position, 0, &bytes).unwrap();
        }
    }
    let (landed, _) = from.write(WriteRequest::new(&grant, source).tag(tag)).await;
    let landed = landed.unwrap();
    let expected = u64::from(layout.layers()) * u64::from(count) * layout.block_bytes();
    // Nothing is said of `local`: when an acknowledgement is lost, the confirmation comes before the completion.
    assert_eq!(landed.bytes, expected);
    let arrival = to.next_arrival().await.unwrap();
    assert_eq!(arrival.tag(), tag);
    for layer in 0..layout.layers() {
        for position in 0..count {
            arrival.blocks().copy_out(layer, position, 0, &mut bytes).unwrap();
            let right = bytes.iter().enumerate().all(|(at, &b)| b == byte(tag, layer, position, at));
            assert!(right, "layer {layer}, block {position}");
        }
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_landed_means_that_every_byte_is_there() {
    on_both_runtimes(async || {
        let layout = Layout::contiguous(3, 64, 5000).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, kv()).await;
        for (tag, count) in [1, 64, 17].into_iter().enumerate() {
            transfer(&sender, &receiver, count, tag as u64).await;
            transfer(&receiver, &sender, count, 100 + tag as u64).await;
        }
        sender.close().await.unwrap();
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn k3_many_small_transfers_over_four_queue_pairs_are_never_torn() {
    run(true, async {
        let layout = Layout::contiguous(2, 32, 1152).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, kv().qps(4)).await;
        for tag in 0..200 {
            transfer(&sender, &receiver, 8, tag).await;
        }
        let used = receiver.path().qps.iter().filter(|qp| qp.received > 0).count();
        assert_eq!((receiver.path().qps.len(), used), (4, 4));
    });
}

/// K8: blocks larger than what one WRITE may be.
#[test]
#[ignore = "needs RDMA devices"]
fn k8_large_blocks_are_sliced() {
    run(true, async {
        let layout = Layout::contiguous(1, 2, 3_000_001).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, kv().max_write(65_536)).await;
        transfer(&sender, &receiver, 2, 3).await;
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn k9_the_path_names_devices_ports_and_gids() {
    run(true, async {
        let layout = Layout::contiguous(1, 8, 4096).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, kv()).await;
        transfer(&sender, &receiver, 8, 0).await;
        let (path, peer) = (sender.path(), receiver.path());
        assert_eq!((path.transport, path.bootstrap, path.port), ("verbs", "oob", Some(1)));
        assert_eq!((&path.device, &peer.device), (&name(0), &name(1)));
        assert_eq!((path.gid, path.peer_gid), (peer.peer_gid, peer.gid));
        assert_ne!(path.gid, path.peer_gid);
        let expected = if device(0).capabilities().immediate { "imm" } else { "send" };
        assert_eq!((path.notify, peer.notify), (expected, expected));
        assert_eq!(path.qps[0].bytes_written, 8 * 4096);
        let text = path.to_string();
        assert!(text.contains(&name(0)) && text.contains("verbs (") && text.contains("port 1"), "{text}");
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn k5_a_killed_peer_ends_writes_and_arrivals() {
    run(true, async {
        let layout = Layout::contiguous(1, 8, 4096).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, kv()).await;
        let grant = receiver.grant(receiver.pool().alloc(8).await.unwrap()).unwrap();
        transfer(&sender, &receiver, 0, 7).await;
        receiver.kill();
        let source = sender.pool().alloc(8).await.unwrap();
        let (result, source) = sender.write(WriteRequest::new(&grant, source)).await;
        let error: WriteError = result.unwrap_err();
        eprintln!("{}", chain(&error));
        drop(source);
        sender.closed().await;
        assert_eq!(sender.pool().free_blocks(), 8);
    });
}
