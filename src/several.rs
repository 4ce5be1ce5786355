//! Several gets of one peer, read in a single call of the engine: their requests and their answers travel
//! together. Whatever hinders that is no failure of theirs: each is read alone then.

use std::{
    iter,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use crate::{
    core::Core,
    engine::{Filled, ReadError, RemoteBuffer},
    error::Error,
    gets::{Claim, Handle, What},
    memory::Memory,
    pool::{Loan, Slot},
    receiver::{OTHER_BUFFER, broken_engine},
};

/// How long they may take. Those that are not read by then are read alone, each until its own deadline.
const TIME: Duration = Duration::from_millis(250);

impl<M: Memory> Core<M> {
    /// Claims what may be read together with this one.
    pub(crate) fn others_like(&self, claim: &Claim<M>) -> Vec<Claim<M>> {
        let peer = &claim.what.remote.peer;
        let most = catch_unwind(AssertUnwindSafe(|| self.engine.reads_at_once(peer))).unwrap_or(1);
        if most < 2 {
            return Vec::new();
        }
        self.gets.claim_like(claim, most - 1, Instant::now() + TIME)
    }

    /// Reads what was claimed, on this thread, and tells the tokens.
    pub(crate) fn perform_many(&self, first: Claim<M>, others: Vec<Claim<M>>) {
        let until = Instant::now() + TIME;
        let (mut asked, mut reads) = (Vec::new(), Vec::new());
        let mut ended = Vec::new();
        for Claim { handle, what, slot } in iter::once(first).chain(others) {
            match slot.settle(|| what.deadline) {
                Ok(()) => {
                    let (buffer, loan) = slot.lend();
                    reads.push((RemoteBuffer::clone(&what.remote), buffer));
                    asked.push((handle, what, loan));
                }
                Err(error) => ended.push(End { handle, what, read: Err((error, Some(slot))) }),
            }
        }
        let read = catch_unwind(AssertUnwindSafe(|| self.engine.read_many(reads, until)));
        let mut outcomes = read.unwrap_or_default();
        if outcomes.len() != asked.len() {
            // Which outcome is whose cannot be told.
            outcomes.clear();
        }
        let lost = || {
            let error = broken_engine("its read_many panicked, or lost a read");
            Err(ReadError { error, buffer: None })
        };
        outcomes.resize_with(asked.len(), lost);
        // From the last on, since each that is queued again goes before all others.
        for ((handle, what, loan), outcome) in asked.into_iter().zip(outcomes).rev() {
            ended.extend(self.end_of(handle, what, loan, outcome));
        }
        ended.reverse();
        self.conclude_all(ended);
    }

    /// `None`: it is queued again.
    fn end_of(
        &self,
        handle: Handle,
        what: What,
        loan: Loan<M>,
        outcome: Result<Filled, ReadError>,
    ) -> Option<End<M>> {
        let hindered = |error: &Error| {
            matches!(error, Error::Aborted | Error::TimedOut) && what.deadline > Instant::now()
        };
        let outcome = match outcome {
            Err(ReadError { error, buffer: Some(buffer) }) if hindered(&error) => {
                // A peer that has not answered in time must not have the next turn, too.
                self.learn(&what, Some(&error));
                match loan.redeem(buffer) {
                    // The slot goes afterwards: an interrupt of this get would meet its next read.
                    Ok(_slot) if self.gets.put_back_alone(handle) => return None,
                    Ok(slot) => Err((error, Some(slot))),
                    Err(_) => Err((broken_engine(OTHER_BUFFER), None)),
                }
            }
            outcome => self.judge(&what, loan, outcome),
        };
        // Its read was asked to give way, and an engine may end that with any error. A fault of the peer's
        // shows again.
        let asked = outcome.is_err() && self.gets.is_asked(handle);
        if asked && what.deadline > Instant::now() && self.gets.put_back(handle) {
            return None;
        }
        Some(End { handle, what, read: outcome })
    }

    fn conclude_all(&self, ended: Vec<End<M>>) {
        let is_told = |end: &&End<M>| end.read.is_ok() && self.gets.is_wanted(end.handle);
        let told: Vec<_> = ended.iter().filter(is_told).map(|end| &end.what).collect();
        self.acknowledge_many(&told);
        for End { handle, what, read } in ended {
            let (read, kept) = match read {
                Ok(slot) => (Ok(slot), None),
                Err((error, kept)) => (Err(error), kept),
            };
            self.finish_get(handle, &what, read, kept);
        }
    }
}

/// How one of them ended.
struct End<M: Memory> {
    handle: Handle,
    what: What,
    read: Result<Slot<M>, (Error, Option<Slot<M>>)>,
}
