//! The reactor: one task a completion channel, which sleeps on the channel's descriptor and drives its owner.
//!
//! What is driven is a [`Drive`]: a ring's completion queue, or a KV channel with its own queue. The reactor knows
//! nothing of either. The task is the only waiter of the descriptor, and keeps the rules that make a lost wake-up
//! impossible (R3):
//!
//! 1. It sleeps only after [`Step::Idle`], which says: polled until empty, armed, polled again, still empty.
//! 2. When the descriptor is readable, it takes **all** events (until `WouldBlock`) and then drives.
//! 3. It clears tokio's cached readiness only after that. An edge that came since then is a newer readiness, which
//!    clearing does not touch.
//!
//! Between two slices of work it yields to the runtime (R9). When the runtime drops the task, what was driven is told
//! so and goes to the [reaper](reaper), a thread that lives only as long as there is something to drain (R7).
//! [events](events) is another reactor, of what a device says out of turn.

// As in `provider`: without RDMA devices nobody reads events.
#[cfg_attr(not(feature = "verbs"), allow(dead_code))]
pub(crate) mod events;
mod reaper;

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Sleep;

use crate::error::DeviceError;
use crate::provider;

/// What the reactor drives. Calls come from one task or thread at a time, except that the owner may call
/// [`drive`](Self::drive) itself (a spinning future): implementations lock.
pub(crate) trait Drive: Send + Sync + 'static {
    /// One bounded slice: polls the queues, completes, posts, arms. Wakers fire after its own locks are released.
    fn drive(&self, now: Instant) -> Step;

    /// When to drive again although no event comes.
    fn next_timeout(&self) -> Option<Instant>;

    /// The channel's events cannot be taken any more: ends everything, with the device where it is known to be gone and
    /// with `error` otherwise, and destroys the queue pairs. It is driven, by nudges and timeouts, until [`Step::Done`].
    fn channel_failed(&self, error: &io::Error);

    /// The runtime went away: moves the queue pairs to the error state, so that what is posted is flushed. The reaper
    /// drives from now on, until [`is_drained`](Self::is_drained). What ends from now on ends with `RuntimeGone`.
    fn runtime_gone(&self);

    /// Nothing is outstanding: the driver may end.
    fn is_drained(&self) -> bool;

    /// The reaper's patience is over: destroys the queue pairs without having drained them, and ends every operation.
    fn abandon(&self);
}

/// What is to be done after a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Polled empty, armed, and empty again: sleep until the descriptor is readable, a timeout, or a nudge.
    Idle,
    /// There is more to do: yield, then drive again.
    More,
    /// Closed and drained: the task ends.
    Done,
}

/// The owner's hold on its driver task.
#[derive(Clone, Debug)]
pub(crate) struct DriverHandle {
    nudge: Arc<Notify>,
}

impl DriverHandle {
    /// Has the task drive once, whether it sleeps or not. Nudges collapse; none is lost.
    pub(crate) fn nudge(&self) {
        self.nudge.notify_one();
    }
}

/// Starts the driver task of `channel` on `runtime`, which needs I/O and time enabled.
pub(crate) fn spawn(
    runtime: &Handle,
    channel: provider::Channel,
    drive: Arc<dyn Drive>,
) -> Result<DriverHandle, DeviceError> {
    let _entered = runtime.enter();
    let io = watch(&channel)?;
    let nudge = Arc::new(Notify::new());
    let driven = Driven { channel, drive, finished: false };
    runtime.spawn(run(io, nudge.clone(), driven));
    Ok(DriverHandle { nudge })
}

/// The descriptor of `channel`, registered with the runtime that this is called in: its waiters learn when it is readable.
pub(crate) fn watch(channel: &provider::Channel) -> Result<AsyncFd<ChannelFd>, DeviceError> {
    // tokio panics where a driver is not enabled, and has no call that asks.
    catch_unwind(AssertUnwindSafe(|| {
        drop(tokio::time::sleep(Duration::ZERO));
        // SAFETY: a channel has one descriptor, which stays open for as long as a clone of the channel lives; this
        // one lives in the `AsyncFd`.
        unsafe { AsyncFd::register_with_interest(ChannelFd(channel.clone()), Interest::READABLE) }
    }))
    .map_err(|_| DeviceError::NoRuntime)?
    .map_err(|e| DeviceError::Os {
        what: "registering a completion channel with the runtime",
        source: e.into(),
    })
}

#[derive(Debug)]
pub(crate) struct ChannelFd(provider::Channel);

impl ChannelFd {
    pub(crate) fn channel(&self) -> &provider::Channel {
        &self.0
    }
}

impl AsRawFd for ChannelFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.fd().as_raw_fd()
    }
}

/// Lives in the task. When it is dropped before the work was finished, the runtime is going away.
struct Driven {
    channel: provider::Channel,
    drive: Arc<dyn Drive>,
    finished: bool,
}

impl Drop for Driven {
    fn drop(&mut self) {
        if !self.finished {
            self.drive.runtime_gone();
            reaper::adopt(self.channel.clone(), self.drive.clone());
        }
    }
}

async fn run(io: AsyncFd<ChannelFd>, nudge: Arc<Notify>, mut driven: Driven) {
    let mut events = Some(&io);
    let mut readable: Option<AsyncFdReadyGuard<'_, ChannelFd>> = None;
    let mut alarm = Alarm { sleep: std::pin::pin!(tokio::time::sleep(Duration::ZERO)), set: None };
    loop {
        match driven.drive.drive(Instant::now()) {
            Step::More => {
                tokio::task::yield_now().await;
                continue;
            }
            Step::Done => {
                driven.finished = true;
                return;
            }
            Step::Idle => {}
        }
        if let Some(mut guard) = readable.take() {
            guard.clear_ready();
        }
        if let Some(at) = driven.drive.next_timeout() {
            alarm.no_later_than(at);
        }
        let mut sleep = Sleeper { events, nudged: std::pin::pin!(nudge.notified()), alarm: &mut alarm };
        match std::future::poll_fn(|cx| sleep.poll(cx)).await {
            Ok(None) => {}
            Ok(Some(guard)) => {
                if let Err(error) = driven.channel.drain_events() {
                    tracing::error!(%error, "a completion channel failed; its queue pairs are destroyed");
                    driven.drive.channel_failed(&error);
                    // It may stay readable for ever, and has nothing to tell.
                    events = None;
                    continue;
                }
                readable = Some(guard);
            }
            // The runtime's I/O driver is gone.
            Err(_) => return,
        }
    }
}

/// A timer that is set anew only for an earlier time. Timeouts move on with every message; a timer that followed them
/// would be taken out of the runtime's wheel and put back at each sleep, which wakes its I/O driver by a system call.
struct Alarm<'p> {
    sleep: Pin<&'p mut Sleep>,
    /// The time that it is set to. It may be before the time that is wanted: then the task looks again, once.
    set: Option<Instant>,
}

impl Alarm<'_> {
    fn no_later_than(&mut self, at: Instant) {
        if self.set.is_none_or(|set| at < set) {
            self.sleep.as_mut().reset(at.into());
            self.set = Some(at);
        }
    }

    /// Ready once at the time that it is set to.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.set.is_none() || self.sleep.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.set = None;
        Poll::Ready(())
    }
}

/// Waits for the descriptor, a nudge or the alarm, whichever is first.
struct Sleeper<'a, 'p, 's, N> {
    /// `None` when the channel has failed.
    events: Option<&'a AsyncFd<ChannelFd>>,
    nudged: Pin<&'p mut N>,
    alarm: &'p mut Alarm<'s>,
}

impl<'a, N: Future<Output = ()>> Sleeper<'a, '_, '_, N> {
    /// `Some` when the descriptor is readable.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<std::io::Result<Option<AsyncFdReadyGuard<'a, ChannelFd>>>> {
        if let Some(events) = self.events
            && let Poll::Ready(ready) = events.poll_read_ready(cx)
        {
            return Poll::Ready(ready.map(Some));
        }
        if self.nudged.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(None));
        }
        if self.alarm.poll(cx).is_ready() {
            return Poll::Ready(Ok(None));
        }
        Poll::Pending
    }
}
