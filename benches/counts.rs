//! How many instructions does each step take on the thread that calls it? `make counts` prints them, as
//! this build has them; `tests/counts.rs` holds those of the tests' build.

#[path = "common/steps.rs"]
mod steps;

use std::{env, process::ExitCode};

const ROUNDS: u32 = 500;

fn main() -> ExitCode {
    if steps::run_if_asked() {
        return ExitCode::SUCCESS;
    }
    if !env::args().any(|arg| arg == "--bench") {
        steps::run(2); // a try, without valgrind
        return ExitCode::SUCCESS;
    }
    match table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn table() -> Result<(), String> {
    let counts = steps::instructions(ROUNDS, &env::temp_dir())?;
    println!("{:>12}  {:10} what", "instructions", "step");
    for (step, what) in steps::STEPS {
        println!("{:>12.0}  {step:10} {what}", counts[step]);
    }
    Ok(())
}
