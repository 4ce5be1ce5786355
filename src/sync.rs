//! The shared-memory primitives of this crate: std's in production, loom's under `--cfg loom`.
//!
//! Every lock-free module imports its atomics and `UnsafeCell` from here, so that `tests/loom.rs`
//! explores the very code that ships.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{Arc, atomic, mpsc::Sender},
    thread,
};

#[cfg(not(loom))]
pub(crate) use crossbeam::channel::Sender;
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{Arc, atomic},
    thread,
};

/// std's `UnsafeCell` behind loom's closure API.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

#[cfg(not(loom))]
pub(crate) use parking_lot::Mutex;

/// loom's mutex behind parking_lot's interface.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().expect("no model panics while it holds a lock")
    }
}

#[cfg(not(loom))]
pub(crate) use crossbeam::queue::ArrayQueue as Ring;

/// A stand-in for the ring, which loom cannot look into: no more ordered than it must be.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Ring<T>(atomic::AtomicU32, usize, std::marker::PhantomData<T>);

#[cfg(loom)]
impl Ring<u32> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(atomic::AtomicU32::new(0), capacity, std::marker::PhantomData)
    }

    pub(crate) fn push(&self, value: u32) -> Result<(), u32> {
        let mut now = self.0.load(atomic::Ordering::Relaxed);
        while (now.count_ones() as usize) < self.1 {
            let (release, relaxed) = (atomic::Ordering::Release, atomic::Ordering::Relaxed);
            match self.0.compare_exchange(now, now | 1 << value, release, relaxed) {
                Ok(_) => return Ok(()),
                Err(other) => now = other,
            }
        }
        Err(value)
    }

    pub(crate) fn pop(&self) -> Option<u32> {
        let mut now = self.0.load(atomic::Ordering::Relaxed);
        while now != 0 {
            let (acquire, relaxed) = (atomic::Ordering::Acquire, atomic::Ordering::Relaxed);
            match self.0.compare_exchange(now, now & (now - 1), acquire, relaxed) {
                Ok(_) => return Some(now.trailing_zeros()),
                Err(other) => now = other,
            }
        }
        None
    }

    pub(crate) fn len(&self) -> usize {
        self.0.load(atomic::Ordering::Relaxed).count_ones() as usize
    }
}

/// The system's futex, safe.
#[cfg(not(loom))]
pub(crate) mod futex {
    use std::num::NonZeroU32;

    use rustix::{
        thread::futex::{self, Flags},
        time::{ClockId, Timespec, clock_gettime},
    };

    use super::atomic::AtomicU32;

    /// Sleeps while `word` holds `expected`, until a wake with one of `bits`, at most for `left`.
    /// `shared`: other processes have the word's memory too.
    pub(crate) fn wait(
        word: &AtomicU32,
        expected: u32,
        bits: u32,
        left: std::time::Duration,
        shared: bool,
    ) {
        let now = clock_gettime(ClockId::Monotonic);
        let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1 << 32, tv_nsec: 0 });
        if let (Some(at), Some(bits)) = (now.checked_add(left), NonZeroU32::new(bits)) {
            // Woken, timed out, interrupted or changed: the caller looks again in each case.
            let _ = futex::wait_bitset(word, flags(shared), expected, Some(&at), bits);
        }
    }

    /// Wakes everybody who sleeps on `word` with one of `bits`.
    pub(crate) fn wake(word: &AtomicU32, bits: u32, shared: bool) {
        if let Some(bits) = NonZeroU32::new(bits) {
            let _ = futex::wake_bitset(word, flags(shared), i32::MAX as u32, bits);
        }
    }

    fn flags(shared: bool) -> Flags {
        if shared { Flags::empty() } else { Flags::PRIVATE }
    }
}

/// Under loom nobody sleeps: a model counts the wakes.
#[cfg(loom)]
pub(crate) mod futex {
    use std::{cell::Cell, time::Duration};

    use super::atomic::AtomicU32;

    thread_local! {
        /// loom runs every thread of a model on one of the system's.
        pub(crate) static WAKES: Cell<usize> = const { Cell::new(0) };
    }

    pub(crate) fn wait(_: &AtomicU32, _: u32, _: u32, _: Duration, _: bool) {}

    pub(crate) fn wake(_: &AtomicU32, _: u32, _: bool) {
        WAKES.set(WAKES.get() + 1);
    }
}
