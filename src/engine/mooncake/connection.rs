//! The raw connection: addresses instead of slots, for who brings his own memory.
#![allow(unsafe_code)] // takes addresses

use std::{
    ptr::NonNull,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{
    aside,
    config::{MooncakeConfig, note_text},
    flight::{Opcode, Task},
    peers::TOO_MANY,
    shared::{Shared, Until, is_the_peers},
};
use crate::{
    engine::Notification,
    error::{Error, Result},
    memory::Span,
    process,
};

/// How long memory may take to be let go of by transfers that were given up.
pub(super) const UNREGISTER: Duration = Duration::from_secs(5);

/// A real Mooncake engine by its own calls: memory is registered by address, and transfers move
/// bytes between addresses. What [`MooncakeEngine`](crate::MooncakeEngine) stands on; a relay needs
/// none of it.
///
/// Who moves bytes by address has none of a relay's promises: nothing says whose bytes a read has
/// delivered, and memory that a transfer was given up on may still be written.
///
/// ```no_run
/// use std::time::{Duration, Instant};
/// use mooncake_relay::{MooncakeConfig, MooncakeConnection};
///
/// let connection = MooncakeConnection::open(&MooncakeConfig::default())?;
/// let mut memory = vec![0_u8; 1 << 20];
/// let soon = Instant::now() + Duration::from_secs(5);
/// // SAFETY: `memory` lives until after `close`, and is touched only between the calls.
/// unsafe {
///     connection.register_memory(memory.as_mut_ptr(), memory.len())?;
///     // The peer has told its session id and an address that it has registered.
///     let (peer, remote) = ("10.0.0.7:15000", 0x7f00_0000_0000);
///     connection.transfer_sync_read(peer, memory.as_mut_ptr(), remote, 4096, soon)?;
/// }
/// connection.close()?;
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Debug)]
pub struct MooncakeConnection {
    pub(super) shared: Arc<Shared>,
}

impl MooncakeConnection {
    /// Loads the library, unless it is loaded, and makes an engine of it. Its threads listen from
    /// then on.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a field that cannot work here; [`Error::Engine`] if no library is
    /// found, with every place that was looked at and what to install, or if it makes no engine.
    pub fn open(config: &MooncakeConfig) -> Result<Self> {
        Ok(Self { shared: Shared::open(config)? })
    }

    /// The name under which peers reach it: `host:port`.
    pub fn session_id(&self) -> &str {
        &self.shared.session_id
    }

    /// What carries the bytes: `tcp`, `rdma` or `nvlink`.
    pub fn protocol(&self) -> &str {
        &self.shared.protocol
    }

    /// Registers `len` bytes at `addr`, for peers to read **and write** and for transfers of this
    /// connection.
    ///
    /// # Safety
    ///
    /// They stay mapped until [`deregister_memory`](Self::deregister_memory) or
    /// [`close`](Self::close) has returned `Ok`, or the connection and all its transfers are gone.
    /// Until then peers may read and write them at any time.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if there are none, or if any of them is registered.
    pub unsafe fn register_memory(&self, addr: *mut u8, len: usize) -> Result<()> {
        let span = span(addr, len)?;
        // SAFETY: by this function's contract.
        unsafe { self.shared.spans.register(&self.shared.native, span, true) }
    }

    /// Forgets what was registered at `addr`. Waits a while for transfers that still use it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if nothing is registered there, so also the second time. After any other
    /// error the memory may still be touched.
    pub fn deregister_memory(&self, addr: *mut u8) -> Result<()> {
        process::check()?;
        let known = self.shared.spans.at(addr.expose_provenance() as u64);
        let known = known.ok_or_else(|| Error::config("addr", "nothing is registered there"))?;
        self.shared.spans.unregister(&self.shared.native, known, UNREGISTER)
    }

    /// Reads `len` bytes at `remote` in the peer's memory into `local`.
    ///
    /// # Safety
    ///
    /// `len` bytes at `local` are registered with this connection, and nobody else touches them
    /// until this returns. After [`Error::TimedOut`] or [`Error::Closed`] the engine may go on
    /// writing them: nobody may touch them until [`in_flight`](Self::in_flight) is 0.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] at the deadline; [`Error::PeerFailed`]; [`Error::Rejected`] if the peer
    /// has not registered the range; [`Error::Config`] if our memory is not registered.
    pub unsafe fn transfer_sync_read(
        &self,
        peer: &str,
        local: *mut u8,
        remote: u64,
        len: usize,
        deadline: Instant,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.transfer_sync(peer, local, remote, len, Opcode::Read, None, deadline) }
    }

    /// Writes `len` bytes at `local` to `remote` in the peer's memory.
    ///
    /// # Safety
    ///
    /// As [`transfer_sync_read`](Self::transfer_sync_read), except that the bytes may be read
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// As [`transfer_sync_read`](Self::transfer_sync_read).
    pub unsafe fn transfer_sync_write(
        &self,
        peer: &str,
        local: *mut u8,
        remote: u64,
        len: usize,
        deadline: Instant,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.transfer_sync(peer, local, remote, len, Opcode::Write, None, deadline) }
    }

    /// Moves `len` bytes one way or the other, and then tells the peer. An `Ok` says that it got the
    /// bytes and the note: the note is a call of its own, since the engine's combined one says
    /// nothing of whether it arrived.
    ///
    /// # Safety
    ///
    /// As [`transfer_sync_read`](Self::transfer_sync_read) or
    /// [`transfer_sync_write`](Self::transfer_sync_write).
    ///
    /// # Errors
    ///
    /// As those; after an error of the note's the bytes have arrived, and the error says so.
    #[allow(clippy::too_many_arguments, reason = "as the engine's own call has them")]
    pub unsafe fn transfer_sync(
        &self,
        peer: &str,
        local: *mut u8,
        remote: u64,
        len: usize,
        opcode: Opcode,
        note: Option<&Notification>,
        deadline: Instant,
    ) -> Result<()> {
        let shared = &self.shared;
        let local = span(local, len)?;
        if remote.checked_add(len as u64).is_none() {
            return Err(Error::config("remote", "address and length run past the end of memory"));
        }
        process::check()?;
        let lease = shared.spans.lease(local)?;
        let until = shared.until(deadline, [local])?;
        let peer = shared.peers.find(peer, shared.p2p)?;
        let segment = peer.segment_with(shared, None, (remote, len), &until)?.id;
        let tasks = vec![Task::new(remote, local, None, lease)];
        let mut landed = shared.transfer(&peer, segment, opcode, tasks, &until);
        landed.pop().map_or(Err(Error::TimedOut), |landed| landed.outcome)?;
        match note {
            Some(note) => self.notify(&peer.name, note, deadline),
            None => Ok(()),
        }
    }

    /// Tells a peer; `Ok` once it has taken the note. A peer that has answered within the last
    /// second is told on this thread, by a call of the engine's that knows no deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Metadata`] for a text with a NUL in it, or of more than 64 KiB;
    /// [`Error::TimedOut`]; [`Error::PeerFailed`].
    pub fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        let name = note_text("transfer_id", note.name())?;
        let text = note_text("message", note.message())?;
        let shared = &self.shared;
        let until = shared.until(deadline, [])?;
        let peer = shared.peers.find(peer, shared.p2p)?;
        let segment = peer.segment(shared, None, &until)?.id;
        let engine = Arc::clone(shared);
        let tell = move || engine.native.notify(segment, &name, &text);
        let told = if peer.is_trusted(shared) {
            Ok(tell())
        } else {
            aside::run(deadline, || until.check().is_err(), tell)
        };
        let told = match told {
            Ok(told) => told.map_err(|reason| Error::peer_failed(&peer.name, reason)),
            Err(Error::Exhausted) => Err(Error::peer_failed(&peer.name, TOO_MANY)),
            Err(error) => Err(until.check().err().unwrap_or(error)),
        };
        match &told {
            Ok(()) => peer.answers(shared),
            Err(error) if is_the_peers(Some(error)) => peer.failed(),
            Err(_) => {}
        }
        told
    }

    /// What peers have told since the last call. While a relay uses this engine they are the
    /// relay's, which misses what is taken here.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if there is no memory for them.
    pub fn get_notifies(&self) -> Result<Vec<Notification>> {
        process::check()?;
        let mut refused = 0;
        let notes = self.shared.native.notes(&mut refused);
        if refused > 0 {
            self.shared.counters.notes_refused.fetch_add(refused, Ordering::Relaxed);
            tracing::warn!(refused, "notifications that are no UTF-8, or have a NUL, were dropped");
        }
        notes
    }

    /// How many transfers may still touch memory that is registered here, from before they begin
    /// until they have ended, whether or not anybody waits for them.
    pub fn in_flight(&self) -> usize {
        self.shared.spans.busy()
    }

    /// Ends what waits, refuses what comes, and deregisters everything. The engine itself ends when
    /// the connection is dropped and nothing is in flight.
    ///
    /// # Errors
    ///
    /// The first one of [`deregister_memory`](Self::deregister_memory): memory may still be touched.
    pub fn close(&self) -> Result<()> {
        process::check()?;
        self.shared.stop();
        let mut first = Ok(());
        for span in self.shared.own_spans() {
            let closed = self.shared.spans.unregister(&self.shared.native, span, UNREGISTER);
            if first.is_ok() {
                first = closed;
            }
        }
        first
    }

    /// Prepares for transfers with `peer`: knows its segment, and has a connection to it.
    pub(super) fn connect(&self, peer: &str, until: &Until<'_>) -> Result<()> {
        let shared = &self.shared;
        let peer = shared.peers.find(peer, shared.p2p)?;
        let opened = peer.segment(shared, None, until)?;
        // The engine has no call for a connection: a read of anything makes one.
        if opened.fresh
            && let Some(word) = shared.scratch()
            && let Some(remote) = opened.open_to_all(word.span().len)
        {
            let lease = shared.spans.lease(word.span())?;
            let tasks = vec![Task::new(remote, word.span(), Some(word), lease)];
            // Where it fails the next read says so, and tries again.
            drop(shared.transfer(&peer, opened.id, Opcode::Read, tasks, until));
            until.check()?;
        }
        Ok(())
    }
}

fn span(addr: *mut u8, len: usize) -> Result<Span> {
    let ptr = NonNull::new(addr).ok_or_else(|| Error::config("addr", "it is NULL"))?;
    match (addr.expose_provenance()).checked_add(len) {
        Some(_) if len > 0 => Ok(Span { ptr, len }),
        _ => Err(Error::config("len", "memory of no length, or past the end of memory")),
    }
}
