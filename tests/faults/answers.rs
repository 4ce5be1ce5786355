//! D and G: whatever an engine or a peer answers, also nothing, ends a call, and says what happened.

use std::{
    io,
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Engine, Error, Metadata, Token};

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        eventually,
        hooked::Call,
        moved_to,
        proxy::Proxy,
    },
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any:
        d6_whatever_an_engine_answers_ends_in_a_typed_result_and_no_loop = 120,
        d6_an_engine_that_is_pending_for_long_is_asked_until_it_answers,
        g6_a_refusal_is_told_apart_from_time_and_from_death;
    Proxy: d7_a_transfer_that_stalls_ends_by_the_limit_of_all_reads;
}

const PATIENCE: Duration = Duration::from_secs(20);

fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(Duration::from_millis(50))
}

type Answer = fn() -> Error;

/// Everything that an engine can say, and some that it should not.
const ANSWERS: [Answer; 14] = [
    || Error::Exhausted,
    || Error::TimedOut,
    || Error::TooLarge { len: 1, slot_size: 0 },
    || Error::Stale { peer: "p".into(), reason: "as the test wants it" },
    || Error::PeerFailed { peer: "p".into(), reason: "as the test wants it".into() },
    || Error::Rejected { peer: "p".into(), reason: "as the test wants it".into() },
    || Error::Aborted,
    || Error::Metadata { field: "size", reason: "as the test wants it".into() },
    || Error::Config { field: "engine", reason: "as the test wants it".into() },
    || Error::Engine { engine: "mooncake", reason: "status 99".into() },
    || Error::Closed,
    || Error::Io(io::ErrorKind::Interrupted.into()),
    || Error::Io(io::ErrorKind::WouldBlock.into()),
    || Error::Io(io::Error::from_raw_os_error(99)),
];

fn d6_whatever_an_engine_answers_ends_in_a_typed_result_and_no_loop(on: &On) {
    let a = on.relay(&small());
    let [fails_reads, fails_others] = [(); 2].map(|()| on.hooked());
    let b = AtRest::new(fails_reads.engine(), &small());
    let c = AtRest::new(fails_others.engine(), &small());
    for answer in ANSWERS {
        let kind = answer().kind();
        let reads = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&reads);
        fails_reads.fail(Call::Read, ..2, answer).before(Call::Read, move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        for into in [false, true] {
            let (metadata, token) = a.sends(b"never read");
            let mut canary = Canary::new(10);
            let got = if into {
                b.get_into(&metadata, canary.dest(), PATIENCE).map(drop)
            } else {
                b.get(&metadata).unwrap().wait().map(drop)
            };
            canary.is_untouched();
            assert!(got.is_err(), "{kind} is no success");
            // Of a put that is said to be over its sender is not told.
            let _ = a.abort(&metadata);
            let ended = token.wait();
            let known = matches!(ended, Err(Error::PeerFailed { .. } | Error::Aborted));
            assert!(known, "{kind}: {ended:?}");
        }
        assert_eq!(reads.load(Ordering::SeqCst), 2, "{kind}: of two gets");
        b.comes_to_rest();
        a.works_with(&b);

        // The same from its other calls, some times; then all is well again.
        let lost = c.health().counters.relay.notes_lost;
        fails_others.fail(Call::Poll, ..2, answer).fail(Call::Notify, ..2, answer);
        let (metadata, token) = a.sends(b"told late");
        assert_eq!(&c.get(&metadata).unwrap().wait().unwrap()[..], b"told late", "{kind}");
        if ["Closed", "Metadata"].contains(&kind) {
            // One that is closed, or cannot call that peer, is not asked again: it is counted.
            eventually(lost + 1, || c.health().counters.relay.notes_lost);
            a.abort(&metadata).unwrap();
            assert!(matches!(token.wait(), Err(Error::Aborted)));
        } else {
            let ended = token.wait();
            assert!(ended.is_ok_and(|slot| slot[..] == *b"told late"), "{kind}");
        }
        c.works_with(&a);
        assert_eq!(c.health().status, "healthy", "{kind}");
    }
}

fn d6_an_engine_that_is_pending_for_long_is_asked_until_it_answers(on: &On) {
    let a = on.relay(&small());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &small());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    engine.on_connect(move |next, peer, deadline| {
        if count.fetch_add(1, Ordering::SeqCst) < 5 {
            return Err(Error::TimedOut);
        }
        next.connect(peer, deadline)
    });
    let (metadata, token) = a.sends(b"at the sixth try");
    let (tx, rx) = unbounded();
    // Nobody waits who would read it himself.
    b.get(&metadata).unwrap().attach(&tx, 0);
    assert_eq!(&rx.recv().unwrap().result.unwrap()[..], b"at the sixth try");
    drop(token.wait().unwrap());
    let asked = asked.load(Ordering::SeqCst);
    assert!((6..50).contains(&asked), "it was asked {asked} times");
}

fn d7_a_transfer_that_stalls_ends_by_the_limit_of_all_reads(on: &On) {
    const LEN: usize = 4 << 20;
    const LIMIT: Duration = Duration::from_millis(500);
    let proxy = Proxy::new();
    let config = Config::default().with_slot_size(LEN);
    let from = on.behind(&proxy, &config);
    // No get has a limit of its own.
    let to = on.relay(&config.with_read_timeout(LIMIT).with_transfer_threads(2));
    let other = on.relay(&small());
    let pattern = Pattern::new(&mut Random::new(0xd7), LEN);
    for round in 0..2 {
        from.works_with(&to);
        let (metadata, put) = from.sends(pattern.of(round, LEN));
        proxy.data().down().stall_after(LEN as u64 / 2);
        let get = to.get(&metadata).unwrap();
        proxy.data().until(|seen| seen.bytes_down >= LEN as u64 / 2);
        // Open, and without a byte: nobody else is held up.
        other.works_with(&to);
        let got = get.wait();
        assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
        proxy.data().pass();
        assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
        from.comes_to_rest();
        to.comes_to_rest();
    }
    from.works_with(&to);
}

fn g6_a_refusal_is_told_apart_from_time_and_from_death(on: &On) {
    let (a, c) = on.pair(&small());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &small());
    let kind = |metadata: &Metadata| b.get(metadata).and_then(Token::wait).unwrap_err().kind();
    a.works_with(&b);
    c.works_with(&b);

    let (over, token) = a.sends(b"over");
    a.abort(&over).unwrap();
    assert!(matches!(token.wait(), Err(Error::Aborted)));
    let refused = if on.lacks(Lack::Identity) { &["Stale", "Rejected"][..] } else { &["Stale"] };
    assert!(refused.contains(&kind(&over)), "{}", kind(&over));

    // Memory that is registered no more, and a relay that is no more.
    let (closed, token) = c.sends(b"closed");
    c.close(PATIENCE);
    assert!(matches!(token.wait(), Err(Error::Closed)));
    let gone = ["Stale", "PeerFailed", if on.lacks(Lack::Identity) { "Rejected" } else { "Stale" }];
    assert!(gone.contains(&kind(&closed)), "{}", kind(&closed));

    // Nobody is there.
    let (open, token) = a.sends(b"open");
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert_eq!(kind(&moved_to(&nobody, &open)), "PeerFailed");

    // There, and silent.
    let gate = engine.hang(Call::Read, 0..1);
    let (tx, rx) = unbounded();
    // Whoever waits would read, and so hang, himself.
    b.get_timeout(&open, Duration::from_millis(50)).unwrap().attach(&tx, 0);
    let late = rx.recv().unwrap().result;
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
    gate.open();
    assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
    b.comes_to_rest();
    a.works_with(&b);
}
