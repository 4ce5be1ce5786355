//! Processes that end in the middle of what their relays do.

use std::{
    cell::RefCell,
    net::TcpListener,
    process::{self, ExitCode},
    sync::{Mutex, OnceLock},
    thread::{self, JoinHandle},
    time::Duration,
};

use libtest_mimic::{Failed, Trial};
use mooncake_relay::{Error, Relay, Result, Slot, Tensor, Token};

use crate::{
    ENGINES, WATCHDOG,
    common::{hooked::Hooked, moved_to},
    exited, in_process, local, put, run, small, times, works,
};

/// One way to end: its name, how it goes, and with which code.
type Route = (&'static str, fn() -> ExitCode, i32);

const ROUTES: [Route; 9] = [
    ("m1_main_returns_and_drops_its_relays", returns, 3),
    ("m1_main_returns_and_leaves_its_relays_in_a_static", leaves, 3),
    ("m1_main_returns_and_its_relays_go_with_its_locals", goes_with_locals, 3),
    ("m1_main_panics", panics, 101),
    ("m1_another_thread_exits", another_exits, 7),
    ("m1_another_thread_exits_while_main_closes", another_exits_while_main_closes, 7),
    ("m1_a_thread_of_the_relay_exits", its_own_thread_exits, 7),
    ("m1_another_thread_ends_it_without_a_word", ends_at_once, 7),
    ("m1_main_returns_although_a_thread_waits", a_thread_waits, 3),
];

pub(crate) fn route(name: &str) -> Option<fn() -> ExitCode> {
    ROUTES.iter().find(|route| route.0 == name).map(|route| route.1)
}

/// How many processes end in each way: 200 if it is to be known well.
fn rounds() -> usize {
    times("MOONCAKE_RELAY_TEST_EXITS", 10)
}

pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    ROUTES.into_iter().map(|(name, _, code)| Trial::test(name, move || ends(name, code)))
}

fn ends(name: &str, code: i32) -> Result<(), Failed> {
    for _ in 0..rounds() {
        let ended = run(name, WATCHDOG)?;
        match code {
            101 => ended.is_as(exited(code))?,
            _ => ended.is_well(exited(code))?,
        }
    }
    Ok(())
}

/// Relays in the middle of everything.
struct Busy {
    relays: Vec<Relay>,
    /// Open, and nobody waits for them.
    tokens: Vec<Token<Slot>>,
    /// Each waits for a put that nobody gets.
    waiting: Vec<JoinHandle<Result<Slot>>>,
    /// Takes connections, and never says a word.
    silent: TcpListener,
}

fn busy() -> Busy {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut relays, mut tokens, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for (_, make) in ENGINES {
        let [a, b] = [(), ()].map(|()| Relay::new(make(), &small().with_credits(3)).unwrap());
        works(&a, &b);
        tokens.push(put(&a, b"nobody gets it").1);
        let (_, token) = put(&b, b"nor that");
        waiting.push(thread::spawn(move || token.wait()));
        let (metadata, _) = put(&a, b"its getter is stuck");
        let silent = silent.local_addr().unwrap().to_string();
        tokens.push(b.get(&moved_to(&silent, &metadata)).unwrap());
        relays.extend([a, b]);
    }
    // So large that a second thread helps.
    let large = Relay::new(local(), &small().with_slot_size(4 << 20).with_credits(1)).unwrap();
    tokens.push(large.put_bytes(&vec![1; 4 << 20], Tensor::bytes(4 << 20)).unwrap().1);
    relays.push(large);
    Busy { relays, tokens, waiting, silent }
}

impl Busy {
    /// Every token has ended as closed.
    fn have_ended(self) {
        for token in self.tokens {
            assert!(matches!(token.wait(), Err(Error::Closed | Error::PeerFailed { .. })));
        }
        for thread in self.waiting {
            assert!(matches!(thread.join().unwrap(), Err(Error::Closed)));
        }
        drop(self.silent);
    }
}

fn returns() -> ExitCode {
    let mut busy = busy();
    busy.relays.clear();
    busy.have_ended();
    ExitCode::from(3)
}

fn leaves() -> ExitCode {
    static BUSY: OnceLock<Mutex<Busy>> = OnceLock::new();
    BUSY.get_or_init(|| Mutex::new(busy()));
    ExitCode::from(3)
}

fn goes_with_locals() -> ExitCode {
    thread_local! {
        static BUSY: RefCell<Option<Busy>> = const { RefCell::new(None) };
    }
    BUSY.set(Some(busy()));
    ExitCode::from(3)
}

fn panics() -> ExitCode {
    let _busy = busy();
    panic!("as the test wants it");
}

fn another_exits() -> ExitCode {
    let mut busy = busy();
    thread::spawn(|| process::exit(7));
    let all: Vec<_> = busy.tokens.drain(..).map(Token::wait).collect();
    thread::park_timeout(WATCHDOG);
    unreachable!("{all:?}");
}

fn another_exits_while_main_closes() -> ExitCode {
    let busy = busy();
    thread::spawn(|| process::exit(7));
    for relay in &busy.relays {
        relay.close(WATCHDOG);
    }
    thread::park_timeout(WATCHDOG);
    unreachable!("the process has ended");
}

fn its_own_thread_exits() -> ExitCode {
    let _busy = busy();
    let engine = Hooked::over(in_process());
    let relay = Relay::new(engine.engine(), &small()).unwrap();
    engine.on_tend(|_| process::exit(7));
    let (_, token) = put(&relay, b"nobody gets it");
    drop(token.wait());
    unreachable!("the process has ended");
}

fn ends_at_once() -> ExitCode {
    let _busy = busy();
    // SAFETY: it ends the process, and nothing else.
    thread::spawn(|| unsafe { libc::_exit(7) });
    thread::park_timeout(WATCHDOG);
    unreachable!("the process has ended");
}

fn a_thread_waits() -> ExitCode {
    let busy = busy();
    let tokens = busy.tokens;
    // It outlives main, and so do the relays.
    thread::spawn(move || tokens.into_iter().map(Token::wait).for_each(drop));
    thread::sleep(Duration::from_millis(1)); // widens the window: it may be waiting by then, or not
    std::mem::forget(busy.relays);
    ExitCode::from(3)
}
