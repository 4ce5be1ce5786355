//! Teaches how bytes can travel another way: an `Engine` of one's own.
//!
//! `cargo run --release --features conformance --example own_engine`
//!
//! This one keeps a copy of what is published and serves the copy to the other engines of its
//! process. It is a whole engine all the same: it passes every case of the contract's public suite,
//! `mooncake_relay::conformance`, and then carries a tensor from relay to relay. A real one has a
//! wire, and a thread that serves it, where this one has a table.

use std::{
    collections::BTreeMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    slice,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_relay::{
    Access, Config, DType, Doorbell, Engine, Error, Event, Filled, Instance, LocalBuffer, Metadata,
    Notification, Publication, ReadError, Relay, RemoteBuffer, Result, Retracted, Span, Tensor,
    conformance,
};
use parking_lot::Mutex;

/// The engines of this process, by name: our network.
static NETWORK: Mutex<BTreeMap<String, Arc<Host>>> = Mutex::new(BTreeMap::new());

/// Notes that may wait to be polled: whoever never polls must not cost memory without end.
const INBOX: usize = 1024;

struct CopyEngine {
    /// Ours in every metadata: `host:port`, as a receiver in another process would expect.
    name: String,
    host: Arc<Host>,
}

/// What the peers of an engine reach.
#[derive(Default)]
struct Host {
    state: Mutex<State>,
    /// Rung after each note, so that a relay that sleeps hears it at once.
    bell: Doorbell,
}

#[derive(Default)]
struct State {
    /// The relay that uses us. None: nothing is served and no note is taken.
    instance: Option<Instance>,
    registered: Vec<Span>,
    /// The last put of each slot.
    puts: BTreeMap<u32, Put>,
    inbox: Vec<Notification>,
}

struct Put {
    publication: Publication,
    /// While it is published.
    bytes: Option<Arc<[u8]>>,
}

impl Engine for CopyEngine {
    /// Where peers find us. It is the `peer` of their `RemoteBuffer`s.
    fn session_id(&self) -> &str {
        &self.name
    }

    /// Relays whose engines speak different protocols refuse each other's metadata.
    fn protocol(&self) -> &str {
        "copy"
    }

    /// One relay at a time.
    fn start(&self, instance: &Instance) -> Result<()> {
        let mut state = self.host.state.lock();
        if state.instance.is_some() {
            return Err(config("engine", "another relay uses it"));
        }
        // Notes that nobody polled were meant for the relay before.
        state.inbox.clear();
        state.instance = Some(*instance);
        Ok(())
    }

    /// Must end every call that still waits. None of ours ever does.
    fn stop(&self, _deadline: Instant) {
        self.host.state.lock().instance = None;
    }

    /// A real engine tells its hardware here; we remember what may be touched.
    unsafe fn register(&self, span: Span, _access: Access) -> Result<()> {
        let mut state = self.host.state.lock();
        if span.len == 0 || state.registered.iter().any(|known| known.overlaps(span)) {
            return Err(config("span", "it is empty, or overlaps a registered one"));
        }
        state.registered.push(span);
        Ok(())
    }

    /// Once this returns `Ok` the memory may be unmapped: no reader may still be in it.
    fn unregister(&self, span: Span) -> Result<()> {
        let mut state = self.host.state.lock();
        let Some(at) = state.registered.iter().position(|known| *known == span) else {
            return Err(config("span", "it is not registered"));
        };
        state.registered.swap_remove(at);
        // Nobody reads it, since readers have copies.
        state.puts.retain(|_, put| !put.publication.span().overlaps(span));
        Ok(())
    }

    /// From here on peers may read. (A copy takes its time: `publish` must not block, and a real
    /// engine only makes an entry in a table.)
    fn publish(&self, slot: &Publication) {
        let mut state = self.host.state.lock();
        let Span { ptr, len } = slot.span();
        if !state.registered.iter().any(|known| known.contains(slot.span().addr(), len)) {
            return; // of other memory we know nothing
        }
        // SAFETY: inside a registered span, which stays mapped until `unregister`, and that needs
        // the lock that we hold; nobody writes to a slot whose put has not ended.
        let bytes = unsafe { slice::from_raw_parts(ptr.as_ptr(), len) };
        state.puts.insert(slot.slot(), Put { publication: *slot, bytes: Some(bytes.into()) });
    }

    /// From here on no new read begins. `Quiet` promises that none is under way either, so that
    /// the slot can be filled again: true at once here, since our readers read the copy.
    fn retract(&self, slot: &Publication) -> Retracted {
        let mut state = self.host.state.lock();
        // A late call must not close the slot's next put.
        if let Some(put) = state.puts.get_mut(&slot.slot())
            && put.publication.identity() == slot.identity()
        {
            put.bytes = None;
        }
        Retracted::Quiet
    }

    /// Fills `local`, and gives it back whatever happens.
    fn read(
        &self,
        remote: &RemoteBuffer,
        mut local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        match fill(remote, local.bytes_mut(), deadline) {
            // `verified`: we made sure of the identity. Where an engine cannot, the relay reads the
            // put's stamp by a second call.
            Ok(()) => Ok(Filled { buffer: local, verified: remote.identity.is_some() }),
            Err(error) => Err(ReadError { error, buffer: Some(local) }),
        }
    }

    /// Relays do not write. An engine may refuse it always.
    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        _deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        let error = refused(&remote.peer, "this engine does not write");
        Err(ReadError { error, buffer: Some(local) })
    }

    /// `Ok` means that the peer's `poll` will report it, once.
    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        let host = find(peer, deadline)?;
        let mut state = host.state.lock();
        if state.instance.is_none() || state.inbox.len() >= INBOX {
            return Err(failed(peer, "no relay polls it"));
        }
        state.inbox.push(note.clone());
        drop(state); // the bell wakes who wants it
        host.bell.ring();
        Ok(())
    }

    /// Hands over what has come. Never blocks.
    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        // Taken out first: `events` may call us again.
        let notes = mem::take(&mut self.host.state.lock().inbox);
        notes.into_iter().for_each(|note| events(Event::Note(note)));
        Ok(())
    }

    /// Not needed; without it a relay that sleeps looks from time to time.
    fn doorbell(&self) -> Option<&Doorbell> {
        Some(&self.host.bell)
    }
}

/// Copies to `dest` what `remote` names, if exactly that is published.
fn fill(remote: &RemoteBuffer, dest: Option<&mut [u8]>, deadline: Instant) -> Result<()> {
    let (peer, ptr, len) = (&*remote.peer, remote.ptr, remote.len);
    let dest = dest.filter(|dest| dest.len() == len);
    let dest = dest.ok_or_else(|| config("local", "not host memory, or of another length"))?;
    let host = find(peer, deadline)?;
    let state = host.state.lock();
    if state.instance.is_none() {
        return Err(failed(peer, "its relay is closed"));
    }
    let wanted = |put: &&Put| match &remote.identity {
        // Unguessable, and of one put only: whoever names it means that put, or nothing.
        Some(identity) => put.publication.identity() == *identity,
        // A Python relay names none, and gets what is published there at this moment.
        None => put.publication.span().contains(ptr, len) && put.bytes.is_some(),
    };
    let is_stamp = |put: &&Put| (ptr, len) == (put.publication.stamp_span().addr(), 8);
    if let Some(put) = state.puts.values().find(wanted)
        && let Some(bytes) = put.bytes.clone()
    {
        let span = put.publication.span();
        if !span.contains(ptr, len) {
            return Err(refused(peer, "that put does not reach so far"));
        }
        drop(state); // others go on while we copy
        let start = (ptr - span.addr()) as usize;
        dest.copy_from_slice(&bytes[start..start + len]);
        Ok(())
    } else if remote.identity.is_some() {
        Err(Error::Stale { peer: peer.to_owned(), reason: "that put is over" })
    } else if let Some(put) = state.puts.values().find(is_stamp) {
        // A stamp proves a put while it is published, and can be asked for ever after.
        let stamp = if put.bytes.is_some() { put.publication.stamp() } else { 0 };
        dest.copy_from_slice(&stamp.to_ne_bytes());
        Ok(())
    } else {
        Err(refused(peer, "nothing is published there"))
    }
}

fn find(peer: &str, deadline: Instant) -> Result<Arc<Host>> {
    if Instant::now() >= deadline {
        return Err(Error::TimedOut);
    }
    NETWORK.lock().get(peer).cloned().ok_or_else(|| failed(peer, "there is no such engine"))
}

// An error's variant says what its reader can do about it.

fn config(field: &'static str, reason: &str) -> Error {
    Error::Config { field, reason: reason.to_owned() }
}

fn failed(peer: &str, reason: &str) -> Error {
    Error::PeerFailed { peer: peer.to_owned(), reason: reason.to_owned() }
}

fn refused(peer: &str, reason: &str) -> Error {
    Error::Rejected { peer: peer.to_owned(), reason: reason.to_owned() }
}

impl CopyEngine {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("copy:{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let host = Arc::<Host>::default();
        NETWORK.lock().insert(name.clone(), Arc::clone(&host));
        Self { name, host }
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        NETWORK.lock().remove(&self.name);
    }
}

fn main() -> Result<ExitCode> {
    let (mut passed, begun) = (0, Instant::now());
    for (name, case) in conformance::CASES {
        let begun = Instant::now();
        // A case panics where the engine breaks its contract, and if it takes more than a minute.
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&|| Arc::new(CopyEngine::new()))));
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("{verdict:6} {:>8.1} ms  {name}", begun.elapsed().as_secs_f64() * 1e3);
        passed += usize::from(outcome.is_ok());
    }
    let cases = conformance::CASES.len();
    println!("{passed} of {cases} cases passed in {:.1?}\n", begun.elapsed());
    if passed < cases {
        return Ok(ExitCode::FAILURE);
    }
    carry_a_tensor()?;
    Ok(ExitCode::SUCCESS)
}

/// What it was made for.
fn carry_a_tensor() -> Result<()> {
    let tensor = Tensor::new(DType::Bfloat16, [1024, 1024]);
    let bytes: Vec<u8> =
        (0..2 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let config = Config::default().with_slot_size(bytes.len());
    let sender = Relay::new(Arc::new(CopyEngine::new()), &config)?;
    let receiver = Relay::new(Arc::new(CopyEngine::new()), &config)?;

    let (metadata, put) = sender.put_bytes(&bytes, tensor)?;
    let metadata: Metadata = metadata.to_string().parse()?; // as it would travel
    let got = receiver.get_timeout(&metadata, Duration::from_secs(10))?.wait()?;
    assert!(got[..] == bytes[..], "the bytes arrived changed");
    put.wait()?; // the acknowledgement came by `notify` and `poll`
    println!(
        "a relay on it moved {:?} of {} by protocol {:?}, every byte compared",
        metadata.tensor().shape,
        metadata.tensor().dtype,
        metadata.protocol().unwrap_or("?"),
    );
    Ok(())
}
