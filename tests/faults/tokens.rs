//! T: tokens and channels.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use crossbeam::{
    channel::{bounded, tick, unbounded},
    select,
};
use mooncake_relay::{Config, Error};
use parking_lot::Mutex;

use crate::{
    common::eventually,
    on::{On, cases},
};

cases! {
    Any:
        t1_a_select_loop_wakes_for_each_message_and_for_nothing_else,
        t4_a_channel_that_nobody_drains_holds_up_nothing_else,
        t6_a_close_loses_no_completion_and_then_the_channel_ends = 300,
        t7_of_many_threads_with_one_token_one_has_the_outcome;
}

const PATIENCE: Duration = Duration::from_secs(20);

fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(Duration::from_millis(50))
}

fn t1_a_select_loop_wakes_for_each_message_and_for_nothing_else(on: &On) {
    const TICKS: usize = 60;
    let (a, b) = on.pair(&small().with_credits(3));
    let (tx, rx) = unbounded();
    let metadata: Vec<_> = (0..3_u8)
        .map(|n| {
            let (metadata, token) = a.sends(&[n; 10]);
            token.attach(&tx, n.into());
            metadata
        })
        .collect();
    let ticker = tick(Duration::from_millis(5));
    let (mut heard, mut ticks, mut rounds) = (Vec::new(), 0, 0);
    thread::scope(|s| {
        s.spawn(|| {
            for metadata in &metadata {
                drop(b.get(metadata).unwrap().wait().unwrap());
            }
        });
        // Long after the last message: a channel that is always ready would show.
        while heard.len() < 3 || ticks < TICKS {
            rounds += 1;
            select! {
                recv(rx) -> said => heard.push(said.unwrap().tag),
                recv(ticker) -> _ => ticks += 1,
            }
        }
    });
    heard.sort_unstable();
    assert_eq!((heard, rounds), (vec![0, 1, 2], 3 + ticks));
}

fn t4_a_channel_that_nobody_drains_holds_up_nothing_else(on: &On) {
    const TOKENS: usize = 100;
    let config = small().with_credits(TOKENS as u32 + 2);
    let (a, b) = on.pair(&config);
    let (puts, kept_puts) = bounded(1);
    let (gets, kept_gets) = bounded(1);
    for n in 0..TOKENS as u64 {
        let (metadata, token) = a.sends(&n.to_le_bytes());
        token.attach(&puts, n);
        b.get(&metadata).unwrap().attach(&gets, n);
    }
    eventually((TOKENS as u64, TOKENS as u64), || {
        (a.health().counters.relay.puts_acknowledged, b.health().counters.relay.gets_done)
    });
    // One in each channel, and all others in the relay.
    assert_eq!((kept_puts.len(), kept_gets.len()), (1, 1));
    for _ in 0..20 {
        a.works_with(&b);
        b.works_with(&a);
    }
    assert_eq!((a.health().free, b.health().receive_free), (2, 2), "each still has its slot");
    // Drained at last, each is there, in order.
    for n in 0..TOKENS as u64 / 2 {
        let (put, got) = (kept_puts.recv().unwrap(), kept_gets.recv().unwrap());
        assert_eq!((put.tag, put.result.unwrap()[..].to_vec()), (n, n.to_le_bytes().to_vec()));
        assert_eq!(got.result.unwrap()[..], got.tag.to_le_bytes());
    }
    // And what nobody wants goes with its channel, of which we have both ends.
    drop((kept_puts, kept_gets, puts, gets));
    a.comes_to_rest();
    b.comes_to_rest();
}

fn t6_a_close_loses_no_completion_and_then_the_channel_ends(on: &On) {
    const PUTS: u64 = 5;
    let config = small().with_credits(PUTS as u32);
    let b = on.relay(&config);
    for round in 0..on.full_or(10_000, 60) {
        let a = on.relay(&config);
        let (tx, rx) = if round % 2 == 0 { unbounded() } else { bounded(PUTS as usize) };
        for n in 0..PUTS {
            let (metadata, token) = a.sends(&n.to_le_bytes());
            token.attach(&tx, n);
            drop(b.get(&metadata).unwrap().wait().unwrap());
        }
        // In each other round all are known to be done; in the rest some notes are on their way.
        let all_done = round % 4 < 2;
        if all_done {
            eventually(PUTS, || a.health().counters.relay.puts_acknowledged);
        }
        let reader = thread::spawn(move || rx.into_iter().collect::<Vec<_>>());
        a.close(PATIENCE);
        drop(tx);
        let heard = reader.join().unwrap();
        let mut tags: Vec<_> = heard.iter().map(|said| said.tag).collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..PUTS), "round {round}");
        for said in heard {
            match said.result {
                Ok(slot) => assert_eq!(slot[..], said.tag.to_le_bytes()),
                Err(error) => {
                    assert!(matches!(error, Error::Closed) && !all_done, "{error:?}");
                }
            }
        }
    }
}

fn t7_of_many_threads_with_one_token_one_has_the_outcome(on: &On) {
    let (a, b) = on.pair(&small());
    for round in 0..on.rounds(20) as u8 {
        let (metadata, token) = a.sends(&[round; 100]);
        // A token has one owner; whoever shares it does so by a lock, as with anything else.
        let (token, taken) = (Mutex::new(token), AtomicUsize::new(0));
        thread::scope(|s| {
            for thread in 0..3 {
                let (token, taken) = (&token, &taken);
                s.spawn(move || {
                    while taken.load(Ordering::SeqCst) == 0 {
                        let mut token = token.lock();
                        let outcome = match thread {
                            0 => token.poll(),
                            _ => token.wait_timeout(Duration::from_millis(1)),
                        };
                        if let Some(outcome) = outcome {
                            assert_eq!(outcome.unwrap()[..], [round; 100]);
                            taken.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
            drop(b.get(&metadata).unwrap().wait().unwrap());
        });
        let mut token = token.into_inner();
        assert_eq!(taken.into_inner(), 1);
        assert!(token.is_done() && token.poll().is_none());
        assert!(token.wait_timeout(PATIENCE).is_none());
        assert!(matches!(token.wait(), Err(Error::Closed)));
    }
}
