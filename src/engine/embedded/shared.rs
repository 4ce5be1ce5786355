//! What the engine and its server's thread both use.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crossbeam::utils::CachePadded;
use parking_lot::{Mutex, RwLock};

use super::{
    builder::{Endpoint, Limits, Patience},
    frame::Descriptor,
    inbox::Inbox,
    local::Local,
    staging::{Stager, Staging},
};
use crate::{
    engine::{Access, Instance, exports::Exports},
    memory::Span,
};

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) endpoint: Endpoint,
    pub(super) limits: Limits,
    pub(super) patience: Patience,
    /// How device memory is reached, if at all.
    pub(super) staging: Option<Staging>,
    /// While a relay in device memory uses it.
    pub(super) stager: RwLock<Option<Arc<Stager>>>,
    pub(super) exports: Arc<Exports>,
    pub(super) inbox: Inbox,
    pub(super) local: Local,
    /// Locked by each put.
    pub(super) spans: CachePadded<Mutex<Vec<(Span, Access)>>>,
    pub(super) counters: Counters,
    /// The server's thread has ended, and nobody stopped it.
    pub(super) failed: AtomicBool,
}

impl Shared {
    pub(super) fn stager(&self) -> Option<Arc<Stager>> {
        self.stager.read().clone()
    }

    pub(super) fn descriptor(&self, instance: Instance) -> Descriptor {
        let spans = self.spans.lock();
        let published = spans.iter().filter(|(_, access)| *access == Access::Published);
        Descriptor {
            name: self.endpoint.session_id.clone(),
            data_host: Some(self.endpoint.host.clone()),
            data_port: self.endpoint.data_port,
            version: 2,
            instance: Some(instance),
            buffers: published.map(|(span, _)| (span.addr(), span.len as u64)).collect(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_served: AtomicU64,
    /// Requests that were not served.
    pub(super) refused: AtomicU64,
    pub(super) notes_refused: AtomicU64,
    pub(super) connections: AtomicU64,
    pub(super) connections_open: AtomicU64,
    pub(super) connections_refused: AtomicU64,
}

impl Counters {
    /// Hands each counter to `each`.
    pub(super) fn each(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let values = [
            ("bytes_served", &self.bytes_served),
            ("refused", &self.refused),
            ("notes_refused", &self.notes_refused),
            ("connections", &self.connections),
            ("connections_open", &self.connections_open),
            ("connections_refused", &self.connections_refused),
        ];
        for (name, value) in values {
            each(name, value.load(Ordering::Relaxed));
        }
    }
}
