//! Looking at a sender's slot in place.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{sync::Arc, time::Duration};

use mooncake_relay::{Config, EmbeddedEngine, Error, Metadata, Relay, Slot, Tensor, Token};

use crate::common::{eventually, within};

const WATCHDOG: Duration = Duration::from_secs(120);

fn config() -> Config {
    Config::default().with_slot_size(64 << 10)
}

fn relay(config: &Config) -> Relay {
    Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()), config).unwrap()
}

fn pair() -> (Relay, Relay) {
    (relay(&config()), relay(&config()))
}

fn put(relay: &Relay, bytes: &[u8]) -> (Metadata, Token<Slot>) {
    relay.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
}

#[track_caller]
fn at_rest(relay: &Relay) {
    eventually((2, 2, 0, 0), || {
        let health = relay.health();
        (health.free, health.receive_free, health.quarantined.len(), health.reading)
    });
}

#[test]
fn a_view_shows_the_bytes_where_they_are_and_its_drop_ends_the_put() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let bytes: Vec<u8> = (0..60_000_u32).map(|n| n as u8).collect();
        let (metadata, token) = put(&sender, &bytes);
        let view = receiver.view(&metadata).unwrap();
        assert_eq!((view.len(), view.is_empty(), view.is_gone()), (60_000, false, false));
        assert_eq!(view.tensor(), &Tensor::bytes(60_000));
        let mut copy = vec![0; 60_001];
        view.copy_to(&mut copy).unwrap();
        assert_eq!(copy[..60_000], bytes);
        assert!(matches!(view.copy_to(&mut copy[..9]), Err(Error::TooLarge { len: 60_000, .. })));
        // SAFETY: the sender is this test, which leaves the put open meanwhile.
        assert_eq!(unsafe { view.as_slice() }, bytes);
        assert!(!token.is_done() && receiver.health().reading == 1);
        drop(view);
        assert_eq!(token.wait().unwrap().len(), 60_000);
        at_rest(&sender);
        at_rest(&receiver);
        let counters = receiver.health().counters;
        assert_eq!((counters.relay.gets, counters.relay.gets_done), (1, 1));
        assert_eq!(counters.engine["reads_local"], 1);
    });
}

#[test]
fn a_put_that_ended_keeps_its_slot_until_the_view_goes() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let (metadata, token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        sender.abort(&metadata).unwrap();
        assert!(matches!(token.wait(), Err(Error::Aborted)));
        assert_eq!(sender.health().quarantined.len(), 1);
        let mut copy = [0; 9];
        view.copy_to(&mut copy).unwrap();
        assert_eq!(&copy, b"looked at");
        drop(view);
        at_rest(&sender);
        at_rest(&receiver);
    });
}

#[test]
fn a_view_is_gone_once_the_quarantine_is_over() {
    within(WATCHDOG, || {
        let sender = relay(&config().with_quarantine(Duration::from_millis(50)));
        let receiver = relay(&config());
        let (metadata, _token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        sender.abort(&metadata).unwrap();
        eventually(true, || view.is_gone());
        at_rest(&sender);
        assert!(matches!(view.copy_to(&mut [0; 9]), Err(Error::Stale { .. })));
        drop(view);
        at_rest(&receiver);
        assert_eq!(receiver.health().counters.relay.gets_stale, 1);
    });
}

#[test]
fn a_view_is_gone_at_its_limit_and_the_sender_hears_of_it() {
    within(WATCHDOG, || {
        let sender = relay(&config());
        let receiver = relay(&config().with_view_limit(Duration::from_millis(50)));
        let (metadata, token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        assert!(view.is_gone());
        at_rest(&sender);
        assert!(matches!(view.copy_to(&mut [0; 9]), Err(Error::Stale { .. })));
        drop(view);
        at_rest(&receiver);
    });
}

#[test]
fn a_view_is_gone_with_either_relay() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let (metadata, _token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        drop(sender);
        eventually(true, || view.is_gone());
        assert!(view.copy_to(&mut [0; 9]).is_err());
        drop(view);
        at_rest(&receiver);

        let (sender, receiver) = pair();
        let (metadata, _token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        drop(receiver);
        assert!(view.is_gone());
        // The sender has its slot back while the view is still held.
        sender.abort(&metadata).unwrap();
        at_rest(&sender);
        drop(view);
        at_rest(&sender);
    });
}

#[test]
fn an_abort_ends_a_view() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let (metadata, token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        receiver.abort(&metadata).unwrap();
        assert!(view.is_gone());
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        drop(view);
        at_rest(&sender);
        at_rest(&receiver);
    });
}

#[test]
fn two_views_of_one_put_are_one_too_many_for_one_relay_and_a_get_goes_another_way() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let (metadata, token) = put(&sender, b"looked at");
        let view = receiver.view(&metadata).unwrap();
        assert!(matches!(receiver.view(&metadata), Err(Error::Config { .. })));
        assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], b"looked at");
        assert_eq!(receiver.health().counters.engine["reads_tcp"], 1);
        drop(view);
        token.wait().unwrap();
        at_rest(&sender);
        at_rest(&receiver);
    });
}

#[test]
fn what_is_not_on_this_host_cannot_be_viewed_and_says_what_can() {
    within(WATCHDOG, || {
        let engine = EmbeddedEngine::builder("127.0.0.1:0").local(false).bind().unwrap();
        let sender = Relay::new(Arc::new(engine), &config()).unwrap();
        let receiver = relay(&config());
        let (metadata, token) = put(&sender, b"far away");
        let refused = receiver.view(&metadata).unwrap_err();
        assert!(matches!(refused, Error::Config { field: "metadata", .. }));
        assert!(refused.to_string().contains("use get"), "{refused}");
        assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], b"far away");
        token.wait().unwrap();
    });
}

#[test]
fn a_view_of_what_is_over_is_stale() {
    within(WATCHDOG, || {
        let (sender, receiver) = pair();
        let (metadata, _token) = put(&sender, b"gone");
        sender.abort(&metadata).unwrap();
        assert!(matches!(receiver.view(&metadata), Err(Error::Stale { .. })));
        at_rest(&receiver);
    });
}
