//! The device's own counters, for a channel and by hand. rxe counts packets, siw counts nothing.

use landfall::counters::{CountUnit, CounterPort, CounterSnapshot, Expected, Payload, Sysfs, Verdict};
use landfall::kv::{KvChannel, KvEndpoint, KvPool, Layout, WriteRequest};

use crate::harness::*;

const BYTES: u64 = 4 << 20;
const BLOCKS: u32 = 64;

async fn endpoint(number: usize) -> KvEndpoint {
    let layout = Layout::contiguous(1, BLOCKS, BYTES / u64::from(BLOCKS)).unwrap();
    let pool = KvPool::new(&device(number).alloc_pd().unwrap(), layout).await.unwrap();
    KvEndpoint::new(pool, kv().require_rdma(true)).unwrap()
}

async fn write_all(from: &KvChannel, to: &KvChannel) {
    let grant = to.grant(to.pool().alloc(BLOCKS).await.unwrap()).unwrap();
    let source = from.pool().alloc(BLOCKS).await.unwrap();
    let (landed, _) = from.write(WriteRequest::new(&grant, source)).await;
    assert_eq!(landed.unwrap().bytes, BYTES);
    to.next_arrival().await.unwrap();
}

fn all() -> CounterSnapshot {
    let sysfs = Sysfs::default();
    CounterSnapshot::take(&sysfs, &sysfs.ports())
}

fn rail(number: usize) -> CounterPort {
    CounterPort::of(&device(number)).unwrap()
}

#[test]
#[ignore = "needs RDMA devices"]
fn oob_k9_a_channel_on_rxe_is_verified_by_packets_at_both_ends() {
    run(true, async {
        let (sending, receiving) = (endpoint(0).await, endpoint(1).await);
        let mut listener = receiving.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
        let (sender, receiver) = (sender.unwrap(), receiver.unwrap());
        assert!(sender.path().counters.is_none());
        write_all(&sender, &receiver).await;
        let sent = sender.verify_path().await.counters.unwrap();
        let received = receiver.verify_path().await.counters.unwrap();
        eprintln!("{sent}; {received}");
        assert_eq!((sent.verdict, received.verdict), (Verdict::Verified, Verdict::Verified));
        assert_eq!((sent.sent.payload.bytes, received.received.payload.bytes), (BYTES, BYTES));
        if device(0).name().starts_with("rxe") {
            assert_eq!(
                (sent.sent.unit, received.received.unit),
                (Some(CountUnit::Packets), Some(CountUnit::Packets))
            );
        }
        // `path` has the latest report, without reading again.
        assert_eq!(sender.path().counters, Some(sent));
        sender.close().await.unwrap();
    });
}

/// The receiving port sends acknowledgements only: who believes that the data went out there is wrong, and is told where
/// it did.
#[test]
#[ignore = "needs RDMA devices"]
fn oob_k9_the_wrong_device_is_contradicted_and_the_right_one_is_named() {
    run(false, async {
        let pair = Pair::new(16).await;
        let target = pair.b.exposed(BYTES).await;
        let source = pair.a.local(BYTES).await;
        let before = all();
        let (written, _) = pair.a.qp.write(source, target.remote().whole()).await;
        written.unwrap();
        let mtu = device(0).capabilities().active_mtu;
        let payload = Payload::new(BYTES, 16);
        // Values may be older than the transfer.
        tokio::time::sleep(2 * before.lifespan()).await;
        let difference = all().since(&before);
        let right = difference.check(&Expected::new([rail(0)], mtu).sent(payload));
        let wrong = difference.check(&Expected::new([rail(1)], mtu).sent(payload));
        let both = difference.check(&Expected::new([rail(0), rail(1)], mtu).sent(payload));
        eprintln!("{right}; {wrong}; {both}");
        assert_eq!((right.verdict, wrong.verdict), (Verdict::Verified, Verdict::Contradicted));
        assert_eq!(both.verdict, Verdict::Verified);
        let named: Vec<_> = wrong.sent.elsewhere.iter().map(|count| &count.port).collect();
        assert_eq!(named, [&rail(0)]);
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn cm_only_k9_siw_has_no_counters_and_is_unknown() {
    assert!(name(0).starts_with("siw"), "{}: a device that counts belongs to the other tests", name(0));
    let before = all();
    let report = all().since(&before).check(&Expected::new([rail(0)], 1024).sent(Payload::new(BYTES, 4)));
    assert_eq!((report.verdict, report.sent.counted), (Verdict::Unknown, None), "{report}");
    assert!(report.to_string().contains(&name(0)), "{report}");
}
