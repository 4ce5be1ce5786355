//! A slot's whole life over the types that it goes through: the ring of credits, the table of puts,
//! and the words that readers on this host share with its owner. Two read it.
//!
//! The steps are those of `src/sender.rs` and `src/engine/embedded/local/`, in their order.

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};
use mooncake_relay::{
    TransferId,
    internal::{Credits, Puts, words},
};

use crate::{Bytes, seen};

/// What the entry of a put has: the slot, which is its credit.
type Slot = u32;

struct Life {
    credits: Credits,
    puts: Puts<Slot>,
    mark: AtomicU64,
    pins: [AtomicU64; 2],
    /// Nobody may touch them while another does.
    bytes: Bytes,
    /// The same for an owner who takes them back by force: which put wrote them.
    torn: AtomicU64,
    /// How many have the slot, the table included.
    owners: AtomicUsize,
    /// How often each put has ended.
    ended: [AtomicUsize; 2],
}

impl Life {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            credits: Credits::full(1),
            puts: Puts::new(1),
            mark: AtomicU64::new(0),
            pins: [AtomicU64::new(words::FREE), AtomicU64::new(words::FREE)],
            bytes: Bytes(UnsafeCell::new(0)),
            torn: AtomicU64::new(0),
            owners: AtomicUsize::new(0),
            ended: [AtomicUsize::new(0), AtomicUsize::new(0)],
        })
    }

    /// Acquire, fill and publish, if the slot is free.
    fn put(&self, by_force: bool) -> Option<TransferId> {
        let slot = self.credits.try_take()?;
        assert_eq!(self.owners.fetch_add(1, Ordering::Relaxed), 0, "it was handed out already");
        let generation = self.puts.next_generation(slot);
        let id = TransferId { random: secret(generation), slot, generation };
        self.torn.store(u64::from(generation), Ordering::Relaxed);
        if !by_force {
            self.bytes.touch();
        }
        words::publish(&self.mark, mark(id));
        self.puts.open(&seen(id), slot);
        Some(id)
    }

    /// Pin, read and let go; then say that it was read.
    fn get(&self, who: usize, id: TransferId, by_force: bool) {
        let pin = &self.pins[who];
        if !words::pin(pin, &self.mark, id.random, mark(id)) {
            return;
        }
        let read = self.torn.load(Ordering::Relaxed);
        if !by_force {
            self.bytes.look();
        }
        if words::unpin(pin, id.random) {
            assert_eq!(read, u64::from(id.generation), "an `Ok` with the bytes of another put");
            self.end(id);
        }
    }

    /// An acknowledgement, an abort or the end of the lease: the first of them ends the put.
    fn end(&self, id: TransferId) {
        let Some(slot) = self.puts.claim(id) else { return };
        self.ended[id.generation as usize - 1].fetch_add(1, Ordering::Relaxed);
        if self.retract(id) { self.let_go(id, slot) } else { self.puts.quarantine(id, slot) }
    }

    /// One look at the quarantine; with force, its time is over.
    fn visit(&self, by_force: bool) {
        let Some(seen) = self.puts.seen(0).filter(|seen| seen.quarantined) else { return };
        let Some(slot) = self.puts.revisit(0) else { return };
        let id = seen.id;
        if by_force {
            words::retire(&self.mark, mark(id));
            for pin in &self.pins {
                words::revoke(pin, id.random);
            }
        }
        if by_force || self.retract(id) {
            self.let_go(id, slot);
        } else {
            self.puts.quarantine(id, slot);
        }
    }

    /// Nothing new is served; whether nobody is in the middle of it.
    fn retract(&self, id: TransferId) -> bool {
        words::retire(&self.mark, mark(id));
        !self.pins.iter().any(|pin| words::is_pinned(pin, id.random))
    }

    fn let_go(&self, id: TransferId, slot: Slot) {
        self.puts.vacate(id);
        assert_eq!(self.owners.fetch_sub(1, Ordering::Relaxed), 1, "it was freed twice");
        self.credits.give_back(slot);
    }

    /// All have gone: the slot is free, or the next put has it.
    fn is_whole(&self, next: Option<TransferId>) {
        self.visit(false);
        let owned = self.owners.load(Ordering::Relaxed);
        assert_eq!((owned, self.credits.free()), (usize::from(next.is_some()), 1 - owned));
        assert_eq!(self.ended[0].load(Ordering::Relaxed), 1, "the put ended once");
        assert_eq!(
            self.ended[1].load(Ordering::Relaxed),
            0,
            "what was said of it is not of the next"
        );
        if let Some(next) = next {
            assert_eq!(self.puts.claim(next), Some(0));
        }
        assert_eq!(self.puts.quarantined(), 0);
    }
}

fn secret(generation: u32) -> u64 {
    u64::from(generation) + 10
}

fn mark(id: TransferId) -> u64 {
    id.random + 100
}

/// Two readers; the owner ends the put, asks after its slot, and puts again if it is free.
fn two_read(by_force: bool) {
    let life = Life::new();
    let id = life.put(by_force).unwrap();
    let readers = [0, 1].map(|who| {
        let life = Arc::clone(&life);
        thread::spawn(move || life.get(who, id, by_force))
    });
    life.end(id);
    life.visit(by_force);
    let next = life.put(by_force);
    for reader in readers {
        reader.join().unwrap();
    }
    life.is_whole(next);
}

#[test]
fn a_slot_that_two_read_is_free_once_and_the_next_put_s_only_after_both() {
    loom::model(|| two_read(false));
}

#[test]
fn a_slot_that_is_taken_back_from_two_is_free_once_and_neither_takes_the_next_put_for_it() {
    loom::model(|| two_read(true));
}

#[test]
fn an_acknowledgement_of_the_last_put_leaves_the_next_and_its_reader_alone() {
    loom::model(|| {
        let life = Life::new();
        let id = life.put(false).unwrap();
        // One reads, and says so late; the other reads what comes after.
        let (late, other) = (Arc::clone(&life), Arc::clone(&life));
        let late = thread::spawn(move || late.get(0, id, false));
        let following = TransferId { random: secret(2), generation: 2, ..id };
        let other = thread::spawn(move || {
            if words::pin(&other.pins[1], &other.mark, following.random, mark(following)) {
                other.bytes.look();
                assert!(words::unpin(&other.pins[1], following.random));
            }
        });
        life.end(id);
        life.visit(false);
        let next = life.put(false);
        late.join().unwrap();
        other.join().unwrap();
        life.is_whole(next);
    });
}
