//! Writes that wait outside of the channel, since as many transfers are unresolved as may be.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::kv::hostile::{PATIENCE, endpoint};
use crate::kv::proto::{GrantRef, Plan, PlanBuilder, TransferId, WriteRequest as ProtoWrite};
use crate::kv::{KvChannel, KvConfig, KvEndpoint, Reason, WriteError, WriteRequest};

/// Two channels' ends, and transfers of nothing that fill what the first may have open: gated, so that they stay.
async fn full() -> (KvEndpoint, KvEndpoint, KvChannel, KvChannel, Vec<TransferId>) {
    let (ours, theirs) = (endpoint(KvConfig::default()).await, endpoint(KvConfig::default()).await);
    let mut listener = theirs.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.unwrap();
    let (a, b) = tokio::join!(ours.connect(listener.local_addr()), listener.accept());
    let (a, b) = (a.unwrap(), b.unwrap());
    let (from, to) = (&a.inner.driver, &b.inner.driver);
    let (owner_epoch, bound_epoch) = (to.local_epoch, from.local_epoch);
    let mut open = Vec::new();
    loop {
        let id = to.locked(|inner, _| inner.conn.as_mut().unwrap().issue_grant(1));
        let grant = GrantRef { id, owner_epoch, bound_epoch, max_bytes: 1 };
        let deadline = Instant::now() + PATIENCE * 10;
        let write = ProtoWrite { grant, plan: nothing(from), tag: 0, deadline };
        match from.locked(|inner, _| inner.conn.as_mut().unwrap().write_gated(write, Instant::now())) {
            Ok(id) => open.push(id),
            Err(_) => break,
        }
    }
    (ours, theirs, a, b, open)
}

fn nothing(driver: &super::KvDriver) -> Plan {
    let peer = &driver.peer;
    PlanBuilder::new((driver.pool.layout(), &peer.ours), (&peer.layout, &peer.seams))
        .unwrap()
        .build()
        .unwrap()
}

#[tokio::test]
async fn k5_a_write_that_waits_outside_of_the_channel_ends_at_its_deadline() {
    let (ours, _theirs, a, b, open) = full().await;
    assert_eq!(open.len(), 65_536);
    let write = |deadline: Duration| {
        let grant = b.grant(b.pool().try_alloc(1).unwrap()).unwrap();
        let source = ours.pool().try_alloc(1).unwrap();
        a.write(WriteRequest::new(&grant, source).deadline(deadline))
    };
    let limit = Duration::from_millis(50);
    let (start, late, detached) = (Instant::now(), write(limit), write(limit));
    assert_eq!(late.transfer(), None, "it has no number before it is in the channel");
    detached.detach();
    let ended =
        tokio::time::timeout(PATIENCE, late).await.expect("nobody made room, and it ends all the same");
    assert!(matches!(ended.0, Err(WriteError::NotDelivered(Reason::Deadline))), "{:?}", ended.0);
    assert!(start.elapsed() >= limit);
    drop(ended.1);
    let all = tokio::time::timeout(PATIENCE, ours.pool().alloc(8)).await;
    drop(all.expect("the blocks of both are back").unwrap());
    // One that finds room in time: its times are from the call on.
    let (waits, waited) = (write(PATIENCE * 10), Duration::from_millis(50));
    tokio::pin!(waits);
    assert!(tokio::time::timeout(waited, &mut waits).await.is_err(), "there is no room");
    a.inner.driver.locked(|inner, after| {
        let now = Instant::now();
        inner.conn.as_mut().unwrap().abort(open[0], now);
        inner.turn(now, after);
    });
    let (landed, _source) = tokio::time::timeout(PATIENCE, waits).await.expect("there is room");
    let landed = landed.unwrap();
    assert!(landed.landed >= waited && landed.local >= waited, "{landed:?}");
    assert_eq!(a.stats().refused, 0);
    a.kill();
}
