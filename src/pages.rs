//! What a request for many pieces carries instead of a list of them: pages of a paged cache, in all of its layers.
//!
//! A block of one end goes to a block of the other, in each layer, and both ends have the same pieces at strides of their own. So a
//! table of pairs of blocks says it all, however many layers there are, and whoever copies computes the addresses.

use std::ops::Range;

/// Pairs of one request at most: a few tables have room in a ring of shared memory at a time.
pub(crate) const MAX_PAIRS: usize = 2048;
/// Blocks that a set of bits is kept for; of farther ones the numbers are sorted.
const BITS: u64 = 1 << 20;

/// Where the pieces of one end lie: that of block `b` in layer `l` is `l * layer + b * block` bytes behind the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strides {
    pub(crate) layer: u64,
    pub(crate) block: u64,
}

/// Pieces of one length, by layers and blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    /// Bytes of a piece: of a block in a layer.
    pub(crate) piece: u32,
    pub(crate) layers: u32,
    pub(crate) source: Strides,
    pub(crate) target: Strides,
    /// See [`pair`].
    pub(crate) pairs: Vec<u64>,
}

/// What pieces cover, from the first one on. Pieces are not all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spans {
    pub(crate) source: Range<u64>,
    pub(crate) target: Range<u64>,
}

/// Pages that are a request: what they cover is known, and that no byte is written twice.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub(crate) pages: Pages,
    pub(crate) spans: Spans,
}

/// A block of the source, and the one of the target that it goes to.
pub(crate) const fn pair(source: u32, target: u32) -> u64 {
    (source as u64) << 32 | target as u64
}

const fn unpair(pair: u64) -> (u64, u64) {
    (pair >> 32, pair & 0xffff_ffff)
}

impl Strides {
    fn span(&self, blocks: Range<u64>, layers: u32, piece: u32) -> Option<Range<u64>> {
        let start = blocks.start.checked_mul(self.block)?;
        let last = blocks.end.checked_mul(self.block)?;
        let deep = u64::from(layers - 1).checked_mul(self.layer)?;
        Some(start..last.checked_add(deep)?.checked_add(piece.into())?)
    }
}

impl Pages {
    /// Bytes of all pieces.
    pub(crate) fn bytes(&self) -> Option<u32> {
        let all = u64::from(self.piece).checked_mul(self.layers.into())?;
        u32::try_from(all.checked_mul(self.pairs.len() as u64)?).ok()
    }

    /// How many pieces there are. Of checked pages: fewer than there are u32s.
    pub(crate) fn pieces(&self) -> u64 {
        u64::from(self.layers).saturating_mul(self.pairs.len() as u64)
    }

    /// See [`spans`](Self::spans).
    pub(crate) fn check(self) -> Option<Checked> {
        let spans = self.spans()?;
        Some(Checked { pages: self, spans })
    }

    /// What the pieces cover at both ends. `None` for what is no request: none or too many pairs, nothing to copy, more than 64 bits
    /// of addresses, or targets that are not known to be apart: who copies has no order.
    pub(crate) fn spans(&self) -> Option<Spans> {
        let sized = self.bytes().is_some_and(|bytes| bytes > 0);
        if !sized || self.pairs.len() > MAX_PAIRS {
            return None;
        }
        // The first and the last block of each end, in one pass.
        let (source, target) = unpair(self.pairs[0]);
        let (mut sources, mut targets) = (source..source, target..target);
        for (source, target) in self.pairs.iter().map(|&pair| unpair(pair)) {
            sources = sources.start.min(source)..sources.end.max(source);
            targets = targets.start.min(target)..targets.end.max(target);
        }
        let source = self.source.span(sources, self.layers, self.piece)?;
        let target = self.target.span(targets.clone(), self.layers, self.piece)?;
        self.are_apart(&targets).then_some(Spans { source, target })
    }

    /// No byte of the target is written twice. `targets` are the first and the last block.
    fn are_apart(&self, targets: &Range<u64>) -> bool {
        let Strides { layer, block } = self.target;
        let (piece, several) = (u64::from(self.piece), self.pairs.len() > 1);
        let deep = self.layers > 1;
        if (several && block < piece) || (deep && layer < piece) {
            return false;
        }
        // Within 64 bits, as parts of the span.
        let (wide, high) =
            ((targets.end - targets.start) * block + piece, u64::from(self.layers - 1) * layer + piece);
        (!several || !deep || layer >= wide || block >= high) && self.are_distinct(targets)
    }

    fn are_distinct(&self, targets: &Range<u64>) -> bool {
        if targets.end - targets.start < BITS {
            let mut seen = vec![0u64; (targets.end - targets.start) as usize / 64 + 1];
            let mut twice = 0;
            for &pair in &self.pairs {
                let at = unpair(pair).1 - targets.start;
                let (word, bit) = (&mut seen[at as usize / 64], 1 << (at % 64));
                twice |= *word & bit;
                *word |= bit;
            }
            return twice == 0;
        }
        let mut all: Vec<u64> = self.pairs.iter().map(|&p| unpair(p).1).collect();
        all.sort_unstable();
        all.windows(2).all(|w| w[0] != w[1])
    }

    /// Where each piece goes, when the first block is at `addr`, and its bytes.
    pub(crate) fn targets_of(&self, addr: u64) -> impl Iterator<Item = (u64, u32)> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let (_, to, len) = self.at(done)?;
            done += u64::from(len);
            Some((addr.wrapping_add(to), len))
        })
    }

    /// The blocks of the target.
    pub(crate) fn targets(&self) -> impl Iterator<Item = u32> {
        self.pairs.iter().map(|&pair| unpair(pair).1 as u32)
    }

    /// What is `done` bytes behind the beginning, when layers follow each other and in each of them the pairs: where it is at both
    /// ends, behind the first piece of all, and how much of its piece is left.
    pub(crate) fn at(&self, done: u64) -> Option<(u64, u64, u32)> {
        let (index, inside) = (done / u64::from(self.piece), done % u64::from(self.piece));
        let layer = index / self.pairs.len() as u64;
        let (source, target) = unpair(self.pairs[(index % self.pairs.len() as u64) as usize]);
        // Parts of the spans, so that nothing overflows: but behind the last layer it might.
        let place = |strides: &Strides, block: u64| layer * strides.layer + block * strides.block + inside;
        (layer < self.layers.into())
            .then(|| (place(&self.source, source), place(&self.target, target), self.piece - inside as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(layers: u32, target: (u64, u64), targets: &[u32]) -> Pages {
        let pairs = targets.iter().enumerate().map(|(i, &t)| pair(3 * i as u32 + 1, t)).collect();
        let source = Strides { layer: 1 << 20, block: 200 };
        let target = Strides { layer: target.0, block: target.1 };
        Pages { piece: 100, layers, source, target, pairs }
    }

    #[test]
    fn k8_spans_hold_each_piece_and_their_ends_are_pieces() {
        let pages = pages(3, (10_000, 100), &[9, 2, 70]);
        let spans = pages.spans().unwrap();
        assert_eq!(spans.target, 200..2 * 10_000 + 7000 + 100);
        assert_eq!(spans.source, 200..2 * (1 << 20) + 1400 + 100);
        let mut seen = Vec::new();
        let mut done = 0;
        while let Some((from, to, left)) = pages.at(done) {
            assert!(spans.source.start <= from && from + u64::from(left) <= spans.source.end);
            assert!(spans.target.start <= to && to + u64::from(left) <= spans.target.end);
            seen.push(to);
            done += u64::from(left);
        }
        assert_eq!(done, u64::from(pages.bytes().unwrap()));
        assert_eq!(seen, [900, 200, 7000, 10_900, 10_200, 17_000, 20_900, 20_200, 27_000]);
        assert_eq!(pages.at(150).unwrap(), (4 * 200 + 50, 250, 50), "in the middle of a piece");
    }

    /// Strides that nothing is said about, where there is one layer or one block: nobody multiplies them by more than that.
    #[test]
    fn b1_the_end_of_pages_is_found_whatever_their_strides() {
        for (layer, block, layers, targets) in
            [(u64::MAX, 100, 1, &[0, 1][..]), (1 << 63, 100, 2, &[0]), (u64::MAX, u64::MAX, 1, &[0])]
        {
            let pages = pages(layers, (layer, block), targets);
            assert!(pages.spans().is_some(), "{pages:?}");
            let all = u64::from(pages.bytes().unwrap());
            assert_eq!(pages.targets_of(0).map(|(_, len)| u64::from(len)).sum::<u64>(), all);
            assert_eq!((pages.at(all), pages.at(all + 100), pages.at(u64::MAX)), (None, None, None));
        }
    }

    #[test]
    fn b1_targets_that_meet_are_refused() {
        for (what, pages, sane) in [
            ("layers behind each other", pages(2, (800, 100), &[0, 7]), true),
            ("layers within a block", pages(2, (100, 200), &[0, 7]), true),
            ("the next layer inside of this one", pages(2, (700, 100), &[0, 7]), false),
            ("a block twice", pages(1, (0, 100), &[5, 6, 5]), false),
            ("a far block twice", pages(1, (0, 100), &[5, u32::MAX, 6, u32::MAX]), false),
            ("far blocks", pages(1, (0, 100), &[5, u32::MAX]), true),
            ("blocks that overlap", pages(1, (0, 99), &[5, 6]), false),
            ("one block of no stride", pages(1, (0, 0), &[5]), true),
            ("layers of no stride", pages(2, (0, 100), &[5]), false),
            ("no layer", pages(0, (800, 100), &[5]), false),
            ("no pair", pages(1, (800, 100), &[]), false),
            ("beyond 64 bits", pages(1, (0, u64::MAX), &[1, 2]), false),
            ("more than 32 bits of bytes", pages(1 << 30, (800, 100), &[1]), false),
        ] {
            assert_eq!(pages.spans().is_some(), sane, "{what}");
        }
        let many: Vec<u32> = (0..=MAX_PAIRS as u32).collect();
        assert!(pages(1, (0, 100), &many).spans().is_none());
        assert!(pages(1, (0, 100), &many[1..]).spans().is_some());
    }
}
