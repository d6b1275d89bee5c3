//! Grants: the blocks that their owner gives a peer to write to, or to read from, once.
//!
//! A value, without any I/O. It is issued by the owner's endpoint, travels by whatever the application uses (serde,
//! or [`Grant::to_bytes`]), and is checked by the peer's library before anything is posted (K6). The keys of the
//! memory are not in it: they were exchanged when the channel was connected.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::wire::{self, Reader};

/// What a grant is for. Each is used once, and by the call for its kind only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GrantKind {
    /// One write: [`KvChannel::grant`](super::KvChannel::grant), [`KvChannel::write`](super::KvChannel::write).
    #[default]
    Write,
    /// One read: [`KvChannel::grant_read`](super::KvChannel::grant_read), [`KvChannel::read`](super::KvChannel::read).
    Read,
    /// A write layer by layer, of so many layers: [`KvChannel::write_layers`](super::KvChannel::write_layers). It has as many
    /// numbers, from its [`id`](Grant::id) on, one for each layer.
    Layers(u32),
}

impl GrantKind {
    /// For errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "one write",
            Self::Read => "one read",
            Self::Layers(_) => "a write by layer",
        }
    }
}

/// Blocks of its owner's pool, in an order: position `i` of a write goes to the `i`-th block, and of a read comes from it.
///
/// Bound to the two endpoints by their epochs and to their connection, and used once: `KvChannel` refuses a grant of an
/// endpoint that has restarted, one that is bound to somebody else, one of an earlier connection, and one that was used
/// before. No block is in it twice.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Grant {
    owner: u64,
    bound: u64,
    connection: u64,
    id: u64,
    kind: GrantKind,
    /// First blocks and numbers of blocks. Plans of writes share them.
    runs: Arc<Vec<(u32, u32)>>,
    /// The position behind the last block of each run.
    ends: Arc<Vec<u32>>,
    /// All blocks are below.
    limit: u32,
}

/// Whom a grant is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    /// Epoch of the endpoint that issues it.
    pub(crate) owner: u64,
    /// Epoch of the endpoint that may use it.
    pub(crate) bound: u64,
    /// The connection between them.
    pub(crate) connection: u64,
}

/// What is not a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// The bytes end early, go on too long, or hold a number that does not fit.
    #[error("not a grant: {what} at byte {at}; pass the bytes of Grant::to_bytes unchanged")]
    Malformed {
        /// What is wrong.
        what: &'static str,
        /// Where.
        at: usize,
    },
    /// The bytes are of a later format.
    #[error("a grant of format {theirs}, this side knows {ours}; run one landfall version on both")]
    Version {
        /// The format that this crate reads.
        ours: u8,
        /// The format found.
        theirs: u8,
    },
    /// A run of no blocks, or one that passes the last index.
    #[error("{len} blocks from {start} on are no run of blocks")]
    Run {
        /// First block.
        start: u32,
        /// Number of blocks.
        len: u32,
    },
    /// A kind of grant that this version does not know, or one of no layers.
    #[error("a grant of unknown kind {kind}; run one landfall version on both sides")]
    Kind {
        /// The kind's number.
        kind: u8,
    },
    /// A block is in it twice: what lands there would depend on timing.
    #[error("block {block} is granted twice; list every block once")]
    Twice {
        /// The block.
        block: u32,
    },
}

/// Without a kind: for one write.
const FORMAT: u8 = 1;
/// With the kind behind it. A grant for one write has the first format, which every version reads.
const FORMAT_KIND: u8 = 2;
const KIND_READ: u8 = 1;
const KIND_LAYERS: u8 = 2;

impl Grant {
    /// Grants `blocks` in that order.
    #[cfg(test)]
    pub(crate) fn new(
        binding: Binding,
        id: u64,
        blocks: impl IntoIterator<Item = u32>,
    ) -> Result<Self, GrantError> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for block in blocks {
            match runs.last_mut() {
                Some((start, len)) if u64::from(*start) + u64::from(*len) == u64::from(block) => *len += 1,
                _ => runs.push((block, 1)),
            }
        }
        Self::from_runs(binding, id, runs)
    }

    /// Grants runs of `(first block, number of blocks)`, in that order.
    pub(crate) fn from_runs(binding: Binding, id: u64, runs: Vec<(u32, u32)>) -> Result<Self, GrantError> {
        let mut total = 0u32;
        let mut ends = Vec::with_capacity(runs.len());
        for &(start, len) in &runs {
            // The last block is at most u32::MAX - 1, so that an end is always a u32.
            let next = total.checked_add(len).filter(|_| len != 0 && start.checked_add(len).is_some());
            total = next.ok_or(GrantError::Run { start, len })?;
            ends.push(total);
        }
        let mut sorted: Vec<_> = runs.iter().map(|&(start, len)| (start, start + len)).collect();
        sorted.sort_unstable();
        if let Some(w) = sorted.windows(2).find(|w| w[1].0 < w[0].1) {
            return Err(GrantError::Twice { block: w[1].0 });
        }
        // None overlaps another.
        let limit = sorted.last().map_or(0, |run| run.1);
        let Binding { owner, bound, connection } = binding;
        let (runs, ends) = (Arc::new(runs), Arc::new(ends));
        Ok(Self { owner, bound, connection, id, kind: GrantKind::Write, runs, ends, limit })
    }

    /// The same for another use, if there is such a use: a grant has at least one layer, and 64 bits number them.
    pub(crate) fn of_kind(mut self, kind: GrantKind) -> Option<Self> {
        if let GrantKind::Layers(layers) = kind
            && (layers == 0 || self.id.checked_add(layers.into()).is_none())
        {
            return None;
        }
        self.kind = kind;
        Some(self)
    }

    /// The number that its issuer gave it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What it is for.
    pub fn kind(&self) -> GrantKind {
        self.kind
    }

    /// The numbers that it has.
    pub(crate) fn ids(&self) -> Range<u64> {
        // `of_kind` has checked the sum.
        match self.kind {
            GrantKind::Layers(layers) => self.id..self.id + u64::from(layers),
            _ => self.id..self.id.saturating_add(1),
        }
    }

    /// The epoch of the endpoint that issued it, and whose the blocks are.
    pub fn owner_epoch(&self) -> u64 {
        self.owner
    }

    /// The epoch of the endpoint that may use it.
    pub fn bound_epoch(&self) -> u64 {
        self.bound
    }

    /// The connection that it was issued on: it dies with that.
    pub fn connection(&self) -> u64 {
        self.connection
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block ids in the owner's pool, in order of position.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs().flat_map(|(start, len)| start..start + len)
    }

    /// The runs of neighbouring blocks, in order: `(first block, number of blocks)`.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + '_ {
        self.runs.iter().copied()
    }

    pub(crate) fn shared_runs(&self) -> &Arc<Vec<(u32, u32)>> {
        &self.runs
    }

    /// All blocks are below this one.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// The block id at `position`, in the owner's pool; `None` beyond the end.
    pub fn block_at(&self, position: u32) -> Option<u32> {
        self.run_at(position).map(|(block, _)| block)
    }

    /// The block at `position`, and how many neighbours from it on are granted in sequence.
    pub(crate) fn run_at(&self, position: u32) -> Option<(u32, u32)> {
        // `ends` is sorted: the first run that ends behind the position holds it.
        let run = self.ends.partition_point(|&end| end <= position);
        let &(start, len) = self.runs.get(run)?;
        let into = position - (self.ends[run] - len);
        Some((start + into, len - into))
    }

    /// A compact form: a few bytes a run.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32 + self.runs.len() * 4);
        match self.kind {
            GrantKind::Write => out.push(FORMAT),
            GrantKind::Read => out.extend([FORMAT_KIND, KIND_READ]),
            GrantKind::Layers(layers) => {
                out.extend([FORMAT_KIND, KIND_LAYERS]);
                out.extend(layers.to_le_bytes());
            }
        }
        for v in [self.owner, self.bound, self.connection, self.id] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        put_varint(&mut out, self.runs.len() as u64);
        let mut end = 0u32;
        for (start, len) in self.runs() {
            put_varint(&mut out, zigzag(i64::from(start) - i64::from(end)));
            put_varint(&mut out, len.into());
            end = start + len;
        }
        out
    }

    /// The grant of [`Grant::to_bytes`]. Everything is checked: the bytes may come from anywhere.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, GrantError> {
        let mut r = Reader::new(bytes, "grant");
        let format = r.u8().map_err(early_end)?;
        let kind = match format {
            FORMAT => GrantKind::Write,
            FORMAT_KIND => match r.u8().map_err(early_end)? {
                KIND_READ => GrantKind::Read,
                KIND_LAYERS => GrantKind::Layers(r.u32().map_err(early_end)?),
                kind => return Err(GrantError::Kind { kind }),
            },
            theirs => return Err(GrantError::Version { ours: FORMAT_KIND, theirs }),
        };
        let mut word = || r.u64().map_err(early_end);
        let binding = Binding { owner: word()?, bound: word()?, connection: word()? };
        let id = word()?;
        let count = get_varint(&mut r)?;
        // A run takes two bytes or more, so that the count cannot make us allocate more than was sent.
        let most = r.remaining() / 2;
        let count = usize::try_from(count).ok().filter(|&n| n <= most);
        let count = count.ok_or(malformed(&r, "a count beyond the end"))?;
        let mut runs = Vec::with_capacity(count);
        let mut end = 0u32;
        for _ in 0..count {
            let step = unzigzag(get_varint(&mut r)?);
            let start = i64::from(end).checked_add(step).and_then(|s| u32::try_from(s).ok());
            let start = start.ok_or(malformed(&r, "a block index out of range"))?;
            let len =
                u32::try_from(get_varint(&mut r)?).map_err(|_| malformed(&r, "a length out of range"))?;
            end = start.checked_add(len).ok_or(GrantError::Run { start, len })?;
            runs.push((start, len));
        }
        if r.remaining() != 0 {
            return Err(malformed(&r, "bytes after the end"));
        }
        Self::from_runs(binding, id, runs)?.of_kind(kind).ok_or(GrantError::Kind { kind: KIND_LAYERS })
    }
}

impl fmt::Debug for Grant {
    /// Without the epochs, which identify the endpoints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("blocks", &self.len())
            .field("runs", &self.runs.len())
            .finish_non_exhaustive()
    }
}

/// The form of a grant in the user's own formats.
#[derive(Serialize, Deserialize)]
struct Parts {
    /// Not there in a grant of an earlier version, which is one to write.
    #[serde(default)]
    kind: GrantKind,
    owner: u64,
    bound: u64,
    connection: u64,
    id: u64,
    runs: Vec<(u32, u32)>,
}

impl From<Grant> for Parts {
    fn from(g: Grant) -> Self {
        let Grant { owner, bound, connection, id, kind, runs, .. } = g;
        Self { owner, bound, connection, id, kind, runs: Arc::unwrap_or_clone(runs) }
    }
}

impl TryFrom<Parts> for Grant {
    type Error = GrantError;

    fn try_from(p: Parts) -> Result<Self, GrantError> {
        let binding = Binding { owner: p.owner, bound: p.bound, connection: p.connection };
        let grant = Self::from_runs(binding, p.id, p.runs)?;
        grant.of_kind(p.kind).ok_or(GrantError::Kind { kind: KIND_LAYERS })
    }
}

fn malformed(r: &Reader<'_>, what: &'static str) -> GrantError {
    GrantError::Malformed { what, at: r.malformed().at }
}

fn early_end(e: wire::Malformed) -> GrantError {
    GrantError::Malformed { what: "the end", at: e.at }
}

fn get_varint(r: &mut Reader<'_>) -> Result<u64, GrantError> {
    let mut v = 0u64;
    for shift in (0..u64::BITS).step_by(7) {
        let b = r.u8().map_err(early_end)?;
        let part = u64::from(b & 0x7f);
        if part << shift >> shift != part {
            return Err(malformed(r, "a number too large"));
        }
        v |= part << shift;
        if b & 0x80 == 0 {
            return Ok(v);
        }
    }
    Err(malformed(r, "a number too long"))
}

fn put_varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

/// Small magnitudes of either sign to small numbers.
fn zigzag(v: i64) -> u64 {
    ((v << 1) ^ (v >> 63)) as u64
}

fn unzigzag(v: u64) -> i64 {
    (v >> 1) as i64 ^ -((v & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINDING: Binding = Binding { owner: u64::MAX, bound: 2, connection: 5 };

    fn grant(blocks: &[u32]) -> Grant {
        Grant::new(BINDING, 3, blocks.iter().copied()).unwrap()
    }

    #[test]
    fn k6_a_grant_keeps_order_and_merges_neighbours() {
        let g = grant(&[5, 6, 7, 2, 1, 0, 100]);
        assert_eq!(g.runs().collect::<Vec<_>>(), [(5, 3), (2, 1), (1, 1), (0, 1), (100, 1)]);
        let blocks: Vec<_> = g.blocks().collect();
        assert_eq!(blocks, [5, 6, 7, 2, 1, 0, 100]);
        assert_eq!((g.len(), g.is_empty()), (7, false));
        for (i, b) in blocks.iter().enumerate() {
            assert_eq!(g.block_at(i as u32), Some(*b));
        }
        assert_eq!(g.run_at(1), Some((6, 2)));
        assert_eq!((g.block_at(7), g.block_at(u32::MAX)), (None, None));
        assert_eq!((grant(&[]).block_at(0), grant(&[]).is_empty()), (None, true));
    }

    #[test]
    fn k6_bytes_and_serde_round_trip() {
        for blocks in [&[][..], &[0], &[u32::MAX - 1, 0, 7], &[9, 8, 7, 6], &[10, 11, 12, 500_000, 500_001]] {
            let g = grant(blocks);
            for g in [g.clone(), g.of_kind(GrantKind::Read).unwrap()] {
                assert_eq!(Grant::from_bytes(&g.to_bytes()).unwrap(), g);
                assert_eq!(serde_json::from_str::<Grant>(&serde_json::to_string(&g).unwrap()).unwrap(), g);
            }
        }
        // 8,192 blocks in runs of 47.
        let runs = (0..174).map(|i| ((i * 97) % 174 * 50, 47)).collect();
        let g = Grant::from_runs(BINDING, 3, runs).unwrap();
        assert!(g.to_bytes().len() < 32 + 174 * 5);
        assert_eq!(Grant::from_bytes(&g.to_bytes()).unwrap(), g);
    }

    #[test]
    fn k6_bytes_cut_anywhere_or_too_long_are_refused() {
        let v = grant(&[1, 2, 3, 70_000, 5]).to_bytes();
        for cut in 0..v.len() {
            assert!(
                matches!(Grant::from_bytes(&v[..cut]), Err(GrantError::Malformed { .. })),
                "cut at {cut}"
            );
        }
        let mut long = v.clone();
        long.push(0);
        assert!(matches!(
            Grant::from_bytes(&long),
            Err(GrantError::Malformed { what: "bytes after the end", .. })
        ));
        let mut later = v;
        later[0] = 3;
        assert_eq!(Grant::from_bytes(&later), Err(GrantError::Version { ours: 2, theirs: 3 }));
        let mut unknown = grant(&[1]).of_kind(GrantKind::Read).unwrap().to_bytes();
        unknown[1] = 9;
        assert_eq!(Grant::from_bytes(&unknown), Err(GrantError::Kind { kind: 9 }));
    }

    #[test]
    fn k6_grants_of_layers_round_trip_and_are_checked() {
        let g = grant(&[1, 2, 9]).of_kind(GrantKind::Layers(61)).unwrap();
        assert_eq!((g.kind(), g.ids()), (GrantKind::Layers(61), 3..64));
        let v = g.to_bytes();
        assert_eq!(Grant::from_bytes(&v).unwrap(), g);
        assert_eq!(serde_json::from_str::<Grant>(&serde_json::to_string(&g).unwrap()).unwrap(), g);
        for cut in 0..v.len() {
            assert!(Grant::from_bytes(&v[..cut]).is_err(), "cut at {cut}");
        }
        // No layers; an unknown kind; numbers that pass the last one.
        let with = |at: usize, byte: u8| {
            let mut v = v.clone();
            v[at] = byte;
            Grant::from_bytes(&v)
        };
        assert_eq!(with(2, 0), Err(GrantError::Kind { kind: KIND_LAYERS }));
        assert_eq!(with(1, 99), Err(GrantError::Kind { kind: 99 }));
        let last = Grant::new(BINDING, u64::MAX - 1, [1]).unwrap();
        assert_eq!(last.clone().of_kind(GrantKind::Layers(2)), None);
        assert!(last.of_kind(GrantKind::Layers(1)).is_some());
        assert!(
            serde_json::from_str::<Grant>(&serde_json::to_string(&g).unwrap().replace("61", "0")).is_err()
        );
    }

    #[test]
    fn k6_hostile_counts_runs_and_numbers_are_refused() {
        let with = |tail: &[u8]| {
            let mut v = grant(&[]).to_bytes();
            v.truncate(33);
            v.extend_from_slice(tail);
            Grant::from_bytes(&v)
        };
        // A count of 2^63, and one that its bytes cannot hold.
        assert!(with(&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1]).is_err());
        assert!(with(&[2, 0, 1, 4]).is_err());
        // Ten bytes that exceed 64 bits; eleven.
        assert!(with(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]).is_err());
        assert!(with(&[0x80; 11]).is_err());
        // A negative block; a run of nothing; a run past the end.
        assert!(with(&[1, 1, 1]).is_err());
        assert_eq!(with(&[1, 0, 0]), Err(GrantError::Run { start: 0, len: 0 }));
        assert!(with(&[1, 2, 0xff, 0xff, 0xff, 0xff, 0x0f]).is_err());
        // A block twice: 0..2, then back to 1.
        assert_eq!(with(&[2, 0, 2, 1, 1]), Err(GrantError::Twice { block: 1 }));
        assert_eq!(with(&[1, 0, 2]).unwrap().blocks().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn k6_serde_checks_what_the_codec_checks() {
        let json = r#"{"owner":1,"bound":2,"connection":5,"id":3,"runs":[[4,2],[5,1]]}"#;
        let e = serde_json::from_str::<Grant>(json).unwrap_err().to_string();
        assert!(e.contains("block 5 is granted twice"), "{e}");
        assert!(serde_json::from_str::<Grant>(&json.replace("[5,1]", "[4294967295,1]")).is_err());
        let old: Grant = serde_json::from_str(&json.replace("[5,1]", "[6,1]")).unwrap();
        assert_eq!(old.kind(), GrantKind::Write);
    }

    #[test]
    fn k6_debug_is_short() {
        assert_eq!(
            format!("{:?}", grant(&[1, 2, 4])),
            "Grant { id: 3, kind: Write, blocks: 3, runs: 2, .. }"
        );
    }
}
