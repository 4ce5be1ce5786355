//! Gets that somebody else ends, holds up or puts off: each ends once, and meets nobody else's.
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

use crossbeam::channel::unbounded;
use mooncake_relay::{
    Config, Engine, Error, Metadata, ReadError, Relay, Slot, Span, Tensor, Token,
};
use parking_lot::Mutex;

use crate::common::{
    eventually,
    gate::Gate,
    hooked::{Call, Hooked, refused, relay},
    moved_to, within,
};

const WATCHDOG: Duration = Duration::from_secs(120);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn put(relay: &Relay) -> (Metadata, Token<Slot>) {
    relay.put_bytes(b"x", Tensor::bytes(1)).unwrap()
}

/// Gets, and how they ended: well, or for the causes that these tests make.
fn counts(relay: &Relay) -> [u64; 5] {
    let counters = relay.health().counters.relay;
    let failed = counters.gets_timed_out + counters.gets_aborted + counters.gets_broken;
    assert_eq!(counters.gets_failed, failed, "{counters:?}");
    assert_eq!(counters.gets, counters.gets_done + failed, "{counters:?}");
    let [timed_out, aborted] = [counters.gets_timed_out, counters.gets_aborted];
    [counters.gets, counters.gets_done, timed_out, aborted, counters.gets_broken]
}

/// Has the first read wait until it is interrupted, and then fail as `end` says.
fn hold_first_read(engine: &Hooked, end: impl Fn(Instant) -> Error + Send + Sync + 'static) {
    let (reads, interrupted) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&interrupted);
    engine.on_interrupt(move |_, _| told.store(true, Ordering::SeqCst));
    engine.on_read(move |next, remote, local, deadline| {
        if reads.fetch_add(1, Ordering::SeqCst) > 0 {
            return next.read(remote, local, deadline);
        }
        while !interrupted.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1)); // it waits for bytes
        }
        Err(ReadError { error: end(deadline), buffer: Some(local) })
    });
}

#[test]
fn a_read_that_gives_way_may_end_with_any_error_and_is_read_again() {
    within(WATCHDOG, || {
        let ((_, a), (_, c)) = (relay(&small()), relay(&small()));
        let (engine, b) = relay(&small());
        hold_first_read(&engine, |_| refused());
        let ((held, _x), (waits, _y)) = (put(&a), put(&c));
        let (tx, rx) = unbounded();
        b.get(&held).unwrap().attach(&tx, 1);
        eventually(1, || b.health().reading);
        b.get(&waits).unwrap().attach(&tx, 2);
        for tag in [2, 1] {
            let completion = rx.recv().unwrap();
            assert_eq!(completion.tag, tag);
            assert_eq!(&completion.result.unwrap()[..], b"x");
        }
        assert_eq!(counts(&b), [2, 2, 0, 0, 0]);
    });
}

#[test]
fn a_read_that_gives_way_when_its_time_is_over_timed_out() {
    within(WATCHDOG, || {
        let ((_, a), (_, c)) = (relay(&small()), relay(&small()));
        let (engine, b) = relay(&small());
        hold_first_read(&engine, |deadline| {
            thread::sleep(deadline.saturating_duration_since(Instant::now()));
            Error::Aborted
        });
        let ((held, _x), (waits, _y)) = (put(&a), put(&c));
        let (tx, rx) = unbounded();
        b.get_timeout(&held, Duration::from_secs(4)).unwrap().attach(&tx, 1);
        eventually(1, || b.health().reading);
        b.get(&waits).unwrap().attach(&tx, 2);
        let [first, second] = [rx.recv().unwrap(), rx.recv().unwrap()];
        assert_eq!((first.tag, second.tag), (1, 2));
        assert!(matches!(first.result, Err(Error::TimedOut)), "{:?}", first.result);
        second.result.unwrap();
        eventually([2, 1, 1, 0, 0], || counts(&b));
    });
}

#[test]
fn a_get_into_that_somebody_ends_while_its_sender_is_told_is_counted_once() {
    within(WATCHDOG, || {
        let ((_, a), (engine, b)) = (relay(&small()), relay(&small()));
        let gate = engine.hang(Call::Notify, 0..=0);
        let (metadata, token) = put(&a);
        thread::scope(|scope| {
            let get = scope.spawn(|| b.get_into(&metadata, &mut [0; 1], WATCHDOG));
            gate.entered(1);
            // Its bytes are there: it ends well, and nothing of it is left to end.
            assert!(matches!(b.abort(&metadata), Err(Error::Stale { .. })));
            gate.open();
            assert_eq!(get.join().unwrap().unwrap(), 1);
        });
        assert_eq!(counts(&b), [1, 1, 0, 0, 0]);
        token.wait().unwrap();
        let counters = a.health().counters.relay;
        assert_eq!((counters.notes_taken, counters.notes_late), (1, 0), "it was told one thing");
    });
}

#[test]
fn a_get_into_that_is_aborted_before_it_turns_to_a_slot_is_aborted() {
    within(WATCHDOG, || {
        let ((_, a), (engine, b)) = (relay(&small()), relay(&small()));
        let (gate, way) = Gate::pair();
        engine.on_read_into(move |_, _, _, _| {
            way.pass();
            None
        });
        let (metadata, token) = put(&a);
        thread::scope(|scope| {
            let get = scope.spawn(|| b.get_into(&metadata, &mut [0; 1], WATCHDOG));
            gate.entered(1);
            b.abort(&metadata).unwrap();
            gate.open();
            let got = get.join().unwrap();
            assert!(matches!(got, Err(Error::Aborted)), "{got:?}");
        });
        assert_eq!(counts(&b), [1, 0, 0, 1, 0]);
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
    });
}

#[test]
fn an_interrupt_does_not_meet_the_next_read_into_a_slot_that_an_engine_let_go_of_early() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small().with_credits(2));
        let config = small().with_receive_credits(1).with_transfer_threads(2);
        let (engine, b) = relay(&config);
        // The peer has proven itself.
        b.get(&put(&a).0).unwrap().wait().unwrap();
        let ((first, first_way), (second, second_way)) = (Gate::pair(), Gate::pair());
        let (reads, met) = (AtomicUsize::new(0), Arc::new(Mutex::new(Vec::<Span>::new())));
        {
            let met = Arc::clone(&met);
            engine.on_interrupt(move |_, span| met.lock().push(span));
        }
        engine.on_read(move |next, remote, local, deadline| {
            if reads.fetch_add(1, Ordering::SeqCst) == 0 {
                // Its thread may look long for what it kept and found quiet at once.
                drop(local);
                first_way.pass();
                return Err(ReadError { error: Error::TimedOut, buffer: None });
            }
            second_way.pass();
            next.read(remote, local, deadline)
        });
        let ((lost, _x), (read, _y)) = (put(&a), put(&a));
        let (tx, rx) = unbounded();
        b.get(&lost).unwrap().attach(&tx, 1);
        first.entered(1);
        b.get(&read).unwrap().attach(&tx, 2);
        second.entered(1);
        b.abort(&lost).unwrap();
        assert_eq!(met.lock()[..], [], "the slot is another read's");
        first.open();
        second.open();
        let mut ends: Vec<_> = rx.iter().take(2).map(|end| (end.tag, end.result.is_ok())).collect();
        ends.sort_unstable();
        assert_eq!(ends, [(1, false), (2, true)]);
        eventually(1, || b.health().receive_free);
        assert_eq!(counts(&b), [3, 2, 0, 1, 0]);
    });
}

/// Has connects to `silent` wait for the gate, and then time out.
fn silent(engine: &Hooked) -> Gate {
    let (gate, way) = Gate::pair();
    engine.on_connect(move |_, peer, _| {
        if peer != "silent" {
            return Ok(());
        }
        way.pass();
        Err(Error::TimedOut)
    });
    gate
}

#[test]
fn a_peer_that_does_not_answer_holds_no_receive_slot() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small().with_receive_credits(1).with_transfer_threads(2));
        let gate = silent(&engine);
        let (metadata, _x) = put(&a);
        let (lost, end) = unbounded();
        let short = Duration::from_secs(3);
        b.get_timeout(&moved_to("silent", &metadata), short).unwrap().attach(&lost, 0);
        gate.entered(1);
        // One that a caller reads, and then those that the other thread reads.
        b.get(&metadata).unwrap().wait().unwrap();
        for tag in 0..3 {
            let ((metadata, _y), (tx, rx)) = (put(&a), unbounded());
            b.get(&metadata).unwrap().attach(&tx, tag);
            rx.recv().unwrap().result.unwrap();
        }
        assert_eq!(b.health().receive_free, 1);
        assert!(matches!(end.recv().unwrap().result, Err(Error::TimedOut)), "by its own deadline");
        drop(gate);
    });
}

#[test]
fn gets_of_a_peer_that_a_caller_has_found_to_answer_are_begun_at_once() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small().with_transfer_threads(2));
        let gate = silent(&engine);
        let ((queued, _x), (waited, _y)) = (put(&a), put(&a));
        let (tx, rx) = unbounded();
        drop(b.get(&moved_to("silent", &queued)).unwrap());
        gate.entered(1);
        // The turn of those who may not answer is taken.
        b.get(&queued).unwrap().attach(&tx, 0);
        b.get(&waited).unwrap().wait().unwrap();
        rx.recv().unwrap().result.unwrap();
        drop(gate);
    });
}
