//! What does a copy into a slot cost, and out of it again, by size: from where on does a second thread pay,
//! and where on stores that go past the caches?
//!
//! `base` is one thread that copies in the plain way, and `relay` is what a relay chooses. Each round
//! makes every copy once untimed, so that the caches are as that way leaves them, and once timed; the
//! ways take turns, so that whatever else the machine does falls on all of them alike.

mod common;

use std::{
    env, fs,
    hint::black_box,
    io,
    sync::mpsc::sync_channel,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Slot, internal::Copier};

use crate::common::{in_process, size_name};

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
    println!("\nload average {}", fs::read_to_string("/proc/loadavg")?.trim_end());
    Ok(())
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
