//! What is under way in one slot: copies that were enqueued, and not waited for.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;

use super::{
    api::Fault,
    gpu::{Event, Gpu},
};
use crate::error::{Error, Result};

/// The end of the last thing that was enqueued on any stream, behind all that came before it.
#[derive(Default)]
#[allow(missing_debug_implementations, unreachable_pub, reason = "named by a hidden type only")]
pub struct Fence(Mutex<State>);

#[derive(Default)]
struct State {
    /// Made when it is first needed, and used again.
    event: Option<Event>,
    busy: Busy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Busy {
    #[default]
    Quiet,
    /// The event says when it is over.
    Marked,
    /// Something was enqueued, and nothing says when it is over.
    Unmarked,
}

/// Between two looks.
const NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_millis(1);

impl Fence {
    /// Waits until nothing is under way.
    pub(super) fn settle(&self, gpu: &Arc<Gpu>, until: Instant) -> Result<()> {
        let mut state = self.0.lock();
        let Some(event) = state.marked(gpu)? else { return Ok(()) };
        let current = gpu.enter()?;
        let begun = Instant::now();
        while !current.is_over(event.raw).map_err(|fault| gpu.error(fault))? {
            let now = Instant::now();
            if now >= until {
                return Err(Error::TimedOut);
            }
            match now - begun {
                short if short < NAP => thread::yield_now(),
                long => thread::sleep((long / 32).clamp(NAP, LONGEST_NAP).min(until - now)),
            }
        }
        state.busy = Busy::Quiet;
        Ok(())
    }

    /// Begins something on a stream of its own, behind what is under way, and waits for it.
    pub(super) fn run(
        &self,
        gpu: &Arc<Gpu>,
        begin: impl FnOnce(CUstream) -> Result<(), Fault>,
    ) -> Result<()> {
        let mut state = self.0.lock();
        let before = state.marked(gpu)?.map(|event| event.raw);
        gpu.run(|current, stream| {
            if let Some(event) = before {
                current.wait_on(stream, event)?;
            }
            begin(stream)
        })?;
        state.busy = Busy::Quiet; // it came behind everything else
        Ok(())
    }

    /// Begins something on `stream`, behind what is under way, and does not wait for it.
    pub(super) fn enqueue(
        &self,
        gpu: &Arc<Gpu>,
        stream: CUstream,
        begin: impl FnOnce(CUstream) -> Result<(), Fault>,
    ) -> Result<()> {
        let mut state = self.0.lock();
        let current = gpu.enter()?;
        if state.event.is_none() {
            state.event = Some(gpu.event(&current)?);
        }
        if let Some(event) = state.marked(gpu)? {
            current.wait_on(stream, event.raw).map_err(|fault| gpu.error(fault))?;
        }
        let Some(event) = &state.event else { return Ok(()) };
        let Err(fault) = begin(stream).and_then(|()| current.record(event.raw, stream)) else {
            state.busy = Busy::Marked;
            return Ok(());
        };
        // It may have begun, with nothing to tell its end: so it is waited for here.
        state.busy = Busy::Unmarked;
        gpu.drain(stream)?;
        state.busy = Busy::Quiet;
        Err(gpu.error(fault))
    }

    /// Has `stream` wait for what is under way.
    pub(super) fn wait_on(&self, gpu: &Arc<Gpu>, stream: CUstream) -> Result<()> {
        let state = self.0.lock();
        let Some(event) = state.marked(gpu)? else { return Ok(()) };
        let current = gpu.enter()?;
        current.wait_on(stream, event.raw).map_err(|fault| gpu.error(fault))
    }
}

impl State {
    /// The event to wait for, if there is anything to wait for. Of a device that is given up no slot is
    /// used any more: a copy that has no end may be of any.
    fn marked(&self, gpu: &Gpu) -> Result<Option<&Event>> {
        match self.busy {
            _ if gpu.is_lost() => Err(gpu.no_end()),
            Busy::Quiet => Ok(None),
            Busy::Marked => Ok(self.event.as_ref()),
            Busy::Unmarked => Err(gpu.no_end()),
        }
    }
}
