//! A sender and receivers, whose reads stop in the middle when the test wants it.

use std::{
    collections::HashMap,
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_relay::{
    Config, Engine, Error, Filled, LocalBuffer, Metadata, ReadError, Relay, RemoteBuffer, Result,
    Retracted, Slot, Tensor, Token, TransferId,
};
use parking_lot::Mutex;

use crate::{
    common::{
        eventually,
        gate::Gate,
        hooked::{Hooked, relay},
    },
    world::CREDITS,
};

/// Who is in the middle of a read of which put: what a real engine knows by its pins.
pub(crate) type Reading = Arc<Mutex<HashMap<TransferId, u32>>>;

/// A relay that puts.
pub(crate) struct Sender {
    pub(crate) engine: Hooked,
    pub(crate) relay: Relay,
    /// Of a put that is over.
    gone: Metadata,
}

/// A relay that gets.
pub(crate) struct Receiver {
    pub(crate) engine: Hooked,
    pub(crate) relay: Relay,
    /// Its next read stops in the middle.
    next: Arc<Mutex<Option<Arc<Hold>>>>,
    pub(crate) held: Option<Held>,
}

/// A read that stops in the middle.
pub(crate) struct Hold {
    gate: Gate,
    began: AtomicBool,
    /// Its process ends while it reads.
    pub(crate) dies: AtomicBool,
}

/// The get of such a read.
pub(crate) struct Held {
    pub(crate) hold: Arc<Hold>,
    pub(crate) gate: Gate,
    /// Which put it is of.
    pub(crate) put: usize,
    /// `None`: the get was ended.
    pub(crate) token: Option<Token<Slot>>,
}

impl Sender {
    pub(crate) fn new(name: &str, ends: Duration, reading: &Reading) -> Self {
        let engine = Hooked::new(name);
        let asked = Arc::clone(reading);
        engine.on_retract(move |next, put| {
            let retracted = next.retract(put);
            let is_read = asked.lock().contains_key(&put.identity().id);
            if is_read { Retracted::Reading } else { retracted }
        });
        let cut = Arc::clone(reading);
        engine.on_cut(move |next, put| {
            cut.lock().remove(&put.identity().id);
            next.cut(put)
        });
        let config = config().with_lease(ends).with_quarantine(ends);
        let relay = Relay::new(engine.engine(), &config).unwrap();
        let (gone, _) = relay.put_bytes(b"", Tensor::bytes(0)).unwrap();
        // Or its lease has ended by now.
        let _ = relay.abort(&gone);
        Self { engine, relay, gone }
    }
}

impl Receiver {
    pub(crate) fn new(reading: &Reading) -> Self {
        let (engine, relay) = relay(&config());
        let next = Arc::<Mutex<Option<Arc<Hold>>>>::default();
        let (wanted, reading) = (Arc::clone(&next), Arc::clone(reading));
        engine.on_read(move |next, remote, local, deadline| {
            let hold = wanted.lock().take();
            let Some(hold) = hold else { return next.read(remote, local, deadline) };
            let id = remote.identity.unwrap().id;
            *reading.lock().entry(id).or_default() += 1;
            match next.read(remote, local, deadline) {
                Ok(filled) => hold.hold(remote, filled.buffer, &reading),
                Err(error) => {
                    leave(&reading, id);
                    Err(error)
                }
            }
        });
        Self { engine, relay, next, held: None }
    }

    /// Has that peer answer once: from then on a read of it holds up nothing else that is for it.
    pub(crate) fn meet(&self, sender: &Sender) {
        let got = self.relay.get(&sender.gone).unwrap().wait();
        assert!(matches!(got, Err(Error::Stale { .. })), "{got:?}");
    }

    /// A get whose read has stopped in its middle; or why it ended before it began.
    pub(crate) fn begin(&self, metadata: &Metadata) -> Result<(Arc<Hold>, Gate, Token<Slot>)> {
        let (gate, own) = Gate::pair();
        let (began, dies) = (AtomicBool::new(false), AtomicBool::new(false));
        let hold = Arc::new(Hold { gate: own, began, dies });
        *self.next.lock() = Some(Arc::clone(&hold));
        let token = self.relay.get(metadata)?;
        eventually(true, || hold.began.load(Ordering::SeqCst) || token.is_done());
        if hold.began.load(Ordering::SeqCst) {
            return Ok((hold, gate, token));
        }
        *self.next.lock() = None;
        Err(token.wait().err().unwrap())
    }
}

impl Hold {
    /// What is left of the read: it looks at the bytes again when it goes on.
    fn hold(
        &self,
        remote: &RemoteBuffer,
        mut buffer: LocalBuffer,
        reading: &Reading,
    ) -> Result<Filled, ReadError> {
        self.began.store(true, Ordering::SeqCst);
        self.gate.pass();
        let id = remote.identity.unwrap().id;
        let dies = self.dies.load(Ordering::SeqCst);
        if !dies && reading.lock().contains_key(&id) {
            // SAFETY: it is this process's memory, and while we are among the readers of that put
            // nobody may write it: which is what is tested.
            let now = unsafe { slice::from_raw_parts(remote.ptr as *const u8, remote.len) };
            buffer.bytes_mut().unwrap().copy_from_slice(now);
        }
        let held = leave(reading, id);
        let peer = remote.peer.to_string();
        let error = match (dies, held) {
            (true, _) => Error::PeerFailed { peer, reason: "its receiver died".to_owned() },
            (false, false) => Error::Stale { peer, reason: "its owner took the slot back" },
            (false, true) => return Ok(Filled { buffer, verified: true }),
        };
        Err(ReadError { error, buffer: Some(buffer) })
    }
}

/// One reads that put no more; whether it was let to until now.
fn leave(reading: &Reading, id: TransferId) -> bool {
    let mut reading = reading.lock();
    let Some(readers) = reading.get_mut(&id) else { return false };
    *readers -= 1;
    if *readers == 0 {
        reading.remove(&id);
    }
    true
}

fn config() -> Config {
    Config::default()
        .with_engine_id("machine")
        .with_credits(CREDITS as u32)
        .with_receive_credits(2)
        .with_transfer_threads(2) // one of them may stop in the middle of a read
        .with_slot_size(4096)
}
