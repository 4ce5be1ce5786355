//! Which way bytes go.

use std::{env, sync::Arc, time::Duration};

use mooncake_relay::{EmbeddedEngine, Error, Metadata, Relay};
use rustix::{fs::SealFlags, process::geteuid};
use serde_json::{Value, json};

use crate::{
    WATCHDOG, at_rest,
    common::{
        peer::Peer,
        place::{Net, Place},
        within,
    },
    config, count, far, put,
    raw::{self, hear, hello, memory, say},
    relay, works,
};

const PUBLISHED: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL).union(SealFlags::FUTURE_WRITE);
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[test]
fn bytes_and_notes_of_one_host_touch_no_socket_and_health_says_so() {
    within(WATCHDOG, || {
        let (a, b) = (relay(&config()), relay(&config()));
        for _ in 0..10 {
            works(&a, &b);
        }
        assert_eq!((count(&b, "reads_local"), count(&b, "reads_tcp")), (10, 0));
        assert_eq!((count(&b, "notes_local"), count(&b, "notes_tcp")), (10, 0));
        assert_eq!((count(&a, "local_peers"), count(&b, "local_peers")), (1, 1));
        assert_eq!(b.health().peers[0].way, "local");
        assert_eq!(count(&a, "connections"), 0);
        // The other way round is another pair.
        works(&b, &a);
        assert_eq!((count(&a, "local_peers"), count(&b, "local_peers")), (2, 2));
        at_rest(&a);
        at_rest(&b);
    });
}

#[test]
fn a_relay_reads_its_own_put_like_any_others() {
    within(WATCHDOG, || {
        let a = relay(&config());
        works(&a, &a);
        assert_eq!(count(&a, "reads_local"), 1);
        at_rest(&a);
    });
}

#[test]
fn either_side_can_do_without() {
    within(WATCHDOG, || {
        let (near, far) = (relay(&config()), far(&config()));
        let (metadata, _token) = put(&far, b"!");
        assert!(!metadata.to_string().contains("local"));
        let (metadata, _token) = put(&near, b"!");
        assert!(metadata.to_string().contains(r#""local":{"socket":"mooncake-relay-"#));
        works(&near, &far);
        works(&far, &near);
        for relay in [&near, &far] {
            assert_eq!((count(relay, "reads_local"), count(relay, "reads_tcp")), (0, 1));
            assert_eq!((count(relay, "notes_local"), count(relay, "notes_tcp")), (0, 1));
            assert_eq!(relay.health().peers[0].way, "tcp");
        }
    });
}

#[test]
fn the_name_of_the_socket_is_checked_at_the_door() {
    let relay = relay(&config());
    let (metadata, _token) = put(&relay, b"!");
    let with = |local: Value| {
        let mut text: Value = serde_json::from_str(&metadata.to_string()).unwrap();
        text["relay"]["local"] = local;
        text.to_string().parse::<Metadata>()
    };
    let name = "n".repeat(107);
    assert_eq!(
        with(json!({"socket": name, "more": 1})).unwrap().to_string().matches(&name).count(),
        1
    );
    with(json!({})).unwrap();
    for wrong in
        [json!({"socket": "n".repeat(108)}), json!({"socket": ""}), json!({"socket": "a\0b"})]
    {
        assert!(matches!(with(wrong), Err(Error::Metadata { field: "socket", .. })));
    }
    // Another shape may be a later version's.
    for other in [json!("name"), json!({"socket": 7}), json!([{}]), json!(null)] {
        assert!(!with(other).unwrap().to_string().contains("socket"));
    }
}

#[test]
fn no_other_socket_is_dialled_than_that_relays_own() {
    within(WATCHDOG, || {
        let (a, b) = (relay(&config()), relay(&config()));
        let (metadata, token) = put(&a, b"hello");
        let text = metadata.to_string().replace("mooncake-relay-", "another-socket-");
        assert_eq!(&b.get(&text.parse().unwrap()).unwrap().wait().unwrap()[..], b"hello");
        token.wait().unwrap();
        assert_eq!((count(&b, "reads_local"), count(&b, "reads_tcp")), (0, 1));
    });
}

#[test]
fn i7_a_hello_that_is_not_for_this_relay_is_not_answered() {
    within(WATCHDOG, || {
        let a = relay(&config());
        let (metadata, _token) = put(&a, b"hello");
        let own = metadata.instance().unwrap();
        let other = mooncake_relay::Instance::from_bytes([3; 16]);
        let longer = [hello(1, [9; 16], own), vec![0]].concat();
        for wrong in [
            hello(1, [9; 16], other),
            hello(2, [9; 16], own),
            longer,
            hello(1, [9; 16], own)[..43].to_vec(),
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        ] {
            let socket = raw::dial(own);
            say(&socket, &wrong, &[]);
            let (answer, fds) = hear(&socket);
            assert!(answer.is_empty() && fds.is_empty());
        }
        assert_eq!(count(&a, "local_peers"), 0);
        works(&a, &relay(&config()));
    });
}

/// A put of a relay without shared memory, whose metadata says that it has.
fn pretended(sender: &Relay) -> (Metadata, impl Drop + use<>) {
    let (metadata, token) = put(sender, b"by tcp");
    let mut text: Value = serde_json::from_str(&metadata.to_string()).unwrap();
    let socket = raw::socket_of(metadata.instance().unwrap());
    text["relay"]["local"] = json!({"socket": socket});
    struct Ends(Option<mooncake_relay::Token<mooncake_relay::Slot>>);
    impl Drop for Ends {
        fn drop(&mut self) {
            drop(self.0.take().unwrap().wait().unwrap());
        }
    }
    (text.to_string().parse().unwrap(), Ends(Some(token)))
}

/// The answer of `sender`, with `change` made to it.
fn answer(sender: &Relay, metadata: &Metadata, slots: u32, len: u64, file: u64) -> Vec<u8> {
    let mut answer = [&raw::MAGIC[..], &1_u32.to_le_bytes()].concat();
    answer.extend(metadata.instance().unwrap().to_bytes());
    answer.extend(slots.to_le_bytes());
    answer.extend(0x7000_0000_u64.to_le_bytes());
    answer.extend(len.to_le_bytes());
    answer.extend(file.to_le_bytes());
    answer.extend(sender.health().session_id.as_bytes());
    answer
}

#[test]
fn i7_an_owner_whose_memory_is_not_what_it_says_is_left_to_tcp() {
    within(WATCHDOG, || {
        let region = (raw::ring_of(2) + (64 << 10)) as u64;
        let good = || [(8192, PUBLISHED), (4096, PUBLISHED), (4096, FIXED), (region, FIXED)];
        // What is wrong with which of the four.
        let mut wrong = vec![(2, 8192, 8192, good()[..3].to_vec()), (2, 8192, 8192, vec![])];
        for n in 0..4 {
            let mut of = good();
            of[n].1 = SealFlags::SHRINK | SealFlags::SEAL;
            wrong.push((2, 8192, 8192, of.to_vec()));
            let mut of = good();
            of[n].0 = 0;
            wrong.push((2, 8192, 8192, of.to_vec()));
            let mut of = good();
            of[n].0 += 4096;
            wrong.push((2, 8192, 8192, of.to_vec()));
        }
        for (slots, len, file) in [
            (0, 8192, 8192),
            (u32::MAX, 8192, 8192),
            (2, 8193, 8192),
            (2, 8192, 4096),
            (2, u64::MAX, u64::MAX),
            (2, 0x7000_0000, 1 << 62),
        ] {
            wrong.push((slots, len, file, good().to_vec()));
        }
        for (slots, len, file, memories) in wrong {
            let (sender, receiver) = (far(&config()), relay(&config()));
            let (metadata, token) = pretended(&sender);
            let listener = raw::pose_as(metadata.instance().unwrap());
            let get = receiver.get(&metadata).unwrap();
            let guest = raw::next_guest(&listener);
            assert_eq!(hear(&guest).0.len(), 44);
            let fds: Vec<_> = memories.iter().map(|(len, seals)| memory(*len, *seals)).collect();
            let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
            say(&guest, &answer(&sender, &metadata, slots, len, file), &fds);
            assert_eq!(&get.wait().unwrap()[..], b"by tcp");
            drop(token);
            // Nor is it asked again at once.
            let (metadata, token) = pretended(&sender);
            assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], b"by tcp");
            drop(token);
            assert_eq!((count(&receiver, "reads_local"), count(&receiver, "reads_tcp")), (0, 2));
            assert_eq!(receiver.health().peers[0].way, "tcp");
        }
    });
}

#[test]
fn an_owner_that_answers_nonsense_or_hangs_up_is_left_to_tcp() {
    within(WATCHDOG, || {
        for nonsense in [&b""[..], b"no", &[0; 300]] {
            let (sender, receiver) = (far(&config()), relay(&config()));
            let (metadata, token) = pretended(&sender);
            let listener = raw::pose_as(metadata.instance().unwrap());
            let get = receiver.get(&metadata).unwrap();
            let guest = raw::next_guest(&listener);
            if !nonsense.is_empty() {
                say(&guest, nonsense, &[]);
            }
            drop(guest);
            assert_eq!(&get.wait().unwrap()[..], b"by tcp");
            drop(token);
        }
    });
}

#[test]
fn an_owner_that_never_answers_costs_a_get_no_more_than_a_connect() {
    within(WATCHDOG, || {
        let sender = far(&config());
        let limit = Duration::from_millis(100);
        let engine = EmbeddedEngine::builder("127.0.0.1:0").connect_timeout(limit).bind().unwrap();
        let receiver = Relay::new(Arc::new(engine), &config()).unwrap();
        let (metadata, token) = pretended(&sender);
        let _listener = raw::pose_as(metadata.instance().unwrap());
        assert_eq!(&receiver.get(&metadata).unwrap().wait().unwrap()[..], b"by tcp");
        drop(token);
        // A get that has no time for that ends by its deadline, and one that is closed at once.
        let patient = relay(&config());
        let (metadata, _token) = put(&sender, b"!");
        let text = metadata.to_string().replace(
            r#""lease_ms""#,
            &format!(
                r#""local":{{"socket":"{}"}},"lease_ms""#,
                raw::socket_of(metadata.instance().unwrap())
            ),
        );
        let metadata = text.parse().unwrap();
        let late = patient.get_timeout(&metadata, Duration::from_millis(50)).unwrap();
        assert!(matches!(late.wait(), Err(Error::TimedOut)));
        let waiting = patient.get(&metadata).unwrap();
        crate::common::eventually(1, || patient.health().reading);
        patient.close(Duration::from_secs(30));
        assert!(matches!(waiting.wait(), Err(Error::Closed)));
    });
}

#[track_caller]
fn goes(from: &Peer, to: &Peer, way: &str) {
    let sent = from.put(json!({"size": 3000, "seed": 3}));
    let got = to.get(&sent.metadata);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    assert_eq!(from.wait(sent.tag)["ok"], true);
    let health = to.health();
    let peer = health["peers"].as_array().unwrap().iter().find(|it| it["way"] == *way);
    assert!(peer.is_some(), "{health}");
    assert_eq!(health["counters"]["reads_local"], u64::from(way == "local"), "{health}");
}

#[test]
fn another_network_namespace_is_another_host() {
    within(WATCHDOG, || {
        let Some((a, b)) = Net::pair() else { return };
        let peer =
            |net: &Net, listen| Peer::start_in(net, &["--slot-size", "4096", "--listen", listen]);
        let (first, second) = (peer(&a, "10.77.0.1:0"), peer(&b, "10.77.0.2:0"));
        goes(&first, &second, "tcp");
        goes(&second, &first, "tcp");
        let third = peer(&a, "10.77.0.1:0");
        goes(&first, &third, "local");
        for peer in [first, second, third] {
            peer.quit();
        }
    });
}

#[test]
fn i6_another_user_is_another_host() {
    within(WATCHDOG, || {
        if !geteuid().is_root() {
            assert!(env::var_os("CI").is_none(), "only root can be another user");
            eprintln!("{}: only root can be another user", crate::common::SKIPPED);
            return;
        }
        let Some(place) = Place::here().with_user(54_321) else { return };
        let flags = ["--slot-size", "4096"];
        let (own, other) = (Peer::start(&flags), Peer::start_in(&place, &flags));
        goes(&own, &other, "tcp");
        goes(&other, &own, "tcp");
        let third = Peer::start_in(&place, &flags);
        goes(&other, &third, "local");
        // An unknown user looks like any other unknown one.
        let Some(nobody) = Place::here().with_user(65_534) else { return };
        let nobodies = [(); 2].map(|()| Peer::start_in(&nobody, &flags));
        goes(&nobodies[0], &nobodies[1], "tcp");
    });
}

#[test]
fn no_local_is_tcp() {
    within(WATCHDOG, || {
        let flags = ["--slot-size", "4096", "--no-local"];
        let (a, b) = (Peer::start(&flags), Peer::start(&flags[..2]));
        goes(&a, &b, "tcp");
        goes(&b, &a, "tcp");
    });
}
