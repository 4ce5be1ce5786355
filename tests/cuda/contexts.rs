//! Contexts are of threads: each call has the right one, on whatever thread it is, and leaves the
//! caller's own as it was.

use std::thread;

use cudarc::driver::{CudaContext, result};
use mooncake_relay::{Cuda, Error, Relay, Tensor};

use crate::{
    Rig, cases,
    ways::{Side, config, engine, on_device, on_host, pattern},
};

cases! {
    Device []:
        o2_many_threads_put_and_get_at_once,
        o2_what_is_dropped_on_another_thread_goes;
    Standin []:
        o2_two_devices_on_one_thread_and_its_own_context_stays,
        a_stream_of_another_device_is_refused;
}

fn o2_many_threads_put_and_get_at_once(_: &Rig) {
    let from = Relay::<Cuda>::with_memory(0, engine(), &config().with_credits(4)).unwrap();
    let config = config().with_receive_credits(4).with_transfer_threads(3);
    let to = Relay::<Cuda>::with_memory(0, engine(), &config).unwrap();
    thread::scope(|s| {
        for thread in 0..4 {
            let (from, to) = (&from, &to);
            s.spawn(move || {
                for round in 0..25 {
                    let bytes = pattern(3000, thread * 64 + round);
                    let (metadata, put) = from.send(&bytes);
                    assert!(to.fetch(&metadata).unwrap() == bytes);
                    put.wait().unwrap();
                }
            });
        }
    });
    assert_eq!((from.health().free, to.health().receive_free), (4, 4));
}

fn o2_what_is_dropped_on_another_thread_goes(_: &Rig) {
    let (from, to) = (on_device(0), on_host());
    let (metadata, put) = from.send(&pattern(100, 1));
    assert!(to.fetch(&metadata).unwrap() == pattern(100, 1));
    let slot = put.wait().unwrap();
    // Neither thread has ever called the driver.
    thread::spawn(move || drop(from)).join().unwrap();
    thread::spawn(move || drop(slot)).join().unwrap();
}

fn o2_two_devices_on_one_thread_and_its_own_context_stays(rig: &Rig) {
    let own = CudaContext::new(1).unwrap();
    own.bind_to_thread().unwrap();
    let current = || result::ctx::get_current().unwrap();
    let before = current();
    let (zero, one) = (on_device(0), on_device(1));
    for seed in 0..4 {
        for (from, to) in [(&zero, &one), (&one, &zero)] {
            let (metadata, put) = from.send(&pattern(2000, seed));
            assert!(to.fetch(&metadata).unwrap() == pattern(2000, seed));
            put.wait().unwrap();
            assert!(current() == before);
        }
    }
    // What cudarc does for a copy, too.
    let other = CudaContext::new(0).unwrap();
    let stream = other.new_stream().unwrap();
    let mut tensor = stream.alloc_zeros::<u8>(100).unwrap();
    own.bind_to_thread().unwrap();
    let second = other.default_stream();
    let mut slot = zero.try_acquire(100).unwrap();
    slot.copy_from_device(&tensor, Some(&second)).unwrap();
    slot.copy_to_device(&mut tensor, Some(&second)).unwrap();
    assert!(current() == before);
    drop((zero, one, slot));
    assert!(current() == before);
    // A thread without any has none afterwards.
    let none = thread::spawn(|| {
        drop(on_device(0));
        result::ctx::get_current().unwrap().is_none()
    });
    assert!(none.join().unwrap());
    assert_eq!(
        rig.standin().calls("cuCtxPushCurrent_v2"),
        rig.standin().calls("cuCtxPopCurrent_v2")
    );
}

fn a_stream_of_another_device_is_refused(_: &Rig) {
    let relay = on_device(0);
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    let mut theirs = stream.alloc_zeros::<u8>(100).unwrap();
    let ours = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut slot = relay.try_acquire(100).unwrap();
    let refusals = [
        slot.copy_from_device(&theirs, None),
        slot.copy_from_device(&theirs, Some(&ours)),
        slot.copy_to_device(&mut theirs, Some(&ours)),
        slot.begin_on(&stream),
        slot.end_on(&stream),
        // SAFETY: refused before it is looked at.
        unsafe { slot.copy_to_device_ptr(4096, Some(&stream)) },
        relay.put_device(&theirs, None, Tensor::bytes(100)).map(drop),
    ];
    for refused in refusals {
        assert!(matches!(refused, Err(Error::Config { .. })), "{refused:?}");
    }
    drop(slot);
    assert_eq!(relay.health().free, 2);
}
