//! The stream's two directions, as tokio knows them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{DATA, END, HEAD, Inband, MESSAGE};

impl AsyncRead for Inband {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
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
                return Poll::Ready(Ok(()));
            }
            if this.got_end {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = this.error() {
                return Poll::Ready(Err(error));
            }
            ready!(this.poll_progress(cx));
        }
    }
}

impl AsyncWrite for Inband {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            if let Some(error) = this.error() {
                return Poll::Ready(Err(error));
            }
            if this.sent_end {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            if buf.is_empty() {
                return Poll::Ready(Ok(0));
            }
            if this.may_send() {
                let n = buf.len().min(MESSAGE - HEAD);
                return Poll::Ready(this.post(DATA, &buf[..n]).map(|()| n));
            }
            ready!(this.poll_progress(cx));
        }
    }

    /// What was written is posted: there is nothing to wait for.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Says that nothing follows, and waits until everything sent has completed: the peer's device has it.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.sent_end && this.free.len() == this.send.len() {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = this.error() {
                return Poll::Ready(Err(error));
            }
            if !this.sent_end && this.may_send() {
                this.sent_end = true;
                if let Err(error) = this.post(END, &[]) {
                    return Poll::Ready(Err(error));
                }
                continue;
            }
            ready!(this.poll_progress(cx));
        }
    }
}
