//! Gets for which somebody waits at once wake no thread; those for which nobody does are read all the
//! same, and by as many threads as there are slots for. Those that were passed over, since their peer had
//! failed, are read as soon as they may.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam::channel::{self, Receiver, Sender};
use mooncake_relay::{Completion, Config, Engine, Error, Relay, Result, Slot, Tensor};

use crate::common::{
    gate::Gate,
    hooked::{Call, Hooked},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(120);
const THREADS: usize = 4;

#[test]
fn after_many_gets_that_were_waited_for_others_are_read_by_every_thread() {
    within(WATCHDOG, || {
        let engine = Hooked::new("waited-gets");
        let (gate, barrier) = Gate::pair();
        let gated = Arc::new(AtomicBool::new(false));
        let is_gated = Arc::clone(&gated);
        engine.before(Call::Read, move || {
            if is_gated.load(Ordering::SeqCst) {
                barrier.pass();
            } else {
                // Whoever waits comes while it is read, if a thread was faster.
                thread::sleep(Duration::from_micros(200));
            }
            Ok(())
        });
        let config = Config::default()
            .with_slot_size(64)
            .with_credits(THREADS as u32)
            .with_transfer_threads(THREADS);
        let relay = Relay::new(engine.engine(), &config).unwrap();
        for round in 0..50 {
            let (metadata, put) = relay.put_bytes(&[round], Tensor::bytes(1)).unwrap();
            assert_eq!(relay.get(&metadata).unwrap().wait().unwrap()[..], [round]);
            put.wait().unwrap();
        }

        gated.store(true, Ordering::SeqCst);
        let (tx, rx) = channel::unbounded();
        for tag in 0..THREADS as u64 {
            let (metadata, _) = relay.put_bytes(&[tag as u8], Tensor::bytes(1)).unwrap();
            relay.get(&metadata).unwrap().attach(&tx, tag);
        }
        gate.entered(THREADS);
        gate.open();
        for _ in 0..THREADS {
            let Completion { tag, result } = rx.recv().unwrap();
            assert_eq!(result.unwrap()[..], [tag as u8]);
        }
    });
}

#[test]
fn slots_that_come_back_together_are_filled_by_as_many_threads() {
    slots_come_back("together", |held, _| held.clear());
}

#[test]
fn slots_that_come_back_while_another_is_filled_are_filled_too() {
    slots_come_back("one-by-one", |held, gate| {
        for filling in 1..=THREADS {
            held.pop();
            gate.entered(filling);
        }
    });
}

/// All slots are held while as many gets wait; `give` gives them back. Each read stays in its engine
/// until all have begun, so that no thread does the work of two.
fn slots_come_back(name: &'static str, give: fn(&mut Vec<Slot>, &Gate)) {
    within(WATCHDOG, move || {
        let engine = Hooked::new(name);
        let config = Config::default()
            .with_slot_size(64)
            .with_credits(2 * THREADS as u32)
            .with_receive_credits(THREADS as u32)
            .with_transfer_threads(THREADS);
        let relay = Relay::new(engine.engine(), &config).unwrap();
        let get = |byte: u8| {
            let (metadata, _) = relay.put_bytes(&[byte], Tensor::bytes(1)).unwrap();
            relay.get(&metadata).unwrap()
        };
        let mut held: Vec<_> = (0..THREADS).map(|_| get(0).wait().unwrap()).collect();
        let (gate, barrier) = Gate::pair();
        engine.before(Call::Read, move || {
            barrier.pass();
            Ok(())
        });
        let waiting: Vec<_> = (1..=THREADS as u8).map(get).collect();
        thread::sleep(Duration::from_millis(50)); // wider: the threads look, and lie down again
        give(&mut held, &gate);
        gate.entered(THREADS);
        gate.open();
        for (byte, token) in (1..).zip(waiting) {
            assert_eq!(token.wait().unwrap()[..], [byte]);
        }
    });
}

#[test]
fn a_peer_that_answers_another_thread_has_its_gets_read_that_were_passed_over() {
    within(WATCHDOG, || {
        let scene = Scene::new("passed-over-answers");
        scene.fails();
        scene.get(1);
        let first = scene.begun();
        scene.get(2); // a thread is free, but for a peer that failed there is the other one
        thread::sleep(Duration::from_millis(50)); // wider: it passes it over
        scene.is_read_by_its_caller();
        scene.begun().send(Ok(())).unwrap();
        assert_eq!(scene.done.recv().unwrap().tag, 2);
        first.send(Ok(())).unwrap();
        assert_eq!(scene.done.recv().unwrap().tag, 1);
    });
}

#[test]
fn a_get_that_was_passed_over_has_its_turn_when_the_one_before_it_has_failed() {
    within(WATCHDOG, || {
        let scene = Scene::new("passed-over-failed");
        scene.fails();
        scene.get(1);
        let first = scene.begun();
        scene.get(2);
        thread::sleep(Duration::from_millis(50)); // wider: the other thread passes it over
        first.send(Err(Error::TimedOut)).unwrap();
        scene.begun().send(Ok(())).unwrap();
        assert_eq!([1, 2].map(|_| scene.done.recv().unwrap().tag), [1, 2]);
    });
}

#[test]
fn a_get_that_was_passed_over_has_its_turn_when_one_from_before_the_failure_has_ended() {
    within(WATCHDOG, || {
        let scene = Scene::new("passed-over-before");
        scene.is_read_by_its_caller();
        scene.get(1);
        let first = scene.begun();
        scene.fails();
        scene.get(2);
        thread::sleep(Duration::from_millis(50)); // wider: the other thread passes it over
        first.send(Err(Error::TimedOut)).unwrap();
        scene.begun().send(Ok(())).unwrap();
        assert_eq!([1, 2].map(|_| scene.done.recv().unwrap().tag), [1, 2]);
    });
}

/// A relay of two transfer threads that gets from itself; each read ends as the test says.
struct Scene {
    relay: Relay,
    reads: Receiver<Sender<Result<()>>>,
    tell: Sender<Completion<Slot>>,
    done: Receiver<Completion<Slot>>,
}

impl Scene {
    fn new(name: &str) -> Self {
        let engine = Hooked::new(name);
        let (begin, reads) = channel::unbounded();
        engine.before(Call::Read, move || {
            let (end, outcome) = channel::bounded(1);
            begin.send(end).unwrap();
            outcome.recv().unwrap_or(Ok(())) // the test is over
        });
        // A peer that takes the note of a failed get has answered.
        engine.on_notify(|next, peer, note, deadline| match note.message() {
            "transfer_failed" => Err(Error::Closed),
            _ => next.notify(peer, note, deadline),
        });
        let config = Config::default().with_slot_size(64).with_credits(4).with_transfer_threads(2);
        let relay = Relay::new(engine.engine(), &config).unwrap();
        let (tell, done) = channel::unbounded();
        Self { relay, reads, tell, done }
    }

    /// A get that nobody waits for.
    fn get(&self, tag: u64) {
        let (metadata, _) = self.relay.put_bytes(&[7], Tensor::bytes(1)).unwrap();
        self.relay.get(&metadata).unwrap().attach(&self.tell, tag);
    }

    /// The end of the read that has begun.
    fn begun(&self) -> Sender<Result<()>> {
        self.reads.recv().unwrap()
    }

    /// A get that its caller reads, and that ends so.
    fn read_by_its_caller(&self, outcome: Result<()>) -> Result<Slot> {
        let (metadata, _) = self.relay.put_bytes(&[7], Tensor::bytes(1)).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| self.begun().send(outcome).unwrap());
            self.relay.get(&metadata).unwrap().wait()
        })
    }

    fn is_read_by_its_caller(&self) {
        self.read_by_its_caller(Ok(())).unwrap();
    }

    fn fails(&self) {
        assert!(matches!(self.read_by_its_caller(Err(Error::TimedOut)), Err(Error::TimedOut)));
    }
}
