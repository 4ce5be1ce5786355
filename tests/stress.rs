//! The ring of credits and the token's hand-off, pulled at by many threads at once.
//!
//! What an ordering allows but this processor never does is for `tests/loom.rs`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam::channel::{bounded, unbounded};
use mooncake_relay::{
    Error,
    internal::{Credits, Tokens},
};

use self::common::within;

const WATCHDOG: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 600 });
const THREADS: usize = if cfg!(miri) { 4 } else { 8 };

/// Miri takes a thousand times as long, and finds in few rounds what it can find.
const fn rounds(count: usize) -> usize {
    if cfg!(miri) { count / 200 } else { count }
}

#[test]
fn a_credit_is_never_lent_twice_and_none_is_lost() {
    within(WATCHDOG, || {
        for (count, warm) in [(1, 1), (2, 2), (2, 1), (5, 5), (5, 2)] {
            let credits = Credits::with_warm(count, warm);
            let lent: Vec<_> = (0..count).map(|_| AtomicBool::new(false)).collect();
            let taken = AtomicUsize::new(0);
            thread::scope(|s| {
                for _ in 0..THREADS {
                    s.spawn(|| {
                        for _ in 0..rounds(10_000) {
                            let Some(credit) = credits.try_take() else {
                                thread::yield_now();
                                continue;
                            };
                            let owner = &lent[credit as usize];
                            assert!(!owner.swap(true, Ordering::Relaxed), "{credit} is lent");
                            owner.store(false, Ordering::Relaxed);
                            credits.give_back(credit);
                            taken.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            });
            assert!(taken.into_inner() > 0);
            let mut left: Vec<_> = std::iter::from_fn(|| credits.try_take()).collect();
            left.sort_unstable();
            assert!(left.into_iter().eq(0..count));
        }
    });
}

#[test]
fn l2_as_many_threads_as_credits_never_find_the_ring_empty() {
    within(WATCHDOG, || {
        let barrier = Barrier::new(THREADS);
        for credits in [1, 2, THREADS as u32].map(|warm| Credits::with_warm(THREADS as u32, warm)) {
            thread::scope(|s| {
                for _ in 0..THREADS {
                    s.spawn(|| {
                        for _ in 0..if cfg!(miri) { 2 } else { 5 } {
                            for _ in 0..rounds(12_500) {
                                let credit =
                                    credits.try_take().expect("one is free for each thread");
                                credits.give_back(credit);
                            }
                            barrier.wait();
                            assert_eq!(credits.free(), THREADS, "all are back");
                            barrier.wait();
                        }
                    });
                }
            });
        }
    });
}

/// Counts how many of it live.
struct Counted(Arc<AtomicUsize>, usize);

impl Counted {
    fn new(alive: &Arc<AtomicUsize>, value: usize) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(alive), value)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn a_token_that_changes_hands_and_times_out_again_and_again_yields_its_own_outcome_once() {
    within(WATCHDOG, || {
        let alive = Arc::new(AtomicUsize::new(0));
        let tokens = Tokens::<Counted>::new();
        thread::scope(|s| {
            for pair in 0..THREADS / 2 {
                let (tx, rx) = bounded(1);
                let (alive, tokens) = (&alive, &tokens);
                // Makes it, looks once, and hands it on.
                s.spawn(move || {
                    for n in 0..rounds(4000) {
                        let value = pair * 10_000 + n;
                        let (completer, mut token) = Tokens::make(tokens);
                        let completing = s.spawn(move || match n % 16 {
                            15 => drop(completer),
                            _ => completer.complete(Ok(Counted::new(alive, value))),
                        });
                        let first = token.wait_timeout(Duration::ZERO);
                        tx.send((value, token, first)).unwrap();
                        completing.join().unwrap();
                    }
                });
                s.spawn(move || {
                    for (value, mut token, first) in rx {
                        let mut outcome = first;
                        while outcome.is_none() {
                            outcome = match value % 3 {
                                0 => token.poll(),
                                1 => token.wait_timeout(Duration::ZERO),
                                _ => token.wait_timeout(Duration::from_millis(1)),
                            };
                        }
                        match outcome.unwrap() {
                            Ok(got) => assert_eq!(got.1, value),
                            Err(Error::Closed) => assert_eq!(value % 10_000 % 16, 15),
                            Err(other) => panic!("{other:?}"),
                        }
                        assert!(token.is_done() && token.poll().is_none());
                        assert!(token.wait_timeout(Duration::ZERO).is_none());
                        assert!(matches!(token.wait(), Err(Error::Closed)));
                    }
                });
            }
        });
        assert_eq!(alive.load(Ordering::Relaxed), 0, "outcomes that nobody dropped");
    });
}

#[test]
fn t2_attaching_while_the_outcome_comes_gives_exactly_one_message() {
    within(WATCHDOG, || {
        const EACH: usize = rounds(10_000);
        let alive = Arc::new(AtomicUsize::new(0));
        let tokens = Tokens::<Counted>::new();
        let (tx, rx) = unbounded();
        thread::scope(|s| {
            for pair in 0..THREADS / 2 {
                let (to_complete, completers) = bounded::<(_, _)>(0);
                let (alive, tokens, tx) = (&alive, &tokens, tx.clone());
                s.spawn(move || {
                    for n in 0..EACH {
                        let (completer, mut token) = Tokens::make(tokens);
                        let tag = pair * EACH + n;
                        // The rendezvous lets both go at once.
                        to_complete.send((completer, tag)).unwrap();
                        let taken = (n % 3 == 0).then(|| token.wait_timeout(Duration::ZERO));
                        if n % 5 == 0 && taken.is_none() {
                            continue; // abandoned: no message at all
                        }
                        if let Some(Some(outcome)) = taken {
                            assert_eq!(outcome.unwrap().1, tag);
                            tx.send((tag as u64, true)).unwrap();
                        } else {
                            let (own, message) = unbounded();
                            token.attach(&own, tag as u64);
                            let completion = message.recv().unwrap();
                            assert_eq!(completion.result.unwrap().1 as u64, completion.tag);
                            drop(own);
                            assert!(message.recv().is_err(), "a second message");
                            tx.send((completion.tag, false)).unwrap();
                        }
                    }
                });
                s.spawn(move || {
                    for (completer, tag) in completers {
                        completer.complete(Ok(Counted::new(alive, tag)));
                    }
                });
            }
        });
        drop(tx);
        let mut tags: Vec<_> = rx.into_iter().map(|(tag, _)| tag as usize).collect();
        tags.sort_unstable();
        let every = |n: usize, tag: &usize| (tag % EACH).is_multiple_of(n);
        let abandoned = |tag: &usize| every(5, tag) && !every(3, tag);
        assert!(tags.into_iter().eq((0..THREADS / 2 * EACH).filter(|tag| !abandoned(tag))));
        assert_eq!(alive.load(Ordering::Relaxed), 0, "outcomes that nobody dropped");
    });
}

/// Before 0.5.15 a channel that was dropped while it was being made freed its memory twice.
#[test]
fn t2_the_channels_are_of_a_version_that_frees_its_memory_once() {
    let lock = include_str!("../Cargo.lock");
    let versions: Vec<Vec<u32>> = lock
        .split("[[package]]")
        .filter(|package| package.contains("name = \"crossbeam-channel\""))
        .filter_map(|package| package.split("version = \"").nth(1)?.split('"').next())
        .map(|version| version.split('.').map(|part| part.parse().unwrap()).collect())
        .collect();
    assert!(!versions.is_empty());
    assert!(versions.iter().all(|version| *version >= vec![0, 5, 15]), "{versions:?}");
}
