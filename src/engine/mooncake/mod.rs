//! The real Mooncake engine, through `mooncake-sys`.
//!
//! It cannot cancel and knows no identities: what nobody waits for any more is parked until it is
//! quiet, no read is verified, and nothing is known of who reads from us.

mod aside;
mod config;
mod connection;
mod flight;
mod many;
mod native;
mod peers;
mod ranges;
mod shared;
mod spans;

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

pub use self::{config::MooncakeConfig, connection::MooncakeConnection, flight::Opcode};
use self::{
    connection::UNREGISTER,
    flight::{Landed, Task},
    native::broken,
    shared::Until,
};
use super::{
    Access, Engine, Event, Filled, Instance, LocalBuffer, Notification, Publication, ReadError,
    RemoteBuffer,
};
use crate::{
    error::{Error, Result},
    memory::{Device, Span},
    process,
};

/// The real Mooncake Transfer Engine: RDMA, NVLink, or TCP between Mooncake's own processes.
///
/// It serves whatever is registered, to whoever reaches its ports, and lets them write it too: such
/// ports belong on a trusted network only. It knows no identities, so that the relay reads a put's
/// stamp after its bytes; and it cannot end a transfer, so that a get that times out has its error
/// at once and its slot once the engine is through with it.
///
/// ```no_run
/// use std::sync::Arc;
/// use mooncake_relay::{Config, MooncakeConfig, MooncakeEngine, Relay};
///
/// let config = MooncakeConfig { hostname: "10.0.0.7".into(), ..MooncakeConfig::default() };
/// let engine = Arc::new(MooncakeEngine::open(&config)?);
/// let relay = Relay::new(engine, &Config::default())?;
/// println!("peers reach us at {}", relay.health().session_id);
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Debug)]
pub struct MooncakeEngine {
    connection: MooncakeConnection,
    is_started: Mutex<bool>,
}

impl MooncakeEngine {
    /// Loads the library, unless it is loaded, and makes an engine of it.
    ///
    /// ```
    /// use mooncake_relay::{Error, MooncakeConfig, MooncakeEngine};
    /// let config = MooncakeConfig { protocol: "pigeon".into(), ..MooncakeConfig::default() };
    /// assert!(matches!(MooncakeEngine::open(&config), Err(Error::Config { field: "protocol", .. })));
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MooncakeConnection::open`].
    pub fn open(config: &MooncakeConfig) -> Result<Self> {
        let connection = MooncakeConnection::open(config)?;
        Ok(Self { connection, is_started: Mutex::new(false) })
    }

    /// The engine's own calls, for memory of one's own beside the relay's.
    pub fn connection(&self) -> &MooncakeConnection {
        &self.connection
    }

    /// One transfer with a slot. A read that fails, although the peer answers and has those bytes, is
    /// tried again: the engine may have known an outdated peer, or connections that are gone, and
    /// then it fails at once, or pauses for a second, before it connects anew.
    fn move_slot(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        opcode: Opcode,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        let shared = &self.connection.shared;
        let until = match shared.until(deadline, [local.span()]) {
            Ok(until) => until,
            Err(error) => return Err(ReadError { error, buffer: Some(local) }),
        };
        if remote.len == 0 {
            return Ok(local); // the engine knows no transfer of nothing
        }
        let patience = Instant::now() + RECOVERY;
        let mut landed = self.try_move(remote, local, opcode, &until)?;
        for _ in 1..ATTEMPTS {
            let may_repeat = opcode == Opcode::Read
                && matches!(landed.outcome, Err(Error::PeerFailed { .. }))
                && Instant::now() < patience
                && until.check().is_ok();
            let Some(local) = landed.buffer.take_if(|_| may_repeat) else { break };
            // A peer that serves only what is published may have refused.
            if remote.stamp.is_some()
                && let Err(error @ Error::Stale { .. }) = self.check_stamp(remote, deadline)
            {
                return Err(ReadError { error, buffer: Some(local) });
            }
            // The peer is asked anew first: one that is gone fails here at once.
            landed = self.try_move(remote, local, opcode, &until)?;
        }
        delivered(landed)
    }

    fn try_move(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        opcode: Opcode,
        until: &Until<'_>,
    ) -> Result<Landed, ReadError> {
        let shared = &self.connection.shared;
        let prepared = shared.spans.lease(local.span()).and_then(|lease| {
            let peer = shared.peers.find(&remote.peer, shared.p2p)?;
            let instance = remote.identity.map(|identity| identity.instance);
            let range = (remote.ptr, remote.len);
            let segment = peer.segment_with(shared, instance, range, until)?.id;
            Ok((lease, peer, segment))
        });
        let (lease, peer, segment) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(ReadError { error, buffer: Some(local) }),
        };
        let tasks = vec![Task::new(remote.ptr, local.span(), Some(local), lease)];
        let landed = shared.transfer(&peer, segment, opcode, tasks, until).pop();
        let nothing = || Landed { outcome: Err(broken("a transfer had no outcome")), buffer: None };
        Ok(landed.unwrap_or_else(nothing))
    }

    /// Whether that put is still published, as far as its stamp says.
    fn check_stamp(&self, remote: &RemoteBuffer, deadline: Instant) -> Result<()> {
        if remote.identity.is_none() {
            return Ok(());
        }
        let Some(stamp) = remote.stamp else {
            return Err(Error::metadata("stamp", "missing, and this engine needs it to verify"));
        };
        let word = self.connection.shared.scratch().ok_or(Error::Exhausted)?;
        let place = RemoteBuffer::new(&remote.peer, stamp.ptr, 8);
        let word = self.move_slot(&place, word, Opcode::Read, deadline);
        let word = word.map_err(|failed| failed.error)?;
        if word.bytes() == Some(&stamp.value.to_le_bytes()[..]) {
            Ok(())
        } else {
            Err(Error::stale(&remote.peer, "its stamp says that the slot moved on"))
        }
    }
}

/// How often a read is tried, and how long after its first try no other begins.
const ATTEMPTS: u32 = 4;
const RECOVERY: Duration = Duration::from_millis(2500);

impl Engine for MooncakeEngine {
    fn session_id(&self) -> &str {
        self.connection.session_id()
    }

    fn protocol(&self) -> &str {
        self.connection.protocol()
    }

    fn start(&self, _instance: &Instance) -> Result<()> {
        process::check()?;
        let mut is_started = self.is_started.lock();
        if *is_started {
            let reason = "another relay uses this engine: close it first, or open another";
            return Err(Error::config("engine", reason));
        }
        // What was meant for the relay before this one.
        self.connection.get_notifies()?;
        self.connection.shared.start();
        *is_started = true;
        Ok(())
    }

    fn stop(&self, _deadline: Instant) {
        if !process::is_here() {
            return;
        }
        let mut is_started = self.is_started.lock();
        if *is_started {
            self.connection.shared.stop();
        }
        *is_started = false;
    }

    #[allow(unsafe_code)] // passes its caller's promise on
    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        let shared = &self.connection.shared;
        // SAFETY: by this function's contract.
        unsafe { shared.spans.register(&shared.native, span, access == Access::Published) }
    }

    /// The library moves it by itself, if it can: by RDMA or NVLink, or, where it is built with CUDA,
    /// by TCP.
    fn device_memory(&self, span: Span, _slots: u32, device: Arc<dyn Device>) -> Result<()> {
        if self.protocol() == "tcp" && !has_cuda() {
            let reason = format!(
                "this build of Mooncake knows nothing of CUDA, and would have the processor touch the \
                 memory of {}: install one that does (mooncake-transfer-engine, without non-cuda), or \
                 use the embedded engine",
                device.location()
            );
            return Err(Error::config("engine", reason));
        }
        self.connection.shared.spans.locate(span, device.location())
    }

    fn unregister(&self, span: Span) -> Result<()> {
        let shared = &self.connection.shared;
        shared.interrupt(span);
        shared.spans.unregister(&shared.native, span, UNREGISTER)
    }

    fn connect(&self, peer: &str, deadline: Instant) -> Result<()> {
        let until = self.connection.shared.until(deadline, [])?;
        self.connection.connect(peer, &until)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let buffer = self.move_slot(remote, local, Opcode::Read, deadline)?;
        Ok(Filled { buffer, verified: false })
    }

    /// One batch for each peer.
    fn read_many(
        &self,
        reads: Vec<(RemoteBuffer, LocalBuffer)>,
        deadline: Instant,
    ) -> Vec<Result<Filled, ReadError>> {
        many::read(&self.connection.shared, reads, deadline)
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        match self.check_stamp(remote, deadline) {
            Ok(()) => self.move_slot(remote, local, Opcode::Write, deadline),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        self.connection.notify(peer, note, deadline)
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        for note in self.connection.get_notifies()? {
            events(Event::Note(note));
        }
        Ok(())
    }

    /// Nothing to do: the engine serves what is registered.
    fn publish(&self, _slot: &Publication) {}

    fn interrupt(&self, span: Span) {
        self.connection.shared.interrupt(span);
    }

    fn tend(&self) {
        self.connection.shared.see_to_the_parked();
    }

    fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        let shared = &self.connection.shared;
        if !process::is_here() {
            return;
        }
        let counters = &shared.counters;
        each("batches", counters.batches.load(Ordering::Relaxed));
        each("batches_freed", counters.freed.load(Ordering::Relaxed));
        each("batches_parked", shared.parked.lock().batches.len() as u64);
        each("segments_opened", counters.segments.load(Ordering::Relaxed));
        each("peers_known", shared.peers.count() as u64);
        each("notes_refused", counters.notes_refused.load(Ordering::Relaxed));
    }
}

/// Whether CUDA's runtime is loaded here, as it is with a library that was built with it.
fn has_cuda() -> bool {
    fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("libcudart"))
}

fn delivered(landed: Landed) -> Result<LocalBuffer, ReadError> {
    match landed {
        Landed { outcome: Ok(()), buffer: Some(buffer) } => Ok(buffer),
        Landed { outcome: Ok(()), buffer: None } => {
            Err(ReadError { error: broken("a transfer lost its buffer"), buffer: None })
        }
        Landed { outcome: Err(error), buffer } => Err(ReadError { error, buffer }),
    }
}
