//! P: counters and health.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use mooncake_relay::{Config, Counters, Error};
use serde_json::{Map, Value};

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
    },
    on::{On, cases},
};

cases! {
    Any:
        p1_counters_only_grow_under_load_and_add_up_at_rest = 120,
        p2_transfers_and_health_are_the_same_whether_or_not_anybody_listens;
    Nothing: p1_every_error_says_what_it_is_about;
}

const PATIENCE: Duration = Duration::from_secs(20);
const MOST: usize = 16 << 10;

fn config() -> Config {
    Config::default()
        .with_slot_size(MOST)
        .with_credits(4)
        .with_transfer_threads(2)
        .with_quarantine(Duration::from_millis(50))
}

fn numbers(counters: &Counters) -> Map<String, Value> {
    let value = serde_json::to_value(counters).unwrap();
    value.as_object().unwrap().clone()
}

fn p1_counters_only_grow_under_load_and_add_up_at_rest(on: &On) {
    const THREADS: usize = 4;
    let each = on.rounds(250);
    let (a, b) = on.pair(&config());
    let pattern = Pattern::new(&mut Random::new(0x91), MOST);
    let len = |round: usize| 1 + round * 37 % MOST;
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        let (a, b, over, pattern) = (&a, &b, &over, &pattern);
        s.spawn(move || {
            let mut before = [a, b].map(|relay| numbers(&relay.health().counters.relay));
            while !over.load(Ordering::Relaxed) {
                let now = [a, b].map(|relay| {
                    let health = relay.health();
                    assert!(health.free + health.published <= 4 + THREADS, "{health:?}");
                    assert_eq!(health.status, "healthy");
                    numbers(&health.counters.relay)
                });
                for (before, now) in before.iter().zip(&now) {
                    for (name, count) in before {
                        assert!(count.as_u64() <= now[name].as_u64(), "{name} went back");
                    }
                }
                before = now;
                thread::sleep(Duration::from_millis(1)); // a dashboard that looks often
            }
        });
        let load: Vec<_> = (0..THREADS)
            .map(|thread| {
                s.spawn(move || {
                    for n in 0..each {
                        let round = thread * each + n;
                        let expected = pattern.of(round, len(round));
                        let (metadata, token) = a.sends(expected);
                        if n % 2 == 0 {
                            assert!(b.get(&metadata).unwrap().wait().unwrap()[..] == *expected);
                        } else {
                            let mut canary = Canary::new(expected.len());
                            b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
                        }
                        drop(token.wait().unwrap());
                    }
                })
            })
            .collect();
        let ended: Vec<_> = load.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    let (sent, got) = (a.health().counters.relay, b.health().counters.relay);
    let all = (THREADS * each) as u64;
    assert_eq!((sent.puts, sent.puts_acknowledged, sent.puts_failed), (all, all, 0));
    assert_eq!((got.gets, got.gets_done, got.gets_failed), (all, all, 0));
    let bytes: usize = (0..THREADS * each).map(len).sum();
    assert_eq!(got.bytes_got, bytes as u64);
    assert_eq!(a.health().free, 4);
}

fn p1_every_error_says_what_it_is_about(_: &On) {
    let (peer, reason) = ("10.0.0.1:7000".to_owned(), "of a reason".to_owned());
    for (error, names) in [
        (Error::Exhausted, vec!["slot", "credits"]),
        (Error::TimedOut, vec!["timed out"]),
        (Error::TooLarge { len: 17, slot_size: 16 }, vec!["17", "16"]),
        (Error::Stale { peer: peer.clone(), reason: "of a reason" }, vec![&peer, &reason]),
        (Error::PeerFailed { peer: peer.clone(), reason: reason.clone() }, vec![&peer, &reason]),
        (Error::Rejected { peer: peer.clone(), reason: reason.clone() }, vec![&peer, &reason]),
        (Error::Aborted, vec!["aborted"]),
        (Error::Metadata { field: "size", reason: reason.clone() }, vec!["size", &reason]),
        (Error::Config { field: "credits", reason: reason.clone() }, vec!["credits", &reason]),
        (Error::Engine { engine: "mooncake", reason: reason.clone() }, vec!["mooncake", &reason]),
        (Error::Closed, vec!["closed"]),
        (Error::Io(std::io::ErrorKind::AddrInUse.into()), vec!["in use"]),
    ] {
        let said = error.to_string();
        assert!(names.iter().all(|name| said.contains(name)), "{error:?}: {said}");
        assert!(!error.kind().is_empty());
    }
}

/// There is no switch that turns counters off; what may be missing is somebody who listens to events.
fn p2_transfers_and_health_are_the_same_whether_or_not_anybody_listens(on: &On) {
    let run = || {
        let (a, b) = on.pair(&config());
        for round in 0..10_u8 {
            let (metadata, token) = a.sends(&[round; 1000]);
            let mut canary = Canary::new(1000);
            b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
            canary.holds(&[round; 1000]);
            drop(token.wait().unwrap());
        }
        let (bad, token) = a.sends(b"given up");
        a.abort(&bad).unwrap();
        assert!(matches!(token.wait(), Err(Error::Aborted)));
        a.comes_to_rest();
        let (sent, got) = (a.health(), b.health());
        assert_eq!((sent.status, got.status), ("healthy", "healthy"));
        a.close(PATIENCE);
        assert_eq!(a.health().status, "closed");
        let (sent, got) = (sent.counters.relay, got.counters.relay);
        (sent.puts, sent.puts_acknowledged, sent.puts_aborted, got.gets_done, got.bytes_got)
    };
    let unheard = run();
    let all =
        tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::TRACE);
    all.with_writer(std::io::sink).init();
    assert_eq!(run(), unheard);
    assert_eq!(unheard, (11, 10, 1, 10, 10_000));
}
