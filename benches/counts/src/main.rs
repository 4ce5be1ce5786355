//! How many instructions does each step of a transfer take on the thread that calls it? Prints a table,
//! which `tests/counts.rs` reads: a line for each step, its count, its name, and what it is.

mod steps;

use std::{env, process::ExitCode};

const ROUNDS: u32 = 500;

fn main() -> ExitCode {
    if steps::run_if_asked() {
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
    for (step, what) in steps::STEPS {
        println!("{:>6.0} {step:10} {what}", counts[step]);
    }
    Ok(())
}
