//! The fault-injecting engine's own tests: each fault does what its name says.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod notes;
mod reads;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Config, Engine, Error, Event, Instance, Metadata, Notification, Publication, Relay, Retracted,
    Slot, Tensor, Token,
};
use parking_lot::Mutex;

use crate::common::{
    Random, eventually,
    hooked::{Call, Hooked, refused},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(60);
const BYTES: [u8; 16] = [0x11; 16];

fn engine() -> Hooked {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    Hooked::new(&format!("fault-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// An engine that takes notes, with no relay.
fn started() -> Hooked {
    let engine = engine();
    engine.start(&Instance::from_bytes([7; 16])).unwrap();
    engine
}

fn relay(engine: &Hooked) -> Relay {
    let config = Config::default().with_slot_size(4096).with_credits(2).with_receive_credits(1);
    Relay::new(engine.engine(), &config).unwrap()
}

/// A sender and a receiver, and their engines.
fn pair() -> (Hooked, Relay, Hooked, Relay) {
    let (from, to) = (engine(), engine());
    let (a, b) = (relay(&from), relay(&to));
    (from, a, to, b)
}

fn put(relay: &Relay) -> (Metadata, Token<Slot>) {
    relay.put_bytes(&BYTES, Tensor::bytes(BYTES.len())).unwrap()
}

fn get(relay: &Relay, metadata: &Metadata) -> Result<Vec<u8>, &'static str> {
    let got = relay.get(metadata).unwrap().wait();
    got.map(|slot| slot.to_vec()).map_err(|error| error.kind())
}

fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

fn note(n: usize) -> Notification {
    Notification::new(&n.to_string(), "transfer_complete")
}

fn tell(from: &Hooked, to: &Hooked, n: usize) -> Result<(), Error> {
    from.notify(to.session_id(), &note(n), soon())
}

/// The names of the notes that one poll reports.
fn heard(engine: &Hooked) -> Vec<String> {
    let mut names = Vec::new();
    let mut hear = |event| match event {
        Event::Note(note) => names.push(note.name().to_owned()),
        other => panic!("{other:?}"),
    };
    engine.poll(&mut hear).unwrap();
    names
}

fn publications(engine: &Hooked) -> Arc<Mutex<Vec<Publication>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let see = Arc::clone(&seen);
    engine.on_publish(move |next, slot| {
        see.lock().push(*slot);
        next.publish(slot);
    });
    seen
}

#[test]
fn every_call_reaches_the_engine_below() {
    within(WATCHDOG, || {
        let called: Arc<Mutex<BTreeSet<&str>>> = Arc::default();
        let below = engine();
        /// A hook that enters the call's name and goes on.
        macro_rules! enter {
            ($($on:ident $call:ident($($arg:ident),*);)*) => {$(
                let called_here = Arc::clone(&called);
                below.$on(move |next, $($arg),*| {
                    called_here.lock().insert(stringify!($call));
                    next.$call($($arg),*)
                });
            )*};
        }
        enter! {
            on_start start(instance);
            on_stop stop(deadline);
            on_unregister unregister(span);
            on_connect connect(peer, deadline);
            on_read_many read_many(reads, deadline);
            on_read_into read_into(remote, dest, deadline);
            on_write write(remote, local, deadline);
            on_notify notify(peer, note, deadline);
            on_poll poll(events);
            on_publish publish(slot);
            on_retract retract(slot);
            on_cut cut(slot);
            on_interrupt interrupt(span);
            on_tend tend();
            on_counters counters(each);
        }
        let above = Hooked::over(below.engine());
        let peer = above.session_id().to_owned();
        assert_eq!((&*peer, above.protocol()), (below.session_id(), "inprocess"));
        assert!(std::ptr::eq(above.doorbell().unwrap(), below.doorbell().unwrap()));
        // Only a relay has buffers to lend: its reads come by another way.
        let lender = Hooked::over(above.engine());
        let relay = relay(&lender);
        assert_eq!((above.registered() > 0, above.registered()), (true, below.registered()));
        let published = publications(&above);
        let (metadata, token) = put(&relay);
        assert_eq!(relay.get_into(&metadata, &mut [0; 16], WATCHDOG).unwrap(), 16);
        drop(token.wait().unwrap());
        let slot = published.lock()[0];
        assert_eq!(above.cut(&slot), Retracted::Quiet);
        above.connect(&peer, soon()).unwrap();
        above.interrupt(slot.span());
        above.tend();
        above.counters(&mut |_, _| ());
        let reads = above.clone();
        lender.on_read(move |_, remote, local, deadline| {
            let refused = reads.write(remote, local, deadline).unwrap_err();
            reads.read_many(vec![(remote.clone(), refused.buffer.unwrap())], deadline).remove(0)
        });
        let (metadata, _token) = put(&relay);
        assert_eq!(get(&relay, &metadata).unwrap(), BYTES);
        drop(relay);
        assert_eq!((above.registered(), below.registered()), (0, 0));
        let called = called.lock();
        // A hook of `read` would stand in the way of the other two; `register` is counted above.
        let all = "connect counters cut interrupt notify poll publish read_into read_many retract \
                   start stop tend unregister write";
        assert_eq!(called.iter().copied().collect::<Vec<_>>().join(" "), all);
    });
}

#[test]
fn the_hook_set_last_is_met_first() {
    let (engine, order) = (started(), Arc::new(Mutex::new(Vec::new())));
    for n in 0..3 {
        let order = Arc::clone(&order);
        engine.before(Call::Poll, move || {
            order.lock().push(n);
            Ok(())
        });
    }
    assert!(heard(&engine.clone()).is_empty());
    assert_eq!(*order.lock(), [2, 1, 0]);
}

#[test]
fn what_reads_in_another_way_meets_the_hooks_of_read_too() {
    within(WATCHDOG, || {
        let (from, to) = (engine(), engine());
        to.fail(Call::Read, .., refused);
        let lender = Hooked::over(to.engine());
        let (a, b) = (relay(&from), relay(&lender));
        let (metadata, _token) = put(&a);
        let into = b.get_into(&metadata, &mut [0; 16], WATCHDOG);
        assert!(matches!(into, Err(Error::Engine { .. })), "{into:?}");
        let (metadata, _token) = put(&a);
        lender.on_read(move |_, remote, local, deadline| {
            to.read_many(vec![(remote.clone(), local)], deadline).remove(0)
        });
        assert_eq!(get(&b, &metadata), Err("Engine"));
    });
}

#[test]
fn a_delay_makes_calls_late() {
    within(WATCHDOG, || {
        let (from, to) = (started(), started());
        let most = Duration::from_millis(5);
        from.delay(Call::Notify, most, 0x5eed);
        let mut random = Random::new(0x5eed);
        let expected: u64 = (0..10).map(|_| random.below(most.as_micros() as u64 + 1)).sum();
        assert!(expected > 0);
        let start = Instant::now();
        (0..10).for_each(|n| tell(&from, &to, n).unwrap());
        assert!(start.elapsed() >= Duration::from_micros(expected));
        assert_eq!(heard(&to).len(), 10);
    });
}

#[test]
fn the_calls_that_fail_are_those_meant_and_a_read_hands_its_buffer_back() {
    within(WATCHDOG, || {
        let (from, a, to, b) = pair();
        to.fail(Call::Read, 1..=1, refused);
        let (metadata, _kept) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata), Err("Engine"));
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        assert_eq!(b.health().receive_free, 1);
        to.fail(Call::Unregister, .., refused);
        drop((a, b));
        assert!(to.registered() > 0 && from.registered() == 0);

        let one = engine();
        one.fail(Call::Start, ..1, refused).fail(Call::Register, ..1, refused);
        for _ in 0..2 {
            assert!(Relay::new(one.engine(), &Config::default()).is_err());
        }
        drop(relay(&one));

        let (from, to) = (started(), started());
        from.fail(Call::Notify, ..2, || Error::TimedOut);
        let told: Vec<_> = (0..4).map(|n| tell(&from, &to, n).is_ok()).collect();
        assert_eq!(told, [false, false, true, true]);
        to.fail(Call::Poll, ..1, refused);
        assert!(to.poll(&mut |_| ()).is_err());
        assert_eq!(heard(&to), ["2", "3"]);
    });
}

#[test]
fn an_engine_that_knows_no_readers_goes_on_serving_what_has_ended() {
    within(WATCHDOG, || {
        let (from, a, to, b) = pair();
        to.ranges_only();
        from.knows_no_readers();
        let published = publications(&from);
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        token.wait().unwrap();
        assert_eq!(get(&b, &metadata), Err("Stale"));
        let slot = published.lock()[0];
        assert_eq!(
            (from.retract(&slot), from.cut(&slot)),
            (Retracted::Unknown, Retracted::Unknown)
        );
    });
}

#[test]
fn a_read_hangs_until_its_gate_is_opened() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        let gate = to.hang(Call::Read, ..1);
        let (metadata, token) = put(&a);
        let waiting = b.get(&metadata).unwrap();
        gate.entered(1);
        assert_eq!((b.health().reading, waiting.is_done()), (1, false));
        gate.open();
        assert_eq!(waiting.wait().unwrap()[..], BYTES);
        token.wait().unwrap();
    });
}

#[test]
fn a_hanging_call_keeps_no_deadline_and_goes_on_when_its_gate_is_dropped() {
    within(WATCHDOG, || {
        let (from, to) = (started(), started());
        let gate = from.hang(Call::Notify, ..);
        let late = Instant::now();
        thread::scope(|s| {
            let calls = [(); 2].map(|()| s.spawn(|| from.notify(to.session_id(), &note(0), late)));
            gate.entered(2);
            assert!(calls.iter().all(|call| !call.is_finished()));
            drop(gate);
            for call in calls {
                assert!(matches!(call.join().unwrap(), Err(Error::TimedOut)));
            }
        });
        tell(&from, &to, 1).unwrap();

        let gate = to.hang(Call::Poll, ..);
        thread::scope(|s| {
            let polled = s.spawn(|| heard(&to));
            gate.entered(1);
            assert!(!polled.is_finished());
            gate.open();
            assert_eq!(polled.join().unwrap(), ["1"]);
        });

        let (from, a, ..) = pair();
        let gate = from.hang(Call::Unregister, ..);
        thread::scope(|s| {
            let ends = s.spawn(|| drop(a));
            gate.entered(1);
            assert!(from.registered() > 0 && !ends.is_finished());
            gate.open();
            ends.join().unwrap();
        });
        assert_eq!(from.registered(), 0);
    });
}

#[test]
fn a_retraction_is_answered_as_the_test_wants_it_until_its_gate_is_opened() {
    within(WATCHDOG, || {
        let (from, a, _, b) = pair();
        let published = publications(&from);
        let cut = from.answer_cut(Retracted::Unknown);
        let gate = from.answer_retract(Retracted::Reading);
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        gate.entered(1);
        eventually(1, || a.health().quarantined.len());
        assert_eq!(get(&b, &metadata), Err("Stale"), "it is over all the same");
        assert!(!token.is_done());
        let slot = published.lock()[0];
        assert_eq!(from.cut(&slot), Retracted::Unknown);
        gate.open();
        token.wait().unwrap();
        drop(cut);
        assert_eq!((from.retract(&slot), from.cut(&slot)), (Retracted::Quiet, Retracted::Quiet));
    });
}

#[test]
fn transfers_go_on_without_a_bell() {
    within(WATCHDOG, || {
        let (from, to) = (engine(), engine());
        from.replace_bell(None);
        assert!(from.doorbell().is_none());
        let (a, b) = (relay(&from), relay(&to));
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        token.wait().unwrap();
    });
}

#[test]
fn faults_add_up() {
    within(WATCHDOG, || {
        let (from, a, to, b) = pair();
        let most = Duration::from_millis(2);
        to.ranges_only().delay(Call::Read, most, 1).delay(Call::Notify, most, 2).double_notes();
        to.fail(Call::Notify, ..1, refused);
        from.delay(Call::Poll, most, 3);
        for _ in 0..4 {
            let (metadata, token) = put(&a);
            assert_eq!(get(&b, &metadata).unwrap(), BYTES);
            token.wait().unwrap();
        }
        let late = || a.health().counters.relay.notes_late;
        eventually(4, late);
        assert_eq!(b.health().counters.relay.notes_untaken, 1);
    });
}
