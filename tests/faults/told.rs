//! B: that the sender is told, once, soon, whatever its size, whoever reads it, and also of failures.

use std::{
    hint,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Error};
use serde_json::json;

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        hooked::refused,
    },
    on::{AtRest, On, cases},
};

cases! {
    Any:
        b3_each_size_gives_exactly_one_notification,
        b6_a_relay_gets_what_it_has_put_itself,
        b8_a_sender_hears_though_nobody_calls_it = 120,
        b10_a_get_that_fails_here_frees_the_slot_there;
    Processes: b5_the_first_transfer_of_two_processes_is_told;
}

const PATIENCE: Duration = Duration::from_secs(20);
const FOREVER: Duration = Duration::from_secs(3600);
const MIB: usize = 1 << 20;

fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(Duration::from_millis(50))
}

fn b3_each_size_gives_exactly_one_notification(on: &On) {
    const SLOT: usize = 2 * MIB;
    let (a, b) = on.pair(&Config::default().with_slot_size(SLOT));
    let pattern = Pattern::new(&mut Random::new(0xb3), SLOT);
    let edges = [64, 4096, 65_536, MIB].map(|edge| [edge - 1, edge, edge + 1]).concat();
    let mut told = 0;
    for len in [&[0, 1, 8][..], &edges, &[SLOT - 1, SLOT]].concat() {
        for into in [false, true] {
            let expected = pattern.of(len, len);
            let (metadata, token) = a.sends(expected);
            if into {
                let mut canary = Canary::new(len);
                b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
                canary.holds(expected);
            } else {
                assert!(b.get(&metadata).unwrap().wait().unwrap()[..] == *expected);
            }
            drop(token.wait().unwrap());
            told += 1;
            // The second of a doubled one is late, and not this.
            let counters = a.health().counters.relay;
            assert_eq!((counters.notes_taken, counters.puts_acknowledged), (told, told), "{len}");
        }
    }
    let counters = b.health().counters.relay;
    assert_eq!((counters.notes_untaken, counters.notes_lost), (0, 0));
}

fn b5_the_first_transfer_of_two_processes_is_told(on: &On) {
    // Fresh for each way: nothing was told before.
    for _ in 0..2 {
        let (a, b) = (on.peer(&[]), on.peer(&[]));
        let sent = a.put(json!({"size": 100, "seed": 5}));
        let waits = a.send(json!({"cmd": "wait", "of": sent.tag}));
        assert_eq!(b.get(&sent.metadata)["sha256"], *sent.sha256);
        let ended = a.answer(waits);
        assert_eq!(ended["ok"], true, "{ended}");
        assert_eq!(a.health()["counters"]["notes_taken"], json!(1));
        b.works_with(&a);
    }
}

fn b6_a_relay_gets_what_it_has_put_itself(on: &On) {
    for credits in [1, 2] {
        let relay = on.relay(&small().with_credits(credits));
        for round in 0..10 {
            let (metadata, token) = relay.sends(&[round; 100]);
            assert_eq!(relay.get(&metadata).unwrap().wait().unwrap()[..], [round; 100]);
            assert_eq!(token.wait().unwrap()[..], [round; 100]);

            let (metadata, token) = relay.sends(&[round; 101]);
            let mut canary = Canary::new(101);
            relay.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
            canary.holds(&[round; 101]);
            drop(token.wait().unwrap());

            let (metadata, token) = relay.sends(&[round; 102]);
            thread::scope(|s| {
                let gets = s.spawn(|| relay.get(&metadata).unwrap().wait().unwrap());
                assert_eq!(token.wait().unwrap()[..], [round; 102]);
                assert_eq!(gets.join().unwrap()[..], [round; 102]);
            });
        }
    }
}

fn b8_a_sender_hears_though_nobody_calls_it(on: &On) {
    let (a, b) = on.pair(&small());
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        for hogs in [0, 2] {
            for _ in 0..hogs {
                s.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        hint::spin_loop();
                    }
                });
            }
            let mut late: Vec<_> = (0..100).map(|_| told_after(&a, &b)).collect();
            late.sort_unstable();
            println!("{hogs} hogs: {:?} in the middle, {:?} at most", late[50], late[99]);
            // A hundred times what it takes; seconds, where the caller must look.
            assert!(late[50] < Duration::from_millis(100), "{late:?}");
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// How long after the end of a get its sender hears of it by a channel, and does nothing meanwhile.
fn told_after(a: &AtRest, b: &AtRest) -> Duration {
    let (metadata, token) = a.sends(b"who tells?");
    let (tx, rx) = unbounded();
    token.attach(&tx, 0);
    drop(b.get(&metadata).unwrap().wait().unwrap());
    let read = Instant::now();
    drop(rx.recv().unwrap().result.unwrap());
    read.elapsed()
}

fn b10_a_get_that_fails_here_frees_the_slot_there(on: &On) {
    // What it would wait for otherwise.
    let a = on.relay(&small().with_credits(1).with_lease(FOREVER));
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &small().with_credits(1));
    for into in [false, true] {
        engine.break_off(..1, refused);
        let (metadata, token) = a.sends(&[1; 100]);
        let mut canary = Canary::new(100);
        let failed = if into {
            b.get_into(&metadata, canary.dest(), PATIENCE).map(drop)
        } else {
            b.get(&metadata).unwrap().wait().map(drop)
        };
        assert!(matches!(failed, Err(Error::Engine { .. })), "{failed:?}");
        canary.is_untouched();
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        a.works_with(&b);
    }
    // What is refused before anything was asked for is another receiver's still.
    let (metadata, token) = a.sends(&[2; 100]);
    let mut canary = Canary::new(99);
    let refused = b.get_into(&metadata, canary.dest(), PATIENCE);
    assert!(matches!(refused, Err(Error::TooLarge { len: 100, slot_size: 99 })), "{refused:?}");
    canary.is_untouched();
    assert!(!token.is_done());
    assert_eq!(b.get(&metadata).unwrap().wait().unwrap()[..], [2; 100]);
    drop(token.wait().unwrap());
    // Nor does a receiver that gives up before its turn leave the sender alone.
    let (metadata, token) = a.sends(b"held");
    let held = b.get(&metadata).unwrap().wait().unwrap();
    drop(token.wait().unwrap());
    let (metadata, token) = a.sends(b"queued");
    let queued = b.get_timeout(&metadata, Duration::from_millis(20)).unwrap();
    assert!(matches!(queued.wait(), Err(Error::TimedOut)));
    assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
    drop(held);
    a.works_with(&b);
}
