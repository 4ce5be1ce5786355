//! Every call ends by its deadline, whatever the engine and the peers do.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    cell::RefCell,
    fs,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use crossbeam::channel::{Sender, bounded};
use mooncake_relay::{Config, Error, Relay, Tensor};

use crate::common::{
    eventually,
    hooked::{Hooked, refused, set},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(20);
/// Long enough for what is done at once, on a busy machine too.
const SOON: Duration = Duration::from_millis(300);

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
    set(&engine.hooks().before_unregister, move |()| {
        let _ = may_go.recv();
        Ok(())
    });
    (engine, go)
}

/// The threads of this test that end relays.
fn closers() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "relay-closer").count()
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
        set(&engine.hooks().before_stop, move |()| {
            let _ = may_go.recv();
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
fn what_an_engine_cannot_unregister_stays_mapped_and_is_told() {
    within(WATCHDOG, || {
        let engine = hooked();
        set(&engine.hooks().before_unregister, |()| Err(refused()));
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
        set(&engine.hooks().before_unregister, |()| panic!("as the test wants it"));
        set(&engine.hooks().before_stop, |()| panic!("as the test wants it"));
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
        eventually(0, closers);
    });
}
