//! One device: its context, and copies that wait for themselves alone.

use std::{
    ffi::c_int,
    fmt, ptr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::queue::ArrayQueue;
use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUstream, CUuuid};
use parking_lot::Mutex;

use super::api::{Api, Fault, NOT_READY};
use crate::{
    error::{Error, Result},
    process,
};

/// A device that this process uses, by its primary context: the one that other libraries use too.
///
/// Whatever is of a device keeps it alive. No thread has the context unless it is inside a call.
pub(super) struct Gpu {
    api: &'static Api,
    ordinal: usize,
    device: CUdevice,
    context: CUcontext,
    location: String,
    uuid: [u8; 16],
    /// Streams that nobody uses at the moment.
    lanes: ArrayQueue<Lane>,
    /// A copy was begun, and the driver says neither that it ended nor that it did not.
    lost: AtomicBool,
}

// SAFETY: the driver's handles may be used by any thread that has their context, as each call does.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks what its calls share.
unsafe impl Sync for Gpu {}

/// A stream that waits for no other, and an event to say when what is on it has ended.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) stream: CUstream,
    event: CUevent,
}

// SAFETY: two handles; see `Gpu`.
unsafe impl Send for Lane {}
// SAFETY: as above.
unsafe impl Sync for Lane {}

/// An event of a device's, destroyed when it is dropped.
pub(super) struct Event {
    gpu: Arc<Gpu>,
    pub(super) raw: CUevent,
}

// SAFETY: a handle; see `Gpu`.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// While it lives, this thread's calls go to the device.
pub(super) struct Current<'a>(&'a Gpu);

/// How many streams are kept for the next copies.
const LANES: usize = 16;
const NON_BLOCKING: u32 = 1;
/// Whoever waits for the event sleeps; and it measures no time.
const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
/// How long a copy is watched before its thread sleeps.
const WATCH: Duration = Duration::from_micros(50);
/// How long a context that has something under way may refuse a thread.
const PATIENCE: Duration = Duration::from_secs(1);

impl Gpu {
    /// The device of that number; the same value while anybody has it.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<(usize, Weak<Gpu>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock();
        open.retain(|(_, gpu)| gpu.strong_count() > 0);
        let known = open.iter().find(|(known, _)| *known == ordinal);
        if let Some(gpu) = known.and_then(|(_, gpu)| gpu.upgrade()) {
            return Ok(gpu);
        }
        let gpu = Arc::new(Self::make(ordinal)?);
        open.push((ordinal, Arc::downgrade(&gpu)));
        Ok(gpu)
    }

    fn make(ordinal: usize) -> Result<Self> {
        let api = Api::load()?;
        let location = format!("cuda:{ordinal}");
        let fault = |fault| api.error(&location, fault);
        let mut count = 0;
        // SAFETY: a place for the answer.
        unsafe { api.cuDeviceGetCount(&raw mut count) }.map_err(fault)?;
        let number = c_int::try_from(ordinal).ok().filter(|number| *number < count);
        let Some(number) = number else {
            let there = match count {
                0 => "none".to_owned(),
                1 => "one, cuda:0".to_owned(),
                _ => format!("{count}, cuda:0 to cuda:{}", count - 1),
            };
            let reason = format!(
                "there is no device {location}: of those that are visible there is {there}"
            );
            return Err(Error::config("memory", reason));
        };
        let mut device = 0;
        // SAFETY: a place for the answer.
        unsafe { api.cuDeviceGet(&raw mut device, number) }.map_err(fault)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: a place for the answer; the device is one.
        unsafe { api.cuDeviceGetUuid_v2(&raw mut uuid, device) }.map_err(fault)?;
        let mut context = ptr::null_mut();
        // SAFETY: a place for the answer; what is retained is released when the value is dropped.
        unsafe { api.cuDevicePrimaryCtxRetain(&raw mut context, device) }.map_err(fault)?;
        Ok(Self {
            api,
            ordinal,
            device,
            context,
            uuid: uuid.bytes.map(|byte| byte as u8),
            lanes: ArrayQueue::new(LANES),
            lost: AtomicBool::new(false),
            location,
        })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    pub(super) fn context(&self) -> CUcontext {
        self.context
    }

    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn location(&self) -> &str {
        &self.location
    }

    pub(super) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Whether it is given up.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn no_end(&self) -> Error {
        Error::Device {
            device: self.location.clone(),
            call: "cuStreamSynchronize",
            reason: "a copy that was begun earlier has no end: the device is not used any more"
                .to_owned(),
        }
    }

    pub(super) fn error(&self, fault: Fault) -> Error {
        self.api.error(&self.location, fault)
    }

    /// Has this thread call the device, until the value is dropped.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        // The driver is its parent's.
        process::check()?;
        // SAFETY: the context is retained.
        unsafe { self.api.cuCtxPushCurrent_v2(self.context) }.map_err(|fault| self.error(fault))?;
        Ok(Current(self))
    }

    /// As [`enter`](Self::enter), for whoever has something under way there: a refusal tells nothing of
    /// that, so it is tried again for a while. After that the device is given up.
    pub(super) fn enter_again(&self) -> Result<Current<'_>> {
        let begun = Instant::now();
        loop {
            match self.enter() {
                Ok(current) => return Ok(current),
                Err(error) if !process::is_here() => return Err(error),
                Err(error) if begun.elapsed() >= PATIENCE => {
                    self.lost.store(true, Ordering::Relaxed);
                    tracing::error!(%error, "a copy has no end: the device is not used any more");
                    return Err(error);
                }
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// A stream of one's own for a while; the thread is inside.
    pub(super) fn lane(&self, current: &Current<'_>) -> Result<Lane> {
        if self.is_lost() {
            return Err(self.no_end());
        }
        if let Some(lane) = self.lanes.pop() {
            return Ok(lane);
        }
        let mut stream = ptr::null_mut();
        // SAFETY: a place for the answer.
        unsafe { self.api.cuStreamCreate(&raw mut stream, NON_BLOCKING) }
            .map_err(|fault| self.error(fault))?;
        match current.event() {
            Ok(event) => Ok(Lane { stream, event }),
            Err(fault) => {
                // SAFETY: it was just made, and is not used.
                let _ = unsafe { self.api.cuStreamDestroy_v2(stream) };
                Err(self.error(fault))
            }
        }
    }

    /// Gives a stream back on which nothing is under way.
    pub(super) fn give_back(&self, lane: Lane) {
        if let Err(lane) = self.lanes.push(lane)
            && let Ok(_current) = self.enter()
        {
            self.destroy(&lane);
        }
    }

    /// The thread is inside, and the lane is not used any more.
    fn destroy(&self, lane: &Lane) {
        // SAFETY: it is ours, nothing is under way on it, and nobody uses it after this.
        let event = unsafe { self.api.cuEventDestroy_v2(lane.event) };
        // SAFETY: as above.
        let stream = unsafe { self.api.cuStreamDestroy_v2(lane.stream) };
        self.note(event.and(stream));
    }

    /// What cannot be returned is told.
    pub(super) fn note(&self, done: Result<(), Fault>) {
        if let Err(fault) = done {
            tracing::warn!(error = %self.error(fault), "a device did not take something back");
        }
    }

    /// Begins something on a stream of its own, and waits for it. After an error it is over, or the
    /// device is given up.
    pub(super) fn run(
        &self,
        begin: impl FnOnce(&Current<'_>, CUstream) -> Result<(), Fault>,
    ) -> Result<()> {
        let current = self.enter()?;
        let lane = self.lane(&current)?;
        let outcome = match begin(&current, lane.stream) {
            Ok(()) => self.mark(&current, &lane).and_then(|()| self.wait_for(&current, &lane)),
            // What it may have begun before it failed is on the lane.
            Err(fault) => Err(self.end(&lane, fault)),
        };
        // Given up, it is left to itself.
        if !self.is_lost() {
            self.give_back(lane);
        }
        outcome
    }

    /// Has the lane's event say when what is on it now has ended. After an error it has.
    pub(super) fn mark(&self, current: &Current<'_>, lane: &Lane) -> Result<()> {
        let recorded = current.record(lane.event, lane.stream);
        recorded.map_err(|fault| self.end(lane, fault))
    }

    /// Waits for what was marked. After an error it is over, or the device is given up.
    pub(super) fn wait_for(&self, current: &Current<'_>, lane: &Lane) -> Result<()> {
        let begun = Instant::now();
        loop {
            match current.is_over(lane.event) {
                Ok(true) => return Ok(()),
                Ok(false) if begun.elapsed() < WATCH => thread::yield_now(),
                Ok(false) => break,
                Err(fault) => return Err(self.end(lane, fault)),
            }
        }
        // SAFETY: the event is of this context.
        let ended = unsafe { self.api.cuEventSynchronize(lane.event) };
        ended.map_err(|fault| self.end(lane, fault))
    }

    /// Whether what was marked is over, well or not.
    pub(super) fn is_over(&self, lane: &Lane) -> bool {
        // Whoever waits for it hears why it cannot be known, and gives up in the end.
        self.is_lost()
            || self.enter().map_or(true, |current| current.is_over(lane.event).unwrap_or(true))
    }

    /// After a fault: waits until nothing is under way on the lane, and says what the fault was. If that
    /// cannot be known either, the device is given up. The thread is inside.
    pub(super) fn end(&self, lane: &Lane, fault: Fault) -> Error {
        if let Err(error) = self.drain(lane.stream) {
            self.lost.store(true, Ordering::Relaxed);
            tracing::error!(%error, "a copy has no end: the device is not used any more");
        }
        self.error(fault)
    }

    /// Waits until nothing is under way on `stream`. The thread is inside.
    pub(super) fn drain(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the stream is of this context.
        unsafe { self.api.cuStreamSynchronize(stream) }.map_err(|fault| self.error(fault))
    }

    /// An event of one's own.
    pub(super) fn event(self: &Arc<Self>, current: &Current<'_>) -> Result<Event> {
        let raw = current.event().map_err(|fault| self.error(fault))?;
        Ok(Event { gpu: Arc::clone(self), raw })
    }
}

impl Current<'_> {
    fn event(&self) -> Result<CUevent, Fault> {
        let mut event = ptr::null_mut();
        // SAFETY: a place for the answer.
        unsafe { self.0.api.cuEventCreate(&raw mut event, BLOCKING_SYNC | DISABLE_TIMING) }?;
        Ok(event)
    }

    /// Has what comes on `stream` wait for what `event` was last recorded behind.
    pub(super) fn wait_on(&self, stream: CUstream, event: CUevent) -> Result<(), Fault> {
        // SAFETY: both are of this context.
        unsafe { self.0.api.cuStreamWaitEvent(stream, event, 0) }
    }

    /// Has `event` stand for what is on `stream` now.
    pub(super) fn record(&self, event: CUevent, stream: CUstream) -> Result<(), Fault> {
        // SAFETY: both are of this context.
        unsafe { self.0.api.cuEventRecord(event, stream) }
    }

    /// Whether what the event was last recorded behind has ended.
    pub(super) fn is_over(&self, event: CUevent) -> Result<bool, Fault> {
        // SAFETY: the event is of this context.
        match unsafe { self.0.api.cuEventQuery(event) } {
            Ok(()) => Ok(true),
            Err(Fault { code: NOT_READY, .. }) => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: what `enter` pushed is on top: values of this type are dropped in turn.
        let done = unsafe { self.0.api.cuCtxPopCurrent_v2(&raw mut popped) };
        self.0.note(done);
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // SAFETY: it is ours, and nobody uses it after this; what it was recorded behind goes on.
        let done = unsafe { self.gpu.api.cuEventDestroy_v2(self.raw) };
        self.gpu.note(done);
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !process::is_here() {
            return;
        }
        if let Ok(_current) = self.enter() {
            while let Some(lane) = self.lanes.pop() {
                self.destroy(&lane);
            }
        }
        // SAFETY: retained once, and nothing of it is left.
        let done = unsafe { self.api.cuDevicePrimaryCtxRelease_v2(self.device) };
        self.note(done);
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("location", &self.location).finish_non_exhaustive()
    }
}
