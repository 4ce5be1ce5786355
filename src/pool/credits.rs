//! The ring of free credits, and the queue of those who wait for one.
//!
//! A credit is the right to use one slot, and is that slot's index. Credits go round first in, first out,
//! but only so many of them as fit into a core's cache while more are not needed: a slot that was not
//! used for long costs what memory costs.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, OnceLock},
    thread::{self, Thread},
};

use crate::sync::{
    Mutex, Ring,
    atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
};

/// The ring. Taking and giving back is lock-free; a lock is met only by those who find it empty.
pub struct Credits {
    warm: Ring<u32>,
    /// Those that are taken when no warm one is free, if there are more.
    cold: Option<Cold>,
    /// How many wait. Not zero: nobody may overtake them.
    waiting: AtomicUsize,
    queue: Mutex<VecDeque<Arc<Waiter>>>,
    /// A consumer that does not queue was turned away, and wants to hear of the next credit.
    starved: AtomicBool,
    /// Called after a credit came back while somebody waited or starved.
    returned: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Cold {
    free: Ring<u32>,
    /// Counts the credits that came back, so that nobody who looks into one ring after the other takes
    /// both for empty while one has moved.
    moves: AtomicU32,
}

/// Somebody who waits for a credit.
#[derive(Debug)]
struct Waiter {
    credit: AtomicU32,
    thread: Thread,
}

/// A place in the queue. Dropped, it is given up, and a credit that came goes back.
#[derive(Debug)]
pub struct Queued<'a> {
    credits: &'a Credits,
    /// `None` once it has left.
    waiter: Option<Arc<Waiter>>,
}

const NONE: u32 = u32::MAX;
const ONCE: &str = "a credit comes back once";

impl Credits {
    /// A ring that holds the credits `0..count`.
    ///
    /// # Panics
    ///
    /// Panics if `count` is zero: the configuration was checked.
    pub fn full(count: u32) -> Self {
        Self::with_warm(count, count)
    }

    /// As [`Self::full`]; no more than `warm` of them go round unless more are out at a time.
    ///
    /// # Panics
    ///
    /// As above, and if `warm` is zero.
    pub fn with_warm(count: u32, warm: u32) -> Self {
        let full = |credits: Range<u32>| {
            let ring = Ring::new(credits.len());
            for credit in credits {
                ring.push(credit).expect("the ring has room for every credit");
            }
            ring
        };
        let warm = warm.min(count);
        let cold =
            (warm < count).then(|| Cold { free: full(warm..count), moves: AtomicU32::new(0) });
        Self {
            warm: full(0..warm),
            cold,
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
            starved: AtomicBool::new(false),
            returned: OnceLock::new(),
        }
    }

    /// Names what to call when a credit comes back and somebody wants it.
    pub fn on_return(&self, call: impl Fn() + Send + Sync + 'static) {
        let first = self.returned.set(Box::new(call)).is_ok();
        debug_assert!(first, "a ring reports to one owner");
    }

    /// How many are free; one that moves meanwhile may be counted twice, or not at all.
    pub fn free(&self) -> usize {
        self.warm.len() + self.cold.as_ref().map_or(0, |cold| cold.free.len())
    }

    /// How many callers wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Takes a credit, or `None` if all are out or others wait already.
    #[inline]
    pub fn try_take(&self) -> Option<u32> {
        if self.waiting.load(Ordering::Relaxed) > 0 { None } else { self.pop() }
    }

    /// As [`Self::try_take`]; after a `None` the next credit to come back is reported.
    pub fn take_or_starve(&self) -> Option<u32> {
        self.try_take().or_else(|| {
            self.starve();
            self.try_take()
        })
    }

    /// Has the next credit to come back reported; true where none is free, so that it will be one
    /// that comes back later.
    pub fn starve(&self) -> bool {
        self.starved.store(true, Ordering::Relaxed);
        // Partner: the fence in `give_back`. Either we see its credit, or it sees us starve.
        fence(Ordering::SeqCst);
        self.free() == 0
    }

    /// Gives a credit back, to whoever waits longest.
    #[inline]
    pub fn give_back(&self, credit: u32) {
        self.push(credit);
        // Partner: the fences in `enqueue`, `starve` and `pop_any`.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) > 0 || self.starved.load(Ordering::Relaxed) {
            self.serve();
        }
    }

    /// Queues the calling thread. It then looks at [`Queued::credit`] until it has one, and leaves.
    pub fn enqueue(&self) -> Queued<'_> {
        let waiter = Arc::new(Waiter { credit: AtomicU32::new(NONE), thread: thread::current() });
        {
            let mut queue = self.queue.lock();
            queue.push_back(Arc::clone(&waiter));
            self.waiting.store(queue.len(), Ordering::Relaxed);
        }
        // Partner: the fence in `give_back`. Either we see its credit, or it sees us wait.
        fence(Ordering::SeqCst);
        self.hand_out();
        Queued { credits: self, waiter: Some(waiter) }
    }

    /// Lets everybody who waits look around: the relay has closed.
    pub(crate) fn wake_waiting(&self) {
        for waiter in self.queue.lock().iter() {
            waiter.thread.unpark();
        }
    }

    #[inline]
    fn pop(&self) -> Option<u32> {
        match &self.cold {
            None => self.warm.pop(),
            Some(cold) => self.warm.pop().or_else(|| self.pop_any(cold)),
        }
    }

    /// From either ring. `None`: at one moment no credit was in any of them.
    fn pop_any(&self, cold: &Cold) -> Option<u32> {
        loop {
            // Acquire: pairs with `push`. What was counted lies in its ring.
            let moves = cold.moves.load(Ordering::Acquire);
            let found = self.warm.pop().or_else(|| cold.free.pop());
            // Partner: the fence in `give_back`. Who took the cold one after a warm one came back let us
            // see that it came.
            fence(Ordering::SeqCst);
            if found.is_some() || cold.moves.load(Ordering::Relaxed) == moves {
                return found;
            }
        }
    }

    #[inline]
    fn push(&self, credit: u32) {
        let Some(cold) = &self.cold else {
            return self.warm.push(credit).expect(ONCE);
        };
        // Whoever finds the warm ring full leaves room in the other: together they hold them all.
        if let Err(credit) = self.warm.push(credit) {
            cold.free.push(credit).expect(ONCE);
        }
        // Release: pairs with the first load in `pop_any`.
        cold.moves.fetch_add(1, Ordering::Release);
    }

    /// What somebody slow does who has found no warm one before.
    #[cfg(loom)]
    pub fn take_cold(&self) -> Option<u32> {
        self.cold.as_ref()?.free.pop()
    }

    #[cold]
    fn serve(&self) {
        self.hand_out();
        self.starved.store(false, Ordering::Relaxed);
        if let Some(returned) = self.returned.get() {
            returned();
        }
    }

    /// Gives free credits to those who wait, in the order in which they came.
    fn hand_out(&self) {
        let mut queue = self.queue.lock();
        while let Some(first) = queue.front() {
            let Some(credit) = self.pop() else { break };
            // Release: what the last owner did to the slot happens before what the waiter will do.
            first.credit.store(credit, Ordering::Release);
            first.thread.unpark();
            queue.pop_front();
        }
        self.waiting.store(queue.len(), Ordering::Relaxed);
    }
}

impl Queued<'_> {
    /// The credit, once it has come.
    pub fn credit(&self) -> Option<u32> {
        self.waiter.as_ref()?.credit()
    }

    /// Ends the wait. A credit that came meanwhile is the caller's.
    pub fn leave(mut self) -> Option<u32> {
        self.end()
    }

    fn end(&mut self) -> Option<u32> {
        let waiter = self.waiter.take()?;
        let mut queue = self.credits.queue.lock();
        queue.retain(|other| !Arc::ptr_eq(other, &waiter));
        self.credits.waiting.store(queue.len(), Ordering::Relaxed);
        drop(queue);
        waiter.credit()
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        if let Some(credit) = self.end() {
            self.credits.give_back(credit);
        }
    }
}

impl Waiter {
    fn credit(&self) -> Option<u32> {
        // Acquire: pairs with the store in `hand_out`.
        Some(self.credit.load(Ordering::Acquire)).filter(|credit| *credit != NONE)
    }
}

impl std::fmt::Debug for Credits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credits").field("free", &self.free()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn take(credits: &Credits, count: usize) -> Vec<u32> {
        (0..count).map(|_| credits.try_take().expect("one is free")).collect()
    }

    #[test]
    fn while_few_are_out_only_warm_ones_go_round_the_longest_unused_first() {
        let credits = Credits::with_warm(8, 3);
        let mut taken = Vec::new();
        for _ in 0..6 {
            taken.extend(take(&credits, 1));
            credits.give_back(taken[taken.len() - 1]);
        }
        assert_eq!(taken, [0, 1, 2, 0, 1, 2]);
        assert_eq!(credits.free(), 8);
    }

    #[test]
    fn all_can_be_out_at_once_and_as_few_go_round_afterwards() {
        let credits = Credits::with_warm(8, 3);
        let mut all = take(&credits, 8);
        assert_eq!((credits.try_take(), credits.free()), (None, 0));
        all.rotate_left(5);
        all.drain(..).for_each(|credit| credits.give_back(credit));
        assert_eq!(take(&credits, 4), [5, 6, 7, 0]);
        assert_eq!(credits.free(), 4);
    }
}
