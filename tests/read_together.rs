//! Gets of one peer that wait in the queue are read by one call of the engine, where it likes that.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_relay::{Config, Engine, Error, ReadError, Relay, Tensor};

use crate::common::{hooked::Hooked, within};

const WATCHDOG: Duration = Duration::from_secs(120);
const GETS: usize = 32;

fn relay(engine: &Hooked) -> Relay {
    let config = Config::default()
        .with_slot_size(64)
        .with_credits(GETS as u32)
        .with_receive_credits(GETS as u32);
    Relay::new(engine.reads_together(8).engine(), &config).unwrap()
}

/// Puts and gets many at once, and what the gets ended with; all slots are free afterwards.
fn round(relay: &Relay) -> Vec<Result<Vec<u8>, Error>> {
    let puts: Vec<_> =
        (0..GETS as u8).map(|n| relay.put_bytes(&[n], Tensor::bytes(1)).unwrap()).collect();
    let gets: Vec<_> = puts.iter().map(|(metadata, _)| relay.get(metadata).unwrap()).collect();
    let ended =
        |get: mooncake_relay::Token<_>| get.wait().map(|slot: mooncake_relay::Slot| slot.to_vec());
    let outcomes: Vec<_> = gets.into_iter().map(ended).collect();
    for (metadata, put) in puts {
        let _ = relay.abort(&metadata); // where the get failed
        let _ = put.wait();
    }
    let begun = Instant::now();
    while relay.health().receive_free != GETS {
        assert!(begun.elapsed() < WATCHDOG / 2, "a credit is lost");
        std::thread::yield_now();
    }
    outcomes
}

fn assert_all_read(outcomes: Vec<Result<Vec<u8>, Error>>) {
    for (n, outcome) in (0..).zip(outcomes) {
        assert_eq!(outcome.unwrap(), [n]);
    }
}

#[test]
fn what_is_queued_is_read_together_and_never_with_the_last_credits() {
    within(WATCHDOG, || {
        let engine = Hooked::new("together");
        let (together, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counts, longest) = (Arc::clone(&together), Arc::clone(&most));
        engine.on_read_many(move |next, reads, deadline| {
            counts.fetch_add(1, Ordering::SeqCst);
            longest.fetch_max(reads.len(), Ordering::SeqCst);
            next.read_many(reads, deadline)
        });
        let relay = relay(&engine);
        // Whoever waits reads his own get, and so may read most of them before the thread comes.
        while together.load(Ordering::SeqCst) < 8 {
            assert_all_read(round(&relay));
        }
        assert!((2..=8).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(relay.health().counters.relay.gets_failed, 0);
    });
}

#[test]
fn whatever_hinders_a_common_read_fails_none_of_its_gets() {
    for error in [|| Error::Aborted, || Error::TimedOut] {
        within(WATCHDOG, move || {
            let engine = Hooked::new("hindered");
            let hindered = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&hindered);
            engine.on_read_many(move |next, mut reads, deadline| {
                let rest = reads.split_off(1);
                let mut outcomes = next.read_many(reads, deadline);
                for (_, local) in rest {
                    count.fetch_add(1, Ordering::SeqCst);
                    outcomes.push(Err(ReadError { error: error(), buffer: Some(local) }));
                }
                outcomes
            });
            let relay = relay(&engine);
            while hindered.load(Ordering::SeqCst) < 8 {
                assert_all_read(round(&relay));
            }
            assert_eq!(relay.health().counters.relay.gets_failed, 0);
        });
    }
}

#[test]
fn an_engine_that_loses_reads_or_panics_costs_no_credit() {
    for panics in [false, true] {
        within(WATCHDOG, move || {
            let engine = Hooked::new("loses");
            let failed = Arc::new(AtomicBool::new(false));
            let happened = Arc::clone(&failed);
            engine.on_read_many(move |next, mut reads, deadline| {
                happened.store(true, Ordering::SeqCst);
                assert!(!panics, "as the test wants it");
                reads.pop();
                next.read_many(reads, deadline)
            });
            let relay = relay(&engine);
            while !failed.load(Ordering::SeqCst) {
                for outcome in round(&relay) {
                    assert!(matches!(outcome, Ok(_) | Err(Error::Engine { .. })), "{outcome:?}");
                }
            }
            assert!(relay.health().counters.relay.gets_failed > 0);
        });
    }
}
