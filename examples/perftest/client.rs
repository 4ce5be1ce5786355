//! The putting side: its relay, its connections to the servers, and a case from begin to end.

use std::{
    collections::HashMap,
    net::{TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hdrhistogram::Histogram;
use mooncake_relay::{Config, Relay, WaitStrategy};

use crate::{
    Result, args,
    case::{Case, Mode},
    machine::{self, Machine, Usage},
    pipe::Pipe,
    row::{self, Measured, Times},
    wire::{APART, Answer, Ask, Hello, Lane, SHARED, SYNC, VERSION, gone},
    worker::{Round, Worker},
};

/// How long a put may stay unread before it is an error.
const LEASE: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(10);
/// Round trips of a lane without a transfer.
const BASES: usize = 200;

/// Where the client's own engine is, and whether metadata may go by shared memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    pub(crate) shares: bool,
    pub(crate) listen: Option<String>,
    pub(crate) advertise: Option<String>,
}

/// Measures one case with these servers: the row's numbers, and the first server's machine.
pub(crate) fn measure(
    case: &Case,
    servers: &[String],
    place: &Place,
) -> Result<(Measured, Machine)> {
    let session = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let server = |peer: usize| &servers[peer % servers.len()];
    let mut controls = Vec::new();
    for peer in 0..case.peers {
        let mut control = connect(server(peer), WaitStrategy::Park)?;
        // A limit on descriptors is met here, where it can be named.
        let hello = Hello::Peer { version: VERSION, session, peer, case: Box::new(case.clone()) };
        control.tell(&hello).map_err(|_| gone(control.peer()))?;
        controls.push(control);
    }
    let mut machine = None;
    for control in &mut controls {
        match control.expect()? {
            Answer::Ready { machine: there } => machine = machine.or(Some(*there)),
            other => return Err(unexpected(control, &other)),
        }
    }
    let relay = relay(case, &controls[0], place)?;
    let mut workers = Vec::new();
    for thread in 0..case.threads {
        let mut lanes = Vec::new();
        for peer in 0..case.peers {
            let mut lane = connect(server(peer), case.wait)?;
            let shares = place.shares && lane.may_share();
            lane.tell(&Hello::Lane { session, peer, lane: thread, shares })
                .map_err(|_| gone(lane.peer()))?;
            if shares {
                share(&mut lane)?;
            }
            lanes.push(lane);
        }
        workers.push(Worker::new(case, &relay, thread, lanes));
    }

    let base = (case.mode == Mode::Latency).then(|| base(&mut workers[0])).transpose()?;
    let warm_up = case.warm_up();
    if !warm_up.is_zero() {
        all(&mut workers, warm_up)?;
        workers.iter_mut().try_for_each(Worker::finish)?; // so that none of it counts
    }
    for control in &mut controls {
        control.ask(&Ask::Reset)?;
    }
    let cpu = machine::cpu_time();
    let rounds = all(&mut workers, case.duration())?;
    let client_cpu_s = (machine::cpu_time() - cpu).as_secs_f64();
    let client_usage = Usage::here();
    workers.iter_mut().try_for_each(Worker::finish)?;

    let mut measured = sum(case, &rounds)?;
    (measured.base, measured.client_cpu_s) = (base, client_cpu_s);
    measured.client_usage = client_usage;
    measured.metadata = metadata_by(&workers);
    collect(&mut controls, &mut measured)?;
    drop(workers);
    Ok((measured, machine.expect("there is a peer")))
}

fn connect(server: &str, wait: WaitStrategy) -> Result<Lane> {
    let refused = |error: &dyn std::fmt::Display| {
        format!(
            "cannot reach a server at {server}: {error}. Start one there (`perftest server --listen \
             HOST:PORT`), and let the firewall pass that port"
        )
    };
    let addresses = server.to_socket_addrs().map_err(|error| refused(&error))?;
    let mut last = refused(&"the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok(Lane::new(stream, wait)?),
            Err(error) => last = refused(&error),
        }
    }
    Err(last.into())
}

/// Takes the memory that the server offers for a lane, if this is its host indeed.
fn share(lane: &mut Lane) -> Result<()> {
    let answer = match lane.expect()? {
        Answer::Done => return Ok(()),
        Answer::Pipe { address } => Pipe::open(&address),
        other => return Err(unexpected(lane, &other)),
    };
    lane.say(if answer.is_ok() { SHARED } else { APART })?;
    if let Ok(pipe) = answer {
        lane.go_by(pipe);
    }
    Ok(())
}

fn metadata_by(workers: &[Worker<'_>]) -> String {
    let lanes = || workers.iter().flat_map(Worker::lanes);
    let shared = lanes().filter(|lane| lane.is_shared()).count();
    match shared {
        0 => "socket",
        _ if shared == lanes().count() => "shared memory",
        _ => "shared memory and sockets",
    }
    .to_owned()
}

fn relay(case: &Case, control: &Lane, place: &Place) -> Result<Relay> {
    let own = control.stream().local_addr()?.ip();
    let listen = place.listen.clone().unwrap_or_else(|| args::at(own));
    let config = Config::default()
        .with_engine_id("perftest-client")
        .with_credits(case.credits)
        .with_receive_credits(1)
        .with_slot_size(case.slot_size())
        .with_lease(LEASE)
        .with_wait(case.wait)
        .with_huge_pages(case.huge_pages);
    let engine = args::engine(case, &listen, place.advertise.clone())?;
    Ok(Relay::new(engine, &config)?)
}

fn unexpected(control: &Lane, answer: &Answer) -> Box<dyn std::error::Error + Send + Sync> {
    format!("{} answers {answer:?}: build both sides from one version", control.peer()).into()
}

/// The first lane alone: a text as long as metadata there, and a line back.
fn base(worker: &mut Worker<'_>) -> Result<Times> {
    let mut histogram = row::histogram();
    for round in 0..BASES + BASES / 10 {
        let taken = worker.echo()?;
        if round >= BASES / 10 {
            histogram.saturating_record(taken.as_nanos() as u64);
        }
    }
    Ok(Times::of(&histogram))
}

/// Every worker on a thread of its own, for so long. The first error ends them all.
fn all(workers: &mut [Worker<'_>], time: Duration) -> Result<Vec<Round>> {
    let begin = Instant::now() + Duration::from_millis(2); // until all threads are there
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|worker| scope.spawn(move || worker.round(begin, time)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a panic has been said"))
            .collect::<Result<Vec<_>>>()
    })
}

fn sum(case: &Case, rounds: &[Round]) -> Result<Measured> {
    let mut latency: Histogram<u64> = row::histogram();
    let (mut puts_per_s, mut seconds, mut unsent) = (0.0, 0.0_f64, 0);
    for round in rounds {
        latency.add(&round.times)?;
        let own = round.taken.as_secs_f64();
        puts_per_s += round.puts as f64 / own.max(1e-9);
        seconds = seconds.max(own);
        unsent += round.unsent;
    }
    Ok(Measured {
        latency: Times::of(&latency),
        get: Times::default(),
        base: None,
        seconds,
        puts_per_s,
        bytes_per_s: puts_per_s * case.size as f64,
        unsent,
        way: String::new(),
        metadata: String::new(),
        client_cpu_s: 0.0,
        server_cpu_s: 0.0,
        client_usage: Usage::default(),
        server_usage: Usage::default(),
    })
}

/// The receivers' own figures. Of several relays the median of `get` is that of the slowest.
fn collect(controls: &mut [Lane], measured: &mut Measured) -> Result<()> {
    let mut ways = Vec::new();
    // Each process once, however many of the relays it has.
    let mut processes = HashMap::new();
    for control in controls {
        match control.ask(&Ask::Report)? {
            Answer::Report { get, way, process, cpu_s, usage } => {
                if get.p50 >= measured.get.p50 {
                    measured.get = get;
                }
                processes.insert((control.peer().to_owned(), process), (cpu_s, usage));
                if !ways.contains(&way) {
                    ways.push(way);
                }
            }
            other => return Err(unexpected(control, &other)),
        }
    }
    measured.way = ways.join("+");
    for (cpu_s, usage) in processes.into_values() {
        measured.server_cpu_s += cpu_s;
        measured.server_usage.add(usage);
    }
    Ok(())
}

/// Asks a lane whether all was got, and how many those were.
pub(crate) fn sync(lane: &mut Lane) -> Result<u64> {
    lane.say(SYNC).map_err(|error| format!("{}: {error}", gone(lane.peer())))?;
    match lane.expect()? {
        Answer::Got { gets } => Ok(gets),
        other => Err(unexpected(lane, &other)),
    }
}
