//! Who hears notifications: the relay itself, from its start to its close, whatever its callers do,
//! whatever strangers send, and however slow those are who should listen.

use std::{
    panic::{self, PanicHookInfo},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{
    Config, Engine, Error, Metadata, Notification, Relay, Result, Slot, Token, TransferId,
    WaitStrategy,
};
use parking_lot::Mutex;

use crate::{
    common::{
        comes_about, eventually,
        faults::odd_notes,
        gate::Gate,
        hooked::{Call, refused},
        threads_named,
    },
    on::{AtRest, Lack, On, Stranger, cases},
};

cases! {
    Any: q14_a_put_that_was_acknowledged_while_its_caller_was_busy_is_no_time_out,
        q14_what_came_before_the_lease_ended_counts_though_nobody_looked_until_after,
        q14_a_lease_does_not_end_between_a_note_and_a_caller_that_is_about_to_look,
        q16_notes_that_make_no_sense_cost_no_other_note_of_their_batch,
        q17_a_sender_that_takes_no_note_holds_up_no_other_get,
        q18_a_note_that_is_not_taken_is_counted_and_sent_again,
        q18_a_note_that_is_never_taken_is_given_up_with_the_lease_and_counted,
        q21_only_the_very_id_with_a_known_message_ends_a_put_and_only_once,
        q26_the_listener_runs_from_the_start_to_the_close,
        q26_looks_that_fail_do_not_end_the_listener,
        q26_a_listener_that_dies_is_seen_and_ends_what_waits;
}

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough for a transfer on a busy machine, short enough to wait for.
const LEASE: Duration = Duration::from_secs(2);
/// How long a lease that has ended waits for the last look of whoever has the engine.
const LAST_LOOK: Duration = Duration::from_secs(1);

fn config() -> Config {
    Config::default()
        .with_engine_id("t")
        .with_slot_size(64 << 10)
        .with_quarantine(Duration::from_millis(100))
}

#[track_caller]
fn gets(relay: &AtRest, metadata: &Metadata) {
    drop(relay.get(metadata).unwrap().wait().unwrap());
}

/// Gets it while its lease, which began after `begun`, cannot have ended; whether that was so.
#[track_caller]
fn gets_in_time(relay: &Relay, metadata: &Metadata, begun: Instant) -> bool {
    let got = relay.get(metadata).unwrap().wait();
    let in_time = begun.elapsed() < LEASE;
    assert!(got.is_ok() || !in_time, "{got:?}");
    in_time
}

fn q14_a_put_that_was_acknowledged_while_its_caller_was_busy_is_no_time_out(on: &On) {
    let (a, b) = on.pair(&config().with_lease(LEASE));
    comes_about(|| {
        a.comes_to_rest();
        let begun = Instant::now();
        let (metadata, token) = a.sends(b"read at once");
        // Put later, so that its lease ends later; only the relay looks meanwhile.
        let (_, sentinel) = a.sends(b"never read");
        if !gets_in_time(&b, &metadata, begun) {
            return false;
        }
        let (tx, rx) = unbounded();
        sentinel.attach(&tx, 0);
        let over = rx.recv().unwrap().result;
        assert!(matches!(over, Err(Error::TimedOut)), "{over:?}");
        assert_eq!(&token.wait().unwrap()[..], b"read at once");
        true
    });
}

fn q14_what_came_before_the_lease_ended_counts_though_nobody_looked_until_after(on: &On) {
    let engine = on.hooked();
    let a = AtRest::new(engine.engine(), &config().with_lease(LEASE));
    let b = on.relay(&config());
    // The listener is away, housekeeping, from before the note comes until after the lease.
    let away: Arc<Mutex<Option<Gate>>> = Arc::default();
    let is_away = Arc::clone(&away);
    engine.on_tend(move |next| {
        let way = is_away.lock().take();
        if let Some(way) = way {
            way.pass();
        }
        next.tend();
    });
    comes_about(|| {
        a.comes_to_rest();
        let (gate, way) = Gate::pair();
        *away.lock() = Some(way);
        gate.entered(1);
        let (begun, before) = (Instant::now(), a.health().counters.relay.puts_expired);
        let (metadata, token) = a.sends(b"read at once");
        let (tx, rx) = unbounded();
        token.attach(&tx, 0);
        if !gets_in_time(&b, &metadata, begun) {
            return false;
        }
        thread::sleep(LEASE); // past the lease; a longer sleep would change nothing
        gate.open();
        assert_eq!(&rx.recv().unwrap().result.unwrap()[..], b"read at once");
        assert_eq!(a.health().counters.relay.puts_expired, before);
        true
    });
}

fn q14_a_lease_does_not_end_between_a_note_and_a_caller_that_is_about_to_look(on: &On) {
    let engine = on.hooked();
    // Whoever waits never parks instead of looking.
    let a =
        AtRest::new(engine.engine(), &config().with_lease(LEASE).with_wait(WaitStrategy::Yield));
    let b = on.relay(&config());
    // Whoever waits looks for the listener, too. Here it is slow.
    let slow: Arc<Mutex<Option<Gate>>> = Arc::default();
    let is_slow = Arc::clone(&slow);
    engine.before(Call::Poll, move || {
        if thread::current().name() == Some("slow") {
            let way = is_slow.lock().take();
            if let Some(way) = way {
                way.pass();
            }
        }
        Ok(())
    });
    comes_about(|| {
        a.comes_to_rest();
        let (gate, way) = Gate::pair();
        *slow.lock() = Some(way);
        let (begun, before) = (Instant::now(), a.health().counters.relay.puts_expired);
        let (metadata, token) = a.sends(b"read at once");
        let named = thread::Builder::new().name("slow".to_owned());
        let waits = named.spawn(move || token.wait()).unwrap();
        gate.entered(1);
        let in_time = gets_in_time(&b, &metadata, begun);
        if in_time {
            // Past the lease, so that the listener has had its chance to do wrong.
            thread::sleep((LEASE + LEASE / 20).saturating_sub(begun.elapsed()));
        }
        gate.open();
        let ended = waits.join().unwrap();
        // It is waited for as long as this, and no longer.
        if !in_time || begun.elapsed() >= LEASE + LAST_LOOK {
            return false;
        }
        assert_eq!(&ended.unwrap()[..], b"read at once");
        assert_eq!(a.health().counters.relay.puts_expired, before);
        true
    });
}

fn q16_notes_that_make_no_sense_cost_no_other_note_of_their_batch(on: &On) {
    let engine = on.hooked();
    let a = AtRest::new(engine.engine(), &config());
    let b = on.relay(&config());
    let stranger = Stranger::new(on);
    let (first, first_token) = a.sends(b"in the middle of a batch");
    let (last, last_token) = a.sends(b"at its end");
    let gate = engine.hang(Call::Poll, ..);
    engine.ring();
    gate.entered(1);
    let send_odd_notes = || {
        let sent = odd_notes().iter().filter(|note| stranger.tries_to_tell(&a, note)).count();
        assert!(sent >= 20);
        sent as u64
    };
    let mut odd = send_odd_notes();
    gets(&b, &first);
    odd += send_odd_notes();
    gets(&b, &last);
    gate.open();
    first_token.wait().unwrap();
    last_token.wait().unwrap();
    let counters = a.health().counters.relay;
    assert_eq!(counters.notes_taken, 2);
    assert!(counters.notes_unknown >= odd, "{counters:?}");
}

fn q17_a_sender_that_takes_no_note_holds_up_no_other_get(on: &On) {
    let (slow, quick) = on.pair(&config());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &config().with_transfer_threads(2));
    // Both are known to answer.
    slow.works_with(&b);
    quick.works_with(&b);
    let (gate, way) = Gate::pair();
    let peer = slow.health().session_id;
    engine.on_notify(move |next, to, note, deadline| {
        if to == peer {
            way.pass();
        }
        next.notify(to, note, deadline)
    });
    let (metadata, slow_token) = slow.sends(b"slow");
    let (tx, rx) = unbounded();
    b.get(&metadata).unwrap().attach(&tx, 0);
    gate.entered(1);
    for round in 1..20 {
        let (metadata, token) = quick.sends(b"quick");
        b.get(&metadata).unwrap().attach(&tx, round);
        assert_eq!(rx.recv().unwrap().tag, round, "the slow one is held still");
        token.wait().unwrap();
    }
    gate.open();
    let slow = rx.recv().unwrap();
    assert_eq!((slow.tag, &slow.result.unwrap()[..]), (0, &b"slow"[..]));
    slow_token.wait().unwrap();
}

fn q18_a_note_that_is_not_taken_is_counted_and_sent_again(on: &On) {
    let a = on.relay(&config());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &config());
    engine.fail(Call::Notify, 0..3, refused);
    let (metadata, token) = a.sends(b"read, and told at the fourth try");
    gets(&b, &metadata);
    let told = b.health().counters.relay;
    assert_eq!((told.notes_untaken, told.gets_done), (1, 1), "its receiver is told, by a counter");
    assert_eq!(&token.wait().unwrap()[..], b"read, and told at the fourth try");
    assert_eq!(b.health().counters.relay.notes_lost, 0);
}

fn q18_a_note_that_is_never_taken_is_given_up_with_the_lease_and_counted(on: &On) {
    let a = on.relay(&config().with_lease(LEASE));
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &config());
    let (metadata, token) = a.sends(b"read, and never told");
    engine.fail(Call::Notify, .., refused);
    gets(&b, &metadata);
    let ended = token.wait();
    assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
    eventually((1, 1), || {
        let counters = b.health().counters.relay;
        (counters.notes_untaken, counters.notes_lost)
    });
}

/// Notes about that put by somebody who does not know its id, or does not know what to say.
pub(crate) fn forged(metadata: &Metadata) -> Vec<(String, &'static str)> {
    const DONE: &str = "transfer_complete";
    let name = metadata.transfer_id();
    let id = TransferId::of_name(name).unwrap();
    let engine = metadata.engine_id().unwrap();
    let named = |id: TransferId| format!("{engine}_{id}");
    let TransferId { random, slot, generation } = id;
    vec![
        (format!("{engine}_00000000"), DONE), // as long as a Python sender's
        (format!("{engine}_{slot:032x}"), DONE),
        (named(TransferId { random: random ^ 1, ..id }), DONE),
        (named(TransferId { random: !random, ..id }), "transfer_failed"),
        (named(TransferId { slot: slot ^ 1, ..id }), DONE),
        (named(TransferId { slot: u32::MAX, ..id }), DONE),
        (named(TransferId { generation: generation + 1, ..id }), DONE),
        (named(TransferId { generation: generation.wrapping_sub(1), ..id }), DONE),
        (format!("other_{id}"), DONE),
        (id.to_string(), DONE),
        (format!("{name}0"), DONE),
        (name[..name.len() - 1].to_owned(), DONE),
        (name.to_owned(), ""),
        (name.to_owned(), "TRANSFER_COMPLETE"),
        (name.to_owned(), "transfer_complete\0"),
    ]
}

fn q21_only_the_very_id_with_a_known_message_ends_a_put_and_only_once(on: &On) {
    let (a, b) = on.pair(&config().with_credits(1));
    let stranger = Stranger::new(on);
    // So that there is a generation before that of the put.
    a.works_with(&b);
    let (metadata, token) = a.sends(b"not to be ended by a stranger");
    let before = a.health().counters.relay;
    let forged = forged(&metadata);
    let notes = forged.iter().map(|(name, message)| Notification::new(name, message));
    let told = notes.filter(|note| stranger.tries_to_tell(&a, note)).count();
    // One of them has a NUL.
    assert!(told + usize::from(on.lacks(Lack::Nul)) >= forged.len());
    let strange = |counters: mooncake_relay::Counters| counters.notes_unknown + counters.notes_late;
    let least = strange(before) + told as u64;
    eventually(true, || strange(a.health().counters.relay) >= least);
    assert!(!token.is_done());
    assert_eq!(a.health().published, 1);
    gets(&b, &metadata);
    drop(token.wait().unwrap());
    // Now its id is known, and of no use: it is of another life of the slot.
    let late = a.health().counters.relay.notes_late;
    let (next, mut token) = a.sends(b"nor by an old id");
    for message in ["transfer_complete", "transfer_failed"] {
        stranger.tells(&a, &Notification::new(metadata.transfer_id(), message));
    }
    eventually(true, || a.health().counters.relay.notes_late >= late + 2);
    assert!(token.poll().is_none());
    gets(&b, &next);
    token.wait().unwrap();
}

fn q26_the_listener_runs_from_the_start_to_the_close(on: &On) {
    let a = on.relay(&config());
    // A thread has its name just after it was made.
    eventually(1, || threads_named("relay-notifier"));
    let b = on.relay(&config());
    // Tasks that wait, are cancelled and come back: the listener is none of theirs.
    for _ in 0..5 {
        let (metadata, token) = a.sends(b"its waiter gives up");
        let waiter = thread::spawn(move || {
            let mut token = token;
            assert!(token.wait_timeout(Duration::ZERO).is_none());
        });
        waiter.join().unwrap();
        gets(&b, &metadata);
        eventually(2, || a.health().free);
    }
    eventually((2, "healthy"), || (threads_named("relay-notifier"), a.health().status));
    a.close(PATIENCE);
    b.close(PATIENCE);
    eventually(0, || threads_named("relay-notifier"));
}

fn q26_looks_that_fail_do_not_end_the_listener(on: &On) {
    let engine = on.hooked();
    let a = AtRest::new(engine.engine(), &config());
    let b = on.relay(&config());
    engine.fail(Call::Poll, 0..5, refused);
    let (metadata, token) = a.sends(b"heard at the sixth look");
    gets(&b, &metadata);
    token.wait().unwrap();
    let health = a.health();
    assert_eq!((health.status, health.counters.relay.poll_errors), ("healthy", 5));
}

const DEATH: &str = "the listener's death, as the test wants it";

/// Says nothing of a death that is wanted.
fn silence_the_death() {
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        // An `assert!` with a message panics with a string of its own.
        let said = info.payload().downcast_ref::<String>().map(String::as_str);
        if said.or_else(|| info.payload().downcast_ref().copied()) != Some(DEATH) {
            tell(info);
        }
    }));
}

#[track_caller]
fn says_that_it_failed<T: std::fmt::Debug>(outcome: Result<T>) {
    let failed = matches!(&outcome, Err(Error::Engine { engine: "relay", .. }));
    assert!(failed, "{outcome:?}");
}

fn q26_a_listener_that_dies_is_seen_and_ends_what_waits(on: &On) {
    silence_the_death();
    let engine = on.hooked();
    let a = AtRest::new(engine.engine(), &config().with_credits(3));
    let b = on.relay(&config());
    let dies = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&dies);
    engine.before(Call::Poll, move || {
        assert!(!now.load(Ordering::SeqCst), "{DEATH}");
        Ok(())
    });
    let reads = engine.hang(Call::Read, ..);
    let (tx, rx) = unbounded();
    // Three puts and a get wait, each in another way.
    let (_, token) = a.sends(b"waited for by a thread");
    a.sends(b"waited for by a channel").1.attach(&tx, 0);
    let (_, mut polled): (_, Token<Slot>) = a.sends(b"polled");
    let (of_b, of_b_token) = b.sends(b"to be got");
    a.get(&of_b).unwrap().attach(&tx, 1);
    reads.entered(1);
    let waiter = thread::spawn(move || token.wait());
    dies.store(true, Ordering::SeqCst);
    engine.ring();
    says_that_it_failed(waiter.join().unwrap());
    let mut heard = [rx.recv().unwrap(), rx.recv().unwrap()].map(|said| {
        says_that_it_failed(said.result);
        said.tag
    });
    heard.sort_unstable();
    assert_eq!(heard, [0, 1]);
    says_that_it_failed(polled.wait_timeout(PATIENCE).unwrap());
    assert_eq!(a.health().status, "failed");
    says_that_it_failed(a.try_acquire(1));
    says_that_it_failed(a.get(&of_b));
    reads.open();
    a.comes_to_rest();
    assert_eq!(a.close(PATIENCE).threads, 0);
    // Its peer is as well as ever.
    b.abort(&of_b).unwrap_or_else(|error| assert!(matches!(error, Error::Stale { .. })));
    of_b_token.wait().unwrap_err();
    on.relay(&config()).works_with(&b);
}
