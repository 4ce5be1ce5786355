//! One test for each defect that was found over sockets, named after the right behaviour.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{net::TcpListener, sync::Arc, thread, time::Duration};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, EmbeddedEngine, Error, Metadata, Relay, Slot, Tensor, Token};

use crate::common::{eventually, within};

const WATCHDOG: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_engine_id("t").with_slot_size(4096)
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

fn over_tcp(config: &Config) -> Relay {
    Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()), config).unwrap()
}

/// As if the put were of a peer that listens and never answers.
fn moved_to(silent: &TcpListener, metadata: &Metadata) -> Metadata {
    let address = silent.local_addr().unwrap().to_string();
    metadata.to_string().replace(metadata.session_id(), &address).parse().unwrap()
}

#[test]
fn an_aborted_get_of_nothing_lets_go_of_its_thread() {
    within(WATCHDOG, || {
        let (a, b) = (over_tcp(&small()), over_tcp(&small()));
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let slot = a.try_acquire(0).unwrap();
        let (metadata, _put) = a.put(slot, Tensor::bytes(0)).unwrap();
        let metadata = moved_to(&silent, &metadata);
        thread::scope(|scope| {
            // A caller that waits reads it, whatever a transfer thread knows of the peer.
            let get = scope.spawn(|| b.get(&metadata).unwrap().wait());
            eventually(1, || b.health().reading);
            b.abort(&metadata).unwrap();
            assert!(matches!(get.join().unwrap(), Err(Error::Aborted)));
        });
        eventually((0, 0), || (b.health().queued, b.health().reading));
    });
}

#[test]
fn notes_owed_to_a_silent_peer_do_not_starve_the_only_thread() {
    within(Duration::from_secs(180), || {
        let (a, b) = (over_tcp(&small().with_credits(4)), over_tcp(&small().with_credits(4)));
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (metadata, _put) = put(&a, b"x");
        let metadata = moved_to(&silent, &metadata);
        let (tx, rx) = unbounded();
        for _ in 0..3 {
            b.get_timeout(&metadata, Duration::from_millis(300)).unwrap().attach(&tx, 0);
        }
        for _ in 0..3 {
            assert!(rx.recv().unwrap().result.is_err());
        }
        for _ in 0..3 {
            let (metadata, token) = put(&a, b"y");
            b.get(&metadata).unwrap().attach(&tx, 0);
            rx.recv().unwrap().result.unwrap();
            token.wait().unwrap();
        }
    });
}
