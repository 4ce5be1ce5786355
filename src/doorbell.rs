//! What wakes the thread that polls an engine.

use std::{fmt, sync::Arc, time::Instant};

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
/// The word may lie in a page that other processes can write, so that they ring by themselves. It is
/// believed for nothing but waking: whatever they write there costs a sleeper a look too many, or
/// the time until it would have woken anyway.
///
/// ```
/// let bell = mooncake_relay::Doorbell::new();
/// bell.ring(); // nobody sleeps: nothing to do
/// ```
#[derive(Debug)]
pub struct Doorbell {
    place: Place,
}

/// Where the word is.
#[derive(Debug)]
enum Place {
    Own(AtomicU32),
    Shared(Arc<dyn Word>),
}

/// A futex word in memory that several processes have mapped.
#[doc(hidden)]
pub trait Word: fmt::Debug + Send + Sync {
    /// The word; the same for the value's whole life.
    fn word(&self) -> &AtomicU32;
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
/// How often a ringer tries to count its ring on a word that changes under it.
const TRIES: usize = 64;

impl Doorbell {
    /// A bell that nobody listens to yet.
    pub fn new() -> Self {
        Self { place: Place::Own(AtomicU32::new(0)) }
    }

    /// The bell of that word, of which there is one in each process that has mapped it.
    #[doc(hidden)]
    pub fn shared(word: Arc<dyn Word>) -> Self {
        Self { place: Place::Shared(word) }
    }

    /// Wakes the sleeper, if there is one. Call it after the event can be polled. From any thread;
    /// costs a fence and a load unless somebody sleeps.
    #[inline]
    pub fn ring(&self) {
        // Partner: the fence in `arm`. Either we see the sleeper's state, or it sees our event.
        fence(Ordering::SeqCst);
        if self.word().load(Ordering::Relaxed) & STATE != 0 {
            self.wake();
        }
    }

    /// Wakes everybody who sleeps or is about to, whatever the state.
    #[cold]
    pub(crate) fn wake_all(&self) {
        let word = self.word();
        word.fetch_and(!STATE, Ordering::Relaxed);
        word.fetch_add(WAKE, Ordering::SeqCst);
        futex::wake(word, STATE, self.is_shared());
    }

    /// The poller is awake: rings cost nothing from now on.
    pub(crate) fn disarm(&self) {
        let word = self.word();
        if word.load(Ordering::Relaxed) & STATE != 0 {
            word.fetch_and(!STATE, Ordering::Relaxed);
        }
    }

    /// Rings wake `who` from now on. The caller polls once more before it sleeps.
    #[doc(hidden)]
    pub fn arm(&self, who: Sleeper) -> Ticket {
        self.word().fetch_and(!STATE, Ordering::Relaxed);
        let word = self.word().fetch_or(who as u32, Ordering::Relaxed) | who as u32;
        // Partner: the fence in `ring`.
        fence(Ordering::SeqCst);
        Ticket(word)
    }

    /// Whether a ring would wake the notifier. SeqCst: see `notifier::Standing`.
    pub(crate) fn wakes_notifier(&self) -> bool {
        self.word().load(Ordering::SeqCst) & STATE == Sleeper::Notifier as u32
    }

    /// For a sleeper that somebody else keeps from arming: taken before its last look around.
    #[doc(hidden)]
    pub fn ticket(&self) -> Ticket {
        // SeqCst: with `wake_all`. What its caller stored before it is seen after this.
        Ticket(self.word().load(Ordering::SeqCst))
    }

    /// Sleeps until a ring for `who`, a wake of all, or `until`; not at all if the word has changed
    /// since the ticket. Whatever the reason it returned, the caller looks again.
    pub(crate) fn sleep(&self, ticket: Ticket, who: Sleeper, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        futex::wait(self.word(), ticket.0, who as u32, left, self.is_shared());
    }

    #[cold]
    fn wake(&self) {
        let word = self.word();
        for _ in 0..TRIES {
            let seen = word.load(Ordering::Relaxed);
            if seen & STATE == 0 {
                return;
            }
            // Counted, or a sleeper whose ticket is older than the arming would find it unchanged.
            let rung = (seen & !STATE).wrapping_add(WAKE);
            // Only the ringer that finds a sleeper pays for the system call.
            if word.compare_exchange(seen, rung, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return futex::wake(word, seen & STATE, self.is_shared());
            }
        }
        // Somebody keeps writing to it.
        futex::wake(word, STATE, self.is_shared());
    }

    fn word(&self) -> &AtomicU32 {
        match &self.place {
            Place::Own(word) => word,
            Place::Shared(shared) => shared.word(),
        }
    }

    fn is_shared(&self) -> bool {
        matches!(self.place, Place::Shared(_))
    }
}

impl Default for Doorbell {
    fn default() -> Self {
        Self::new()
    }
}
