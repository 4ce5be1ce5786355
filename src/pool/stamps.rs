//! The stamps: eight bytes a slot, in pages of their own.

use std::ptr::NonNull;

use crate::{
    error::Result,
    memory::{Host, Memory, PAIR, Purpose, Span},
    sync::atomic::{AtomicU64, Ordering},
};

/// One stamp for each slot, each on a pair of cache lines of its own.
pub(crate) struct Stamps {
    memory: Host,
    count: u32,
}

const STRIDE: usize = PAIR;
/// What a stamp holds while nothing is published.
const RETIRED: u64 = 0;

impl Stamps {
    pub(crate) fn new(count: u32) -> Result<Self> {
        let memory = Host::allocate(&(), count as usize * STRIDE, Purpose::Stamps, false)?;
        Ok(Self { memory, count })
    }

    pub(crate) fn memory(&self) -> &Host {
        &self.memory
    }

    /// Where the stamp of `slot` lies.
    pub(crate) fn span(&self, slot: u32) -> Span {
        Span { ptr: self.ptr(slot), len: size_of::<u64>() }
    }

    pub(crate) fn set(&self, slot: u32, stamp: u64) {
        // Release: the slot's bytes, which its owner wrote, come before the stamp that vouches for
        // them. The reader's side is another process's read of the bytes, then of the stamp.
        self.word(slot).store(stamp, Ordering::Release);
    }

    pub(crate) fn retire(&self, slot: u32) {
        // SeqCst: before the range is retracted and, after that, written by its next owner.
        self.word(slot).store(RETIRED, Ordering::SeqCst);
    }

    fn word(&self, slot: u32) -> &AtomicU64 {
        // SAFETY: the word is inside the mapping, which is zeroed, aligned to a page and lives as
        // long as `self`; it is only ever touched through atomics in this process.
        unsafe { AtomicU64::from_ptr(self.ptr(slot).as_ptr().cast()) }
    }

    fn ptr(&self, slot: u32) -> NonNull<u8> {
        assert!(slot < self.count, "a slot of this pool");
        // SAFETY: the memory holds `count * STRIDE` bytes.
        unsafe { self.memory.span().ptr.add(slot as usize * STRIDE) }
    }
}
