//! What a sender learns of its receivers, and when.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{Sender, unbounded};
use mooncake_relay::{Config, Engine, Error, Metadata, ReadError, Relay, Slot, Tensor, Token};

use crate::common::{
    hooked::{Call, Hooked},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(3);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn relay(config: &Config) -> (Hooked, Relay) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let engine = Hooked::new(&format!("learns-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    let relay = Relay::new(engine.engine(), config).unwrap();
    (engine, relay)
}

fn put(relay: &Relay) -> (Metadata, Token<Slot>) {
    relay.put_bytes(b"x", Tensor::bytes(1)).unwrap()
}

fn is_called(name: &str) -> bool {
    thread::current().name() == Some(name)
}

/// Waits until a lease that began before `put` returned at `start` is over, and some more.
fn outlast(start: Instant) {
    let over = start + LEASE + Duration::from_millis(200);
    thread::sleep(over.saturating_duration_since(Instant::now()));
}

#[test]
fn an_acknowledgement_that_came_in_time_counts_although_the_notifier_was_starved() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small().with_lease(LEASE));
        let (_, b) = relay(&small());
        let (inside, is_inside) = unbounded();
        let (go, may_go) = unbounded::<()>();
        let hold = Arc::new(AtomicBool::new(false));
        {
            let hold = Arc::clone(&hold);
            // At the end of a look that has found nothing.
            engine.after_poll(move |_| {
                if is_called("relay-notifier") && hold.swap(false, Ordering::SeqCst) {
                    inside.send(()).unwrap();
                    let _ = may_go.recv();
                }
            });
        }
        let start = Instant::now();
        let (metadata, token) = put(&a);
        hold.store(true, Ordering::SeqCst);
        engine.doorbell().unwrap().ring();
        is_inside.recv().unwrap();
        b.get(&metadata).unwrap().wait().unwrap();
        assert!(start.elapsed() < LEASE, "too slow a machine to say anything");
        outlast(start);
        drop(go);
        token.wait().unwrap();
        assert_eq!(a.health().counters.relay.puts_expired, 0);
    });
}

/// A caller that waits for a put of its own, and that stands still in the engine once `go` is made.
fn stuck_driver(
    engine: &Hooked,
) -> (Arc<AtomicBool>, crossbeam::channel::Receiver<()>, Sender<()>) {
    let hold = Arc::new(AtomicBool::new(false));
    let (inside, is_inside) = unbounded();
    let (go, may_go) = unbounded::<()>();
    let held = Arc::clone(&hold);
    engine.before(Call::Poll, move || {
        if is_called("driver") && held.swap(false, Ordering::SeqCst) {
            inside.send(()).unwrap();
            let _ = may_go.recv();
        }
        Ok(())
    });
    (hold, is_inside, go)
}

#[test]
fn an_acknowledgement_that_came_in_time_counts_although_the_driver_was_starved() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small().with_lease(LEASE));
        let (_, b) = relay(&small());
        let (hold, is_inside, go) = stuck_driver(&engine);
        let start = Instant::now();
        let (metadata, token) = put(&a);
        let (_, own) = put(&a);
        let (tx, rx) = unbounded();
        token.attach(&tx, 0);
        let driver = thread::Builder::new().name("driver".to_owned());
        hold.store(true, Ordering::SeqCst);
        let driver = driver.spawn(move || own.wait().map(drop)).unwrap();
        is_inside.recv().unwrap();
        b.get(&metadata).unwrap().wait().unwrap();
        assert!(start.elapsed() < LEASE, "too slow a machine to say anything");
        outlast(start);
        drop(go);
        rx.recv().unwrap().result.unwrap();
        // Its own put was not acknowledged.
        assert!(matches!(driver.join().unwrap(), Err(Error::TimedOut)));
        assert_eq!(a.health().counters.relay.puts_expired, 1);
    });
}

#[test]
fn a_driver_that_never_comes_back_does_not_keep_a_lease_from_ending() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small().with_lease(LEASE));
        let (hold, is_inside, go) = stuck_driver(&engine);
        let (_, token) = put(&a);
        let (_, own) = put(&a);
        let driver = thread::Builder::new().name("driver".to_owned());
        hold.store(true, Ordering::SeqCst);
        let driver = driver.spawn(move || own.wait().map(drop)).unwrap();
        is_inside.recv().unwrap();
        let (tx, rx) = unbounded();
        token.attach(&tx, 0);
        assert!(matches!(rx.recv().unwrap().result, Err(Error::TimedOut)));
        drop(go);
        assert!(matches!(driver.join().unwrap(), Err(Error::TimedOut)));
    });
}

/// How a put's token ends whose receiver's get ends so.
fn told(sender: &Relay, get: impl FnOnce(&Metadata) -> Result<Slot, Error>) -> String {
    let (metadata, token) = put(sender);
    get(&metadata).unwrap_err();
    match token.wait() {
        Err(Error::PeerFailed { peer, reason }) => {
            assert_eq!(peer, "(its receiver)");
            reason
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sender_hears_at_once_why_its_receiver_gave_up() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small().with_lease(Duration::from_secs(3600)));
        let (engine, b) = relay(&small());
        engine.on_read(|_, remote, local, _| {
            let error =
                Error::PeerFailed { peer: remote.peer.to_string(), reason: "a test".to_owned() };
            Err(ReadError { error, buffer: Some(local) })
        });
        let reason = told(&a, |metadata| b.get(metadata)?.wait());
        assert_eq!(reason, "it said that it gave up: its get was PeerFailed");
        let reason = told(&a, |metadata| b.get_timeout(metadata, Duration::ZERO)?.wait());
        assert_eq!(reason, "it said that it gave up: its get was TimedOut");
    });
}

#[cfg(feature = "embedded")]
#[test]
fn a_sender_hears_over_sockets_why_its_receiver_gave_up() {
    use mooncake_relay::EmbeddedEngine;

    within(WATCHDOG, || {
        let over_tcp = || {
            let engine = Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap());
            Relay::new(engine, &small().with_lease(Duration::from_secs(3600))).unwrap()
        };
        let (a, b) = (over_tcp(), over_tcp());
        let reason = told(&a, |metadata| b.get_timeout(metadata, Duration::ZERO)?.wait());
        assert_eq!(reason, "it said that it gave up: its get was TimedOut");
    });
}
