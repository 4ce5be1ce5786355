//! Slots that are locked into memory, or a clear word why not.
//!
//! These tests change limits of the process and capabilities of a thread, so they run one at a time.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{fs, sync::Arc, thread};

use mooncake_relay::{Config, Error, InProcessEngine, Relay, Tensor};
use parking_lot::Mutex;
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};

static ALONE: Mutex<()> = Mutex::new(());

fn relay(config: &Config) -> Result<Relay, Error> {
    Relay::new(Arc::new(InProcessEngine::new("locked-memory").unwrap()), config)
}

/// Bytes of this process that are locked.
fn locked() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Runs `body` on a thread that may lock `limit` bytes and no more.
fn without_privilege(limit: u64, body: impl FnOnce() + Send) {
    let before = getrlimit(Resource::Memlock);
    let current = before.maximum.map_or(limit, |most| most.min(limit));
    setrlimit(Resource::Memlock, Rlimit { current: Some(current), ..before }).unwrap();
    thread::scope(|s| {
        let ended = s.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            sets.permitted.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, sets).unwrap();
            body();
        });
        let ended = ended.join();
        setrlimit(Resource::Memlock, before).unwrap();
        ended.unwrap();
    });
}

fn small() -> Config {
    Config::default().with_slot_size(4096).with_credits(2)
}

#[test]
fn locked_slots_are_locked_and_let_go() {
    let _alone = ALONE.lock();
    let before = locked();
    let unlocked = relay(&small()).unwrap();
    assert_eq!(locked(), before, "nothing is locked that nobody asked for");
    drop(unlocked);
    let relay = relay(&small().with_lock_memory(true)).unwrap();
    // Two pools of two slots, the stamps and the scratch: whole pages.
    assert_eq!(locked() - before, 6 * 4096);
    let (metadata, put) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
    assert_eq!(&relay.get(&metadata).unwrap().wait().unwrap()[..], b"x");
    drop((put, relay));
    assert_eq!(locked(), before);
}

#[test]
fn what_may_not_be_locked_says_how_much_is_needed_and_allowed() {
    let _alone = ALONE.lock();
    without_privilege(64 << 10, || {
        let large = Config::default().with_slot_size(4 << 20).with_credits(2);
        let unlocked = relay(&large).unwrap();
        let (metadata, put) = unlocked.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        assert_eq!(&unlocked.get(&metadata).unwrap().wait().unwrap()[..], b"x");
        drop((put, unlocked));
        match relay(&large.with_lock_memory(true)) {
            Err(Error::Config { field: "lock_memory", reason }) => {
                let needed = 16 << 20;
                let numbers = reason.split(|c: char| !c.is_ascii_digit());
                let numbers: Vec<u64> = numbers.filter_map(|text| text.parse().ok()).collect();
                assert!((needed..needed + (64 << 10)).contains(&numbers[0]), "{reason}");
                assert!(numbers[1] <= 64 << 10, "{reason}");
                for remedy in ["ulimit -l", "CAP_IPC_LOCK"] {
                    assert!(reason.contains(remedy), "{reason}");
                }
            }
            other => panic!("{other:?}"),
        }
        // It left nothing, and what fits is locked.
        drop(relay(&small().with_lock_memory(true)).unwrap());
    });
}
