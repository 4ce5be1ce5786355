//! The receiving side: makes a relay for each case, and gets what its lanes tell of.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use hdrhistogram::Histogram;
use mooncake_relay::{Config, Metadata, Relay, Slot, Token, WaitStrategy};
use parking_lot::Mutex;
use serde_json::json;

use crate::{
    Result, args,
    case::{Case, Get, size_name},
    machine::{self, Machine, Usage},
    pattern,
    pipe::Pipe,
    row,
    wire::{Answer, Ask, Heard, Hello, Lane, SHARED, SYNC, VERSION},
};

/// Flags of the server.
#[derive(Args, Debug)]
pub(crate) struct Server {
    /// Where clients connect: HOST:PORT, port 0 for any. Whoever reaches it can have this process
    /// use memory and cores: name an address that only your own machines reach.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// The most memory that clients may ask for at once, all together.
    #[arg(long, default_value = "8G", value_parser = crate::case::size)]
    memory: usize,
    /// End when standard input does.
    #[arg(long, hide = true)]
    child: bool,
}

/// A get may take as long.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a connection may keep silent about what it is.
const GREETING: Duration = Duration::from_secs(10);
/// More connections at once are closed.
const MOST_CONNECTIONS: usize = 8192;
const MOST_THREADS: usize = 1024;

pub(crate) fn serve(server: &Server) -> Result<()> {
    let listener = TcpListener::bind(&server.listen).map_err(|error| {
        format!("cannot listen on {}: {error}: choose another with --listen", server.listen)
    })?;
    let address = listener.local_addr()?;
    let said = if server.child {
        thread::spawn(|| {
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            process::exit(0); // whoever started this is gone, or has no more to ask
        });
        json!({"listening": address.to_string()}).to_string()
    } else {
        format!(
            "listening on {address}; Ctrl-C ends it. On the other host:\n    cargo run --release \
             --example perftest -- client {}",
            reach(address)
        )
    };
    // A server whose output nobody reads serves all the same.
    let _ = writeln!(io::stdout(), "{said}");
    let house = Arc::new(House {
        memory: server.memory,
        taken: AtomicUsize::new(0),
        connections: AtomicUsize::new(0),
        sessions: Mutex::default(),
    });
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                say(&format!("cannot accept a connection: {error}"));
                thread::sleep(Duration::from_millis(100)); // out of descriptors: it may pass
                continue;
            }
        };
        if house.connections.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTIONS {
            house.connections.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let guest = Arc::clone(&house);
        let started = thread::Builder::new().spawn(move || {
            if let Err(error) = guest.receive(stream) {
                say(&error.to_string());
            }
            guest.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = started {
            house.connections.fetch_sub(1, Ordering::Relaxed);
            say(&format!("cannot start a thread: {error}"));
        }
    }
    Ok(())
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "perftest server: {text}");
}

/// What to call it by; of a server on every address, only the port is known.
fn reach(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        format!("THIS-HOST:{}", address.port())
    } else {
        address.to_string()
    }
}

/// What all connections share.
struct House {
    memory: usize,
    taken: AtomicUsize,
    connections: AtomicUsize,
    sessions: Mutex<HashMap<(u64, usize), Arc<Session>>>,
}

/// A relay that gets, for one case.
struct Session {
    case: Case,
    relay: Relay,
    /// One for each lane: how long its gets took.
    times: Mutex<Vec<Arc<Mutex<Histogram<u64>>>>>,
    lanes: AtomicU64,
}

impl House {
    fn receive(&self, stream: TcpStream) -> Result<()> {
        let mut lane = Lane::new(stream, WaitStrategy::Park)?;
        let hello = match lane.hear(Some(Instant::now() + GREETING))? {
            Heard::Line(line) => serde_json::from_str(line),
            Heard::Nothing | Heard::End => return Ok(()), // somebody who only looked
        };
        match hello {
            Ok(Hello::Peer { version: VERSION, session, peer, case }) => {
                self.host(&mut lane, (session, peer), *case)
            }
            Ok(Hello::Peer { version, .. }) => {
                let error = format!(
                    "this perftest speaks version {VERSION} and the client's {version}: build both \
                     from one version"
                );
                Ok(lane.tell(&Answer::Failed { error })?)
            }
            Ok(Hello::Lane { session, peer, lane: number, shares }) => {
                let found = self.sessions.lock().get(&(session, peer)).cloned();
                let session = found.ok_or("a lane of no session: its client has ended")?;
                if shares {
                    share(&mut lane, &session.case)?;
                }
                session.serve(lane, number)
            }
            Err(error) => {
                let error = format!("no perftest client spoke here: {error}");
                Ok(lane.tell(&Answer::Failed { error })?)
            }
        }
    }

    /// Makes a relay, and keeps it as long as the client is there.
    fn host(&self, lane: &mut Lane, key: (u64, usize), case: Case) -> Result<()> {
        // Slots, and for each lane a buffer and what metadata goes by.
        let buffers = (case.receive_credits() as usize).saturating_add(case.threads);
        let lanes = case.threads.saturating_mul(8 * case.lane_words());
        let needed = buffers.saturating_mul(case.slot_size().saturating_add(4096));
        let needed = needed.saturating_add(lanes);
        let taken = self.taken.fetch_add(needed, Ordering::Relaxed);
        let outcome = if taken.saturating_add(needed) > self.memory {
            let error = format!(
                "the case needs {} MiB here and this server gives {} (--memory): fewer peers or \
                 outstanding puts, or smaller ones",
                needed >> 20,
                size_name(self.memory)
            );
            lane.tell(&Answer::Failed { error }).map_err(Into::into)
        } else {
            match Session::new(case, lane.stream().local_addr()?) {
                Ok(session) => self.keep(lane, key, session),
                Err(error) => {
                    lane.tell(&Answer::Failed { error: error.to_string() }).map_err(Into::into)
                }
            }
        };
        self.taken.fetch_sub(needed, Ordering::Relaxed);
        outcome
    }

    fn keep(&self, lane: &mut Lane, key: (u64, usize), session: Session) -> Result<()> {
        let session = Arc::new(session);
        self.sessions.lock().insert(key, Arc::clone(&session));
        let outcome = session.answer(lane);
        self.sessions.lock().remove(&key);
        outcome
    }
}

/// Offers the client memory for the lines of its lane; it may be on a host that only seems to be this.
fn share(lane: &mut Lane, case: &Case) -> Result<()> {
    let Ok((pipe, address)) = Pipe::create(case.lane_words(), RandomState::new().hash_one(0))
    else {
        return Ok(lane.tell(&Answer::Done)?);
    };
    lane.tell(&Answer::Pipe { address })?;
    match lane.hear(Some(Instant::now() + GREETING))? {
        Heard::Line(SHARED) => lane.go_by(pipe),
        Heard::Line(_) => {}
        Heard::Nothing | Heard::End => return Err("a client left while it opened a lane".into()),
    }
    Ok(())
}

impl Session {
    fn new(case: Case, own: SocketAddr) -> Result<Self> {
        if !(1..=MOST_THREADS).contains(&case.threads) || case.outstanding == 0 {
            let threads = case.threads;
            return Err(format!("{threads} threads: give 1 to {MOST_THREADS}, and puts").into());
        }
        let config = Config::default()
            .with_engine_id("perftest-server")
            .with_credits(1)
            .with_receive_credits(case.receive_credits())
            .with_slot_size(case.slot_size())
            .with_transfer_threads(case.transfer_threads)
            .with_wait(case.wait)
            .with_huge_pages(case.huge_pages)
            .with_queued_gets(65_536);
        let engine = args::engine(&case, &args::at(own.ip()), None)?;
        let relay = Relay::new(engine, &config)?;
        Ok(Self { case, relay, times: Mutex::default(), lanes: AtomicU64::new(0) })
    }

    /// The connection that is no lane, until its end.
    fn answer(&self, lane: &mut Lane) -> Result<()> {
        let before = machine::cpu_time();
        lane.tell(&Answer::Ready { machine: Box::new(Machine::here()) })?;
        let mut cpu = before;
        loop {
            let ask = match lane.hear(None)? {
                Heard::Line(line) => serde_json::from_str(line)?,
                Heard::Nothing => continue,
                Heard::End => return Ok(()),
            };
            match ask {
                Ask::Reset => {
                    self.times.lock().iter().for_each(|times| times.lock().reset());
                    cpu = machine::cpu_time();
                    lane.tell(&Answer::Done)?;
                }
                Ask::Report => {
                    let mut all = row::histogram();
                    for times in &*self.times.lock() {
                        all.add(&*times.lock())?;
                    }
                    let cpu_s = (machine::cpu_time() - cpu).as_secs_f64();
                    let (get, way) = (row::Times::of(&all), self.way());
                    let (process, usage) = (process::id(), Usage::here());
                    lane.tell(&Answer::Report { get, way, process, cpu_s, usage })?;
                }
            }
        }
    }

    /// By which way the bytes came.
    fn way(&self) -> String {
        let peers = self.relay.health().peers;
        peers.first().map_or_else(|| "none".to_owned(), |peer| peer.way.clone())
    }

    /// A lane, until its end.
    fn serve(&self, mut lane: Lane, number: usize) -> Result<()> {
        lane.read_by(self.case.lane_wait(machine::allowed().len()));
        let of_lane = self.lanes.fetch_add(1, Ordering::Relaxed) as usize;
        if of_lane >= self.case.threads {
            return Err("more lanes than the case has threads".into());
        }
        let times = Arc::new(Mutex::new(row::histogram()));
        self.times.lock().push(Arc::clone(&times));
        let mut getter = Getter {
            session: self,
            number,
            times: &times,
            dest: vec![0; if self.case.get == Get::Token { 0 } else { self.case.size }],
            tokens: VecDeque::new(),
            gets: 0,
        };
        let outcome = machine::pin(&self.case.receiver_cores, of_lane)
            .map_err(Into::into)
            .and_then(|()| getter.run(&mut lane));
        if let Err(error) = outcome {
            // The client hears why; what it still sends must not come back as a reset before that.
            let _ = lane.tell(&Answer::Failed { error: error.to_string() });
            lane.drain();
        }
        Ok(())
    }
}

/// What gets the puts of one lane.
struct Getter<'s> {
    session: &'s Session,
    number: usize,
    times: &'s Mutex<Histogram<u64>>,
    dest: Vec<u8>,
    tokens: VecDeque<(Token<Slot>, Instant)>,
    gets: u64,
}

impl Getter<'_> {
    fn run(&mut self, lane: &mut Lane) -> Result<()> {
        let most = self.session.case.tokens();
        loop {
            // What is under way is looked after whenever no metadata is there.
            let heard = if self.tokens.is_empty() { lane.hear(None)? } else { lane.look()? };
            match heard {
                Heard::End => return Ok(()),
                Heard::Nothing => self.settle()?,
                Heard::Line(SYNC) => {
                    while !self.tokens.is_empty() {
                        self.settle()?;
                    }
                    lane.tell(&Answer::Got { gets: self.gets })?;
                }
                // As long as metadata is, and answered at once: what the lane itself costs.
                Heard::Line(line) if line.starts_with("{\"cmd\"") => lane.say("{}")?,
                Heard::Line(line) => {
                    let metadata: Metadata = line.parse()?;
                    self.get(&metadata)?;
                    while self.tokens.len() >= most {
                        self.settle()?;
                    }
                }
            }
        }
    }

    fn get(&mut self, metadata: &Metadata) -> Result<()> {
        let relay = &self.session.relay;
        let begun = Instant::now();
        match self.session.case.get {
            Get::Into => {
                let len = relay.get_into(metadata, &mut self.dest, PATIENCE)?;
                self.record(begun);
                self.check(len, None)
            }
            Get::View => {
                let view = relay.view(metadata)?;
                if self.session.case.check {
                    view.copy_to(&mut self.dest)?;
                }
                let len = view.len();
                drop(view);
                self.record(begun);
                self.check(len, None)
            }
            Get::Token => {
                self.tokens.push_back((relay.get_timeout(metadata, PATIENCE)?, begun));
                Ok(())
            }
        }
    }

    /// Waits for the oldest get.
    fn settle(&mut self) -> Result<()> {
        let Some((token, begun)) = self.tokens.pop_front() else { return Ok(()) };
        let slot = token.wait()?;
        self.record(begun);
        self.check(slot.len(), Some(&slot))
    }

    fn record(&self, begun: Instant) {
        self.times.lock().saturating_record(begun.elapsed().as_nanos() as u64);
    }

    /// The bytes, which are in `dest` or in a slot.
    fn check(&mut self, len: usize, slot: Option<&Slot>) -> Result<()> {
        let put = self.gets;
        self.gets += 1;
        let wanted = self.session.case.size;
        if len != wanted {
            return Err(format!("put {put} has {len} bytes, not {wanted}: report this").into());
        }
        if !self.session.case.check {
            return Ok(());
        }
        let bytes = match slot {
            Some(slot) => &slot[..],
            None => &self.dest[..len],
        };
        match pattern::difference(bytes, self.number, put) {
            None => Ok(()),
            Some(at) => Err(format!(
                "the data check failed: byte {at} of put {put} of lane {} is not that put's: \
                 report this, with the command",
                self.number
            )
            .into()),
        }
    }
}
