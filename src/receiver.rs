//! The receiver's side: how a get is read, verified, acknowledged and completed.

use std::{
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    core::{Core, State},
    engine::{Filled, ReadError, RemoteBuffer, Stamp},
    error::{Error, Result},
    gets::{Claim, Handle, Job, Tell, What, Work},
    identity::{Note, Notification},
    memory::{Memory, Span},
    peers::Trust,
    pool::{Loan, Slot},
    token::{Token, Tokens},
    wait::deadline_after,
};

/// How long the one notification that a get waits for may take; beyond, it is retried aside.
const NOTIFY_LIMIT: Duration = Duration::from_secs(1);
/// The pause before the first retry of a notification; it doubles up to the second.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MOST: Duration = Duration::from_secs(1);
/// The pause is this many times as long as the try that failed, at least.
const SILENT_SHARE: u32 = 4;
/// How long a peer that has not answered may take to be connected to, before the gets of others have
/// their turn; it doubles with each miss up to `PROBE_MOST`.
const PROBE_FIRST: Duration = Duration::from_millis(50);
const PROBE_MOST: Duration = Duration::from_secs(1);
/// The most while no get of another peer waits: a real engine may be held up for seconds.
const PROBE_ALONE: Duration = Duration::from_secs(10);
/// How much longer a thread may take to say itself that its deadline has passed.
const EXPIRY_GRACE: Duration = Duration::from_millis(20);

impl<M: Memory> Core<M> {
    /// Queues a get.
    pub(crate) fn submit(
        &self,
        what: What,
        since: Instant,
        request: Option<Arc<str>>,
    ) -> Result<Token<Slot<M>>> {
        let (completer, token) = Tokens::make(&self.tokens);
        let deadline = self.ticks(what.deadline);
        let job = Job { what, since, request, completer: Some(completer) };
        self.gets.submit(job)?;
        self.counters.gets.count();
        // It may have failed since it was looked at, and then has nobody who would end this get.
        if self.state() == State::Failed {
            self.end_gets(|_, _| true, || self.failed());
        }
        self.wake_notifier_by(deadline);
        Ok(token)
    }

    /// Reads `remote`, which `what` shares, straight into `dest` on this thread. `what` comes back where
    /// the engine goes through slots.
    pub(crate) fn read_into(
        &self,
        remote: &RemoteBuffer,
        what: What,
        since: Instant,
        dest: &mut [u8],
    ) -> Result<Option<What>> {
        let deadline = what.deadline;
        let job = Job { what, since, request: None, completer: None };
        let entered = Entered { core: self, handle: self.gets.enter(job, Span::of(dest))? };
        let read = self.engine.read_into(remote, dest, deadline);
        // Before its end is counted and told: both happen once.
        let Some((Job { what, .. }, wanted)) = entered.leave() else { return Err(Error::Aborted) };
        if read.is_some() || !wanted {
            self.counters.gets.count();
        }
        if let Some(read) = &read {
            self.learn(&what, read.as_ref().err());
        }
        if !wanted {
            // Whoever ended it has counted it and told the sender.
            return Err(self.unwanted(&what));
        }
        let Some(read) = read else { return Ok(Some(what)) };
        match &read {
            Ok(()) => {
                self.acknowledge(&what);
                self.count_got(&what);
            }
            Err(error) => self.count_failure(&what, error),
        }
        read.map(|()| None)
    }

    /// Reads what was claimed, on this thread, and tells its token.
    pub(crate) fn perform(&self, claim: Claim<M>) {
        let Claim { handle, what, slot } = claim;
        let _span =
            tracing::debug_span!("read", peer = %what.remote.peer, len = what.remote.len).entered();
        // What an engine does with a panic is its own fault; the get's end is ours.
        let read = catch_unwind(AssertUnwindSafe(|| self.read(&what, slot)));
        let (mut read, kept) = match read {
            Ok(Ok(slot)) => (Ok(slot), None),
            Ok(Err((error, slot))) => (Err(error), slot),
            Err(_) => (Err(broken_engine("its read panicked")), None),
        };
        // An engine ends it with any error; what is the peer's doing is met again.
        if read.is_err() && self.gets.is_asked(handle) {
            if what.deadline > Instant::now() && self.gets.put_back(handle) {
                return;
            }
            read = Err(Error::TimedOut);
        }
        self.conclude(handle, &what, read, kept);
    }

    /// Ends a get that was claimed.
    fn conclude(&self, handle: Handle, what: &What, read: Result<Slot<M>>, kept: Option<Slot<M>>) {
        let wanted = self.gets.is_wanted(handle);
        if read.is_ok() && wanted {
            self.acknowledge(what);
        }
        self.finish_get(handle, what, read, kept);
    }

    /// Takes a get out that was claimed, and tells its token.
    pub(crate) fn finish_get(
        &self,
        handle: Handle,
        what: &What,
        read: Result<Slot<M>>,
        kept: Option<Slot<M>>,
    ) {
        // Whoever ended it meanwhile has told the token and the sender.
        let completer = self.gets.finish(handle).and_then(|(job, _)| job.completer);
        // Not before: an interrupt of this get would meet the next read into the same slot.
        drop(kept);
        let Some(completer) = completer else { return };
        match &read {
            Ok(_) => self.count_got(what),
            Err(error) => self.count_failure(what, error),
        }
        completer.complete(read);
    }

    /// Ends the gets that `which` names; how many.
    pub(crate) fn end_gets(
        &self,
        which: impl FnMut(&Job<M>, bool) -> bool,
        error: impl Fn() -> Error,
    ) -> usize {
        let ended = self.gets.end(which);
        let count = ended.len();
        if count > 0 {
            self.interrupt_reads();
            // A read that had not begun yet is asked again.
            self.wake_notifier_by(self.ticks(Instant::now()));
        }
        for job in ended {
            self.end_job(job, error());
        }
        count
    }

    fn end_job(&self, job: Job<M>, error: Error) {
        self.count_failure(&job.what, &error);
        if let Some(completer) = job.completer {
            completer.complete(Err(error));
        }
    }

    /// Ends the gets whose deadline has passed.
    pub(crate) fn expire_gets(&self, now: Instant) {
        let late = |job: &Job<M>, reading: bool| {
            let grace = if reading { EXPIRY_GRACE } else { Duration::ZERO };
            now.checked_duration_since(job.what.deadline).is_some_and(|late| late >= grace)
        };
        self.end_gets(late, || Error::TimedOut);
    }

    /// Asks the engine to end what it reads for gets that are over, or that are to give way.
    pub(crate) fn interrupt_reads(&self) {
        self.gets.each_to_interrupt(|span| self.engine.interrupt(span));
    }

    /// A transfer thread's life.
    pub(crate) fn work(&self) {
        loop {
            match self.gets.next() {
                Work::Read { claim, queued } => {
                    let peer = Arc::clone(&claim.what.peer);
                    let others = if queued { self.others_like(&claim) } else { Vec::new() };
                    if others.is_empty() {
                        self.perform(claim);
                    } else {
                        self.perform_many(claim, others);
                    }
                    self.gets.release(false, &peer);
                }
                Work::Probe { handle, what, slot } => {
                    // Somebody else may need it while the peer does not answer.
                    drop(slot);
                    self.attempt(handle, &what);
                    self.gets.release(true, &what.peer);
                }
                Work::Tell { tell, suspect } => {
                    let peer = Arc::clone(&tell.what.peer);
                    self.tell(tell);
                    self.gets.release(suspect, &peer);
                }
                Work::End => return,
            }
        }
    }

    /// Reads from a peer that may not answer: if it does not within a short time, its get waits again,
    /// behind the others, until its own deadline.
    fn attempt(&self, handle: Handle, what: &What) {
        match self.probe(what) {
            Ok(()) => {
                if let Some(claim) = self.gets.claim_probed(handle) {
                    self.perform(claim);
                }
            }
            Err(Error::TimedOut) if what.deadline > Instant::now() => self.gets.defer(handle),
            Err(error) => {
                if let Some(job) = self.gets.withdraw(handle) {
                    self.end_job(job, error);
                }
            }
        }
    }

    /// Whether the peer can be connected to in the time that it is given.
    fn probe(&self, what: &What) -> Result<()> {
        let RemoteBuffer { peer, len, identity, .. } = &*what.remote;
        if *len == 0 && identity.is_none() {
            return Ok(()); // nothing will be read
        }
        let most = if self.gets.others_wait(&what.peer) { PROBE_MOST } else { PROBE_ALONE };
        let given = (PROBE_FIRST * 2_u32.pow(what.peer.misses().min(8))).min(most);
        let until = what.deadline.min(Instant::now() + given);
        let probed = catch_unwind(AssertUnwindSafe(|| self.engine.connect(peer, until)))
            .unwrap_or_else(|_| Err(broken_engine("its connect panicked")));
        if let Err(error) = &probed {
            self.learn(what, Some(error));
            if matches!(error, Error::TimedOut) {
                what.peer.count_miss(given);
            }
        }
        probed
    }

    /// An error comes with the slot, unless the engine keeps it.
    fn read(&self, what: &What, slot: Slot<M>) -> Result<Slot<M>, (Error, Option<Slot<M>>)> {
        if what.deadline <= Instant::now() {
            return Err((Error::TimedOut, Some(slot)));
        }
        let remote = &what.remote;
        if remote.len == 0 && remote.identity.is_none() {
            // A Python sender's empty tensor: there is nothing to read and nothing to verify.
            return Ok(slot);
        }
        // Its last owner may have left a copy of it under way.
        if let Err(error) = slot.settle(|| what.deadline) {
            return Err((error, Some(slot)));
        }
        let (buffer, loan) = slot.lend();
        let read = self.engine.read(remote, buffer, what.deadline);
        self.judge(what, loan, read)
    }

    /// What a read's outcome is for its get.
    pub(crate) fn judge(
        &self,
        what: &What,
        loan: Loan<M>,
        read: Result<Filled, ReadError>,
    ) -> Result<Slot<M>, (Error, Option<Slot<M>>)> {
        self.learn(what, read.as_ref().err().map(|failed| &failed.error));
        let (buffer, verdict) = match read {
            Ok(Filled { buffer, verified }) => (Some(buffer), Ok(verified)),
            Err(ReadError { error, buffer }) => (buffer, Err(error)),
        };
        let Some(buffer) = buffer else {
            // The engine may still write into it, and drops it once it is quiet.
            self.counters.buffers_kept.count();
            return Err((verdict.err().unwrap_or(Error::TimedOut), None));
        };
        let slot = loan.redeem(buffer).map_err(|_| (broken_engine(OTHER_BUFFER), None))?;
        let verified = match verdict {
            Ok(verified) if verified || what.remote.identity.is_none() => Ok(()),
            Ok(_) => self.verify_stamp(what),
            Err(error) => Err(error),
        };
        match verified {
            Ok(()) => Ok(slot),
            Err(error) => Err((error, Some(slot))),
        }
    }

    /// After the bytes: the stamp still says that they are those of this put.
    fn verify_stamp(&self, what: &What) -> Result<()> {
        let remote = &what.remote;
        let Some(Stamp { ptr, value }) = remote.stamp else {
            return Err(Error::metadata("stamp", "missing, and this engine needs it to verify"));
        };
        let len = size_of::<u64>();
        let scratch = self.scratch.try_slot(len).ok_or(Error::Exhausted)?;
        let (buffer, loan) = scratch.lend();
        let peer = Arc::clone(&remote.peer);
        let stamp = RemoteBuffer { peer, ptr, len, identity: None, stamp: None, local: None };
        let filled = match self.engine.read(&stamp, buffer, what.deadline) {
            Ok(filled) => filled,
            Err(ReadError { error, buffer }) => {
                drop(buffer.map(|buffer| loan.redeem(buffer)));
                return Err(error);
            }
        };
        let slot = loan.redeem(filled.buffer).map_err(|_| broken_engine(OTHER_BUFFER))?;
        if slot[..] != value.to_le_bytes() {
            return Err(Error::stale(&remote.peer, "its stamp says that the slot moved on"));
        }
        Ok(())
    }

    /// Tells the sender that its slot was read: one try here, the rest aside.
    pub(crate) fn acknowledge(&self, what: &What) {
        let now = Instant::now();
        let limit = what.deadline.max(now + RETRY_FIRST).min(now + NOTIFY_LIMIT);
        let note = Notification::with_note(what.remote.name(), Note::Complete);
        let _span = tracing::debug_span!("notify", peer = %what.remote.peer).entered();
        if let Err(error) = self.notify_peer(&what.remote.peer, &note, limit) {
            self.owe_complete(what, now, &error);
        }
    }

    /// As [`acknowledge`](Self::acknowledge), for several gets of one peer.
    pub(crate) fn acknowledge_many(&self, whats: &[&What]) {
        let Some(peer) = whats.first().map(|what| &what.remote.peer) else { return };
        let now = Instant::now();
        let first = whats.iter().map(|what| what.deadline).min().unwrap_or(now);
        let limit = first.max(now + RETRY_FIRST).min(now + NOTIFY_LIMIT);
        let note = |what: &&What| Notification::with_note(what.remote.name(), Note::Complete);
        let notes: Vec<_> = whats.iter().map(note).collect();
        let _span = tracing::debug_span!("notify", %peer, notes = notes.len()).entered();
        let told = catch_unwind(AssertUnwindSafe(|| self.engine.notify_many(peer, &notes, limit)));
        let mut told = told.unwrap_or_default().into_iter();
        for what in whats {
            let missing = || Err(broken_engine("its notify panicked, or told nothing of a note"));
            if let Err(error) = told.next().unwrap_or_else(missing) {
                self.owe_complete(what, now, &error);
            }
        }
    }

    fn owe_complete(&self, what: &What, now: Instant, error: &Error) {
        self.counters.notes_untaken.count();
        tracing::debug!(peer = %what.remote.peer, %error, "a notification was not taken");
        let until = deadline_after(now, what.lease);
        let tell =
            Tell { what: what.clone(), note: Note::Complete, reason: None, until, attempts: 1 };
        self.owe(now + RETRY_FIRST, tell);
    }

    /// Tells the sender that its slot will not be read, without waiting for that.
    fn nack(&self, what: &What, error: &Error) {
        // A Python sender takes every notification for a success; a stale one holds nothing.
        let ours = what.remote.identity.is_some();
        if !ours || matches!(error, Error::Stale { .. } | Error::Closed) {
            return;
        }
        let now = Instant::now();
        let until = deadline_after(now, what.lease);
        let reason = Some(error.kind());
        self.owe(now, Tell { what: what.clone(), note: Note::Failed, reason, until, attempts: 0 });
    }

    fn tell(&self, mut tell: Tell) {
        let now = Instant::now();
        let note = Notification::with_note(tell.what.remote.name(), tell.note.clone())
            .because(tell.reason.unwrap_or_default());
        let peer = &tell.what.remote.peer;
        tell.attempts += 1;
        match self.notify_peer(peer, &note, now + NOTIFY_LIMIT) {
            Ok(()) => self.learn(&tell.what, None),
            // Where the peer's name is no address, no later try can reach it.
            Err(Error::Closed | Error::Metadata { .. }) => self.counters.notes_lost.count(),
            Err(_) => {
                tell.what.peer.learn(Trust::Failed);
                let pause = RETRY_FIRST * 2_u32.pow(tell.attempts.min(8));
                let end = Instant::now();
                // One that never answers takes a small part of a thread, however much it is owed.
                let due = end + pause.min(RETRY_MOST).max((end - now) * SILENT_SHARE);
                self.gets.postpone(&tell.what.peer, due);
                if due < tell.until {
                    self.owe(due, tell);
                } else {
                    self.counters.notes_lost.count();
                }
            }
        }
    }

    /// What an engine does with a panic is its own fault; the get's end is ours.
    fn notify_peer(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        catch_unwind(AssertUnwindSafe(|| self.engine.notify(peer, note, deadline)))
            .unwrap_or_else(|_| Err(broken_engine("its notify panicked")))
    }

    fn owe(&self, due: Instant, tell: Tell) {
        if !self.gets.tell(due, tell) {
            self.counters.notes_lost.count();
        }
    }

    /// Whether the peer answered, whatever it said.
    pub(crate) fn learn(&self, what: &What, error: Option<&Error>) {
        match error {
            None | Some(Error::Stale { .. } | Error::Rejected { .. }) => {
                if what.peer.learn(Trust::Good) {
                    self.gets.proven();
                }
            }
            Some(Error::PeerFailed { .. } | Error::TimedOut) => {
                what.peer.learn(Trust::Failed);
            }
            Some(_) => {}
        }
    }

    /// Why a get was ended that had no token to be told by.
    fn unwanted(&self, what: &What) -> Error {
        match self.state() {
            State::Closed => Error::Closed,
            State::Failed => self.failed(),
            State::Open if what.deadline <= Instant::now() => Error::TimedOut,
            State::Open => Error::Aborted,
        }
    }

    pub(crate) fn count_got(&self, what: &What) {
        self.counters.gets_done.count();
        self.counters.bytes_got.add(what.remote.len as u64);
        what.peer.count_done();
    }

    pub(crate) fn count_failure(&self, what: &What, error: &Error) {
        self.counters.gets_failed.count();
        what.peer.count_failure(error);
        let counters = &self.counters;
        let cause = match error {
            Error::TimedOut => &counters.gets_timed_out,
            Error::Aborted => &counters.gets_aborted,
            Error::Stale { .. } => &counters.gets_stale,
            Error::Rejected { .. } => &counters.gets_rejected,
            Error::PeerFailed { .. } => &counters.gets_peer_failed,
            Error::Closed => &counters.gets_closed,
            _ => &counters.gets_broken,
        };
        cause.count();
        tracing::debug!(peer = %what.remote.peer, %error, "a get failed");
        self.nack(what, error);
    }
}

pub(crate) const OTHER_BUFFER: &str = "it returned another buffer than the one it was lent";

#[cold]
pub(crate) fn broken_engine(did: &str) -> Error {
    Error::Engine { engine: "relay", reason: format!("the engine broke its contract: {did}") }
}

/// A get that its caller reads by itself; leaves the table when dropped.
struct Entered<'a, M: Memory> {
    core: &'a Core<M>,
    handle: Handle,
}

impl<M: Memory> Entered<'_, M> {
    /// Leaves now: the get, and whether nobody has ended it.
    fn leave(self) -> Option<(Job<M>, bool)> {
        // Not dropped as well.
        let Self { core, handle } = *ManuallyDrop::new(self);
        core.gets.finish(handle)
    }
}

impl<M: Memory> Drop for Entered<'_, M> {
    fn drop(&mut self) {
        self.core.gets.finish(self.handle);
    }
}
