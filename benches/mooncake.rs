//! What does the relay add to the calls of the real Mooncake engine?
//!
//! The other process has a relay over that engine and puts; here each round reads what it has put
//! twice, in turns, so that whatever else the machine does falls on both alike:
//!
//! - `bare`, the base case: the C calls in a loop, by an engine of this process's own: a batch, its
//!   status without a pause until it is completed, the batch freed; and then the call that notifies.
//! - `relay`: `get` and `wait` on this thread, less the stamp's read, which has a row of its own.
//!
//! `read` and `notify` are the two parts of each; the relay's are timed around the engine, so that
//! what is left of `relay` is the relay itself. `stamp` is the read of eight bytes that the relay does
//! between them; the bare calls do it, too, or the two would notify in different states of the machine.
//!
//! Wants the engine (README.md says how to install it); says so and ends without it.

#[path = "common/bare.rs"]
mod bare;
mod common;
#[path = "common/timed.rs"]
mod timed;

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use mooncake_relay::{Config, Error, Metadata, MooncakeConfig, MooncakeEngine, Relay, Tensor};

use crate::{
    bare::Bare,
    common::{PATIENCE, size_name},
    timed::Timed,
};

/// Bytes, and how often in each run.
const SIZES: [(usize, usize); 4] =
    [(4 << 10, 1000), (64 << 10, 1000), (1 << 20, 300), (64 << 20, 20)];
const LARGEST: usize = 64 << 20;
const RUNS: usize = 3;

/// The table's rows, in the order of [`Round`].
const ROWS: [&str; 8] = [
    "bare",
    "  its read",
    "  its notify",
    "relay, less the stamp",
    "  its read",
    "  its notify",
    "stamp, bare",
    "stamp, relay",
];

/// What one round took, in nanoseconds.
type Round = [u64; ROWS.len()];

fn main() -> io::Result<()> {
    if env::args().nth(1).as_deref() == Some("--sender") {
        return put();
    }
    // As criterion does: only `cargo bench` measures, anything else tries it out.
    let measures = env::args().any(|arg| arg == "--bench");
    let engine = match MooncakeEngine::open(&MooncakeConfig::default()) {
        Ok(engine) => engine,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    let mut sender = Sender::start()?;
    let timed = Arc::new(Timed::over(engine));
    let relay = Relay::new(Arc::clone(&timed) as Arc<_>, &config()).map_err(io::Error::other)?;
    let bare = Bare::open(LARGEST, Some(&sender.session_id));
    println!(
        "{:8} {:22} {:>6} {:>10} {:>19} {:>10} {:>10}",
        "bytes", "what", "rounds", "p50, µs", "lowest–highest", "p90", "p99"
    );
    for (size, rounds) in SIZES {
        let (runs, rounds) = if measures { (RUNS, rounds) } else { (1, 2) };
        let runs: Vec<Vec<Round>> = (0..runs)
            .map(|_| {
                // The first tenth warms up.
                let warm_up = rounds / 10;
                let all = (0..rounds + warm_up).map(|at| {
                    let metadata = sender.put(size)?;
                    round(at % 2 == 0, &relay, &timed, &bare, &metadata)
                });
                Ok(all.collect::<io::Result<Vec<_>>>()?.split_off(warm_up))
            })
            .collect::<io::Result<_>>()?;
        print(size, &runs);
    }
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}

fn config() -> Config {
    Config::default().with_credits(1).with_slot_size(LARGEST)
}

/// One put, read by both.
fn round(
    bare_first: bool,
    relay: &Relay,
    timed: &Timed,
    bare: &Bare,
    metadata: &Metadata,
) -> io::Result<Round> {
    let text: serde_json::Value = serde_json::from_str(&metadata.to_string())?;
    let remote = text["mooncake"]["buffer_ptr"].as_u64().expect("an address");
    let mut times = [0; ROWS.len()];
    let by_bare_calls = |times: &mut Round| {
        // In the relay's order, so that the two meet the machine in the same state.
        let begun = Instant::now();
        bare.read(remote, metadata.size());
        let read = nanos(begun);
        let begun = Instant::now();
        bare.read(remote, 8);
        let stamp = nanos(begun);
        let begun = Instant::now();
        bare.notify();
        let all = read + nanos(begun);
        (times[0], times[1], times[2], times[6]) = (all, read, all - read, stamp);
    };
    if bare_first {
        by_bare_calls(&mut times);
    }
    let begun = Instant::now();
    let got = relay.get(metadata).and_then(|token| token.wait()).map_err(io::Error::other)?;
    let all = nanos(begun);
    drop(got);
    let part = |which: usize| timed.nanos[which].load(Ordering::Relaxed);
    (times[3], times[4], times[5], times[7]) = (all - part(1), part(0), part(2), part(1));
    if !bare_first {
        by_bare_calls(&mut times);
    }
    Ok(times)
}

fn nanos(begun: Instant) -> u64 {
    begun.elapsed().as_nanos() as u64
}

fn print(size: usize, runs: &[Vec<Round>]) {
    for (row, what) in ROWS.into_iter().enumerate() {
        let percentile = |times: &mut Vec<u64>, part: usize| {
            times.sort_unstable();
            times[(times.len() * part / 100).min(times.len() - 1)] as f64 / 1e3
        };
        let column = |run: &Vec<Round>| run.iter().map(|round| round[row]).collect::<Vec<_>>();
        let mut medians: Vec<_> = runs.iter().map(|run| percentile(&mut column(run), 50)).collect();
        medians.sort_by(f64::total_cmp);
        let mut all: Vec<_> = runs.iter().flat_map(column).collect();
        let (p90, p99) = (percentile(&mut all, 90), percentile(&mut all, 99));
        let spread = format!("{:.1}–{:.1}", medians[0], medians[medians.len() - 1]);
        let (size, count, median) = (size_name(size), all.len(), medians[medians.len() / 2]);
        println!(
            "{size:8} {what:22} {count:>6} {median:>10.1} {spread:>19} {p90:>10.1} {p99:>10.1}"
        );
    }
}

/// The process that puts, for each line with a length, and prints the metadata.
struct Sender {
    child: Child,
    to: Option<ChildStdin>,
    from: Lines<BufReader<ChildStdout>>,
    session_id: String,
}

impl Sender {
    fn start() -> io::Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .arg("--sender")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (to, from) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let mut from = BufReader::new(from).lines();
        let session_id = from.next().expect("a first line")?;
        Ok(Self { child, to, from, session_id })
    }

    fn put(&mut self, size: usize) -> io::Result<Metadata> {
        writeln!(self.to.as_ref().expect("open until it is dropped"), "{size}")?;
        let line = self.from.next().expect("the sender's side lives")?;
        line.parse().map_err(|error: Error| io::Error::other(error))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        drop(self.to.take());
        let _ = self.child.wait();
    }
}

fn put() -> io::Result<()> {
    let engine = MooncakeEngine::open(&MooncakeConfig::default()).map_err(io::Error::other)?;
    let relay = Relay::new(Arc::new(engine), &config()).map_err(io::Error::other)?;
    println!("{}", relay.health().session_id);
    let mut last = None;
    for line in io::stdin().lines() {
        let size = line?.parse().expect("a length");
        if let Some(token) = last.take() {
            mooncake_relay::Token::wait(token).map_err(io::Error::other)?;
        }
        let slot = relay.acquire(size, PATIENCE).map_err(io::Error::other)?;
        let (metadata, token) = relay.put(slot, Tensor::bytes(size)).map_err(io::Error::other)?;
        println!("{metadata}");
        last = Some(token);
    }
    Ok(())
}
