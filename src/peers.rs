//! What is known of each peer: whether it answers.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use foldhash::quality::RandomState;
use parking_lot::{Mutex, RwLock};

use crate::{
    error::Error,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
};

/// Everybody this relay has read from lately.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// By a keyed hash that need not be strong: it shows nowhere, and there are [`REMEMBERED`] at the most.
    known: RwLock<HashMap<Arc<str>, Arc<Peer>, RandomState>>,
}

/// More than this many are not remembered; those with nothing under way are forgotten first.
const REMEMBERED: usize = 4096;

/// So many misses in a row are more than a busy machine's.
const STUCK: u32 = 3;

/// One peer.
#[derive(Debug)]
pub(crate) struct Peer {
    trust: AtomicU8,
    /// How many times in a row it did not answer in the time that it was given; more, if a read of it
    /// was held up.
    misses: AtomicU32,
    /// How many transfer threads are busy with it.
    busy: AtomicU32,
    /// How many gets ended well, and how many did not.
    pub(crate) done: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// The last failure, and when it was.
    last_failure: Mutex<Option<(Instant, String)>>,
}

/// Whether a peer answers. Nothing is for ever: each transfer says anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Trust {
    /// It has not answered yet.
    Unproven,
    /// It answered last time.
    Good,
    /// It failed last time.
    Failed,
}

impl Peers {
    /// The peer at `session`, known or not.
    pub(crate) fn at(&self, session: &Arc<str>) -> Arc<Peer> {
        if let Some(peer) = self.known.read().get(session) {
            return Arc::clone(peer);
        }
        let mut known = self.known.write();
        if known.len() >= REMEMBERED {
            known.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let fresh = || {
            Arc::new(Peer {
                trust: AtomicU8::new(Trust::Unproven as u8),
                misses: AtomicU32::new(0),
                busy: AtomicU32::new(0),
                done: AtomicU64::new(0),
                failed: AtomicU64::new(0),
                last_failure: Mutex::default(),
            })
        };
        Arc::clone(known.entry(Arc::clone(session)).or_insert_with(fresh))
    }

    /// Hands each peer to `each`, with its session id.
    pub(crate) fn each(&self, mut each: impl FnMut(&str, &Peer)) {
        for (session, peer) in self.known.read().iter() {
            each(session, peer);
        }
    }
}

impl Peer {
    pub(crate) fn trust(&self) -> Trust {
        match self.trust.load(Ordering::Relaxed) {
            1 => Trust::Good,
            2 => Trust::Failed,
            _ => Trust::Unproven,
        }
    }

    /// Whether that is news.
    pub(crate) fn learn(&self, trust: Trust) -> bool {
        let is_news = self.trust() != trust;
        if is_news {
            self.trust.store(trust as u8, Ordering::Relaxed);
        }
        // Also where that is no news: a read may end well just when it is found to be stuck.
        if trust == Trust::Good && self.misses() > 0 {
            self.misses.store(0, Ordering::Relaxed);
        }
        is_news
    }

    pub(crate) fn misses(&self) -> u32 {
        self.misses.load(Ordering::Relaxed)
    }

    pub(crate) fn count_miss(&self, given: Duration) {
        self.misses.fetch_add(1, Ordering::Relaxed);
        *self.last_failure.lock() = Some((Instant::now(), format!("no answer in {given:?}")));
    }

    /// It holds up a read that others wait for. That weighs as much as tries of that length.
    pub(crate) fn found_stuck(&self) {
        self.learn(Trust::Failed);
        self.misses.fetch_max(STUCK, Ordering::Relaxed);
    }

    /// Whether it has not failed last time, or has only not been quick: what is busy may be.
    pub(crate) fn may_answer(&self) -> bool {
        self.trust() != Trust::Failed || self.misses() < STUCK
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy() > 0
    }

    pub(crate) fn busy(&self) -> u32 {
        self.busy.load(Ordering::Relaxed)
    }

    pub(crate) fn count_done(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_failure(&self, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        *self.last_failure.lock() = Some((Instant::now(), error.to_string()));
    }

    /// The last failure, and when it was.
    pub(crate) fn last_failure(&self) -> Option<(Instant, String)> {
        self.last_failure.lock().clone()
    }

    pub(crate) fn begin(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.busy.fetch_sub(1, Ordering::Relaxed);
    }
}
