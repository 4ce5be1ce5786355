//! Two processes, and between them a pair of relays for each way.

use std::{
    env,
    fs::File,
    io::{self, Read},
    path::Path,
    process::{self, Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use mooncake_relay::{Config, EmbeddedEngine, Engine, Metadata, Relay, WaitStrategy};
use rustix::{
    thread::{sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};

use super::{
    PATIENCE,
    mailbox::{self, LANES, Lane},
    receiver::pin,
};

pub(crate) const LARGEST: usize = 64 << 20;
/// What the receiver is asked for; above it in the word is the number of the way.
pub(crate) const HOP: u64 = 0;
pub(crate) const TEXT: u64 = 1;
pub(crate) const GET: u64 = 2;
pub(crate) const VIEW: u64 = 3;
const END: u64 = 4;
/// Pins that lane's thread to the core whose number stands above it, or lets it go.
const PIN: u64 = 5;
const ANYWHERE: u64 = 1 << 32;
const WAY: u32 = 8;

/// One relay of this process; the other process has its like.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) relay: Relay,
    /// The largest payload.
    pub(crate) holds: usize,
    number: u64,
    gets: AtomicU64,
}

impl Way {
    /// The word for the mailbox.
    pub(crate) fn ask(&self, what: u64) -> u64 {
        what | self.number << WAY
    }

    /// A relay whose waits always sleep says nothing where there is no pause.
    pub(crate) fn fits(&self, pause: Duration) -> bool {
        self.holds == LARGEST || !pause.is_zero()
    }

    /// The bytes came this way and no other.
    fn prove(&self) {
        let counters = self.relay.health().counters.engine;
        let count = |name| counters.get(name).copied().unwrap_or(0);
        let gets = self.gets.load(Ordering::Relaxed);
        let (local, tcp) = (count("reads_local"), count("reads_tcp"));
        println!("{}: {gets} gets and views, reads_local {local}, reads_tcp {tcp}", self.name);
        match self.name {
            "TCP" => assert_eq!((local, tcp), (0, gets)),
            "Mooncake" => assert_eq!((local, tcp), (0, 0)),
            _ => assert_eq!((local, tcp), (gets, 0)),
        }
    }
}

/// The ways that there are here.
fn ways() -> Vec<Way> {
    let embedded = |local| {
        let engine = EmbeddedEngine::builder("127.0.0.1:0").local(local).bind();
        Arc::new(engine.expect("a port is free")) as Arc<dyn Engine>
    };
    let mut engines = vec![
        ("same host", embedded(true), LARGEST, WaitStrategy::Auto),
        ("same host, park", embedded(true), 64 << 10, WaitStrategy::Park),
        ("TCP", embedded(false), LARGEST, WaitStrategy::Auto),
    ];
    match mooncake() {
        Ok(engine) => engines.push(("Mooncake", engine, LARGEST, WaitStrategy::Auto)),
        Err(why) => println!("Mooncake is SKIPPED: {why}"),
    }
    let relay = |(number, (name, engine, holds, wait)): (usize, (_, _, usize, _))| Way {
        name,
        relay: {
            let config = Config::default().with_credits(LANES as u32).with_slot_size(holds);
            Relay::new(engine, &config.with_wait(wait)).expect("the memory is there")
        },
        holds,
        number: number as u64,
        gets: AtomicU64::new(0),
    };
    engines.into_iter().enumerate().map(relay).collect()
}

#[cfg(feature = "mooncake")]
fn mooncake() -> mooncake_relay::Result<Arc<dyn Engine>> {
    use mooncake_relay::{MooncakeConfig, MooncakeEngine};

    // Where `make wheel` puts it, if nothing says otherwise.
    let said =
        ["MOONCAKE_LIBRARY", "MOONCAKE_WHEEL"].iter().any(|name| env::var_os(name).is_some());
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let folders = built.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let wheel = folders.filter(|path| path.join("mooncake").is_dir()).max();
    let library = if said { None } else { wheel };
    Ok(Arc::new(MooncakeEngine::open(&MooncakeConfig { library, ..MooncakeConfig::default() })?))
}

#[cfg(not(feature = "mooncake"))]
fn mooncake() -> mooncake_relay::Result<Arc<dyn Engine>> {
    mooncake_relay::open_engine("mooncake", &Default::default())
}

/// The sender's end of all.
pub(crate) struct Pair {
    pub(crate) lanes: &'static [Lane; LANES],
    pub(crate) ways: Vec<Way>,
    asked: [AtomicU32; LANES],
    answered: [AtomicU32; LANES],
    /// Some metadata's text.
    text: String,
    child: Child,
    _file: File,
}

impl Pair {
    /// Starts this program again. Its `main` must begin with [`serve_if_asked`].
    pub(crate) fn start() -> io::Result<Self> {
        let (lanes, file, name) = mailbox::create()?;
        let mut command = Command::new(env::current_exe()?);
        let child = command.arg("--ways").arg(name).stdin(Stdio::piped()).spawn()?;
        let ways = ways();
        let (metadata, put) = ways[0]
            .relay
            .put_bytes(&[1], mooncake_relay::Tensor::bytes(1))
            .map_err(io::Error::other)?;
        ways[0].relay.abort(&metadata).map_err(io::Error::other)?;
        let _ = put.wait();
        lanes[0].await_reply(1); // its relays are up
        Ok(Self {
            lanes,
            ways,
            asked: Default::default(),
            answered: [1, 0, 0, 0].map(AtomicU32::new),
            text: metadata.to_string(),
            child,
            _file: file,
        })
    }

    pub(crate) fn send(&self, number: usize, lane: &Lane, what: u64, text: &str) {
        // Counted by the lane's own thread.
        self.asked[number].fetch_add(1, Ordering::Relaxed);
        lane.ask(what, text);
    }

    /// A word or the text there, and an answer: nanoseconds, as a round's three are.
    pub(crate) fn ask(&self, number: usize, lane: &Lane, what: u64) -> [u64; 3] {
        let metadata: Option<Metadata> = (what == TEXT).then(|| self.text.parse().expect("ours"));
        let begun = clock();
        let text = metadata.map_or_else(String::new, |metadata| metadata.to_string());
        self.send(number, lane, what, &text);
        lane.await_reply(self.answered[number].fetch_add(1, Ordering::Relaxed) + 1);
        [0, clock() - begun, clock() - begun]
    }

    /// Pins the receiver's thread of the first lane, or lets it go.
    pub(crate) fn pin_other(&self, core: Option<usize>) {
        let core = core.map_or(ANYWHERE, |core| core as u64);
        self.ask(0, &self.lanes[0], PIN | core << WAY);
    }

    /// Ends the receiver, which proves the ways first.
    pub(crate) fn end(mut self) -> io::Result<()> {
        for (number, lane) in self.lanes.iter().enumerate() {
            self.send(number, lane, END, "");
        }
        let _open = self.child.stdin.take(); // `wait` would close it first
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => Err(io::Error::other(format!("the receiver ended with {status}"))),
        }
    }
}

/// Whether this process was started by [`Pair::start`]; if so, its work is done.
pub(crate) fn serve_if_asked() -> io::Result<bool> {
    let args: Vec<_> = env::args().skip(1).collect();
    let [first, name] = &args[..] else { return Ok(false) };
    if first != "--ways" {
        return Ok(false);
    }
    let lanes = mailbox::open(name)?;
    thread::spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        process::exit(1); // the sender has ended without a word
    });
    let ways = ways();
    lanes[0].reply();
    thread::scope(|scope| {
        for lane in lanes {
            scope.spawn(|| serve(lane, &ways));
        }
    });
    ways.iter().for_each(Way::prove);
    Ok(true)
}

fn serve(lane: &Lane, ways: &[Way]) {
    let anywhere = sched_getaffinity(None).expect("every thread has one");
    let mut dest = vec![1; LARGEST];
    let mut text = Vec::new();
    for number in 1.. {
        let word = lane.hear(number, &mut text);
        let what = word & ((1 << WAY) - 1);
        match what {
            END => return,
            HOP => lane.reply(),
            PIN => {
                match word >> WAY {
                    ANYWHERE => sched_setaffinity(None, &anywhere).expect("as it was"),
                    core => pin(core as usize),
                }
                lane.reply();
            }
            _ => {
                let metadata: Metadata =
                    str::from_utf8(&text).expect("text").parse().expect("as it was sent");
                lane.begun.store(clock(), Ordering::Release);
                if what == TEXT {
                    lane.reply();
                    continue;
                }
                let way = &ways[(word >> WAY) as usize];
                way.gets.fetch_add(1, Ordering::Relaxed);
                let taken = match what {
                    VIEW => way.relay.view(&metadata).map(drop),
                    _ => way.relay.get_into(&metadata, &mut dest, PATIENCE).map(drop),
                };
                taken.expect("the sender holds it");
            }
        }
    }
}

/// Nanoseconds of the clock that all processes share.
pub(crate) fn clock() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
