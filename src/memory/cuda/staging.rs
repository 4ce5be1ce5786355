//! Pinned host memory, and the one copy that it may be in.

use std::{ptr, ptr::NonNull, sync::Arc};

use super::{
    api::{Fault, INVALID_VALUE},
    gpu::{Gpu, Lane},
};
use crate::{
    error::Result,
    memory::{Span, device::Staging},
};

/// Page-locked memory that the driver gave, with a stream of its own.
pub(super) struct Staged {
    gpu: Arc<Gpu>,
    span: Span,
    /// `None` only while it is dropped.
    lane: Option<Lane>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Quiet,
    /// A copy was begun and marked.
    Busy,
    /// A copy was begun, and nobody knows whether it is over: the memory is never freed.
    Lost,
}

/// For every context of the process.
const PORTABLE: u32 = 1;

impl Staged {
    pub(super) fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let current = gpu.enter()?;
        let lane = gpu.lane(&current)?;
        let mut at = ptr::null_mut();
        // SAFETY: a place for the answer.
        let made = unsafe { gpu.api().cuMemHostAlloc(&raw mut at, len.max(1), PORTABLE) };
        let made = made.and_then(|()| {
            NonNull::new(at.cast::<u8>())
                .ok_or(Fault { call: "cuMemHostAlloc", code: INVALID_VALUE })
        });
        match made {
            Ok(ptr) => {
                // SAFETY: the driver gave so many bytes, and nobody else has them.
                unsafe { ptr.write_bytes(0, len) };
                let gpu = Arc::clone(gpu);
                Ok(Self { gpu, span: Span { ptr, len }, lane: Some(lane), state: State::Quiet })
            }
            Err(fault) => {
                gpu.give_back(lane);
                Err(gpu.error(fault))
            }
        }
    }

    /// Begins what `copy` begins on a stream.
    fn begin(&mut self, copy: impl FnOnce(&Self, &Lane) -> Result<(), Fault>) -> Result<()> {
        let gpu = Arc::clone(&self.gpu);
        if gpu.is_lost() {
            return Err(gpu.no_end());
        }
        let current = gpu.enter()?;
        let Some(lane) = self.lane.take() else { return Ok(()) };
        let begun = match copy(self, &lane) {
            Ok(()) => gpu.mark(&current, &lane),
            Err(fault) => Err(gpu.end(&lane, fault)),
        };
        self.lane = Some(lane);
        self.state = match &begun {
            Ok(()) => State::Busy,
            Err(_) if gpu.is_lost() => State::Lost,
            Err(_) => State::Quiet,
        };
        begun
    }
}

impl Staging for Staged {
    fn span(&self) -> Span {
        self.span
    }

    unsafe fn begin_from(&mut self, from: Span) -> Result<()> {
        if from.len == 0 {
            return Ok(());
        }
        // SAFETY: by this function's contract; nobody touches the bytes here until it was waited for.
        self.begin(|own, lane| unsafe {
            own.gpu.api().cuMemcpyDtoHAsync_v2(
                own.span.ptr.as_ptr().cast(),
                from.addr(),
                from.len,
                lane.stream,
            )
        })
    }

    unsafe fn begin_to(&mut self, to: Span) -> Result<()> {
        if to.len == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        self.begin(|own, lane| unsafe {
            own.gpu.api().cuMemcpyHtoDAsync_v2(
                to.addr(),
                own.span.ptr.as_ptr().cast(),
                to.len,
                lane.stream,
            )
        })
    }

    fn is_done(&self) -> bool {
        match &self.lane {
            Some(lane) if self.state == State::Busy => self.gpu.is_over(lane),
            _ => true,
        }
    }

    fn wait(&mut self) -> Result<()> {
        let (State::Busy, Some(lane)) = (self.state, &self.lane) else { return Ok(()) };
        let current = self.gpu.enter_again();
        let ended = current.and_then(|current| self.gpu.wait_for(&current, lane));
        self.state = if self.gpu.is_lost() { State::Lost } else { State::Quiet };
        ended
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.wait().is_err() && self.state != State::Quiet || self.state == State::Lost {
            return tracing::error!("pinned memory is left: a copy of it may be under way");
        }
        let gpu = Arc::clone(&self.gpu);
        if let Ok(_current) = gpu.enter() {
            // SAFETY: it is ours, no copy of it is under way, and nobody uses it after this.
            let done = unsafe { gpu.api().cuMemFreeHost(self.span.ptr.as_ptr().cast()) };
            gpu.note(done);
        }
        if let Some(lane) = self.lane.take() {
            gpu.give_back(lane);
        }
    }
}
