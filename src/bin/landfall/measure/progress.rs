//! A line at the foot of a table, drawn over itself while something is measured. On a terminal only.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::units::digits;
use crate::output::{Error, Output};

/// Cells of the bar.
const WIDTH: usize = 24;
const EVERY: Duration = Duration::from_millis(200);
/// To the beginning of the line, and clear to its end.
const CLEAR: &str = "\r\x1b[K";

/// How far a list of measurements is.
pub(crate) struct Progress {
    output: Output,
    all: usize,
    done: usize,
    /// Of one measurement.
    expected: Duration,
    /// Bytes that have landed in the one that is under way.
    pub(crate) seen: AtomicU64,
}

impl Progress {
    pub(crate) fn new(output: &Output, all: usize, expected: Duration) -> Self {
        Self { output: *output, all, done: 0, expected, seen: AtomicU64::new(0) }
    }

    /// Shows what `work` is at until it is done.
    pub(crate) async fn during<T>(
        &self,
        what: &str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        self.seen.store(0, Ordering::Relaxed);
        if !self.output.is_live() {
            return work.await;
        }
        let begin = Instant::now();
        let drawing = async {
            let mut tick = tokio::time::interval(EVERY);
            let (mut last, mut at) = (0, begin);
            loop {
                tick.tick().await;
                let (seen, now) = (self.seen.load(Ordering::Relaxed), Instant::now());
                let rate = seen.saturating_sub(last) as f64 / (now - at).as_secs_f64().max(1e-9) / 1e9;
                (last, at) = (seen, now);
                let part = (begin.elapsed().as_secs_f64() / self.expected.as_secs_f64().max(1e-9)).min(1.0);
                let line = self.line(what, part, rate);
                // Whoever looks at the table may have gone; the rows will tell.
                let _ = self.output.print(&format!("{CLEAR}{line}"));
            }
        };
        let result = tokio::select! {
            result = work => result,
            never = drawing => never,
        };
        self.output.print(CLEAR)?;
        result
    }

    pub(crate) fn next(&mut self) {
        self.done += 1;
    }

    fn line(&self, what: &str, part: f64, gb_s: f64) -> String {
        let whole = (self.done as f64 + part) / self.all.max(1) as f64;
        let filled = ((whole * WIDTH as f64) as usize).min(WIDTH);
        format!(
            "[{}{}] {}/{} {what}, {} GB/s now",
            "#".repeat(filled),
            "-".repeat(WIDTH - filled),
            self.done + 1,
            self.all,
            digits(gb_s)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills_from_nothing_to_all() {
        let mut progress = Progress::new(&Output::new(false), 4, Duration::from_secs(1));
        assert_eq!(progress.line("64 KiB", 0.0, 0.0), "[------------------------] 1/4 64 KiB, 0 GB/s now");
        progress.next();
        progress.next();
        assert!(progress.line("a", 0.0, 1.0).starts_with("[############------------] 3/4"));
        progress.next();
        assert!(progress.line("a", 1.0, 1.0).starts_with("[########################] 4/4"));
    }
}
