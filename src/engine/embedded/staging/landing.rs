//! A read into one of our slots on the device.
//!
//! ```text
//!   chunk ─filled by the caller─► land: its copy begins ─► the chunk is home again, once that is over
//!   end ─► all copies are over: the buffer goes back
//!     └──► the deadline passed first: the stager keeps the buffer, and drops it when they are
//! ```
#![allow(unsafe_code)] // begins copies to the slot that it owns

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{
    Chunk, Stager,
    stager::{Berth, Flight, Kept, Pause},
};
use crate::{
    engine::{Filled, LocalBuffer, ReadError},
    error::{Error, Result},
    memory::Span,
};

/// How many copies of one read are under way at a time.
const DEPTH: usize = 2;

#[derive(Debug)]
pub(in crate::engine::embedded) struct Landing {
    flights: VecDeque<Flight>,
    buffer: LocalBuffer,
    berth: Berth,
    /// How many bytes have come.
    got: usize,
    /// A copy failed, or could not be begun.
    failed: Option<Error>,
    stager: Arc<Stager>,
}

impl Landing {
    pub(in crate::engine::embedded) fn new(stager: &Arc<Stager>, buffer: LocalBuffer) -> Self {
        let span = buffer.span();
        // A read of nothing has a place too, or it could not be ended.
        let berth = stager.berths.take(Span { len: span.len.max(1), ..span });
        let (flights, stager) = (VecDeque::new(), Arc::clone(stager));
        Self { flights, buffer, berth, got: 0, failed: None, stager }
    }

    /// The slot.
    pub(in crate::engine::embedded) fn span(&self) -> Span {
        self.buffer.span()
    }

    /// How many bytes are still to come.
    pub(in crate::engine::embedded) fn left(&self) -> usize {
        self.span().len - self.got
    }

    /// How many bytes have come.
    pub(in crate::engine::embedded) fn got(&self) -> usize {
        self.got
    }

    /// A chunk for the next bytes. `None`: none was free by `deadline`, or a copy has failed.
    pub(in crate::engine::embedded) fn chunk(&mut self, deadline: Instant) -> Option<Chunk> {
        if !self.settle_to(DEPTH - 1, deadline) || self.failed.is_some() {
            return None;
        }
        if let Some(chunk) = self.stager.incoming.try_take() {
            return Some(chunk);
        }
        // Nobody waits for a chunk who has one.
        if !self.settle(deadline) || self.failed.is_some() {
            return None;
        }
        self.stager.incoming.take(deadline)
    }

    /// The first `len` bytes of `chunk` are the next of the slot.
    pub(in crate::engine::embedded) fn land(&mut self, chunk: Chunk, len: usize) {
        let len = len.min(self.left());
        if len == 0 {
            return;
        }
        let Span { ptr, .. } = self.span();
        // SAFETY: `got` and `len` together are no more than the slot has.
        let ptr = unsafe { ptr.add(self.got) };
        self.got += len;
        // SAFETY: a part of the slot that nothing was copied to yet; the slot is the buffer's, which
        // goes nowhere until the copy was waited for.
        let moving = unsafe { chunk.send_to(Span { ptr, len }) };
        self.flights.push_back(Flight::Chunk(moving));
    }

    /// Begins to copy all of the slot from `from`, which is on a device and as long.
    ///
    /// # Safety
    ///
    /// `from` is mapped for as long as what [`end`](Self::end) is given as `with` lives.
    pub(in crate::engine::embedded) unsafe fn copy_all(&mut self, from: Span) {
        let to = self.span();
        self.got = to.len;
        // SAFETY: by this function's contract, and as in `land`.
        let copying = unsafe { self.stager.device().begin_within(from, to) };
        self.flights.push_back(Flight::Within(copying));
    }

    /// Waits until all copies are over, so that no chunk is held; false: `deadline` passed first.
    pub(in crate::engine::embedded) fn settle(&mut self, deadline: Instant) -> bool {
        self.settle_to(0, deadline)
    }

    /// Waits until no more than `most` copies are under way.
    fn settle_to(&mut self, most: usize, deadline: Instant) -> bool {
        let mut pause = Pause::default();
        while let Some(first) = self.flights.pop_front() {
            if first.is_done() {
                self.over(first);
                continue;
            }
            self.flights.push_front(first);
            if self.flights.len() <= most {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            pause.wait();
        }
        true
    }

    /// Whether a copy has failed.
    pub(in crate::engine::embedded) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// How the read ended, with `outcome` of all but the copies; by `deadline`. Whatever else the
    /// copies touch is `with`.
    pub(in crate::engine::embedded) fn end(
        mut self,
        outcome: Result<bool>,
        with: impl fmt::Debug + Send + Sync + 'static,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let settled = self.settle(deadline);
        let Self { flights, buffer, berth, failed, stager, got } = self;
        let outcome = match failed {
            Some(error) => Err(error),
            None => outcome,
        };
        if !settled {
            let error = outcome.err().unwrap_or(Error::TimedOut);
            stager.keep(Kept::new(flights, (with, berth, buffer)));
            return Err(ReadError { error, buffer: None });
        }
        match outcome {
            Ok(verified) => {
                debug_assert_eq!(got, buffer.span().len, "all of it has come");
                Ok(Filled { buffer, verified })
            }
            Err(error) => Err(ReadError { error, buffer: Some(buffer) }),
        }
    }

    /// Counts a read that went through chunks.
    pub(in crate::engine::embedded) fn count(&self) {
        self.stager.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn over(&mut self, flight: Flight) {
        if let Err(error) = flight.end() {
            self.failed.get_or_insert(error);
        }
    }
}
