//! The requests on a data connection.

use std::{sync::Arc, time::Instant};

use rustix::io::Errno;

use super::{
    dest::Dest,
    peer::{Endpoint, Peer},
    socket::{Fault, Short, Socket},
};
use crate::{
    engine::{
        Identity, Notification,
        embedded::frame::{self, Header, MAX_NOTE_BODY, Status},
    },
    error::Error,
};

/// A connection to a peer's data port; one request at a time.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Arc<Socket>,
    /// The peer's session id.
    peer: Arc<str>,
    /// Which [`Endpoint`] it leads to.
    pub(super) epoch: u64,
    /// Whether it has served a request before; the peer may have closed it since.
    pub(super) is_kept: bool,
    /// Notifications are made in it.
    scratch: Vec<u8>,
}

/// Where a request reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) len: usize,
}

/// How a request fails.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection ended before a byte of an answer came.
    Unanswered(Fault),
    /// The peer said no; the connection goes on.
    Declined(Error),
    /// The connection is of no more use.
    Broken(Error),
}

impl Connection {
    /// A new connection, over a socket that is connected to `endpoint` of `peer`.
    pub(super) fn new(socket: Arc<Socket>, peer: &Peer, endpoint: &Endpoint) -> Self {
        let peer = Arc::clone(&peer.name);
        Self { socket, peer, epoch: endpoint.epoch, is_kept: false, scratch: Vec::new() }
    }

    /// Reads the bytes of exactly that put. Nothing is written to `dest` unless the peer holds it.
    pub(super) fn read_identified(
        &mut self,
        identity: &Identity,
        addr: u64,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        const LEN: usize = Header::LEN + frame::IDENTITY_LEN;
        let mut request = [0; LEN];
        let header = Header { size: dest.len() as u64, addr, opcode: frame::READ_IDENTIFIED };
        request[..Header::LEN].copy_from_slice(&header.encode());
        request[Header::LEN..].copy_from_slice(&frame::encode_identity(identity));
        self.send(&request, &[], deadline)?;
        match self.status(deadline)? {
            Status::Done => self.fill(dest, deadline),
            Status::Refused => Err(self.rejected("the range is not inside that transfer")),
            Status::Gone => Err(self.stale("the put has ended")),
            Status::OtherInstance => Err(self.stale("another relay has taken its place")),
        }
    }

    /// Reads whatever is at `addr`.
    pub(super) fn read(
        &mut self,
        addr: u64,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.request(frame::READ_V2, Range { addr, len: dest.len() }, &[], deadline)?;
        self.done("it does not publish the range", deadline)?;
        self.fill(dest, deadline)
    }

    /// As [`read`](Self::read), from a peer that sends no status. It refuses by closing the
    /// connection, and so an end before the first byte is taken for that.
    pub(super) fn read_v1(
        &mut self,
        addr: u64,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.request(frame::READ_V1, Range { addr, len: dest.len() }, &[], deadline)?;
        dest.fill(&self.socket, deadline).map_err(|short| match short {
            Short { got: 0, fault: Fault::Eof } => {
                self.rejected("it closed the connection instead of sending the range")
            }
            Short { fault, .. } => self.broken(fault, "reading the body"),
        })
    }

    /// Writes `body` to `addr`, and returns once the peer has stored it.
    pub(super) fn write(
        &mut self,
        addr: u64,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let all = self.request(frame::WRITE_V2, Range { addr, len: body.len() }, body, deadline)?;
        self.done("it does not let that range be written", deadline)?;
        if all { Ok(()) } else { Err(self.garbage("done before it had all bytes")) }
    }

    /// As [`write`](Self::write), to a peer that acknowledges nothing: it serves a second request
    /// only after the first, so that the answer to a read tells that the bytes are stored.
    pub(super) fn write_v1(
        &mut self,
        addr: u64,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let mut byte = [0];
        self.request(frame::WRITE_V1, Range { addr, len: body.len() }, body, deadline)?;
        self.request(frame::READ_V1, Range { addr, len: byte.len() }, &[], deadline)?;
        self.socket
            .fill(&mut byte, deadline)
            .map_err(|short| self.broken(short.fault, "the write was not acknowledged"))
    }

    /// Hands the peer a notification, and returns once it has it.
    pub(super) fn notify(&mut self, note: &Notification, deadline: Instant) -> Result<(), Failure> {
        let mut body = std::mem::take(&mut self.scratch);
        body.clear();
        frame::encode_notification(note, &mut body);
        let len = body.len();
        let sent = if len <= MAX_NOTE_BODY {
            self.request(frame::NOTIFY, Range { addr: 0, len }, &body, deadline)
        } else {
            Err(Failure::Declined(Error::TooLarge { len, slot_size: MAX_NOTE_BODY }))
        };
        self.scratch = body;
        let all = sent?;
        self.done("it does not take the notification", deadline)?;
        if all { Ok(()) } else { Err(self.garbage("done before it had all bytes")) }
    }

    fn request(
        &self,
        opcode: u8,
        range: Range,
        body: &[u8],
        deadline: Instant,
    ) -> Result<bool, Failure> {
        let header = Header { size: range.len as u64, addr: range.addr, opcode };
        self.send(&header.encode(), body, deadline)
    }

    /// `Ok(false)`: the answer is there already, or the connection is at its end.
    fn send(&self, head: &[u8], body: &[u8], deadline: Instant) -> Result<bool, Failure> {
        self.socket
            .send(head, body, deadline)
            .map_err(|fault| self.broken(fault, "sending a request"))
    }

    /// An answer that can only be yes or no.
    fn done(&self, refused: &str, deadline: Instant) -> Result<(), Failure> {
        match self.status(deadline)? {
            Status::Done => Ok(()),
            Status::Refused => Err(self.rejected(refused)),
            Status::Gone | Status::OtherInstance => {
                Err(self.garbage("a status that belongs to another request"))
            }
        }
    }

    fn status(&self, deadline: Instant) -> Result<Status, Failure> {
        let mut bytes = [0; Status::LEN];
        match self.socket.fill(&mut bytes, deadline) {
            Ok(()) => Status::decode(&bytes).map_err(|error| self.garbage(error)),
            Err(Short {
                got: 0,
                fault: fault @ (Fault::Eof | Fault::Os(Errno::CONNRESET | Errno::PIPE)),
            }) => Err(Failure::Unanswered(fault)),
            Err(short) => Err(self.broken(short.fault, "reading the answer")),
        }
    }

    fn fill(&self, dest: &mut Dest<'_>, deadline: Instant) -> Result<(), Failure> {
        dest.fill(&self.socket, deadline)
            .map_err(|short| self.broken(short.fault, "reading the body"))
    }

    #[cold]
    fn stale(&self, reason: &'static str) -> Failure {
        Failure::Declined(Error::stale(&self.peer, reason))
    }

    #[cold]
    fn rejected(&self, reason: &str) -> Failure {
        Failure::Broken(Error::rejected(&self.peer, reason))
    }

    #[cold]
    fn broken(&self, fault: Fault, doing: &str) -> Failure {
        Failure::Broken(fault.error(&self.peer, doing))
    }

    #[cold]
    fn garbage(&self, answer: impl std::fmt::Display) -> Failure {
        Failure::Broken(Error::peer_failed(&self.peer, format!("its answer is wrong: {answer}")))
    }
}
