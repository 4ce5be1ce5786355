//! An in-process engine whose calls a test can hold up, or have fail.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Instant,
};

use mooncake_relay::{
    Access, Doorbell, Engine, Error, Event, Filled, InProcessEngine, Instance, LocalBuffer,
    Notification, Publication, ReadError, RemoteBuffer, Result, Retracted, Span,
};

type Hook<In, Out> = OnceLock<Box<dyn Fn(In) -> Out + Send + Sync>>;

/// What a hook does in place of a read, or the buffer back: then the read is the engine's own.
pub(crate) type Instead = std::result::Result<std::result::Result<Filled, ReadError>, LocalBuffer>;

/// Every hook is optional; without one the call is the in-process engine's own.
#[derive(Default)]
pub(crate) struct Hooks {
    pub(crate) start: Hook<(), Result<()>>,
    /// The number of the span, from 0.
    pub(crate) register: Hook<usize, Result<()>>,
    pub(crate) before_unregister: Hook<(), Result<()>>,
    pub(crate) before_stop: Hook<(), ()>,
    /// The peer and the deadline go in.
    pub(crate) before_connect: Hook<(String, Instant), Result<()>>,
    /// In place of the read. `Err(buffer)`: go on as usual.
    pub(crate) read: Hook<(RemoteBuffer, LocalBuffer, Instant), Instead>,
    pub(crate) interrupt: Hook<Span, ()>,
    pub(crate) tend: Hook<(), ()>,
    pub(crate) before_notify: Hook<(), Result<()>>,
    pub(crate) before_poll: Hook<(), Result<()>>,
    /// How many events there were goes in.
    pub(crate) after_poll: Hook<usize, ()>,
    /// The truth goes in.
    pub(crate) retract: Hook<Retracted, Retracted>,
    pub(crate) cut: Hook<Retracted, Retracted>,
}

/// Clones are the same engine.
#[derive(Clone)]
pub(crate) struct Hooked(Arc<Inner>);

struct Inner {
    engine: InProcessEngine,
    hooks: Hooks,
    registered: std::sync::atomic::AtomicUsize,
}

impl Hooked {
    pub(crate) fn new(name: &str) -> Self {
        let engine = InProcessEngine::new(name).unwrap();
        Self(Arc::new(Inner { engine, hooks: Hooks::default(), registered: 0.into() }))
    }

    pub(crate) fn hooks(&self) -> &Hooks {
        &self.0.hooks
    }

    /// How many spans are registered.
    pub(crate) fn registered(&self) -> usize {
        self.0.registered.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) fn engine(&self) -> Arc<dyn Engine> {
        Arc::new(self.clone())
    }
}

pub(crate) fn set<In, Out>(hook: &Hook<In, Out>, call: impl Fn(In) -> Out + Send + Sync + 'static) {
    assert!(hook.set(Box::new(call)).is_ok(), "a hook is set once");
}

fn ask<In, Out>(hook: &Hook<In, Out>, with: In, default: impl FnOnce(In) -> Out) -> Out {
    match hook.get() {
        Some(hook) => hook(with),
        None => default(with),
    }
}

impl Engine for Hooked {
    fn session_id(&self) -> &str {
        self.0.engine.session_id()
    }

    fn protocol(&self) -> &str {
        "inprocess"
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        ask(&self.0.hooks.start, (), |()| Ok(()))?;
        self.0.engine.start(instance)
    }

    fn stop(&self, deadline: Instant) {
        ask(&self.0.hooks.before_stop, (), |()| ());
        self.0.engine.stop(deadline);
    }

    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        ask(&self.0.hooks.register, self.registered(), |_| Ok(()))?;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.engine.register(span, access) }?;
        self.0.registered.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    fn unregister(&self, span: Span) -> Result<()> {
        ask(&self.0.hooks.before_unregister, (), |()| Ok(()))?;
        self.0.engine.unregister(span)?;
        self.0.registered.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        ask(&self.0.hooks.before_connect, (peer.to_owned(), deadline), |_| Ok(()))?;
        self.0.engine.connect(peer, deadline)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let hooked =
            ask(&self.0.hooks.read, (remote.clone(), local, deadline), |(_, local, _)| Err(local));
        hooked.unwrap_or_else(|local| self.0.engine.read(remote, local, deadline))
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        self.0.engine.write(remote, local, deadline)
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        ask(&self.0.hooks.before_notify, (), |()| Ok(()))?;
        self.0.engine.notify(peer, note, deadline)
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        ask(&self.0.hooks.before_poll, (), |()| Ok(()))?;
        let mut count = 0;
        let polled = self.0.engine.poll(&mut |event| {
            count += 1;
            events(event);
        });
        ask(&self.0.hooks.after_poll, count, |_| ());
        polled
    }

    fn publish(&self, slot: &Publication) {
        self.0.engine.publish(slot);
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        ask(&self.0.hooks.retract, self.0.engine.retract(slot), |truth| truth)
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        ask(&self.0.hooks.cut, self.0.engine.cut(slot), |truth| truth)
    }

    fn interrupt(&self, span: Span) {
        ask(&self.0.hooks.interrupt, span, |_| ());
    }

    fn tend(&self) {
        ask(&self.0.hooks.tend, (), |()| ());
    }

    fn doorbell(&self) -> Option<&Doorbell> {
        self.0.engine.doorbell()
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

/// A failure that nobody could mistake.
pub(crate) fn refused() -> Error {
    Error::Engine { engine: "hooked", reason: "as the test wants it".to_owned() }
}
