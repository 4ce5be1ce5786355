//! What the Python relay gets wrong, and what is right: reads that fail, hang or come too late.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_relay::{Config, Engine, Error, Metadata};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use crate::{
    common::{
        bytes::Canary,
        eventually,
        gate::Gate,
        hooked::{Call, Hooked, refused},
    },
    on::{AtRest, On, cases},
    reference::{FOREVER, PATIENCE, comes_back, gets, hooked, small},
};

cases! {
    Any:
        q6_a_cancelled_get_holds_its_slot_until_the_engine_is_done,
        q7_a_failed_read_leaves_the_destination_as_it_was,
        q8_a_destination_is_checked_before_anything_is_taken_or_told,
        q8_a_sender_hears_of_success_after_its_receiver_has_the_bytes,
        q9_a_get_from_a_stuck_peer_ends_by_its_time_and_burns_no_core,
        q10_a_timed_out_read_that_goes_on_writing_touches_no_other_get;
    Processes:
        q9_a_frozen_peer_costs_a_get_its_time_and_no_core,
        q10_what_a_frozen_peer_sends_late_lands_in_no_other_get;
}

/// Far longer than a read needs to begin.
const AMPLE: Duration = Duration::from_secs(2);

/// The gets that run beside one whose read goes on: each has its own bytes.
#[track_caller]
fn others_are_right(from: &AtRest, to: &AtRest) {
    for n in 0..50_u8 {
        let bytes = vec![n; 4096 - usize::from(n)];
        let (metadata, token) = from.sends(&bytes);
        if n % 2 == 0 {
            gets(to, &metadata, &bytes);
        } else {
            let mut canary = Canary::new(bytes.len());
            to.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
            canary.holds(&bytes);
        }
        comes_back(token, &bytes);
    }
}

fn q6_a_cancelled_get_holds_its_slot_until_the_engine_is_done(on: &On) {
    let (a, c) = on.pair(&small());
    for how in ["aborted", "out of time", "dropped"] {
        let (engine, b) = hooked(on, &small().with_credits(2).with_transfer_threads(2));
        a.works_with(&b);
        let gate = engine.hang(Call::Read, 0..1);
        let (metadata, put) = a.sends(&[0xEE; 4096]);
        let limit = if how == "out of time" { AMPLE } else { FOREVER };
        let get = b.get_timeout(&metadata, limit).unwrap();
        gate.entered(1);
        match how {
            "aborted" => {
                b.abort(&metadata).unwrap();
                assert!(matches!(get.wait(), Err(Error::Aborted)));
            }
            "dropped" => drop(get),
            _ => assert!(matches!(get.wait(), Err(Error::TimedOut))),
        }
        let health = b.health();
        assert_eq!((health.reading, health.receive_free), (1, 1), "{how}: the engine has it");
        others_are_right(&c, &b);
        assert_eq!(b.health().receive_free, 1, "{how}: still");
        if how == "dropped" {
            // The claim was abandoned, and the transfer was not.
            gate.open();
            comes_back(put, &[0xEE; 4096]);
        } else {
            assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })), "{how}: it is told");
            gate.open();
        }
        b.comes_to_rest();
        others_are_right(&c, &b);
    }
}

fn q7_a_failed_read_leaves_the_destination_as_it_was(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small().with_credits(1));
    // What an earlier request left in the one slot there is.
    let (earlier, token) = a.sends(&[0x77; 4096]);
    gets(&b, &earlier, &[0x77; 4096]);
    comes_back(token, &[0x77; 4096]);
    engine.break_off(0..=0, refused).fail(Call::Read, 0..=0, refused);
    for _ in 0..2 {
        let (metadata, token) = a.sends(&[0x11; 4096]);
        let mut canary = Canary::new(4096);
        let got = b.get_into(&metadata, canary.dest(), PATIENCE);
        assert!(matches!(got, Err(Error::Engine { engine: "hooked", .. })), "{got:?}");
        canary.is_untouched();
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        b.comes_to_rest();
    }
    let (metadata, token) = a.sends(&[0x22; 4096]);
    let mut canary = Canary::new(4096);
    b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
    canary.holds(&[0x22; 4096]);
    comes_back(token, &[0x22; 4096]);
}

fn q8_a_destination_is_checked_before_anything_is_taken_or_told(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small().with_credits(1));
    let calls = Arc::new(Mutex::new(Vec::new()));
    for call in [Call::Read, Call::Notify] {
        let calls = Arc::clone(&calls);
        engine.before(call, move || {
            calls.lock().push(call);
            Ok(())
        });
    }
    let (metadata, mut token) = a.sends(&[5; 100]);
    for len in [0, 1, 99] {
        let mut canary = Canary::new(len);
        let got = b.get_into(&metadata, canary.dest(), PATIENCE);
        assert!(
            matches!(got, Err(Error::TooLarge { len: 100, slot_size }) if slot_size == len),
            "{got:?}"
        );
        canary.is_untouched();
        assert_eq!((b.health().receive_free, b.health().counters.relay.gets), (1, 0));
    }
    assert!(calls.lock().is_empty(), "it went to the sender");
    assert!(token.poll().is_none());
    let mut canary = Canary::new(100);
    b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
    canary.holds(&[5; 100]);
    comes_back(token, &[5; 100]);
}

fn q8_a_sender_hears_of_success_after_its_receiver_has_the_bytes(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small());
    let (gate, way) = Gate::pair();
    engine.on_read(move |next, remote, local, deadline| {
        let read = next.read(remote, local, deadline);
        way.pass(); // the bytes are there, and the engine has not said so
        read
    });
    let (metadata, token) = a.sends(&[6; 4096]);
    let get = b.get(&metadata).unwrap();
    gate.entered(1);
    assert!(!token.is_done());
    // Nor does a note follow by itself: a second relay's put does come through.
    on.relay(&small()).works_with(&a);
    assert!(!token.is_done());
    assert_eq!(a.health().counters.relay.notes_taken, 0);
    gate.open();
    assert_eq!(get.wait().unwrap()[..], [6; 4096]);
    comes_back(token, &[6; 4096]);
}

/// How much time the process has computed so far.
fn computed() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// Runs `wait`, which lasts a while, and takes next to nothing of a core. A tenth is far more than a
/// wait needs, and less than a spin gets on a machine that has others to serve.
#[track_caller]
fn burns_no_core(wait: impl FnOnce()) {
    let (begun, before) = (Instant::now(), computed());
    wait();
    let (lasted, spent) = (begun.elapsed(), computed() - before);
    assert!(spent < lasted / 10, "it computed {spent:?} of {lasted:?}");
}

fn q9_a_get_from_a_stuck_peer_ends_by_its_time_and_burns_no_core(on: &On) {
    let a = on.relay(&small());
    let (engine, b) = hooked(on, &small());
    let gate = engine.hang(Call::Read, ..);
    let (metadata, put) = a.sends(b"stuck");
    let mut get = b.get_timeout(&metadata, AMPLE).unwrap();
    gate.entered(1);
    burns_no_core(|| {
        let got = get.wait_timeout(PATIENCE).unwrap();
        assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
    });
    assert_eq!(b.health().receive_free, 1, "the engine has not let go of the other");
    gate.open();
    assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
    b.comes_to_rest();
    a.works_with(&b);
}

fn q9_a_frozen_peer_costs_a_get_its_time_and_no_core(on: &On) {
    let frozen = on.peer(&[]);
    let relay = on.relay(&Config::default().with_slot_size(256 << 10));
    let sent = frozen.put(json!({"size": 200_000, "seed": 9}));
    let metadata: Metadata = serde_json::from_value(sent.metadata).unwrap();
    frozen.stop();
    let mut canary = Canary::new(200_000);
    burns_no_core(|| {
        let got = relay.get_into(&metadata, canary.dest(), Duration::from_secs(1));
        assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
    });
    canary.is_untouched();
    burns_no_core(|| {
        let get = relay.get_timeout(&metadata, Duration::from_secs(1)).unwrap();
        assert!(matches!(get.wait(), Err(Error::TimedOut)));
    });
    frozen.resume();
    let ended = frozen.wait(sent.tag);
    assert_eq!(ended["kind"], "PeerFailed", "{ended}");
}

fn q10_a_timed_out_read_that_goes_on_writing_touches_no_other_get(on: &On) {
    const KEPT: usize = 2;
    let (a, c) = on.pair(&small());
    let healthy = on.hooked();
    let engine = Hooked::over(healthy.engine());
    let config = small().with_credits(KEPT as u32 + 1).with_transfer_threads(2);
    let b = AtRest::new(engine.engine(), &config);
    let gate = engine.keep_writing();
    let reads = AtomicUsize::new(0);
    engine.on_read(move |keeps, remote, local, deadline| {
        if reads.fetch_add(1, Ordering::SeqCst) < KEPT {
            keeps.read(remote, local, deadline)
        } else {
            healthy.read(remote, local, deadline)
        }
    });
    for kept in 1..=KEPT {
        let (metadata, put) = a.sends(&[0xEE; 4096]);
        let late = b.get_timeout(&metadata, AMPLE).unwrap();
        assert!(matches!(late.wait(), Err(Error::TimedOut)));
        assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
        eventually((KEPT + 1 - kept, kept as u64), || {
            (b.health().receive_free, b.health().counters.relay.buffers_kept)
        });
    }
    others_are_right(&c, &b);
    others_are_right(&a, &b);
    assert_eq!(b.health().receive_free, 1, "what is written is nobody's");
    gate.open();
    b.comes_to_rest();
    others_are_right(&a, &b);
}

fn q10_what_a_frozen_peer_sends_late_lands_in_no_other_get(on: &On) {
    const LEN: usize = 256 << 10;
    let (frozen, alive) = (on.peer(&[]), on.peer(&[]));
    let relay = on.relay(&Config::default().with_slot_size(LEN).with_credits(1));
    for round in 0..3_u8 {
        let late = frozen.put(json!({"size": LEN, "fill": 0xEE}));
        let metadata: Metadata = serde_json::from_value(late.metadata).unwrap();
        frozen.stop();
        let got = relay.get_timeout(&metadata, Duration::from_millis(50)).unwrap().wait();
        frozen.resume(); // it sends what it was asked for
        let in_full = match got {
            // From the same host's memory, whether or not its sender runs.
            Ok(slot) => relay.reads_memory() && slot[..] == vec![0xEE; LEN],
            Err(error) => {
                assert!(matches!(error, Error::TimedOut), "{error}");
                false
            }
        };
        for _ in 0..5 {
            let sent = alive.put(json!({"size": LEN, "fill": round}));
            let metadata: Metadata = serde_json::from_value(sent.metadata).unwrap();
            gets(&relay, &metadata, &vec![round; LEN]);
            assert_eq!(alive.wait(sent.tag)["ok"], true);
        }
        let ended = frozen.wait(late.tag);
        if in_full {
            assert_eq!(ended["ok"], true, "{ended}");
        } else {
            assert_eq!(ended["kind"], "PeerFailed", "{ended}");
        }
    }
}
