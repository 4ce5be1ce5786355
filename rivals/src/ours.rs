//! A relay in each process, by each way.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use mooncake_relay::{
    Config, EmbeddedEngine, Engine, Metadata, MooncakeConfig, MooncakeEngine, Relay, Tensor,
    WaitStrategy,
};

use crate::{
    PATIENCE,
    measure::{LARGEST, Plan, check, clock, measure, say, value, warm_up},
    pair::{Pair, Requests},
    rows::Start,
    timed::Timed,
};

/// Into the receiver's own memory.
const INTO: u64 = 1;
/// Into a slot of the receiver.
const SLOT: u64 = 2;
/// Nowhere: the receiver looks at the sender's slot.
const VIEW: u64 = 3;
const PIN: u64 = 4;

/// With fewer, a slot is written whose lines the reader's core has only just read: `benches/copy.rs`.
const CREDITS: u32 = 4;

const PAUSE: Duration = Duration::from_micros(300);
/// The one size that is measured after a pause, too.
const PARKED: usize = 4 << 10;

/// How one row has the sender's bytes, and what the receiver is asked for.
struct Shape {
    row: &'static str,
    /// Copied by `put_bytes`; else they lie in a slot already.
    bytes: bool,
    what: u64,
    pause: Duration,
}

fn shapes(start: Start) -> Vec<Shape> {
    let shape = |row, bytes, what| Shape { row, bytes, what, pause: Duration::ZERO };
    match start {
        Start::SameHost => vec![
            shape("ours, same host", true, INTO),
            shape("ours, same host, from a slot", false, INTO),
            shape("ours, same host, view", false, VIEW),
            Shape { pause: PAUSE, ..shape("ours, same host, after a pause", true, INTO) },
        ],
        Start::SameHostSpin => vec![shape("ours, same host, Spin", true, INTO)],
        Start::SameHostPark => {
            vec![Shape {
                pause: PAUSE,
                ..shape("ours, same host, Park, after a pause", true, INTO)
            }]
        }
        Start::Tcp => {
            vec![shape("ours, TCP", true, INTO), shape("ours, TCP, from a slot", false, INTO)]
        }
        _ => vec![
            shape("ours, Mooncake", true, INTO),
            shape("ours, Mooncake, from slot to slot", false, SLOT),
        ],
    }
}

/// What of the last row is the relay's and the bare calls', since those read no stamp.
const LESS_STAMP: &str = "ours, Mooncake, from slot to slot, less the stamp's read";

fn relay(engine: Arc<dyn Engine>, start: Start) -> io::Result<Relay> {
    let wait = match start {
        Start::SameHostSpin => WaitStrategy::Spin,
        Start::SameHostPark => WaitStrategy::Park,
        _ => WaitStrategy::Auto,
    };
    let config =
        Config::default().with_slot_size(LARGEST).with_credits(CREDITS).with_wait(wait);
    Relay::new(engine, &config).map_err(io::Error::other)
}

fn embedded(start: Start) -> io::Result<Arc<dyn Engine>> {
    let builder = EmbeddedEngine::builder("127.0.0.1:0").local(start != Start::Tcp);
    Ok(Arc::new(builder.bind().map_err(io::Error::other)?))
}

fn mooncake() -> io::Result<MooncakeEngine> {
    MooncakeEngine::open(&MooncakeConfig::default()).map_err(io::Error::other)
}

pub(crate) fn send(
    start: Start,
    plan: &Plan,
    pair: impl FnOnce() -> io::Result<Pair>,
) -> io::Result<()> {
    let engine = match start {
        Start::Mooncake => Arc::new(mooncake()?),
        _ => embedded(start)?,
    };
    let relay = relay(engine, start)?;
    let mut pair = pair()?;
    pair.call(PIN, "");
    plan.pin();
    let mut number = 0;
    for (size, count) in plan.sizes() {
        let mut bytes = vec![1; size];
        for shape in shapes(start) {
            if !shape.pause.is_zero() && size != PARKED {
                continue;
            }
            pair.sleeps(!shape.pause.is_zero());
            let mut less_stamp = Vec::new();
            measure(shape.row, (size, count), || {
                number += 1;
                let [transfer, whole] = once(&relay, &mut pair, &shape, number, &mut bytes)
                    .map_err(io::Error::other)?;
                if shape.what == SLOT {
                    let stamp = pair.told();
                    less_stamp.push([transfer.saturating_sub(stamp), whole.saturating_sub(stamp)]);
                }
                Ok([transfer, whole])
            })?;
            if shape.what == SLOT {
                say(LESS_STAMP, size, &less_stamp[warm_up(count)..])?;
            }
        }
    }
    pair.end()
}

/// Nanoseconds of the transfer, and of all.
fn once(
    relay: &Relay,
    pair: &mut Pair,
    shape: &Shape,
    number: u64,
    bytes: &mut [u8],
) -> mooncake_relay::Result<[u64; 2]> {
    let tensor = Tensor::bytes(bytes.len());
    let mut slot = None;
    if shape.bytes {
        bytes.fill(value(number));
    } else {
        slot.insert(relay.acquire(bytes.len(), PATIENCE)?).fill(value(number));
    }
    if !shape.pause.is_zero() {
        thread::sleep(shape.pause);
    }
    let begun = clock();
    let (metadata, token) = match slot {
        Some(slot) => relay.put(slot, tensor)?,
        None => relay.put_bytes(bytes, tensor)?,
    };
    let put = clock() - begun;
    pair.ask(shape.what, number, &metadata.to_string());
    let slot = token.wait()?;
    let now = clock();
    drop(slot);
    Ok([put + (now - pair.begun()), now - begun])
}

pub(crate) fn receive(start: Start, requests: &mut Requests) -> io::Result<()> {
    // A clock around the engine's calls tells what the stamp's read takes.
    let timed = match start {
        Start::Mooncake => Some(Arc::new(Timed::over(mooncake()?))),
        _ => None,
    };
    let engine = match &timed {
        Some(timed) => Arc::clone(timed) as Arc<dyn Engine>,
        None => embedded(start)?,
    };
    let relay = relay(engine, start)?;
    let mut dest = vec![1; LARGEST];
    let mut gets = 0;
    while let Some(request) = requests.next() {
        if request.what == PIN {
            requests.pin();
            requests.reply();
            continue;
        }
        let (what, number) = (request.what, request.number);
        let metadata: Metadata = request.text.parse().map_err(io::Error::other)?;
        requests.begin();
        gets += 1;
        match what {
            INTO => {
                let len =
                    relay.get_into(&metadata, &mut dest, PATIENCE).map_err(io::Error::other)?;
                check(&dest[..len], number);
            }
            SLOT => {
                let slot = relay.get(&metadata).and_then(|token| token.wait());
                check(&slot.map_err(io::Error::other)?, number);
                let timed = timed.as_ref().expect("only over the real engine");
                requests.tell(timed.nanos[1].load(Ordering::Relaxed));
            }
            _ => drop(relay.view(&metadata).map_err(io::Error::other)?),
        }
    }
    prove(&relay, start, gets);
    Ok(())
}

/// The bytes came this way and no other.
fn prove(relay: &Relay, start: Start, gets: u64) {
    let counters = relay.health().counters.engine;
    let count = |name| counters.get(name).copied().unwrap_or(0);
    let expected = match start {
        Start::Tcp => (0, gets),
        Start::Mooncake => (0, 0),
        _ => (gets, 0),
    };
    assert_eq!((count("reads_local"), count("reads_tcp")), expected, "local reads, TCP reads");
}
