//! The real Mooncake engine as a row of the cases.
//!
//! It runs in full wherever the engine can be set up, and is skipped aloud elsewhere.

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use mooncake_relay::Engine;

use super::{Lack, On, PLAIN};
use crate::common::{peer::real_engine, real};

pub(super) const ON: On = On {
    name: "mooncake",
    make,
    flags: Some(&["--engine", "mooncake"]),
    lacks: &[
        Lack::Identity,
        Lack::Readers,
        Lack::Publication,
        Lack::Cancel,
        Lack::Nul,
        Lack::Ports,
        Lack::NoteConnections,
    ],
    except: EXCEPT,
    share: 5,
    library_stays: true,
    is_there,
    ..PLAIN
};

/// An engine's end takes a second: it is left to a thread of its own, so that several end at once. A
/// case is over when those threads are.
fn make() -> Arc<dyn Engine> {
    let engine: Arc<dyn Engine> = Arc::new(real::engine().expect("it is there"));
    let last = Arc::clone(&engine);
    let ends = move || {
        while Arc::strong_count(&last) > 1 {
            thread::sleep(Duration::from_millis(10)); // between two looks
        }
    };
    thread::Builder::new().name("mooncake-end".to_owned()).spawn(ends).unwrap();
    engine
}

/// What it cannot do by its nature.
const EXCEPT: &[(&str, &str)] = &[
    (
        "c1_a_peer_that_is_killed_and_restarted_on_its_port_is_read_at_first_try",
        "it listens on ports of its own choice",
    ),
    ("f1_ipv6_works_both_ways_beside_ipv4_and_is_bracketed", NO_IPV6),
    ("f1_an_address_with_a_zone_is_reached", NO_IPV6),
    ("q24_ipv6_is_bracketed_and_works_both_ways", NO_IPV6),
    (
        "q17_idle_connections_to_the_control_port_hold_up_nothing",
        "its control port serves one connection at a time",
    ),
];

const NO_IPV6: &str = "it has IPv6 or IPv4, by a variable for the whole process";

/// Asked once, and so said once.
fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| real_engine().is_some())
}
