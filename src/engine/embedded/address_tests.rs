//! What is an address, what is not, and that a resolver which hangs holds nobody.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;

use super::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn names_and_addresses_stand_before_a_port() {
    for (text, host, port) in [
        ("127.0.0.1:15708", "127.0.0.1", 15708),
        ("node-3.rack_1.example:1", "node-3.rack_1.example", 1),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%lo]:80", "fe80::1%lo", 80),
        ("[::ffff:10.0.0.1]:65535", "::ffff:10.0.0.1", 65535),
        ("localhost:0", "localhost", 0),
    ] {
        assert_eq!(Address::parse(text), Ok(Address { host, port }), "{text}");
        assert_eq!(Address { host, port }.to_string(), text);
    }
}

#[test]
fn what_is_no_address_says_why() {
    for (text, why) in [
        ("", Malformed::NoHost),
        (":80", Malformed::NoHost),
        ("host", Malformed::NoPort),
        ("host:", Malformed::NoPort),
        ("[::1]", Malformed::NoPort),
        ("::1", Malformed::BareIpv6),
        ("::1:80", Malformed::BareIpv6),
        ("fe80::1%lo", Malformed::BareIpv6),
        ("a:2:3", Malformed::BareIpv6),
        ("host:+80", Malformed::Port),
        ("host:65536", Malformed::Port),
        ("host:000080", Malformed::Port),
        ("host:8o", Malformed::Port),
        ("[host]:80", Malformed::Brackets),
        ("[::1:80", Malformed::Brackets),
        ("[::1]80", Malformed::Brackets),
        ("[127.0.0.1]:80", Malformed::Brackets),
        ("[fe80::1%]:80", Malformed::Brackets),
        ("[fe80::1%a-name-of-16-byt]:80", Malformed::Brackets),
        ("ho st:80", Malformed::NotAHost),
        ("host\n:80", Malformed::NotAHost),
        ("/host:80", Malformed::NotAHost),
        ("h\u{f6}st:80", Malformed::NotAHost),
        ("127.1:80", Malformed::NotAHost),
        ("256.0.0.1:80", Malformed::NotAHost),
    ] {
        assert_eq!(Address::parse(text), Err(why), "{text:?}");
    }
    let long = "a".repeat(254) + ":80";
    assert_eq!(Address::parse(&long), Err(Malformed::NotAHost));
    assert_eq!(Address::parse(&"a".repeat(1 << 20)), Err(Malformed::TooLong));
}

#[test]
fn a_host_alone_takes_ipv6_with_and_without_brackets() {
    assert_eq!(parse_host("::1"), Ok("::1"));
    assert_eq!(parse_host("[::1]"), Ok("::1"));
    assert_eq!(parse_host("fe80::1%eth0"), Ok("fe80::1%eth0"));
    assert_eq!(parse_host("10.0.0.7"), Ok("10.0.0.7"));
    assert_eq!(parse_host("stage0"), Ok("stage0"));
    assert_eq!(parse_host("stage0:80"), Err(Malformed::PortAfterHost));
    assert_eq!(parse_host(""), Err(Malformed::NoHost));
}

#[test]
fn an_advertised_address_has_no_port_or_one_or_two() {
    let parse = |text| {
        Advertised::parse(text).map(|it: Advertised<'_>| (it.host, it.control_port, it.data_port))
    };
    assert_eq!(parse("stage0"), Ok(("stage0", None, None)));
    assert_eq!(parse("stage0:7000"), Ok(("stage0", Some(7000), None)));
    assert_eq!(parse("stage0:7000:7001"), Ok(("stage0", Some(7000), Some(7001))));
    assert_eq!(parse("::1"), Ok(("::1", None, None)));
    assert_eq!(parse("[::1]"), Ok(("::1", None, None)));
    assert_eq!(parse("[::1]:7000:7001"), Ok(("::1", Some(7000), Some(7001))));
    assert_eq!(parse("stage0:7000:"), Err(Malformed::NoPort));
    assert_eq!(parse("stage0:1:2:3"), Err(Malformed::BareIpv6));
}

fn host() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<Ipv4Addr>().prop_map(|ip| ip.to_string()),
        any::<Ipv6Addr>().prop_map(|ip| ip.to_string()),
        (any::<Ipv6Addr>(), "[a-z0-9]{1,15}").prop_map(|(ip, zone)| format!("{ip}%{zone}")),
        "[a-z][a-zA-Z0-9._-]{0,60}",
    ]
}

proptest! {
    #[test]
    fn an_address_survives_its_text(host in host(), port: u16) {
        let text = Address { host: &host, port }.to_string();
        prop_assert_eq!(Address::parse(&text), Ok(Address { host: &host, port }));
        prop_assert_eq!(parse_host(&host), Ok(&*host));
        let advertised = format!("{text}:{port}");
        let whole = Advertised { host: &host, control_port: Some(port), data_port: Some(port) };
        prop_assert_eq!(Advertised::parse(&advertised), Ok(whole));
    }

    #[test]
    fn any_text_is_an_address_or_an_error(text in "\\PC{0,40}|[0-9a-f:%.\\[\\]]{0,40}") {
        if let Ok(address) = Address::parse(&text) {
            let again = address.to_string();
            prop_assert_eq!(Address::parse(&again), Ok(address));
        }
        let _ = (Advertised::parse(&text), parse_host(&text));
    }
}

#[test]
fn numeric_addresses_need_no_resolver_and_no_time() {
    let past = Instant::now();
    assert_eq!(resolve("127.0.0.1", 7, past).unwrap(), ["127.0.0.1:7".parse().unwrap()]);
    assert_eq!(resolve("::1", 7, past).unwrap(), ["[::1]:7".parse().unwrap()]);
    assert_eq!(resolve("fe80::1%3", 7, past).unwrap(), ["[fe80::1%3]:7".parse().unwrap()]);
    let SocketAddr::V6(named) = resolve("fe80::1%lo", 7, past).unwrap()[0] else { panic!() };
    assert_ne!(named.scope_id(), 0);
    let error = resolve("fe80::1%nosuchinterfac", 7, past).unwrap_err();
    assert!(matches!(&error, Error::PeerFailed { reason, .. } if reason.contains("interface")));
}

#[test]
fn a_name_is_looked_up_and_an_unknown_one_is_the_peers_fault() {
    let found = resolve("localhost", 7, soon()).unwrap();
    assert!(found.iter().all(|address| address.ip().is_loopback()), "{found:?}");
    let unknown: Lookup = |_, _| Err(io::Error::other("no such name"));
    let error = look_up(&channel::never(), "nobody", 7, soon(), unknown).unwrap_err();
    let Error::PeerFailed { peer, reason } = error else { panic!("{error:?}") };
    assert_eq!((&*peer, &*reason), ("nobody:7", "cannot resolve nobody: no such name"));
    let empty: Lookup = |_, _| Ok(Vec::new());
    let error = look_up(&channel::never(), "nobody", 7, soon(), empty).unwrap_err();
    assert_eq!(error.kind(), "PeerFailed");
}

static HUNG: AtomicUsize = AtomicUsize::new(0);
static MAY_ANSWER: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Hangs until the test lets it go.
fn hang(_: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
    HUNG.fetch_add(1, Ordering::SeqCst);
    let mut may_answer = MAY_ANSWER.0.lock();
    while !*may_answer {
        MAY_ANSWER.1.wait(&mut may_answer);
    }
    Ok(Vec::new())
}

#[test]
fn a_resolver_that_hangs_holds_few_threads_and_nobody_beyond_a_deadline_or_a_cancel() {
    let shortly = || Instant::now() + Duration::from_millis(10);
    let (cancel, cancelled) = channel::bounded(0);
    drop(cancel);
    assert_eq!(look_up(&cancelled, "hung", 7, soon(), hang).unwrap_err().kind(), "Closed");
    for _ in 0..2 * LOOKUPS_AT_ONCE {
        let error = look_up(&channel::never(), "hung", 7, shortly(), hang).unwrap_err();
        assert_eq!(error.kind(), "TimedOut");
    }
    assert!(HUNG.load(Ordering::SeqCst) <= LOOKUPS_AT_ONCE);
    *MAY_ANSWER.0.lock() = true;
    MAY_ANSWER.1.notify_all();
    // Each has given its place back, so that there is one for us.
    let error = look_up(&channel::never(), "hung", 7, soon(), hang).unwrap_err();
    assert_eq!(error.kind(), "PeerFailed");
}
