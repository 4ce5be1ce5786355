//! The real engine: what it is opened with, its raw connection, and what it does that others do not.
#![cfg(feature = "mooncake")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::HashMap,
    fs,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Config, Engine, Error, Metadata, MooncakeConfig, MooncakeConnection, MooncakeEngine,
    Notification, Opcode, Relay, Result, Tensor,
};
use serde_json::json;

use crate::common::{
    eventually,
    peer::{Peer, Sent, real_engine},
    real, within,
};

const WATCHDOG: Duration = Duration::from_secs(120);

#[test]
fn what_cannot_work_is_refused_before_any_library_is_looked_for() {
    let config =
        || MooncakeConfig { library: Some("/nowhere.so".into()), ..MooncakeConfig::default() };
    let name = |hostname: &str| MooncakeConfig { hostname: hostname.into(), ..config() };
    let server = |server: &str| MooncakeConfig { metadata_server: server.into(), ..config() };
    let protocol = |protocol: &str| MooncakeConfig { protocol: protocol.into(), ..config() };
    let device = |protocol: &str, name: &str| MooncakeConfig {
        protocol: protocol.into(),
        device_name: name.into(),
        ..config()
    };
    let long = "n".repeat(300);
    for (expected, config) in [
        ("hostname", name("")),
        ("hostname", name("a b")),
        ("hostname", name("a\0b")),
        ("hostname", name("nöde")),
        ("hostname", name("0.0.0.0")),
        ("hostname", name("[::")),
        ("hostname", name(&long)),
        ("hostname", name("::1")), // MC_USE_IPV6 is not set
        ("hostname", name("[::1]")),
        ("metadata_server", server("")),
        ("metadata_server", server("p2phandshake")),
        ("metadata_server", server("http://")),
        ("metadata_server", server("ftp://host")),
        ("metadata_server", server("etcd://ho st")),
        ("metadata_server", server("etcd://host\0")),
        ("protocol", protocol("")),
        ("protocol", protocol("TCP")),
        ("protocol", protocol("tcp\0")),
        ("device_name", device("tcp", "mlx5_0")),
        ("device_name", device("rdma", "mlx5_0,,")),
        ("device_name", device("rdma", "a/b")),
    ] {
        match MooncakeEngine::open(&config) {
            Err(Error::Config { field, .. }) => assert_eq!(field, expected, "{config:?}"),
            other => panic!("{config:?}: {other:?}"),
        }
    }
}

#[test]
fn without_a_library_it_says_where_it_looked_and_what_to_install() {
    let config =
        MooncakeConfig { library: Some("/nowhere.so".into()), ..MooncakeConfig::default() };
    let error = MooncakeEngine::open(&config).unwrap_err();
    assert!(matches!(error, Error::Engine { engine: "mooncake", .. }), "{error:?}");
    let text = error.to_string();
    for named in ["/nowhere.so", "pip install", "apt-get install", "MOONCAKE_LIBRARY"] {
        assert!(text.contains(named), "{named} is not in: {text}");
    }
}

#[test]
fn what_the_library_or_the_host_lacks_is_an_error_and_not_the_end_of_the_process() {
    let Some(config) = real::config() else { return };
    within(WATCHDOG, move || {
        let wrong = [
            MooncakeConfig { metadata_server: "redis://127.0.0.1:1".into(), ..config.clone() },
            MooncakeConfig { protocol: "nvlink".into(), ..config.clone() },
            MooncakeConfig {
                protocol: "rdma".into(),
                device_name: "no_such_device".into(),
                ..config.clone()
            },
        ];
        for config in wrong {
            let opened = MooncakeEngine::open(&config);
            assert!(matches!(opened, Err(Error::Config { .. })), "{config:?}: {opened:?}");
        }
        let nobody = MooncakeConfig { metadata_server: "http://127.0.0.1:1/m".into(), ..config };
        let opened = MooncakeEngine::open(&nobody);
        assert!(matches!(opened, Err(Error::Engine { .. } | Error::Config { .. })), "{opened:?}");
    });
}

#[test]
fn the_raw_connection_registers_moves_and_tells() {
    let Some(config) = real::config() else { return };
    within(WATCHDOG, move || {
        let (a, b) = (Raw::open(&config, 1), Raw::open(&config, 2));
        let there = a.address();

        assert_config(b.register());
        b.transfer(&a, 0, there, 100, Opcode::Read, None).unwrap();
        assert_eq!(b.bytes(0, 101), [&[1; 100][..], &[2]].concat());
        b.transfer(&a, 200, there + 100, 50, Opcode::Write, None).unwrap();
        assert_eq!(a.bytes(99, 52), [&[1][..], &[2; 50], &[1]].concat());

        let told = note("größe");
        b.transfer(&a, 0, there, 8, Opcode::Read, Some(&told)).unwrap();
        eventually(vec![told], || a.connection.get_notifies().unwrap());

        let outside = b.transfer(&a, 0, there + 1, SIZE, Opcode::Read, None);
        assert!(matches!(outside, Err(Error::Rejected { .. })), "{outside:?}");

        b.connection.deregister_memory(b.memory).unwrap();
        assert_config(b.connection.deregister_memory(b.memory));
        assert_config(b.transfer(&a, 0, there, 8, Opcode::Read, None));

        a.connection.close().unwrap();
        a.connection.close().unwrap();
        let closed = a.connection.notify(b.connection.session_id(), &note("late"), soon());
        assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
        assert_eq!((a.connection.in_flight(), b.connection.in_flight()), (0, 0));
    });
}

#[test]
fn with_the_variable_that_it_wants_ipv6_works_both_ways() {
    let Some(real) = real_engine().filter(|_| common::has_ipv6()) else { return };
    let start = || {
        Peer::start_with(
            &["--engine", "mooncake", "--listen", "[::1]:0", "--slot-size", "4096"],
            &[("MOONCAKE_WHEEL", real.site.as_os_str()), ("MC_USE_IPV6", "1".as_ref())],
        )
    };
    let (a, b) = (start(), start());
    assert!(a.session_id().starts_with("[::1]:"), "{}", a.session_id());
    for (from, to) in [(&a, &b), (&b, &a)] {
        let sent = from.put(json!({"size": 4000, "seed": 6}));
        assert_eq!(to.get(&sent.metadata)["sha256"], *sent.sha256);
        assert_eq!(from.wait(sent.tag)["ok"], true);
    }
}

#[test]
fn b13_a_text_that_c_would_cut_is_refused() {
    let Some(engine) = real::engine() else { return };
    within(WATCHDOG, move || {
        let peer = engine.session_id();
        for note in [note("a\0b"), Notification::new("a", "b\0"), note(&"n".repeat(1 << 17))] {
            let told = engine.notify(peer, &note, soon());
            assert!(matches!(told, Err(Error::Metadata { .. })), "{told:?}");
        }
        for peer in ["a\0b:1", "nöde:1", "a b:1", "/127.0.0.1:1"] {
            let told = engine.notify(peer, &note("a"), soon());
            assert!(matches!(told, Err(Error::Metadata { .. })), "{peer:?}: {told:?}");
        }
    });
}

#[test]
fn no_batch_is_left_after_many_transfers() {
    let Some(sender) = real::engine() else { return };
    let Some(receiver) = real::engine() else { return };
    within(WATCHDOG, move || {
        let config = Config::default().with_slot_size(4096).with_credits(4);
        let sender = Relay::new(Arc::new(sender), &config).unwrap();
        let receiver = Relay::new(Arc::new(receiver), &config).unwrap();
        for round in 0..500_u32 {
            let bytes = vec![round as u8; 1 + round as usize % 300];
            let (metadata, token) = sender.put_bytes(&bytes, Tensor::bytes(bytes.len())).unwrap();
            assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], bytes);
            token.wait().unwrap();
        }
        let counters = counters(&receiver);
        // A read of the bytes and one of the stamp each; and one that connects, if a transfer thread
        // was there first.
        let batches = counters["batches"];
        assert!((1000..=1001).contains(&batches), "{batches}");
        assert_eq!((counters["batches_freed"], counters["batches_parked"]), (batches, 0));
        assert_eq!(counters["segments_opened"], 1);
    });
}

#[test]
fn a_get_after_connect_asks_the_peer_for_nothing_but_the_bytes() {
    let Some(sender) = real::engine() else { return };
    let Some(engine) = real::engine() else { return };
    within(WATCHDOG, move || {
        let config = Config::default().with_slot_size(4096);
        let sender = Relay::new(Arc::new(sender), &config).unwrap();
        let engine = Arc::new(engine);
        let receiver = Relay::new(Arc::clone(&engine) as Arc<dyn Engine>, &config).unwrap();
        engine.connect(&sender.health().session_id, soon()).unwrap();
        let connected = counters(&receiver);
        assert_eq!((connected["segments_opened"], connected["batches"]), (1, 1));

        let (metadata, put) = sender.put_bytes(b"first", Tensor::bytes(5)).unwrap();
        assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], b"first");
        put.wait().unwrap();
        let counters = counters(&receiver);
        assert_eq!((counters["segments_opened"], counters["batches"]), (1, 3));
    });
}

#[test]
fn reads_from_a_frozen_peer_end_in_time_and_their_slots_come_back_when_it_wakes() {
    const SLOTS: usize = 512;
    /// So many at least, and so many at most until nothing is new any more.
    const ROUNDS: std::ops::RangeInclusive<u64> = 3..=10;
    /// What two kilobytes a read would be several times over.
    const LITTLE: u64 = 4 << 20;
    let Some(real) = real_engine() else { return };
    let Some(engine) = real::engine() else { return };
    // Lease and quarantine are short, since the same slots are put in every round, whether or not the
    // sender has been told of the failures before.
    let flags = ["--slot-size", "4096", "--credits", "513"];
    let short = ["--lease-ms", "4000", "--quarantine-ms", "100"];
    let sender = Peer::start_with(
        &[&["--engine", "mooncake"], &flags[..], &short].concat(),
        &[("MOONCAKE_WHEEL", real.site.as_os_str())],
    );
    within(WATCHDOG * 5, move || {
        let config = Config::default()
            .with_slot_size(4096)
            .with_receive_credits(SLOTS as u32)
            .with_quarantine(Duration::from_millis(100));
        let receiver = Relay::new(Arc::new(engine), &config).unwrap();
        let slots = || {
            let free = receiver.health().receive_free;
            (free, counters(&receiver)["batches_parked"] as usize)
        };
        let got_from = |sent: &Sent| receiver.get(&metadata(sent)).unwrap().wait().unwrap();
        let mut resident = Vec::new();
        let grown = |resident: &[u64]| match resident[..] {
            [.., before, last] => last.saturating_sub(before),
            _ => u64::MAX,
        };
        for round in 1..=*ROUNDS.end() {
            if round > *ROUNDS.start() && grown(&resident) < LITTLE {
                break;
            }
            let put = json!({"cmd": "put", "bytes": {"size": 4096, "seed": round}});
            let mut tags: Vec<_> = (0..SLOTS).map(|_| sender.send(put.clone())).collect();
            let puts: Vec<_> =
                (0..SLOTS).map(|_| metadata(&sender.first_sent(&mut tags))).collect();
            got_from(&sender.put(json!({"text": "awake"}))); // it is known, and has answered
            sender.stop();
            let begun = Instant::now();
            // Each on a thread of its own, so that all are under way at once.
            let ended = thread::scope(|scope| {
                let get = |put| receiver.get_timeout(put, Duration::from_secs(1)).unwrap().wait();
                let gets: Vec<_> = puts.iter().map(|put| scope.spawn(move || get(put))).collect();
                gets.into_iter().map(|get| get.join().unwrap().unwrap_err()).collect::<Vec<_>>()
            });
            let took = begun.elapsed();
            assert!(took < 20 * Duration::from_secs(1), "the callers heard after {took:?}");
            let other = ended.iter().find(|error| !matches!(error, Error::TimedOut));
            assert!(other.is_none(), "{other:?}");

            // What the engine may still write is nobody's.
            let (free, parked) = slots();
            assert!(parked > 0, "no read was under way");
            assert!(free <= SLOTS - parked, "{free} free, {parked} parked");
            let (own, _put) = receiver.put_bytes(b"own", Tensor::bytes(3)).unwrap();
            let got = receiver.get_timeout(&own, Duration::from_millis(200)).unwrap().wait();
            assert!(free > 0 || got.is_err(), "a slot that is still read into was lent");
            drop(got);

            sender.resume();
            eventually((SLOTS, 0), slots);
            let counters = counters(&receiver);
            assert_eq!(counters["batches"], counters["batches_freed"]);
            resident.push(resident_bytes());
            println!("{parked} reads parked, the callers heard after {took:?}");
        }
        println!("resident after each round: {resident:?}");
        // The first rounds bring the threads' stacks and the engine's own buffers; on a busy machine
        // more than the very first.
        assert!(grown(&resident) < LITTLE, "each round takes more: {resident:?}");
        assert_eq!(&got_from(&sender.put(json!({"text": "again"})))[..], b"again");
    });
}

#[test]
fn a_put_that_is_over_is_stale_from_either_kind_of_sender() {
    let Some(real) = real_engine() else { return };
    for kind in ["mooncake", "embedded"] {
        let Some(engine) = real::engine() else { return };
        let sender = Peer::start_with(
            &["--engine", kind, "--slot-size", "4096"],
            &[("MOONCAKE_WHEEL", real.site.as_os_str())],
        );
        within(WATCHDOG, move || {
            let receiver = Relay::new(Arc::new(engine), &Config::default().with_slot_size(4096));
            let receiver = receiver.unwrap();
            let put = sender.put(json!({"size": 100, "seed": 1}));
            let metadata = put.metadata.to_string().parse().unwrap();
            receiver.get(&metadata).unwrap().wait().unwrap();
            sender.wait(put.tag);
            let late = receiver.get(&metadata).unwrap().wait();
            assert!(matches!(late, Err(Error::Stale { .. })), "{kind}: {late:?}");
        });
    }
}

const SIZE: usize = 4096;

/// A connection with registered memory, which is never freed.
struct Raw {
    connection: MooncakeConnection,
    memory: *mut u8,
}

impl Raw {
    fn open(config: &MooncakeConfig, fill: u8) -> Self {
        let memory = Box::leak(vec![fill; SIZE].into_boxed_slice()).as_mut_ptr();
        let raw = Self { connection: MooncakeConnection::open(config).unwrap(), memory };
        raw.register().unwrap();
        raw
    }

    fn register(&self) -> Result<()> {
        // SAFETY: it is never freed, and looked at only while nothing is in flight.
        unsafe { self.connection.register_memory(self.memory, SIZE) }
    }

    fn address(&self) -> u64 {
        self.memory.expose_provenance() as u64
    }

    fn transfer(
        &self,
        peer: &Self,
        local: usize,
        remote: u64,
        len: usize,
        opcode: Opcode,
        note: Option<&Notification>,
    ) -> Result<()> {
        let (local, peer) = (self.memory.wrapping_add(local), peer.connection.session_id());
        // SAFETY: as in `register`.
        unsafe { self.connection.transfer_sync(peer, local, remote, len, opcode, note, soon()) }
    }

    fn bytes(&self, from: usize, len: usize) -> Vec<u8> {
        assert!(from + len <= SIZE);
        let mut bytes = vec![0; len];
        let from = self.memory.wrapping_add(from);
        // SAFETY: inside, and nothing is in flight.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }
}

#[track_caller]
fn assert_config(refused: Result<()>) {
    assert!(matches!(refused, Err(Error::Config { .. })), "{refused:?}");
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn note(name: &str) -> Notification {
    Notification::new(name, "transfer_complete")
}

fn counters(relay: &Relay) -> HashMap<String, u64> {
    relay.health().counters.engine.iter().map(|(name, value)| (name.to_string(), *value)).collect()
}

fn metadata(sent: &Sent) -> Metadata {
    sent.metadata.to_string().parse().unwrap()
}

/// What of this process is in memory.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
