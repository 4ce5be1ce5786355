//! What wakes the thread that polls an engine.

use std::time::Instant;

use crate::sync::{
    atomic::{AtomicU32, Ordering, fence},
    futex,
};

/// One futex word that an engine rings after it has queued an event; see
/// [`Engine::doorbell`](crate::Engine::doorbell).
///
/// ```text
///   state      meaning                                        who is woken by a ring
///   AWAKE      somebody polls, and will see the event         nobody: one fence and one load
///   NOTIFIER   the notifier thread sleeps until an event      the notifier
///   DRIVER     a caller that waits sleeps while it drives     that caller
/// ```
///
/// A ringer queues its event, then looks at the word; a sleeper arms the word, then looks at the
/// queue again. A `SeqCst` fence between the two steps on either side makes it impossible that both
/// look too early. The bits above the state count the wake-ups, so that a sleeper that is just lying
/// down does not miss one.
///
/// ```
/// let bell = mooncake_relay::Doorbell::new();
/// bell.ring(); // nobody sleeps: nothing to do
/// ```
#[derive(Debug)]
pub struct Doorbell {
    word: AtomicU32,
}

/// Who sleeps; the value is both the word's state and the futex's bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Sleeper {
    /// The relay's thread.
    Notifier = 1,
    /// A caller that waits.
    Driver = 2,
}

/// The word as a sleeper saw it before its last look around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u32);

const STATE: u32 = 0b11;
const WAKE: u32 = STATE + 1;

impl Doorbell {
    /// A bell that nobody listens to yet.
    pub fn new() -> Self {
        Self { word: AtomicU32::new(0) }
    }

    /// Wakes the sleeper, if there is one. Call it after the event can be polled. From any thread;
    /// costs a fence and a load unless somebody sleeps.
    #[inline]
    pub fn ring(&self) {
        // Partner: the fence in `arm`. Either we see the sleeper's state, or it sees our event.
        fence(Ordering::SeqCst);
        if self.word.load(Ordering::Relaxed) & STATE != 0 {
            self.wake();
        }
    }

    /// Wakes everybody who sleeps or is about to, whatever the state.
    #[cold]
    pub(crate) fn wake_all(&self) {
        self.word.fetch_and(!STATE, Ordering::Relaxed);
        self.word.fetch_add(WAKE, Ordering::SeqCst);
        futex::wake(&self.word, STATE);
    }

    /// The poller is awake: rings cost nothing from now on.
    pub(crate) fn disarm(&self) {
        if self.word.load(Ordering::Relaxed) & STATE != 0 {
            self.word.fetch_and(!STATE, Ordering::Relaxed);
        }
    }

    /// Rings wake `who` from now on. The caller polls once more before it sleeps.
    #[doc(hidden)]
    pub fn arm(&self, who: Sleeper) -> Ticket {
        self.word.fetch_and(!STATE, Ordering::Relaxed);
        let word = self.word.fetch_or(who as u32, Ordering::Relaxed) | who as u32;
        // Partner: the fence in `ring`.
        fence(Ordering::SeqCst);
        Ticket(word)
    }

    /// Whether a ring would wake the notifier. SeqCst: see `notifier::Standing`.
    pub(crate) fn wakes_notifier(&self) -> bool {
        self.word.load(Ordering::SeqCst) & STATE == Sleeper::Notifier as u32
    }

    /// For a sleeper that somebody else keeps from arming: taken before its last look around.
    #[doc(hidden)]
    pub fn ticket(&self) -> Ticket {
        // SeqCst: with `wake_all`. What its caller stored before it is seen after this.
        Ticket(self.word.load(Ordering::SeqCst))
    }

    /// Sleeps until a ring for `who`, a wake of all, or `until`; not at all if the word has changed
    /// since the ticket. Whatever the reason it returned, the caller looks again.
    pub(crate) fn sleep(&self, ticket: Ticket, who: Sleeper, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        futex::wait(&self.word, ticket.0, who as u32, left);
    }

    #[cold]
    fn wake(&self) {
        // Counted, or a sleeper whose ticket is older than the arming would find the word unchanged.
        let rung = |word: u32| (word & STATE != 0).then_some((word & !STATE).wrapping_add(WAKE));
        // Only the ringer that finds a sleeper pays for the system call.
        let found = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, rung);
        if let Ok(word) = found {
            futex::wake(&self.word, word & STATE);
        }
    }
}

impl Default for Doorbell {
    fn default() -> Self {
        Self::new()
    }
}
