//! What a process must have back after a round: descriptors, mappings, tasks, threads.

use std::fmt;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// How long a process may take to let go of everything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Mappings are counted by their size too: the kernel joins neighbours. The allocator's own are kept out by the settings that
/// workers are started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    pub descriptors: usize,
    pub mapped_kib: u64,
    /// Mappings of memfds, which are what is shared: our own, and those of peers.
    pub memfds: usize,
    pub tasks: usize,
    pub threads: usize,
}

impl Levels {
    pub fn now() -> std::io::Result<Self> {
        let count = |path: &str| Ok::<_, std::io::Error>(std::fs::read_dir(path)?.count());
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        Ok(Self {
            descriptors: count("/proc/self/fd")?,
            mapped_kib: maps.lines().filter(|line| is_ours(line)).map(kib).sum(),
            memfds: maps.lines().filter(|line| name(line).starts_with(MEMFD)).count(),
            tasks: tokio::runtime::Handle::current().metrics().num_alive_tasks(),
            threads: count("/proc/self/task")?,
        })
    }

    /// Waits until nothing is above `before`. The error says what still is.
    pub async fn settle(before: Self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let now = Self::now().map_err(|e| format!("reading /proc: {e}"))?;
            if now.is_within(&before) {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("{PATIENCE:?} after a round: {now}; before: {before}"));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.mapped_kib <= before.mapped_kib
            && self.memfds <= before.memfds
            && self.tasks <= before.tasks
            && self.threads <= before.threads
    }
}

/// The C library keeps the stacks of some threads that have ended, for the next ones: as many as ever run at once are mapped
/// from the beginning, so that they are no news later.
pub fn map_stacks() {
    const THREADS: usize = 4;
    let all = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| all.wait());
        }
    });
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, mapped_kib, memfds, tasks, threads } = self;
        write!(
            f,
            "{descriptors} descriptors, {mapped_kib} KiB mapped, {memfds} memfds mapped, {tasks} tasks, {threads} threads"
        )
    }
}

const MEMFD: &str = "/memfd:";

fn name(line: &str) -> &str {
    line.split_ascii_whitespace().nth(5).unwrap_or("")
}

/// Not of a file or the kernel, nor the heap.
fn is_ours(line: &str) -> bool {
    let name = name(line);
    name.is_empty() || name.starts_with(MEMFD) || name.starts_with("[anon:")
}

fn kib(line: &str) -> u64 {
    let range = line.split_ascii_whitespace().next().unwrap_or("");
    let Some((from, to)) = range.split_once('-') else { return 0 };
    let at = |text| u64::from_str_radix(text, 16).unwrap_or(0);
    at(to).saturating_sub(at(from)) >> 10
}
