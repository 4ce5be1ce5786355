//! Device memory, as engines see it: how its bytes are copied, and nothing of whose device it is.

use std::{fmt, slice};

use super::Span;
use crate::error::{Error, Result};

/// A device whose memory the processor cannot touch: copies to, from and within it.
///
/// An [`Engine`](crate::Engine) is handed one for each span of device memory that a relay registers.
/// Sealed: the crate knows every kind. Any thread may call any method; none changes what context a
/// caller's thread has for longer than the call.
///
/// The copies that are methods of it have ended when they return, and wait for nothing but
/// themselves. To have several under way, use [`pinned`](Self::pinned) memory.
pub trait Device: super::sealed::Device + fmt::Debug + Send + Sync + 'static {
    /// What this process calls it: `"cuda:0"`. Another process may call it otherwise.
    fn location(&self) -> &str;

    /// What every process calls it.
    fn uuid(&self) -> [u8; 16];

    /// Copies `from` to `to`, which is as long.
    ///
    /// # Safety
    ///
    /// `from` is mapped memory of this device, and nobody writes it meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Device`]; `to` is unspecified then.
    unsafe fn copy_to_host(&self, from: Span, to: &mut [u8]) -> Result<()>;

    /// Copies `from` to `to`, which is as long.
    ///
    /// # Safety
    ///
    /// `to` is mapped memory of this device, and nobody else touches it meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Device`]; `to` is unspecified then, and is not written any more.
    unsafe fn copy_from_host(&self, from: &[u8], to: Span) -> Result<()>;

    /// Copies `from` to `to`, which is as long.
    ///
    /// # Safety
    ///
    /// `to` is mapped memory of this device that nobody else touches meanwhile. `from` is mapped
    /// memory of this or another device of this process (what [`open_ipc`](Self::open_ipc) has
    /// opened, too), does not overlap `to`, and nobody in this process writes it meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Device`]; `to` is unspecified then, and is not written any more.
    unsafe fn copy_within(&self, from: Span, to: Span) -> Result<()>;

    /// As [`copy_within`](Self::copy_within), without waiting for it where the device can do so.
    ///
    /// # Safety
    ///
    /// As there, until the copy was waited for, or dropped.
    unsafe fn begin_within(&self, from: Span, to: Span) -> CopyingWithin {
        // SAFETY: by this function's contract.
        CopyingWithin::over(unsafe { self.copy_within(from, to) })
    }

    /// `len` bytes of host memory, zeroed, that copies to and from this device go through fastest.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] where there is none to be had.
    fn pinned(&self, len: usize) -> Result<Pinned>;

    /// What has another process of this host find a pool: the whole span that
    /// [`Engine::device_memory`](crate::Engine::device_memory) was called with.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] where the system does not allow it.
    fn ipc_handle(&self, pool: Span) -> Result<[u8; 64]>;

    /// The pool of another process that a handle of its names, if it is on this device and has at
    /// least `len` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] where the system does not allow it, or the handle is not (or no more) good,
    /// or the pool is shorter.
    fn open_ipc(&self, handle: &[u8; 64], len: usize) -> Result<IpcMemory>;
}

/// Host memory that a device reaches by itself; freed when it is dropped.
///
/// A copy takes it and gives it back, as a relay's slots go: while one is under way nobody else
/// touches the bytes.
pub struct Pinned(Box<dyn Staging>);

impl Pinned {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "no device makes one"))]
    pub(crate) fn new(staging: Box<dyn Staging>) -> Self {
        Self(staging)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let Span { ptr, len } = self.0.span();
        // SAFETY: initialised when they were made, and no copy is under way: a `Copying` has this.
        unsafe { slice::from_raw_parts(ptr.as_ptr(), len) }
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let Span { ptr, len } = self.0.span();
        // SAFETY: as in `bytes`, and `&mut self` makes the borrow unique.
        unsafe { slice::from_raw_parts_mut(ptr.as_ptr(), len) }
    }

    /// Begins to copy `from` to the front, and does not wait for it.
    ///
    /// # Safety
    ///
    /// `from` is mapped memory of the device, no longer than this, and nobody writes it until the
    /// copy was waited for, or dropped.
    pub unsafe fn fill_from(mut self, from: Span) -> Copying {
        let begun = match self.fits(from) {
            // SAFETY: by this function's contract, and it fits.
            Ok(()) => unsafe { self.0.begin_from(from) },
            Err(error) => Err(error),
        };
        Copying { pinned: self, begun }
    }

    /// Begins to copy the front to `to`, as many bytes as that has, and does not wait for it.
    ///
    /// # Safety
    ///
    /// `to` is mapped memory of the device, no longer than this, and nobody else touches it until
    /// the copy was waited for, or dropped.
    pub unsafe fn send_to(mut self, to: Span) -> Copying {
        let begun = match self.fits(to) {
            // SAFETY: by this function's contract, and it fits.
            Ok(()) => unsafe { self.0.begin_to(to) },
            Err(error) => Err(error),
        };
        Copying { pinned: self, begun }
    }

    fn fits(&self, span: Span) -> Result<()> {
        let Span { len: slot_size, .. } = self.0.span();
        if span.len <= slot_size {
            return Ok(());
        }
        Err(Error::TooLarge { len: span.len, slot_size })
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.0.span().len).finish_non_exhaustive()
    }
}

/// A copy between pinned memory and a device, under way or over. Dropped, it is waited for.
#[derive(Debug)]
#[must_use]
pub struct Copying {
    pinned: Pinned,
    begun: Result<()>,
}

impl Copying {
    /// Whether it is over, or never began: then [`wait`](Self::wait) does not block.
    pub fn is_done(&self) -> bool {
        self.begun.is_err() || self.pinned.0.is_done()
    }

    /// Waits until it is over. The memory comes back in any case; after an error its bytes, or those
    /// of the device, are unspecified.
    ///
    /// # Errors
    ///
    /// [`Error::Device`]; [`Error::TooLarge`] for a span that is longer than the pinned memory.
    pub fn wait(self) -> (Pinned, Result<()>) {
        let Self { mut pinned, begun } = self;
        let ended = begun.and_then(|()| pinned.0.wait());
        (pinned, ended)
    }
}

/// A copy from device memory to device memory, under way or over. Dropped, it is waited for.
#[must_use]
pub struct CopyingWithin(Result<Option<Box<dyn Within>>>);

impl CopyingWithin {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "no device makes one"))]
    pub(crate) fn new(begun: Result<Box<dyn Within>>) -> Self {
        Self(begun.map(Some))
    }

    /// One that is over already.
    pub(crate) fn over(ended: Result<()>) -> Self {
        Self(ended.map(|()| None))
    }

    /// Whether it is over, or never began: then [`wait`](Self::wait) does not block.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Ok(Some(copy)) => copy.is_done(),
            Ok(None) | Err(_) => true,
        }
    }

    /// Waits until it is over.
    ///
    /// # Errors
    ///
    /// [`Error::Device`]; the bytes are unspecified then, and are not written any more.
    pub fn wait(self) -> Result<()> {
        match self.0? {
            Some(mut copy) => copy.wait(),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for CopyingWithin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyingWithin").field("is_done", &self.is_done()).finish()
    }
}

/// Memory of another process on a device, mapped; unmapped when it is dropped.
pub struct IpcMemory(Box<dyn Mapping>);

impl IpcMemory {
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "no device makes one"))]
    pub(crate) fn new(mapping: Box<dyn Mapping>) -> Self {
        Self(mapping)
    }

    /// Where it is. The same for the value's whole life.
    pub fn span(&self) -> Span {
        self.0.span()
    }
}

impl fmt::Debug for IpcMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IpcMemory").field(&self.span()).finish()
    }
}

/// What is behind a [`Pinned`]. Dropped, it waits for its copy and frees the memory, or leaves it
/// where that cannot be known to be over.
pub(crate) trait Staging: Send + Sync {
    /// Where it is on the host.
    fn span(&self) -> Span;

    /// # Safety
    ///
    /// As for [`Pinned::fill_from`], and it fits.
    unsafe fn begin_from(&mut self, from: Span) -> Result<()>;

    /// # Safety
    ///
    /// As for [`Pinned::send_to`], and it fits.
    unsafe fn begin_to(&mut self, to: Span) -> Result<()>;

    /// Whether what was begun is over, well or not.
    fn is_done(&self) -> bool;

    /// Waits for what was begun.
    fn wait(&mut self) -> Result<()>;
}

/// What is behind a [`CopyingWithin`]. Dropped, it waits.
pub(crate) trait Within: Send + Sync {
    /// Whether it is over, well or not.
    fn is_done(&self) -> bool;

    /// Waits for it.
    fn wait(&mut self) -> Result<()>;
}

/// What is behind an [`IpcMemory`].
pub(crate) trait Mapping: Send + Sync {
    fn span(&self) -> Span;
}
