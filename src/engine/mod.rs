//! Engines: how bytes travel.
#![allow(unsafe_code)] // declares `unsafe fn register`; calls nothing unsafe

mod buffer;
#[cfg(feature = "embedded")]
mod embedded;
mod exports;
mod identity;
mod inprocess;

use std::time::Instant;

pub(crate) use self::buffer::Lender;
#[cfg(feature = "embedded")]
pub use self::embedded::{EmbeddedBuilder, EmbeddedEngine};
pub use self::{
    buffer::{Filled, LocalBuffer, ReadError, RemoteBuffer, Stamp},
    identity::{Identity, Instance, Note, Notification, TransferId},
};
use crate::{error::Result, memory::Span, doorbell::Doorbell};

/// A transport that reads a peer's registered memory.
///
/// An engine owns no policy: it neither queues, retries nor chooses threads. The relay calls
/// [`read`](Self::read) and [`notify`](Self::notify) from its transfer threads and from callers
/// that wait, and [`poll`](Self::poll) from one thread at a time.
///
/// # Contract
///
/// 1. [`read`](Self::read) returns `Ok` only when every byte is visible to the caller, and returns
///    by its deadline. It gives the buffer back, unless the engine may still write into it.
/// 2. [`notify`](Self::notify) says whether the peer took it: `Ok` means that the peer's
///    [`poll`](Self::poll) will report it, once.
/// 3. [`poll`](Self::poll), [`publish`](Self::publish), [`retract`](Self::retract) and
///    [`cut`](Self::cut) never block.
/// 4. Only what is published at that moment is served, and after [`Retracted::Quiet`] no byte of
///    it is read any more.
/// 5. Nothing unwinds or aborts across it.
///
/// `mooncake_relay::conformance` (feature `conformance`) states all this as functions.
pub trait Engine: Send + Sync + 'static {
    /// The address under which peers reach this engine: `host:port`, IPv6 in brackets.
    fn session_id(&self) -> &str;

    /// The transport's name in the metadata: `"tcp"`, `"rdma"`, …
    fn protocol(&self) -> &str;

    /// Called by the relay before its first [`register`](Self::register).
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) while another relay uses this engine.
    fn start(&self, instance: &Instance) -> Result<()>;

    /// Called by the relay after its last [`unregister`](Self::unregister). Ends what still waits.
    fn stop(&self, deadline: Instant);

    /// Makes `span` known: to be read by peers where and while it is published, or to be filled by
    /// [`read`](Self::read).
    ///
    /// # Safety
    ///
    /// The span stays mapped until [`unregister`](Self::unregister) has returned `Ok`.
    unsafe fn register(&self, span: Span, access: Access) -> Result<()>;

    /// Forgets `span`, once the reads of it that are under way have ended or were ended.
    ///
    /// # Errors
    ///
    /// After an error the engine may still touch the span, so its owner never unmaps it.
    fn unregister(&self, span: Span) -> Result<()>;

    /// Prepares for reads from `peer`, so that the first costs no more than the next.
    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        let _ = (peer, deadline);
        Ok(())
    }

    /// Fills `local` with the bytes of `remote`. Both are of one length.
    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError>;

    /// Does many reads; the outcomes come in the order asked. By default one after another.
    fn read_many(
        &self,
        reads: Vec<(RemoteBuffer, LocalBuffer)>,
        deadline: Instant,
    ) -> Vec<Result<Filled, ReadError>> {
        reads.into_iter().map(|(remote, local)| self.read(&remote, local, deadline)).collect()
    }

    /// Reads `remote` straight into `dest`, which is as long. `None`: go through a slot.
    ///
    /// `Some(Ok(()))` means that the identity was verified. On an error `dest` is untouched unless
    /// the copy had begun.
    fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        let _ = (remote, dest, deadline);
        None
    }

    /// Fills `remote` with the bytes of `local`.
    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError>;

    /// Tells `peer`, and says whether it took the note.
    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()>;

    /// Hands each event since the last call to `events`. Never blocks.
    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()>;

    /// Opens a slot to reads by peers. Never blocks.
    fn publish(&self, slot: &Publication);

    /// Closes a slot to new reads and says whether one is under way. Never blocks; asked again
    /// until [`Retracted::Quiet`].
    fn retract(&self, slot: &Publication) -> Retracted;

    /// The quarantine is over: as [`retract`](Self::retract), and ends what still reads.
    fn cut(&self, slot: &Publication) -> Retracted {
        self.retract(slot)
    }

    /// The bell that this engine rings after it has queued an event for [`poll`](Self::poll).
    ///
    /// `None`, the default: the relay looks from time to time, which costs latency when nothing
    /// spins.
    fn doorbell(&self) -> Option<&Doorbell> {
        None
    }

    /// Hands the engine's own counters to `each`, for [`Relay::health`](crate::Relay::health).
    fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let _ = each;
    }
}

/// What peers may do with a registered span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Peers may read it, where and while it is [published](Engine::publish).
    Published,
    /// No peer reaches it; [`Engine::read`] fills it.
    Local,
}

/// One put, as the engine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Publication {
    /// The slot's index in its pool.
    pub slot: u32,
    /// Its bytes: the put's length, not the slot's.
    pub span: Span,
    /// Which put this is.
    pub identity: Identity,
    /// The stamp's value.
    pub stamp: u64,
    /// Where the stamp lies: eight bytes that peers may read from the first publication of the
    /// slot on, also after it was retracted.
    pub stamp_span: Span,
}

/// Whether a retracted slot is still being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Retracted {
    /// No read of it is under way, and none will begin.
    Quiet,
    /// A read of it is under way.
    Reading,
    /// This engine cannot know.
    Unknown,
}

/// What [`Engine::poll`] reports.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer's notification.
    Note(Notification),
    /// The relay of that instance is proven gone.
    PeerGone(Instance),
}
