//! Python peers on older wheels of the real engine, and relays on either engine. Each wheel is fetched,
//! so that this runs by its name alone: `make interop-all`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "suites/interop.rs"]
mod suite;

use crate::{
    common::{
        peer::{real_engine, real_engine_of},
        place::Place,
        within,
    },
    suite::{
        Kind::{self, Embedded, Mooncake, Python},
        WATCHDOG, exchange, start,
    },
};

#[test]
fn embedded_and_python_on_0_3_7_post2() {
    older(Embedded, "0.3.7.post2");
}

#[test]
fn embedded_and_python_on_0_3_10_post2() {
    older(Embedded, "0.3.10.post2");
}

#[test]
fn embedded_and_python_on_0_3_12_post1() {
    older(Embedded, "0.3.12.post1");
}

#[test]
fn mooncake_and_python_on_0_3_7_post2() {
    older(Mooncake, "0.3.7.post2");
}

#[test]
fn mooncake_and_python_on_0_3_10_post2() {
    older(Mooncake, "0.3.10.post2");
}

#[test]
fn mooncake_and_python_on_0_3_12_post1() {
    older(Mooncake, "0.3.12.post1");
}

fn older(ours: Kind, version: &'static str) {
    let Some(real) = real_engine_of(version) else { return };
    if ours == Mooncake && real_engine().is_none() {
        return;
    }
    within(WATCHDOG, move || {
        let mut place = Place::here();
        if version == "0.3.7.post2" {
            // It closes each connection after a transfer, where the newer engine would keep it.
            place = place.with_variable("MC_TCP_ENABLE_CONNECTION_POOL", "0");
        }
        let ours = start(ours, "ours", &place, "127.0.0.1", None);
        let python = start(Python, "python", &Place::here(), "127.0.0.1", Some(&real));
        exchange(ours, python, 40);
    });
}
