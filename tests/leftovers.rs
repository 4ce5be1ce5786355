//! What cannot start says which field is at fault, and hostile peers are borne; neither leaves a
//! thread, a descriptor or a mapping behind.
//!
//! These tests count what the whole process has, so they run one at a time.
#![cfg(all(feature = "embedded", feature = "mooncake"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
mod raw;

use std::{
    fs,
    io::{ErrorKind, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use mooncake_relay::{
    Config, EmbeddedEngine, Engine, EngineOptions, Error, InProcessEngine, Relay, Result, Tensor,
    open_engine,
};
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit, setrlimit};

use self::{
    common::{
        Random, eventually,
        hooked::{Call, Hooked, refused as refused_by_engine},
        threads_named, within,
    },
    raw::{NOTIFY, READ_IDENTIFIED, READ_V1, READ_V2, WRITE_V2, connect, frame, header},
};

const WATCHDOG: Duration = Duration::from_secs(120);
static ALONE: Mutex<()> = Mutex::new(());

/// The threads, descriptors and shared mappings of relays that this process has.
fn held() -> (usize, usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mappings = maps.lines().filter(|line| line.contains("memfd:"));
    (threads_named("relay-"), descriptors.count(), mappings.count())
}

fn small() -> Config {
    Config::default().with_slot_size(4096)
}

fn embedded() -> EmbeddedEngine {
    EmbeddedEngine::bind("127.0.0.1:0").unwrap()
}

/// A relay that works, so that what is made once in a process has been made.
fn warm_up() {
    for engine in [Arc::new(embedded()) as Arc<dyn Engine>, engine_in_process()] {
        let relay = Relay::new(engine, &small()).unwrap();
        let (metadata, _token) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        relay.get(&metadata).unwrap().wait().unwrap();
    }
    settle();
}

/// A thread that was joined, or has answered, may still be on its way out.
fn settle() {
    eventually(0, || held().0);
}

fn engine_in_process() -> Arc<dyn Engine> {
    Arc::new(InProcessEngine::new("leftovers").unwrap())
}

#[test]
fn i1_a_limit_on_file_sizes_is_an_error_and_no_signal() {
    let _alone = ALONE.lock();
    within(WATCHDOG, || {
        warm_up();
        let before = getrlimit(Resource::Fsize);
        for (expected, config) in [
            ("slot_size", small().with_credits(64).with_receive_credits(1)),
            ("receive_credits", small().with_credits(1).with_receive_credits(64)),
        ] {
            refused(expected, || {
                let mut limit = before;
                // More than the stamps, less than the slots.
                limit.current = Some(64 << 10);
                setrlimit(Resource::Fsize, limit).unwrap();
                let relay = Relay::new(engine_in_process(), &config).map(drop);
                setrlimit(Resource::Fsize, before).unwrap();
                relay
            });
        }
        warm_up();
    });
}

#[test]
fn a_relay_that_could_not_be_made_leaves_nothing() {
    let _alone = ALONE.lock();
    within(WATCHDOG, || {
        warm_up();
        let before = held();
        for bad in 0..4 {
            let engine = Hooked::new("bad");
            engine.fail(Call::Register, bad..=bad, refused_by_engine);
            let made = Relay::new(engine.engine(), &small());
            assert!(matches!(made, Err(Error::Engine { engine: "hooked", .. })), "{made:?}");
            assert_eq!(engine.registered(), 0);
            let again = Relay::new(engine.engine(), &small()).unwrap();
            let (metadata, token) = again.put_bytes(b"x", Tensor::bytes(1)).unwrap();
            again.get(&metadata).unwrap().wait().unwrap();
            token.wait().unwrap();
        }
        let engine = Hooked::new("bad");
        engine.fail(Call::Start, .., refused_by_engine);
        assert!(Relay::new(engine.engine(), &small()).is_err());
        drop(engine);
        eventually(before, held);
    });
}

#[test]
fn an_engine_that_cannot_open_names_its_field_and_leaves_nothing() {
    let _alone = ALONE.lock();
    within(WATCHDOG, || {
        warm_up();
        // A lookup that fails, so that what a resolver makes once has been made.
        let _ = EmbeddedEngine::bind("no-such-host.invalid:0");
        settle();
        let options = EngineOptions::default;
        let listen = |listen: &str| EngineOptions { listen: listen.into(), ..options() };
        let advertise =
            |address: &str| EngineOptions { advertise: Some(address.into()), ..options() };
        for (expected, name, options) in [
            ("engine", "", options()),
            ("engine", "verbs", options()),
            ("engine", "Embedded", options()),
            ("listen", "mooncake", listen("0.0.0.0:0")),
            ("advertise", "mooncake", advertise("[::]:7000")),
            ("protocol", "mooncake", EngineOptions { protocol: "pigeon".into(), ..options() }),
            (
                "metadata_server",
                "mooncake",
                EngineOptions { metadata_server: "x".into(), ..options() },
            ),
            (
                "device_name",
                "mooncake",
                EngineOptions { device_name: "mlx5_0".into(), ..options() },
            ),
            ("protocol", "embedded", EngineOptions { protocol: "rdma".into(), ..options() }),
            ("listen", "embedded", listen("")),
            ("listen", "embedded", listen("127.0.0.1")),
            ("listen", "embedded", listen("no-such-host.invalid:0")),
            ("listen", "embedded", listen("203.0.113.7:0")),
            ("advertise", "embedded", advertise("")),
            ("advertise", "embedded", advertise("host:1:2:3")),
            ("advertise", "embedded", advertise("0.0.0.0")),
            ("advertise", "embedded", advertise("host:7000:0")),
        ] {
            refused(expected, || open_engine(name, &options).map(drop));
        }
        let unknown = open_engine("verbs", &EngineOptions::default()).map(drop).unwrap_err();
        assert!(unknown.to_string().contains("embedded"), "it says which there are: {unknown}");

        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let before = held();
        match open_engine("embedded", &listen(&address)).map(drop) {
            Err(Error::Io(error)) => {
                assert_eq!(error.kind(), ErrorKind::AddrInUse);
                assert!(error.to_string().contains(&address), "{error}");
            }
            other => panic!("{other:?}"),
        }
        eventually(before, held);
    });
}

/// Fails as a configuration of that field, twice, and leaves nothing.
#[track_caller]
fn refused(expected: &str, mut start: impl FnMut() -> Result<()>) {
    let before = held();
    for _ in 0..2 {
        match start() {
            Err(Error::Config { field, reason }) => assert_eq!(field, expected, "{reason}"),
            other => panic!("{expected}: {other:?}"),
        }
    }
    // The thread of a lookup ends just after it has answered.
    eventually(before, held);
}

#[test]
fn hostile_connections_on_both_ports_disturb_no_transfer_and_leave_nothing() {
    let _alone = ALONE.lock();
    within(WATCHDOG, || {
        warm_up();
        let before = held();
        let engines = [(); 2].map(|()| Arc::new(embedded()));
        let [a, b] = engines.each_ref().map(|engine| {
            let engine = Arc::clone(engine) as Arc<dyn Engine>;
            Relay::new(engine, &small().with_credits(4).with_transfer_threads(2)).unwrap()
        });
        let mut random = Random::new(0xbad);
        let (published, _kept) = a.put_bytes(&[1; 4096], Tensor::bytes(4096)).unwrap();
        let addr = serde_json::to_value(&published).unwrap()["mooncake"]["buffer_ptr"].as_u64();

        let mut hostile = Vec::new();
        for n in 0..512 {
            // New ones come all the time, and all of them stay.
            if n % 8 == 0 {
                for engine in &engines {
                    let data = attack(engine.data_addr(), &data_attack(n / 8, addr, &mut random));
                    let control =
                        attack(engine.control_addr(), &control_attack(n / 8, &mut random));
                    hostile.extend([data, control]);
                }
            }
            let (from, to) = if n % 2 == 0 { (&a, &b) } else { (&b, &a) };
            let bytes: Vec<u8> = (0..=n as u8).map(|byte| byte ^ n as u8).collect();
            let (metadata, token) = from.put_bytes(&bytes, Tensor::bytes(bytes.len())).unwrap();
            if n % 3 == 0 {
                let mut dest = vec![0; bytes.len()];
                to.get_into(&metadata, &mut dest, WATCHDOG).unwrap();
                assert_eq!(dest, bytes);
            } else {
                assert_eq!(to.get(&metadata).unwrap().wait().unwrap()[..], bytes);
            }
            token.wait().unwrap();
        }
        assert_eq!(hostile.len(), 2 * 2 * 64, "on each port of each engine");
        for relay in [&a, &b] {
            let health = relay.health();
            let idle = health.free + health.published;
            assert_eq!((idle, health.receive_free, health.status), (4, 4, "healthy"));
            assert!(health.quarantined.is_empty(), "{health:?}");
        }
        assert_eq!(a.get(&published).unwrap().wait().unwrap()[..], [1; 4096], "untouched");
        drop(hostile);
        for engine in &engines {
            // One for the notes and reads of the other relay stays, perhaps more.
            eventually(true, || counter(engine, "connections_open") <= 8);
        }
        drop((a, b, engines, published, _kept));
        eventually(before, held);
    });
}

fn attack(addr: std::net::SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = connect(addr);
    // The server may close while we still write.
    let _ = stream.write_all(bytes);
    stream
}

fn noise(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.next() as u8).collect()
}

fn data_attack(kind: usize, published: Option<u64>, random: &mut Random) -> Vec<u8> {
    let addr = published.unwrap();
    match kind % 8 {
        0 => Vec::new(),
        1 => noise(random, 3000),
        2 => header(READ_V2, 4096, addr)[..23].to_vec(),
        3 => header(READ_V1, u64::MAX, addr),
        4 => header(READ_IDENTIFIED, u64::MAX - addr + 1, addr),
        5 => [header(NOTIFY, 64 << 10, 0), b"{\"name\":".to_vec()].concat(),
        6 => [header(WRITE_V2, 1 << 62, addr), noise(random, 1000)].concat(),
        // A whole read whose answer nobody takes, and the start of another.
        _ => [header(READ_V2, 4096, addr), header(READ_V2, 1, addr)[..1].to_vec()].concat(),
    }
}

fn control_attack(kind: usize, random: &mut Random) -> Vec<u8> {
    match kind % 8 {
        0 => Vec::new(),
        1 => noise(random, 3000),
        2 => frame(1, b"{}")[..8].to_vec(),
        3 => u64::MAX.to_le_bytes().to_vec(),
        4 => 0u64.to_le_bytes().to_vec(),
        5 => [&(1u64 << 20).to_le_bytes()[..], b"\x02{\"name\":\""].concat(),
        6 => frame(0xff, b"{}"),
        _ => frame(1, &b"[".repeat(100_000)),
    }
}

fn counter(engine: &EmbeddedEngine, name: &str) -> u64 {
    let mut found = None;
    engine.counters(&mut |counter, value| {
        if counter == name {
            found = Some(value);
        }
    });
    found.unwrap()
}
