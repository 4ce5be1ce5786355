//! One of the processes: it puts what comes to its mind, gets what it is told of, and looks at every
//! byte.
//!
//! It says `put SEED METADATA`, `stats JSON` twice a second, and `end JSON`; `wrong TEXT` ends it. It
//! hears `get SEED METADATA`, until its input ends.

use std::{
    collections::BTreeMap,
    fs, io, panic,
    path::PathBuf,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use hdrhistogram::Histogram;
use mooncake_relay::{
    Config, EmbeddedEngine, Engine, Error, Metadata, MooncakeConfig, MooncakeEngine, Relay, Slot,
    Tensor, Token,
};
use parking_lot::Mutex;
use serde_json::json;

use crate::common::{Random, eventually, threads_named};

const CREDITS: u32 = 8;
const SLOT: usize = 1 << 20;
const PUTTERS: u64 = 2;
const GETTERS: u64 = 2;
/// How much of what it is told waits to be got; the rest is dropped, as by a receiver that is late.
const TOLD: usize = 64;
/// No call waits longer, so that nobody stands still for long when its peer does.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a get or a put may end with when peers stop, die, abort and are late.
const EXPECTED: [&str; 6] = ["Stale", "PeerFailed", "TimedOut", "Rejected", "Aborted", "Exhausted"];

struct Worker {
    relay: Relay,
    name: String,
    stopping: AtomicBool,
    puts: AtomicU64,
    seen: Mutex<Seen>,
}

/// What it saw.
struct Seen {
    gets: u64,
    bytes: u64,
    /// Errors by kind; a put's begin so.
    ends: BTreeMap<String, u64>,
    latency: Histogram<u64>,
}

pub(crate) fn run(kind: &str, name: &str, seed: u64, library: &str) {
    let engine = engine(kind, library);
    let config = Config::default()
        .with_engine_id(name)
        .with_credits(CREDITS)
        .with_slot_size(SLOT)
        .with_transfer_threads(2)
        .with_lease(Duration::from_millis(50))
        .with_quarantine(Duration::from_millis(200))
        .with_read_timeout(PATIENCE);
    let relay = Relay::new(engine, &config).unwrap();
    // Wherever it is, and whoever waits for whom: a kill would hide it.
    panic::set_hook(Box::new(|info| wrong(&info.to_string())));
    let seen = Seen {
        gets: 0,
        bytes: 0,
        ends: BTreeMap::new(),
        latency: Histogram::new_with_max(60_000_000, 3).unwrap(),
    };
    let worker = Worker {
        relay,
        name: name.to_owned(),
        stopping: AtomicBool::new(false),
        puts: AtomicU64::new(0),
        seen: Mutex::new(seen),
    };
    let (tell, told) = bounded(TOLD);
    println!("ready {}", worker.relay.health().session_id);
    thread::scope(|s| {
        s.spawn(|| worker.hear(tell));
        let mut threads = Vec::new();
        for n in 0..PUTTERS {
            threads.push(s.spawn({
                let worker = &worker;
                move || worker.put(&mut Random::of(seed ^ n))
            }));
        }
        for n in 0..GETTERS {
            let told = told.clone();
            threads.push(s.spawn({
                let worker = &worker;
                move || worker.get(&told, &mut Random::of(seed ^ n << 8))
            }));
        }
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            println!("stats {}", worker.stats());
            thread::sleep(Duration::from_millis(500)); // how often it tells
        }
    });
    worker.end();
}

fn engine(kind: &str, library: &str) -> Arc<dyn Engine> {
    let embedded = |local| EmbeddedEngine::builder("127.0.0.1:0").local(local).bind().unwrap();
    match kind {
        "local" => Arc::new(embedded(true)),
        "tcp" => Arc::new(embedded(false)),
        "mooncake" => {
            let library = Some(PathBuf::from(library));
            let config = MooncakeConfig { library, ..MooncakeConfig::default() };
            Arc::new(MooncakeEngine::open(&config).unwrap())
        }
        _ => panic!("no engine of kind {kind}"),
    }
}

impl Worker {
    /// Takes commands until there are no more.
    fn hear(&self, tell: Sender<(u64, String)>) {
        for line in io::stdin().lines().map_while(io::Result::ok) {
            let mut words = line.splitn(3, ' ');
            match (words.next(), words.next(), words.next()) {
                (Some("get"), Some(seed), Some(metadata)) => {
                    let told = (seed.parse().unwrap(), metadata.to_owned());
                    // Full: that put's lease ends.
                    if let Err(TrySendError::Disconnected(_)) = tell.try_send(told) {
                        break;
                    }
                }
                _ => wrong(&format!("was told {line:?}")),
            }
        }
        self.stopping.store(true, Ordering::Relaxed);
    }

    fn put(&self, random: &mut Random) {
        while !self.stopping.load(Ordering::Relaxed) {
            let seed = random.next();
            let len = random.size(SLOT as u64) as usize;
            let mut slot = match self.relay.acquire(len, PATIENCE) {
                Ok(slot) => slot,
                Err(error) => {
                    self.ended("acquire", &error);
                    continue;
                }
            };
            fill(&mut slot, seed);
            let (metadata, mut token) = self.relay.put(slot, Tensor::bytes(len)).unwrap();
            self.puts.fetch_add(1, Ordering::Relaxed);
            println!("put {seed} {metadata}");
            match random.below(10) {
                0 => drop(token),
                1 => {
                    spin(random.below(2000));
                    // Over already, at times.
                    let _ = self.relay.abort(&metadata);
                    self.back(token, seed);
                }
                2 => {
                    if let Some(outcome) = token.wait_timeout(spell(random.below(5000))) {
                        self.own_again(outcome, seed);
                    }
                }
                _ => self.back(token, seed),
            }
        }
    }

    fn back(&self, token: Token<Slot>, seed: u64) {
        self.own_again(token.wait(), seed);
    }

    /// Nobody has written into a slot that was put.
    fn own_again(&self, outcome: Result<Slot, Error>, seed: u64) {
        match outcome {
            Ok(slot) => holds(&slot, seed, "a slot that came back"),
            Err(error) => self.ended("put", &error),
        }
    }

    fn get(&self, told: &Receiver<(u64, String)>, random: &mut Random) {
        // Guarded by a byte on each side.
        let mut dest = vec![0xC7; SLOT + 2];
        for (seed, metadata) in told {
            let metadata: Metadata = metadata.parse().unwrap();
            let len = metadata.size();
            dest[len + 1] = 0xC7;
            let begun = Instant::now();
            let outcome = match random.below(8) {
                0 => self.relay.get_into(&metadata, &mut dest[1..=len], PATIENCE).map(|read| {
                    assert_eq!(read, len);
                    holds(&dest[1..=len], seed, "a destination");
                }),
                1 => self.view(&metadata, seed),
                2 => {
                    self.relay.get_timeout(&metadata, spell(random.below(3000))).and_then(|token| {
                        token.wait().map(|slot| holds(&slot, seed, "a slot got in a short time"))
                    })
                }
                3 => self.relay.get(&metadata).map(|token| {
                    spin(random.below(300));
                    let _ = self.relay.abort(&metadata);
                    if let Ok(slot) = token.wait() {
                        holds(&slot, seed, "a slot whose get was aborted late");
                    }
                }),
                4 => self.relay.get(&metadata).map(drop),
                _ => self.relay.get(&metadata).and_then(Token::wait).map(|slot| {
                    self.took(begun);
                    holds(&slot, seed, "a slot");
                }),
            };
            if dest[0] != 0xC7 || dest[len + 1] != 0xC7 {
                wrong("a byte beside the destination was written");
            }
            match outcome {
                Ok(()) => {
                    let mut seen = self.seen.lock();
                    seen.gets += 1;
                    seen.bytes += len as u64;
                }
                Err(error) => self.ended("get", &error),
            }
        }
    }

    fn view(&self, metadata: &Metadata, seed: u64) -> Result<(), Error> {
        // Only peers on the same host, by shared memory.
        let view = match self.relay.view(metadata) {
            Err(Error::Engine { .. } | Error::Config { .. }) => {
                let slot = self.relay.get(metadata)?.wait()?;
                holds(&slot, seed, "a slot in place of a view");
                return Ok(());
            }
            view => view?,
        };
        let mut bytes = vec![0; view.len()];
        view.copy_to(&mut bytes)?;
        holds(&bytes, seed, "a view");
        Ok(())
    }

    fn took(&self, begun: Instant) {
        self.seen.lock().latency.saturating_record(begun.elapsed().as_micros() as u64);
    }

    fn ended(&self, what: &str, error: &Error) {
        if !EXPECTED.contains(&error.kind()) {
            wrong(&format!("{what} of {} ended with {error}", self.name));
        }
        *self.seen.lock().ends.entry(format!("{what} {}", error.kind())).or_default() += 1;
    }

    fn stats(&self) -> serde_json::Value {
        let seen = self.seen.lock();
        json!({
            "puts": self.puts.load(Ordering::Relaxed),
            "gets": seen.gets,
            "bytes": seen.bytes,
            "timed": seen.latency.len(),
            "p50_us": seen.latency.value_at_quantile(0.5),
            "p999_us": seen.latency.value_at_quantile(0.999),
            "max_us": seen.latency.max(),
            "ends": seen.ends,
        })
    }

    /// Everything is free again, and nothing stays behind.
    fn end(self) {
        let stats = self.stats();
        let credits = CREDITS as usize;
        eventually_free(|| {
            let health = self.relay.health();
            let free = (health.free, health.receive_free, health.quarantined.len());
            (free == (credits, credits, 0) && health.status == "healthy")
                .then_some(())
                .ok_or_else(|| format!("{health:?}"))
        });
        let health = self.relay.health();
        let closed = self.relay.close(Duration::from_secs(20));
        if closed != Default::default() {
            wrong(&format!("at rest, the close still found {closed:?}"));
        }
        drop(self.relay);
        eventually(0, || threads_named("relay-"));
        let left = maps("mooncake-relay-");
        if left > 0 {
            wrong(&format!("{left} mappings of pools are left"));
        }
        println!("end {}", json!({"stats": stats, "counters": health.counters}));
    }
}

/// Longer than `common::eventually` waits: the real engine lets go of a dead peer in its own time.
fn eventually_free(mut ask: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while let Err(found) = ask() {
        if Instant::now() > deadline {
            wrong(&format!("not all is free: {found}"));
        }
        thread::sleep(Duration::from_millis(20)); // between two looks
    }
}

fn maps(name: &str) -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().matches(name).count()
}

/// Says what is wrong, and ends this process at once.
fn wrong(what: &str) -> ! {
    println!("wrong {what}");
    process::exit(3)
}

fn spell(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn spin(micros: u64) {
    let end = Instant::now() + spell(micros);
    while Instant::now() < end {
        thread::yield_now();
    }
}

/// The word at that place of the bytes with that seed.
fn word(seed: u64, at: usize) -> [u8; 8] {
    (seed ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (at, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, at)[..chunk.len()]);
    }
}

fn holds(bytes: &[u8], seed: u64, what: &str) {
    for (at, chunk) in bytes.chunks(8).enumerate() {
        if *chunk != word(seed, at)[..chunk.len()] {
            wrong(&format!("{what} of {} bytes is wrong at {}", bytes.len(), at * 8));
        }
    }
}
