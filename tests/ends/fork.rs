//! A forked child: whatever it does with what it has inherited is refused, and its parent feels
//! nothing of it.

use std::{
    io::ErrorKind,
    net::TcpStream,
    panic::{AssertUnwindSafe, catch_unwind},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use crossbeam::channel::unbounded;
use mooncake_relay::{
    Closed, EmbeddedEngine, Engine, Error, InProcessEngine, Instance, Metadata, MooncakeConfig,
    MooncakeEngine, Notification, Relay, Result, Slot, Tensor, Token, View,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::json;

use crate::{
    ENGINES, Make, WATCHDOG, cases,
    common::{eventually, peer::Peer, real},
    local, put, small, tcp, works,
};

cases! {
    m4_a_forked_child_is_refused_everything_and_its_parent_goes_on = 300,
    m4_a_child_of_the_real_engine_is_refused_everything_and_its_parent_goes_on = 300,
    m4_forks_in_the_middle_of_transfers_disturb_none = 300,
    m4_a_child_that_is_forked_before_the_first_relay_makes_its_own_and_a_later_one_makes_none = 300,
    m4_other_processes_feel_nothing_of_a_fork = 300,
    m4_a_parent_that_closes_while_its_child_lives_is_gone_and_its_ports_are_free,
}

/// How a child ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Without a word.
    AtOnce,
    /// As a program does: by `exit`, with whatever was registered for that.
    Exit,
}

/// Runs `body` in a forked child, which has half a minute; true if it came to its end.
fn in_child(end: End, body: impl FnOnce()) -> bool {
    // SAFETY: the child allocates, which the system's allocator allows after a fork, and meets no lock
    // that another thread may have held: that it does not is what is tested.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a signal that ends it.
            unsafe { libc::alarm(30) };
            let well = catch_unwind(AssertUnwindSafe(body)).is_ok();
            match (well, end) {
                // SAFETY: it ends the child.
                (true, End::AtOnce) => unsafe { libc::_exit(0) },
                // SAFETY: as above; what runs at the exit of a process has no part in relays.
                (true, End::Exit) => unsafe { libc::exit(0) },
                // SAFETY: as above.
                (false, _) => unsafe { libc::_exit(1) },
            }
        }
        pid => {
            let pid = Pid::from_raw(pid).expect("the system forks");
            let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
            status.exit_status() == Some(0)
        }
    }
}

/// Everything of a relay's that a child may inherit.
struct Inherited {
    engine: Arc<dyn Engine>,
    relay: Relay,
    /// For a put of the parent's.
    metadata: Metadata,
    slots: Vec<Slot>,
    tokens: Vec<Token<Slot>>,
    done: Token<Slot>,
    view: Option<View>,
}

impl Inherited {
    fn new(make: fn() -> Arc<dyn Engine>, from: &Relay) -> Self {
        let engine = make();
        let relay = Relay::new(Arc::clone(&engine), &small().with_credits(16)).unwrap();
        works(&relay, from);
        works(from, &relay);
        let (metadata, _) = put(from, b"open at the parent");
        let view = relay.view(&metadata).ok();
        let (metadata, _) = put(from, b"open at the parent");
        let slots = (0..4).map(|n| {
            let mut slot = relay.try_acquire(8).unwrap();
            slot.fill(n);
            slot
        });
        let slots = slots.collect();
        let tokens = (0..6).map(|_| put(&relay, b"open").1).collect();
        let done = relay.get(&put(from, b"read before the fork").0).unwrap();
        eventually(true, || done.is_done());
        Self { engine, relay, metadata, slots, tokens, done, view }
    }

    /// What a child tries with all of it, and how it drops it.
    fn meets_refusals(mut self) {
        let relay = &self.relay;
        let metadata = &self.metadata;
        let tensor = || Tensor::bytes(8);
        refused("try_acquire", relay.try_acquire(1));
        refused("acquire", relay.acquire(1, WATCHDOG));
        refused("put_bytes", relay.put_bytes(&[1; 8], tensor()));
        refused("put", relay.put(self.slots.pop().unwrap(), tensor()));
        refused("put_as", relay.put_as("r", self.slots.pop().unwrap(), tensor()));
        refused("get", relay.get(metadata));
        refused("get_timeout", relay.get_timeout(metadata, WATCHDOG));
        refused("get_as", relay.get_as("r", metadata));
        refused("get_into", relay.get_into(metadata, &mut [0; 64], WATCHDOG));
        refused("view", relay.view(metadata));
        refused("abort", relay.abort(metadata));
        assert_eq!(relay.cleanup("r"), 0);
        let health = relay.health();
        assert_eq!((health.status, health.credits, health.free), ("forked", 16, 0));
        assert_eq!(relay.close(WATCHDOG), Closed::default());
        assert!(format!("{relay:?} {:?}", self.slots).contains("Relay"));

        let mut token = || self.tokens.pop().unwrap();
        refused("wait", token().wait());
        let mut polled = token();
        refused("poll", polled.poll().unwrap());
        assert!(polled.poll().is_none(), "told once");
        let mut timed = token();
        refused("wait_timeout", timed.wait_timeout(WATCHDOG).unwrap());
        let (tx, rx) = unbounded();
        token().attach(&tx, 1);
        assert!(rx.try_recv().is_err(), "nothing is sent");
        refused("wait, of what is done", self.done.wait());

        if let Some(view) = &self.view {
            assert!(view.is_gone());
            refused("copy_to", view.copy_to(&mut [0; 64]));
        }

        let engine = &self.engine;
        let soon = Instant::now() + WATCHDOG;
        refused("start", engine.start(&Instance::from_bytes([1; 16])));
        refused("unregister", engine.unregister(relay_span(&self.slots)));
        refused("connect", engine.connect(metadata.session_id(), soon));
        let note = Notification::new("n", "transfer_complete");
        refused("notify", engine.notify(metadata.session_id(), &note, soon));
        refused("poll", engine.poll(&mut |_| panic!("nothing is heard")));
        engine.tend();
        engine.interrupt(relay_span(&self.slots));
        engine.stop(soon);
        if let Some(bell) = engine.doorbell() {
            bell.ring();
        }
        engine.counters(&mut |_, _| ());
        refused("a relay on it", Relay::new(Arc::clone(engine), &small()));

        drop(self.slots.pop());
        drop((self.tokens, self.view));
        drop(self.relay);
        drop(self.slots);
        drop(self.engine);
    }
}

fn relay_span(slots: &[Slot]) -> mooncake_relay::Span {
    slots[0].span()
}

#[track_caller]
fn refused<T>(what: &str, outcome: Result<T>) {
    match outcome.map(drop) {
        Err(Error::Config { field: "process", .. }) => {}
        other => panic!("{what}: {other:?}"),
    }
}

fn m4_a_forked_child_is_refused_everything_and_its_parent_goes_on() {
    for make in ENGINES {
        is_refused_in_a_child(make);
    }
}

fn m4_a_child_of_the_real_engine_is_refused_everything_and_its_parent_goes_on() {
    if crate::common::peer::real_engine().is_some() {
        is_refused_in_a_child(("mooncake", || Arc::new(real::engine().unwrap())));
    }
}

fn is_refused_in_a_child((kind, make): Make) {
    let from = Relay::new(make(), &small().with_credits(8)).unwrap();
    for end in [End::AtOnce, End::Exit] {
        let mut own = Some(Inherited::new(make, &from));
        let before = links(&own.as_ref().unwrap().relay);
        let well = in_child(end, || own.take().unwrap().meets_refusals());
        assert!(well, "{kind}, {end:?}: the child says why");
        // The child's copy is gone, and the parent's is as it was.
        let mut own = own.unwrap();
        for (slot, n) in own.slots.iter().zip(0..) {
            assert_eq!(slot[..], [n; 8], "{kind}, {end:?}");
        }
        if let Some(view) = own.view.take() {
            let mut bytes = [0; 18];
            view.copy_to(&mut bytes).unwrap();
            assert_eq!(&bytes, b"open at the parent", "{kind}, {end:?}");
        }
        assert_eq!(
            own.relay.get(&own.metadata).unwrap().wait().unwrap()[..],
            *b"open at the parent"
        );
        assert_eq!(own.done.wait().unwrap()[..], *b"read before the fork");
        for _ in 0..100 {
            works(&own.relay, &from);
            works(&from, &own.relay);
        }
        assert_eq!(links(&own.relay), before, "{kind}, {end:?}: no connection was made anew");
        let closed = own.relay.close(WATCHDOG);
        assert_eq!((closed.puts, closed.threads, closed.spans_kept), (6, 0, 0), "{kind}");
        for token in own.tokens {
            assert!(matches!(token.wait(), Err(Error::Closed)));
        }
    }
}

/// What it has had to do with others: all that tells of a connection that was lost.
fn links(relay: &Relay) -> Vec<(&'static str, u64)> {
    let counters = relay.health().counters.engine;
    let names =
        ["connections", "reconnects", "local_peers", "descriptor_fetches", "segments_opened"];
    names.iter().filter_map(|name| Some((*name, *counters.get(name)?))).collect()
}

fn m4_forks_in_the_middle_of_transfers_disturb_none() {
    for (kind, make) in ENGINES {
        let [a, b] = [(), ()].map(|()| {
            let engine = make();
            (Arc::clone(&engine), Relay::new(engine, &small().with_credits(8)).unwrap())
        });
        let over = AtomicBool::new(false);
        let rounds = thread::scope(|s| {
            let both = [(&a.1, &b.1), (&b.1, &a.1)].map(|(from, to)| {
                let over = &over;
                s.spawn(move || {
                    let mut rounds = 0;
                    while !over.load(Ordering::SeqCst) {
                        works(from, to);
                        rounds += 1;
                    }
                    rounds
                })
            });
            for n in 0..40 {
                let well = in_child(if n % 2 == 0 { End::AtOnce } else { End::Exit }, || {
                    for (engine, relay) in [&a, &b] {
                        refused("try_acquire", relay.try_acquire(1));
                        refused("put_bytes", relay.put_bytes(b"x", Tensor::bytes(1)));
                        assert_eq!(relay.health().status, "forked");
                        assert_eq!(relay.close(WATCHDOG), Closed::default());
                        refused("poll", engine.poll(&mut |_| ()));
                        engine.stop(Instant::now());
                        // SAFETY: the child's copies, which it alone looks at, and ends with.
                        drop(unsafe { std::ptr::read(relay) });
                        // SAFETY: as above.
                        drop(unsafe { std::ptr::read(engine) });
                    }
                });
                assert!(well, "{kind}, fork {n}: the child says why");
            }
            over.store(true, Ordering::SeqCst);
            both.map(|thread| thread.join().unwrap())
        });
        println!("{kind}: {rounds:?} transfers beside 40 forks");
        assert!(rounds.iter().all(|rounds| *rounds > 0), "{kind}: {rounds:?}");
        for (_, relay) in [&a, &b] {
            eventually((8, 0), || (relay.health().free, relay.health().quarantined.len()));
        }
    }
}

fn m4_a_child_that_is_forked_before_the_first_relay_makes_its_own_and_a_later_one_makes_none() {
    let make_and_work = || {
        for (_, make) in ENGINES {
            let [a, b] = [(), ()].map(|()| Relay::new(make(), &small()).unwrap());
            works(&a, &b);
        }
    };
    // Its parent has nothing, so all that it has is its own; as in a server that forks its workers.
    assert!(in_child(End::Exit, || {
        assert!(in_child(End::Exit, make_and_work), "the grandchild says why");
        make_and_work();
    }));
    make_and_work();
    // Though all of it is gone again: the locks of the process were used.
    assert!(in_child(End::Exit, || {
        refused("in process", InProcessEngine::new("a child's"));
        refused("embedded", EmbeddedEngine::bind("127.0.0.1:0"));
        refused("mooncake", MooncakeEngine::open(&MooncakeConfig::default()));
        assert!(in_child(End::AtOnce, || {
            refused("a grandchild", EmbeddedEngine::bind("127.0.0.1:0"));
        }));
        // What is started by exec is nobody's child in that sense.
        let ended = Command::new("true").output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }));
    make_and_work();
}

fn m4_other_processes_feel_nothing_of_a_fork() {
    for (flags, make) in [(&[] as &[&str], local as fn() -> _), (&["--no-local"], tcp)] {
        let peer = Peer::start(&[flags, &["--slot-size", "4096"]].concat());
        let mut own = Some(Relay::new(make(), &small().with_credits(4)).unwrap());
        let transfers = |relay: &Relay, count: usize| {
            for n in 0..count {
                let sent = peer.put(json!({"size": 1000, "fill": n % 250}));
                let got = relay.get(&sent.metadata.to_string().parse().unwrap()).unwrap();
                assert_eq!(got.wait().unwrap()[..], [(n % 250) as u8; 1000]);
                assert_eq!(peer.wait(sent.tag)["ok"], true);
                let (metadata, token) = put(relay, &[n as u8; 100]);
                let got = peer.get(&serde_json::from_str(&metadata.to_string()).unwrap());
                assert_eq!(got["ok"], true, "{got}");
                drop(token.wait().unwrap());
            }
        };
        transfers(own.as_ref().unwrap(), 3);
        let before = (links(own.as_ref().unwrap()), links_of(&peer));
        for end in [End::AtOnce, End::Exit] {
            assert!(in_child(end, || {
                let own = own.take().unwrap();
                refused("put_bytes", own.put_bytes(b"x", Tensor::bytes(1)));
                drop(own);
            }));
            transfers(own.as_ref().unwrap(), 50);
        }
        assert_eq!((links(own.as_ref().unwrap()), links_of(&peer)), before);
        drop(own.take());
        peer.quit();
    }
}

fn m4_a_parent_that_closes_while_its_child_lives_is_gone_and_its_ports_are_free() {
    for make in [
        EmbeddedEngine::builder("127.0.0.1:0"),
        EmbeddedEngine::builder("127.0.0.1:0").local(false),
    ] {
        let engine = Arc::new(make.bind().unwrap());
        let ports = [engine.control_addr(), engine.data_addr()];
        let [a, b] = [Arc::clone(&engine) as Arc<dyn Engine>, local()]
            .map(|engine| Relay::new(engine, &small()).unwrap());
        works(&a, &b);
        works(&b, &a);
        let (metadata, open) = put(&a, b"open");
        // SAFETY: the child does nothing but live.
        let child = match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: it sleeps, and ends with the signal at the latest.
                unsafe { libc::alarm(60) };
                // SAFETY: as above.
                unsafe { libc::pause() };
            },
            pid => Pid::from_raw(pid).expect("the system forks"),
        };
        a.close(WATCHDOG);
        assert!(matches!(open.wait(), Err(Error::Closed)));
        let got = b.get(&metadata).unwrap().wait();
        assert!(matches!(got, Err(Error::PeerFailed { .. } | Error::Stale { .. })), "{got:?}");
        for port in ports {
            let refused = TcpStream::connect(port).map(drop).map_err(|error| error.kind());
            assert_eq!(refused, Err(ErrorKind::ConnectionRefused));
        }
        drop((a, engine));
        let again = EmbeddedEngine::bind(&ports[0].to_string()).unwrap();
        let again = Relay::new(Arc::new(again), &small()).unwrap();
        works(&again, &b);
        works(&b, &again);
        kill_process(child, Signal::KILL).unwrap();
        waitpid(Some(child), WaitOptions::empty()).unwrap();
    }
}

fn links_of(peer: &Peer) -> Vec<serde_json::Value> {
    let health = peer.health();
    let names = ["connections", "reconnects", "local_peers", "descriptor_fetches"];
    names.map(|name| health["counters"][name].clone()).into()
}
