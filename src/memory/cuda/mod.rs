//! The memory of an NVIDIA device.

mod access;
mod api;
mod fence;
mod gpu;
mod staging;
mod within;

use std::{
    fmt,
    os::fd::BorrowedFd,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use self::{
    access::{Access, pointer},
    api::{Api, Fault, OUT_OF_MEMORY},
    fence::Fence,
    gpu::Gpu,
};
use super::{Device, Memory, Purpose, Span};
use crate::error::{Error, Result};

/// Memory of an NVIDIA device: one allocation for the slots of puts and one for those of gets, zeroed
/// when it is made.
///
/// What says which device is its ordinal, as the driver counts those that `CUDA_VISIBLE_DEVICES`
/// leaves: `Relay::<Cuda>::with_memory(0, engine, &config)`. The driver is loaded then, and not
/// before; without one, or without such a device, that is an [`Error::Config`] of the field `memory`.
///
/// ```no_run
/// # #[cfg(feature = "embedded")]
/// # fn f() -> mooncake_relay::Result<()> {
/// # use std::sync::Arc;
/// use mooncake_relay::{Config, Cuda, EmbeddedEngine, Relay, Staging};
/// let engine = EmbeddedEngine::builder("127.0.0.1:0").staging(Staging::default()).bind()?;
/// let relay = Relay::<Cuda>::with_memory(1, Arc::new(engine), &Config::default())?;
/// assert_eq!(relay.health().device, "cuda:1");
/// # Ok(()) }
/// # #[cfg(feature = "embedded")]
/// # let _ = f;
/// ```
///
/// Each direction, slots times their size in bytes, is rounded up to 2 MiB.
///
/// Device memory is never swapped out, so that [`Config::lock_memory`](crate::Config::lock_memory)
/// asks for nothing there; and its pages are the driver's: [`HugePages::Require`](crate::HugePages)
/// is refused, and `Prefer` means nothing.
pub struct Cuda {
    gpu: Arc<Gpu>,
    access: Arc<Access>,
    span: Span,
    /// A copy of it may never end: it is left to itself.
    kept: AtomicBool,
}

/// The driver shares whole blocks of this size with another process that is told of an allocation:
/// nobody else's bytes are to lie in ours.
const BLOCK: usize = 2 << 20;

impl Memory for Cuda {
    type Options = usize;
    type Fence = Fence;

    const HOST: bool = false;

    fn device(&self) -> String {
        self.access.location().to_owned()
    }

    fn device_id(&self) -> i64 {
        self.gpu.ordinal() as i64
    }

    fn allocate(ordinal: &usize, len: usize, purpose: Purpose, _huge: bool) -> Result<Self> {
        let gpu = Gpu::open(*ordinal)?;
        let field = match purpose {
            Purpose::Receive => "receive_credits",
            Purpose::Published | Purpose::Stamps => "slot_size",
        };
        let too_much = || Error::config(field, format!("{len} bytes are more than any device has"));
        let all = len.max(1).checked_next_multiple_of(BLOCK).ok_or_else(too_much)?;
        let ptr = {
            let _current = gpu.enter()?;
            let mut at: CUdeviceptr = 0;
            // SAFETY: a place for the answer.
            unsafe { gpu.api().cuMemAlloc_v2(&raw mut at, all) }
                .map_err(|fault| refused(&gpu, fault, all, field))?;
            let nothing = Fault { call: "cuMemAlloc_v2", code: OUT_OF_MEMORY };
            pointer(at).ok_or_else(|| gpu.error(nothing))?
        };
        let span = Span { ptr, len: len.max(1) };
        let access = Arc::new(Access(Arc::clone(&gpu)));
        let memory = Self { gpu, access, span, kept: AtomicBool::new(false) };
        // SAFETY: so many bytes are ours, and nobody else knows of them.
        memory.gpu.run(|_, stream| unsafe {
            memory.api().cuMemsetD8Async(span.addr(), 0, all, stream)
        })?;
        Ok(memory)
    }

    fn huge(&self) -> bool {
        false
    }

    fn span(&self) -> Span {
        self.span
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn device_access(&self) -> Option<Arc<dyn Device>> {
        Some(Arc::clone(&self.access) as Arc<dyn Device>)
    }

    fn settle(&self, fence: &Fence, until: Instant) -> Result<()> {
        fence.settle(&self.gpu, until)
    }

    fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }
}

impl Cuda {
    fn api(&self) -> &'static Api {
        self.gpu.api()
    }

    /// While the value lives, this thread's calls, `cudarc`'s too, go to the device; then the thread has
    /// what it had before.
    pub(crate) fn enter(&self) -> Result<impl Drop + '_> {
        self.gpu.enter()
    }

    /// Fails unless `stream` is of this device, in the context that everybody shares.
    pub(crate) fn check_stream(&self, field: &'static str, stream: &CudaStream) -> Result<()> {
        if ptr::eq(stream.context().cu_ctx(), self.gpu.context()) {
            return Ok(());
        }
        Err(Error::config(
            field,
            format!(
                "it is not of {}, or not in its primary context: make it by CudaContext::new({})",
                self.access.location(),
                self.gpu.ordinal()
            ),
        ))
    }

    /// Fails with what `cudarc` has kept to itself, of calls that could not say it.
    pub(crate) fn check_kept(&self, stream: &CudaStream) -> Result<()> {
        stream.context().check_err().map_err(|error| {
            self.gpu.error(Fault { call: "a call of cudarc's", code: error.0 as u32 })
        })
    }

    /// Copies `from` to `to`, in a slot, behind whatever is under way there; waits for it.
    pub(crate) fn fill(&self, fence: &Fence, from: &[u8], to: Span) -> Result<()> {
        debug_assert_eq!(from.len(), to.len, "the caller has compared them");
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: `to` is a part of our memory, and the slot's owner's; it is over when this returns.
        fence.run(&self.gpu, |stream| unsafe {
            self.api().cuMemcpyHtoDAsync_v2(to.addr(), from.as_ptr().cast(), from.len(), stream)
        })
    }

    /// Copies `from`, in a slot, to `to`, behind whatever is under way there; waits for it.
    pub(crate) fn fetch(&self, fence: &Fence, from: Span, to: &mut [u8]) -> Result<()> {
        debug_assert_eq!(from.len, to.len(), "the caller has compared them");
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: `from` is a part of our memory, and the slot's owner's; it is over when this returns.
        fence.run(&self.gpu, |stream| unsafe {
            self.api().cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.addr(), to.len(), stream)
        })
    }

    /// Copies within the device, to or from a slot, behind whatever is under way there: on `stream`,
    /// and then does not wait for it, or on one of its own.
    ///
    /// # Safety
    ///
    /// Both are memory of the device, of so many bytes. The one that is not the slot's is not freed,
    /// and is written and read by nobody but in the order of `stream`; without one, until this returns.
    pub(crate) unsafe fn copy(
        &self,
        fence: &Fence,
        from: u64,
        to: u64,
        len: usize,
        stream: Option<CUstream>,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: by this function's contract.
        let copy = |stream| unsafe { self.api().cuMemcpyDtoDAsync_v2(to, from, len, stream) };
        match stream {
            Some(stream) => fence.enqueue(&self.gpu, stream, copy),
            None => fence.run(&self.gpu, copy),
        }
    }

    /// Has `stream` wait for whatever is under way in a slot.
    pub(crate) fn wait_on(&self, fence: &Fence, stream: CUstream) -> Result<()> {
        fence.wait_on(&self.gpu, stream)
    }

    /// What is on `stream` now is under way in a slot.
    pub(crate) fn record(&self, fence: &Fence, stream: CUstream) -> Result<()> {
        fence.enqueue(&self.gpu, stream, |_| Ok(()))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.kept.load(Ordering::Relaxed) || self.gpu.is_lost() {
            return tracing::error!("device memory is left: something may still use it");
        }
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: it is ours, whole; no copy of it is under way, and nobody uses it after this.
            let done = unsafe { self.api().cuMemFree_v2(self.span.addr()) };
            self.gpu.note(done);
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("device", &self.device()).field("span", &self.span).finish()
    }
}

/// Why there is no memory, and how much there is. The thread is inside.
fn refused(gpu: &Gpu, fault: Fault, len: usize, field: &'static str) -> Error {
    let error = gpu.error(fault);
    if fault.code != OUT_OF_MEMORY {
        return error;
    }
    let (mut free, mut total) = (0, 0);
    // SAFETY: places for the answers.
    let known = unsafe { gpu.api().cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    let there = match known {
        Ok(()) => format!("{free} of its {total} bytes are free"),
        Err(_) => "it does not say how many are free".to_owned(),
    };
    let reason = format!(
        "{len} bytes are asked for, and {there}: {error}. Configure fewer credits or \
                          smaller slots, or free what else is on the device"
    );
    Error::config(field, reason)
}
