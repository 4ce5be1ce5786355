//! How a relay is doing.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde::{Serialize, Serializer};

use crate::{
    core::{Core, State},
    counters::Counters,
    memory::Memory,
    peers::Trust,
    process,
    puts::Seen,
    sync::atomic::Ordering,
};

/// A snapshot of a relay, for people and for dashboards; serialises to JSON.
///
/// The numbers are read one after another while transfers go on, so they need not add up exactly
/// unless the relay is at rest. Every field, and what it tells a stuck user, is in
/// [`guide::troubleshooting`](crate::guide::troubleshooting).
///
/// ```
/// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-health")?;
/// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
/// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
/// let health = relay.health();
/// assert_eq!((health.credits, health.free, health.published), (2, 1, 1));
/// let oldest = health.oldest.expect("a put is open");
/// assert_eq!(oldest.id, metadata.transfer_id());
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// `"healthy"`, `"degraded"` (the last looks at the engine failed, so that nothing is heard of
    /// peers), `"failed"` (a thread of the relay, or its engine, panicked), `"closed"` or `"forked"` (this is a
    /// forked child: the relay is its parent's, and nothing is known of it here).
    pub status: &'static str,
    /// Why the last look at the engine failed; none once a look works again.
    pub engine_error: Option<String>,
    /// The configured name.
    pub engine_id: String,
    /// The address under which peers reach this relay.
    pub session_id: String,
    /// This relay's random name, as 32 hexadecimal digits.
    pub instance: String,
    /// The engine's transport.
    pub protocol: String,
    /// Where the slots are: `"cpu"`, or `"cuda:0"`.
    pub device: String,
    /// Whether the slots are made of huge pages.
    pub huge_pages: bool,
    /// Bytes in a slot.
    pub slot_size: usize,
    /// How many slots puts share.
    pub credits: u32,
    /// How many of them are free. What is neither free, published nor quarantined is held by the
    /// relay's users: as slots, or in tokens that are done.
    pub free: usize,
    /// How many are published: put, and not ended yet.
    pub published: usize,
    /// Ended puts whose slots a peer may still be reading.
    pub quarantined: Vec<Holder>,
    /// How many callers wait for a slot in `acquire`.
    pub waiting: usize,
    /// How many receive slots are free.
    pub receive_free: usize,
    /// How many gets wait for a thread or a receive slot.
    pub queued: usize,
    /// How many gets are being read, those of `get_into` among them.
    pub reading: usize,
    /// How many of those are over, timed out or aborted, and wait for the engine to let go.
    pub unwanted: usize,
    /// How many receive slots the engine has kept after their reads, and may still write into.
    pub receive_kept: usize,
    /// The put that has been published longest.
    pub oldest: Option<Holder>,
    /// The get that was asked for longest ago and has not ended.
    pub oldest_get: Option<Getting>,
    /// Everybody this relay has read from lately.
    pub peers: Vec<PeerHealth>,
    /// How often each thing has happened.
    pub counters: AllCounters,
}

/// A get that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Getting {
    /// Whom it reads from: a session id.
    pub peer: String,
    /// How long ago it was asked for. Serialises as seconds.
    #[serde(serialize_with = "seconds")]
    pub age: Duration,
    /// Whether it is being read; if not, it waits for a thread or a receive slot.
    pub reading: bool,
}

/// How one peer answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerHealth {
    /// Its session id.
    pub session_id: String,
    /// `"good"` (it answered last time), `"unproven"` (it has not answered yet) or `"failed"`.
    pub state: &'static str,
    /// Which way bytes come from it: `"local"` (shared memory), `"tcp"`, or as the engine's protocol
    /// says. Into device memory: `"cuda-ipc"` (one copy, from device to device), `"local-staged"` (from
    /// shared memory, through pinned memory) or `"staged"` (by TCP, through pinned memory).
    pub way: String,
    /// How many of this relay's transfer threads are busy with it.
    pub busy: u32,
    /// How many gets from it ended well.
    pub done: u64,
    /// How many did not.
    pub failed: u64,
    /// Why the last of those failed.
    pub last_error: Option<String>,
    /// How long ago that was. Serialises as seconds.
    #[serde(serialize_with = "maybe_seconds")]
    pub last_error_age: Option<Duration>,
}

/// A put that holds a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// The slot's index.
    pub slot: u32,
    /// The transfer's id, as in its metadata. Whoever knows it can end the put.
    pub id: String,
    /// How long ago it was put, also if it is quarantined. Serialises as seconds.
    #[serde(serialize_with = "seconds")]
    pub age: Duration,
}

/// The relay's counters and, beside them, the engine's own; they serialise as one flat object.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct AllCounters {
    /// The relay's.
    #[serde(flatten)]
    pub relay: Counters,
    /// The engine's, by name: the embedded engine has `reads_tcp`, among others.
    #[serde(flatten)]
    pub engine: BTreeMap<&'static str, u64>,
}

/// What a close found; all zero if every transfer had ended before, and for a call whose time passed
/// while another call was closing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Closed {
    /// Puts that nobody had acknowledged; their tokens ended with `Error::Closed`.
    pub puts: usize,
    /// Gets that had not ended; likewise.
    pub gets: usize,
    /// Slots that a peer was still reading.
    pub quarantined: usize,
    /// Threads that did not end in time, and were left to themselves.
    pub threads: usize,
    /// Spans that the engine had not let go of; their pages stay mapped until it does, or for the
    /// process's life if it says that it cannot.
    pub spans_kept: usize,
}

/// So many looks at the engine that fail in a row are more than a hiccup.
const DEGRADED: u32 = 3;

impl Health {
    pub(crate) fn of<M: Memory>(core: &Core<M>, protocol: &str) -> Self {
        let unknown = Self::unknown(core, protocol);
        if !process::is_here() {
            return unknown;
        }
        let now = core.ticks(Instant::now());
        let holder = |seen: &Seen| Holder {
            slot: seen.id.slot,
            id: format!("{}_{}", core.engine_id, seen.id),
            age: seen.age(now),
        };
        let (quarantined, published): (Vec<_>, Vec<_>) =
            core.puts.each().partition(|seen| seen.quarantined);
        let (queued, reading) = core.gets.counts();
        let mut engine = BTreeMap::new();
        core.engine.counters(&mut |name, count| {
            engine.insert(name, count);
        });
        Self {
            status: match core.state() {
                State::Open if core.failing_polls.load(Ordering::Relaxed) >= DEGRADED => "degraded",
                State::Open => "healthy",
                State::Failed => "failed",
                State::Closed => "closed",
            },
            engine_error: core.poll_failure.lock().clone(),
            free: core.slots.credits().free(),
            published: published.len(),
            quarantined: quarantined.iter().map(holder).collect(),
            waiting: core.slots.credits().waiting(),
            receive_free: core.receive.credits().free(),
            queued,
            reading,
            unwanted: core.gets.unwanted(),
            receive_kept: core.receive.kept(),
            oldest: published.iter().min_by_key(|seen| seen.since).map(holder),
            oldest_get: core.gets.oldest().map(|(peer, since, reading)| Getting {
                peer: peer.to_string(),
                age: since.elapsed(),
                reading,
            }),
            peers: peers(core),
            counters: AllCounters { relay: core.counters.now(), engine },
            ..unknown
        }
    }

    /// What never changes, so that no lock is met: a forked child may have inherited it held.
    fn unknown<M: Memory>(core: &Core<M>, protocol: &str) -> Self {
        Self {
            status: "forked",
            engine_error: None,
            engine_id: core.engine_id.to_string(),
            session_id: core.session_id.to_string(),
            instance: core.ids.instance().to_string(),
            protocol: protocol.to_owned(),
            device: core.slots.memory().device(),
            huge_pages: core.slots.memory().huge(),
            slot_size: core.slots.slot_size(),
            credits: core.puts.slots() as u32,
            free: 0,
            published: 0,
            quarantined: Vec::new(),
            waiting: 0,
            receive_free: 0,
            queued: 0,
            reading: 0,
            unwanted: 0,
            receive_kept: 0,
            oldest: None,
            oldest_get: None,
            peers: Vec::new(),
            counters: AllCounters::default(),
        }
    }
}

fn peers<M: Memory>(core: &Core<M>) -> Vec<PeerHealth> {
    let mut peers = Vec::new();
    core.peers.each(|session_id, peer| {
        let (last, last_error) = peer.last_failure().unzip();
        peers.push(PeerHealth {
            session_id: session_id.to_owned(),
            state: match peer.trust() {
                Trust::Good => "good",
                Trust::Unproven => "unproven",
                Trust::Failed => "failed",
            },
            way: core.engine.way(session_id).unwrap_or_else(|| core.engine.protocol()).to_owned(),
            busy: peer.busy(),
            done: peer.done.load(Ordering::Relaxed),
            failed: peer.failed.load(Ordering::Relaxed),
            last_error,
            last_error_age: last.map(|at| at.elapsed()),
        });
    });
    peers
}

fn seconds<S: Serializer>(age: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(age.as_secs_f64())
}

fn maybe_seconds<S: Serializer>(age: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    age.as_ref().map(Duration::as_secs_f64).serialize(serializer)
}
