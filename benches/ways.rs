//! What does a transfer between two processes take by each way: shared memory, TCP, the real Mooncake
//! engine?
//!
//! A round is `put_bytes`, the receiver's `get_into`, and the sender's token: both copies, with one
//! transfer of a thread under way. The metadata goes as text through memory that both processes
//! share. `p50` and `p99` are of `put_bytes` and, from the begin of the receiver's get on, of what
//! follows; `whole` has the metadata's way too, with its encoding and decoding. A way runs a block of
//! rounds, then the next one does, so that each is in its stride; `runs` times, in turn.
//!
//! - `memcpy twice`: plain copies of that size, one after the other: the base.
//! - `view`: `put` of a slot that is filled already, and a view that is dropped at once.
//! - `a word`, `the text`: one word there and one back through shared memory; the same with metadata
//!   encoded here and decoded there. Between sleepers each is a futex wake.
//! - `parked`: 300 µs without work before each round, so that all have gone to sleep.
//!
//! The receiver's counters say at the end which way each byte came.

mod common;

use std::{env, fs, hint::black_box, io, sync::Barrier, thread, time::Duration};

use hdrhistogram::Histogram;
use mooncake_relay::{Metadata, Tensor};

use crate::common::{
    PATIENCE,
    mailbox::{LANES, Lane},
    receiver::{allowed, histogram, pin},
    size_name,
    ways::{self, GET, HOP, LARGEST, Pair, TEXT, VIEW, Way, clock},
};

/// Bytes, and how many rounds a run.
const SIZES: [(usize, usize); 6] =
    [(64, 1000), (4 << 10, 1000), (64 << 10, 600), (1 << 20, 160), (16 << 20, 16), (64 << 20, 8)];
const RUNS: usize = 3;
const PARKED: usize = 4 << 10;
const PAUSE: Duration = Duration::from_micros(300);

fn main() -> io::Result<()> {
    if ways::serve_if_asked()? {
        return Ok(());
    }
    // As criterion does: only `cargo bench` measures, anything else tries it out.
    let measures = env::args().any(|arg| arg == "--bench");
    let load = || fs::read_to_string("/proc/loadavg");
    println!("load average {}", load()?.trim());
    let pair = Pair::start()?;
    let runs = if measures { RUNS } else { 1 };
    let cores = allowed();
    if let [own, other, ..] = cores[..] {
        println!(
            "\none at a time, the sender's thread on core {own}, the receiver's on core {other}, µs"
        );
        header();
        pair.pin_other(Some(other));
        for (size, rounds) in SIZES {
            let rounds = if measures { rounds } else { 2 };
            let pause = Duration::ZERO;
            table(&pair, Case { size, rounds, threads: 1, pause, core: Some(own) }, runs);
        }
        pair.pin_other(None);
    }
    for threads in [1, LANES] {
        println!("\n{threads} at a time, unpinned, p50 of {runs} runs, µs");
        header();
        for (size, rounds) in SIZES {
            let rounds = if measures { (rounds / threads).max(4) } else { 2 };
            table(&pair, Case { size, rounds, threads, pause: Duration::ZERO, core: None }, runs);
        }
    }
    println!("\nparked: {PAUSE:?} of nothing before each, µs");
    header();
    let rounds = if measures { 600 } else { 2 };
    table(&pair, Case { size: PARKED, rounds, threads: 1, pause: PAUSE, core: None }, runs);
    pair.end()?;
    println!("load average {}", load()?.trim());
    Ok(())
}

#[derive(Clone, Copy)]
struct Case {
    size: usize,
    rounds: usize,
    threads: usize,
    pause: Duration,
    /// Of the sender's thread.
    core: Option<usize>,
}

#[derive(Clone, Copy)]
enum Row<'a> {
    Copies,
    Ask(&'static str, u64),
    Get(&'a Way),
    View(&'a Way),
}

impl Row<'_> {
    fn name(&self) -> String {
        match self {
            Self::Copies => "memcpy twice".to_owned(),
            Self::Ask(name, _) => (*name).to_owned(),
            Self::Get(way) => way.name.to_owned(),
            Self::View(way) => format!("view, {}", way.name),
        }
    }
}

/// What one thread, or all of them, measured in a run.
struct Seen {
    transfer: Histogram<u64>,
    put: Histogram<u64>,
    whole: Histogram<u64>,
    from: u64,
    to: u64,
}

impl Default for Seen {
    fn default() -> Self {
        let [transfer, put, whole] = [(); 3].map(|()| histogram());
        Self { transfer, put, whole, from: u64::MAX, to: 0 }
    }
}

/// All rows of one size.
fn table(pair: &Pair, case: Case, runs: usize) {
    let mut rows = vec![Row::Copies, Row::Ask("a word", HOP), Row::Ask("the text", TEXT)];
    for way in pair.ways.iter().filter(|way| way.holds >= case.size && way.fits(case.pause)) {
        rows.push(Row::Get(way));
        if way.name.starts_with("same host") {
            rows.push(Row::View(way));
        }
    }
    let mut measured: Vec<Vec<(Seen, f64)>> = rows.iter().map(|_| Vec::new()).collect();
    for _ in 0..runs {
        for (row, measured) in rows.iter().zip(&mut measured) {
            measured.push(block(pair, *row, case));
        }
    }
    for (row, runs) in rows.iter().zip(&measured) {
        print(*row, case, runs);
    }
}

/// One row, once: all threads begin together.
fn block(pair: &Pair, row: Row<'_>, case: Case) -> (Seen, f64) {
    let start = Barrier::new(case.threads);
    thread::scope(|scope| {
        let work = |lane| {
            let start = &start;
            move || lane_of(pair, lane, row, case, start)
        };
        let threads: Vec<_> = (0..case.threads).map(|lane| scope.spawn(work(lane))).collect();
        let mut all = Seen::default();
        for thread in threads {
            let seen = thread.join().expect("no panic");
            all.transfer.add(seen.transfer).expect("of one range");
            all.put.add(seen.put).expect("of one range");
            all.whole.add(seen.whole).expect("of one range");
            all.from = all.from.min(seen.from);
            all.to = all.to.max(seen.to);
        }
        let bytes = (case.size * case.rounds * case.threads) as f64;
        let rate = bytes / (all.to - all.from) as f64;
        (all, rate)
    })
}

fn lane_of(pair: &Pair, number: usize, row: Row<'_>, case: Case, start: &Barrier) -> Seen {
    if let Some(core) = case.core {
        pin(core);
    }
    let lane = &pair.lanes[number];
    let mut seen = Seen::default();
    let bytes = vec![7; case.size];
    let mut spare = [vec![1; case.size], vec![2; case.size]];
    let mut once = || {
        if !case.pause.is_zero() {
            thread::sleep(case.pause);
        }
        match row {
            Row::Copies => copies(&bytes, &mut spare),
            Row::Ask(_, what) => pair.ask(number, lane, what),
            Row::Get(way) => transfer(pair, number, way, &bytes, GET),
            Row::View(way) => transfer(pair, number, way, &bytes, VIEW),
        }
    };
    (0..(case.rounds / 10).max(2)).for_each(|_| _ = once()); // warms up
    start.wait();
    seen.from = clock();
    for _ in 0..case.rounds {
        let [put, transfer, whole] = once();
        seen.put.saturating_record(put);
        seen.transfer.saturating_record(transfer);
        seen.whole.saturating_record(whole);
    }
    seen.to = clock();
    seen
}

fn copies(bytes: &[u8], spare: &mut [Vec<u8>; 2]) -> [u64; 3] {
    let begun = clock();
    let [slot, dest] = spare;
    black_box(&mut *slot).copy_from_slice(black_box(bytes));
    black_box(&mut *dest).copy_from_slice(black_box(&*slot));
    black_box(&*dest);
    [clock() - begun; 3]
}

/// Nanoseconds of the put, of the transfer, of all.
fn transfer(pair: &Pair, number: usize, way: &Way, bytes: &[u8], what: u64) -> [u64; 3] {
    let lane: &Lane = &pair.lanes[number];
    let tensor = Tensor::bytes(bytes.len());
    let slot = (what == VIEW)
        .then(|| way.relay.acquire(bytes.len(), PATIENCE).expect("one for each thread"));
    let begun = clock();
    let (metadata, token): (Metadata, _) = match slot {
        Some(slot) => way.relay.put(slot, tensor),
        None => way.relay.put_bytes(bytes, tensor),
    }
    .expect("the relay is open");
    let put = clock() - begun;
    pair.send(number, lane, way.ask(what), &metadata.to_string());
    let slot = token.wait().expect("the receiver takes it");
    let now = clock();
    drop(slot);
    // It was written before the notification that ended the token.
    let taken = lane.begun.load(std::sync::atomic::Ordering::Acquire);
    [put, put + (now - taken), now - begun]
}

fn header() {
    println!(
        "{:8} {:22} {:>6} {:>10} {:>21} {:>10} {:>10} {:>10} {:>7}",
        "bytes", "way", "rounds", "p50", "lowest–highest", "p99", "of it put", "whole p50", "GB/s"
    );
}

fn print(row: Row<'_>, case: Case, runs: &[(Seen, f64)]) {
    let at = |of: fn(&Seen) -> &Histogram<u64>, part| {
        let value = |(seen, _): &(Seen, f64)| of(seen).value_at_percentile(part) as f64 / 1e3;
        sorted(runs.iter().map(value))
    };
    let middle = |values: &[f64]| values[values.len() / 2];
    let p50 = at(|seen| &seen.transfer, 50.0);
    let rate = match row {
        Row::Copies | Row::Get(_) => {
            format!("{:.2}", middle(&sorted(runs.iter().map(|(_, rate)| *rate))))
        }
        Row::Ask(..) | Row::View(_) => "–".to_owned(), // no bytes move
    };
    println!(
        "{:8} {:22} {:>6} {:>10.2} {:>21} {:>10.1} {:>10.2} {:>10.2} {rate:>7}",
        size_name(case.size),
        row.name(),
        case.rounds * case.threads * runs.len(),
        middle(&p50),
        format!("{:.2}–{:.2}", p50[0], p50[p50.len() - 1]),
        middle(&at(|seen| &seen.transfer, 99.0)),
        middle(&at(|seen| &seen.put, 50.0)),
        middle(&at(|seen| &seen.whole, 50.0)),
    );
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

const _: () = assert!(LARGEST == SIZES[SIZES.len() - 1].0);
