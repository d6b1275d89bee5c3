//! K8 for mapped plans: thousands of pairs of shapes, each byte held against a naive copy.

use super::*;
use crate::kv::mapping::Mapping;
use crate::kv::shape::{Heads, Order, Shape, Strides};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    fn range(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.range(1, n) == 1
    }
}

/// What both sides have in common.
struct Model {
    planes: u32,
    heads: u32,
    head_bytes: u32,
}

fn shape(r: &mut Random, model: &Model, heads: Heads) -> Shape {
    let tokens = [1, 2, 3, 4, 6, 8][r.range(0, 5) as usize];
    if r.one_in(2) {
        let order = if r.one_in(2) { Order::TokensHeads } else { Order::HeadsTokens };
        return Shape::dense(model.planes, tokens, heads, model.head_bytes, order).expect("valid");
    }
    // Any order of the three dimensions, with gaps here and there.
    let counts = [model.planes, tokens, heads.count()];
    let mut order = [0, 1, 2];
    for i in [2, 1] {
        order.swap(i, r.range(0, i as u32) as usize);
    }
    let (mut strides, mut inner) = ([0; 3], u64::from(model.head_bytes));
    for dim in order {
        let gap = if r.one_in(3) { u64::from(r.range(1, 3)) } else { 0 };
        strides[dim] = inner + gap;
        inner += strides[dim] * u64::from(counts[dim] - 1);
    }
    let strides = Strides { plane: strides[0], token: strides[1], head: strides[2] };
    Shape::strided(model.planes, tokens, heads, model.head_bytes, strides).expect("in order")
}

fn layout(r: &mut Random, layers: u32, shape: Shape) -> Layout {
    let blocks = r.range(1, 6);
    let block_bytes = shape.bytes() + u64::from(r.range(0, 2));
    let gap = u64::from(r.range(0, 2));
    let (layer_stride, block_stride) = if r.one_in(2) {
        // Layers outside of blocks, or inside.
        ((block_bytes + gap) * u64::from(blocks), block_bytes + gap)
    } else {
        (block_bytes + gap, (block_bytes + gap) * u64::from(layers))
    };
    let layout = Layout::new(layers, blocks, block_bytes, layer_stride, block_stride).expect("valid");
    layout.with_shape(shape).expect("fits")
}

/// A pool in parts of random lengths. A part's address tells its number and the offset in the pool.
fn seams(r: &mut Random, bytes: u64) -> PoolSeams {
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < bytes {
        let len = if r.one_in(2) { bytes - at } else { u64::from(r.range(1, 64)).min(bytes - at) };
        parts.push(Part { addr: (parts.len() as u64 + 1) << 32 | at, len, key: parts.len() as u32 });
        at += len;
    }
    Seams::new(parts).expect("valid").into()
}

/// The offset in the pool of an address, which must be of the part of this key.
fn offset(addr: u64, key: u32) -> usize {
    assert_eq!(addr >> 32, u64::from(key) + 1, "an address of another region");
    (addr & 0xffff_ffff) as usize
}

fn carry_out(plan: &Plan, max_write: u32, source: &[u8], target: &mut [u8]) -> u64 {
    let (mut cursor, mut bytes) = (super::super::plan::Cursor::default(), 0);
    while let Some(p) = cursor.next(plan, 0, max_write) {
        assert!(p.len > 0 && p.len <= max_write);
        let (from, to, len) = (offset(p.src_addr, p.lkey), offset(p.dst_addr, p.rkey), p.len as usize);
        target[to..to + len].copy_from_slice(&source[from..from + len]);
        bytes += u64::from(p.len);
    }
    assert!(cursor.is_done(plan));
    bytes
}

/// The same of a plan of READs: from the remote side to ours.
fn read_in(plan: &Plan, max_read: u32, owners: &[u8], ours: &mut [u8]) -> u64 {
    let (mut cursor, mut bytes) = (super::super::plan::Cursor::default(), 0);
    while let Some(p) = cursor.next(plan, 0, max_read) {
        let (to, from, len) = (offset(p.src_addr, p.lkey), offset(p.dst_addr, p.rkey), p.len as usize);
        ours[to..to + len].copy_from_slice(&owners[from..from + len]);
        bytes += u64::from(p.len);
    }
    bytes
}

/// Source token, target token, count: of whole pools, so that runs merge across blocks.
fn spans(r: &mut Random, source: u32, target: u32) -> Vec<(u32, u32, u32)> {
    let mut spans = Vec::new();
    let mut to = 0;
    while to < target {
        to += if r.one_in(2) { 0 } else { r.range(0, 5) };
        if to >= target {
            break;
        }
        let from = r.range(0, source - 1);
        let count = r.range(1, 12).min(source - from).min(target - to);
        spans.push((from, to, count));
        to += count;
    }
    spans
}

fn random_case(seed: u64) {
    let r = &mut Random(seed);
    let model = Model { planes: r.range(1, 2), heads: r.range(1, 6), head_bytes: r.range(1, 8) };
    let mut heads = || {
        let first = r.range(0, model.heads - 1);
        let count = r.range(1, model.heads - first);
        Heads::new(first, count, model.heads).expect("within the model")
    };
    let (ours, theirs) = (heads(), heads());
    let (src_shape, dst_shape) = (shape(r, &model, ours), shape(r, &model, theirs));
    let common: Vec<u32> = ours.range().filter(|h| theirs.range().contains(h)).collect();
    let mapping = match Mapping::new(&src_shape, &dst_shape) {
        Ok(mapping) => mapping,
        Err(error) => {
            assert!(common.is_empty(), "{error}");
            return;
        }
    };
    let layers = r.range(1, 3);
    let (src, dst) = (layout(r, layers, src_shape), layout(r, layers, dst_shape));
    let (src_seams, dst_seams) = (seams(r, src.required_bytes()), seams(r, dst.required_bytes()));
    let source: Vec<u8> = (0..src.required_bytes()).map(|_| r.next() as u8).collect();
    let before: Vec<u8> = (0..dst.required_bytes()).map(|_| r.next() as u8).collect();

    let mut expected = before.clone();
    let build = || PlanBuilder::mapped((&src, &src_seams), (&dst, &dst_seams), &mapping).expect("fits");
    let (mut builder, mut by_layer, mut bytes) = (build(), build(), 0u64);
    let pushed = spans(r, src.tokens(), dst.tokens());
    for &(from, to, count) in &pushed {
        builder.push(from, to, count).expect("in range");
        by_layer.push(from, to, count).expect("in range");
        for i in 0..count {
            let place = |token: u32, shape: &Shape| (token / shape.tokens(), token % shape.tokens());
            let ((sb, st), (db, dt)) = (place(from + i, &src_shape), place(to + i, &dst_shape));
            for layer in 0..layers {
                for plane in 0..model.planes {
                    for &head in &common {
                        let s = src.offset(layer, sb).expect("inside")
                            + src_shape.offset(plane, st, head).expect("inside");
                        let d = dst.offset(layer, db).expect("inside")
                            + dst_shape.offset(plane, dt, head).expect("inside");
                        for b in 0..u64::from(model.head_bytes) {
                            expected[(d + b) as usize] = source[(s + b) as usize];
                            bytes += 1;
                        }
                    }
                }
            }
        }
    }
    let plan = builder.build().expect("small");
    assert_eq!(plan.bytes(), bytes, "seed {seed}");
    let max_write = if r.one_in(2) { 1 << 20 } else { r.range(1, 40) };
    let mut got = before.clone();
    assert_eq!(carry_out(&plan, max_write, &source, &mut got), bytes, "seed {seed}");
    assert!(got == expected, "seed {seed}: other bytes than the naive copy's");

    // As a reader plans it: its own memory is the source's side of the plan, and each piece comes the other way.
    let back = mapping.reversed();
    let mut builder = PlanBuilder::mapped((&dst, &dst_seams), (&src, &src_seams), &back).expect("fits");
    pushed.iter().for_each(|&(from, to, count)| builder.push(to, from, count).expect("in range"));
    let read = builder.build().expect("small");
    assert_eq!((read.bytes(), read.descriptors()), (bytes, plan.descriptors()), "seed {seed}");
    let mut got = before.clone();
    assert_eq!(read_in(&read, max_write, &source, &mut got), bytes, "seed {seed}");
    assert!(got == expected, "seed {seed}: READs bring other bytes than the naive copy");

    // The layers one by one make the whole.
    let plan = by_layer.build_by_layer().expect("small");
    let (mut got, mut sum, mut descriptors) = (before, 0, 0);
    for layer in (0..layers).rev() {
        let one = plan.layer(layer).expect("inside");
        sum += carry_out(&one, max_write, &source, &mut got);
        descriptors += one.descriptors();
    }
    assert_eq!((sum, descriptors), (bytes, plan.descriptors()), "seed {seed}");
    assert!(got == expected, "seed {seed}: the layers make something else");
    assert!(plan.layer(layers).is_none());
}

#[test]
fn k8_mapped_plans_copy_what_a_naive_copy_does_and_nothing_else() {
    for seed in 0..5_000 {
        random_case(seed);
    }
}

/// A page of 64 from pages of 16, and back: about as many work requests as there are planes of a page of 16.
#[test]
fn k8_pages_of_16_and_64_are_as_coarse_as_the_pages_allow() {
    let shape = |tokens| {
        let heads = Heads::all(8).expect("not zero");
        Shape::dense(2, tokens, heads, 256, Order::TokensHeads).expect("valid")
    };
    let pool = |tokens: u32, blocks: u32| {
        let s = shape(tokens);
        Layout::contiguous(1, blocks, s.bytes()).expect("valid").with_shape(s).expect("fits")
    };
    let (small, large) = (pool(16, 512), pool(64, 128));
    let seams = |l: &Layout| {
        PoolSeams::from(
            Seams::new(vec![Part { addr: 4096, len: l.required_bytes(), key: 1 }]).expect("valid"),
        )
    };
    for (src, dst) in [(&small, &large), (&large, &small)] {
        let mapping = Mapping::new(src.shape().expect("set"), dst.shape().expect("set")).expect("one model");
        let mut b = PlanBuilder::mapped((src, &seams(src)), (dst, &seams(dst)), &mapping).expect("they fit");
        b.push(0, 0, 8192).expect("in range");
        let plan = b.build().expect("small");
        assert_eq!((plan.runs(), plan.descriptors(), plan.bytes()), (1, 512, 8192 * 2 * 8 * 256));
        let (mut cursor, mut pieces) = (super::super::plan::Cursor::default(), Vec::new());
        while let Some(piece) = cursor.next(&plan, 0, 2 << 20) {
            pieces.push(u64::from(piece.len));
        }
        // K and V of each page of 16; where a page of 64 ends, its last V and the next K are neighbours on both sides.
        assert_eq!((pieces.len(), pieces.iter().sum()), (2 * 512 - 127, plan.bytes()));
    }
}

#[test]
fn r10_mapped_plans_are_checked() {
    let shape = |tokens| {
        Shape::dense(1, tokens, Heads::all(1).expect("not zero"), 8, Order::TokensHeads).expect("valid")
    };
    let bare = |blocks, bytes| Layout::contiguous(2, blocks, bytes).expect("valid");
    let pool =
        |tokens: u32, blocks| bare(blocks, u64::from(tokens) * 8).with_shape(shape(tokens)).expect("fits");
    let seams = PoolSeams::from(Seams::new(vec![Part { addr: 0, len: 4096, key: 1 }]).expect("valid"));
    let (a, b) = (pool(4, 8), pool(16, 2));
    let mapping = Mapping::new(&shape(4), &shape(16)).expect("one model");
    let mut builder = PlanBuilder::mapped((&a, &seams), (&b, &seams), &mapping).expect("fits");
    builder.push(0, 0, 32).expect("all of it");
    for (src, dst, count) in [(1, 0, 32), (0, 1, 32), (32, 0, 1), (0, 0, u32::MAX), (u32::MAX, 0, 1)] {
        let refused = builder.push(src, dst, count);
        assert!(matches!(refused, Err(PlanError::OutOfRange { unit: "token", .. })), "{refused:?}");
    }
    let refused =
        |s: &Layout, d: &Layout| PlanBuilder::mapped((s, &seams), (d, &seams), &mapping).unwrap_err();
    assert_eq!(refused(&b, &b), PlanError::OtherShape { side: "source" });
    assert_eq!(refused(&a, &bare(2, 128)), PlanError::OtherShape { side: "target" });
    let one_layer = Layout::contiguous(1, 2, 128).expect("valid").with_shape(shape(16)).expect("fits");
    assert!(matches!(refused(&a, &one_layer), PlanError::Layouts { what: "layers", got: 2, want: 1 }));
    // A plan of blocks does not pass over what is in them.
    let plain = |s: &Layout, d: &Layout| PlanBuilder::new((s, &seams), (d, &seams)).map(drop);
    assert_eq!(plain(&a, &b), Err(PlanError::Shapes));
    assert_eq!(plain(&a, &pool(4, 2)), Ok(()));
    assert_eq!(plain(&a, &bare(2, 32)), Ok(()), "one side says nothing");
    assert!(matches!(plain(&a, &bare(2, 128)), Err(PlanError::Layouts { got: 32, want: 128, .. })));
}
