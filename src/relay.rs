//! The relay: it wires the parts, and is the one door to them.

mod pools;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use self::pools::pools;
use crate::{
    affinity,
    config::Config,
    core::{Core, Parts, Times},
    engine::{Engine, Stamp},
    error::{Error, Result},
    gets::{Remote, What},
    health::{Closed, Health},
    ids::Ids,
    memory::{Copier, Host, Memory, PAIR, Purpose, check_lock, lock},
    metadata::{Metadata, Put},
    notifier,
    pool::{Pool, Slot, Stamps},
    process,
    shutdown::{Shutdown, Threads},
    tensor::Tensor,
    token::Token,
    view::View,
    wait::deadline_after,
};

/// How long `drop` waits for the engine and for threads that are inside it.
const DROP_LIMIT: Duration = Duration::from_secs(5);
/// A sender may claim any lease; a note that it does not take is not retried for longer than this.
const LONGEST_LEASE: Duration = Duration::from_secs(60 * 60);
/// The few bytes that a stamp needs, on lines of their own; a slot's size is what is asked for.
const SCRATCH: usize = PAIR;

/// Moves tensors to and from peers.
///
/// `Send` and `Sync`: any thread may call any method, as [`guide::threads`](crate::guide::threads)
/// says in full. Dropping it closes it, as [`close`](Self::close) with a `timeout` of 5 s does. In a
/// forked child every call that can fail is [`Error::Config`], and dropping it does nothing.
///
/// ```
/// use std::sync::Arc;
/// use mooncake_relay::{Config, InProcessEngine, Relay, Tensor};
///
/// # fn main() -> mooncake_relay::Result<()> {
/// let config = Config::default().with_slot_size(4096);
/// let sender = Relay::new(Arc::new(InProcessEngine::new("doc-sender")?), &config)?;
/// let receiver = Relay::new(Arc::new(InProcessEngine::new("doc-receiver")?), &config)?;
///
/// let (metadata, put) = sender.put_bytes(b"hello", Tensor::bytes(5))?;
/// let got = receiver.get(&metadata)?.wait()?;
/// assert_eq!(&got[..], b"hello");
/// put.wait()?; // the sender has its slot back
/// # Ok(())
/// # }
/// ```
pub struct Relay<M: Memory = Host> {
    core: Arc<Core<M>>,
    copier: Copier,
    shutdown: Shutdown,
    protocol: Arc<str>,
    /// Where this host's peers find the engine.
    local: Option<Arc<str>>,
    lease: Duration,
    view_limit: Duration,
}

impl Relay<Host> {
    /// A relay whose slots are in host memory: allocates and registers them and starts the threads.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a configuration that cannot work here, and for an engine that serves
    /// another relay already; [`Error::Io`] where the system gives no memory or no thread; the
    /// engine's own errors. The example of [`Relay`] begins here.
    pub fn new(engine: Arc<dyn Engine>, config: &Config) -> Result<Self> {
        Self::with_memory((), engine, config)
    }

    /// Copies `bytes` into a slot and publishes it. Waits for a free slot at most
    /// [`Config::read_timeout`].
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-put-bytes")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, put) = relay.put_bytes(&[1, 2, 3, 4], Tensor::new(DType::Int16, [2]))?;
    /// assert_eq!(metadata.size(), 4); // the bytes, whatever the shape
    /// # drop(put);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Self::acquire`] and [`Self::put`].
    pub fn put_bytes(&self, bytes: &[u8], tensor: Tensor) -> Result<(Metadata, Token<Slot>)> {
        tensor.fits(bytes.len())?;
        let mut slot = self.acquire(bytes.len(), self.core.times.read_timeout)?;
        self.copier.copy_slice(bytes, &mut slot);
        self.put(slot, tensor)
    }

    /// Fetches what `metadata` describes into the front of `dest`, on this thread where it can;
    /// returns how many bytes that are.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-get-into")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?; // a relay may get its own
    /// let mut dest = [0; 8];
    /// let len = relay.get_into(&metadata, &mut dest, std::time::Duration::from_secs(5))?;
    /// assert_eq!(&dest[..len], b"hello");
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if `dest` is too short: nothing was read then, and the sender still holds
    /// its slot. Otherwise those of [`Self::get`] and of its token. `dest` is untouched after an
    /// error, unless the copy had begun: then it is unspecified.
    pub fn get_into(
        &self,
        metadata: &Metadata,
        dest: &mut [u8],
        timeout: Duration,
    ) -> Result<usize> {
        let (what, now) = self.what(metadata, timeout)?;
        let len = metadata.size();
        let slot_size = dest.len();
        let Some(dest) = dest.get_mut(..len) else {
            return Err(Error::TooLarge { len, slot_size });
        };
        if let Some(what) = self.core.read_into(metadata.remote(), what, now, dest)? {
            self.core.receive.fits(len)?;
            let slot = self.core.submit(what, now, None)?.wait()?;
            self.copier.copy_slice(&slot, dest);
        }
        Ok(len)
    }

    /// Looks at what `metadata` describes in the sender's own slot: no copy, whatever its size. Only
    /// on the same host; waits at most [`Config::read_timeout`] for the sender to be met. Dropping
    /// the view tells the sender that its slot was read.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")] {
    /// # use std::sync::Arc;
    /// # use mooncake_relay::*;
    /// # let config = Config::default().with_slot_size(4096);
    /// let sender = Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config)?;
    /// let receiver = Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config)?;
    /// let (metadata, put) = sender.put_bytes(b"hello", Tensor::bytes(5))?;
    /// let view = receiver.view(&metadata)?;
    /// let mut bytes = [0; 5];
    /// view.copy_to(&mut bytes)?; // or `as_ptr`, if another library reads it
    /// assert_eq!(&bytes, b"hello");
    /// drop(view);
    /// put.wait()?; // the sender has its slot back
    /// # }
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the sender's memory cannot be reached: use [`Self::get`] then, which
    /// always can; the sender does not hear of this, and still holds its slot. Otherwise
    /// [`Error::Stale`], [`Error::Rejected`], [`Error::Metadata`] and [`Error::Closed`], as in
    /// [`Self::get`].
    pub fn view(&self, metadata: &Metadata) -> Result<View> {
        let (what, _) = self.what(metadata, self.core.times.read_timeout)?;
        self.core.view(what, metadata.tensor().clone(), self.view_limit)
    }
}

impl<M: Memory> Relay<M> {
    /// A relay whose slots are in the memory that `memory` says.
    ///
    /// # Errors
    ///
    /// As [`Relay::new`], which is `Relay::<Host>::with_memory((), engine, config)`. In device memory also
    /// [`Error::Config`] of the field `memory` without a driver or such a device, of `staging` where the
    /// embedded engine was given none, of `slot_size` and `receive_credits` where the device has too
    /// little; and [`Error::Device`].
    pub fn with_memory(
        memory: M::Options,
        engine: Arc<dyn Engine>,
        config: &Config,
    ) -> Result<Self> {
        process::enter()?;
        let config = config.check()?;
        let cores = affinity::allowed().len();
        if config.lock_memory {
            let all = config.credits as usize + config.receive_credits as usize;
            // Device memory is never swapped out.
            let slot_size = if M::HOST { config.slot_size } else { 0 };
            check_lock(all.saturating_mul(slot_size + SCRATCH))?;
        }
        let [slots, receive] = pools(&memory, &config)?;
        let parts = Parts {
            ids: Ids::new()?,
            slots,
            stamps: Stamps::new(config.credits)?,
            receive,
            scratch: Pool::new(&(), config.receive_credits, SCRATCH, Purpose::Receive, false)?,
            engine: Arc::clone(&engine),
            engine_id: Arc::clone(&config.engine_id),
            times: Times { quarantine: config.quarantine, read_timeout: config.read_timeout },
            wait: config.wait,
            cores,
            credits: config.credits,
            queued_gets: config.queued_gets,
            transfer_threads: config.transfer_threads,
        };
        let core = Core::new(parts);
        if config.lock_memory {
            lock(&core.host_spans())?;
        }
        engine.waits(core.wait);
        engine.start(&core.ids.instance())?;
        // From here on dropping the relay undoes what was done.
        let relay = Self {
            protocol: engine.protocol().into(),
            local: engine.local(),
            lease: config.lease,
            view_limit: config.view_limit,
            copier: Copier::new(cores),
            shutdown: Shutdown::default(),
            core,
        };
        relay.register(&engine)?;
        let threads = relay.shutdown.threads();
        for n in 0..config.transfer_threads {
            let core = config.transfer_core(n);
            relay.spawn(threads, &format!("relay-worker-{n}"), core, Core::work)?;
        }
        relay.spawn(threads, "relay-notifier", config.notifier_core, Core::notify)?;
        Ok(relay)
    }

    /// Takes a slot of `len` bytes to fill, without waiting. What they hold is left from before.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`] if none is free or others wait already; [`Error::TooLarge`] if `len` is
    /// more than a slot has; [`Error::Closed`]. For an example see [`Self::acquire`].
    pub fn try_acquire(&self, len: usize) -> Result<Slot<M>> {
        self.core.slots.fits(len)?;
        let slot = self.core.slots.try_slot(len);
        // After it was taken: a close frees slots that a peer may still read.
        self.core.check_open()?;
        slot.ok_or(Error::Exhausted)
    }

    /// Takes a slot of `len` bytes to fill; waits up to `timeout` for one, first come, first served.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-acquire")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let mut slots = [relay.acquire(16, std::time::Duration::from_secs(5))?, relay.try_acquire(8)?];
    /// slots[1].fill(7); // a slot is a `[u8]`; these are both that there are:
    /// assert!(matches!(relay.try_acquire(16), Err(Error::Exhausted)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`]; [`Error::TooLarge`] at once; [`Error::Closed`], also while it waits.
    pub fn acquire(&self, len: usize, timeout: Duration) -> Result<Slot<M>> {
        match self.try_acquire(len) {
            Err(Error::Exhausted) => self.core.acquire_slow(len, timeout),
            outcome => outcome,
        }
    }

    /// Publishes `slot`. The token yields the slot when a receiver has read it and nobody else is
    /// reading it; it ends with [`Error::TimedOut`] when [`Config::lease`] has passed, with
    /// [`Error::PeerFailed`] when the receiver says that it gave up, with [`Error::Aborted`] or
    /// [`Error::Closed`] when this side ended it.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-put")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let mut slot = relay.try_acquire(24)?;
    /// slot.fill(1);
    /// let (metadata, put) = relay.put(slot, Tensor::new(DType::Float32, [2, 3]))?;
    /// let text = metadata.to_string(); // to the receiver, by any channel
    /// assert_eq!(relay.get(&text.parse()?)?.wait()?[..], [1; 24]);
    /// assert_eq!(put.wait()?.len(), 24); // the slot, to be filled again
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Metadata`] if the tensor's shape says another size than the slot's;
    /// [`Error::Config`] for a slot that is not one of this relay's for puts; [`Error::Closed`].
    /// An error frees the slot.
    pub fn put(&self, slot: Slot<M>, tensor: Tensor) -> Result<(Metadata, Token<Slot<M>>)> {
        self.put_slot(None, slot, tensor)
    }

    /// As [`Self::put`], as a part of request `request_id`: see [`Self::cleanup`].
    ///
    /// # Errors
    ///
    /// As [`Self::put`].
    pub fn put_as(
        &self,
        request_id: &str,
        slot: Slot<M>,
        tensor: Tensor,
    ) -> Result<(Metadata, Token<Slot<M>>)> {
        self.put_slot(Some(request_id), slot, tensor)
    }

    /// Fetches what `metadata` describes; the token yields the slot that holds it. Never blocks: the
    /// get is queued until a receive slot is free, and ends by [`Config::read_timeout`].
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-get")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// let received = relay.get(&metadata)?.wait()?;
    /// assert_eq!(&received[..], b"hello"); // a receive slot: drop it when you are done
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`] beyond [`Config::queued_gets`]; [`Error::TooLarge`];
    /// [`Error::Metadata`] for another protocol than this engine's; [`Error::Closed`]. The sender
    /// does not hear of these, and still holds its slot. The token's errors: [`Error::Stale`],
    /// [`Error::Rejected`], [`Error::PeerFailed`], [`Error::TimedOut`], [`Error::Aborted`],
    /// [`Error::Closed`], [`Error::Metadata`] for a session id that this engine cannot call, and
    /// the engine's own. A sender that is a relay of this library is told
    /// of those, unless it holds the slot no more (`Stale`) or nobody is left to tell it (`Closed`).
    pub fn get(&self, metadata: &Metadata) -> Result<Token<Slot<M>>> {
        self.get_timeout(metadata, self.core.times.read_timeout)
    }

    /// As [`Self::get`]; the whole get, its time in the queue included, ends by `timeout`.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-get-timeout")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, _put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// let late = relay.get_timeout(&metadata, std::time::Duration::ZERO)?;
    /// assert!(matches!(late.wait(), Err(Error::TimedOut)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::get`].
    pub fn get_timeout(&self, metadata: &Metadata, timeout: Duration) -> Result<Token<Slot<M>>> {
        self.get_slot(None, metadata, timeout)
    }

    /// As [`Self::get`], as a part of request `request_id`: see [`Self::cleanup`].
    ///
    /// # Errors
    ///
    /// As [`Self::get`].
    pub fn get_as(&self, request_id: &str, metadata: &Metadata) -> Result<Token<Slot<M>>> {
        self.get_slot(Some(request_id), metadata, self.core.times.read_timeout)
    }

    /// Ends the put or the gets that `metadata` describes, with [`Error::Aborted`], on whichever
    /// side this relay is. The slot is free as soon as nobody reads it.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-abort")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// relay.abort(&metadata)?;
    /// assert!(matches!(put.wait(), Err(Error::Aborted)));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if nothing of that transfer is open here.
    pub fn abort(&self, metadata: &Metadata) -> Result<()> {
        process::check()?;
        let remote = metadata.remote();
        let own = remote.identity.filter(|identity| self.core.is_own(identity.instance));
        let put = own.is_some_and(|own| self.core.end_put(own.id, Error::Aborted));
        let name = metadata.transfer_id();
        let same = |what: &What| what.remote.name() == name && what.remote.peer == remote.peer;
        let gets = self.core.end_gets(|job, _| same(&job.what), || Error::Aborted);
        self.core.bell().ring();
        if !put && gets == 0 {
            return Err(Error::stale(&remote.peer, "nothing of it is open here"));
        }
        Ok(())
    }

    /// Aborts all that is open of request `request_id`; returns how many transfers that were.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-cleanup")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (metadata, put) = relay.put_as("request 7", relay.try_acquire(4)?, Tensor::bytes(4))?;
    /// let (_, other) = relay.put_bytes(b"of no request", Tensor::bytes(13))?;
    /// assert_eq!(relay.cleanup("request 7"), 1); // likewise what `get_as` began
    /// assert!(matches!(put.wait(), Err(Error::Aborted)) && !other.is_done());
    /// # drop(metadata);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn cleanup(&self, request_id: &str) -> usize {
        if !process::is_here() {
            return 0;
        }
        let number = self.core.ids.request(request_id);
        let puts = self.core.end_puts(|seen| seen.request == number, || Error::Aborted);
        let gets = self
            .core
            .end_gets(|job, _| job.request.as_deref() == Some(request_id), || Error::Aborted);
        self.core.bell().ring();
        puts + gets
    }

    /// How this relay is doing. Cheap, and works on a closed relay too.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-health")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let health = relay.health();
    /// assert_eq!((health.status, health.free, health.counters.relay.puts), ("healthy", 2, 0));
    /// let json = serde_json::to_string(&health).expect("it is plain data");
    /// # assert!(json.starts_with("{\"status\":\"healthy\""));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn health(&self) -> Health {
        Health::of(&self.core, &self.protocol)
    }

    /// Ends everything: open tokens end with [`Error::Closed`], later calls too; the threads are
    /// joined and the memory is unregistered. Idempotent, from any thread. It returns by `timeout`:
    /// threads that are still inside the engine then are left to themselves, and counted. Memory that
    /// the engine has not let go of is counted too, stays mapped, and goes when the engine does let
    /// go; until then the engine takes no other relay. Completions that a full channel has not taken
    /// are dropped.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-close")?;
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
    /// let (_, put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
    /// let closed = relay.close(std::time::Duration::from_secs(5));
    /// assert_eq!((closed.puts, closed.threads), (1, 0)); // one put was open; every thread has ended
    /// assert!(matches!(put.wait(), Err(Error::Closed)));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn close(&self, timeout: Duration) -> Closed {
        if !process::is_here() {
            return Closed::default();
        }
        self.shutdown.close(&self.core, deadline_after(Instant::now(), timeout))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn read_timeout(&self) -> Duration {
        self.core.times.read_timeout
    }

    fn register(&self, engine: &Arc<dyn Engine>) -> Result<()> {
        let slots = &self.core.slots;
        if let Some(file) = slots.memory().file() {
            engine.backed_by(slots.memory().span(), self.core.puts.slots() as u32, file);
        }
        for pool in [slots, &self.core.receive] {
            if let Some(device) = pool.memory().device_access() {
                engine.device_memory(pool.memory().span(), pool.slots(), device)?;
            }
        }
        for (span, access) in self.core.spans() {
            self.shutdown.register(&**engine, span, access)?;
        }
        Ok(())
    }

    fn spawn(
        &self,
        threads: &Arc<Threads>,
        name: &str,
        pin: Option<usize>,
        body: fn(&Core<M>),
    ) -> Result<()> {
        let core = Arc::clone(&self.core);
        let running = threads.enter();
        let handle = affinity::spawn(name, pin, move || {
            let _running = running;
            notifier::supervise(&core, body);
        })?;
        threads.add(handle);
        Ok(())
    }

    fn put_slot(
        &self,
        request: Option<&str>,
        slot: Slot<M>,
        tensor: Tensor,
    ) -> Result<(Metadata, Token<Slot<M>>)> {
        let _span = tracing::debug_span!("put", slot = slot.index(), len = slot.len()).entered();
        let core = &self.core;
        core.check_open()?;
        if !slot.is_of(&core.slots) {
            return Err(Error::config(
                "slot",
                "it was not acquired from this relay: acquire one and copy into it",
            ));
        }
        tensor.fits(slot.len())?;
        // What is copied to it is there before anybody can read it.
        slot.settle(|| deadline_after(Instant::now(), core.times.read_timeout))?;
        let (offset, len) = (slot.offset(), slot.len());
        let (publication, token) = core.publish(slot, self.lease, request);
        let metadata = Metadata::of_put(Put {
            engine_id: Arc::clone(&core.engine_id),
            session_id: Arc::clone(&core.session_id),
            protocol: Arc::clone(&self.protocol),
            identity: publication.identity(),
            ptr: publication.span().addr(),
            len,
            credit_id: offset as u64,
            device_id: core.slots.memory().device_id(),
            stamp: Stamp { ptr: publication.stamp_span().addr(), value: publication.stamp() },
            local: self.local.clone(),
            lease: self.lease,
            tensor,
        });
        Ok((metadata, token))
    }

    fn get_slot(
        &self,
        request: Option<&str>,
        metadata: &Metadata,
        timeout: Duration,
    ) -> Result<Token<Slot<M>>> {
        let _span = tracing::debug_span!("get", peer = metadata.session_id()).entered();
        self.core.receive.fits(metadata.size())?;
        let (what, now) = self.what(metadata, timeout)?;
        self.core.submit(what, now, request.map(Into::into))
    }

    /// What is to be read, and since when.
    fn what(&self, metadata: &Metadata, timeout: Duration) -> Result<(What, Instant)> {
        self.core.check_open()?;
        if let Some(protocol) = metadata.protocol().filter(|other| *other != &*self.protocol) {
            return Err(Error::metadata(
                "protocol",
                format!("the sender speaks {protocol:?} and this engine {:?}", self.protocol),
            ));
        }
        let now = Instant::now();
        let what = What {
            remote: Remote::of(metadata.described()),
            peer: self.core.peers.at(&metadata.remote().peer),
            lease: metadata.lease().unwrap_or(self.lease).min(LONGEST_LEASE),
            deadline: deadline_after(now, timeout),
        };
        Ok((what, now))
    }
}

impl<M: Memory> Drop for Relay<M> {
    fn drop(&mut self) {
        self.close(DROP_LIMIT);
    }
}

impl<M: Memory> fmt::Debug for Relay<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("session_id", &self.core.session_id)
            .field("state", &self.core.state())
            .finish_non_exhaustive()
    }
}
