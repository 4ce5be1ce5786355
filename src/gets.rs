//! The queue of gets, and what the transfer threads do next.
//!
//! A get is *queued* until somebody claims it together with a receive slot, and then *reading* until
//! that thread finishes it. Its token's end stays here meanwhile, so that an abort or a deadline can
//! tell the token at once while the engine is still busy.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::{
    engine::RemoteBuffer,
    error::{Error, Result},
    identity::Note,
    memory::{Memory, Span},
    peers::{Peer, Trust},
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
    pub(crate) remote: RemoteBuffer,
    /// The transfer's name, for the notification.
    pub(crate) name: Arc<str>,
    /// How long the sender waits for it.
    pub(crate) lease: Duration,
    pub(crate) deadline: Instant,
    pub(crate) peer: Arc<Peer>,
}

/// A get that the holder must read and finish.
pub(crate) struct Claim<M: Memory> {
    pub(crate) handle: Handle,
    pub(crate) what: What,
    pub(crate) slot: Slot<M>,
}

/// A notification that is still owed.
pub(crate) struct Tell {
    pub(crate) what: What,
    pub(crate) note: Note,
    /// The kind of the error that it tells of.
    pub(crate) reason: Option<&'static str>,
    pub(crate) until: Instant,
    pub(crate) attempts: u32,
}

/// What a transfer thread does next.
pub(crate) enum Work<M: Memory> {
    /// Read it; then [`Gets::release`] with `suspect`.
    Read { claim: Claim<M>, suspect: bool },
    /// Send it; then likewise.
    Tell { tell: Tell, suspect: bool },
    /// The relay closes.
    End,
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
    table: Mutex<Table<M>>,
    work: Condvar,
    receive: Arc<Pool<M>>,
    most_queued: usize,
    /// How many threads may be busy with peers that have not answered, or failed last time.
    most_suspect: usize,
    /// How many places are reading and ended; changed under the lock.
    unwanted: AtomicUsize,
    /// How many places are reading and were asked to give way; likewise.
    yielding: AtomicUsize,
}

struct Table<M: Memory> {
    places: Vec<Place<M>>,
    free: Vec<u32>,
    /// Queued gets in order, and gets that somebody else has claimed or ended meanwhile.
    order: VecDeque<Handle>,
    tells: VecDeque<(Instant, Tell)>,
    queued: usize,
    reading: usize,
    suspect: usize,
    idle: usize,
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
    way: Way,
    job: Option<Job<M>>,
}

/// Whether a read has made room for others; it does so once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Kept,
    Asked,
    Given,
}

/// How long reads may hold every thread while a get from somebody else waits.
const PATIENCE: Duration = Duration::from_millis(500);

/// Beyond this many, notifications that could not be delivered are given up.
const MOST_TELLS: usize = 1024;

impl<M: Memory> Gets<M> {
    pub(crate) fn new(receive: Arc<Pool<M>>, most_queued: usize, threads: usize) -> Self {
        let table = Table {
            places: Vec::new(),
            free: Vec::new(),
            order: VecDeque::new(),
            tells: VecDeque::new(),
            queued: 0,
            reading: 0,
            suspect: 0,
            idle: 0,
            closed: false,
        };
        Self {
            table: Mutex::new(table),
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
        if table.idle > 0 {
            self.work.notify_one();
        }
        Ok(())
    }

    /// Enters a get that its caller reads by itself, without a slot, into `dest`.
    pub(crate) fn enter(&self, job: Job<M>, dest: Span) -> Result<Handle> {
        let mut table = self.table.lock();
        if table.closed {
            return Err(Error::Closed);
        }
        table.reading += 1;
        Ok(table.insert(job, Some(dest)))
    }

    /// Claims one get, if it is still queued, ends by `until`, and there is a slot for it.
    pub(crate) fn claim(&self, handle: Handle, until: Option<Instant>) -> Option<Claim<M>> {
        let mut table = self.table.lock();
        let job = table.queued_job(handle)?;
        if until.is_some_and(|until| job.what.deadline > until) {
            return None;
        }
        let slot = self.receive.try_slot(job.what.remote.len)?;
        Some(table.begin(handle, slot))
    }

    /// Waits for work.
    pub(crate) fn next(&self) -> Work<M> {
        let mut table = self.table.lock();
        loop {
            if table.closed {
                return Work::End;
            }
            let now = Instant::now();
            if let Some(work) = self.pick(&mut table, now) {
                return work;
            }
            table.idle += 1;
            match table.tells.iter().map(|(due, _)| *due).filter(|due| *due > now).min() {
                Some(due) => drop(self.work.wait_until(&mut table, due)),
                None => self.work.wait(&mut table),
            }
            table.idle -= 1;
        }
    }

    /// The worker that had this peer is done with it.
    pub(crate) fn release(&self, was_suspect: bool, peer: &Peer) {
        let mut table = self.table.lock();
        peer.end();
        table.suspect -= usize::from(was_suspect);
        // Gets of that peer, or of another suspect, may have waited for this.
        if table.idle > 0 && !table.order.is_empty() {
            // A peer that has proven itself opens the way for all its gets.
            let most = if was_suspect { table.idle } else { 1 };
            for _ in 0..most {
                self.work.notify_one();
            }
        }
    }

    /// Whether nobody has ended it.
    pub(crate) fn is_wanted(&self, handle: Handle) -> bool {
        let table = self.table.lock();
        table.place(handle).is_some_and(|place| !place.ended)
    }

    /// Queues a claimed get again, behind the others. False: somebody has ended it. Its slot is the
    /// caller's to drop, afterwards.
    pub(crate) fn put_back(&self, handle: Handle) -> bool {
        let mut table = self.table.lock();
        if table.places[handle.place()].ended {
            return false;
        }
        self.leave_reading(&mut table, handle);
        table.queued += 1;
        table.order.retain(|other| *other != handle);
        table.order.push_back(handle);
        true
    }

    /// As [`Self::put_back`], of a read that was asked to give way.
    pub(crate) fn gave_way(&self, handle: Handle) -> bool {
        let asked = {
            let table = self.table.lock();
            table.place(handle).is_some_and(|place| place.way == Way::Asked)
        };
        asked && self.put_back(handle)
    }

    /// Asks one read to give way, if a get from somebody else waits long for what it holds: a thread,
    /// or the turn of those who may not answer. Whoever holds it may have stopped.
    /// [`Self::each_unwanted`] has it from then on.
    pub(crate) fn make_way(&self, now: Instant) {
        let mut table = self.table.lock();
        let long = |since: Instant| now.duration_since(since) >= PATIENCE;
        let waits = |job: &&Job<M>| {
            let peer = &job.what.peer;
            long(job.since) && peer.trust() != Trust::Failed && !peer.is_busy()
        };
        let mut queued = table.order.iter().filter_map(|handle| table.queued_job(*handle));
        let Some(waiting) = queued.find(waits) else { return };
        let is_suspect = |job: &Job<M>| job.what.peer.trust() != Trust::Good;
        let for_turn = is_suspect(waiting) && table.suspect >= self.most_suspect;
        if table.idle > 0 && !for_turn {
            return;
        }
        let held = table.places.iter_mut().filter_map(|place| {
            let Place { since: Some(since), ended: false, way: Way::Kept, job: Some(job), .. } =
                place
            else {
                return None;
            };
            let fits = long(*since) && (is_suspect(job) || !for_turn);
            fits.then_some((job.what.peer.busy(), now - *since, place))
        });
        if let Some((_, _, place)) = held.max_by_key(|(busy, age, _)| (*busy, *age)) {
            place.way = Way::Asked;
            if let Some(job) = &place.job {
                job.what.peer.learn(Trust::Failed);
            }
            self.yielding.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A place is being read no more.
    fn leave_reading(&self, table: &mut Table<M>, handle: Handle) {
        table.reading -= 1;
        let place = &mut table.places[handle.place()];
        (place.reading, place.since) = (None, None);
        if place.way == Way::Asked {
            place.way = Way::Given;
            self.yielding.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether gets from anybody but `peer` are queued.
    pub(crate) fn others_wait(&self, peer: &Arc<Peer>) -> bool {
        let table = self.table.lock();
        table.first(|what| !Arc::ptr_eq(&what.peer, peer)).is_some()
    }

    /// Takes a finished get out. `None` in its completer: somebody else told the token.
    pub(crate) fn finish(&self, handle: Handle) -> Option<Job<M>> {
        let mut table = self.table.lock();
        let unwanted = table.place(handle)?.ended;
        self.unwanted.fetch_sub(usize::from(unwanted), Ordering::Relaxed);
        self.leave_reading(&mut table, handle);
        table.remove(handle)
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
    pub(crate) fn each_unwanted(&self, interrupt: impl FnMut(Span)) {
        if self.has_unwanted() {
            let table = self.table.lock();
            let unwanted = table
                .places
                .iter()
                .filter(|place| place.job.is_some() && (place.ended || place.way == Way::Asked));
            unwanted.filter_map(|place| place.reading).for_each(interrupt);
        }
    }

    /// Whether a read goes on that should end.
    pub(crate) fn has_unwanted(&self) -> bool {
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

    /// Owes a notification, first tried at `due`. False: too many are owed already.
    pub(crate) fn tell(&self, due: Instant, tell: Tell) -> bool {
        let mut table = self.table.lock();
        if table.closed || table.tells.len() >= MOST_TELLS {
            return false;
        }
        table.tells.push_back((due, tell));
        if table.idle > 0 {
            self.work.notify_one();
        }
        true
    }

    /// Nothing is told to `peer` before `due`.
    pub(crate) fn postpone(&self, peer: &Arc<Peer>, due: Instant) {
        let mut table = self.table.lock();
        for (at, _) in table.tells.iter_mut().filter(|(_, tell)| Arc::ptr_eq(&tell.what.peer, peer))
        {
            *at = due.max(*at);
        }
    }

    /// A receive slot came back while somebody wanted one.
    pub(crate) fn slot_returned(&self) {
        let _table = self.table.lock();
        // All: one that is woken may find that its get was claimed by a caller.
        self.work.notify_all();
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

    /// Who waits for a read comes before a note to somebody who may never answer.
    fn pick(&self, table: &mut Table<M>, now: Instant) -> Option<Work<M>> {
        let good = |_: &Table<M>, peer: &Peer| peer.trust() == Trust::Good;
        let may = |table: &Table<M>, peer: &Peer| {
            good(table, peer) || (table.suspect < self.most_suspect && !peer.is_busy())
        };
        let unfailed =
            |table: &Table<M>, peer: &Peer| peer.trust() != Trust::Failed && may(table, peer);
        self.pick_tell(table, now, good)
            .or_else(|| self.pick_read(table, unfailed))
            .or_else(|| self.pick_tell(table, now, may))
            .or_else(|| self.pick_read(table, may))
    }

    fn pick_tell(
        &self,
        table: &mut Table<M>,
        now: Instant,
        may: impl Fn(&Table<M>, &Peer) -> bool,
    ) -> Option<Work<M>> {
        let due = |(due, tell): &(Instant, Tell)| *due <= now && may(table, &tell.what.peer);
        let index = table.tells.iter().position(due)?;
        let (_, tell) = table.tells.remove(index)?;
        let suspect = table.busy_with(&tell.what.peer);
        Some(Work::Tell { tell, suspect })
    }

    fn pick_read(
        &self,
        table: &mut Table<M>,
        may: impl Fn(&Table<M>, &Peer) -> bool,
    ) -> Option<Work<M>> {
        let next = table.first(|what| may(table, &what.peer))?;
        let len = table.queued_job(next)?.what.remote.len;
        let credit = self.receive.credits().take_or_starve()?;
        let claim = table.begin(next, self.receive.slot(credit, len));
        table.places[next.place()].since = Some(Instant::now());
        let suspect = table.busy_with(&claim.what.peer);
        Some(Work::Read { claim, suspect })
    }
}

impl<M: Memory> Table<M> {
    fn insert(&mut self, job: Job<M>, reading: Option<Span>) -> Handle {
        let index = self.free.pop().unwrap_or_else(|| {
            let (since, way) = (None, Way::Kept);
            self.places.push(Place { generation: 0, reading, since, ended: false, way, job: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        // Skips 0, so that no handle is 0.
        place.generation = place.generation.wrapping_add(1).max(1);
        (place.reading, place.since) = (reading, None);
        (place.ended, place.way) = (false, Way::Kept);
        let handle = Handle(u64::from(place.generation) << 32 | u64::from(index));
        if let Some(completer) = &job.completer {
            completer.stands_for(handle.0);
        }
        place.job = Some(job);
        handle
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

    fn begin(&mut self, handle: Handle, slot: Slot<M>) -> Claim<M> {
        self.queued -= 1;
        self.reading += 1;
        let place = &mut self.places[handle.place()];
        place.reading = Some(slot.span());
        let what = place.job.as_ref().map(|job| job.what.clone()).expect("a queued get has a job");
        self.sweep();
        Claim { handle, what, slot }
    }

    /// Drops from the front of the order what is queued no more; all of it when it piles up.
    fn sweep(&mut self) {
        while self.order.front().is_some_and(|front| self.queued_job(*front).is_none()) {
            self.order.pop_front();
        }
        if self.order.len() > 2 * self.queued + 64 {
            let mut order = std::mem::take(&mut self.order);
            order.retain(|handle| self.queued_job(*handle).is_some());
            self.order = order;
        }
    }

    /// Enters a thread that is busy with `peer`; whether it counts against the suspects.
    fn busy_with(&mut self, peer: &Peer) -> bool {
        let suspect = peer.trust() != Trust::Good;
        peer.begin();
        self.suspect += usize::from(suspect);
        suspect
    }
}
