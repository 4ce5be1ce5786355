//! One test for each defect that was found, named after the right behaviour.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{bounded, unbounded};
use mooncake_relay::{
    Completion, Config, Engine, Error, Metadata, ReadError, Relay, Retracted, Slot, Tensor, Token,
    WaitStrategy,
};

use crate::common::{
    eventually,
    hooked::{Call, Hooked, refused},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn hooked() -> Hooked {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    Hooked::new(&format!("regression-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn relay(config: &Config) -> (Hooked, Relay) {
    let engine = hooked();
    let relay = Relay::new(engine.engine(), config).unwrap();
    (engine, relay)
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

#[test]
fn an_aborted_get_never_interrupts_the_next_read_into_its_slot() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small().with_credits(2));
        let (engine, b) = relay(&small().with_credits(1).with_transfer_threads(3));
        let interrupted = Arc::new(AtomicUsize::new(0));
        let next_reads = Arc::new(AtomicBool::new(false));
        let wrong = Arc::new(AtomicUsize::new(0));
        {
            let (interrupted, next_reads, wrong) =
                (Arc::clone(&interrupted), Arc::clone(&next_reads), Arc::clone(&wrong));
            engine.on_interrupt(move |_, _| {
                interrupted.fetch_add(1, Ordering::SeqCst);
                if next_reads.load(Ordering::SeqCst) {
                    wrong.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        engine.on_read(move |next, remote, local, deadline| {
            if remote.len == 1 {
                // Ends once it is interrupted.
                let before = interrupted.load(Ordering::SeqCst);
                while interrupted.load(Ordering::SeqCst) == before {
                    thread::yield_now();
                }
                return Err(ReadError { error: refused(), buffer: Some(local) });
            }
            next_reads.store(true, Ordering::SeqCst);
            for _ in 0..200 {
                thread::yield_now();
            }
            next_reads.store(false, Ordering::SeqCst);
            next.read(remote, local, deadline)
        });
        let stop = AtomicBool::new(false);
        thread::scope(|s| {
            // Others who want the table make what happens between two steps likelier.
            for _ in 0..2 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        b.health();
                    }
                });
            }
            let end = Instant::now() + Duration::from_secs(5);
            while Instant::now() < end {
                let (first, one) = put(&a, b"1");
                let (second, two) = put(&a, b"22");
                let unwanted = b.get(&first).unwrap();
                while b.health().reading == 0 {
                    thread::yield_now();
                }
                let wanted = b.get(&second).unwrap();
                b.abort(&first).unwrap();
                assert!(unwanted.wait().is_err());
                assert_eq!(&wanted.wait().unwrap()[..], b"22");
                assert!(one.wait().is_err());
                two.wait().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let wrong = wrong.load(Ordering::SeqCst);
        assert_eq!(wrong, 0, "reads that nobody had ended were interrupted");
    });
}

#[test]
fn an_engine_that_panics_in_a_callers_wait_fails_the_relay_and_not_the_caller() {
    within(WATCHDOG, || {
        // It never parks instead of driving.
        let config = small().with_credits(1).with_wait(WaitStrategy::Yield);
        let (engine, a) = relay(&config);
        let held = a.try_acquire(1).unwrap();
        let panics = Arc::new(AtomicBool::new(false));
        {
            let panics = Arc::clone(&panics);
            engine.before(Call::Poll, move || {
                let here = thread::current().name() == Some("acquires");
                assert!(!(here && panics.load(Ordering::SeqCst)), "as the test wants it");
                Ok(())
            });
        }
        panics.store(true, Ordering::SeqCst);
        thread::scope(|s| {
            let acquire = || a.acquire(1, WATCHDOG).map(drop);
            let named = thread::Builder::new().name("acquires".to_owned());
            let outcome = named.spawn_scoped(s, acquire).unwrap().join().unwrap();
            assert!(matches!(outcome, Err(Error::Engine { .. })), "{outcome:?}");
        });
        drop(held);
        let health = a.health();
        assert_eq!((health.status, health.waiting, health.free), ("failed", 0, 1));
        assert!(matches!(a.try_acquire(1), Err(Error::Engine { .. })));
    });
}

#[test]
fn a_relay_that_fails_ends_a_wait_for_a_quarantined_slot() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small());
        let (_, b) = relay(&small());
        let panics = Arc::new(AtomicBool::new(false));
        {
            let panics = Arc::clone(&panics);
            engine.on_retract(move |next, slot| {
                let notifier = thread::current().name() == Some("relay-notifier");
                assert!(!(notifier && panics.load(Ordering::SeqCst)), "as the test wants it");
                let _ = next.retract(slot);
                Retracted::Reading
            });
        }
        let (metadata, token) = put(&a, b"x");
        let (other, second) = put(&a, b"y");
        b.get(&metadata).unwrap().wait().unwrap();
        b.get(&other).unwrap().wait().unwrap();
        eventually(2, || a.health().quarantined.len());
        panics.store(true, Ordering::SeqCst);
        eventually("failed", || a.health().status);
        for token in [token, second] {
            let (tx, rx) = unbounded();
            token.attach(&tx, 0);
            let ended = rx.recv_timeout(WATCHDOG).expect("the token has ended");
            assert!(ended.result.is_err());
        }
    });
}

#[test]
fn a_relay_that_fails_ends_an_acquire() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small().with_credits(1));
        let panics = Arc::new(AtomicBool::new(false));
        {
            let panics = Arc::clone(&panics);
            engine.on_retract(move |next, slot| {
                let notifier = thread::current().name() == Some("relay-notifier");
                assert!(!(notifier && panics.load(Ordering::SeqCst)), "as the test wants it");
                let _ = next.retract(slot);
                Retracted::Reading
            });
        }
        let (metadata, _token) = put(&a, b"x");
        a.abort(&metadata).unwrap();
        thread::scope(|s| {
            let acquire = || a.acquire(1, Duration::from_secs(3600)).map(drop);
            let waits: Vec<_> = (0..3).map(|_| s.spawn(acquire)).collect();
            eventually(3, || a.health().waiting);
            thread::sleep(Duration::from_millis(1200)); // wider: they have complained, and settled
            panics.store(true, Ordering::SeqCst);
            for wait in waits {
                assert!(matches!(wait.join().unwrap(), Err(Error::Engine { .. }) | Ok(())));
            }
        });
    });
}

#[test]
fn a_notify_that_panics_on_the_callers_thread_leaves_nothing_reading() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        engine.before(Call::Notify, || panic!("as the test wants it"));
        let (metadata, _token) = put(&a, b"x");
        thread::scope(|s| {
            let got = s.spawn(|| b.get(&metadata).unwrap().wait().map(drop)).join();
            assert!(matches!(got, Ok(Ok(()))), "{got:?}");
            let into = s.spawn(|| b.get_into(&metadata, &mut [0; 1], WATCHDOG)).join();
            assert!(matches!(into, Ok(Ok(1))), "{into:?}");
        });
        eventually((0, 2), || (b.health().reading, b.health().receive_free));
        assert_eq!(b.health().status, "healthy");
    });
}

#[test]
fn a_close_in_the_middle_of_a_look_at_the_quarantine_ends_its_tokens() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small());
        let (_, b) = relay(&small());
        let (inside, is_inside) = unbounded();
        let (go, may_go) = unbounded::<()>();
        let hold = Arc::new(AtomicBool::new(false));
        {
            let hold = Arc::clone(&hold);
            engine.on_retract(move |next, slot| {
                let _ = next.retract(slot);
                if hold.swap(false, Ordering::SeqCst) {
                    inside.send(()).unwrap();
                    may_go.recv().unwrap();
                }
                Retracted::Reading
            });
        }
        let (metadata, token) = put(&a, b"x");
        b.get(&metadata).unwrap().wait().unwrap();
        eventually(1, || a.health().quarantined.len());
        hold.store(true, Ordering::SeqCst);
        is_inside.recv().unwrap();
        thread::scope(|s| {
            let close = s.spawn(|| a.close(WATCHDOG));
            thread::sleep(Duration::from_millis(100)); // wider: it goes as far as it can
            go.send(()).unwrap();
            assert_eq!(close.join().unwrap().threads, 0);
        });
        let (tx, rx) = unbounded();
        token.attach(&tx, 0);
        let ended = rx.recv_timeout(WATCHDOG).expect("the token has ended");
        assert!(matches!(ended.result, Err(Error::Closed)));
    });
}

#[test]
fn a_close_delivers_what_waits_for_a_channel_that_has_room_again() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small().with_credits(8));
        let (tx, rx) = bounded(8);
        for tag in 100..108 {
            tx.send(Completion { tag, result: Err(Error::Aborted) }).unwrap();
        }
        for n in 0..8 {
            put(&a, &[n]).1.attach(&tx, n.into());
        }
        let full = Mutex::new(Some(rx.clone()));
        engine.before(Call::Unregister, move || {
            // By now every put has ended, and no completion had room.
            if let Some(full) = full.lock().unwrap().take() {
                (0..8).for_each(|_| drop(full.recv().unwrap()));
            }
            Ok(())
        });
        a.close(WATCHDOG);
        let mut heard: Vec<_> = rx.try_iter().map(|completion| completion.tag).collect();
        heard.sort_unstable();
        assert_eq!(heard, [0, 1, 2, 3, 4, 5, 6, 7], "every token gives one message");
    });
}

#[test]
fn a_close_delivers_what_waits_for_a_channel_without_room() {
    within(WATCHDOG, || {
        // It does so for a moment only, which may pass before a busy machine has run the reader.
        let heard = (0..20).map(|_| {
            let (_, a) = relay(&small().with_credits(8));
            let (tx, rx) = bounded(0);
            for n in 0..8 {
                put(&a, &[n]).1.attach(&tx, n.into());
            }
            drop(tx);
            thread::scope(|s| {
                let hears = s.spawn(|| rx.iter().count());
                a.close(WATCHDOG);
                drop(a); // and with it what was not taken
                hears.join().unwrap()
            })
        });
        let heard: Vec<_> = heard.take_while(|heard| *heard < 8).collect();
        assert!(heard.len() < 20, "not every token gave one message: {heard:?}");
    });
}

#[test]
fn a_buffer_that_the_engine_keeps_comes_back_whenever_it_is_dropped() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        let kept = Arc::new(Mutex::new(Vec::new()));
        {
            let kept = Arc::clone(&kept);
            engine.on_read(move |_, _, local, _| {
                kept.lock().unwrap().push(local);
                Err(ReadError { error: Error::TimedOut, buffer: None })
            });
        }
        let (metadata, _put) = put(&a, b"x");
        for _ in 0..2 {
            assert!(matches!(b.get(&metadata).unwrap().wait(), Err(Error::TimedOut)));
        }
        assert_eq!(b.health().receive_free, 0);
        let (tx, rx) = unbounded();
        b.get(&metadata).unwrap().attach(&tx, 0);
        assert!(rx.recv_timeout(Duration::from_millis(50)).is_err(), "there is no slot");
        kept.lock().unwrap().remove(0);
        assert!(rx.recv().unwrap().result.is_err());
        assert_eq!(b.health().receive_free, 0);
        assert_eq!(b.close(WATCHDOG).threads, 0);
        drop(b);
        let mut kept = std::mem::take(&mut *kept.lock().unwrap());
        for buffer in &mut kept {
            buffer.bytes_mut().unwrap().fill(7);
        }
        drop(kept);
    });
}

#[test]
fn buffers_that_an_engine_swaps_are_lost_to_nobody() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        let other: Mutex<Option<mooncake_relay::LocalBuffer>> = Mutex::default();
        let twice = Arc::new(AtomicBool::new(false));
        let lent_twice = Arc::clone(&twice);
        engine.on_read(move |_, _, local, _| {
            let mut other = other.lock().unwrap();
            if other.as_ref().is_some_and(|other| other.span() == local.span()) {
                lent_twice.store(true, Ordering::SeqCst);
            }
            match other.replace(local) {
                // Another than was lent.
                Some(buffer) => Err(ReadError { error: Error::TimedOut, buffer: Some(buffer) }),
                None => Err(ReadError { error: Error::TimedOut, buffer: None }),
            }
        });
        let (metadata, _put) = put(&a, b"x");
        for _ in 0..10 {
            assert!(b.get(&metadata).unwrap().wait().is_err());
            assert_eq!(b.health().receive_free, 1);
        }
        assert!(!twice.load(Ordering::SeqCst), "a slot was lent that the engine still had");
    });
}

#[test]
fn closes_from_many_threads_beside_calls_end_them_all() {
    within(Duration::from_secs(180), || {
        for round in 0..30 {
            let (_, a) = relay(&small().with_credits(3));
            let (_, b) = relay(&small().with_credits(3));
            thread::scope(|s| {
                for n in 0..4 {
                    let (a, b) = (&a, &b);
                    s.spawn(move || {
                        loop {
                            let slot = match a.acquire(1, WATCHDOG) {
                                Ok(slot) => slot,
                                Err(error) => break assert!(matches!(error, Error::Closed)),
                            };
                            let (metadata, token) = match a.put(slot, Tensor::bytes(1)) {
                                Ok(put) => put,
                                Err(error) => break assert!(matches!(error, Error::Closed)),
                            };
                            let got = b.get(&metadata).unwrap().wait();
                            match (n + round) % 3 {
                                0 => drop(token.wait()),
                                1 => {
                                    let (tx, rx) = unbounded();
                                    token.attach(&tx, 0);
                                    drop(rx.recv().unwrap());
                                }
                                _ => drop(token),
                            }
                            if let Err(error) = got {
                                assert!(
                                    matches!(error, Error::Stale { .. } | Error::PeerFailed { .. }),
                                    "{error:?}"
                                );
                            }
                        }
                    });
                }
                thread::sleep(Duration::from_millis(5)); // wider: they are in the middle of it
                let closes: Vec<_> = (0..4).map(|_| s.spawn(|| a.close(WATCHDOG))).collect();
                let closes: Vec<_> =
                    closes.into_iter().map(|close| close.join().unwrap()).collect();
                assert!(closes.iter().all(|closed| *closed == closes[0] && closed.threads == 0));
            });
        }
    });
}
