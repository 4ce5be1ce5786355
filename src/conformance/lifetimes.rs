//! Cases: when what was published stops being served.

use std::{
    sync::Arc,
    thread::{self, ScopedJoinHandle},
};

use super::{
    LIMIT,
    side::{Side, assert_same, bytes_of, pattern, soon},
    within,
};
use crate::{
    Engine, Publication, RemoteBuffer, Retracted,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Ending a publication that nobody has ever read does not say `Reading`.
pub fn retract_is_quiet_when_nobody_reads(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 2, 4096);
    within(LIMIT, move || {
        let (first, second) = (side.publish(0, &[1; 4096]), side.publish(1, &[2; 4096]));
        assert_ne!(side.engine.retract(&first), Retracted::Reading, "nobody reads it");
        assert_ne!(side.engine.retract(&first), Retracted::Reading, "it may be asked again");
        assert_ne!(side.engine.cut(&second), Retracted::Reading, "nobody reads it");
    });
}

/// A read that begins after a retraction is not proven, whatever the retraction said.
pub fn nothing_is_served_after_a_retraction(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 2, 4096);
    within(LIMIT, move || {
        for round in 0..20 {
            let publication = sender.publish(0, &pattern(round, 4096));
            let other = sender.publish(1, &pattern(round, 4096));
            let remote = sender.remote(&publication);
            receiver.get(&remote).expect("it is published");
            let _ = sender.retract(&publication);
            assert!(receiver.get(&remote).is_err(), "the put is over");
            receiver.get(&sender.remote(&other)).expect("the other slot is still published");
            let _ = sender.end(&other, |engine, publication| engine.cut(publication));
            assert!(receiver.get(&sender.remote(&other)).is_err(), "that put is over too");
        }
    });
}

/// Once a slot carries the next put, metadata of the one before proves nothing.
pub fn a_slot_published_anew_does_not_answer_for_the_put_before(
    make: &dyn Fn() -> Arc<dyn Engine>,
) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let mut before = sender.publish(0, &pattern(0, 4096));
        for round in 1..20 {
            let _ = sender.retract(&before);
            let bytes = pattern(round, 4096);
            let next = sender.publish(0, &bytes);
            assert!(receiver.get(&sender.remote(&before)).is_err(), "that put is over");
            let got = receiver.get(&sender.remote(&next)).expect("this one is published");
            assert_same(&got, &bytes);
            before = next;
        }
    });
}

/// Retracting a put again, when its slot carries the next one, does not close the next one.
pub fn a_late_retraction_leaves_the_next_put_open(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let before = sender.publish(0, &pattern(1, 4096));
        let _ = sender.retract(&before);
        let bytes = pattern(2, 4096);
        let next = sender.publish(0, &bytes);
        let _ = sender.engine.retract(&before);
        let _ = sender.engine.cut(&before);
        let got = receiver.get(&sender.remote(&next)).expect("this one is still published");
        assert_same(&got, &bytes);
    });
}

/// Bytes that the sender writes after `Quiet` never reach a receiver as proven.
pub fn no_byte_is_delivered_after_quiet(make: &dyn Fn() -> Arc<dyn Engine>) {
    scribble_after_the_end(make, |engine, publication| engine.retract(publication));
}

/// A cut lets no read go on for ever, and what it ends is not delivered as proven.
pub fn a_cut_ends_the_reads_under_way(make: &dyn Fn() -> Arc<dyn Engine>) {
    scribble_after_the_end(make, |engine, publication| engine.cut(publication));
}

/// Once `unregister` has returned, nothing of the span is read any more.
pub fn unregister_waits_for_reads_or_ends_them(make: &dyn Fn() -> Arc<dyn Engine>) {
    let senders: Vec<_> = (0..ROUNDS / 4).map(|_| Side::new(make(), 1, LARGE)).collect();
    let receiver = Side::new(make(), 1, LARGE);
    within(LIMIT, move || {
        for (round, mut sender) in (0..).zip(senders) {
            let bytes = pattern(round, LARGE);
            let publication = sender.publish(0, &bytes);
            let remote = sender.remote(&publication);
            let reads = AtomicUsize::new(0);
            thread::scope(|scope| {
                let reading = [scope.spawn(|| read_on(&receiver, &remote, &bytes, &reads))];
                wait_for(&reads, 1, &reading);
                sender.retire_stamp(&publication); // all that an engine which cannot know has
                let _slots = sender.unregister_slots();
                sender.scribble(&publication);
            });
        }
    });
}

/// What a receiver has got stays as it was when the sender uses its slot for something else.
pub fn delivered_bytes_outlive_the_senders_slot(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, LARGE);
    within(LIMIT, move || {
        for round in 0..5 {
            let bytes = pattern(round, LARGE);
            let publication = sender.publish(0, &bytes);
            let filled = receiver.read(&sender.remote(&publication), soon()).expect("published");
            let _ = sender.retract(&publication);
            sender.scribble(&publication);
            assert_same(bytes_of(&filled), &bytes);
        }
    });
}

/// Large enough to be caught in the middle.
const LARGE: usize = 4 << 20;
const ROUNDS: u64 = 24;

/// Two receivers read in a loop while the sender ends its put and then writes over it.
fn scribble_after_the_end(
    make: &dyn Fn() -> Arc<dyn Engine>,
    end: fn(&dyn Engine, &Publication) -> Retracted,
) {
    let (sender, first) = Side::pair(make, 1, LARGE);
    let second = Side::new(make(), 1, LARGE);
    within(LIMIT, move || {
        for round in 0..ROUNDS {
            let bytes = pattern(round, LARGE);
            let publication = sender.publish(0, &bytes);
            let remote = sender.remote(&publication);
            let reads = AtomicUsize::new(0);
            thread::scope(|scope| {
                let reading = [
                    scope.spawn(|| read_on(&first, &remote, &bytes, &reads)),
                    scope.spawn(|| read_into_on(&second, &remote, &bytes, &reads)),
                ];
                // Another number of reads each time, so that the end meets another place.
                wait_for(&reads, 2 + round as usize % 5, &reading);
                let _ = sender.end(&publication, end);
                sender.scribble(&publication);
            });
        }
    });
}

/// Reads until it is refused; what it gets before is `bytes`.
fn read_on(receiver: &Side, remote: &RemoteBuffer, bytes: &[u8], reads: &AtomicUsize) {
    while let Ok(got) = receiver.get(remote) {
        assert_same(&got, bytes);
        reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// As [`read_on`], straight into a destination where the engine can.
fn read_into_on(receiver: &Side, remote: &RemoteBuffer, bytes: &[u8], reads: &AtomicUsize) {
    let mut dest = vec![0; bytes.len()];
    loop {
        match receiver.engine.read_into(remote, &mut dest, soon()) {
            Some(Ok(())) => assert_same(&dest, bytes),
            Some(Err(_)) => return,
            None => return read_on(receiver, remote, bytes, reads),
        }
        reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits for that many reads, or for a reader to have ended early.
fn wait_for(reads: &AtomicUsize, count: usize, reading: &[ScopedJoinHandle<'_, ()>]) {
    while reads.load(Ordering::Relaxed) < count && !reading.iter().any(|one| one.is_finished()) {
        thread::yield_now();
    }
}
