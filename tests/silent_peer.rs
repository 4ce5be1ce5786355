//! Gets from a peer that accepts connections and says nothing.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::Duration,
};

use mooncake_relay::{Config, EmbeddedEngine, Error, Metadata, Relay, Tensor};

use crate::common::{place::Blackhole, within};

const WATCHDOG: Duration = Duration::from_secs(60);

fn relay() -> Relay {
    let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
    Relay::new(Arc::new(engine), &Config::default().with_slot_size(4096)).unwrap()
}

/// Metadata as a relay of ours writes it, of a put that is at `peer`.
fn put_at(peer: SocketAddr) -> Metadata {
    let (metadata, _token) = relay().put_bytes(b"never", Tensor::bytes(5)).unwrap();
    metadata.to_string().replace(metadata.session_id(), &peer.to_string()).parse().unwrap()
}

/// The same, at somebody who listens and says nothing.
fn put_at_silent(peer: &TcpListener) -> Metadata {
    put_at(peer.local_addr().unwrap())
}

fn counts(relay: &Relay) -> [u64; 4] {
    let counters = relay.health().counters.relay;
    [counters.gets, counters.gets_failed, counters.gets_aborted, counters.gets_timed_out]
}

#[test]
fn a_get_into_that_is_aborted_is_counted_once() {
    within(WATCHDOG, || {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (relay, metadata) = (relay(), put_at_silent(&silent));
        thread::scope(|scope| {
            let get = scope.spawn(|| relay.get_into(&metadata, &mut [0; 5], WATCHDOG));
            while relay.health().reading == 0 {
                thread::yield_now();
            }
            relay.abort(&metadata).unwrap();
            assert!(matches!(get.join().unwrap(), Err(Error::Aborted)));
        });
        assert_eq!(counts(&relay), [1, 1, 1, 0]);
    });
}

#[test]
fn a_get_into_whose_time_is_over_timed_out_whoever_noticed_it() {
    within(WATCHDOG, || {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (relay, metadata) = (relay(), put_at_silent(&silent));
        for number in 1..=20 {
            let got = relay.get_into(&metadata, &mut [0; 5], Duration::from_millis(5));
            assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
            assert_eq!(counts(&relay), [number, number, 0, number]);
        }
    });
}

#[test]
fn a_get_without_any_time_times_out_and_its_sender_is_told() {
    within(WATCHDOG, || {
        let (a, b) = (relay(), relay());
        let (metadata, token) = a.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        let late = b.get_timeout(&metadata, Duration::ZERO).unwrap().wait();
        assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        assert_eq!(counts(&b), [1, 1, 0, 1]);
    });
}

#[test]
fn notes_owed_to_a_silent_peer_let_the_gets_of_others_pass() {
    const OWED: usize = 10;
    within(WATCHDOG, || {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (relay, sender, lost) = (relay(), relay(), put_at_silent(&silent));
        for _ in 0..OWED {
            let late = relay.get_timeout(&lost, Duration::ZERO).unwrap().wait();
            assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");
        }
        let (metadata, _token) = sender.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        // Nobody waits for it, so that the one transfer thread has to.
        let get = relay.get(&metadata).unwrap();
        while !get.is_done() {
            thread::yield_now();
        }
        silent.set_nonblocking(true).unwrap();
        // Kept: one that is closed makes room for the next try.
        let tries: Vec<_> = silent.incoming().map_while(Result::ok).collect();
        assert!(tries.len() <= OWED / 2, "{} notes went first", tries.len());
    });
}

#[test]
fn a_peer_never_used_before_is_read_while_twenty_listen_and_say_nothing() {
    within(WATCHDOG, || {
        let silent: Vec<_> = (0..20).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let engine = Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap());
        let config = Config::default().with_slot_size(4096).with_transfer_threads(2);
        let (relay, sender) = (Relay::new(engine, &config).unwrap(), relay());
        let lost: Vec<_> = silent.iter().map(put_at_silent).collect();
        let (metadata, put) = sender.put_bytes(b"x", Tensor::bytes(1)).unwrap();
        let silent: Vec<_> = lost.iter().map(|lost| relay.get(lost).unwrap()).collect();
        // Nobody waits for it, so that a transfer thread has to read it.
        let get = relay.get(&metadata).unwrap();
        while !get.is_done() {
            thread::yield_now();
        }
        assert!(silent.iter().all(|get| !get.is_done()), "no other get has ended");
        assert_eq!(&get.wait().unwrap()[..], b"x");
        put.wait().unwrap();
    });
}

#[test]
fn an_address_that_swallows_packets_fails_its_get_long_before_the_deadline() {
    within(WATCHDOG, || {
        let blackhole = Blackhole::new();
        let engine = EmbeddedEngine::builder("127.0.0.1:0")
            .connect_timeout(Duration::from_millis(500))
            .bind()
            .unwrap();
        let config = Config::default().with_slot_size(4096).with_read_timeout(WATCHDOG * 100);
        let relay = Relay::new(Arc::new(engine), &config).unwrap();
        let get = relay.get(&put_at(blackhole.addr())).unwrap();
        while !get.is_done() {
            thread::yield_now();
        }
        match get.wait() {
            Err(Error::PeerFailed { reason, .. }) => {
                assert!(reason.contains("connect timed out after 500ms"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let waited = relay.get(&put_at(blackhole.addr())).unwrap().wait();
        assert!(matches!(waited, Err(Error::PeerFailed { .. })), "on the caller's thread too");
    });
}
