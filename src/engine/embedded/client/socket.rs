//! A TCP socket on which nothing waits beyond a deadline.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags,
        SocketType, connect, getpeername, getsockname, recv, sendmsg, shutdown, socket_with,
        sockopt,
    },
};

use crate::{
    engine::embedded::{builder::Patience, pace::Pace},
    error::Error,
    wait::deadline_after,
};

/// How long somebody may receive at a time who holds what others need, and how long a pause may be.
const HOLD: Duration = Duration::from_millis(20);
const LINGER: Duration = Duration::from_millis(2);

/// A connection under way or made. Every call tries first, and waits only if it must.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    address: SocketAddr,
    patience: Patience,
    pace: Pace,
}

impl Socket {
    /// A socket for `address`, not connected yet.
    pub(super) fn open(address: SocketAddr, patience: Patience, pace: Pace) -> Result<Self, Fault> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = socket_with(family, SocketType::STREAM, flags, None).map_err(|errno| {
            match errno {
                Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => Fault::Ours(errno),
                // The family, say, is switched off: another address may do.
                _ => Fault::Os(errno),
            }
        })?;
        sockopt::set_tcp_nodelay(&fd, true).map_err(Fault::Os)?;
        Ok(Self { fd, address, patience, pace })
    }

    /// Where it leads.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn connect(&self, deadline: Instant) -> Result<(), Fault> {
        match connect(&self.fd, &self.address) {
            Ok(()) => {}
            // Interrupted, it goes on in the background just the same.
            Err(Errno::INPROGRESS | Errno::INTR) => {
                self.wait_at_most(self.patience.connect, PollFlags::OUT, deadline).map_err(
                    |fault| match fault {
                        Fault::Silent(limit) => Fault::NotConnected(limit),
                        fault => fault,
                    },
                )?;
                sockopt::socket_error(&self.fd).map_err(Fault::Os)?.map_err(Fault::Os)?;
            }
            Err(errno) => return Err(Fault::Os(errno)),
        }
        // Where nobody listens on a port of the range that the system draws from, it may draw that
        // very port for our end, and TCP connects us to ourselves.
        let us = getsockname(&self.fd).map_err(Fault::Os)?;
        match getpeername(&self.fd).map_err(Fault::Os)? {
            Some(peer) if peer != us => Ok(()),
            _ => Err(Fault::Os(Errno::CONNREFUSED)),
        }
    }

    /// Fills `buffer`.
    pub(super) fn fill(&self, buffer: &mut [u8], deadline: Instant) -> Result<(), Short> {
        self.fill_at_least(buffer.len(), buffer, false, deadline).map(drop)
    }

    /// Receives `least` bytes, and those behind them that have come too, as far as `buffer` reaches; how
    /// many. `asked`: it is the answer to what was just sent, and cannot be there yet.
    pub(super) fn fill_at_least(
        &self,
        least: usize,
        buffer: &mut [u8],
        asked: bool,
        deadline: Instant,
    ) -> Result<usize, Short> {
        let mut got = 0;
        let mut looks = self.pace.looks();
        if asked && self.pace.parks() {
            self.wait(PollFlags::IN, deadline).map_err(|fault| Short { got, fault })?;
        }
        while got < least {
            match recv(&self.fd, &mut buffer[got..], RecvFlags::empty()) {
                Ok((_, 0)) => return Err(Short { got, fault: Fault::Eof }),
                Ok((_, more)) => {
                    got += more;
                    looks.reset();
                    // A peer that trickles never makes us wait, so its time ends here.
                    if got < least && Instant::now() >= deadline {
                        return Err(Short { got, fault: Fault::Deadline });
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !looks.pause() => {}
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, deadline).map_err(|fault| Short { got, fault })?;
                }
                Err(errno) => return Err(Short { got, fault: Fault::Os(errno) }),
            }
        }
        Ok(got)
    }

    /// Waits until bytes have come, or the connection has ended.
    pub(super) fn wait_for_more(&self, deadline: Instant) -> Result<(), Fault> {
        self.wait(PollFlags::IN, deadline).map(drop)
    }

    /// Whether bytes have come, or the connection has ended.
    pub(super) fn has_more(&self) -> bool {
        !self.is_quiet()
    }

    /// Fills as much of `buffer` as comes in a short while, without a long pause. How the connection failed, if
    /// it did, is told of after the bytes that came before.
    pub(super) fn receive(
        &self,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> (usize, Result<(), Fault>) {
        let mut got = 0;
        let enough = Instant::now() + HOLD;
        while got < buffer.len() {
            match recv(&self.fd, &mut buffer[got..], RecvFlags::empty()) {
                Ok((_, 0)) => return (got, Err(Fault::Eof)),
                Ok((_, more)) => got += more,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let until = deadline.min(enough).min(Instant::now() + LINGER);
                    match self.wait_until(PollFlags::IN, until) {
                        Ok(_) => {}
                        Err(Fault::Deadline) => break,
                        Err(fault) => return (got, Err(fault)),
                    }
                }
                Err(errno) => return (got, Err(Fault::Os(errno))),
            }
            if got < buffer.len() && Instant::now() >= deadline {
                return (got, Err(Fault::Deadline));
            }
        }
        (got, Ok(()))
    }

    /// Sends `head`, then `body`. `Ok(false)`: something came back, or the connection ended, before
    /// all was sent; what that is, [`fill`](Self::fill) tells.
    pub(super) fn send(&self, head: &[u8], body: &[u8], deadline: Instant) -> Result<bool, Fault> {
        let (mut head, mut body) = (head, body);
        loop {
            let parts = [IoSlice::new(head), IoSlice::new(body)];
            let mut no_control = SendAncillaryBuffer::default();
            match sendmsg(&self.fd, &parts, &mut no_control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    let of_head = sent.min(head.len());
                    head = &head[of_head..];
                    body = &body[sent - of_head..];
                    if head.is_empty() && body.is_empty() {
                        return Ok(true);
                    }
                    if Instant::now() >= deadline {
                        return Err(Fault::Deadline);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let ready = self.wait(PollFlags::IN | PollFlags::OUT, deadline)?;
                    if ready != PollFlags::OUT {
                        return Ok(false);
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
                Err(errno) => return Err(Fault::Os(errno)),
            }
        }
    }

    /// Whether it is open, and nothing has come that nobody asked for.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(recv(&self.fd, &mut [0], RecvFlags::PEEK), Err(Errno::AGAIN | Errno::INTR))
    }

    /// Ends the connection at once, also for whoever waits on it.
    pub(super) fn shut(&self) {
        // Not connected yet, or not any more: then there is nothing to end.
        let _ = shutdown(&self.fd, Shutdown::Both);
    }

    /// Waits for one of `wanted`, or for the connection's end, as long as our patience lasts.
    fn wait(&self, wanted: PollFlags, deadline: Instant) -> Result<PollFlags, Fault> {
        self.wait_at_most(self.patience.stall, wanted, deadline)
    }

    fn wait_at_most(
        &self,
        limit: Duration,
        wanted: PollFlags,
        deadline: Instant,
    ) -> Result<PollFlags, Fault> {
        let silent = deadline_after(Instant::now(), limit);
        match self.wait_until(wanted, deadline.min(silent)) {
            Err(Fault::Deadline) if silent < deadline => Err(Fault::Silent(limit)),
            waited => waited,
        }
    }

    fn wait_until(&self, wanted: PollFlags, deadline: Instant) -> Result<PollFlags, Fault> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::Deadline);
            }
            let mut polled = [PollFd::new(&self.fd, wanted)];
            match poll(&mut polled, Some(&timespec(left))) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(polled[0].revents()),
                Err(errno) => return Err(Fault::Os(errno)),
            }
        }
    }
}

/// How a connection fails.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The deadline passed.
    Deadline,
    /// No byte came, or went, for so long.
    Silent(Duration),
    /// Nothing answered the connect for so long.
    NotConnected(Duration),
    /// The peer closed it.
    Eof,
    /// It was refused, reset, or is otherwise of no more use.
    Os(Errno),
    /// This process has no more descriptors, or no more memory.
    Ours(Errno),
    /// The device that the bytes were for; which says more.
    Device,
}

impl Fault {
    pub(super) fn error(self, peer: &str, doing: &str) -> Error {
        match self {
            Self::Deadline => Error::TimedOut,
            Self::Silent(limit) => {
                Error::peer_failed(peer, format!("{doing}: it was silent for {limit:?}"))
            }
            Self::NotConnected(limit) => {
                Error::peer_failed(peer, format!("{doing}: connect timed out after {limit:?}"))
            }
            Self::Eof => Error::peer_failed(peer, format!("{doing}: it closed the connection")),
            Self::Os(errno) => {
                Error::peer_failed(peer, format!("{doing}: {}", io::Error::from(errno)))
            }
            Self::Ours(errno) => Error::Io(errno.into()),
            Self::Device => super::super::broken("its device took no more bytes"),
        }
    }
}

/// A buffer that was not filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Short {
    /// How many bytes came.
    pub(super) got: usize,
    /// Why there are no more.
    pub(super) fault: Fault,
}

fn timespec(left: Duration) -> Timespec {
    // Longer than the kernel can count is as long as it can count.
    Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1 << 32, tv_nsec: 0 })
}
