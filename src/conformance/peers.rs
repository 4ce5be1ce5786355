//! Cases: peers that are not there, or do not answer, and deadlines.

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    LIMIT,
    side::{PATIENCE, Side, assert_same, instance, pattern, soon},
    within,
};
use crate::{Engine, Notification, RemoteBuffer};

/// Names that no peer has, well formed or not, are errors in every call that takes one.
pub fn an_unknown_peer_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        for name in ["", "nobody", "127.0.0.1:1", "127.0.0.1:99999", "[::1", ":", "a:b:c", "\n"] {
            assert_unreachable(&side, name, PATIENCE);
        }
    });
}

/// A peer that is gone is an error, also to who has read from it before.
pub fn a_dead_peer_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let publication = sender.publish(0, &[1; 4096]);
        let remote = sender.remote(&publication);
        receiver.get(&remote).expect("it is published");
        receiver.engine.notify(&remote.peer, &note(), soon()).expect("it lives");
        drop(sender);
        assert!(receiver.get(&remote).is_err(), "it is gone");
        assert_unreachable(&receiver, &remote.peer, PATIENCE);
    });
}

/// A peer that takes connections and says nothing is an error by the deadline.
pub fn a_silent_peer_is_an_error_by_the_deadline(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        // The system accepts for it; nobody ever reads or writes.
        let silent = TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
        let address = silent.local_addr().expect("a listener has an address").to_string();
        assert_unreachable(&side, &address, Duration::from_millis(300));
    });
}

/// A deadline that has passed is an error at once, and does no harm to the next call.
pub fn a_deadline_that_has_passed_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let bytes = pattern(1, 4096);
        let publication = sender.publish(0, &bytes);
        let remote = sender.remote(&publication);
        for round in 0..2 {
            let now = Instant::now();
            for past in [now, now.checked_sub(Duration::from_secs(1)).unwrap_or(now)] {
                let read = receiver.read(&remote, past);
                assert!(read.is_err(), "round {round}: the deadline had passed");
                let mut dest = [0; 4096];
                let read = receiver.engine.read_into(&remote, &mut dest, past);
                assert!(!matches!(read, Some(Ok(()))), "round {round}: the deadline had passed");
                let (_, buffer) = receiver.lend(4096);
                let written = receiver.engine.write(&remote, buffer, past);
                assert!(written.is_err(), "round {round}: the deadline had passed");
                let _ = receiver.engine.connect(&remote.peer, past);
                // It was taken or it was not; either way the answer comes at once.
                let taken = receiver.engine.notify(&remote.peer, &note(), past).is_ok();
                sender.poll_until(usize::from(taken));
            }
            assert_same(&receiver.get(&remote).expect("there is time"), &bytes);
        }
    });
}

/// A deadline in a century overflows nothing.
pub fn a_distant_deadline_is_no_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    let idle = make();
    within(LIMIT, move || {
        let publication = sender.publish(0, &pattern(2, 4096));
        let remote = sender.remote(&publication);
        receiver.engine.connect(&remote.peer, distant()).expect("it lives");
        drop(receiver.read(&remote, distant()).expect("it is published"));
        receiver.engine.notify(&remote.peer, &note(), distant()).expect("it lives");
        sender.poll_until(1);
        idle.start(&instance()).expect("a fresh engine starts");
        idle.stop(distant());
    });
}

/// Connecting to a peer that lives is no error, before its first use or after.
pub fn a_living_peer_can_be_connected_to(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let remote = sender.remote(&sender.publish(0, &[1; 4096]));
        receiver.engine.connect(&remote.peer, soon()).expect("it lives");
        receiver.get(&remote).expect("it is published");
        receiver.engine.connect(&remote.peer, soon()).expect("it lives");
    });
}

/// In a century.
pub(super) fn distant() -> Instant {
    Instant::now() + Duration::from_secs(100 * 365 * 24 * 3600)
}

/// Every call that takes a peer fails, and does so by its deadline.
fn assert_unreachable(side: &Side, peer: &str, timeout: Duration) {
    let deadline = || Instant::now() + timeout;
    let remote = RemoteBuffer::new(peer, 4096, 64);
    assert!(side.read(&remote, deadline()).is_err(), "{peer:?} was read from");
    let read = side.engine.read_into(&remote, &mut [0; 64], deadline());
    assert!(!matches!(read, Some(Ok(()))), "{peer:?} was read from");
    let (_, buffer) = side.lend(64);
    assert!(side.engine.write(&remote, buffer, deadline()).is_err(), "{peer:?} was written to");
    assert!(side.engine.notify(peer, &note(), deadline()).is_err(), "{peer:?} took a note");
    let _ = side.engine.connect(peer, deadline()); // may do nothing; returns
}

fn note() -> Notification {
    Notification::new("a_0123456789abcdef0123456789abcdef", "transfer_complete")
}
