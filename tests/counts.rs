//! No step of a transfer takes more instructions than `tests/counts.txt` has, and a margin.
//!
//! They are those of a release build, of a program of its own: `benches/counts`. To record them anew,
//! where a step has to take more, or takes less now:
//! `MOONCAKE_RELAY_TEST_COUNTS=record cargo test --all-features --test counts`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::common::within;

/// How much more than recorded a step may take: more than what another release of the compiler makes of
/// the same source, mostly, and less than what a `format!` takes in `put`.
const MARGIN: f64 = 0.2;
/// Steps of a few instructions may have so many more.
const ALWAYS: f64 = 20.0;

const RECORD: &str = "MOONCAKE_RELAY_TEST_COUNTS=record cargo test --all-features --test counts";

/// With a release build and a slow machine in it.
const WATCHDOG: Duration = Duration::from_secs(1800);

#[test]
fn no_step_of_a_transfer_takes_more_instructions_than_recorded() {
    within(WATCHDOG, hold);
}

fn hold() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = root.join("benches/counts/Cargo.toml");
    if !program.exists() {
        return; // a package has none
    }
    if !cfg!(target_arch = "x86_64") {
        let _ = writeln!(io::stderr(), "SKIPPED: instructions are recorded for x86-64 alone");
        return;
    }
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        let said = format!("valgrind: {error}; apt-get install valgrind (Debian, Ubuntu)");
        assert!(env::var_os("CI").is_none(), "{said}");
        // Past the test harness, which would swallow it: a skipped test says so.
        let _ = writeln!(io::stderr(), "SKIPPED, instructions cannot be counted: {said}");
        return;
    }
    // A folder of its own, so that no other build there is waited for.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("counts");
    let said = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "--locked", "--manifest-path"])
        .arg(&program)
        .env("CARGO_TARGET_DIR", target)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .unwrap();
    let table = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success(), "{table}{}", String::from_utf8_lossy(&said.stderr));
    println!("{table}");
    let counts = counts(&table);
    assert!(!counts.is_empty(), "nothing was counted");
    if env::var("MOONCAKE_RELAY_TEST_COUNTS").is_ok_and(|wish| wish == "record") {
        return record(&counts);
    }
    let recorded = self::counts(&fs::read_to_string(file()).unwrap());
    let mut faults = Vec::new();
    for (step, count) in &counts {
        let Some((_, recorded)) = recorded.iter().find(|(known, _)| known == step) else {
            faults.push(format!("{step} is not recorded"));
            continue;
        };
        let most = recorded * (1.0 + MARGIN) + ALWAYS;
        if *count > most {
            faults.push(format!(
                "{step} takes {count} instructions, {recorded} were recorded and {most:.0} are the most"
            ));
        }
    }
    assert!(
        faults.is_empty(),
        "{}\nif that has to be, or the compiler is another one, record them anew: {RECORD}",
        faults.join("\n")
    );
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counts.txt")
}

/// Each step, and its count, which stands before it.
fn counts(text: &str) -> Vec<(String, f64)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
    });
    pairs.map(|(count, step)| (step, count)).collect()
}

fn record(counts: &[(String, f64)]) {
    let compiler = Command::new("rustc").arg("-V").output().unwrap();
    let compiler = String::from_utf8_lossy(&compiler.stdout);
    let mut text = format!(
        "# Instructions of each step in a release build for x86-64, which tests/counts.rs holds: {}.\n# {RECORD}\n",
        compiler.trim()
    );
    for (step, count) in counts {
        text += &format!("{count:>6} {step}\n");
    }
    fs::write(file(), text).unwrap();
}
