//! The relay over the real engine, by TCP. Where there is none, that is said aloud, and another stands
//! in for it.
#![cfg(feature = "mooncake")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "suites/relay.rs"]
mod suite;

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use mooncake_relay::{Engine, InProcessEngine};

const KNOWS_WHO_READS: bool = false;

fn engine() -> Arc<dyn Engine> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    match common::real::engine() {
        Some(engine) => Arc::new(engine),
        None => {
            let name = format!("stand-in-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            Arc::new(InProcessEngine::new(&name).unwrap())
        }
    }
}
