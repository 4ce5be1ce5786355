//! The flags, and the cases that they make.

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use clap::{Args, Parser, Subcommand};
use mooncake_relay::{Engine, EngineOptions, HugePages, WaitStrategy, open_engine};

use crate::{
    Result,
    case::{self, Axis, Case, Get, Mode},
    plot::Plot,
    server::Server,
};

/// Measures how long puts take, and how many fit into a second, between processes or hosts.
///
/// Without a command it measures on this host, between itself and processes that it starts. With
/// `server` here and `client HOST:PORT` there it measures between hosts: the client puts, the server
/// gets, and a put's time is from `put` to the sender's token.
#[derive(Parser, Debug)]
#[command(version, args_conflicts_with_subcommands = true, after_help = HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: Run,
}

const HELP: &str = "\
What is measured:
  --mode latency     A closed loop: each thread makes one put, waits for its token, makes the next. It
                     measures service time. While a put stalls no other is made, so the stall is one
                     bad sample however long it lasts.
  --rate R           An open loop: a put is due every 1/R seconds whether or not those before have
                     ended, and its time counts from the instant it was due. So a stall counts for all
                     that were due meanwhile: coordinated omission is avoided. Use it for percentiles.
  --mode throughput  As many puts as --outstanding allows, as fast as they end.
  --parked           Nothing happens for 300 µs before each put, so that threads have gone to sleep.
  --check            Every put has bytes of its own, and the receiver looks at every one of them.
  --x, --values      What differs from row to row: size, outstanding, threads, peers, credits or
                     transfer-threads.

Examples:
  perftest                                          latency by size, on this host
  perftest --no-local --rate 2000 --size 64K        an open loop over TCP
  perftest --mode throughput --x outstanding --json > out.jsonl
  perftest plot --out out.svg out.jsonl other.jsonl
  perftest server --listen 10.0.0.7:18515           and on the other host
  perftest client 10.0.0.7:18515 --check";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Gets what clients put, case after case, until it is ended.
    Server(Server),
    /// Puts to servers, and shows the times.
    Client {
        /// Where servers listen; several peers are dealt to several servers in turn.
        #[arg(required = true, value_name = "HOST:PORT")]
        servers: Vec<String>,
        #[command(flatten)]
        run: Box<Run>,
    },
    /// Draws what --json printed: latency and throughput, several runs over each other.
    Plot(Plot),
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    #[arg(long, value_enum, default_value = "latency")]
    mode: Mode,
    /// Puts a second, of all threads together: an open loop.
    #[arg(long, value_parser = rate, conflicts_with_all = ["mode", "parked"])]
    rate: Option<f64>,
    /// Nothing for 300 µs before each put.
    #[arg(long)]
    parked: bool,
    /// What differs from row to row [default: size, or none where --size is given].
    #[arg(long, value_enum)]
    x: Option<Axis>,
    /// Its values, with commas between them.
    #[arg(long, value_delimiter = ',', value_parser = case::size)]
    values: Vec<usize>,
    /// Bytes a put: 4096, 64K, 1M.
    #[arg(long, value_parser = case::size)]
    size: Option<usize>,
    /// Measure each row so many times, and show the one of the median throughput.
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub(crate) runs: usize,
    /// Putting threads, which share one relay.
    #[arg(long, default_value_t = 1, value_parser = positive)]
    threads: usize,
    /// Puts under way for each thread [default: 1; 16 for throughput; 64 for --rate].
    #[arg(long, value_parser = positive)]
    outstanding: Option<usize>,
    /// Receiving relays.
    #[arg(long, default_value_t = 1, value_parser = positive)]
    peers: usize,
    /// Slots of the putting relay [default: one for each put under way, in 256 MiB at most].
    #[arg(long)]
    credits: Option<u32>,
    /// How the receiver gets.
    #[arg(long, value_enum, default_value = "into")]
    get: Get,
    /// The receivers' threads for `--get token`.
    #[arg(long, default_value_t = 1, value_parser = positive)]
    transfer_threads: usize,
    /// What waits: auto, spin, yield or park.
    #[arg(long, default_value_t = WaitStrategy::Auto)]
    wait: WaitStrategy,
    /// Cores of the putting threads, in turn: 0,2.
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    /// Cores of the receivers' threads, in turn.
    #[arg(long, value_delimiter = ',')]
    receiver_cores: Vec<usize>,
    /// Seconds a row.
    #[arg(long, default_value_t = 1.0, value_parser = seconds)]
    duration: f64,
    /// Seconds before each row that do not count.
    #[arg(long, default_value_t = 0.2, value_parser = seconds)]
    warm_up: f64,
    /// Puts of each thread a row, at most.
    #[arg(long)]
    count: Option<u64>,
    /// Compare every byte of every put.
    #[arg(long)]
    check: bool,
    /// embedded or mooncake.
    #[arg(long, default_value = "embedded")]
    engine: String,
    /// Use TCP also between processes of one host.
    #[arg(long)]
    no_local: bool,
    /// tcp; of the Mooncake engine also rdma or nvlink.
    #[arg(long, default_value = "tcp")]
    protocol: String,
    /// RDMA devices of the Mooncake engine.
    #[arg(long, default_value = "")]
    device: String,
    /// off, prefer or require.
    #[arg(long, default_value_t = HugePages::Off)]
    huge_pages: HugePages,
    /// Where this side's engine listens, for the receivers to read from [default: the address by which
    /// the server is reached, any port].
    #[arg(long)]
    pub(crate) listen: Option<String>,
    /// How receivers reach it, if not by that: HOST[:CONTROL[:DATA]].
    #[arg(long)]
    pub(crate) advertise: Option<String>,
    /// Without `client`: how many server processes to start [default: one for each peer].
    #[arg(long, value_parser = positive)]
    processes: Option<usize>,
    /// Send metadata by a socket also between processes of one host, where it goes by shared memory.
    #[arg(long)]
    pub(crate) metadata_by_socket: bool,
    /// Write the rows there, too, as --json prints them.
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// A line of JSON for each row, in place of the table.
    #[arg(long)]
    pub(crate) json: bool,
    /// What a plot calls this run.
    #[arg(long)]
    label: Option<String>,
}

/// Threads, and peers.
const MOST: usize = 1024;

impl Run {
    /// What differs between the cases, and the cases.
    pub(crate) fn cases(&self) -> Result<(Axis, Vec<Case>)> {
        let axis = self.x.unwrap_or(Axis::Size);
        let values = match (self.x, self.size) {
            _ if !self.values.is_empty() => self.values.clone(),
            (None, Some(size)) => vec![size],
            _ => axis.values().to_vec(),
        };
        let several = axis == Axis::Outstanding || self.outstanding.is_some_and(|puts| puts > 1);
        if several && self.rate.is_none() && self.mode == Mode::Latency {
            return Err("--mode latency has one put under way for each thread: use --mode \
                        throughput or --rate with --outstanding"
                .into());
        }
        if values.contains(&0) && axis != Axis::Size {
            return Err(format!("--values: there is no row with 0 {axis}").into());
        }
        let cases: Vec<_> = values.iter().map(|&value| self.case(axis, value)).collect();
        if let Some(case) = cases.iter().find(|case| !(1..=65_536).contains(&case.credits)) {
            return Err(format!("{} credits: a relay has 1 to 65536", case.credits).into());
        }
        if let Some(case) = cases.iter().find(|case| case.threads.max(case.peers) > MOST) {
            let (threads, peers) = (case.threads, case.peers);
            return Err(format!("{threads} threads, {peers} peers: give {MOST} at most").into());
        }
        Ok((axis, cases))
    }

    pub(crate) fn label(&self) -> String {
        self.label.clone().unwrap_or_else(|| {
            let way = if self.no_local { ", TCP" } else { "" };
            let mode = match (self.rate, self.mode) {
                (Some(rate), _) => format!("{rate} puts/s"),
                (None, Mode::Throughput) => "throughput".to_owned(),
                (None, _) if self.parked => "latency, parked".to_owned(),
                (None, _) => "latency".to_owned(),
            };
            format!("{}{way}, {mode}", self.engine)
        })
    }

    /// Server processes to start where nobody named any.
    pub(crate) fn processes(&self, cases: &[Case]) -> usize {
        let peers = cases.iter().map(|case| case.peers).max().unwrap_or(1);
        self.processes.unwrap_or(peers).clamp(1, 64)
    }

    fn case(&self, axis: Axis, value: usize) -> Case {
        let mode = if self.rate.is_some() { Mode::Rate } else { self.mode };
        let of = |own: Axis, otherwise: usize| if axis == own { value } else { otherwise };
        let few = match mode {
            Mode::Latency => 1,
            _ if axis == Axis::Credits => 1024, // so that it is the slots that bound it
            Mode::Rate => 64,
            Mode::Throughput => 16,
        };
        let size = of(Axis::Size, self.size.unwrap_or(4096));
        let threads = of(Axis::Threads, self.threads);
        let outstanding = match mode {
            Mode::Latency => 1,
            _ => of(Axis::Outstanding, self.outstanding.unwrap_or(few)),
        };
        let credits = match self.credits {
            Some(credits) => credits as usize,
            None => {
                let most = ((256 << 20) / size.max(4096)).max(2);
                threads.saturating_mul(outstanding).min(most).min(65_536)
            }
        };
        Case {
            mode,
            size,
            threads,
            outstanding,
            peers: of(Axis::Peers, self.peers),
            credits: u32::try_from(of(Axis::Credits, credits)).unwrap_or(u32::MAX),
            rate: self.rate,
            idle_us: if self.parked { 300 } else { 0 },
            get: self.get,
            check: self.check,
            wait: self.wait,
            transfer_threads: of(Axis::TransferThreads, self.transfer_threads),
            cores: self.cores.clone(),
            receiver_cores: self.receiver_cores.clone(),
            engine: self.engine.clone(),
            local: !self.no_local,
            protocol: self.protocol.clone(),
            device: self.device.clone(),
            huge_pages: self.huge_pages,
            warm_up_s: self.warm_up,
            duration_s: self.duration,
            count: self.count,
        }
    }
}

/// The engine of a case, listening there.
pub(crate) fn engine(
    case: &Case,
    listen: &str,
    advertise: Option<String>,
) -> Result<Arc<dyn Engine>> {
    let options = EngineOptions {
        listen: listen.to_owned(),
        advertise,
        local: case.local,
        protocol: case.protocol.clone(),
        device_name: case.device.clone(),
        ..EngineOptions::default()
    };
    Ok(open_engine(&case.engine, &options)?)
}

/// Any port of that address.
pub(crate) fn at(ip: IpAddr) -> String {
    // A server on `[::]` sees IPv4 clients by an address that an IPv4 socket does not have.
    match ip.to_canonical() {
        IpAddr::V4(ip) => format!("{ip}:0"),
        IpAddr::V6(ip) => format!("[{ip}]:0"),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=65_536) => Ok(number),
        _ => Err("expected a number from 1 to 65536".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..=86_400.0).contains(&number) => Ok(number),
        _ => Err("expected seconds, from 0 to 86400".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.001..=1e9).contains(&number) => Ok(number),
        _ => Err("expected puts a second, from 0.001 to 1000000000".to_owned()),
    }
}
