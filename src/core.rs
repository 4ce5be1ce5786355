//! What the threads of a relay share.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;

use crate::{
    counters::Counting,
    doorbell::Doorbell,
    engine::{Access, Engine},
    error::{Error, Result},
    gets::Gets,
    ids::Ids,
    memory::{Host, Memory, PAIR, Span},
    peers::Peers,
    pool::{Pool, Slot, Stamps},
    process,
    puts::Puts,
    sender::Entry,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    token::Tokens,
    wait::{Grace, Idle, WaitStrategy, nanos},
};

/// A relay without its threads.
pub(crate) struct Core<M: Memory> {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) engine_id: Arc<str>,
    pub(crate) session_id: Arc<str>,
    pub(crate) ids: Ids,
    pub(crate) slots: Arc<Pool<M>>,
    pub(crate) stamps: Stamps,
    pub(crate) receive: Arc<Pool<M>>,
    /// Where stamps are read to: a few bytes for each receive slot.
    pub(crate) scratch: Arc<Pool<Host>>,
    pub(crate) puts: Puts<Entry<M>>,
    pub(crate) gets: Gets<M>,
    pub(crate) peers: Peers,
    pub(crate) tokens: Arc<Tokens<Slot<M>>>,
    pub(crate) counters: Counting,
    /// How many looks at the engine have ended; counted by whoever holds `driving`. Each look writes it,
    /// so it shares no line with what other threads read.
    pub(crate) looks: CachePadded<AtomicU64>,
    /// How many looks at the engine have failed in a row, and why the last did.
    pub(crate) failing_polls: AtomicU32,
    pub(crate) poll_failure: Mutex<Option<String>>,
    /// The engine has panicked when it was asked about a slot: it is not asked again.
    pub(crate) knows_no_slots: AtomicBool,
    pub(crate) times: Times,
    /// Held by the one thread that polls the engine.
    pub(crate) driving: CachePadded<Mutex<()>>,
    /// How many callers drive, or would: the notifier stands back for them.
    pub(crate) drivers: CachePadded<AtomicU32>,
    /// Rung by ourselves only; the engine's own is used where it has one.
    pub(crate) own_bell: Doorbell,
    pub(crate) wait: WaitStrategy,
    /// How many processors this process may use.
    pub(crate) cores: usize,
    /// How long a caller spins who waits for what others do.
    grace: Grace,
    /// How long one who polls the engine does.
    driver_grace: Grace,
    /// Counts who waits for the driver of an engine without a doorbell.
    pub(crate) joined: AtomicU32,
    state: AtomicU8,
    clock: Instant,
    /// When the next lease or deadline ends, on `clock`.
    pub(crate) next_timer: CachePadded<AtomicU64>,
    /// Until when the notifier sleeps, on `clock`.
    pub(crate) notifier_sleeps: CachePadded<AtomicU64>,
}

/// The limits of the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) quarantine: Duration,
    pub(crate) read_timeout: Duration,
}

/// What a relay is made of; the rest follows from it.
pub(crate) struct Parts<M: Memory> {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) engine_id: Arc<str>,
    pub(crate) ids: Ids,
    pub(crate) slots: Arc<Pool<M>>,
    pub(crate) stamps: Stamps,
    pub(crate) receive: Arc<Pool<M>>,
    pub(crate) scratch: Arc<Pool<Host>>,
    pub(crate) times: Times,
    pub(crate) wait: WaitStrategy,
    pub(crate) cores: usize,
    pub(crate) credits: u32,
    pub(crate) queued_gets: usize,
    pub(crate) transfer_threads: usize,
}

/// Whether a relay works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Open = 0,
    /// A thread of the relay panicked.
    Failed = 1,
    Closed = 2,
}

impl<M: Memory> Core<M> {
    pub(crate) fn new(parts: Parts<M>) -> Arc<Self> {
        let blind = parts.engine.doorbell().is_none();
        let core = Arc::new(Self {
            session_id: parts.engine.session_id().into(),
            engine: parts.engine,
            engine_id: parts.engine_id,
            ids: parts.ids,
            slots: parts.slots,
            stamps: parts.stamps,
            gets: Gets::new(Arc::clone(&parts.receive), parts.queued_gets, parts.transfer_threads),
            receive: parts.receive,
            scratch: parts.scratch,
            puts: Puts::new(parts.credits),
            peers: Peers::default(),
            tokens: Tokens::new(),
            counters: Counting::default(),
            looks: CachePadded::default(),
            failing_polls: AtomicU32::new(0),
            knows_no_slots: AtomicBool::new(false),
            poll_failure: Mutex::default(),
            times: parts.times,
            driving: CachePadded::default(),
            drivers: CachePadded::default(),
            own_bell: Doorbell::new(),
            wait: parts.wait,
            cores: parts.cores,
            grace: Grace::new(false),
            driver_grace: Grace::new(blind),
            joined: AtomicU32::new(0),
            state: AtomicU8::new(State::Open as u8),
            clock: Instant::now(),
            next_timer: CachePadded::new(AtomicU64::new(u64::MAX)),
            notifier_sleeps: CachePadded::default(),
        });
        let driver = Arc::downgrade(&core);
        core.tokens.drive_by(driver);
        let weak = Arc::downgrade(&core);
        core.slots.credits().on_return(move || {
            if let Some(core) = weak.upgrade() {
                core.bell().ring();
            }
        });
        let weak = Arc::downgrade(&core);
        core.receive.credits().on_return(move || {
            if let Some(core) = weak.upgrade() {
                core.gets.slot_returned();
            }
        });
        core
    }

    /// All the memory of this relay, and what peers may do with it.
    pub(crate) fn spans(&self) -> [(Span, Access); 4] {
        [
            (self.slots.memory().span(), Access::Published),
            (self.stamps.memory().span(), Access::Published),
            (self.receive.memory().span(), Access::Local),
            (self.scratch.memory().span(), Access::Local),
        ]
    }

    /// Of those, the ones in host memory.
    pub(crate) fn host_spans(&self) -> Vec<Span> {
        let [slots, stamps, receive, scratch] = self.spans().map(|(span, _)| span);
        if M::HOST { vec![slots, stamps, receive, scratch] } else { vec![stamps, scratch] }
    }

    pub(crate) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Open,
            1 => State::Failed,
            _ => State::Closed,
        }
    }

    /// Moves on to `state`, never back. True: it was this call that did.
    pub(crate) fn advance(&self, state: State) -> bool {
        let moved = self.state.fetch_max(state as u8, Ordering::AcqRel) < state as u8;
        // Partner: the fences in `wake_notifier_by` and `quarantine`. Whoever opens or quarantines a
        // put looks at the state afterwards: either we see the put, or it sees the state.
        fence(Ordering::SeqCst);
        moved
    }

    /// Fails unless the relay is open, and of this process.
    pub(crate) fn check_open(&self) -> Result<()> {
        process::check()?;
        match self.state() {
            State::Open => Ok(()),
            State::Closed => Err(Error::Closed),
            State::Failed => Err(self.failed()),
        }
    }

    /// What a call ends with after a thread of the relay panicked.
    pub(crate) fn failed(&self) -> Error {
        Error::Engine {
            engine: "relay",
            reason: "a thread of this relay, or its engine, panicked: close it and make another"
                .to_owned(),
        }
    }

    /// The bell whose ringing wakes whoever polls the engine.
    pub(crate) fn bell(&self) -> &Doorbell {
        self.engine.doorbell().unwrap_or(&self.own_bell)
    }

    /// For a caller who waits for others.
    pub(crate) fn idle(&self) -> Idle<'_> {
        Idle::new(self.wait, self.cores, &self.grace)
    }

    /// For a caller who polls the engine.
    pub(crate) fn idle_driving(&self) -> Idle<'_> {
        Idle::new(self.wait, self.cores, &self.driver_grace)
    }

    /// `at` on the relay's clock.
    pub(crate) fn ticks(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.clock))
    }

    /// The other way round.
    pub(crate) fn instant(&self, ticks: u64) -> Instant {
        self.clock + Duration::from_nanos(ticks.min(FAR))
    }

    /// Makes sure that the notifier looks at the timers by `at`; the caller has entered what ends
    /// then.
    pub(crate) fn wake_notifier_by(&self, at: u64) {
        // Partner: the fence in `keep_time`. Either the notifier sees what was entered, or we see
        // that it has no next timer.
        fence(Ordering::SeqCst);
        if at < self.next_timer.load(Ordering::SeqCst) {
            self.next_timer.fetch_min(at, Ordering::SeqCst);
        }
        // Partner: `notifier::sleep`, which stores the one before it loads the other.
        if at < self.notifier_sleeps.load(Ordering::SeqCst) {
            self.bell().wake_all();
        }
    }
}

// What one thread writes while others read is on lines of its own.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const _: () = {
    use std::mem::offset_of;

    type Any = Core<Host>;
    let places = [
        offset_of!(Any, looks),
        offset_of!(Any, driving),
        offset_of!(Any, drivers),
        offset_of!(Any, next_timer),
        offset_of!(Any, notifier_sleeps),
        offset_of!(Any, state),
    ];
    let mut n = 0;
    while n < places.len() {
        let mut other = n + 1;
        while other < places.len() {
            assert!(places[n] / PAIR != places[other] / PAIR);
            other += 1;
        }
        n += 1;
    }
    assert!(size_of::<crate::counters::Counter>().is_multiple_of(PAIR));
};

/// About a hundred years, in nanoseconds: further than any deadline of ours.
const FAR: u64 = 100 * 365 * 24 * 3600 * 1_000_000_000;
