//! The relay's behaviour through its public interface, whatever the engine: `super::engine` makes
//! one that is a peer of the others it made. `super::KNOWS_WHO_READS`: it can tell that nobody reads a
//! slot, so that a put which ended without an acknowledgement leaves no quarantine behind.

use std::{thread, time::Duration};

use crossbeam::channel::{bounded, unbounded};
use mooncake_relay::{Config, DType, Error, Metadata, Relay, Slot, Tensor, Token, WaitStrategy};

use crate::{
    KNOWS_WHO_READS,
    common::{comes_about, eventually, within},
    engine,
};

const WATCHDOG: Duration = Duration::from_secs(60);
/// For thousands of hand-overs, each of which a busy machine may let wait for its turn.
const LONG_WATCHDOG: Duration = Duration::from_secs(600);

fn small() -> Config {
    let config = Config::default().with_engine_id("t").with_slot_size(4096);
    if KNOWS_WHO_READS { config } else { config.with_quarantine(Duration::from_millis(50)) }
}

fn relay(config: &Config) -> Relay {
    Relay::new(engine(), config).unwrap()
}

fn pair(config: &Config) -> (Relay, Relay) {
    (relay(config), relay(config))
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

/// Every credit is back and nothing is quarantined; at once, where the engine knows who reads.
#[track_caller]
fn assert_at_rest(relay: &Relay) {
    if !KNOWS_WHO_READS {
        eventually(true, || relay.health().quarantined.is_empty());
    }
    let health = relay.health();
    assert!(health.quarantined.is_empty(), "{health:?}");
    assert_eq!((health.free as u32, health.receive_free as u32), (health.credits, health.credits));
}

#[test]
fn a_get_yields_the_bytes_and_the_put_its_slot() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let (metadata, token) = put(&a, b"hello");
        let got = b.get(&metadata).unwrap().wait().unwrap();
        assert_eq!(&got[..], b"hello");
        assert_eq!(token.wait().unwrap().len(), 5);
        drop(got);
        assert_at_rest(&a);
        assert_at_rest(&b);
    });
}

#[test]
fn metadata_travels_as_json_text() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let mut slot = a.try_acquire(12).unwrap();
        slot.copy_from_slice(b"twelve bytes");
        let tensor = Tensor::new(DType::Bfloat16, [2, 3]);
        let (metadata, _token) = a.put(slot, tensor.clone()).unwrap();
        let read: Metadata = metadata.to_string().parse().unwrap();
        assert_eq!(read.tensor(), &tensor);
        assert_eq!(&b.get(&read).unwrap().wait().unwrap()[..], b"twelve bytes");
    });
}

#[test]
fn every_wait_strategy_and_every_way_to_hear_works() {
    for wait in [WaitStrategy::Auto, WaitStrategy::Yield, WaitStrategy::Park, WaitStrategy::Spin] {
        within(WATCHDOG, move || {
            let (a, b) = pair(&small().with_wait(wait));
            for round in 0..50_u8 {
                let (metadata, mut token) = put(&a, &[round; 100]);
                let mut get = b.get(&metadata).unwrap();
                let got = match round % 3 {
                    0 => get.wait().unwrap(),
                    1 => loop {
                        if let Some(outcome) = get.poll() {
                            break outcome.unwrap();
                        }
                        thread::yield_now();
                    },
                    _ => loop {
                        if let Some(outcome) = get.wait_timeout(Duration::from_millis(10)) {
                            break outcome.unwrap();
                        }
                    },
                };
                assert_eq!(&got[..], &[round; 100]);
                if round % 2 == 0 {
                    token.wait().unwrap();
                } else {
                    while token.poll().is_none() {
                        thread::yield_now();
                    }
                }
            }
        });
    }
}

#[test]
fn gets_beyond_the_queue_are_exhausted() {
    within(WATCHDOG, || {
        let a = relay(&small().with_credits(4));
        let b = relay(&small().with_credits(1).with_queued_gets(2));
        let puts: Vec<_> = (0..4).map(|n| put(&a, &[n])).collect();
        let holds = b.get(&puts[0].0).unwrap().wait().unwrap();
        let _queued = [b.get(&puts[1].0).unwrap(), b.get(&puts[2].0).unwrap()];
        assert!(matches!(b.get(&puts[3].0), Err(Error::Exhausted)));
        drop(holds);
    });
}

#[test]
fn get_into_fills_the_front_of_the_destination() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let (metadata, token) = put(&a, b"hello");
        let mut dest = [7; 8];
        assert!(matches!(
            b.get_into(&metadata, &mut dest[..4], WATCHDOG),
            Err(Error::TooLarge { len: 5, slot_size: 4 })
        ));
        assert_eq!(dest, [7; 8]);
        assert_eq!(b.get_into(&metadata, &mut dest, WATCHDOG).unwrap(), 5);
        assert_eq!(&dest, b"hello\x07\x07\x07");
        token.wait().unwrap();
    });
}

#[test]
fn a_caller_that_waits_hears_of_the_end_of_a_lease_and_not_a_nap_later() {
    within(WATCHDOG, || {
        let lease = |ms| relay(&small().with_lease(Duration::from_millis(ms)));
        let (short, long) = (lease(20), lease(800));
        // A driver that sleeps on until its nap is over is late each time, a busy machine is not.
        comes_about(|| {
            let (_first, later) = put(&long, b"long");
            let (_second, token) = put(&short, b"short");
            assert!(matches!(token.wait(), Err(Error::TimedOut)));
            !later.is_done()
        });
    });
}

#[test]
fn an_abort_ends_either_side() {
    within(WATCHDOG, || {
        let (a, b) = (relay(&small()), relay(&small().with_credits(1)));
        let (metadata, token) = put(&a, b"x");
        a.abort(&metadata).unwrap();
        assert!(matches!(token.wait(), Err(Error::Aborted)));
        assert_at_rest(&a);
        assert!(matches!(a.abort(&metadata), Err(Error::Stale { .. })));

        let (first, _first) = put(&a, b"1");
        let holds = b.get(&first).unwrap().wait().unwrap();
        let (second, put) = put(&a, b"2");
        let get = b.get(&second).unwrap();
        b.abort(&second).unwrap();
        assert!(matches!(get.wait(), Err(Error::Aborted)));
        assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
        drop(holds);
        assert_at_rest(&b);
    });
}

#[test]
fn thousands_of_tokens_on_one_channel_give_one_message_each() {
    within(LONG_WATCHDOG, || {
        let (a, b) = pair(&small().with_credits(8));
        let (tx, rx) = unbounded();
        for n in 0..4000_u64 {
            let (metadata, token) = put(&a, &n.to_le_bytes());
            let get = b.get(&metadata).unwrap();
            match n % 3 {
                // Before, during and after the completion.
                0 => get.attach(&tx, n),
                1 => {
                    thread::yield_now();
                    get.attach(&tx, n);
                }
                _ => {
                    while !get.is_done() {
                        thread::yield_now();
                    }
                    get.attach(&tx, n);
                }
            }
            token.attach(&tx, n + 1_000_000);
            // Gets hold receive slots until their message is taken.
            let mut seen = 0;
            while seen < 2 {
                let completion = rx.recv().unwrap();
                assert_eq!(completion.tag % 1_000_000, n);
                let slot = completion.result.unwrap();
                assert_eq!(slot[..], n.to_le_bytes());
                seen += 1;
            }
        }
        assert!(rx.is_empty());
    });
}

#[test]
fn a_full_channel_neither_blocks_nor_loses_nor_reorders() {
    within(WATCHDOG, || {
        let (a, b) = (relay(&small().with_credits(20)), relay(&small().with_credits(20)));
        let (tx, rx) = bounded(1);
        let mut others = Vec::new();
        for n in 0..10_u64 {
            let (metadata, token) = put(&a, &[n as u8]);
            token.attach(&tx, n);
            b.get(&metadata).unwrap().wait().unwrap();
            others.push(put(&a, b"other"));
        }
        // The full channel holds nobody up.
        for (metadata, token) in others {
            b.get(&metadata).unwrap().wait().unwrap();
            token.wait().unwrap();
        }
        for n in 0..10 {
            assert_eq!(rx.recv().unwrap().tag, n);
        }
        let (metadata, token) = put(&a, b"gone");
        drop(rx);
        token.attach(&tx, 99);
        b.get(&metadata).unwrap().wait().unwrap();
        while a.health().free != 20 {
            thread::yield_now();
        }
    });
}

#[test]
fn a_slot_outlives_its_relay() {
    within(WATCHDOG, || {
        let a = relay(&small());
        let mut slot = a.try_acquire(3).unwrap();
        drop(a);
        slot.copy_from_slice(b"abc");
        assert_eq!(&slot[..], b"abc");
    });
}

#[test]
fn a_slot_of_another_relay_or_a_received_one_cannot_be_put() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let foreign = b.try_acquire(1).unwrap();
        assert!(matches!(
            a.put(foreign, Tensor::bytes(1)),
            Err(Error::Config { field: "slot", .. })
        ));
        let (metadata, _token) = put(&a, b"x");
        let received = b.get(&metadata).unwrap().wait().unwrap();
        assert!(matches!(
            b.put(received, Tensor::bytes(1)),
            Err(Error::Config { field: "slot", .. })
        ));
        assert_at_rest(&b);
    });
}

#[test]
fn a_shape_that_says_another_size_is_refused_and_frees_the_slot() {
    within(WATCHDOG, || {
        let a = relay(&small());
        let slot = a.try_acquire(5).unwrap();
        assert!(matches!(
            a.put(slot, Tensor::new(DType::Float32, [2])),
            Err(Error::Metadata { field: "shape", .. })
        ));
        assert_at_rest(&a);
    });
}

#[test]
fn an_engine_serves_one_relay_at_a_time() {
    within(WATCHDOG, || {
        let engine = engine();
        let first = Relay::new(engine.clone(), &small()).unwrap();
        assert!(matches!(Relay::new(engine.clone(), &small()), Err(Error::Config { .. })));
        drop(first);
        Relay::new(engine, &small()).unwrap();
    });
}

#[test]
fn a_relay_gets_what_it_put_itself() {
    within(WATCHDOG, || {
        let a = relay(&small().with_credits(1));
        let (metadata, token) = put(&a, b"self");
        assert_eq!(&a.get(&metadata).unwrap().wait().unwrap()[..], b"self");
        token.wait().unwrap();
    });
}

#[test]
fn many_threads_on_both_sides_lose_nothing() {
    within(LONG_WATCHDOG, || {
        let (a, b) = pair(&small().with_credits(4).with_transfer_threads(2));
        thread::scope(|s| {
            for t in 0..8_u64 {
                let (a, b) = (&a, &b);
                s.spawn(move || {
                    for n in 0..500_u64 {
                        let bytes = [t.to_le_bytes(), n.to_le_bytes()].concat();
                        let (metadata, token) = put(a, &bytes);
                        if n % 2 == 0 {
                            assert_eq!(b.get(&metadata).unwrap().wait().unwrap()[..], bytes);
                        } else {
                            let mut dest = [0; 16];
                            b.get_into(&metadata, &mut dest, WATCHDOG).unwrap();
                            assert_eq!(dest[..], bytes);
                        }
                        token.wait().unwrap();
                    }
                });
            }
        });
        assert_at_rest(&a);
        assert_at_rest(&b);
        assert_eq!(a.health().counters.relay.puts_acknowledged, 4000);
    });
}

#[test]
fn an_unknown_peer_is_an_error_not_a_hang() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let (metadata, _token) = put(&a, b"x");
        let text = metadata.to_string().replace(metadata.session_id(), "127.0.0.1:1");
        let lost: Metadata = text.parse().unwrap();
        assert!(matches!(b.get(&lost).unwrap().wait(), Err(Error::PeerFailed { .. })));
        assert_at_rest(&b);
    });
}

#[test]
fn a_large_copy_is_whole() {
    within(LONG_WATCHDOG, || {
        let size = 9 << 20;
        let (a, b) = pair(&Config::default().with_slot_size(size + 1).with_credits(1));
        let bytes: Vec<u8> = (0..size).map(|i| (i * 31 % 251) as u8).collect();
        let (metadata, token) = put(&a, &bytes);
        let mut dest = vec![0; size];
        b.get_into(&metadata, &mut dest, WATCHDOG).unwrap();
        assert!(dest == bytes);
        token.wait().unwrap();
    });
}

#[test]
fn health_says_who_holds_what_and_which_peer_fails() {
    within(WATCHDOG, || {
        let (a, b) = pair(&small());
        let (first, token) = put(&a, b"1");
        let holder = a.health().oldest.unwrap();
        assert_eq!((holder.slot, holder.id.as_str()), (0, first.transfer_id()));
        b.get(&first).unwrap().wait().unwrap();
        token.wait().unwrap();
        assert!(a.health().oldest.is_none());
        let known = &b.health().peers[0];
        assert_eq!(
            (known.session_id.as_str(), known.state),
            (a.health().session_id.as_str(), "good")
        );
        assert_eq!((known.done, known.failed, known.last_error.as_ref()), (1, 0, None));

        let (second, _token) = put(&a, b"2");
        let text = second.to_string().replace(second.session_id(), "127.0.0.1:1");
        assert!(b.get(&text.parse().unwrap()).unwrap().wait().is_err());
        let health = b.health();
        let dead = health.peers.iter().find(|peer| peer.session_id == "127.0.0.1:1").unwrap();
        assert_eq!((dead.state, dead.done, dead.failed), ("failed", 0, 1));
        assert!(dead.last_error.is_some() && dead.last_error_age.is_some());
        let json = serde_json::to_value(&health).unwrap();
        assert_eq!(json["status"], "healthy");
        assert_eq!(json["counters"]["gets_failed"], 1);
    });
}
