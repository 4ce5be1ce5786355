//! The peers that were asked for their segment, and what is known of each.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use mooncake_sys::SegmentId;
use parking_lot::{Condvar, Mutex, RwLock};

use super::{
    aside::{self, LOOK},
    config::peer_name,
    ranges::Ranges,
    shared::{Shared, Until},
};
use crate::{
    engine::Instance,
    error::{Error, Result},
};

/// How long a peer that has answered is taken to answer again: so long the engine is called on the
/// caller's own thread, which nothing can call back.
const TRUSTED: Duration = Duration::from_secs(1);

/// Peers that are remembered; beyond, the one that answered longest ago is forgotten.
const MOST: usize = 4096;

/// A peer's latest relays; metadata of any other has its segment asked for anew.
const INSTANCES: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Peers(RwLock<HashMap<Arc<str>, Arc<Peer>>>);

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) name: Arc<str>,
    text: CString,
    state: Mutex<State>,
    opened: Condvar,
    /// When it last answered, in nanoseconds of the engine's life; 0: not, or not since it failed.
    answered: AtomicU64,
}

#[derive(Debug)]
struct State {
    segment: Segment,
    /// Something failed since: it is asked for anew.
    stale: bool,
    /// Why the last time failed.
    failure: String,
    instances: ArrayVec<Instance, INSTANCES>,
    /// It was asked before any relay of it was known: the first that is, is taken for that one.
    is_new: bool,
    /// What it had registered when it was asked last; `None`: it does not say.
    ranges: Option<Arc<Ranges>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Segment {
    Closed,
    /// A thread asks for it.
    Opening,
    Open(SegmentId),
}

/// A peer's segment, and whether it was asked for by this call.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) id: SegmentId,
    pub(super) fresh: bool,
    ranges: Option<Arc<Ranges>>,
}

impl Opened {
    /// Whether the peer has registered these bytes, or may have.
    pub(super) fn may_have(&self, addr: u64, len: usize) -> bool {
        self.ranges.as_ref().is_none_or(|ranges| ranges.contain(addr, len))
    }

    /// Where anybody may read `len` bytes of it at any time.
    pub(super) fn open_to_all(&self, len: usize) -> Option<u64> {
        self.ranges.as_ref()?.open_to_all(len as u64)
    }
}

impl Peers {
    pub(super) fn find(&self, name: &str, p2p: bool) -> Result<Arc<Peer>> {
        if let Some(known) = self.0.read().get(name) {
            return Ok(Arc::clone(known));
        }
        let text = peer_name(name, p2p)?;
        let mut peers = self.0.write();
        if peers.len() >= MOST {
            let oldest = peers.values().min_by_key(|peer| peer.answered.load(Ordering::Relaxed));
            let oldest = oldest.map(|peer| Arc::clone(&peer.name));
            oldest.and_then(|name| peers.remove(&name));
        }
        let name: Arc<str> = name.into();
        let peer = peers.entry(Arc::clone(&name)).or_insert_with(|| {
            Arc::new(Peer {
                name,
                text,
                state: Mutex::new(State {
                    segment: Segment::Closed,
                    stale: false,
                    failure: String::new(),
                    instances: ArrayVec::new(),
                    is_new: false,
                    ranges: None,
                }),
                opened: Condvar::new(),
                answered: AtomicU64::new(0),
            })
        });
        Ok(Arc::clone(peer))
    }

    pub(super) fn count(&self) -> usize {
        self.0.read().len()
    }

    /// It has never answered, and may never: names from outside must not pile up.
    fn forget(&self, peer: &Arc<Peer>) {
        let mut peers = self.0.write();
        if peers.get(&peer.name).is_some_and(|known| Arc::ptr_eq(known, peer)) {
            peers.remove(&peer.name);
        }
    }
}

impl Peer {
    /// Its segment: the one that is known, unless it failed or belongs to a relay that is new here.
    /// One thread asks for it; everybody else waits for that one.
    pub(super) fn segment(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        instance: Option<Instance>,
        until: &Until<'_>,
    ) -> Result<Opened> {
        let mut state = self.state.lock();
        if let Segment::Open(id) = state.segment
            && !state.stale
            && instance.is_none_or(|instance| state.instances.contains(&instance) || state.is_new)
        {
            state.know(instance);
            return Ok(state.opened(id, false));
        }
        if state.segment != Segment::Opening {
            state.segment = Segment::Opening;
            let (peer, shared) = (Arc::clone(self), Arc::clone(shared));
            if !aside::begin(move || peer.open(&shared, instance)) {
                state.segment = Segment::Closed;
                return Err(Error::peer_failed(&self.name, TOO_MANY));
            }
        }
        loop {
            match state.segment {
                Segment::Open(id) => {
                    state.know(instance);
                    return Ok(state.opened(id, true));
                }
                Segment::Closed => return Err(Error::peer_failed(&self.name, &state.failure)),
                Segment::Opening => {}
            }
            until.check()?;
            let wake = until.deadline().min(Instant::now() + LOOK);
            self.opened.wait_until(&mut state, wake);
        }
    }

    /// As [`segment`](Self::segment), and one that has `len` bytes at `addr`, as far as it says.
    pub(super) fn segment_with(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        instance: Option<Instance>,
        (addr, len): (u64, usize),
        until: &Until<'_>,
    ) -> Result<Opened> {
        let mut opened = self.segment(shared, instance, until)?;
        if !opened.may_have(addr, len) && !opened.fresh {
            // It may have registered them since.
            self.outdate();
            opened = self.segment(shared, instance, until)?;
        }
        if opened.may_have(addr, len) {
            Ok(opened)
        } else {
            let reason = format!("it has not registered {len} bytes at {addr:#x}");
            Err(Error::rejected(&self.name, reason))
        }
    }

    /// Asks for the segment, on a thread of its own.
    fn open(self: &Arc<Self>, shared: &Arc<Shared>, instance: Option<Instance>) {
        let opened = shared.native.open_segment(&self.text).and_then(|id| {
            // With a metadata server the name is no address.
            if !shared.p2p {
                return Ok((id, None));
            }
            // The engine goes on with what it knew of a peer that is gone.
            let ranges = Ranges::ask(&self.name);
            let ranges =
                ranges.map_err(|error| format!("asking it what it has failed: {error}"))?;
            Ok((id, Some(Arc::new(ranges))))
        });
        let mut state = self.state.lock();
        match opened {
            Ok((id, ranges)) => {
                (state.segment, state.stale) = (Segment::Open(id), false);
                state.ranges = ranges;
                state.is_new = state.instances.is_empty();
                state.know(instance);
                self.answers(shared);
                shared.counters.segments.fetch_add(1, Ordering::Relaxed);
            }
            Err(reason) => {
                (state.segment, state.failure) = (Segment::Closed, reason);
                shared.peers.forget(self);
            }
        }
        self.opened.notify_all();
    }

    /// It has answered just now.
    pub(super) fn answers(&self, shared: &Shared) {
        self.answered.store(shared.nanos(), Ordering::Relaxed);
    }

    /// It may have changed: it is asked anew the next time.
    pub(super) fn outdate(&self) {
        self.state.lock().stale = true;
    }

    /// It has failed: it is asked anew, and by a thread aside, the next time.
    pub(super) fn failed(&self) {
        self.answered.store(0, Ordering::Relaxed);
        self.outdate();
    }

    /// Whether a call to it may be made on the caller's thread.
    pub(super) fn is_trusted(&self, shared: &Shared) -> bool {
        let answered = self.answered.load(Ordering::Relaxed);
        answered != 0 && shared.nanos() - answered < TRUSTED.as_nanos() as u64
    }
}

impl State {
    fn opened(&self, id: SegmentId, fresh: bool) -> Opened {
        Opened { id, fresh, ranges: self.ranges.clone() }
    }

    fn know(&mut self, instance: Option<Instance>) {
        let Some(instance) = instance else { return };
        self.is_new = false;
        if !self.instances.contains(&instance) {
            if self.instances.is_full() {
                self.instances.remove(0);
            }
            self.instances.push(instance);
        }
    }
}

pub(super) const TOO_MANY: &str = "too many peers do not answer: no thread is left to ask it";
