//! The memory itself: what it is when it is made, what there is too little of, what comes back.

use std::{env, fs, process::Command, sync::Arc};

use mooncake_relay::{Config, Cuda, Error, HugePages, InProcessEngine, Relay, Span};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    Rig, cases,
    common::eventually,
    plain::{Ignorant, device_of},
    standin::UNKNOWN,
    ways::{SLOT, SOON, Side, config, engine, on_device, pattern},
};

cases! {
    Device []:
        fresh_slots_are_zero,
        an_engine_that_knows_nothing_of_devices_says_so,
        a_device_s_pages_are_its_driver_s,
        copies_through_pinned_memory_go_both_ways;
    Standin []:
        what_the_device_does_not_have_is_refused_with_what_it_has,
        everything_comes_back_however_often,
        only_what_is_on_the_host_is_locked,
        a_handle_is_of_this_host_s_other_processes,
        memory_of_another_process_is_copied_from,
        where_memory_is_not_shared_it_is_an_error,
        a_copy_that_is_dropped_is_waited_for;
    Leaves []:
        another_process_has_memory_to_be_copied_from;
}

fn fresh_slots_are_zero(_: &Rig) {
    let relay = on_device(0);
    let slots = [relay.try_acquire(SLOT).unwrap(), relay.try_acquire(SLOT).unwrap()];
    for slot in &slots {
        let mut bytes = vec![1; SLOT];
        slot.copy_to_host(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
    drop(relay); // the slots outlive it
    let mut byte = [1];
    let [mut first, _second] = slots;
    first.truncate(1);
    first.copy_to_host(&mut byte).unwrap();
    assert_eq!(byte, [0]);
}

fn what_the_device_does_not_have_is_refused_with_what_it_has(rig: &Rig) {
    rig.standin().memory(8 << 20);
    let make = |config: Config| Relay::<Cuda>::with_memory(0, engine(), &config);
    let one = config().with_slot_size(4 << 20).with_credits(1).with_receive_credits(1);
    for (expected, asked, free, config) in [
        ("slot_size", 12 << 20, 8 << 20, one.clone().with_credits(3)),
        ("receive_credits", 8 << 20, 4 << 20, one.clone().with_receive_credits(2)),
    ] {
        match make(config) {
            Err(Error::Config { field, reason }) => {
                assert_eq!(field, expected, "{reason}");
                for part in [
                    format!("{asked} bytes are asked for"),
                    format!("{free} of its {} bytes are free", 8 << 20),
                    "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
                ] {
                    assert!(reason.contains(&part), "{reason}");
                }
            }
            other => panic!("{other:?}"),
        }
        eventually(0, || rig.standin().live("device"));
    }
    // What was refused took nothing.
    let relay = make(one).unwrap();
    let (metadata, _put) = relay.send(b"hello");
    assert_eq!(relay.fetch(&metadata).unwrap(), b"hello");
    let refused = make(config().with_slot_size(1 << 50));
    assert!(matches!(refused, Err(Error::Config { field: "slot_size", .. })), "{refused:?}");
}

fn everything_comes_back_however_often(rig: &Rig) {
    let standin = rig.standin();
    for round in 0..5 {
        let relay = on_device(round % 2);
        let other = on_device(0);
        for seed in 0..20 {
            let (metadata, put) = relay.send(&pattern(5000, seed));
            assert!(other.fetch(&metadata).unwrap() == pattern(5000, seed));
            put.wait().unwrap();
        }
        // Streams and events are used again, not made anew.
        assert!(
            standin.live("stream") <= 8 && standin.live("event") <= 16,
            "{:?}",
            standin.all_live()
        );
        drop((relay, other));
        eventually(vec![], || standin.all_live());
    }
}

fn an_engine_that_knows_nothing_of_devices_says_so(_: &Rig) {
    let engine = || Arc::new(Ignorant(InProcessEngine::new("ignorant").unwrap()));
    match Relay::<Cuda>::with_memory(0, engine(), &config()) {
        Err(Error::Config { field: "engine", reason }) => {
            assert!(reason.contains("cuda:0") && reason.contains("inprocess"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    // It was let go of, and serves a relay in host memory.
    drop(Relay::new(engine(), &config()).unwrap());
}

fn a_device_s_pages_are_its_driver_s(_: &Rig) {
    let make = |pages| Relay::<Cuda>::with_memory(0, engine(), &config().with_huge_pages(pages));
    let refused = make(HugePages::Require);
    assert!(matches!(refused, Err(Error::Config { field: "huge_pages", .. })), "{refused:?}");
    assert!(!make(HugePages::Prefer).unwrap().health().huge_pages);
}

fn only_what_is_on_the_host_is_locked(_: &Rig) {
    let before = locked();
    let Rlimit { maximum, .. } = getrlimit(Resource::Memlock);
    // Less than the slots, more than the rest.
    setrlimit(Resource::Memlock, Rlimit { current: Some(64 << 10), maximum }).unwrap();
    let config = config().with_lock_memory(true);
    let relay = Relay::<Cuda>::with_memory(0, engine(), &config).unwrap();
    let locked = locked() - before;
    assert!((8..=32).contains(&locked), "{locked} KiB");
    let (metadata, _put) = relay.send(b"hello");
    assert_eq!(relay.fetch(&metadata).unwrap(), b"hello");
}

/// In KiB.
fn locked() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse().unwrap()
}

fn copies_through_pinned_memory_go_both_ways(_: &Rig) {
    let (relay, device, [slots, receive]) = device_of("pinned");
    assert_eq!(device.location(), "cuda:0");
    assert_eq!(device.uuid(), device_of("another").1.uuid());
    let mut chunk = device.pinned(10_000).unwrap();
    assert!(chunk.bytes() == vec![0; 10_000]);
    chunk.bytes_mut().copy_from_slice(&pattern(10_000, 5));
    let part = |span: Span, len| Span { len, ..span };
    // SAFETY: both spans are the relay's, which uses neither at the moment.
    let (mut chunk, sent) = unsafe { chunk.send_to(part(slots, 10_000)) }.wait();
    sent.unwrap();
    // SAFETY: as above.
    unsafe { device.copy_within(part(slots, 10_000), part(receive, 10_000)) }.unwrap();
    chunk.bytes_mut().fill(0);
    // SAFETY: as above.
    let copying = unsafe { chunk.fill_from(part(receive, 9_999)) };
    eventually(true, || copying.is_done());
    let (chunk, filled) = copying.wait();
    filled.unwrap();
    assert!(chunk.bytes()[..9_999] == pattern(10_000, 5)[..9_999] && chunk.bytes()[9_999] == 0);

    // SAFETY: as above.
    let (chunk, refused) = unsafe { chunk.fill_from(part(receive, 10_001)) }.wait();
    assert!(matches!(refused, Err(Error::TooLarge { len: 10_001, slot_size: 10_000 })));
    // SAFETY: as above.
    let (_chunk, nothing) = unsafe { chunk.send_to(part(slots, 0)) }.wait();
    nothing.unwrap();
    // SAFETY: as above.
    let refused = unsafe { device.copy_within(part(slots, 5), part(receive, 6)) };
    assert!(matches!(refused, Err(Error::Config { .. })));
    drop(relay);
}

fn a_copy_that_is_dropped_is_waited_for(rig: &Rig) {
    let (relay, device, [slots, _]) = device_of("dropped");
    let chunk = device.pinned(1 << 20).unwrap();
    rig.standin().delay(20_000);
    // SAFETY: the span is the relay's, which does not use it at the moment.
    drop(unsafe { chunk.fill_from(Span { len: 1 << 20, ..slots }) });
    assert_eq!((rig.standin().live("pinned"), rig.standin().live("violation")), (0, 0));
    drop(relay);
}

fn a_handle_is_of_this_host_s_other_processes(_: &Rig) {
    let (relay, device, [slots, _]) = device_of("handle");
    let handle = device.ipc_handle(slots).unwrap();
    for handle in [handle, [7; 64]] {
        let refused = device.open_ipc(&handle, slots.len);
        assert!(matches!(refused, Err(Error::Device { call: "cuIpcOpenMemHandle_v2", .. })));
    }
    drop(relay);
}

const HANDLE: &str = "MOONCAKE_RELAY_TEST_HANDLE";

fn memory_of_another_process_is_copied_from(_: &Rig) {
    let (relay, device, [slots, _]) = device_of("exporter");
    let slot = {
        let mut slot = relay.try_acquire(5000).unwrap();
        slot.copy_from_host(&pattern(5000, 9)).unwrap();
        slot
    };
    let handle = device.ipc_handle(slots).unwrap();
    let text: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .env("MOONCAKE_RELAY_TEST_CUDA_CASE", "another_process_has_memory_to_be_copied_from")
        .env(HANDLE, format!("{text}:{}", slot.span().addr() - slots.addr()));
    crate::ends_well("a part of it", command, SOON).unwrap();
    drop(slot);
}

/// The other process of the case above; alone it has nothing to do.
fn another_process_has_memory_to_be_copied_from(rig: &Rig) {
    let Ok(told) = env::var(HANDLE) else { return };
    let (text, offset) = told.split_once(':').unwrap();
    let mut handle = [0; 64];
    for (byte, digits) in handle.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    let (relay, device, [_, receive]) = device_of("importer");
    {
        let refused = device.open_ipc(&handle, (2 << 20) + 1);
        assert!(matches!(refused, Err(Error::Device { .. })), "it is not that long");
        let memory = device.open_ipc(&handle, 2 << 20).unwrap();
        let again = device.open_ipc(&handle, 2 << 20).unwrap();
        drop(again);
        // SAFETY: inside what was opened.
        let ptr = unsafe { memory.span().ptr.add(offset.parse().unwrap()) };
        let (from, to) = (Span { ptr, len: 5000 }, Span { len: 5000, ..receive });
        let mut bytes = vec![0; 5000];
        // SAFETY: mapped, and the other process keeps it as it is; `to` is the relay's, unused.
        unsafe { device.copy_within(from, to) }.unwrap();
        // SAFETY: `to` is the relay's, unused.
        unsafe { device.copy_to_host(to, &mut bytes) }.unwrap();
        assert!(bytes == pattern(5000, 9));
    }
    drop((relay, device));
    eventually(vec![], || rig.standin().all_live());
}

fn where_memory_is_not_shared_it_is_an_error(rig: &Rig) {
    let (relay, device, [slots, _]) = device_of("unshared");
    rig.standin().fail("cuIpcGetMemHandle", 0, UNKNOWN);
    match device.ipc_handle(slots) {
        Err(Error::Device { device, call, reason }) => {
            assert_eq!((&*device, call), ("cuda:0", "cuIpcGetMemHandle"));
            assert_eq!(reason, "CUDA_ERROR_UNKNOWN (unknown error)");
        }
        other => panic!("{other:?}"),
    }
    rig.standin().fail("cuIpcGetMemHandle", 0, 0);
    assert!(device.ipc_handle(slots).is_ok());
    drop(relay);
}
