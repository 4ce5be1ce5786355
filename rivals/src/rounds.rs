//! The order in which everything has its turn.

use std::{
    env, fs,
    io::{self, Read},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;

use crate::{
    Compare,
    machine::Machine,
    measure::{Measured, Plan, allowed},
    nixl,
    report::Report,
    rows::Start,
    ucx,
};

/// For one start by all sizes: ten times what it takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Two callers and two notifiers.
const SPINNING: usize = 4;

pub(crate) fn compare(args: &Compare) -> io::Result<()> {
    let began = Instant::now();
    let cores = match allowed()[..] {
        [own, other, ..] if !args.unpinned => vec![own, other],
        _ => Vec::new(),
    };
    let plan = Plan { quick: args.quick, cores };
    let starts = match args.only[..] {
        [] => Start::value_variants(),
        _ => &args.only,
    };
    let rounds = if args.quick { 1 } else { args.rounds };
    let mut report = Report {
        machine: Machine::now(),
        pinned: !plan.cores.is_empty(),
        rounds,
        measured: Vec::new(),
        failed: Vec::new(),
    };
    for round in 0..rounds {
        // Nobody is always the first.
        for at in 0..starts.len() {
            let start = starts[(at + round) % starts.len()];
            if report.failed.iter().any(|(failed, _)| *failed == start.name()) {
                continue;
            }
            let since = Instant::now();
            match run(start, &plan) {
                Ok(measured) => {
                    eprintln!(
                        "round {} of {rounds}: {} {:.1?}",
                        round + 1,
                        start.name(),
                        since.elapsed()
                    );
                    report.measured.extend(measured.into_iter().map(|one| (round, one)));
                }
                Err(why) => {
                    eprintln!("{} is SKIPPED: {why}", start.name());
                    report.failed.push((start.name(), why.to_string()));
                }
            }
        }
    }
    report.machine.end(began.elapsed());
    fs::create_dir_all(&args.out)?;
    let text = report.markdown();
    print!("{text}");
    fs::write(args.out.join("compare.md"), text)?;
    fs::write(args.out.join("compare.json"), report.json()?)
}

fn run(start: Start, plan: &Plan) -> io::Result<Vec<Measured>> {
    let mut command = match start {
        Start::SameHostSpin if allowed().len() < SPINNING => {
            let why = format!("each of its {SPINNING} threads spins, and wants a core of its own");
            return Err(io::Error::other(why));
        }
        Start::UcxShm | Start::UcxTcp => return ucx::run(start, plan),
        Start::NixlShm | Start::NixlTcp => nixl::command(start, plan)?,
        _ => {
            let mut command = Command::new(env::current_exe()?);
            command.arg("send").arg(start.name());
            if plan.quick {
                command.arg("--quick");
            }
            if !plan.cores.is_empty() {
                command.arg("--cores").arg(join(&plan.cores));
            }
            command
        }
    };
    let text = output(&mut command, LIMIT)?;
    // What a library prints there, too, is no object.
    let lines = text.lines().filter(|line| line.starts_with("{\"row\""));
    lines.map(|line| Ok(serde_json::from_str(line)?)).collect()
}

pub(crate) fn join(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// What a program prints, if it ends well and in time.
pub(crate) fn output(command: &mut Command, limit: Duration) -> io::Result<String> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    fn collect(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
        let mut from = from.expect("piped");
        thread::spawn(move || {
            let mut all = Vec::new();
            let _ = from.read_to_end(&mut all);
            String::from_utf8_lossy(&all).into_owned()
        })
    }
    let (text, said) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!("it did not end within {limit:?}")));
        }
        thread::sleep(Duration::from_millis(10));
    };
    let join = |thread: thread::JoinHandle<String>| thread.join().expect("it does not panic");
    let (text, said) = (join(text), join(said));
    if status.success() {
        return Ok(text);
    }
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    Err(io::Error::other(format!("{status}: {}", last.unwrap_or("it said nothing").trim())))
}
