//! What wakes the thread that polls an engine.

use std::{num::NonZeroU32, time::Instant};

use rustix::{
    thread::futex::{self, Flags},
    time::{ClockId, Timespec, clock_gettime},
};

use crate::sync::atomic::{AtomicU32, Ordering, fence};

/// One futex word that an engine rings after it has queued an event.
///
/// ```text
///   word       meaning                                        who is woken by a ring
///   AWAKE      somebody polls, and will see the event         nobody: one fence and one load
///   NOTIFIER   the notifier thread sleeps until an event      the notifier
///   DRIVER     a caller that waits sleeps while it drives     that caller
/// ```
///
/// A ringer queues its event, then looks at the word; a sleeper stores the word, then looks at the
/// queue again. A `SeqCst` fence between the two steps on either side makes it impossible that both
/// look too early.
///
/// ```
/// let bell = mooncake_relay::Doorbell::new();
/// bell.ring(); // nobody sleeps: nothing to do
/// ```
#[derive(Debug, Default)]
pub struct Doorbell {
    word: AtomicU32,
}

/// Who sleeps; the value is both the word's state and the futex's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Sleeper {
    Notifier = 1,
    Driver = 2,
}

const AWAKE: u32 = 0;

impl Doorbell {
    /// A bell that nobody listens to yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes the sleeper, if there is one. Call it after the event can be polled.
    #[inline]
    pub fn ring(&self) {
        // Partner: the fence in `arm`. Either we see the sleeper's word, or it sees our event.
        fence(Ordering::SeqCst);
        if self.word.load(Ordering::Relaxed) != AWAKE {
            self.wake();
        }
    }

    /// Wakes whoever sleeps, whatever the word says.
    #[cold]
    pub(crate) fn wake_all(&self) {
        self.word.store(AWAKE, Ordering::SeqCst);
        let _ = futex::wake(&self.word, Flags::PRIVATE, i32::MAX as u32);
    }

    /// The poller is awake: rings cost nothing from now on.
    pub(crate) fn disarm(&self) {
        self.word.store(AWAKE, Ordering::Relaxed);
    }

    /// Rings wake `who` from now on. The caller polls once more before it sleeps.
    pub(crate) fn arm(&self, who: Sleeper) {
        self.word.store(who as u32, Ordering::Relaxed);
        // Partner: the fence in `ring`.
        fence(Ordering::SeqCst);
    }

    /// Sleeps as `who` until a ring or `until`, if the word is still as [`Self::arm`] left it.
    pub(crate) fn sleep(&self, who: Sleeper, until: Instant) {
        self.sleep_while(who as u32, who, until);
    }

    /// Sleeps until a ring for `who` or `until`, whatever the word says now.
    pub(crate) fn sleep_aside(&self, who: Sleeper, until: Instant) {
        self.sleep_while(self.word.load(Ordering::Relaxed), who, until);
    }

    fn sleep_while(&self, word: u32, who: Sleeper, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let now = clock_gettime(ClockId::Monotonic);
        let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1 << 32, tv_nsec: 0 });
        let at = now.checked_add(left);
        let bits = NonZeroU32::new(who as u32);
        if let (Some(at), Some(bits)) = (at, bits) {
            // Woken, timed out, interrupted or changed: the caller looks again in each case.
            let _ = futex::wait_bitset(&self.word, Flags::PRIVATE, word, Some(&at), bits);
        }
    }

    #[cold]
    fn wake(&self) {
        // Only the ringer that finds a sleeper pays for the system call.
        if let Some(bits) = NonZeroU32::new(self.word.swap(AWAKE, Ordering::AcqRel)) {
            let _ = futex::wake_bitset(&self.word, Flags::PRIVATE, i32::MAX as u32, bits);
        }
    }
}
