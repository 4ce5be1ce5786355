//! Gets for which somebody waits at once wake no thread; those for which nobody does are read all the
//! same.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam::channel;
use mooncake_relay::{Completion, Config, Relay, Tensor};

use crate::common::{
    gate::Gate,
    hooked::{Call, Hooked},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(120);
const THREADS: usize = 4;

#[test]
fn after_many_gets_that_were_waited_for_others_are_read_by_every_thread() {
    within(WATCHDOG, || {
        let engine = Hooked::new("waited-gets");
        let (gate, barrier) = Gate::pair();
        let gated = Arc::new(AtomicBool::new(false));
        let is_gated = Arc::clone(&gated);
        engine.before(Call::Read, move || {
            if is_gated.load(Ordering::SeqCst) {
                barrier.pass();
            } else {
                // Whoever waits comes while it is read, if a thread was faster.
                thread::sleep(Duration::from_micros(200));
            }
            Ok(())
        });
        let config = Config::default()
            .with_slot_size(64)
            .with_credits(THREADS as u32)
            .with_transfer_threads(THREADS);
        let relay = Relay::new(engine.engine(), &config).unwrap();
        for round in 0..50 {
            let (metadata, put) = relay.put_bytes(&[round], Tensor::bytes(1)).unwrap();
            assert_eq!(relay.get(&metadata).unwrap().wait().unwrap()[..], [round]);
            put.wait().unwrap();
        }

        gated.store(true, Ordering::SeqCst);
        let (tx, rx) = channel::unbounded();
        for tag in 0..THREADS as u64 {
            let (metadata, _) = relay.put_bytes(&[tag as u8], Tensor::bytes(1)).unwrap();
            relay.get(&metadata).unwrap().attach(&tx, tag);
        }
        gate.entered(THREADS);
        gate.open();
        for _ in 0..THREADS {
            let Completion { tag, result } = rx.recv().unwrap();
            assert_eq!(result.unwrap()[..], [tag as u8]);
        }
    });
}
