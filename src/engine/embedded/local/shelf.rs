//! What this relay lends to readers on its own host, and what is published of it at this moment.
//!
//! Of each slot a line of 128 bytes says the mark of the put, or 0, and where its bytes lie. The
//! lines are in pages that only we can write.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crossbeam::utils::CachePadded;
use rustix::{fs::fstat, mm::ProtFlags};
use siphasher::sip::SipHasher24;

use super::{
    message::Answer,
    page::{OWNED, Pages},
    region::MOST_SLOTS,
    socket,
};
use crate::{
    engine::{Identity, Publication, embedded::staging::Stager},
    memory::{IpcMemory, PAGE, PAIR, Span},
    words,
};

const LINE: usize = PAIR;
const MARK: usize = 0;
const ADDR: usize = 8;
const LEN: usize = 16;

/// What stands on the shelf of a put, never 0: whoever knows its id can tell that this is it, and
/// nobody can tell the id from it. The secret is the hash's key, which it does not give away.
pub(super) fn mark(identity: &Identity) -> u64 {
    let instance = u128::from_be_bytes(identity.instance.to_bytes());
    let put = u64::from(identity.id.slot) << 32 | u64::from(identity.id.generation);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&((instance >> 64) as u64).to_le_bytes());
    bytes[8..].copy_from_slice(&put.to_le_bytes());
    SipHasher24::new_with_keys(identity.id.random, instance as u64).hash(&bytes).max(1)
}

/// Our slots.
#[derive(Debug)]
pub(super) struct Shelf {
    pub(super) span: Span,
    pub(super) slots: u32,
    pub(super) backing: Backing,
    pub(super) lines: Pages,
    pub(super) lines_fd: OwnedFd,
    /// The secret of the put that was on each line last, so that its mark need not be made again.
    secrets: Box<[CachePadded<AtomicU64>]>,
}

/// How others come by the bytes.
#[derive(Debug)]
pub(super) enum Backing {
    /// A memfd, and its own length.
    File(OwnedFd, u64),
    /// Memory of the device of that uuid, and its handle if it has one.
    Device([u8; 16], Option<[u8; 64]>),
}

impl Shelf {
    pub(super) fn of_file(span: Span, slots: u32, fd: BorrowedFd<'_>) -> io::Result<Self> {
        let file = fstat(fd)?.st_size as u64;
        Self::new(span, slots, Backing::File(fd.try_clone_to_owned()?, file))
    }

    pub(super) fn new(span: Span, slots: u32, backing: Backing) -> io::Result<Self> {
        if !(1..=MOST_SLOTS).contains(&slots) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (lines, lines_fd) = Pages::make("mooncake-relay-shelf", slots as usize * LINE, OWNED)?;
        let secrets = (0..slots).map(|_| CachePadded::default()).collect();
        Ok(Self { span, slots, backing, lines, lines_fd, secrets })
    }

    /// Puts a publication on the shelf, if it lies in our slots.
    pub(super) fn publish(&self, publication: &Publication) {
        let Span { len, .. } = publication.span();
        let addr = publication.span().addr();
        if publication.slot() < self.slots && self.span.contains(addr, len) {
            let line = publication.slot() as usize * LINE;
            let secret = &self.secrets[publication.slot() as usize];
            // Relaxed: they come before the mark, which readers look at first, and `retire` too.
            secret.store(publication.identity().id.random, Ordering::Relaxed);
            self.lines.word(line + ADDR).store(addr, Ordering::Relaxed);
            self.lines.word(line + LEN).store(len as u64, Ordering::Relaxed);
            words::publish(self.lines.word(line + MARK), mark(&publication.identity()));
        }
    }

    /// Takes it off again, if it is still there.
    pub(super) fn retire(&self, publication: &Publication) {
        if publication.slot() < self.slots {
            let word = self.lines.word(publication.slot() as usize * LINE + MARK);
            // Acquire: pairs with `publish`. Of another put's mark that one's secret is seen.
            let now = word.load(Ordering::Acquire);
            let secret = self.secrets[publication.slot() as usize].load(Ordering::Relaxed);
            let is_it = secret == publication.identity().id.random;
            words::retire(word, if is_it { now } else { mark(&publication.identity()) });
        }
    }

    /// Takes all of it off.
    pub(super) fn clear(&self) {
        for slot in 0..self.slots as usize {
            let mark = self.lines.word(slot * LINE + MARK);
            words::retire(mark, mark.load(Ordering::Relaxed));
        }
    }
}

/// A peer's slots, mapped to read where they can be.
#[derive(Debug)]
pub(super) struct Lent {
    /// Where the owner has them.
    base: u64,
    len: usize,
    slots: u32,
    bytes: Bytes,
    lines: Pages,
}

/// Where a peer's bytes are here.
#[derive(Debug)]
pub(super) enum Bytes {
    /// In the host's memory.
    Pages(Pages),
    /// On a device, mapped by the one that this relay's own slots are on.
    Device(Borrowed),
    /// Nowhere: they come by TCP.
    Beyond,
}

/// A peer's device memory, which it frees once we have let go of it: when the socket has ended.
#[derive(Debug)]
pub(super) struct Borrowed(Option<Mapped>, Weak<Stager>);

#[derive(Debug)]
struct Mapped {
    memory: IpcMemory,
    /// Ends after the mapping, whose place in this struct is before it.
    _socket: Ending,
}

#[derive(Debug)]
struct Ending(Arc<OwnedFd>);

impl Borrowed {
    pub(super) fn new(memory: IpcMemory, socket: &Arc<OwnedFd>, stager: &Arc<Stager>) -> Self {
        let mapped = Mapped { memory, _socket: Ending(Arc::clone(socket)) };
        Self(Some(mapped), Arc::downgrade(stager))
    }

    /// Where it is here.
    pub(super) fn span(&self) -> Option<Span> {
        self.0.as_ref().map(|mapped| mapped.memory.span())
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // The server's thread may be here, and a device may keep whoever unmaps waiting.
        if let (Some(mapped), Some(stager)) = (self.0.take(), self.1.upgrade()) {
            stager.drop_aside(mapped);
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        socket::shut(&self.0);
    }
}

impl Lent {
    /// `len` bytes that the owner has at `base`, in a file of `file` bytes.
    pub(super) fn of_file(
        answer: &Answer,
        file: u64,
        fd: BorrowedFd<'_>,
        lines: &OwnedFd,
    ) -> io::Result<Self> {
        let fits = answer.len <= file && isize::try_from(file).is_ok();
        let bytes = || Ok(Bytes::Pages(Pages::of_peer(fd, file as usize, OWNED, ProtFlags::READ)?));
        Self::of_peer(answer, fits, bytes, lines)
    }

    /// As many bytes that the owner has on a device; `open` maps them, if it can.
    pub(super) fn of_device(
        answer: &Answer,
        open: impl FnOnce() -> Bytes,
        lines: &OwnedFd,
    ) -> io::Result<Self> {
        Self::of_peer(answer, isize::try_from(answer.len).is_ok(), || Ok(open()), lines)
    }

    fn of_peer(
        answer: &Answer,
        fits: bool,
        bytes: impl FnOnce() -> io::Result<Bytes>,
        lines: &OwnedFd,
    ) -> io::Result<Self> {
        let Answer { base, len, slots, .. } = *answer;
        if !fits || base.checked_add(len).is_none() || !(1..=MOST_SLOTS).contains(&slots) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its slots cannot be there"));
        }
        let table = (slots as usize * LINE).next_multiple_of(PAGE);
        let lines = Pages::of_peer(lines.as_fd(), table, OWNED, ProtFlags::READ)?;
        Ok(Self { base, len: len as usize, slots, bytes: bytes()?, lines })
    }

    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    /// The mark of `slot`, which is one of [`slots`](Self::slots).
    pub(super) fn mark(&self, slot: u32) -> &AtomicU64 {
        self.lines.word(slot as usize * LINE + MARK)
    }

    /// Where `len` bytes at the owner's `addr` are here, if they are inside what is published in
    /// `slot`. Asked while that is pinned.
    pub(super) fn find(&self, slot: u32, addr: u64, len: usize) -> Option<usize> {
        let line = slot as usize * LINE;
        // Relaxed: written before the mark that the pin has seen.
        let from = self.lines.word(line + ADDR).load(Ordering::Relaxed);
        let published = self.lines.word(line + LEN).load(Ordering::Relaxed);
        let inside = |from: u64, room: u64| {
            let before = addr.checked_sub(from)?;
            (before <= room && len as u64 <= room - before).then_some(before as usize)
        };
        inside(from, published)?;
        // The owner may have written any number.
        inside(self.base, self.len as u64)
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Whether the owner must not free them before we have let go.
    pub(super) fn holds_device(&self) -> bool {
        matches!(self.bytes, Bytes::Device(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Instance, TransferId};

    #[test]
    fn a_put_is_taken_off_the_shelf_and_not_the_next_one() {
        let mut memory = [0; 64];
        let (span, file) = (Span::of(&mut memory), Pages::make("shelf", PAGE, OWNED).unwrap().1);
        let shelf = Shelf::new(span, 1, Backing::File(file, PAGE as u64)).unwrap();
        let put = |generation| Publication {
            slot: 0,
            span,
            identity: Identity {
                instance: Instance::from_bytes([7; 16]),
                id: TransferId { random: 0xfeed + u64::from(generation), slot: 0, generation },
            },
            stamp: 1,
            stamp_span: span,
        };
        let marked = || shelf.lines.word(MARK).load(Ordering::Relaxed);
        let (first, second) = (put(1), put(2));
        shelf.publish(&first);
        assert_eq!(marked(), mark(&first.identity()));
        shelf.retire(&first);
        assert_eq!(marked(), 0);
        shelf.publish(&second);
        shelf.retire(&first); // it is asked again until nobody reads it
        assert_eq!(marked(), mark(&second.identity()));
        shelf.retire(&second);
        assert_eq!(marked(), 0);
    }
}
