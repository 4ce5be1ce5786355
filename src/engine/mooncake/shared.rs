//! What a connection, its engine, its transfers and its threads share.
#![allow(unsafe_code)] // registers memory of its own

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use crossbeam::queue::ArrayQueue;
use mooncake_sys::SegmentId;
use parking_lot::Mutex;

use super::{
    aside,
    config::MooncakeConfig,
    flight::{Batch, Flight, Landed, Opcode, Task, reap},
    native::Native,
    peers::{Peer, Peers, TOO_MANY},
    spans::Spans,
};
use crate::{
    engine::{Lender, LocalBuffer},
    error::{Error, Result},
    memory::{Host, Memory, PAGE, Purpose, Span},
    process,
    wait::Grace,
};

pub(super) struct Shared {
    // Destroyed first: until then it may touch what is registered.
    pub(super) native: Native,
    pub(super) session_id: String,
    pub(super) protocol: String,
    pub(super) p2p: bool,
    pub(super) spans: Spans,
    pub(super) peers: Peers,
    pub(super) parked: Mutex<Parked>,
    pub(super) counters: Counters,
    /// Processors that this process may use.
    pub(super) cores: usize,
    /// How long whoever waits for a transfer spins.
    pub(super) grace: Grace,
    scratch: Arc<Scratch>,
    calls: Mutex<Calls>,
    born: Instant,
    /// How often it was stopped: who began before that waits no longer.
    stops: AtomicU64,
    stopped: AtomicBool,
}

/// Batches that nobody waits for.
#[derive(Debug, Default)]
pub(super) struct Parked {
    pub(super) batches: Vec<Batch>,
    /// A thread looks after them.
    pub(super) reaping: bool,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) batches: AtomicU64,
    pub(super) freed: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) notes_refused: AtomicU64,
}

/// Reads that somebody waits for, so that they can be interrupted.
#[derive(Debug, Default)]
struct Calls {
    next: u64,
    spans: Vec<Call>,
}

#[derive(Debug)]
struct Call {
    id: u64,
    span: Span,
    cut: bool,
}

impl Shared {
    pub(super) fn open(config: &MooncakeConfig) -> Result<Arc<Self>> {
        process::enter()?;
        let checked = config.check()?;
        let scratch = Arc::new(Scratch::new()?);
        let native = Native::open(config, &checked)?;
        let session_id = match checked.scheme {
            None => bracketed(&native.address()?),
            Some(_) => checked.name.to_string_lossy().into_owned(),
        };
        let shared = Self {
            native,
            session_id,
            protocol: config.protocol.clone(),
            p2p: checked.scheme.is_none(),
            spans: Spans::default(),
            peers: Peers::default(),
            parked: Mutex::default(),
            counters: Counters::default(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            grace: Grace::new(true),
            scratch,
            calls: Mutex::default(),
            born: Instant::now(),
            stops: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        };
        let span = shared.scratch.memory.span();
        // SAFETY: the scratch lives as long as `shared`, which destroys the engine first.
        unsafe { shared.spans.register(&shared.native, span, false) }?;
        Ok(Arc::new(shared))
    }

    /// Transfers, all with one peer, as one batch; the outcomes in the order asked.
    pub(super) fn transfer(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        segment: SegmentId,
        opcode: Opcode,
        tasks: Vec<Task>,
        until: &Until<'_>,
    ) -> Vec<Landed> {
        let count = tasks.len();
        let shared = Arc::clone(self);
        let begin = move || Flight::begin(shared, segment, opcode, tasks);
        let begun = if peer.is_trusted(self) {
            Ok(begin())
        } else {
            // It may have to connect, and then to wait for as long as the system does.
            aside::run(until.deadline(), || until.check().is_err(), begin)
        };
        let landed = match begun {
            Ok(Ok(flight)) => flight.land(&peer.name, until),
            Ok(Err((error, tasks))) => tasks
                .into_iter()
                .map(|task| Landed { outcome: Err(Until::again(&error)), buffer: task.buffer })
                .collect(),
            // The thread aside has the buffers, and lets them go once it is through.
            Err(error) => {
                let error = match error {
                    Error::Exhausted => Error::peer_failed(&peer.name, TOO_MANY),
                    error => until.check().err().unwrap_or(error),
                };
                let landed = || Landed { outcome: Err(Until::again(&error)), buffer: None };
                (0..count).map(|_| landed()).collect()
            }
        };
        if landed.iter().any(|one| one.outcome.is_ok()) {
            peer.answers(self);
        } else if landed.iter().any(|one| is_the_peers(one.outcome.as_ref().err())) {
            peer.failed();
        }
        landed
    }

    /// Keeps a batch until it is quiet.
    pub(super) fn park(batch: Batch) {
        let shared = Arc::clone(batch.shared());
        shared.parked.lock().batches.push(batch);
        shared.see_to_the_parked();
    }

    /// Has a thread look after what is parked. Where the system has none, it is tried again by the
    /// next call.
    pub(super) fn see_to_the_parked(self: &Arc<Self>) {
        if !process::is_here() {
            return;
        }
        let mut parked = self.parked.lock();
        if parked.batches.is_empty() || parked.reaping {
            return;
        }
        let shared = Arc::clone(self);
        let reaper = thread::Builder::new().name("mooncake-reaper".to_owned());
        parked.reaping = reaper.spawn(move || reap(&shared)).is_ok();
    }

    /// Eight bytes, registered, to read a stamp into. `None`: all are in use.
    pub(super) fn scratch(&self) -> Option<LocalBuffer> {
        Scratch::lend(&self.scratch)
    }

    /// What was registered from outside.
    pub(super) fn own_spans(&self) -> Vec<Span> {
        let scratch = self.scratch.memory.span();
        self.spans.all().into_iter().filter(|span| *span != scratch).collect()
    }

    /// Nanoseconds of its life; never 0.
    pub(super) fn nanos(&self) -> u64 {
        self.born.elapsed().as_nanos() as u64 + 1
    }

    pub(super) fn start(&self) {
        self.stopped.store(false, Ordering::SeqCst);
    }

    /// Ends what waits, and refuses what comes.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.stops.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends the wait for what fills these bytes.
    pub(super) fn interrupt(&self, span: Span) {
        if !process::is_here() {
            return;
        }
        for call in &mut self.calls.lock().spans {
            call.cut |= call.span.overlaps(span);
        }
    }

    /// A call that ends by `deadline`, and whose reads into `spans` may be interrupted.
    pub(super) fn until(
        &self,
        deadline: Instant,
        spans: impl IntoIterator<Item = Span>,
    ) -> Result<Until<'_>> {
        process::check()?;
        let stops = self.stops.load(Ordering::SeqCst);
        if self.stopped.load(Ordering::SeqCst) {
            return Err(Error::Closed);
        }
        if deadline <= Instant::now() {
            return Err(Error::TimedOut);
        }
        let mut calls = self.calls.lock();
        calls.next += 1;
        let id = calls.next;
        calls.spans.extend(spans.into_iter().map(|span| Call { id, span, cut: false }));
        Ok(Until { shared: self, deadline, stops, id })
    }
}

/// How long one call may wait.
pub(super) struct Until<'a> {
    shared: &'a Shared,
    deadline: Instant,
    stops: u64,
    id: u64,
}

impl Until<'_> {
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Fails once there is nothing more to wait for.
    pub(super) fn check(&self) -> Result<()> {
        if self.shared.stops.load(Ordering::SeqCst) != self.stops {
            return Err(Error::Closed);
        }
        if self.deadline <= Instant::now() {
            return Err(Error::TimedOut);
        }
        let calls = self.shared.calls.lock();
        let mut own = calls.spans.iter().filter(|call| call.id == self.id).peekable();
        if own.peek().is_some() && own.all(|call| call.cut) {
            return Err(Error::Aborted);
        }
        Ok(())
    }

    /// The same error once more, for each of many.
    pub(super) fn again(error: &Error) -> Error {
        match error {
            Error::Closed => Error::Closed,
            Error::TimedOut => Error::TimedOut,
            Error::Aborted => Error::Aborted,
            Error::PeerFailed { peer, reason } => Error::peer_failed(peer, reason),
            Error::Config { field, reason } => Error::config(field, reason.clone()),
            other => super::native::broken(&other.to_string()),
        }
    }
}

impl Drop for Until<'_> {
    fn drop(&mut self) {
        self.shared.calls.lock().spans.retain(|call| call.id != self.id);
    }
}

/// Whether it says that the peer does not answer.
pub(super) fn is_the_peers(error: Option<&Error>) -> bool {
    matches!(error, Some(Error::PeerFailed { .. } | Error::TimedOut))
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("session_id", &self.session_id)
            .field("native", &self.native)
            .finish_non_exhaustive()
    }
}

/// Words to read stamps into.
struct Scratch {
    memory: Host,
    free: ArrayQueue<u32>,
}

const WORDS: u32 = (PAGE / 8) as u32;

impl Scratch {
    fn new() -> Result<Self> {
        let free = ArrayQueue::new(WORDS as usize);
        for word in 0..WORDS {
            let _ = free.push(word); // there is room for all
        }
        Ok(Self { memory: Host::allocate(&(), PAGE, Purpose::Receive, false)?, free })
    }

    fn lend(this: &Arc<Self>) -> Option<LocalBuffer> {
        let word = this.free.pop()?;
        let all = this.memory.span();
        // SAFETY: there are as many words in the page.
        let ptr = unsafe { all.ptr.add(word as usize * 8) };
        let lender: Arc<dyn Lender> = Arc::clone(this) as Arc<dyn Lender>;
        // SAFETY: mapped and initialised while `this` lives, and nobody else's until its number is
        // in `free` again.
        Some(unsafe { LocalBuffer::new(lender, word, Span { ptr, len: 8 }) })
    }
}

impl Lender for Scratch {
    fn give_back(&self, word: u32) {
        let _ = self.free.push(word); // it came from there
    }

    fn is_host(&self) -> bool {
        true
    }
}

/// `host:port`, with the brackets that the engine leaves out.
fn bracketed(address: &str) -> String {
    match address.rsplit_once(':') {
        Some((host, port)) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{port}")
        }
        _ => address.to_owned(),
    }
}
