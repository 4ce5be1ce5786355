//! The requests on a data connection.

use std::{mem, sync::Arc, time::Instant};

use rustix::io::Errno;

use super::{
    ahead::Ahead,
    dest::Dest,
    peer::{Endpoint, Peer},
    socket::{Fault, Short, Socket},
};
use crate::{
    engine::{
        Identity, Notification,
        embedded::frame::{self, Header, IDENTITY_LEN, MAX_NOTE_BODY, Status},
    },
    error::Error,
};

/// A connection to a peer's data port; one call at a time.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Arc<Socket>,
    /// The peer's session id.
    peer: Arc<str>,
    /// Which [`Endpoint`] it leads to.
    pub(super) epoch: u64,
    /// Whether it has served a request before; the peer may have closed it since.
    pub(super) is_kept: bool,
    /// Requests are made in it.
    scratch: Vec<u8>,
    ahead: Ahead,
}

/// Where a request reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) len: usize,
}

/// One of several reads.
#[derive(Debug)]
pub(super) struct Ask<'a> {
    pub(super) identity: Identity,
    pub(super) addr: u64,
    pub(super) dest: &'a mut [u8],
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
        let (scratch, ahead) = (Vec::new(), Ahead::default());
        Self { socket, peer, epoch: endpoint.epoch, is_kept: false, scratch, ahead }
    }

    /// Reads the bytes of exactly that put. Nothing is written to `dest` unless the peer holds it.
    pub(super) fn read_identified(
        &mut self,
        identity: &Identity,
        addr: u64,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.send(&identified(identity, addr, dest.len()), &[], deadline)?;
        let status = self.status(dest.front(), deadline)?;
        match self.holds(status) {
            Ok(()) => self.fill(dest, deadline),
            // Whoever declines sends no bytes of it; what is there would be taken for the next answer.
            Err(Failure::Declined(_)) if !self.ahead.is_empty() => {
                Err(self.garbage("bytes of a put that it does not hold"))
            }
            refused => refused,
        }
    }

    /// Reads the bytes of exactly these puts, all asked for at once. The outcomes go to `outcomes`, in
    /// order.
    ///
    /// # Errors
    ///
    /// The connection is of no more use: how that ended the first of those that have no outcome yet, if it
    /// did.
    pub(super) fn read_many(
        &mut self,
        asks: &mut [Ask<'_>],
        deadline: Instant,
        outcomes: &mut Vec<Result<(), Error>>,
    ) -> Result<(), Option<Error>> {
        let mut requests = mem::take(&mut self.scratch);
        requests.clear();
        for Ask { identity, addr, dest } in &*asks {
            requests.extend_from_slice(&identified(identity, *addr, dest.len()));
        }
        self.send_all(requests, deadline)?;
        let mut left: usize = asks.iter().map(|ask| Status::LEN + ask.dest.len()).sum();
        for Ask { dest, .. } in asks {
            left -= Status::LEN;
            let read = self.status(left, deadline).and_then(|status| {
                left -= dest.len();
                self.holds(status)?;
                self.fill(&mut Dest::Host(dest), deadline)
            });
            goes_on(read, outcomes)?;
        }
        self.is_at_rest()
    }

    /// Reads whatever is at `addr`.
    pub(super) fn read(
        &mut self,
        addr: u64,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.request(frame::READ_V2, Range { addr, len: dest.len() }, &[], deadline)?;
        let status = self.status(dest.front(), deadline)?;
        self.is_done(status, "it does not publish the range")?;
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
        dest.fill(&mut self.ahead, &self.socket, deadline).map_err(|short| match short {
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
        let mut body = mem::take(&mut self.scratch);
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
        self.done(NOT_TAKEN, deadline)?;
        if all { Ok(()) } else { Err(self.garbage("done before it had all bytes")) }
    }

    /// Hands the peer these notifications, all at once, which are short.
    ///
    /// # Errors
    ///
    /// As [`read_many`](Self::read_many).
    pub(super) fn notify_many(
        &mut self,
        notes: &[Notification],
        deadline: Instant,
        outcomes: &mut Vec<Result<(), Error>>,
    ) -> Result<(), Option<Error>> {
        let mut requests = mem::take(&mut self.scratch);
        requests.clear();
        for note in notes {
            let start = requests.len();
            requests.extend_from_slice(&[0; Header::LEN]);
            frame::encode_notification(note, &mut requests);
            let size = (requests.len() - start - Header::LEN) as u64;
            let header = Header { size, addr: 0, opcode: frame::NOTIFY };
            requests[start..start + Header::LEN].copy_from_slice(&header.encode());
        }
        self.send_all(requests, deadline)?;
        for left in (0..notes.len()).rev() {
            let told = self.status(left * Status::LEN, deadline);
            let told = told.and_then(|status| self.is_done(status, NOT_TAKEN));
            goes_on(told, outcomes)?;
        }
        self.is_at_rest()
    }

    /// Sends several requests, which fit into an idle socket.
    fn send_all(&mut self, requests: Vec<u8>, deadline: Instant) -> Result<(), Option<Error>> {
        let sent = self.send(&requests, &[], deadline);
        self.scratch = requests;
        if matches!(sent, Ok(true)) { Ok(()) } else { Err(None) }
    }

    /// After the last answer: if there are more bytes, nobody can tell what follows.
    fn is_at_rest(&self) -> Result<(), Option<Error>> {
        if self.ahead.is_empty() { Ok(()) } else { Err(None) }
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
    fn done(&mut self, refused: &str, deadline: Instant) -> Result<(), Failure> {
        let status = self.status(0, deadline)?;
        self.is_done(status, refused)
    }

    fn is_done(&self, status: Status, refused: &str) -> Result<(), Failure> {
        match status {
            Status::Done => Ok(()),
            Status::Refused => Err(self.rejected(refused)),
            Status::Gone | Status::OtherInstance => {
                Err(self.garbage("a status that belongs to another request"))
            }
        }
    }

    /// Whether the peer holds the put that was asked for.
    fn holds(&self, status: Status) -> Result<(), Failure> {
        match status {
            Status::Done => Ok(()),
            Status::Refused => Err(self.rejected("the range is not inside that transfer")),
            Status::Gone => Err(self.stale("the put has ended")),
            Status::OtherInstance => Err(self.stale("another relay has taken its place")),
        }
    }

    /// The next status; of the bytes that may `follow` it, some may come with it.
    fn status(&mut self, follow: usize, deadline: Instant) -> Result<Status, Failure> {
        match self.ahead.status(follow, &self.socket, deadline) {
            Ok(bytes) => Status::decode(&bytes).map_err(|error| self.garbage(error)),
            Err(Short {
                got: 0,
                fault: fault @ (Fault::Eof | Fault::Os(Errno::CONNRESET | Errno::PIPE)),
            }) => Err(Failure::Unanswered(fault)),
            Err(short) => Err(self.broken(short.fault, "reading the answer")),
        }
    }

    fn fill(&mut self, dest: &mut Dest<'_>, deadline: Instant) -> Result<(), Failure> {
        dest.fill(&mut self.ahead, &self.socket, deadline)
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

const NOT_TAKEN: &str = "it does not take the notification";

fn identified(identity: &Identity, addr: u64, len: usize) -> [u8; Header::LEN + IDENTITY_LEN] {
    let mut request = [0; Header::LEN + IDENTITY_LEN];
    let header = Header { size: len as u64, addr, opcode: frame::READ_IDENTIFIED };
    request[..Header::LEN].copy_from_slice(&header.encode());
    request[Header::LEN..].copy_from_slice(&frame::encode_identity(identity));
    request
}

/// Notes the outcome of one of several requests, if the next one is answered too.
fn goes_on(
    outcome: Result<(), Failure>,
    outcomes: &mut Vec<Result<(), Error>>,
) -> Result<(), Option<Error>> {
    match outcome {
        Ok(()) => outcomes.push(Ok(())),
        Err(Failure::Declined(error)) => outcomes.push(Err(error)),
        Err(Failure::Unanswered(_)) => return Err(None),
        Err(Failure::Broken(error)) => return Err(Some(error)),
    }
    Ok(())
}
