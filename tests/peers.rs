//! Processes that live, work and die.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{Random, eventually, peer::Peer, within};

const SLOT: u64 = 256 << 10;
/// The default of `Config::read_timeout`.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const WATCHDOG: Duration = Duration::from_secs(180);

/// The flags for each way that bytes can go. So far there is one, TCP.
const WAYS: [&[&str]; 1] = [&["--no-local"]];

fn start(flags: &[&str]) -> Peer {
    Peer::start(&[&["--slot-size", "262144"], flags].concat())
}

#[test]
fn a_thousand_transfers_leave_nothing_behind() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let (a, b) = (Arc::new(start(way)), Arc::new(start(way)));
            let idle = [&a, &b].map(|peer| (peer.threads_of_its_own(), peer.descriptors()));
            several_at_once(&a, &b, &mut Random::new(0x5eed0), 20);
            several_at_once(&b, &a, &mut Random::new(0x5eed1), 20);
            // Connections and mappings are kept for the next transfer, and no more are made.
            let warm = [&a, &b].map(|peer| peer.descriptors());

            let (from, to) = (Arc::clone(&b), Arc::clone(&a));
            let back = thread::spawn(move || {
                several_at_once(&from, &to, &mut Random::new(0x5eed2), 500);
            });
            several_at_once(&a, &b, &mut Random::new(0x5eed3), 500);
            back.join().unwrap();

            for (peer, warm) in [&a, &b].into_iter().zip(warm) {
                eventually((2, Some(2)), || peer.free());
                assert_eq!(peer.health()["quarantined"], json!([]));
                let (threads, _) = idle[0];
                eventually(threads, || peer.threads());
                // Two lanes more, since both directions were busy at once.
                eventually(true, || peer.descriptors() <= warm + 4);
            }
            // What belonged to the other goes when it goes.
            Arc::into_inner(b).unwrap().quit();
            eventually(idle[0], || (a.threads(), a.descriptors()));
            Arc::into_inner(a).unwrap().hang_up();
        });
    }
}

/// Four puts are asked for ahead of the gets; two credits decide how many there are.
fn several_at_once(from: &Peer, to: &Peer, random: &mut Random, times: usize) {
    let mut put = || {
        let bytes = json!({"size": random.size(SLOT), "seed": random.next()});
        from.send(json!({"cmd": "put", "bytes": bytes}))
    };
    let mut puts: Vec<u64> = (0..4).map(|_| put()).collect();
    for done in 0..times {
        let sent = from.first_sent(&mut puts);
        let got = to.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
        let ended = from.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
        if done + 4 < times {
            puts.push(put());
        }
    }
}

#[test]
fn two_receivers_of_one_put_read_it_or_hear_that_it_is_gone() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let sender = start(&[&["--credits", "1"], way].concat());
            let receivers = [start(way), start(way)];
            let mut read = 0;
            for round in 0..40 {
                let sent = sender.put(json!({"size": SLOT, "seed": round}));
                // Wanted already: the next put waits for the slot that both read.
                let next = sender.send(json!({"cmd": "put", "bytes": {"size": SLOT, "fill": 255}}));
                let gets = receivers.each_ref().map(|peer| peer.send_get(&sent.metadata));
                for (receiver, get) in receivers.iter().zip(gets) {
                    let got = receiver.answer(get);
                    if got["ok"] == true {
                        assert_eq!(got["sha256"], *sent.sha256, "bytes of another put");
                        read += 1;
                    } else {
                        assert_eq!(got["kind"], "Stale", "{got}");
                    }
                }
                assert_eq!(sender.wait(sent.tag)["ok"], true);
                let next = sender.sent(next);
                assert_eq!(receivers[0].get(&next.metadata)["sha256"], *next.sha256);
            }
            assert!(read >= 40, "each put was read at least once");
            eventually((1, Some(1)), || sender.free());
            for receiver in &receivers {
                eventually((2, Some(2)), || receiver.free());
            }
        });
    }
}

#[test]
fn ipv6_works_both_ways_and_is_bracketed() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let flags = [&["--listen", "[::1]:0"], way].concat();
            let (six, other, four) = (start(&flags), start(&flags), start(way));
            assert!(six.session_id().starts_with("[::1]:"), "{}", six.session_id());
            for (from, to) in [(&six, &other), (&other, &six), (&six, &four), (&four, &six)] {
                let sent = from.put(json!({"size": 70_000, "seed": 6}));
                assert_eq!(to.get(&sent.metadata)["sha256"], *sent.sha256);
                assert_eq!(from.wait(sent.tag)["ok"], true);
            }
        });
    }
}

#[test]
fn a_killed_sender_fails_what_reads_from_it_and_nothing_else() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let (dead, alive, receiver) = (start(way), start(way), start(way));
            let warm = dead.put(json!({"size": 10, "fill": 1}));
            assert_eq!(receiver.get(&warm.metadata)["ok"], true);

            let sent = dead.put(json!({"size": SLOT, "fill": 2}));
            dead.signal(Signal::STOP); // so that the read cannot be over before the kill
            let get = receiver.send_get(&sent.metadata);
            dead.kill();
            let got = receiver.answer(get);
            // From the same host's memory it may have been read in full before the kill.
            assert!(got["ok"] == true || got["kind"] == "PeerFailed", "{got}");

            let got = receiver.get(&sent.metadata);
            assert_eq!(got["kind"], "PeerFailed", "{got}");
            works(&alive, &receiver);
            eventually((2, Some(2)), || receiver.free());
        });
    }
}

#[test]
fn a_killed_receiver_costs_its_sender_no_slot() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let sender = start(&[&["--lease-ms", "1500", "--quarantine-ms", "500"], way].concat());
            let (dead, alive) = (start(way), start(way));
            works(&sender, &dead);
            let sent = sender.put(json!({"size": SLOT, "fill": 3}));
            dead.signal(Signal::STOP);
            dead.send_get(&sent.metadata);
            dead.kill();
            let ended = sender.wait(sent.tag);
            assert!(
                ["PeerFailed", "TimedOut"].map(Value::from).contains(&ended["kind"]),
                "{ended}"
            );
            eventually((2, Some(2)), || sender.free());
            works(&sender, &alive);
        });
    }
}

#[test]
fn a_sender_restarts_on_its_port_at_once_and_its_past_is_stale() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let receiver = start(way);
            let mut sender = start(way);
            let address = sender.session_id().to_owned();
            let mut descriptors = None;
            for round in 0..5 {
                let lost = sender.put(json!({"size": 1000, "seed": round}));
                works(&sender, &receiver);
                sender.kill();
                sender = start(&[&["--listen", &address], way].concat());
                assert_eq!(sender.session_id(), address);
                let got = receiver.get(&lost.metadata);
                assert_eq!(got["kind"], "Stale", "{got}");
                works(&sender, &receiver);
                let most = *descriptors.get_or_insert_with(|| receiver.descriptors());
                eventually(true, || receiver.descriptors() <= most);
            }
        });
    }
}

#[test]
fn an_unread_put_ends_with_its_lease_and_is_then_stale() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let sender = start(&[&["--lease-ms", "150"], way].concat());
            let receiver = start(way);
            works(&sender, &receiver);
            let sent = sender.put(json!({"text": "nobody comes"}));
            let ended = sender.wait(sent.tag);
            assert_eq!(ended["kind"], "TimedOut", "{ended}");
            assert_eq!(sender.wait(sent.tag)["kind"], "TimedOut", "asked again");
            assert_eq!(receiver.get(&sent.metadata)["kind"], "Stale");
            // Whether or not anybody waits for them.
            (0..20).for_each(|fill| drop(sender.put(json!({"size": 9, "fill": fill}))));
            eventually((2, Some(2)), || sender.free());
        });
    }
}

#[test]
fn a_frozen_sender_holds_a_get_no_longer_than_its_timeout() {
    within(WATCHDOG, || {
        let (frozen, receiver) = (start(&["--no-local"]), start(&["--no-local"]));
        works(&frozen, &receiver);
        let sent = frozen.put(json!({"size": SLOT, "seed": 4}));
        frozen.signal(Signal::STOP);
        let metadata = &sent.metadata;
        let got = receiver.ask(json!({"cmd": "get", "metadata": metadata, "timeout": 0.3}));
        assert_eq!(got["kind"], "TimedOut", "{got}");

        let get = receiver.send_get(metadata);
        eventually(json!(1), || receiver.health()["reading"].clone());
        let begun = Instant::now();
        assert_eq!(receiver.ask(json!({"cmd": "abort", "of": get}))["ok"], true);
        let got = receiver.answer(get);
        assert_eq!(got["kind"], "Aborted", "{got}");
        assert!(begun.elapsed() < READ_TIMEOUT / 2, "it went on to its own deadline");
        frozen.signal(Signal::CONT);
        eventually((2, Some(2)), || receiver.free());
        works(&frozen, &receiver);
    });
}

#[test]
fn a_frozen_sender_does_not_keep_its_receiver_from_quitting() {
    within(WATCHDOG, || {
        let (frozen, receiver) = (start(&[]), start(&[]));
        let sent = frozen.put(json!({"size": SLOT, "seed": 4}));
        frozen.signal(Signal::STOP);
        let get = receiver.send_get(&sent.metadata);
        eventually(json!(1), || receiver.health()["reading"].clone());
        let begun = Instant::now();
        receiver.send_line(r#"{"cmd":"quit"}"#);
        let got = receiver.answer(get);
        assert_eq!(got["kind"], "Closed", "{got}");
        assert_eq!(receiver.other(), json!({"event": "bye"}));
        assert!(begun.elapsed() < READ_TIMEOUT / 2, "it waited for the read's own deadline");
    });
}

/// One put, from end to end.
#[track_caller]
fn works(from: &Peer, to: &Peer) {
    let sent = from.put(json!({"size": 5000, "seed": 77}));
    let got = to.get(&sent.metadata);
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    let ended = from.wait(sent.tag);
    assert_eq!(ended["ok"], true, "{ended}");
}
