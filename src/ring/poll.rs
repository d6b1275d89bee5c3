//! Poll, arm, poll again: how a driver comes to know that it may sleep (R3).
//!
//! A completion that comes between the last poll and the arm raises no event, so that a queue counts as empty only when it
//! was empty once more after it was armed. Whoever sleeps on less loses a wake-up. Imports no tokio.

use std::io;

use crate::provider::Armed;
use crate::reactor::Step;

/// What one poll has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    Some,
    /// As much as a poll can take: there may be more.
    Full,
}

/// A queue of completions, and what becomes of them.
pub(super) trait Polled {
    /// Takes completions and hands them on.
    fn poll(&mut self) -> io::Result<Found>;
    /// A poll has found nothing.
    fn was_empty(&mut self);
    fn arm(&mut self) -> io::Result<Armed>;
}

/// Polls until there is nothing, at most `batches` times. With `arm`, `Idle` means: armed, and empty after that.
pub(super) fn poll_and_arm(queue: &mut impl Polled, batches: usize, arm: bool) -> io::Result<Step> {
    let mut armed = false;
    for _ in 0..batches {
        match queue.poll()? {
            Found::Nothing => {}
            // Whoever spins looks again by itself, unless this was what it waits for.
            Found::Some if !arm => return Ok(Step::Idle),
            Found::Some | Found::Full => {
                armed = false;
                continue;
            }
        }
        queue.was_empty();
        if !arm {
            return Ok(Step::Idle);
        }
        // On a software transport the poll after the arm may have stopped in the middle of I/O that raises no event any
        // more; arming once more asks for that too.
        match queue.arm()? {
            Armed::More => return Ok(Step::More),
            Armed::Armed if armed => return Ok(Step::Idle),
            Armed::Armed => armed = true,
        }
    }
    Ok(Step::More)
}
