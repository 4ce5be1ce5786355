//! B: notifications that are early, late, doubled, or of the past.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam::channel::{bounded, unbounded};
use mooncake_relay::{Config, Engine, Error, Metadata, Notification, Slot, Token};
use serde_json::json;

use crate::{
    common::{Random, bytes::Pattern, eventually},
    on::{AtRest, On, Stranger, cases},
};

cases! {
    Any:
        b1_a_completion_that_comes_before_anybody_waits_is_kept_and_told_once,
        b2_no_slot_comes_back_before_its_bytes_were_copied = 600,
        b11_a_completion_of_a_put_that_is_over_is_counted_and_frees_no_other_slot;
    Processes: b2_a_slot_is_filled_anew_only_when_the_other_process_has_read_it = 600;
}

const SOON: Duration = Duration::from_secs(60);
const NOW: Duration = Duration::ZERO;

fn b1_a_completion_that_comes_before_anybody_waits_is_kept_and_told_once(on: &On) {
    let (from, to) = on.pair(&Config::default().with_slot_size(4096));
    // Whoever waits is not always the first to ask.
    for asked_before in [false, true] {
        for way in [wait, wait_timeout, poll, attach] {
            let (metadata, mut token) = from.sends(b"early");
            if asked_before {
                assert!(token.wait_timeout(NOW).is_none() && token.poll().is_none());
            }
            assert_eq!(&to.get(&metadata).unwrap().wait().unwrap()[..], b"early");
            eventually(true, || token.is_done());
            way(token);
            from.comes_to_rest();
        }
    }
}

type Put = Token<Slot>;

fn wait(token: Put) {
    assert_eq!(&token.wait().unwrap()[..], b"early");
}

fn wait_timeout(mut token: Put) {
    assert_eq!(&token.wait_timeout(SOON).unwrap().unwrap()[..], b"early");
    assert!(token.wait_timeout(SOON).is_none(), "it was taken");
    assert!(matches!(token.wait(), Err(Error::Closed)));
}

fn poll(mut token: Put) {
    assert_eq!(&token.poll().unwrap().unwrap()[..], b"early");
    assert!(token.poll().is_none() && token.wait_timeout(SOON).is_none(), "it was taken");
}

fn attach(token: Put) {
    let (tx, rx) = unbounded();
    token.attach(&tx, 7);
    let first = rx.recv().unwrap();
    assert_eq!((first.tag, &first.result.unwrap()[..]), (7, &b"early"[..]));
    drop(tx);
    assert!(rx.recv().is_err(), "a second message");
}

const ROUNDS: usize = 10_000;
const MOST: usize = 4 << 20;

fn b2_no_slot_comes_back_before_its_bytes_were_copied(on: &On) {
    let config = Config::default().with_slot_size(MOST);
    let from = on.relay(&config.clone().with_credits(1));
    // The one reads into its slots, the other into its caller's memory where it can.
    let (slots, dest) = (Copies::default(), Copies::default());
    let (engine, counts) = (on.hooked(), Arc::clone(&slots.0));
    engine.on_read(move |next, remote, local, deadline| {
        let filled = next.read(remote, local, deadline)?;
        // What has no identity is a stamp.
        counts.fetch_add(usize::from(remote.identity.is_some()), Ordering::SeqCst);
        Ok(filled)
    });
    let by_slot = AtRest::new(engine.engine(), &config);
    let (engine, counts) = (on.hooked(), Arc::clone(&dest.0));
    engine.on_read_into(move |next, remote, dest, deadline| {
        let read = next.read_into(remote, dest, deadline);
        counts.fetch_add(usize::from(matches!(read, Some(Ok(())))), Ordering::SeqCst);
        read
    });
    let by_dest = AtRest::new(engine.engine(), &config);
    drop(engine);
    let mut random = Random::new(0xb2);
    let pattern = Pattern::new(&mut random, MOST);
    thread::scope(|s| {
        let (tx, rx) = bounded::<(usize, Metadata)>(1);
        let pattern = &pattern;
        let receives = s.spawn(move || {
            let mut into = vec![0; MOST];
            for (round, metadata) in rx {
                let expected = pattern.of(round, metadata.size());
                if round.is_multiple_of(2) {
                    let got = by_slot.get(&metadata).unwrap().wait().unwrap();
                    assert!(got[..] == *expected, "round {round}: bytes of after the put");
                } else {
                    let len = by_dest.get_into(&metadata, &mut into, SOON).unwrap();
                    assert!(into[..len] == *expected, "round {round}: bytes of after the put");
                }
            }
            (by_slot, by_dest)
        });
        for round in 0..on.rounds(ROUNDS) {
            let len = random.size(MOST as u64).max(1) as usize;
            let (metadata, token) = from.sends(pattern.of(round, len));
            tx.send((round, metadata)).unwrap();
            let mut slot = token.wait().unwrap();
            slot.fill(0xFF);
            // Counted by the engine at the end of each copy: this one's was before.
            assert_eq!(slots.count(), round / 2 + 1, "round {round}");
            // None at all where the engine goes through slots.
            assert!([0, round.div_ceil(2)].contains(&dest.count()), "round {round}");
        }
        drop(tx);
        receives.join().unwrap();
    });
}

/// How many copies have ended.
#[derive(Default)]
struct Copies(Arc<AtomicUsize>);

impl Copies {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

fn b2_a_slot_is_filled_anew_only_when_the_other_process_has_read_it(on: &On) {
    const SIZE: u64 = 256 << 10;
    let (from, to) = (on.peer(&["--credits", "1"]), on.peer(&[]));
    for round in 0..on.rounds(500) {
        let sent = from.put(json!({"size": SIZE, "seed": round}));
        // Wanted already: it is filled with 0xFF the moment the slot is back.
        let next = from.send(json!({"cmd": "put", "bytes": {"size": SIZE, "fill": 0xFF}}));
        let got = to.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "round {round}: {got}");
        let next = from.sent(next);
        let got = to.get(&next.metadata);
        assert_eq!(got["sha256"], *next.sha256, "round {round}: {got}");
        assert_eq!(from.wait(next.tag)["ok"], true);
    }
}

fn b11_a_completion_of_a_put_that_is_over_is_counted_and_frees_no_other_slot(on: &On) {
    let config = Config::default().with_slot_size(4096).with_credits(1);
    // An engine that never knows who reads leaves what expired in quarantine: not for long.
    let config = config.with_lease(LEASE).with_quarantine(Duration::from_millis(100));
    let (from, to) = on.pair(&config);
    let stranger = Stranger::new(on);
    for ends in [expires, is_aborted, is_read] {
        let (old, token) = from.sends(b"the old one");
        ends(&from, &to, &old, token);
        both_are_said(&stranger, &from, &old); // the slot is free
        from.comes_to_rest();
        let (new, token) = from.sends(NEW);
        both_are_said(&stranger, &from, &old); // the slot is another put's
        match (to.get(&new).unwrap().wait(), token.wait()) {
            (Ok(got), Ok(slot)) => assert_eq!((&got[..], &slot[..]), (NEW, NEW)),
            // On a machine that slow its lease has ended, too.
            (_, Err(Error::TimedOut)) => {}
            other => panic!("the new put ended by what was said of the old one: {other:?}"),
        }
        from.comes_to_rest();
    }
}

const LEASE: Duration = Duration::from_secs(3);
const NEW: &[u8] = b"the new owner's";

fn expires(_: &AtRest, _: &AtRest, _: &Metadata, token: Put) {
    assert!(matches!(token.wait(), Err(Error::TimedOut)));
}

fn is_aborted(from: &AtRest, _: &AtRest, put: &Metadata, token: Put) {
    from.abort(put).unwrap();
    assert!(matches!(token.wait(), Err(Error::Aborted)));
}

fn is_read(_: &AtRest, to: &AtRest, put: &Metadata, token: Put) {
    assert_eq!(&to.get(put).unwrap().wait().unwrap()[..], b"the old one");
    drop(token.wait().unwrap());
}

/// Says of `put`, twice each, that it was read and that it was not; returns when `to` has heard.
fn both_are_said(stranger: &Stranger, to: &AtRest, put: &Metadata) {
    let late = || to.health().counters.relay.notes_late;
    let before = late();
    for message in ["transfer_complete", "transfer_failed"].repeat(2) {
        stranger.tells(to, &Notification::new(put.transfer_id(), message));
    }
    eventually(true, || late() >= before + 4);
}
