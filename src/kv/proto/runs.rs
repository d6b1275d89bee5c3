//! Runs: neighbours at the source that go to neighbours at the target, in units of blocks, or of tokens where a plan is mapped.

use std::sync::Arc;

/// Runs that a list may become more by, when it is cut, until it grows.
const SPLITS: usize = 64;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) count: u32,
}

/// Runs, the first of them in place: most plans of one block, or of neighbours, allocate nothing. The plans of several
/// layers share the others.
#[derive(Clone, Debug)]
pub(super) enum Runs {
    Own {
        first: Option<Run>,
        rest: Option<Arc<Vec<Run>>>,
    },
    /// Each of the source goes to that in its place of the target, which is as long. The target may have more.
    Alike {
        src: Arc<Vec<(u32, u32)>>,
        dst: Arc<Vec<(u32, u32)>>,
    },
}

impl Runs {
    /// Blocks of the source, `(first, count)` each, to those in their places of the target, which has as many or more. Lists of which the
    /// runs are as long, one after the other, are used as they are; others are cut where either has an end.
    pub(super) fn of_lists(src: &Arc<Vec<(u32, u32)>>, dst: &Arc<Vec<(u32, u32)>>) -> Self {
        if alike(src, dst) == src.len() {
            return Self::Alike { src: src.clone(), dst: dst.clone() };
        }
        let blocks: u64 = src.iter().map(|run| u64::from(run.1)).sum();
        // As a rule that is enough.
        let room = (src.len().max(dst.len()) + SPLITS).min(usize::try_from(blocks).unwrap_or(usize::MAX));
        let (mut from, mut to) = (Vec::with_capacity(room), Vec::with_capacity(room));
        cut(src, dst, &mut from, &mut to);
        Self::Alike { src: from.into(), dst: to.into() }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Own { first, rest } => {
                usize::from(first.is_some()) + rest.as_ref().map_or(0, |rest| rest.len())
            }
            Self::Alike { src, .. } => src.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn get(&self, index: usize) -> Option<Run> {
        match self {
            Self::Own { first, rest } => match index.checked_sub(1) {
                None => *first,
                Some(i) => rest.as_ref()?.get(i).copied(),
            },
            Self::Alike { src, dst } => {
                let (&(src, count), &(dst, _)) = (src.get(index)?, dst.get(index)?);
                Some(Run { src, dst, count })
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Run> {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

/// How many runs from the first on are as long in both.
fn alike(src: &[(u32, u32)], dst: &[(u32, u32)]) -> usize {
    src.iter().zip(dst).take_while(|(from, to)| from.1 == to.1 && from.1 > 0).count()
}

/// Adds both lists to `from` and `to`, cut to what they have in common. Long lists are as a rule alike for the most part.
fn cut<'a>(
    mut src: &'a [(u32, u32)],
    mut dst: &'a [(u32, u32)],
    from: &mut Vec<(u32, u32)>,
    to: &mut Vec<(u32, u32)>,
) {
    loop {
        let same = alike(src, dst);
        from.extend_from_slice(&src[..same]);
        to.extend_from_slice(&dst[..same]);
        (src, dst) = (&src[same..], &dst[same..]);
        let (Some(mut s), Some(mut d)) = (next(&mut src), next(&mut dst)) else { return };
        // Up to where both have an end.
        loop {
            let count = s.1.min(d.1);
            from.push((s.0, count));
            to.push((d.0, count));
            // One that leaves 32 bits is refused, wherever it was cut.
            (s, d) = ((s.0.saturating_add(count), s.1 - count), (d.0.saturating_add(count), d.1 - count));
            if (s.1, d.1) == (0, 0) {
                break;
            }
            for (run, list) in [(&mut s, &mut src), (&mut d, &mut dst)] {
                if run.1 == 0 {
                    let Some(more) = next(list) else { return };
                    *run = more;
                }
            }
        }
    }
}

/// Takes the first run that is of something.
fn next(list: &mut &[(u32, u32)]) -> Option<(u32, u32)> {
    loop {
        let (&run, rest) = list.split_first()?;
        *list = rest;
        if run.1 > 0 {
            return Some(run);
        }
    }
}

impl Default for Runs {
    fn default() -> Self {
        Self::Own { first: None, rest: None }
    }
}

/// Runs that are being collected: each that continues the last one is merged with it.
#[derive(Debug, Default)]
pub(super) struct RunList {
    first: Option<Run>,
    rest: Vec<Run>,
}

impl RunList {
    /// Adds a run, of which the ends fit into 32 bits.
    pub(super) fn push(&mut self, run: Run) {
        match self.rest.last_mut().or(self.first.as_mut()) {
            // A merged run ends where this one does, so that its count fits, too.
            Some(last) if last.src + last.count == run.src && last.dst + last.count == run.dst => {
                last.count += run.count;
            }
            Some(_) => self.rest.push(run),
            None => self.first = Some(run),
        }
    }

    pub(super) fn freeze(self) -> Runs {
        Runs::Own { first: self.first, rest: (!self.rest.is_empty()).then(|| Arc::new(self.rest)) }
    }
}
