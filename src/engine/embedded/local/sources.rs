//! Everybody on this host whose slots we have mapped, or would: found by session id and instance.
//!
//! Each entry goes its own way, so that a get meets no lock of another peer's.
//!
//! ```text
//!   Unmet ──a get, one at a time──► Meeting ──► Met(source) ──it is gone──► no entry
//!     ▲                                │
//!     └────── after 10 s ── Refused ◄──┘
//! ```

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, OnceLock, Weak},
    time::{Duration, Instant},
};

use crossbeam::utils::CachePadded;
use parking_lot::{Condvar, Mutex, RwLock};

use super::source::Source;
use crate::{engine::Instance, memory::Span};

/// How long a peer that could not be met is left to TCP.
const REFUSED: Duration = Duration::from_secs(10);
const BUCKETS: usize = 64;
/// Beyond so many in a bucket, one that is not met is forgotten.
const ENTRIES: usize = 64;

#[derive(Debug)]
pub(super) struct Sources {
    buckets: [CachePadded<RwLock<Vec<Arc<Entry>>>>; BUCKETS],
    /// All that live, those too that have no entry any more, by the tokens of their sockets.
    all: Mutex<HashMap<usize, Weak<Source>>>,
}

#[derive(Debug)]
struct Entry {
    session: Arc<str>,
    instance: Instance,
    /// Of row Met, which no entry leaves: read without the lock.
    met: OnceLock<Arc<Source>>,
    state: Mutex<State>,
    settled: Condvar,
}

#[derive(Debug)]
enum State {
    Unmet,
    Meeting,
    Met,
    Refused(Instant),
}

/// What is known of a peer without a meeting.
#[derive(Debug)]
pub(super) enum Known {
    Met(Arc<Source>),
    /// It is reached by TCP for now.
    Elsewhere,
    /// Ask [`Sources::find`].
    Unsettled,
}

/// Why a meeting came to nothing.
#[derive(Debug)]
pub(super) enum Missed {
    /// The peer, or this host, has no such way.
    Refused,
    /// There was no time for it.
    NoTime,
}

impl Default for Sources {
    fn default() -> Self {
        let bucket = || CachePadded::new(RwLock::new(Vec::new()));
        Self { buckets: std::array::from_fn(|_| bucket()), all: Mutex::default() }
    }
}

impl Sources {
    /// What is known of the peer of that name. It takes no lock alone, and makes nothing.
    pub(super) fn known(&self, session: &str, instance: Instance) -> Known {
        let bucket = self.bucket(session).read();
        let first = bucket.iter().find(|entry| *entry.session == *session);
        // Notes of this session go to whom we read from last, who must be first.
        let Some(first) = first.filter(|first| first.instance == instance) else {
            return Known::Unsettled;
        };
        match first.met.get() {
            Some(source) if !source.is_gone() => Known::Met(Arc::clone(source)),
            // Kept until the server's thread has met the end of its socket, and told of it.
            Some(_) => Known::Elsewhere,
            None if first.is_refused() => Known::Elsewhere,
            None => Known::Unsettled,
        }
    }

    /// The source that notes for `session` go to.
    pub(super) fn latest(&self, session: &str) -> Option<Arc<Source>> {
        let bucket = self.bucket(session).read();
        bucket.iter().find(|entry| *entry.session == *session)?.source()
    }

    /// The source of that name; `meet` is called if it has to be met, by one thread at a time.
    /// `None`: go by TCP.
    pub(super) fn find(
        &self,
        session: &Arc<str>,
        instance: Instance,
        deadline: Instant,
        meet: impl FnOnce() -> Result<Arc<Source>, Missed>,
    ) -> Option<Arc<Source>> {
        let entry = self.entry(session, instance)?;
        let mut state = entry.state.lock();
        loop {
            match &*state {
                State::Met => return entry.source(),
                State::Refused(until) if Instant::now() < *until => return None,
                State::Refused(_) | State::Unmet => break,
                State::Meeting => {
                    if entry.settled.wait_until(&mut state, deadline).timed_out() {
                        return None;
                    }
                }
            }
        }
        *state = State::Meeting;
        drop(state);
        let met = meet();
        let mut state = entry.state.lock();
        let (next, source) = match met {
            Ok(source) => {
                let first = entry.met.set(Arc::clone(&source)).is_ok();
                debug_assert!(first, "an entry is met once");
                (State::Met, Some(source))
            }
            Err(Missed::Refused) => (State::Refused(Instant::now() + REFUSED), None),
            Err(Missed::NoTime) => (State::Unmet, None),
        };
        *state = next;
        entry.settled.notify_all();
        drop(state);
        // Whoever met its end before it stood here found nothing to forget.
        if let Some(source) = source.as_ref().filter(|source| source.is_gone()) {
            self.forget(source);
        }
        source
    }

    /// Keeps track of a new source, until it is dropped.
    pub(super) fn track(&self, token: usize, source: &Arc<Source>) {
        let mut all = self.all.lock();
        all.retain(|_, source| source.strong_count() > 0);
        all.insert(token, Arc::downgrade(source));
    }

    pub(super) fn tracked(&self, token: usize) -> Option<Arc<Source>> {
        self.all.lock().get(&token)?.upgrade()
    }

    /// Forgets a source that is gone; the next get tries to meet it again.
    pub(super) fn forget(&self, source: &Source) {
        let is_it = |entry: &Entry| entry.met.get().is_some_and(|met| std::ptr::eq(&**met, source));
        self.bucket(&source.session).write().retain(|entry| !is_it(entry));
    }

    /// Leaves all of them.
    pub(super) fn clear(&self) {
        for bucket in &self.buckets {
            bucket.write().clear();
        }
        for source in self.live() {
            source.leave();
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.live().iter().filter(|source| !source.is_gone()).count()
    }

    /// Whether we have a source of that instance that has not gone.
    pub(super) fn are_any_of(&self, instance: Instance) -> bool {
        self.live().iter().any(|source| source.instance == instance && !source.is_gone())
    }

    /// Ends the reads and views inside `span`, and waits until none fills it. False: `deadline`
    /// passed first.
    pub(super) fn end_inside(&self, span: Span, deadline: Instant) -> bool {
        let sources = self.live();
        sources.iter().for_each(|source| source.end(span));
        while sources.iter().any(|source| source.fills(span)) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }

    fn live(&self) -> Vec<Arc<Source>> {
        self.all.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The entry of that name, which is the first of its session afterwards. `None`: there is no
    /// room for it.
    fn entry(&self, session: &Arc<str>, instance: Instance) -> Option<Arc<Entry>> {
        let mut bucket = self.bucket(session).write();
        let known =
            bucket.iter().position(|entry| entry.instance == instance && entry.session == *session);
        let entry = match known {
            Some(index) => bucket.remove(index),
            None => {
                if bucket.len() >= ENTRIES {
                    let is_met = |entry: &Arc<Entry>| {
                        !matches!(&*entry.state.lock(), State::Unmet | State::Refused(_))
                    };
                    let last = bucket.iter().rposition(|entry| !is_met(entry))?;
                    bucket.remove(last);
                }
                let (state, settled) = (Mutex::new(State::Unmet), Condvar::new());
                let (session, met) = (Arc::clone(session), OnceLock::new());
                Arc::new(Entry { session, instance, met, state, settled })
            }
        };
        bucket.insert(0, Arc::clone(&entry));
        Some(entry)
    }

    fn bucket(&self, session: &str) -> &RwLock<Vec<Arc<Entry>>> {
        // Eight bytes at a time. Peers choose their names, and gain nothing by sharing a bucket.
        let (words, rest) = session.as_bytes().as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let hash = words.iter().chain([&last]).fold(0, |hash, word| {
            let mixed = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ mixed >> 32
        });
        &self.buckets[(hash >> 48) as usize % BUCKETS]
    }
}

impl Entry {
    fn source(&self) -> Option<Arc<Source>> {
        // Kept when it is gone until the server's thread has met the end of its socket, and told of it.
        self.met.get().filter(|source| !source.is_gone()).cloned()
    }

    fn is_refused(&self) -> bool {
        matches!(&*self.state.lock(), State::Refused(until) if Instant::now() < *until)
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        for source in mem::take(self.all.get_mut()).into_values().filter_map(|it| it.upgrade()) {
            source.leave();
        }
    }
}
