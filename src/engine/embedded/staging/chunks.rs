//! Pinned host memory: so many chunks of one size, and no more.
#![allow(unsafe_code)] // begins copies for who owns both ends

use std::{collections::VecDeque, sync::Arc, time::Instant};

use parking_lot::{Condvar, Mutex};

use crate::{
    error::Result,
    memory::{Copying, Device, Pinned, Span},
};

/// All of one direction.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Chunks {
    size: usize,
    free: Mutex<VecDeque<Pinned>>,
    returned: Condvar,
}

impl Chunks {
    pub(super) fn make(device: &dyn Device, size: usize, count: usize) -> Result<Arc<Self>> {
        let free = (0..count).map(|_| device.pinned(size)).collect::<Result<_>>()?;
        Ok(Arc::new(Self { size, free: Mutex::new(free), returned: Condvar::new() }))
    }

    /// How many bytes a chunk has.
    pub(in crate::engine::embedded) fn size(&self) -> usize {
        self.size
    }

    /// How many nobody has.
    pub(in crate::engine::embedded) fn free(&self) -> usize {
        self.free.lock().len()
    }

    pub(in crate::engine::embedded) fn try_take(self: &Arc<Self>) -> Option<Chunk> {
        let pinned = self.free.lock().pop_front()?;
        Some(Chunk { pinned: Some(pinned), home: Arc::clone(self) })
    }

    /// Waits for one until `deadline`.
    pub(super) fn take(self: &Arc<Self>, deadline: Instant) -> Option<Chunk> {
        let mut free = self.free.lock();
        loop {
            if let Some(pinned) = free.pop_front() {
                return Some(Chunk { pinned: Some(pinned), home: Arc::clone(self) });
            }
            if self.returned.wait_until(&mut free, deadline).timed_out() && free.is_empty() {
                return None;
            }
        }
    }

    fn give_back(&self, pinned: Pinned) {
        self.free.lock().push_back(pinned);
        self.returned.notify_one();
    }
}

/// One of them; goes home when it is dropped.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Chunk {
    /// `None` once a copy has it.
    pinned: Option<Pinned>,
    home: Arc<Chunks>,
}

impl Chunk {
    pub(in crate::engine::embedded) fn bytes(&self) -> &[u8] {
        self.pinned.as_ref().map_or(&[], Pinned::bytes)
    }

    pub(in crate::engine::embedded) fn bytes_mut(&mut self) -> &mut [u8] {
        self.pinned.as_mut().map_or(&mut [], Pinned::bytes_mut)
    }

    /// Begins to copy `from`, no longer than a chunk, to the front.
    ///
    /// # Safety
    ///
    /// As for [`Pinned::fill_from`].
    pub(super) unsafe fn fill_from(mut self, from: Span) -> Moving {
        // SAFETY: by this function's contract.
        let copying = self.pinned.take().map(|pinned| unsafe { pinned.fill_from(from) });
        Moving { copying, home: Arc::clone(&self.home) }
    }

    /// Begins to copy the front to `to`, no longer than a chunk.
    ///
    /// # Safety
    ///
    /// As for [`Pinned::send_to`].
    pub(super) unsafe fn send_to(mut self, to: Span) -> Moving {
        // SAFETY: by this function's contract.
        let copying = self.pinned.take().map(|pinned| unsafe { pinned.send_to(to) });
        Moving { copying, home: Arc::clone(&self.home) }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.home.give_back(pinned);
        }
    }
}

/// A chunk that a copy has. Dropped, it is waited for.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Moving {
    copying: Option<Copying>,
    home: Arc<Chunks>,
}

impl Moving {
    /// Whether the copy is over, well or not.
    pub(super) fn is_done(&self) -> bool {
        self.copying.as_ref().is_none_or(Copying::is_done)
    }

    /// The chunk again, once the copy is over.
    pub(super) fn end(mut self) -> (Chunk, Result<()>) {
        let (pinned, ended) = match self.copying.take().map(Copying::wait) {
            Some((pinned, ended)) => (Some(pinned), ended),
            None => (None, Ok(())),
        };
        (Chunk { pinned, home: Arc::clone(&self.home) }, ended)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        if let Some(copying) = self.copying.take() {
            self.home.give_back(copying.wait().0);
        }
    }
}
