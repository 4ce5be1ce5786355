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

/// The faults that have at least one case each.
const HELD: &[&str] = &[
    "a1", "a3", "a5", "a6", "a10", "a11", "b1", "b2", "b11", "c1", "c3", "c4", "c6", "d1", "d2",
    "d4", "d9", "d11", "e1", "e5", "f1", "f2", "g1", "g3", "n2", "r1", "r4", "q1", "q2", "q3",
    "q4", "q5", "q6", "q7", "q8", "q9", "q10", "q11", "q12", "q13", "q14", "q15", "q16", "q17",
    "q18", "q19", "q20", "q21", "q22", "q23", "q24", "q25", "q26",
];

fn main() -> ExitCode {
    if let Some(name) = supervisor::asked() {
        let (on, case) = pairs().find(|(on, case)| on.name_of(case) == name).expect("a case");
        supervisor::run(on, case);
        return ExitCode::SUCCESS;
    }
    let mut trials: Vec<_> = pairs().map(|(on, case)| trial(on, case)).collect();
    trials.push(Trial::test("every_fault_has_a_case", every_fault_has_a_case));
    trials.push(Trial::test("every_exception_is_of_a_case", every_exception_is_of_a_case));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
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

fn every_fault_has_a_case() -> Result<(), libtest_mimic::Failed> {
    let begins = |case: &Case, fault: &str| case.name.split('_').next() == Some(fault);
    let has = |fault: &&&str| pairs().any(|(_, case)| begins(case, fault));
    let missing: Vec<_> = HELD.iter().filter(|fault| !has(fault)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("no case for {missing:?}").into()) }
}

fn every_exception_is_of_a_case() -> Result<(), libtest_mimic::Failed> {
    let is_one =
        |name: &str| pairs().any(|(on, case)| on.excepts(case).is_some() && case.name == name);
    let none: Vec<_> =
        ENGINES.iter().flat_map(On::exceptions).filter(|name| !is_one(name)).collect();
    if none.is_empty() { Ok(()) } else { Err(format!("no such case: {none:?}").into()) }
}
