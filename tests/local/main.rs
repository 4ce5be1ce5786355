//! The same host: which way bytes go, who is believed what, and who dies of it.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod death;
mod hostile;
mod raw;
mod ways;

use std::{sync::Arc, time::Duration};

use mooncake_relay::{Config, EmbeddedEngine, Metadata, Relay, Slot, Tensor, Token};

use crate::common::eventually;

const WATCHDOG: Duration = Duration::from_secs(120);

fn config() -> Config {
    Config::default().with_slot_size(4096)
}

fn relay(config: &Config) -> Relay {
    Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()), config).unwrap()
}

/// One that has no shared memory.
fn far(config: &Config) -> Relay {
    let engine = EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap();
    Relay::new(Arc::new(engine), config).unwrap()
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

/// One transfer, from end to end.
#[track_caller]
fn works(from: &Relay, to: &Relay) {
    let (metadata, token) = put(from, b"a transfer that works");
    let mut dest = [0; 21];
    to.get_into(&metadata, &mut dest, Duration::from_secs(30)).unwrap();
    assert_eq!(&dest, b"a transfer that works");
    drop(token.wait().unwrap());
}

fn count(relay: &Relay, name: &str) -> u64 {
    relay.health().counters.engine[name]
}

/// Every credit is back.
#[track_caller]
fn at_rest(relay: &Relay) {
    let credits = relay.health().credits as usize;
    eventually((credits, credits, 0, 0), || {
        let health = relay.health();
        (health.free, health.receive_free, health.quarantined.len(), health.reading)
    });
}
