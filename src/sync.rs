//! The shared-memory primitives of this crate: std's in production, loom's under `--cfg loom`.
//!
//! Every lock-free module imports its atomics and `UnsafeCell` from here, so that `tests/loom.rs`
//! explores the very code that ships.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::{Arc, atomic},
    thread,
};

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
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
