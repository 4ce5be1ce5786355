//! The words that two processes share: who reads a slot, which put it holds, and how far a
//! ring has been written and read. Either process may be hostile to the other: a word is believed
//! for nothing but what its row says.
//!
//! ```text
//!   pin        meaning                                   who leaves it
//!   FREE       this reader does not read that slot       the reader, by `pin`
//!   a secret   it reads the put of that secret           the reader, by `unpin`; the owner, by `revoke`
//!   REVOKED    the owner has taken its slot back         the reader, whose `unpin` fails
//! ```
//!
//! A secret is the random half of a transfer's id, which only whoever was given the metadata knows:
//! so a reader can hold up nothing else. The mark of a published put lies in a page that readers
//! cannot write.

use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// The pin of who does not read.
pub const FREE: u64 = 0;
/// The pin of who reads no more, and does not know it yet.
pub const REVOKED: u64 = u64::MAX;
/// The mark of a slot in which nothing is published.
const NOTHING: u64 = 0;

/// Whether a put can be pinned by this secret: two values have a meaning of their own.
pub fn is_secret(secret: u64) -> bool {
    secret != FREE && secret != REVOKED
}

/// The reader holds the put that `secret` and `expected` belong to, if it is published.
pub fn pin(pin: &AtomicU64, mark: &AtomicU64, secret: u64, expected: u64) -> bool {
    // Release: the owner may see this pin in place of the one before it, which `unpin` has let go
    // of, and then pairs with this.
    pin.store(secret, Ordering::Release);
    // Partner: the fence in `retire`. Either we see that the mark is retired, or its owner sees
    // our pin.
    fence(Ordering::SeqCst);
    // Acquire: pairs with `publish`, which comes after the bytes.
    if expected != NOTHING && mark.load(Ordering::Acquire) == expected {
        return true;
    }
    unpin(pin, secret);
    false
}

/// The reader has copied, and lets go. False: the owner took the slot back in the middle.
pub fn unpin(pin: &AtomicU64, secret: u64) -> bool {
    // Release: pairs with `is_pinned` and `revoke`. What we read was read before the owner writes.
    // It and a revocation are exchanges of one word, so that one of the two fails.
    let held = pin.compare_exchange(secret, FREE, Ordering::Release, Ordering::Relaxed).is_ok();
    if !held {
        pin.store(FREE, Ordering::Relaxed);
    }
    held
}

/// Whether the reader still holds the put: asked after a look at the bytes, it says whether they
/// were that put's.
pub fn holds(pin: &AtomicU64, secret: u64) -> bool {
    // Partner: the fence in `revoke`. If we have seen a byte from after it, we see it too.
    fence(Ordering::Acquire);
    pin.load(Ordering::Relaxed) == secret
}

/// The owner opens a slot, whose bytes it has written.
pub fn publish(mark: &AtomicU64, value: u64) {
    // Release: pairs with the load in `pin`.
    mark.store(value, Ordering::Release);
}

/// The owner ends the publication of that mark, if it is the slot's; asks for pins after that.
pub fn retire(mark: &AtomicU64, value: u64) {
    // Only the owner's side writes marks, and a later put of the slot has another one.
    let _ = mark.compare_exchange(value, NOTHING, Ordering::Relaxed, Ordering::Relaxed);
    // Partner: the fence in `pin`.
    fence(Ordering::SeqCst);
}

/// Whether that reader reads the put of that secret. The owner asks, after `retire`.
pub fn is_pinned(pin: &AtomicU64, secret: u64) -> bool {
    // Acquire: pairs with `unpin`.
    pin.load(Ordering::Acquire) == secret
}

/// The owner takes its slot back from a reader of that put, and may write right after.
pub fn revoke(pin: &AtomicU64, secret: u64) -> bool {
    // Acquire, also where it fails: pairs with `unpin`, which may have come first.
    let order = Ordering::Acquire;
    let revoked = pin.compare_exchange(secret, REVOKED, order, order).is_ok();
    // Partner: the fence in `holds`.
    fence(Ordering::Release);
    revoked
}

/// The end of a ring, for whoever does not move it.
pub fn end(end: &AtomicU64) -> u64 {
    // Acquire: pairs with `advance`. What was written up to there is seen, or was copied out.
    end.load(Ordering::Acquire)
}

/// Moves an end of a ring, for whoever owns it.
pub fn advance(end: &AtomicU64, to: u64) {
    // Release: pairs with `end`.
    end.store(to, Ordering::Release);
}
