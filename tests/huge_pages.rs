//! Slots in huge pages, or a clear word why not.
//!
//! What is free is the whole machine's, so these tests run one at a time, also of several processes. Where
//! no huge pages are free and none can be set aside, those that need some skip, and say so.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    fs::{self, File},
    io::{self, Write},
    sync::Arc,
};

use mooncake_relay::{Config, Error, HugePages, InProcessEngine, Relay, Tensor};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, SealFlags, fcntl_get_seals, flock};

use crate::common::SKIPPED;

const HUGE_PAGE: usize = 2 << 20;
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

/// Nobody else here counts huge pages until the file is closed.
fn alone() -> File {
    let file = File::open("/proc/meminfo").unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}

fn relay(config: &Config) -> Result<Relay, Error> {
    Relay::new(Arc::new(InProcessEngine::new("huge-pages").unwrap()), config)
}

/// Two huge pages a direction, the second with a page of 4 KiB in it.
fn four() -> Config {
    Config::default().with_credits(1).with_slot_size(HUGE_PAGE + 4096)
}

/// More than any machine has: half a million huge pages a direction.
fn too_many() -> Config {
    Config::default().with_credits(1).with_slot_size(1 << 40).with_huge_pages(HugePages::Require)
}

fn round_trip(relay: &Relay) {
    let sent: Vec<u8> = (0..HUGE_PAGE + 4096).map(|n| (n % 251) as u8).collect();
    let (metadata, put) = relay.put_bytes(&sent, Tensor::bytes(sent.len())).unwrap();
    assert!(relay.get(&metadata).unwrap().wait().unwrap()[..] == sent[..]);
    put.wait().unwrap();
}

/// The numbers in a text, as they come.
fn numbers(text: &str) -> Vec<usize> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn free() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let of = |name| numbers(text.lines().find(|line| line.starts_with(name)).unwrap())[0];
    of("HugePages_Free") - of("HugePages_Rsvd")
}

/// So many huge pages or more that are free, until it is dropped.
struct Reserved {
    added: usize,
}

impl Reserved {
    fn new(count: usize) -> Option<Self> {
        let reserved = Self { added: count.saturating_sub(free()) };
        reserved.change(|now| now + reserved.added);
        if free() >= count {
            return Some(reserved);
        }
        skip(&format!("{count} huge pages are wanted, and {} are free: {RESERVED}", free()))
    }

    fn change(&self, to: impl Fn(usize) -> usize) {
        if self.added > 0 {
            let now = numbers(&fs::read_to_string(RESERVED).unwrap())[0];
            let _ = fs::write(RESERVED, to(now).to_string()); // seen by what is free then
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.change(|now| now.saturating_sub(self.added));
    }
}

/// Not a failure where `CI` is set: huge pages are the machine's owner's to set aside.
fn skip<T>(reason: &str) -> Option<T> {
    // Past the test harness, which would swallow it.
    let _ = writeln!(io::stderr(), "{SKIPPED}: {reason}");
    None
}

/// What `/proc/self/smaps` says of each mapping of a relay's slots.
fn mappings() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut all: Vec<String> = Vec::new();
    for line in text.lines() {
        let begins = line.split_whitespace().next().is_some_and(|word| word.contains('-'));
        if begins || all.is_empty() {
            all.push(String::new());
        }
        let last = all.last_mut().unwrap();
        last.push_str(line);
        last.push('\n');
    }
    let slots = ["mooncake-relay-slots", "mooncake-relay-receive"];
    // The scratch of the receive side is a page.
    let large = |text: &String| numbers(text.split("Size:").nth(1).unwrap())[0] > 4;
    all.retain(|text| slots.iter().any(|name| text.contains(name)) && large(text));
    all
}

#[test]
fn what_is_required_and_missing_is_an_error_with_numbers() {
    let _alone = alone();
    let free = free();
    match relay(&too_many()) {
        Err(Error::Config { field: "huge_pages", reason }) => {
            let numbers = numbers(&reason);
            assert_eq!(numbers[0], 2 << 19, "{reason}");
            assert!(numbers.contains(&free), "{reason}");
            for remedy in ["vm.nr_hugepages=", "HugePages_Free", "fewer credits"] {
                assert!(reason.contains(remedy), "{reason}");
            }
        }
        other => panic!("{other:?}"),
    }
    assert!(mappings().is_empty());
}

#[test]
fn what_is_preferred_and_missing_is_small_pages_and_one_warning() {
    let _alone = alone();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    let free = free();
    if free > 64 {
        let _: Option<()> = skip(&format!("{free} huge pages are free, too many to want more"));
        return;
    }
    let config = four().with_receive_credits(free as u32 + 1);
    let relay = tracing::subscriber::with_default(subscriber, || {
        relay(&config.with_huge_pages(HugePages::Prefer)).unwrap()
    });
    assert!(!relay.health().huge_pages);
    round_trip(&relay);
    let log = String::from_utf8(log.0.lock().clone()).unwrap();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    assert!(warnings[0].contains("vm.nr_hugepages"), "{log}");
}

#[test]
fn without_a_wish_the_slots_are_small_pages() {
    let _alone = alone();
    let relay = relay(&four()).unwrap();
    assert!(!relay.health().huge_pages);
    let mappings = mappings();
    assert_eq!(mappings.len(), 2);
    assert!(mappings.iter().all(|text| text.contains("KernelPageSize:        4 kB")));
}

#[test]
fn slots_in_huge_pages_take_so_many_and_give_them_back() {
    let _alone = alone();
    let Some(_reserved) = Reserved::new(4) else { return };
    for choice in [HugePages::Require, HugePages::Prefer] {
        let before = free();
        let relay = relay(&four().with_huge_pages(choice)).unwrap();
        assert!(relay.health().huge_pages);
        assert_eq!(free(), before - 4);
        let mappings = mappings();
        assert_eq!(mappings.len(), 2, "{mappings:?}");
        for text in mappings {
            assert!(text.contains("KernelPageSize:     2048 kB"), "{text}");
            // `dc`: not there in a forked child.
            assert!(text.lines().any(|l| l.starts_with("VmFlags:") && l.contains(" dc")), "{text}");
        }
        round_trip(&relay);
        assert_eq!(relay.try_acquire(1).unwrap().span().addr() % HUGE_PAGE as u64, 0);
        drop(relay);
        assert_eq!(free(), before);
    }
}

#[test]
fn one_huge_page_too_few_is_refused_before_any_is_taken() {
    let _alone = alone();
    let Some(_reserved) = Reserved::new(3) else { return };
    let before = free();
    // Both directions have a part of a page, which counts as one: 2, and one more than their slots.
    let config = four().with_receive_credits(before as u32 - 2);
    match relay(&config.with_huge_pages(HugePages::Require)) {
        Err(Error::Config { field: "huge_pages", reason }) => {
            assert_eq!(numbers(&reason)[0], before + 1, "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(free(), before);
}

#[test]
fn huge_slots_that_peers_read_are_sealed() {
    let _alone = alone();
    let Some(_reserved) = Reserved::new(4) else { return };
    let _relay = relay(&four().with_huge_pages(HugePages::Require)).unwrap();
    let slots = fs::read_dir("/proc/self/fd").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let name = fs::read_link(&path).ok()?;
        name.to_str()?.contains("mooncake-relay-slots").then_some(path)
    });
    let slots = fs::OpenOptions::new().read(true).write(true).open(slots.unwrap()).unwrap();
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert!(fcntl_get_seals(&slots).unwrap().contains(seals));
    assert_eq!(slots.metadata().unwrap().len(), 2 * HUGE_PAGE as u64);
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
