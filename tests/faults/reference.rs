//! What the Python relay gets wrong, and what is right: how transfers end. `reuse.rs` and `reads.rs`
//! have more of it.

use std::{
    net::{SocketAddr, TcpListener},
    process, thread,
    time::Duration,
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Error, Metadata, Retracted, Slot, Tensor, Token};
use serde_json::{Value, json};

use crate::{
    common::{
        bytes::Canary,
        eventually,
        hooked::{Call, Hooked, refused},
        sockets::{Socket, State, sockets_around},
    },
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any:
        q1_a_completion_is_kept_whenever_it_comes_and_however_it_is_asked_for,
        q2_a_wait_that_gave_up_is_no_outcome_and_an_outcome_comes_once,
        q11_a_put_that_fits_no_slot_is_refused_before_the_sender_is_involved,
        q11_a_sender_is_told_at_once_that_its_receiver_failed,
        q12_cleanup_aborts_all_of_one_request_and_nothing_else,
        q12_cleanup_quarantines_a_slot_that_may_still_be_read,
        q13_close_ends_every_wait_and_every_later_call,
        q13_close_does_not_wait_for_ever_for_a_read_that_hangs;
    Processes:
        q2_every_wait_for_one_put_tells_the_same_outcome,
        q11_a_destination_that_is_too_small_is_refused_before_the_sender_is_involved,
        q11_a_killed_receiver_costs_its_sender_no_slot;
}

/// How long something may take that is to happen at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const FOREVER: Duration = Duration::from_secs(3600);

/// A short quarantine, since an engine that knows no readers waits for its end.
pub(crate) fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(Duration::from_millis(50))
}

/// A relay, and its engine, whose calls can be held up or fail.
pub(crate) fn hooked(on: &On, config: &Config) -> (Hooked, AtRest) {
    let engine = on.hooked();
    let relay = AtRest::new(engine.engine(), config);
    (engine, relay)
}

/// A get of those very bytes.
#[track_caller]
pub(crate) fn gets(relay: &AtRest, metadata: &Metadata, expected: &[u8]) {
    let got = relay.get(metadata).unwrap().wait().unwrap();
    assert!(got[..] == *expected, "bytes of another put");
}

/// The put has come back to its sender, unchanged.
#[track_caller]
pub(crate) fn comes_back(token: Token<Slot>, expected: &[u8]) {
    assert!(token.wait().unwrap()[..] == *expected, "the slot came back changed");
}

fn q1_a_completion_is_kept_whenever_it_comes_and_however_it_is_asked_for(on: &On) {
    let (a, b) = on.pair(&small().with_credits(5));
    let puts: Vec<_> = (0..5_u8).map(|n| a.sends(&[n; 100])).collect();
    // All are read, last first, before anybody waits for the first.
    for (n, (metadata, _)) in puts.iter().enumerate().rev() {
        gets(&b, metadata, &[n as u8; 100]);
    }
    eventually(true, || puts.iter().all(|(_, token)| token.is_done()));
    let (tx, rx) = unbounded();
    for (n, (_, mut token)) in puts.into_iter().enumerate() {
        let outcome = match n {
            0 => token.wait(),
            1 => token.poll().unwrap(),
            2 => token.wait_timeout(Duration::ZERO).unwrap(),
            3 => token.wait_timeout(PATIENCE).unwrap(),
            _ => {
                token.attach(&tx, 4);
                rx.recv().unwrap().result
            }
        };
        assert_eq!(outcome.unwrap()[..], [n as u8; 100]);
    }
    assert!(rx.is_empty(), "one message a token");
    // And where the wait comes first.
    let (metadata, token) = a.sends(b"waited for");
    thread::scope(|s| {
        s.spawn(|| comes_back(token, b"waited for"));
        gets(&b, &metadata, b"waited for");
    });
}

fn q2_a_wait_that_gave_up_is_no_outcome_and_an_outcome_comes_once(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small());
    let (metadata, mut put) = a.sends(b"later");
    for _ in 0..3 {
        assert!(put.wait_timeout(Duration::from_millis(10)).is_none());
        assert!(put.poll().is_none() && !put.is_done());
    }
    gets(&b, &metadata, b"later");
    assert_eq!(put.wait_timeout(PATIENCE).unwrap().unwrap()[..], *b"later");
    was_taken(put);

    engine.fail(Call::Read, .., refused);
    let (metadata, mut put) = a.sends(b"never");
    let mut get = b.get(&metadata).unwrap();
    let failed = get.wait_timeout(PATIENCE).unwrap();
    assert!(matches!(failed, Err(Error::Engine { engine: "hooked", .. })), "{failed:?}");
    was_taken(get);
    let failed = put.wait_timeout(PATIENCE).unwrap();
    assert!(matches!(failed, Err(Error::PeerFailed { .. })), "{failed:?}");
    was_taken(put);
}

/// Whoever asks again hears nothing, and no success.
#[track_caller]
fn was_taken(mut token: Token<Slot>) {
    assert!(token.poll().is_none());
    assert!(token.wait_timeout(PATIENCE).is_none());
    assert!(matches!(token.wait(), Err(Error::Closed)));
}

fn q2_every_wait_for_one_put_tells_the_same_outcome(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let brief = on.peer(&["--lease-ms", "50"]);
    let read = a.put(json!({"text": "read"}));
    assert_eq!(b.get(&read.metadata)["ok"], true);
    let aborted = a.put(json!({"text": "aborted"}));
    assert_eq!(a.ask(json!({"cmd": "abort", "of": aborted.tag}))["ok"], true);
    let unread = brief.put(json!({"text": "unread"}));
    for _ in 0..3 {
        let ended = a.wait(read.tag);
        assert_eq!(ended["ok"], true, "{ended}");
        let ended = a.wait(aborted.tag);
        assert_eq!((&ended["ok"], &ended["kind"]), (&json!(false), &json!("Aborted")), "{ended}");
        let ended = brief.wait(unread.tag);
        assert_eq!((&ended["ok"], &ended["kind"]), (&json!(false), &json!("TimedOut")), "{ended}");
    }
}

fn q11_a_put_that_fits_no_slot_is_refused_before_the_sender_is_involved(on: &On) {
    let a = on.relay(&small().with_slot_size(8192));
    let (b, c) = (on.relay(&small()), on.relay(&small().with_slot_size(8192)));
    let (metadata, token) = a.sends(&[3; 8192]);
    for _ in 0..10 {
        let got = b.get(&metadata);
        assert!(matches!(got, Err(Error::TooLarge { len: 8192, slot_size: 4096 })), "{got:?}");
    }
    assert_eq!((b.health().receive_free, b.health().counters.relay.gets), (2, 0));
    assert!(!token.is_done());
    gets(&c, &metadata, &[3; 8192]);
    comes_back(token, &[3; 8192]);
}

fn q11_a_sender_is_told_at_once_that_its_receiver_failed(on: &On) {
    // What it would wait for otherwise.
    let a = on.relay(&small().with_lease(FOREVER));
    let (engine, b) = hooked(on, &small().with_credits(1));
    engine.break_off(0..=0, || Error::TimedOut).fail(Call::Read, 0..=0, refused);
    for n in 0..5 {
        let (metadata, token) = a.sends(b"never");
        let error = match n {
            0 | 1 => b.get(&metadata).unwrap().wait().unwrap_err(),
            2 => b.get_timeout(&metadata, Duration::ZERO).unwrap().wait().unwrap_err(),
            3 => b.get_into(&metadata, &mut [0; 5], Duration::ZERO).unwrap_err(),
            _ => {
                // Its slot is in use, so that the get is queued.
                let (other, other_token) = a.sends(b"other");
                let held = b.get(&other).unwrap().wait().unwrap();
                comes_back(other_token, b"other");
                let get = b.get(&metadata).unwrap();
                b.abort(&metadata).unwrap();
                drop(held);
                get.wait().unwrap_err()
            }
        };
        let told = token.wait();
        assert!(matches!(told, Err(Error::PeerFailed { .. })), "{error}: {told:?}");
    }
    assert_eq!(a.health().counters.relay.puts_failed, 5);
    a.works_with(&b);
}

fn q11_a_destination_that_is_too_small_is_refused_before_the_sender_is_involved(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let sent = a.put(json!({"size": 1000, "seed": 11}));
    let get = |len| json!({"cmd": "get", "metadata": sent.metadata, "dest_size": len});
    let got = b.ask(get(999));
    assert_eq!(got["kind"], "TooLarge", "{got}");
    let wait = a.send(json!({"cmd": "wait", "of": sent.tag}));
    assert_eq!((b.free(), a.free().0), ((2, Some(2)), 1));
    assert!(!a.has_answered(wait));
    assert_eq!(b.ask(get(1000))["sha256"], *sent.sha256);
    assert_eq!(a.answer(wait)["ok"], true);
}

fn q11_a_killed_receiver_costs_its_sender_no_slot(on: &On) {
    let sender = on.peer(&["--lease-ms", "4000", "--quarantine-ms", "500"]);
    let (dead, alive) = (on.peer(&[]), on.peer(&[]));
    sender.works_with(&dead);
    let sent = sender.put(json!({"size": 256 << 10, "fill": 3}));
    dead.stop();
    dead.send_get(&sent.metadata);
    dead.kill();
    // By its lease, unless the engine sees that the peer is gone.
    let ended = sender.wait(sent.tag);
    assert!(["PeerFailed", "TimedOut"].map(Value::from).contains(&ended["kind"]), "{ended}");
    sender.comes_to_rest();
    sender.works_with(&alive);
}

fn q12_cleanup_aborts_all_of_one_request_and_nothing_else(on: &On) {
    let a = on.relay(&small().with_credits(4));
    let b = on.relay(&small().with_credits(4).with_receive_credits(1));
    let puts = |request| a.put_as(request, a.try_acquire(1).unwrap(), Tensor::bytes(1)).unwrap();
    let (_, one) = puts("r1");
    let (_, two) = puts("r1");
    let (other, kept) = puts("r2");
    assert_eq!(a.cleanup("r1"), 2);
    assert!(matches!(one.wait(), Err(Error::Aborted)));
    assert!(matches!(two.wait(), Err(Error::Aborted)));
    assert!(!kept.is_done());
    assert_eq!(a.cleanup("r1"), 0);
    eventually(3, || a.health().free);

    // The receiver has a request of the same name, and its only slot is in use.
    let held = b.get(&other).unwrap().wait().unwrap();
    drop(kept.wait().unwrap());
    let (unwanted, put) = puts("r1");
    let (wanted, other_put) = puts("r1");
    let (get, other_get) = (b.get_as("r1", &unwanted).unwrap(), b.get_as("r2", &wanted).unwrap());
    assert_eq!(b.cleanup("r1"), 1);
    assert!(matches!(get.wait(), Err(Error::Aborted)));
    assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })), "its sender is told");
    drop(held);
    assert_eq!(other_get.wait().unwrap().len(), 1);
    drop(other_put.wait().unwrap());
}

fn q12_cleanup_quarantines_a_slot_that_may_still_be_read(on: &On) {
    // Only an engine that cannot know who reads lets it last so long.
    let config = small().with_credits(1).with_quarantine(Duration::from_secs(5));
    let (engine, a) = hooked(on, &config);
    let gate = engine.answer_retract(Retracted::Reading);
    let slot = a.try_acquire(4).unwrap();
    let (metadata, token) = a.put_as("r", slot, Tensor::bytes(4)).unwrap();
    assert_eq!(a.cleanup("r"), 1);
    assert!(matches!(token.wait(), Err(Error::Aborted)), "its waiter is not kept");
    let health = a.health();
    assert_eq!((health.free, health.quarantined.len()), (0, 1));
    assert_eq!(health.quarantined[0].id, metadata.transfer_id());
    assert!(matches!(a.try_acquire(1), Err(Error::Exhausted)));
    gate.open();
    a.comes_to_rest();
    a.works_with(&a);
}

fn q13_close_ends_every_wait_and_every_later_call(on: &On) {
    let a = on.relay(&small().with_credits(3).with_receive_credits(1));
    let b = on.relay(&small());
    let session = a.health().session_id;
    let slot = a.try_acquire(1).unwrap();
    let ((first, one), (_, two)) = (a.sends(b"1"), a.sends(b"2"));
    let (tx, rx) = unbounded();
    two.attach(&tx, 0);
    let ((read, read_token), (unread, unread_token)) = (b.sends(b"3"), b.sends(b"4"));
    let held = a.get(&read).unwrap().wait().unwrap();
    comes_back(read_token, b"3");
    let get = a.get(&unread).unwrap(); // there is no slot for it
    thread::scope(|s| {
        let waits = [
            s.spawn(|| one.wait().map(drop)),
            s.spawn(|| get.wait().map(drop)),
            s.spawn(|| a.acquire(1, FOREVER).map(drop)),
        ];
        eventually(1, || a.health().waiting);
        let closed = a.close(PATIENCE);
        assert_eq!((closed.puts, closed.gets, closed.threads), (2, 1, 0));
        for wait in waits {
            assert!(matches!(wait.join().unwrap(), Err(Error::Closed)));
        }
        assert!(matches!(rx.recv().unwrap().result, Err(Error::Closed)));
        assert_eq!(a.close(Duration::ZERO), closed, "and again, at once");
    });

    let mut canary = Canary::new(1);
    let later = [
        a.try_acquire(1).map(drop),
        a.acquire(1, FOREVER).map(drop),
        a.put(slot, Tensor::bytes(1)).map(drop),
        a.put_bytes(b"x", Tensor::bytes(1)).map(drop),
        a.get(&unread).map(drop),
        a.get_into(&unread, canary.dest(), FOREVER).map(drop),
    ];
    assert!(later.iter().all(|call| matches!(call, Err(Error::Closed))), "{later:?}");
    canary.is_untouched();
    assert_eq!((a.health().status, a.cleanup("r")), ("closed", 0));
    // What it had put is gone, and its peers are none the worse.
    let got = b.get(&first).unwrap().wait();
    let gone = matches!(got, Err(Error::Stale { .. } | Error::PeerFailed { .. }));
    let not_registered = matches!(got, Err(Error::Rejected { .. })) && on.lacks(Lack::Identity);
    assert!(gone || not_registered, "{got:?}");
    b.abort(&unread).unwrap();
    assert!(matches!(unread_token.wait(), Err(Error::Aborted)));
    assert_eq!(held[..], *b"3", "what was received outlives the relay");
    drop(a);
    if let Ok(address) = session.parse::<SocketAddr>() {
        if on.lacks(Lack::Ports) {
            let listens = |socket: &Socket| {
                socket.state == State::Listening && socket.local.port() == address.port()
            };
            // Its engine may take a second to end.
            eventually(false, || sockets_around(process::id()).iter().any(listens));
        } else {
            TcpListener::bind(address).expect("its port is free");
        }
    }
}

fn q13_close_does_not_wait_for_ever_for_a_read_that_hangs(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small());
    let gate = engine.hang(Call::Read, ..);
    let (metadata, put) = a.sends(b"x");
    let get = b.get(&metadata).unwrap();
    gate.entered(1);
    thread::scope(|s| {
        let wait = s.spawn(|| get.wait().map(drop));
        // Far longer than its other thread needs to end.
        let closed = b.close(Duration::from_secs(3));
        assert_eq!((closed.gets, closed.threads), (1, 1));
        assert!(matches!(wait.join().unwrap(), Err(Error::Closed)));
    });
    gate.open();
    drop(b);
    a.abort(&metadata).unwrap();
    assert!(matches!(put.wait(), Err(Error::Aborted)));
}
