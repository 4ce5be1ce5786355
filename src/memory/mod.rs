//! Memory that a pool can be carved from.

mod copy;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod host;
mod huge;
mod limits;
mod lock;
mod stream;

use std::{os::fd::BorrowedFd, ptr::NonNull, sync::Arc, time::Instant};

#[cfg(feature = "cuda")]
pub use self::cuda::Cuda;
pub(crate) use self::huge::{CHOICES as HUGE_PAGES, check_huge};
pub(crate) use self::lock::{check_lock, lock};
pub use self::{
    copy::Copier,
    device::{Copying, CopyingWithin, Device, IpcMemory, Pinned},
    host::Host,
    huge::HugePages,
};
use crate::error::Result;

/// The size of a page.
pub(crate) const PAGE: usize = 4096;
/// Two cache lines, which processors fetch together: what different threads write lies so far apart, or
/// each would slow the other down.
pub(crate) const PAIR: usize = 128;

/// One contiguous stretch of memory, of which a relay's slots are made. Sealed: the crate knows every
/// kind, which are [`Host`] and, with the feature `cuda`, `Cuda`.
pub trait Memory: sealed::Sealed + Sized + Send + Sync + 'static {
    /// What says where the memory comes from.
    type Options: Default + Send;

    /// What is known of copies of one slot's bytes that may be under way.
    #[doc(hidden)]
    type Fence: Default + Send + Sync;

    /// Whether the processor can touch the bytes.
    #[doc(hidden)]
    const HOST: bool;

    /// What `health` calls the device: `"cpu"`, `"cuda:0"`.
    fn device(&self) -> String;

    /// The ordinal in the metadata; 0 for the host.
    fn device_id(&self) -> i64;

    /// Allocates `len` bytes, initialised and page-aligned; in huge pages or not at all if `huge`.
    #[doc(hidden)]
    fn allocate(options: &Self::Options, len: usize, purpose: Purpose, huge: bool) -> Result<Self>;

    /// Whether it is in huge pages.
    #[doc(hidden)]
    fn huge(&self) -> bool;

    /// Where it is. The same for the value's whole life.
    #[doc(hidden)]
    fn span(&self) -> Span;

    /// The file that it is, if other processes could map that.
    #[doc(hidden)]
    fn file(&self) -> Option<BorrowedFd<'_>>;

    /// How its bytes are copied, where the processor cannot touch them.
    #[doc(hidden)]
    fn device_access(&self) -> Option<Arc<dyn Device>>;

    /// Waits until no copy of that slot's bytes is under way; by `until`, or it has timed out.
    #[doc(hidden)]
    fn settle(&self, fence: &Self::Fence, until: Instant) -> Result<()>;

    /// A copy of it may be under way for ever: it is not to be freed.
    #[doc(hidden)]
    fn keep(&self);
}

/// What memory is for; on the host each is a memfd of its own.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Slots that peers read: sealed, so that nobody else can ever map them writable.
    Published,
    /// Stamps, likewise.
    Stamps,
    /// Slots that reads fill.
    Receive,
}

/// An address and a length; owns nothing.
///
/// ```
/// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-span")?;
/// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(4096))?;
/// let (a, b) = (relay.try_acquire(100)?.span(), relay.try_acquire(4096)?.span());
/// assert!(a.contains(a.addr() + 90, 10) && !a.contains(a.addr() + 90, 11));
/// assert!(a.overlaps(a) && a.addr() != 0 && b.len == 4096);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub ptr: NonNull<u8>,
    /// The number of bytes.
    pub len: usize,
}

impl Span {
    /// Where `bytes` are.
    pub(crate) fn of(bytes: &mut [u8]) -> Self {
        Self { len: bytes.len(), ptr: NonNull::from(bytes).cast() }
    }

    /// The first byte's address, as it stands in metadata.
    pub fn addr(self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    /// Whether `len` bytes at `addr` lie wholly inside.
    pub fn contains(self, addr: u64, len: usize) -> bool {
        let Some(offset) = addr.checked_sub(self.addr()) else { return false };
        let Some(room) = (self.len as u64).checked_sub(offset) else { return false };
        len as u64 <= room
    }

    /// Whether the two share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.addr(), other.addr());
        a < b.saturating_add(other.len as u64) && b < a.saturating_add(self.len as u64)
    }
}

// SAFETY: a span is two numbers; only `unsafe` code can follow the pointer.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Host {}
    #[cfg(feature = "cuda")]
    impl Sealed for super::Cuda {}

    pub trait Device {}
}
