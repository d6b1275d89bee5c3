//! The stream's two directions, as tokio knows them.
//!
//! A peer can keep a queue pair busy for as long as it likes, with messages that carry nothing. A call takes a number of
//! rounds of what has come, and then gives way to other tasks (R9).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

use super::{DATA, END, HEAD, Inband, MESSAGE, ROUNDS};

/// Repeats `step` until it has an answer, or gives way: the task is woken, and comes back.
fn in_rounds<T>(cx: &mut Context<'_>, mut step: impl FnMut(&mut Context<'_>) -> Poll<Option<T>>) -> Poll<T> {
    for _ in 0..ROUNDS {
        if let Some(answer) = ready!(step(cx)) {
            return Poll::Ready(answer);
        }
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

impl AsyncRead for Inband {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // A message may also carry a single byte.
        let turn = ready!(coop::poll_proceed(cx));
        let this = self.get_mut();
        let read = in_rounds(cx, |cx| {
            if let Some(front) = this.unread.front_mut() {
                let bytes = &this.recv[front.slot][front.at..front.end];
                let n = bytes.len().min(buf.remaining());
                buf.put_slice(&bytes[..n]);
                front.at += n;
                if front.at == front.end {
                    let slot = front.slot;
                    this.unread.pop_front();
                    this.repost(slot);
                }
                return Poll::Ready(Some(Ok(())));
            }
            if this.got_end {
                return Poll::Ready(Some(Ok(())));
            }
            if let Some(error) = this.error() {
                return Poll::Ready(Some(Err(error)));
            }
            this.poll_progress(cx).map(|()| None)
        });
        if read.is_ready() {
            turn.made_progress();
        }
        read
    }
}

impl AsyncWrite for Inband {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        in_rounds(cx, |cx| {
            if let Some(error) = this.error() {
                return Poll::Ready(Some(Err(error)));
            }
            if this.sent_end {
                return Poll::Ready(Some(Err(io::ErrorKind::BrokenPipe.into())));
            }
            if buf.is_empty() {
                return Poll::Ready(Some(Ok(0)));
            }
            if this.may_send() {
                let n = buf.len().min(MESSAGE - HEAD);
                return Poll::Ready(Some(this.post(DATA, &buf[..n]).map(|()| n)));
            }
            this.poll_progress(cx).map(|()| None)
        })
    }

    /// What was written is posted: there is nothing to wait for.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Says that nothing follows, and waits until everything sent has completed: the peer's device has it.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        in_rounds(cx, |cx| {
            if this.sent_end && this.free.len() == this.send.len() {
                return Poll::Ready(Some(Ok(())));
            }
            if let Some(error) = this.error() {
                return Poll::Ready(Some(Err(error)));
            }
            if !this.sent_end && this.may_send() {
                this.sent_end = true;
                if let Err(error) = this.post(END, &[]) {
                    return Poll::Ready(Some(Err(error)));
                }
                return Poll::Ready(None);
            }
            this.poll_progress(cx).map(|()| None)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn r9_a_call_gives_way_and_comes_back_however_much_there_is_to_take() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let mut cx = Context::from_waker(&waker);
        let mut rounds = 0;
        let endless = in_rounds(&mut cx, |_| {
            rounds += 1;
            Poll::Ready(None::<()>)
        });
        assert!(endless.is_pending());
        assert_eq!((rounds, woken.0.load(Ordering::Relaxed)), (ROUNDS, 1));
        // Whoever waits for something else, or has the answer, asks for no wake-up.
        assert!(in_rounds(&mut cx, |_| Poll::<Option<()>>::Pending).is_pending());
        assert!(in_rounds(&mut cx, |_| Poll::Ready(Some(()))).is_ready());
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    }
}
