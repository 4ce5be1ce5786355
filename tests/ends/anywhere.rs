//! A relay is closed, or dropped, by whatever thread: tokens that others wait on end, nothing hangs.

use std::{
    cell::RefCell,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Engine, Error, Event, Relay, Result, Slot, Tensor, Token};
use parking_lot::Mutex;

use crate::{
    ENGINES, WATCHDOG, cases,
    common::{
        eventually,
        hooked::{Call, Hooked},
        threads_named,
    },
    put, small, works,
};

cases! {
    m2_a_close_by_a_thread_of_the_relay_returns,
    m2_a_drop_by_a_thread_of_the_relay_returns,
    m2_a_close_by_the_closer_itself_returns,
    m2_relays_whose_threads_close_each_other_end,
    m2_relays_whose_threads_close_each_other_at_once_end_in_their_time,
    m2_a_drop_with_a_threads_locals_beside_other_drops_in_any_order,
    m2_a_drop_by_who_takes_its_completions,
    j7_a_notifier_that_panics_fails_what_is_open_and_the_relay_closes,
    j7_a_read_that_panics_on_a_worker_ends_its_get_and_the_worker_goes_on,
}

/// A relay that its own engine may take, and close or drop.
type Shared = Arc<Mutex<Option<Arc<Relay>>>>;

/// Which call of the engine does it.
const PLACES: [&str; 5] = ["read", "notify", "poll", "tend", "retract"];

/// An engine that does `then` in calls of `place` by threads of the relay.
fn engine_that(place: &str, then: impl Fn() + Send + Sync + Clone + 'static) -> Hooked {
    let engine = Hooked::over(crate::in_process());
    let act = move || {
        if thread::current().name().is_some_and(|name| name.starts_with("relay-")) {
            then();
        }
    };
    match place {
        "read" => engine.before(Call::Read, move || {
            act();
            Ok(())
        }),
        "notify" => engine.before(Call::Notify, move || {
            act();
            Ok(())
        }),
        "poll" => engine.on_poll(move |next, events: &mut dyn FnMut(Event)| {
            let polled = next.poll(events);
            act();
            polled
        }),
        "tend" => engine.on_tend(move |next| {
            act();
            next.tend();
        }),
        "retract" => engine.on_retract(move |next, slot| {
            act();
            next.retract(slot)
        }),
        _ => unreachable!("a place"),
    };
    engine
}

/// Work for all of a relay's threads, and tokens that threads wait on meanwhile. It may be closed
/// while it is given that.
fn at_work(relay: &Relay, other: &Relay) -> Vec<JoinHandle<Result<Slot>>> {
    // By a worker, since nobody waits for it; its notification, and the end of its put, come with it.
    if let Ok((metadata, _)) = other.put_bytes(b"x", Tensor::bytes(1)) {
        drop(relay.get(&metadata));
    }
    let puts = (0..3).filter_map(|_| relay.put_bytes(b"x", Tensor::bytes(1)).ok());
    let puts: Vec<_> = puts.collect();
    if let Some((metadata, _)) = puts.first() {
        drop(other.get(metadata));
    }
    puts.into_iter().map(|(_, token)| thread::spawn(move || token.wait())).collect()
}

fn each_ends(waiting: Vec<JoinHandle<Result<Slot>>>) {
    for thread in waiting {
        match thread.join().unwrap() {
            Ok(_) | Err(Error::Closed | Error::TimedOut | Error::PeerFailed { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

fn ends_in(place: &str, how: impl Fn(Arc<Relay>) + Send + Sync + Clone + 'static) {
    let held: Shared = Arc::default();
    let (tx, rx) = unbounded();
    let engine = engine_that(place, {
        let held = Arc::clone(&held);
        move || {
            let Some(relay) = held.lock().take() else { return };
            // The last who has it.
            while Arc::strong_count(&relay) > 1 {
                thread::yield_now();
            }
            how(relay);
            tx.send(()).unwrap();
        }
    });
    let other = Relay::new(crate::in_process(), &small().with_credits(4)).unwrap();
    let lease = Duration::from_secs(2);
    let relay = Relay::new(engine.engine(), &small().with_credits(4).with_lease(lease)).unwrap();
    let relay = Arc::new(relay);
    *held.lock() = Some(Arc::clone(&relay));
    let waiting = at_work(&relay, &other);
    drop(relay);
    rx.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("never ended in {place}"));
    each_ends(waiting);
    drop((other, engine));
    eventually(0, || threads_named("relay-"));
}

fn m2_a_close_by_a_thread_of_the_relay_returns() {
    for place in PLACES {
        ends_in(place, move |relay| {
            let closed = relay.close(WATCHDOG);
            assert_eq!((closed.threads, closed.spans_kept), (0, 0), "in {place}");
            assert!(matches!(relay.try_acquire(1), Err(Error::Closed)), "in {place}");
        });
    }
}

fn m2_a_drop_by_a_thread_of_the_relay_returns() {
    for place in PLACES {
        ends_in(place, drop);
    }
}

fn m2_a_close_by_the_closer_itself_returns() {
    let held: Shared = Arc::default();
    let engine = Hooked::over(crate::in_process());
    let inner = Arc::clone(&held);
    engine.before(Call::Unregister, move || {
        // It cannot wait for itself: the one that is under way is what it gets.
        if let Some(relay) = inner.lock().take() {
            let closed = relay.close(Duration::from_millis(50));
            assert_eq!(closed, mooncake_relay::Closed::default());
        }
        Ok(())
    });
    let relay = Arc::new(Relay::new(engine.engine(), &small()).unwrap());
    *held.lock() = Some(Arc::clone(&relay));
    let closed = relay.close(WATCHDOG);
    assert_eq!((closed.threads, closed.spans_kept), (0, 0));
    assert!(held.lock().is_none(), "the closer has closed it, too");
}

fn m2_relays_whose_threads_close_each_other_end() {
    for place in ["poll", "tend", "read"] {
        close_each_other(place, None);
    }
}

/// Each waits for the other's thread then, and only the time that it was given ends that.
fn m2_relays_whose_threads_close_each_other_at_once_end_in_their_time() {
    // Not a poll: who waits for a token polls in place of the relay's thread.
    for place in ["tend", "read"] {
        close_each_other(place, Some(Arc::new(Barrier::new(2))));
    }
}

/// How long a close has that may wait for one which waits for it.
const MUTUAL: Duration = Duration::from_secs(6);

/// `meet`: where both are before either closes.
fn close_each_other(place: &str, meet: Option<Arc<Barrier>>) {
    let held: [Shared; 2] = Default::default();
    let (tx, rx) = unbounded();
    let relays = [0, 1].map(|n| {
        let (other, tx, meet) = (Arc::clone(&held[1 - n]), tx.clone(), meet.clone());
        let engine = engine_that(place, move || {
            let Some(relay) = other.lock().take() else { return };
            if let Some(meet) = &meet {
                meet.wait();
            }
            assert_eq!(relay.close(MUTUAL).spans_kept, 0);
            tx.send(()).unwrap();
        });
        Arc::new(Relay::new(engine.engine(), &small().with_credits(4)).unwrap())
    });
    for (relay, held) in relays.iter().zip(&held) {
        *held.lock() = Some(Arc::clone(relay));
    }
    let waiting: Vec<_> =
        [0, 1].into_iter().flat_map(|n| at_work(&relays[n], &relays[1 - n])).collect();
    for _ in 0..if meet.is_some() { 2 } else { 1 } {
        rx.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("never closed in {place}"));
    }
    for relay in &relays {
        relay.close(WATCHDOG);
    }
    each_ends(waiting);
    held.iter().for_each(|held| *held.lock() = None);
    drop(relays);
    eventually(0, || threads_named("relay-"));
}

fn m2_a_drop_with_a_threads_locals_beside_other_drops_in_any_order() {
    type Parts = (Option<Relay>, Vec<Token<Slot>>, Option<Slot>);
    thread_local! {
        static PARTS: RefCell<Parts> = const { RefCell::new((None, Vec::new(), None)) };
    }
    for (kind, make) in ENGINES {
        // Which of them the thread's locals have; the rest goes before, or after, from here.
        for locals in 0..8 {
            let relay = Relay::new(make(), &small().with_credits(4)).unwrap();
            let (_, token) = put(&relay, b"open");
            let (_, waited) = put(&relay, b"waited for");
            let slot = relay.try_acquire(1).unwrap();
            let waiting = thread::spawn(move || waited.wait());
            let mut rest = (Some(relay), vec![token], Some(slot));
            let mut own: Parts = (None, Vec::new(), None);
            if locals & 1 != 0 {
                own.0 = rest.0.take();
            }
            if locals & 2 != 0 {
                own.1.append(&mut rest.1);
            }
            if locals & 4 != 0 {
                own.2 = rest.2.take();
            }
            thread::spawn(move || PARTS.set(own)).join().unwrap();
            drop(rest);
            assert!(matches!(waiting.join().unwrap(), Err(Error::Closed)), "{kind} {locals}");
        }
    }
    eventually(0, || threads_named("relay-"));
}

fn m2_a_drop_by_who_takes_its_completions() {
    for (_, make) in ENGINES {
        let [a, b] = [(), ()].map(|()| Relay::new(make(), &small().with_credits(4)).unwrap());
        let (tx, rx) = unbounded();
        for tag in 0..2 {
            let (metadata, token) = put(&a, b"x");
            token.attach(&tx, tag);
            b.get(&metadata).unwrap().attach(&tx, tag);
        }
        put(&a, b"nobody gets it").1.attach(&tx, 2);
        // The relay goes first, and the completions, with slots of it, after.
        let taker = thread::spawn(move || {
            let first = rx.recv().unwrap();
            drop((a, b));
            drop(tx);
            (first, rx.iter().collect::<Vec<_>>())
        });
        let (first, mut all) = taker.join().unwrap();
        all.push(first);
        assert_eq!(all.len(), 5, "each has ended once");
        assert!(all.iter().any(|one| one.tag == 2 && matches!(one.result, Err(Error::Closed))));
    }
    eventually(0, || threads_named("relay-"));
}

/// The relay has failed: all that was open has ended, what comes is refused, and it closes.
fn has_failed(relay: Relay, other: Relay, waiting: Vec<JoinHandle<Result<Slot>>>) {
    eventually("failed", || relay.health().status);
    for thread in waiting {
        let ended = thread.join().unwrap();
        let failed = matches!(&ended, Err(Error::Engine { engine: "relay", .. }));
        assert!(failed, "{ended:?}");
    }
    assert!(matches!(relay.try_acquire(1), Err(Error::Engine { .. })));
    let closed = relay.close(WATCHDOG);
    assert_eq!((closed.threads, closed.spans_kept), (0, 0));
    drop((relay, other));
    eventually(0, || threads_named("relay-"));
}

fn quiet_panics() {
    // Wanted ones are not told on stderr.
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("as the test wants it") {
            eprintln!("{info}");
        }
    }));
}

fn j7_a_notifier_that_panics_fails_what_is_open_and_the_relay_closes() {
    quiet_panics();
    for place in ["poll", "tend", "retract"] {
        let go = Arc::new(AtomicBool::new(false));
        let may = Arc::clone(&go);
        let engine = Hooked::over(crate::in_process());
        let panics = move || {
            let own = thread::current().name().is_some_and(|name| name == "relay-notifier");
            assert!(!(own && may.load(Ordering::SeqCst)), "as the test wants it");
        };
        match place {
            "poll" => engine.before(Call::Poll, move || {
                panics();
                Ok(())
            }),
            "tend" => engine.on_tend(move |next| {
                panics();
                next.tend();
            }),
            _ => engine.on_retract(move |next, slot| {
                panics();
                next.retract(slot)
            }),
        };
        let other = Relay::new(crate::in_process(), &small()).unwrap();
        let config = small().with_credits(4).with_lease(Duration::from_secs(1800));
        let relay = Relay::new(engine.engine(), &config).unwrap();
        works(&relay, &other);
        let (metadata, noted) = put(&relay, b"its acknowledgement is heard");
        let waiting = (0..2).map(|_| put(&relay, b"open").1);
        // Nobody drives: a caller that does would meet the panic in its own call.
        let waiting: Vec<_> = waiting
            .map(|mut token| {
                thread::spawn(move || {
                    while !token.is_done() {
                        thread::sleep(Duration::from_millis(1)); // between two looks
                    }
                    token.poll().unwrap()
                })
            })
            .collect();
        go.store(true, Ordering::SeqCst);
        other.get(&metadata).unwrap().wait().unwrap();
        drop(noted);
        has_failed(relay, other, waiting);
    }
}

fn j7_a_read_that_panics_on_a_worker_ends_its_get_and_the_worker_goes_on() {
    quiet_panics();
    let engine = Hooked::over(crate::in_process());
    let other = Relay::new(crate::in_process(), &small()).unwrap();
    let relay = Relay::new(engine.engine(), &small().with_credits(4)).unwrap();
    works(&relay, &other);
    let open = put(&relay, b"open").1;
    let waiting = thread::spawn(move || open.wait());
    let (metadata, _put) = put(&other, b"read by a worker");
    let panics = AtomicBool::new(true);
    engine.before(Call::Read, move || {
        assert!(!panics.swap(false, Ordering::SeqCst), "as the test wants it");
        Ok(())
    });
    let get = relay.get(&metadata).unwrap();
    eventually(true, || get.is_done());
    assert!(matches!(get.wait(), Err(Error::Engine { .. })), "the get that it was about");
    // That read has failed alone: the next is the same worker's, since nobody waits for it.
    let (metadata, _put) = put(&other, b"read by the same");
    let get = relay.get(&metadata).unwrap();
    eventually(true, || get.is_done());
    assert_eq!(get.wait().unwrap()[..], *b"read by the same");
    assert_eq!((relay.health().status, relay.health().reading), ("healthy", 0));
    relay.close(WATCHDOG);
    assert!(matches!(waiting.join().unwrap(), Err(Error::Closed)));
}
