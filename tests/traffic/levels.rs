//! What a process must have back after a round: descriptors, mappings, tasks, threads.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// How long a process may take to let go of everything.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a process whose levels are looked at is started with: one arena, nothing of it by mmap, and no stack kept of threads that
/// have ended, but for those that end at the same moment. Then each mapping is one that somebody asked for.
pub const SETTINGS: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=0"),
];

/// Mappings are counted by their size too: the kernel joins neighbours. The allocator's own, and the stacks of threads that have
/// ended, are kept out by the settings that workers are started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    /// How many there are of each kind: `socket`, `/dev/infiniband/uverbs0`, `anon_inode:[eventfd]`.
    pub descriptors: BTreeMap<String, usize>,
    pub mapped_kib: u64,
    /// Mappings of memfds, which are what is shared: our own, and those of peers.
    pub memfds: usize,
    pub tasks: usize,
    pub threads: usize,
}

impl Levels {
    pub fn now() -> std::io::Result<Self> {
        // A thread that ends unmaps the stacks of those that have ended before, not its own. One that is joined leaves none.
        let _ = std::thread::spawn(|| ()).join();
        let count = |path: &str| Ok::<_, std::io::Error>(std::fs::read_dir(path)?.count());
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        Ok(Self {
            descriptors: descriptors()?,
            mapped_kib: maps.lines().filter(|line| is_ours(line)).map(kib).sum(),
            memfds: maps.lines().filter(|line| name(line).starts_with(MEMFD)).count(),
            tasks: tokio::runtime::Handle::current().metrics().num_alive_tasks(),
            threads: count("/proc/self/task")?,
        })
    }

    /// Waits until nothing is above `before`. The error says what still is.
    pub async fn settle(before: &Self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let now = Self::now().map_err(|e| format!("reading /proc: {e}"))?;
            if now.is_within(before) {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("{PATIENCE:?} after a round: {now}; before: {before}"));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn opened(&self) -> usize {
        self.descriptors.values().sum()
    }

    fn is_within(&self, before: &Self) -> bool {
        self.opened() <= before.opened()
            && self.mapped_kib <= before.mapped_kib
            && self.memfds <= before.memfds
            && self.tasks <= before.tasks
            && self.threads <= before.threads
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, mapped_kib, memfds, tasks, threads } = self;
        write!(f, "{} descriptors (", self.opened())?;
        for (at, (kind, count)) in descriptors.iter().enumerate() {
            write!(f, "{}{count} {kind}", if at == 0 { "" } else { ", " })?;
        }
        write!(f, "), {mapped_kib} KiB mapped, {memfds} memfds mapped, {tasks} tasks, {threads} threads")
    }
}

const MEMFD: &str = "/memfd:";

/// By what they are open to, without the numbers of sockets and pipes.
fn descriptors() -> std::io::Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        // What was closed meanwhile is not there.
        let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy();
        let kind = target
            .split_once(":[")
            .filter(|(kind, _)| *kind != "anon_inode")
            .map_or(&*target, |(kind, _)| kind);
        *kinds.entry(kind.to_owned()).or_default() += 1;
    }
    Ok(kinds)
}

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
