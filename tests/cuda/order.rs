//! What is enqueued on streams is waited for: nothing is read before its bytes are there, and nothing
//! is written while it is still read.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, CudaStream};
use mooncake_relay::{Cuda, Error, Relay, Result, Slot, Tensor};

use crate::{
    Rig, cases,
    common::eventually,
    standin::UNKNOWN,
    ways::{SOON, Side, config, engine, on_device, on_host, pattern},
};

cases! {
    Standin []:
        a_put_waits_for_what_was_enqueued_for_its_slot,
        a_put_of_a_slot_filled_in_place_waits_for_the_stream,
        a_get_does_not_write_a_slot_that_is_still_copied_from,
        a_slot_that_was_dropped_while_it_was_filled_is_not_filled_over_by_the_old_copy,
        a_copy_on_one_stream_waits_for_the_slot_s_copies_on_others,
        a_kernel_in_place_waits_for_the_slot_s_copies,
        a_get_into_is_behind_its_stream_and_before_what_comes_after,
        a_put_gives_up_on_a_stream_that_does_not_move_and_the_slot_comes_back,
        a_get_gives_up_on_a_slot_whose_stream_does_not_move,
        copies_of_host_memory_are_over_when_they_return,
        a_read_is_over_when_it_is_said_to_be,
        a_copy_that_nothing_tells_the_end_of_is_waited_for,
        a_relay_that_is_closed_lets_copies_end_before_its_memory_goes;
    Leaves []:
        memory_whose_copies_do_not_end_is_left_rather_than_freed;
}

fn stream() -> Arc<CudaStream> {
    CudaContext::new(0).unwrap().new_stream().unwrap()
}

/// Only widens the window in which a stream would do what it must not.
fn give_a_chance() {
    thread::sleep(Duration::from_millis(100));
}

/// Waits until somebody has asked for an event that is not over.
fn somebody_waits(rig: &Rig) {
    let before = rig.standin().calls("cuEventQuery");
    eventually(true, || rig.standin().calls("cuEventQuery") > before + 3);
}

fn a_put_waits_for_what_was_enqueued_for_its_slot(rig: &Rig) {
    let (from, to, stream) = (on_device(0), on_host(), stream());
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    rig.standin().hold_stream(&stream, true);
    let mut slot = from.try_acquire(5000).unwrap();
    slot.copy_from_device(&tensor, Some(&stream)).unwrap();
    thread::scope(|s| {
        let put = s.spawn(|| from.put(slot, Tensor::bytes(5000)).unwrap());
        somebody_waits(rig);
        assert_eq!(from.health().published, 0);
        rig.standin().hold_stream(&stream, false);
        let (metadata, put) = put.join().unwrap();
        assert!(to.fetch(&metadata).unwrap() == pattern(5000, 1));
        put.wait().unwrap();
    });
}

fn a_put_of_a_slot_filled_in_place_waits_for_the_stream(rig: &Rig) {
    let (from, to, stream) = (on_device(0), on_host(), stream());
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    let slot = from.try_acquire(5000).unwrap();
    rig.standin().hold_stream(&stream, true);
    slot.begin_on(&stream).unwrap();
    in_place(&tensor, slot.span().addr(), &stream);
    slot.end_on(&stream).unwrap();
    thread::scope(|s| {
        let put = s.spawn(|| from.put(slot, Tensor::bytes(5000)).unwrap());
        somebody_waits(rig);
        rig.standin().hold_stream(&stream, false);
        let (metadata, _put) = put.join().unwrap();
        assert!(to.fetch(&metadata).unwrap() == pattern(5000, 1));
    });
}

/// As a kernel would write there.
fn in_place(tensor: &cudarc::driver::CudaSlice<u8>, at: u64, stream: &CudaStream) {
    use cudarc::driver::DevicePtr;
    let (from, _recorded) = tensor.device_ptr(stream);
    // SAFETY: both are so many bytes of the device, and the slot is the test's.
    unsafe {
        cudarc::driver::result::memcpy_dtod_async(at, from, tensor.len(), stream.cu_stream())
    }
    .unwrap();
}

fn a_get_does_not_write_a_slot_that_is_still_copied_from(rig: &Rig) {
    let from = on_host();
    let to = Relay::<Cuda>::with_memory(0, engine(), &config().with_receive_credits(1)).unwrap();
    let stream = stream();
    let mut kept = stream.alloc_zeros::<u8>(5000).unwrap();
    stream.synchronize().unwrap();
    let (metadata, put) = from.send(&pattern(5000, 1));
    let slot = to.get(&metadata).unwrap().wait().unwrap();
    put.wait().unwrap();

    rig.standin().hold_stream(&stream, true);
    slot.copy_to_device(&mut kept, Some(&stream)).unwrap();
    drop(slot); // the next get has it
    let (metadata, put) = from.send(&pattern(5000, 2));
    let next = to.get(&metadata).unwrap();
    somebody_waits(rig);
    assert!(!next.is_done());
    rig.standin().hold_stream(&stream, false);
    let slot = next.wait().unwrap();
    let mut bytes = vec![0; 5000];
    slot.copy_to_host(&mut bytes).unwrap();
    assert!(bytes == pattern(5000, 2));
    assert!(stream.clone_dtoh(&kept).unwrap() == pattern(5000, 1));
    put.wait().unwrap();
}

fn a_slot_that_was_dropped_while_it_was_filled_is_not_filled_over_by_the_old_copy(rig: &Rig) {
    let from = Relay::<Cuda>::with_memory(0, engine(), &config().with_credits(1)).unwrap();
    let (to, stream) = (on_host(), stream());
    let old = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    rig.standin().hold_stream(&stream, true);
    let mut slot = from.try_acquire(5000).unwrap();
    slot.copy_from_device(&old, Some(&stream)).unwrap();
    drop(slot);
    let before = rig.standin().calls("cuEventSynchronize");
    thread::scope(|s| {
        let put = s.spawn(|| from.put_host(&pattern(5000, 2), Tensor::bytes(5000)).unwrap());
        eventually(true, || rig.standin().calls("cuEventSynchronize") > before);
        rig.standin().hold_stream(&stream, false);
        let (metadata, _put) = put.join().unwrap();
        stream.synchronize().unwrap();
        assert!(to.fetch(&metadata).unwrap() == pattern(5000, 2));
    });
}

fn a_copy_on_one_stream_waits_for_the_slot_s_copies_on_others(rig: &Rig) {
    let (relay, first, second) = (on_device(0), stream(), stream());
    let tensor = first.clone_htod(&pattern(5000, 1)).unwrap();
    let mut out = second.alloc_zeros::<u8>(5000).unwrap();
    first.synchronize().unwrap();
    second.synchronize().unwrap();
    rig.standin().hold_stream(&first, true);
    let mut slot = relay.try_acquire(5000).unwrap();
    slot.copy_from_device(&tensor, Some(&first)).unwrap();
    slot.copy_to_device(&mut out, Some(&second)).unwrap();
    give_a_chance();
    rig.standin().hold_stream(&first, false);
    assert!(second.clone_dtoh(&out).unwrap() == pattern(5000, 1));
}

fn a_kernel_in_place_waits_for_the_slot_s_copies(rig: &Rig) {
    let (relay, first, second) = (on_device(0), stream(), stream());
    let old = first.clone_htod(&pattern(5000, 1)).unwrap();
    let new = second.clone_htod(&pattern(5000, 2)).unwrap();
    first.synchronize().unwrap();
    second.synchronize().unwrap();
    rig.standin().hold_stream(&first, true);
    let mut slot = relay.try_acquire(5000).unwrap();
    slot.copy_from_device(&old, Some(&first)).unwrap();
    slot.begin_on(&second).unwrap();
    in_place(&new, slot.span().addr(), &second);
    slot.end_on(&second).unwrap();
    give_a_chance();
    rig.standin().hold_stream(&first, false);
    let mut bytes = vec![0; 5000];
    slot.copy_to_host(&mut bytes).unwrap();
    first.synchronize().unwrap();
    let mut later = vec![0; 5000];
    slot.copy_to_host(&mut later).unwrap();
    assert!(bytes == pattern(5000, 2) && later == bytes);
}

fn a_get_into_is_behind_its_stream_and_before_what_comes_after(rig: &Rig) {
    let (from, to, stream) = (on_host(), on_device(0), stream());
    let mut dest = stream.alloc_zeros::<u8>(5000).unwrap();
    let mut copy = stream.alloc_zeros::<u8>(5000).unwrap();
    stream.synchronize().unwrap();
    let (metadata, put) = from.send(&pattern(5000, 3));
    rig.standin().hold_stream(&stream, true);
    assert_eq!(to.get_into(&metadata, &mut dest, Some(&stream), SOON).unwrap(), 5000);
    put.wait().unwrap(); // it was read, and is on its way
    stream.memcpy_dtod(&dest, &mut copy).unwrap();
    rig.standin().hold_stream(&stream, false);
    assert!(stream.clone_dtoh(&copy).unwrap() == pattern(5000, 3));
}

fn a_put_gives_up_on_a_stream_that_does_not_move_and_the_slot_comes_back(rig: &Rig) {
    let config = config().with_credits(1).with_read_timeout(Duration::from_millis(200));
    let relay = Relay::<Cuda>::with_memory(0, engine(), &config).unwrap();
    let stream = stream();
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    rig.standin().hold_stream(&stream, true);
    let mut slot = relay.try_acquire(5000).unwrap();
    slot.copy_from_device(&tensor, Some(&stream)).unwrap();
    let begun = Instant::now();
    let late = relay.put(slot, Tensor::bytes(5000));
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!((relay.health().free, relay.health().published), (1, 0));
    rig.standin().hold_stream(&stream, false);
    stream.synchronize().unwrap();
    let (metadata, put) = relay.send(&pattern(5000, 2));
    assert!(relay.fetch(&metadata).unwrap() == pattern(5000, 2));
    put.wait().unwrap();
}

fn a_get_gives_up_on_a_slot_whose_stream_does_not_move(rig: &Rig) {
    let config = config().with_receive_credits(1);
    let (from, to) = (on_host(), Relay::<Cuda>::with_memory(0, engine(), &config).unwrap());
    let stream = stream();
    let mut kept = stream.alloc_zeros::<u8>(100).unwrap();
    stream.synchronize().unwrap();
    let (metadata, _put) = from.send(&pattern(100, 1));
    let slot = to.get(&metadata).unwrap().wait().unwrap();
    rig.standin().hold_stream(&stream, true);
    slot.copy_to_device(&mut kept, Some(&stream)).unwrap();
    drop(slot);
    let (metadata, put) = from.send(&pattern(100, 2));
    let late = to.get_timeout(&metadata, Duration::from_millis(200)).unwrap().wait();
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
    assert!(matches!(put.wait(), Err(Error::PeerFailed { .. })));
    eventually(1, || to.health().receive_free);
    rig.standin().hold_stream(&stream, false);
    let (metadata, put) = from.send(&pattern(100, 3));
    assert!(to.fetch(&metadata).unwrap() == pattern(100, 3));
    put.wait().unwrap();
    assert!(stream.clone_dtoh(&kept).unwrap() == pattern(100, 1));
}

fn copies_of_host_memory_are_over_when_they_return(rig: &Rig) {
    let relay = on_device(0);
    rig.standin().strict(true);
    rig.standin().delay(2000);
    let mut slot = relay.try_acquire(5000).unwrap();
    for seed in 0..20 {
        let mut source = pattern(5000, seed);
        slot.copy_from_host(&source).unwrap();
        source.fill(0);
        let mut got = vec![0; 5000];
        slot.copy_to_host(&mut got).unwrap();
        assert!(got == pattern(5000, seed));
    }
}

fn a_read_is_over_when_it_is_said_to_be(rig: &Rig) {
    let (host, device, other) = (on_host(), on_device(0), on_device(0));
    rig.standin().strict(true);
    rig.standin().delay(500);
    for seed in 0..10 {
        let bytes = pattern((1 << 20) + 9, seed);
        for (metadata, put) in [device.send(&bytes), device.send(&bytes)] {
            let mut dest = vec![0; bytes.len()];
            match seed % 3 {
                0 => dest = host.fetch(&metadata).unwrap(),
                1 => dest = other.fetch(&metadata).unwrap(),
                _ => _ = host.get_into(&metadata, &mut dest, SOON).unwrap(),
            }
            assert!(dest == bytes, "{seed}");
            put.wait().unwrap();
        }
    }
}

fn a_copy_that_nothing_tells_the_end_of_is_waited_for(rig: &Rig) {
    let (relay, stream, standin) = (on_device(0), stream(), rig.standin());
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    let bytes = pattern(5000, 2);
    let on_theirs = |slot: &mut Slot<Cuda>| slot.copy_from_device(&tensor, Some(&stream));
    let on_our_own = |slot: &mut Slot<Cuda>| slot.copy_from_host(&bytes);
    type Copy<'a> = &'a (dyn Fn(&mut Slot<Cuda>) -> Result<()> + Sync);
    let copies: [Copy<'_>; 2] = [&on_theirs, &on_our_own];
    for (copy, expected) in copies.into_iter().zip([&pattern(5000, 1), &bytes]) {
        let mut slot = relay.try_acquire(5000).unwrap();
        let before = standin.calls("cuStreamSynchronize");
        standin.hold(true);
        standin.fail("cuEventRecord", 1, UNKNOWN);
        thread::scope(|s| {
            let copied = s.spawn(|| copy(&mut slot));
            eventually(true, || standin.calls("cuStreamSynchronize") > before);
            assert!(!copied.is_finished());
            standin.hold(false);
            let failed = copied.join().unwrap();
            assert!(
                matches!(failed, Err(Error::Device { call: "cuEventRecord", .. })),
                "{failed:?}"
            );
        });
        // It is the slot's owner's again, and over.
        let mut got = vec![0; 5000];
        slot.copy_to_host(&mut got).unwrap();
        assert!(got == *expected);
    }
}

fn a_relay_that_is_closed_lets_copies_end_before_its_memory_goes(rig: &Rig) {
    let (relay, stream) = (on_device(0), stream());
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    let mut out = stream.alloc_zeros::<u8>(5000).unwrap();
    stream.synchronize().unwrap();
    rig.standin().hold_stream(&stream, true);
    let mut slot = relay.try_acquire(5000).unwrap();
    slot.copy_from_device(&tensor, Some(&stream)).unwrap();
    slot.copy_to_device(&mut out, Some(&stream)).unwrap();
    let closed = relay.close(SOON);
    assert_eq!((closed.threads, closed.spans_kept), (0, 0));
    drop(relay);
    let refused = relay_is_gone(slot, rig, &stream);
    assert!(refused, "the slot outlives its relay");
    assert!(stream.clone_dtoh(&out).unwrap() == pattern(5000, 1));
}

/// Drops the last slot while its stream is held, and lets the stream go only then.
fn relay_is_gone(slot: Slot<Cuda>, rig: &Rig, stream: &CudaStream) -> bool {
    let before = rig.standin().live("device");
    thread::scope(|s| {
        let dropped = s.spawn(|| drop(slot));
        somebody_waits(rig);
        let there = rig.standin().live("device") == before;
        rig.standin().hold_stream(stream, false);
        dropped.join().unwrap();
        there && rig.standin().live("device") < before
    })
}

fn memory_whose_copies_do_not_end_is_left_rather_than_freed(rig: &Rig) {
    let (relay, stream) = (on_device(0), stream());
    let tensor = stream.clone_htod(&pattern(5000, 1)).unwrap();
    stream.synchronize().unwrap();
    let before = rig.standin().live("device");
    rig.standin().hold_stream(&stream, true);
    let mut slot = relay.try_acquire(5000).unwrap();
    slot.copy_from_device(&tensor, Some(&stream)).unwrap();
    drop((slot, relay));
    // The slots for gets are free; those for puts are not.
    assert_eq!(rig.standin().live("device"), before - 1);
    rig.standin().hold_stream(&stream, false);
    stream.synchronize().unwrap();
    assert_eq!(rig.standin().live("violation"), 0);
}
