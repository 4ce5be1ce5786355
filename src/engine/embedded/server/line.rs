//! A socket that never blocks, and what epoll has told of it.

use std::{
    io::{self, IoSlice, Read},
    net::{Shutdown, SocketAddr},
};

use mio::{event::Event, net::TcpStream};
use rustix::{
    io::Errno,
    net::{SendAncillaryBuffer, SendFlags, sendmsg},
};

#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    peer: SocketAddr,
    /// Something may wait to be received. Edges are told once, so this remembers them.
    readable: bool,
    /// The peer has said its last byte or broken off, so input ends with an end or an error.
    ended: bool,
}

impl Line {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr) -> Self {
        Self { stream, peer, readable: false, ended: false }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    pub(super) fn heard(&mut self, event: &Event) {
        self.ended |= event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || self.ended;
    }

    /// Receives into `room`, which is not empty. `None`: nothing is there; `Some(0)`: the end.
    pub(super) fn receive(&mut self, room: &mut [u8]) -> io::Result<Option<usize>> {
        while self.readable {
            match self.stream.read(room) {
                Ok(len) => {
                    // What fell short of the room was all there was; the next byte is an edge.
                    self.readable = len == room.len() || self.ended;
                    return Ok(Some(len));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Sends `first` and then `second`, as one packet where they fit. `None`: there is no room. `more`:
    /// something follows at once, and what does not fill a packet may wait for it.
    pub(super) fn send(
        &mut self,
        first: &[u8],
        second: &[u8],
        more: bool,
    ) -> io::Result<Option<usize>> {
        let parts = [IoSlice::new(first), IoSlice::new(second)];
        loop {
            // A signal for a closed peer would end processes that do not ignore it.
            let more = if more { SendFlags::MORE } else { SendFlags::empty() };
            let flags = SendFlags::NOSIGNAL | more;
            match sendmsg(&self.stream, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => return Ok(Some(len)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Nothing more will be sent.
    pub(super) fn finish(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // The peer must hear of it even where a forked child still holds the descriptor.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
