//! What `health` shows an operator: causes that add up, and whatever is held.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crossbeam::channel::unbounded;
use mooncake_relay::{
    Config, Counters, Engine, Error, Metadata, ReadError, Relay, Slot, Tensor, Token,
};

use crate::common::{
    eventually,
    hooked::{Call, refused, relay},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096).with_credits(8)
}

fn put(relay: &Relay, len: usize) -> (Metadata, Token<Slot>) {
    relay.put_bytes(&vec![7; len], Tensor::bytes(len)).unwrap()
}

fn counters(relay: &Relay) -> Counters {
    relay.health().counters.relay
}

#[test]
fn every_failed_get_has_one_cause() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small());
        let (go, may_go) = unbounded::<()>();
        engine.on_read(move |next, remote, local, deadline| {
            let peer = remote.peer.to_string();
            let error = match remote.len {
                1 => Error::TimedOut,
                2 => Error::Stale { peer, reason: "as the test wants it" },
                3 => Error::Rejected { peer, reason: "as the test wants it".to_owned() },
                4 => Error::PeerFailed { peer, reason: "as the test wants it".to_owned() },
                5 => refused(),
                6 => {
                    let _ = may_go.recv();
                    Error::TimedOut
                }
                _ => return next.read(remote, local, deadline),
            };
            Err(ReadError { error, buffer: Some(local) })
        });
        for len in [1, 1, 2, 3, 4, 5, 7] {
            let _ = b.get(&put(&a, len).0).unwrap().wait();
        }
        // One is aborted, and one is queued behind it when the relay closes.
        let (held, _put) = put(&a, 6);
        let [aborted, closed] = [b.get(&held).unwrap(), b.get(&put(&a, 7).0).unwrap()];
        eventually(1, || b.health().reading);
        let (tx, rx) = unbounded();
        aborted.attach(&tx, 0);
        b.abort(&held).unwrap();
        assert!(matches!(rx.recv().unwrap().result, Err(Error::Aborted)));
        // The read still holds the one thread.
        b.close(Duration::ZERO);
        assert!(matches!(closed.wait(), Err(Error::Closed)));
        drop(go);

        let all = counters(&b);
        let causes = [
            all.gets_timed_out,
            all.gets_aborted,
            all.gets_stale,
            all.gets_rejected,
            all.gets_peer_failed,
            all.gets_closed,
            all.gets_broken,
        ];
        assert_eq!(causes, [2, 1, 1, 1, 1, 1, 1]);
        assert_eq!((all.gets, all.gets_done, all.gets_failed), (9, 1, causes.iter().sum()));
    });
}

#[test]
fn every_failed_put_has_one_cause() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (_, b) = relay(&small());
        let (metadata, acknowledged) = put(&a, 1);
        b.get(&metadata).unwrap().wait().unwrap();
        acknowledged.wait().unwrap();
        let (metadata, given_up) = put(&a, 1);
        let late = b.get_timeout(&metadata, Duration::ZERO).unwrap().wait();
        assert!(matches!(late, Err(Error::TimedOut)));
        assert!(matches!(given_up.wait(), Err(Error::PeerFailed { .. })));
        let (metadata, aborted) = put(&a, 1);
        a.abort(&metadata).unwrap();
        assert!(aborted.wait().is_err());
        let (_open, cut_short) = put(&a, 1);
        a.close(WATCHDOG);
        assert!(matches!(cut_short.wait(), Err(Error::Closed)));
        let all = counters(&a);
        assert_eq!((all.puts, all.puts_acknowledged, all.puts_aborted), (4, 1, 1));
        assert_eq!((all.puts_failed, all.puts_peer_failed, all.puts_closed), (2, 1, 1));

        let (_, expiring) = relay(&small().with_lease(Duration::from_millis(20)));
        assert!(matches!(put(&expiring, 1).1.wait(), Err(Error::TimedOut)));
        let all = counters(&expiring);
        assert_eq!((all.puts, all.puts_expired, all.puts_failed), (1, 1, 0));

        let (engine, breaking) = relay(&small());
        let (_open, broken) = put(&breaking, 1);
        engine.before(Call::Poll, || panic!("as the test wants it"));
        assert!(matches!(broken.wait(), Err(Error::Engine { .. })));
        let all = counters(&breaking);
        assert_eq!((all.puts, all.puts_failed, all.puts_broken), (1, 1, 1));
    });
}

#[test]
fn an_engine_that_cannot_be_polled_is_seen_and_so_is_its_recovery() {
    within(WATCHDOG, || {
        let (engine, a) = relay(&small());
        let fails = Arc::new(AtomicBool::new(false));
        {
            let fails = Arc::clone(&fails);
            engine.before(Call::Poll, move || {
                if fails.load(Ordering::SeqCst) { Err(refused()) } else { Ok(()) }
            });
        }
        let seen = || {
            let health = a.health();
            (health.status, health.engine_error)
        };
        assert_eq!(seen(), ("healthy", None));
        fails.store(true, Ordering::SeqCst);
        eventually(("degraded", Some(refused().to_string())), seen);
        fails.store(false, Ordering::SeqCst);
        eventually(("healthy", None), seen);
        assert!(counters(&a).poll_errors >= 3);
        let (metadata, token) = put(&a, 1);
        a.get(&metadata).unwrap().wait().unwrap();
        token.wait().unwrap();
    });
}

/// Receive slots: those that are free, those of reads that nobody wants, those that the engine keeps.
fn receive(relay: &Relay) -> (usize, usize, usize) {
    let health = relay.health();
    (health.receive_free, health.unwanted, health.receive_kept)
}

#[test]
fn a_timed_out_get_keeps_its_slot_until_the_engine_lets_go_of_it_visibly() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small().with_receive_credits(2));
        let (go, may_go) = unbounded::<()>();
        engine.on_read(move |_, _, local, _| {
            let _ = may_go.recv();
            Err(ReadError { error: Error::TimedOut, buffer: Some(local) })
        });
        let (tx, rx) = unbounded();
        // Far longer than a read needs to begin.
        b.get_timeout(&put(&a, 1).0, Duration::from_secs(3)).unwrap().attach(&tx, 0);
        eventually(1, || b.health().reading);
        assert_eq!(receive(&b), (1, 0, 0));
        assert!(matches!(rx.recv().unwrap().result, Err(Error::TimedOut)));
        assert_eq!(receive(&b), (1, 1, 0));
        drop(go);
        eventually((2, 0, 0), || receive(&b));
    });
}

#[test]
fn slots_that_the_engine_keeps_are_seen_for_as_long_as_it_keeps_them() {
    within(WATCHDOG, || {
        let (_, a) = relay(&small());
        let (engine, b) = relay(&small().with_receive_credits(3));
        let kept: Arc<Mutex<Vec<_>>> = Arc::default();
        {
            let kept = Arc::clone(&kept);
            engine.on_read(move |next, remote, local, deadline| match remote.len {
                1 => {
                    kept.lock().unwrap().push(local);
                    Err(ReadError { error: Error::TimedOut, buffer: None })
                }
                2 => panic!("as the test wants it"),
                3 => Err(ReadError { error: Error::TimedOut, buffer: Some(local) }),
                // It lets go before it says that it keeps it.
                4 => Err(ReadError { error: Error::TimedOut, buffer: None }),
                _ => next.read(remote, local, deadline),
            });
        }
        let get = |len| b.get(&put(&a, len).0).unwrap().wait().map(drop);
        for len in 1..=4 {
            get(len).unwrap_err();
            assert_eq!(receive(&b), (2, 0, 1), "after {len}");
        }
        get(1).unwrap_err();
        assert_eq!(receive(&b), (1, 0, 2));
        assert_eq!(counters(&b).buffers_kept, 3);
        kept.lock().unwrap().clear();
        assert_eq!(receive(&b), (3, 0, 0));
        get(5).unwrap();
        assert_eq!(receive(&b), (3, 0, 0));
    });
}
