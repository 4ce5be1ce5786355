//! What an engine has for its relay's device memory: chunks, and the thread that copies to them and
//! waits for whatever a caller could not wait for.
#![allow(unsafe_code)] // begins copies of memory that it was given with its owner

use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam::channel::{self, Receiver, Sender};
use mio::Waker;
use parking_lot::{Condvar, Mutex};

use super::{Chunk, Chunks, Staging, chunks::Moving};
use crate::{
    affinity,
    engine::exports::Pin,
    error::{Error, Result},
    memory::{CopyingWithin, Device, Span},
};

/// How often a copy is looked at before whoever waits for it sleeps between looks.
const LOOKS: u32 = 100;
const NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// How long a stop waits for copies that are under way.
const STOP: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(in crate::engine::embedded) struct Stager {
    device: Arc<dyn Device>,
    /// The relay's device memory, and how many slots each has.
    spans: Mutex<Vec<(Span, u32)>>,
    /// For what peers read.
    pub(in crate::engine::embedded) outgoing: Arc<Chunks>,
    /// For what we read.
    pub(super) incoming: Arc<Chunks>,
    pub(super) berths: Arc<Berths>,
    pub(super) reads: AtomicU64,
    work: Sender<Work>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Receiver<Infallible>,
}

#[derive(Debug)]
enum Work {
    Copy(Job),
    Keep(Kept),
}

/// A copy for the server's thread.
#[derive(Debug)]
struct Job {
    chunk: Chunk,
    from: Span,
    /// So that the slot is not quiet before the copy is over.
    pin: Arc<Pin>,
    copied: Arc<Copied>,
    tell: (Arc<Arrivals>, usize),
}

/// Copies that outlast the call that began them, and what they touch.
#[derive(Debug)]
pub(super) struct Kept {
    flights: VecDeque<Flight>,
    /// Dropped when they are over.
    _things: Box<dyn fmt::Debug + Send + Sync>,
}

impl Kept {
    pub(super) fn new(
        flights: VecDeque<Flight>,
        things: impl fmt::Debug + Send + Sync + 'static,
    ) -> Self {
        Self { flights, _things: Box::new(things) }
    }
}

/// A copy under way.
#[derive(Debug)]
pub(super) enum Flight {
    Chunk(Moving),
    Within(CopyingWithin),
}

impl Flight {
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Chunk(moving) => moving.is_done(),
            Self::Within(copying) => copying.is_done(),
        }
    }

    pub(super) fn end(self) -> Result<()> {
        match self {
            Self::Chunk(moving) => moving.end().1,
            Self::Within(copying) => copying.wait(),
        }
    }
}

impl Stager {
    pub(in crate::engine::embedded) fn start(
        device: Arc<dyn Device>,
        staging: Staging,
    ) -> Result<Arc<Self>> {
        let Staging { chunk, chunks } = staging;
        let outgoing = Chunks::make(&*device, chunk, chunks)?;
        let incoming = Chunks::make(&*device, chunk, chunks)?;
        let (work, jobs) = channel::unbounded();
        let (running, ended) = channel::bounded(0);
        let thread = thread::Builder::new().name("relay-stager".to_owned()).spawn(move || {
            let _running: Sender<Infallible> = running;
            affinity::roam();
            run(&jobs);
        })?;
        Ok(Arc::new(Self {
            device,
            spans: Mutex::default(),
            outgoing,
            incoming,
            berths: Arc::default(),
            reads: AtomicU64::new(0),
            work,
            thread: Mutex::new(Some(thread)),
            ended,
        }))
    }

    pub(in crate::engine::embedded) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(in crate::engine::embedded) fn add(&self, span: Span, slots: u32) {
        self.spans.lock().push((span, slots));
    }

    pub(in crate::engine::embedded) fn slots(&self, span: Span) -> Option<u32> {
        self.spans.lock().iter().find(|(known, _)| *known == span).map(|(_, slots)| *slots)
    }

    pub(in crate::engine::embedded) fn forget(&self, span: Span) {
        self.spans.lock().retain(|(known, _)| *known != span);
    }

    /// Whether those bytes are the device's.
    pub(in crate::engine::embedded) fn covers(&self, part: Span) -> bool {
        self.spans.lock().iter().any(|(span, _)| span.contains(part.addr(), part.len))
    }

    /// How many reads went through chunks.
    pub(in crate::engine::embedded) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Has `from`, which `pin` holds and a chunk can, copied to `chunk`; then tells `arrivals`.
    pub(in crate::engine::embedded) fn copy(
        &self,
        chunk: Chunk,
        from: Span,
        pin: &Arc<Pin>,
        arrivals: &Arc<Arrivals>,
        token: usize,
    ) -> Arc<Copied> {
        let copied = Arc::new(Copied(Mutex::new(State::Copying)));
        let tell = (Arc::clone(arrivals), token);
        let (pin, job) = (Arc::clone(pin), Arc::clone(&copied));
        let job = Job { chunk, from, pin, copied: job, tell };
        if self.work.send(Work::Copy(job)).is_err() {
            copied.fail(&lost());
        }
        copied
    }

    /// Keeps what is under way until it is over.
    pub(super) fn keep(&self, kept: Kept) {
        // Without the thread they are waited for here, where they are dropped.
        let _ = self.work.send(Work::Keep(kept));
    }

    /// Drops `thing`, which may have to wait for the device, on a thread that may wait.
    pub(in crate::engine::embedded) fn drop_aside(
        &self,
        thing: impl fmt::Debug + Send + Sync + 'static,
    ) {
        self.keep(Kept::new(VecDeque::new(), thing));
    }

    /// Whether nothing of ours fills a part of `span` any more. False: `deadline` passed first.
    pub(in crate::engine::embedded) fn let_go_of(&self, span: Span, deadline: Instant) -> bool {
        self.berths.wait_until_free(span, deadline)
    }

    /// Ends the thread once all copies are over, which is waited for until `deadline`.
    pub(in crate::engine::embedded) fn stop(self: Arc<Self>, deadline: Instant) {
        let thread = self.thread.lock().take();
        let (ended, until) = (self.ended.clone(), deadline.min(Instant::now() + STOP));
        drop(self);
        // It waits for what others still hold, and ends by itself when they let go.
        if let Err(channel::RecvTimeoutError::Disconnected) = ended.recv_deadline(until)
            && let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the thread that copies from the device had panicked");
        }
    }
}

fn lost() -> Error {
    super::super::broken("the thread that copies from the device has ended: open another relay")
}

/// Until nobody can send more, and all is over.
fn run(work: &Receiver<Work>) {
    let mut copies: VecDeque<(Moving, Ticket)> = VecDeque::new();
    let mut kept: Vec<Kept> = Vec::new();
    let mut pause = Pause::default();
    loop {
        let next = if copies.is_empty() && kept.is_empty() {
            match work.recv() {
                Ok(next) => Some(next),
                Err(_) => return,
            }
        } else {
            work.try_recv().ok()
        };
        match next {
            Some(Work::Copy(Job { chunk, from, pin, copied, tell })) => {
                // SAFETY: the pin holds the slot, so that it is mapped and nobody writes it, and goes
                // when the copy was waited for.
                let moving = unsafe { chunk.fill_from(from) };
                copies.push_back((moving, Ticket { pin, copied, tell }));
                pause = Pause::default();
                continue;
            }
            Some(Work::Keep(one)) => {
                kept.push(one);
                continue;
            }
            None => {}
        }
        let mut any = false;
        while copies.front().is_some_and(|(moving, _)| moving.is_done()) {
            let Some((moving, ticket)) = copies.pop_front() else { break };
            ticket.end(moving);
            any = true;
        }
        for over in kept.extract_if(.., |one| one.flights.iter().all(Flight::is_done)) {
            drop(over);
            any = true;
        }
        if any {
            pause = Pause::default();
        } else {
            pause.wait();
        }
    }
}

/// What waits for a copy.
struct Ticket {
    pin: Arc<Pin>,
    copied: Arc<Copied>,
    tell: (Arc<Arrivals>, usize),
}

impl Ticket {
    fn end(self, moving: Moving) {
        let Self { pin, copied, tell: (arrivals, token) } = self;
        let (chunk, ended) = moving.end();
        // The slot is quiet before anybody is told.
        drop(pin);
        match ended {
            Ok(()) => *copied.0.lock() = State::Ready(chunk),
            Err(error) => {
                drop(chunk);
                copied.fail(&error);
            }
        }
        // If nobody wants it any more, the chunk goes home here.
        drop(copied);
        arrivals.tell(token);
    }
}

/// What has become of a copy.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Copied(Mutex<State>);

#[derive(Debug)]
enum State {
    Copying,
    Ready(Chunk),
    Failed(String),
    Taken,
}

impl Copied {
    /// The chunk, once it is filled; `None`: not yet.
    pub(in crate::engine::embedded) fn take(&self) -> Option<Result<Chunk, String>> {
        let mut state = self.0.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Ready(chunk) => Some(Ok(chunk)),
            State::Failed(reason) => Some(Err(reason)),
            other => {
                *state = other;
                None
            }
        }
    }

    fn fail(&self, error: &Error) {
        *self.0.lock() = State::Failed(error.to_string());
    }
}

/// Where the server's thread hears of copies.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Arrivals {
    tokens: Mutex<Vec<usize>>,
    waker: Arc<Waker>,
}

impl Arrivals {
    pub(in crate::engine::embedded) fn new(waker: Arc<Waker>) -> Self {
        Self { tokens: Mutex::default(), waker }
    }

    /// Whose copies are over.
    pub(in crate::engine::embedded) fn take(&self) -> Vec<usize> {
        mem::take(&mut *self.tokens.lock())
    }

    fn tell(&self, token: usize) {
        self.tokens.lock().push(token);
        // The kernel refuses only if the counter is full, and then the thread is awake anyway.
        let _ = self.waker.wake();
    }
}

/// How somebody waits for a device.
#[derive(Debug, Default)]
pub(super) struct Pause {
    looks: u32,
}

impl Pause {
    pub(super) fn wait(&mut self) {
        self.looks = self.looks.saturating_add(1);
        match self.looks.checked_sub(LOOKS) {
            None => thread::yield_now(),
            Some(over) => thread::sleep((NAP * (1 + over / 16)).min(LONGEST_NAP)),
        }
    }
}

/// The slots of ours that reads are filling, until no copy to them is under way.
#[derive(Debug, Default)]
pub(super) struct Berths {
    taken: Mutex<Vec<Span>>,
    left: Condvar,
}

impl Berths {
    pub(super) fn take(self: &Arc<Self>, span: Span) -> Berth {
        self.taken.lock().push(span);
        Berth { all: Arc::clone(self), span }
    }

    fn wait_until_free(&self, span: Span, deadline: Instant) -> bool {
        let mut taken = self.taken.lock();
        while taken.iter().any(|one| one.overlaps(span)) {
            if self.left.wait_until(&mut taken, deadline).timed_out() {
                return !taken.iter().any(|one| one.overlaps(span));
            }
        }
        true
    }
}

/// One of them, while it lives.
#[derive(Debug)]
pub(super) struct Berth {
    all: Arc<Berths>,
    span: Span,
}

impl Drop for Berth {
    fn drop(&mut self) {
        let mut taken = self.all.taken.lock();
        if let Some(index) = taken.iter().position(|one| *one == self.span) {
            taken.swap_remove(index);
        }
        self.all.left.notify_all();
    }
}
