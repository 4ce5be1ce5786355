//! Tensors in the memory of devices: on a driver that stands in for a real one, or, where
//! `MOONCAKE_RELAY_TEST_CUDA` is `device`, on what there is.
//!
//! Each case runs in a process of its own, under a watchdog, which finds the driver where the loader
//! looks. It ends by asking the stand-in what is left.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod contexts;
mod failures;
mod loading;
mod memory;
#[cfg(feature = "mooncake")]
mod mooncake;
mod order;
mod plain;
mod standin;
mod ways;

use std::{
    env,
    path::Path,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{
    common::{
        ended::{Ended, exited},
        eventually,
    },
    standin::{Built, Standin},
};

/// What a case is given.
pub(crate) struct Rig {
    standin: Option<Standin>,
}

impl Rig {
    /// The stand-in, for cases that cannot do without.
    pub(crate) fn standin(&self) -> &Standin {
        self.standin.as_ref().expect("a case for the stand-in")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Any driver with a device.
    Device,
    /// The stand-in.
    Standin,
    /// The stand-in; and it is not asked what is left.
    Leaves,
    /// The stand-in, which nobody is to load before the case does.
    Untouched,
    /// No driver.
    Nothing,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) needs: Needs,
    pub(crate) run: fn(&Rig),
    /// Of the stand-in.
    pub(crate) variables: &'static [(&'static str, &'static str)],
}

/// A table of cases, each a function of its name, by what they need and the stand-in's variables.
macro_rules! cases {
    ($($needs:ident $variables:tt: $($name:ident),+;)+) => {
        pub(crate) const CASES: &[crate::Case] = &[$($(crate::Case {
            name: stringify!($name),
            needs: crate::Needs::$needs,
            run: $name,
            variables: &$variables,
        }),+),+];
    };
}
pub(crate) use cases;

const CASES: &[&[Case]] = &[
    ways::CASES,
    order::CASES,
    memory::CASES,
    contexts::CASES,
    failures::CASES,
    loading::CASES,
    #[cfg(feature = "mooncake")]
    mooncake::CASES,
];

/// Set for a process that is for one case.
const CASE: &str = "MOONCAKE_RELAY_TEST_CUDA_CASE";
/// `device`: the cases are for what there is.
const ON: &str = "MOONCAKE_RELAY_TEST_CUDA";
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    if let Ok(name) = env::var(CASE) {
        let mut all = CASES.iter().flat_map(|cases| *cases);
        run(all.find(|case| case.name == name).expect("a case"));
        return ExitCode::SUCCESS;
    }
    let real = env::var(ON).is_ok_and(|on| on == "device");
    // Trials may run after this returns to nobody: they keep it.
    let built = Arc::new((!real).then(Built::new));
    let all = CASES.iter().flat_map(|cases| *cases);
    let trials = all.map(|case| {
        let built = Arc::clone(&built);
        let skipped = real && case.needs != Needs::Device && case.needs != Needs::Nothing;
        let path = move || watch(case, built.as_ref().as_ref().map(Built::path));
        let kind = if skipped { "stand-in only" } else { "" };
        Trial::test(case.name, path).with_kind(kind).with_ignored_flag(skipped)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// In the process of the case.
fn run(case: &Case) {
    let real = env::var(ON).is_ok_and(|on| on == "device");
    let told = matches!(case.needs, Needs::Device | Needs::Standin | Needs::Leaves);
    let rig = Rig { standin: (!real && told).then(Standin::found) };
    (case.run)(&rig);
    if let Some(standin) = &rig.standin
        && case.needs != Needs::Leaves
    {
        eventually(vec![], || standin.all_live());
    }
}

/// Runs a case in a process of its own.
fn watch(case: &Case, driver: Option<&Path>) -> Result<(), Failed> {
    let mut command = Command::new(env::current_exe()?);
    command.env(CASE, case.name).envs(case.variables.iter().copied());
    match driver {
        Some(_) if case.needs == Needs::Nothing => command.env("LD_LIBRARY_PATH", "/nowhere"),
        Some(folder) => command.env("LD_LIBRARY_PATH", folder),
        None => &mut command,
    };
    ends_well(case.name, command, LIMIT)
}

/// Fails unless the process ends well in time, and no thread of it panicked.
pub(crate) fn ends_well(name: &str, mut command: Command, limit: Duration) -> Result<(), Failed> {
    Ended::of(name, &mut command, limit)?.is_well(exited(0))
}
