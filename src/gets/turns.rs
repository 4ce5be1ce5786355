//! What a transfer thread does next, and who gives way to whom.
//!
//! Peers that have answered come first. Those that have not, or failed last time, are *suspects*: with
//! two or more threads they hold all but one, and each of them one at the most. Of the suspects those
//! come last that held up a read, or have missed many tries: whoever missed one may be well.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Claim, Gets, Handle, Job, Place, Slot, Table, What, streak::Naps};
use crate::{
    identity::Note,
    memory::Memory,
    peers::{Peer, Trust},
    sync::atomic::Ordering,
};

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
    /// Read it; then [`Gets::release`]. `queued`: others may be read with it.
    Read { claim: Claim<M>, queued: bool },
    /// See whether its peer answers, without a slot, which others may need; then likewise, as one that
    /// was suspect. The get is queued meanwhile.
    Probe { handle: Handle, what: What, slot: Slot<M> },
    /// Send it; then likewise.
    Tell { tell: Tell, suspect: bool },
    /// The relay closes.
    End,
}

/// Whether a read has made room for others. It does so once, so that it ends one day however many
/// others come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nobody has asked it.
    Kept,
    /// It was asked, and goes on.
    Asked,
    /// It was asked, and has ended; it is queued again, or being read for the second time.
    Given,
}

/// Which gets are looked for, one rule after another. What a rule does not let begin now it may later:
/// when a peer answers, or a thread that was busy with a suspect is done. Whoever sees to that resets
/// `Table::passed`; else each look would go through all that is queued for a peer that is dead.
pub(super) const RULES: usize = 3;
const UNFAILED: usize = 0;
const UNSTUCK: usize = 1;
/// All that the others let begin, too.
const ANY: usize = 2;

/// How long reads may hold every thread while a get from somebody else waits.
const HELD_LONG: Duration = Duration::from_millis(500);

/// Beyond this many, notifications that could not be delivered are given up.
const MOST_TELLS: usize = 1024;

impl<M: Memory> Gets<M> {
    /// Waits for work.
    pub(crate) fn next(&self) -> Work<M> {
        let mut table = self.table.lock();
        let mut naps = Naps::default();
        // Whether this thread was to wake when a notification is due.
        let mut timed = false;
        loop {
            if table.closed {
                return Work::End;
            }
            let now = Instant::now();
            if let Some(work) = self.pick(&mut table, now) {
                let mut wakes = self.should_wake(&mut table);
                wakes |= timed && table.idle > 0 && !table.tells.is_empty();
                drop(table);
                if wakes {
                    self.work.notify_one();
                }
                return work;
            }
            let due = table.tells.iter().map(|(due, _)| *due).filter(|due| *due > now).min();
            timed = due.is_some();
            let nap = naps.begin(&mut table.streak, now);
            table.idle += 1;
            match due.into_iter().chain(nap).min() {
                Some(wake) => drop(self.work.wait_until(&mut table, wake)),
                None => self.work.wait(&mut table),
            }
            table.idle -= 1;
            table.waking = false;
            naps.end(&mut table.streak);
        }
    }

    /// The worker that had this peer is done with it.
    pub(crate) fn release(&self, was_suspect: bool, peer: &Peer) {
        let mut table = self.table.lock();
        peer.end();
        table.suspect -= usize::from(was_suspect);
        if was_suspect || peer.trust() != Trust::Good {
            table.passed = [0; RULES];
        }
        // Gets of that peer, or of another suspect, may have waited for this; where that can only be one,
        // this thread takes it next. A peer that has proven itself opens the way for all its gets.
        if was_suspect && table.idle > 0 && !table.order.is_empty() {
            self.work.notify_all();
        }
    }

    /// Queues a get again, behind the others, whose read was asked to give way. False: somebody has
    /// ended it. Its slot is the caller's to drop, afterwards.
    pub(crate) fn put_back(&self, handle: Handle) -> bool {
        let mut table = self.table.lock();
        self.requeue(&mut table, handle) && {
            table.order.push_back(handle);
            true
        }
    }

    /// Queues a get again, before the others, which was read together with others in vain: the next time
    /// it is read alone. Else as [`put_back`](Self::put_back).
    pub(crate) fn put_back_alone(&self, handle: Handle) -> bool {
        let mut table = self.table.lock();
        self.requeue(&mut table, handle) && {
            table.places[handle.place()].alone = true;
            table.order.push_front(handle);
            true
        }
    }

    /// All but its place in the order.
    fn requeue(&self, table: &mut Table<M>, handle: Handle) -> bool {
        if table.place(handle).is_none_or(|place| place.ended) {
            return false;
        }
        self.leave_reading(table, handle);
        table.queued += 1;
        // Its old place in the order may still be there, and would count again.
        table.order.retain(|other| *other != handle);
        table.passed = [0; RULES];
        true
    }

    /// Whether this read was asked to give way.
    pub(crate) fn is_asked(&self, handle: Handle) -> bool {
        self.table.lock().place(handle).is_some_and(|place| place.way == Way::Asked)
    }

    /// Asks one read to give way, if a get from somebody else waits long for what it holds: a thread,
    /// or the turn of those who may not answer. Whoever holds it may have stopped.
    /// [`Self::each_to_interrupt`] has it from then on.
    pub(crate) fn make_way(&self, now: Instant) {
        let mut table = self.table.lock();
        let long = |since: Instant| now.duration_since(since) >= HELD_LONG;
        let is_suspect = |job: &Job<M>| job.what.peer.trust() != Trust::Good;
        let turn_is_held = table.suspect >= self.most_suspect;
        let waits = |job: &&Job<M>| {
            let peer = &job.what.peer;
            // Who failed last time may ask for the turn of such as it, and not for a thread.
            let may = peer.trust() != Trust::Failed || turn_is_held && peer.may_answer();
            long(job.since) && may && !peer.is_busy()
        };
        let mut queued = table.order.iter().filter_map(|handle| table.queued_job(*handle));
        let Some(waiting) = queued.find(waits) else { return };
        let for_turn = is_suspect(waiting) && turn_is_held;
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
                // Else it would have the next turn, too.
                job.what.peer.found_stuck();
            }
            self.yielding.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether gets from anybody but `peer` are queued.
    pub(crate) fn others_wait(&self, peer: &Arc<Peer>) -> bool {
        let table = self.table.lock();
        table.first(|what| !Arc::ptr_eq(&what.peer, peer)).is_some()
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
        let wakes = self.should_wake(&mut self.table.lock());
        if wakes {
            self.work.notify_one();
        }
    }

    /// Whether the caller must wake a thread: there is a get, and a slot for it; else a slot that comes
    /// back is reported. One thread at a time: it has the next woken where there is more of both, and
    /// looks behind a get that somebody else has claimed.
    pub(super) fn should_wake(&self, table: &mut Table<M>) -> bool {
        if table.queued == 0 || table.idle == 0 || table.waking {
            return false;
        }
        let mut not_passed = table.order.range(table.passed[ANY]..);
        if !not_passed.any(|handle| table.queued_job(*handle).is_some()) {
            return false; // all that is queued waits for a turn
        }
        let slots = self.receive.credits();
        // One that is idle looks as soon as it has the lock, be it woken by this or by itself.
        table.waking = slots.free() > 0 || !slots.starve();
        table.waking
    }

    /// A place is being read no more.
    pub(super) fn leave_reading(&self, table: &mut Table<M>, handle: Handle) {
        table.reading -= 1;
        let place = &mut table.places[handle.place()];
        (place.reading, place.since) = (None, None);
        if place.way == Way::Asked {
            place.way = Way::Given;
            self.yielding.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Who waits for a read comes before a note to somebody who may never answer.
    fn pick(&self, table: &mut Table<M>, now: Instant) -> Option<Work<M>> {
        let good = |_: &Table<M>, peer: &Peer| peer.trust() == Trust::Good;
        let may = |table: &Table<M>, peer: &Peer| {
            good(table, peer) || (table.suspect < self.most_suspect && !peer.is_busy())
        };
        let unfailed =
            |table: &Table<M>, peer: &Peer| peer.trust() != Trust::Failed && may(table, peer);
        let unstuck = |table: &Table<M>, peer: &Peer| peer.may_answer() && may(table, peer);
        self.pick_tell(table, now, good)
            .or_else(|| self.pick_read(table, UNFAILED, unfailed))
            .or_else(|| self.pick_tell(table, now, may))
            .or_else(|| self.pick_read(table, UNSTUCK, unstuck))
            .or_else(|| self.pick_read(table, ANY, may))
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
        rule: usize,
        may: impl Fn(&Table<M>, &Peer) -> bool,
    ) -> Option<Work<M>> {
        let next = table.next_by(rule, |table, what| may(table, &what.peer))?;
        let what = table.queued_job(next)?.what.clone();
        let credit = self.receive.credits().take_or_starve()?;
        table.streak.taken();
        let slot = self.receive.slot(credit, what.remote.len);
        if table.busy_with(&what.peer) {
            return Some(Work::Probe { handle: next, what, slot });
        }
        let claim = table.begin(next, slot, Some(Instant::now()));
        Some(Work::Read { claim, queued: table.queued > 0 })
    }
}

impl<M: Memory> Table<M> {
    /// Enters a thread that is busy with `peer`; whether it counts against the suspects.
    fn busy_with(&mut self, peer: &Peer) -> bool {
        let suspect = peer.trust() != Trust::Good;
        peer.begin();
        self.suspect += usize::from(suspect);
        suspect
    }
}
