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
use mooncake_relay::{
    Config, Engine, Error, Metadata, ReadError, Relay, Slot, Tensor, Token, WaitStrategy,
};

use crate::common::{
    comes_about,
    hooked::{Call, Hooked},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(3);
/// How long a lease that has ended waits for a driver's last look.
const LAST_LOOK: Duration = Duration::from_secs(1);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

/// A put's lease is short, and whoever waits never parks instead of driving.
fn leased() -> Config {
    small().with_lease(LEASE).with_wait(WaitStrategy::Yield)
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

/// Gets it while its lease, which began after `start`, cannot have ended; whether that was so.
fn gets_in_time(relay: &Relay, metadata: &Metadata, start: Instant) -> bool {
    let got = relay.get(metadata).unwrap().wait();
    let in_time = start.elapsed() < LEASE;
    assert!(got.is_ok() || !in_time, "{got:?}");
    in_time
}

/// Waits until a lease that began before now is over, and the notifier has had its chance to do wrong.
fn outlast_lease() {
    thread::sleep(LEASE + LAST_LOOK / 5);
}

#[test]
fn an_acknowledgement_that_came_in_time_counts_although_the_notifier_was_starved() {
    within(WATCHDOG, || comes_about(notifier_is_starved));
}

fn notifier_is_starved() -> bool {
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
    hold.store(true, Ordering::SeqCst);
    engine.doorbell().unwrap().ring();
    is_inside.recv().unwrap();
    let start = Instant::now();
    let (metadata, token) = put(&a);
    if !gets_in_time(&b, &metadata, start) {
        return false;
    }
    outlast_lease();
    drop(go);
    token.wait().unwrap();
    assert_eq!(a.health().counters.relay.puts_expired, 0);
    true
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
    within(WATCHDOG, || comes_about(driver_is_starved));
}

fn driver_is_starved() -> bool {
    let (engine, a) = relay(&leased());
    let (_, b) = relay(&small());
    let (hold, is_inside, go) = stuck_driver(&engine);
    let (_, own) = put(&a);
    let driver = thread::Builder::new().name("driver".to_owned());
    hold.store(true, Ordering::SeqCst);
    let driver = driver.spawn(move || own.wait().map(drop)).unwrap();
    is_inside.recv().unwrap();
    let start = Instant::now();
    let (metadata, token) = put(&a);
    let (tx, rx) = unbounded();
    token.attach(&tx, 0);
    let in_time = gets_in_time(&b, &metadata, start);
    if in_time {
        outlast_lease();
    }
    drop(go);
    let heard = rx.recv().unwrap().result;
    // It looks too late, or there was nothing in time to be seen.
    let too_late = !in_time || start.elapsed() >= LEASE + LAST_LOOK;
    assert!(heard.is_ok() || too_late, "{heard:?}");
    // Its own put was not acknowledged.
    assert!(matches!(driver.join().unwrap(), Err(Error::TimedOut)));
    if too_late {
        return false;
    }
    assert_eq!(a.health().counters.relay.puts_expired, 1);
    true
}

#[test]
fn a_driver_that_never_comes_back_does_not_keep_a_lease_from_ending() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&leased());
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
