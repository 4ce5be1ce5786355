//! How a relay ends.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex};

use crate::{
    core::{Core, State},
    engine::{Access, Engine},
    error::{Error, Result},
    health::Closed,
    memory::{Memory, Span},
    process,
};

/// How long channels without room may take what they are owed; who closes may be the one to read
/// them, so it is not long.
const LAST_OFFERS: Duration = Duration::from_millis(250);
const OFFER_PAUSE: Duration = Duration::from_millis(1);

/// What must be undone, and whether it was.
#[derive(Default)]
pub(crate) struct Shutdown {
    threads: Arc<Threads>,
    spans: Mutex<Vec<Span>>,
    done: Mutex<Option<Closed>>,
}

/// The threads of one relay.
#[derive(Default)]
pub(crate) struct Threads {
    handles: Mutex<Vec<JoinHandle<()>>>,
    state: Mutex<Count>,
    ended: Condvar,
}

#[derive(Default)]
struct Count {
    running: usize,
    /// What the next one to end does before it goes.
    last: Option<Job>,
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs, while it lives.
pub(crate) struct Running(Arc<Threads>);

impl Shutdown {
    pub(crate) fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// Registers memory of the core's, which outlives the registration.
    #[allow(unsafe_code)] // hands the pools' memory to the engine
    pub(crate) fn register(&self, engine: &dyn Engine, span: Span, access: Access) -> Result<()> {
        // SAFETY: the span is a pool's of the core; `close` has it unregistered by a thread that keeps
        // the core until then, and keeps the core for ever if that fails.
        unsafe { engine.register(span, access) }?;
        self.spans.lock().push(span);
        Ok(())
    }

    /// Ends everything, once; whoever calls again gets the same answer.
    pub(crate) fn close<M: Memory>(&self, core: &Arc<Core<M>>, until: Instant) -> Closed {
        let Some(mut done) = self.done.try_lock_until(until) else {
            return Closed::default();
        };
        if let Some(closed) = *done {
            return closed;
        }
        let spans = mem::take(&mut *self.spans.lock());
        // While the relay's threads are there: one of them may have to do it.
        let farewell = Farewell::prepare(core, &self.threads, spans, until);
        core.advance(State::Closed);
        core.gets.close();
        let quarantined = core.puts.quarantined();
        let gets = core.end_gets(|_, _| true, || Error::Closed);
        let puts = core.end_puts(|_| true, || Error::Closed);
        core.end_quarantined();
        core.slots.credits().wake_waiting();
        core.bell().wake_all();
        let spans_kept = farewell.say(until);
        let threads = self.threads.join(until);
        // After the threads: one may have been about to put a slot there.
        core.empty_quarantine();
        let patience = until.min(Instant::now() + LAST_OFFERS);
        core.tokens.backlog.flush();
        // Nobody offers them after this.
        while !core.tokens.backlog.is_empty() && Instant::now() < patience {
            thread::sleep(OFFER_PAUSE);
            core.tokens.backlog.flush();
        }
        let closed = Closed { puts, gets, quarantined, threads, spans_kept };
        *done = Some(closed);
        closed
    }
}

/// How the engine ends what still reads, here and at the peers, and lets go of the memory.
///
/// An engine may wait for readers, so this happens on a thread of its own. If its time passes it goes
/// on by itself: it keeps the core, hence the pages, until the engine has let go.
struct Farewell {
    all: usize,
    /// Whoever does it waits for this.
    go: Sender<()>,
    /// A message for each span that is free.
    freed: Receiver<()>,
    closer: Option<JoinHandle<()>>,
    /// Nobody else does it.
    here: Option<Job>,
}

impl Farewell {
    fn prepare<M: Memory>(
        core: &Arc<Core<M>>,
        threads: &Threads,
        spans: Vec<Span>,
        until: Instant,
    ) -> Self {
        let all = spans.len();
        let (go, may_go) = unbounded();
        let job = || {
            let (tx, freed) = unbounded();
            let (core, spans, may_go) = (Arc::clone(core), spans.clone(), may_go.clone());
            let body = move || {
                if may_go.recv().is_ok() {
                    rid_of(core, &spans, until, tx);
                }
            };
            (body, freed)
        };
        let (body, freed) = job();
        let named = thread::Builder::new().name("relay-closer".to_owned());
        // It panics where a thread's own locals are gone already.
        if let Ok(Ok(closer)) = catch_unwind(AssertUnwindSafe(|| named.spawn(body))) {
            return Self { all, go, freed, closer: Some(closer), here: None };
        }
        // The system has no thread to give: the first of ours that ends does it. Where there is none,
        // the engine is asked by whoever closes, for as long as it takes.
        let (body, freed) = job();
        let here = threads.give_last(Box::new(body)).err();
        Self { all, go, freed, closer: None, here }
    }

    /// Has it happen; how many spans the engine has not let go of by `until`.
    fn say(self, until: Instant) -> usize {
        let Self { all, go, freed, closer, here } = self;
        let waiting = go.send(());
        debug_assert!(waiting.is_ok(), "whoever does it waits");
        if let Some(job) = here {
            job();
        }
        let (count, ended) = count_until(&freed, until);
        if ended {
            // A panic was caught and told before.
            let _ = closer.map(JoinHandle::join);
        } else {
            tracing::error!(
                spans = all - count,
                "the engine has not let go of a closed relay's memory in time; it stays mapped until then"
            );
        }
        all - count
    }
}

/// Has the engine let go of `spans` and stop; sends a message for each span that is free.
fn rid_of<M: Memory>(core: Arc<Core<M>>, spans: &[Span], until: Instant, freed: Sender<()>) {
    let engine = &core.engine;
    let mut kept = false;
    for span in spans.iter().rev() {
        let unregistered = catch_unwind(AssertUnwindSafe(|| engine.unregister(*span)));
        let reason = match unregistered {
            Ok(Ok(())) => {
                let _ = freed.send(());
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "its unregister panicked".to_owned(),
        };
        kept = true;
        tracing::error!(reason, "the engine keeps memory of a closed relay");
    }
    // Before the join: a thread may have been about to begin a read, or wait for a peer's answer.
    if catch_unwind(AssertUnwindSafe(|| engine.stop(until))).is_err() {
        tracing::error!("the engine panicked while it was stopped");
    }
    if kept {
        // The engine may still touch the pages, so they are never unmapped.
        mem::forget(core);
    } else {
        drop(core);
    }
    // Whoever waits finds the memory gone, if nobody else holds it.
    drop(freed);
}

/// How many messages come by `until`, and whether the sender has ended by then.
fn count_until(messages: &Receiver<()>, until: Instant) -> (usize, bool) {
    let mut count = 0;
    loop {
        match messages.recv_deadline(until) {
            Ok(()) => count += 1,
            Err(error) => return (count, error.is_disconnected()),
        }
    }
}

impl Threads {
    /// Counts a thread that is about to run.
    pub(crate) fn enter(self: &Arc<Self>) -> Running {
        self.state.lock().running += 1;
        Running(Arc::clone(self))
    }

    /// Takes its handle, to be joined.
    pub(crate) fn add(&self, handle: JoinHandle<()>) {
        self.handles.lock().push(handle);
    }

    /// Has the next thread to end do that first. It comes back if there is none to wait for.
    fn give_last(&self, job: Job) -> Result<(), Job> {
        let inside = self.inside();
        let mut state = self.state.lock();
        if state.running <= inside {
            return Err(job);
        }
        state.last = Some(job);
        Ok(())
    }

    /// How many of them call this: a relay that is closed by a thread of its own cannot wait for it.
    fn inside(&self) -> usize {
        let own = thread::current().id();
        usize::from(self.handles.lock().iter().any(|handle| handle.thread().id() == own))
    }

    /// Waits until all have ended, or until `until`; how many have not.
    fn join(&self, until: Instant) -> usize {
        let inside = self.inside();
        let handles = mem::take(&mut *self.handles.lock());
        let mut state = self.state.lock();
        while state.running > inside {
            if self.ended.wait_until(&mut state, until).timed_out() {
                return state.running - inside;
            }
        }
        drop(state);
        let own = thread::current().id();
        for handle in handles.into_iter().filter(|handle| handle.thread().id() != own) {
            // A panic was caught and told before.
            let _ = handle.join();
        }
        0
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if !process::is_here() {
            // A forked child has the handles and none of the threads.
            mem::forget(mem::take(self.handles.get_mut()));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Self(threads) = self;
        let mut state = threads.state.lock();
        while let Some(job) = state.last.take() {
            drop(state);
            // Else nobody would hear that this thread has ended.
            let _ = catch_unwind(AssertUnwindSafe(job));
            state = threads.state.lock();
        }
        state.running -= 1;
        threads.ended.notify_all();
    }
}
