//! Pools whose blocks differ: pages of tokens, heads of ranks, orders and strides. K1 every byte is in its place and no other
//! is touched, K4 the end of one part, B1 what cannot be mapped is refused, R10 what is asked for is checked.
//!
//! The plans are held against a naive copy in `src/kv/proto/tests/mapped.rs`; here they go from end to end.

use std::sync::Arc;

use landfall::connect::ConnectError;
use landfall::device::{Device, Profile};
use landfall::kv::{
    AbortReason, ArrivalError, Blocks, Gather, Heads, KvChannel, KvEndpoint, KvListener, KvPool, Layout,
    LayoutError, Mapping, MappingError, Order, PoolAccess, ReadError, ReadRequest, ReadStrategy,
    SenderReason, Shape, Strides, TokenSpan, WriteError, WriteRequest,
};
use landfall::memory::Memory;

use crate::common::{On, config, endpoint, far_endpoint, on_every_profile, run};

on_every_profile!(
    k1_pages_and_ranks_of_any_kind_meet_byte_by_byte,
    k1_reads_of_pages_and_ranks_of_any_kind_meet_byte_by_byte,
    k1_two_senders_fill_the_heads_of_one_claim,
    k1_a_mapped_write_goes_layer_by_layer,
    k4_a_part_that_is_aborted_is_told_and_leaves_the_other,
);

const LAYERS: u32 = 2;
const TOTAL: u32 = 8;
const HEAD_BYTES: u32 = 48;

fn heads(rank: u32, ranks: u32) -> Heads {
    Heads::of_rank(TOTAL, rank, ranks).unwrap()
}

fn dense(tokens: u32, heads: Heads, order: Order) -> Shape {
    Shape::dense(2, tokens, heads, HEAD_BYTES, order).unwrap()
}

/// A pool for `tokens` tokens and a little more.
fn pool(shape: Shape, tokens: u32) -> Layout {
    let blocks = tokens.div_ceil(shape.tokens()) + 2;
    Layout::contiguous(LAYERS, blocks, shape.bytes()).unwrap().with_shape(shape).unwrap()
}

struct Ends {
    sender: KvChannel,
    receiver: KvChannel,
    _endpoints: (KvEndpoint, KvEndpoint, KvListener),
}

async fn connected(on: impl Into<On>, near: Layout, far: Layout) -> Ends {
    let on = on.into();
    let (sending, receiving) = (endpoint(on, near, config()).await, far_endpoint(on, far, config()).await);
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Ends { sender: sender.unwrap(), receiver: receiver.unwrap(), _endpoints: (sending, receiving, listener) }
}

/// Byte `b` of a head, as the model made it.
fn byte(seed: u8, layer: u32, plane: u32, token: u32, head: u32, b: u32) -> u8 {
    let place = (((layer * 2 + plane) * 1000 + token) * TOTAL + head) * HEAD_BYTES + b;
    (place.wrapping_mul(0x9E37_79B1) >> 24) as u8 ^ seed
}

fn each_block(blocks: &Blocks) -> impl Iterator<Item = (u32, u32)> + use<> {
    let (layers, len) = (blocks.pool().layout().layers(), blocks.len());
    (0..layers).flat_map(move |layer| (0..len).map(move |position| (layer, position)))
}

/// Fills each token of the claim with what it holds, and the gaps with zeros.
fn fill(blocks: &mut Blocks, seed: u8) {
    let shape = *blocks.pool().layout().shape().unwrap();
    for (layer, position) in each_block(blocks) {
        let mut block = vec![0; blocks.pool().layout().block_bytes() as usize];
        for plane in 0..shape.planes() {
            for token in 0..shape.tokens() {
                for head in shape.heads().range() {
                    let at = shape.offset(plane, token, head).unwrap() as usize;
                    let whole = position * shape.tokens() + token;
                    for b in 0..HEAD_BYTES {
                        block[at + b as usize] = byte(seed, layer, plane, whole, head, b);
                    }
                }
            }
        }
        blocks.copy_in(layer, position, 0, &block).unwrap();
    }
}

const BEFORE: u8 = 0xA5;

/// Every byte is what it was before anything was written.
fn blank(blocks: &mut Blocks) {
    let bytes = vec![BEFORE; blocks.pool().layout().block_bytes() as usize];
    for (layer, position) in each_block(blocks) {
        blocks.copy_in(layer, position, 0, &bytes).unwrap();
    }
}

/// Bytes that are neither what `fill` wrote there, for the tokens and heads that `written` names by the seed of their source and
/// their token at the source, nor as `blank` left them.
fn wrong(blocks: &Blocks, written: impl Fn(u32, u32) -> Option<(u8, u32)>) -> usize {
    let shape = *blocks.pool().layout().shape().unwrap();
    let mut wrong = 0;
    for (layer, position) in each_block(blocks) {
        let mut expected = vec![BEFORE; blocks.pool().layout().block_bytes() as usize];
        for plane in 0..shape.planes() {
            for token in 0..shape.tokens() {
                for head in shape.heads().range() {
                    let Some((seed, from)) = written(position * shape.tokens() + token, head) else {
                        continue;
                    };
                    let at = shape.offset(plane, token, head).unwrap() as usize;
                    for b in 0..HEAD_BYTES {
                        expected[at + b as usize] = byte(seed, layer, plane, from, head, b);
                    }
                }
            }
        }
        let mut got = vec![0; expected.len()];
        blocks.copy_out(layer, position, 0, &mut got).unwrap();
        wrong += got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    }
    wrong
}

/// A claim whose blocks lie in another order than they are named.
fn scattered(channel: &KvChannel, tokens: u32) -> Blocks {
    let layout = *channel.pool().layout();
    let blocks = tokens.div_ceil(layout.shape().unwrap().tokens());
    let ids: Vec<u32> = (0..blocks).map(|i| if i % 3 == 2 { i } else { blocks + 1 - i }).collect();
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() == ids.len() {
        return channel.pool().claim(&ids).unwrap();
    }
    let ids: Vec<u32> = (0..blocks).rev().collect();
    channel.pool().claim(&ids).unwrap()
}

async fn k1_pages_and_ranks_of_any_kind_meet_byte_by_byte(on: On) {
    for (near, far) in kinds() {
        // The last block is not full on either side.
        let tokens = 150;
        let Ends { sender, receiver, _endpoints } =
            connected(on, pool(near, tokens), pool(far, tokens)).await;
        assert_eq!(sender.peer_shape(), Some(&far));
        let mapping = sender.mapping_to_peer().unwrap();
        let back = receiver.mapping_from_peer().unwrap();
        assert_eq!((back.source(), back.target()), (mapping.source(), mapping.target()));
        let heads = mapping.heads();
        let mut source = scattered(&sender, tokens);
        fill(&mut source, 0);
        let mut target = scattered(&receiver, tokens);
        blank(&mut target);
        let grant = receiver.grant(target).unwrap();
        let (landed, source) =
            sender.write(WriteRequest::new(&grant, source).mapped_tokens(&mapping, tokens)).await;
        let bytes = u64::from(LAYERS * tokens) * mapping.bytes_per_token();
        assert_eq!(landed.unwrap().bytes, bytes);
        let arrival = receiver.next_arrival().await.unwrap();
        assert_eq!(arrival.bytes(), bytes);
        let first = |token, head| (token < tokens && heads.contains(&head)).then_some((0, token));
        assert_eq!(wrong(arrival.blocks(), first), 0, "{near:?} to {far:?}");

        // The mapping again, from and to the middle of blocks, behind a prefix that is there already.
        let mut target = arrival.into_blocks();
        blank(&mut target);
        let grant = receiver.grant(target).unwrap();
        let spans = [
            TokenSpan { source: 100, target: 5, tokens: 30 },
            TokenSpan { source: 0, target: 40, tokens: 17 },
        ];
        let request = WriteRequest::new(&grant, source).mapped_spans(&mapping, spans);
        sender.write(request).await.0.unwrap();
        let arrival = receiver.next_arrival().await.unwrap();
        let second = |token, head| {
            let from = match token {
                5..35 => token + 95,
                40..57 => token - 40,
                _ => return None,
            };
            heads.contains(&head).then_some((0, from))
        };
        assert_eq!(wrong(arrival.blocks(), second), 0, "{near:?} to {far:?}");
        sender.close().await.unwrap();
    }
}

/// The pairs of shapes that writes and reads go between.
fn kinds() -> [(Shape, Shape); 6] {
    use Order::{HeadsTokens, TokensHeads};
    // K and V beside each other in each token, with a gap behind it.
    let beside = |tokens, heads: Heads| {
        let plane = u64::from(heads.count()) * u64::from(HEAD_BYTES);
        let strides = Strides { plane, token: 2 * plane + 16, head: HEAD_BYTES.into() };
        Shape::strided(2, tokens, heads, HEAD_BYTES, strides).unwrap()
    };
    [
        (dense(16, heads(0, 1), TokensHeads), dense(64, heads(0, 1), TokensHeads)),
        (dense(64, heads(0, 1), TokensHeads), dense(16, heads(0, 1), TokensHeads)),
        (dense(16, heads(0, 2), HeadsTokens), dense(64, heads(1, 4), TokensHeads)),
        (dense(64, heads(2, 4), TokensHeads), dense(16, heads(1, 2), HeadsTokens)),
        (beside(16, heads(1, 2)), dense(12, heads(2, 4), HeadsTokens)),
        (dense(1, heads(0, 1), TokensHeads), beside(16, heads(3, 4))),
    ]
}

/// An end whose pool may be written to and read.
async fn open_end(on: On, device: Device, layout: Layout) -> KvEndpoint {
    let pd = device.alloc_pd().unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&pd, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, config().require_rdma(on == On::Devices)).unwrap()
}

async fn k1_reads_of_pages_and_ranks_of_any_kind_meet_byte_by_byte(on: On) {
    let tokens = 150;
    for (theirs, ours) in kinds() {
        let (near, far) = on.devices();
        let owning = open_end(on, near, pool(theirs, tokens)).await;
        let reading = open_end(on, far, pool(ours, tokens)).await;
        let mut listener = reading.listen(on.any_port_of(1)).await.unwrap();
        let (owner, reader) = tokio::join!(owning.connect(listener.local_addr()), listener.accept());
        let (owner, reader) = (owner.unwrap(), reader.unwrap());
        let mapping = reader.mapping_from_peer().unwrap();
        let heads = mapping.heads();
        let mut source = scattered(&owner, tokens);
        fill(&mut source, 0);
        let source = Arc::new(source);
        for way in
            [ReadStrategy::RdmaRead { depth: 4, qps: 1 }, ReadStrategy::RemoteWrite, ReadStrategy::Auto]
        {
            let mut target = scattered(&reader, tokens);
            blank(&mut target);
            let grant = owner.grant_read(source.clone()).unwrap();
            let request = ReadRequest::new(&grant, target).strategy(way).mapped_tokens(&mapping, tokens);
            let (done, mut target) = reader.read(request).await;
            let done = done.unwrap();
            let bytes = u64::from(LAYERS * tokens) * mapping.bytes_per_token();
            assert_eq!(done.bytes, bytes, "{way:?}");
            let served = owner.next_served().await.unwrap();
            assert!(served.bytes() == bytes && served.result().is_ok(), "{way:?}");
            let first = |token, head| (token < tokens && heads.contains(&head)).then_some((0, token));
            assert_eq!(wrong(&target, first), 0, "{theirs:?} to {ours:?} by {way:?}");

            // From and to the middle of blocks, and one token of the owner's twice.
            blank(&mut target);
            let grant = owner.grant_read(source.clone()).unwrap();
            let span = |source, target, tokens| TokenSpan { source, target, tokens };
            let spans = [span(100, 5, 30), span(0, 40, 17), span(110, 60, 3)];
            let request = ReadRequest::new(&grant, target).strategy(way).mapped_spans(&mapping, spans);
            let (done, target) = reader.read(request).await;
            assert_eq!(done.unwrap().bytes, u64::from(LAYERS * 50) * mapping.bytes_per_token());
            owner.next_served().await.unwrap();
            let second = |token, head| {
                let from = match token {
                    5..35 => token + 95,
                    40..57 => token - 40,
                    60..63 => token + 50,
                    _ => return None,
                };
                heads.contains(&head).then_some((0, from))
            };
            assert_eq!(wrong(&target, second), 0, "{theirs:?} to {ours:?} by {way:?}");
        }
        reader.close().await.unwrap();
    }
}

/// Two ranks of four, and the receiver is a rank of two.
async fn two_ranks(on: On, tokens: u32) -> (Vec<(KvChannel, KvChannel)>, impl Sized) {
    let far = pool(dense(64, heads(1, 2), Order::TokensHeads), tokens);
    let receiving = far_endpoint(on, far, config()).await;
    let mut listener = receiving.listen(on.any_port_of(1)).await.unwrap();
    let (mut channels, mut endpoints) = (Vec::new(), Vec::new());
    for rank in [2, 3] {
        let near = pool(dense(16, heads(rank, 4), Order::TokensHeads), tokens);
        let sending = endpoint(on, near, config()).await;
        let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
        channels.push((sender.unwrap(), receiver.unwrap()));
        endpoints.push(sending);
    }
    (channels, (receiving, listener, endpoints))
}

/// What rank `part + 2` of four sends of its tokens, with its own seed.
fn source_of(sender: &KvChannel, part: u8, tokens: u32) -> Blocks {
    let mut source = scattered(sender, tokens);
    fill(&mut source, part);
    source
}

/// The rank that has a head, of the two.
fn part_of(head: u32) -> u8 {
    (head / 2 - 2) as u8
}

async fn k1_two_senders_fill_the_heads_of_one_claim(on: On) {
    let tokens = 150;
    let (channels, _ends) = two_ranks(on, tokens).await;
    let pool = channels[0].1.pool().clone();
    let mut target = scattered(&channels[0].1, tokens);
    blank(&mut target);
    let mut gather = Gather::new(target);
    let mut writes = Vec::new();
    for (part, (sender, receiver)) in (0..).zip(&channels) {
        let grant = gather.grant(receiver).unwrap();
        let source = source_of(sender, part, tokens);
        let mapping = sender.mapping_to_peer().unwrap();
        writes.push(
            sender.write(WriteRequest::new(&grant, source).mapped_tokens(&mapping, tokens).tag(part.into())),
        );
    }
    for write in writes {
        write.await.0.unwrap();
    }
    let mut parts = Vec::new();
    while let Some(arrival) = gather.next().await {
        let landed = arrival.result.unwrap();
        assert_eq!((u64::from(arrival.part), landed.layer), (landed.tag, None));
        parts.push(arrival.part);
    }
    parts.sort_unstable();
    assert_eq!(parts, [0, 1]);
    let (result, blocks) = gather.finish().await;
    result.unwrap();
    assert_eq!(wrong(&blocks, |token, head| (token < tokens).then_some((part_of(head), token))), 0);
    drop(blocks);
    assert_eq!(pool.free_blocks(), pool.layout().blocks());
    // Nothing came to those who wait for whole claims.
    for (sender, receiver) in &channels {
        sender.close().await.unwrap();
        assert!(matches!(receiver.next_arrival().await, Err(ArrivalError::Closed(_))));
    }
}

async fn k4_a_part_that_is_aborted_is_told_and_leaves_the_other(on: On) {
    let tokens = 70;
    let (channels, _ends) = two_ranks(on, tokens).await;
    let pool = channels[0].1.pool().clone();
    let mut target = scattered(&channels[0].1, tokens);
    blank(&mut target);
    let mut gather = Gather::new(target);
    let (first, second) = (&channels[0], &channels[1]);
    let given = gather.grant_layers(&first.1).unwrap();
    let whole = gather.grant(&second.1).unwrap();
    // The first one gives up after a layer.
    let mapping = first.0.mapping_to_peer().unwrap();
    let request = WriteRequest::new(&given, source_of(&first.0, 0, tokens));
    let mut write = first.0.write_layers(request.mapped_tokens(&mapping, tokens)).unwrap();
    write.push(1).unwrap();
    let arrival = gather.next().await.unwrap();
    assert_eq!((arrival.part, arrival.result.unwrap().layer), (0, Some(1)));
    drop(write);
    let arrival = gather.next().await.unwrap();
    assert_eq!((arrival.part, arrival.grant), (0, given.id()));
    assert_eq!(arrival.result.unwrap_err(), AbortReason::Sender(SenderReason::Cancelled));
    let mapping = second.0.mapping_to_peer().unwrap();
    let request = WriteRequest::new(&whole, source_of(&second.0, 1, tokens));
    second.0.write(request.mapped_tokens(&mapping, tokens)).await.0.unwrap();
    let arrival = gather.next().await.unwrap();
    assert_eq!((arrival.part, arrival.grant, arrival.result.is_ok()), (1, whole.id(), true));
    assert!(gather.next().await.is_none());
    let (result, blocks) = gather.finish().await;
    // It was told before.
    result.unwrap();
    // Of the first one's heads, one layer is there and one is not.
    let all = |token, head| (token < tokens).then_some((part_of(head), token));
    let missing = wrong(&blocks, all);
    let layer = (2 * tokens * 2 * HEAD_BYTES) as usize;
    assert!(missing > layer * 9 / 10 && missing <= layer, "{missing} of {layer}");
    // Revoked when it is dropped: by then no late write can reach the blocks.
    let mut gather = Gather::new(blocks);
    for (_, receiver) in &channels {
        gather.grant_layers(receiver).unwrap();
    }
    drop(gather);
    pool.alloc(pool.layout().blocks()).await.unwrap();
    for (sender, _) in &channels {
        sender.close().await.unwrap();
    }
}

async fn k1_a_mapped_write_goes_layer_by_layer(on: On) {
    let tokens = 100;
    let (channels, _ends) = two_ranks(on, tokens).await;
    let mut target = scattered(&channels[0].1, tokens);
    blank(&mut target);
    let mut gather = Gather::new(target);
    let mut writes = Vec::new();
    for (part, (sender, receiver)) in (0..).zip(&channels) {
        let grant = gather.grant_layers(receiver).unwrap();
        let mapping = sender.mapping_to_peer().unwrap();
        let request = WriteRequest::new(&grant, source_of(sender, part, tokens)).tag(part.into());
        writes.push(sender.write_layers(request.mapped_tokens(&mapping, tokens)).unwrap());
    }
    for layer in (0..LAYERS).rev() {
        for write in &mut writes {
            write.push(layer).unwrap();
        }
        for _ in 0..2 {
            let landed = gather.next().await.unwrap().result.unwrap();
            assert_eq!(landed.layer, Some(layer));
        }
    }
    for write in writes {
        write.finish().await.0.unwrap();
    }
    let (result, blocks) = gather.finish().await;
    result.unwrap();
    assert_eq!(wrong(&blocks, |token, head| (token < tokens).then_some((part_of(head), token))), 0);
}

#[test]
fn b1_case_16_block_sizes_differ_only_where_both_say_what_is_in_them() {
    run(async {
        let (small, large) =
            (dense(16, heads(0, 1), Order::TokensHeads), dense(64, heads(0, 1), Order::TokensHeads));
        let bare = |shape: Shape| Layout::contiguous(LAYERS, 4, shape.bytes()).unwrap();
        let refused = async |near: Layout, far: Layout| {
            let on = On::Soft(Profile::Default);
            let (near, far) = (endpoint(on, near, config()).await, endpoint(on, far, config()).await);
            let mut listener = far.listen(on.any_port_of(1)).await.unwrap();
            let connecting = near.connect(listener.local_addr());
            tokio::select! {
                error = connecting => error.unwrap_err(),
                _ = listener.accept() => panic!("accepted"),
            }
        };
        for (near, far) in
            [(bare(small), bare(large)), (pool(small, 64), bare(large)), (bare(small), pool(large, 64))]
        {
            match refused(near, far).await {
                ConnectError::LayoutMismatch { ours, theirs, .. } => {
                    assert_eq!((ours, theirs), (small.bytes(), large.bytes()));
                }
                other => panic!("{other:?}"),
            }
        }
        // Nor where they are of two models.
        let wide = Shape::dense(2, 16, heads(0, 1), HEAD_BYTES * 2, Order::TokensHeads).unwrap();
        let error = refused(pool(small, 64), pool(wide, 64)).await;
        assert!(matches!(error, ConnectError::LayoutMismatch { ours: 48, theirs: 96, .. }), "{error:?}");
        assert!(error.to_string().contains("head"), "{error}");
        let more = Shape::dense(2, 16, Heads::all(16).unwrap(), HEAD_BYTES, Order::TokensHeads).unwrap();
        let error = refused(pool(small, 64), pool(more, 64)).await;
        assert!(matches!(error, ConnectError::LayoutMismatch { ours: 8, theirs: 16, .. }), "{error:?}");
    });
}

#[test]
fn r10_what_is_asked_of_a_mapping_is_checked_before_anything_is_posted() {
    run(async {
        let (near, far) =
            (dense(16, heads(0, 2), Order::TokensHeads), dense(64, heads(0, 4), Order::HeadsTokens));
        let ends = connected(Profile::Default, pool(near, 128), pool(far, 128)).await;
        let (sender, receiver) = (&ends.sender, &ends.receiver);
        let mapping = sender.mapping_to_peer().unwrap();
        let grant = receiver.grant(receiver.pool().try_alloc(2).unwrap()).unwrap();
        let source = || sender.pool().try_alloc(8).unwrap();
        let refused = async |request: WriteRequest| sender.write(request).await.0.unwrap_err();
        // Blocks as they are.
        let error = refused(WriteRequest::new(&grant, source())).await;
        assert!(matches!(error, WriteError::Shapes { .. }), "{error:?}");
        assert!(error.to_string().contains("WriteRequest::mapped"), "{error}");
        // A mapping of other pools, or the other way round.
        let error =
            refused(WriteRequest::new(&grant, source()).mapped(&receiver.mapping_to_peer().unwrap())).await;
        assert!(
            matches!(error, WriteError::Mapping(MappingError::OtherShape { side: "source", .. })),
            "{error:?}"
        );
        let span = |source, target, tokens| TokenSpan { source, target, tokens };
        for (spans, what, index, limit) in [
            (vec![span(0, 0, 129)], "token of the source", 128, 128),
            (vec![span(128, 0, 1)], "token of the source", 128, 128),
            (vec![span(0, 1, 128)], "token of the grant", 128, 128),
            (vec![span(0, 0, 1), span(u32::MAX, 5, u32::MAX)], "token of the source", 8_589_934_589, 128),
        ] {
            let error = refused(WriteRequest::new(&grant, source()).mapped_spans(&mapping, spans)).await;
            match error {
                WriteError::OutOfRange { what: w, index: i, limit: l } => {
                    assert_eq!((w, i, l), (what, index, limit));
                }
                other => panic!("{other:?}"),
            }
        }
        // A grant whose blocks the peer's pool does not have.
        let far_away = serde_json::to_string(&grant).unwrap();
        let at = far_away.find("\"runs\":").unwrap();
        let far_away = format!("{}\"runs\":[[4294967290,4]]}}", &far_away[..at]);
        let far_away = serde_json::from_str(&far_away).unwrap();
        let error = refused(WriteRequest::new(&far_away, source()).mapped(&mapping)).await;
        assert!(matches!(error, WriteError::OutOfRange { what: "token", .. }), "{error:?}");
        let twice = [span(0, 10, 10), span(50, 0, 5), span(60, 4, 7)];
        let error = refused(WriteRequest::new(&grant, source()).mapped_spans(&mapping, twice)).await;
        assert!(matches!(error, WriteError::TokenTwice { token: 4 }), "{error:?}");
        let touching = [span(0, 10, 10), span(50, 0, 5), span(60, 5, 5), span(0, 7, 0)];
        // None of it has used the grant up.
        let request = WriteRequest::new(&grant, source()).mapped_spans(&mapping, touching);
        assert_eq!(sender.write(request).await.0.unwrap().bytes, 2 * 20 * mapping.bytes_per_token());
        // Heads that meet nowhere are no error of the connection.
        let other = dense(64, heads(3, 4), Order::HeadsTokens);
        let ends = connected(Profile::Default, pool(near, 128), pool(other, 128)).await;
        assert!(matches!(ends.sender.mapping_to_peer(), Err(MappingError::NoHeads { .. })));
        // A pool that says nothing.
        let bare = Layout::contiguous(LAYERS, 8, near.bytes()).unwrap();
        let ends = connected(Profile::Default, pool(near, 128), bare).await;
        assert!(matches!(ends.sender.mapping_to_peer(), Err(MappingError::NoShape { side: "target" })));
        let grant = ends.receiver.grant(ends.receiver.pool().try_alloc(1).unwrap()).unwrap();
        let one = ends.sender.pool().try_alloc(1).unwrap();
        ends.sender.write(WriteRequest::new(&grant, one)).await.0.unwrap();
        let mapping = Mapping::new(&near, &near).unwrap();
        let one = ends.sender.pool().try_alloc(1).unwrap();
        let error = ends.sender.write(WriteRequest::new(&grant, one).mapped(&mapping)).await.0.unwrap_err();
        assert!(matches!(error, WriteError::Mapping(MappingError::NoShape { side: "target" })), "{error:?}");
        assert!(matches!(
            Layout::contiguous(1, 1, 10).unwrap().with_shape(near),
            Err(LayoutError::Shape { block_bytes: 10, .. })
        ));
    });
}

/// Found by tests/chaos: one way named a byte that was out of range, and the other had the owner refuse, which used the grant up.
#[test]
fn r10_blocks_of_another_shape_are_not_read_as_they_are() {
    run(async {
        let near = dense(16, heads(0, 1), Order::TokensHeads);
        let far = dense(16, heads(0, 1), Order::HeadsTokens);
        let ends = connected(Profile::Default, pool(near, 64), pool(far, 64)).await;
        let (reader, owner) = (&ends.sender, &ends.receiver);
        let grant = owner.grant_read(owner.pool().try_alloc(1).unwrap()).unwrap();
        let by_reads = ReadStrategy::RdmaRead { depth: 1, qps: 1 };
        for way in [ReadStrategy::Auto, by_reads, ReadStrategy::RemoteWrite, ReadStrategy::Measured] {
            let target = reader.pool().try_alloc(1).unwrap();
            let (refused, _) = reader.read(ReadRequest::new(&grant, target).strategy(way)).await;
            match refused {
                Err(ReadError::Shapes { ours, theirs }) => assert_eq!((*ours, *theirs), (near, far)),
                other => panic!("{way:?}: {other:?}"),
            }
            // A mapping of other pools, or the other way round; and tokens that are not there, or come to one twice.
            let of_peer = reader.mapping_from_peer().unwrap();
            let span = |source, target, tokens| TokenSpan { source, target, tokens };
            let refused = async |mapping: &Mapping, spans: Vec<TokenSpan>| {
                let target = reader.pool().try_alloc(1).unwrap();
                let request = ReadRequest::new(&grant, target).strategy(way).mapped_spans(mapping, spans);
                reader.read(request).await.0.unwrap_err()
            };
            let error = refused(&reader.mapping_to_peer().unwrap(), vec![span(0, 0, 1)]).await;
            let other = |e: &ReadError| matches!(e, ReadError::Mapping(MappingError::OtherShape { .. }));
            assert!(other(&error), "{way:?}: {error:?}");
            for (span, what, index) in [
                (span(0, 0, 17), "token of the grant", 16),
                (span(16, 0, 1), "token of the grant", 16),
                (span(0, 16, 1), "token of our blocks", 16),
                (span(u32::MAX, 0, u32::MAX), "token of the grant", 8_589_934_589),
            ] {
                match refused(&of_peer, vec![span]).await {
                    ReadError::OutOfRange { what: w, index: i, limit: 16 } => {
                        assert_eq!((w, i), (what, index))
                    }
                    other => panic!("{way:?}: {other:?}"),
                }
            }
            let error = refused(&of_peer, vec![span(0, 0, 5), span(9, 4, 1)]).await;
            assert!(matches!(error, ReadError::TokenTwice { token: 4 }), "{way:?}: {error:?}");
        }
        // Nothing was said to the owner.
        owner.revoke(&grant);
        let served = owner.next_served().await.unwrap();
        assert_eq!((served.grant(), served.result()), (grant.id(), Err(AbortReason::Revoked)));
    });
}
