//! A copy from device memory to device memory that nobody has waited for yet.

use std::sync::Arc;

use super::gpu::{Gpu, Lane};
use crate::{
    error::Result,
    memory::{Span, device::Within},
};

/// Under way on a stream of its own, until it was waited for.
pub(super) struct CopyOnDevice {
    gpu: Arc<Gpu>,
    lane: Option<Lane>,
}

impl CopyOnDevice {
    /// # Safety
    ///
    /// As for [`Device::begin_within`](crate::memory::Device::begin_within); both are as long.
    pub(super) unsafe fn begin(gpu: &Arc<Gpu>, from: Span, to: Span) -> Result<Self> {
        let current = gpu.enter()?;
        let lane = gpu.lane(&current)?;
        // SAFETY: by this function's contract; nobody touches the bytes until it was waited for.
        let begun =
            unsafe { gpu.api().cuMemcpyDtoDAsync_v2(to.addr(), from.addr(), to.len, lane.stream) };
        let begun = match begun {
            Ok(()) => gpu.mark(&current, &lane),
            // What it may have begun before it failed is on the lane.
            Err(fault) => Err(gpu.end(&lane, fault)),
        };
        match begun {
            Ok(()) => Ok(Self { gpu: Arc::clone(gpu), lane: Some(lane) }),
            Err(error) => {
                // Given up, it is left to itself.
                if !gpu.is_lost() {
                    gpu.give_back(lane);
                }
                Err(error)
            }
        }
    }
}

impl Within for CopyOnDevice {
    fn is_done(&self) -> bool {
        self.lane.as_ref().is_none_or(|lane| self.gpu.is_over(lane))
    }

    fn wait(&mut self) -> Result<()> {
        let Some(lane) = self.lane.take() else { return Ok(()) };
        let current = self.gpu.enter_again();
        let ended = current.and_then(|current| self.gpu.wait_for(&current, &lane));
        // Given up, it is left to itself.
        if !self.gpu.is_lost() {
            self.gpu.give_back(lane);
        }
        ended
    }
}

impl Drop for CopyOnDevice {
    fn drop(&mut self) {
        // Whoever drops it does not want to know.
        let _ = self.wait();
    }
}
