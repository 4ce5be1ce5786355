//! Completions that a full channel has not taken yet.

use std::collections::VecDeque;

use crossbeam::channel::{Sender, TrySendError};
use parking_lot::Mutex;

use crate::{
    sync::atomic::{AtomicUsize, Ordering},
    token::Completion,
};

/// Completions in the order in which they are owed, whatever their channel.
pub(crate) struct Backlog<T> {
    /// The length of `owed`, readable without its lock.
    waiting: AtomicUsize,
    owed: Mutex<VecDeque<Owed<T>>>,
}

/// A completion, and the channel that it is for.
type Owed<T> = (Sender<Completion<T>>, Completion<T>);

impl<T> Default for Backlog<T> {
    fn default() -> Self {
        Self { waiting: AtomicUsize::new(0), owed: Mutex::default() }
    }
}

impl<T> Backlog<T> {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Sends `completion`, or keeps it behind what its channel is owed already. True: it was kept,
    /// and somebody must call [`Self::flush`] later. A gone receiver's completion is dropped.
    pub(crate) fn offer(&self, tx: Sender<Completion<T>>, completion: Completion<T>) -> bool {
        if self.is_empty() {
            match tx.try_send(completion) {
                Ok(()) | Err(TrySendError::Disconnected(_)) => false,
                Err(TrySendError::Full(completion)) => self.keep(tx, completion),
            }
        } else {
            self.keep(tx, completion)
        }
    }

    /// Offers again what waits.
    pub(crate) fn flush(&self) {
        if self.is_empty() {
            return;
        }
        let mut gone = Vec::new();
        let mut owed = self.owed.lock();
        let mut full: Vec<Sender<Completion<T>>> = Vec::new();
        for _ in 0..owed.len() {
            let Some((tx, completion)) = owed.pop_front() else { break };
            if full.iter().any(|other| other.same_channel(&tx)) {
                owed.push_back((tx, completion));
                continue;
            }
            match tx.try_send(completion) {
                Ok(()) => {}
                Err(TrySendError::Disconnected(completion)) => gone.push(completion),
                Err(TrySendError::Full(completion)) => {
                    full.push(tx.clone());
                    owed.push_back((tx, completion));
                }
            }
        }
        self.waiting.store(owed.len(), Ordering::Release);
        drop(owed);
        // Outside the lock: a slot goes back.
        drop(gone);
    }

    #[cold]
    fn keep(&self, tx: Sender<Completion<T>>, completion: Completion<T>) -> bool {
        let mut owed = self.owed.lock();
        let completion = if owed.iter().any(|(other, _)| other.same_channel(&tx)) {
            completion
        } else {
            // Another channel's backlog is none of its business.
            match tx.try_send(completion) {
                Ok(()) | Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(completion)) => completion,
            }
        };
        owed.push_back((tx, completion));
        self.waiting.store(owed.len(), Ordering::Release);
        true
    }
}
