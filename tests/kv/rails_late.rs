//! K10: a rail that was left out at the start comes as soon as its device can be had again, at whichever end it was missing, and
//! carries its part. Until then the others carry everything, and both ends say why it is not there.

use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::device::{Device, Profile, SoftConfig, SoftLink};
use landfall::kv::{Bootstrap, KvChannel, KvConfig, RailState, WriteRequest};

use crate::common::{On, fill, on_soft_profiles, until, wrong};
use crate::rails::{End, Pair, pages, quick, up};

on_soft_profiles!(
    k10_a_rail_left_out_at_the_start_comes_when_its_device_can_be_had,
    k10_a_device_that_registers_the_pool_late_carries_its_part,
    k10_a_rail_left_out_at_the_start_is_named_until_it_comes,
    k10_a_rail_whose_link_is_down_at_the_start_comes_when_it_is_up,
);

/// What a device has at most once: a completion queue, a queue pair or a registration that cannot be had.
type Fault = fn(SoftConfig) -> SoftConfig;

/// Three devices, of which the one at `place` has a fault.
fn three(on: On, place: usize, fault: Option<Fault>) -> Vec<Device> {
    let soft = || on.soft().unwrap().seed(7);
    let device =
        |n| Device::soft(if n == place { fault.map_or(soft(), |fault| fault(soft())) } else { soft() });
    (0..3).map(|n| device(n).unwrap()).collect()
}

async fn pair(on: On, place: usize, faults: [Option<Fault>; 2], config: KvConfig) -> Pair {
    let near = End::new(three(on, place, faults[0]), pages(on), config.clone()).await;
    let far = End::new(three(on, place, faults[1]), pages(on), config).await;
    Pair::new(on, near, far).await
}

/// A channel that is connected while `link` is cut, and has carried something by all of its rails after that was mended.
async fn comes_when_mended(on: On, near: End, far: End, link: SoftLink) -> Pair {
    link.cut();
    let pair = Pair::new(on, near, far).await;
    pair.stream(2, |_| {}).await;
    let count = |n| up(&pair.sender.path()) == n && up(&pair.receiver.path()) == n;
    until("both know that it is not there", || count(2)).await;
    link.mend();
    until("it comes", || count(3)).await;
    pair.stream_more().await;
    pair
}

async fn k10_a_rail_left_out_at_the_start_comes_when_its_device_can_be_had(on: On) {
    let (cq, qp): (Fault, Fault) = (|soft| soft.fail_cq(1), |soft| soft.fail_qp(1));
    // The second is had once, for nothing; then not; then again.
    let later: Fault = |soft| soft.fail_qp(2);
    // The handshake by a connection manager is over the first device, and needs a completion queue of it.
    let first = usize::from(!on.caps().oob);
    let cases = [
        (first, [Some(cq), None]),
        (1, [None, Some(cq)]),
        (2, [Some(qp), None]),
        (1, [None, Some(qp)]),
        (1, [Some(cq), Some(qp)]),
        (2, [Some(cq), Some(later)]),
    ];
    for (place, faults) in cases {
        comes_and_carries(pair(on, place, faults, quick()).await, on, place).await;
    }
}

/// The peer hears of the pool's keys on that device when the rail comes.
async fn k10_a_device_that_registers_the_pool_late_carries_its_part(on: On) {
    let (mr, cq): (Fault, Fault) = (|soft| soft.fail_mr(1), |soft| soft.fail_cq(1));
    let cases =
        [(0, [Some(mr), None]), (2, [None, Some(mr)]), (1, [Some(mr), Some(mr)]), (1, [Some(mr), Some(cq)])];
    for (place, faults) in cases {
        let pair = pair(on, place, faults, quick()).await;
        // What was planned before may go on over it.
        let mut source = pair.sender.pool().alloc(32).await.unwrap();
        fill(&mut source, 99);
        let (grant, arrivals) =
            pair.receiver.grant_layers(pair.receiver.pool().alloc(32).await.unwrap()).unwrap();
        let mut write = pair.sender.write_layers(WriteRequest::new(&grant, source)).unwrap();
        write.push(0).unwrap();
        let all = || up(&pair.sender.path()) == 3 && up(&pair.receiver.path()) == 3;
        until("it comes", all).await;
        (1..4).for_each(|layer| write.push(layer).unwrap());
        let ((landed, source), arrived) = tokio::join!(write.finish(), arrivals.finish());
        let (_, arrived) = (landed.unwrap(), arrived.unwrap());
        assert_eq!(wrong(&arrived, 99, |p| p), 0);
        drop((source, arrived));
        comes_and_carries(pair, on, place).await;
    }
}

/// The rail at `place` comes, and then is one like any other.
async fn comes_and_carries(pair: Pair, on: On, place: usize) {
    let has_all = |channel: &KvChannel| up(&channel.path()) == 3;
    until("it comes", || has_all(&pair.sender) && has_all(&pair.receiver)).await;
    pair.stream_more().await;
    for path in [pair.sender.path(), pair.receiver.path()] {
        let (rail, others) = (&path.rails[place], path.rails.iter().filter(|rail| rail.returns == 0));
        assert_eq!((rail.failures, rail.returns, others.count()), (0, 1, 2), "{path}");
        assert!(path.warnings.is_empty() && path.transport == on.transport(), "{path}");
    }
    let path = pair.sender.path();
    assert!(path.rails.iter().all(|rail| rail.bytes_written > 0), "{path}");
    // In the other direction, too, and down and back as any other.
    pair.receiver.send_message(vec![7; 100_000]).await.unwrap();
    assert_eq!(pair.sender.recv_message().await.unwrap(), vec![7; 100_000]);
    let link = pair.far.link(place);
    link.cut();
    pair.stream_more().await;
    until("it is down", || !has_all(&pair.sender) && !has_all(&pair.receiver)).await;
    link.mend();
    until("it is back", || has_all(&pair.sender) && has_all(&pair.receiver)).await;
    let before = pair.sender.path().rails[place].bytes_written;
    pair.stream_more().await;
    let rail = &pair.sender.path().rails[place];
    assert!(rail.bytes_written > before && (rail.failures, rail.returns) == (1, 2), "{rail}");
    pair.sender.close().await.unwrap();
    assert!(pair.receiver.closed().await.is_graceful());
    let free = (pair.near.endpoint.pool().free_blocks(), pair.far.endpoint.pool().free_blocks());
    assert_eq!(free, (32, 32));
}

async fn k10_a_rail_left_out_at_the_start_is_named_until_it_comes(on: On) {
    let (cq, mr): (Fault, Fault) = (|soft| soft.fail_cq(1), |soft| soft.fail_mr(1));
    let cases = [
        (true, [Some(cq), None], "completion queue"),
        (false, [None, Some(cq)], "completion queue"),
        (true, [Some(mr), None], "the pool cannot be registered"),
        (false, [None, Some(mr)], "the pool cannot be registered"),
    ];
    for (near_fails, faults, words) in cases {
        // Nobody looks for it while this test runs.
        let hours = Duration::from_secs(36_000);
        let pair = pair(on, 1, faults, quick().rail_probe(hours, hours)).await;
        pair.stream(2, |_| {}).await;
        for (channel, fails) in [(&pair.sender, near_fails), (&pair.receiver, !near_fails)] {
            let path = channel.path();
            assert_eq!((path.rails.len(), up(&path), path.warnings.len()), (3, 2, 1), "{path}");
            let about = if fails { words } else { "the peer could not set up its device" };
            let RailState::Down { cause, attempt: None, .. } = &path.rails[1].state else { panic!("{path}") };
            assert!(cause.contains(about) && path.warnings[0].to_string().contains(about), "{path}");
            assert!(path.rails[1].bytes_written == 0 && path.transport == on.transport(), "{path}");
        }
        // It is no reason to stay.
        pair.sender.close().await.unwrap();
        assert!(pair.receiver.closed().await.is_graceful());
    }
}

async fn k10_a_rail_whose_link_is_down_at_the_start_comes_when_it_is_up(on: On) {
    for near_is_cut in [true, false] {
        let near = End::new(three(on, 1, None), pages(on), quick()).await;
        let far = End::new(three(on, 1, None), pages(on), quick()).await;
        let link = if near_is_cut { near.link(1) } else { far.link(1) };
        let pair = comes_when_mended(on, near, far, link).await;
        for path in [pair.sender.path(), pair.receiver.path()] {
            assert!(path.rails[1].returns > 0 && path.warnings.is_empty(), "{path}");
        }
        let path = pair.sender.path();
        assert!(path.rails.iter().all(|rail| rail.bytes_written > 0), "{path}");
        pair.sender.close().await.unwrap();
    }
}

/// By a connection manager the handshake runs over a queue pair of its own: on whichever device there is.
#[tokio::test]
async fn k10_a_channel_by_the_manager_is_had_though_the_first_device_is_down() {
    let on = On::Soft(Profile::Default);
    let by_cm = || quick().bootstrap(Bootstrap::Cm);
    let near = End::new(three(on, 0, None), pages(on), by_cm()).await;
    let far = End::new(three(on, 0, None), pages(on), by_cm()).await;
    let link = near.link(0);
    let pair = comes_when_mended(on, near, far, link).await;
    assert!(pair.sender.path().rails[0].returns > 0);
    pair.sender.close().await.unwrap();
}

/// When no device reaches the peer, the first one's error is told, by the deadline.
#[tokio::test]
async fn k10_a_peer_that_no_device_reaches_is_not_had() {
    let on = On::Soft(Profile::Default);
    let config = quick().bootstrap(Bootstrap::Cm);
    let near = End::new(three(on, 0, None), pages(on), config.clone()).await;
    let far = End::new(three(on, 0, None), pages(on), config).await;
    (0..3).for_each(|n| near.link(n).cut());
    let listener = far.endpoint.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let error = near.endpoint.connect(listener.local_addr()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Resources { .. } | ConnectError::NoPath { .. }), "{error:?}");
}

/// The one of two rails that is left does not wait for the other: when it fails, the channel ends.
#[tokio::test]
async fn k10_a_rail_that_is_not_there_yet_does_not_keep_a_channel_alive() {
    let on = On::Soft(Profile::Default);
    let hours = Duration::from_secs(36_000);
    let soft = || on.soft().unwrap();
    let near = vec![Device::soft(soft().fail_cq(1)).unwrap(), Device::soft(soft()).unwrap()];
    let far = vec![Device::soft(soft()).unwrap(), Device::soft(soft()).unwrap()];
    let near = End::new(near, pages(on), quick().rail_probe(hours, hours)).await;
    let far = End::new(far, pages(on), quick()).await;
    let pair = Pair::new(on, near, far).await;
    pair.stream_more().await;
    pair.far.link(1).cut();
    for channel in [&pair.sender, &pair.receiver] {
        let closed = channel.closed().await;
        assert!(!closed.is_graceful(), "{closed}");
    }
}
