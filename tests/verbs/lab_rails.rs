//! K10 on real drivers, in the lab: a channel over soft-RoCE and soft-iWARP at once, and the wire of one of them is cut.

use std::time::Duration;

use landfall::connect::cm;
use landfall::device::Device;
use landfall::kv::{KvChannel, KvEndpoint, KvPool, Layout, PoolAccess, RailState, WriteRequest};
use landfall::memory::Memory;

use crate::harness::*;
use crate::lab_events::Lab;

const BLOCKS: u32 = 16;
const BYTES: u64 = 32 << 10;

/// One end: its RoCE device and its iWARP device. RDMA_CM connects both.
async fn endpoint(end: usize) -> KvEndpoint {
    let open = |kind| Device::open(&format!("{kind}{end}")).unwrap().alloc_pd().unwrap();
    let (roce, iwarp) = (open("rxe"), open("siw"));
    let layout = Layout::contiguous(2, BLOCKS, BYTES).unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::on_rails(&[&roce, &iwarp], layout, memory, PoolAccess::Target).await.unwrap();
    let probe = (Duration::from_millis(100), Duration::from_millis(500));
    let config = kv()
        .max_write(BYTES as u32)
        .heartbeat(Duration::from_millis(500))
        .rail_probe(probe.0, probe.1)
        .require_rdma(true);
    KvEndpoint::new(pool, config).unwrap()
}

/// What is on the wire of the iWARP devices, both ways: nothing gets through, or everything.
fn wire(cut: bool) {
    for end in 0..2 {
        let words = match cut {
            true => format!("tc qdisc add dev siw_{end} root netem loss 100%"),
            false => format!("tc qdisc del dev siw_{end} root"),
        };
        assert!(Lab::command(&words).wait().unwrap().success(), "{words}");
    }
}

/// Every block, and every byte compared.
async fn write(sender: &KvChannel, receiver: &KvChannel, seed: u8) {
    let mut source = sender.pool().alloc(BLOCKS).await.unwrap();
    let content = |layer: u32, block: u32| vec![seed ^ (layer * 31 + block) as u8; BYTES as usize];
    for (layer, block) in (0..2).flat_map(|l| (0..BLOCKS).map(move |b| (l, b))) {
        source.copy_in(layer, block, 0, &content(layer, block)).unwrap();
    }
    let grant = receiver.grant(receiver.pool().alloc(BLOCKS).await.unwrap()).unwrap();
    let written = sender.write(WriteRequest::new(&grant, source));
    let (written, arrival) = within(async { tokio::join!(written, receiver.next_arrival()) }).await;
    written.0.unwrap();
    let (arrival, mut got) = (arrival.unwrap(), vec![0; BYTES as usize]);
    for (layer, block) in (0..2).flat_map(|l| (0..BLOCKS).map(move |b| (l, b))) {
        arrival.blocks().copy_out(layer, block, 0, &mut got).unwrap();
        assert!(got == content(layer, block), "layer {layer}, block {block}");
    }
}

#[test]
#[ignore = "needs the lab"]
fn k10_a_rail_whose_wire_is_cut_fails_alone_and_comes_back() {
    run(true, async {
        let _lab = Lab;
        let (near, far) = (endpoint(0).await, endpoint(1).await);
        let at = cm::addresses(far.device()).await.unwrap()[0];
        let mut listener = far.listen(at).await.unwrap();
        let (sender, receiver) = tokio::join!(near.connect(listener.local_addr()), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        let up = |channel: &KvChannel, rail: usize| channel.path().rails[rail].state == RailState::Up;
        let path = sender.path();
        assert!(path.rails.len() == 2 && path.warnings.is_empty() && path.bootstrap == "cm", "{path}");
        for seed in 0..4 {
            write(&sender, &receiver, seed).await;
        }
        let path = sender.path();
        assert!(path.rails.iter().all(|rail| rail.bytes_written > 0), "{path}");

        wire(true);
        let mut seed = 4;
        while up(&sender, 1) || up(&receiver, 1) {
            write(&sender, &receiver, seed).await;
            seed = seed.wrapping_add(1);
        }
        wire(false);
        while !up(&sender, 1) || !up(&receiver, 1) {
            write(&sender, &receiver, seed).await;
            seed = seed.wrapping_add(1);
        }
        let before = sender.path().rails[1].bytes_written;
        for seed in 0..4 {
            write(&sender, &receiver, seed).await;
        }
        let path = sender.path();
        assert!(path.rails[1].bytes_written > before, "{path}");
        assert_eq!((path.rails[0].failures, path.rails[1].returns > 0), (0, true), "{path}");
        sender.close().await.unwrap();
    });
}
