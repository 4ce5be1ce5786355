//! What was measured: a line of the table, or of JSON.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    case::{Axis, Case, Get, Mode},
    machine::{Machine, Usage},
};

/// A row, as `--json` prints it and `plot` reads it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What a plot calls the rows of one run.
    pub(crate) label: String,
    /// What differs from row to row.
    pub(crate) x: Axis,
    pub(crate) case: Case,
    pub(crate) result: Measured,
    pub(crate) client: Machine,
    pub(crate) server: Machine,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// From `put` to the token, metadata's way there included; in an open loop from the instant at
    /// which the put was due.
    pub(crate) latency: Times,
    /// Of that the receiver's own call.
    pub(crate) get: Times,
    /// The way of a text as long as metadata, and back, without a transfer. Closed loops only.
    pub(crate) base: Option<Times>,
    pub(crate) seconds: f64,
    pub(crate) puts_per_s: f64,
    pub(crate) bytes_per_s: f64,
    /// Of an open loop: puts that were due and could not be made in time, nor in the grace after it.
    /// They are in `latency` with the age that they had then.
    pub(crate) unsent: u64,
    /// `local` (shared memory), `tcp`, or what the engine calls it.
    pub(crate) way: String,
    /// By what metadata went: shared memory, or a socket.
    pub(crate) metadata: String,
    /// Processor time, of each side.
    pub(crate) client_cpu_s: f64,
    pub(crate) server_cpu_s: f64,
    pub(crate) client_usage: Usage,
    /// Of all its processes together.
    pub(crate) server_usage: Usage,
}

/// Nanoseconds, of a histogram of three digits.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Times {
    pub(crate) count: u64,
    pub(crate) min: u64,
    pub(crate) mean: f64,
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
}

impl Times {
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self {
            count: histogram.len(),
            min: if histogram.is_empty() { 0 } else { histogram.min() },
            mean: histogram.mean(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max(),
        }
    }
}

/// Three digits, from a nanosecond to ten minutes.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 600_000_000_000, 3).expect("bounds in order")
}

/// What stands above the table that begins with this row.
pub(crate) fn head(row: &Row) -> String {
    let Row { case, x: axis, client, server, .. } = row;
    let axis = *axis;
    let mut lines = vec![format!("client: {}", client.describe())];
    if server.describe() != client.describe() {
        lines.push(format!("server: {}", server.describe()));
    }
    if !client.optimised || !server.optimised {
        lines.push("BUILT WITHOUT OPTIMISATION: run it with --release".to_owned());
    }
    let (engine, wait) = (&case.engine, case.wait);
    let way = if case.local { "" } else { ", no shared memory" };
    let fixed: Vec<_> = [Axis::Size, Axis::Threads, Axis::Outstanding, Axis::Peers, Axis::Credits]
        .into_iter()
        .filter(|other| *other != axis && !(axis != Axis::Credits && *other == Axis::Credits))
        .map(|other| format!("{other} {}", other.show(other.of(case))))
        .collect();
    lines.push(format!(
        "engine {engine}{way}, wait {wait}, {}, by {}, metadata by {}{}",
        fixed.join(", "),
        match case.get {
            Get::Into => "get_into",
            Get::Token => "get",
            Get::View => "view",
        },
        row.result.metadata,
        if case.check { ", every byte checked" } else { "" }
    ));
    lines.extend(
        match case.mode {
            Mode::Latency => [
                "Closed loop: each thread waits for one put before the next, so this is service time,",
                "and a stall is one long put. What callers see at a given load: --rate (open loop).",
                "From `put` to the sender's token; `base` is the metadata's channel alone, both ways.",
            ],
            Mode::Rate => [
                "Open loop: from the instant at which each put was due, whether or not it could be made",
                "then, so that a stall counts for all who waited: no coordinated omission. Puts that",
                "could not be made at all are `unsent`, and count with the age they had at the end.",
            ],
            Mode::Throughput => [
                "As many puts under way as allowed: the time of each includes its time in the queue, and",
                "is what the loop that makes them sees. How long a put takes at a given load: --rate.",
                "Client and servers, each: threads (relays' / all), MiB resident and mapped.",
            ],
        }
        .map(str::to_owned),
    );
    lines.push(String::new());
    let last = match case.mode {
        Mode::Latency => "base µs",
        Mode::Rate => "unsent",
        Mode::Throughput => "CPUs",
    };
    let usage = match case.mode {
        Mode::Throughput => format!(" {:>13} {:>9} {:>11}", "threads", "resident", "mapped"),
        Mode::Latency | Mode::Rate => String::new(),
    };
    lines.push(format!(
        "{:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>8} {:>8} {:>8}{usage}  way",
        axis.to_string(),
        "puts",
        "p50 µs",
        "p90",
        "p99",
        "p99.9",
        "max",
        "puts/s",
        "GB/s",
        "get µs",
        last
    ));
    lines.join("\n")
}

impl Row {
    pub(crate) fn line(&self) -> String {
        let Measured { latency, get, base, .. } = &self.result;
        let last = match self.case.mode {
            Mode::Latency => base.map_or_else(|| "–".to_owned(), |base| micros(base.p50)),
            Mode::Rate => self.result.unsent.to_string(),
            Mode::Throughput => {
                let all = self.result.client_cpu_s + self.result.server_cpu_s;
                format!("{:.2}", all / self.result.seconds.max(1e-9))
            }
        };
        let usage = match self.case.mode {
            Mode::Throughput => self.usage(),
            Mode::Latency | Mode::Rate => String::new(),
        };
        // Fewer puts than a percentile speaks of say nothing of it.
        let p99 = if latency.count < 100 { "–".to_owned() } else { micros(latency.p99) };
        let p999 = if latency.count < 1000 { "–".to_owned() } else { micros(latency.p999) };
        format!(
            "{:>11} {:>9} {:>9} {:>9} {p99:>9} {p999:>9} {:>9} {:>10.0} {:>8.3} {:>8} {last:>8}{usage}  {}",
            self.x.show(self.x.of(&self.case)),
            latency.count,
            micros(latency.p50),
            micros(latency.p90),
            micros(latency.max),
            self.result.puts_per_s,
            self.result.bytes_per_s / 1e9,
            micros(get.p50),
            self.result.way
        )
    }

    fn usage(&self) -> String {
        let Measured { client_usage: client, server_usage: server, .. } = &self.result;
        let threads = |one: &Usage| format!("{}/{}", one.relay_threads, one.threads);
        let mib = |one: fn(&Usage) -> u64| format!("{}+{}", one(client) >> 10, one(server) >> 10);
        format!(
            " {:>13} {:>9} {:>11}",
            format!("{}+{}", threads(client), threads(server)),
            mib(|one| one.resident_kib),
            mib(|one| one.mapped_kib)
        )
    }
}

/// Three digits that matter, and no more than the histogram has.
fn micros(nanos: u64) -> String {
    let micros = Duration::from_nanos(nanos).as_secs_f64() * 1e6;
    match nanos {
        0..100_000 => format!("{micros:.2}"),
        100_000..1_000_000 => format!("{micros:.1}"),
        _ => format!("{micros:.0}"),
    }
}
