//! Runs: neighbours at the source that go to neighbours at the target, in units of blocks, or of tokens where a plan is mapped.

use std::sync::Arc;

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
