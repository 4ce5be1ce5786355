//! The notifications that have arrived and wait for `poll`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crossbeam::queue::ArrayQueue;

use crate::{doorbell::Doorbell, engine::Notification};

/// How many bytes of text wait at most. Our own notes have about 100.
const TEXT_LIMIT: usize = 16 << 20;

/// A bounded queue: one that is full says so to the sender, who tries again.
#[derive(Debug)]
pub(super) struct Inbox {
    notes: ArrayQueue<Notification>,
    text: AtomicUsize,
    bell: Arc<Doorbell>,
}

impl Inbox {
    /// Room for `capacity` notes, which is not zero.
    pub(super) fn new(capacity: usize, bell: Arc<Doorbell>) -> Self {
        Self { notes: ArrayQueue::new(capacity), text: AtomicUsize::new(0), bell }
    }

    /// Whether there was room for it.
    pub(super) fn push(&self, note: Notification) -> bool {
        let text = text_len(&note);
        // Relaxed: a count of bytes publishes nothing.
        let waiting = self.text.fetch_add(text, Ordering::Relaxed);
        if waiting.saturating_add(text) > TEXT_LIMIT || self.notes.push(note).is_err() {
            self.text.fetch_sub(text, Ordering::Relaxed);
            return false;
        }
        self.bell.ring();
        true
    }

    /// Hands out what waits; what arrives meanwhile may be left for the next call.
    pub(super) fn drain(&self, each: &mut dyn FnMut(Notification)) {
        for _ in 0..self.notes.capacity() {
            let Some(note) = self.notes.pop() else { return };
            self.text.fetch_sub(text_len(&note), Ordering::Relaxed);
            each(note);
        }
    }

    pub(super) fn bell(&self) -> &Doorbell {
        &self.bell
    }
}

fn text_len(note: &Notification) -> usize {
    note.name().len() + note.message().len()
}
