//! The ring of free credits, and the queue of those who wait for one.
//!
//! A credit is the right to use one slot, and is that slot's index.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
    thread::{self, Thread},
};

use crate::sync::{
    Mutex, Ring,
    atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
};

/// The ring. Taking and giving back is lock-free; a lock is met only by those who find it empty.
pub struct Credits {
    free: Ring<u32>,
    /// How many wait. Not zero: nobody may overtake them.
    waiting: AtomicUsize,
    queue: Mutex<VecDeque<Arc<Waiter>>>,
    /// A consumer that does not queue was turned away, and wants to hear of the next credit.
    starved: AtomicBool,
    /// Called after a credit came back while somebody waited or starved.
    returned: OnceLock<Box<dyn Fn() + Send + Sync>>,
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

impl Credits {
    /// A ring that holds the credits `0..count`.
    ///
    /// # Panics
    ///
    /// Panics if `count` is zero: the configuration was checked.
    pub fn full(count: u32) -> Self {
        let free = Ring::new(count as usize);
        for credit in 0..count {
            free.push(credit).expect("the ring has room for every credit");
        }
        Self {
            free,
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

    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// How many callers wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Takes a credit, or `None` if all are out or others wait already.
    #[inline]
    pub fn try_take(&self) -> Option<u32> {
        if self.waiting.load(Ordering::Relaxed) > 0 { None } else { self.free.pop() }
    }

    /// As [`Self::try_take`]; after a `None` the next credit to come back is reported.
    pub fn take_or_starve(&self) -> Option<u32> {
        self.try_take().or_else(|| {
            self.starved.store(true, Ordering::Relaxed);
            // Partner: the fence in `give_back`. Either we see its credit, or it sees us starve.
            fence(Ordering::SeqCst);
            self.try_take()
        })
    }

    /// Gives a credit back, to whoever waits longest.
    #[inline]
    pub fn give_back(&self, credit: u32) {
        self.free.push(credit).expect("a credit comes back once");
        // Partner: the fences in `enqueue` and `take_or_starve`.
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
            let Some(credit) = self.free.pop() else { break };
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
        f.debug_struct("Credits").field("free", &self.free.len()).finish_non_exhaustive()
    }
}
