//! Mapped transfers: which tokens go where, drawn; and what a naive copy of them leaves in the target's blocks.

use landfall::kv::{Layout, Mapping, TokenSpan};

use super::content::{GUARD, Rng, block, head};

/// The most tokens of a transfer, of which each head may be a work request.
const TOKENS: u64 = 24;

/// What a mapped transfer copies.
#[derive(Clone, Debug)]
pub struct Stretches {
    pub spans: Vec<TokenSpan>,
    /// Blocks that it takes at each end.
    pub source_blocks: u32,
    pub target_blocks: u32,
}

impl Stretches {
    /// In at most so many blocks at each end: all of the source's blocks, their beginning, or tokens from anywhere to anywhere.
    pub fn draw(mapping: &Mapping, most: u64, rng: &mut Rng) -> Self {
        let (source, target) = (mapping.source().tokens(), mapping.target().tokens());
        let (from, to) = (most * u64::from(source), most * u64::from(target));
        let all = from.min(to).min(TOKENS);
        let spans = match rng.range(0, 2) {
            // Whole blocks of the source, where one of them fits.
            0 if all >= u64::from(source) => {
                let blocks = rng.range(1, all / u64::from(source)) as u32;
                vec![TokenSpan { source: 0, target: 0, tokens: blocks * source }]
            }
            0 | 1 => vec![TokenSpan { source: 0, target: 0, tokens: rng.range(1, all) as u32 }],
            _ => anywhere(from, to, rng),
        };
        let blocks = |of: fn(&TokenSpan) -> u32, page: u32| {
            spans.iter().map(|span| of(span) + span.tokens).max().unwrap_or(1).div_ceil(page)
        };
        let (source_blocks, target_blocks) = (blocks(|s| s.source, source), blocks(|s| s.target, target));
        Self { spans, source_blocks, target_blocks }
    }

    pub fn tokens(&self) -> u64 {
        self.spans.iter().map(|span| u64::from(span.tokens)).sum()
    }

    /// From the first token on to the first one on, and how many, where it is no more than that.
    pub fn beginning(&self) -> Option<u32> {
        match self.spans[..] {
            [TokenSpan { source: 0, target: 0, tokens }] => Some(tokens),
            _ => None,
        }
    }
}

/// A few spans, which do not meet at the target, in any order.
fn anywhere(from: u64, to: u64, rng: &mut Rng) -> Vec<TokenSpan> {
    let mut spans = Vec::new();
    let mut at = 0;
    for _ in 0..rng.range(1, 3) {
        at += rng.range(0, 3);
        let left = to.saturating_sub(at).min(from).min(TOKENS / 3);
        if left == 0 {
            break;
        }
        let tokens = rng.range(1, left);
        let source = rng.range(0, from - tokens);
        let span = TokenSpan { source: source as u32, target: at as u32, tokens: tokens as u32 };
        spans.insert(rng.range(0, spans.len() as u64) as usize, span);
        at += tokens;
    }
    if spans.is_empty() {
        spans.push(TokenSpan { source: 0, target: 0, tokens: 1 });
    }
    spans
}

/// A block of the target, which held `GUARD`, after the naive copy: head by head of each token, where both have it.
pub fn copied(
    tag: u64,
    mapping: &Mapping,
    spans: &[TokenSpan],
    target: &Layout,
    layer: u32,
    position: u32,
) -> Vec<u8> {
    let mut bytes = block(target, GUARD, layer, position);
    let shape = mapping.target();
    for span in spans {
        for token in 0..span.tokens {
            let (from, to) = (span.source + token, span.target + token);
            if to / shape.tokens() != position {
                continue;
            }
            for plane in 0..shape.planes() {
                for number in mapping.heads() {
                    let at = shape.offset(plane, to % shape.tokens(), number).expect("it is there") as usize;
                    let head = head(tag, layer, plane, from, number, shape.head_bytes());
                    bytes[at..at + head.len()].copy_from_slice(&head);
                }
            }
        }
    }
    bytes
}
