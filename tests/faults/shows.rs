//! All of it at once, and for long.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use mooncake_relay::{Config, Counters, Engine, Error, Metadata, Retracted, Slot, Tensor, Token};
use parking_lot::Mutex;

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        hooked::{Call, Hooked},
    },
    on::{AtRest, On, cases},
};

cases! {
    Any: chaos_of_delays_short_leases_and_aborts_never_yields_other_bytes = 1800;
}

const THREADS: usize = 4;
const TRANSFERS: usize = 20_000;
const MOST: usize = 64 << 10;

/// What the threads of the chaos share.
struct Chaos {
    sides: [AtRest; 2],
    pattern: Pattern,
    round: AtomicUsize,
    transfers: usize,
    slowness: u32,
    delivered: AtomicU64,
    came_back: AtomicU64,
}

fn chaos_of_delays_short_leases_and_aborts_never_yields_other_bytes(on: &On) {
    // On a busy machine hardly anything ends well in so little time: then everybody takes more of it.
    assert!([1, 4, 16].into_iter().any(|slowness| is_about_something(on, slowness)));
}

/// One chaos; whether enough of its transfers ended well.
fn is_about_something(on: &On, slowness: u32) -> bool {
    let config = Config::default()
        .with_credits(2)
        .with_slot_size(MOST)
        .with_transfer_threads(2)
        .with_lease(Duration::from_millis(4) * slowness)
        .with_quarantine(Duration::from_millis(2) * slowness);
    let chaos = Chaos {
        slowness,
        sides: [1, 2].map(|seed| AtRest::new(harsh(on, seed).engine(), &config)),
        pattern: Pattern::new(&mut Random::new(0xc4a05), MOST),
        round: AtomicUsize::new(0),
        transfers: on.rounds(TRANSFERS),
        delivered: AtomicU64::new(0),
        came_back: AtomicU64::new(0),
    };
    thread::scope(|s| {
        for seed in 1..=THREADS as u64 {
            let chaos = &chaos;
            s.spawn(move || chaos.work(&mut Random::new(seed)));
        }
    });
    let Chaos { sides, transfers, delivered, came_back, .. } = chaos;
    sides.iter().for_each(AtRest::comes_to_rest);
    let counters = sides.each_ref().map(|side| side.health().counters.relay);
    println!("delivered {delivered:?}, came back {came_back:?}\n{counters:#?}");
    assert_eq!(counters[0].puts + counters[1].puts, transfers as u64);
    counters.iter().for_each(adds_up);
    let ended_well = [delivered, came_back].map(|count| count.into_inner() as usize);
    if ended_well.iter().any(|count| *count <= transfers / 10) {
        return false;
    }
    counters.iter().for_each(everything_happened);
    // The same relays, in peace: their leases are as short as before.
    let in_peace = |from: &AtRest, to: &AtRest| {
        let (metadata, _token) = from.sends(b"in peace");
        to.get(&metadata).unwrap().wait().is_ok_and(|got| got[..] == *b"in peace")
    };
    assert!((0..1000).any(|_| in_peace(&sides[0], &sides[1])));
    assert!((0..1000).any(|_| in_peace(&sides[1], &sides[0])));
    true
}

/// Each third read and note up to 2 ms late; and each third slot that is let go is said to be read,
/// again and again, until its quarantine is cut or chance has it.
fn harsh(on: &On, seed: u64) -> Hooked {
    let engine = on.hooked();
    for (call, seed) in [(Call::Read, 2 * seed), (Call::Notify, 2 * seed + 1)] {
        let random = Mutex::new(Random::new(0xde1a0 + seed));
        engine.before(call, move || {
            let mut random = random.lock();
            let micros = if random.below(3) == 0 { random.below(2001) } else { 0 };
            drop(random);
            if micros > 0 {
                thread::sleep(Duration::from_micros(micros)); // the fault itself
            }
            Ok(())
        });
    }
    let random = Mutex::new(Random::new(0x4ead + seed));
    let reading = Mutex::new(Vec::new());
    engine.on_retract(move |next, slot| {
        let truth = next.retract(slot);
        let mut reading = reading.lock();
        let known = reading.iter().position(|slots| *slots == slot.slot());
        let lots =
            if known.is_some() { random.lock().below(8) > 0 } else { random.lock().below(3) == 0 };
        match (known, lots) {
            (Some(known), false) => drop(reading.swap_remove(known)),
            (None, true) => reading.push(slot.slot()),
            _ => {}
        }
        if lots { Retracted::Reading } else { truth }
    });
    engine
}

/// Each put and each get ended once.
#[track_caller]
fn adds_up(counters: &Counters) {
    let Counters { puts_acknowledged, puts_failed, puts_expired, puts_aborted, .. } = counters;
    assert_eq!(puts_acknowledged + puts_failed + puts_expired + puts_aborted, counters.puts);
    assert_eq!(counters.gets_done + counters.gets_failed, counters.gets);
    assert!(counters.quarantines_cut <= counters.quarantines);
    assert_eq!(counters.notes_taken, puts_acknowledged + puts_failed);
}

/// No part of it was left out.
#[track_caller]
fn everything_happened(counters: &Counters) {
    let never: Vec<_> = [
        ("puts_acknowledged", counters.puts_acknowledged),
        ("puts_failed", counters.puts_failed),
        ("puts_expired", counters.puts_expired),
        ("puts_aborted", counters.puts_aborted),
        ("quarantines", counters.quarantines),
        ("quarantines_cut", counters.quarantines_cut),
        ("gets_done", counters.gets_done),
        ("gets_failed", counters.gets_failed),
        ("gets_timed_out", counters.gets_timed_out),
        ("gets_aborted", counters.gets_aborted),
        ("notes_late", counters.notes_late),
    ]
    .into_iter()
    .filter(|(_, count)| *count == 0)
    .collect();
    assert!(never.is_empty(), "{never:?}");
}

impl Chaos {
    /// From 0 to 5 ms.
    fn some_time(&self, random: &mut Random) -> Duration {
        Duration::from_micros(random.below(5001)) * self.slowness
    }

    fn work(&self, random: &mut Random) {
        loop {
            let round = self.round.fetch_add(1, Ordering::Relaxed);
            if round >= self.transfers {
                return;
            }
            let (from, to) = (&self.sides[round % 2], &self.sides[(round + 1) % 2]);
            let (metadata, token) = self.put(from, round, random);
            let expected = self.pattern.of(round, metadata.size());
            if random.below(10) == 0 {
                let _ = from.abort(&metadata);
            }
            pause(random);
            match random.below(20) {
                0 => {} // nobody comes
                1..=4 => self.get_into(to, &metadata, expected, random),
                5..=9 => drop(to.get_timeout(&metadata, self.some_time(random))), // abandoned
                _ => self.get(to, &metadata, expected, random),
            }
            self.ends(token, expected, random);
        }
    }

    fn put(&self, from: &AtRest, round: usize, random: &mut Random) -> (Metadata, Token<Slot>) {
        let len = random.size(MOST as u64) as usize;
        loop {
            match from.acquire(len, self.some_time(random)) {
                Ok(mut slot) => {
                    slot.copy_from_slice(self.pattern.of(round, len));
                    break from.put(slot, Tensor::bytes(len)).unwrap();
                }
                Err(Error::TimedOut | Error::Exhausted) => {}
                Err(other) => panic!("round {round}: {other:?}"),
            }
        }
    }

    fn get(&self, to: &AtRest, metadata: &Metadata, expected: &[u8], random: &mut Random) {
        let mut token = match to.get_timeout(metadata, self.some_time(random)) {
            Ok(token) => token,
            Err(error) => return is_expected(&error),
        };
        if random.below(8) == 0 {
            let _ = to.abort(metadata);
        }
        match token.wait_timeout(self.some_time(random)) {
            Some(Ok(slot)) => self.delivered(&slot, expected),
            Some(Err(error)) => is_expected(&error),
            None => {} // given up
        }
    }

    fn get_into(&self, to: &AtRest, metadata: &Metadata, expected: &[u8], random: &mut Random) {
        let mut canary = Canary::new(expected.len());
        match to.get_into(metadata, canary.dest(), self.some_time(random)) {
            Ok(len) => {
                assert_eq!(len, expected.len());
                canary.holds(expected);
                self.delivered.fetch_add(1, Ordering::Relaxed);
            }
            // A copy that was cut after it had begun leaves the destination unspecified.
            Err(error) => is_expected(&error),
        }
    }

    fn delivered(&self, slot: &[u8], expected: &[u8]) {
        assert!(slot == expected, "bytes of another put");
        self.delivered.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for the put, or not; if its slot comes back, nobody has touched it.
    fn ends(&self, mut token: Token<Slot>, expected: &[u8], random: &mut Random) {
        match token.wait_timeout(self.some_time(random)) {
            Some(Ok(slot)) => {
                assert!(slot[..] == *expected, "the slot came back changed");
                self.came_back.fetch_add(1, Ordering::Relaxed);
            }
            Some(Err(error)) => is_expected(&error),
            None => {}
        }
    }
}

/// Nothing, mostly: what is random here is who comes first.
fn pause(random: &mut Random) {
    if random.below(4) == 0 {
        thread::sleep(Duration::from_micros(random.below(2000)));
    }
}

#[track_caller]
fn is_expected(error: &Error) {
    let expected = matches!(
        error,
        Error::TimedOut
            | Error::Aborted
            | Error::Stale { .. }
            | Error::PeerFailed { .. }
            | Error::Rejected { .. }
            | Error::Exhausted
    );
    assert!(expected, "{error:?}");
}
