//! A device that is taken away in mid-traffic, between queue pairs that were connected out of band.

use landfall::kv::{Cause, Layout, WriteRequest};

use crate::harness::*;
use crate::lab_events::{Lab, is_gone};
use crate::oob_kv::{Channels, channels, transfer};

#[test]
#[ignore = "needs the lab"]
fn r7_removal_in_mid_traffic_ends_ring_operations() {
    on_both_runtimes(async || {
        let _lab = Lab;
        let Pair { a, b } = Pair::new(64).await;
        let (target, source) = (b.exposed(64 << 10).await, a.exposed(64 << 10).await);
        let mut removal = None;
        // In flight all the time.
        let mut writes = std::collections::VecDeque::new();
        let error = loop {
            while writes.len() < 100 {
                writes.push_back(a.qp.write(source.slice(..).unwrap(), target.remote().whole()));
            }
            match writes.pop_front().unwrap().await.0 {
                Ok(_) => drop(removal.get_or_insert_with(|| Lab::remove(0))),
                Err(error) => break error,
            }
        };
        assert!(is_gone(&error), "{error:?}");
        for write in writes {
            let error = write.await.0.unwrap_err();
            assert!(is_gone(&error), "{error:?}");
        }
        drop((a, source));
        Lab::removed(removal.unwrap()).await;
        drop((b, target));
    });
}

#[test]
#[ignore = "needs the lab"]
fn r7_removal_in_mid_traffic_ends_a_channel() {
    run(true, async {
        let _lab = Lab;
        let layout = Layout::contiguous(1, 64, 64 << 10).unwrap();
        let Channels { sender, receiver, ends } = channels(layout, kv().qps(2)).await;
        transfer(&sender, &receiver, 8, 1).await;
        let granted = sender.grant(sender.pool().alloc(8).await.unwrap()).unwrap();
        let mut removal = None;
        loop {
            let Ok(blocks) = receiver.pool().alloc(8).await else { break };
            let Ok(grant) = receiver.grant(blocks) else { break };
            let source = sender.pool().alloc(8).await.unwrap();
            if sender.write(WriteRequest::new(&grant, source)).await.0.is_err() {
                break;
            }
            removal.get_or_insert_with(|| Lab::remove(0));
            drop(receiver.next_arrival().await.unwrap());
        }
        let closed = sender.closed().await;
        assert_eq!(closed.cause(), Cause::DeviceGone, "{closed}");
        sender.next_arrival().await.unwrap_err();
        // The peer's device is there: it has lost its peer.
        let lost = receiver.closed().await;
        assert_ne!(lost.cause(), Cause::DeviceGone, "{lost}");
        // Every block is its pool's again.
        assert_eq!(sender.pool().free_blocks(), 64);
        drop((sender, granted, ends.0));
        Lab::removed(removal.unwrap()).await;
        drop((receiver, ends.1));
    });
}
