//! The failures that systems of this kind have shipped, as tests: each case on each engine it fits.
//!
//! A case's name begins with the letter and number of its fault. Each runs in a process of its own,
//! under a watchdog, and ends by looking at what is left: credits, threads, descriptors, mappings,
//! and what was said on stderr. The next engine adds a line to [`on::ENGINES`].
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod answers;
mod callers;
mod chain;
mod claims;
#[path = "../common/mod.rs"]
mod common;
mod counts;
mod crowd;
mod death;
mod listener;
mod memory;
mod names;
mod notes;
mod on;
mod races;
#[cfg(feature = "embedded")]
#[path = "../raw/mod.rs"]
mod raw;
mod reads;
mod reference;
mod reuse;
mod shared;
mod shows;
mod sizes;
mod sockets;
#[cfg(feature = "embedded")]
mod strangers;
mod supervisor;
mod table;
mod tokens;
mod told;
mod truth;
mod waiting;
mod wanted;
mod wire;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use crate::on::{Case, ENGINES, On};

/// All cases, file by file.
const CASES: &[&[Case]] = &[
    truth::CASES,
    chain::CASES,
    notes::CASES,
    told::CASES,
    death::CASES,
    crowd::CASES,
    waiting::CASES,
    answers::CASES,
    sockets::CASES,
    names::CASES,
    wire::CASES,
    #[cfg(feature = "embedded")]
    wire::stranger::CASES,
    sizes::CASES,
    memory::CASES,
    shared::CASES,
    races::CASES,
    tokens::CASES,
    counts::CASES,
    reference::CASES,
    reuse::CASES,
    reads::CASES,
    listener::CASES,
    callers::CASES,
    claims::CASES,
    #[cfg(feature = "embedded")]
    claims::names::CASES,
    #[cfg(feature = "embedded")]
    strangers::CASES,
    wanted::CASES,
    shows::CASES,
];

fn main() -> ExitCode {
    if let Some(name) = supervisor::asked() {
        let (on, case) = pairs().find(|(on, case)| on.name_of(case) == name).expect("a case");
        supervisor::run(on, case);
        return ExitCode::SUCCESS;
    }
    if table::asked() {
        print!("{}", table::text());
        return ExitCode::SUCCESS;
    }
    let mut trials: Vec<_> = pairs().map(|(on, case)| trial(on, case)).collect();
    trials.push(Trial::test("every_fault_has_a_test", table::every_fault_has_a_test));
    trials.push(Trial::test("the_table_of_faults_is_as_the_tests_are", table::is_up_to_date));
    trials.push(Trial::test("every_exception_is_of_a_case", every_exception_is_of_a_case));
    let mut arguments = Arguments::from_args();
    // Most of a case's time is spent waiting: for peers to start, for leases to end.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.test_threads.get_or_insert(2 * cores);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// What an engine cannot pass is listed as ignored, with the reason before its name.
fn trial(on: &'static On, case: &'static Case) -> Trial {
    let name = on.name_of(case);
    let runs = {
        let name = name.clone();
        move || if on.is_there() { supervisor::watch(&name, case.limit) } else { Ok(()) }
    };
    match on.excepts(case) {
        Some(reason) => Trial::test(name, runs).with_kind(reason).with_ignored_flag(true),
        None => Trial::test(name, runs),
    }
}

/// Each engine with each case that fits it.
fn pairs() -> impl Iterator<Item = (&'static On, &'static Case)> {
    let each = |on: &'static On| {
        CASES
            .iter()
            .flat_map(|cases| *cases)
            .filter(|case| on.fits(case))
            .map(move |case| (on, case))
    };
    ENGINES.iter().flat_map(each)
}

fn every_exception_is_of_a_case() -> Result<(), libtest_mimic::Failed> {
    let is_one =
        |name: &str| pairs().any(|(on, case)| on.excepts(case).is_some() && case.name == name);
    let none: Vec<_> =
        ENGINES.iter().flat_map(On::exceptions).filter(|name| !is_one(name)).collect();
    if none.is_empty() { Ok(()) } else { Err(format!("no such case: {none:?}").into()) }
}
