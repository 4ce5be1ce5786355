//! Four processes on both engines put and get for a while, with leases of 50 ms, aborts, doubled, old
//! and lost metadata, and are stopped and killed meanwhile. Every `Ok` has the bytes of its put, and
//! at the end every slot is free and nothing is left.
//!
//! Some seconds of it are a test; `make soak` runs it for ten minutes and prints what it saw.
#![cfg(all(feature = "embedded", feature = "mooncake"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod driver;
mod worker;

use std::{env, process::ExitCode, time::Duration};

use libtest_mimic::{Arguments, Trial};

use crate::common::within;

/// How many seconds, if not these.
const VARIABLE: &str = "MOONCAKE_RELAY_TEST_SOAK";
const SECONDS: u64 = 10;
/// What the end may take: Mooncake's engine gives a read of a dead peer up after half a minute.
const END: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    let args: Vec<_> = env::args().skip(1).collect();
    if let [flag, kind, name, seed, library] = &args[..]
        && flag == "--worker"
    {
        worker::run(kind, name, seed.parse().expect("a number"), library);
        return ExitCode::SUCCESS;
    }
    let seconds = env::var(VARIABLE).map_or(SECONDS, |text| text.parse().expect("a number"));
    let soak = move || {
        let time = Duration::from_secs(seconds);
        within(time * 2 + END, move || driver::soak(time));
        Ok(())
    };
    let name = "aborts_short_leases_stops_and_kills_cost_no_byte_and_no_slot";
    libtest_mimic::run(&Arguments::from_args(), vec![Trial::test(name, soak)]).exit_code()
}
