//! The gets of a relay: queued, being read, over. `turns` has what the transfer threads do next.
//!
//! A get is *queued* until somebody claims it together with a receive slot, and then *reading* until
//! that thread finishes it. Its token's end stays here meanwhile, so that an abort or a deadline can
//! tell the token at once while the engine is still busy.

mod streak;
mod turns;

use std::{
    collections::VecDeque,
    mem,
    ops::Deref,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::{Condvar, Mutex};

pub(crate) use self::turns::{Tell, Work};
use self::{
    streak::Streak,
    turns::{RULES, Way},
};
use crate::{
    engine::RemoteBuffer,
    error::{Error, Result},
    memory::{Memory, Span},
    peers::Peer,
    pool::{Pool, Slot},
    sync::atomic::{AtomicUsize, Ordering},
    token::Completer,
};

/// A get, from the call to its outcome.
pub(crate) struct Job<M: Memory> {
    pub(crate) what: What,
    pub(crate) since: Instant,
    pub(crate) request: Option<Arc<str>>,
    /// `None` once the token was told, and for a get without one.
    pub(crate) completer: Option<Completer<Slot<M>>>,
}

/// What is read, from whom, until when.
#[derive(Clone)]
pub(crate) struct What {
    pub(crate) remote: Remote,
    /// How long the sender waits for it.
    pub(crate) lease: Duration,
    pub(crate) deadline: Instant,
    pub(crate) peer: Arc<Peer>,
}

/// What the metadata of a put says to who reads it.
pub(crate) trait Described: Send + Sync {
    fn remote(&self) -> &RemoteBuffer;

    /// The transfer's name, for the notification.
    fn name(&self) -> &str;
}

/// The same, shared with the metadata: a clone is one count and not one for each text.
#[derive(Clone)]
pub(crate) struct Remote(Arc<dyn Described>);

impl Remote {
    pub(crate) fn of(described: Arc<dyn Described>) -> Self {
        Self(described)
    }

    pub(crate) fn name(&self) -> &str {
        self.0.name()
    }
}

impl Deref for Remote {
    type Target = RemoteBuffer;

    fn deref(&self) -> &RemoteBuffer {
        self.0.remote()
    }
}

/// A get that the holder must read and finish.
pub(crate) struct Claim<M: Memory> {
    pub(crate) handle: Handle,
    pub(crate) what: What,
    pub(crate) slot: Slot<M>,
}

/// Names one get: its place and the place's generation. Never 0 as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(u64);

impl Handle {
    pub(crate) fn from_job(job: u64) -> Self {
        Self(job)
    }

    fn place(self) -> usize {
        self.0 as u32 as usize
    }
}

pub(crate) struct Gets<M: Memory> {
    /// On lines of its own: the notifier looks at what is below whenever it passes.
    table: CachePadded<Mutex<Table<M>>>,
    work: Condvar,
    receive: Arc<Pool<M>>,
    most_queued: usize,
    /// How many threads may be busy with peers that have not answered, or failed last time.
    most_suspect: usize,
    /// How many places are reading and ended; changed under the lock.
    unwanted: AtomicUsize,
    /// How many places are reading and were asked to give way; likewise under the lock.
    yielding: AtomicUsize,
}

struct Table<M: Memory> {
    places: Vec<Place<M>>,
    free: Vec<u32>,
    /// Queued gets in order, and gets that somebody else has claimed or ended meanwhile.
    order: VecDeque<Handle>,
    /// How many at its front are known not to be begun, for each rule in `turns`: nothing has happened
    /// since that would let one.
    passed: [usize; RULES],
    tells: VecDeque<(Instant, Tell)>,
    queued: usize,
    reading: usize,
    suspect: usize,
    idle: usize,
    /// A thread was woken for what is queued, and has not looked yet.
    waking: bool,
    streak: Streak,
    closed: bool,
}

struct Place<M: Memory> {
    generation: u32,
    /// What a thread is filling. `None` while queued.
    reading: Option<Span>,
    /// Since when a transfer thread reads it.
    since: Option<Instant>,
    /// Somebody ended it while it was reading.
    ended: bool,
    /// Somebody waits for it, or has.
    waited: bool,
    /// It has been read together with others in vain.
    alone: bool,
    way: Way,
    job: Option<Job<M>>,
}

/// Gets of at most so many bytes are read together: of larger ones the bytes take the time, not the calls.
const SMALL: usize = 64 << 10;
/// And so many bytes together at most, for which others wait.
const TOGETHER: usize = 256 << 10;

impl<M: Memory> Default for Place<M> {
    fn default() -> Self {
        let (reading, since, job) = (None, None, None);
        let (ended, waited, alone) = (false, false, false);
        Self { generation: 0, reading, since, ended, waited, alone, way: Way::Kept, job }
    }
}

impl<M: Memory> Gets<M> {
    pub(crate) fn new(receive: Arc<Pool<M>>, most_queued: usize, threads: usize) -> Self {
        let table = Table {
            places: Vec::new(),
            free: Vec::new(),
            order: VecDeque::new(),
            passed: [0; RULES],
            tells: VecDeque::new(),
            queued: 0,
            reading: 0,
            suspect: 0,
            idle: 0,
            waking: false,
            streak: Streak::default(),
            closed: false,
        };
        Self {
            table: CachePadded::new(Mutex::new(table)),
            work: Condvar::new(),
            receive,
            most_queued,
            most_suspect: threads.saturating_sub(1).max(1),
            unwanted: AtomicUsize::new(0),
            yielding: AtomicUsize::new(0),
        }
    }

    /// Queues a get.
    pub(crate) fn submit(&self, job: Job<M>) -> Result<()> {
        let mut table = self.table.lock();
        if table.closed {
            return Err(Error::Closed);
        }
        if table.queued >= self.most_queued {
            return Err(Error::Exhausted);
        }
        let handle = table.insert(job, None);
        table.queued += 1;
        table.order.push_back(handle);
        table.sweep();
        let wakes = !table.streak.stands_in() && self.should_wake(&mut table);
        // Before the wake: who is woken would only wait for the lock, and we would wake it again.
        drop(table);
        if wakes {
            self.work.notify_one();
        }
        Ok(())
    }

    /// Somebody waits for a get that he cannot read himself.
    pub(crate) fn hurry(&self) {
        let table = self.table.lock();
        if table.streak.is_napping() && table.queued > 0 {
            self.work.notify_one();
        }
    }

    /// Enters a get that its caller reads by itself, without a slot, into `dest`.
    pub(crate) fn enter(&self, job: Job<M>, dest: Span) -> Result<Handle> {
        let mut table = self.table.lock();
        if table.closed {
            return Err(Error::Closed);
        }
        table.reading += 1;
        let handle = table.insert(job, Some(dest));
        table.places[handle.place()].waited = true;
        Ok(handle)
    }

    /// Claims one get, if it is still queued, ends by `until`, and there is a slot for it.
    pub(crate) fn claim(&self, handle: Handle, until: Option<Instant>) -> Option<Claim<M>> {
        let mut table = self.table.lock();
        let prompt = table.waits_for(handle)?;
        let job = table.queued_job(handle)?;
        if until.is_some_and(|until| job.what.deadline > until) {
            return None;
        }
        let slot = self.receive.try_slot(job.what.remote.len)?;
        if !prompt {
            table.streak.end();
        }
        Some(table.begin(handle, slot, None))
    }

    /// Claims one for a transfer thread, if it is still queued and there is a slot for it.
    pub(crate) fn claim_probed(&self, handle: Handle) -> Option<Claim<M>> {
        let mut table = self.table.lock();
        let len = table.queued_job(handle)?.what.remote.len;
        let credit = self.receive.credits().take_or_starve()?;
        Some(table.begin(handle, self.receive.slot(credit, len), Some(Instant::now())))
    }

    /// Claims more gets like this one, which a transfer thread has: small ones of the same peer, that can
    /// be read in a single call.
    pub(crate) fn claim_like(
        &self,
        first: &Claim<M>,
        most: usize,
        until: Instant,
    ) -> Vec<Claim<M>> {
        let what = &first.what;
        let small = |what: &What| what.remote.len <= SMALL && what.remote.identity.is_some();
        if !small(what) || what.deadline < until {
            return Vec::new();
        }
        let mut table = self.table.lock();
        if table.places[first.handle.place()].alone {
            return Vec::new();
        }
        // A peer that falls silent must not hold the credits that the others need.
        let most = most.min(self.receive.credits().free() / 2);
        let mut bytes = what.remote.len;
        let fits = |handle: &Handle| {
            let job = table.queued_job(*handle)?;
            let other = &job.what;
            let alike = Arc::ptr_eq(&other.peer, &what.peer) && small(other);
            let in_time = other.deadline >= until && !table.places[handle.place()].alone;
            (alike && in_time).then_some((*handle, other.remote.len))
        };
        let alike = table.order.iter().filter_map(fits).take_while(|(_, len)| {
            bytes += len;
            bytes <= TOGETHER
        });
        let alike: Vec<_> = alike.take(most).collect();
        let begin = |(handle, len)| {
            let slot = self.receive.try_slot(len)?;
            Some(table.begin(handle, slot, Some(Instant::now())))
        };
        alike.into_iter().map_while(begin).collect()
    }

    /// Puts a get that is still queued behind the others.
    pub(crate) fn defer(&self, handle: Handle) {
        let mut table = self.table.lock();
        if table.queued_job(handle).is_some() {
            table.move_back(handle);
        }
    }

    /// Takes a get out that is still queued.
    pub(crate) fn withdraw(&self, handle: Handle) -> Option<Job<M>> {
        let mut table = self.table.lock();
        table.queued_job(handle)?;
        table.queued -= 1;
        table.remove(handle)
    }

    /// A peer answers that had not, or had failed: its gets need wait for nobody's turn any more.
    pub(crate) fn proven(&self) {
        let mut table = self.table.lock();
        table.passed = [0; RULES];
        if table.idle > 0 && !(table.order.is_empty() && table.tells.is_empty()) {
            self.work.notify_all();
        }
    }

    /// Whether nobody has ended it.
    pub(crate) fn is_wanted(&self, handle: Handle) -> bool {
        let table = self.table.lock();
        table.place(handle).is_some_and(|place| !place.ended)
    }

    /// Takes a finished get out, and whether nobody has ended it. `None` in its completer: somebody
    /// else told the token.
    pub(crate) fn finish(&self, handle: Handle) -> Option<(Job<M>, bool)> {
        let mut table = self.table.lock();
        let Place { ended, waited, .. } = *table.place(handle)?;
        if !waited {
            table.streak.end();
        }
        self.unwanted.fetch_sub(usize::from(ended), Ordering::Relaxed);
        self.leave_reading(&mut table, handle);
        Some((table.remove(handle)?, !ended))
    }

    /// Ends the gets that `which` names; what comes back must be told. A queued one is out; one
    /// that is reading stays until its thread finishes it.
    pub(crate) fn end(&self, mut which: impl FnMut(&Job<M>, bool) -> bool) -> Vec<Job<M>> {
        let mut table = self.table.lock();
        let mut ended = Vec::new();
        for index in 0..table.places.len() {
            let place = &mut table.places[index];
            let Some(job) = &mut place.job else { continue };
            if place.ended || !which(job, place.reading.is_some()) {
                continue;
            }
            let handle = Handle(u64::from(place.generation) << 32 | index as u64);
            if place.reading.is_some() {
                place.ended = true;
                let (what, since) = (job.what.clone(), job.since);
                let (request, completer) = (None, job.completer.take());
                ended.push(Job { what, since, request, completer });
                self.unwanted.fetch_add(1, Ordering::Relaxed);
            } else {
                table.queued -= 1;
                ended.extend(table.remove(handle));
            }
        }
        ended
    }

    /// Hands each span to `interrupt` that is still being filled for a get that was ended, or that
    /// is to give way.
    pub(crate) fn each_to_interrupt(&self, interrupt: impl FnMut(Span)) {
        if self.any_to_interrupt() {
            let table = self.table.lock();
            let reading = || {
                let live = table.places.iter().filter(|place| place.job.is_some());
                live.filter_map(|place| {
                    Some((place.reading?, place.ended || place.way == Way::Asked))
                })
            };
            // An engine may let go of a slot that it kept before its read returns: then the next get
            // reads into that slot already, and is not the one that is meant.
            let is_anothers = |span| reading().any(|(other, go)| !go && other == span);
            let unwanted = reading().filter(|(span, go)| *go && !is_anothers(*span));
            unwanted.map(|(span, _)| span).for_each(interrupt);
        }
    }

    /// Whether a read goes on that should end.
    pub(crate) fn any_to_interrupt(&self) -> bool {
        self.unwanted() > 0 || self.yielding.load(Ordering::Relaxed) > 0
    }

    /// How many reads go on that nobody wants.
    pub(crate) fn unwanted(&self) -> usize {
        self.unwanted.load(Ordering::Relaxed)
    }

    /// The earliest deadline there is.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let table = self.table.lock();
        let live = table.places.iter().filter(|place| !place.ended);
        live.filter_map(|place| Some(place.job.as_ref()?.what.deadline)).min()
    }

    /// The get that was asked for longest ago: its peer, when that was, and whether it is reading.
    pub(crate) fn oldest(&self) -> Option<(Arc<str>, Instant, bool)> {
        let table = self.table.lock();
        let live = table.places.iter().filter(|place| !place.ended);
        let jobs = live.filter_map(|place| Some((place.job.as_ref()?, place.reading.is_some())));
        let (job, reading) = jobs.min_by_key(|(job, _)| job.since)?;
        Some((Arc::clone(&job.what.remote.peer), job.since, reading))
    }

    /// How many are queued and how many are reading.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let table = self.table.lock();
        (table.queued, table.reading)
    }

    /// Refuses further gets and ends the threads.
    pub(crate) fn close(&self) {
        let mut table = self.table.lock();
        table.closed = true;
        table.tells.clear();
        self.work.notify_all();
    }
}

impl<M: Memory> Table<M> {
    fn insert(&mut self, job: Job<M>, reading: Option<Span>) -> Handle {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        // Skips 0, so that no handle is 0.
        place.generation = place.generation.wrapping_add(1).max(1);
        (place.reading, place.since) = (reading, None);
        (place.ended, place.waited, place.alone, place.way) = (false, false, false, Way::Kept);
        let handle = Handle(u64::from(place.generation) << 32 | u64::from(index));
        if let Some(completer) = &job.completer {
            completer.stands_for(handle.0);
        }
        place.job = Some(job);
        handle
    }

    /// Somebody waits for it; whether he came at once, or again. `None`: it is over.
    fn waits_for(&mut self, handle: Handle) -> Option<bool> {
        let since = self.place(handle)?.job.as_ref()?.since;
        let again = mem::replace(&mut self.places[handle.place()].waited, true);
        Some(again || self.streak.waited(since))
    }

    fn place(&self, handle: Handle) -> Option<&Place<M>> {
        let place = self.places.get(handle.place())?;
        (u64::from(place.generation) == handle.0 >> 32 && place.job.is_some()).then_some(place)
    }

    fn queued_job(&self, handle: Handle) -> Option<&Job<M>> {
        self.place(handle).filter(|place| place.reading.is_none())?.job.as_ref()
    }

    fn remove(&mut self, handle: Handle) -> Option<Job<M>> {
        self.place(handle)?;
        self.free.push(handle.place() as u32);
        self.places[handle.place()].job.take()
    }

    /// The first queued get that `may` be begun.
    fn first(&self, may: impl Fn(&What) -> bool) -> Option<Handle> {
        let mut queued = self.order.iter().copied();
        queued.find(|handle| self.queued_job(*handle).is_some_and(|job| may(&job.what)))
    }

    /// The first queued get that `may` be begun by rule `rule`, whose answer is always the same.
    fn next_by(&mut self, rule: usize, may: impl Fn(&Self, &What) -> bool) -> Option<Handle> {
        let from = self.passed[rule];
        let may =
            |handle: &Handle| self.queued_job(*handle).is_some_and(|job| may(self, &job.what));
        let found = self.order.range(from..).position(may).map(|at| from + at);
        self.passed[rule] = found.unwrap_or(self.order.len());
        self.order.get(found?).copied()
    }

    /// Puts a get that may be in the order already behind all others.
    fn move_back(&mut self, handle: Handle) {
        self.order.retain(|other| *other != handle);
        self.order.push_back(handle);
        self.passed = [0; RULES];
    }

    /// `since`: when a transfer thread begins.
    fn begin(&mut self, handle: Handle, slot: Slot<M>, since: Option<Instant>) -> Claim<M> {
        self.queued -= 1;
        self.reading += 1;
        let place = &mut self.places[handle.place()];
        (place.reading, place.since) = (Some(slot.span()), since);
        let what = place.job.as_ref().map(|job| job.what.clone()).expect("a queued get has a job");
        self.sweep();
        Claim { handle, what, slot }
    }

    /// Drops from the front of the order what is queued no more; all of it when it piles up.
    fn sweep(&mut self) {
        while self.order.front().is_some_and(|front| self.queued_job(*front).is_none()) {
            self.order.pop_front();
            self.passed = self.passed.map(|passed| passed.saturating_sub(1));
        }
        if self.order.len() > 2 * self.queued + 64 {
            let mut order = mem::take(&mut self.order);
            order.retain(|handle| self.queued_job(*handle).is_some());
            self.order = order;
            self.passed = [0; RULES];
        }
    }
}
