//! K5, K10: what was begun by pages ends, whatever becomes of the rails and of what they take.

use super::rails::by_rail;
use super::*;
use crate::pages::Checked;
use std::collections::BTreeSet;

const LAYERS: u32 = 32;
const BLOCK: u64 = 8192;
/// A block with all of its layers.
const DEEP: u64 = BLOCK * LAYERS as u64;
const SOURCE: u64 = 1 << 32;
const TARGET: u64 = 1 << 40;

/// A wire whose queue pairs take pages of at most so many bytes.
struct Paged<'p> {
    wire: Wire,
    takes: &'p [u32],
    /// Pieces that came as pages, and others; and where each of them goes.
    pages: usize,
    pieces: usize,
    targets: Vec<(u64, u64)>,
}

impl Sink for Paged<'_> {
    fn room(&self, qp: usize) -> usize {
        self.wire.room(qp)
    }

    fn write(&mut self, qp: usize, piece: &Piece, imm: Option<u32>, token: Token) {
        self.pieces += usize::from(piece.len > 0);
        self.targets.push((piece.dst_addr, piece.len.into()));
        self.wire.write(qp, piece, imm, token);
    }

    fn takes_pages(&self, qp: usize, _: u32) -> u32 {
        self.takes[qp]
    }

    fn write_pages(&mut self, qp: usize, piece: &Piece, pages: Checked, imm: Option<u32>, token: Token) {
        assert!(piece.len <= self.takes[qp], "{} bytes", piece.len);
        self.pages += 1;
        let targets = pages.pages.targets_of(piece.dst_addr).map(|(at, len)| (at, len.into()));
        self.targets.extend(targets);
        self.wire.write(qp, piece, imm, token);
    }

    fn read(&mut self, qp: usize, piece: &Piece, token: Token) {
        self.wire.read(qp, piece, token);
    }

    fn send(&mut self, qp: usize, bytes: &[u8], token: Token) {
        self.wire.send(qp, bytes, token);
    }
}

/// Of what was written: by pages and by pieces, and which bytes, in lines of a kilobyte that nobody writes twice.
#[derive(Default)]
struct Written {
    pages: usize,
    pieces: usize,
    lines: BTreeSet<u64>,
}

impl Written {
    fn bytes(&self) -> u64 {
        self.lines.len() as u64 * 1024
    }

    fn transmit(&mut self, p: &mut Pair, takes: &[u32]) -> Vec<Posted> {
        let wire = Wire { room: p.room, posted: Vec::new() };
        let mut paged = Paged { wire, takes, pages: 0, pieces: 0, targets: Vec::new() };
        while p.conns[0].poll_transmit(p.now, &mut paged) != Transmitted::Idle {}
        self.pages += paged.pages;
        self.pieces += paged.pieces;
        for (at, len) in paged.targets {
            assert!(at % 1024 == 0 && len % 1024 == 0);
            (at..at + len).step_by(1024).for_each(|line| assert!(self.lines.insert(line), "{line:#x} twice"));
        }
        paged.wire.posted
    }

    /// Until both are at rest. `slow`: how long what each rail has posted takes.
    fn settle(&mut self, p: &mut Pair, takes: &[u32], slow: &[Duration]) {
        loop {
            let there = self.transmit(p, takes);
            let (fast, last) = {
                let first = there.iter().map(|wr| slow[p.conns[0].links[wr.qp()].rail]).min();
                let first = first.unwrap_or_default();
                there.into_iter().partition::<Vec<_>, _>(|wr| slow[p.conns[0].links[wr.qp()].rail] == first)
            };
            let mut quiet = true;
            for posted in [fast, last] {
                for wr in posted {
                    p.now += slow[p.conns[0].links[wr.qp()].rail];
                    p.pass(0, &wr);
                    quiet = false;
                }
            }
            for wr in p.transmit(1) {
                p.pass(1, &wr);
                quiet = false;
            }
            if quiet {
                return;
            }
        }
    }
}

/// Rails of one queue pair each, whose messages are long, and nobody is lost for being slow.
fn config_of(rails: usize) -> Config {
    let rail = RailConfig { qps: 1, max_write: 1 << 20, ..rail() };
    let long = Duration::from_secs(1 << 16);
    Config { rails: vec![rail; rails], heartbeat: long / 2, peer_timeout: long, ..config() }
}

fn begin(p: &mut Pair, blocks: u32) {
    let layout = Layout::contiguous(LAYERS, 2048, BLOCK).expect("valid");
    let len = layout.required_bytes();
    let seams = |addr, key| {
        let one = |rail: u32| Seams::new(vec![Part { addr, len, key: key + 10 * rail }]).expect("valid");
        PoolSeams::new((0..p.cfg.rails.len() as u32).map(one).collect())
    };
    let mut b = PlanBuilder::new((&layout, &seams(SOURCE, 1)), (&layout, &seams(TARGET, 2))).expect("alike");
    // No two are neighbours.
    (0..blocks).for_each(|i| b.push(2 * i, 2047 - 2 * i, 1).expect("in range"));
    let (grant, deadline) = (p.grant(), p.now + Duration::from_secs(1 << 15));
    let plan = b.build().expect("small");
    p.conns[0].write(WriteRequest { grant, plan, tag: 5, deadline }, p.now).expect("fresh");
}

/// The rate of each rail.
fn warm(p: &mut Pair, each: Duration) {
    for _ in 0..8 {
        let grant = p.grant();
        p.write(grant, 1 << 20).expect("fresh");
        Written::default().settle(p, &[0; 2], &[each; 2]);
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    }
}

const FAST: Duration = Duration::from_micros(10);
const SLOW: Duration = Duration::from_millis(400);

#[test]
fn k10_pages_go_on_when_the_rails_become_slower_than_a_block_with_its_layers() {
    let mut p = Pair::new(config_of(2));
    warm(&mut p, FAST);
    begin(&mut p, 800);
    let mut written = Written::default();
    written.settle(&mut p, &[u32::MAX; 2], &[SLOW; 2]);
    assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    let best = p.conns[0].rails.iter().map(|rail| rail.pace.longest(rail.pace.rate(), u32::MAX)).max();
    assert!(u64::from(best.unwrap()) < DEEP, "they have become slow: {best:?}");
    assert_eq!((written.bytes(), written.pieces), (800 * DEEP, 0), "{} WRITEs of pages", written.pages);
}

#[test]
fn k10_a_rail_without_pages_carries_pieces_beside_one_with_them_whichever_is_slower() {
    for (takes, slow) in
        [([u32::MAX, 0], [SLOW, FAST]), ([u32::MAX, 0], [FAST, SLOW]), ([0, u32::MAX], [SLOW, FAST])]
    {
        let mut p = Pair::new(config_of(2));
        warm(&mut p, FAST);
        begin(&mut p, 200);
        let mut written = Written::default();
        written.settle(&mut p, &takes, &slow);
        assert_eq!(done(&p.events(0)), [Outcome::Landed], "{takes:?} {slow:?}");
        assert_eq!(written.bytes(), 200 * DEEP, "{takes:?} {slow:?}");
        assert!(written.pages > 0 || takes[0] == 0, "{takes:?} {slow:?}");
    }
}

#[test]
fn k5_a_transfer_that_was_begun_by_pages_ends_by_pieces_where_none_are_taken_any_more() {
    for rails in [1, 2] {
        let mut p = Pair::new(config_of(rails));
        if rails == 2 {
            warm(&mut p, FAST);
        }
        begin(&mut p, 100);
        let mut written = Written::default();
        p.room = 8;
        let posted = written.transmit(&mut p, &[1 << 20; 2]);
        p.room = 64;
        assert!(written.pages > 0 && written.bytes() < 100 * DEEP, "begun, and not at its end");
        posted.iter().for_each(|wr| p.pass(0, wr));
        // Too little for a block with its layers, on each rail.
        written.settle(&mut p, &[DEEP as u32 - 1; 2], &[FAST; 2]);
        assert_eq!(done(&p.events(0)), [Outcome::Landed]);
        assert_eq!(written.bytes(), 100 * DEEP);
        assert!(written.pieces > 0);
    }
}

#[test]
fn k10_the_only_rail_with_pages_may_be_lost_in_mid_transfer() {
    let mut p = Pair::new(config_of(2));
    warm(&mut p, FAST);
    begin(&mut p, 200);
    let takes = [u32::MAX, 0];
    let mut first = Written::default();
    p.room = 8;
    let posted = first.transmit(&mut p, &takes);
    p.room = 64;
    assert!(first.pages > 0 && first.bytes() < 200 * DEEP);
    let (lost, left) = by_rail(&p, posted);
    left.iter().for_each(|wr| p.pass(0, wr));
    p.conns[0].rail_failed(0, Cause::Transport, p.now);
    p.settle();
    p.fence(0, 0, &lost);
    p.fence(1, 0, &[]);
    // From the beginning, on the other.
    let mut again = Written::default();
    again.settle(&mut p, &takes, &[FAST; 2]);
    assert_eq!(done(&p.events(0)), [Outcome::Landed]);
    assert_eq!((again.bytes(), again.pages), (200 * DEEP, 0));
}
