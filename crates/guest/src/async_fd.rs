//! Pipes and terminals, read and written without blocking a thread.

use std::{io, os::fd::OwnedFd};

use rustix::fs::OFlags;
use tokio::io::{Interest, unix::AsyncFd};

/// One end of a pipe, or the master of a terminal.
#[derive(Debug)]
pub struct AsyncPipe(AsyncFd<OwnedFd>);

impl AsyncPipe {
    /// Takes the descriptor over and makes it non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    pub fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        // SAFETY: an `OwnedFd` is valid while it lives, and always answers the same descriptor.
        let fd = unsafe { AsyncFd::register_with_interest(fd, interest)? };
        Ok(Self(fd))
    }

    /// Reads what is there, at least one byte; zero is the end. A terminal whose other side is
    /// closed answers EIO, which is its way to say the same.
    ///
    /// # Errors
    /// The read fails.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // Ask the kernel before the reactor: what is there already is returned by the first poll.
        let result = match rustix::io::read(self.0.get_ref(), &mut *buffer) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                self.read_when_ready(buffer).await
            }
            other => other.map_err(io::Error::from),
        };
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(0),
            other => other,
        }
    }

    async fn read_when_ready(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0
            .async_io(Interest::READABLE, |fd| {
                rustix::io::read(fd, &mut *buffer).map_err(io::Error::from)
            })
            .await
    }

    /// Writes everything, waiting for the reader where the pipe is full.
    ///
    /// # Errors
    /// The other side is closed, or the write fails.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self
                .0
                .async_io(Interest::WRITABLE, |fd| {
                    rustix::io::write(fd, bytes).map_err(io::Error::from)
                })
                .await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// The descriptor, for calls on a terminal.
    pub fn fd(&self) -> &OwnedFd {
        self.0.get_ref()
    }
}
