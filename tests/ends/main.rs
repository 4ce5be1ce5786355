//! How things end, and how they go on with little: relays that are closed or dropped anywhere,
//! processes that exit or fork in the middle of transfers, few cores, no threads to be had.
//!
//! A case's name begins with the letter and number of its fault. Each runs in a process of its own,
//! under a watchdog: how that ends is part of the case.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod anywhere;
mod close;
#[path = "../common/mod.rs"]
mod common;
mod cores;
mod exits;
mod fork;
mod host;
mod idle;
mod leaks;
mod settings;

use std::{
    env,
    io::{self, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Command, ExitCode, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use mooncake_relay::{
    Config, EmbeddedEngine, Engine, InProcessEngine, Metadata, Relay, Slot, Tensor, Token,
};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::{SKIPPED, peer::found_engine};

const CASE: &str = "MOONCAKE_RELAY_TEST_CASE";
/// Far longer than anything here takes.
const WATCHDOG: Duration = Duration::from_secs(60);

/// One case: its name, what it does in a process of its own, and far longer than it takes.
type Case = (&'static str, fn(), u64);

const CASES: &[&[Case]] = &[
    anywhere::CASES,
    close::CASES,
    cores::CASES,
    fork::CASES,
    idle::CASES,
    leaks::CASES,
    settings::CASES,
];

/// `cases! { m1_a_name, m2_another = 300 }`: the number is the watchdog's seconds.
macro_rules! cases {
    ($($name:ident $(= $seconds:literal)?),+ $(,)?) => {
        pub(crate) const CASES: &[$crate::Case] = &[$((
            stringify!($name),
            $name,
            {
                #[allow(unused_mut, unused_assignments)]
                let mut seconds = 120;
                $(seconds = $seconds;)?
                seconds
            },
        )),+];
    };
}
pub(crate) use cases;

fn main() -> ExitCode {
    if let Ok(name) = env::var(CASE) {
        return part(&name);
    }
    let alone = |(name, _, seconds): &Case| {
        let (name, limit) = (*name, Duration::from_secs(*seconds));
        Trial::test(name, move || Ended::of(name, limit)?.is_well(ExitStatus::default()))
    };
    let mut trials: Vec<_> = CASES.iter().flat_map(|cases| *cases).map(alone).collect();
    trials.extend(exits::trials());
    trials.extend(host::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// What this process is for.
fn part(name: &str) -> ExitCode {
    if let Some(route) = exits::route(name) {
        return route();
    }
    if name == settings::PART {
        settings::reads_the_environment();
        return ExitCode::SUCCESS;
    }
    let found = CASES.iter().flat_map(|cases| *cases).find(|case| case.0 == name);
    found.expect("a case").1();
    ExitCode::SUCCESS
}

/// How a process of ours has ended.
struct Ended {
    status: ExitStatus,
    out: String,
    err: String,
}

impl Ended {
    /// Runs this program as the part of that name.
    fn of(name: &str, limit: Duration) -> io::Result<Self> {
        Self::after(Command::new(env::current_exe()?).env(CASE, name), limit)
    }

    /// Runs a command to its end; whatever still runs of it after `limit` is killed.
    fn after(command: &mut Command, limit: Duration) -> io::Result<Self> {
        let mut child = command
            .envs(found_engine())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let group = Pid::from_child(&child);
        let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
        let deadline = Instant::now() + limit;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() >= deadline => {
                    let _ = kill_process_group(group, Signal::KILL);
                    child.wait()?;
                    let text = err.join().expect("a reader");
                    let reason = format!("still running after {limit:?}\n{text}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                }
                None => thread::sleep(Duration::from_millis(2)), // between two looks
            }
        };
        // Whoever is left of its children has no business any more.
        let _ = kill_process_group(group, Signal::KILL);
        let [out, err] = [out, err].map(|reader| reader.join().expect("a reader"));
        for line in err.lines().filter(|line| line.starts_with(SKIPPED)) {
            // A test that was skipped says so, past whoever captures the output.
            let _ = writeln!(io::stderr(), "{line}");
        }
        Ok(Self { status, out, err })
    }

    /// As expected, and nothing has panicked.
    fn is_well(&self, expected: ExitStatus) -> Result<(), Failed> {
        self.is_as(expected)?;
        if self.err.contains("panicked at") { Err(self.told("something panicked")) } else { Ok(()) }
    }

    fn is_as(&self, expected: ExitStatus) -> Result<(), Failed> {
        if self.status == expected {
            return Ok(());
        }
        Err(self.told(&format!("ended with {}, not {expected}", self.status)))
    }

    fn told(&self, wrong: &str) -> Failed {
        format!("{wrong}\n--- stdout\n{}\n--- stderr\n{}", self.out, self.err).into()
    }
}

/// How a process ends that exits with `code`.
fn exited(code: i32) -> ExitStatus {
    ExitStatus::from_raw(code << 8)
}

/// Reads to the end, aside.
fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// How often a thing is done: `usual`, unless that variable asks for more.
fn times(variable: &str, usual: usize) -> usize {
    env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn small() -> Config {
    Config::default().with_slot_size(4096)
}

/// What makes an engine, with the name of its kind.
type Make = (&'static str, fn() -> Arc<dyn Engine>);

const ENGINES: [Make; 3] = [("in process", in_process), ("local", local), ("tcp", tcp)];

fn in_process() -> Arc<dyn Engine> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("ends-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Arc::new(InProcessEngine::new(&name).unwrap())
}

fn local() -> Arc<dyn Engine> {
    Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap())
}

fn tcp() -> Arc<dyn Engine> {
    Arc::new(EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap())
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

/// One transfer, from end to end.
#[track_caller]
fn works(from: &Relay, to: &Relay) {
    let (metadata, token) = put(from, b"a transfer that works");
    assert_eq!(to.get(&metadata).unwrap().wait().unwrap()[..], *b"a transfer that works");
    drop(token.wait().unwrap());
}
