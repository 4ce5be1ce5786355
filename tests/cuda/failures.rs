//! Each call of the driver fails in its turn: an error that names it, and nothing else is amiss.

use std::{collections::BTreeMap, sync::Arc};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use mooncake_relay::{Cuda, Error, Memory, Metadata, Relay, Result, Slot, Tensor, Token};

use crate::{
    Rig, cases,
    common::eventually,
    plain::device_of,
    standin::{Standin, UNKNOWN},
    ways::{SOON, Side, config, engine, on_device, on_host, pattern},
};

cases! {
    Leaves []:
        every_call_fails_once_and_is_an_error_and_nothing_more,
        every_call_fails_once_after_it_was_done,
        calls_for_pinned_memory_fail_once,
        a_device_that_does_not_answer_is_given_up,
        a_slot_that_nobody_knows_the_end_of_is_not_used_again;
    Standin []:
        a_device_that_fails_for_good_fails_its_gets_and_their_senders_hear,
        what_cudarc_keeps_to_itself_is_an_error_of_the_copy;
}

/// What a test has of its own, made before anything fails.
struct Own {
    stream: Arc<CudaStream>,
    tensor: CudaSlice<u8>,
    dest: CudaSlice<u8>,
}

impl Own {
    fn new() -> Self {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let tensor = stream.clone_htod(&pattern(LEN, 7)).unwrap();
        let dest = stream.alloc_zeros(LEN).unwrap();
        stream.synchronize().unwrap();
        Self { stream, tensor, dest }
    }
}

const LEN: usize = 5000;

/// All that a relay does with a device. The errors that it met; whatever was `Ok` was right.
fn everything(own: &mut Own) -> Vec<Error> {
    let mut errors = Vec::new();
    let made = (|| {
        let from = Relay::<Cuda>::with_memory(0, engine(), &config())?;
        Ok((from, Relay::<Cuda>::with_memory(0, engine(), &config())?))
    })();
    let (from, to) = match made {
        Ok(relays) => relays,
        Err(error) => return vec![error],
    };
    let host = on_host();
    let bytes = pattern(LEN, 7);
    let mut step = |did: Result<()>| errors.extend(did.err());

    for _ in 0..2 {
        step(moved(from.put_host(&bytes, Tensor::bytes(LEN)), &to, &bytes));
        let put = from.put_device(&own.tensor, Some(&own.stream), Tensor::bytes(LEN));
        step(moved(put, &host, &bytes));
        step(moved(host.put_bytes(&bytes, Tensor::bytes(LEN)), &to, &bytes));
        let into = host.put_bytes(&bytes, Tensor::bytes(LEN)).and_then(|(metadata, put)| {
            let got = to.get_into(&metadata, &mut own.dest, Some(&own.stream), SOON);
            drop(put.wait());
            got.map(drop)
        });
        let is_ok = into.is_ok();
        step(into);
        // What is on the stream is let through, whatever it is.
        let arrived = own.stream.clone_dtoh(&own.dest);
        assert!(!is_ok || arrived.is_err() || arrived.unwrap() == bytes);
    }

    for health in [from.health(), to.health(), host.health()] {
        assert_eq!(health.status, "healthy");
    }
    eventually((2, 2), || (from.health().free, from.health().receive_free));
    eventually((2, 2), || (to.health().free, to.health().receive_free));
    eventually((2, 2), || (host.health().free, host.health().receive_free));
    errors
}

/// A put that was tried is got, and each side ends.
fn moved<A: Memory, B: Memory>(
    put: Result<(Metadata, Token<Slot<A>>)>,
    to: &Relay<B>,
    bytes: &[u8],
) -> Result<()>
where
    Relay<B>: Side<B>,
{
    let (metadata, put) = put?;
    let got = to.fetch(&metadata);
    match (&got, put.wait()) {
        (Ok(got), Ok(_)) => assert!(*got == bytes),
        // It was read into the slot, and failed on its way from there.
        (Err(_), Ok(_) | Err(Error::PeerFailed { .. })) => {}
        (got, put) => panic!("{got:?} {put:?}"),
    }
    got.map(drop)
}

/// What is called but to make and to name things, and how often.
fn calls(standin: &Standin, run: impl FnOnce()) -> BTreeMap<String, u64> {
    let count = || -> BTreeMap<String, u64> {
        standin.called().into_iter().map(|name| (name.clone(), standin.calls(&name))).collect()
    };
    let before = count();
    run();
    let mut after = count();
    for (name, calls) in &mut after {
        *calls -= before.get(name).copied().unwrap_or(0);
    }
    after.retain(|_, calls| *calls > 0);
    after
}

/// Once the driver is loaded.
fn clean_calls(standin: &Standin, own: &mut Own) -> BTreeMap<String, u64> {
    assert!(everything(own).is_empty());
    let clean = calls(standin, || assert!(everything(own).is_empty()));
    println!("{clean:?}");
    clean
}

/// Once is as good as often from there on.
const MOST: u64 = 30;

fn every_call_fails_once_and_is_an_error_and_nothing_more(rig: &Rig) {
    let standin = rig.standin();
    let mut own = Own::new();
    let clean = clean_calls(standin, &mut own);
    for expected in ["cuMemAlloc_v2", "cuMemcpyDtoDAsync_v2", "cuStreamWaitEvent", "cuEventRecord"]
    {
        assert!(clean.contains_key(expected), "{expected} in {clean:?}");
    }
    for (function, count) in &clean {
        let mut seen = 0;
        for nth in 1..=(*count).min(MOST) {
            let before = standin.all_live();
            println!("{function} {nth}");
            standin.fail(function, nth as u32, UNKNOWN);
            let errors = everything(&mut own);
            standin.fail(function, 0, 0);
            for error in &errors {
                is_of(error, function);
            }
            seen += errors.len();
            if gives_back(function) {
                // What the driver does not take back is left, and told.
                continue;
            }
            eventually(before, || standin.all_live());
        }
        // What gives back has nobody to tell; a name is not needed.
        let silent =
            gives_back(function) || function.starts_with("cuGetError") || cudarc_s(function);
        assert!(seen > 0 || silent, "{function} failed {count} times, and nobody saw it");
        assert_eq!(standin.live("violation"), 0, "{function}");
    }
}

fn every_call_fails_once_after_it_was_done(rig: &Rig) {
    let standin = rig.standin();
    let mut own = Own::new();
    let clean = clean_calls(standin, &mut own);
    let makes = ["cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate", "cuDevicePrimaryCtxRetain"];
    let mut seen = 0;
    for (function, count) in &clean {
        if makes.contains(&&**function) || function == "cuCtxPushCurrent_v2" {
            continue; // what the driver has made, and says that it has not, is nobody's
        }
        for nth in 1..=(*count).min(MOST) {
            let before = standin.all_live();
            println!("{function} {nth}");
            standin.fail_late(function, nth as u32, UNKNOWN);
            for error in everything(&mut own) {
                is_of(&error, function);
                seen += 1;
            }
            standin.fail(function, 0, 0);
            if function != "cuDevicePrimaryCtxRelease_v2" {
                eventually(before, || standin.all_live());
            }
        }
        assert_eq!(standin.live("violation"), 0, "{function}");
    }
    assert!(seen > 0, "no call that failed was seen");
}

/// Whether it gives something back to the driver, or is on the way there.
fn gives_back(function: &str) -> bool {
    let names = ["cuMemFree_v2", "cuStreamDestroy_v2", "cuEventDestroy_v2", "cuMemFreeHost"];
    names.contains(&function)
        || function.starts_with("cuCtx")
        || function == "cuDevicePrimaryCtxRelease_v2"
}

/// Whether only cudarc calls it here, on the test's behalf.
fn cudarc_s(function: &str) -> bool {
    ["cuStreamSynchronize", "cuCtxGetCurrent", "cuCtxSetCurrent"].contains(&function)
}

#[track_caller]
fn is_of(error: &Error, function: &str) {
    match error {
        Error::Device { device, call, reason } => {
            assert!(
                device == "cuda:0" && (*call == function || *call == "a call of cudarc's"),
                "{error}"
            );
            let named =
                function.starts_with("cuGetError") || reason.starts_with("CUDA_ERROR_UNKNOWN");
            assert!(named, "{error}");
        }
        // The sender's, whose device could not be read from.
        Error::PeerFailed { reason, .. } => assert!(reason.contains(function), "{error}"),
        _ => panic!("{function}: {error}"),
    }
}

fn calls_for_pinned_memory_fail_once(rig: &Rig) {
    let standin = rig.standin();
    let (relay, device, [slots, _]) = device_of("pinned");
    let round = |seed: u8| -> Result<()> {
        let mut chunk = device.pinned(LEN)?;
        chunk.bytes_mut().copy_from_slice(&pattern(LEN, seed));
        let part = mooncake_relay::Span { len: LEN, ..slots };
        // SAFETY: the span is the relay's, which does not use it at the moment.
        let (mut chunk, sent) = unsafe { chunk.send_to(part) }.wait();
        sent?;
        chunk.bytes_mut().fill(0);
        // SAFETY: as above.
        let (chunk, filled) = unsafe { chunk.fill_from(part) }.wait();
        filled?;
        assert!(chunk.bytes() == pattern(LEN, seed));
        Ok(())
    };
    let clean = calls(standin, || round(1).unwrap());
    assert!(clean.contains_key("cuMemHostAlloc") && clean.contains_key("cuMemFreeHost"));
    for (function, count) in &clean {
        for (nth, late) in (1..=(*count).min(MOST)).flat_map(|nth| [(nth, false), (nth, true)]) {
            let makes = function == "cuMemHostAlloc" || function == "cuCtxPushCurrent_v2";
            if late && makes {
                continue;
            }
            let before = standin.live("pinned");
            match late {
                false => standin.fail(function, nth as u32, UNKNOWN),
                true => standin.fail_late(function, nth as u32, UNKNOWN),
            }
            if let Err(error) = round(nth as u8) {
                is_of(&error, function);
            }
            standin.fail(function, 0, 0);
            if late || !gives_back(function) {
                assert_eq!(standin.live("pinned"), before, "{function} {nth} {late}");
            }
            round(99).unwrap();
        }
    }
    assert_eq!(standin.live("violation"), 0);
    drop(relay);
}

fn a_device_that_fails_for_good_fails_its_gets_and_their_senders_hear(rig: &Rig) {
    let standin = rig.standin();
    let (from, to) = (on_host(), on_device(0));
    for function in ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuCtxPushCurrent_v2"] {
        standin.fail(function, 0, 700);
        for _ in 0..5 {
            let (metadata, put) = from.send(&pattern(LEN, 1));
            match to.get(&metadata).unwrap().wait() {
                Err(Error::Device { call, reason, .. }) => {
                    assert_eq!(call, function);
                    assert!(reason.starts_with("CUDA_ERROR_ILLEGAL_ADDRESS"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
            match put.wait() {
                Err(Error::PeerFailed { reason, .. }) => {
                    assert!(reason.contains("Device"), "{reason}")
                }
                other => panic!("{other:?}"),
            }
        }
        standin.fail(function, 0, 0);
        assert_eq!((to.health().receive_free, from.health().free), (2, 2));
        let (metadata, put) = from.send(&pattern(LEN, 2));
        assert!(to.fetch(&metadata).unwrap() == pattern(LEN, 2));
        put.wait().unwrap();
    }
}

fn a_device_that_does_not_answer_is_given_up(rig: &Rig) {
    let standin = rig.standin();
    let (relay, host) = (on_device(0), on_host());
    let (_others, device, [slots, _]) = device_of("given up");
    let chunk = device.pinned(LEN).unwrap();
    let (metadata, put) = relay.send(&pattern(LEN, 1));
    standin.fail("cuEventRecord", 1, UNKNOWN);
    standin.fail("cuStreamSynchronize", 1, UNKNOWN);
    assert!(matches!(host.fetch(&metadata), Err(Error::Device { call: "cuEventRecord", .. })));
    drop(put.wait()); // its slot is free
    // From here on nothing of that device is an `Ok`.
    let (metadata, _other) = host.send(&pattern(LEN, 2));
    for _ in 0..3 {
        let errors = [
            relay.fetch(&metadata).map(drop),
            relay.put_host(&pattern(LEN, 3), Tensor::bytes(LEN)).map(drop),
            relay.put(relay.try_acquire(LEN).unwrap(), Tensor::bytes(LEN)).map(drop),
            Relay::<Cuda>::with_memory(0, engine(), &config()).map(drop),
        ];
        for error in errors {
            match error {
                Err(Error::Device { reason, .. }) => {
                    assert!(reason.contains("not used any more"), "{reason}");
                }
                // The sender was told of the first.
                Err(Error::Stale { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // SAFETY: the span is that of a relay that does not use it.
    let copying = unsafe { chunk.send_to(mooncake_relay::Span { len: LEN, ..slots }) };
    let (chunk, refused) = copying.wait();
    assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    drop(chunk);
    eventually((2, 2), || (relay.health().free, relay.health().receive_free));
    let left = standin.live("device");
    drop(relay);
    assert_eq!(standin.live("device"), left, "it may still be used");
}

fn a_slot_that_nobody_knows_the_end_of_is_not_used_again(rig: &Rig) {
    let standin = rig.standin();
    let own = Own::new();
    let (relay, host) = (on_device(0), on_host());
    let mut slot = relay.try_acquire(LEN).unwrap();
    standin.fail("cuEventRecord", 1, UNKNOWN);
    standin.fail("cuStreamSynchronize", 1, UNKNOWN);
    let address = slot.span().addr();
    // SAFETY: the tensor lives longer than anything here.
    let failed = unsafe {
        use cudarc::driver::DevicePtr;
        slot.copy_from_device_ptr(own.tensor.device_ptr(&own.stream).0, Some(&own.stream))
    };
    assert!(matches!(failed, Err(Error::Device { .. })), "{failed:?}");
    let refused = relay.put(slot, Tensor::bytes(LEN));
    assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    assert_eq!(relay.health().free, 2);
    // The other slot is as good as ever; that one is never read, whoever has it.
    for _ in 0..6 {
        let mut slot = relay.try_acquire(LEN).unwrap();
        let is_that = slot.span().addr() == address;
        let filled = slot.copy_from_host(&pattern(LEN, 5));
        assert_eq!(filled.is_err(), is_that, "{filled:?}");
        if let Ok((metadata, put)) = relay.put(slot, Tensor::bytes(LEN)) {
            assert!(!is_that && host.fetch(&metadata).unwrap() == pattern(LEN, 5));
            put.wait().unwrap();
        }
    }
    let left = standin.live("device");
    drop(relay);
    assert_eq!(standin.live("device"), left - 1, "the slots for gets are free");
}

fn what_cudarc_keeps_to_itself_is_an_error_of_the_copy(rig: &Rig) {
    let own = Own::new();
    let other = own.stream.context().new_stream().unwrap();
    let relay = on_device(0);
    let mut slot = relay.try_acquire(LEN).unwrap();
    // The stream is to wait for who wrote the tensor, and does not.
    rig.standin().fail("cuStreamWaitEvent", 1, UNKNOWN);
    match slot.copy_from_device(&own.tensor, Some(&other)) {
        Err(Error::Device { reason, .. }) => assert!(reason.starts_with("CUDA_ERROR_UNKNOWN")),
        other => panic!("{other:?}"),
    }
    slot.copy_from_device(&own.tensor, Some(&other)).unwrap();
    let (metadata, _put) = relay.put(slot, Tensor::bytes(LEN)).unwrap();
    assert!(on_host().fetch(&metadata).unwrap() == pattern(LEN, 7));
}
