//! An engine with a clock: how long the last get's calls of it took.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use mooncake_relay::{
    Access, Engine, Event, Filled, Instance, LocalBuffer, MooncakeEngine, Notification,
    Publication, ReadError, RemoteBuffer, Result, Span,
};

pub(crate) struct Timed {
    inner: MooncakeEngine,
    /// Nanoseconds of the last read of a put, of a stamp, and of the last notification.
    pub(crate) nanos: [AtomicU64; 3],
}

impl Timed {
    pub(crate) fn over(inner: MooncakeEngine) -> Self {
        Self { inner, nanos: Default::default() }
    }

    fn time<T>(&self, which: usize, call: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let out = call();
        self.nanos[which].store(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        out
    }
}

impl Engine for Timed {
    fn session_id(&self) -> &str {
        self.inner.session_id()
    }

    fn protocol(&self) -> &str {
        self.inner.protocol()
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        self.inner.start(instance)
    }

    fn stop(&self, deadline: Instant) {
        self.inner.stop(deadline);
    }

    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.inner.register(span, access) }
    }

    fn unregister(&self, span: Span) -> Result<()> {
        self.inner.unregister(span)
    }

    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        self.inner.connect(peer, deadline)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        // Only a put has an identity.
        let which = usize::from(remote.identity.is_none());
        self.time(which, || self.inner.read(remote, local, deadline))
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        self.inner.write(remote, local, deadline)
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        self.time(2, || self.inner.notify(peer, note, deadline))
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        self.inner.poll(events)
    }

    fn publish(&self, slot: &Publication) {
        self.inner.publish(slot);
    }

    fn interrupt(&self, span: Span) {
        self.inner.interrupt(span);
    }

    fn tend(&self) {
        self.inner.tend();
    }
}
