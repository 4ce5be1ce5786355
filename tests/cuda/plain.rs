//! Engines over the in-process one: one that knows nothing of devices, and one that keeps what it is
//! told of them, and may write where it is to read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use mooncake_relay::{
    Access, Config, Cuda, Device, Doorbell, Engine, Event, Filled, Host, InProcessEngine, Instance,
    LocalBuffer, Memory, Notification, Publication, ReadError, Relay, RemoteBuffer, Result,
    Retracted, Slot, Span,
};
use parking_lot::Mutex;

use crate::ways::{Side, pattern};

/// It leaves at its default what an engine may.
pub(crate) struct Ignorant(pub(crate) InProcessEngine);

/// It keeps the devices that it was told of.
pub(crate) struct Keeping {
    inner: InProcessEngine,
    pub(crate) devices: Mutex<Vec<(Span, Arc<dyn Device>)>>,
    writes: AtomicBool,
}

impl Keeping {
    pub(crate) fn new(name: &str) -> Arc<Self> {
        let inner = InProcessEngine::new(name).unwrap();
        Arc::new(Self { inner, devices: Mutex::default(), writes: AtomicBool::new(false) })
    }
}

/// What both pass on.
macro_rules! passes_on {
    ($inner:tt) => {
        fn session_id(&self) -> &str {
            self.$inner.session_id()
        }
        fn protocol(&self) -> &str {
            self.$inner.protocol()
        }
        fn start(&self, instance: &Instance) -> Result<()> {
            self.$inner.start(instance)
        }
        fn stop(&self, deadline: Instant) {
            self.$inner.stop(deadline);
        }
        unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.$inner.register(span, access) }
        }
        fn unregister(&self, span: Span) -> Result<()> {
            self.$inner.unregister(span)
        }
        fn write(
            &self,
            remote: &RemoteBuffer,
            local: LocalBuffer,
            deadline: Instant,
        ) -> Result<LocalBuffer, ReadError> {
            self.$inner.write(remote, local, deadline)
        }
        fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
            self.$inner.notify(peer, note, deadline)
        }
        fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
            self.$inner.poll(events)
        }
        fn publish(&self, slot: &Publication) {
            self.$inner.publish(slot);
        }
        fn retract(&self, slot: &Publication) -> Retracted {
            self.$inner.retract(slot)
        }
        fn cut(&self, slot: &Publication) -> Retracted {
            self.$inner.cut(slot)
        }
        fn doorbell(&self) -> Option<&Doorbell> {
            self.$inner.doorbell()
        }
    };
}

impl Engine for Ignorant {
    passes_on!(0);

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        self.0.read(remote, local, deadline)
    }
}

impl Engine for Keeping {
    passes_on!(inner);

    fn device_memory(&self, span: Span, slots: u32, device: Arc<dyn Device>) -> Result<()> {
        self.devices.lock().push((span, Arc::clone(&device)));
        self.inner.device_memory(span, slots, device)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        if !self.writes.load(Ordering::Relaxed) {
            return self.inner.read(remote, local, deadline);
        }
        let buffer = self.inner.write(remote, local, deadline)?;
        Ok(Filled { buffer, verified: true })
    }
}

/// Into a slot that is published, from one that was read into.
pub(crate) fn writes() {
    fn between<A: Memory, B: Memory>(
        name: &str,
        from: A::Options,
        to: B::Options,
        bytes: fn(&Slot<A>) -> Vec<u8>,
    ) where
        Relay<A>: Side<A>,
        Relay<B>: Side<B>,
    {
        let config = Config::default().with_slot_size(2 << 20).with_receive_credits(1);
        let takes = InProcessEngine::new(&format!("takes {name}")).unwrap().allow_writes(true);
        let sender = Relay::<A>::with_memory(from, Arc::new(takes), &config).unwrap();
        let engine = Keeping::new(name);
        let receiver = Relay::<B>::with_memory(to, engine.clone(), &config).unwrap();
        let (ours, theirs) = (pattern(1_500_000, 1), pattern(1_500_000, 2));
        let (metadata, put) = sender.send(&ours);
        assert!(receiver.fetch(&metadata).unwrap() == ours);
        put.wait().unwrap();
        // The receiver's one slot holds that still.
        let (metadata, put) = sender.send(&theirs);
        engine.writes.store(true, Ordering::Relaxed);
        receiver.fetch(&metadata).unwrap();
        assert!(bytes(&put.wait().unwrap()) == ours, "{name}");
    }
    let on_device = |slot: &Slot<Cuda>| {
        let mut bytes = vec![0; slot.len()];
        slot.copy_to_host(&mut bytes).unwrap();
        bytes
    };
    between::<Cuda, Cuda>("device to device", 0, 0, on_device);
    between::<Cuda, Host>("host to device", 0, (), on_device);
    between::<Host, Cuda>("device to host", (), 0, |slot| slot.to_vec());
    between::<Host, Host>("host to host", (), (), |slot| slot.to_vec());
}

/// The device of a relay that lives, as its engine has it; and the spans.
pub(crate) fn device_of(name: &str) -> (Relay<Cuda>, Arc<dyn Device>, [Span; 2]) {
    let engine = Keeping::new(name);
    let config = Config::default().with_slot_size(1 << 20);
    let relay = Relay::<Cuda>::with_memory(0, engine.clone(), &config).unwrap();
    let devices = engine.devices.lock();
    let [(slots, device), (receive, _)] = &devices[..] else { panic!("{devices:?}") };
    assert_eq!((slots.len, receive.len), (2 << 20, 2 << 20));
    (relay, Arc::clone(device), [*slots, *receive])
}
