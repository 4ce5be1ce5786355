//! What one reader and one owner of slots share: a pin for each slot, and a ring of notes.
//!
//! ```text
//!   0     head: how far the owner has read      the owner writes it
//!   128   tail: how far the reader has written  the reader writes it
//!   136   not 0: the reader has come to read    the reader writes it
//!   256   not 0: the owner is closed             the owner writes it
//!   384   a pin for each slot, 128 bytes apart  both do: see `words`
//!   …     the ring                              the reader writes it
//! ```
//!
//! Both processes can write all of it, so neither believes what it finds: each keeps its own end of
//! the ring in its own memory, and checks the other's.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::mm::ProtFlags;

use super::page::{FIXED, Pages};
use crate::memory::{PAGE, PAIR};

/// Words that one process writes and the other reads are a pair of cache lines apart.
const LINE: usize = PAIR;
const HEAD: usize = 0;
const TAIL: usize = LINE;
const ATTACHED: usize = TAIL + 8;
const CLOSED: usize = 2 * LINE;
const PINS: usize = 3 * LINE;
/// How many bytes the ring has: about 400 of our own notes.
pub(super) const RING: usize = 64 << 10;
/// The most slots that can be pinned: what a relay has at most.
pub(super) const MOST_SLOTS: u32 = 65_536;

// The owner writes the first and the third, the reader the second and each pin.
const _: () = assert!(
    TAIL / PAIR > HEAD / PAIR
        && TAIL / PAIR == ATTACHED / PAIR
        && CLOSED / PAIR > ATTACHED / PAIR
        && PINS / PAIR > CLOSED / PAIR
        && LINE.is_multiple_of(PAIR)
);

#[derive(Debug)]
pub(super) struct Region {
    pages: Pages,
    slots: u32,
}

impl Region {
    /// A region for an owner of `slots` slots, and its memfd.
    pub(super) fn make(slots: u32) -> io::Result<(Self, OwnedFd)> {
        let (pages, fd) = Pages::make("mooncake-relay-pair", len(slots), FIXED)?;
        Ok((Self { pages, slots }, fd))
    }

    /// The region that the owner of `slots` slots, at most [`MOST_SLOTS`], has made.
    pub(super) fn of_peer(fd: BorrowedFd<'_>, slots: u32) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let pages = Pages::of_peer(fd, len(slots), FIXED, access)?;
        Ok(Self { pages, slots })
    }

    pub(super) fn head(&self) -> &AtomicU64 {
        self.pages.word(HEAD)
    }

    pub(super) fn tail(&self) -> &AtomicU64 {
        self.pages.word(TAIL)
    }

    /// The reader has mapped all of it, and its end is its relay's.
    pub(super) fn attach(&self) {
        // Relaxed: asked after the socket's end, which orders it.
        self.pages.word(ATTACHED).store(1, Ordering::Relaxed);
    }

    pub(super) fn is_attached(&self) -> bool {
        self.pages.word(ATTACHED).load(Ordering::Relaxed) != 0
    }

    /// The owner hears nothing any more, and looks at no pin.
    pub(super) fn close(&self) {
        // Release: pairs with `is_closed`. The pins were revoked before.
        self.pages.word(CLOSED).store(1, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.pages.word(CLOSED).load(Ordering::Acquire) != 0
    }

    /// The pin of `slot`; `None` beyond those there are.
    pub(super) fn pin(&self, slot: u32) -> Option<&AtomicU64> {
        (slot < self.slots).then(|| self.pages.word(PINS + slot as usize * LINE))
    }

    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    /// Writes `bytes`, at most a ring of them, at the ring's place `at`.
    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        let (offset, first) = self.place(at, bytes.len());
        self.pages.put(offset, &bytes[..first]);
        self.pages.put(ring(self.slots), &bytes[first..]);
    }

    /// Fills `dest`, at most a ring of it, from the ring's place `at`.
    pub(super) fn fill(&self, at: u64, dest: &mut [u8]) {
        let (offset, first) = self.place(at, dest.len());
        let (before, after) = dest.split_at_mut(first);
        self.pages.fill(offset, before);
        self.pages.fill(ring(self.slots), after);
    }

    /// Where that is, and how many of `len` bytes lie before the ring's end.
    fn place(&self, at: u64, len: usize) -> (usize, usize) {
        let at = at as usize % RING;
        (ring(self.slots) + at, len.min(RING - at))
    }
}

fn ring(slots: u32) -> usize {
    (PINS + slots as usize * LINE).next_multiple_of(PAGE)
}

fn len(slots: u32) -> usize {
    ring(slots) + RING
}
