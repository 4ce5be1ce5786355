//! Device memory over the embedded engine: which way the bytes go between two processes, and that
//! they are the right ones whatever a device, its driver or a process does in between.
//!
//! The driver is a stand-in (see `tests/cuda/standin.c`), built here and found by its name; each side
//! of a transfer is a process of its own, which this binary is, too. Where `MOONCAKE_RELAY_TEST_CUDA`
//! is `device`, the cases that need no stand-in run on what there is.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod death;
mod driver;
mod few;
mod hostile;
#[allow(dead_code, reason = "a part of it is needed here")]
#[path = "../local/raw.rs"]
mod meeting;
#[path = "../raw/mod.rs"]
mod raw;
mod slow;
#[path = "../cuda/standin.rs"]
mod standin;
mod station;
mod ways;

use std::{
    env,
    path::PathBuf,
    process::{Command, ExitCode},
    sync::{Arc, OnceLock},
    time::Duration,
};

use libtest_mimic::{Arguments, Trial};
use serde_json::{Value, json};

use crate::{
    common::{
        eventually,
        peer::{Peer, Sent},
        within,
    },
    standin::Built,
    station::{PLAN, Plan},
};

/// A case: its name, and what it does.
type Case = (&'static str, fn());

const CASES: &[&[Case]] =
    &[ways::CASES, few::CASES, slow::CASES, driver::CASES, death::CASES, hostile::CASES];

/// Those that need no stand-in, beside all of `death`.
const ON_A_DEVICE: &[&str] = &[
    "host_to_host_as_ever",
    "host_to_device_by_tcp",
    "device_to_host_by_tcp",
    "device_to_device_by_tcp",
    "host_to_device_on_one_host",
    "device_to_host_on_one_host",
    "device_to_device_on_one_host",
    "one_process_does_not_open_what_is_its_own",
    "without_staging_there_is_no_relay_on_a_device",
    "readers_that_take_nothing_keep_no_chunk_from_others",
    "a_real_engine_s_reads_are_served",
    "a_quarantine_ends_a_stuck_read",
];

/// Where the stand-in is.
static STANDIN: OnceLock<PathBuf> = OnceLock::new();

const WATCHDOG: Duration = Duration::from_secs(240);
/// Small, so that what is tested takes many of them.
const CHUNK: usize = 64 << 10;
const SLOT: usize = 8 * CHUNK;

fn main() -> ExitCode {
    if let Some(plan) = station::asked() {
        station::run(&plan);
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    // A case is two or three processes, and some are about time.
    arguments.test_threads.get_or_insert(2);
    // Kept by whoever may still run when this returns.
    let built = Arc::new((!is_real()).then(Built::new));
    if let Some(built) = &*built {
        STANDIN.set(built.path().to_owned()).unwrap();
    }
    let all = || CASES.iter().flat_map(|cases| *cases);
    let known = |name| all().any(|(case, _)| case == name);
    assert!(ON_A_DEVICE.iter().all(known), "a case that is not there");
    let trials = all().map(|&(name, case)| {
        let built = Arc::clone(&built);
        let skipped = is_real() && !needs_no_standin(name);
        let run = move || {
            let _built = built;
            within(WATCHDOG, case);
            Ok(())
        };
        let kind = if skipped { "stand-in only" } else { "" };
        Trial::test(name, run).with_kind(kind).with_ignored_flag(skipped)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Whether it is about a real device.
fn is_real() -> bool {
    env::var("MOONCAKE_RELAY_TEST_CUDA").is_ok_and(|on| on == "device")
}

fn needs_no_standin(name: &str) -> bool {
    ON_A_DEVICE.contains(&name) || death::CASES.iter().any(|(case, _)| *case == name)
}

/// One on the host.
fn host() -> Plan {
    Plan {
        device: None,
        local: true,
        staging: None,
        slot_size: SLOT,
        credits: 4,
        quarantine_ms: 30_000,
        twin: false,
    }
}

/// One on a device.
fn cuda() -> Plan {
    Plan { device: Some(0), staging: Some((CHUNK, 4)), ..host() }
}

/// The same, without shared memory.
fn far(plan: Plan) -> Plan {
    Plan { local: false, ..plan }
}

/// Starts a station, with copies that take a while: what does not wait for them sees old bytes.
fn start(plan: &Plan) -> Peer {
    start_with(plan, &[])
}

fn start_with(plan: &Plan, variables: &[(&str, &str)]) -> Peer {
    let peer = spawn(plan, variables);
    assert!(peer.ready().get("error").is_none(), "{}", peer.ready());
    peer
}

/// As well one that may say why it cannot be.
fn spawn(plan: &Plan, variables: &[(&str, &str)]) -> Peer {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(PLAN, plan.to_json().to_string()).envs(variables.iter().copied());
    if let Some(standin) = STANDIN.get() {
        command
            .env("LD_LIBRARY_PATH", standin)
            .env("STANDIN_STRICT", "1")
            .env("STANDIN_DELAY_US", "300");
    }
    Peer::spawn(&mut command)
}

fn put(peer: &Peer, size: usize, seed: u64) -> Sent {
    peer.put(json!({"size": size, "seed": seed}))
}

/// One transfer, from end to end.
#[track_caller]
fn works(from: &Peer, to: &Peer, size: usize, seed: u64) {
    let sent = put(from, size, seed);
    let got = to.get(&sent.metadata);
    assert_eq!((&got["ok"], &got["sha256"]), (&json!(true), &json!(sent.sha256)), "{size}: {got}");
    let ended = from.wait(sent.tag);
    assert_eq!(ended["ok"], true, "{ended}");
}

/// By which way `to` reads from `from`.
fn way(from: &Peer, to: &Peer) -> String {
    let health = to.health();
    let mut peers = health["peers"].as_array().unwrap().iter();
    let peer = peers.find(|peer| peer["session_id"] == from.session_id()).unwrap();
    peer["way"].as_str().unwrap().to_owned()
}

fn count(peer: &Peer, counter: &str) -> u64 {
    let counters = peer.health()["counters"].clone();
    counters[counter].as_u64().unwrap_or_else(|| panic!("no {counter} in {counters}"))
}

/// Every credit is back.
#[track_caller]
fn at_rest(peer: &Peer, credits: u64) {
    let free = || {
        let health = peer.health();
        ["free", "receive_free", "receive_kept"].map(|key| health[key].as_u64().unwrap())
    };
    eventually([credits, credits, 0], free);
}

fn tell(peer: &Peer, what: Value) -> Value {
    let mut command = what;
    command["cmd"] = "standin".into();
    peer.ask(command)
}

/// How many of a kind the stand-in counts; a real driver counts nothing.
fn live(peer: &Peer, kind: &str) -> i64 {
    if is_real() {
        return 0;
    }
    tell(peer, json!({"do": "live"}))[kind].as_i64().unwrap()
}

/// Closes it, and nothing of it is left on the device.
#[track_caller]
fn leaves_nothing(peer: Peer) {
    let closed = peer.ask(json!({"cmd": "close"}));
    assert_eq!((&closed["spans_kept"], &closed["threads"]), (&json!(0), &json!(0)), "{closed}");
    // It goes with the last reference to it.
    peer.ask(json!({"cmd": "drop"}));
    eventually([0; 7], || station::KINDS.map(|kind| live(&peer, kind)));
    peer.quit();
}
