//! Cases: memory that comes and goes, and an engine's start and stop.
#![allow(unsafe_code)] // registers memory

use std::{net::TcpListener, sync::Arc, thread};

use super::{
    LIMIT,
    peers::distant,
    side::{Side, assert_same, instance, part, pattern, soon},
    within,
};
use crate::{
    Access, Engine, RemoteBuffer, Span,
    memory::{Host, Memory, PAGE, Purpose},
};

/// A span of no bytes cannot be registered.
pub fn registering_nothing_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let engine = make();
    within(LIMIT, move || {
        let memory = started_with_memory(&*engine);
        let span = Span { len: 0, ..memory.span() };
        for access in [Access::Published, Access::Local] {
            assert!(register(&*engine, span, access).is_err(), "there is nothing to register");
        }
        engine.stop(soon());
    });
}

/// A span that shares a byte with a registered one cannot be registered.
pub fn registering_what_is_registered_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let engine = make();
    within(LIMIT, move || {
        let memory = started_with_memory(&*engine);
        let all = memory.span();
        let middle = part(all, PAGE, 2 * PAGE);
        register(&*engine, middle, Access::Published).expect("fresh memory can be registered");
        let overlapping = [
            middle,
            all,
            part(all, 0, PAGE + 1),
            part(all, 3 * PAGE - 1, PAGE),
            part(all, PAGE + 8, 8),
        ];
        for span in overlapping {
            for access in [Access::Published, Access::Local] {
                assert!(register(&*engine, span, access).is_err(), "it overlaps");
            }
        }
        // A neighbour does not.
        let next = part(all, 3 * PAGE, PAGE);
        register(&*engine, next, Access::Local).expect("it overlaps nothing");
        for span in [next, middle] {
            engine.unregister(span).expect("it is registered");
        }
        engine.stop(soon());
    });
}

/// What was unregistered can be registered again, for either use.
pub fn a_span_can_be_registered_again(make: &dyn Fn() -> Arc<dyn Engine>) {
    let engine = make();
    within(LIMIT, move || {
        let memory = started_with_memory(&*engine);
        for access in [Access::Published, Access::Local, Access::Published] {
            register(&*engine, memory.span(), access).expect("it is not registered now");
            engine.unregister(memory.span()).expect("it is registered");
        }
        engine.stop(soon());
    });
}

/// Unregistering what was never registered, or is no longer, may fail, and changes nothing else.
pub fn unregistering_the_unknown_harms_nothing(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 2, 4096);
    within(LIMIT, move || {
        let bytes = pattern(1, 4096);
        let publication = sender.publish(0, &bytes);
        let stranger = allocate();
        let _ = sender.engine.unregister(stranger.span());
        let _ = sender.engine.unregister(stranger.span());
        let got = receiver.get(&sender.remote(&publication)).expect("it is still published");
        assert_same(&got, &bytes);
    });
}

/// An engine serves one relay at a time.
pub fn starting_twice_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let bytes = pattern(2, 4096);
        let publication = sender.publish(0, &bytes);
        for instance in [sender.instance, instance()] {
            assert!(sender.engine.start(&instance).is_err(), "another relay uses it");
        }
        let got = receiver.get(&sender.remote(&publication)).expect("the first relay goes on");
        assert_same(&got, &bytes);
    });
}

/// After `stop` an engine can be started again, and metadata from before proves nothing.
pub fn a_restarted_engine_serves_only_its_new_instance(make: &dyn Fn() -> Arc<dyn Engine>) {
    let engine = make();
    let receiver = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        let mut before: Option<RemoteBuffer> = None;
        for round in 0..3 {
            let sender = Side::new(Arc::clone(&engine), 1, 4096);
            let bytes = pattern(round, 4096);
            let publication = sender.publish(0, &bytes);
            if let Some(before) = &before {
                assert!(receiver.get(before).is_err(), "that relay is closed");
            }
            let remote = sender.remote(&publication);
            assert_same(&receiver.get(&remote).expect("it is published"), &bytes);
            let _ = sender.retract(&publication);
            drop(sender); // stops the engine
            assert!(receiver.get(&remote).is_err(), "the relay is closed");
            before = Some(remote);
        }
    });
}

/// `stop` ends a read that would wait for a silent peer for a long time.
pub fn stop_ends_a_read_that_waits(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        let silent = TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
        silent.set_nonblocking(true).expect("a socket can be non-blocking");
        let address = silent.local_addr().expect("a listener has an address").to_string();
        let remote = RemoteBuffer::new(&address, 4096, 64);
        thread::scope(|scope| {
            let read = scope.spawn(|| side.read(&remote, distant()).map(drop));
            // An engine that does not use TCP has failed by itself.
            let mut held = Vec::new();
            while held.is_empty() && !read.is_finished() {
                held.extend(silent.accept().ok());
                thread::yield_now();
            }
            side.stop();
            let read = read.join().expect("the read does not panic");
            assert!(read.is_err(), "nobody has answered");
        });
    });
}

fn started_with_memory(engine: &dyn Engine) -> Host {
    engine.start(&instance()).expect("a fresh engine starts");
    allocate()
}

fn allocate() -> Host {
    Host::allocate(&(), 4 * PAGE, Purpose::Published, false).expect("a test gets memory")
}

fn register(engine: &dyn Engine, span: Span, access: Access) -> crate::Result<()> {
    // SAFETY: each case unregisters what it registers before its memory goes; where it expects an
    // error and gets none, it panics, and nothing was ever published of the span.
    unsafe { engine.register(span, access) }
}
