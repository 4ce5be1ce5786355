//! One party of a transfer, as a relay would be: an engine, and the memory it serves and fills.
#![allow(unsafe_code)] // owns memory, registers it and lends it

use std::{
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::locals::Locals;
use crate::{
    Access, Engine, Error, Event, Filled, Identity, Instance, LocalBuffer, Notification,
    Publication, ReadError, RemoteBuffer, Result, Retracted, Span, Stamp, TransferId,
    memory::{Host, Memory, PAGE, Purpose},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

/// An engine that was started, with slots to publish and buffers to fill.
///
/// Dropping it ends everything in the order in which a relay does, and then checks that every
/// buffer that was lent has come back once.
pub(super) struct Side {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) instance: Instance,
    slots: Option<Host>,
    slot_size: usize,
    stamps: Option<Host>,
    generation: AtomicU32,
    locals: Arc<Locals>,
    stopped: AtomicBool,
}

impl Side {
    /// Two sides with `slots` slots of `size` bytes each.
    pub(super) fn pair(
        make: &dyn Fn() -> Arc<dyn Engine>,
        slots: u32,
        size: usize,
    ) -> (Self, Self) {
        (Self::new(make(), slots, size), Self::new(make(), slots, size))
    }

    pub(super) fn new(engine: Arc<dyn Engine>, slots: u32, size: usize) -> Self {
        let slot_size = size.next_multiple_of(PAGE);
        let (count, total) = (slots, slot_size * slots as usize);
        let memory =
            |len, purpose| Host::allocate(&(), len, purpose, false).expect("a test gets memory");
        let side = Self {
            engine,
            instance: instance(),
            slots: Some(memory(total, Purpose::Published)),
            slot_size,
            stamps: Some(memory(slots as usize * STAMP_STRIDE, Purpose::Stamps)),
            generation: AtomicU32::new(0),
            locals: Arc::new(Locals::new(slots.max(LOCALS), size)),
            stopped: AtomicBool::new(false),
        };
        side.engine.start(&side.instance).expect("a fresh engine starts");
        if let Some((slots, file)) = side.slots.as_ref().and_then(|it| Some((it, it.file()?))) {
            side.engine.backed_by(slots.span(), count, file);
        }
        for (span, access) in side.registered() {
            // SAFETY: the memory lives until `drop`, which leaks it if `unregister` fails.
            unsafe { side.engine.register(span, access) }.expect("fresh memory can be registered");
        }
        side
    }

    /// Opens `slot`, holding `bytes`, to the peers.
    pub(super) fn publish(&self, slot: u32, bytes: &[u8]) -> Publication {
        let publication = self.prepare(slot, bytes);
        self.engine.publish(&publication);
        publication
    }

    /// Everything of [`Self::publish`] except that the engine is told.
    pub(super) fn prepare(&self, slot: u32, bytes: &[u8]) -> Publication {
        assert!(bytes.len() <= self.slot_size, "a case fits its bytes in a slot");
        let span = Span { len: bytes.len(), ..self.slot(slot) };
        // SAFETY: the slot is mapped, as long as `bytes`, and published to nobody.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), span.ptr.as_ptr(), bytes.len()) };
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let id = TransferId { random: u64::from_ne_bytes(random()), slot, generation };
        let identity = Identity { instance: self.instance, id };
        let stamp = u64::from_ne_bytes(random());
        // SAFETY: both are registered by `new`, and a case writes a slot only while it is quiet.
        let publication =
            unsafe { Publication::new(slot, span, identity, stamp, self.stamp_span(slot)) };
        self.stamp_word(slot).store(publication.stamp(), Ordering::Release);
        publication
    }

    /// Ends a publication with `end`, as a relay does: the stamp first; asked until not `Reading`.
    pub(super) fn end(
        &self,
        publication: &Publication,
        end: fn(&dyn Engine, &Publication) -> Retracted,
    ) -> Retracted {
        self.retire_stamp(publication);
        loop {
            match end(&*self.engine, publication) {
                Retracted::Reading => thread::yield_now(),
                settled => return settled,
            }
        }
    }

    pub(super) fn retire_stamp(&self, publication: &Publication) {
        self.stamp_word(publication.slot()).store(0, Ordering::Release);
    }

    pub(super) fn retract(&self, publication: &Publication) -> Retracted {
        self.end(publication, |engine, publication| engine.retract(publication))
    }

    /// Overwrites what was published. For after its end.
    pub(super) fn scribble(&self, publication: &Publication) {
        let Span { ptr, len } = publication.span();
        // SAFETY: the slot is mapped; a conforming engine reads it no more, and for one that
        // cannot know, a reader that sees these bytes finds the stamp retired.
        unsafe { ptr::write_bytes(ptr.as_ptr(), SCRIBBLE, len) };
    }

    /// What the slot of a publication that has ended holds now.
    pub(super) fn contents(&self, publication: &Publication) -> Vec<u8> {
        let Span { ptr, len } = publication.span();
        let mut bytes = vec![0; len];
        // SAFETY: the slot is mapped, and nothing is served from it.
        unsafe { ptr::copy_nonoverlapping(ptr.as_ptr(), bytes.as_mut_ptr(), len) };
        bytes
    }

    /// What this side's metadata would say of a publication.
    pub(super) fn remote(&self, publication: &Publication) -> RemoteBuffer {
        let span = publication.span();
        let mut remote = RemoteBuffer::new(self.engine.session_id(), span.addr(), span.len)
            .with_identity(publication.identity());
        let ptr = publication.stamp_span().addr();
        remote.stamp = Some(Stamp { ptr, value: publication.stamp() });
        remote.local = self.engine.local();
        remote
    }

    /// Reads, and checks that the buffer that came back is the one lent, and not overrun.
    pub(super) fn read(&self, remote: &RemoteBuffer, deadline: Instant) -> Result<Filled> {
        let (index, buffer) = self.lend(remote.len);
        self.returned(index, self.engine.read(remote, buffer, deadline))
    }

    /// A buffer of `len` bytes, and its index.
    pub(super) fn lend(&self, len: usize) -> (u32, LocalBuffer) {
        self.locals.lend(len)
    }

    /// Checks the buffer that came back for the one of `index`.
    pub(super) fn returned(&self, index: u32, read: Result<Filled, ReadError>) -> Result<Filled> {
        match read {
            Ok(filled) => {
                self.locals.check(index, &filled.buffer);
                Ok(filled)
            }
            Err(ReadError { error, buffer }) => {
                if let Some(buffer) = buffer {
                    self.locals.check(index, &buffer);
                }
                Err(error)
            }
        }
    }

    /// Gets as a relay does: bytes that are proven, or an error.
    pub(super) fn get(&self, remote: &RemoteBuffer) -> Result<Vec<u8>> {
        let filled = self.read(remote, soon())?;
        let (verified, bytes) = (filled.verified, bytes_of(&filled).to_vec());
        // The stamp needs a buffer too: threads that hold one each would wait for each other.
        drop(filled);
        if !verified && remote.identity.is_some() {
            let stamp = remote.stamp.expect("the suite's remotes have a stamp");
            if self.stamp(&remote.peer, stamp.ptr)? != stamp.value {
                return Err(Error::stale(&remote.peer, "the stamp is another's"));
            }
        }
        Ok(bytes)
    }

    /// Reads the stamp at `addr`.
    pub(super) fn stamp(&self, peer: &str, addr: u64) -> Result<u64> {
        let filled = self.read(&RemoteBuffer::new(peer, addr, 8), soon())?;
        Ok(u64::from_ne_bytes(bytes_of(&filled).try_into().expect("eight bytes were asked for")))
    }

    /// Polls once.
    pub(super) fn poll(&self) -> Vec<Notification> {
        let mut notes = Vec::new();
        let polled = self.engine.poll(&mut |event| match event {
            Event::Note(note) => notes.push(note),
            Event::PeerGone(_) | Event::ReaderGone(_) => {}
        });
        polled.expect("a healthy engine can be polled");
        notes
    }

    /// Polls until `count` notes have come.
    pub(super) fn poll_until(&self, count: usize) -> Vec<Notification> {
        let mut notes = self.poll();
        let until = Instant::now() + PATIENCE;
        while notes.len() < count {
            assert!(Instant::now() < until, "only {} of {count} notes came", notes.len());
            thread::yield_now();
            notes.extend(self.poll());
        }
        notes
    }

    /// Everything of a slot's memory.
    pub(super) fn slot(&self, slot: u32) -> Span {
        let all = self.slots.as_ref().expect("it is there until the drop").span();
        part(all, slot as usize * self.slot_size, self.slot_size)
    }

    /// Unregisters the published slots; they stay mapped until the drop.
    pub(super) fn unregister_slots(&mut self) -> Host {
        let span = self.slots.as_ref().expect("it is there until the drop").span();
        self.engine.unregister(span).expect("reads under way end");
        self.slots.take().expect("it was there above")
    }

    /// Stops the engine under whoever still uses it.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.engine.stop(soon());
    }

    fn stamp_span(&self, slot: u32) -> Span {
        let all = self.stamps.as_ref().expect("it is there until the drop").span();
        part(all, slot as usize * STAMP_STRIDE, 8)
    }

    fn stamp_word(&self, slot: u32) -> &AtomicU64 {
        // SAFETY: eight mapped, aligned bytes of ours that are touched by atomics only.
        unsafe { AtomicU64::from_ptr(self.stamp_span(slot).ptr.as_ptr().cast()) }
    }

    fn registered(&self) -> Vec<(Span, Access)> {
        let published = [&self.slots, &self.stamps].into_iter().flatten();
        let mut spans: Vec<_> = published.map(|host| (host.span(), Access::Published)).collect();
        spans.push((self.locals.memory.span(), Access::Local));
        spans
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let spans = self.registered();
        let failed = spans.into_iter().filter(|(span, _)| self.engine.unregister(*span).is_err());
        let failed = failed.count();
        let was_stopped = *self.stopped.get_mut();
        self.engine.stop(soon());
        if failed > 0 {
            // The engine may still touch it.
            std::mem::forget((self.slots.take(), self.stamps.take(), Arc::clone(&self.locals)));
        }
        if !thread::panicking() {
            // An engine that was stopped first may have forgotten what it knew.
            assert!(failed == 0 || was_stopped, "what nobody reads can be unregistered");
            self.locals.check_all_back();
        }
    }
}

/// A relay's name; new each time, as engines may give it to the system.
pub(super) fn instance() -> Instance {
    Instance::from_bytes(random())
}

/// A deadline that only a hanging engine misses; within `LIMIT`.
pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// `len` bytes that differ from place to place and from seed to seed.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes
}

/// Panics unless the two are equal, without printing megabytes.
#[track_caller]
pub(super) fn assert_same(got: &[u8], expected: &[u8]) {
    if got == expected {
        return;
    }
    assert_eq!(got.len(), expected.len(), "another number of bytes arrived");
    let at = got.iter().zip(expected).position(|(got, expected)| got != expected);
    let at = at.expect("they are as long, and differ");
    panic!("byte {at} of {} is {:#x}, not {:#x}", got.len(), got[at], expected[at]);
}

pub(super) fn bytes_of(filled: &Filled) -> &[u8] {
    filled.buffer.bytes().expect("the suite lends host memory")
}

/// How long a case waits for what should be there almost at once.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

const LOCALS: u32 = 4;
const STAMP_STRIDE: usize = 64;
const SCRIBBLE: u8 = 0xff;

pub(super) fn part(all: Span, offset: usize, len: usize) -> Span {
    assert!(offset + len <= all.len, "a part is inside");
    // SAFETY: checked above.
    Span { ptr: unsafe { all.ptr.add(offset) }, len }
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    bytes
}
