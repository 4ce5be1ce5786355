//! A slot that is wanted while somebody is in the middle of reading it.

use std::{thread, time::Duration};

use mooncake_relay::{Config, Engine, Error, Retracted, Slot, Token};
use serde_json::{Value, json};

use crate::{
    common::{bytes::Canary, eventually, gate::Gate, hooked::Hooked, peer::Sent, proxy::Proxy},
    on::{AtRest, Lack, On, Peer, cases},
};

cases! {
    Any: q3_a_slot_whose_lease_ends_under_a_read_is_handed_out_after_it,
        q3_a_read_that_outlasts_the_quarantine_never_yields_the_next_bytes,
        q19_of_two_receivers_the_slow_one_holds_the_slot_and_releases_nothing;
    Proxy: q3_a_slot_whose_lease_ends_under_a_frozen_receiver_is_handed_out_after_it = 600,
        q3_a_frozen_receiver_is_cut_when_the_quarantine_is_over = 600,
        q19_of_two_receivers_of_32_mib_the_slow_one_holds_the_slot_and_releases_nothing = 600;
}

const PATIENCE: Duration = Duration::from_secs(60);
const OLD: [u8; 4096] = [0x0D; 4096];
const NEW: [u8; 4096] = [0xEE; 4096];

/// One slot, whose lease ends soon, and long after a read has begun.
fn one() -> Config {
    Config::default()
        .with_credits(1)
        .with_slot_size(64 << 10)
        .with_lease(Duration::from_secs(3))
        .with_quarantine(Duration::from_secs(2))
}

/// A relay of which it is said, until the gate opens, that its slots are being read.
fn read_by_somebody(on: &On, config: &Config) -> (AtRest, Gate) {
    let engine = on.hooked();
    let reading = engine.answer_retract(Retracted::Reading);
    (AtRest::new(engine.engine(), config), reading)
}

/// Each read has all its bytes, and returns when the gate is opened.
fn linger(engine: &Hooked) -> Gate {
    let (gate, way) = Gate::pair();
    engine.on_read(move |next, remote, local, deadline| {
        let filled = next.read(remote, local, deadline);
        way.pass();
        filled
    });
    gate
}

/// The bytes of that put, or the word that it is over where only the stamp can tell.
#[track_caller]
fn that_or_over(on: &On, got: mooncake_relay::Result<Slot>) -> bool {
    match got {
        Ok(slot) => {
            assert!(slot[..] == OLD, "bytes of another put");
            true
        }
        Err(error) => {
            let stale = matches!(error, Error::Stale { .. }) && on.lacks(Lack::Identity);
            assert!(stale, "{error:?}");
            false
        }
    }
}

#[track_caller]
fn timed_out(token: Token<Slot>) {
    let ended = token.wait();
    assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
}

fn q3_a_slot_whose_lease_ends_under_a_read_is_handed_out_after_it(on: &On) {
    let (a, reading) = read_by_somebody(on, &one().with_quarantine(Duration::from_secs(5)));
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &Config::default().with_slot_size(64 << 10));
    let held = linger(&engine);
    let (metadata, token) = a.sends(&OLD);
    let get = b.get(&metadata).unwrap();
    held.entered(1);
    timed_out(token);
    assert_eq!(a.health().quarantined[0].id, metadata.transfer_id());
    thread::scope(|s| {
        let next = s.spawn(|| a.sends(&NEW));
        eventually(1, || a.health().waiting);
        assert!(!next.is_finished() && !get.is_done());
        held.open();
        that_or_over(on, get.wait());
        assert!(!next.is_finished(), "the engine has not let go of the slot");
        reading.open();
        let (metadata, token) = next.join().unwrap();
        assert_eq!(b.get(&metadata).unwrap().wait().unwrap()[..], NEW);
        token.wait().unwrap();
    });
}

fn q3_a_read_that_outlasts_the_quarantine_never_yields_the_next_bytes(on: &On) {
    let (a, _reading) = read_by_somebody(on, &one());
    let engine = on.hooked();
    let b = AtRest::new(engine.engine(), &Config::default().with_slot_size(64 << 10));
    // Two gets of the old put: one has its bytes and no more, one has not begun.
    let held = linger(&engine);
    let (old, token) = a.sends(&OLD);
    let lingers = b.get(&old).unwrap();
    held.entered(1);
    timed_out(token);
    // Waits for the quarantine, and writes all over the slot.
    let (new, new_token) = a.sends(&NEW);
    assert_eq!(a.health().counters.relay.quarantines_cut, 1);
    held.open();
    that_or_over(on, lingers.wait());
    let mut canary = Canary::new(OLD.len());
    let late = b.get_into(&old, canary.dest(), PATIENCE);
    assert!(matches!(late, Err(Error::Stale { .. })), "{late:?}");
    canary.is_untouched();
    assert_eq!(b.get(&new).unwrap().wait().unwrap()[..], NEW);
    new_token.wait().unwrap();
}

fn q19_of_two_receivers_the_slow_one_holds_the_slot_and_releases_nothing(on: &On) {
    let config = one().with_lease(PATIENCE).with_quarantine(Duration::from_secs(5));
    let (a, reading) = read_by_somebody(on, &config);
    let quick = on.relay(&Config::default().with_slot_size(64 << 10));
    let engine = on.hooked();
    let slow = AtRest::new(engine.engine(), &Config::default().with_slot_size(64 << 10));
    let held = linger(&engine);
    let (metadata, token) = a.sends(&OLD);
    let late = slow.get(&metadata).unwrap();
    held.entered(1);
    assert_eq!(quick.get(&metadata).unwrap().wait().unwrap()[..], OLD);
    eventually(1, || a.health().quarantined.len());
    thread::scope(|s| {
        let next = s.spawn(|| a.acquire(1, PATIENCE).map(drop));
        eventually(1, || a.health().waiting);
        assert!(!token.is_done() && !next.is_finished());
        held.open();
        let read = that_or_over(on, late.wait());
        reading.open();
        let slot = token.wait().unwrap();
        assert!(slot[..] == OLD, "the slot came back changed");
        assert!(!next.is_finished(), "it is the caller's now, and of nobody else");
        drop(slot);
        next.join().unwrap().unwrap();
        let counters = || a.health().counters.relay;
        eventually(true, || counters().notes_late >= u64::from(read));
        assert_eq!(counters().puts_acknowledged, 1);
    });
    assert_eq!(a.health().free, 1);
}

const LARGE: u64 = 32 << 20;
/// Where the middle of a read is: far more than the start, far less than all.
const MIDDLE: u64 = 1 << 20;

/// A sender with one slot behind a proxy, which a receiver is in the middle of reading.
struct Midway {
    proxy: Proxy,
    sender: Peer,
    receiver: Peer,
    sent: Sent,
    get: u64,
    /// A put that wants the slot.
    next: u64,
}

impl Midway {
    fn begin(on: &On, flags: &[&str]) -> Self {
        let proxy = Proxy::new();
        let advertise = proxy.advertise();
        let own = ["--slot-size", "33554432", "--credits", "1", "--advertise", &advertise];
        let sender = on.peer(&[&own, flags].concat());
        proxy.forward_to_peer(&sender);
        let receiver = on.peer(&["--slot-size", "33554432"]);
        let sent = sender.put(json!({"size": LARGE, "seed": 1}));
        proxy.data().down().stall_after(MIDDLE);
        let get = receiver.send_get(&sent.metadata);
        proxy.data().until(|seen| seen.bytes_down >= MIDDLE);
        let next = sender.send(json!({"cmd": "put", "bytes": {"size": LARGE, "fill": 238}}));
        eventually(json!(1), || sender.health()["waiting"].clone());
        Self { proxy, sender, receiver, sent, get, next }
    }

    fn counter(&self, name: &str) -> u64 {
        self.sender.health()["counters"][name].as_u64().unwrap()
    }

    fn is_quarantined(&self) {
        eventually(1, || self.sender.health()["quarantined"].as_array().unwrap().len());
        assert!(!self.sender.has_answered(self.next), "the slot was handed out");
        assert!(self.counter("bytes_served") < LARGE);
    }

    /// The put that waited, and what was read of it.
    fn next_works(&self) {
        let next = self.sender.sent(self.next);
        assert_eq!(self.receiver.get(&next.metadata)["sha256"], *next.sha256);
        assert_eq!(self.sender.wait(next.tag)["ok"], true);
    }
}

fn q3_a_slot_whose_lease_ends_under_a_frozen_receiver_is_handed_out_after_it(on: &On) {
    let midway = Midway::begin(on, &["--lease-ms", "4000", "--quarantine-ms", "120000"]);
    let Midway { proxy, sender, receiver, sent, get, next } = &midway;
    receiver.stop();
    assert_eq!(sender.wait(sent.tag)["kind"], "TimedOut");
    // What the sockets hold goes on its way, and no more, since nobody reads.
    proxy.data().down().resume();
    midway.is_quarantined();
    receiver.resume();
    let got = receiver.answer(*get);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    let answered = sender.sent(*next);
    assert_eq!((midway.counter("bytes_served"), midway.counter("quarantines_cut")), (LARGE, 0));
    assert_eq!(receiver.get(&answered.metadata)["sha256"], *answered.sha256);
    assert_eq!(sender.wait(answered.tag)["ok"], true);
    // It came in its own time, for a put that had ended.
    eventually(1, || midway.counter("notes_late"));
}

fn q3_a_frozen_receiver_is_cut_when_the_quarantine_is_over(on: &On) {
    let midway = Midway::begin(on, &["--lease-ms", "4000", "--quarantine-ms", "1500"]);
    let Midway { proxy, sender, receiver, sent, get, next } = &midway;
    receiver.stop();
    assert_eq!(sender.wait(sent.tag)["kind"], "TimedOut");
    proxy.data().down().resume();
    let answered = sender.sent(*next);
    assert_eq!(midway.counter("quarantines_cut"), 1);
    assert!(midway.counter("bytes_served") < LARGE);
    receiver.resume();
    let got = receiver.answer(*get);
    assert!(["PeerFailed", "Stale"].map(Value::from).contains(&got["kind"]), "{got}");
    assert_eq!(receiver.get(&answered.metadata)["sha256"], *answered.sha256);
    assert_eq!(sender.wait(answered.tag)["ok"], true);
}

fn q19_of_two_receivers_of_32_mib_the_slow_one_holds_the_slot_and_releases_nothing(on: &On) {
    let midway = Midway::begin(on, &["--lease-ms", "60000", "--quarantine-ms", "120000"]);
    let Midway { proxy, sender, receiver, sent, get, .. } = &midway;
    let quick = on.peer(&["--slot-size", "33554432"]);
    assert_eq!(quick.get(&sent.metadata)["sha256"], *sent.sha256);
    eventually(1, || midway.counter("puts_acknowledged"));
    eventually(1, || sender.health()["quarantined"].as_array().unwrap().len());
    assert!(!sender.has_answered(midway.next), "the slot was handed out");
    let wait = sender.send(json!({"cmd": "wait", "of": sent.tag}));
    assert!(!sender.has_answered(wait));
    proxy.data().down().resume();
    let got = receiver.answer(*get);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    assert_eq!(sender.answer(wait)["ok"], true);
    eventually(1, || midway.counter("notes_late"));
    assert_eq!((midway.counter("puts_acknowledged"), midway.counter("quarantines_cut")), (1, 0));
    midway.next_works();
}
