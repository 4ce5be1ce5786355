//! Metadata from hostile peers, given to relays at work over the embedded engine: typed errors, no
//! byte in the wrong place, no credit lost on either side.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
mod raw;

use std::{
    io::Write,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use mooncake_relay::{Config, EmbeddedEngine, Engine, Error, Metadata, Relay, Slot, Tensor, Token};
use rustix::{
    net::getsockname,
    process::{Resource, getrlimit, setrlimit},
};
use serde_json::{Value, json};

use self::{
    common::{eventually, hooked::Hooked, proxy::hold_port, within},
    raw::connect,
};

const WATCHDOG: Duration = Duration::from_secs(120);
const CREDITS: u32 = 3;

fn config() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096).with_credits(CREDITS)
}

fn engine() -> Arc<EmbeddedEngine> {
    Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap())
}

fn relay() -> Relay {
    Relay::new(engine(), &config()).unwrap()
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

/// Puts that are open, and credits that are free on either side; nothing queued or reading.
#[track_caller]
fn assert_at_rest(relay: &Relay, open: usize) {
    eventually((open, CREDITS as usize - open, CREDITS as usize, 0, 0, 0), || {
        let health = relay.health();
        let quarantined = health.quarantined.len();
        let (queued, reading) = (health.queued, health.reading);
        (health.published, health.free, health.receive_free, queued, reading, quarantined)
    });
}

/// Keeps transfers going from `a` to `b` while `body` runs; every one must be right.
fn amid_transfers(a: &Relay, b: &Relay, body: impl FnOnce()) {
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        let transfers = s.spawn(|| {
            let mut count = 0_u32;
            while !over.load(Ordering::Relaxed) || count < 100 {
                let bytes = count.to_le_bytes().repeat(1 + count as usize % 200);
                let (metadata, token) = put(a, &bytes);
                let metadata: Metadata = metadata.to_string().parse().unwrap();
                assert_eq!(b.get(&metadata).unwrap().wait().unwrap()[..], bytes);
                token.wait().unwrap();
                count += 1;
            }
        });
        let stop = Stop(&over);
        body();
        drop(stop);
        transfers.join().unwrap();
    });
}

/// Also when the body panics: the transfers end, and the test with them.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn each_bad_field_is_an_error_that_names_it_while_transfers_go_on() {
    within(WATCHDOG, || {
        let (a, b, c) = (relay(), relay(), relay());
        let (good, token) = put(&a, b"twelve bytes");
        let good_json = serde_json::to_value(&good).unwrap();
        amid_transfers(&a, &b, || {
            for (field, text) in bad_fields(&good_json) {
                let parsed = text.parse::<Metadata>();
                for receiver in [&b, &c] {
                    let got = parsed.as_ref().map_err(Error::to_string).map(|metadata| {
                        let outcome = receiver.get(metadata).and_then(Token::wait).map(drop);
                        outcome.unwrap_err()
                    });
                    match got {
                        Err(text) => assert!(text.contains(&format!("{field:?}")), "{text}"),
                        Ok(Error::Metadata { field: found, .. }) => assert_eq!(found, field),
                        Ok(other) => panic!("{field}: {other:?}: {text}"),
                    }
                }
                // The same through serde, which knows no variants of ours.
                let error = serde_json::from_str::<Metadata>(&text).err();
                assert!(error.is_none_or(|error| error.to_string().contains(field)), "{text}");
                assert_at_rest(&c, 0);
            }
        });
        assert_at_rest(&b, 0);
        assert_at_rest(&a, 1);
        assert_eq!(&c.get(&good).unwrap().wait().unwrap()[..], b"twelve bytes");
        token.wait().unwrap();
    });
}

/// Every field damaged in every way, each with the name that the error must have.
fn bad_fields(good: &Value) -> Vec<(&'static str, String)> {
    let fields = [
        // Path, whether it is needed, a value of another type, values that are too much.
        ("/engine_id", false, json!(7), vec![json!("e".repeat(256))]),
        ("/session_id", true, json!(7), vec![json!("h".repeat(301)), json!("host"), json!("h:0")]),
        ("/protocol", false, json!([]), vec![json!("p".repeat(65)), json!("rdma")]),
        ("/transfer_id", true, json!(7), vec![json!("t".repeat(256)), json!("t_00")]),
        ("/mooncake", true, json!([]), vec![]),
        ("/mooncake/buffer_ptr", true, json!("0x1"), vec![json!(u64::MAX), json!(u64::MAX - 11)]),
        ("/mooncake/device_id", false, json!("0"), vec![]),
        ("/transfer_info", true, json!("x"), vec![]),
        ("/transfer_info/size", true, json!("12"), vec![json!(u64::MAX), json!(1_u64 << 63)]),
        (
            "/transfer_info/shape",
            false,
            json!("12"),
            vec![json!([13]), json!([1_u64 << 32, 1_u64 << 32]), json!(vec![1; 65])],
        ),
        ("/transfer_info/dtype", false, json!(7), vec![json!("d".repeat(256))]),
        ("/transfer_info/credit_id", false, json!("0"), vec![]),
        ("/relay", false, json!(7), vec![]),
        ("/relay/version", true, json!("1"), vec![json!(2)]),
        ("/relay/instance", true, json!(7), vec![json!("0".repeat(33))]),
        ("/relay/slot", true, json!("1"), vec![json!(1_u64 << 32)]),
        ("/relay/generation", true, json!("1"), vec![json!(1_u64 << 32)]),
        ("/relay/stamp", true, json!(7), vec![json!("0".repeat(17))]),
        ("/relay/stamp_ptr", true, json!(7), vec![json!("0xfffffffffffffff9")]),
        ("/relay/lease_ms", true, json!("1"), vec![]),
    ];
    let mut bad = Vec::new();
    for (path, needed, other_type, too_much) in fields {
        let (parent, field) = path.rsplit_once('/').unwrap();
        if needed {
            let mut value = good.clone();
            let parent = value.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            parent.remove(field).unwrap();
            bad.push((field, value.to_string()));
        }
        let mut damaged: Vec<_> = [other_type, json!(true), json!([[]])].into_iter().collect();
        damaged.extend(too_much);
        for value in damaged {
            let mut whole = good.clone();
            *whole.pointer_mut(path).unwrap() = value;
            bad.push((field, whole.to_string()));
        }
        // More than any integer of ours holds, and no string at all.
        let mut whole = good.clone();
        *whole.pointer_mut(path).unwrap() = json!("@");
        bad.push((field, whole.to_string().replace("\"@\"", "18446744073709551616")));
    }
    bad.push(("metadata", " ".repeat(1 << 20)));
    bad.push(("metadata", good.to_string()[..200].to_owned()));
    bad
}

/// What a hostile peer makes of good metadata: another put's names and addresses, and so on.
struct Forgery {
    what: &'static str,
    text: String,
    kind: &'static str,
    /// The receiver knows which transfer failed, and tells the sender so.
    told: bool,
}

/// Forgeries of `good`, which describes an open put of `a`; another is `victim`, and `c` is a relay
/// of its own.
fn forgeries(good: &Metadata, victim: &Metadata, c: &Relay, absent: &str) -> Vec<Forgery> {
    let json = |metadata: &Metadata| serde_json::to_value(metadata).unwrap();
    let (good, victim) = (json(good), json(victim));
    let ptr = good["mooncake"]["buffer_ptr"].as_u64().unwrap();
    let (slot, generation) = (&good["relay"]["slot"], &good["relay"]["generation"]);
    let (slot, generation) = (slot.as_u64().unwrap(), generation.as_u64().unwrap());
    let name = good["transfer_id"].as_str().unwrap();
    let random = &name[name.len() - 32..][..16];
    let named = |random: &str, slot: u64, generation: u64| {
        vec![
            ("/transfer_id", json!(format!("t_{random}{slot:08x}{generation:08x}"))),
            ("/relay/slot", json!(slot)),
            ("/relay/generation", json!(generation)),
        ]
    };
    let sized = |size: u64| {
        vec![("/transfer_info/size", json!(size)), ("/transfer_info/shape", json!([size]))]
    };
    let python = |mut changes: Vec<(&'static str, Value)>| {
        changes.push(("/relay", Value::Null));
        changes
    };
    let changed = |what, kind, told, changes: Vec<(&str, Value)>| {
        let mut whole = good.clone();
        for (path, value) in changes {
            if path == "/relay" {
                whole.as_object_mut().unwrap().remove("relay");
            } else {
                *whole.pointer_mut(path).unwrap() = value;
            }
        }
        Forgery { what, text: whole.to_string(), kind, told }
    };
    let at = |ptr: u64| vec![("/mooncake/buffer_ptr", json!(ptr))];
    let session = |session: &str| vec![("/session_id", json!(session))];
    let c_session = c.health().session_id;
    vec![
        changed("one byte on", "Rejected", true, at(ptr + 1)),
        changed("one byte back", "Rejected", true, at(ptr - 1)),
        changed(
            "another put's",
            "Rejected",
            true,
            at(victim["mooncake"]["buffer_ptr"].as_u64().unwrap()),
        ),
        changed("no memory at all", "Rejected", true, at(8)),
        changed("the end of memory", "Rejected", true, at(u64::MAX - 12)),
        changed("more than was put", "Rejected", true, sized(13)),
        changed("all of the slot", "Rejected", true, sized(4096)),
        changed("another slot", "Stale", false, named(random, slot + 1, generation)),
        changed(
            "no slot of the pool",
            "Stale",
            false,
            named(random, u64::from(u32::MAX), generation),
        ),
        changed("a later put", "Stale", false, named(random, slot, generation + 1)),
        changed("an earlier put", "Stale", false, named(random, slot, generation - 1)),
        changed("a guessed id", "Stale", false, named("0123456789abcdef", slot, generation)),
        changed("a later relay", "Stale", false, vec![("/relay/instance", json!("0".repeat(32)))]),
        changed("the session of another relay", "Stale", false, session(&c_session)),
        changed("the session of nobody", "PeerFailed", false, session(absent)),
        changed("a Python sender's, elsewhere", "Rejected", false, python(at(ptr + 1))),
        changed("a Python sender's, too long", "Rejected", false, python(sized(13))),
        changed("a Python sender's, in no memory", "Rejected", false, python(at(8))),
    ]
}

#[test]
fn forged_metadata_moves_no_byte_and_costs_no_credit() {
    within(WATCHDOG, || {
        let (a, b, c) = (relay(), relay(), relay());
        let (victim, victim_token) = put(&a, &[0x11; 12]);
        // A session at which nobody listens, nor will.
        let held = hold_port(Ipv4Addr::LOCALHOST.into());
        let closed = SocketAddr::try_from(getsockname(&held).unwrap()).unwrap().to_string();
        for n in 0.. {
            let (metadata, token) = put(&a, b"twelve bytes");
            let forgery = forgeries(&metadata, &victim, &c, &closed).into_iter().nth(n / 2);
            let Some(forgery) = forgery else {
                a.abort(&metadata).unwrap();
                break;
            };
            let Forgery { what, text, kind, told } = forgery;
            let forged: Metadata = text.parse().unwrap_or_else(|error| panic!("{what}: {error}"));
            let outcome = if n % 2 == 0 {
                b.get(&forged).and_then(Token::wait).map(drop)
            } else {
                let mut canary = [0xC7; 4096];
                let outcome = b.get_into(&forged, &mut canary, WATCHDOG).map(drop);
                assert!(canary.iter().all(|byte| *byte == 0xC7), "{what}: {canary:?}");
                outcome
            };
            assert_eq!(outcome.map_err(|error| error.kind()), Err(kind), "{what}");
            assert_at_rest(&b, 0);
            if told {
                assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })), "{what}");
            } else {
                assert!(!token.is_done(), "{what} ended the put");
                assert_eq!(&b.get(&metadata).unwrap().wait().unwrap()[..], b"twelve bytes");
                token.wait().unwrap();
            }
        }
        assert_at_rest(&a, 1);
        assert_eq!(b.get(&victim).unwrap().wait().unwrap()[..], [0x11; 12]);
        victim_token.wait().unwrap();
    });
}

#[test]
fn a_session_that_is_no_address_is_told_nothing_and_not_for_long() {
    within(WATCHDOG, || {
        let (a, b) = (relay(), relay());
        let (good, _token) = put(&a, b"x");
        let lost = good.to_string().replace(good.session_id(), "no address");
        // Refused at the door for its space; this one only where it is dialled.
        assert!(matches!(
            lost.parse::<Metadata>(),
            Err(Error::Metadata { field: "session_id", .. })
        ));
        let lost = good.to_string().replace(good.session_id(), "no-address");
        let outcome = b.get(&lost.parse().unwrap()).unwrap().wait();
        assert!(matches!(outcome, Err(Error::Metadata { field: "session_id", .. })), "{outcome:?}");
        eventually(1, || b.health().counters.relay.notes_lost);
    });
}

#[test]
fn a_forged_stamp_is_stale_where_the_stamp_is_the_only_proof() {
    within(WATCHDOG, || {
        let [a, b] = ["stamped", "reader"]
            .map(|name| Relay::new(Hooked::new(name).ranges_only().engine(), &config()).unwrap());
        let (other, _other_token) = put(&a, &[0x11; 12]);
        let stamp_of = |metadata: &Metadata| {
            let json = serde_json::to_value(metadata).unwrap();
            (json["relay"]["stamp"].clone(), json["relay"]["stamp_ptr"].clone())
        };
        let (other_stamp, other_ptr) = stamp_of(&other);
        for (path, value, kind) in [
            ("/relay/stamp", json!("0000000000000000"), "Stale"),
            ("/relay/stamp", other_stamp, "Stale"),
            ("/relay/stamp_ptr", other_ptr, "Stale"),
            ("/relay/stamp_ptr", json!("0x8"), "Rejected"),
        ] {
            for into in [false, true] {
                let (metadata, token) = put(&a, b"twelve bytes");
                let mut forged = serde_json::to_value(&metadata).unwrap();
                *forged.pointer_mut(path).unwrap() = value.clone();
                let forged: Metadata = serde_json::from_value(forged).unwrap();
                let mut canary = [0xC7; 12];
                let outcome = match into {
                    true => b.get_into(&forged, &mut canary, WATCHDOG).map(drop),
                    false => b.get(&forged).and_then(Token::wait).map(drop),
                };
                assert_eq!(outcome.map_err(|error| error.kind()), Err(kind), "{path}: {value}");
                assert_eq!(canary, [0xC7; 12]);
                assert_at_rest(&b, 0);
                if kind == "Rejected" {
                    assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
                } else {
                    assert_eq!(&b.get(&metadata).unwrap().wait().unwrap()[..], b"twelve bytes");
                    token.wait().unwrap();
                }
            }
        }
        assert_at_rest(&a, 1);
    });
}

#[test]
fn hundreds_of_idle_connections_on_each_port_are_borne_while_transfers_go_on() {
    within(WATCHDOG, || {
        // Both ends of each connection are in this process.
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum.map(|most| most.min(1 << 16));
        setrlimit(Resource::Nofile, limit).unwrap();
        let engine = engine();
        let (data, control) = (engine.data_addr(), engine.control_addr());
        let a = Relay::new(Arc::clone(&engine) as Arc<dyn Engine>, &config()).unwrap();
        let b = relay();
        amid_transfers(&a, &b, || {
            let mut idle: Vec<_> = (0..300).map(|_| connect(data)).collect();
            // The control port lets go of who is silent for long: on a slow machine it takes more.
            while a.health().counters.engine["connections_open"] < 600 {
                idle.push(connect(control));
            }
            // The hundred transfers that there are at least, with all of them open.
            let done = b.health().counters.relay.gets_done;
            eventually(true, || b.health().counters.relay.gets_done >= done + 100);
            for stream in &mut idle[..300] {
                stream.write_all(&[0]).unwrap(); // still there
            }
            assert_eq!(a.health().counters.engine["connections_refused"], 0);
        });
        assert_at_rest(&a, 0);
        assert_at_rest(&b, 0);
    });
}
