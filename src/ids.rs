//! Where names come from: one key of the system's, then no system call per put.

use crossbeam::utils::CachePadded;
use siphasher::sip::SipHasher24;

use crate::{
    error::{Error, Result},
    identity::{Instance, TransferId},
    sync::atomic::{AtomicU64, Ordering},
};

/// A relay's source of ids, stamps and its instance.
pub(crate) struct Ids {
    instance: Instance,
    ids: Key,
    stamps: Key,
    requests: Key,
    /// On lines of its own: the keys are read by whoever puts.
    puts: CachePadded<AtomicU64>,
}

type Key = [u8; 16];

impl Ids {
    /// Draws the keys.
    pub(crate) fn new() -> Result<Self> {
        let draw = || {
            let mut bytes = [0; 16];
            getrandom::fill(&mut bytes)
                .map(|()| bytes)
                .map_err(|error| Error::Io(std::io::Error::other(format!("getrandom: {error}"))))
        };
        Ok(Self {
            instance: Instance::from_bytes(draw()?),
            ids: draw()?,
            stamps: draw()?,
            requests: draw()?,
            puts: CachePadded::default(),
        })
    }

    pub(crate) fn instance(&self) -> Instance {
        self.instance
    }

    /// A fresh id. Those seen tell nothing of others: each is a keyed hash of a counter.
    pub(crate) fn id(&self, slot: u32, generation: u32) -> TransferId {
        let count = self.puts.fetch_add(1, Ordering::Relaxed);
        TransferId { random: hash(&self.ids, &count.to_le_bytes()), slot, generation }
    }

    /// The stamp of a put, never 0. It tells nothing of the id, so whoever reads a stamp cannot
    /// forge an acknowledgement.
    pub(crate) fn stamp(&self, id: TransferId) -> u64 {
        hash(&self.stamps, &id.to_bytes()).max(1)
    }

    /// A request's number, never 0.
    pub(crate) fn request(&self, request_id: &str) -> u64 {
        hash(&self.requests, request_id.as_bytes()).max(1)
    }
}

fn hash(key: &Key, bytes: &[u8]) -> u64 {
    SipHasher24::new_with_key(key).hash(bytes)
}

impl std::fmt::Debug for Ids {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ids").field("instance", &self.instance).finish_non_exhaustive()
    }
}
