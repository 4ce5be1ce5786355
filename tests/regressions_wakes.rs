//! One test for each wake-up that was lost, named after the right behaviour.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, unbounded};
use mooncake_relay::{
    Config, Engine, Error, Metadata, Relay, Retracted, Slot, Tensor, Token, WaitStrategy,
};

use crate::common::{eventually, hooked::relay, within};

const WATCHDOG: Duration = Duration::from_secs(60);
/// A lost wake-up costs the rest of the notifier's nap, most of a second; one that is heard takes
/// microseconds. So many rounds tell the two apart, however busy the machine is in one of them.
const ROUNDS: u32 = 5;
const HALF_OF_THEIR_NAPS: Duration = Duration::from_millis(2500);
/// A machine may be too busy for that for a while. What is lost is lost in every batch of rounds.
const BATCHES: usize = 5;

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

/// `round` returns how long it took until the event was heard.
#[track_caller]
fn assert_heard_at_once(round: fn() -> Duration) {
    let mut batches = Vec::new();
    while batches.len() < BATCHES {
        let waited: Vec<_> = (0..ROUNDS).map(|_| within(WATCHDOG, round)).collect();
        if waited.iter().sum::<Duration>() < HALF_OF_THEIR_NAPS {
            return;
        }
        batches.push(waited);
    }
    panic!("heard after {batches:?}");
}

/// How long `rx` makes us wait, at the most for all naps.
fn wait_for<T>(rx: &Receiver<T>) -> Duration {
    let start = Instant::now();
    rx.recv().unwrap();
    start.elapsed()
}

#[test]
fn a_poll_that_coincides_with_an_event_does_not_put_the_notifier_to_sleep() {
    assert_heard_at_once(|| {
        let (engine, a) = relay(&small());
        let (_, b) = relay(&small());
        let poller = thread::current().id();
        let (inside, is_inside) = unbounded();
        let (go, may_go) = unbounded::<()>();
        let armed = Arc::new(AtomicBool::new(false));
        let arm = Arc::clone(&armed);
        engine.after_poll(move |_| {
            if thread::current().id() == poller && armed.swap(false, Ordering::SeqCst) {
                inside.send(()).unwrap();
                may_go.recv().unwrap();
            }
        });
        let (_kept, mut other) = put(&a, b"other");
        let (metadata, token) = put(&a, b"watched");
        let (tx, rx) = unbounded();
        token.attach(&tx, 0);
        arm.store(true, Ordering::SeqCst);
        thread::scope(|s| {
            s.spawn(|| {
                is_inside.recv().unwrap();
                // The note comes while the poll is at its end.
                b.get(&metadata).unwrap().wait().unwrap();
                thread::sleep(Duration::from_millis(50)); // wider for the notifier, which looks
                go.send(()).unwrap();
            });
            // A poll does not look while the notifier does.
            while arm.load(Ordering::SeqCst) {
                assert!(other.poll().is_none());
            }
        });
        wait_for(&rx)
    });
}

#[test]
fn an_event_that_comes_while_a_driver_leaves_is_heard() {
    assert_heard_at_once(|| {
        // The driver never parks instead of driving.
        let (engine, a) = relay(&small().with_wait(WaitStrategy::Yield));
        let (_, b) = relay(&small());
        let driver = thread::current().id();
        let (drives, it_drives) = unbounded();
        let (inside, is_inside) = unbounded();
        let (go, may_go) = unbounded::<()>();
        let (own, token) = put(&a, b"own");
        let (metadata, watched) = put(&a, b"watched");
        let (tx, rx) = unbounded();
        watched.attach(&tx, 0);
        let step = AtomicUsize::new(0);
        engine.after_poll(move |events| {
            if thread::current().id() != driver {
                return;
            }
            match step.load(Ordering::SeqCst) {
                0 => {
                    step.store(1, Ordering::SeqCst);
                    drives.send(()).unwrap();
                }
                1 if events > 0 => step.store(2, Ordering::SeqCst),
                // Its own put has ended, so that this look is its last.
                2 => {
                    step.store(3, Ordering::SeqCst);
                    inside.send(()).unwrap();
                    may_go.recv().unwrap();
                }
                _ => {}
            }
        });
        thread::scope(|s| {
            s.spawn(|| {
                it_drives.recv().unwrap();
                b.get(&own).unwrap().wait().unwrap();
                is_inside.recv().unwrap();
                b.get(&metadata).unwrap().wait().unwrap();
                thread::sleep(Duration::from_millis(50)); // wider for the notifier, which looks
                go.send(()).unwrap();
            });
            token.wait().unwrap();
        });
        wait_for(&rx)
    });
}

#[test]
fn an_event_that_comes_before_the_notifier_lies_down_is_heard() {
    assert_heard_at_once(|| {
        // The driver never sleeps.
        let (engine, a) = relay(&small().with_wait(WaitStrategy::Yield));
        let (_, b) = relay(&small());
        let (drives, it_drives) = unbounded();
        let (inside, is_inside) = unbounded();
        let (go, may_go) = unbounded::<()>();
        let hold = Arc::new(AtomicBool::new(false));
        {
            let hold = Arc::clone(&hold);
            // The notifier is between its ticket and its sleep.
            engine.on_tend(move |_| {
                if hold.swap(false, Ordering::SeqCst) {
                    inside.send(()).unwrap();
                    may_go.recv().unwrap();
                }
            });
        }
        engine.after_poll(move |_| {
            if thread::current().name() == Some("drives") {
                let _ = drives.send(());
            }
        });
        let (own, token) = put(&a, b"own");
        let (metadata, watched) = put(&a, b"watched");
        let (tx, rx) = unbounded();
        watched.attach(&tx, 0);
        thread::scope(|s| {
            let named = thread::Builder::new().name("drives".to_owned());
            let driver = named.spawn_scoped(s, || token.wait().map(drop)).unwrap();
            // From its first look until its put has ended, so that the notifier stands back.
            it_drives.recv().unwrap();
            drop(it_drives);
            hold.store(true, Ordering::SeqCst);
            is_inside.recv().unwrap();
            b.get(&own).unwrap().wait().unwrap();
            driver.join().unwrap().unwrap();
            b.get(&metadata).unwrap().wait().unwrap();
            go.send(()).unwrap();
        });
        wait_for(&rx)
    });
}

#[test]
fn a_wait_hears_at_once_that_its_lease_has_ended() {
    assert_heard_at_once(|| {
        let (_, a) = relay(&small().with_lease(Duration::from_millis(30)));
        let (_, token) = put(&a, b"x");
        let start = Instant::now();
        assert!(matches!(token.wait(), Err(Error::TimedOut)));
        start.elapsed()
    });
}

#[test]
fn a_wait_hears_at_once_that_its_slot_is_quiet() {
    assert_heard_at_once(|| {
        let (engine, a) = relay(&small());
        let (_, b) = relay(&small());
        let reading = Arc::new(AtomicBool::new(true));
        let read = Arc::clone(&reading);
        engine.on_retract(move |next, slot| {
            let truth = next.retract(slot);
            if reading.load(Ordering::SeqCst) { Retracted::Reading } else { truth }
        });
        let (metadata, token) = put(&a, b"x");
        b.get(&metadata).unwrap().wait().unwrap();
        eventually(1, || a.health().quarantined.len());
        let waiting = thread::spawn(move || {
            let slot = token.wait();
            (Instant::now(), slot)
        });
        thread::sleep(Duration::from_millis(100)); // wider: it drives, and sleeps
        let quiet = Instant::now();
        read.store(false, Ordering::SeqCst);
        let (heard, slot) = waiting.join().unwrap();
        slot.unwrap();
        heard - quiet
    });
}
