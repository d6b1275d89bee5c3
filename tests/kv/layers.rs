//! Writes layer by layer: K1 each layer is there when it is told, K2 what is known of each, K4 the end of one is the end of
//! all, K5 one deadline, K6 one use, K7 beside other writes.

use std::sync::Arc;
use std::time::Duration;

use landfall::device::Profile;
use landfall::kv::{
    AbortReason, ArrivalError, Blocks, GrantKind, KvChannel, LayerArrivals, LayerError, LayerView,
    LayerWrite, Reason, SenderReason, WriteError, WriteRequest,
};

use crate::common::{
    On, Pair, config, content, fill, layout, on_every_profile, on_soft_profiles, pair, pair_with, qps, run,
    wrong,
};

on_every_profile!(
    k1_a_layer_can_be_read_as_soon_as_it_has_landed,
    k4_dropping_a_write_by_layer_tells_the_receiver,
    k4_layers_that_are_never_pushed_are_cancelled,
    k4_dropping_the_arrivals_ends_the_write,
    k5_the_deadline_is_of_the_whole,
    k7_layers_share_the_channel_with_other_writes,
);

on_soft_profiles!(k2_when_the_connection_dies_each_layer_says_what_is_known);

const LAYERS: u32 = 7;
const BLOCKS: u32 = 12;

/// A write by layer of `BLOCKS` blocks, and its arrivals.
fn begin(pair: &Pair, seed: u64, deadline: Option<Duration>) -> (LayerWrite, LayerArrivals) {
    let mut source = pair.sender.pool().try_alloc(BLOCKS).unwrap();
    fill(&mut source, seed);
    begin_with(&pair.sender, &pair.receiver, source, seed, deadline)
}

fn begin_with(
    sender: &KvChannel,
    receiver: &KvChannel,
    source: impl Into<Arc<Blocks>>,
    seed: u64,
    deadline: Option<Duration>,
) -> (LayerWrite, LayerArrivals) {
    let (grant, arrivals) = receiver.grant_layers(receiver.pool().try_alloc(BLOCKS).unwrap()).unwrap();
    let mut request = WriteRequest::new(&grant, source).tag(seed);
    if let Some(deadline) = deadline {
        request = request.deadline(deadline);
    }
    (sender.write_layers(request).unwrap(), arrivals)
}

/// Blocks of a landed layer that are not what `fill` wrote.
fn wrong_in(view: &LayerView<'_>, seed: u64, block_bytes: usize) -> usize {
    let (mut got, mut expected) = (vec![0; block_bytes], vec![0; block_bytes]);
    let is_wrong = |position: &u32| {
        view.copy_out(*position, 0, &mut got).unwrap();
        content(seed, view.layer(), *position, &mut expected);
        got != expected
    };
    (0..view.len()).filter(is_wrong).count()
}

async fn all_free(pair: &Pair) {
    for pool in [pair.sender.pool(), pair.receiver.pool()] {
        pool.alloc(pool.layout().blocks()).await.unwrap();
    }
}

/// The channel is as good as new.
async fn lands(pair: &Pair) {
    let grant = pair.receiver.grant(pair.receiver.pool().alloc(BLOCKS).await.unwrap()).unwrap();
    let mut source = pair.sender.pool().alloc(BLOCKS).await.unwrap();
    fill(&mut source, 77);
    pair.sender.write(WriteRequest::new(&grant, source)).await.0.unwrap();
    let arrival = pair.receiver.next_arrival().await.unwrap();
    assert_eq!(wrong(arrival.blocks(), 77, |p| p), 0);
}

fn reason(error: ArrivalError) -> AbortReason {
    match error {
        ArrivalError::Aborted { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

async fn k1_a_layer_can_be_read_as_soon_as_it_has_landed(on: On) {
    let p = pair(on, layout(LAYERS, 32, 5000)).await;
    let (mut write, mut arrivals) = begin(&p, 1, None);
    assert_eq!((write.layers(), arrivals.layers()), (LAYERS, LAYERS));
    assert_eq!(arrivals.grant().kind(), GrantKind::Layers(LAYERS));
    // Whatever order the model has them ready in. The next one is pushed when the one before was read.
    for layer in [3, 0, 6] {
        assert!(arrivals.layer(layer).is_none());
        write.push(layer).unwrap();
        let landed = arrivals.next().await.unwrap().unwrap();
        assert_eq!((landed.layer, landed.tag, landed.bytes), (layer, 1, u64::from(BLOCKS) * 5000));
        assert_eq!(Some(landed.transfer), write.transfer(layer));
        assert_eq!(wrong_in(&arrivals.layer(layer).unwrap(), 1, 5000), 0);
    }
    assert!(arrivals.layer(1).is_none() && arrivals.layer(LAYERS).is_none());
    // A layer that is made while others are on their way.
    let mut block = vec![0; 5000];
    content(9, 5, 2, &mut block);
    write.copy_in(5, 2, 0, &block).unwrap();
    write.push(4..6).unwrap();
    write.push(1..3).unwrap();
    let (landed, source) = write.finish().await;
    let landed = landed.unwrap();
    assert_eq!((landed.layers.len(), landed.bytes), (LAYERS as usize, u64::from(LAYERS * BLOCKS) * 5000));
    assert!(landed.wrs >= u64::from(LAYERS) && landed.tail <= landed.landed, "{landed:?}");
    drop(source);
    let mut rest = Vec::new();
    while let Some(layer) = arrivals.next().await.unwrap() {
        rest.push(layer.layer);
    }
    rest.sort_unstable();
    assert_eq!(rest, [1, 2, 4, 5]);
    let changed = arrivals.layer(5).unwrap();
    let mut got = vec![0; 5000];
    changed.copy_out(2, 0, &mut got).unwrap();
    assert_eq!((got, wrong_in(&changed, 1, 5000)), (block, 1));
    let blocks = arrivals.finish().await.unwrap();
    assert_eq!((blocks.len(), wrong(&blocks, 1, |p| p)), (BLOCKS, 1));
    assert_eq!(p.receiver.pool().free_blocks(), 32 - BLOCKS);
    drop(blocks);
    let (sent, received) = (p.sender.stats(), p.receiver.stats());
    assert_eq!((sent.landed, received.arrived, received.aborted), (LAYERS.into(), LAYERS.into(), 0));
    lands(&p).await;
    all_free(&p).await;
}

async fn k4_dropping_a_write_by_layer_tells_the_receiver(on: On) {
    let p = pair(on, layout(LAYERS, 32, 5000)).await;
    for pushed in [0, 2, LAYERS - 1] {
        let (mut write, mut arrivals) = begin(&p, 2, None);
        write.push(0..pushed).unwrap();
        for _ in 0..pushed {
            arrivals.next().await.unwrap().unwrap();
        }
        drop(write);
        let error = arrivals.next().await.unwrap_err();
        assert_eq!(reason(error), AbortReason::Sender(SenderReason::Cancelled));
        // It stays so, and what had landed can still be read.
        assert!(arrivals.next().await.is_err());
        assert_eq!((0..LAYERS).filter(|&layer| arrivals.layer(layer).is_some()).count(), pushed as usize);
        assert!(arrivals.finish().await.is_err());
        all_free(&p).await;
    }
    // Told once for all layers.
    assert_eq!(p.receiver.stats().aborted, 3);
    lands(&p).await;
}

async fn k4_layers_that_are_never_pushed_are_cancelled(on: On) {
    let p = pair(on, layout(LAYERS, 32, 5000)).await;
    let (mut write, arrivals) = begin(&p, 3, None);
    write.push(1..LAYERS).unwrap();
    let (result, source) = write.finish().await;
    let error = result.unwrap_err();
    assert_eq!((error.first, error.layers.len()), (0, LAYERS as usize));
    assert!(matches!(error.layers[0], Err(WriteError::NotDelivered(Reason::Cancelled))), "{error:?}");
    assert!(!error.may_have_landed() && error.in_doubt().next().is_none());
    assert_eq!(source.len(), BLOCKS);
    drop(source);
    assert!(matches!(reason(arrivals.finish().await.unwrap_err()), AbortReason::Sender(_)));
    lands(&p).await;
    all_free(&p).await;
}

async fn k4_dropping_the_arrivals_ends_the_write(on: On) {
    let p = pair(on, layout(LAYERS, 32, 5000)).await;
    let (mut write, mut arrivals) = begin(&p, 4, None);
    write.push(0).unwrap();
    arrivals.next().await.unwrap().unwrap();
    drop(arrivals);
    // The layers were not pushed: it ends by the receiver's word.
    p.receiver.pool().alloc(32).await.unwrap();
    let (result, source) = write.finish().await;
    let error = result.unwrap_err();
    assert_eq!(error.landed, 1);
    assert!(matches!(error.why, WriteError::NotDelivered(Reason::Revoked)), "{error:?}");
    drop(source);
    // So does a revocation.
    let (write, arrivals) = begin(&p, 4, None);
    p.receiver.revoke(arrivals.grant());
    assert_eq!(reason(arrivals.finish().await.unwrap_err()), AbortReason::Revoked);
    assert!(write.finish().await.0.is_err());
    lands(&p).await;
    all_free(&p).await;
}

/// Nobody polls the write, and the model never makes the second layer.
async fn k5_the_deadline_is_of_the_whole(on: On) {
    let p = pair(on, layout(LAYERS, 32, 500)).await;
    let (mut write, mut arrivals) = begin(&p, 5, Some(Duration::from_secs(2)));
    write.push(3).unwrap();
    let error = loop {
        match arrivals.next().await {
            Ok(landed) => assert_eq!(landed.unwrap().layer, 3),
            Err(error) => break error,
        }
    };
    assert_eq!(reason(error), AbortReason::Sender(SenderReason::Deadline));
    match write.push(0) {
        Err(LayerError::Ended(Reason::Deadline)) => {}
        other => panic!("{other:?}"),
    }
    let (result, source) = write.finish().await;
    let error = result.unwrap_err();
    assert!(matches!(error.why, WriteError::NotDelivered(Reason::Deadline)), "{error:?}");
    assert!(error.landed <= 1, "{error:?}");
    drop((arrivals, source));
    lands(&p).await;
    all_free(&p).await;
}

/// As many layers as a large model has, beside small writes: more than there are transfer slots in all.
async fn k7_layers_share_the_channel_with_other_writes(on: On) {
    let config = config().qps(qps(on, 4));
    let p = pair_with(on, layout(61, 64, 256), config.clone(), config).await;
    let mut by_layer = Vec::new();
    for seed in 0..4 {
        by_layer.push((seed, begin(&p, seed, None)));
    }
    let mut small = Vec::new();
    for seed in 0..16 {
        let grant = p.receiver.grant(p.receiver.pool().try_alloc(1).unwrap()).unwrap();
        let mut source = p.sender.pool().try_alloc(1).unwrap();
        fill(&mut source, 100 + seed);
        small.push(p.sender.write(WriteRequest::new(&grant, source).tag(100 + seed)));
    }
    for (_, (write, _)) in &mut by_layer {
        write.push(0..61).unwrap();
    }
    for (seed, (write, arrivals)) in by_layer {
        let (landed, _source) = write.finish().await;
        assert_eq!(landed.unwrap().layers.len(), 61);
        assert_eq!(wrong(&arrivals.finish().await.unwrap(), seed, |p| p), 0);
    }
    for write in small {
        write.await.0.unwrap();
        let arrival = p.receiver.next_arrival().await.unwrap();
        assert_eq!(wrong(arrival.blocks(), arrival.tag(), |p| p), 0);
    }
    all_free(&p).await;
}

async fn k2_when_the_connection_dies_each_layer_says_what_is_known(on: On) {
    let p = pair(on, layout(LAYERS, 32, 5000)).await;
    let (mut write, mut arrivals) = begin(&p, 6, None);
    write.push(2).unwrap();
    arrivals.next().await.unwrap().unwrap();
    write.push(4..6).unwrap();
    p.sender.kill();
    let transfers: Vec<_> = (0..LAYERS).map(|layer| write.transfer(layer).unwrap()).collect();
    let (result, source) = write.finish().await;
    let error = result.unwrap_err();
    for (layer, result) in (0..).zip(&error.layers) {
        match result {
            Ok(_) => assert!([2, 4, 5].contains(&layer)),
            Err(WriteError::InDoubt { transfer, .. }) => {
                assert!([2, 4, 5].contains(&layer));
                assert_eq!(*transfer, transfers[layer as usize]);
            }
            Err(WriteError::NotDelivered(Reason::Lost(_))) => assert!(layer != 2),
            other => panic!("layer {layer}: {other:?}"),
        }
    }
    assert!(!error.may_have_landed(), "five layers were not pushed");
    drop(source);
    let ended = loop {
        match arrivals.next().await {
            Ok(Some(layer)) => assert!([4, 5].contains(&layer.layer)),
            Ok(None) => panic!("all layers"),
            Err(error) => break error,
        }
    };
    assert_eq!(reason(ended), AbortReason::ConnectionLost);
    drop(arrivals);
    p.sender.closed().await;
    p.receiver.closed().await;
    assert_eq!((p.sender.pool().free_blocks(), p.receiver.pool().free_blocks()), (32, 32));
    // The next connection tells of those in doubt.
    let Pair { sending, mut listener, .. } = p;
    let (again, other) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    let (again, _other) = (again.unwrap(), other.unwrap());
    for (_, transfer) in error.in_doubt() {
        assert!(again.resolve(transfer).await.is_some());
    }
}

#[test]
fn k6_a_grant_by_layer_is_for_one_write_by_layer() {
    run(async {
        let p = pair(Profile::Default, layout(LAYERS, 32, 500)).await;
        let source = || p.sender.pool().try_alloc(1).unwrap();
        let (by_layer, arrivals) = p.receiver.grant_layers(p.receiver.pool().try_alloc(1).unwrap()).unwrap();
        let plain = p.receiver.grant(p.receiver.pool().try_alloc(1).unwrap()).unwrap();
        let (error, _) = p.sender.write(WriteRequest::new(&by_layer, source())).await;
        match error {
            Err(WriteError::WrongKind { asked: "one write", granted: "a write by layer", .. }) => {}
            other => panic!("{other:?}"),
        }
        let refused = p.sender.write_layers(WriteRequest::new(&plain, source())).unwrap_err();
        assert!(matches!(refused.why, WriteError::WrongKind { .. }) && refused.blocks.len() == 1);
        // Neither has used its grant up.
        p.sender.write(WriteRequest::new(&plain, source())).await.0.unwrap();
        let mut write = p.sender.write_layers(WriteRequest::new(&by_layer, source())).unwrap();
        let refused = p.sender.write_layers(WriteRequest::new(&by_layer, source())).unwrap_err();
        assert!(matches!(refused.why, WriteError::StaleGrant { .. }), "{refused:?}");
        write.push(0..LAYERS).unwrap();
        write.finish().await.0.unwrap();
        arrivals.finish().await.unwrap();
        // Another number of layers than the peer's pool has.
        let other = serde_json::to_string(&by_layer).unwrap().replace("\"layers\":7", "\"layers\":8");
        let other = serde_json::from_str(&other).unwrap();
        let refused = p.sender.write_layers(WriteRequest::new(&other, source())).unwrap_err();
        assert!(matches!(refused.why, WriteError::OutOfRange { index: 8, limit: 7, .. }), "{refused:?}");
        assert_eq!(p.sender.stats().refused, 4);
    });
}

#[test]
fn r10_a_layer_is_pushed_once_and_not_changed_after() {
    run(async {
        let p = pair(Profile::Default, layout(LAYERS, 32, 500)).await;
        let (mut write, arrivals) = begin(&p, 8, None);
        let out_of_range = |result| match result {
            Err(LayerError::OutOfRange { layer, layers: LAYERS }) => layer,
            other => panic!("{other:?}"),
        };
        assert_eq!(out_of_range(write.push(LAYERS)), LAYERS);
        assert_eq!(out_of_range(write.push(u32::MAX - 1)), u32::MAX - 1);
        assert_eq!(out_of_range(write.push(5..9)), LAYERS);
        assert_eq!(out_of_range(write.copy_in(LAYERS, 0, 0, b"x")), LAYERS);
        assert!(matches!(write.copy_in(0, BLOCKS, 0, b"x"), Err(LayerError::Pool(_))));
        assert!(matches!(write.copy_in(0, 0, 500, b"x"), Err(LayerError::Pool(_))));
        write.push(2).unwrap();
        assert!(matches!(write.push(2), Err(LayerError::Pushed { layer: 2 })));
        assert!(matches!(write.push(0..4), Err(LayerError::Pushed { layer: 2 })));
        assert!(matches!(write.copy_in(2, 0, 0, b"x"), Err(LayerError::Pushed { layer: 2 })));
        // A range that was refused is not pushed in part.
        write.push(0..2).unwrap();
        write.push(3..LAYERS).unwrap();
        write.finish().await.0.unwrap();
        assert_eq!(wrong(&arrivals.finish().await.unwrap(), 8, |p| p), 0);
        // Whoever else has the source may be reading it.
        let shared = Arc::new(p.sender.pool().try_alloc(BLOCKS).unwrap());
        let (mut write, _arrivals) = begin_with(&p.sender, &p.receiver, shared.clone(), 0, None);
        assert!(matches!(write.copy_in(0, 0, 0, b"x"), Err(LayerError::Shared)));
    });
}

#[test]
fn k4_an_abandoned_finish_aborts_what_is_left() {
    run(async {
        let p = pair(Profile::Default, layout(LAYERS, 32, 500)).await;
        let (write, arrivals) = begin(&p, 9, None);
        // Layers were not pushed, so that the first poll cancels the whole; it is then dropped.
        drop(Box::pin(write.finish()));
        assert!(matches!(reason(arrivals.finish().await.unwrap_err()), AbortReason::Sender(_)));
        all_free(&p).await;
        lands(&p).await;
    });
}
