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

use mooncake_relay::{Config, Engine, Error, ReadError, Relay, Slot, Tensor, Token};

use crate::common::{hooked::Hooked, within};

const WATCHDOG: Duration = Duration::from_secs(120);
const GETS: usize = 32;

fn relay(engine: &Hooked) -> Relay {
    relay_of(engine, GETS)
}

fn relay_of(engine: &Hooked, receive_credits: usize) -> Relay {
    let config = Config::default()
        .with_slot_size(64)
        .with_credits(GETS as u32)
        .with_receive_credits(receive_credits as u32);
    Relay::new(engine.reads_together(8).engine(), &config).unwrap()
}

/// Puts and gets many at once, and what the gets ended with; all slots are free afterwards.
fn round(from: &Relay, relay: &Relay) -> Vec<Result<Vec<u8>, Error>> {
    let all = relay.health().receive_free;
    let puts: Vec<_> =
        (0..GETS as u8).map(|n| from.put_bytes(&[n], Tensor::bytes(1)).unwrap()).collect();
    let gets: Vec<_> = puts.iter().map(|(metadata, _)| relay.get(metadata).unwrap()).collect();
    let ended = |get: Token<Slot>| get.wait().map(|slot| slot.to_vec());
    let outcomes: Vec<_> = gets.into_iter().map(ended).collect();
    for (metadata, put) in puts {
        let _ = from.abort(&metadata); // where the get failed
        let _ = put.wait();
    }
    let begun = Instant::now();
    while relay.health().receive_free != all {
        assert!(begun.elapsed() < WATCHDOG / 2, "a credit is lost");
        std::thread::yield_now();
    }
    outcomes
}

/// How many common reads there were, and how many gets the largest had.
fn counted(engine: &Hooked) -> [Arc<AtomicUsize>; 2] {
    let [together, most] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let (counts, longest) = (Arc::clone(&together), Arc::clone(&most));
    engine.on_read_many(move |next, reads, deadline| {
        counts.fetch_add(1, Ordering::SeqCst);
        longest.fetch_max(reads.len(), Ordering::SeqCst);
        next.read_many(reads, deadline)
    });
    [together, most]
}

fn assert_all_read(outcomes: Vec<Result<Vec<u8>, Error>>) {
    for (n, outcome) in (0..).zip(outcomes) {
        assert_eq!(outcome.unwrap(), [n]);
    }
}

#[test]
fn what_is_queued_is_read_together() {
    within(WATCHDOG, || {
        let engine = Hooked::new("together");
        let [together, most] = counted(&engine);
        let relay = relay(&engine);
        // Whoever waits reads his own get, and so may read most of them before the thread comes.
        while together.load(Ordering::SeqCst) < 8 {
            assert_all_read(round(&relay, &relay));
        }
        assert!((2..=8).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(relay.health().counters.relay.gets_failed, 0);
    });
}

#[test]
fn a_common_read_leaves_half_of_the_free_receive_slots_to_others() {
    within(WATCHDOG, || {
        let engine = Hooked::new("leaves-slots");
        let [together, most] = counted(&engine);
        let relay = relay_of(&engine, 4);
        while together.load(Ordering::SeqCst) < 4 {
            assert_all_read(round(&relay, &relay));
        }
        // The first has a slot, and of the three others one may go with it.
        assert_eq!(most.load(Ordering::SeqCst), 2);
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
                assert_all_read(round(&relay, &relay));
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
                for outcome in round(&relay, &relay) {
                    assert!(matches!(outcome, Ok(_) | Err(Error::Engine { .. })), "{outcome:?}");
                }
            }
            assert!(relay.health().counters.relay.gets_failed > 0);
        });
    }
}

#[cfg(feature = "embedded")]
mod over_tcp {
    use mooncake_relay::EmbeddedEngine;

    use super::*;
    use crate::common::{eventually, proxy::Proxy};

    /// A sender behind a proxy, and a receiver that has read from it.
    fn pair() -> (Relay, Proxy, Relay) {
        let (sender, proxy) = sender();
        let receiver = receiver(GETS);
        assert_all_read(round(&sender, &receiver));
        (sender, proxy, receiver)
    }

    fn sender() -> (Relay, Proxy) {
        let proxy = Proxy::new();
        let engine = EmbeddedEngine::builder("127.0.0.1:0").advertise(&proxy.advertise());
        let engine = engine.local(false).bind().unwrap();
        proxy.forward_to(engine.control_addr(), engine.data_addr());
        let config = Config::default().with_slot_size(4096).with_credits(GETS as u32);
        (Relay::new(Arc::new(engine), &config).unwrap(), proxy)
    }

    fn receiver(credits: usize) -> Relay {
        let engine = EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap();
        let config = Config::default().with_slot_size(4096).with_credits(credits as u32);
        Relay::new(Arc::new(engine), &config).unwrap()
    }

    #[test]
    fn what_has_ended_among_them_is_stale_and_the_others_are_read() {
        within(WATCHDOG, || {
            let (sender, _proxy, receiver) = pair();
            for _ in 0..50 {
                let puts: Vec<_> = (0..GETS as u8)
                    .map(|n| sender.put_bytes(&[n], Tensor::bytes(1)).unwrap())
                    .collect();
                for (metadata, _) in puts.iter().step_by(3) {
                    sender.abort(metadata).unwrap();
                }
                let gets: Vec<_> =
                    puts.iter().map(|(metadata, _)| receiver.get(metadata).unwrap()).collect();
                for (n, get) in gets.into_iter().enumerate() {
                    match get.wait() {
                        Ok(slot) if n % 3 > 0 => assert_eq!(slot[..], [n as u8]),
                        Err(Error::Stale { .. }) if n % 3 == 0 => {}
                        wrong => panic!("get {n} ended with {wrong:?}"),
                    }
                }
                for (n, (_, put)) in puts.into_iter().enumerate() {
                    assert_eq!(put.wait().is_ok(), n % 3 > 0);
                }
            }
        });
    }

    #[test]
    fn a_peer_that_falls_silent_does_not_keep_the_threads_from_another() {
        /// So many that tries of four would go on beyond every deadline.
        const MANY: usize = 500;
        within(WATCHDOG, || {
            let [(silent, proxy), (well, _other_proxy)] = [sender(), sender()];
            let receiver = receiver(8);
            assert_all_read(round(&silent, &receiver));
            assert_all_read(round(&well, &receiver));
            proxy.data().down().stall();
            let (metadata, _put) = silent.put_bytes(b"silent", Tensor::bytes(6)).unwrap();
            let gets: Vec<_> = (0..MANY).map(|_| receiver.get(&metadata).unwrap()).collect();
            let (metadata, _put) = well.put_bytes(b"well", Tensor::bytes(4)).unwrap();
            // Nobody waits for it, so that a transfer thread has to read it.
            let get = receiver.get(&metadata).unwrap();
            eventually(true, || get.is_done());
            assert!(!gets.iter().any(Token::is_done), "their deadline came first");
            assert_eq!(get.wait().unwrap()[..], *b"well");
            drop(gets);
            proxy.data().down().resume();
        });
    }

    #[test]
    fn a_peer_that_falls_silent_holds_one_credit_and_loses_no_get() {
        within(WATCHDOG, || {
            let (sender, proxy, receiver) = pair();
            proxy.data().down().stall();
            let puts: Vec<_> = (0..GETS as u8)
                .map(|n| sender.put_bytes(&[n], Tensor::bytes(1)).unwrap())
                .collect();
            let mut gets: Vec<_> =
                puts.iter().map(|(metadata, _)| receiver.get(metadata).unwrap()).collect();
            eventually(true, || receiver.health().reading > 0);
            // Where the first was taken before the others came, those are asked for together after it.
            if receiver.health().reading == 1 {
                receiver.abort(&puts[0].0).unwrap();
                assert!(matches!(gets.remove(0).wait(), Err(Error::Aborted)));
            }
            // That is given up, and each is read alone.
            eventually((1, gets.len() - 1, GETS - 1), || {
                let health = receiver.health();
                (health.reading, health.queued, health.receive_free)
            });
            proxy.data().down().resume();
            for (n, get) in ((GETS - gets.len()) as u8..).zip(gets) {
                assert_eq!(get.wait().unwrap()[..], [n]);
            }
            eventually(GETS, || receiver.health().receive_free);
        });
    }
}
