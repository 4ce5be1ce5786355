//! Calls that may take as long as the system's timeouts, on threads of their own.
//!
//! The engine's blocking calls know no deadline, and nothing ends them. Whoever makes one has a
//! thread do it and waits no longer than he may; the thread ends when the call does.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{self, RecvTimeoutError};

use crate::error::{Error, Result};

/// A silent peer holds its thread for a minute, so there are never more than these.
const AT_ONCE: usize = 64;

/// How often whoever waits looks whether the engine was stopped.
pub(super) const LOOK: Duration = Duration::from_millis(5);

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Runs `call` on a thread of its own. False: there are too many, and `call` was dropped.
pub(super) fn begin(call: impl FnOnce() + Send + 'static) -> bool {
    let Some(permit) = Permit::take() else { return false };
    let spawned = thread::Builder::new().name("mooncake-aside".to_owned()).spawn(move || {
        let _permit = permit;
        call();
    });
    spawned.is_ok()
}

/// Runs `call` on a thread of its own, and waits for what it returns until `deadline`, or until
/// `over` says that nobody waits any more. What comes later is dropped on that thread.
pub(super) fn run<T: Send + 'static>(
    deadline: Instant,
    over: impl Fn() -> bool,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (tx, rx) = channel::bounded(1);
    let begun = begin(move || {
        // Fails if nobody waits any more.
        let _ = tx.send(call());
    });
    if !begun {
        return Err(Error::Exhausted);
    }
    loop {
        let now = Instant::now();
        match rx.recv_timeout(deadline.saturating_duration_since(now).min(LOOK)) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Closed),
            Err(RecvTimeoutError::Timeout) if over() => return Err(Error::Closed),
            Err(RecvTimeoutError::Timeout) if now >= deadline => return Err(Error::TimedOut),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

struct Permit;

impl Permit {
    fn take() -> Option<Self> {
        let more = |running: usize| (running < AT_ONCE).then_some(running + 1);
        RUNNING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}
