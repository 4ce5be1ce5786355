//! The same host: bytes and notes by shared memory, chosen by itself where a peer can be met.
//!
//! ```text
//!   owner of slots (its server's thread)            reader (the thread that needs it)
//!   listens at a socket named by its instance  ◄──  connects, says who it is and whom it wants
//!   same user, right instance: makes the       ──►  checks user, instance, seals and sizes;
//!   pair's region, hands out descriptors            maps slots to read, closes descriptors
//!
//!   asks each pair's pins before a slot        ◄──  pins, copies, lets go
//!   goes on; revokes after the quarantine           finds out when it lets go
//!   reads the pair's ring when it polls        ◄──  notes, then a ring of the shared doorbell
//!   socket ends: pins are gone, puts too            socket ends: reads end, the mapping goes
//! ```
//!
//! Whatever does not fit goes by TCP, which is always there.

mod device;
mod door;
#[cfg(any(fuzzing, test))]
#[cfg_attr(test, allow(unreachable_pub))] // it is reached by fuzz targets
pub(super) mod fuzzing;
mod meeting;
mod message;
mod note;
mod page;
mod reader;
mod region;
mod shelf;
mod socket;
mod source;
mod sources;

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use mio::Registry;
use parking_lot::{Condvar, Mutex, RwLock};
use tracing::{debug, info};

use self::{
    door::SOURCE,
    page::{FIXED, Pages},
    reader::{Reader, Readers},
    shelf::{Backing, Shelf},
    source::{Source, Told},
    sources::{Known, Sources},
};
pub(super) use self::{
    door::{DOOR, Door},
    reader::{Heard, Look},
    source::Sight,
};
use crate::{
    affinity,
    doorbell::Doorbell,
    engine::{
        Filled, Instance, Notification, Publication, ReadError, RemoteBuffer, Retracted,
        embedded::staging::{Landing, Stager},
    },
    error::{Error, Result},
    identity::Hex,
    memory::{Copier, Device, PAGE, Span},
};

const PREFIX: &str = "mooncake-relay-";

/// The name under which the relay of that instance listens.
pub(super) fn name(instance: Instance) -> String {
    format!("{PREFIX}{instance}")
}

/// What one engine has to do with this host's others.
#[derive(Debug)]
pub(super) struct Local {
    /// The engine's session id.
    session: Box<str>,
    bell: Arc<Doorbell>,
    /// The bell's page; `None` where there is none, and no shared memory then.
    bell_fd: Option<OwnedFd>,
    /// While a relay uses it.
    running: RwLock<Option<Running>>,
    shelf: RwLock<Option<Arc<Shelf>>>,
    /// The device that our slots are on.
    stager: RwLock<Option<Arc<Stager>>>,
    /// Who may have mapped our device memory, and which.
    borrowers: Mutex<Vec<(Span, Arc<Reader>)>>,
    borrower_left: Condvar,
    readers: Readers,
    sources: Sources,
    next: AtomicUsize,
    /// Sources that have gone since the last poll.
    gone: Mutex<Vec<Instance>>,
    any_gone: AtomicBool,
    counters: CachePadded<Counters>,
    /// For what is large.
    copier: Arc<Copier>,
    /// How long meeting a peer may take.
    patience: Duration,
}

#[derive(Debug)]
struct Running {
    instance: Instance,
    name: Arc<str>,
    registry: Registry,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    /// From device to device.
    ipc: AtomicU64,
    ipc_refused: AtomicU64,
    bytes: AtomicU64,
    notes: AtomicU64,
}

impl Local {
    /// `wanted`: whether shared memory may be used at all.
    pub(super) fn new(wanted: bool, session: &str, patience: Duration) -> Self {
        let page = wanted.then(|| Pages::make("mooncake-relay-bell", PAGE, FIXED));
        let (bell, bell_fd) = match page {
            Some(Ok((page, fd))) => (Doorbell::shared(Arc::new(page)), Some(fd)),
            Some(Err(error)) => {
                debug!(%error, "no shared memory: peers on this host are reached by TCP");
                (Doorbell::new(), None)
            }
            None => (Doorbell::new(), None),
        };
        Self {
            session: session.into(),
            bell: Arc::new(bell),
            bell_fd,
            running: RwLock::new(None),
            shelf: RwLock::new(None),
            stager: RwLock::new(None),
            borrowers: Mutex::default(),
            borrower_left: Condvar::new(),
            readers: Readers::default(),
            sources: Sources::default(),
            next: AtomicUsize::new(0),
            gone: Mutex::default(),
            any_gone: AtomicBool::new(false),
            counters: CachePadded::default(),
            copier: Arc::new(Copier::new(affinity::allowed().len())),
            patience,
        }
    }

    pub(super) fn bell(&self) -> &Arc<Doorbell> {
        &self.bell
    }

    /// Opens the door; `None` where there is none, which costs nothing but speed.
    pub(super) fn start(
        &self,
        instance: Instance,
        registry: &Registry,
        most: usize,
    ) -> Option<Door> {
        self.bell_fd.as_ref()?;
        let open = || {
            let door = Door::open(instance, registry.try_clone()?, most)?;
            Ok::<_, io::Error>((door, registry.try_clone()?))
        };
        let (door, registry) = open()
            .inspect_err(|error| debug!(%error, "no door: this host's peers come by TCP"))
            .ok()?;
        let name = name(instance).into();
        *self.running.write() = Some(Running { instance, name, registry });
        Some(door)
    }

    /// Ends everything, here and at the peers.
    pub(super) fn stop(&self) {
        *self.running.write() = None;
        self.withdraw();
        self.readers.clear();
        self.sources.clear();
        self.gone.lock().clear();
        *self.stager.write() = None;
    }

    /// Where peers on this host are met.
    pub(super) fn name(&self) -> Option<Arc<str>> {
        self.running.read().as_ref().map(|running| Arc::clone(&running.name))
    }

    /// The slots of the relay lie in that memfd.
    pub(super) fn backed_by(&self, span: Span, slots: u32, fd: BorrowedFd<'_>) {
        if self.bell_fd.is_none() {
            return;
        }
        match Shelf::of_file(span, slots, fd) {
            Ok(shelf) => *self.shelf.write() = Some(Arc::new(shelf)),
            Err(error) => debug!(%error, "our slots cannot be lent on this host"),
        }
    }

    /// Our slots are on that device: what a peer lends may be mapped there.
    pub(super) fn on_device(&self, stager: &Arc<Stager>) {
        *self.stager.write() = Some(Arc::clone(stager));
    }

    /// The slots of the relay lie on that device.
    pub(super) fn lend_device(&self, span: Span, slots: u32, device: &dyn Device) {
        if self.bell_fd.is_none() {
            return;
        }
        let handle = device
            .ipc_handle(span)
            .inspect_err(|error| info!(%error, "no other process can map our slots on the device"))
            .ok();
        match Shelf::new(span, slots, Backing::Device(device.uuid(), handle)) {
            Ok(shelf) => *self.shelf.write() = Some(Arc::new(shelf)),
            Err(error) => debug!(%error, "our slots cannot be lent on this host"),
        }
    }

    pub(super) fn publish(&self, publication: &Publication) {
        if let Some(shelf) = &*self.shelf.read() {
            shelf.publish(publication);
        }
    }

    pub(super) fn retract(&self, publication: &Publication) -> Retracted {
        let shelf = self.shelf.read();
        let Some(shelf) = &*shelf else { return Retracted::Quiet };
        shelf.retire(publication);
        if self.readers.read(publication) { Retracted::Reading } else { Retracted::Quiet }
    }

    pub(super) fn cut(&self, publication: &Publication) {
        if let Some(shelf) = self.shelf() {
            shelf.retire(publication);
            self.readers.revoke(publication);
        }
    }

    /// Our slots are about to go: nobody reads them any more.
    pub(super) fn unregister(&self, span: Span) {
        if self.shelf.read().as_ref().is_some_and(|shelf| shelf.span == span) {
            self.withdraw();
        }
    }

    /// Waits until nobody has mapped that device memory of ours any more. False: `deadline` passed
    /// first.
    pub(super) fn has_all_back(&self, span: Span, deadline: Instant) -> bool {
        let has_it = |(borrowed, _): &&(Span, Arc<Reader>)| *borrowed == span;
        let mut borrowers = self.borrowers.lock();
        borrowers.iter().filter(has_it).for_each(|(_, reader)| reader.dismiss());
        while borrowers.iter().any(|one| has_it(&one)) {
            if self.borrower_left.wait_until(&mut borrowers, deadline).timed_out() {
                return !borrowers.iter().any(|one| has_it(&one));
            }
        }
        true
    }

    /// Ends the reads and views inside `span`. False: some had not ended by `deadline`.
    pub(super) fn end_inside(&self, span: Span, deadline: Instant) -> bool {
        self.sources.end_inside(Span { len: span.len.max(1), ..span }, deadline)
    }

    /// Reads through shared memory, straight into `dest`. `None`: go by TCP.
    pub(super) fn read(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        let source = self.source(remote, deadline)?;
        if remote.len != dest.len() || Instant::now() >= deadline {
            return None; // the other way says what is wrong
        }
        let read = source.read(remote, dest, deadline)?;
        if read.is_ok() {
            self.counters.reads.fetch_add(1, Ordering::Relaxed);
            self.counters.bytes.fetch_add(remote.len as u64, Ordering::Relaxed);
        }
        Some(read)
    }

    /// As [`read`](Self::read), into a slot on a device. The landing comes back if it must go by TCP.
    pub(super) fn read_device(
        &self,
        remote: &RemoteBuffer,
        landing: Landing,
        deadline: Instant,
    ) -> Result<Result<Filled, ReadError>, Box<Landing>> {
        let landing = Box::new(landing);
        let Some(source) = self.source(remote, deadline) else { return Err(landing) };
        if remote.len != landing.span().len || Instant::now() >= deadline {
            return Err(landing); // the other way says what is wrong
        }
        let read = device::read(&source, remote, landing, deadline)?;
        if read.is_ok() {
            self.counters.reads.fetch_add(1, Ordering::Relaxed);
            self.counters.bytes.fetch_add(remote.len as u64, Ordering::Relaxed);
            if source.lends_device() {
                self.counters.ipc.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(read)
    }

    /// Pins `remote`, to be looked at in place. `None`: it is not on this host.
    pub(super) fn view(&self, remote: &RemoteBuffer, deadline: Instant) -> Option<Result<Sight>> {
        let sight = Sight::of(&self.source(remote, deadline)?, remote)?;
        if sight.is_ok() {
            self.counters.reads.fetch_add(1, Ordering::Relaxed);
        }
        Some(sight)
    }

    /// Tells a peer through its ring. `None`: go by TCP.
    pub(super) fn notify(
        &self,
        session: &str,
        note: &Notification,
        deadline: Instant,
    ) -> Option<Result<()>> {
        let source = self.sources.latest(session)?;
        match source.notify(note, deadline) {
            Told::Taken => {
                self.counters.notes.fetch_add(1, Ordering::Relaxed);
                Some(Ok(()))
            }
            Told::Elsewhere => None,
            Told::Full => Some(Err(Error::TimedOut)),
        }
    }

    /// Which way bytes come from that peer; `None`: by TCP.
    pub(super) fn way(&self, session: &str) -> Option<&'static str> {
        self.sources.latest(session)?.way(self.stager.read().is_some())
    }

    /// Whether we can tell that the relay of that instance lives.
    pub(super) fn is_alive(&self, instance: Instance) -> bool {
        self.sources.are_any_of(instance)
    }

    /// Begins a look at what readers have said.
    pub(super) fn look(&self) -> Option<Look<'_>> {
        self.readers.look()
    }

    /// Hands out the sources that have gone.
    pub(super) fn each_gone(&self, each: impl FnMut(Instance)) {
        if self.any_gone.load(Ordering::Acquire) {
            self.any_gone.store(false, Ordering::Relaxed);
            let gone = std::mem::take(&mut *self.gone.lock());
            gone.into_iter().for_each(each);
        }
    }

    /// The socket of a source has something to say, which can only be that it has ended.
    pub(super) fn source_event(&self, token: usize) {
        let Some(source) = self.sources.tracked(token) else { return };
        if socket::is_open(source.socket()) {
            return;
        }
        let was_left = source.was_left();
        source.leave();
        self.sources.forget(&source);
        if !was_left {
            debug!(peer = &*source.session, "a peer on this host is gone");
            self.gone.lock().push(source.instance);
            self.any_gone.store(true, Ordering::Release);
            // As in `reader_left`: the two are often one process.
            self.bell.wake_all();
        }
    }

    pub(super) fn is_source(token: usize) -> bool {
        token >= SOURCE
    }

    pub(super) fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let Counters { reads, ipc, ipc_refused, bytes, notes } = &*self.counters;
        each("reads_local", reads.load(Ordering::Relaxed));
        each("reads_ipc", ipc.load(Ordering::Relaxed));
        each("ipc_refused", ipc_refused.load(Ordering::Relaxed));
        each("bytes_read_local", bytes.load(Ordering::Relaxed));
        each("notes_local", notes.load(Ordering::Relaxed));
        each("local_peers", (self.readers.count() + self.sources.count()) as u64);
    }

    fn session(&self) -> &str {
        &self.session
    }

    fn instance(&self) -> Option<Instance> {
        self.running.read().as_ref().map(|running| running.instance)
    }

    fn shelf(&self) -> Option<Arc<Shelf>> {
        self.shelf.read().clone()
    }

    fn bell_fd(&self) -> Option<&OwnedFd> {
        self.bell_fd.as_ref()
    }

    fn stager(&self) -> Option<Arc<Stager>> {
        self.stager.read().clone()
    }

    /// A reader is about to hear of our device memory.
    fn borrowed(&self, shelf: &Arc<Shelf>, reader: &Arc<Reader>) -> io::Result<()> {
        let mut borrowers = self.borrowers.lock();
        // Under the lock: once it was withdrawn, those are dismissed who are there.
        if !self.shelf().is_some_and(|now| Arc::ptr_eq(&now, shelf)) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        borrowers.push((shelf.span, Arc::clone(reader)));
        Ok(())
    }

    /// A reader's process, or its mapping, has ended.
    fn returned(&self, reader: &Reader) {
        self.borrowers.lock().retain(|(_, one)| !std::ptr::eq(&**one, reader));
        self.borrower_left.notify_all();
    }

    fn reader_left(&self, reader: &Reader) {
        self.readers.leave(reader);
        self.returned(reader);
        // Whatever the state: it may have died after it had taken that, and before its wake.
        self.bell.wake_all();
    }

    fn withdraw(&self) {
        if let Some(shelf) = self.shelf.write().take() {
            shelf.clear();
            self.readers.revoke_all();
        }
    }

    fn source(&self, remote: &RemoteBuffer, deadline: Instant) -> Option<Arc<Source>> {
        let instance = remote.identity?.instance;
        let at = remote.local.as_ref()?;
        match self.sources.known(&remote.peer, instance) {
            Known::Met(source) => return Some(source),
            Known::Elsewhere => return None,
            Known::Unsettled => {}
        }
        // No other socket than that relay's own, whatever the metadata says.
        let digits = Hex::of(instance.to_bytes());
        if self.bell_fd.is_none() || at.strip_prefix(PREFIX) != Some(digits.as_str()) {
            return None;
        }
        self.sources.find(&remote.peer, instance, deadline, || {
            self.meet(at, &remote.peer, instance, deadline).inspect_err(|missed| {
                debug!(peer = &*remote.peer, ?missed, "not met on this host: by TCP");
            })
        })
    }
}
