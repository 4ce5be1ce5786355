//! Transfers under way: a batch, what it fills, and who waits for it.
//!
//! Nothing ends a transfer but itself, and a batch can be freed only then. Whoever waits may give up
//! earlier: what is left is *parked*, with its buffers, and a thread of its own looks after it until
//! it is quiet. A batch keeps its engine alive.
#![allow(unsafe_code)] // calls C++ on batches

use std::{
    ffi::c_int,
    mem,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_sys::{
    BatchId, OPCODE_READ, OPCODE_WRITE, STATUS_COMPLETED, STATUS_PENDING, STATUS_TIMEOUT,
    STATUS_WAITING, SegmentId, TransferRequest,
};

use super::{
    shared::{Shared, Until},
    spans::Lease,
};
use crate::{
    engine::LocalBuffer,
    error::{Error, Result},
    memory::Span,
    wait::{Idle, NAP_LEAST, NAP_MOST, WaitStrategy},
};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// One transfer.
#[derive(Debug)]
pub(super) struct Task {
    /// The address in the peer's memory.
    pub(super) remote: u64,
    pub(super) local: Span,
    /// Goes back with the outcome, or once the transfer has ended.
    pub(super) buffer: Option<LocalBuffer>,
    /// Before it is gone the memory is not unregistered.
    _lease: Lease,
    status: Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    UnderWay,
    /// The engine's own limit has passed, and it may still be under way.
    Late,
    Ended(c_int),
}

/// How one transfer ended; without its buffer, it may still be under way.
#[derive(Debug)]
pub(super) struct Landed {
    pub(super) outcome: Result<()>,
    pub(super) buffer: Option<LocalBuffer>,
}

impl Task {
    pub(super) fn new(remote: u64, local: Span, buffer: Option<LocalBuffer>, lease: Lease) -> Self {
        Self { remote, local, buffer, _lease: lease, status: Status::UnderWay }
    }
}

/// A batch that is not freed yet. Dropping it parks it.
#[derive(Debug)]
pub(super) struct Flight(Option<Batch>);

#[derive(Debug)]
pub(super) struct Batch {
    id: BatchId,
    tasks: Vec<Task>,
    /// Why not all of it was begun.
    refused: Option<String>,
    shared: Arc<Shared>,
}

impl Flight {
    /// Submits the transfers as one batch. Blocks only where the engine must connect.
    pub(super) fn begin(
        shared: Arc<Shared>,
        segment: SegmentId,
        opcode: Opcode,
        tasks: Vec<Task>,
    ) -> Result<Self, (Error, Vec<Task>)> {
        let id = match shared.native.allocate_batch(tasks.len()) {
            Ok(id) => id,
            Err(error) => return Err((error, tasks)),
        };
        shared.counters.batches.fetch_add(1, Ordering::Relaxed);
        let request = |task: &Task| TransferRequest {
            opcode: if opcode == Opcode::Read { OPCODE_READ } else { OPCODE_WRITE },
            source: task.local.ptr.as_ptr().cast(),
            target_id: segment,
            target_offset: task.remote,
            length: task.local.len as u64,
        };
        let mut batch = Batch { id, tasks, refused: None, shared };
        let native = &batch.shared.native;
        let code = match &batch.tasks[..] {
            // SAFETY: a new batch for one transfer, whose memory is leased, and whose buffer nobody
            // touches until it has ended.
            [only] => unsafe { native.submit(id, &mut [request(only)]) },
            many => {
                let mut requests: Vec<_> = many.iter().map(request).collect();
                // SAFETY: as above, for as many.
                unsafe { native.submit(id, &mut requests) }
            }
        };
        if code != 0 {
            batch.refused = Some(batch.shared.native.why("beginning the transfer", code));
        }
        Ok(Self(Some(batch)))
    }

    /// Waits until all of it has landed, or as long as `until` allows. What has not landed by then
    /// is parked.
    pub(super) fn land(mut self, peer: &str, until: &Until<'_>) -> Vec<Landed> {
        let Some(mut batch) = self.0.take() else { return Vec::new() };
        let given_up = batch.wait(until);
        let refused = batch.refused.take();
        let quiet = batch.is_over() && batch.free();
        let mut landed = Vec::with_capacity(batch.tasks.len());
        for task in &mut batch.tasks {
            let outcome = match task.status {
                Status::Ended(STATUS_COMPLETED) if refused.is_none() => Ok(()),
                Status::Ended(_) => Err(Error::peer_failed(
                    peer,
                    refused.as_deref().unwrap_or("the transfer failed: it is gone, or refused"),
                )),
                Status::Late => Err(Error::TimedOut),
                Status::UnderWay => Err(given_up.as_ref().map_or(Error::TimedOut, Until::again)),
            };
            let ended = quiet || (refused.is_none() && matches!(task.status, Status::Ended(_)));
            landed.push(Landed { outcome, buffer: task.buffer.take_if(|_| ended) });
        }
        if !quiet {
            self.0 = Some(batch); // dropped, and so parked
        }
        landed
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some(batch) = self.0.take() {
            Shared::park(batch);
        }
    }
}

impl Batch {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Passes the time until all has ended; the error for what has not.
    fn wait(&mut self, until: &Until<'_>) -> Option<Error> {
        let shared = Arc::clone(&self.shared);
        let mut idle = Idle::new(WaitStrategy::Auto, shared.cores, &shared.grace);
        loop {
            self.look();
            if self.tasks.iter().all(|task| task.status != Status::UnderWay) {
                idle.end(true);
                return None;
            }
            if self.refused.is_some() {
                // What was begun all the same ends by itself.
                return Some(Error::TimedOut);
            }
            if idle.pause() {
                if let Err(error) = until.check() {
                    return Some(error);
                }
                let left = until.deadline().saturating_duration_since(Instant::now());
                let nap = idle.nap(NAP_LEAST, NAP_MOST);
                thread::sleep(nap.min(left)); // nothing tells when a transfer ends
            }
        }
    }

    /// Asks for the state of what has not ended.
    pub(super) fn look(&mut self) {
        let native = &self.shared.native;
        for (at, task) in self.tasks.iter_mut().enumerate() {
            if matches!(task.status, Status::Ended(_)) {
                continue;
            }
            // SAFETY: the batch is freed only after the last look.
            task.status = match unsafe { native.status(self.id, at) } {
                Ok(STATUS_WAITING | STATUS_PENDING) => Status::UnderWay,
                Ok(STATUS_TIMEOUT) => Status::Late,
                // A code: the engine does not know that transfer, so that it was never begun.
                Ok(status) | Err(status) => Status::Ended(status),
            };
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.tasks.iter().all(|task| matches!(task.status, Status::Ended(_)))
    }

    /// Frees it, if the engine agrees that all has ended.
    pub(super) fn free(&mut self) -> bool {
        // SAFETY: it is freed once: what was freed is not asked again by any caller.
        let freed = unsafe { self.shared.native.free_batch(self.id) };
        if freed {
            self.shared.counters.freed.fetch_add(1, Ordering::Relaxed);
        }
        freed
    }
}

/// The life of the thread that looks after what is parked: until there is nothing left.
pub(super) fn reap(shared: &Arc<Shared>) {
    let mut pause = Duration::from_millis(1);
    loop {
        let mut batches = {
            let mut parked = shared.parked.lock();
            if parked.batches.is_empty() {
                parked.reaping = false;
                return;
            }
            mem::take(&mut parked.batches)
        };
        let before = batches.len();
        batches.retain_mut(|batch| {
            batch.look();
            !(batch.is_over() && batch.free())
        });
        let fewer = batches.len() < before;
        shared.parked.lock().batches.append(&mut batches);
        pause = if fewer { Duration::from_millis(1) } else { (pause * 2).min(SLOWEST) };
        thread::sleep(pause); // nothing tells when a transfer ends
    }
}

const SLOWEST: Duration = Duration::from_millis(10);
