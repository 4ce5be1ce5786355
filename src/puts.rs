//! The table of open puts: one life a slot, found by index.
//!
//! ```text
//!            open                claim              vacate
//!   VACANT ────────► OPEN(g) ────────► HELD(g) ────────────► VACANT
//!                                         │                    ▲
//!                              quarantine ▼     revisit        │ vacate
//!                                      LIMBO(g) ──────► VISITED(g)
//!                                         ▲                │
//!                                         └── quarantine ──┘
//!
//!   state    the entry belongs to          who leaves it
//!   VACANT   nobody: there is none         the owner of the slot
//!   OPEN     the table                     whoever claims that generation: one wins
//!   HELD     the thread that claimed it    that thread
//!   LIMBO    the table                     whoever revisits it: one wins
//!   VISITED  the thread that revisited it  that thread; it is seen as in LIMBO meanwhile
//! ```
//!
//! A generation is in the word, so a late notification can never end a newer put.

use std::{iter, time::Duration};

use crate::{
    identity::TransferId,
    sync::{
        UnsafeCell,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// What can be seen of a put without owning it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which put it is.
    pub id: TransferId,
    /// Whether it has ended, and its slot is not quiet yet.
    pub quarantined: bool,
    /// When its lease ends, in nanoseconds of the table's clock.
    pub lease_ends: u64,
    /// When it was published, likewise.
    pub since: u64,
    /// The hash of its request's id, or 0.
    pub request: u64,
}

impl Seen {
    /// How long it has been under way; one that began after `now` has just begun.
    pub fn age(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.since))
    }
}

/// The lives of all slots, each with an entry of type `E` while its put is open.
#[allow(missing_debug_implementations)] // internal
pub struct Puts<E> {
    lives: Box<[Life<E>]>,
    /// How many are in LIMBO or VISITED.
    limbo: AtomicUsize,
    /// A bit for each of those, by which they are found among many. A hint: a life's word says what it
    /// is in.
    marks: Box<[AtomicU64]>,
}

/// One slot's life. On lines of its own: two slots' owners do not disturb each other.
#[repr(align(128))]
struct Life<E> {
    /// `generation << 8 | state`.
    word: AtomicU64,
    // The rest is for `seen`: written before OPEN, and constant until VACANT.
    random: AtomicU64,
    lease_ends: AtomicU64,
    since: AtomicU64,
    request: AtomicU64,
    entry: UnsafeCell<Option<E>>,
}

const VACANT: u64 = 0;
const OPEN: u64 = 1;
const HELD: u64 = 2;
const LIMBO: u64 = 3;
const VISITED: u64 = 4;

// SAFETY: the table at the top grants the entry to one thread at a time.
unsafe impl<E: Send> Sync for Life<E> {}
// SAFETY: as above; nothing in it is tied to the thread that made it.
unsafe impl<E: Send> Send for Life<E> {}

impl<E> Puts<E> {
    /// The lives of `slots` slots, all vacant.
    pub fn new(slots: u32) -> Self {
        let life = |_| Life {
            word: AtomicU64::new(VACANT),
            random: AtomicU64::new(0),
            lease_ends: AtomicU64::new(u64::MAX),
            since: AtomicU64::new(0),
            request: AtomicU64::new(0),
            entry: UnsafeCell::new(None),
        };
        let marks = (0..slots.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect();
        Self { lives: (0..slots).map(life).collect(), limbo: AtomicUsize::new(0), marks }
    }

    /// The generation of the slot's next put. The caller owns the slot.
    pub fn next_generation(&self, slot: u32) -> u32 {
        let word = self.lives[slot as usize].word.load(Ordering::Relaxed);
        ((word >> 8) as u32).wrapping_add(1)
    }

    /// VACANT to OPEN. The caller owned the slot, which is in `entry` now.
    pub fn open(&self, seen: &Seen, entry: E) {
        let life = &self.lives[seen.id.slot as usize];
        life.random.store(seen.id.random, Ordering::Relaxed);
        life.lease_ends.store(seen.lease_ends, Ordering::Relaxed);
        life.since.store(seen.since, Ordering::Relaxed);
        life.request.store(seen.request, Ordering::Relaxed);
        // SAFETY: row VACANT: the slot was the caller's, so nobody else opens this life.
        life.entry.with_mut(|cell| unsafe { *cell = Some(entry) });
        // Release: pairs with `claim` and `seen`.
        life.word.store(word(seen.id.generation, OPEN), Ordering::Release);
    }

    /// OPEN to HELD, if exactly that put is open.
    pub fn claim(&self, id: TransferId) -> Option<E> {
        let life = self.lives.get(id.slot as usize)?;
        if self.seen(id.slot).is_none_or(|seen| seen.id != id) {
            return None;
        }
        self.take(life, word(id.generation, OPEN), word(id.generation, HELD))
    }

    /// HELD or VISITED to LIMBO: the caller gives the entry back to the table.
    pub fn quarantine(&self, id: TransferId, entry: E) {
        let life = &self.lives[id.slot as usize];
        // SAFETY: rows HELD and VISITED: the caller has the entry, hence holds this life.
        life.entry.with_mut(|cell| unsafe { *cell = Some(entry) });
        if !life.is_visited() {
            self.limbo.fetch_add(1, Ordering::Relaxed);
            self.mark(id.slot, |word, bit| word.fetch_or(bit, Ordering::Relaxed));
        }
        life.word.store(word(id.generation, LIMBO), Ordering::Release);
    }

    /// LIMBO to VISITED.
    pub fn revisit(&self, slot: u32) -> Option<E> {
        let life = self.lives.get(slot as usize)?;
        let now = life.word.load(Ordering::Acquire);
        if now & 0xff != LIMBO {
            return None;
        }
        self.take(life, now, now & !0xff | VISITED)
    }

    /// HELD or VISITED to VACANT. The caller has the entry's slot and may let it go after this.
    pub fn vacate(&self, id: TransferId) {
        let life = &self.lives[id.slot as usize];
        if life.is_visited() {
            self.limbo.fetch_sub(1, Ordering::Relaxed);
            self.mark(id.slot, |word, bit| word.fetch_and(!bit, Ordering::Relaxed));
        }
        // Relaxed: the entry was taken, and the slot's next owner is ordered after by the credits.
        life.word.store(word(id.generation, VACANT), Ordering::Relaxed);
    }

    /// What can be seen of slot `slot`, if a put of it is open or quarantined.
    pub fn seen(&self, slot: u32) -> Option<Seen> {
        let life = self.lives.get(slot as usize)?;
        // Acquire: pairs with `open`. If the word changes meanwhile, `claim` fails later.
        let now = life.word.load(Ordering::Acquire);
        let state = now & 0xff;
        matches!(state, OPEN | LIMBO | VISITED).then(|| Seen {
            id: TransferId {
                random: life.random.load(Ordering::Relaxed),
                slot,
                generation: (now >> 8) as u32,
            },
            quarantined: state != OPEN,
            lease_ends: life.lease_ends.load(Ordering::Relaxed),
            since: life.since.load(Ordering::Relaxed),
            request: life.request.load(Ordering::Relaxed),
        })
    }

    /// [`Self::seen`] of every slot that has something to see.
    pub fn each(&self) -> impl Iterator<Item = Seen> {
        (0..self.lives.len() as u32).filter_map(|slot| self.seen(slot))
    }

    /// Of those the quarantined ones; one that has just been quarantined may be missing.
    pub fn each_quarantined(&self) -> impl Iterator<Item = Seen> {
        let marked = self.marks.iter().zip(0..).flat_map(|(word, index)| {
            let mut left = word.load(Ordering::Relaxed);
            iter::from_fn(move || {
                let bit = left.trailing_zeros();
                left &= left.wrapping_sub(1);
                (bit < u64::BITS).then_some(index * u64::BITS + bit)
            })
        });
        marked.filter_map(|slot| self.seen(slot)).filter(|seen| seen.quarantined)
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.lives.len()
    }

    /// Whether there is such a slot.
    pub fn has(&self, slot: u32) -> bool {
        (slot as usize) < self.lives.len()
    }

    /// How many are quarantined.
    pub fn quarantined(&self) -> usize {
        self.limbo.load(Ordering::Relaxed)
    }

    fn mark(&self, slot: u32, change: impl FnOnce(&AtomicU64, u64) -> u64) {
        change(&self.marks[(slot / u64::BITS) as usize], 1 << (slot % u64::BITS));
    }

    fn take(&self, life: &Life<E>, from: u64, to: u64) -> Option<E> {
        // Acquire: pairs with the Release of `open` or `quarantine`, which wrote the entry.
        life.word.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: rows HELD and VISITED: the exchange made this life ours.
        life.entry.with_mut(|cell| unsafe { (*cell).take() })
    }
}

impl<E> Life<E> {
    /// Asked by whoever has the entry: nobody else changes the word then.
    fn is_visited(&self) -> bool {
        self.word.load(Ordering::Relaxed) & 0xff == VISITED
    }
}

fn word(generation: u32, state: u64) -> u64 {
    u64::from(generation) << 8 | state
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_quarantined_are_found_among_many_until_they_are_let_go() {
        let puts = Puts::new(130);
        let id = |slot| TransferId { random: 1, slot, generation: puts.next_generation(slot) };
        let quarantined = || puts.each_quarantined().map(|seen| seen.id.slot).collect::<Vec<_>>();
        let mut open = Vec::new();
        for slot in [0, 1, 63, 64, 100, 129] {
            let id = id(slot);
            puts.open(&Seen { id, quarantined: false, lease_ends: 0, since: 0, request: 0 }, slot);
            open.push(id);
        }
        assert!(quarantined().is_empty());
        for id in open.iter().filter(|id| id.slot % 2 != 0 || id.slot == 64) {
            let entry = puts.claim(*id).unwrap();
            puts.quarantine(*id, entry);
        }
        assert_eq!(quarantined(), [1, 63, 64, 129]);
        let entry = puts.revisit(64).unwrap();
        puts.quarantine(open[3], entry);
        assert_eq!(quarantined(), [1, 63, 64, 129]);
        for id in [open[1], open[5]] {
            puts.revisit(id.slot).unwrap();
            puts.vacate(id);
        }
        assert_eq!(quarantined(), [63, 64]);
        assert_eq!(puts.quarantined(), 2);
    }
}
