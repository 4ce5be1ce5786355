//! Where calls wait until a test lets them go.

use std::{
    sync::{Arc, OnceLock},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

/// Shut until the test opens it, or drops it. Then its threads end, too.
#[must_use = "a gate that is dropped is open"]
pub(crate) struct Gate(Arc<Way>);

/// What a gate bars.
#[derive(Default)]
pub(crate) struct Way {
    state: Mutex<State>,
    changed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    when_opened: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct State {
    open: bool,
    entered: usize,
}

impl Gate {
    /// Two ends of one gate: the test's, and the engine's, which opens it when the engine ends.
    pub(crate) fn pair() -> (Self, Self) {
        let way = Arc::new(Way::default());
        (Self(Arc::clone(&way)), Self(way))
    }

    /// Lets everybody go, now and later.
    pub(crate) fn open(&self) {
        if !std::mem::replace(&mut self.0.state.lock().open, true)
            && let Some(then) = self.0.when_opened.get()
        {
            then();
        }
        self.0.changed.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.state.lock().open
    }

    /// Waits until `count` callers in all have come to the shut gate.
    #[track_caller]
    pub(crate) fn entered(&self, count: usize) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.0.state.lock();
        while state.entered < count {
            let waited = self.0.changed.wait_until(&mut state, until);
            assert!(!waited.timed_out(), "{} of {count} came to the gate", state.entered);
        }
    }

    /// Counts a caller, if the gate is shut; whether it is.
    pub(crate) fn enter(&self) -> bool {
        let mut state = self.0.state.lock();
        state.entered += usize::from(!state.open);
        self.0.changed.notify_all();
        !state.open
    }

    /// Waits, as a caller, until the gate is open.
    pub(crate) fn pass(&self) {
        if self.enter() {
            let mut state = self.0.state.lock();
            self.0.changed.wait_while(&mut state, |state| !state.open);
        }
    }

    /// Waits for the gate until `deadline`, uncounted.
    pub(crate) fn wait_until(&self, deadline: Instant) {
        self.0.wait_until(deadline);
    }

    /// Runs `body`, which ends soon once the gate is open, on a thread of its own.
    pub(crate) fn spawn(&self, body: impl FnOnce(&Way) + Send + 'static) {
        let way = Arc::clone(&self.0);
        self.0.threads.lock().push(thread::spawn(move || body(&way)));
    }

    /// Calls `then` when the gate is opened.
    pub(crate) fn when_opened(&self, then: impl Fn() + Send + Sync + 'static) {
        assert!(self.0.when_opened.set(Box::new(then)).is_ok(), "it is said once");
    }
}

impl Way {
    /// Waits until the gate is open, or until `deadline`; whether it is open.
    pub(crate) fn wait_until(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while_until(&mut state, |state| !state.open, deadline);
        state.open
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
        let threads = std::mem::take(&mut *self.0.threads.lock());
        // A thread of the gate's may be what ends the engine, and so this gate.
        let others =
            threads.into_iter().filter(|other| other.thread().id() != thread::current().id());
        for thread in others {
            assert!(thread.join().is_ok() || thread::panicking(), "a thread of a fault panicked");
        }
    }
}

/// How long a test waits for callers that should come at once.
const PATIENCE: Duration = Duration::from_secs(60);
