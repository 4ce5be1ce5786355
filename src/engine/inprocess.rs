//! The in-process engine: peers meet by name, and reads are copies.
#![allow(unsafe_code)] // has spans copied that a peer in this process has pinned for us

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam::queue::ArrayQueue;
use parking_lot::{Mutex, RwLock};

use super::{
    Access, Engine, Event, Filled, Instance, LocalBuffer, Notification, Publication, ReadError,
    RemoteBuffer, Retracted,
    ends::{Other, Own},
    exports::{Exports, Pin, Refusal},
};
use crate::{
    doorbell::Doorbell,
    error::{Error, Result},
    memory::{Device, Span},
    process,
    sync::atomic::{AtomicBool, Ordering},
};

/// An engine whose peers are the other engines of this process, found by name.
///
/// It opens no socket and starts no thread, so that it is fast and does the same each time: for
/// tests, and for measuring what is built on a relay. Either side may be in device memory.
///
/// Its [`session_id`](Engine::session_id) is its name; dropping it frees the name.
///
/// ```
/// use std::time::{Duration, Instant};
/// use mooncake_relay::{Engine, Event, InProcessEngine, Instance, Notification};
///
/// let (a, b) = (InProcessEngine::new("a")?, InProcessEngine::new("b")?);
/// b.start(&Instance::from_bytes([7; 16]))?;
///
/// let note = Notification::new("stage0_1f", "transfer_complete");
/// a.notify("b", &note, Instant::now() + Duration::from_secs(1))?;
///
/// let mut heard = Vec::new();
/// b.poll(&mut |event| heard.push(event))?;
/// assert!(matches!(&heard[..], [Event::Note(got)] if *got == note));
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
pub struct InProcessEngine {
    peer: Arc<Peer>,
}

impl InProcessEngine {
    /// The engine of that name: its [`session_id`](Engine::session_id), not an address.
    ///
    /// ```
    /// use mooncake_relay::{Engine, Error, InProcessEngine};
    /// let engine = InProcessEngine::new("doc-new")?;
    /// assert_eq!((engine.session_id(), engine.protocol()), ("doc-new", "inprocess"));
    /// assert!(matches!(InProcessEngine::new("doc-new"), Err(Error::Config { field: "name", .. })));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the name is empty, or while another engine of this process has it.
    pub fn new(name: &str) -> Result<Self> {
        process::enter()?;
        if name.is_empty() {
            return Err(Error::config("name", "an engine needs a name to be found by"));
        }
        let mut peers = PEERS.write();
        if peers.contains_key(name) {
            return Err(Error::config(
                "name",
                format!("an engine named {name:?} lives in this process: choose another name"),
            ));
        }
        let peer = Arc::new(Peer {
            name: name.into(),
            state: RwLock::new(State::New),
            exports: Arc::default(),
            spans: Mutex::default(),
            devices: Mutex::default(),
            inbox: ArrayQueue::new(INBOX),
            bell: Doorbell::new(),
            takes_writes: AtomicBool::new(false),
            bytes: RwLock::new(()),
        });
        peers.insert(Arc::clone(&peer.name), Arc::clone(&peer));
        Ok(Self { peer })
    }

    /// Whether peers may [`write`](Engine::write) into what this engine publishes; by default not.
    ///
    /// ```
    /// # use mooncake_relay::InProcessEngine;
    /// let engine = InProcessEngine::new("doc-allow-writes")?.allow_writes(true);
    /// # drop(engine);
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    #[must_use]
    pub fn allow_writes(self, allow: bool) -> Self {
        self.peer.takes_writes.store(allow, Ordering::Relaxed);
        self
    }
}

impl Engine for InProcessEngine {
    fn session_id(&self) -> &str {
        &self.peer.name
    }

    fn protocol(&self) -> &str {
        "inprocess"
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        process::check()?;
        let mut state = self.peer.state.write();
        if let State::Started(_) = *state {
            return Err(Error::config(
                "engine",
                "another relay uses this engine, or has not ended its close: give each relay an engine \
                 of its own",
            ));
        }
        // What nobody polled was meant for the relay before.
        while self.peer.inbox.pop().is_some() {}
        *state = State::Started(*instance);
        Ok(())
    }

    fn stop(&self, _deadline: Instant) {
        if !process::is_here() {
            return;
        }
        *self.peer.state.write() = State::Stopped;
        self.peer.bell.ring();
    }

    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        process::check()?;
        if span.len == 0 {
            return Err(Error::config("span", "no bytes to register"));
        }
        let mut spans = self.peer.spans.lock();
        if spans.iter().any(|known| known.span.overlaps(span)) {
            return Err(Error::config(
                "span",
                format!("{} bytes at {:#x} overlap a registered span", span.len, span.addr()),
            ));
        }
        spans.push(Registered { span, access, leaving: false });
        Ok(())
    }

    fn device_memory(&self, span: Span, _slots: u32, device: Arc<dyn Device>) -> Result<()> {
        self.peer.devices.lock().push((span, device));
        Ok(())
    }

    fn unregister(&self, span: Span) -> Result<()> {
        process::check()?;
        match self.peer.spans.lock().iter_mut().find(|known| known.span == span) {
            // From here on nothing in it is published.
            Some(known) => known.leaving = true,
            None => return Err(Error::config("span", "it is not registered")),
        }
        if !self.peer.exports.forget(span, Instant::now() + UNREGISTER) {
            return Err(Error::Engine {
                engine: "inprocess",
                reason: format!("a peer still reads the span after {UNREGISTER:?}"),
            });
        }
        self.peer.spans.lock().retain(|known| known.span != span);
        self.peer.devices.lock().retain(|(known, _)| *known != span);
        Ok(())
    }

    fn connect(&self, peer: &str, _deadline: Instant) -> Result<()> {
        process::check()?;
        find(peer).map(drop)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        mut local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        if let Err(error) = process::check() {
            return Err(ReadError { error, buffer: Some(local) });
        }
        let outcome = Own::of(&mut local).and_then(|mut dest| fill(remote, &mut dest, deadline));
        match outcome {
            Ok(verified) => Ok(Filled { buffer: local, verified }),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        // Without an identity nothing could be verified before `dest` is written.
        remote.identity?;
        if let Err(error) = process::check() {
            return Some(Err(error));
        }
        Some(fill(remote, &mut Own::Host(dest), deadline).map(drop))
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        mut local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        if let Err(error) = process::check() {
            return Err(ReadError { error, buffer: Some(local) });
        }
        let outcome = Own::of(&mut local).and_then(|source| overwrite(remote, &source, deadline));
        match outcome {
            Ok(()) => Ok(local),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        process::check()?;
        in_time(deadline)?;
        let peer = find(peer)?;
        {
            // Held over the push: no `start` empties the inbox between the two.
            let state = peer.state.read();
            let State::Started(_) = *state else {
                return Err(Error::peer_failed(&peer.name, "no relay uses it"));
            };
            if peer.inbox.push(note.clone()).is_err() {
                return Err(Error::peer_failed(
                    &peer.name,
                    format!("its inbox is full: it has not polled {INBOX} notifications"),
                ));
            }
        }
        peer.bell.ring();
        Ok(())
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        process::check()?;
        // What `events` itself causes waits for the next call, so that this one ends.
        for _ in 0..self.peer.inbox.len() {
            let Some(note) = self.peer.inbox.pop() else { break };
            events(Event::Note(note));
        }
        Ok(())
    }

    fn publish(&self, slot: &Publication) {
        if !process::is_here() {
            return;
        }
        // Held over the publication: no `unregister` comes between the two.
        let spans = self.peer.spans.lock();
        let is_known = |span: Span| {
            spans.iter().any(|known| {
                known.access == Access::Published
                    && !known.leaving
                    && known.span.contains(span.addr(), span.len)
            })
        };
        // `register` promised that its spans are mapped; of others nothing is known.
        if is_known(slot.span)
            && is_known(slot.stamp_span)
            && slot.stamp_span.ptr.cast::<u64>().is_aligned()
        {
            self.peer.exports.publish(slot);
        } else {
            tracing::warn!(slot = slot.slot, "not served: it is not in memory that is registered");
        }
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        if !process::is_here() {
            return Retracted::Unknown;
        }
        self.peer.exports.retract(slot)
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        if !process::is_here() {
            return Retracted::Unknown;
        }
        self.peer.exports.cut(slot)
    }

    fn doorbell(&self) -> Option<&Doorbell> {
        Some(&self.peer.bell)
    }
}

impl Drop for InProcessEngine {
    fn drop(&mut self) {
        if !process::is_here() {
            return;
        }
        *self.peer.state.write() = State::Stopped;
        PEERS.write().remove(&*self.peer.name);
    }
}

impl fmt::Debug for InProcessEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessEngine").field("name", &self.peer.name).finish_non_exhaustive()
    }
}

/// How many notifications wait to be polled.
const INBOX: usize = 1024;

/// How many bytes are copied between two looks at the clock and at the pin.
const CHUNK: usize = 1 << 20;

/// How long `unregister` waits for a reader, which looks up after every chunk.
const UNREGISTER: Duration = Duration::from_secs(5);

/// Every engine that lives, by name.
static PEERS: RwLock<BTreeMap<Arc<str>, Arc<Peer>>> = RwLock::new(BTreeMap::new());

/// What peers reach of an engine.
struct Peer {
    name: Arc<str>,
    state: RwLock<State>,
    exports: Arc<Exports>,
    spans: Mutex<Vec<Registered>>,
    /// Whose memory those are that the processor cannot touch.
    devices: Mutex<Vec<(Span, Arc<dyn Device>)>>,
    inbox: ArrayQueue<Notification>,
    bell: Doorbell,
    takes_writes: AtomicBool,
    /// Reads of the published bytes share it; a write has it alone.
    bytes: RwLock<()>,
}

enum State {
    New,
    Started(Instance),
    Stopped,
}

struct Registered {
    span: Span,
    access: Access,
    /// `unregister` was called, and has not succeeded.
    leaving: bool,
}

impl Peer {
    /// Fails unless the relay that published `remote` still uses this engine.
    fn check_instance(&self, remote: &RemoteBuffer) -> Result<()> {
        match (&*self.state.read(), &remote.identity) {
            (State::Started(own), Some(identity)) if *own != identity.instance => {
                Err(self.refused(Refusal::OtherInstance))
            }
            (State::Started(_), _) => Ok(()),
            (State::New, _) => Err(self.refused(Refusal::OtherInstance)),
            (State::Stopped, _) => Err(Error::peer_failed(&self.name, "its relay is closed")),
        }
    }

    fn pin(&self, remote: &RemoteBuffer) -> Result<Pin> {
        match &remote.identity {
            Some(identity) => self.exports.pin(identity, remote.ptr, remote.len),
            None => self.exports.pin_range(remote.ptr, remote.len),
        }
        .map_err(|refusal| self.refused(refusal))
    }

    /// What is pinned, and whose memory it is.
    fn end_of(&self, pin: &Pin) -> Other {
        let span = pin.span();
        let devices = self.devices.lock();
        let known = devices.iter().find(|(known, _)| known.contains(span.addr(), span.len));
        Other { span, device: known.map(|(_, device)| Arc::clone(device)) }
    }

    #[cold]
    fn refused(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::OtherInstance => Error::stale(&self.name, "another relay has its name now"),
            Refusal::Gone => Error::stale(&self.name, "that put is over"),
            Refusal::Range => Error::rejected(&self.name, "the range is not published"),
        }
    }

    /// Calls `copy` with each chunk of the pinned bytes, while the owner and the clock allow it.
    fn chunks(
        &self,
        pin: &Pin,
        deadline: Instant,
        mut copy: impl FnMut(Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let len = pin.span().len;
        for start in (0..len).step_by(CHUNK) {
            if start > 0 {
                if pin.is_cut() {
                    return Err(Error::stale(&self.name, "it needed the slot back meanwhile"));
                }
                in_time(deadline)?;
            }
            copy(start..len.min(start + CHUNK))?;
        }
        Ok(())
    }
}

fn find(name: &str) -> Result<Arc<Peer>> {
    PEERS
        .read()
        .get(name)
        .cloned()
        .ok_or_else(|| Error::peer_failed(name, "no engine of that name lives in this process"))
}

/// Copies `remote` to `dest` and says whether it is proven to be that put.
fn fill(remote: &RemoteBuffer, dest: &mut Own<'_>, deadline: Instant) -> Result<bool> {
    same_length(remote, dest.len())?;
    in_time(deadline)?;
    let peer = find(&remote.peer)?;
    peer.check_instance(remote)?;
    if remote.identity.is_none()
        && let Some(stamp) = peer.exports.stamp(remote.ptr, remote.len)
    {
        dest.set(&stamp)?;
        return Ok(false);
    }
    let _shared = peer.bytes.try_read_until(deadline).ok_or(Error::TimedOut)?;
    let pin = peer.pin(remote)?;
    let source = peer.end_of(&pin);
    // SAFETY: the pin keeps the source mapped and its owner from writing it, `_shared` keeps
    // `overwrite` from it; `dest` is ours alone, so it is not in the source.
    peer.chunks(&pin, deadline, |range| unsafe { dest.fill_from(&source, range) })?;
    Ok(remote.identity.is_some())
}

/// Copies `source` to `remote`.
fn overwrite(remote: &RemoteBuffer, source: &Own<'_>, deadline: Instant) -> Result<()> {
    same_length(remote, source.len())?;
    in_time(deadline)?;
    let peer = find(&remote.peer)?;
    peer.check_instance(remote)?;
    if !peer.takes_writes.load(Ordering::Relaxed) {
        return Err(Error::rejected(&peer.name, "it does not allow writes"));
    }
    let _alone = peer.bytes.try_write_until(deadline).ok_or(Error::TimedOut)?;
    let pin = peer.pin(remote)?;
    let dest = peer.end_of(&pin);
    // SAFETY: the pin keeps the destination mapped and its owner from touching it, `_alone` keeps
    // every other peer from it; so nothing that is borrowed lies in it.
    peer.chunks(&pin, deadline, |range| unsafe { source.write_to(&dest, range) })
}

fn same_length(remote: &RemoteBuffer, len: usize) -> Result<()> {
    if remote.len == len {
        return Ok(());
    }
    Err(Error::config("local", format!("{len} bytes for {} remote ones", remote.len)))
}

fn in_time(deadline: Instant) -> Result<()> {
    if Instant::now() < deadline { Ok(()) } else { Err(Error::TimedOut) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{Identity, TransferId},
        memory::{Host, Memory, PAGE, Purpose},
    };

    #[test]
    fn a_read_under_way_is_told_and_is_ended_by_a_cut() {
        let engine = InProcessEngine::new("cut in the middle").unwrap();
        let instance = Instance::from_bytes([1; 16]);
        engine.start(&instance).unwrap();
        let memory = Host::allocate(&(), 3 * CHUNK, Purpose::Published, false).unwrap();
        let all = memory.span();
        // SAFETY: the memory outlives `unregister` below.
        unsafe { engine.register(all, Access::Published) }.unwrap();
        let id = TransferId { random: 1, slot: 0, generation: 1 };
        let put = Publication {
            slot: 0,
            span: Span { len: 3 * CHUNK - PAGE, ..all },
            identity: Identity { instance, id },
            stamp: 1,
            // SAFETY: inside the memory, behind the published part.
            stamp_span: Span { ptr: unsafe { all.ptr.add(3 * CHUNK - PAGE) }, len: 8 },
        };
        engine.publish(&put);
        let remote = RemoteBuffer::new(engine.session_id(), put.span.addr(), put.span.len)
            .with_identity(put.identity);

        // What a read does, held in the middle.
        let pin = engine.peer.pin(&remote).unwrap();
        let far = Instant::now() + Duration::from_secs(3600);
        assert_eq!(engine.retract(&put), Retracted::Reading);
        let mut copied = 0;
        engine
            .peer
            .chunks(&pin, far, |range| {
                copied += range.len();
                Ok(())
            })
            .unwrap();
        assert_eq!(copied, put.span.len, "a retraction alone lets the read end");

        let late = engine.peer.chunks(&pin, Instant::now(), |_| Ok(()));
        assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");

        assert_eq!(engine.cut(&put), Retracted::Reading);
        let cut = engine.peer.chunks(&pin, far, |_| Ok(()));
        assert!(matches!(cut, Err(Error::Stale { .. })), "{cut:?}");
        drop(pin);
        assert_eq!(engine.cut(&put), Retracted::Quiet);
        engine.unregister(all).unwrap();
    }
}
