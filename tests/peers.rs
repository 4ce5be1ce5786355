//! Processes that live, work and die.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::common::{Random, eventually, peer::Peer, within};

const SLOT: u64 = 256 << 10;
/// The default of `Config::read_timeout`.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const WATCHDOG: Duration = Duration::from_secs(600);

/// The flags for each way that bytes can go: shared memory and TCP.
const WAYS: [&[&str]; 2] = [&[], &["--no-local"]];

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
fn an_unread_put_ends_with_its_lease_and_is_then_stale() {
    for way in WAYS {
        within(WATCHDOG, move || {
            let sender = start(&[&["--lease-ms", "150"], way].concat());
            let receiver = start(way);
            // So that the two have met. A slow machine may need more than one lease for that.
            eventually(true, || {
                let sent = sender.put(json!({"size": 5000, "seed": 77}));
                let got = receiver.get(&sent.metadata);
                assert!(got["ok"] == false || got["sha256"] == *sent.sha256, "{got}");
                sender.wait(sent.tag)["ok"] == true
            });
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
fn a_frozen_sender_does_not_keep_its_receiver_from_quitting() {
    within(WATCHDOG, || {
        let (frozen, receiver) = (start(&[]), start(&[]));
        let sent = frozen.put(json!({"size": SLOT, "seed": 4}));
        frozen.stop();
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
