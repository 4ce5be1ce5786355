//! Several requests at once on one connection: they go in one write, and the answers come in their order.
//!
//! That is done on a connection that is kept, and only there: what it does not decide, for whatever
//! reason, is asked for one by one, by the rules of a single request.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{
    Client, check_len,
    connection::{Ask, Connection},
    operation::Operation,
    peer::{Endpoint, Peer},
};
use crate::{
    engine::{Filled, LocalBuffer, Notification, ReadError, RemoteBuffer},
    error::{Error, Result},
    memory::Span,
};

/// How many requests go at once, at most.
pub(in super::super) const MOST: usize = 16;

/// And how many bytes of notes: they fit into a socket, so that no answer can come before all is sent.
const TEXT: usize = 4 << 10;

/// One of the reads.
struct Read {
    remote: RemoteBuffer,
    local: LocalBuffer,
    outcome: Option<Result<()>>,
}

impl Client {
    /// Fills all buffers; the outcomes come in the order asked. Once one of the reads was ended, those
    /// that were not decided by then are not begun again: they end with [`Error::Aborted`].
    pub(in super::super) fn read_many(
        &self,
        reads: Vec<(RemoteBuffer, LocalBuffer)>,
        deadline: Instant,
    ) -> Vec<Result<Filled, ReadError>> {
        let undecided = |(remote, local)| Read { remote, local, outcome: None };
        let mut reads: Vec<_> = reads.into_iter().map(undecided).collect();
        reads.chunks_mut(MOST).for_each(|some| self.read_at_once(some, deadline));
        let closed = |read: &Read| matches!(read.outcome, Some(Err(Error::Closed)));
        let mut ended = reads.iter().any(closed);
        let mut outcomes = Vec::with_capacity(reads.len());
        for Read { remote, local, outcome } in reads {
            outcomes.push(match outcome {
                Some(Ok(())) => Ok(Filled { buffer: local, verified: true }),
                Some(Err(error)) => Err(ReadError { error, buffer: Some(local) }),
                None if ended => Err(ReadError { error: Error::Aborted, buffer: Some(local) }),
                None => {
                    let read = self.read(&remote, local, deadline);
                    ended |= matches!(read, Err(ReadError { error: Error::Closed, .. }));
                    read
                }
            });
        }
        outcomes
    }

    /// Decides as many of them as one kept connection does.
    fn read_at_once(&self, reads: &mut [Read], deadline: Instant) {
        let Some(first) = reads.first() else { return };
        let Some((peer, endpoint, mut connection)) = self.kept(&first.remote.peer) else { return };
        let (mut operations, mut asked, mut asks) = (Vec::new(), Vec::new(), Vec::new());
        for Read { remote, local, outcome } in reads {
            // Of another relay than the one that is known there, the peer is asked first.
            let same = |instance| endpoint.instance == Some(instance);
            let identity = remote.identity.filter(|identity| same(identity.instance));
            let Some(identity) = identity.filter(|_| remote.peer == peer.name) else { continue };
            let Some(dest) = local.bytes_mut() else { continue };
            match self.begin_many(remote, Span::of(dest), &connection, deadline) {
                Ok(operation) => {
                    operations.push(operation);
                    asked.push((remote.len, outcome));
                    asks.push(Ask { identity, addr: remote.ptr, dest });
                }
                Err(error) => *outcome = Some(Err(error)),
            }
        }
        if asks.len() < 2 {
            // It is read alone, by the same connection unless that was ended meanwhile.
            if operations.iter().all(|operation| operation.release().is_ok()) {
                peer.keep(connection);
            }
            return;
        }
        let mut decided = Vec::with_capacity(asks.len());
        let end = connection.read_many(&mut asks, deadline, &mut decided);
        let released: Vec<_> = operations.iter().map(Operation::release).collect();
        drop(operations);
        // One that was ended has ended the connection, and that says nothing of the peer, nor of the others.
        if released.iter().all(Result::is_ok) {
            decided.extend(self.put_away(&peer, &endpoint, connection, end).map(Err));
        }
        let mut decided = decided.into_iter();
        for ((len, outcome), released) in asked.into_iter().zip(released) {
            *outcome = match (decided.next(), released) {
                (Some(Ok(())), _) => {
                    self.counters.reads.fetch_add(1, Ordering::Relaxed);
                    self.counters.bytes.fetch_add(len as u64, Ordering::Relaxed);
                    Some(Ok(()))
                }
                (_, Err(closed)) => Some(Err(closed)),
                (decided, Ok(())) => decided,
            };
        }
    }

    /// Each is an operation of its own, so that it can be ended; its end is the connection's.
    fn begin_many(
        &self,
        remote: &RemoteBuffer,
        dest: Span,
        connection: &Connection,
        deadline: Instant,
    ) -> Result<Operation<'_>> {
        check_len(remote, dest.len)?;
        let place = Span { len: dest.len.max(1), ..dest };
        let operation = self.operations.begin(Some(place), deadline)?;
        operation.hold(&connection.socket)?;
        Ok(operation)
    }

    /// Tells `peer` all of it; the outcomes come in the order of the notes.
    pub(in super::super) fn notify_many(
        &self,
        peer: &str,
        notes: &[Notification],
        deadline: Instant,
    ) -> Vec<Result<()>> {
        let mut outcomes = Vec::with_capacity(notes.len());
        for some in notes.chunks(MOST) {
            let first = outcomes.len();
            self.tell_at_once(peer, some, deadline, &mut outcomes);
            let told = outcomes.len() - first;
            outcomes.extend(some[told..].iter().map(|note| self.notify(peer, note, deadline)));
        }
        outcomes
    }

    fn tell_at_once(
        &self,
        peer: &str,
        notes: &[Notification],
        deadline: Instant,
        outcomes: &mut Vec<Result<()>>,
    ) {
        let text: usize = notes.iter().map(|note| note.name().len() + note.message().len()).sum();
        if text > TEXT || notes.len() < 2 {
            return;
        }
        let Ok(operation) = self.operations.begin(None, deadline) else { return };
        let Some((peer, endpoint, mut connection)) = self.kept(peer) else { return };
        if operation.hold(&connection.socket).is_err() {
            return;
        }
        let first = outcomes.len();
        let end = connection.notify_many(notes, deadline, outcomes);
        let told = outcomes[first..].iter().filter(|told| told.is_ok()).count();
        self.counters.notes.fetch_add(told as u64, Ordering::Relaxed);
        if operation.release().is_ok() {
            outcomes.extend(self.put_away(&peer, &endpoint, connection, end).map(Err));
        }
    }

    /// A kept connection to another relay, if there is one.
    fn kept(&self, peer: &str) -> Option<(Arc<Peer>, Arc<Endpoint>, Connection)> {
        let peer = self.peers.find(peer).ok()?;
        let (endpoint, connection) = peer.kept()?;
        Some((peer, endpoint, connection))
    }

    /// Keeps the connection, or closes it; how the first request ended that was not answered, if it did.
    fn put_away(
        &self,
        peer: &Peer,
        endpoint: &Endpoint,
        connection: Connection,
        end: Result<(), Option<Error>>,
    ) -> Option<Error> {
        let error = match end {
            Ok(()) => {
                peer.keep(connection);
                return None;
            }
            Err(error) => error,
        };
        match &error {
            Some(Error::PeerFailed { .. } | Error::TimedOut) => peer.forget(endpoint),
            Some(_) => {}
            None => {
                // It may have been closed since its last use, and the others with it.
                self.counters.reconnects.fetch_add(1, Ordering::Relaxed);
                peer.close_idle();
            }
        }
        error
    }
}
