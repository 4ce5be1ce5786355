//! How often a transfer allocates, in all threads of the process together: twice in a put, for the
//! metadata it hands out (its text's name and what it holds), and never again.
//!
//! A file of its own, since the counting allocator is the whole process's; and one test, since a
//! second one would be counted too.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crossbeam::channel::{Receiver, Sender, bounded};
use mooncake_relay::{
    Completion, Config, Engine, InProcessEngine, Metadata, Relay, Slot, Tensor, Token,
};

use crate::common::within;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is the system allocator's, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

const WARM_UP: usize = 300;
const ROUNDS: usize = 1000;
/// In `put`: the transfer's name, and what the metadata shares among its clones.
const METADATA: usize = 2;
/// What threads and channels make once, when they first have to sleep, which may be after the warm-up.
/// One allocation in a hundred transfers would be more.
const ONCE: usize = 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// What each part of a round allocated, over all rounds.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    put: usize,
    get: usize,
    token: usize,
}

/// How a round ends: the metadata is got, then the put's token is heard.
type Round = fn(&Setting, &Metadata, Token<Slot>) -> usize;

struct Setting {
    sender: Relay,
    receiver: Relay,
    tx: Sender<Completion<Slot>>,
    rx: Receiver<Completion<Slot>>,
}

#[test]
fn a_transfer_allocates_nothing_but_its_metadata() {
    within(Duration::from_secs(600), || {
        let in_process = || {
            let name = format!("allocations-{}", ALLOCATIONS.load(Ordering::Relaxed));
            Arc::new(InProcessEngine::new(&name).unwrap()) as Arc<dyn Engine>
        };
        over("in-process", in_process);
        #[cfg(feature = "embedded")]
        over("embedded", || Arc::new(mooncake_relay::EmbeddedEngine::bind("127.0.0.1:0").unwrap()));
    });
}

fn over(name: &str, engine: impl Fn() -> Arc<dyn Engine>) {
    let config = Config::default().with_slot_size(4096);
    let relay = || Relay::new(engine(), &config).unwrap();
    // An unbounded channel would make a block for every few messages.
    let (tx, rx) = bounded(4);
    let setting = Setting { sender: relay(), receiver: relay(), tx, rx };
    let rounds: [(&str, Round); 4] = [
        ("get, wait", get_and_wait),
        ("get_into", get_into),
        ("get, poll", get_and_poll),
        ("get, attach", get_and_attach),
    ];
    for (how, round) in rounds {
        let spent = setting.run(round);
        println!("{name:10} {how:12} {ROUNDS} rounds: {spent:?}");
        let all = spent.put + spent.get + spent.token;
        assert!((METADATA * ROUNDS..=METADATA * ROUNDS + ONCE).contains(&all), "{name}, {how}");
    }
}

impl Setting {
    fn run(&self, round: Round) -> Spent {
        let mut spent = Spent::default();
        for number in 0..WARM_UP + ROUNDS {
            if number == WARM_UP {
                spent = Spent::default();
            }
            let tensor = Tensor::bytes(100);
            let begun = ALLOCATIONS.load(Ordering::Relaxed);
            let (metadata, token) = self.sender.put_bytes(&[7; 100], tensor).unwrap();
            let put = ALLOCATIONS.load(Ordering::Relaxed);
            let got = round(self, &metadata, token);
            let ended = ALLOCATIONS.load(Ordering::Relaxed);
            spent.put += put - begun;
            spent.get += got - put;
            spent.token += ended - got;
        }
        spent
    }
}

fn get_and_wait(setting: &Setting, metadata: &Metadata, token: Token<Slot>) -> usize {
    let slot = setting.receiver.get(metadata).unwrap().wait().unwrap();
    assert_eq!(slot[..], [7; 100]);
    drop(slot);
    let got = ALLOCATIONS.load(Ordering::Relaxed);
    token.wait().unwrap();
    got
}

fn get_into(setting: &Setting, metadata: &Metadata, token: Token<Slot>) -> usize {
    let mut dest = [0; 128];
    assert_eq!(setting.receiver.get_into(metadata, &mut dest, PATIENCE).unwrap(), 100);
    let got = ALLOCATIONS.load(Ordering::Relaxed);
    token.wait().unwrap();
    got
}

fn get_and_poll(setting: &Setting, metadata: &Metadata, mut token: Token<Slot>) -> usize {
    let mut get = setting.receiver.get(metadata).unwrap();
    while !get.is_done() {
        std::thread::yield_now();
    }
    drop(get.poll().unwrap().unwrap());
    let got = ALLOCATIONS.load(Ordering::Relaxed);
    while token.poll().is_none() {
        std::thread::yield_now();
    }
    got
}

fn get_and_attach(setting: &Setting, metadata: &Metadata, token: Token<Slot>) -> usize {
    setting.receiver.get(metadata).unwrap().attach(&setting.tx, 1);
    setting.rx.recv().unwrap().result.unwrap();
    let got = ALLOCATIONS.load(Ordering::Relaxed);
    token.attach(&setting.tx, 2);
    setting.rx.recv().unwrap().result.unwrap();
    got
}
