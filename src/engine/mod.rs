//! Engines: how bytes travel.

mod buffer;
#[cfg(feature = "embedded")]
mod embedded;
mod ends;
mod exports;
mod inprocess;
#[cfg(feature = "mooncake")]
mod mooncake;
mod open;

use std::{fmt, os::fd::BorrowedFd, sync::Arc, time::Instant};

pub(crate) use self::buffer::Lender;
pub use self::buffer::{Filled, LocalBuffer, ReadError, RemoteBuffer, Stamp};
#[cfg(all(fuzzing, feature = "embedded"))]
pub use self::embedded::fuzzing;
#[cfg(feature = "embedded")]
pub use self::embedded::{EmbeddedBuilder, EmbeddedEngine, Staging};
pub use self::inprocess::InProcessEngine;
#[cfg(feature = "mooncake")]
pub use self::mooncake::{MooncakeConfig, MooncakeConnection, MooncakeEngine, Opcode};
pub use self::open::{EngineOptions, open_engine};
pub(crate) use crate::identity::{Identity, Instance, Notification, TransferId};
use crate::{
    doorbell::Doorbell,
    error::{Error, Result},
    memory::{Device, Span},
    wait::WaitStrategy,
};

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
///
/// No method may call the relay. What an engine may do with it is to drop a [`LocalBuffer`], which
/// returns its credit (but not within [`interrupt`](Self::interrupt)), and to ring its
/// [`Doorbell`].
///
/// # Examples
///
/// An engine that counts the reads of another. What it leaves at its default works, in a plainer
/// way: without `read_into`, say, a `get_into` goes through a slot. Two defaults are not for an engine
/// that checks identities, nor for one that wraps such: it must end what it serves, by
/// [`retract`](Self::retract) and [`cut`](Self::cut), or a reader of old metadata gets new bytes.
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering::Relaxed}, sync::Arc, time::Instant};
/// use mooncake_relay::*;
///
/// struct Counted<E> {
///     inner: E,
///     reads: AtomicU64,
/// }
///
/// impl<E: Engine> Engine for Counted<E> {
///     fn read(
///         &self,
///         remote: &RemoteBuffer,
///         local: LocalBuffer,
///         deadline: Instant,
///     ) -> Result<Filled, ReadError> {
///         self.reads.fetch_add(1, Relaxed);
///         self.inner.read(remote, local, deadline)
///     }
///
///     fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
///         each("reads_counted", self.reads.load(Relaxed));
///         self.inner.counters(each);
///     }
///
///     fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
///         self.inner.poll(events)
///     }
///     fn retract(&self, slot: &Publication) -> Retracted {
///         self.inner.retract(slot)
///     }
///
///     fn cut(&self, slot: &Publication) -> Retracted {
///         self.inner.cut(slot)
///     }
///     // … and so on: eleven methods have no default.
/// #   fn session_id(&self) -> &str { self.inner.session_id() }
/// #   fn protocol(&self) -> &str { self.inner.protocol() }
/// #   fn start(&self, instance: &Instance) -> Result<()> { self.inner.start(instance) }
/// #   fn stop(&self, deadline: Instant) { self.inner.stop(deadline) }
/// #   unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
/// #       unsafe { self.inner.register(span, access) }
/// #   }
/// #   fn unregister(&self, span: Span) -> Result<()> { self.inner.unregister(span) }
/// #   fn write(&self, remote: &RemoteBuffer, local: LocalBuffer, deadline: Instant)
/// #       -> Result<LocalBuffer, ReadError> { self.inner.write(remote, local, deadline) }
/// #   fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
/// #       self.inner.notify(peer, note, deadline)
/// #   }
/// #   fn publish(&self, slot: &Publication) { self.inner.publish(slot) }
/// #   fn doorbell(&self) -> Option<&Doorbell> { self.inner.doorbell() }
/// }
///
/// let engine = Counted { inner: InProcessEngine::new("doc-engine")?, reads: AtomicU64::new(0) };
/// let relay = Relay::new(Arc::new(engine), &Config::default().with_slot_size(4096))?;
/// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
/// assert_eq!(&relay.get(&metadata)?.wait()?[..], b"hello");
/// assert_eq!(relay.health().counters.engine["reads_counted"], 1);
/// # Ok::<(), Error>(())
/// ```
pub trait Engine: Send + Sync + 'static {
    /// The address under which peers reach this engine, as it stands in the metadata: `host:port`,
    /// IPv6 in brackets. The same for the engine's whole life.
    fn session_id(&self) -> &str;

    /// The transport's name in the metadata: `"tcp"`, `"rdma"`, … A relay gets nothing from a sender
    /// that names another.
    fn protocol(&self) -> &str;

    /// How the relay's callers wait. Called before each [`start`](Self::start): an engine that may
    /// spin before it sleeps does so as they do, and not where they park. By default it does nothing.
    fn waits(&self, strategy: WaitStrategy) {
        let _ = strategy;
    }

    /// Called by the relay before its first [`register`](Self::register).
    ///
    /// # Errors
    ///
    /// [`Error::Config`] while another relay uses this engine.
    fn start(&self, instance: &Instance) -> Result<()>;

    /// Called by the relay after its last [`unregister`](Self::unregister). Ends what still waits;
    /// calls that come in its middle or after it fail, or do nothing.
    fn stop(&self, deadline: Instant);

    /// Where peers on this host find this engine, to read from it without a socket; the relay puts
    /// it into its metadata. Asked once, after [`start`](Self::start). By default there is no such
    /// place.
    fn local(&self) -> Option<Arc<str>> {
        None
    }

    /// `span`, which will be registered next, is `slots` slots of one size, and all of the memory
    /// file `fd`, or its beginning. The file is sealed: nobody but its owner can write to it. An
    /// engine may have peers map it to read. By default it does nothing.
    fn backed_by(&self, span: Span, slots: u32, fd: BorrowedFd<'_>) {
        let _ = (span, slots, fd);
    }

    /// `span`, which will be registered next, is `slots` slots of one size in memory of `device`. The processor
    /// cannot touch it: a [`LocalBuffer`] in it has no [`bytes`](LocalBuffer::bytes), and what is
    /// [published](Self::publish) in it has none either. Forgotten when it is unregistered. By
    /// default it is refused.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] from an engine that moves host memory only; the relay is not made then.
    fn device_memory(&self, span: Span, slots: u32, device: Arc<dyn Device>) -> Result<()> {
        let _ = (span, slots);
        Err(Error::config(
            "engine",
            format!(
                "this engine ({}) does not reach the memory of {}: use one that does (the embedded \
                 engine, or the Mooncake engine where it is built with CUDA), or a relay in host \
                 memory and copies of your own",
                self.protocol(),
                device.location()
            ),
        ))
    }

    /// Which way bytes come from `peer` at present, for [`Relay::health`](crate::Relay::health):
    /// `"local"`, `"tcp"`, `"cuda-ipc"`, …. `None`, the default: as [`protocol`](Self::protocol) says.
    fn way(&self, peer: &str) -> Option<&'static str> {
        let _ = peer;
        None
    }

    /// Makes `span` known: to be read by peers where and while it is published, or to be filled by
    /// [`read`](Self::read).
    ///
    /// # Safety
    ///
    /// The span stays mapped until [`unregister`](Self::unregister) has returned `Ok`. If the processor
    /// cannot touch it, [`device_memory`](Self::device_memory) was told of it. Of an
    /// [`Access::Published`] one, nobody writes the bytes of a [`Publication`] from
    /// [`publish`](Self::publish) on until a [`retract`](Self::retract) or [`cut`](Self::cut) of it
    /// has said [`Retracted::Quiet`].
    #[allow(unsafe_code)] // a promise to the engine
    unsafe fn register(&self, span: Span, access: Access) -> Result<()>;

    /// Forgets `span`, once the reads of it that are under way have ended or were ended.
    ///
    /// # Errors
    ///
    /// After an error the engine may still touch the span, so its owner never unmaps it.
    fn unregister(&self, span: Span) -> Result<()>;

    /// Prepares for reads from `peer`, so that the first costs no more than the next. By default it
    /// does nothing.
    ///
    /// A relay's transfer threads call it before they read from a peer that has not answered yet or
    /// failed last time. The `deadline` is 50 ms away at first, and with each miss twice that: up to a
    /// second while gets from others wait, which a peer that does not answer must not keep waiting,
    /// and up to ten seconds while none does.
    ///
    /// # Errors
    ///
    /// After [`Error::TimedOut`] the relay tries again while the get's own
    /// deadline lasts; any other ends the get.
    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        let _ = (peer, deadline);
        Ok(())
    }

    /// Fills `local` with the bytes of `remote`. Both are of one length.
    ///
    /// With an identity, [`Filled::verified`] says whether the engine made sure of it; if not, the
    /// relay reads the stamp by a second call.
    ///
    /// # Errors
    ///
    /// Of the kinds that a get's token has. [`Error::PeerFailed`] and
    /// [`Error::TimedOut`] say that the peer did not answer: the relay then
    /// lets it occupy one thread at a time until it does.
    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError>;

    /// How many reads from `peer` take less time in one [`read_many`](Self::read_many) than one by one, at
    /// most. 1, the default: it makes no difference, and the relay reads one by one. Never blocks.
    fn reads_at_once(&self, peer: &str) -> usize {
        let _ = peer;
        1
    }

    /// Does many reads; the outcomes come in the order asked. By default one after another.
    ///
    /// A relay calls it for small reads of one peer that answers, as many as
    /// [`reads_at_once`](Self::reads_at_once) says. After an [`interrupt`](Self::interrupt) of one of them
    /// the others may end too, with [`Aborted`](Error::Aborted): the relay reads those again, one by one.
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

    /// Pins `remote`, to be looked at where it is, for [`Relay::view`](crate::Relay::view). `None`,
    /// the default: it cannot be; nothing was asked of the peer.
    ///
    /// What it pins is ended by [`interrupt`](Self::interrupt) of its span, as a read is.
    fn view(&self, remote: &RemoteBuffer, deadline: Instant) -> Option<Result<Box<dyn Viewed>>> {
        let _ = (remote, deadline);
        None
    }

    /// Fills `remote` with the bytes of `local`. No relay calls it.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); [`Error::Rejected`] where writes are not
    /// allowed.
    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError>;

    /// Tells `peer`, and says whether it took the note.
    ///
    /// # Errors
    ///
    /// The relay tries again after any but [`Error::Closed`].
    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()>;

    /// Tells `peer` several notes, in order; the outcomes come in that order. By default one after another.
    fn notify_many(
        &self,
        peer: &str,
        notes: &[Notification],
        deadline: Instant,
    ) -> Vec<Result<()>> {
        notes.iter().map(|note| self.notify(peer, note, deadline)).collect()
    }

    /// Hands each event since the last call to `events`. Never blocks.
    ///
    /// `events` ends puts: it calls [`retract`](Self::retract) of this engine, drops slots and tells
    /// tokens. So hold no lock over it.
    ///
    /// # Errors
    ///
    /// Counted as `poll_errors`; the relay looks again after 10 ms.
    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()>;

    /// Opens a slot to reads by peers, in place of what that slot published before. Never blocks.
    fn publish(&self, slot: &Publication);

    /// Closes a slot to new reads and says whether one is under way. Never blocks; asked again
    /// until [`Retracted::Quiet`].
    ///
    /// By default [`Retracted::Unknown`]: for an engine that serves whatever is registered, and so
    /// never says that a read was verified. An engine that does must end the publication here.
    fn retract(&self, slot: &Publication) -> Retracted {
        let _ = slot;
        Retracted::Unknown
    }

    /// The quarantine is over: as [`retract`](Self::retract), and ends what still reads.
    fn cut(&self, slot: &Publication) -> Retracted {
        self.retract(slot)
    }

    /// The read that fills `span` is wanted no more, or is to give way to the gets of others: it may
    /// end at once. Never blocks; asked again until the read has returned. By default the read goes on.
    ///
    /// A read that was to give way begins anew later if it ends with [`Aborted`](Error::Aborted),
    /// [`TimedOut`](Error::TimedOut), [`PeerFailed`](Error::PeerFailed) or
    /// [`Closed`](Error::Closed); any other error ends its get.
    ///
    /// Called under a lock of the relay's: it must not drop a [`LocalBuffer`].
    fn interrupt(&self, span: Span) {
        let _ = span;
    }

    /// Housekeeping: called about once a second while a relay is open. Never blocks.
    fn tend(&self) {}

    /// The bell that this engine rings after it has queued an event for [`poll`](Self::poll).
    ///
    /// `None`, the default: the relay looks from time to time, which costs latency when nothing
    /// spins.
    fn doorbell(&self) -> Option<&Doorbell> {
        None
    }

    /// Hands the engine's own counters to `each`, for [`Relay::health`](crate::Relay::health). By
    /// default there are none.
    fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let _ = each;
    }
}

/// A peer's bytes, pinned, from [`Engine::view`].
///
/// # Safety
///
/// The span is mapped to read for as long as the value lives, and while it
/// [`holds`](Self::holds) its bytes are those of the put that was asked for.
#[allow(unsafe_code)] // the engine promises
pub unsafe trait Viewed: fmt::Debug + Send + Sync {
    /// Where the bytes are. The same for the value's whole life.
    fn span(&self) -> Span;

    /// Whether the pin holds.
    fn holds(&self) -> bool;

    /// Copies the bytes to `dest`, which is as long. They are good if it holds afterwards.
    fn copy_to(&self, dest: &mut [u8]);

    /// Lets go of the pin, once; whether it held until now.
    fn end(&mut self) -> bool;
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
///
/// Between [`publish`](Engine::publish) and [`retract`](Engine::retract) peers may read `span`, as
/// those bytes of `identity`; `stamp_span` they may read for as long as its memory is registered.
///
/// ```
/// use mooncake_relay::{Publication, RemoteBuffer};
///
/// /// Whether a peer that asks for `wanted` may have it.
/// fn is_served(published: &Publication, wanted: &RemoteBuffer) -> bool {
///     published.span().contains(wanted.ptr, wanted.len)
///         && wanted.identity.is_none_or(|identity| identity == published.identity())
/// }
/// # let _: fn(&Publication, &RemoteBuffer) -> bool = is_served;
/// ```
#[derive(Clone, Copy)]
pub struct Publication {
    slot: u32,
    span: Span,
    identity: Identity,
    stamp: u64,
    stamp_span: Span,
}

impl Publication {
    /// A put of `span` from slot `slot`, whose stamp `stamp` lies in `stamp_span`. The relay makes
    /// them; whoever drives an engine by hand may.
    ///
    /// # Safety
    ///
    /// Both spans lie in memory that is registered with the engine as [`Access::Published`], and the
    /// stamp's is eight aligned bytes that only atomics touch. From [`Engine::publish`] on, nobody
    /// writes the bytes of `span` until the engine has said [`Retracted::Quiet`] of it, or was
    /// rid of the memory by [`Engine::unregister`].
    #[allow(unsafe_code)] // a promise to the engine
    pub unsafe fn new(
        slot: u32,
        span: Span,
        identity: Identity,
        stamp: u64,
        stamp_span: Span,
    ) -> Self {
        Self { slot, span, identity, stamp, stamp_span }
    }

    /// The slot's index in its pool.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Its bytes: the put's length, not the slot's.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Which put this is.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// The stamp's value: what proves the bytes to a reader that cannot be asked for the identity.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Where the stamp lies: eight bytes that peers may read from the first publication of the slot
    /// on, also after it was retracted.
    pub fn stamp_span(&self) -> Span {
        self.stamp_span
    }
}

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publication")
            .field("slot", &self.slot)
            .field("span", &self.span)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// Whether a retracted slot is still being read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub enum Retracted {
    /// No read of it is under way, and none will begin.
    Quiet,
    /// A read of it is under way.
    Reading,
    /// This engine cannot know.
    #[default]
    Unknown,
}

/// What [`Engine::poll`] reports.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer's notification.
    Note(Notification),
    /// The relay of that instance is proven gone: the engine has ended its reads.
    PeerGone(Instance),
    /// Who was in the middle of reading that put is proven gone.
    ReaderGone(TransferId),
}
