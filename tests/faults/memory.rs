//! Registration and the memory of pools.

use std::{
    fs,
    ptr::NonNull,
    time::{Duration, Instant},
};

use mooncake_relay::{Access, Config, Error, Instance, Relay, Span};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};

use crate::{
    common::{eventually, hooked::Hooked, threads_named},
    on::{AtRest, On, cases},
};

cases! {
    Any:
        r1_what_cannot_be_made_names_its_field_and_leaves_nothing,
        r1_an_engine_that_is_in_use_is_refused_after_the_memory_was_made,
        r2_memory_that_is_registered_is_refused_and_two_relays_do_not_meet,
        r4_locked_slots_are_locked_and_let_go,
        r4_what_may_not_be_locked_says_how_much_is_needed_and_allowed;
}

const PATIENCE: Duration = Duration::from_secs(20);

fn small() -> Config {
    Config::default().with_slot_size(4096)
}

/// Two tries fail, each by that field and without a trace.
#[track_caller]
fn is_refused(engine: &Hooked, config: &Config, expected: &str) {
    let before = (relay_threads(), engine.registered());
    for _ in 0..2 {
        match Relay::new(engine.engine(), config) {
            Err(Error::Config { field, reason }) => assert_eq!(field, expected, "{reason}"),
            other => panic!("{expected}: {other:?}"),
        }
        eventually(before, || (relay_threads(), engine.registered()));
    }
}

/// The threads that relays have started in this process.
fn relay_threads() -> usize {
    threads_named("relay-worker") + threads_named("relay-notifier")
}

fn r1_what_cannot_be_made_names_its_field_and_leaves_nothing(on: &On) {
    let absent = 1 << 20;
    let tib = 1 << 40;
    let engine = on.hooked();
    for (expected, config) in [
        ("slot_size", small().with_slot_size(0)),
        ("credits", small().with_credits(0)),
        ("receive_credits", small().with_receive_credits(0)),
        ("transfer_cores", small().with_transfer_cores([absent])),
        ("notifier_core", small().with_notifier_core(absent)),
        ("slot_size", small().with_credits(1).with_slot_size(tib)),
        ("slot_size", small().with_credits(1 << 14).with_slot_size(tib >> 14)),
        // The pool for puts is there by then.
        ("receive_credits", small().with_receive_credits(1 << 16).with_slot_size(tib >> 16)),
        ("slot_size", small().with_credits(1 << 16).with_slot_size(1 << 48)),
        ("slot_size", small().with_slot_size(usize::MAX)),
    ] {
        is_refused(&engine, &config, expected);
        // The engine is free for another, and that one is whole.
        let next = AtRest::new(engine.engine(), &small());
        next.works_with(&next);
    }
}

fn r1_an_engine_that_is_in_use_is_refused_after_the_memory_was_made(on: &On) {
    let engine = on.hooked();
    let first = AtRest::new(engine.engine(), &small());
    is_refused(&engine, &small(), "engine");
    first.works_with(&first);
}

fn r2_memory_that_is_registered_is_refused_and_two_relays_do_not_meet(on: &On) {
    const PAGE: usize = 4096;
    let memory = Box::leak(vec![0_u8; 4 * PAGE].into_boxed_slice());
    let base = NonNull::from(&mut *memory).cast::<u8>();
    let span = |from: usize, len| {
        // SAFETY: `from` is less than the memory's length.
        Span { ptr: unsafe { base.add(from) }, len }
    };
    let engine = on.engine();
    engine.start(&Instance::from_bytes([0x22; 16])).unwrap();
    // SAFETY: the memory is never freed, and nobody publishes any of it.
    let register = |span, access| unsafe { engine.register(span, access) };
    register(span(PAGE, 2 * PAGE), Access::Published).unwrap();
    for again in [
        span(PAGE, 2 * PAGE),
        span(0, 4 * PAGE),
        span(0, PAGE + 1),
        span(3 * PAGE - 1, PAGE),
        span(PAGE + 8, 8),
    ] {
        for access in [Access::Published, Access::Local] {
            let refused = register(again, access);
            assert!(matches!(refused, Err(Error::Config { .. })), "{again:?}: {refused:?}");
        }
    }
    // What was refused has changed nothing: neighbours fit, and each goes as it came.
    register(span(3 * PAGE, PAGE), Access::Local).unwrap();
    for known in [span(3 * PAGE, PAGE), span(PAGE, 2 * PAGE)] {
        engine.unregister(known).unwrap();
    }
    register(span(0, 4 * PAGE), Access::Local).unwrap();
    engine.unregister(span(0, 4 * PAGE)).unwrap();
    engine.stop(Instant::now() + PATIENCE);

    // Relays of one process, each with an engine of its own, meet as any others do.
    let relays = [(); 3].map(|()| on.relay(&small()));
    for (n, relay) in relays.iter().enumerate() {
        relay.works_with(&relays[(n + 1) % 3]);
    }
}

/// Bytes of this process that are locked.
fn locked() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn r4_locked_slots_are_locked_and_let_go(on: &On) {
    let before = locked();
    let unlocked = on.relay(&small());
    assert_eq!(locked(), before, "nothing is locked that nobody asked for");
    drop(unlocked);
    let relay = on.relay(&small().with_lock_memory(true));
    // Two pools of two slots, the stamps and the scratch: whole pages.
    assert_eq!(locked() - before, 6 * 4096);
    relay.works_with(&relay);
    drop(relay);
    assert_eq!(locked(), before);
}

fn r4_what_may_not_be_locked_says_how_much_is_needed_and_allowed(on: &On) {
    const ALLOWED: u64 = 64 << 10;
    const POOLS: u64 = 16 << 20;
    // Of the case's own process; without the capability, since that passes the limit by.
    let limit = Rlimit { current: Some(ALLOWED), ..getrlimit(Resource::Memlock) };
    setrlimit(Resource::Memlock, limit).unwrap();
    let mut rights = capabilities(None).unwrap();
    rights.effective.remove(CapabilitySet::IPC_LOCK);
    rights.permitted.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, rights).unwrap();

    let large = Config::default().with_slot_size(4 << 20).with_credits(2);
    let unlocked = on.relay(&large);
    unlocked.works_with(&unlocked);
    drop(unlocked);
    let engine = on.hooked();
    match Relay::new(engine.engine(), &large.with_lock_memory(true)) {
        Err(Error::Config { field: "lock_memory", reason }) => {
            let numbers = reason.split(|c: char| !c.is_ascii_digit());
            let numbers: Vec<u64> = numbers.filter_map(|text| text.parse().ok()).collect();
            assert!((POOLS..POOLS + (64 << 10)).contains(&numbers[0]), "{reason}");
            assert!(numbers[1] <= ALLOWED, "{reason}");
            for remedy in ["ulimit -l", "CAP_IPC_LOCK"] {
                assert!(reason.contains(remedy), "{reason}");
            }
        }
        other => panic!("{other:?}"),
    }
    // It left nothing, and what fits is locked.
    assert_eq!((locked(), engine.registered()), (0, 0));
    let small = AtRest::new(engine.engine(), &small().with_lock_memory(true));
    assert_eq!(locked(), 6 * 4096);
    small.works_with(&small);
}
