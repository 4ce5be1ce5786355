//! A one-shot hand-off: a [`Completer`] writes the outcome once, its [`Token`] reads it once.
//!
//! Both ends live in this file because they are one state machine:
//!
//! ```text
//!              complete                     state      outcome     listener
//!   EMPTY ───────────────────► DONE         EMPTY      completer   token
//!     │ ▲                       ▲           LISTENING  completer   completer
//!     │ │ wait_timeout          │           DONE       token (*)   completer if it found
//!     ▼ │                       │                                  LISTENING, else token
//!   LISTENING ──────────────────┘
//!              complete, then wake          (*) the completer, if a channel listens
//! ```
//!
//! The right-hand columns say who may touch each cell; every `SAFETY` comment below cites a row.
//! The cells live in [`Tokens`], which makes them once and uses them again when both ends have
//! left: making a token allocates nothing after warm-up.

use std::{
    fmt,
    mem::ManuallyDrop,
    ptr::{self, NonNull},
    sync::{Arc as StdArc, OnceLock, Weak},
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;

#[cfg(not(loom))]
use crate::backlog::Backlog;
use crate::{
    error::{Error, Result},
    process,
    sync::{
        Arc, Sender, UnsafeCell,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
        thread,
    },
};

const EMPTY: u8 = 0;
const LISTENING: u8 = 1;
const DONE: u8 = 2;

/// What a token that waits can call on: the relay that made it.
pub(crate) trait Driver: Send + Sync {
    /// Makes what progress it can without blocking.
    fn step(&self);

    /// Works, or waits, until `done` or `until`; returns early where the thread had better park on
    /// its token. `job` is the queued work that the token stands for, or 0.
    fn help(&self, job: u64, done: &dyn Fn() -> bool, until: Option<Instant>);

    /// Makes the notifier look again soon.
    fn nudge(&self);
}

/// A hand-off's shared part. On lines of its own, since two threads use it.
#[repr(align(128))]
struct Cell<T> {
    /// See the table at the top of this file.
    state: AtomicU8,
    /// How many of the two ends have left.
    left: AtomicU8,
    /// The free cell below this one.
    below: AtomicU32,
    /// Its own index.
    index: u32,
    /// The queued work that this token stands for, or 0.
    job: AtomicU64,
    outcome: UnsafeCell<Option<Result<T>>>,
    listener: UnsafeCell<Option<Listener<T>>>,
}

/// Whom the completer must tell.
enum Listener<T> {
    Thread(thread::Thread),
    Channel(Sender<Completion<T>>, u64),
}

// SAFETY: the table grants each cell to one side at a time, and the outcome crosses threads once.
unsafe impl<T: Send> Sync for Cell<T> {}
// SAFETY: as above; nothing in it is tied to the thread that made it.
unsafe impl<T: Send> Send for Cell<T> {}

/// The outcome of one transfer, as [`Token::attach`] delivers it.
///
/// Dropping it drops the slot in it. For an example see [`Token::attach`].
#[derive(Debug)]
pub struct Completion<T> {
    /// The number given to [`Token::attach`].
    pub tag: u64,
    /// What [`Token::wait`] would have returned.
    pub result: Result<T>,
}

/// The cells of one relay's tokens.
#[allow(missing_debug_implementations)] // internal
pub struct Tokens<T> {
    /// `tag << 32 | top` of the free cells; the tag changes on every exchange, so that a stale
    /// `top` cannot win.
    free: CachePadded<AtomicU64>,
    /// Chunk `n` holds `FIRST << n` cells; made when needed, never moved or dropped before `self`.
    chunks: [OnceLock<Box<[Cell<T>]>>; CHUNKS],
    growing: Mutex<usize>,
    #[cfg(not(loom))]
    pub(crate) backlog: Backlog<T>,
    /// Unset: nobody drives, and a token that waits parks.
    driver: OnceLock<Weak<dyn Driver>>,
}

const FIRST: u32 = if cfg!(loom) { 2 } else { 64 };
const CHUNKS: usize = 25;
const BOTTOM: u32 = u32::MAX;

impl<T: Send + 'static> Tokens<T> {
    /// Makes the first cells.
    pub fn new() -> Arc<Self> {
        let tokens = Self {
            free: CachePadded::new(AtomicU64::new(u64::from(BOTTOM))),
            chunks: [const { OnceLock::new() }; CHUNKS],
            growing: Mutex::new(0),
            #[cfg(not(loom))]
            backlog: Backlog::default(),
            driver: OnceLock::new(),
        };
        tokens.grow();
        Arc::new(tokens)
    }

    #[cfg(not(loom))]
    pub(crate) fn drive_by(&self, driver: Weak<dyn Driver>) {
        let first = self.driver.set(driver).is_ok();
        debug_assert!(first, "one relay drives its tokens");
    }

    /// Makes the two ends of a hand-off.
    pub fn make(home: &Arc<Self>) -> (Completer<T>, Token<T>) {
        let index = loop {
            match home.pop() {
                Some(index) => break index,
                None => home.grow(),
            }
        };
        let cell = home.cell(index);
        // Both ends of the last hand-off have left, and `push` and `pop` ordered that before us.
        cell.state.store(EMPTY, Ordering::Relaxed);
        cell.left.store(0, Ordering::Relaxed);
        cell.job.store(0, Ordering::Relaxed);
        let home = ManuallyDrop::new(Arc::clone(home));
        // SAFETY: a copy of the share that both ends have, and that is dropped once: by the last to leave.
        let same = unsafe { ptr::read(&raw const home) };
        let end = |home| End { cell: NonNull::from(cell), home };
        (Completer { end: Some(end(home)) }, Token { end: Some(end(same)) })
    }

    fn cell(&self, index: u32) -> &Cell<T> {
        let chunk = ((index / FIRST) + 1).ilog2();
        let offset = index - FIRST * ((1 << chunk) - 1);
        let cells = self.chunks[chunk as usize].get().expect("an index is of a made chunk");
        &cells[offset as usize]
    }

    fn pop(&self) -> Option<u32> {
        let mut head = self.free.load(Ordering::Acquire);
        loop {
            let top = head as u32;
            if top == BOTTOM {
                return None;
            }
            let below = self.cell(top).below.load(Ordering::Relaxed);
            // Acquire: what the last hand-off did to the cell happens before what the next does.
            match self.swing(head, below, Ordering::Acquire) {
                Ok(()) => return Some(top),
                Err(now) => head = now,
            }
        }
    }

    fn push(&self, cell: &Cell<T>) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            cell.below.store(head as u32, Ordering::Relaxed);
            // Release: pairs with the exchange in `pop`.
            match self.swing(head, cell.index, Ordering::Release) {
                Ok(()) => return,
                Err(now) => head = now,
            }
        }
    }

    fn swing(&self, head: u64, top: u32, order: Ordering) -> Result<(), u64> {
        let tag = (head >> 32).wrapping_add(1);
        let next = tag << 32 | u64::from(top);
        self.free.compare_exchange_weak(head, next, order, Ordering::Acquire).map(|_| ())
    }

    #[cold]
    fn grow(&self) {
        let mut made = self.growing.lock();
        if self.free.load(Ordering::Acquire) as u32 != BOTTOM {
            return;
        }
        assert!(*made < CHUNKS, "over two thousand million tokens are alive");
        let first = FIRST * ((1 << *made) - 1);
        let cells: Box<[_]> = (first..first + (FIRST << *made)).map(Cell::new).collect();
        let cells = self.chunks[*made].get_or_init(|| cells);
        *made += 1;
        for cell in cells.iter().rev() {
            self.push(cell);
        }
    }
}

impl<T> Tokens<T> {
    fn driver(&self) -> Option<StdArc<dyn Driver>> {
        self.driver.get()?.upgrade()
    }
}

impl<T> Cell<T> {
    fn new(index: u32) -> Self {
        Self {
            state: AtomicU8::new(EMPTY),
            left: AtomicU8::new(0),
            below: AtomicU32::new(BOTTOM),
            index,
            job: AtomicU64::new(0),
            outcome: UnsafeCell::new(None),
            listener: UnsafeCell::new(None),
        }
    }

    fn is_done(&self) -> bool {
        // Acquire: pairs with the swap in `complete`.
        self.state.load(Ordering::Acquire) == DONE
    }

    /// Takes the outcome. Only the side that the row DONE names may call this.
    fn take(&self) -> Option<Result<T>> {
        // SAFETY: row DONE.
        self.outcome.with_mut(|cell| unsafe { (*cell).take() })
    }
}

/// One end: the cell, and what keeps it.
struct End<T: Send + 'static> {
    cell: NonNull<Cell<T>>,
    /// One share of it for both ends: a count less to be changed.
    home: ManuallyDrop<Arc<Tokens<T>>>,
}

// SAFETY: an end is a reference to a cell, which is `Sync`, and a part in a share of its home.
unsafe impl<T: Send> Send for End<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for End<T> {}

impl<T: Send + 'static> End<T> {
    fn cell(&self) -> &Cell<T> {
        // SAFETY: `home` keeps its chunks while one of its ends is there, and this one has not left.
        unsafe { self.cell.as_ref() }
    }

    fn complete(&self, outcome: Result<T>) {
        let cell = self.cell();
        // SAFETY: rows EMPTY and LISTENING: before DONE the outcome is the completer's.
        cell.outcome.with_mut(|slot| unsafe { *slot = Some(outcome) });
        // Release publishes the outcome to `is_done`; Acquire brings in the listener of `listen`.
        if cell.state.swap(DONE, Ordering::AcqRel) == LISTENING {
            // SAFETY: row DONE: we found LISTENING, so the listener is ours.
            match cell.listener.with_mut(|slot| unsafe { (*slot).take() }) {
                Some(Listener::Thread(thread)) => thread.unpark(),
                Some(Listener::Channel(tx, tag)) => self.send(tx, tag),
                None => unreachable!("LISTENING without a listener"),
            }
        }
    }

    /// Takes the outcome and sends it.
    fn send(&self, tx: Sender<Completion<T>>, tag: u64) {
        let Some(result) = self.cell().take() else { return };
        let completion = Completion { tag, result };
        #[cfg(not(loom))]
        if self.home.backlog.offer(tx, completion)
            && let Some(driver) = self.home.driver()
        {
            driver.nudge();
        }
        #[cfg(loom)]
        let _ = tx.send(completion);
    }
}

impl<T: Send + 'static> Drop for End<T> {
    fn drop(&mut self) {
        let left = &self.cell().left;
        // Acquire, AcqRel: the last to leave sees what the other did, and so may empty the cell. Who
        // finds the other gone is the last, and need not say so to anybody.
        if left.load(Ordering::Acquire) == 1 || left.fetch_add(1, Ordering::AcqRel) == 1 {
            // Nobody took it: the token was dropped first.
            let unclaimed = self.cell().take();
            // SAFETY: both ends have left, and `push` has not yet handed the cell on.
            let listener = self.cell().listener.with_mut(|slot| unsafe { (*slot).take() });
            self.home.push(self.cell());
            // SAFETY: the other end has left, and touches its copy of the share no more. Of this one it is
            // the last use.
            let home = unsafe { ManuallyDrop::take(&mut self.home) };
            drop((unclaimed, listener, home));
        }
    }
}

/// The writing end. Dropped without a word, it says [`Error::Closed`]: no token waits for ever.
#[allow(missing_debug_implementations)] // internal
pub struct Completer<T: Send + 'static> {
    end: Option<End<T>>,
}

impl<T: Send + 'static> Completer<T> {
    /// Hands over the outcome and wakes whoever listens.
    pub fn complete(mut self, outcome: Result<T>) {
        if let Some(end) = self.end.take() {
            end.complete(outcome);
        }
    }

    /// Names the queued work that the token stands for.
    #[cfg(not(loom))]
    pub(crate) fn stands_for(&self, job: u64) {
        if let Some(end) = &self.end {
            // Before the token reaches its user; whoever gets it from there is ordered after.
            end.cell().job.store(job, Ordering::Relaxed);
        }
    }
}

impl<T: Send + 'static> Drop for Completer<T> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end.complete(Err(Error::Closed));
        }
    }
}

/// A claim on the outcome of one transfer.
///
/// Dropping a token abandons the claim, never the transfer: when that ends, its slot goes back to
/// the pool. A token that is done holds its slot until its outcome is taken or the token is dropped.
/// One thread waits on a token at a time; it may move between threads.
///
/// ```
/// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-token")?;
/// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
/// let (metadata, put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
/// drop(put); // nobody asks how it ends
/// relay.get(&metadata)?.wait()?;
/// let second = std::time::Duration::from_secs(1);
/// let both = [relay.acquire(1, second * 5)?, relay.acquire(1, second * 5)?]; // its slot is back
/// # drop(both); Ok::<(), Error>(())
/// ```
#[must_use = "dropping a token abandons its outcome"]
pub struct Token<T: Send + 'static> {
    /// `None` once the outcome was taken.
    end: Option<End<T>>,
}

impl<T: Send + 'static> Token<T> {
    /// Whether the transfer has ended: one atomic load. True for ever after, also once the outcome
    /// was taken. It does none of the relay's work: a loop that only asks this waits for the threads.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-is-done")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, mut put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// assert!(!put.is_done());
    /// relay.abort(&metadata)?;
    /// assert!(put.is_done() && put.poll().is_some() && put.is_done());
    /// # Ok::<(), Error>(())
    /// ```
    #[inline]
    pub fn is_done(&self) -> bool {
        self.end.as_ref().is_none_or(|end| end.cell().is_done())
    }

    /// Returns the outcome if there is one, after a look for it that does not block. `None` after
    /// the outcome was taken. It never runs a read.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-poll")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, mut put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// assert!(put.poll().is_none());
    /// relay.get(&metadata)?.wait()?; // by now the notification is there
    /// let slot = loop {
    ///     // … work of your own …
    ///     if let Some(outcome) = put.poll() {
    ///         break outcome?;
    ///     }
    /// };
    /// assert!(put.poll().is_none() && slot.len() == 5);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn poll(&mut self) -> Option<Result<T>> {
        let end = self.end.as_ref()?;
        if !process::is_here() {
            return self.forked();
        }
        if !end.cell().is_done() {
            end.home.driver()?.step();
            if !end.cell().is_done() {
                return None;
            }
        }
        self.take()
    }

    /// Returns the outcome, and does the relay's work meanwhile where it can.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-wait")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// assert_eq!(&relay.get(&metadata)?.wait()?[..], b"hello");
    /// let mut slot = put.wait()?; // the sender's again
    /// slot.fill(0);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The transfer's own, which [`Relay::put`](crate::Relay::put) and
    /// [`Relay::get`](crate::Relay::get) list; [`Error::Closed`] if the outcome was taken before.
    pub fn wait(mut self) -> Result<T> {
        while self.end.is_some() {
            if let Some(outcome) = self.wait_until(None) {
                return outcome;
            }
        }
        Err(Error::Closed)
    }

    /// Returns the outcome, or `None` if `timeout` passes first: then the token stays valid. `None`
    /// at once after the outcome was taken.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-wait-timeout")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, mut put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// assert!(put.wait_timeout(std::time::Duration::from_millis(1)).is_none()); // not yet
    /// relay.get(&metadata)?.wait()?;
    /// let slot = put.wait_timeout(std::time::Duration::from_secs(5)).expect("in time")?;
    /// # drop(slot);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<T>> {
        // A time too far to say is no limit.
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Sends the outcome to `tx` under `tag`, now or when it comes: exactly one message, or none if
    /// it was taken before.
    ///
    /// The sender is `crossbeam`'s 0.8, which is `crossbeam-channel`'s 0.5.
    ///
    /// A full channel neither blocks nor loses: the completion waits in the relay, in order, and is
    /// offered again. If the receiver is gone the outcome is dropped and its slot freed. What a
    /// full channel has not taken when the relay closes is dropped, too.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-attach")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (tx, rx) = crossbeam::channel::unbounded();
    /// for tag in 1..=2 {
    ///     let (metadata, _) = relay.put_bytes(&[tag as u8], Tensor::bytes(1))?;
    ///     relay.get(&metadata)?.attach(&tx, tag);
    /// }
    /// let both = [rx.recv(), rx.recv()].map(|completion| completion.expect("`tx` lives"));
    /// for Completion { tag, result } in both {
    ///     assert_eq!(result?[..], [tag as u8]);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn attach(mut self, tx: &Sender<Completion<T>>, tag: u64) {
        let Some(end) = self.end.take().filter(|_| process::is_here()) else { return };
        if !end.listen(Listener::Channel(tx.clone(), tag)) {
            end.send(tx.clone(), tag);
        }
    }

    /// A forked child has no part in it.
    #[cold]
    fn forked(&mut self) -> Option<Result<T>> {
        self.end = None;
        Some(Err(process::forked()))
    }

    fn take(&mut self) -> Option<Result<T>> {
        let end = self.end.take()?;
        // Row DONE: we saw DONE and no channel listens, so the outcome is ours.
        end.cell().take()
    }

    fn wait_until(&mut self, until: Option<Instant>) -> Option<Result<T>> {
        let end = self.end.as_ref()?;
        if !process::is_here() {
            return self.forked();
        }
        if !end.cell().is_done()
            && let Some(driver) = end.home.driver()
        {
            let job = end.cell().job.load(Ordering::Relaxed);
            driver.help(job, &|| end.cell().is_done(), until);
        }
        if !end.cell().is_done() {
            end.park(until);
        }
        if self.is_done() { self.take() } else { None }
    }
}

impl<T: Send + 'static> End<T> {
    /// EMPTY to LISTENING. False if the outcome came first.
    fn listen(&self, listener: Listener<T>) -> bool {
        if self.cell().is_done() {
            return false;
        }
        // SAFETY: row EMPTY: the listener is the token's until the exchange below succeeds. (Row
        // DONE, if the outcome comes now: still the token's, since the completer finds EMPTY.)
        self.cell().listener.with_mut(|slot| unsafe { *slot = Some(listener) });
        // Release hands the listener to the swap in `complete`; Acquire takes the outcome.
        self.cell()
            .state
            .compare_exchange(EMPTY, LISTENING, Ordering::Release, Ordering::Acquire)
            .is_ok()
    }

    /// Sleeps until DONE or `until`.
    fn park(&self, until: Option<Instant>) {
        if !self.listen(Listener::Thread(thread::current())) {
            return;
        }
        while !self.cell().is_done() {
            match until.map(|at| at.saturating_duration_since(Instant::now())) {
                None => thread::park(),
                Some(Duration::ZERO) => return self.unlisten(),
                #[cfg(not(loom))]
                Some(left) => thread::park_timeout(left),
                #[cfg(loom)]
                Some(_) => return self.unlisten(),
            }
        }
    }

    /// LISTENING to EMPTY, unless the outcome came first: the caller looks with `is_done`.
    fn unlisten(&self) {
        let _ = self.cell().state.compare_exchange(
            LISTENING,
            EMPTY,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }
}

impl<T: Send + 'static> fmt::Debug for Token<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("done", &self.is_done()).finish_non_exhaustive()
    }
}
