//! The pool and its slots.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    ptr, slice,
    sync::Arc,
    time::{Duration, Instant},
};

use super::Credits;
use crate::{
    engine::{Lender, LocalBuffer, Publication},
    error::{Error, Result},
    identity::Identity,
    memory::{Device, Host, Memory, Purpose, Span},
    process,
    sync::atomic::{AtomicIsize, Ordering},
};

/// Memory that is registered once and lent slot by slot.
pub(crate) struct Pool<M: Memory> {
    memory: M,
    slot_size: usize,
    credits: Credits,
    /// One for each slot.
    fences: Box<[M::Fence]>,
    /// How many slots an engine keeps. Below zero for a moment when one is dropped before its loan.
    kept: AtomicIsize,
}

/// How many bytes of slots go round while one at a time is out, about what a core's own cache holds: see
/// `benches/RESULTS.md`. With fewer than `FEWEST_WARM` of them a slot is written whose lines the reader's
/// core has only just read.
const WARM: usize = 4 << 20;
const FEWEST_WARM: usize = 4;
const MOST_WARM: usize = 32;

/// How long memory that is to go waits for copies of it.
const LAST_COPIES: Duration = Duration::from_secs(5);

impl<M: Memory> Pool<M> {
    /// Allocates `credits` slots of `slot_size` bytes; the product was checked.
    pub(crate) fn new(
        options: &M::Options,
        credits: u32,
        slot_size: usize,
        purpose: Purpose,
        huge: bool,
    ) -> Result<Arc<Self>> {
        let memory = M::allocate(options, credits as usize * slot_size, purpose, huge)?;
        let fences = (0..credits).map(|_| M::Fence::default()).collect();
        let warm = (WARM / slot_size.max(1)).clamp(FEWEST_WARM, MOST_WARM) as u32;
        let (credits, kept) = (Credits::with_warm(credits, warm), AtomicIsize::new(0));
        Ok(Arc::new(Self { memory, slot_size, credits, fences, kept }))
    }

    /// How many slots an engine has kept after the call that it was lent them for.
    pub(crate) fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed).try_into().unwrap_or(0)
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    pub(crate) fn credits(&self) -> &Credits {
        &self.credits
    }

    /// How many slots there are.
    pub(crate) fn slots(&self) -> u32 {
        self.fences.len() as u32
    }

    pub(crate) fn slot_size(&self) -> usize {
        self.slot_size
    }

    /// Fails if a slot cannot hold `len` bytes: before any credit is taken.
    pub(crate) fn fits(&self, len: usize) -> Result<()> {
        if len > self.slot_size {
            return Err(Error::TooLarge { len, slot_size: self.slot_size });
        }
        Ok(())
    }

    /// The slot of a credit that the caller has taken from this pool's ring.
    pub(crate) fn slot(self: &Arc<Self>, credit: u32, len: usize) -> Slot<M> {
        debug_assert!(len <= self.slot_size, "the length was checked");
        Slot { pool: Arc::clone(self), index: credit, len }
    }

    /// A slot without waiting; `None` if all are out.
    pub(crate) fn try_slot(self: &Arc<Self>, len: usize) -> Option<Slot<M>> {
        self.credits.try_take().map(|credit| self.slot(credit, len))
    }
}

impl<M: Memory> Drop for Pool<M> {
    fn drop(&mut self) {
        if M::HOST {
            return;
        }
        // No slot is anybody's any more; what was enqueued by the last owners may not be over.
        let until = Instant::now() + LAST_COPIES;
        let settle = |fence| self.memory.settle(fence, until);
        // Asked once more: what a device does not know now, it may know then.
        let unknown =
            self.fences.iter().find_map(|fence| settle(fence).or_else(|_| settle(fence)).err());
        if let Some(error) = unknown {
            tracing::error!(%error, "a slot of a relay that is gone is still copied");
            self.memory.keep();
        }
    }
}

impl<M: Memory> Lender for Pool<M> {
    fn give_back(&self, index: u32) {
        if !process::is_here() {
            return;
        }
        // Before the slot is free, so that whoever sees it free does not see it kept.
        self.kept.fetch_sub(1, Ordering::Relaxed);
        self.credits.give_back(index);
    }

    fn is_host(&self) -> bool {
        M::HOST
    }

    fn device(&self) -> Option<Arc<dyn Device>> {
        self.memory.device_access()
    }
}

/// Exclusive use of one slot; dropping it returns the credit.
///
/// On the host it is a `[u8]` that starts page-aligned. The bytes of a fresh slot are whatever an
/// earlier transfer left there. A slot outlives its relay: the memory goes with the last of them. In a
/// forked child the memory is not there: touching it ends the child, dropping the slot does nothing.
///
/// ```
/// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-slot")?;
/// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(4096))?;
/// let mut slot = relay.try_acquire(8)?;
/// slot[..4].copy_from_slice(&1.5_f32.to_le_bytes());
/// slot.truncate(4);
/// assert_eq!((slot.len(), slot.is_empty(), slot.capacity()), (4, false, 4096));
/// assert_eq!(slot.span().addr() % 4096, 0);
/// drop(slot);
/// assert_eq!(relay.health().free, 2);
/// # Ok::<(), Error>(())
/// ```
pub struct Slot<M: Memory = Host> {
    pool: Arc<Pool<M>>,
    index: u32,
    len: usize,
}

impl<M: Memory> Slot<M> {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The most bytes it could have: the configured slot size.
    pub fn capacity(&self) -> usize {
        self.pool.slot_size
    }

    /// Shortens it to `len` bytes; does nothing if it has no more than that. What was cut off does
    /// not come back while this slot lives.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Where its bytes are: for an address to hand to another library, while you hold the slot.
    pub fn span(&self) -> Span {
        // SAFETY: the memory holds `credits * slot_size` bytes, and the index is below `credits`.
        let ptr = unsafe { self.pool.memory.span().ptr.add(self.offset()) };
        Span { ptr, len: self.len }
    }

    /// Waits until no copy of its bytes is under way: before anybody else is to see them, or to write
    /// them.
    pub(crate) fn settle(&self, until: impl FnOnce() -> Instant) -> Result<()> {
        if M::HOST {
            return Ok(());
        }
        self.pool.memory.settle(self.fence(), until())
    }

    pub(super) fn fence(&self) -> &M::Fence {
        &self.pool.fences[self.index as usize]
    }

    #[cfg(feature = "cuda")]
    pub(super) fn memory(&self) -> &M {
        &self.pool.memory
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Where it starts in the pool.
    pub(crate) fn offset(&self) -> usize {
        self.index as usize * self.pool.slot_size
    }

    pub(crate) fn is_of(&self, pool: &Arc<Pool<M>>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Describes a put of this slot, which its owner gives to the table of puts with it.
    pub(crate) fn publication(
        &self,
        identity: Identity,
        stamp: u64,
        stamp_span: Span,
    ) -> Publication {
        // SAFETY: slots and stamps are registered while the relay is open, and stamps are touched by
        // atomics only. The table owns the slot from here on, and hands it on only after the engine
        // has said that it is quiet, or cannot know.
        unsafe { Publication::new(self.index, self.span(), identity, stamp, stamp_span) }
    }

    /// Hands the slot to an engine; the loan turns what comes back into the slot again.
    pub(crate) fn lend(self) -> (LocalBuffer, Loan<M>) {
        let span = self.span();
        let slot = ManuallyDrop::new(self);
        // SAFETY: the slot is not dropped, so its reference to the pool is moved, not copied.
        let pool = unsafe { ptr::read(&raw const slot.pool) };
        let lender: Arc<dyn Lender> = Arc::<Pool<M>>::clone(&pool);
        let loan = Loan { pool: Some(pool), index: slot.index, len: slot.len };
        // SAFETY: the memory was initialised when it was made and lives as long as the pool, which
        // the buffer keeps; the credit that the slot owned is the buffer's now.
        (unsafe { LocalBuffer::new(lender, slot.index, span) }, loan)
    }
}

impl Deref for Slot<Host> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Span { ptr, len } = self.span();
        // SAFETY: initialised at allocation, and the credit makes these bytes ours.
        unsafe { slice::from_raw_parts(ptr.as_ptr(), len) }
    }
}

impl DerefMut for Slot<Host> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Span { ptr, len } = self.span();
        // SAFETY: as in `deref`, and `&mut self` makes the borrow unique.
        unsafe { slice::from_raw_parts_mut(ptr.as_ptr(), len) }
    }
}

impl<M: Memory> Drop for Slot<M> {
    fn drop(&mut self) {
        // A forked child's copy of it is nobody's slot.
        if process::is_here() {
            self.pool.credits.give_back(self.index);
        }
    }
}

impl<M: Memory> fmt::Debug for Slot<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("index", &self.index).field("len", &self.len).finish()
    }
}

/// A slot that an engine has. Dropped, the engine keeps it.
pub(crate) struct Loan<M: Memory> {
    /// `None` once it was redeemed.
    pool: Option<Arc<Pool<M>>>,
    index: u32,
    len: usize,
}

impl<M: Memory> Loan<M> {
    /// The slot again, if `buffer` is the one that was lent.
    pub(crate) fn redeem(mut self, buffer: LocalBuffer) -> Result<Slot<M>, LocalBuffer> {
        let Some(pool) = self.pool.take() else { return Err(buffer) };
        let lender: Arc<dyn Lender> = Arc::<Pool<M>>::clone(&pool);
        if !buffer.is_of(&lender, self.index) {
            self.pool = Some(pool);
            return Err(buffer);
        }
        buffer.forget();
        Ok(Slot { pool, index: self.index, len: self.len })
    }
}

impl<M: Memory> Drop for Loan<M> {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.kept.fetch_add(1, Ordering::Relaxed);
        }
    }
}
