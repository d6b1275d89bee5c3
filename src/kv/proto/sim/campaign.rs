//! Many seeds on all cores, and what is said about a failure. `tests/sim` runs this optimised.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Script;
use super::reduce::{self, as_list, parse_list};
use super::shared::is_drawn;
use super::summary::Summary;
use super::world::World;

const HELP: &str = "\
cargo test -p landfall-sim -- [options]

  --seeds N       so many seeds (default 20000)
  --from N        the first of them (default 0)
  --minutes M     until M minutes have passed, instead
  --threads N     (default: one a core)
  --find          a failure is what is looked for: says after how many seeds, and succeeds
  --seed N        one seed, again
  --trace         and print what happens
  --without LIST  without these moves, as in 3,5-9
  --link KIND     all in shared memory (shm), or none (device); as drawn by the seed, one in three is";

/// A run that has failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) script: Script,
    pub(super) what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Script { seed, without, shared, .. } = &self.script;
        write!(f, "{}\nrepeat it: cargo test -p landfall-sim -- --seed {seed}", self.what)?;
        if !without.is_empty() {
            write!(f, " --without {}", as_list(without))?;
        }
        match is_drawn(&self.script) {
            true => write!(f, " --link shm"),
            false if shared.is_some() => write!(f, " --link device"),
            false => Ok(()),
        }
    }
}

/// Runs one script; a panic becomes a failure.
pub(super) fn attempt(script: &Script) -> Result<Summary, Failure> {
    let run = || World::new(script).run();
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let what = panic.downcast_ref::<String>().map(String::as_str);
        let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        Failure { script: script.clone(), what: what.to_owned() }
    })
}

/// Runs seeds until the first failure.
pub(super) fn run(seeds: Range<u64>, threads: usize) -> Result<Summary, Box<Failure>> {
    run_until(seeds, None, threads, None).0
}

/// Also answers how many seeds were run.
fn run_until(
    seeds: Range<u64>,
    shared: Option<bool>,
    threads: usize,
    until: Option<Instant>,
) -> (Result<Summary, Box<Failure>>, u64) {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new((Summary::default(), None::<Failure>));
    let lock = || total.lock().unwrap_or_else(|e| e.into_inner());
    let work = || {
        let mut mine = Summary::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || until.is_some_and(|u| Instant::now() >= u) {
                break;
            }
            match attempt(&Script { seed, shared, ..Script::default() }) {
                Ok(summary) => mine.add(&summary),
                Err(failure) => {
                    // The others come to their end; the smallest seed is told.
                    next.fetch_max(seeds.end, Ordering::Relaxed);
                    let first = &mut lock().1;
                    if first.as_ref().is_none_or(|f| failure.script.seed < f.script.seed) {
                        *first = Some(failure);
                    }
                }
            }
            if lock().1.is_some() {
                break;
            }
        }
        lock().0.add(&mine);
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    let (summary, failure) = total.into_inner().unwrap_or_else(|e| e.into_inner());
    match failure {
        Some(f) => {
            let ran = f.script.seed - seeds.start + 1;
            (Err(Box::new(f)), ran)
        }
        None => (Ok(summary), next.into_inner().min(seeds.end) - seeds.start),
    }
}

struct Options {
    seeds: u64,
    from: u64,
    shared: Option<bool>,
    minutes: Option<u64>,
    threads: usize,
    find: bool,
    one: Option<Script>,
}

/// What a test harness may ask of its programs, also of this one: answers whether there is nothing to run.
fn as_test(args: &mut Vec<String>) -> bool {
    const NAME: &str = "k1_to_k8_hold_under_seeds";
    if args.iter().any(|a| a == "--list") {
        println!("{NAME}: test");
        return true;
    }
    args.retain(|a| !matches!(a.as_str(), "--nocapture" | "--no-capture" | "--quiet" | "-q" | "--exact"));
    // A filter.
    if args.first().is_some_and(|a| !a.starts_with('-')) {
        return !NAME.contains(&args.remove(0));
    }
    false
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut o =
        Options { seeds: 20_000, from: 0, shared: None, minutes: None, threads, find: false, one: None };
    let (mut without, mut trace) = (None, false);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--find" => o.find = true,
            "--trace" => trace = true,
            _ => {}
        }
        if matches!(arg.as_str(), "--find" | "--trace") {
            continue;
        }
        let value = args.next().ok_or_else(|| format!("{arg}: unknown, or its value is missing\n{HELP}"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{arg} {value}: not a number"));
        match arg.as_str() {
            "--seeds" => o.seeds = number()?,
            "--from" => o.from = number()?,
            "--minutes" => o.minutes = Some(number()?),
            "--threads" => o.threads = number()? as usize,
            "--seed" => o.one = Some(Script { seed: number()?, ..Script::default() }),
            "--link" => {
                o.shared = match value.as_str() {
                    "shm" => Some(true),
                    "device" => Some(false),
                    _ => return Err(format!("--link {value}: neither shm nor device")),
                }
            }
            "--without" => without = Some(parse_list(&value).ok_or(format!("--without {value}: no list"))?),
            _ => return Err(format!("{arg}: unknown\n{HELP}")),
        }
    }
    match &mut o.one {
        Some(script) => {
            script.without = without.unwrap_or_default();
            script.trace = trace;
            script.shared = o.shared;
        }
        None if trace || without.is_some() => return Err("--trace and --without need --seed".to_owned()),
        None => {}
    }
    Ok(o)
}

/// The program of `tests/sim`.
#[allow(dead_code, reason = "called there only")]
pub(crate) fn main() -> Result<(), String> {
    let mut args = std::env::args().skip(1).collect();
    if as_test(&mut args) {
        return Ok(());
    }
    let o = options(args.into_iter())?;
    if let Some(script) = o.one {
        // The panic shows where.
        let summary = attempt(&script).map_err(|f| f.to_string())?;
        println!("seed {} passes: {summary}", script.seed);
        return Ok(());
    }
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let (seeds, until) = match o.minutes {
        Some(m) => (o.from..u64::MAX, Some(start + Duration::from_secs(60 * m))),
        None => (o.from..o.from.saturating_add(o.seeds), None),
    };
    let (result, ran) = run_until(seeds, o.shared, o.threads, until);
    let seconds = start.elapsed().as_secs_f64();
    let rate =
        format!("{ran} seeds in {seconds:.1} s, {:.0} a second, {} threads", ran as f64 / seconds, o.threads);
    let outcome = match result {
        Ok(summary) if o.find => Err(format!("nothing found: {rate}: {summary}")),
        Ok(summary) => {
            println!("{rate}: {summary}");
            Ok(())
        }
        Err(failure) if o.find => {
            println!("found after {ran} seeds: {}", failure.what.lines().next().unwrap_or_default());
            Ok(())
        }
        Err(failure) => Err(format!("after {ran} seeds: {}", reduce::reduce(*failure))),
    };
    std::panic::set_hook(hook);
    outcome
}
