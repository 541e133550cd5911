//! A stream that reports whenever bytes move through it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Who is told that bytes moved. Called for every read and write, so it must be cheap.
pub(crate) trait Meter {
    fn moved(&self);
}

/// `io`, with every completed read and write told to `meter`.
pub(crate) struct Metered<Io, M> {
    io: Io,
    meter: Arc<M>,
}

impl<Io, M: Meter> Metered<Io, M> {
    pub(crate) fn new(io: Io, meter: Arc<M>) -> Self {
        Self { io, meter }
    }

    fn note<T>(&self, poll: Poll<T>) -> Poll<T> {
        if poll.is_ready() {
            self.meter.moved();
        }
        poll
    }
}

impl<Io: AsyncRead + Unpin, M: Meter> AsyncRead for Metered<Io, M> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_read(cx, buffer);
        self.note(poll)
    }
}

impl<Io: AsyncWrite + Unpin, M: Meter> AsyncWrite for Metered<Io, M> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.note(poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write_vectored(cx, buffers);
        self.note(poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
