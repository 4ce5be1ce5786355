//! The relay over the embedded engine, by TCP.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "suites/relay.rs"]
mod suite;

use std::sync::Arc;

use mooncake_relay::{EmbeddedEngine, Engine};

const KNOWS_WHO_READS: bool = true;

fn engine() -> Arc<dyn Engine> {
    Arc::new(EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap())
}
