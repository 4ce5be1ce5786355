//! By which names peers are reached.

use serde_json::json;

use crate::{
    common::{
        place::Net,
        sockets::{State, sockets_around},
    },
    on::{On, cases},
};

cases! {
    Processes:
        f1_ipv6_works_both_ways_beside_ipv4_and_is_bracketed,
        f1_an_address_with_a_zone_is_reached,
        f2_peers_connect_where_the_metadata_says_and_not_where_it_listens;
    Nothing:
        f2_a_host_name_that_only_this_host_understands_is_an_error_that_asks_for_one;
}

fn f1_ipv6_works_both_ways_beside_ipv4_and_is_bracketed(on: &On) {
    if !crate::common::has_ipv6() {
        return;
    }
    let flags = ["--listen", "[::1]:0"];
    let (six, other, four) = (on.peer(&flags), on.peer(&flags), on.peer(&[]));
    let sent = six.put(json!({"text": "where am I?"}));
    let session = sent.metadata["session_id"].as_str().unwrap();
    assert_eq!(session, six.session_id());
    let port = session.strip_prefix("[::1]:").expect("in brackets");
    assert!(port.parse::<u16>().is_ok(), "{session}");
    // One that reads from both at once.
    let also = four.put(json!({"text": "and I?"}));
    let gets = [&sent, &also].map(|sent| other.send_get(&sent.metadata));
    for (get, sent) in gets.into_iter().zip([&sent, &also]) {
        let got = other.answer(get);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
    }
    assert_eq!(six.wait(sent.tag)["ok"], true);
    assert_eq!(four.wait(also.tag)["ok"], true);
    for (from, to) in [(&six, &other), (&other, &six), (&six, &four), (&four, &six)] {
        from.works_with(to);
    }
}

fn f1_an_address_with_a_zone_is_reached(on: &On) {
    let Some(net) = Net::new() else { return };
    if net.add_address("fe80::1/64").is_none() {
        return;
    }
    let (zoned, plain) = (on.peer_in(&net, &["--listen", "[fe80::1%lo]:0"]), on.peer_in(&net, &[]));
    println!("{}", zoned.session_id());
    zoned.works_with(&plain);
    plain.works_with(&zoned);
}

fn f2_peers_connect_where_the_metadata_says_and_not_where_it_listens(on: &On) {
    let Some(net) = Net::new() else { return };
    if net.add_address("10.8.8.1/32").is_none() {
        return;
    }
    let everywhere = on.peer_in(&net, &["--listen", "0.0.0.0:0", "--advertise", "10.8.8.1"]);
    let other = on.peer_in(&net, &[]);
    let session = everywhere.session_id().to_owned();
    assert!(session.starts_with("10.8.8.1:"), "{session}");
    let sent = everywhere.put(json!({"size": 5000, "seed": 8}));
    assert_eq!(sent.metadata["session_id"], *session);
    let got = other.get(&sent.metadata);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    assert_eq!(everywhere.wait(sent.tag)["ok"], true);
    let connections: Vec<_> = sockets_around(other.pid())
        .into_iter()
        .filter(|socket| socket.state == State::Established)
        .map(|socket| [socket.local, socket.remote].map(|end| end.ip().to_canonical().to_string()))
        .collect();
    assert!(!connections.is_empty() || other.reads_memory());
    for ends in connections {
        // Both ends of it are in this namespace.
        assert!(ends.contains(&"10.8.8.1".to_owned()), "it connected elsewhere");
    }
}

#[cfg(feature = "embedded")]
fn f2_a_host_name_that_only_this_host_understands_is_an_error_that_asks_for_one(_: &On) {
    use mooncake_relay::{EmbeddedEngine, Error};
    use rustix::{
        process::geteuid,
        system::sethostname,
        thread::{UnshareFlags, unshare_unsafe},
    };

    use crate::common::SKIPPED;

    let also = if geteuid().is_root() { UnshareFlags::empty() } else { UnshareFlags::NEWUSER };
    // SAFETY: a namespace for the host's name concerns no memory and no descriptor.
    if let Err(error) = unsafe { unshare_unsafe(UnshareFlags::NEWUTS | also) } {
        assert!(std::env::var_os("CI").is_none(), "{error}");
        eprintln!("{SKIPPED}, no host name of our own to test with: {error}");
        return;
    }
    for name in ["localhost", "127.0.1.1", "no-such-host.invalid", "0.0.0.0"] {
        sethostname(name.as_bytes()).unwrap();
        for listen in ["0.0.0.0:0", "[::]:0"] {
            match EmbeddedEngine::bind(listen) {
                Err(Error::Config { field: "advertise", reason }) => {
                    assert!(reason.contains(name), "{reason}");
                }
                other => panic!("{name}: {other:?}"),
            }
            let told = EmbeddedEngine::builder(listen).advertise("node7.example").bind().unwrap();
            let port = told.control_addr().port();
            assert_eq!(told.session_id(), format!("node7.example:{port}"));
        }
        // Where it listens at one address, that is what peers are told.
        let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        assert!(engine.session_id().starts_with("127.0.0.1:"));
    }
    // A name by which others may reach it is taken; this one needs no resolver.
    sethostname(b"203.0.113.7").unwrap();
    let engine = EmbeddedEngine::bind("0.0.0.0:0").unwrap();
    assert!(engine.session_id().starts_with("203.0.113.7:"), "{}", engine.session_id());
}

#[cfg(not(feature = "embedded"))]
fn f2_a_host_name_that_only_this_host_understands_is_an_error_that_asks_for_one(_: &On) {}
