//! Faults of notifications.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use mooncake_relay::{Engine, Event, Instance, internal::Sleeper};

use crate::{
    BYTES, WATCHDOG,
    common::{eventually, faults::odd_notes, hooked::Hooked, within},
    get, heard, note, pair, put, started, tell,
};

/// `call` wakes whoever sleeps until an event comes.
#[track_caller]
fn assert_rings(engine: &Hooked, call: impl FnOnce()) {
    let bell = engine.doorbell().unwrap();
    let ticket = bell.arm(Sleeper::Notifier);
    call();
    assert_ne!(bell.ticket(), ticket);
}

#[test]
fn notes_are_dropped_or_doubled() {
    let (from, to) = (started(), started());
    from.drop_notes(1..3);
    (0..4).for_each(|n| tell(&from, &to, n).unwrap());
    assert_eq!(heard(&to), ["0", "3"]);
    from.double_notes();
    tell(&from, &to, 4).unwrap();
    assert_eq!(heard(&to), ["4", "4"]);
}

#[test]
fn notes_are_held_until_released() {
    within(WATCHDOG, || {
        let (from, to) = (started(), started());
        let gate = to.hold_notes();
        (0..2).for_each(|n| tell(&from, &to, n).unwrap());
        assert!(heard(&to).is_empty());
        gate.entered(2);
        assert_rings(&to, || gate.open());
        tell(&from, &to, 2).unwrap();
        assert_eq!(heard(&to), ["0", "1", "2"]);

        let (from, a, _, b) = pair();
        let gate = from.hold_notes();
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        gate.entered(1);
        assert!(!token.is_done());
        gate.open();
        token.wait().unwrap();
    });
}

#[test]
fn notes_are_reported_in_reverse_by_pairs() {
    let (from, to) = (started(), started());
    to.reverse_notes();
    (0..5).for_each(|n| tell(&from, &to, n).unwrap());
    assert_eq!(heard(&to), ["1", "0", "3", "2"]);
    tell(&from, &to, 5).unwrap();
    assert_eq!(heard(&to), ["5", "4"]);
}

#[test]
fn notes_that_nobody_sent_and_odd_ones_are_reported_and_a_relay_bears_them() {
    within(WATCHDOG, || {
        let to = started();
        assert_rings(&to, || to.inject_note(note(0)));
        assert_eq!(heard(&to), ["0"]);
        assert!(heard(&to).is_empty());

        let (from, a, _, b) = pair();
        let odd = odd_notes();
        let heard = Arc::new(AtomicUsize::new(0));
        let hear = Arc::clone(&heard);
        from.after_poll(move |count| {
            hear.fetch_add(count, Ordering::SeqCst);
        });
        odd.iter().for_each(|note| from.inject_note(note.clone()));
        from.inject(Event::PeerGone(Instance::from_bytes([9; 16])));
        eventually(odd.len() + 1, || heard.load(Ordering::SeqCst));
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        token.wait().unwrap();
        assert_eq!(a.health().counters.relay.notes_unknown, odd.len() as u64);
    });
}
