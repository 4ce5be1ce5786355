//! What the tests share.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

pub(crate) mod broken;
pub(crate) mod bytes;
pub(crate) mod ended;
pub(crate) mod faults;
pub(crate) mod gate;
pub(crate) mod hooked;
pub(crate) mod peer;
pub(crate) mod place;
pub(crate) mod proxy;
pub(crate) mod real;
pub(crate) mod sockets;

use std::{
    fmt::Debug,
    fs,
    io::{self, Write},
    net::TcpListener,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::Metadata;

/// As if the put were of a peer of that name.
pub(crate) fn moved_to(name: &str, metadata: &Metadata) -> Metadata {
    metadata.to_string().replace(metadata.session_id(), name).parse().unwrap()
}

/// Whether there is IPv6 on loopback. If not, that is said aloud: nothing can install it.
pub(crate) fn has_ipv6() -> bool {
    let bound = TcpListener::bind("[::1]:0");
    if let Err(error) = &bound {
        // Past the test harness, which would swallow it. Nobody may listen.
        let _ = writeln!(io::stderr(), "{SKIPPED}, no IPv6 on loopback: {error}");
    }
    bound.is_ok()
}

/// How the line of a test begins that cannot run here.
pub(crate) const SKIPPED: &str = "SKIPPED";

/// Runs `body` on a thread of its own and fails loudly if it takes longer than `limit`.
pub(crate) fn within<R: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (tx, rx) = mpsc::channel();
    let runner = thread::spawn(move || {
        let out = body();
        let _ = tx.send(());
        out
    });
    match rx.recv_timeout(limit) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("watchdog: still running after {limit:?}"),
        _ => match runner.join() {
            Ok(out) => out,
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

/// Asks again and again until the answer is `expected`; fails with what it was instead. For what
/// another process does in its own time.
#[track_caller]
pub(crate) fn eventually<T: PartialEq + Debug>(expected: T, mut ask: impl FnMut() -> T) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = ask();
        if found == expected {
            return;
        }
        assert!(Instant::now() < deadline, "still {found:?}, not {expected:?}");
        thread::sleep(Duration::from_millis(2)); // between two looks, not instead of one
    }
}

/// Plays a scene again until it came about, which it says itself: what a machine does that is too busy
/// for one is not what is tested.
#[track_caller]
pub(crate) fn comes_about(mut scene: impl FnMut() -> bool) {
    const TRIES: usize = 20;
    assert!((0..TRIES).any(|_| scene()), "too slow a machine to say anything");
}

/// How many threads of this process have a name that begins so.
pub(crate) fn threads_named(start: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    // A thread may end between the two looks.
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with(start)).count()
}

/// Numbers that look random and are the same in every run.
pub(crate) struct Random(u64);

impl Random {
    /// Prints the seed: it is all that is needed to run a failure again.
    pub(crate) fn new(seed: u64) -> Self {
        println!("seed {seed:#x}");
        Self::of(seed)
    }

    /// Says nothing: for who has said what the seed comes from.
    pub(crate) fn of(seed: u64) -> Self {
        Self(seed.max(1))
    }

    /// xorshift64*
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }

    /// From 0 to `most`; every order of magnitude is as likely as the next.
    pub(crate) fn size(&mut self, most: u64) -> u64 {
        let bits = u64::from(64 - most.leading_zeros());
        let top = 1 << self.below(bits + 1);
        self.below(top).min(most)
    }
}
