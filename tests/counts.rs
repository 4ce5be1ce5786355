//! No step of a transfer takes more instructions than `tests/counts.txt` has, and a margin. The counts
//! are of the tests' own build, whose steps are many times longer than those of a release build: they
//! tell that a step has grown, not how long it takes. `make counts` prints those of a release build.
//!
//! To record them anew, where a step has to take more, or takes less now:
//! `MOONCAKE_RELAY_TEST_COUNTS=record cargo test --all-features --test counts`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../benches/common/steps.rs"]
mod steps;

use std::{
    collections::HashMap,
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use libtest_mimic::{Arguments, Failed, Trial};

const ROUNDS: u32 = 200;
/// How much more than recorded a step may take, in parts of a hundred: more than what another release
/// of the compiler makes of the same source, mostly.
const MARGIN: f64 = 20.0;
/// Steps of a few instructions may have so many more.
const ALWAYS: f64 = 20.0;

const RECORD: &str = "MOONCAKE_RELAY_TEST_COUNTS=record cargo test --all-features --test counts";

fn main() -> ExitCode {
    if steps::run_if_asked() {
        return ExitCode::SUCCESS;
    }
    let name = "no_step_of_a_transfer_takes_more_instructions_than_recorded";
    let trial = Trial::test(name, no_step_takes_more_than_recorded);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

fn no_step_takes_more_than_recorded() -> Result<(), Failed> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        let said = format!("valgrind: {error}; apt-get install valgrind (Debian, Ubuntu)");
        assert!(env::var_os("CI").is_none(), "{said}");
        // Past the test harness, which would swallow it: a skipped test says so.
        let _ = writeln!(io::stderr(), "SKIPPED, instructions cannot be counted: {said}");
        return Ok(());
    }
    let counts = steps::instructions(ROUNDS, Path::new(env!("CARGO_TARGET_TMPDIR")))?;
    for (step, _) in steps::STEPS {
        println!("{:>9.0}  {step}", counts[step]);
    }
    if env::var("MOONCAKE_RELAY_TEST_COUNTS").is_ok_and(|wish| wish == "record") {
        return Ok(record(&counts)?);
    }
    let recorded = recorded();
    let mut faults = Vec::new();
    for (step, _) in steps::STEPS {
        let Some(recorded) = recorded.get(*step) else {
            faults.push(format!("{step} is not recorded"));
            continue;
        };
        let (count, most) = (counts[step], recorded * (1.0 + MARGIN / 100.0) + ALWAYS);
        if count > most {
            faults.push(format!(
                "{step} takes {count:.0} instructions, {recorded} were recorded and {most:.0} are the most"
            ));
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    let faults = faults.join("\n");
    Err(format!(
        "{faults}\nIf that has to be, or the compiler is another one, record them anew:\n{RECORD}"
    )
    .into())
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counts.txt")
}

fn recorded() -> HashMap<String, f64> {
    let text = fs::read_to_string(file()).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let words = lines.filter_map(|line| line.trim().split_once(' '));
    words.map(|(count, step)| (step.trim().to_owned(), count.parse().unwrap())).collect()
}

fn record(counts: &HashMap<&str, f64>) -> io::Result<()> {
    let compiler = Command::new("rustc").arg("-V").output()?;
    let compiler = String::from_utf8_lossy(&compiler.stdout);
    let mut text = format!(
        "# Instructions of each step in the tests' build, which tests/counts.rs holds: {}.\n# {RECORD}\n",
        compiler.trim()
    );
    for (step, _) in steps::STEPS {
        text += &format!("{:>6.0} {step}\n", counts[step]);
    }
    fs::write(file(), text)
}
