//! What is known of the peers, and the connections kept to them.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use crossbeam::{
    channel::{self, Receiver, Sender},
    select,
};
use parking_lot::Mutex;

use super::{connection::Connection, operation::Operation};
use crate::{
    engine::{Instance, embedded::address::Address},
    error::{Error, Result},
};

/// Connections kept to one peer while nobody uses them.
const IDLE_PER_PEER: usize = 8;
/// Peers remembered; beyond it the one that was used longest ago is forgotten.
const PEERS: usize = 1024;

/// All peers, by their session ids.
#[derive(Debug, Default)]
pub(super) struct Peers {
    table: Mutex<HashMap<Arc<str>, Arc<Peer>>>,
    clock: AtomicU64,
}

impl Peers {
    /// The peer of that name, which may be new to us.
    pub(super) fn find(&self, name: &str) -> Result<Arc<Peer>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut table = self.table.lock();
        if let Some(peer) = table.get(name) {
            peer.used.store(now, Ordering::Relaxed);
            return Ok(Arc::clone(peer));
        }
        match Address::parse(name) {
            Ok(Address { port: 0, .. }) => {
                return Err(Error::metadata("session_id", "nobody listens on port 0"));
            }
            Ok(_) => {}
            Err(malformed) => return Err(Error::metadata("session_id", malformed.to_string())),
        }
        let peer = Arc::new(Peer { name: name.into(), used: now.into(), state: Mutex::default() });
        if table.len() < PEERS || make_room(&mut table) {
            table.insert(Arc::clone(&peer.name), Arc::clone(&peer));
        }
        Ok(peer)
    }

    /// Closes the connections that nobody uses.
    pub(super) fn close_idle(&self) {
        for peer in self.table.lock().values() {
            peer.state.lock().idle.clear();
        }
    }

    /// Closes those connections that nobody uses and that their peers have closed.
    pub(super) fn drop_dead(&self) {
        for peer in self.table.lock().values() {
            peer.state.lock().idle.retain(|connection| connection.socket.is_quiet());
        }
    }

    /// Forgets every peer.
    pub(super) fn clear(&self) {
        self.table.lock().clear();
    }
}

/// False: every peer is in use at this moment, and the new one goes unremembered.
fn make_room(table: &mut HashMap<Arc<str>, Arc<Peer>>) -> bool {
    let unused = table.values().filter(|peer| Arc::strong_count(peer) == 1);
    let oldest = unused.min_by_key(|peer| peer.used.load(Ordering::Relaxed));
    let Some(name) = oldest.map(|peer| Arc::clone(&peer.name)) else { return false };
    table.remove(&name).is_some()
}

/// One peer.
#[derive(Debug)]
pub(super) struct Peer {
    /// Its session id.
    pub(super) name: Arc<str>,
    used: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    endpoint: Option<Arc<Endpoint>>,
    /// Which endpoint the idle connections lead to.
    epoch: u64,
    idle: ArrayVec<Connection, IDLE_PER_PEER>,
    /// The thread that asks the peer, if one does.
    asking: Option<Asked>,
    /// How long connects have waited in all since one was answered.
    unanswered: Duration,
}

/// What others see of the thread that asks.
#[derive(Clone, Debug)]
struct Asked {
    /// Disconnected once it has an answer, or none.
    done: Receiver<Infallible>,
    /// Why it has none, if that is the peer's doing.
    failed: Arc<OnceLock<String>>,
}

/// What a peer's descriptor said.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// When it was asked for.
    pub(super) asked: Instant,
    /// Marks the connections that lead to it; [`Peer::endpoint`] sets it.
    pub(super) epoch: u64,
    /// The peer's own name, to which notifications go; not checked.
    pub(super) name: String,
    /// The control port that answered.
    pub(super) control: SocketAddr,
    /// The addresses of the data port.
    pub(super) data: Vec<SocketAddr>,
    /// The version of the data protocol.
    pub(super) version: u32,
    /// The relay behind it, if it is one of ours.
    pub(super) instance: Option<Instance>,
}

impl Endpoint {
    /// Whether the peer answers by statuses. Older ones may close after each request, so that a
    /// connection to them is never kept.
    pub(super) fn has_status(&self) -> bool {
        self.version >= 2
    }

    /// Whether a connection to `other` is as good.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let facts = |it: &Self| (it.instance, it.has_status());
        facts(self) == facts(other) && self.data == other.data
    }
}

impl Peer {
    /// What is known of the peer, if it was asked for at `since` or later; else it is asked, by
    /// one thread at a time. Whoever waits for that thread shares its answer, and its failure.
    pub(super) fn endpoint(
        &self,
        operation: &Operation<'_>,
        since: Option<Instant>,
        ask: impl FnOnce() -> Result<Endpoint>,
    ) -> Result<Arc<Endpoint>> {
        let asking = loop {
            let asking = {
                let mut state = self.state.lock();
                if let Some(endpoint) = &state.endpoint
                    && since.is_none_or(|since| endpoint.asked >= since)
                {
                    return Ok(Arc::clone(endpoint));
                }
                match &state.asking {
                    Some(asking) => asking.clone(),
                    None => {
                        let (tx, done) = channel::bounded(0);
                        let failed = Arc::default();
                        state.asking = Some(Asked { done, failed: Arc::clone(&failed) });
                        break Asking { peer: self, failed, _done: tx };
                    }
                }
            };
            let left = operation.deadline.saturating_duration_since(Instant::now());
            select! {
                recv(asking.done) -> _ => if let Some(reason) = asking.failed.get() {
                    return Err(Error::peer_failed(&self.name, reason));
                },
                recv(operation.cancelled()) -> _ => return Err(Error::Closed),
                default(left) => return Err(Error::TimedOut),
            }
        };
        let mut endpoint = ask().inspect_err(|error| {
            // A deadline is only the asker's own.
            if let Error::PeerFailed { reason, .. } = error {
                let _ = asking.failed.set(reason.clone());
            }
        })?;
        let mut state = self.state.lock();
        if !state.endpoint.as_ref().is_some_and(|old| old.is_same(&endpoint)) {
            state.forget();
        }
        endpoint.epoch = state.epoch;
        let endpoint = Arc::new(endpoint);
        state.endpoint = Some(Arc::clone(&endpoint));
        Ok(endpoint)
    }

    /// How many wait for the thread that asks.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        // Who asks has a share, and so has this peer.
        let shares = |asking: &Asked| Arc::strong_count(&asking.failed) - 2;
        self.state.lock().asking.as_ref().map_or(0, shares)
    }

    /// A connect was answered, if only by a refusal.
    pub(super) fn answered(&self) {
        self.state.lock().unanswered = Duration::ZERO;
    }

    /// Nothing answered a connect for so long; whether that makes `limit` in all, by several short
    /// tries as by one long.
    pub(super) fn unanswered(&self, waited: Duration, limit: Duration) -> bool {
        let mut state = self.state.lock();
        state.unanswered = state.unanswered.saturating_add(waited);
        let over = state.unanswered >= limit;
        if over {
            state.unanswered = Duration::ZERO;
        }
        over
    }

    /// A connection that nobody uses, and what it leads to, which is another relay.
    pub(super) fn kept(&self) -> Option<(Arc<Endpoint>, Connection)> {
        let mut state = self.state.lock();
        let endpoint = state.endpoint.clone().filter(|endpoint| endpoint.instance.is_some())?;
        Some((endpoint, state.idle.pop()?))
    }

    /// A connection that nobody uses.
    pub(super) fn idle(&self) -> Option<Connection> {
        self.state.lock().idle.pop()
    }

    /// Keeps a connection for the next call, if there is room and it leads where the next call
    /// would go.
    pub(super) fn keep(&self, mut connection: Connection) {
        connection.is_kept = true;
        let mut state = self.state.lock();
        if connection.epoch == state.epoch {
            // Over the limit it is closed.
            let _ = state.idle.try_push(connection);
        }
    }

    /// Closes the connections that nobody uses: one of them was found dead.
    pub(super) fn close_idle(&self) {
        self.state.lock().idle.clear();
    }

    /// `endpoint` failed: the next call asks the peer afresh.
    pub(super) fn forget(&self, endpoint: &Endpoint) {
        let mut state = self.state.lock();
        if endpoint.epoch == state.epoch {
            state.forget();
        }
    }
}

impl State {
    fn forget(&mut self) {
        self.endpoint = None;
        self.epoch += 1;
        self.idle.clear();
    }
}

/// This thread is the one that asks.
struct Asking<'a> {
    peer: &'a Peer,
    failed: Arc<OnceLock<String>>,
    /// Wakes the others when it goes.
    _done: Sender<Infallible>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.peer.state.lock().asking = None;
    }
}
