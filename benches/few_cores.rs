//! How long does a transfer take where there are few cores, from p50 to p99?
//!
//! Two relays in one process, which runs itself again for each line: with all cores, with one for
//! everybody, with one that four strangers never let go of, and with what a stranger leaves of one
//! (`SCHED_IDLE`). A round is `put`, a worker's read, and `wait` for the sender's slot; `base` is what
//! two threads of the same process need to wake each other and answer, in the same place.

mod common;

use std::{
    env, io,
    process::{Child, Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Relay, Tensor};
use rustix::{
    process::getpid,
    thread::{CpuSet, sched_setaffinity},
};

use crate::common::{
    embedded,
    receiver::{allowed, histogram, percentiles},
};

/// Name, whether one core must do, how many strangers are on it, whether they come first.
const PLACES: [(&str, bool, usize, bool); 5] = [
    ("all cores", false, 0, false),
    ("one core", true, 0, false),
    ("one core, four strangers", true, 4, false),
    ("one core, SCHED_IDLE", true, 0, true),
    ("one core, SCHED_IDLE, a stranger", true, 1, true),
];
const LEN: usize = 4096;
/// How long a line is measured at most, and with how many rounds.
const MOST: Duration = Duration::from_secs(4);
const ROUNDS: usize = 2000;

fn main() -> ExitCode {
    let args: Vec<_> = env::args().collect();
    if let [_, flag, place, rounds] = &args[..]
        && flag == "--place"
    {
        let (place, rounds) = (place.parse().expect("a number"), rounds.parse().expect("a number"));
        measure(place, rounds).expect("the system gives what it takes");
        return ExitCode::SUCCESS;
    }
    let measures = args.iter().any(|arg| arg == "--bench");
    let rounds = if measures { ROUNDS } else { 2 };
    println!(
        "{:34} {:12} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}  µs",
        "", "", "rounds", "p50", "p90", "p99", "p99.9", "max"
    );
    for place in 0..PLACES.len() {
        let program = env::current_exe().expect("this program");
        let arguments = ["--place", &place.to_string(), &rounds.to_string()].map(str::to_owned);
        let status = Command::new(program).args(arguments).status().expect("it starts");
        if !status.success() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Programs that never let go of a core by themselves.
struct Strangers(Vec<Child>);

impl Drop for Strangers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn measure(place: usize, rounds: usize) -> io::Result<()> {
    let (name, one_core, strangers, idle) = PLACES[place];
    if one_core {
        let mut mask = CpuSet::new();
        mask.set(*allowed().last().expect("at least one"));
        sched_setaffinity(Some(getpid()), &mask)?;
    }
    // They inherit the core, and not what comes below.
    let start =
        |_| Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn();
    let strangers = Strangers((0..strangers).map(start).collect::<io::Result<_>>()?);
    if idle {
        be_idle()?;
    }
    let until = Instant::now() + MOST;
    line(name, "base", rounds, until, &mut answers());
    let until = Instant::now() + MOST;
    let (from, to) = (embedded(LEN), embedded(LEN));
    line(name, "transfer", rounds, until, &mut || transfer(&from, &to));
    drop(strangers);
    Ok(())
}

/// Only when nobody else wants the core.
#[allow(unsafe_code)] // rustix has no such call
fn be_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters live, and what this thread makes inherits what it says.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn line(place: &str, what: &str, rounds: usize, until: Instant, step: &mut dyn FnMut()) {
    let mut times = histogram();
    step();
    for _ in 0..rounds {
        let begun = Instant::now();
        step();
        times.saturating_record(begun.elapsed().as_nanos() as u64);
        if Instant::now() >= until {
            break;
        }
    }
    let [p50, p90, p99, p999, max] = percentiles(&times).map(|nanos| nanos as f64 / 1000.0);
    println!(
        "{place:34} {what:12} {:>7} {p50:>9.1} {p90:>9.1} {p99:>9.1} {p999:>9.1} {max:>9.1}",
        times.len()
    );
}

/// Another thread is woken, and answers.
fn answers() -> impl FnMut() {
    let (ask, asked) = mpsc::sync_channel::<()>(0);
    let (answer, answered) = mpsc::sync_channel(0);
    thread::spawn(move || asked.iter().try_for_each(|()| answer.send(())));
    move || {
        ask.send(()).expect("it listens");
        answered.recv().expect("it answers");
    }
}

fn transfer(from: &Relay, to: &Relay) {
    let (metadata, token) = from.put_bytes(&[7; LEN], Tensor::bytes(LEN)).expect("a slot is free");
    let got = to.get(&metadata).expect("it is open").wait().expect("its sender lives");
    assert_eq!(got.len(), LEN);
    drop(token.wait().expect("it was acknowledged"));
}
