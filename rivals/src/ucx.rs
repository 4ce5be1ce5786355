//! UCX by `ucx_perftest`: a server and a client for each size and percentile.
//!
//! Its `tag_lat` sends the bytes there and as many back, and says half of what that took. The job is the
//! bytes there and a word back: half a round trip of that size, and half of one with 8 bytes. Its `ucp_get`
//! reads what the peer has registered; the peer is told nothing, so a word is added, and a word before
//! it for the request in `whole`.

use std::{
    io,
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    PATIENCE,
    measure::{Measured, Plan, warm_up},
    rounds::output,
    rows::Start,
};

const PROGRAM: &str = "ucx_perftest";
const LIMIT: Duration = Duration::from_secs(120);
/// With fewer transfers its percentiles mean nothing.
const LEAST: usize = 8;
/// The least it can do: a word.
const WORD: usize = 8;

pub(crate) fn run(start: Start, plan: &Plan) -> io::Result<Vec<Measured>> {
    let way = if start == Start::UcxShm { "shm" } else { "TCP" };
    let words = plan.sizes().map(|(_, count)| count).max().unwrap_or(1);
    let word = latency(start, plan, "tag_lat", (WORD, words), 50)?;
    let mut all = Vec::new();
    for (size, count) in plan.sizes() {
        let count = count.max(LEAST);
        for (test, name, requests) in [("tag_lat", "tag", 0.0), ("ucp_get", "get", 1.0)] {
            let half = latency(start, plan, test, (size, count), 50)?;
            let late = latency(start, plan, test, (size, count), 99)?;
            all.push(Measured {
                row: format!("UCX {name}, {way}"),
                size,
                count,
                p50: half + word,
                p99: late + word,
                whole: half + word + requests * word,
            });
        }
    }
    Ok(all)
}

/// Microseconds, at that percentile.
fn latency(
    start: Start,
    plan: &Plan,
    test: &str,
    (size, count): (usize, usize),
    percentile: usize,
) -> io::Result<f64> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let command = |core: usize| {
        let mut command = Command::new(PROGRAM);
        command.env("UCX_TLS", if start == Start::UcxShm { "shm,self" } else { "tcp,self" });
        command.env("UCX_NET_DEVICES", "lo").env("UCX_WARN_UNUSED_ENV_VARS", "n");
        command.args(["-p", &port]);
        if let Some(core) = plan.cores.get(core) {
            command.args(["-c", &core.to_string()]);
        }
        command
    };
    let server =
        command(1).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let _server = Server(server.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other("no ucx_perftest: apt-get install ucx-utils"),
        _ => error,
    })?);
    let (size, warm_up) = (size.to_string(), warm_up(count).to_string());
    let (count, percentile) = (count.to_string(), percentile.to_string());
    let begun = Instant::now();
    loop {
        let mut client = command(0);
        client.args(["127.0.0.1", "-f", "-v", "-t", test, "-s", &size, "-O", "1"]);
        client.args(["-n", &count, "-w", &warm_up, "-R", &percentile]);
        match output(&mut client, LIMIT) {
            Ok(text) => return parse(&text),
            // The server may not listen yet.
            Err(_) if begun.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error),
        }
    }
}

/// The second number of the last line: `iterations,percentile,average,…`.
fn parse(text: &str) -> io::Result<f64> {
    let mut lines = text.lines().rev().map(str::trim);
    let line = lines.find(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    let number = line.and_then(|line| line.split(',').nth(1)?.trim().parse().ok());
    number.ok_or_else(|| io::Error::other(format!("{PROGRAM} said {text:?}")))
}

/// Ends with its client, or here.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
