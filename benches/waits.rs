//! What stands behind the constants of `src/wait.rs` and `src/notifier.rs`?
//!
//! - `hop`: a word there and back, halved, between two threads that look without a pause.
//! - `wake`: from a futex wake until its sleeper runs, by how long it has slept; and the call alone.
//! - `yield`: one `sched_yield`, by who else wants the core.
//! - `nap`: how long a sleep lasts that was asked for.
//! - `grace`: two relays of this process on the same host, one put of 4 KiB at a time; a receiver that
//!   takes its time before each get. The sender's wait, and what its thread takes of its core for each.
//!   `learnt` is as the library has it; else every spin is of that length.
//! - `slots`: the same from end to end, by how many slots take turns: with one the last one used is the
//!   next, which is what a stack of free slots would give.
//!
//! `facts`, `grace` and `slots` are also the names of its parts: `cargo bench --bench waits -- slots`. By
//! `taskset -c 0` all of it is on one core.

mod common;

use std::{
    env, fs,
    hint::spin_loop,
    io,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use mooncake_relay::{Config, EmbeddedEngine, Metadata, Relay, Tensor, internal::fix_grace};
use rustix::{
    thread::futex,
    time::{ClockId, clock_gettime},
};

use crate::common::{
    PATIENCE,
    mailbox::{self, Lane},
    receiver::{allowed, histogram, pin},
    size_name,
};

/// The largest payload.
const LARGEST: usize = 1 << 20;
const HOP: u64 = 1;
const GET: u64 = 2;
const END: u64 = 3;

/// What the receiver does before its get: for how many µs it works, and how many strangers each core has.
const RECEIVERS: [(&str, u64, usize); 5] = [
    ("gets at once", 0, 0),
    ("after 20 µs", 20, 0),
    ("after 60 µs", 60, 0),
    ("after 300 µs", 300, 0),
    ("at once, a stranger on each core", 0, 1),
];

fn main() -> io::Result<()> {
    let args: Vec<_> = env::args().skip(1).collect();
    // As criterion does: only `cargo bench` measures, anything else tries it out.
    let runs = if args.iter().any(|arg| arg == "--bench") { 3 } else { 0 };
    let cores = allowed();
    let bench = Bench { runs, own: cores[0], other: cores[cores.len() - 1], cores };
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    println!("the first thread on core {}, the other on core {}; in µs", bench.own, bench.other);
    pin(bench.own);
    let named: Vec<_> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let wanted = |part: &str| named.is_empty() || named.iter().any(|name| *name == part);
    if wanted("facts") {
        bench.facts()?;
    }
    if wanted("grace") {
        bench.graces()?;
    }
    if wanted("slots") {
        bench.slots()?;
    }
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}

struct Bench {
    /// 0: everything is tried out.
    runs: usize,
    cores: Vec<usize>,
    own: usize,
    other: usize,
}

impl Bench {
    fn count(&self, most: usize) -> usize {
        if self.runs == 0 { 2 } else { most }
    }

    fn runs(&self, run: impl FnMut() -> Histogram<u64>) -> Vec<Histogram<u64>> {
        std::iter::repeat_with(run).take(self.runs.max(1)).collect()
    }

    /// Has `first` done beside a thread that answers, or gets.
    fn with_other<T>(
        &self,
        relay: &Relay,
        first: impl FnOnce(&Lane) -> io::Result<T>,
    ) -> io::Result<T> {
        let (lanes, _file, _) = mailbox::create()?;
        thread::scope(|scope| {
            scope.spawn(|| serve(&lanes[0], relay, self.other, self.own == self.other));
            let done = first(&lanes[0]);
            lanes[0].ask(END, "");
            done
        })
    }

    fn facts(&self) -> io::Result<()> {
        println!();
        header(&["what", "rounds", "p50", "lowest–highest", "p99"]);
        self.with_other(&relay(1, 1)?, |lane| {
            let mut asked = 0;
            let mut hop = || {
                let begun = Instant::now();
                lane.ask(HOP, "");
                asked += 1;
                lane.await_reply(asked);
                nanos(begun) / 2
            };
            row("hop", &self.runs(|| many(self.count(20_000), &mut hop)));
            Ok(())
        })?;
        for micros in [20, 100, 300, 1000, 3000, 10_000] {
            let slept = Duration::from_micros(micros);
            let rounds = self.count((400_000 / micros as usize).min(1000));
            let mut calls = Vec::new();
            let wakes = self.runs(|| {
                let (to_run, call) = wakes(slept, self.other, rounds);
                calls.push(call);
                to_run
            });
            row(&format!("wake after {slept:?}"), &wakes);
            row("  of that the call", &calls);
        }
        let yields = |rounds| many(self.count(rounds), || timed(thread::yield_now));
        row("yield, alone", &self.runs(|| yields(20_000)));
        let stranger = Strangers::start(&[self.own], 1)?;
        row("yield, a stranger on the core", &self.runs(|| yields(100)));
        drop(stranger);
        for micros in [1, 50, 100, 1000] {
            let asked = Duration::from_micros(micros);
            let nap = || many(self.count(300), || timed(|| thread::sleep(asked)));
            row(&format!("nap of {asked:?}"), &self.runs(nap));
        }
        Ok(())
    }

    fn graces(&self) -> io::Result<()> {
        println!();
        header(&["the receiver, grace", "rounds", "p50", "lowest–highest", "p99", "of the core"]);
        let (left, right) = (relay(2, 4096)?, relay(2, 4096)?);
        self.with_other(&right, |lane| {
            let sender = Sender { relay: &left, lane };
            for (name, micros, strangers) in RECEIVERS {
                let _strangers = Strangers::start(&self.cores, strangers)?;
                let rounds = self.count(if strangers > 0 { 200 } else { 1000 });
                for fixed in [None, Some(0), Some(6), Some(12), Some(25), Some(50), Some(100)] {
                    fix_grace(fixed.map(Duration::from_micros));
                    let mut took = 0;
                    let waits = self.runs(|| {
                        many(rounds / 10, || sender.once(4096, micros)[0]);
                        let before = own_time();
                        let waits = many(rounds, || sender.once(4096, micros)[0]);
                        took += own_time() - before;
                        waits
                    });
                    let grace =
                        fixed.map_or_else(|| "learnt".to_owned(), |micros| format!("{micros} µs"));
                    let each = took as f64 / 1e3 / (rounds * waits.len()) as f64;
                    line(&format!("{name}, {grace}"), &waits);
                    println!(" {each:>12.2}");
                }
            }
            fix_grace(None);
            Ok(())
        })
    }

    fn slots(&self) -> io::Result<()> {
        println!();
        header(&["bytes, slots", "rounds", "p50", "lowest–highest", "p99"]);
        for (size, rounds) in [(4 << 10, 5000), (64 << 10, 3000), (256 << 10, 1500), (1 << 20, 500)]
        {
            for slots in [1, 2, 4, 8, 32] {
                let (left, right) = (relay(slots, size)?, relay(1, size)?);
                self.with_other(&right, |lane| {
                    let sender = Sender { relay: &left, lane };
                    many(self.count(rounds / 10), || sender.once(size, 0)[1]);
                    let runs = self.runs(|| many(self.count(rounds), || sender.once(size, 0)[1]));
                    row(&format!("{}, {slots}", size_name(size)), &runs);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }
}

fn relay(slots: u32, size: usize) -> io::Result<Relay> {
    let engine = EmbeddedEngine::bind("127.0.0.1:0").map_err(io::Error::other)?;
    let config = Config::default().with_credits(slots).with_receive_credits(1).with_slot_size(size);
    Relay::new(Arc::new(engine), &config).map_err(io::Error::other)
}

/// Puts, and waits.
struct Sender<'a> {
    relay: &'a Relay,
    lane: &'a Lane,
}

impl Sender<'_> {
    /// Nanoseconds from the put to its token, without what the receiver does before its get; and with it.
    fn once(&self, size: usize, works: u64) -> [u64; 2] {
        let begun = Instant::now();
        let mut slot = self.relay.acquire(size, PATIENCE).expect("one at a time");
        slot.fill(1);
        let (metadata, token) = self.relay.put(slot, Tensor::bytes(size)).expect("it is open");
        self.lane.ask(GET | works << 8, &metadata.to_string());
        drop(token.wait().expect("the receiver takes it"));
        let all = nanos(begun);
        [all.saturating_sub(works * 1000), all]
    }
}

/// The other thread: answers, or gets.
fn serve(lane: &Lane, relay: &Relay, core: usize, alone: bool) {
    pin(core);
    let mut dest = vec![1; LARGEST];
    let mut text = Vec::new();
    for number in 1.. {
        while !lane.has(number) {
            // Always awake, so that its own wake is in none of the times.
            if alone { thread::yield_now() } else { spin_loop() }
        }
        let word = lane.hear(number, &mut text);
        match word & 0xff {
            HOP => lane.reply(),
            GET => {
                let text = str::from_utf8(&text).expect("as it was sent");
                let metadata: Metadata = text.parse().expect("as it was sent");
                let begun = Instant::now();
                while nanos(begun) < (word >> 8) * 1000 {
                    spin_loop();
                }
                relay.get_into(&metadata, &mut dest, PATIENCE).expect("its sender lives");
            }
            _ => return,
        }
    }
}

/// Nanoseconds until a thread on `core` runs that was woken after it had slept, and of the call.
fn wakes(slept: Duration, core: usize, rounds: usize) -> (Histogram<u64>, Histogram<u64>) {
    let (word, ran) = (AtomicU32::new(0), AtomicU64::new(0));
    let begun = Instant::now();
    let (mut waking, mut calling) = (histogram(), histogram());
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(core);
            for number in 0..rounds as u32 {
                while word.load(SeqCst) == number {
                    // Woken, or changed meanwhile: look again.
                    let _ = futex::wait(&word, futex::Flags::PRIVATE, number, None);
                }
                ran.store(nanos(begun), SeqCst);
            }
        });
        for number in 1..=rounds as u32 {
            let before = nanos(begun);
            // By now it sleeps. Not by a nap, after which this core would have been idle, too.
            while nanos(begun) - before < slept.as_nanos() as u64 {
                spin_loop();
            }
            let woken = nanos(begun);
            word.store(number, SeqCst);
            futex::wake(&word, futex::Flags::PRIVATE, 1).expect("a word of ours");
            calling.saturating_record(nanos(begun) - woken);
            while ran.load(SeqCst) < woken {
                thread::yield_now(); // both may share a core
            }
            waking.saturating_record(ran.load(SeqCst) - woken);
        }
    });
    (waking, calling)
}

/// Programs that never let go of a core by themselves.
struct Strangers(Vec<Child>);

impl Strangers {
    fn start(cores: &[usize], each: usize) -> io::Result<Self> {
        let cores = cores.iter().flat_map(|core| vec![core.to_string(); each]);
        let start = |core: String| {
            let mut command = Command::new("taskset");
            command.args(["-c", &core, "sh", "-c", "while :; do :; done"]);
            command.stdin(Stdio::null()).spawn()
        };
        Ok(Self(cores.map(start).collect::<io::Result<_>>()?))
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn nanos(begun: Instant) -> u64 {
    begun.elapsed().as_nanos() as u64
}

/// Nanoseconds that the calling thread has had of a core.
fn own_time() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn timed(call: impl FnOnce()) -> u64 {
    let begun = Instant::now();
    call();
    nanos(begun)
}

fn many(rounds: usize, mut once: impl FnMut() -> u64) -> Histogram<u64> {
    let mut times = histogram();
    (0..rounds).for_each(|_| times.saturating_record(once()));
    times
}

fn header(columns: &[&str]) {
    let [what, rounds, p50, spread, rest @ ..] = columns else { return };
    print!("{what:40} {rounds:>7} {p50:>9} {spread:>19}");
    rest.iter().for_each(|column| print!(" {column:>12}"));
    println!();
}

fn line(what: &str, runs: &[Histogram<u64>]) {
    let sorted = |part: f64| {
        let mut values: Vec<_> =
            runs.iter().map(|run| run.value_at_percentile(part) as f64 / 1e3).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let (p50, p99) = (sorted(50.0), sorted(99.0));
    let middle = runs.len() / 2;
    let spread = format!("{:.2}–{:.2}", p50[0], p50[runs.len() - 1]);
    let rounds: u64 = runs.iter().map(Histogram::len).sum();
    print!("{what:40} {rounds:>7} {:>9.2} {spread:>19} {:>12.2}", p50[middle], p99[middle]);
}

fn row(what: &str, runs: &[Histogram<u64>]) {
    line(what, runs);
    println!();
}
