//! A: leases that end while a get is on its way, and chains of relays with one credit each.

use std::{thread, time::Duration};

use crossbeam::channel::bounded;
use mooncake_relay::{Config, Engine, Error, Metadata, Slot};

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        gate::Gate,
        hooked::{Call, Hooked},
    },
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any:
        a8_a_get_after_the_lease_is_refused_and_its_time_is_in_the_metadata,
        a8_a_get_that_outlasts_the_lease_is_right_or_refused,
        a9_requests_go_down_a_chain_of_relays_with_one_credit_each = 300;
}

const PATIENCE: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_millis(200);
const OLD: [u8; 4096] = [0x0D; 4096];
const NEW: [u8; 4096] = [0xEE; 4096];

/// One slot, so that the next put takes the one before's.
fn one() -> Config {
    Config::default()
        .with_credits(1)
        .with_slot_size(4096)
        .with_quarantine(Duration::from_millis(100))
}

#[track_caller]
fn is_over(on: &On, error: &Error) {
    let rejected = matches!(error, Error::Rejected { .. }) && on.lacks(Lack::Identity);
    assert!(rejected || matches!(error, Error::Stale { .. }), "{error:?}");
}

fn a8_a_get_after_the_lease_is_refused_and_its_time_is_in_the_metadata(on: &On) {
    let (from, to) = (on.relay(&one().with_lease(LEASE)), on.relay(&one()));
    let (old, token) = from.sends(&OLD);
    let heard: Metadata = old.to_string().parse().unwrap();
    assert_eq!(heard.lease(), Some(LEASE), "a receiver may refuse early");
    assert!(matches!(token.wait(), Err(Error::TimedOut)));
    for next in [false, true] {
        // The slot is free, and then another put's.
        let other = next.then(|| from.sends(&NEW));
        is_over(on, &to.get(&old).unwrap().wait().unwrap_err());
        let mut canary = Canary::new(OLD.len());
        is_over(on, &to.get_into(&old, canary.dest(), PATIENCE).unwrap_err());
        canary.is_untouched();
        drop(other.map(|(_, token)| token.wait()));
    }
    from.comes_to_rest();
}

/// When the lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ends {
    /// The get has a thread, and no byte yet.
    BeforeTheRead,
    /// All bytes are there, and the engine has not said so.
    AfterTheRead,
}

fn a8_a_get_that_outlasts_the_lease_is_right_or_refused(on: &On) {
    for ends in [Ends::BeforeTheRead, Ends::AfterTheRead] {
        let (from, engine) = (on.relay(&one().with_lease(LEASE)), on.hooked());
        let to = AtRest::new(engine.engine(), &one());
        to.works_with(&to); // its reads are not held up yet
        let held = match ends {
            Ends::BeforeTheRead => engine.hang(Call::Read, 0..1),
            Ends::AfterTheRead => linger(&engine),
        };
        let (old, token) = from.sends(&OLD);
        let get = to.get(&old).unwrap();
        held.entered(1);
        assert!(matches!(token.wait(), Err(Error::TimedOut)));
        // Written over, as soon as the slot may be.
        let (new, token) = from.sends(&NEW);
        held.open();
        match get.wait() {
            Ok(slot) => {
                assert!(ends == Ends::AfterTheRead, "there was nothing left to read");
                assert!(slot[..] == OLD, "bytes of another put");
            }
            Err(error) => is_over(on, &error),
        }
        match (to.get(&new).unwrap().wait(), token.wait()) {
            (Ok(got), Ok(_)) => assert!(got[..] == NEW),
            // On a machine that slow its lease has ended, too.
            (_, Err(Error::TimedOut)) => {}
            other => panic!("{ends:?}: {other:?}"),
        }
    }
}

/// The first read has all its bytes, and returns when the gate is opened.
fn linger(engine: &Hooked) -> Gate {
    let (gate, way) = Gate::pair();
    engine.on_read(move |next, remote, local, deadline| {
        let filled = next.read(remote, local, deadline);
        way.pass();
        filled
    });
    gate
}

const MOST: usize = 64 << 10;

fn a9_requests_go_down_a_chain_of_relays_with_one_credit_each(on: &On) {
    let requests = on.full_or(500, 200);
    let config = one().with_slot_size(MOST);
    let [a, b, c] = [(); 3].map(|()| on.relay(&config));
    let mut random = Random::new(0xa9);
    let pattern = Pattern::new(&mut random, MOST);
    let len_of = |round: usize| round * 7919 % (MOST + 1);
    let (to_b, at_b) = bounded::<Metadata>(0);
    let (to_c, at_c) = bounded::<Metadata>(0);
    thread::scope(|s| {
        let (a, b, c, pattern) = (&a, &b, &c, &pattern);
        s.spawn(move || {
            for round in 0..requests {
                let (metadata, token) = a.sends(pattern.of(round, len_of(round)));
                to_b.send(metadata).unwrap();
                thinks(round);
                drop(token.wait().unwrap());
            }
        });
        s.spawn(move || {
            for (round, metadata) in at_b.into_iter().enumerate() {
                let got = b.get(&metadata).unwrap().wait().unwrap();
                thinks(round + 1);
                let (metadata, token) = b.sends(&got);
                drop::<Slot>(got);
                to_c.send(metadata).unwrap();
                drop(token.wait().unwrap());
            }
        });
        let mut requests_heard = 0;
        for (round, metadata) in at_c.into_iter().enumerate() {
            thinks(round + 2);
            let got = c.get(&metadata).unwrap().wait().unwrap();
            assert!(got[..] == *pattern.of(round, len_of(round)), "request {round}");
            requests_heard += 1;
        }
        assert_eq!(requests_heard, requests);
    });
    for relay in [&a, &b, &c] {
        let counters = relay.health().counters.relay;
        assert_eq!((counters.puts_expired, counters.gets_failed), (0, 0), "{counters:?}");
    }
}

/// What a stage does beside its transfers: 0 to 2 ms of it.
fn thinks(round: usize) {
    thread::sleep(Duration::from_micros((round * 613 % 2001) as u64));
}
