//! What two processes share: pins, the ring's ends, and a doorbell.

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
};
use mooncake_relay::{
    Doorbell,
    internal::{Sleeper, Word, wakes, words},
};

use crate::Bytes;

/// The secret of a put and the mark of it.
const SECRET: u64 = 5;
const MARK: u64 = 7;

/// A slot's words, and its bytes in both kinds: those that nobody may touch at once, and those that
/// an owner which has lost patience writes under a reader.
struct Shelf {
    pin: AtomicU64,
    mark: AtomicU64,
    bytes: Bytes,
    torn: AtomicU64,
}

impl Shelf {
    fn new(mark: u64) -> Arc<Self> {
        Arc::new(Self {
            pin: AtomicU64::new(words::FREE),
            mark: AtomicU64::new(mark),
            bytes: Bytes(UnsafeCell::new(0)),
            torn: AtomicU64::new(1),
        })
    }

    fn pinned(&self) -> bool {
        words::pin(&self.pin, &self.mark, SECRET, MARK)
    }
}

#[test]
fn an_owner_writes_what_nobody_has_pinned() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        let other = Arc::clone(&shelf);
        let reading = thread::spawn(move || {
            if other.pinned() {
                other.bytes.touch();
                assert!(words::unpin(&other.pin, SECRET));
            }
        });
        words::retire(&shelf.mark, MARK);
        if !words::is_pinned(&shelf.pin, SECRET) {
            shelf.bytes.touch();
        }
        reading.join().unwrap();
        assert!(!words::is_pinned(&shelf.pin, SECRET));
    });
}

#[test]
fn who_pins_a_put_sees_what_its_owner_wrote() {
    loom::model(|| {
        let shelf = Shelf::new(0);
        let other = Arc::clone(&shelf);
        let reading = thread::spawn(move || {
            if other.pinned() {
                other.bytes.touch();
                words::unpin(&other.pin, SECRET);
            }
        });
        shelf.bytes.touch();
        words::publish(&shelf.mark, MARK);
        reading.join().unwrap();
    });
}

#[test]
fn a_reader_whose_slot_was_written_under_it_finds_that_out() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        let other = Arc::clone(&shelf);
        let reading = thread::spawn(move || {
            if other.pinned() {
                let seen = other.torn.load(Ordering::Relaxed);
                if words::unpin(&other.pin, SECRET) {
                    assert_eq!(seen, 1, "bytes of the next put were taken for this one's");
                }
            }
        });
        words::retire(&shelf.mark, MARK);
        if words::is_pinned(&shelf.pin, SECRET) {
            words::revoke(&shelf.pin, SECRET);
        }
        shelf.torn.store(2, Ordering::Relaxed);
        reading.join().unwrap();
    });
}

#[test]
fn a_look_at_bytes_that_are_not_that_puts_any_more_finds_that_out() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        let other = Arc::clone(&shelf);
        let looking = thread::spawn(move || {
            if other.pinned() {
                let seen = other.torn.load(Ordering::Relaxed);
                if words::holds(&other.pin, SECRET) {
                    assert_eq!(seen, 1, "bytes of the next put were taken for this one's");
                }
                words::unpin(&other.pin, SECRET);
            }
        });
        words::retire(&shelf.mark, MARK);
        if words::is_pinned(&shelf.pin, SECRET) {
            words::revoke(&shelf.pin, SECRET);
        }
        shelf.torn.store(2, Ordering::Relaxed);
        looking.join().unwrap();
    });
}

#[test]
fn an_owner_whose_revocation_comes_too_late_writes_after_the_reader() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        let other = Arc::clone(&shelf);
        let reading = thread::spawn(move || {
            if other.pinned() {
                other.bytes.touch();
                words::unpin(&other.pin, SECRET);
            }
        });
        words::retire(&shelf.mark, MARK);
        if !words::revoke(&shelf.pin, SECRET) {
            shelf.bytes.touch();
        }
        reading.join().unwrap();
    });
}

#[test]
fn a_late_retirement_leaves_the_next_put_on_the_shelf() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        words::retire(&shelf.mark, MARK + 1);
        assert!(!words::pin(&shelf.pin, &shelf.mark, SECRET, MARK + 1));
        assert!(shelf.pinned());
        assert!(words::unpin(&shelf.pin, SECRET));
        words::retire(&shelf.mark, MARK);
        assert!(!shelf.pinned());
        assert!(!words::is_secret(words::FREE) && !words::is_secret(words::REVOKED));
    });
}

#[test]
fn what_is_in_the_ring_is_read_once_and_whole() {
    loom::model(|| {
        // A ring with room for one.
        let ring = Arc::new((AtomicU64::new(0), AtomicU64::new(0), Bytes(UnsafeCell::new(0))));
        let other = Arc::clone(&ring);
        let writing = thread::spawn(move || {
            let (head, tail, bytes) = &*other;
            let mut written = 0;
            for _ in 0..2 {
                if words::end(head) == written {
                    bytes.touch();
                    written += 1;
                    words::advance(tail, written);
                }
            }
            written
        });
        let (head, tail, bytes) = &*ring;
        let mut read = 0;
        for _ in 0..2 {
            if words::end(tail) > read {
                bytes.touch();
                read += 1;
                words::advance(head, read);
            }
        }
        assert!(read <= writing.join().unwrap());
    });
}

#[derive(Debug)]
struct SharedWord(AtomicU32);

impl Word for SharedWord {
    fn word(&self) -> &AtomicU32 {
        &self.0
    }
}

#[test]
fn a_note_in_a_ring_wakes_the_sleeper_by_another_hand_on_the_same_bell() {
    loom::model(|| {
        let before = wakes();
        let word = std::sync::Arc::new(SharedWord(AtomicU32::new(0)));
        let (own, theirs) = (Doorbell::shared(word.clone()), Doorbell::shared(word));
        let tail = Arc::new(AtomicU64::new(0));
        let other = Arc::clone(&tail);
        let telling = thread::spawn(move || {
            words::advance(&other, 1);
            theirs.ring();
        });
        own.arm(Sleeper::Notifier);
        let seen = words::end(&tail) == 1;
        telling.join().unwrap();
        assert!(seen || wakes() > before, "it sleeps, and nobody rings again");
    });
}

#[test]
fn a_pin_for_another_put_does_not_hide_from_the_owner_that_the_first_was_let_go() {
    loom::model(|| {
        let shelf = Shelf::new(MARK);
        let other = Arc::clone(&shelf);
        let reading = thread::spawn(move || {
            if other.pinned() {
                other.bytes.touch();
                assert!(words::unpin(&other.pin, SECRET));
            }
            // A put of that slot that is over long ago.
            assert!(!words::pin(&other.pin, &other.mark, SECRET + 1, MARK + 1));
        });
        words::retire(&shelf.mark, MARK);
        if !words::is_pinned(&shelf.pin, SECRET) {
            shelf.bytes.touch();
        }
        reading.join().unwrap();
    });
}
