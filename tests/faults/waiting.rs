//! Waiting: full pools, leases, times, and what one peer's silence costs the others.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{
    Completion, Config, Engine, Error, Metadata, ReadError, Relay, Retracted, Tensor,
};
use serde_json::json;

use crate::{
    common::{eventually, gate::Gate, hooked::Call, moved_to, place::Blackhole},
    on::{AtRest, Lack, On, cases, metadata_of},
};

cases! {
    Any:
        d1_a_full_pool_says_so_and_who_holds_it_and_then_serves_in_order,
        d2_a_thousand_puts_that_nobody_reads_cost_no_slot_and_are_refused_later = 300,
        d4_twenty_gets_that_hang_leave_a_thread_for_healthy_peers,
        d9_each_time_ends_what_it_is_for_and_nothing_else = 300,
        d9_a_get_ends_at_its_time_though_its_read_goes_on,
        d11_two_peers_with_one_credit_each_put_and_then_get_a_thousand_times = 300;
    Processes:
        d4_stopped_and_blackholed_peers_leave_a_thread_for_healthy_ones,
        d4_peers_that_answered_before_they_stopped_give_way;
}

/// What a test waits for that must not pass by itself.
const FOREVER: Duration = Duration::from_secs(60 * 60);
const SHORT: Duration = Duration::from_millis(60);

/// With a short quarantine, for engines that never know whether somebody reads.
fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(SHORT)
}

fn d1_a_full_pool_says_so_and_who_holds_it_and_then_serves_in_order(on: &On) {
    let (a, b) = on.pair(&small().with_read_timeout(FOREVER));
    // Of the slots that are kept here none goes back to the pool.
    let (first, first_token) = a.sends(b"1");
    let (second, second_token) = a.sends(b"2");
    assert!(matches!(a.try_acquire(1), Err(Error::Exhausted)));
    let begun = Instant::now();
    assert!(matches!(a.acquire(1, SHORT), Err(Error::TimedOut)));
    assert!(begun.elapsed() >= SHORT);

    let (tx, served) = unbounded();
    thread::scope(|scope| {
        for n in 0..4 {
            let (a, tx) = (&a, tx.clone());
            scope.spawn(move || {
                let put = if n % 2 == 0 {
                    a.put_bytes(&[n], Tensor::bytes(1)).unwrap()
                } else {
                    let mut slot = a.acquire(1, FOREVER).unwrap();
                    slot[0] = n;
                    a.put(slot, Tensor::bytes(1)).unwrap()
                };
                tx.send((n, put)).unwrap();
            });
            eventually(usize::from(n) + 1, || a.health().waiting);
        }
        let health = a.health();
        assert_eq!((health.free, health.published, health.waiting), (0, 2, 4));
        let oldest = health.oldest.expect("two puts are open");
        assert_eq!((&*oldest.id, oldest.slot), (first.transfer_id(), 0));
        assert!(oldest.age >= SHORT, "{oldest:?}");

        // Whoever has waited longest is let in by each slot that comes back, and nobody else.
        let mut under_way = vec![(first, first_token), (second, second_token)];
        for expected in 0..4 {
            assert!(served.is_empty(), "somebody was served without a slot");
            let (metadata, token) = under_way.remove(0);
            drop(b.get(&metadata).unwrap().wait().unwrap());
            drop(token.wait().unwrap());
            let (n, put) = served.recv().unwrap();
            assert_eq!(n, expected);
            under_way.push(put);
        }
        for (metadata, token) in under_way {
            drop(b.get(&metadata).unwrap().wait().unwrap());
            drop(token.wait().unwrap());
        }
    });
}

fn d2_a_thousand_puts_that_nobody_reads_cost_no_slot_and_are_refused_later(on: &On) {
    const PUTS: u64 = 1000;
    let config =
        small().with_lease(Duration::from_millis(3)).with_quarantine(Duration::from_millis(1));
    let (a, b) = on.pair(&config);
    let mut expired = Vec::new();
    for round in 0..PUTS {
        // Waits for a slot, where both are taken.
        let (metadata, token) = a.sends(&round.to_le_bytes());
        expired.push(metadata);
        // Whether anybody waits for it or not.
        if round % 3 > 0 {
            let ended = token.wait();
            assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
        }
    }
    a.comes_to_rest();
    assert_eq!(a.health().counters.relay.puts_expired, PUTS);
    for (round, metadata) in expired.iter().enumerate() {
        if round % 50 == 0 {
            // Others use the slots meanwhile.
            drop(a.sends(b"of another put"));
        }
        is_refused(on, &b, metadata);
    }
    a.comes_to_rest();
    // A slow machine may need more than one lease for a transfer.
    eventually(true, || {
        let (metadata, _token) = a.sends(b"alive");
        b.get(&metadata).unwrap().wait().is_ok_and(|slot| slot[..] == *b"alive")
    });
}

/// What is over yields nothing.
#[track_caller]
fn is_refused(on: &On, relay: &Relay, metadata: &Metadata) {
    match relay.get(metadata).unwrap().wait() {
        Err(Error::Stale { .. }) => {}
        // Without identities, a range that is published no more is all that it knows.
        Err(Error::Rejected { .. }) if on.lacks(Lack::Identity) => {}
        other => panic!("{other:?}"),
    }
}

fn d4_twenty_gets_that_hang_leave_a_thread_for_healthy_peers(on: &On) {
    let dead: Vec<_> = (0..4).map(|_| on.relay(&small().with_credits(5))).collect();
    let (known, fresh) = on.pair(&small());
    let (gate, way) = Gate::pair();
    let names: Vec<_> = dead.iter().map(|relay| relay.health().session_id).collect();
    let answers = Arc::new(move |peer: &str, deadline| {
        if !names.iter().any(|name| name == peer) {
            return true;
        }
        way.enter();
        way.wait_until(deadline);
        way.is_open()
    });
    let engine = on.hooked();
    let connects = Arc::clone(&answers);
    engine
        .on_connect(move |next, peer, deadline| {
            if connects(peer, deadline) {
                next.connect(peer, deadline)
            } else {
                Err(Error::TimedOut)
            }
        })
        .on_read(move |next, remote, local, deadline| {
            if answers(&remote.peer, deadline) {
                return next.read(remote, local, deadline);
            }
            Err(ReadError { error: Error::TimedOut, buffer: Some(local) })
        });
    let receiver = AtRest::new(engine.engine(), &small().with_transfer_threads(2));
    known.works_with(&receiver);

    let (tx, hanging) = unbounded();
    let puts: Vec<_> = (0..20).map(|n| dead[n % 4].sends(&[n as u8; 9])).collect();
    for (n, (metadata, _)) in puts.iter().enumerate() {
        receiver.get(metadata).unwrap().attach(&tx, n as u64);
    }
    gate.entered(1);
    are_served(&receiver, &[&known, &fresh]);
    assert!(hanging.is_empty());

    gate.open();
    for _ in 0..20 {
        let Completion { tag, result } = hanging.recv().unwrap();
        assert_eq!(result.unwrap()[..], [tag as u8; 9]);
    }
    puts.into_iter().for_each(|(_, token)| drop(token.wait().unwrap()));
}

fn d4_peers_that_answered_before_they_stopped_give_way(on: &On) {
    let stopped = [(); 2].map(|()| on.peer(&["--credits", "5"]));
    let (known, fresh) = on.pair(&small());
    // A slot of a read that cannot be ended is not to be had again until its peer goes on.
    let slots = if on.lacks(Lack::Cancel) { 10 } else { 2 };
    let receiver = on.relay(&small().with_transfer_threads(2).with_receive_credits(slots));
    known.works_with(&receiver);
    for (peer, fill) in stopped.iter().zip([1, 2]) {
        let sent = peer.put(json!({"size": 9, "fill": fill}));
        assert_eq!(receiver.get(&metadata_of(&sent)).unwrap().wait().unwrap()[..], [fill; 9]);
        assert_eq!(peer.wait(sent.tag)["ok"], true);
    }
    if receiver.reads_memory() {
        return; // a stopped sender holds up nobody who has mapped its memory
    }

    let sent: Vec<_> = (0..8).map(|n| stopped[n % 2].put(json!({"size": n, "fill": n}))).collect();
    stopped.iter().for_each(|peer| peer.stop());
    let (tx, hanging) = unbounded();
    for (n, sent) in sent.iter().enumerate() {
        receiver.get(&metadata_of(sent)).unwrap().attach(&tx, n as u64);
    }
    are_served(&receiver, &[&known, &fresh]);
    assert!(hanging.is_empty(), "they go on");

    stopped.iter().for_each(|peer| peer.resume());
    for _ in 0..sent.len() {
        let Completion { tag, result } = hanging.recv().unwrap();
        assert_eq!(*result.unwrap(), *vec![tag as u8; tag as usize]);
    }
    for (n, sent) in sent.iter().enumerate() {
        assert_eq!(stopped[n % 2].wait(sent.tag)["ok"], true);
    }
}

fn d4_stopped_and_blackholed_peers_leave_a_thread_for_healthy_ones(on: &On) {
    let stopped = [(); 2].map(|()| on.peer(&["--credits", "5"]));
    let blackholes = [(); 2].map(|()| Blackhole::new());
    let (known, fresh) = on.pair(&small());
    let receiver = on.relay(&small().with_transfer_threads(2));
    known.works_with(&receiver);

    let sent: Vec<_> = (0..10).map(|n| stopped[n % 2].put(json!({"size": n, "fill": n}))).collect();
    stopped.iter().for_each(|peer| peer.stop());
    let (nowhere, nobodys) = known.sends(b"x");
    let lost = blackholes.each_ref().map(|blackhole| moved_to(&blackhole.session_id(), &nowhere));
    let (tx, hanging) = unbounded();
    for (n, sent) in sent.iter().enumerate() {
        receiver.get(&metadata_of(sent)).unwrap().attach(&tx, n as u64);
        receiver.get(&lost[n % 2]).unwrap().attach(&tx, u64::MAX);
    }
    are_served(&receiver, &[&known, &fresh]);
    assert!(hanging.is_empty());

    // Unless their connects have ended by themselves.
    lost.iter().for_each(|metadata| drop(receiver.abort(metadata)));
    stopped.iter().for_each(|peer| peer.resume());
    for _ in 0..20 {
        match hanging.recv().unwrap() {
            Completion { tag: u64::MAX, result } => {
                let expected = matches!(result, Err(Error::Aborted | Error::PeerFailed { .. }));
                assert!(expected, "{result:?}");
            }
            Completion { tag, result } => {
                assert_eq!(*result.unwrap(), *vec![tag as u8; tag as usize]);
            }
        }
    }
    for (n, sent) in sent.iter().enumerate() {
        assert_eq!(stopped[n % 2].wait(sent.tag)["ok"], true);
    }
    drop(receiver.get(&nowhere).unwrap().wait().unwrap());
    drop(nobodys.wait().unwrap());
}

/// While nobody waits who would do the work, and for who does it himself.
#[track_caller]
fn are_served(receiver: &Relay, senders: &[&AtRest]) {
    let (tx, served) = unbounded();
    for sender in senders {
        for bytes in [b"first ", b"second"] {
            let (metadata, token) = sender.sends(bytes);
            receiver.get(&metadata).unwrap().attach(&tx, 0);
            assert_eq!(served.recv().unwrap().result.unwrap()[..], *bytes);
            drop(token.wait().unwrap());
        }
        let (metadata, token) = sender.sends(b"third");
        let mut dest = [0; 5];
        receiver.get_into(&metadata, &mut dest, FOREVER).unwrap();
        assert_eq!(&dest, b"third");
        drop(token.wait().unwrap());
    }
}

/// The times that can be set or given, all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Time {
    ReadTimeout,
    Lease,
    Quarantine,
    OfGet,
    OfGetInto,
    OfAcquire,
    OfWait,
}

fn d9_each_time_ends_what_it_is_for_and_nothing_else(on: &On) {
    for (short, ends) in [
        (Time::ReadTimeout, &["get", "put_bytes"][..]),
        (Time::Lease, &["put"]),
        (Time::Quarantine, &["a slot that is being read"]),
        (Time::OfGet, &["get_timeout"]),
        (Time::OfGetInto, &["get_into"]),
        (Time::OfAcquire, &["acquire"]),
        (Time::OfWait, &["wait_timeout"]),
    ] {
        only_ends(on, short, ends);
    }
}

/// Eight waits at once, each of which would be for ever, but for the one time.
fn only_ends(on: &On, short: Time, ends: &[&str]) {
    let time = |which| if which == short { SHORT } else { FOREVER };
    let config = small()
        .with_credits(1)
        .with_receive_credits(3)
        .with_read_timeout(time(Time::ReadTimeout))
        .with_lease(time(Time::Lease))
        .with_quarantine(time(Time::Quarantine));

    // Its reads return at their deadlines and not before.
    let slow = on.hooked();
    let (gate, way) = Gate::pair();
    slow.on_read(move |next, remote, local, deadline| {
        way.wait_until(deadline);
        if way.is_open() {
            return next.read(remote, local, deadline);
        }
        Err(ReadError { error: Error::TimedOut, buffer: Some(local) })
    });
    let getter = AtRest::new(slow.engine(), &config);
    let source = on.relay(&small().with_credits(4));
    let [first, second, third] = [(); 3].map(|()| source.sends(b"x").0);

    // Somebody reads what it has put, until he is cut.
    let read = on.hooked();
    let _reading = read.answer_retract(Retracted::Reading);
    let _cut = read.answer_cut(Retracted::Quiet);
    let (being_read, begun) = loop {
        let being_read = AtRest::new(read.engine(), &config);
        let (aborted, ended) = being_read.sends(b"x");
        let begun = Instant::now();
        let in_time = being_read.abort(&aborted).is_ok();
        match ended.wait() {
            Err(Error::Aborted) => break (being_read, begun),
            // On a machine that slow a short lease has ended first.
            Err(Error::TimedOut) if !in_time && short == Time::Lease => {}
            other => panic!("{other:?}"),
        }
        being_read.close(FOREVER);
    };

    let (putter, full) = on.pair(&config);
    let _all_it_has = full.try_acquire(1).unwrap();

    let waits: [(&str, &(dyn Fn() -> Option<Error> + Sync)); 8] = [
        ("get", &|| getter.get(&first).unwrap().wait().err()),
        ("get_timeout", &|| getter.get_timeout(&second, time(Time::OfGet)).unwrap().wait().err()),
        ("get_into", &|| getter.get_into(&third, &mut [0], time(Time::OfGetInto)).err()),
        ("acquire", &|| full.acquire(1, time(Time::OfAcquire)).err()),
        ("put_bytes", &|| full.put_bytes(b"x", Tensor::bytes(1)).err()),
        ("put", &|| putter.sends(b"x").1.wait().err()),
        ("a slot that is being read", &|| being_read.acquire(1, FOREVER).err()),
        ("wait_timeout", &|| {
            let (_, mut token) = source.sends(b"x");
            token.wait_timeout(time(Time::OfWait)).map_or(Some(Error::TimedOut), Result::err)
        }),
    ];
    let (tx, over) = unbounded();
    thread::scope(|scope| {
        for (name, wait) in waits {
            let tx = tx.clone();
            scope.spawn(move || tx.send((name, wait(), begun.elapsed())).unwrap());
        }
        let mut ended = Vec::new();
        for _ in ends {
            let (name, error, elapsed) = over.recv().unwrap();
            assert!(elapsed >= SHORT, "{name} ended early, {error:?}");
            let slot_came = name == "a slot that is being read" && error.is_none();
            assert!(slot_came || matches!(error, Some(Error::TimedOut)), "{name}: {error:?}");
            ended.push(name);
        }
        ended.sort_unstable();
        assert_eq!(ended, ends, "{short:?}");
        // In as much time again nothing more may happen.
        let other = over.recv_timeout(SHORT);
        assert!(other.is_err(), "{short:?} ended also {other:?}");
        gate.open();
        for relay in [&getter, &source, &being_read, &putter, &full] {
            relay.close(FOREVER);
        }
    });
}

fn d9_a_get_ends_at_its_time_though_its_read_goes_on(on: &On) {
    let engine = on.hooked();
    let gate = engine.hang(Call::Read, ..);
    let (sender, receiver) = (on.relay(&small()), AtRest::new(engine.engine(), &small()));
    let (metadata, token) = sender.sends(b"slow");
    let (tx, ended) = unbounded();
    let begun = Instant::now();
    let ample = Duration::from_secs(2); // for a read to begin
    receiver.get_timeout(&metadata, ample).unwrap().attach(&tx, 0);
    gate.entered(1);
    let got = ended.recv().unwrap().result;
    assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
    assert!(begun.elapsed() >= ample);
    // Its slot stays with the engine as long as that may write.
    let health = receiver.health();
    assert_eq!((health.reading, health.receive_free), (1, 1));
    gate.open();
    let ended = token.wait();
    assert!(matches!(ended, Err(Error::PeerFailed { .. })), "{ended:?}");
    receiver.comes_to_rest();
    sender.works_with(&receiver);
}

fn d11_two_peers_with_one_credit_each_put_and_then_get_a_thousand_times(on: &On) {
    let (a, b) = on.pair(&small().with_credits(1));
    for round in 0..on.rounds(1000) as u32 {
        let (to_b, to_a) = (round.to_le_bytes(), round.to_be_bytes());
        let (from_a, put_a) = a.sends(&to_b);
        let (from_b, put_b) = b.sends(&to_a);
        let (at_a, at_b) = (a.get(&from_b).unwrap(), b.get(&from_a).unwrap());
        assert_eq!(at_a.wait().unwrap()[..], to_a);
        assert_eq!(at_b.wait().unwrap()[..], to_b);
        drop(put_a.wait().unwrap());
        drop(put_b.wait().unwrap());
    }
}
