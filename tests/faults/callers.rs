//! Many callers, many peers, many relays: none stands in the way of another.

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, unbounded};
use mooncake_relay::{Completion, Config, Engine, Error, ReadError, Slot, Tensor, Token};
use parking_lot::Mutex;
use serde_json::json;

use crate::{
    common::{
        Random,
        bytes::Pattern,
        eventually,
        gate::Gate,
        hooked::{Call, Hooked},
    },
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any: q15_bytes_are_written_and_read_in_place_and_calls_return_while_bytes_travel,
        q19_a_slot_is_released_once_however_many_ends_a_put_has,
        q20_gets_from_a_stuck_sender_keep_no_healthy_one_waiting,
        q20_gets_from_a_sender_that_never_answered_keep_no_thread_from_others,
        q20_a_sender_that_answered_before_it_got_stuck_gives_way,
        q20_a_sender_that_missed_its_first_try_does_not_wait_for_stuck_ones,
        q23_relays_used_from_two_threads_share_nothing = 300;
    Processes: q19_any_number_of_waiters_hear_the_same_end;
}

const PATIENCE: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::default().with_slot_size(64 << 10).with_quarantine(Duration::from_millis(20))
}

fn q15_bytes_are_written_and_read_in_place_and_calls_return_while_bytes_travel(on: &On) {
    let a = on.relay(&config());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &config());
    let gate = engine.hang(Call::Read, ..);
    let mut slot = a.try_acquire(5000).unwrap();
    slot.fill(0x15);
    let place = slot.as_ptr().addr();
    let (metadata, token) = a.put(slot, Tensor::bytes(5000)).unwrap();
    let published = serde_json::to_value(&metadata).unwrap()["mooncake"]["buffer_ptr"].clone();
    assert_eq!(published, json!(place), "nothing was copied");
    let get = b.get(&metadata).unwrap();
    gate.entered(1);
    // Both sides go on with everything else.
    assert!(!get.is_done() && !token.is_done());
    drop(b.try_acquire(1).unwrap());
    let (other, other_token) = b.sends(b"the other way");
    assert_eq!(&a.get(&other).unwrap().wait().unwrap()[..], b"the other way");
    other_token.wait().unwrap();
    let later = b.get(&a.sends(b"later").0).unwrap();
    assert_eq!((b.health().reading, b.health().queued), (1, 1));
    gate.open();
    assert_eq!(get.wait().unwrap()[..], [0x15; 5000]);
    assert_eq!(token.wait().unwrap().as_ptr().addr(), place, "nor on the way back");
    later.wait().unwrap();
}

fn q19_a_slot_is_released_once_however_many_ends_a_put_has(on: &On) {
    const CREDITS: u32 = 3;
    let (a, b) = on.pair(&config().with_credits(CREDITS));
    for round in 0..60_u8 {
        let mut slot = a.acquire(100, PATIENCE).unwrap();
        slot.fill(round);
        let (metadata, mut token) = a.put_as("request", slot, Tensor::bytes(100)).unwrap();
        thread::scope(|s| {
            let (a, b, metadata) = (&a, &b, &metadata);
            s.spawn(move || match b.get(metadata).unwrap().wait() {
                Ok(got) => assert_eq!(got[..], [round; 100]),
                Err(error) => is_over(&error),
            });
            s.spawn(move || a.abort(metadata).unwrap_or_else(|error| is_over(&error)));
            s.spawn(move || assert!(a.cleanup("request") <= 1));
        });
        match token.wait_timeout(PATIENCE).unwrap() {
            Ok(slot) => assert_eq!(slot[..], [round; 100]),
            Err(error) => is_over(&error),
        }
        a.comes_to_rest();
        let all: Vec<_> = iter::from_fn(|| a.try_acquire(1).ok()).collect();
        let mut places: Vec<_> = all.iter().map(|slot| slot.as_ptr().addr()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!((all.len(), places.len()), (CREDITS as usize, CREDITS as usize));
    }
    let counters = a.health().counters.relay;
    let ends = counters.puts_acknowledged + counters.puts_failed + counters.puts_aborted;
    assert_eq!((counters.puts, ends), (60, 60), "{counters:?}");
}

/// What a put or a get ends with that somebody else has ended.
#[track_caller]
fn is_over(error: &Error) {
    let over = matches!(
        error,
        // Where only ranges are known, one that is published no more is refused.
        Error::Aborted | Error::Stale { .. } | Error::Rejected { .. } | Error::PeerFailed { .. }
    );
    assert!(over, "{error:?}");
}

fn q19_any_number_of_waiters_hear_the_same_end(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let (read, aborted) =
        (a.put(json!({"size": 9, "fill": 1})), a.put(json!({"size": 9, "fill": 2})));
    let wait = |of| a.send(json!({"cmd": "wait", "of": of}));
    let early: Vec<_> = (0..4).flat_map(|_| [wait(read.tag), wait(aborted.tag)]).collect();
    assert_eq!(b.get(&read.metadata)["sha256"], *read.sha256);
    assert_eq!(a.ask(json!({"cmd": "abort", "of": aborted.tag}))["ok"], true);
    let late: Vec<_> = (0..4).flat_map(|_| [wait(read.tag), wait(aborted.tag)]).collect();
    for pair in [early, late].concat().chunks(2) {
        assert_eq!(a.answer(pair[0])["ok"], true);
        assert_eq!(a.answer(pair[1])["kind"], "Aborted");
    }
    if on.lacks(Lack::Readers) {
        a.comes_to_rest(); // the aborted one's slot might have been read
    }
    eventually(2, || a.free().0);
}

const HANDFUL: usize = 6;

/// Gets from one sender, that nobody waits for in a way that would read them.
struct Handful {
    tx: Sender<Completion<Slot>>,
    rx: Receiver<Completion<Slot>>,
    puts: Vec<Token<Slot>>,
}

impl Handful {
    fn of(stuck: &AtRest, relay: &AtRest) -> Self {
        let (tx, rx) = unbounded();
        let (metadata, puts): (Vec<_>, _) = (0..HANDFUL).map(|_| stuck.sends(b"stuck")).unzip();
        for metadata in &metadata {
            relay.get(metadata).unwrap().attach(&tx, 0);
        }
        Self { tx, rx, puts }
    }

    /// Gets from another, likewise, end before any of these.
    #[track_caller]
    fn let_others_pass(&self, healthy: &AtRest, relay: &AtRest) {
        for round in 1..20 {
            let (metadata, token) = healthy.sends(b"healthy");
            relay.get(&metadata).unwrap().attach(&self.tx, round);
            assert_eq!(self.rx.recv().unwrap().tag, round, "the stuck ones are still stuck");
            token.wait().unwrap();
        }
    }

    #[track_caller]
    fn end_well(self) {
        for _ in &self.puts {
            assert_eq!(&self.rx.recv().unwrap().result.unwrap()[..], b"stuck");
        }
        self.puts.into_iter().for_each(|token| drop(token.wait().unwrap()));
    }
}

/// Reads from `stuck` hang until the gate is opened.
fn hang_reads_of(stuck: &AtRest, engine: &Hooked) -> Gate {
    let (gate, way) = Gate::pair();
    let peer = stuck.health().session_id;
    engine.on_read(move |next, remote, local, deadline| {
        if *remote.peer == *peer {
            way.pass();
        }
        next.read(remote, local, deadline)
    });
    gate
}

fn q20_gets_from_a_stuck_sender_keep_no_healthy_one_waiting(on: &On) {
    let stuck = on.relay(&config().with_credits(HANDFUL as u32));
    let healthy = on.relay(&config());
    let engine = on.hooked();
    let few = config().with_transfer_threads(2).with_receive_credits(2 * HANDFUL as u32);
    let b = AtRest::new(engine.engine(), &few);
    stuck.works_with(&b);
    healthy.works_with(&b);
    let gate = hang_reads_of(&stuck, &engine);
    let gets = Handful::of(&stuck, &b);
    gate.entered(1);
    // Whoever waits for a get may read it too, so it needs no thread of the relay.
    for _ in 0..20 {
        healthy.works_with(&b);
    }
    assert!(gets.rx.is_empty(), "the stuck ones are still stuck");
    gate.open();
    gets.end_well();
}

fn q20_gets_from_a_sender_that_never_answered_keep_no_thread_from_others(on: &On) {
    let stuck = on.relay(&config().with_credits(HANDFUL as u32));
    let healthy = on.relay(&config());
    let engine = on.hooked();
    let few = config().with_transfer_threads(2).with_receive_credits(2 * HANDFUL as u32);
    let b = AtRest::new(engine.engine(), &few);
    healthy.works_with(&b);
    let gate = hang_reads_of(&stuck, &engine);
    let gets = Handful::of(&stuck, &b);
    gate.entered(1);
    gets.let_others_pass(&healthy, &b);
    gate.open();
    gets.end_well();
}

fn q20_a_sender_that_answered_before_it_got_stuck_gives_way(on: &On) {
    let stuck = on.relay(&config().with_credits(HANDFUL as u32));
    let healthy = on.relay(&config());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &config().with_transfer_threads(2));
    stuck.works_with(&b);
    let gate = stick_reads_of(&stuck, &engine);
    let gets = Handful::of(&stuck, &b);
    gate.entered(2); // both threads, and both receive slots
    gets.let_others_pass(&healthy, &b);
    gate.open();
    gets.end_well();
}

fn q20_a_sender_that_missed_its_first_try_does_not_wait_for_stuck_ones(on: &On) {
    let stuck = [(); 2].map(|()| on.relay(&config().with_credits(HANDFUL as u32)));
    let slow = on.relay(&config());
    let engine = on.hooked();
    let slots = 2 * HANDFUL as u32;
    let b = AtRest::new(
        engine.engine(),
        &config().with_transfer_threads(2).with_receive_credits(slots),
    );
    stuck.iter().for_each(|relay| relay.works_with(&b));
    // Once, as on a machine that has other things to do.
    let (name, missed) = (slow.health().session_id, AtomicBool::new(false));
    engine.on_connect(move |next, peer, deadline| {
        if *peer == *name && !missed.swap(true, Ordering::SeqCst) {
            return Err(Error::TimedOut);
        }
        next.connect(peer, deadline)
    });
    let gates = stuck.each_ref().map(|relay| stick_reads_of(relay, &engine));
    let gets = stuck.each_ref().map(|relay| Handful::of(relay, &b));
    eventually(2, || b.health().reading);
    let (tx, rx) = unbounded();
    let (metadata, token) = slow.sends(b"slow, and well");
    b.get(&metadata).unwrap().attach(&tx, 0);
    assert_eq!(&rx.recv().unwrap().result.unwrap()[..], b"slow, and well");
    drop(token.wait().unwrap());
    assert!(gets.iter().all(|gets| gets.rx.is_empty()), "the stuck ones are still stuck");
    gates.iter().for_each(Gate::open);
    gets.into_iter().for_each(Handful::end_well);
}

/// Reads from `peer` end only when the gate is opened or the relay interrupts them.
fn stick_reads_of(peer: &AtRest, engine: &Hooked) -> Gate {
    let (gate, way) = Gate::pair();
    let name = peer.health().session_id;
    let interrupted: Arc<Mutex<Vec<u64>>> = Arc::default();
    let asked = Arc::clone(&interrupted);
    engine.on_interrupt(move |next, span| {
        asked.lock().push(span.addr());
        next.interrupt(span);
    });
    engine.on_read(move |next, remote, local, deadline| {
        if *remote.peer != *name || !way.enter() {
            return next.read(remote, local, deadline);
        }
        let at = local.span().addr();
        interrupted.lock().retain(|span| *span != at);
        while !way.is_open() {
            if Instant::now() >= deadline || interrupted.lock().contains(&at) {
                return Err(ReadError { error: Error::Aborted, buffer: Some(local) });
            }
            thread::sleep(Duration::from_millis(1)); // between two looks
        }
        next.read(remote, local, deadline)
    });
    gate
}

fn q23_relays_used_from_two_threads_share_nothing(on: &On) {
    const PAIRS: usize = 4;
    const ROUNDS: usize = 50;
    let config = config().with_engine_id("the same for all");
    let pairs: Vec<_> = (0..PAIRS).map(|_| on.pair(&config)).collect();
    let pattern = Pattern::new(&mut Random::new(0x9023), 4096);
    // Two threads a pair, each way at once.
    thread::scope(|s| {
        for (n, (from, to)) in pairs.iter().enumerate() {
            for (thread, from, to) in [(2 * n, from, to), (2 * n + 1, to, from)] {
                let pattern = &pattern;
                s.spawn(move || {
                    for round in 0..ROUNDS {
                        let expected = pattern.of(thread * ROUNDS + round, 4096);
                        let (metadata, token) = from.sends(expected);
                        assert!(to.get(&metadata).unwrap().wait().unwrap()[..] == *expected);
                        token.wait().unwrap();
                    }
                });
            }
        }
    });
    for relay in pairs.iter().flat_map(|(from, to)| [from, to]) {
        let counters = relay.health().counters.relay;
        assert_eq!(
            (counters.puts_acknowledged, counters.gets_done),
            (ROUNDS as u64, ROUNDS as u64)
        );
        assert_eq!(counters.notes_unknown, 0, "a note for another relay");
    }
    // And the end of one is no other's.
    let (open, token) = pairs[0].0.sends(b"still open");
    pairs[1].0.close(PATIENCE);
    assert!(!token.is_done());
    assert_eq!(&pairs[0].1.get(&open).unwrap().wait().unwrap()[..], b"still open");
    token.wait().unwrap();
}
