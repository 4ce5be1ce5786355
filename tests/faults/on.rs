//! What a case runs on.

use std::{
    env,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[cfg(feature = "mooncake")]
#[path = "mooncake.rs"]
mod mooncake;

#[cfg(feature = "embedded")]
use mooncake_relay::EmbeddedEngine;
use mooncake_relay::{
    Config, Engine, Error, InProcessEngine, Instance, Metadata, Notification, Relay, Slot, Tensor,
    Token,
};
use serde_json::json;

use crate::common::{
    eventually,
    hooked::{Call, Hooked},
    peer,
    place::Place,
    proxy::Proxy,
};

/// The engines, a line or a few each.
pub(crate) const ENGINES: &[On] = &[
    On { name: "in_process", make: in_process, ..PLAIN },
    On { name: "ranges_only", make: ranges_only, lacks: &[Lack::Identity, Lack::Readers], ..PLAIN },
    On { name: "disturbed", make: disturbed, ..PLAIN },
    #[cfg(feature = "embedded")]
    On {
        name: "embedded_tcp",
        make: || Arc::new(EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap()),
        flags: Some(&["--no-local"]),
        behind: Some(behind),
        ..PLAIN
    },
    // No proxy: it would stand where no byte passes.
    #[cfg(feature = "embedded")]
    On {
        name: "embedded_local",
        make: || Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()),
        flags: Some(&[]),
        ..PLAIN
    },
    #[cfg(feature = "mooncake")]
    mooncake::ON,
];

const PLAIN: On = On {
    name: "",
    make: in_process,
    flags: None,
    behind: None,
    lacks: &[],
    except: &[],
    share: 1,
    library_stays: false,
    is_there: || true,
};

/// One engine, as the cases see it.
pub(crate) struct On {
    pub(crate) name: &'static str,
    make: fn() -> Arc<dyn Engine>,
    /// Flags of the `peer` example that make it use this engine; `None`: only in one process.
    flags: Option<&'static [&'static str]>,
    /// One that others reach through a proxy; `None`: no proxy can stand there.
    behind: Option<Behind>,
    lacks: &'static [Lack],
    /// Cases that fit, and that it cannot pass by its nature, each with the reason.
    except: &'static [(&'static str, &'static str)],
    /// Which part of a long case's rounds it does, where each takes it long: one of so many.
    share: usize,
    library_stays: bool,
    /// Whether it can be set up here.
    is_there: fn() -> bool,
}

/// What some engines cannot do; a case asks where that changes what is right.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// It tells what may be read by the address alone: whose bytes were read is for the receiver to
    /// find out, by the stamp.
    Identity,
    /// It never knows whether a slot is being read, so that the quarantine of one that may be lasts
    /// its full time.
    Readers,
    /// It serves whatever is registered, put or not.
    Publication,
    /// Nothing ends a read but itself: its slot is the engine's until then.
    Cancel,
    /// Notes travel as C's texts, which have no NUL.
    Nul,
    /// It listens on ports of its own choice, and nobody can have one of them right after it.
    Ports,
    /// It keeps no connection for its notes.
    NoteConnections,
}

type Behind = fn(&Proxy) -> Arc<dyn Engine>;

/// One fault.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&On),
    pub(crate) needs: Needs,
    /// Far longer than it takes.
    pub(crate) limit: Duration,
}

/// What an engine must be able to do for a case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing beyond the contract.
    Any,
    /// Relays in processes of their own.
    Processes,
    /// A proxy between the relays.
    Proxy,
    /// No engine: it runs once.
    Nothing,
}

/// The cases of a file: `cases! { Any: a1_such_a_fault; Processes: a2_another, a3_a_third }`. A case
/// takes `&On`; what takes longer than a second or two is given its watchdog: `a4_slow = 300`.
macro_rules! cases {
    ($($needs:ident: $($name:ident $(= $seconds:literal)?),+);+ $(;)?) => {
        pub(crate) const CASES: &[$crate::on::Case] = &[$($(
            $crate::on::Case {
                name: stringify!($name),
                run: $name,
                needs: $crate::on::Needs::$needs,
                limit: {
                    #[allow(unused_mut, unused_assignments)]
                    let mut seconds = 180;
                    $(seconds = $seconds;)?
                    std::time::Duration::from_secs(seconds)
                },
            }
        ),+),+];
    };
}
pub(crate) use cases;

/// A relay that must be at rest when it goes: every credit back, nothing quarantined, nothing kept.
pub(crate) struct AtRest {
    relay: Relay,
    receive_credits: usize,
}

/// A process that must be at rest when it goes, and then says goodbye.
pub(crate) struct Peer(Option<peer::Peer>);

impl On {
    pub(crate) fn name_of(&self, case: &Case) -> String {
        let on = if case.needs == Needs::Nothing { "any" } else { self.name };
        format!("{on}::{}", case.name)
    }

    /// Why it is left out here, if it is.
    pub(crate) fn excepts(&self, case: &Case) -> Option<&'static str> {
        self.except.iter().find(|(name, _)| *name == case.name).map(|(_, reason)| *reason)
    }

    /// The names of what is left out here.
    pub(crate) fn exceptions(&self) -> impl Iterator<Item = &'static str> {
        self.except.iter().map(|(name, _)| *name)
    }

    /// Whether a library comes with it that is never unloaded and has threads of its own.
    pub(crate) fn library_stays(&self) -> bool {
        self.library_stays
    }

    pub(crate) fn is_there(&self) -> bool {
        (self.is_there)()
    }

    pub(crate) fn lacks(&self, what: Lack) -> bool {
        self.lacks.contains(&what)
    }

    /// How many rounds of a long case are done here.
    pub(crate) fn rounds(&self, all: usize) -> usize {
        all / self.share
    }

    /// The same, of a case that does `all` of them where the environment asks for that, and `few`
    /// everywhere else.
    pub(crate) fn full_or(&self, all: usize, few: usize) -> usize {
        if in_full() { all } else { self.rounds(few) }
    }

    pub(crate) fn fits(&self, case: &Case) -> bool {
        match case.needs {
            Needs::Any => true,
            Needs::Processes => self.flags.is_some(),
            Needs::Proxy => self.behind.is_some(),
            Needs::Nothing => self.name == ENGINES[0].name,
        }
    }

    pub(crate) fn engine(&self) -> Arc<dyn Engine> {
        (self.make)()
    }

    /// This engine, with faults to be set.
    pub(crate) fn hooked(&self) -> Hooked {
        Hooked::over(self.engine())
    }

    /// A relay on an engine of its own.
    pub(crate) fn relay(&self, config: &Config) -> AtRest {
        AtRest::new(self.engine(), config)
    }

    /// Two relays, each on an engine of its own.
    pub(crate) fn pair(&self, config: &Config) -> (AtRest, AtRest) {
        (self.relay(config), self.relay(config))
    }

    /// A relay that others reach through `proxy`.
    pub(crate) fn behind(&self, proxy: &Proxy, config: &Config) -> AtRest {
        AtRest::new(self.behind.expect("a proxy can stand here")(proxy), config)
    }

    /// The `peer` example on this engine, with slots of 256 KiB unless the flags say otherwise.
    pub(crate) fn peer(&self, flags: &[&str]) -> Peer {
        Peer(Some(peer::Peer::start(&self.flags(flags))))
    }

    /// The same in another place, a network namespace say.
    pub(crate) fn peer_in(&self, place: &Place, flags: &[&str]) -> Peer {
        Peer(Some(peer::Peer::start_in(place, &self.flags(flags))))
    }

    /// The flags with which the `peer` example uses this engine, and `more`.
    pub(crate) fn flags<'a>(&self, more: &[&'a str]) -> Vec<&'a str> {
        let own = self.flags.expect("peers can be processes here");
        let default = |flag, value, wanted| {
            if wanted && !more.contains(&flag) { vec![flag, value] } else { Vec::new() }
        };
        let size = default("--slot-size", "262144", true);
        let quarantine = default("--quarantine-ms", "100", self.lacks(Lack::Readers));
        [&size, &quarantine, own, more].concat()
    }
}

impl AtRest {
    pub(crate) fn new(engine: Arc<dyn Engine>, config: &Config) -> Self {
        let receive_credits = config.receive_credits.unwrap_or(config.credits) as usize;
        Self { relay: Relay::new(engine, config).unwrap(), receive_credits }
    }

    /// Everything is back; waits for what is on its way.
    #[track_caller]
    pub(crate) fn comes_to_rest(&self) {
        let credits = self.health().credits as usize;
        eventually((credits, self.receive_credits, [0; 5]), || {
            let health = self.health();
            let quarantined = health.quarantined.len();
            let busy =
                [health.published, quarantined, health.queued, health.reading, health.waiting];
            (health.free, health.receive_free, busy)
        });
    }

    /// Puts a copy of `bytes`.
    #[track_caller]
    pub(crate) fn sends(&self, bytes: &[u8]) -> (Metadata, Token<Slot>) {
        self.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
    }

    /// Whether it has read through shared memory, which takes no part of its sender.
    pub(crate) fn reads_memory(&self) -> bool {
        self.health().counters.engine.get("reads_local").is_some_and(|count| *count > 0)
    }

    /// One transfer, from end to end, to `other`.
    #[track_caller]
    pub(crate) fn works_with(&self, other: &Relay) {
        let (metadata, token) = self.sends(b"a transfer that works");
        assert_eq!(&other.get(&metadata).unwrap().wait().unwrap()[..], b"a transfer that works");
        drop(token.wait().unwrap());
    }
}

impl Deref for AtRest {
    type Target = Relay;

    fn deref(&self) -> &Relay {
        &self.relay
    }
}

impl Drop for AtRest {
    fn drop(&mut self) {
        if !thread::panicking() && self.relay.health().status != "closed" {
            self.comes_to_rest();
        }
    }
}

impl Deref for Peer {
    type Target = peer::Peer;

    fn deref(&self) -> &peer::Peer {
        self.0.as_ref().expect("it runs until it is dropped")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.0.is_some() && !thread::panicking() {
            self.comes_to_rest();
            self.take().quit();
        }
    }
}

impl Peer {
    /// SIGKILL: no goodbye.
    pub(crate) fn kill(mut self) {
        self.take().kill();
    }

    fn take(&mut self) -> peer::Peer {
        self.0.take().expect("it runs until it is dropped")
    }

    /// Everything is back; waits for what is on its way.
    #[track_caller]
    pub(crate) fn comes_to_rest(&self) {
        let credits = self.health()["credits"].as_u64().unwrap();
        eventually((credits, Some(credits), json!([[], 0, 0])), || {
            let (free, receive_free) = self.free();
            let health = self.health();
            let busy = ["quarantined", "reading", "queued"].map(|name| health[name].clone());
            (free, receive_free, json!(busy))
        });
    }

    /// Whether it has read through shared memory, which takes no part of its sender.
    pub(crate) fn reads_memory(&self) -> bool {
        self.health()["counters"]["reads_local"].as_u64().unwrap_or(0) > 0
    }

    /// One put, from end to end, to `other`.
    #[track_caller]
    pub(crate) fn works_with(&self, other: &Self) {
        let sent = self.put(json!({"size": 5000, "seed": 77}));
        let got = other.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
        let ended = self.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    }
}

/// An engine that is no relay's, to send notes with.
pub(crate) struct Stranger {
    engine: Arc<dyn Engine>,
    lacks_nul: bool,
}

impl Stranger {
    pub(crate) fn new(on: &On) -> Self {
        let engine = on.engine();
        engine.start(&Instance::from_bytes([0x57; 16])).unwrap();
        Self { engine, lacks_nul: on.lacks(Lack::Nul) }
    }

    #[track_caller]
    pub(crate) fn tells(&self, relay: &AtRest, note: &Notification) {
        assert!(self.tries_to_tell(relay, note), "its engine does not send that");
    }

    /// False: the note is longer than its engine sends, or has a NUL, and that cannot have any.
    #[track_caller]
    pub(crate) fn tries_to_tell(&self, relay: &AtRest, note: &Notification) -> bool {
        match self.engine.notify(&relay.health().session_id, note, soon()) {
            Ok(()) => true,
            Err(Error::TooLarge { .. }) => false,
            Err(Error::Metadata { reason, .. }) if self.lacks_nul && reason.contains("NUL") => {
                false
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.engine.stop(soon());
    }
}

/// Whether `MOONCAKE_RELAY_TEST_FULL` is set: cases then do all the rounds that their fault wants.
pub(crate) fn in_full() -> bool {
    env::var_os("MOONCAKE_RELAY_TEST_FULL").is_some()
}

/// Far later than anything here takes.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// What a peer in another process has put.
pub(crate) fn metadata_of(sent: &peer::Sent) -> Metadata {
    sent.metadata.to_string().parse().unwrap()
}

fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("fault-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn in_process() -> Arc<dyn Engine> {
    Arc::new(InProcessEngine::new(&name()).unwrap())
}

/// As a real Mooncake engine: it knows no identity and never whether a slot is being read.
fn ranges_only() -> Arc<dyn Engine> {
    Hooked::over(in_process()).ranges_only().knows_no_readers().engine()
}

/// Reads and notifications are late, and each notification comes twice.
fn disturbed() -> Arc<dyn Engine> {
    let engine = Hooked::new(&name());
    let (read, notify) = (Duration::from_micros(200), Duration::from_micros(100));
    engine.delay(Call::Read, read, 0x5eed).delay(Call::Notify, notify, 0x5eee).double_notes();
    engine.engine()
}

#[cfg(feature = "embedded")]
fn behind(proxy: &Proxy) -> Arc<dyn Engine> {
    let builder = EmbeddedEngine::builder("127.0.0.1:0").local(false);
    let engine = builder.advertise(&proxy.advertise()).bind().unwrap();
    proxy.forward_to(engine.control_addr(), engine.data_addr());
    Arc::new(engine)
}
