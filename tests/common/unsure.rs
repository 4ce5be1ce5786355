//! An engine that cannot check identities, as a real Mooncake engine cannot: its relay reads stamps.

use std::time::Instant;

use mooncake_relay::{
    Access, Doorbell, Engine, Event, Filled, InProcessEngine, Instance, LocalBuffer, Notification,
    Publication, ReadError, RemoteBuffer, Result, Retracted, Span,
};

/// An in-process engine that knows ranges only.
#[derive(Debug)]
pub(crate) struct Unsure(pub(crate) InProcessEngine);

impl Engine for Unsure {
    fn session_id(&self) -> &str {
        self.0.session_id()
    }

    fn protocol(&self) -> &str {
        self.0.protocol()
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        self.0.start(instance)
    }

    fn stop(&self, deadline: Instant) {
        self.0.stop(deadline);
    }

    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.register(span, access) }
    }

    fn unregister(&self, span: Span) -> Result<()> {
        self.0.unregister(span)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let range = RemoteBuffer::new(&remote.peer, remote.ptr, remote.len);
        let filled = self.0.read(&range, local, deadline)?;
        Ok(Filled { verified: false, ..filled })
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        self.0.write(remote, local, deadline)
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        self.0.notify(peer, note, deadline)
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        self.0.poll(events)
    }

    fn publish(&self, slot: &Publication) {
        self.0.publish(slot);
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        self.0.retract(slot)
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        self.0.cut(slot)
    }

    fn doorbell(&self) -> Option<&Doorbell> {
        self.0.doorbell()
    }
}
