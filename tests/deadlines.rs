//! Every call ends by its deadline, whatever the engine and the peers do.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    cell::RefCell,
    fs,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::{Sender, bounded};
use mooncake_relay::{
    Config, Engine, Error, InProcessEngine, Instance, Notification, Relay, RemoteBuffer, Tensor,
};

use crate::common::{
    eventually,
    hooked::{Call, Hooked, refused},
    threads_named, within,
};

const WATCHDOG: Duration = Duration::from_secs(60);
/// Long enough for what is done at once, on a busy machine too.
const SOON: Duration = Duration::from_secs(3);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn hooked() -> Hooked {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    Hooked::new(&format!("deadlines-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// An engine that lets go of nothing until the sender is dropped.
fn holds_on() -> (Hooked, Sender<()>) {
    let engine = hooked();
    let (go, may_go) = bounded::<()>(0);
    engine.before(Call::Unregister, move || {
        let _ = may_go.recv();
        Ok(())
    });
    (engine, go)
}

#[test]
fn a_close_returns_in_its_time_and_what_the_engine_holds_goes_when_it_lets_go() {
    within(WATCHDOG, || {
        let (engine, go) = holds_on();
        let relay = Relay::new(engine.engine(), &small()).unwrap();
        let (_, put) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        let closed = relay.close(SOON);
        assert_eq!((closed.puts, closed.threads, closed.spans_kept), (1, 0, 4));
        assert!(matches!(put.wait(), Err(Error::Closed)));
        assert_eq!(relay.close(WATCHDOG), closed, "the same answer, at once");
        drop(relay);

        let second = Relay::new(engine.engine(), &small());
        assert!(matches!(second, Err(Error::Config { field: "engine", .. })), "{second:?}");
        assert_eq!(engine.registered(), 4);
        drop(go);
        eventually(0, || engine.registered());
        eventually(true, || {
            Relay::new(engine.engine(), &small()).is_ok_and(|relay| {
                let (metadata, _put) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
                relay.get(&metadata).unwrap().wait().is_ok()
            })
        });
    });
}

#[test]
fn a_close_returns_in_its_time_although_the_engine_does_not_stop() {
    within(WATCHDOG, || {
        let engine = hooked();
        let (go, may_go) = bounded::<()>(0);
        engine.on_stop(move |next, deadline| {
            let _ = may_go.recv();
            next.stop(deadline);
        });
        let relay = Relay::new(engine.engine(), &small()).unwrap();
        let closed = relay.close(SOON);
        assert_eq!((closed.threads, closed.spans_kept, engine.registered()), (0, 0, 0));
        let second = Relay::new(engine.engine(), &small());
        assert!(matches!(second, Err(Error::Config { field: "engine", .. })), "{second:?}");
        drop(go);
        eventually(true, || Relay::new(engine.engine(), &small()).is_ok());
    });
}

#[test]
fn closes_of_many_threads_each_return_in_their_own_time() {
    within(WATCHDOG, || {
        let (engine, go) = holds_on();
        let relay = Relay::new(engine.engine(), &small()).unwrap();
        thread::scope(|s| {
            let first = s.spawn(|| relay.close(Duration::from_secs(3600)));
            eventually("closed", || relay.health().status);
            for _ in 0..3 {
                s.spawn(|| relay.close(SOON));
            }
            for _ in 0..3 {
                assert_eq!(relay.close(Duration::ZERO).spans_kept, 0, "another call closes");
            }
            drop(go);
            assert_eq!(first.join().unwrap().spans_kept, 0);
        });
        assert_eq!(engine.registered(), 0);
    });
}

#[test]
fn r6_what_an_engine_cannot_unregister_stays_mapped_and_is_told() {
    within(WATCHDOG, || {
        let engine = hooked();
        engine.fail(Call::Unregister, .., refused);
        let relay = Relay::new(engine.engine(), &small()).unwrap();
        let kept = relay.try_acquire(8).unwrap().span();
        let closed = relay.close(WATCHDOG);
        assert_eq!((closed.threads, closed.spans_kept), (0, 4));
        drop(relay);
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let inside = |line: &&str| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap());
            (start..end).contains(&kept.addr())
        };
        let line = maps.lines().find(inside).expect("it is mapped");
        assert!(line.contains("mooncake-relay-slots"), "{line}");
    });
}

#[test]
fn an_engine_that_panics_in_unregister_or_stop_costs_its_memory_and_not_the_caller() {
    within(WATCHDOG, || {
        let engine = hooked();
        engine.before(Call::Unregister, || panic!("as the test wants it"));
        engine.on_stop(|_, _| panic!("as the test wants it"));
        let relay = Relay::new(engine.engine(), &small()).unwrap();
        let closed = relay.close(WATCHDOG);
        assert_eq!((closed.threads, closed.spans_kept), (0, 4));
    });
}

#[test]
fn a_relay_that_goes_with_its_threads_locals_closes() {
    thread_local! {
        static RELAY: RefCell<Option<Relay>> = const { RefCell::new(None) };
    }
    within(WATCHDOG, || {
        let engine = hooked();
        let shared = engine.engine();
        thread::spawn(move || {
            let relay = Relay::new(shared, &small()).unwrap();
            RELAY.with_borrow_mut(|local| *local = Some(relay));
        })
        .join()
        .unwrap();
        assert_eq!(engine.registered(), 0);
        eventually(0, || threads_named("relay-closer"));
    });
}

type Open = fn() -> Arc<dyn Engine>;

fn in_process() -> Arc<dyn Engine> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Arc::new(InProcessEngine::new(&format!("deadlines-plain-{n}")).unwrap())
}

#[cfg(feature = "embedded")]
fn embedded() -> Arc<dyn Engine> {
    Arc::new(mooncake_relay::EmbeddedEngine::bind("127.0.0.1:0").unwrap())
}

const ENGINES: &[Open] = &[
    in_process,
    #[cfg(feature = "embedded")]
    embedded,
];

/// As long as can be, where a configuration says how long.
fn for_ever() -> Config {
    let long = small().with_credits(1).with_lease(Duration::MAX).with_quarantine(Duration::MAX);
    long.with_read_timeout(Duration::MAX)
}

fn timed_out<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::TimedOut))
}

#[test]
fn no_time_at_all_is_one_try_on_every_call() {
    for open in ENGINES {
        within(WATCHDOG, move || {
            let relay = Relay::new(open(), &small().with_credits(1)).unwrap();
            let slot = relay.acquire(1, Duration::ZERO).unwrap();
            assert!(timed_out(relay.acquire(1, Duration::ZERO)));
            let (metadata, mut put) = relay.put(slot, Tensor::bytes(1)).unwrap();
            assert!(put.wait_timeout(Duration::ZERO).is_none());
            let mut late = relay.get_timeout(&metadata, Duration::ZERO).unwrap();
            while late.wait_timeout(Duration::ZERO).is_none_or(|late| !timed_out(late)) {}
            // The sender was told, and so it is over.
            assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));

            let (metadata, mut put) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
            assert!(timed_out(relay.get_into(&metadata, &mut [0], Duration::ZERO)));
            assert!(matches!(put.wait_timeout(Duration::MAX), Some(Err(Error::PeerFailed { .. }))));
            assert!(put.wait_timeout(Duration::MAX).is_none(), "its outcome was taken");
            assert_eq!(relay.close(Duration::ZERO).puts, 0);
        });
    }
}

#[test]
fn all_the_time_there_is_overflows_nowhere() {
    for open in ENGINES {
        within(WATCHDOG, move || {
            let relay = Relay::new(open(), &for_ever()).unwrap();
            let slot = relay.acquire(1, Duration::MAX).unwrap();
            thread::scope(|s| {
                let next = s.spawn(|| relay.acquire(1, Duration::MAX).map(drop));
                eventually(1, || relay.health().waiting);
                drop(slot);
                next.join().unwrap().unwrap();
            });
            let (metadata, mut put) = relay.put_bytes(b"x", Tensor::bytes(1)).unwrap();
            let metadata = metadata.to_string().parse().unwrap();
            let mut get = relay.get_timeout(&metadata, Duration::MAX).unwrap();
            assert_eq!(&get.wait_timeout(Duration::MAX).unwrap().unwrap()[..], b"x");
            put.wait_timeout(Duration::MAX).unwrap().unwrap();

            let (metadata, put) = relay.put_bytes(b"y", Tensor::bytes(1)).unwrap();
            let mut dest = [0];
            assert_eq!(relay.get_into(&metadata, &mut dest, Duration::MAX).unwrap(), 1);
            put.wait().unwrap();
            // One that nobody waits for, so that a transfer thread reads it.
            let (metadata, put) = relay.put_bytes(b"z", Tensor::bytes(1)).unwrap();
            let get = relay.get(&metadata).unwrap();
            eventually(true, || get.is_done());
            drop((get, put));
            let (_, open) = relay.put_bytes(b"open", Tensor::bytes(4)).unwrap();
            let closed = relay.close(Duration::MAX);
            assert_eq!((closed.puts, closed.threads, closed.spans_kept), (1, 0, 0));
            assert!(matches!(open.wait(), Err(Error::Closed)));
        });
    }
}

#[test]
fn an_engines_calls_bear_any_deadline() {
    for open in ENGINES {
        within(WATCHDOG, move || {
            let engine = open();
            let peer = Relay::new(open(), &small()).unwrap();
            engine.start(&Instance::from_bytes([1; 16])).unwrap();
            let (metadata, _put) = peer.put_bytes(b"abcd", Tensor::bytes(4)).unwrap();
            let name = metadata.session_id();
            let json: serde_json::Value = serde_json::from_str(&metadata.to_string()).unwrap();
            let ptr = json["mooncake"]["buffer_ptr"].as_u64().unwrap();
            let id = metadata.transfer_id().rsplit_once('_').unwrap().1.parse().unwrap();
            let instance = json["relay"]["instance"].as_str().unwrap().parse().unwrap();
            let identity = mooncake_relay::Identity { instance, id };
            let remote = RemoteBuffer::new(name, ptr, 4).with_identity(identity);
            let note = Notification::new("a_b", "transfer_complete");

            let never = Instant::now();
            let mut dest = [0; 4];
            assert!(timed_out(engine.read_into(&remote, &mut dest, never).unwrap()));
            assert!(timed_out(engine.notify(name, &note, never)));
            assert_eq!(dest, [0; 4]);
            // What a century is, with room to spare.
            let far = never + Duration::from_secs(200 * 365 * 24 * 3600);
            engine.connect(name, far).unwrap();
            engine.read_into(&remote, &mut dest, far).unwrap().unwrap();
            engine.notify(name, &note, far).unwrap();
            assert_eq!(&dest, b"abcd");
            engine.stop(never);
        });
    }
}

#[test]
fn a_configuration_without_time_is_refused_where_nothing_could_happen_in_it() {
    let zero = Duration::ZERO;
    for (expected, config) in
        [("lease", small().with_lease(zero)), ("read_timeout", small().with_read_timeout(zero))]
    {
        match Relay::new(in_process(), &config) {
            Err(Error::Config { field, .. }) => assert_eq!(field, expected),
            other => panic!("{other:?}"),
        }
    }
    Relay::new(in_process(), &small().with_quarantine(zero)).unwrap();
}
