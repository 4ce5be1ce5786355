//! A peer on this host whose slots we have mapped: reads, views and notes without a socket.
#![allow(unsafe_code)] // answers for views; calls nothing unsafe

use std::{
    hint, mem,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;

use super::{
    note::{self, STEP},
    page::Pages,
    region::{RING, Region},
    shelf::{Bytes, Lent, mark},
    socket,
};
use crate::{
    doorbell::Doorbell,
    engine::{Instance, Notification, RemoteBuffer, Viewed},
    error::{Error, Result},
    memory::{Copier, Span},
    process, words,
};

/// How much is copied between two looks at whether the read is still wanted.
const PIECE: usize = 16 << 20;
/// How many looks at a full ring go by between two at the clock.
const LOOKS: u32 = 64;
/// How long a full ring is watched before its writer sleeps between looks.
const WATCH: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(100);

/// Set in a lane: nobody wants the read any more.
const ENDED: u64 = 1 << 63;
/// Set in a lane: it is a view, so that whoever ends it lets go of the pin.
const VIEW: u64 = 1 << 62;
/// Set in a lane: the pin of an ended view is gone.
const LET_GO: u64 = 1 << 61;

/// One of them.
#[derive(Debug)]
pub(super) struct Source {
    /// Its session id.
    pub(super) session: Arc<str>,
    pub(super) instance: Instance,
    lent: Lent,
    region: Region,
    bell: Doorbell,
    /// For each slot, which address of ours it is read to; 0 while it is not read.
    lanes: Box<[CachePadded<AtomicU64>]>,
    gone: AtomicBool,
    /// Open for as long as it lives.
    socket: Arc<OwnedFd>,
    /// On lines of its own: other threads read meanwhile.
    writer: CachePadded<Mutex<Writer>>,
    copier: Arc<Copier>,
}

/// Our end of the ring.
#[derive(Debug, Default)]
struct Writer {
    tail: u64,
    /// How far the peer had read when we looked last.
    head: u64,
    record: Vec<u8>,
}

/// What became of a note.
#[derive(Debug)]
pub(super) enum Told {
    /// It is in the ring.
    Taken,
    /// It must go by TCP; what was told before is read.
    Elsewhere,
    /// The ring was full until the deadline.
    Full,
}

impl Source {
    pub(super) fn new(
        session: Arc<str>,
        instance: Instance,
        lent: Lent,
        region: Region,
        bell: Doorbell,
        socket: Arc<OwnedFd>,
        copier: Arc<Copier>,
    ) -> Self {
        let lanes = (0..lent.slots()).map(|_| CachePadded::default()).collect();
        let (gone, writer) = (AtomicBool::new(false), CachePadded::default());
        Self { session, instance, lent, region, bell, lanes, gone, socket, writer, copier }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn is_gone(&self) -> bool {
        // Acquire: pairs with `leave`, which comes before the peer can hear of it.
        self.gone.load(Ordering::Acquire) || self.region.is_closed()
    }

    /// Tells it that we are here to read.
    pub(super) fn attach(&self) {
        self.region.attach();
    }

    /// Whether we have left it.
    pub(super) fn was_left(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Nothing is read from it any more.
    pub(super) fn leave(&self) {
        if !process::is_here() {
            return;
        }
        // Before the socket ends: from then on the peer does not look at our pins.
        self.gone.store(true, Ordering::SeqCst);
        if self.lent.holds_device() {
            // The peer must not free what we have mapped, and does when the socket has ended: that is
            // when the last read has. Our own server's thread hears of this now.
            socket::listen_no_more(&self.socket);
        } else {
            socket::shut(&self.socket);
        }
    }

    /// By which way bytes come, `to_device` or to the host; `None`: by TCP.
    pub(super) fn way(&self, to_device: bool) -> Option<&'static str> {
        match (self.lent.bytes(), to_device) {
            (Bytes::Pages(_), false) => Some("local"),
            (Bytes::Pages(_), true) => Some("local-staged"),
            (Bytes::Device(_), true) => Some("cuda-ipc"),
            (Bytes::Device(_), false) | (Bytes::Beyond, _) => None,
        }
    }

    /// Copies `remote` to `dest`, which is as long. `None`: this read must go by TCP.
    pub(super) fn read(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        let Bytes::Pages(pages) = self.lent.bytes() else { return None };
        let hold = match self.pin(remote, dest.as_ptr().addr() as u64, 0)? {
            Ok(hold) => hold,
            Err(error) => return Some(Err(error)),
        };
        let copied = self.copy(pages, &hold, dest, deadline);
        Some(self.ended(&hold, copied))
    }

    /// Lets go of the pin of a read; the copies say `copied`.
    pub(super) fn ended(&self, hold: &Hold, copied: Result<()>) -> Result<()> {
        let whole = self.unpin(hold);
        // After the pin: it tells nothing of a peer that has stopped looking at it. Partner: the fence
        // in `retire`. If we have seen a byte that was written after it closed, we see that too.
        fence(Ordering::Acquire);
        match copied {
            _ if self.is_gone() => Err(self.failed()),
            _ if !whole => Err(self.revoked()),
            copied => copied,
        }
    }

    /// Whether one of our reads fills a part of `span`.
    pub(super) fn fills(&self, span: Span) -> bool {
        self.lanes.iter().any(|lane| is_inside(span, lane.load(Ordering::Acquire)))
    }

    /// Ends the reads and views that are inside `span`.
    pub(super) fn end(&self, span: Span) {
        for (slot, lane) in (0..).zip(&self.lanes) {
            let now = lane.load(Ordering::Acquire);
            let ended = now | ENDED;
            if !is_inside(span, now)
                || now & ENDED != 0
                || lane.compare_exchange(now, ended, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                continue;
            }
            if now & VIEW != 0 {
                if let Some(pin) = self.region.pin(slot) {
                    // The view's own secret, or the mark that it was revoked.
                    words::unpin(pin, pin.load(Ordering::Relaxed));
                }
                lane.fetch_or(LET_GO, Ordering::AcqRel);
            }
        }
    }

    /// Tells it. The note is in the peer's memory then, and the peer looks there by itself.
    pub(super) fn notify(&self, note: &Notification, deadline: Instant) -> Told {
        let Some(mut writer) = self.writer.try_lock_until(deadline) else { return Told::Full };
        let mut record = mem::take(&mut writer.record);
        record.clear();
        let fits = note::encode(note, &mut record);
        // One that does not fit goes another way, once all before it have been read.
        let needed = if fits { record.len() } else { RING };
        let mut told = self.wait_for(&mut writer, needed as u64, deadline);
        if matches!(told, Told::Taken) {
            if fits {
                self.region.put(writer.tail, &record);
                writer.tail = writer.tail.wrapping_add(record.len() as u64);
                words::advance(self.region.tail(), writer.tail);
                self.bell.ring();
            } else {
                told = Told::Elsewhere;
            }
        }
        writer.record = record;
        told
    }

    fn wait_for(&self, writer: &mut Writer, needed: u64, deadline: Instant) -> Told {
        let mut began = None;
        let mut looks = 0_u32;
        loop {
            if self.is_gone() {
                return Told::Elsewhere;
            }
            if RING as u64 - writer.tail.wrapping_sub(writer.head) >= needed {
                return Told::Taken;
            }
            let head = words::end(self.region.head());
            let waiting = writer.tail.wrapping_sub(head);
            if waiting > RING as u64 || !waiting.is_multiple_of(STEP as u64) {
                self.leave();
                return Told::Elsewhere;
            }
            if head != writer.head {
                writer.head = head;
                continue;
            }
            looks = looks.wrapping_add(1);
            if began.is_some() && !looks.is_multiple_of(LOOKS) {
                hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            if now >= deadline {
                return Told::Full;
            }
            if now.duration_since(*began.get_or_insert(now)) < WATCH {
                hint::spin_loop();
            } else {
                thread::sleep(NAP);
                looks = LOOKS - 1; // the next look is at the clock as well
            }
        }
    }

    /// Pins what `remote` names, for a read to `dest`. `None`: this read must go by TCP.
    pub(super) fn pin(&self, remote: &RemoteBuffer, dest: u64, kind: u64) -> Option<Result<Hold>> {
        let identity = remote.identity?;
        let (slot, secret) = (identity.id.slot, identity.id.random);
        let pin = self.region.pin(slot)?;
        let lane = self.lanes.get(slot as usize)?;
        if self.is_gone() || !words::is_secret(secret) {
            return None;
        }
        // Another read of ours has this slot's pin.
        lane.compare_exchange(0, dest | kind, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let hold = Hold { slot, secret, offset: 0 };
        if !words::pin(pin, self.lent.mark(slot), secret, mark(&identity)) {
            lane.store(0, Ordering::Release);
            if self.is_gone() {
                return None;
            }
            return Some(Err(Error::stale(&self.session, "the put has ended")));
        }
        let Some(offset) = self.lent.find(slot, remote.ptr, remote.len) else {
            if !self.unpin(&hold) {
                // What stands there is another put's by now.
                return Some(Err(self.revoked()));
            }
            let reason = "the range is not inside that transfer";
            return Some(Err(Error::rejected(&self.session, reason)));
        };
        Some(Ok(Hold { offset, ..hold }))
    }

    /// Whether it was pinned all the while.
    pub(super) fn unpin(&self, hold: &Hold) -> bool {
        let Some(pin) = self.region.pin(hold.slot) else { return false };
        let whole = words::unpin(pin, hold.secret);
        self.lanes[hold.slot as usize].store(0, Ordering::Release);
        whole
    }

    fn holds(&self, hold: &Hold) -> bool {
        let pin = self.region.pin(hold.slot);
        pin.is_some_and(|pin| words::holds(pin, hold.secret))
    }

    fn copy(&self, pages: &Pages, hold: &Hold, dest: &mut [u8], deadline: Instant) -> Result<()> {
        let mut offset = hold.offset;
        let many = dest.len() > PIECE;
        for piece in dest.chunks_mut(PIECE) {
            pages.fill_by(&self.copier, offset, piece);
            offset += piece.len();
            if !many {
                break;
            }
            self.goes_on(hold, deadline)?;
        }
        Ok(())
    }

    /// Whether a read that is under way is still wanted, and still has what it reads.
    pub(super) fn goes_on(&self, hold: &Hold, deadline: Instant) -> Result<()> {
        if self.lanes[hold.slot as usize].load(Ordering::Relaxed) & ENDED != 0 {
            return Err(Error::Closed);
        }
        if self.is_gone() || !self.holds(hold) {
            return Err(self.revoked());
        }
        if Instant::now() >= deadline {
            return Err(Error::TimedOut);
        }
        Ok(())
    }

    /// Whether its slots are mapped on our device.
    pub(super) fn lends_device(&self) -> bool {
        self.lent.holds_device()
    }

    pub(super) fn bytes(&self) -> &Bytes {
        self.lent.bytes()
    }

    pub(super) fn copier(&self) -> &Copier {
        &self.copier
    }

    #[cold]
    pub(super) fn failed(&self) -> Error {
        Error::peer_failed(&self.session, "it is gone: the socket that it held open has closed")
    }

    #[cold]
    pub(super) fn revoked(&self) -> Error {
        Error::stale(&self.session, "it took its slot back in the middle of the read")
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // That of a device ends when what we have mapped of it is let go of.
        if process::is_here() && !self.lent.holds_device() {
            socket::shut(&self.socket);
        }
    }
}

fn is_inside(span: Span, lane: u64) -> bool {
    let addr = lane & !(ENDED | VIEW | LET_GO);
    addr != 0 && span.contains(addr, 1)
}

/// What a read has pinned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    slot: u32,
    secret: u64,
    /// Where the bytes are in the peer's slots.
    pub(super) offset: usize,
}

/// A peer's bytes, pinned and looked at in place.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Sight {
    source: Arc<Source>,
    hold: Hold,
    span: Span,
    ended: bool,
}

impl Sight {
    /// Pins what `remote` names. `None`: it cannot be looked at in place.
    pub(super) fn of(source: &Arc<Source>, remote: &RemoteBuffer) -> Option<Result<Self>> {
        let Bytes::Pages(pages) = source.bytes() else { return None };
        // No address of anything, until it is known where the bytes are.
        let hold = match source.pin(remote, 1, VIEW)? {
            Ok(hold) => hold,
            Err(error) => return Some(Err(error)),
        };
        let span = pages.part(hold.offset, remote.len);
        // Nobody could end it before.
        source.lanes[hold.slot as usize].store(span.addr() | VIEW, Ordering::Release);
        Some(Ok(Self { source: Arc::clone(source), hold, span, ended: false }))
    }

    fn lane(&self) -> &AtomicU64 {
        &self.source.lanes[self.hold.slot as usize]
    }
}

// SAFETY: the span is a part of the source's mapping, which the source keeps; the pin, while it is
// ours, keeps the owner from writing there.
unsafe impl Viewed for Sight {
    fn span(&self) -> Span {
        self.span
    }

    fn holds(&self) -> bool {
        // In this order: the peer stops looking at pins only after it is gone.
        let pinned = self.source.holds(&self.hold);
        pinned && !self.source.is_gone() && self.lane().load(Ordering::Acquire) & ENDED == 0
    }

    fn copy_to(&self, dest: &mut [u8]) {
        let len = dest.len().min(self.span.len);
        if let Bytes::Pages(pages) = self.source.bytes() {
            pages.fill_by(self.source.copier(), self.hold.offset, &mut dest[..len]);
        }
    }

    fn end(&mut self) -> bool {
        if mem::replace(&mut self.ended, true) {
            return false;
        }
        let lane = self.lane();
        if lane.fetch_or(ENDED, Ordering::AcqRel) & ENDED == 0 {
            let held = self.source.unpin(&self.hold);
            return held && !self.source.is_gone();
        }
        // Whoever ended it is about to let go of the pin, if that has not happened yet.
        while lane.load(Ordering::Acquire) & LET_GO == 0 {
            thread::yield_now();
        }
        lane.store(0, Ordering::Release);
        false
    }
}

impl Drop for Sight {
    fn drop(&mut self) {
        if process::is_here() {
            self.end();
        }
    }
}
