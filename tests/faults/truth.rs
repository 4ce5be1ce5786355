//! A: whether what a completion says is true, how long a slot lives, and what an old reference gets.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, Engine, Error, Metadata, Slot, Token};
use serde_json::{Value, json};

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        eventually,
        gate::Gate,
        hooked::{Call, refused},
        proxy::{Ending, Proxy, STATUS},
    },
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any:
        a1_a_get_is_pending_until_its_read_has_ended,
        a3_a_buffer_that_the_engine_still_writes_into_is_nobody_elses,
        a3_a_read_that_ends_after_its_get_has_no_effect_on_the_next,
        a5_a_reference_to_an_ended_put_never_yields_the_bytes_of_the_next,
        a6_a_reference_to_no_open_put_is_an_error_and_moves_no_byte,
        a10_a_read_that_fails_halfway_delivers_nothing_and_is_told,
        a11_eight_threads_with_two_sizes_mix_nothing_up = 600;
    Processes: a1_a_get_is_pending_while_its_sender_is_stopped = 300;
    Proxy:
        a3_a_get_that_times_out_in_the_middle_is_over = 300,
        a10_a_body_that_is_cut_delivers_nothing_and_is_told;
}

const SOON: Duration = Duration::from_secs(60);
/// Far longer than a read needs to begin.
const AMPLE: Duration = Duration::from_secs(2);
const SLOT: usize = 64 << 10;

/// An engine that never knows who reads leaves what failed in quarantine: not for long.
fn config() -> Config {
    Config::default().with_slot_size(SLOT).with_quarantine(Duration::from_millis(100))
}

fn pattern(most: usize) -> Pattern {
    Pattern::new(&mut Random::new(0xa), most)
}

fn a1_a_get_is_pending_until_its_read_has_ended(on: &On) {
    let engine = on.hooked();
    let (from, to) = (on.relay(&config()), AtRest::new(engine.engine(), &config()));
    from.works_with(&to);
    let pattern = pattern(SLOT);
    let gate = engine.hang(Call::Read, ..);
    let (metadata, put) = from.sends(pattern.of(1, SLOT));
    let mut get = to.get(&metadata).unwrap();
    gate.entered(1);
    // Far longer than a read takes; whatever is wrong has the time to happen.
    assert!(get.wait_timeout(Duration::from_millis(200)).is_none());
    assert!(!get.is_done() && !put.is_done());
    gate.open();
    assert!(get.wait().unwrap()[..] == *pattern.of(1, SLOT));
    drop(put.wait().unwrap());
}

fn a1_a_get_is_pending_while_its_sender_is_stopped(on: &On) {
    let big = ["--slot-size", "33554432"];
    let (from, to) = (on.peer(&big), on.peer(&big));
    from.works_with(&to);
    // From the same host's memory it may be read in full, whether or not its sender runs.
    let needs_sender = !to.reads_memory();
    let sent = from.put(json!({"size": 32 << 20, "seed": 1}));
    from.stop();
    let get = to.send_get(&sent.metadata);
    thread::sleep(Duration::from_secs(1)); // in which it must not end
    assert!(!(needs_sender && to.has_answered(get)), "done, and its sender is stopped");
    from.resume();
    let got = to.answer(get);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    assert_eq!(from.wait(sent.tag)["ok"], true);
}

fn a3_a_buffer_that_the_engine_still_writes_into_is_nobody_elses(on: &On) {
    let engine = on.hooked();
    let from = on.relay(&config());
    let to = AtRest::new(engine.engine(), &config().with_receive_credits(1));
    let pattern = pattern(SLOT);
    let gate = engine.keep_writing();
    let (first, first_put) = from.sends(pattern.of(1, SLOT));
    let mut canary = Canary::new(SLOT);
    let outcome = to.get_into(&first, canary.dest(), AMPLE);
    assert!(matches!(outcome, Err(Error::TimedOut)), "{outcome:?}");
    gate.entered(1);
    assert!(matches!(first_put.wait(), Err(Error::PeerFailed { .. })));

    let (second, second_put) = from.sends(pattern.of(2, SLOT));
    let mut get = to.get(&second).unwrap();
    // Long enough for a get that took the slot all the same.
    assert!(get.wait_timeout(Duration::from_millis(200)).is_none());
    let health = to.health();
    assert_eq!((health.receive_free, health.queued, health.reading), (0, 1, 0));
    canary.is_untouched();
    gate.open();
    assert!(get.wait().unwrap()[..] == *pattern.of(2, SLOT));
    drop(second_put.wait().unwrap());
    canary.is_untouched();
}

fn a3_a_read_that_ends_after_its_get_has_no_effect_on_the_next(on: &On) {
    // With one receive slot the next get waits for the read, with two it takes the other.
    for receive_credits in [1, 2] {
        let engine = on.hooked();
        let from = on.relay(&config());
        let receiver = config().with_receive_credits(receive_credits).with_transfer_threads(2);
        let to = AtRest::new(engine.engine(), &receiver);
        from.works_with(&to);
        let (gate, way) = Gate::pair();
        let reads = AtomicUsize::new(0);
        engine.on_read(move |next, remote, local, deadline| {
            if reads.fetch_add(1, Ordering::SeqCst) > 0 {
                return next.read(remote, local, deadline);
            }
            way.pass();
            next.read(remote, local, Instant::now() + SOON)
        });
        let pattern = pattern(SLOT);
        let (first, first_put) = from.sends(pattern.of(1, SLOT));
        let late = to.get_timeout(&first, AMPLE).unwrap();
        gate.entered(1);
        eventually(true, || late.is_done());
        assert!(matches!(late.wait(), Err(Error::TimedOut)));
        assert!(matches!(first_put.wait(), Err(Error::PeerFailed { .. })));

        let (second, second_put) = from.sends(pattern.of(2, SLOT));
        let mut get = to.get(&second).unwrap();
        if receive_credits == 1 {
            // Long enough for a get that took the slot all the same.
            assert!(get.wait_timeout(Duration::from_millis(200)).is_none());
            assert_eq!((to.health().receive_free, to.health().queued), (0, 1));
            gate.open();
        }
        let got = get.wait().unwrap();
        gate.open();
        // What the first read still writes, it writes elsewhere.
        eventually(0, || to.health().reading);
        assert!(got[..] == *pattern.of(2, SLOT));
        drop((got, second_put.wait().unwrap()));
    }
}

fn a3_a_get_that_times_out_in_the_middle_is_over(on: &On) {
    const BIG: usize = 8 << 20;
    let proxy = Proxy::new();
    let config = Config::default().with_slot_size(BIG);
    let from = on.behind(&proxy, &config);
    let to = on.relay(&config.clone().with_receive_credits(1));
    from.works_with(&to);
    let pattern = pattern(BIG);
    proxy.data().down().throttle(1 << 20);

    let (first, first_put) = from.sends(pattern.of(1, BIG));
    let late = to.get_timeout(&first, Duration::from_millis(100)).unwrap().wait();
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
    let (second, second_put) = from.sends(pattern.of(2, 512 << 10));
    let got = to.get(&second).unwrap().wait().unwrap();
    assert!(got[..] == *pattern.of(2, 512 << 10));
    drop(second_put.wait().unwrap());
    assert!(matches!(first_put.wait(), Err(Error::PeerFailed { .. })));

    // The same straight into memory of the caller's, who has other uses for it at once.
    let (third, third_put) = from.sends(pattern.of(3, BIG));
    let mut canary = Canary::new(BIG);
    let late = to.get_into(&third, canary.dest(), Duration::from_millis(100));
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
    canary.dest().copy_from_slice(pattern.of(4, BIG));
    let (fourth, fourth_put) = from.sends(pattern.of(5, 512 << 10));
    let mut dest = Canary::new(512 << 10);
    to.get_into(&fourth, dest.dest(), SOON).unwrap();
    dest.holds(pattern.of(5, 512 << 10));
    drop(fourth_put.wait().unwrap());
    assert!(matches!(third_put.wait(), Err(Error::PeerFailed { .. })));
    proxy.data().pass();
    from.comes_to_rest();
    // Whatever was on its way has arrived, and neither here nor there.
    assert!(got[..] == *pattern.of(2, 512 << 10));
    canary.holds(pattern.of(4, BIG));
}

fn a5_a_reference_to_an_ended_put_never_yields_the_bytes_of_the_next(on: &On) {
    let config = config().with_credits(1).with_lease(Duration::from_millis(500));
    let (from, to) = on.pair(&config);
    let pattern = pattern(SLOT);
    for end in [expire, abandon, abort] {
        let (old, token) = from.sends(pattern.of(1, SLOT));
        end(&from, &old, token);
        let (new, token) = from.sends(pattern.of(2, SLOT));
        let address = |metadata: &Metadata| json_of(metadata)["mooncake"]["buffer_ptr"].clone();
        assert_eq!(address(&old), address(&new), "the same slot");
        let kinds = [false, true].map(|into| fails(&to, &old, into));
        match (to.get(&new).unwrap().wait(), token.wait()) {
            (Ok(got), Ok(_)) => {
                assert_eq!(kinds, ["Stale"; 2]);
                assert!(got[..] == *pattern.of(2, SLOT));
            }
            // On a machine that slow its lease has ended, too.
            (_, Err(Error::TimedOut)) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn expire(_: &AtRest, _: &Metadata, token: Token<Slot>) {
    assert!(matches!(token.wait(), Err(Error::TimedOut)));
}

fn abandon(from: &AtRest, _: &Metadata, token: Token<Slot>) {
    drop(token);
    from.comes_to_rest();
}

fn abort(from: &AtRest, put: &Metadata, token: Token<Slot>) {
    from.abort(put).unwrap();
    assert!(matches!(token.wait(), Err(Error::Aborted)));
}

fn a6_a_reference_to_no_open_put_is_an_error_and_moves_no_byte(on: &On) {
    let one = config().with_credits(1);
    let (from, to) = on.pair(&one);
    let short = on.relay(&one.with_lease(Duration::from_millis(100)));
    let references: [(&str, Make, &str); 6] = [
        ("that nobody handed out", unknown, "Stale"),
        ("past the end of the pool", past_the_end, "Rejected"),
        ("that reaches over the end of its put", too_long, "Rejected"),
        ("that was consumed", consumed, "Stale"),
        ("whose slot was put again", reused, "Stale"),
        ("that has expired", expired, "Stale"),
    ];
    for (what, make, kind) in references {
        if on.lacks(Lack::Publication) && what == "that reaches over the end of its put" {
            continue; // it is served with what lies behind, as registered
        }
        for into in [false, true] {
            let from = if what == "that has expired" { &short } else { &from };
            let (reference, open) = make(from, &to);
            assert_eq!(fails(&to, &reference, into), kind, "a reference {what}");
            if let Some((put, token)) = open {
                // An error where its sender was told already that it cannot be read.
                let _ = from.abort(&put);
                drop(token);
            }
            from.comes_to_rest();
            to.comes_to_rest();
        }
    }
    from.works_with(&to);
}

type Make = fn(&AtRest, &AtRest) -> Made;
/// A reference, and the put that is open meanwhile.
type Made = (Metadata, Option<(Metadata, Token<Slot>)>);

fn unknown(from: &AtRest, _: &AtRest) -> Made {
    forged(from, |json| {
        let guess = "0123456789abcdef";
        let name = json["transfer_id"].as_str().unwrap();
        let id = name.len() - 2 * guess.len();
        json["transfer_id"] = format!("{}{guess}{}", &name[..id], &name[id + guess.len()..]).into();
        // What proves it where only ranges are known.
        json["relay"]["stamp"] = guess.into();
    })
}

fn past_the_end(from: &AtRest, _: &AtRest) -> Made {
    forged(from, |json| {
        let address = json["mooncake"]["buffer_ptr"].as_u64().unwrap();
        json["mooncake"]["buffer_ptr"] = (address + (1 << 30)).into();
    })
}

fn too_long(from: &AtRest, _: &AtRest) -> Made {
    forged(from, |json| {
        json["transfer_info"]["size"] = SLOT.into();
        json["transfer_info"]["shape"] = json!([SLOT]);
    })
}

fn consumed(from: &AtRest, to: &AtRest) -> Made {
    let (metadata, token) = from.sends(b"the same length");
    assert_eq!(&to.get(&metadata).unwrap().wait().unwrap()[..], b"the same length");
    drop(token.wait().unwrap());
    (metadata, None)
}

fn reused(from: &AtRest, to: &AtRest) -> Made {
    let (metadata, _) = consumed(from, to);
    (metadata, Some(from.sends(b"another message")))
}

fn expired(from: &AtRest, _: &AtRest) -> Made {
    let (metadata, token) = from.sends(b"nobody comes");
    assert!(matches!(token.wait(), Err(Error::TimedOut)));
    (metadata, None)
}

/// A put that is open, and its metadata as somebody has changed it.
fn forged(from: &AtRest, change: impl FnOnce(&mut Value)) -> Made {
    let (metadata, token) = from.sends(b"open, and another's");
    let mut json = json_of(&metadata);
    change(&mut json);
    (serde_json::from_value(json).unwrap(), Some((metadata, token)))
}

fn json_of(metadata: &Metadata) -> Value {
    serde_json::to_value(metadata).unwrap()
}

/// Gets what cannot be got; its destination stays as it was. The error's kind.
#[track_caller]
fn fails(to: &AtRest, reference: &Metadata, into: bool) -> &'static str {
    if !into {
        return to.get(reference).and_then(Token::wait).unwrap_err().kind();
    }
    let mut canary = Canary::new(reference.size());
    let outcome = to.get_into(reference, canary.dest(), SOON);
    canary.is_untouched();
    outcome.unwrap_err().kind()
}

fn a10_a_read_that_fails_halfway_delivers_nothing_and_is_told(on: &On) {
    let engine = on.hooked();
    let (from, to) = (on.relay(&config()), AtRest::new(engine.engine(), &config()));
    engine.break_off(..2, refused);
    let pattern = pattern(SLOT);
    for into in [false, true] {
        let (metadata, put) = from.sends(pattern.of(1, SLOT));
        assert_eq!(fails(&to, &metadata, into), "Engine");
        assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
        from.comes_to_rest();
        to.comes_to_rest();
    }
    from.works_with(&to);
}

fn a10_a_body_that_is_cut_delivers_nothing_and_is_told(on: &On) {
    let proxy = Proxy::new();
    let from = on.behind(&proxy, &config());
    let to = on.relay(&config());
    let pattern = pattern(SLOT);
    for ending in [Ending::Close, Ending::Reset] {
        for into in [false, true] {
            from.works_with(&to); // over a connection that it keeps
            let (metadata, put) = from.sends(pattern.of(1, SLOT));
            proxy.data().down().end_after(STATUS + SLOT as u64 / 2, ending);
            let error = if into {
                // The bytes that came before the cut may be in it, and nothing around it.
                let mut canary = Canary::new(SLOT);
                let outcome = to.get_into(&metadata, canary.dest(), SOON);
                canary.dest();
                outcome.unwrap_err()
            } else {
                to.get(&metadata).unwrap().wait().unwrap_err()
            };
            assert!(matches!(error, Error::PeerFailed { .. }), "{error:?}");
            assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
            from.comes_to_rest();
            to.comes_to_rest();
        }
    }
    from.works_with(&to);
}

fn a11_eight_threads_with_two_sizes_mix_nothing_up(on: &On) {
    const THREADS: usize = 8;
    let each = on.rounds(500);
    const SIZES: [usize; 2] = [16_384, 2_424_832];
    let config =
        Config::default().with_slot_size(SIZES[1]).with_credits(4).with_transfer_threads(2);
    let (from, to) = on.pair(&config);
    // Each message has bytes of its own.
    let pattern = pattern(SIZES[1]);
    thread::scope(|s| {
        for thread in 0..THREADS {
            let (from, to, pattern) = (&from, &to, &pattern);
            s.spawn(move || {
                for n in 0..each {
                    let round = thread * each + n;
                    let expected = pattern.of(round, SIZES[n % 2]);
                    let (metadata, put) = from.sends(expected);
                    if n / 2 % 2 == 0 {
                        let got = to.get(&metadata).unwrap().wait().unwrap();
                        assert!(got[..] == *expected, "message {round}");
                    } else {
                        let mut canary = Canary::new(expected.len());
                        to.get_into(&metadata, canary.dest(), SOON).unwrap();
                        canary.holds(expected);
                    }
                    assert!(put.wait().unwrap()[..] == *expected, "message {round}, at its sender");
                }
            });
        }
    });
    let counters = to.health().counters.relay;
    assert_eq!(counters.gets_done, (THREADS * each) as u64);
    assert_eq!(counters.bytes_got, (THREADS * each / 2 * (SIZES[0] + SIZES[1])) as u64);
}
