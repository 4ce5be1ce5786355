//! The relay over the in-process engine.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "suites/relay.rs"]
mod suite;

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use mooncake_relay::{Engine, InProcessEngine};

const KNOWS_WHO_READS: bool = true;

fn engine() -> Arc<dyn Engine> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("relay-test-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Arc::new(InProcessEngine::new(&name).unwrap())
}
