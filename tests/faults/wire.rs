//! Hostile and damaged input, from the wire and as metadata.

use std::{ops::Range, time::Duration};

use mooncake_relay::{Config, Error, Metadata, Slot, Tensor, Token};
use serde_json::{Value, json};

use crate::{
    common::{Random, bytes::Canary},
    on::{AtRest, Lack, On, cases},
};

cases! {
    Any:
        g1_a_range_outside_what_is_put_is_refused_and_moves_no_byte,
        g3_a_hundred_thousand_damaged_texts_cost_no_credit = 600;
}

const PATIENCE: Duration = Duration::from_secs(60);
const SLOT: u64 = 4096;
/// What a put of these cases holds, and what the memory around it holds.
const OURS: u8 = 0x5A;
const SECRET: u8 = 0x99;

/// A relay of three slots. The first 1000 bytes of the second are put; all else is secret.
struct Guarded {
    relay: AtRest,
    metadata: Metadata,
    token: Token<Slot>,
    kept: [Slot; 2],
    pool: u64,
    put: u64,
}

const LEN: u64 = 1000;

impl Guarded {
    fn new(make: impl FnOnce(&Config) -> AtRest) -> Self {
        let relay = make(&Config::default().with_slot_size(SLOT as usize).with_credits(3));
        let mut slots = [(); 3].map(|()| relay.try_acquire(SLOT as usize).unwrap());
        for slot in &mut slots {
            slot.fill(SECRET);
        }
        let [first, mut second, third] = slots;
        second.truncate(LEN as usize);
        second.fill(OURS);
        let (metadata, token) = relay.put(second, Tensor::bytes(LEN as usize)).unwrap();
        let json = serde_json::to_value(&metadata).unwrap();
        let put = json["mooncake"]["buffer_ptr"].as_u64().unwrap();
        let pool = put - json["transfer_info"]["credit_id"].as_u64().unwrap();
        assert_eq!(put, pool + SLOT);
        Self { relay, metadata, token, kept: [first, third], pool, put }
    }

    /// Ranges that are not wholly inside what is put: how many bytes, and where.
    fn outside(&self) -> Vec<(u64, u64)> {
        let (pool, put) = (self.pool, self.put);
        let end = pool + 3 * SLOT;
        vec![
            // Before the pool, into it, out of it, and past it.
            (8, pool - SLOT),
            (8, pool - 4),
            (8, end - 4),
            (8, end),
            // In the pool, and in no put.
            (8, pool),
            (8, pool + 2 * SLOT),
            (8, put + LEN),
            // Into the put, out of it, and around it.
            (8, put - 4),
            (8, put + LEN - 4),
            (LEN + 1, put),
            (SLOT, put),
            (3 * SLOT, pool),
            // Sums that overflow.
            (8, u64::MAX - 8),
            (u64::MAX - put, put),
            (8, 8),
        ]
    }

    /// The put is what it was, to its receiver and to its sender; and so is the rest.
    fn ends_as_it_began(self, receiver: &AtRest) -> AtRest {
        let Self { relay, metadata, token, kept, .. } = self;
        assert_eq!(receiver.get(&metadata).unwrap().wait().unwrap()[..], [OURS; LEN as usize]);
        assert_eq!(token.wait().unwrap()[..], [OURS; LEN as usize]);
        assert!(kept.iter().all(|slot| slot[..] == [SECRET; SLOT as usize]));
        relay
    }
}

/// As a Python sender writes it, with no identity that could be checked first.
fn g1_a_range_outside_what_is_put_is_refused_and_moves_no_byte(on: &On) {
    let guarded = Guarded::new(|config| on.relay(config));
    let receiver = on.relay(&Config::default().with_slot_size(3 * SLOT as usize));
    let (pool, end) = (guarded.pool, guarded.pool + 3 * SLOT);
    // Beside the pool there may be other memory of the relay's.
    let registered = [pool - SLOT..pool, pool..end, end..end + SLOT];
    for (size, ptr) in guarded.outside() {
        let lies_in = |span: &Range<u64>| span.contains(&ptr) && size <= span.end - ptr;
        if on.lacks(Lack::Publication) && registered.iter().any(lies_in) {
            continue; // it is served, put or not
        }
        let mut forged = serde_json::to_value(&guarded.metadata).unwrap();
        forged.as_object_mut().unwrap().remove("relay");
        forged["mooncake"]["buffer_ptr"] = json!(ptr);
        forged["transfer_info"]["size"] = json!(size);
        forged["transfer_info"]["shape"] = json!([size]);
        let Ok(forged) = serde_json::from_value::<Metadata>(forged) else {
            assert!(ptr.checked_add(size).is_none_or(|end| end == u64::MAX), "{size} at {ptr:#x}");
            continue;
        };
        let got = receiver.get(&forged).unwrap().wait();
        assert!(matches!(got, Err(Error::Rejected { .. })), "{size} at {ptr:#x}: {got:?}");
        let mut canary = Canary::new(size as usize);
        let got = receiver.get_into(&forged, canary.dest(), PATIENCE);
        assert!(matches!(got, Err(Error::Rejected { .. })), "{size} at {ptr:#x}: {got:?}");
        canary.is_untouched();
        receiver.comes_to_rest();
    }
    assert!(!guarded.token.is_done());
    guarded.ends_as_it_began(&receiver);
}

/// Each text is refused, or means what the put is: no byte of anything else, no panic, no credit.
fn g3_a_hundred_thousand_damaged_texts_cost_no_credit(on: &On) {
    // An engine that knows no readers waits for the end of a quarantine.
    let quarantine = Duration::from_millis(1);
    let config = Config::default().with_slot_size(SLOT as usize).with_quarantine(quarantine);
    let (a, b) = on.pair(&config);
    let mut random = Random::new(0xdead_7e47);
    let mut taken = 0;
    let (mut metadata, mut token) = a.sends(&[OURS; 12]);
    let mut good = serde_json::to_value(&metadata).unwrap();
    for round in 0..on.rounds(100_000) {
        if token.is_done() {
            // What was damaged ended it: as read, or as failed.
            (metadata, token) = a.sends(&[OURS; 12]);
            good = serde_json::to_value(&metadata).unwrap();
        }
        let surely = !round.is_multiple_of(4);
        let text = if surely { damage(&good, &mut random) } else { noise(&good, &mut random) };
        let parsed = text.parse::<Metadata>();
        let got = match parsed {
            // It would be somebody else's.
            Ok(other) if other.session_id() != metadata.session_id() => {
                assert!(!surely);
                continue;
            }
            Ok(odd) => b.get(&odd).and_then(Token::wait),
            Err(error) => Err(error),
        };
        match got {
            Ok(slot) => {
                assert!(!surely, "taken: {text}");
                // What is registered beside it has whatever bytes it has.
                let elsewhere = || {
                    let moved = buffer_of(&text.parse::<Value>().unwrap()) != buffer_of(&good);
                    moved || slot.len() > 12
                };
                let ours = slot.iter().all(|byte| *byte == OURS);
                assert!(ours || on.lacks(Lack::Publication) && elsewhere(), "other bytes: {text}");
                taken += 1;
            }
            Err(Error::Metadata { .. }) => {}
            Err(error) => {
                let known = ["Stale", "Rejected", "TooLarge"].contains(&error.kind());
                assert!(known && !surely, "{error:?}: {text}");
            }
        }
    }
    println!("{taken} were taken");
    b.comes_to_rest();
    // The word of the last that was taken may still be on its way; then this put is over.
    let got = b.get(&metadata).and_then(Token::wait);
    let ended = token.wait();
    let over = matches!(got, Err(Error::Stale { .. } | Error::Rejected { .. }));
    assert!(if got.is_ok() { ended.is_ok() } else { over }, "{got:?}, {ended:?}");
    a.works_with(&b);
}

fn buffer_of(metadata: &Value) -> &Value {
    &metadata["mooncake"]["buffer_ptr"]
}

const NEEDED: [&str; 13] = [
    "/session_id",
    "/transfer_id",
    "/mooncake",
    "/mooncake/buffer_ptr",
    "/transfer_info",
    "/transfer_info/size",
    "/relay/version",
    "/relay/instance",
    "/relay/slot",
    "/relay/generation",
    "/relay/stamp",
    "/relay/stamp_ptr",
    "/relay/lease_ms",
];
const OTHERS: [&str; 6] = [
    "/engine_id",
    "/protocol",
    "/transfer_info/shape",
    "/transfer_info/dtype",
    "/transfer_info/credit_id",
    "/relay",
];
/// No key takes any of these.
const WRONG: [&str; 12] = [
    "null",
    "true",
    "-7",
    "1.5",
    "-1.0",
    "1e400",
    "18446744073709551616",
    "[-1]",
    "[[]]",
    "{}",
    "\"\\u0000\"",
    "\"\u{1}\"",
];

/// `good`, with one to three faults of which each alone must be refused.
fn damage(good: &Value, random: &mut Random) -> String {
    let mut value = good.clone();
    let mut raw = Vec::new();
    for _ in 0..=random.below(3) {
        match random.below(5) {
            0 => remove(&mut value, of(&NEEDED, random)),
            1 => set(&mut value, "/transfer_info/size", json!(random.below(1 << 20) + 13)),
            2 => set(&mut value, "/transfer_info/shape", json!([random.below(12)])),
            _ => {
                let path =
                    if random.below(3) == 0 { of(&OTHERS, random) } else { of(&NEEDED, random) };
                if let Some(place) = value.pointer_mut(path) {
                    *place = json!(format!("@{}@", raw.len()));
                    raw.push(of(&WRONG, random));
                }
            }
        }
    }
    match random.below(40) {
        0 => set(&mut value, "/protocol", json!("rdma")),
        1 => set(&mut value, "/relay/version", json!(random.below(1 << 32) + 2)),
        2 => value["extra"] = json!("\0"),
        _ => {}
    }
    let mut text = value.to_string();
    for (n, wrong) in raw.into_iter().enumerate() {
        text = text.replace(&format!("\"@{n}@\""), wrong);
    }
    match random.below(2000) {
        0 => text.insert_str(1, &format!("\"x\":{}{},", "[".repeat(10_000), "]".repeat(10_000))),
        1 => text.insert_str(1, &format!("\"x\":\"{}\",", "x".repeat(10 << 20))),
        2..40 => text.truncate(random.below(text.len() as u64 - 1) as usize),
        40..80 => text.insert(random.below(text.len() as u64) as usize, '\0'),
        80..120 => text.insert_str(1, "\"transfer_id\":\"t\","),
        _ => {}
    }
    text
}

fn of<'a>(all: &[&'a str], random: &mut Random) -> &'a str {
    all[random.below(all.len() as u64) as usize]
}

fn set(value: &mut Value, path: &str, to: Value) {
    if let Some(place) = value.pointer_mut(path) {
        *place = to;
    }
}

fn remove(value: &mut Value, path: &str) {
    let (parent, key) = path.rsplit_once('/').expect("a path");
    if let Some(parent) = value.pointer_mut(parent).and_then(Value::as_object_mut) {
        parent.remove(key);
    }
}

/// `good`, with up to three bytes of it changed, added or gone.
fn noise(good: &Value, random: &mut Random) -> String {
    const BYTES: &[u8] = b"\"{}[]:,-+.eE0123456789abcfx\\u \0\n_tn\xff";
    let mut bytes = good.to_string().into_bytes();
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len() as u64) as usize;
        let byte = BYTES[random.below(BYTES.len() as u64) as usize];
        match random.below(3) {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, byte),
            _ => drop(bytes.remove(at)),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The embedded engine's data port, spoken to by a stranger.
#[cfg(feature = "embedded")]
pub(crate) mod stranger {
    use std::{io::Write, sync::Arc};

    use mooncake_relay::{EmbeddedEngine, Identity, TransferId};

    use super::{Guarded, LEN, OURS, SLOT};
    use crate::{
        on::{AtRest, On, cases},
        raw::{
            DONE, READ_V1, READ_V2, REFUSED, WRITE_V1, WRITE_V2, connect, header, identified, rest,
            take,
        },
    };

    cases! { Nothing: g1_raw_requests_outside_what_is_put_are_refused_and_leak_nothing; }

    fn g1_raw_requests_outside_what_is_put_are_refused_and_leak_nothing(_: &On) {
        let engine = Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap());
        let data = engine.data_addr();
        let guarded = Guarded::new(|config| AtRest::new(engine, config));
        let answer = |request: &[u8]| {
            let mut stranger = connect(data);
            stranger.write_all(request).unwrap();
            rest(&mut stranger)
        };
        let identity = Identity {
            instance: guarded.metadata.instance().unwrap(),
            id: TransferId::of_name(guarded.metadata.transfer_id()).unwrap(),
        };
        for (size, ptr) in guarded.outside() {
            let what = format!("{size} bytes at {ptr:#x}");
            assert_eq!(answer(&header(READ_V1, size, ptr)), b"", "{what}");
            assert_eq!(answer(&header(READ_V2, size, ptr)), REFUSED, "{what}");
            assert_eq!(answer(&identified(&identity, size, ptr)), REFUSED, "{what}");
            for (write, answered) in [(WRITE_V1, &b""[..]), (WRITE_V2, REFUSED)] {
                let request = [&header(write, 8, ptr)[..], b"evil"].concat();
                assert_eq!(answer(&request), answered, "{what}");
            }
        }
        // Nor is what is put written, and what may be read can still be read.
        assert_eq!(answer(&header(WRITE_V2, 8, guarded.put)), REFUSED);
        let mut stranger = connect(data);
        stranger.write_all(&header(READ_V2, LEN, guarded.put)).unwrap();
        assert_eq!(take(&mut stranger, 8 + LEN as usize), [DONE, &[OURS; LEN as usize]].concat());
        let (relay, put) = (guarded.relay.health(), guarded.put);
        assert_eq!((relay.status, relay.published, relay.free), ("healthy", 1, 0));
        drop(stranger);

        let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        let receiver = AtRest::new(
            Arc::new(engine),
            &mooncake_relay::Config::default().with_slot_size(SLOT as usize),
        );
        let relay = guarded.ends_as_it_began(&receiver);
        // The put is over.
        assert_eq!(answer(&header(READ_V2, 8, put)), REFUSED);
        drop(relay);
    }
}
