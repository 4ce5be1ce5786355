//! Calls that may take as long as the system's timeouts, on threads of their own.
//!
//! The engine's blocking calls know no deadline, and nothing ends them. Whoever makes one has a
//! thread do it and waits no longer than he may; the thread ends when the call does.

use std::{
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{self, RecvTimeoutError};
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};

/// A silent peer holds its thread for a minute, so there are never more than these.
const AT_ONCE: usize = 64;

/// How often whoever waits looks whether the engine was stopped.
pub(super) const LOOK: Duration = Duration::from_millis(5);

static RUNNING: Mutex<usize> = Mutex::new(0);
static FEWER: Condvar = Condvar::new();

/// Runs `call` on a thread of its own. False: there are too many, and `call` was dropped.
pub(super) fn begin(call: impl FnOnce() + Send + 'static) -> bool {
    let permit = Permit::take(&mut RUNNING.lock());
    permit.is_some_and(|permit| spawn(permit, call))
}

fn spawn(permit: Permit, call: impl FnOnce() + Send + 'static) -> bool {
    let spawned = thread::Builder::new().name("mooncake-aside".to_owned()).spawn(move || {
        let _permit = permit;
        call();
    });
    spawned.is_ok()
}

/// Runs `call` on a thread of its own, once there are not too many, and waits for what it returns until
/// `deadline`, or until `over` says that nobody waits any more. What comes later is dropped on that
/// thread.
pub(super) fn run<T: Send + 'static>(
    deadline: Instant,
    over: impl Fn() -> bool,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (tx, rx) = channel::bounded(1);
    let begun = spawn(Permit::wait(deadline, &over)?, move || {
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
    fn take(running: &mut usize) -> Option<Self> {
        (*running < AT_ONCE).then(|| {
            *running += 1;
            Self
        })
    }

    fn wait(deadline: Instant, over: impl Fn() -> bool) -> Result<Self> {
        let mut running = RUNNING.lock();
        loop {
            if let Some(permit) = Self::take(&mut running) {
                return Ok(permit);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::TimedOut);
            }
            FEWER.wait_until(&mut running, deadline.min(now + LOOK));
            if over() {
                return Err(Error::Closed);
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *RUNNING.lock() -= 1;
        FEWER.notify_one();
    }
}
