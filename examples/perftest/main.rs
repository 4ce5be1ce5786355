//! How long puts take and how many fit into a second, between processes or hosts:
//! `cargo run --release --example perftest -- --help`.
//!
//! What `ib_read_lat` and `ucx_perftest` are for their transports. This host alone:
//!
//! ```text
//! cargo run --release --example perftest
//! ```
//!
//! Two hosts, of which the first gets and the second puts:
//!
//! ```text
//! cargo run --release --example perftest -- server --listen 10.0.0.7:18515
//! cargo run --release --example perftest -- client 10.0.0.7:18515 --mode throughput
//! ```

mod args;
mod case;
mod client;
mod machine;
mod pattern;
mod pipe;
mod plot;
mod row;
mod server;
mod stop;
mod wire;
mod worker;

use std::{
    env, error,
    fs::File,
    io::{self, BufRead, BufReader, IsTerminal, Write},
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::{
    args::{Cli, Run},
    case::{Axis, Case},
    client::Place,
    machine::Machine,
    row::Row,
    stop::stopped,
};

type Result<T, E = Box<dyn error::Error + Send + Sync>> = std::result::Result<T, E>;

/// The error of a run that Ctrl-C has ended.
const STOPPED: &str = "stopped by Ctrl-C: the rows above are whole, the one under way is not shown";

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(args::Command::Server(server)) => server::serve(server),
        Some(args::Command::Client { servers, run }) => {
            stop::on_interrupt();
            run.cases().and_then(|(axis, cases)| measure(run, axis, &cases, servers))
        }
        Some(args::Command::Plot(plot)) => plot::draw(plot),
        None => {
            stop::on_interrupt();
            alone(&cli.run)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if stopped() => {
            let _ = writeln!(io::stderr(), "perftest: {STOPPED}");
            ExitCode::from(130)
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "perftest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Both sides on this host: the servers are processes of this program.
fn alone(run: &Run) -> Result<()> {
    let (axis, cases) = run.cases()?;
    let children =
        (0..run.processes(&cases)).map(|_| Server::start()).collect::<Result<Vec<_>>>()?;
    let servers: Vec<_> = children.iter().map(|child| child.address.clone()).collect();
    measure(run, axis, &cases, &servers)
}

/// Case by case, in the table or as JSON.
fn measure(run: &Run, axis: Axis, cases: &[Case], servers: &[String]) -> Result<()> {
    let (listen, advertise) = (run.listen.clone(), run.advertise.clone());
    let place = Place { shares: !run.metadata_by_socket, listen, advertise };
    let expected: Duration = cases.iter().map(|case| case.warm_up() + case.duration()).sum();
    let expected = expected * run.runs as u32;
    let mut saved = run
        .save
        .as_ref()
        .map(File::create)
        .transpose()
        .map_err(|error| format!("--save: {error}: name a file in a folder that is there"))?;
    let progress = Progress::new(expected);
    for (number, case) in cases.iter().enumerate() {
        progress.row(axis.show(axis.of(case)));
        let mut rows = Vec::new();
        for _ in 0..run.runs {
            let client = Machine::here(); // the load before it
            let (result, server) = client::measure(case, servers, &place)?;
            if stopped() {
                return Err(STOPPED.into());
            }
            let (label, case) = (run.label(), case.clone());
            rows.push(Row { label, x: axis, case, result, client, server });
        }
        rows.sort_by(|one, other| one.result.puts_per_s.total_cmp(&other.result.puts_per_s));
        let row = rows.swap_remove(run.runs / 2);
        if let Some(file) = &mut saved {
            writeln!(file, "{}", serde_json::to_string(&row)?)?;
        }
        let text = if run.json {
            serde_json::to_string(&row)?
        } else if number == 0 {
            format!("{}\n{}", row::head(&row), row.line())
        } else {
            row.line()
        };
        progress.print(&text)?;
    }
    Ok(())
}

/// A server process on this host; it ends with its input, so with this process too.
struct Server {
    child: Child,
    address: String,
    input: Option<ChildStdin>,
}

impl Server {
    fn start() -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["server", "--child", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line)
            .map_err(|_| "the server process ended before it listened: see above")?;
        let address = said["listening"].as_str().unwrap_or_default().to_owned();
        Ok(Self { child, address, input })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// How far it is, for people, if that takes long.
struct Progress {
    bar: ProgressBar,
    /// Dropped, so that the thread that moves the bar ends.
    ticker: Option<mpsc::Sender<()>>,
}

impl Progress {
    fn new(expected: Duration) -> Self {
        if !io::stderr().is_terminal() || expected < Duration::from_secs(2) {
            return Self { bar: ProgressBar::hidden(), ticker: None };
        }
        let style = "{bar:40} {percent}% {msg} {elapsed} of about {len_text}";
        let style = style.replace("{len_text}", &format!("{} s", expected.as_secs()));
        let bar = ProgressBar::new(expected.as_millis() as u64).with_style(
            ProgressStyle::with_template(&style).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        let (ticker, ended) = mpsc::channel::<()>();
        let (moved, begun) = (bar.clone(), Instant::now());
        thread::spawn(move || {
            while ended.recv_timeout(Duration::from_millis(250)) == Err(RecvTimeoutError::Timeout) {
                moved.set_position(begun.elapsed().as_millis() as u64);
            }
        });
        Self { bar, ticker: Some(ticker) }
    }

    fn row(&self, what: String) {
        self.bar.set_message(what);
    }

    fn print(&self, text: &str) -> io::Result<()> {
        self.bar.suspend(|| {
            let mut out = io::stdout().lock();
            writeln!(out, "{text}")?;
            out.flush()
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.ticker.take());
        self.bar.finish_and_clear();
    }
}
