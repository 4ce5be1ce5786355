//! Faults of reads.

use std::{sync::Arc, time::Duration};

use mooncake_relay::{Engine, Error};
use parking_lot::Mutex;

use crate::{
    BYTES, WATCHDOG,
    common::{eventually, hooked::Hooked, within},
    get, pair, put,
};

/// What a buffer held before a read and after it.
type Buffers = Arc<Mutex<Vec<(Vec<u8>, Vec<u8>)>>>;

/// The buffers of the reads that begin from now on.
fn watch_buffers(engine: &Hooked) -> Buffers {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let see = Arc::clone(&seen);
    engine.on_read(move |next, remote, local, deadline| {
        let before = local.bytes().unwrap().to_vec();
        let read = next.read(remote, local, deadline);
        let buffer = match &read {
            Ok(filled) => Some(&filled.buffer),
            Err(failed) => failed.buffer.as_ref(),
        };
        let after = buffer.map_or_else(Vec::new, |buffer| buffer.bytes().unwrap().to_vec());
        see.lock().push((before, after));
        read
    });
    seen
}

#[test]
fn a_read_that_breaks_off_has_filled_the_first_half() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        to.break_off(..1, || Error::TimedOut);
        let buffers = watch_buffers(&to);
        let (metadata, _token) = put(&a);
        assert_eq!(get(&b, &metadata), Err("TimedOut"));
        let (before, after) = &buffers.lock()[0];
        assert_eq!(after[..8], BYTES[..8]);
        assert_eq!(after[8..], before[8..]);
        assert_ne!(after[8..], BYTES[8..]);
        assert_eq!(b.health().receive_free, 1);
    });
}

#[test]
fn a_flipped_byte_is_delivered_and_a_flipped_stamp_is_stale() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        let (metadata, _token) = put(&a);
        to.flip_stamp(1..=1).flip(..1);
        // No stamp can tell that an engine delivers other bytes than it read.
        let wrong = get(&b, &metadata).unwrap();
        assert_eq!((wrong[0], &wrong[1..]), (BYTES[0] ^ 1, &BYTES[1..]));

        to.ranges_only();
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata), Err("Stale"));
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        token.wait().unwrap();
    });
}

#[test]
fn an_engine_that_knows_ranges_only_leaves_the_proof_to_the_stamp() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        let lens = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&lens);
        to.on_read(move |next, remote, local, deadline| {
            assert!(remote.identity.is_none());
            seen.lock().push(remote.len);
            next.read(remote, local, deadline)
        });
        to.ranges_only();
        let (metadata, token) = put(&a);
        assert_eq!(get(&b, &metadata).unwrap(), BYTES);
        token.wait().unwrap();
        assert_eq!(*lens.lock(), [16, 8]);
        // The range is closed.
        assert_eq!(get(&b, &metadata), Err("Rejected"));
    });
}

#[test]
fn a_buffer_that_is_still_written_comes_back_when_the_gate_is_opened() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        let gate = to.keep_writing();
        let buffers = watch_buffers(&to);
        let (metadata, _token) = put(&a);
        let token = b.get_timeout(&metadata, Duration::from_secs(2)).unwrap();
        assert!(matches!(token.wait(), Err(Error::TimedOut)));
        gate.entered(1);
        eventually(1, || b.health().counters.relay.buffers_kept);
        assert_eq!(b.health().receive_free, 0);
        let (metadata, _token) = put(&a);
        let next = b.get(&metadata).unwrap();
        gate.open();
        // The slot that was written to is the only one.
        assert_eq!(next.wait().unwrap()[..], BYTES);
        let (before, _) = &buffers.lock()[1];
        assert!(before[0] != 0 && before.iter().all(|byte| *byte == before[0]), "{before:?}");
        assert_eq!(b.health().receive_free, 1);
    });
}

#[test]
fn a_gate_that_outlives_its_engine_has_no_thread_left() {
    within(WATCHDOG, || {
        let (_, a, to, b) = pair();
        let gate = to.keep_writing();
        let (metadata, _token) = put(&a);
        let token = b.get_timeout(&metadata, Duration::from_secs(2)).unwrap();
        assert!(matches!(token.wait(), Err(Error::TimedOut)));
        drop((a, b, to));
        assert!(gate.is_open());
        drop(gate);
    });
}
