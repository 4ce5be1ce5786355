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
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use mooncake_relay::{
    Config, EmbeddedEngine, Engine, InProcessEngine, Metadata, Relay, Slot, Tensor, Token,
};

use crate::common::ended::{Ended, exited};

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
        Trial::test(name, move || run(name, limit)?.is_well(exited(0)))
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

/// Runs this program as the part of that name.
fn run(name: &str, limit: Duration) -> Result<Ended, Failed> {
    let mut command = Command::new(env::current_exe()?);
    Ended::of(name, command.env(CASE, name), limit)
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
