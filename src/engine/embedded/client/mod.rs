//! The requesting half: reads, writes and notifies over connections that are kept.
//!
//! ```text
//!   session id ─ask its control port─► Endpoint ─dial its data port─► Connection ─► idle, at the Peer
//!                                                                        ▲               │
//!                                                                        └── next call ──┘
//! ```
//!
//! Nothing is latched: whatever fails is forgotten, and the next call starts afresh.

mod ahead;
mod connection;
mod control;
mod dest;
mod many;
mod operation;
mod peer;
mod request;
mod socket;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use parking_lot::RwLock;
use tracing::trace;

pub(super) use self::many::MOST as AT_ONCE;
use self::{
    dest::Dest,
    operation::{Operation, Operations},
    peer::Peers,
};
use crate::{
    engine::{
        Filled, Identity, LocalBuffer, Notification, ReadError, RemoteBuffer,
        embedded::{builder::Patience, pace::Pace, staging::Landing},
    },
    error::{Error, Result},
    memory::Span,
};

/// Reads from, writes to and notifies any number of peers, from any number of threads.
///
/// Every call returns by its deadline, and sooner if the peer is silent for longer than our patience
/// lasts. What it says of the peer is [`Error::PeerFailed`],
/// [`Error::TimedOut`], [`Error::Stale`] or [`Error::Rejected`]; a session id that is no address is
/// [`Error::Metadata`], and [`Error::Io`] means that this process is out of descriptors or memory.
#[derive(Debug)]
pub(super) struct Client {
    operations: Operations,
    peers: Peers,
    counters: Counters,
    patience: Patience,
    pace: RwLock<Pace>,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    notes: AtomicU64,
    bytes: AtomicU64,
    reconnects: AtomicU64,
    descriptors: AtomicU64,
}

impl Client {
    /// A client whose calls fail until [`start`](Self::start).
    pub(super) fn new(patience: Patience) -> Self {
        Self {
            operations: Operations::default(),
            peers: Peers::default(),
            counters: Counters::default(),
            patience,
            pace: RwLock::default(),
        }
    }

    /// From now on its calls wait so.
    pub(super) fn wait_by(&self, pace: Pace) {
        *self.pace.write() = pace;
    }

    pub(super) fn start(&self) {
        self.operations.start();
    }

    /// Ends every call that is under way, and closes every connection.
    pub(super) fn stop(&self) {
        self.operations.stop();
        self.peers.clear();
    }

    /// Opens `peer`, and a connection to it, so that the first read costs no more than the next.
    pub(super) fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        let operation = self.operations.begin(None, deadline)?;
        let peer = self.peers.find(peer)?;
        if self.endpoint(&operation, &peer, None)?.has_status() {
            self.request(&operation, &peer, None, |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// Fills `local`; the buffer always comes back.
    pub(super) fn read(
        &self,
        remote: &RemoteBuffer,
        mut local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let filled = match local.bytes_mut() {
            Some(dest) => self.fill(remote, Dest::Host(dest), deadline),
            None => Err(not_host()),
        };
        match filled {
            Ok(verified) => Ok(Filled { buffer: local, verified }),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    /// Fills a slot on a device, through chunks; `Ok` once the last was copied.
    pub(super) fn read_staged(
        &self,
        remote: &RemoteBuffer,
        mut landing: Landing,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let filled = self.fill(remote, Dest::Device(&mut landing), deadline);
        if filled.is_ok() {
            landing.count();
        }
        landing.end(filled, (), deadline)
    }

    /// Fills `dest` where the peer can check the identity; `None` where it cannot, or there is
    /// none. `dest` is untouched unless the peer has said that it holds that put; a connection that
    /// breaks after that leaves the bytes that came before.
    pub(super) fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        let identity = remote.identity.as_ref()?;
        self.fill_identified(remote, identity, dest, deadline).transpose()
    }

    /// Writes `local` to `remote`, and returns once the peer has stored it.
    pub(super) fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        let written = match local.bytes() {
            Some(bytes) => self.store(remote, bytes, deadline),
            None => Err(not_host()),
        };
        match written {
            Ok(()) => Ok(local),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    /// Tells `peer`; `Ok` means that it has the note in its queue.
    pub(super) fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        let operation = self.operations.begin(None, deadline)?;
        let peer = self.peers.find(peer)?;
        let endpoint = self.endpoint(&operation, &peer, None)?;
        if endpoint.instance.is_some() {
            let told = self.request(&operation, &peer, None, |endpoint, connection| {
                // It was another peer when we looked first.
                if endpoint.instance.is_none() {
                    return Ok(false);
                }
                connection.notify(note, deadline).map(|()| true)
            })?;
            if told {
                self.counters.notes.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
        }
        let told = self.notify_control(&operation, &peer, &endpoint, note);
        match &told {
            Ok(()) => drop(self.counters.notes.fetch_add(1, Ordering::Relaxed)),
            Err(_) => peer.forget(&endpoint),
        }
        told
    }

    /// Ends the reads that fill a part of `span`, and waits until they have let go of it. False:
    /// `deadline` passed first.
    pub(super) fn end_reads_into(&self, span: Span, deadline: Instant) -> bool {
        self.operations.end_into(Span { len: span.len.max(1), ..span }, deadline)
    }

    /// Closes the kept connections that their peers have closed.
    pub(super) fn tend(&self) {
        self.peers.drop_dead();
    }

    /// Hands each counter to `each`.
    pub(super) fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let Counters { reads, notes, bytes, reconnects, descriptors } = &self.counters;
        each("reads_tcp", reads.load(Ordering::Relaxed));
        each("notes_tcp", notes.load(Ordering::Relaxed));
        each("bytes_read_tcp", bytes.load(Ordering::Relaxed));
        each("reconnects", reconnects.load(Ordering::Relaxed));
        each("descriptor_fetches", descriptors.load(Ordering::Relaxed));
    }

    /// Whether the peer checked the identity.
    fn fill(&self, remote: &RemoteBuffer, mut dest: Dest<'_>, deadline: Instant) -> Result<bool> {
        let dest = &mut dest;
        let operation = self.begin(remote, dest, deadline)?;
        let identity = remote.identity.as_ref();
        if remote.len == 0 && identity.is_none() {
            return Ok(false);
        }
        let peer = self.peers.find(&remote.peer)?;
        if remote.len == 0 && self.endpoint(&operation, &peer, identity)?.instance.is_none() {
            return Ok(false);
        }
        let verified = self.request(&operation, &peer, identity, |endpoint, connection| {
            match identity {
                Some(identity) if endpoint.instance.is_some() => {
                    connection.read_identified(identity, remote.ptr, dest, deadline)?;
                    return Ok(true);
                }
                // The identity alone was wanted, and the peer that knew it is gone.
                _ if dest.is_empty() => {}
                _ if endpoint.has_status() => connection.read(remote.ptr, dest, deadline)?,
                _ => connection.read_v1(remote.ptr, dest, deadline)?,
            }
            Ok(false)
        })?;
        self.count(remote);
        Ok(verified)
    }

    /// `None`: the peer cannot check it.
    fn fill_identified(
        &self,
        remote: &RemoteBuffer,
        identity: &Identity,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<()>> {
        let dest = &mut Dest::Host(dest);
        let operation = self.begin(remote, dest, deadline)?;
        let peer = self.peers.find(&remote.peer)?;
        if self.endpoint(&operation, &peer, Some(identity))?.instance.is_none() {
            return Ok(None);
        }
        let done = self.request(&operation, &peer, Some(identity), |endpoint, connection| {
            if endpoint.instance.is_none() {
                return Ok(None);
            }
            connection.read_identified(identity, remote.ptr, dest, deadline).map(Some)
        })?;
        self.count(remote);
        Ok(done)
    }

    fn store(&self, remote: &RemoteBuffer, bytes: &[u8], deadline: Instant) -> Result<()> {
        let operation = self.operations.begin(None, deadline)?;
        check_len(remote, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let peer = self.peers.find(&remote.peer)?;
        self.request(&operation, &peer, None, |endpoint, connection| {
            if endpoint.has_status() {
                connection.write(remote.ptr, bytes, deadline)
            } else {
                connection.write_v1(remote.ptr, bytes, deadline)
            }
        })
    }

    fn begin(
        &self,
        remote: &RemoteBuffer,
        dest: &mut Dest<'_>,
        deadline: Instant,
    ) -> Result<Operation<'_>> {
        check_len(remote, dest.len())?;
        // A read of nothing has a place too, or it could not be ended.
        let span = dest.span();
        self.operations.begin(Some(Span { len: span.len.max(1), ..span }), deadline)
    }

    fn count(&self, remote: &RemoteBuffer) {
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(remote.len as u64, Ordering::Relaxed);
        trace!(peer = &*remote.peer, len = remote.len, "read");
    }
}

fn check_len(remote: &RemoteBuffer, len: usize) -> Result<()> {
    if remote.len == len {
        return Ok(());
    }
    Err(Error::TooLarge { len: remote.len, slot_size: len })
}

#[cold]
fn not_host() -> Error {
    Error::Engine {
        engine: "embedded",
        reason: "it reads device memory, and does not write from it: use host memory".to_owned(),
    }
}

#[cfg(test)]
mod tests;
