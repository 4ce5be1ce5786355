//! The embedded engine: pure Rust, TCP that speaks Mooncake's own protocol.

mod address;
mod builder;
mod client;
mod frame;
#[cfg(any(fuzzing, test))]
#[cfg_attr(test, allow(unreachable_pub))] // it is reached by fuzz targets
pub mod fuzzing;
mod inbox;
mod local;
mod many;
mod pace;
mod server;
mod shared;
mod staging;

use std::{
    mem,
    net::SocketAddr,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::{Mutex, RwLock};
use tracing::error;

pub use self::{builder::EmbeddedBuilder, staging::Staging};
use self::{
    builder::{Endpoint, Listeners},
    client::{AT_ONCE, Client},
    inbox::Inbox,
    local::{Heard, Local},
    pace::Pace,
    server::Server,
    shared::{Counters, Shared},
    staging::{Landing, Stager},
};
use super::{
    Access, Engine, Event, Filled, Instance, LocalBuffer, Notification, Publication, ReadError,
    RemoteBuffer, Retracted, Viewed,
};
use crate::{
    doorbell::Doorbell,
    error::{Error, Result},
    memory::{Device, Span},
    process,
    wait::WaitStrategy,
};

/// How long reads that were cut may take to let go of memory that is to be unmapped.
const UNREGISTER: Duration = Duration::from_secs(5);

/// An engine in pure Rust: TCP that speaks Mooncake's own protocol, with real engines as peers in
/// both directions.
///
/// It listens from [`bind`](Self::bind) on, serves while a relay uses it, and serves nothing by TCP but
/// what that relay has published at that moment (and stamps, which tell nothing). Who may reach its
/// two ports, and what Python peers can do, is in [`guide::deployment`](crate::guide::deployment).
///
/// Relays of one user on one host use shared memory instead, by themselves: such a peer maps all of the
/// slots, to read. [`guide::threats`](crate::guide::threats) says what that means, and
/// [`EmbeddedBuilder::local`] turns it off.
///
/// ```
/// let engine = mooncake_relay::EmbeddedEngine::bind("127.0.0.1:0")?;
/// assert_eq!(engine.session_id(), format!("127.0.0.1:{}", engine.control_addr().port()));
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Debug)]
pub struct EmbeddedEngine {
    shared: Arc<Shared>,
    client: Client,
    control: SocketAddr,
    data: SocketAddr,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Listens; who connects has to wait.
    Bound(Listeners),
    Running(Server),
    Stopping,
    /// The ports are closed.
    Stopped,
}

impl EmbeddedEngine {
    /// Listens on `address`, `host:port`, where port 0 is any that is free; the data port is the
    /// system's choice on the same address.
    ///
    /// ```
    /// use mooncake_relay::{Config, EmbeddedEngine, Relay, Tensor};
    /// let engine = std::sync::Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?);
    /// let relay = Relay::new(engine, &Config::default().with_slot_size(4096))?;
    /// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// assert!(metadata.session_id().starts_with("127.0.0.1:"));
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`EmbeddedBuilder::bind`].
    pub fn bind(address: &str) -> Result<Self> {
        Self::builder(address).bind()
    }

    /// Configures an engine that will listen on `address`, `host:port`; see [`EmbeddedBuilder`].
    pub fn builder(address: &str) -> EmbeddedBuilder {
        EmbeddedBuilder::new(address)
    }

    /// The address under which peers reach this engine: `host:port`, IPv6 in brackets.
    pub fn session_id(&self) -> &str {
        &self.shared.endpoint.session_id
    }

    /// Where it listens for requests about itself, and for the notifications of real engines.
    pub fn control_addr(&self) -> SocketAddr {
        self.control
    }

    /// Where it listens for reads, and for the notifications of relays of this library.
    pub fn data_addr(&self) -> SocketAddr {
        self.data
    }

    fn new(
        builder: &EmbeddedBuilder,
        endpoint: Endpoint,
        listeners: Listeners,
        control: SocketAddr,
        data: SocketAddr,
    ) -> Self {
        let local = Local::new(builder.local, &endpoint.session_id, builder.patience.connect);
        let shared = Arc::new(Shared {
            endpoint,
            limits: builder.limits,
            patience: builder.patience,
            staging: builder.staging,
            stager: RwLock::default(),
            exports: Arc::default(),
            inbox: Inbox::new(builder.queued_notes, Arc::clone(local.bell())),
            local,
            spans: CachePadded::default(),
            counters: Counters::default(),
            failed: AtomicBool::new(false),
        });
        let (client, state) = (Client::new(builder.patience), Mutex::new(State::Bound(listeners)));
        Self { shared, client, control, data, state }
    }

    /// What the calls use; `None` in a forked child, which has no part in it.
    fn here(&self) -> Option<&Shared> {
        process::is_here().then_some(&*self.shared)
    }

    /// Has the server look for what was cut.
    fn wake(&self) {
        if let State::Running(server) = &*self.state.lock() {
            server.wake();
        }
    }
}

impl Engine for EmbeddedEngine {
    fn session_id(&self) -> &str {
        self.session_id()
    }

    fn protocol(&self) -> &str {
        "tcp"
    }

    fn waits(&self, strategy: WaitStrategy) {
        self.client.wait_by(Pace::of(strategy));
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        process::check()?;
        let mut state = self.state.lock();
        let listeners = match mem::replace(&mut *state, State::Stopped) {
            State::Bound(listeners) => listeners,
            State::Stopped => Listeners::open(self.control, self.data)?,
            busy @ (State::Running(_) | State::Stopping) => {
                *state = busy;
                let reason = "another relay uses this engine, or has not ended its close: close it first, \
                              or bind another";
                return Err(Error::config("engine", reason));
            }
        };
        self.shared.failed.store(false, Ordering::Relaxed);
        // What was meant for the relay before this one.
        self.shared.inbox.drain(&mut drop);
        let server = Server::start(Arc::clone(&self.shared), *instance, listeners)?;
        *state = State::Running(server);
        self.client.start();
        Ok(())
    }

    fn stop(&self, deadline: Instant) {
        if !process::is_here() {
            return;
        }
        let mut state = self.state.lock();
        let server = match mem::replace(&mut *state, State::Stopping) {
            State::Running(server) => server,
            other => {
                *state = other;
                return;
            }
        };
        drop(state);
        self.client.stop();
        self.shared.local.stop();
        server.stop();
        // Its thread may have let a reader in meanwhile, whom nobody would tell that we are gone.
        self.shared.local.stop();
        // Its own statement: nobody who asks for our health waits for the stager's end.
        let stager = self.shared.stager.write().take();
        if let Some(stager) = stager {
            stager.stop(deadline);
        }
        *self.state.lock() = State::Stopped;
    }

    fn local(&self) -> Option<Arc<str>> {
        self.here()?;
        self.shared.local.name()
    }

    fn backed_by(&self, span: Span, slots: u32, fd: BorrowedFd<'_>) {
        if !process::is_here() {
            return;
        }
        self.shared.local.backed_by(span, slots, fd);
    }

    fn device_memory(&self, span: Span, slots: u32, device: Arc<dyn Device>) -> Result<()> {
        let Some(staging) = self.shared.staging else {
            let reason = format!(
                "it reads and serves the memory of {} through host memory that it was not given: \
                 build it with `EmbeddedEngine::builder(..).staging(Staging::default())`",
                device.location()
            );
            return Err(Error::config("staging", reason));
        };
        let mut stager = self.shared.stager.write();
        let stager = match &mut *stager {
            Some(known) if known.device().uuid() == device.uuid() => known,
            Some(_) => return Err(Error::config("memory", "all of it must be on one device")),
            none => none.insert(Stager::start(device, staging)?),
        };
        stager.add(span, slots);
        self.shared.local.on_device(stager);
        Ok(())
    }

    fn way(&self, peer: &str) -> Option<&'static str> {
        self.here()?;
        Some(match (self.shared.local.way(peer), &*self.shared.stager.read()) {
            (Some(way), _) => way,
            (None, Some(_)) => "staged",
            (None, None) => "tcp",
        })
    }

    #[allow(unsafe_code)] // calls nothing unsafe
    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        process::check()?;
        if span.len == 0 {
            return Err(Error::config("span", "memory of no length cannot be registered"));
        }
        let mut spans = self.shared.spans.lock();
        if spans.iter().any(|(known, _)| known.overlaps(span)) {
            return Err(Error::config("span", "this memory, or a part of it, is registered"));
        }
        spans.push((span, access));
        if access == Access::Published
            && let Some(stager) = &*self.shared.stager.read()
            && let Some(slots) = stager.slots(span)
        {
            self.shared.local.lend_device(span, slots, &**stager.device());
        }
        Ok(())
    }

    fn unregister(&self, span: Span) -> Result<()> {
        process::check()?;
        let deadline = Instant::now() + UNREGISTER;
        let access = {
            let mut spans = self.shared.spans.lock();
            let index = spans.iter().position(|(known, _)| *known == span);
            let index = index.ok_or_else(|| Error::config("span", "it is not registered"))?;
            spans.remove(index).1
        };
        let exports = &self.shared.exports;
        let quiet = match access {
            // Marks what is read, has the server drop it, and waits for that.
            Access::Published => {
                self.shared.local.unregister(span);
                let quiet = exports.forget(span, Instant::now()) || {
                    self.wake();
                    exports.forget(span, deadline)
                };
                quiet && self.shared.local.has_all_back(span, deadline)
            }
            Access::Local => {
                let stager = self.shared.stager();
                self.client.end_reads_into(span, deadline)
                    && self.shared.local.end_inside(span, deadline)
                    && stager.is_none_or(|stager| stager.let_go_of(span, deadline))
            }
        };
        if let Some(stager) = self.shared.stager().filter(|_| quiet) {
            stager.forget(span);
        }
        if quiet { Ok(()) } else { Err(broken("a read would not let go of unregistered memory")) }
    }

    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        process::check()?;
        if self.shared.local.way(peer).is_some() {
            return Ok(());
        }
        self.client.connect(peer, deadline)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        mut local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        if let Err(error) = process::check() {
            return Err(ReadError { error, buffer: Some(local) });
        }
        if let Some(stager) = local.device().and_then(|_| self.shared.stager()) {
            let landing = Landing::new(&stager, local);
            return match self.shared.local.read_device(remote, landing, deadline) {
                Ok(read) => read,
                Err(landing) => self.client.read_staged(remote, *landing, deadline),
            };
        }
        let read = local.bytes_mut();
        match read.and_then(|dest| self.shared.local.read(remote, dest, deadline)) {
            Some(Ok(())) => return Ok(Filled { buffer: local, verified: true }),
            Some(Err(error)) => return Err(ReadError { error, buffer: Some(local) }),
            None => {}
        }
        self.client.read(remote, local, deadline)
    }

    fn reads_at_once(&self, peer: &str) -> usize {
        if self.way(peer) == Some("tcp") { AT_ONCE } else { 1 }
    }

    fn read_many(
        &self,
        reads: Vec<(RemoteBuffer, LocalBuffer)>,
        deadline: Instant,
    ) -> Vec<Result<Filled, ReadError>> {
        many::read(self, reads, deadline)
    }

    fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        if let Err(error) = process::check() {
            return Some(Err(error));
        }
        if let Some(read) = self.shared.local.read(remote, dest, deadline) {
            return Some(read);
        }
        self.client.read_into(remote, dest, deadline)
    }

    fn view(&self, remote: &RemoteBuffer, deadline: Instant) -> Option<Result<Box<dyn Viewed>>> {
        if let Err(error) = process::check() {
            return Some(Err(error));
        }
        let sight = self.shared.local.view(remote, deadline)?;
        Some(sight.map(|sight| Box::new(sight) as Box<dyn Viewed>))
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        match process::check() {
            Ok(()) => self.client.write(remote, local, deadline),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        process::check()?;
        match self.shared.local.notify(peer, note, deadline) {
            Some(told) => told,
            None => self.client.notify(peer, note, deadline),
        }
    }

    fn notify_many(
        &self,
        peer: &str,
        notes: &[Notification],
        deadline: Instant,
    ) -> Vec<Result<()>> {
        many::notify(self, peer, notes, deadline)
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        process::check()?;
        let shared = &*self.shared;
        // Notes come in the order in which one thread has sent them, whichever way they came.
        let look = shared.local.look();
        shared.inbox.drain(&mut |note| events(Event::Note(note)));
        if let Some(look) = look {
            look.drain(&mut |heard| match heard {
                Heard::Note(note) => events(Event::Note(note)),
                Heard::Gone(instance, held) => {
                    // The puts that it was reading, if they are open.
                    for id in held.into_iter().filter_map(|(slot, it)| shared.exports.id(slot, it))
                    {
                        events(Event::ReaderGone(id));
                    }
                    // Where we read from it too, our own socket to it says whether it lives.
                    if let Some(gone) = instance.filter(|it| !shared.local.is_alive(*it)) {
                        events(Event::PeerGone(gone));
                    }
                }
            });
        }
        shared.local.each_gone(|instance| events(Event::PeerGone(instance)));
        if self.shared.failed.load(Ordering::Relaxed) {
            return Err(broken(
                "its server has failed, so that no peer reaches this relay: open another",
            ));
        }
        Ok(())
    }

    fn publish(&self, slot: &Publication) {
        if !process::is_here() {
            return;
        }
        // Held until it is published, so that nothing is that was just unregistered.
        let spans = self.shared.spans.lock();
        let known = |wanted: Span| {
            spans.iter().any(|(span, access)| {
                *access == Access::Published && span.contains(wanted.addr(), wanted.len)
            })
        };
        let stamp = slot.stamp_span;
        if known(slot.span) && known(stamp) && stamp.addr().is_multiple_of(8) && stamp.len == 8 {
            self.shared.exports.publish(slot);
            self.shared.local.publish(slot);
        } else {
            error!(slot = slot.slot, "not published: its memory is not registered for that");
        }
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        if !process::is_here() {
            return Retracted::Unknown;
        }
        let local = self.shared.local.retract(slot);
        let served = self.shared.exports.retract(slot);
        if local == Retracted::Reading { local } else { served }
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        if !process::is_here() {
            return Retracted::Unknown;
        }
        self.shared.local.cut(slot);
        let retracted = self.shared.exports.cut(slot);
        if retracted == Retracted::Reading {
            self.wake();
        }
        retracted
    }

    fn doorbell(&self) -> Option<&Doorbell> {
        // Its word is not there in a forked child.
        self.here().map(|shared| shared.inbox.bell())
    }

    fn interrupt(&self, span: Span) {
        if !process::is_here() {
            return;
        }
        // Ended, not waited for: the deadline has passed.
        self.client.end_reads_into(span, Instant::now());
        self.shared.local.end_inside(span, Instant::now());
    }

    fn tend(&self) {
        if self.here().is_some() {
            self.client.tend();
        }
    }

    fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        if !process::is_here() {
            return;
        }
        self.shared.local.counters(each);
        self.client.counters(each);
        each("reads_staged", self.shared.stager.read().as_ref().map_or(0, |stager| stager.reads()));
        self.shared.counters.each(each);
    }
}

impl Drop for EmbeddedEngine {
    fn drop(&mut self) {
        if self.here().is_some() {
            return self.stop(Instant::now());
        }
        // The thread is the parent's, and there is nothing here to end or to join.
        mem::forget(mem::replace(self.state.get_mut(), State::Stopped));
    }
}

fn broken(reason: &str) -> Error {
    Error::Engine { engine: "embedded", reason: reason.to_owned() }
}
