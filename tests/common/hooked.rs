//! An engine over any other, whose calls a test can watch, hold up, change, or have fail.
//!
//! A hook stands in front of one kind of call. It gets the engine as it is without that hook and
//! those set later, and the call's arguments, and goes on with the call or not. Hooks of one kind
//! add up: the one set last is met first. `faults.rs` has the ready-made ones.

use std::{
    fmt, mem,
    os::fd::BorrowedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use mooncake_relay::{
    Access, Config, Device, Doorbell, Engine, Error, Event, Filled, InProcessEngine, Instance,
    LocalBuffer, Notification, Publication, ReadError, Relay, RemoteBuffer, Result, Retracted,
    Span, Viewed, WaitStrategy,
};
use parking_lot::{Mutex, RwLock};

/// Clones are the same engine.
#[derive(Clone)]
pub(crate) struct Hooked {
    inner: Arc<Inner>,
    /// Only hooks set before this one are met.
    before: u64,
}

struct Inner {
    engine: Arc<dyn Engine>,
    hooks: Hooks,
    /// How many hooks were set, of any kind.
    set: AtomicU64,
    registered: AtomicUsize,
    injected: Mutex<Vec<Event>>,
    /// In place of the engine's own.
    bell: OnceLock<Option<Doorbell>>,
    /// Likewise, for how many reads it likes at once.
    at_once: OnceLock<usize>,
}

/// The kinds of call that [`Hooked::before`] can stand in front of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Start,
    Register,
    Unregister,
    Read,
    Notify,
    Poll,
}

impl Hooked {
    /// An engine that does what `engine` does, until hooks are set.
    pub(crate) fn over(engine: Arc<dyn Engine>) -> Self {
        let inner = Inner {
            engine,
            hooks: Hooks::default(),
            set: AtomicU64::new(0),
            registered: AtomicUsize::new(0),
            injected: Mutex::default(),
            bell: OnceLock::new(),
            at_once: OnceLock::new(),
        };
        let hooked = Self { inner: Arc::new(inner), before: u64::MAX };
        hooked.count_spans().lead_reads_past_their_hooks().report_what_is_injected();
        hooked
    }

    /// An in-process engine of that name.
    pub(crate) fn new(name: &str) -> Self {
        Self::over(Arc::new(InProcessEngine::new(name).unwrap()))
    }

    pub(crate) fn engine(&self) -> Arc<dyn Engine> {
        Arc::new(self.clone())
    }

    /// From now on it says that it likes so many reads at once.
    pub(crate) fn reads_together(&self, most: usize) -> &Self {
        self.inner.at_once.set(most).unwrap();
        self
    }

    /// How many spans are registered.
    pub(crate) fn registered(&self) -> usize {
        self.inner.registered.load(Ordering::SeqCst)
    }

    /// Runs `first` in front of each `call`. What it fails with is what the call fails with; a read
    /// then hands its buffer back.
    pub(crate) fn before(
        &self,
        call: Call,
        first: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> &Self {
        match call {
            Call::Start => self.on_start(move |next, instance| {
                first()?;
                next.start(instance)
            }),
            Call::Register => self.on_register(move |next, span, access| {
                first()?;
                // SAFETY: the promise of whoever called `register` is passed on.
                unsafe { next.register(span, access) }
            }),
            Call::Unregister => self.on_unregister(move |next, span| {
                first()?;
                next.unregister(span)
            }),
            Call::Read => self.on_read(move |next, remote, local, deadline| match first() {
                Ok(()) => next.read(remote, local, deadline),
                Err(error) => Err(ReadError { error, buffer: Some(local) }),
            }),
            Call::Notify => self.on_notify(move |next, peer, note, deadline| {
                first()?;
                next.notify(peer, note, deadline)
            }),
            Call::Poll => self.on_poll(move |next, events| {
                first()?;
                next.poll(events)
            }),
        }
    }

    /// Runs `then` at the end of each poll, with the number of events that it reported.
    pub(crate) fn after_poll(&self, then: impl Fn(usize) + Send + Sync + 'static) -> &Self {
        self.on_poll(move |next, events| {
            let mut count = 0;
            let polled = next.poll(&mut |event| {
                count += 1;
                events(event);
            });
            then(count);
            polled
        })
    }

    /// The next poll reports `event` too, as if the engine had it from a peer.
    pub(crate) fn inject(&self, event: Event) {
        self.inner.injected.lock().push(event);
        self.ring();
    }

    /// Rings the engine's bell, if it has one.
    pub(crate) fn ring(&self) {
        if let Some(bell) = self.doorbell() {
            bell.ring();
        }
    }

    /// Calls [`Self::ring`] without keeping the engine alive.
    pub(crate) fn ringer(&self) -> impl Fn() + Send + Sync + 'static {
        let (inner, before) = (Arc::downgrade(&self.inner), self.before);
        move || {
            if let Some(inner) = inner.upgrade() {
                Self { inner, before }.ring();
            }
        }
    }

    /// From now on the engine has this bell, which nobody rings, or none.
    pub(crate) fn replace_bell(&self, bell: Option<Doorbell>) -> &Self {
        assert!(self.inner.bell.set(bell).is_ok(), "a bell is replaced once");
        self
    }

    fn count_spans(&self) -> &Self {
        self.on_register(|next, span, access| {
            // SAFETY: the promise of whoever called `register` is passed on.
            unsafe { next.register(span, access) }?;
            next.inner.registered.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        self.on_unregister(|next, span| {
            next.unregister(span)?;
            next.inner.registered.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
    }

    /// Whatever reads meets the hooks of `read`, if there are any; so these must not call
    /// `read_many` of the engine that they got.
    fn lead_reads_past_their_hooks(&self) -> &Self {
        self.on_read_into(|next, remote, dest, deadline| {
            if next.inner.hooks.read.is_empty() {
                next.read_into(remote, dest, deadline)
            } else {
                None
            }
        });
        self.on_read_many(|next, reads, deadline| {
            if next.inner.hooks.read.is_empty() {
                return next.read_many(reads, deadline);
            }
            let all = Self { before: u64::MAX, ..next.clone() };
            reads.into_iter().map(|(remote, local)| all.read(&remote, local, deadline)).collect()
        })
    }

    fn report_what_is_injected(&self) -> &Self {
        self.on_poll(|next, events| {
            // No lock is held over `events`: it may call this engine.
            let injected = mem::take(&mut *next.inner.injected.lock());
            injected.into_iter().for_each(&mut *events);
            next.poll(events)
        })
    }

    /// The hook that this call meets first, and the engine that it goes on with.
    fn meets<F: ?Sized>(&self, hooks: &List<F>) -> Option<(Arc<F>, Self)> {
        let hooks = hooks.0.read();
        let (set, hook) = hooks.iter().rev().find(|(set, _)| *set < self.before)?;
        Some((Arc::clone(hook), Self { inner: Arc::clone(&self.inner), before: *set }))
    }
}

/// Hooks of one kind, each with its place among all, in the order in which they were set.
struct List<F: ?Sized>(RwLock<Vec<(u64, Arc<F>)>>);

impl<F: ?Sized> List<F> {
    fn push(&self, set: &AtomicU64, hook: Arc<F>) {
        let mut hooks = self.0.write();
        hooks.push((set.fetch_add(1, Ordering::SeqCst), hook));
    }

    fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }
}

impl<F: ?Sized> Default for List<F> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

/// Makes, of each call named, a list of hooks, what adds to it, and the call that walks it.
macro_rules! hooks {
    ($($on:ident: $call:ident($($arg:ident: $In:ty),*) $(-> $Out:ty)?;)*) => {
        #[derive(Default)]
        struct Hooks {
            register: List<dyn Fn(&Hooked, Span, Access) -> Result<()> + Send + Sync>,
            $($call: List<dyn Fn(&Hooked, $($In),*) $(-> $Out)? + Send + Sync>,)*
        }

        impl Hooked {
            pub(crate) fn on_register(
                &self,
                hook: impl Fn(&Self, Span, Access) -> Result<()> + Send + Sync + 'static,
            ) -> &Self {
                self.inner.hooks.register.push(&self.inner.set, Arc::new(hook));
                self
            }

            $(pub(crate) fn $on(
                &self,
                hook: impl Fn(&Self, $($In),*) $(-> $Out)? + Send + Sync + 'static,
            ) -> &Self {
                self.inner.hooks.$call.push(&self.inner.set, Arc::new(hook));
                self
            })*
        }

        impl Engine for Hooked {
            fn session_id(&self) -> &str {
                self.inner.engine.session_id()
            }

            fn protocol(&self) -> &str {
                self.inner.engine.protocol()
            }

            unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
                match self.meets(&self.inner.hooks.register) {
                    Some((hook, next)) => hook(&next, span, access),
                    // SAFETY: the caller's promise is passed on.
                    None => unsafe { self.inner.engine.register(span, access) },
                }
            }

            fn waits(&self, strategy: WaitStrategy) {
                self.inner.engine.waits(strategy);
            }

            fn local(&self) -> Option<Arc<str>> {
                self.inner.engine.local()
            }

            fn backed_by(&self, span: Span, slots: u32, fd: BorrowedFd<'_>) {
                self.inner.engine.backed_by(span, slots, fd);
            }

            fn device_memory(
                &self,
                span: Span,
                slots: u32,
                device: Arc<dyn Device>,
            ) -> Result<()> {
                self.inner.engine.device_memory(span, slots, device)
            }

            fn way(&self, peer: &str) -> Option<&'static str> {
                self.inner.engine.way(peer)
            }

            fn doorbell(&self) -> Option<&Doorbell> {
                match self.inner.bell.get() {
                    Some(instead) => instead.as_ref(),
                    None => self.inner.engine.doorbell(),
                }
            }

            /// Where reads meet hooks they come one by one.
            fn reads_at_once(&self, peer: &str) -> usize {
                if self.inner.hooks.read.is_empty() {
                    let own = || self.inner.engine.reads_at_once(peer);
                    self.inner.at_once.get().copied().unwrap_or_else(own)
                } else {
                    1
                }
            }

            $(fn $call(&self, $($arg: $In),*) $(-> $Out)? {
                match self.meets(&self.inner.hooks.$call) {
                    Some((hook, next)) => hook(&next, $($arg),*),
                    None => self.inner.engine.$call($($arg),*),
                }
            })*
        }
    };
}

hooks! {
    on_start: start(instance: &Instance) -> Result<()>;
    on_stop: stop(deadline: Instant);
    on_unregister: unregister(span: Span) -> Result<()>;
    on_connect: connect(peer: &str, deadline: Instant) -> Result<()>;
    on_read: read(remote: &RemoteBuffer, local: LocalBuffer, deadline: Instant)
        -> Result<Filled, ReadError>;
    on_read_many: read_many(reads: Vec<(RemoteBuffer, LocalBuffer)>, deadline: Instant)
        -> Vec<Result<Filled, ReadError>>;
    on_read_into: read_into(remote: &RemoteBuffer, dest: &mut [u8], deadline: Instant)
        -> Option<Result<()>>;
    on_view: view(remote: &RemoteBuffer, deadline: Instant) -> Option<Result<Box<dyn Viewed>>>;
    on_write: write(remote: &RemoteBuffer, local: LocalBuffer, deadline: Instant)
        -> Result<LocalBuffer, ReadError>;
    on_notify: notify(peer: &str, note: &Notification, deadline: Instant) -> Result<()>;
    on_poll: poll(events: &mut dyn FnMut(Event)) -> Result<()>;
    on_publish: publish(slot: &Publication);
    on_retract: retract(slot: &Publication) -> Retracted;
    on_cut: cut(slot: &Publication) -> Retracted;
    on_interrupt: interrupt(span: Span);
    on_tend: tend();
    on_counters: counters(each: &mut dyn FnMut(&'static str, u64));
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("over", &self.session_id()).finish_non_exhaustive()
    }
}

/// A relay over a hooked engine of its own, in this process.
pub(crate) fn relay(config: &Config) -> (Hooked, Relay) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let engine = Hooked::new(&format!("hooked-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    let relay = Relay::new(engine.engine(), config).unwrap();
    (engine, relay)
}

/// A failure that nobody could mistake.
pub(crate) fn refused() -> Error {
    Error::Engine { engine: "hooked", reason: "as the test wants it".to_owned() }
}
