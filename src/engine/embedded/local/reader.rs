//! The peers that read from us through shared memory: what they have pinned, what they say, and
//! how they go.

use std::{
    mem,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, MutexGuard, RwLock};
use tracing::{debug, warn};

use super::{
    note::{self, LONGEST, STEP},
    region::{RING, Region},
    socket,
};
use crate::{
    engine::{Instance, Notification, Publication},
    process,
    words::{self, FREE, REVOKED},
};

/// One of them.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) instance: Instance,
    region: Region,
    /// Open for as long as it lives.
    socket: OwnedFd,
    /// It may have mapped device memory, which must not be freed before its socket has ended.
    borrows: bool,
    /// How far its notes were read. Moved by whoever polls.
    head: AtomicU64,
    state: AtomicU8,
    /// What it had pinned when it went: slots and secrets.
    held: Mutex<Vec<(u32, u64)>>,
}

const HERE: u8 = 0;
/// Somebody is taking its pins away.
const PARTING: u8 = 1;
/// Its process has ended, or its relay; what it had pinned is known.
const LEFT: u8 = 2;
/// It wrote what no relay writes.
const EXPELLED: u8 = 3;

impl Reader {
    pub(super) fn new(instance: Instance, region: Region, socket: OwnedFd, borrows: bool) -> Self {
        Self {
            instance,
            region,
            socket,
            borrows,
            head: AtomicU64::new(0),
            state: AtomicU8::new(HERE),
            held: Mutex::default(),
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Sends it away: nothing of ours is there to be read any more.
    pub(super) fn dismiss(&self) {
        self.region.close();
        // Its answer is the end of the socket, once it has unmapped what it had borrowed.
        socket::say_no_more(&self.socket);
    }

    /// Whether it has ever come to read. One that has not got our answer in time, or could not use it,
    /// leaves as well, and its relay lives on.
    fn came(&self) -> bool {
        self.region.is_attached() || words::end(self.region.tail()) != 0
    }

    /// Up to where it has written notes that were not read.
    fn news(&self) -> Option<u64> {
        let tail = words::end(self.region.tail());
        (tail != self.head.load(Ordering::Relaxed)).then_some(tail)
    }

    /// Takes in its notes up to `tail`. What it says is copied before it is looked at.
    fn hear(
        &self,
        tail: u64,
        scratch: &mut [u8; LONGEST],
        each: &mut dyn FnMut(Notification),
    ) -> Result<(), &'static str> {
        let mut head = self.head.load(Ordering::Relaxed);
        let waiting = tail.wrapping_sub(head);
        if waiting > RING as u64 || !waiting.is_multiple_of(STEP as u64) {
            return Err("its ring cannot hold what it says that it holds");
        }
        while head != tail {
            let mut header = [0; 4];
            self.region.fill(head, &mut header);
            let size = note::size(header).ok_or("a note in its ring has no such length")?;
            let taken = size.next_multiple_of(STEP) as u64;
            if taken > tail.wrapping_sub(head) {
                return Err("a note in its ring is longer than all of it");
            }
            let record = &mut scratch[..size];
            self.region.fill(head, record);
            head = head.wrapping_add(taken);
            self.head.store(head, Ordering::Relaxed);
            words::advance(self.region.head(), head);
            // The length may have changed since; it is not looked at again.
            each(note::decode(record).ok_or("a note in its ring is malformed")?);
        }
        Ok(())
    }

    fn reads(&self, publication: &Publication) -> bool {
        let secret = publication.identity().id.random;
        let pin = self.region.pin(publication.slot());
        pin.is_some_and(|pin| words::is_secret(secret) && words::is_pinned(pin, secret))
    }

    fn revoke(&self, publication: &Publication) {
        let secret = publication.identity().id.random;
        if words::is_secret(secret)
            && let Some(pin) = self.region.pin(publication.slot())
            && words::revoke(pin, secret)
        {
            debug!(slot = publication.slot(), "a pin was revoked: its quarantine is over");
        }
    }

    /// Revokes whatever it has pinned, and says what that was.
    fn revoke_all(&self) -> Vec<(u32, u64)> {
        let pins = (0..self.region.slots()).filter_map(|slot| {
            let pin = self.region.pin(slot)?;
            let secret = pin.load(Ordering::Relaxed);
            let revoked = secret != FREE && secret != REVOKED && words::revoke(pin, secret);
            revoked.then_some((slot, secret))
        });
        pins.collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if process::is_here() {
            socket::shut(&self.socket);
        }
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Readers {
    list: RwLock<Arc<[Arc<Reader>]>>,
    /// Counts the changes of the list.
    changes: AtomicU64,
    /// Somebody in the list is not here any more.
    leaving: AtomicBool,
    poller: Mutex<Poller>,
}

/// What one look at the readers needs, kept from look to look.
#[derive(Debug)]
struct Poller {
    changes: u64,
    list: Arc<[Arc<Reader>]>,
    news: Vec<(usize, u64)>,
    scratch: Box<[u8; LONGEST]>,
}

/// What a reader's end means.
#[derive(Debug)]
pub(in crate::engine::embedded) enum Heard {
    Note(Notification),
    /// It is gone, and had pinned these slots, by these secrets. No instance: it never came to read,
    /// so that its relay may live.
    Gone(Option<Instance>, Vec<(u32, u64)>),
}

impl Default for Readers {
    fn default() -> Self {
        let list: Arc<[_]> = Arc::default();
        let poller = Poller {
            changes: 0,
            list: Arc::clone(&list),
            news: Vec::new(),
            scratch: Box::new([0; LONGEST]),
        };
        Self {
            list: RwLock::new(list),
            changes: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            poller: Mutex::new(poller),
        }
    }
}

impl Readers {
    pub(super) fn add(&self, reader: Arc<Reader>) {
        self.change(|list| list.push(reader));
    }

    /// Undoes `add`, for one that could not be told.
    pub(super) fn forget(&self, reader: &Arc<Reader>) {
        self.change(|list| list.retain(|one| !Arc::ptr_eq(one, reader)));
    }

    pub(super) fn count(&self) -> usize {
        self.list.read().len()
    }

    /// Whether one of them reads that put. Asked after it was taken off the shelf.
    pub(super) fn read(&self, publication: &Publication) -> bool {
        self.list.read().iter().any(|reader| reader.reads(publication))
    }

    /// Nobody reads that put any more; who was in the middle of it finds that out.
    pub(super) fn revoke(&self, publication: &Publication) {
        for reader in self.list.read().iter() {
            reader.revoke(publication);
        }
    }

    /// Nobody reads anything any more.
    pub(super) fn revoke_all(&self) {
        for reader in self.list.read().iter() {
            reader.revoke_all();
        }
    }

    /// Its socket has ended, so it has no pins; `poll` does the rest, once its last notes are read.
    pub(super) fn leave(&self, reader: &Reader) {
        self.part(reader, LEFT);
    }

    /// Forgets all of them.
    pub(super) fn clear(&self) {
        self.revoke_all();
        self.list.read().iter().for_each(|reader| reader.region.close());
        self.change(Vec::clear);
        let mut poller = self.poller.lock();
        poller.list = Arc::default();
        poller.changes = 0;
    }

    /// Begins a look: notes that are there now are handed out by [`Look::drain`]. What else was
    /// there before is to be told first, so that it keeps its order. `None`: another look is under
    /// way.
    pub(super) fn look(&self) -> Option<Look<'_>> {
        let mut poller = self.poller.try_lock()?;
        let changes = self.changes.load(Ordering::Acquire);
        if poller.changes != changes {
            poller.list = Arc::clone(&self.list.read());
            poller.changes = changes;
        }
        let Poller { list, news, .. } = &mut *poller;
        news.clear();
        let said = list.iter().enumerate();
        news.extend(said.filter_map(|(index, reader)| Some((index, reader.news()?))));
        Some(Look { readers: self, poller })
    }

    fn part(&self, reader: &Reader, how: u8) {
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        if reader.state.compare_exchange(HERE, PARTING, order.0, order.1).is_err() {
            return;
        }
        let held = reader.revoke_all();
        reader.region.close();
        if how == LEFT {
            *reader.held.lock() = held;
        }
        if how == EXPELLED && reader.borrows {
            reader.dismiss();
        } else {
            socket::shut(&reader.socket);
        }
        // Only now: whoever drains for another one's sake takes what this one held.
        reader.state.store(how, Ordering::Release);
        // Release: pairs with `drain`. Its state was changed before.
        self.leaving.store(true, Ordering::Release);
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Reader>>)) {
        let mut list = self.list.write();
        let mut next = list.to_vec();
        change(&mut next);
        *list = next.into();
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// A look at all readers, by the one who polls.
pub(in crate::engine::embedded) struct Look<'a> {
    readers: &'a Readers,
    poller: MutexGuard<'a, Poller>,
}

impl Look<'_> {
    /// Hands out what was there when the look began, and who has gone.
    pub(in crate::engine::embedded) fn drain(mut self, each: &mut dyn FnMut(Heard)) {
        let Poller { list, news, scratch, .. } = &mut *self.poller;
        for (index, tail) in news.drain(..) {
            let reader = &list[index];
            if reader.state.load(Ordering::Relaxed) == EXPELLED {
                continue;
            }
            if let Err(why) = reader.hear(tail, scratch, &mut |note| each(Heard::Note(note))) {
                self.readers.expel(reader, why);
            }
        }
        if !self.readers.leaving.load(Ordering::Relaxed) {
            return;
        }
        // An exchange, and Acquire: pairs with `part`. A store could overtake the looks below, and wipe
        // out the word of one who leaves between the two.
        self.readers.leaving.swap(false, Ordering::Acquire);
        let gone =
            |reader: &Arc<Reader>| matches!(reader.state.load(Ordering::Acquire), LEFT | EXPELLED);
        // Not the list of the look's beginning: one may have come and gone since.
        let now = Arc::clone(&self.readers.list.read());
        let parted: Vec<_> = now.iter().filter(|reader| gone(reader)).cloned().collect();
        for reader in &parted {
            if reader.state.load(Ordering::Relaxed) != LEFT {
                continue;
            }
            // Its last words are in the ring, whatever has become of it.
            let said = |note| each(Heard::Note(note));
            if let Some(tail) = reader.news()
                && let Err(why) = reader.hear(tail, scratch, &mut { said })
            {
                debug!(reader = %reader.instance, why, "the last notes of a reader are lost");
            }
            let held = mem::take(&mut *reader.held.lock());
            let came = reader.came() || !held.is_empty();
            each(Heard::Gone(came.then_some(reader.instance), held));
        }
        let is_parted = |reader: &Arc<Reader>| parted.iter().any(|one| Arc::ptr_eq(one, reader));
        self.readers.change(|list| list.retain(|reader| !is_parted(reader)));
    }
}

impl Readers {
    #[cold]
    fn expel(&self, reader: &Reader, why: &str) {
        warn!(reader = %reader.instance, why, "a reader on this host is sent back to TCP");
        self.part(reader, EXPELLED);
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn reader() -> Arc<Reader> {
        let (region, _) = Region::make(2).unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (socket, _) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        Arc::new(Reader::new(Instance::from_bytes([7; 16]), region, socket, false))
    }

    fn gone(look: Look<'_>) -> Vec<Option<Instance>> {
        let mut gone = Vec::new();
        look.drain(&mut |heard| match heard {
            Heard::Gone(instance, _) => gone.push(instance),
            Heard::Note(note) => panic!("{note:?}"),
        });
        gone
    }

    #[test]
    fn one_that_comes_and_goes_during_a_look_is_not_forgotten() {
        let (readers, reader) = (Readers::default(), reader());
        let look = readers.look().unwrap();
        reader.region.attach();
        readers.add(Arc::clone(&reader));
        readers.leave(&reader);
        let mut all = gone(look);
        all.extend(gone(readers.look().unwrap()));
        assert_eq!(all, [Some(reader.instance)]);
        assert_eq!(readers.count(), 0);
    }

    #[test]
    fn one_that_never_came_to_read_does_not_stand_for_its_relay_s_death() {
        let (readers, reader) = (Readers::default(), reader());
        readers.add(Arc::clone(&reader));
        readers.leave(&reader);
        assert_eq!(gone(readers.look().unwrap()), [None]);
        assert_eq!(readers.count(), 0);
    }
}
