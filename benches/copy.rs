//! What does a copy into a slot cost, and out of it again, by size: from where on does a second thread pay,
//! and where on stores that go past the caches?
//!
//! `base` is one thread that copies in the plain way, and `relay` is what a relay chooses. Each round
//! makes every copy once untimed, so that the caches are as that way leaves them, and once timed; the
//! ways take turns, so that whatever else the machine does falls on all of them alike.
//!
//! And what does it cost that slots go round: a thread copies into one after the other, and a thread on
//! another core copies out of it, both looking without a pause for their turn.

mod common;

use std::{
    env, fs,
    hint::black_box,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::sync_channel,
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, InProcessEngine, Relay, Slot, internal::Copier};

use crate::common::{
    in_process,
    receiver::{allowed, pin},
    size_name,
};

const SIZES: [usize; 10] = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    64 << 20,
];
const LARGEST: usize = SIZES[SIZES.len() - 1];
/// Smaller copies are timed so many bytes at a time.
const BATCH: usize = 1 << 20;
/// A hand-over to another thread is lost in copies of this size.
const HANDED_OVER: usize = 1 << 20;
const NEVER: usize = usize::MAX;

struct Ground {
    bytes: Vec<u8>,
    slot: Slot,
    dest: Vec<u8>,
}

/// Sizes and numbers of slots that go round.
const ROUND_SIZES: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];
const ROUND_SLOTS: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// So many bytes, in one way, so often; and how long once took.
type Path = fn(&mut Ground, &Copier, usize, usize) -> Duration;

fn main() -> io::Result<()> {
    // As criterion does: only `cargo bench` measures, anything else tries it out.
    let measures = env::args().any(|arg| arg == "--bench");
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim_end());
    let relay = in_process("copy", LARGEST);
    let mut ground = Ground {
        bytes: vec![7; LARGEST],
        // Warm, as a relay makes it.
        slot: relay.try_acquire(LARGEST).expect("its only slot is free"),
        dest: vec![0; LARGEST],
    };
    let cores = thread::available_parallelism()?.get();
    let ways = [
        ("base", Copier::with_thresholds(1, NEVER, NEVER)),
        ("streaming", Copier::with_thresholds(1, NEVER, 0)),
        ("shared", Copier::with_thresholds(cores, 0, NEVER)),
        ("both", Copier::with_thresholds(cores, 0, 0)),
        ("relay", Copier::new(cores)),
    ];
    let paths: [(&str, usize, Path); 3] = [
        ("into a slot", 0, into),
        ("into a slot and out, by one thread", 0, into_and_out),
        ("into a slot, and out by another thread", HANDED_OVER, out_by_another),
    ];
    for (path, least, run) in paths {
        println!("\n{path}, in µs: the least and the median\n\n| bytes | {} |", names(&ways));
        println!("|---|{}", "--:|".repeat(ways.len()));
        for size in SIZES.into_iter().filter(|&size| size >= least) {
            let rounds = if measures { (1 << 29) / size } else { 1 };
            let mut times = vec![Vec::new(); ways.len()];
            for _ in 0..rounds.clamp(1, 60) {
                for ((_, copier), times) in ways.iter().zip(&mut times) {
                    let repeats = (BATCH / size).max(1);
                    run(&mut ground, copier, size, repeats);
                    times.push(run(&mut ground, copier, size, repeats));
                }
            }
            let cells = times.iter_mut().map(|times| {
                times.sort();
                let [least, median] =
                    [0, times.len() / 2].map(|n| times[n].as_nanos() as f64 / 1000.0);
                format!(" {least:.2}, {median:.2} |")
            });
            println!("| {} |{}", size_name(size), cells.collect::<String>());
        }
    }
    go_round(measures);
    println!("\nload average {}", fs::read_to_string("/proc/loadavg")?.trim_end());
    Ok(())
}

fn go_round(measures: bool) {
    if allowed().len() < 2 {
        return println!("\nslots that go round: not measured, since it takes two cores");
    }
    let (most, largest) = (ROUND_SLOTS[ROUND_SLOTS.len() - 1], ROUND_SIZES[ROUND_SIZES.len() - 1]);
    let config = Config::default().with_credits(most as u32).with_slot_size(largest);
    let engine = InProcessEngine::new("round").expect("each name is used once");
    let relay = Relay::new(Arc::new(engine), &config).expect("the memory is there");
    let slot = || Mutex::new(relay.try_acquire(largest).expect("all are free"));
    let slots: Vec<_> = (0..most).map(|_| slot()).collect();
    println!("\nslots that go round, in µs: the median copy in + the median copy out\n");
    let heads = ROUND_SLOTS.map(|count| count.to_string()).join(" | ");
    println!("| bytes | {heads} |\n|---|{}", "--:|".repeat(ROUND_SLOTS.len()));
    for size in ROUND_SIZES {
        let rounds = if measures { ((1 << 28) / size).clamp(100, 3000) } else { 1 };
        let mut times = ROUND_SLOTS.map(|_| Vec::new());
        for _ in 0..if measures { 5 } else { 1 } {
            for (count, times) in ROUND_SLOTS.into_iter().zip(&mut times) {
                times.push(round(&slots[..count], size, rounds));
            }
        }
        let cells = times.iter_mut().map(|times| {
            times.sort_by_key(|[put, get]| *put + *get);
            let [put, get] = times[times.len() / 2].map(|time| time.as_nanos() as f64 / 1000.0);
            format!(" {put:.2} + {get:.2} |")
        });
        println!("| {} |{}", size_name(size), cells.collect::<String>());
    }
}

/// Copies into each slot in turn on one core, and out of it on another: the median of each.
fn round(slots: &[Mutex<Slot>], size: usize, rounds: usize) -> [Duration; 2] {
    let (cores, turn) = (allowed(), &AtomicUsize::new(0));
    let wait = |until: usize| {
        while turn.load(Ordering::Acquire) != until {
            std::hint::spin_loop();
        }
    };
    let times = |of: usize, mut copy: Box<dyn FnMut(&mut Slot) + '_>| {
        pin(cores[of]);
        let mut times = Vec::with_capacity(rounds);
        for number in 0..rounds {
            wait(2 * number + of);
            let mut slot = slots[number % slots.len()].lock().expect("nobody panics");
            let begun = Instant::now();
            copy(&mut slot);
            times.push(begun.elapsed());
            drop(slot);
            turn.store(2 * number + of + 1, Ordering::Release);
        }
        times.sort();
        times[rounds / 2]
    };
    let (bytes, mut dest) = (vec![7_u8; size], vec![0; size]);
    thread::scope(|s| {
        let put = s.spawn(|| {
            let write = |slot: &mut Slot| slot[..size].copy_from_slice(black_box(&bytes));
            times(0, Box::new(write))
        });
        let get = s.spawn(|| {
            let read = |slot: &mut Slot| black_box(&mut dest).copy_from_slice(&slot[..size]);
            times(1, Box::new(read))
        });
        [put, get].map(|side| side.join().expect("it ends"))
    })
}

fn into(ground: &mut Ground, copier: &Copier, size: usize, repeats: usize) -> Duration {
    let begun = Instant::now();
    for _ in 0..repeats {
        copier.copy_slice(black_box(&ground.bytes[..size]), &mut ground.slot);
    }
    begun.elapsed() / repeats as u32
}

fn into_and_out(ground: &mut Ground, copier: &Copier, size: usize, repeats: usize) -> Duration {
    let begun = Instant::now();
    for _ in 0..repeats {
        copier.copy_slice(black_box(&ground.bytes[..size]), &mut ground.slot);
        copier.copy_slice(black_box(&ground.slot[..size]), &mut ground.dest);
    }
    begun.elapsed() / repeats as u32
}

/// The reader sleeps until it is its turn, so that its core is free for whoever helps.
fn out_by_another(ground: &mut Ground, copier: &Copier, size: usize, _: usize) -> Duration {
    let (to_reader, turn) = sync_channel::<&[u8]>(0);
    let (to_writer, done) = sync_channel(0);
    let Ground { bytes, slot, dest } = ground;
    thread::scope(|s| {
        s.spawn(move || {
            for slot in turn {
                copier.copy_slice(slot, dest);
                to_writer.send(()).expect("the writer waits");
            }
        });
        let begun = Instant::now();
        copier.copy_slice(black_box(&bytes[..size]), slot);
        to_reader.send(&slot[..size]).expect("the reader waits");
        done.recv().expect("the reader answers");
        let took = begun.elapsed();
        drop(to_reader);
        took
    })
}

fn names(ways: &[(&str, Copier)]) -> String {
    ways.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" | ")
}
