//! Who has to wait for peers that do not answer: nobody else.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Error, Metadata, Relay, Slot, Tensor, Token};

use crate::common::{eventually, gate::Gate, hooked::relay, moved_to, within};

const WATCHDOG: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn put(relay: &Relay) -> (Metadata, Token<Slot>) {
    relay.put_bytes(b"x", Tensor::bytes(1)).unwrap()
}

/// What a connect to somebody who does not answer does.
fn no_answer(deadline: Instant) -> Result<(), Error> {
    thread::sleep(deadline.saturating_duration_since(Instant::now()));
    Err(Error::TimedOut)
}

#[test]
fn a_peer_never_used_before_is_read_while_twenty_others_do_not_answer() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small().with_transfer_threads(2));
        engine.on_connect(
            |_, peer, deadline| {
                if peer.starts_with("silent") { no_answer(deadline) } else { Ok(()) }
            },
        );
        let (metadata, put) = put(&a);
        let ((tx, silent), (healthy, done)) = (unbounded(), unbounded());
        for n in 0..20 {
            let lost = moved_to(&format!("silent-{n}"), &metadata);
            b.get(&lost).unwrap().attach(&tx, n);
        }
        b.get(&metadata).unwrap().attach(&healthy, 0);
        // Nobody waits in a way that would read it.
        done.recv().unwrap().result.unwrap();
        put.wait().unwrap();
        assert!(silent.is_empty(), "no other get has ended");
    });
}

#[test]
fn a_peer_never_tried_goes_before_one_whose_try_has_failed() {
    within(WATCHDOG, || {
        let (other, a) = relay(&small());
        let (engine, b) = relay(&small());
        let tried: Arc<Mutex<Vec<String>>> = Arc::default();
        let (go, may_go) = unbounded::<()>();
        {
            let tried = Arc::clone(&tried);
            engine.on_connect(move |_, peer, deadline| {
                tried.lock().unwrap().push(peer.to_owned());
                if peer != "silent" {
                    return Ok(());
                }
                let _ = may_go.recv(); // until all are queued
                no_answer(deadline)
            });
        }
        let (metadata, _put) = put(&a);
        let (tx, rx) = unbounded();
        let lost = moved_to("silent", &metadata);
        for _ in 0..3 {
            drop(b.get(&lost).unwrap());
        }
        b.get(&metadata).unwrap().attach(&tx, 0);
        drop(go);
        rx.recv().unwrap().result.unwrap();
        let name = other.engine().session_id().to_owned();
        assert_eq!(tried.lock().unwrap()[..2], ["silent".to_owned(), name]);
    });
}

#[test]
fn a_peer_that_answers_late_is_tried_again_and_read() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        let tries = AtomicUsize::new(0);
        engine.on_connect(move |_, _, deadline| {
            let tried = tries.fetch_add(1, Ordering::SeqCst);
            if tried < 3 { no_answer(deadline) } else { Ok(()) }
        });
        let (metadata, put) = put(&a);
        let (tx, rx) = unbounded();
        b.get(&metadata).unwrap().attach(&tx, 0);
        assert_eq!(&rx.recv().unwrap().result.unwrap()[..], b"x");
        put.wait().unwrap();
        let peer = &b.health().peers[0];
        assert_eq!((peer.state, peer.done, peer.failed), ("good", 1, 0));
        // Twice as long as the time before, and that twice as long as the first.
        assert!(peer.last_error.as_ref().unwrap().contains("no answer in 200ms"), "{peer:?}");
    });
}

/// The most that peers of these names, which never answer, are given for an answer.
fn most_given(names: &[&str]) -> Duration {
    /// Enough for each to reach the most.
    const TRIES: usize = 24;
    let (_, a) = relay(&small());
    let (engine, b) = relay(&small());
    let given: Arc<Mutex<Vec<Duration>>> = Arc::default();
    let (go, may_go) = unbounded::<()>();
    {
        let given = Arc::clone(&given);
        engine.on_connect(move |_, peer, deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = may_go.recv(); // until all are queued
            let mut given = given.lock().unwrap();
            if given.len() == TRIES {
                return Err(Error::PeerFailed {
                    peer: peer.to_owned(),
                    reason: "enough".to_owned(),
                });
            }
            given.push(left);
            Err(Error::TimedOut) // as if that time had passed
        });
    }
    let (metadata, _put) = put(&a);
    let (tx, rx) = unbounded();
    for name in names {
        b.get(&moved_to(name, &metadata)).unwrap().attach(&tx, 0);
    }
    drop(go);
    for _ in names {
        assert!(matches!(rx.recv().unwrap().result, Err(Error::PeerFailed { .. })));
    }
    let given = given.lock().unwrap();
    assert!(given[0] <= Duration::from_millis(50), "{given:?}");
    given.iter().copied().max().unwrap()
}

#[test]
fn a_peer_that_does_not_answer_is_given_more_time_while_nobody_else_waits() {
    within(WATCHDOG, || {
        let [second, ten] = [1, 10].map(Duration::from_secs);
        let alone = most_given(&["silent"]);
        assert!(second < alone && alone <= ten, "{alone:?}");
        assert!(most_given(&["silent-1", "silent-2"]) <= second);
    });
}

#[test]
fn a_get_whose_peer_never_answers_ends_at_its_own_deadline_and_keeps_no_slot() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        engine.on_connect(|_, _, deadline| no_answer(deadline));
        let (metadata, put) = put(&a);
        let (tx, rx) = unbounded();
        b.get_timeout(&metadata, Duration::from_millis(400)).unwrap().attach(&tx, 0);
        assert!(matches!(rx.recv().unwrap().result, Err(Error::TimedOut)));
        eventually((0, 0, 2), || {
            let health = b.health();
            (health.queued, health.reading, health.receive_free)
        });
        let counters = b.health().counters.relay;
        assert_eq!((counters.gets, counters.gets_failed, counters.gets_timed_out), (1, 1, 1));
        assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })), "the sender was told");
    });
}

#[test]
fn a_get_that_is_aborted_while_its_peer_does_not_answer_is_not_queued_again() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        engine.on_connect(|_, _, deadline| no_answer(deadline));
        let (metadata, _put) = put(&a);
        let metadata = moved_to("silent", &metadata);
        for _ in 0..4 {
            let (tx, rx) = unbounded();
            b.get(&metadata).unwrap().attach(&tx, 0);
            eventually(1, || b.health().reading + b.health().queued);
            b.abort(&metadata).unwrap();
            assert!(matches!(rx.recv().unwrap().result, Err(Error::Aborted)));
        }
        eventually((0, 0, 2), || {
            let health = b.health();
            (health.queued, health.reading, health.receive_free)
        });
    });
}

#[test]
fn a_caller_that_waits_reads_although_every_thread_waits_for_silent_peers() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        let (gate, way) = Gate::pair();
        engine.on_connect(move |_, _, _| {
            way.pass();
            Err(Error::TimedOut)
        });
        let (metadata, _put) = put(&a);
        drop(b.get(&moved_to("silent", &metadata)).unwrap());
        gate.entered(1);
        assert_eq!(&b.get(&metadata).unwrap().wait().unwrap()[..], b"x");
        drop(gate);
    });
}
