//! How long does a transfer between two processes take, from the best to the worst: p50 to p99.9?
//!
//! Each round measures four times, one after the other, so that whatever else the machine does
//! falls on all of them alike:
//!
//! - `base`: the text of the metadata over the control channel, and a byte back. Both ends look at
//!   the channel without pause. This is what the next two spend on telling the receiver.
//! - `bare socket`: the same text, then the bytes over a plain loopback TCP stream, asked for and
//!   acknowledged by one byte each: what no transfer over TCP can do without.
//! - `relay`: `put`, the text, the receiver's `get_into`, until `wait` gives the sender its slot back.
//!   The slot was filled before.
//! - `get_into`: of that, what the receiver's own call takes, by the receiver's clock.
//!
//! And last: the processor time that two idle relays take.

mod common;

use std::{
    env, fs, io, thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use mooncake_relay::{Relay, Slot, Tensor};
use rustix::time::{ClockId, clock_gettime};

use crate::common::{
    embedded,
    receiver::{self, Receiver, Times, allowed, histogram, percentiles, pin},
    size_name,
};

/// Bytes, and how often in each run.
const SIZES: [(usize, usize); 5] =
    [(64, 2000), (4 << 10, 2000), (64 << 10, 2000), (1 << 20, 300), (64 << 20, 15)];
const LARGEST: usize = 64 << 20;
const RUNS: usize = 5;
const IDLE: Duration = Duration::from_secs(10);

/// What is measured, in the order of the table.
const ROWS: [&str; 4] = ["base", "bare socket", "relay", "get_into"];

fn main() -> io::Result<()> {
    if receiver::serve_if_asked() {
        return Ok(());
    }
    // As criterion does: only `cargo bench` measures, anything else tries it out.
    let measures = env::args().any(|arg| arg == "--bench");
    println!("load average {}", load()?);
    let cores = allowed();
    let run = |cores| thread::spawn(move || compare(cores, measures)).join().expect("no panic");
    run(None)?;
    match cores[..] {
        [sender, receiver, ..] => run(Some([sender, receiver]))?,
        _ => println!("one core: nothing to pin"),
    }
    idle(if measures { IDLE } else { Duration::from_millis(20) });
    println!("load average {}", load()?);
    Ok(())
}

/// All sizes, on a thread of its own, which it may pin.
fn compare(cores: Option<[usize; 2]>, measures: bool) -> io::Result<()> {
    let relay = embedded(LARGEST);
    let mut receiver = Receiver::start(LARGEST, cores.map(|[_, receiver]| receiver))?;
    match cores {
        Some([own, other]) => {
            pin(own); // after the relay, whose threads run where they like
            println!("\nthe sender's thread on core {own}, the receiver's on core {other}");
        }
        None => println!("\nunpinned"),
    }
    println!("{:8} {:12} {:>7}  p50 of {RUNS} runs, µs         all runs, µs", "", "", "");
    println!(
        "{:8} {:12} {:>7} {:>9} {:>19}  {:>9} {:>9} {:>9} {:>9}",
        "bytes", "what", "rounds", "median", "lowest–highest", "p90", "p99", "p99.9", "max"
    );
    for (size, rounds) in SIZES {
        let (runs, rounds) = if measures { (RUNS, rounds) } else { (1, 2) };
        let mut all = [(); 3].map(|()| histogram());
        let mut each: [Vec<Times>; 4] = Default::default();
        let mut slot = Some(filled(&relay, size));
        for _ in 0..runs {
            let mut run = [(); 3].map(|()| histogram());
            // The first tenth of a run warms up.
            for round in 0..rounds + rounds / 10 {
                if round == rounds / 10 {
                    run.iter_mut().for_each(Histogram::reset);
                    receiver.times()?;
                }
                let times = transfer(&relay, &mut receiver, &mut slot)?;
                for (histogram, time) in run.iter_mut().zip(times) {
                    histogram.saturating_record(time.as_nanos() as u64);
                }
            }
            for (n, run) in run.iter().enumerate() {
                all[n].add(run).expect("of one range");
                each[n].push(percentiles(run));
            }
            each[3].push(receiver.times()?);
        }
        for (n, what) in ROWS.into_iter().enumerate() {
            // Of the receiver's histograms only the percentiles of each run come back.
            let tail = all.get(n).map_or_else(|| worst(&each[n]), percentiles);
            print(size, what, rounds * runs, &each[n], tail);
        }
    }
    Ok(())
}

/// `base`, `bare socket` and `relay`, once.
fn transfer(
    relay: &Relay,
    receiver: &mut Receiver,
    slot: &mut Option<Slot>,
) -> io::Result<[Duration; 3]> {
    let own = slot.take().expect("the last round gave it back");
    let text = ".".repeat(480); // as long as metadata is
    let begun = Instant::now();
    receiver.base(&text)?;
    let base = begun.elapsed();

    let begun = Instant::now();
    receiver.bare(&text, &own)?;
    let bare = begun.elapsed();

    let tensor = Tensor::bytes(own.len());
    let begun = Instant::now();
    let (metadata, token) = relay.put(own, tensor).map_err(io::Error::other)?;
    receiver.get(&metadata)?;
    *slot = Some(token.wait().map_err(io::Error::other)?);
    Ok([base, bare, begun.elapsed()])
}

fn filled(relay: &Relay, size: usize) -> Slot {
    let mut slot = relay.try_acquire(size).expect("its only slot is free");
    slot.fill(7);
    slot
}

/// Percentile by percentile.
fn worst(runs: &[Times]) -> Times {
    std::array::from_fn(|n| runs.iter().map(|run| run[n]).max().unwrap_or(0))
}

fn print(size: usize, what: &str, rounds: usize, runs: &[Times], tail: Times) {
    let micros = |nanos: u64| nanos as f64 / 1e3;
    let mut medians: Vec<_> = runs.iter().map(|run| micros(run[0])).collect();
    medians.sort_by(f64::total_cmp);
    let spread = format!("{:.1}–{:.1}", medians[0], medians[medians.len() - 1]);
    let [_, p90, p99, p999, max] = tail.map(micros);
    println!(
        "{:8} {what:12} {rounds:>7} {:>9.1} {spread:>19}  {p90:>9.1} {p99:>9.1} {p999:>9.1} {max:>9.1}",
        size_name(size),
        medians[medians.len() / 2],
    );
}

/// Two relays with nothing to do, by this process's clock of processor time.
fn idle(time: Duration) {
    let relays = [(); 2].map(|()| embedded(1 << 20));
    thread::sleep(Duration::from_millis(10)); // let them lie down
    let used = || {
        let now = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let before = used();
    thread::sleep(time);
    let used = used() - before;
    let share = 100.0 * used.as_secs_f64() / time.as_secs_f64();
    println!(
        "\n{} idle relays over {time:?}: {used:?} of processor time, {share:.3} % of a core",
        relays.len()
    );
}

fn load() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/loadavg")?.trim().to_owned())
}
