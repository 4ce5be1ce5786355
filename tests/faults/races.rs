//! J and L: one core for everything, many threads at once, and one slot over and over.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Error, Metadata, Token};
use parking_lot::Mutex;
use rustix::{
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};
use serde_json::json;

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
    },
    on::{AtRest, Lack, On, cases, in_full},
};

cases! {
    Any:
        j4_a_thousand_round_trips_on_one_core_need_little_of_it = 120,
        l4_four_threads_read_four_peers_while_relays_come_and_go = 300,
        l6_a_slot_that_is_used_again_and_again_is_never_mistaken = 300;
    Processes: j4_two_processes_on_one_core_hand_it_to_each_other = 120;
}

const PATIENCE: Duration = Duration::from_secs(20);

fn small() -> Config {
    Config::default().with_slot_size(4096).with_quarantine(Duration::from_millis(50))
}

/// From here on this thread, and all that come of it, run on one core.
fn on_one_core() {
    let allowed = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).unwrap();
}

fn j4_a_thousand_round_trips_on_one_core_need_little_of_it(on: &On) {
    on_one_core();
    let (a, b) = on.pair(&small());
    a.works_with(&b);
    let rounds = on.rounds(1000);
    let before = computed();
    let (puts, ended) = unbounded();
    let (gets, got) = unbounded();
    for round in 0..rounds as u32 {
        let (metadata, token) = a.sends(&round.to_le_bytes());
        let get = b.get(&metadata).unwrap();
        let (slot, back) = if round % 2 == 0 {
            (get.wait(), token.wait())
        } else {
            // Nobody waits who would do the work: two threads of the relays have to.
            get.attach(&gets, 0);
            token.attach(&puts, 0);
            (got.recv().unwrap().result, ended.recv().unwrap().result)
        };
        assert_eq!(slot.unwrap()[..], round.to_le_bytes());
        drop(back.unwrap());
    }
    needs_little(rounds, computed() - before);
}

fn j4_two_processes_on_one_core_hand_it_to_each_other(on: &On) {
    on_one_core(); // and so are its children
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    a.works_with(&b);
    let rounds = on.rounds(400);
    let spent = || [&a, &b].map(|peer| computed_by(peer.pid())).into_iter().sum::<Duration>();
    let before = spent();
    for round in 0..rounds {
        let sent = a.put(json!({"size": 8, "seed": round}));
        let waits = a.send(json!({"cmd": "wait", "of": sent.tag}));
        assert_eq!(b.get(&sent.metadata)["sha256"], *sent.sha256);
        assert_eq!(a.answer(waits)["ok"], true);
    }
    needs_little(rounds, spent() - before);
}

/// Whoever spins on the only core until its slice is over computes for 6 ms and more a round trip.
#[track_caller]
fn needs_little(rounds: usize, spent: Duration) {
    println!("{rounds} round trips computed for {spent:?}");
    assert!(spent < Duration::from_millis(4 * rounds as u64), "{spent:?} for {rounds}");
}

/// What another process has, in the system's ticks of 10 ms.
fn computed_by(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    Duration::from_millis(10 * ticks)
}

/// How much time the process has computed so far.
fn computed() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

fn l4_four_threads_read_four_peers_while_relays_come_and_go(on: &On) {
    const MOST: usize = 64 << 10;
    let time = Duration::from_secs(if in_full() { 60 } else { 2 });
    let config = small().with_slot_size(MOST).with_transfer_threads(2).with_credits(4);
    let senders: [AtRest; 4] = std::array::from_fn(|_| on.relay(&config));
    let receiver = on.relay(&config);
    let pattern = Pattern::new(&mut Random::new(0x14), MOST);
    let (over, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|s| {
        for (n, sender) in senders.iter().enumerate() {
            let (receiver, pattern, over, rounds) = (&receiver, &pattern, &over, &rounds);
            s.spawn(move || {
                let mut random = Random::new(n as u64 + 1);
                while !over.load(Ordering::Relaxed) {
                    let round = rounds.fetch_add(1, Ordering::Relaxed);
                    let expected = pattern.of(round, random.size(MOST as u64) as usize);
                    let (metadata, token) = sender.sends(expected);
                    assert!(receiver.get(&metadata).unwrap().wait().unwrap()[..] == *expected);
                    assert!(token.wait().unwrap()[..] == *expected);
                }
            });
        }
        let begun = Instant::now();
        let mut came = 0;
        while begun.elapsed() < time {
            let guest = on.relay(&small());
            guest.works_with(&receiver);
            receiver.works_with(&guest);
            came += 1;
        }
        over.store(true, Ordering::Relaxed);
        assert!(came > 0);
        println!("{came} relays came and went");
    });
    println!("{} transfers", rounds.into_inner());
}

/// What a reader finds who asks before, while and after the only slot is written.
fn l6_a_slot_that_is_used_again_and_again_is_never_mistaken(on: &On) {
    const LEN: usize = 4096;
    let rounds = on.full_or(10_000, 1000);
    let (a, b) = on.pair(&small().with_credits(1));
    let pattern = Pattern::new(&mut Random::new(0x16), LEN);
    let newest = Mutex::new(None::<(usize, Metadata)>);
    let (over, early) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|s| {
        let (a, b, pattern, newest, over, early) = (&a, &b, &pattern, &newest, &over, &early);
        s.spawn(move || {
            for round in 0..rounds {
                let (metadata, token) = a.sends(pattern.of(round, LEN));
                *newest.lock() = Some((round, metadata));
                drop(token.wait().unwrap()); // by the one reader there is
            }
            over.store(true, Ordering::Relaxed);
        });
        s.spawn(move || {
            let (mut canary, mut last) = (Canary::new(LEN), None);
            while !over.load(Ordering::Relaxed) {
                let Some((round, metadata)) = newest.lock().clone() else { continue };
                if last == Some(round) {
                    // Read already, and its slot is being written again: no byte of that.
                    match b.get(&metadata).and_then(Token::wait) {
                        // Its sender has not heard yet.
                        Ok(slot) => assert!(slot[..] == *pattern.of(round, LEN)),
                        Err(Error::Stale { .. }) => {}
                        Err(Error::Rejected { .. }) if on.lacks(Lack::Identity) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                    early.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                b.get_into(&metadata, canary.dest(), PATIENCE)
                    .expect("it is open, and nobody else's");
                canary.holds(pattern.of(round, LEN));
                last = Some(round);
            }
        });
    });
    println!("{} asked too early", early.into_inner());
    assert_eq!(a.health().counters.relay.puts_acknowledged, rounds as u64);
}
