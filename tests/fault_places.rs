//! The places that tests of faults run in are what they say.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    fs::File,
    io::ErrorKind,
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use serde_json::json;

use crate::common::{
    eventually,
    peer::Peer,
    place::{Blackhole, Net, Place, elsewhere},
    sockets::{State, sockets_around},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(120);
/// Long enough for an answer that would come.
const A_MOMENT: Duration = Duration::from_millis(300);

fn connecting_to(addr: SocketAddr) -> Result<TcpStream, ErrorKind> {
    TcpStream::connect_timeout(&addr, A_MOMENT).map_err(|error| error.kind())
}

#[test]
fn a_namespace_has_its_own_addresses_routes_and_ports() {
    let name = "a_namespace_has_its_own_addresses_routes_and_ports";
    let make = || {
        let net = Net::new()?;
        net.add_address("10.8.8.1/32")?;
        net.choose_ports(40_000, 40_009)?;
        net.blackhole("10.9.9.9/32")?;
        net.silence("10.9.9.8/32")?;
        Some(net.place())
    };
    elsewhere(name, make, || {
        let listener = TcpListener::bind("10.8.8.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        assert!((40_000..=40_009).contains(&addr.port()), "{addr}");
        // No more than ten to one address.
        let open: Vec<_> = (0..20).map_while(|_| TcpStream::connect(addr).ok()).collect();
        assert!((1..=10).contains(&open.len()), "{} connections", open.len());
        drop(open);
        let (blackhole, silence) = ("10.9.9.9:1".parse().unwrap(), "10.9.9.8:1".parse().unwrap());
        assert_eq!(connecting_to(blackhole).unwrap_err(), ErrorKind::InvalidInput);
        // All ports to the listener's address may be taken, but not those to this one.
        assert_eq!(connecting_to(silence).unwrap_err(), ErrorKind::TimedOut);
    });
}

#[test]
fn a_namespace_ends_with_its_last_place() {
    let Some(net) = Net::new() else { return };
    let entered = |place: &Place| place.command("true").output().unwrap().status.success();
    let place = net.place();
    drop(net);
    assert!(entered(&place));
    let words = place.command("true");
    let mut again = std::process::Command::new(words.get_program());
    again.args(words.get_args());
    drop(place);
    assert!(!again.output().unwrap().status.success());
}

#[test]
fn sockets_of_a_namespace_are_counted_by_state() {
    let name = "sockets_of_a_namespace_are_counted_by_state";
    let make = || Some(Net::new()?.place());
    elsewhere(name, make, || {
        let count = |state| {
            let all = sockets_around(std::process::id());
            all.iter().filter(|socket| socket.state == state).count()
        };
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            // Without IPv6 the first is all there is.
            let Ok(listener) = TcpListener::bind(addr) else { continue };
            let before = [State::Listening, State::Established, State::TimeWait].map(count);
            let addr = listener.local_addr().unwrap();
            let open = [(); 3].map(|()| (TcpStream::connect(addr).unwrap(), listener.accept()));
            assert_eq!(count(State::Listening), before[0]);
            assert_eq!(count(State::Established), before[1] + 6);
            drop(open); // the client's end first
            eventually(before[2] + 3, || count(State::TimeWait));
            assert_eq!(count(State::Established), before[1]);
        }
    });
}

#[test]
fn peers_run_in_a_namespace() {
    within(WATCHDOG, || {
        let Some(net) = Net::new() else { return };
        let flags = ["--slot-size", "4096", "--no-local"];
        let (putter, getter) = (Peer::start_in(&net, &flags), Peer::start_in(&net, &flags));
        assert_eq!(net.count(State::Listening), 4);
        let sent = putter.put(json!({"text": "hello"}));
        assert_eq!(getter.get(&sent.metadata)["sha256"], sent.sha256);
        assert!(net.count(State::Established) > 0);
        putter.quit();
        getter.quit();
        eventually(0, || net.count(State::Listening));
    });
}

#[test]
fn two_namespaces_reach_each_other() {
    within(WATCHDOG, || {
        let Some((a, b)) = Net::pair() else { return };
        let flags = |listen| ["--slot-size", "4096", "--listen", listen];
        let putter = Peer::start_in(&a, &flags("10.77.0.1:0"));
        let getter = Peer::start_in(&b, &flags("10.77.0.2:0"));
        let sent = putter.put(json!({"text": "hello"}));
        assert_eq!(getter.get(&sent.metadata)["sha256"], sent.sha256);
        assert_eq!(putter.wait(sent.tag)["ok"], true);
    });
}

#[test]
fn a_process_gets_no_more_descriptors_than_its_limit() {
    let name = "a_process_gets_no_more_descriptors_than_its_limit";
    elsewhere(
        name,
        || Place::here().with_descriptors(40),
        || {
            let open: Vec<_> = (0..100).map_while(|_| File::open("/dev/null").ok()).collect();
            assert!((20..40).contains(&open.len()), "{}", open.len());
        },
    );
}

#[test]
fn a_process_locks_no_more_memory_than_its_limit() {
    const LIMIT: usize = 1 << 20;
    let name = "a_process_locks_no_more_memory_than_its_limit";
    elsewhere(
        name,
        || Place::here().with_locked_memory(LIMIT as u64),
        || {
            let mut bytes = vec![0_u8; 2 * LIMIT];
            let mut lock = |len| {
                // SAFETY: within one allocation, and nothing but its being swapped out is changed.
                unsafe { rustix::mm::mlock(bytes.as_mut_ptr().cast(), len) }
            };
            assert!(lock(LIMIT / 2).is_ok());
            assert!(lock(2 * LIMIT).is_err());
        },
    );
}

#[test]
fn limits_hold_in_a_namespace_too() {
    let name = "limits_hold_in_a_namespace_too";
    elsewhere(
        name,
        || Net::new()?.place().with_descriptors(40),
        || {
            assert!((0..100).map_while(|_| File::open("/dev/null").ok()).count() > 0);
            let open: Vec<_> = (0..100).map_while(|_| File::open("/dev/null").ok()).collect();
            assert!(open.len() < 40, "{}", open.len());
            assert_eq!(sockets_around(std::process::id()).len(), 0);
        },
    );
}

#[test]
fn a_full_listener_never_answers() {
    let silent = Blackhole::new();
    for _ in 0..3 {
        assert_eq!(connecting_to(silent.addr()).unwrap_err(), ErrorKind::TimedOut);
    }
    assert_eq!(silent.session_id(), silent.addr().to_string());
}
