//! What the benches share: short criterion runs, and a receiver in a process of its own.
#![allow(dead_code, reason = "each bench uses a part")]

#[cfg(feature = "embedded")]
pub(crate) mod mailbox;
#[cfg(feature = "embedded")]
pub(crate) mod receiver;
#[cfg(feature = "embedded")]
pub(crate) mod ways;

use std::{sync::Arc, time::Duration};

use criterion::Criterion;
#[cfg(feature = "embedded")]
use mooncake_relay::EmbeddedEngine;
use mooncake_relay::{Config, Engine, InProcessEngine, Relay};

/// Nobody here waits longer than this.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `benches`, each measured for half a second. Without `--bench` criterion runs each once.
pub(crate) fn measure(benches: impl FnOnce(&mut Criterion)) {
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .without_plots()
        .configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
}

/// A relay over TCP, one slot each way.
#[cfg(feature = "embedded")]
pub(crate) fn embedded(slot_size: usize) -> Relay {
    relay(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").expect("a port is free")), slot_size)
}

/// A relay whose peers are in this process, one slot each way.
pub(crate) fn in_process(name: &str, slot_size: usize) -> Relay {
    relay(Arc::new(InProcessEngine::new(name).expect("each name is used once")), slot_size)
}

pub(crate) fn relay(engine: Arc<dyn Engine>, slot_size: usize) -> Relay {
    let config = Config::default().with_credits(1).with_slot_size(slot_size);
    Relay::new(engine, &config).expect("the memory and the threads are there")
}

/// "4 KiB", "64 MiB".
pub(crate) fn size_name(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
