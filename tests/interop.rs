//! Relays on either engine and a Python process on the real one are peers, each of each, both ways.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "suites/interop.rs"]
mod suite;

use crate::{
    common::{
        peer::{RealEngine, real_engine},
        place::{Net, Place},
        within,
    },
    suite::{
        Kind::{self, Embedded, Mooncake, Python},
        WATCHDOG, exchange, start,
    },
};

#[test]
fn embedded_and_embedded() {
    here(Embedded, Embedded, 40);
}

#[test]
fn embedded_and_mooncake() {
    here(Embedded, Mooncake, 40);
}

#[test]
fn embedded_and_python() {
    here(Embedded, Python, 100);
}

#[test]
fn mooncake_and_mooncake() {
    here(Mooncake, Mooncake, 40);
}

#[test]
fn mooncake_and_python() {
    here(Mooncake, Python, 40);
}

#[test]
fn embedded_and_mooncake_in_two_namespaces() {
    apart(Embedded, Mooncake);
}

#[test]
fn embedded_and_python_in_two_namespaces() {
    apart(Embedded, Python);
}

#[test]
fn mooncake_and_mooncake_in_two_namespaces() {
    apart(Mooncake, Mooncake);
}

#[test]
fn mooncake_and_python_in_two_namespaces() {
    apart(Mooncake, Python);
}

/// On this host, by its loopback.
fn here(a: Kind, b: Kind, transfers: usize) {
    let Some(real) = wheel_of(a, b) else { return };
    within(WATCHDOG, move || {
        let peer = |kind, name| start(kind, name, &Place::here(), "127.0.0.1", real);
        exchange(peer(a, "first"), peer(b, "second"), transfers);
    });
}

/// In two network namespaces, each with an address of its own.
fn apart(a: Kind, b: Kind) {
    let Some(real) = wheel_of(a, b) else { return };
    let Some((first, second)) = Net::pair() else { return };
    within(WATCHDOG, move || {
        let first = start(a, "first", &first, "10.77.0.1", real);
        let second = start(b, "second", &second, "10.77.0.2", real);
        for (peer, address) in [(&first, "10.77.0.1:"), (&second, "10.77.0.2:")] {
            assert!(peer.session_id().starts_with(address), "{}", peer.session_id());
        }
        exchange(first, second, 24);
    });
}

/// The real engine, if one of them needs it; `None`, said aloud: it cannot be set up here.
fn wheel_of(a: Kind, b: Kind) -> Option<Option<&'static RealEngine>> {
    if [a, b] == [Embedded; 2] { Some(None) } else { real_engine().map(Some) }
}
