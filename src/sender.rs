//! The sender's side: how a put is published, and the ways in which it ends.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use crate::{
    core::{Core, State},
    engine::{Event, Publication, Retracted},
    error::{Error, Result},
    gets::Job,
    identity::{Identity, Instance, Note, Notification, TransferId},
    memory::Memory,
    pool::Slot,
    puts::Seen,
    sync::atomic::{Ordering, fence},
    token::{Completer, Token, Tokens},
    wait::{deadline_after, nanos},
};

/// A wait for a slot that lasts this long is told once, with the holder.
const SLOW_WAIT: Duration = Duration::from_secs(1);

/// A put that has not gone back to its slot's next owner.
pub(crate) struct Entry<M: Memory> {
    pub(crate) slot: Slot<M>,
    /// `None` once the token was told.
    pub(crate) completer: Option<Completer<Slot<M>>>,
    pub(crate) publication: Publication,
    /// When it ended, if it is quarantined.
    pub(crate) ended: Instant,
}

impl<M: Memory> Core<M> {
    /// Waits for a slot, in turn; drives meanwhile.
    #[cold]
    pub(crate) fn acquire_slow(&self, len: usize, timeout: Duration) -> Result<Slot<M>> {
        let start = Instant::now();
        let until = deadline_after(start, timeout);
        let mut warn_at = Some(deadline_after(start, SLOW_WAIT));
        let credits = self.slots.credits();
        let queued = credits.enqueue();
        let credit = loop {
            let next = warn_at.map_or(until, |at| at.min(until));
            self.drive(&|| queued.credit().is_some(), Some(next));
            let now = Instant::now();
            if queued.credit().is_some() || now >= until || self.state() != State::Open {
                // A credit that came in the last moment counts.
                break queued.leave();
            }
            if warn_at.is_some_and(|at| now >= at) {
                warn_at = None;
                let oldest = self.puts.each().min_by_key(|seen| seen.since);
                tracing::warn!(
                    waited = ?now - start,
                    holder = oldest.map(|seen| format!("{}_{}", self.engine_id, seen.id)),
                    age = ?oldest.map(|seen| seen.age(self.ticks(now))),
                    "every slot is in use: the oldest put has not been acknowledged"
                );
            }
            std::thread::park_timeout(next.saturating_duration_since(now));
        };
        let slot = credit.map(|credit| self.slots.slot(credit, len));
        self.check_open()?;
        slot.ok_or(Error::TimedOut)
    }

    /// Publishes a slot of this relay's.
    pub(crate) fn publish(
        &self,
        slot: Slot<M>,
        lease: Duration,
        request: Option<&str>,
    ) -> (Publication, Token<Slot<M>>) {
        let index = slot.index();
        let id = self.ids.id(index, self.puts.next_generation(index));
        let identity = Identity { instance: self.ids.instance(), id };
        let publication = slot.publication(identity, self.ids.stamp(id), self.stamps.span(index));
        let (completer, token) = Tokens::make(&self.tokens);
        let now = Instant::now();
        let since = self.ticks(now);
        let lease_ends = since.saturating_add(nanos(lease));
        let seen = Seen {
            id,
            quarantined: false,
            lease_ends,
            since,
            request: request.map_or(0, |request| self.ids.request(request)),
        };
        self.stamps.set(index, publication.stamp());
        if catch_unwind(AssertUnwindSafe(|| self.engine.publish(&publication))).is_err() {
            self.fail("the engine panicked while it published a slot");
        }
        // Before the metadata leaves, hence before anybody can know the id.
        self.puts.open(&seen, Entry { slot, completer: Some(completer), publication, ended: now });
        self.counters.puts.count();
        self.wake_notifier_by(lease_ends);
        if self.state() != State::Open {
            // A close that ran before `open` has not seen this put. The fence in `wake_notifier_by`
            // stands between the two.
            self.end_put(id, self.check_open().err().unwrap_or(Error::Closed));
        }
        (publication, token)
    }

    /// Takes in what the engine reports.
    pub(crate) fn on_event(&self, event: Event) {
        match event {
            Event::Note(note) => self.on_note(&note),
            // Puts do not name their reader: what that peer was reading of ours is quiet now, as the
            // engine says when it is asked. What we read of it cannot end well.
            Event::PeerGone(instance) => {
                let of_it = |job: &Job<M>| job.what.remote.identity.map(|own| own.instance);
                self.end_gets(
                    |job, _| of_it(job) == Some(instance),
                    || Error::peer_failed("(the sender)", "it is gone"),
                );
            }
            Event::ReaderGone(id) => {
                let died = || Error::peer_failed("(its receiver)", "it died while it was reading");
                self.end_put(id, died());
            }
        }
    }

    /// Ends a put of ours with an error, if it is open.
    pub(crate) fn end_put(&self, id: TransferId, error: Error) -> bool {
        let Some(entry) = self.puts.claim(id) else { return false };
        self.end(entry, Err(error));
        true
    }

    /// Ends the open puts that `which` names; how many.
    pub(crate) fn end_puts(
        &self,
        which: impl Fn(&Seen) -> bool,
        error: impl Fn() -> Error,
    ) -> usize {
        let open = self.puts.each().filter(|seen| !seen.quarantined && which(seen));
        open.filter(|seen| self.end_put(seen.id, error())).count()
    }

    /// Asks again after each quarantined slot, and lets go of those that are quiet; how many.
    pub(crate) fn visit_quarantine(&self, now: Instant) -> usize {
        let mut let_go = 0;
        if self.puts.quarantined() == 0 || self.knows_no_slots.load(Ordering::Relaxed) {
            return let_go;
        }
        for seen in self.puts.each_quarantined() {
            let Some(entry) = self.puts.revisit(seen.id.slot) else { continue };
            let over = now.saturating_duration_since(entry.ended) >= self.times.quarantine;
            let quiet = if over {
                // An engine that cannot know: the stamp protects the reader from here on.
                self.ask(|| self.engine.cut(&entry.publication)) != Retracted::Reading
            } else {
                self.ask(|| self.engine.retract(&entry.publication)) == Retracted::Quiet
            };
            if quiet {
                if over {
                    self.counters.quarantines_cut.count();
                }
                self.let_go(entry);
                let_go += 1;
            } else {
                self.quarantine(seen.id, entry);
            }
        }
        let_go
    }

    /// Ends the tokens that wait for a quarantined slot: the relay is open no more.
    pub(crate) fn end_quarantined(&self) {
        for seen in self.puts.each().filter(|seen| seen.quarantined) {
            let Some(mut entry) = self.puts.revisit(seen.id.slot) else { continue };
            let completer = entry.completer.take();
            self.puts.quarantine(seen.id, entry);
            tell(completer, Err(self.check_open().err().unwrap_or(Error::Closed)));
        }
    }

    /// Lets go of every quarantined slot, for a relay that closes: unregistering ends the reads, and
    /// nobody is handed a slot of it any more.
    pub(crate) fn empty_quarantine(&self) {
        for seen in self.puts.each().filter(|seen| seen.quarantined) {
            if let Some(entry) = self.puts.revisit(seen.id.slot) {
                self.let_go(entry);
            }
        }
    }

    /// Whether that instance is this relay.
    pub(crate) fn is_own(&self, instance: Instance) -> bool {
        instance == self.ids.instance()
    }

    fn on_note(&self, note: &Notification) {
        let Some(id) = self.own_id(note.name()) else {
            return self.counters.notes_unknown.count();
        };
        let outcome = match note.note() {
            Note::Complete => Ok(()),
            Note::Failed => Err(Error::peer_failed(
                "(its receiver)",
                match note.reason() {
                    Some(kind) => format!("it said that it gave up: its get was {kind}"),
                    None => "it said that it gave up".to_owned(),
                },
            )),
            Note::Other(_) => return self.counters.notes_unknown.count(),
        };
        match self.puts.claim(id) {
            Some(entry) => {
                self.counters.notes_taken.count();
                self.end(entry, outcome);
            }
            // A generation that this slot has not reached was never handed out.
            None if self.puts.next_generation(id.slot).wrapping_sub(id.generation) as i32 <= 0 => {
                self.counters.notes_unknown.count();
            }
            None => self.counters.notes_late.count(),
        }
    }

    /// The id in a transfer's name, if the name is one of ours.
    fn own_id(&self, name: &str) -> Option<TransferId> {
        let id = name.strip_prefix(&*self.engine_id)?.strip_prefix('_')?;
        let id: TransferId = id.parse().ok()?;
        self.puts.has(id.slot).then_some(id)
    }

    /// Ends a put that the caller has claimed.
    fn end(&self, mut entry: Entry<M>, outcome: Result<()>) {
        let slot = entry.publication.slot();
        // First the stamp, then the range: whoever still reads the bytes finds the stamp retired.
        self.stamps.retire(slot);
        let retracted = self.ask(|| self.engine.retract(&entry.publication));
        self.count_end(&outcome);
        let acknowledged = outcome.is_ok();
        if retracted == Retracted::Quiet || (retracted == Retracted::Unknown && acknowledged) {
            return match outcome {
                Ok(()) => self.let_go(entry),
                Err(error) => {
                    // The slot is free before anybody hears of it.
                    let completer = entry.completer.take();
                    self.let_go(entry);
                    tell(completer, Err(error));
                }
            };
        }
        self.counters.quarantines.count();
        tracing::debug!(slot, ?retracted, acknowledged, "a slot is quarantined: a peer reads it");
        entry.ended = Instant::now();
        let completer = if acknowledged { None } else { entry.completer.take() };
        let id = entry.publication.identity().id;
        self.quarantine(id, entry);
        self.wake_notifier_by(self.ticks(Instant::now()));
        if self.state() == State::Closed {
            // A close that ran before `quarantine` has not seen it, and nobody visits it again.
            self.empty_quarantine();
        }
        if let Err(error) = outcome {
            tell(completer, Err(error));
        }
    }

    /// What the engine says of a slot. One that panics fails the relay; whether somebody reads the slot
    /// is not known then, and nobody gets it before the relay is closed.
    fn ask(&self, engine: impl FnOnce() -> Retracted) -> Retracted {
        if self.knows_no_slots.load(Ordering::Relaxed) {
            return Retracted::Reading;
        }
        catch_unwind(AssertUnwindSafe(engine)).unwrap_or_else(|_| {
            self.knows_no_slots.store(true, Ordering::Relaxed);
            self.fail("the engine panicked when it was asked about a slot");
            Retracted::Reading
        })
    }

    fn quarantine(&self, id: TransferId, entry: Entry<M>) {
        self.puts.quarantine(id, entry);
        fence(Ordering::SeqCst);
        if self.state() != State::Open {
            // A close that ran before has not seen this one.
            self.end_quarantined();
        }
    }

    /// The slot is nobody's but ours: to the caller through the token, or free.
    fn let_go(&self, entry: Entry<M>) {
        self.puts.vacate(entry.publication.identity().id);
        match entry.completer {
            Some(completer) => completer.complete(Ok(entry.slot)),
            None => drop(entry.slot),
        }
    }

    fn count_end(&self, outcome: &Result<()>) {
        let counters = &self.counters;
        let cause = match outcome {
            Ok(()) => return counters.puts_acknowledged.count(),
            Err(Error::TimedOut) => return counters.puts_expired.count(),
            Err(Error::Aborted) => return counters.puts_aborted.count(),
            Err(Error::PeerFailed { .. }) => &counters.puts_peer_failed,
            Err(Error::Closed) => &counters.puts_closed,
            Err(_) => &counters.puts_broken,
        };
        counters.puts_failed.count();
        cause.count();
    }
}

fn tell<M: Memory>(completer: Option<Completer<Slot<M>>>, outcome: Result<Slot<M>>) {
    if let Some(completer) = completer {
        completer.complete(outcome);
    }
}
