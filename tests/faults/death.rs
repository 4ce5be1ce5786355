//! Peers that die, freeze, come back or were never there.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::channel::unbounded;
use mooncake_relay::{Config, Error};
use serde_json::json;

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        eventually, moved_to,
        peer::Sent,
        place::{Blackhole, Net, Place},
        proxy::{Ending, Proxy},
    },
    on::{AtRest, On, Peer, cases, metadata_of},
};

cases! {
    Processes:
        c1_a_peer_that_is_killed_and_restarted_on_its_port_is_read_at_first_try = 300,
        c6_a_killed_sender_fails_what_reads_from_it_and_nothing_else,
        c6_a_frozen_sender_holds_a_get_no_longer_than_its_timeout,
        c6_a_blackholed_address_is_an_error_and_no_wait_for_ever = 300,
        c6_an_address_without_a_route_is_an_error_at_once,
        c6_dead_and_frozen_peers_disturb_no_transfer_of_healthy_ones;
    Proxy:
        c1_eight_threads_find_a_restarted_peer_with_few_connections,
        c3_a_connection_that_is_reset_is_one_error_and_no_verdict,
        c3_a_port_that_refuses_is_an_error_until_it_listens_again,
        c4_connections_that_were_closed_while_idle_cost_no_transfer = 300,
        c6_a_sender_killed_in_the_middle_of_a_read_is_an_error_at_once,
        c6_a_sender_frozen_in_the_middle_of_a_read_ends_it_at_its_timeout;
}

/// What a case waits for that must not pass by itself.
const FOREVER: Duration = Duration::from_secs(60 * 60);
const SLOT: u64 = 256 << 10;
/// More than all kernels on the way hold of it.
const LONG: usize = 32 << 20;
/// Where a long read is held up.
const MIDDLE: u64 = 1 << 20;

fn small() -> Config {
    Config::default().with_slot_size(SLOT as usize).with_read_timeout(FOREVER)
}

fn c1_a_peer_that_is_killed_and_restarted_on_its_port_is_read_at_first_try(on: &On) {
    // What is remembered of the one before is wrong in more than its instance.
    let layouts: [&[&str]; 3] =
        [&[], &["--slot-size", "8192", "--credits", "7"], &["--slot-size", "1048576"]];
    // Where nobody else takes a port while nobody listens there.
    let place = Net::new().map_or_else(Place::here, |net| net.place());
    let receiver = on.peer_in(&place, &[]);
    let mut sender = on.peer_in(&place, &[]);
    sender.works_with(&receiver);
    let address = sender.session_id().to_owned();
    let mut descriptors = None;
    for round in 0..20 {
        let lost = sender.put(json!({"size": 1000, "seed": round}));
        sender.kill();
        sender = on.peer_in(&place, &[&["--listen", &address], layouts[round % 3]].concat());
        assert_eq!(sender.session_id(), address);
        let past_is_stale = || {
            let got = receiver.get(&lost.metadata);
            assert_eq!(got["kind"], "Stale", "{got}");
        };
        // Whichever comes first.
        if round % 2 == 0 {
            sender.works_with(&receiver);
            past_is_stale();
        } else {
            past_is_stale();
            sender.works_with(&receiver);
        }
        assert_eq!(receiver.health()["peers"].as_array().unwrap().len(), 1);
        let most = *descriptors.get_or_insert_with(|| receiver.descriptors());
        eventually(true, || receiver.descriptors() <= most);
    }
    let health = receiver.health();
    assert_eq!(health["peers"][0]["state"], "good", "{health}");
}

fn c1_eight_threads_find_a_restarted_peer_with_few_connections(on: &On) {
    const THREADS: usize = 8;
    let proxy = Proxy::new();
    let config = small().with_credits(THREADS as u32);
    let receiver = on.relay(&config);
    for round in 0..5 {
        let sender = on.behind(&proxy, &config);
        sender.works_with(&receiver);
        drop(sender);
        let sender = on.behind(&proxy, &config);
        let before = [proxy.control(), proxy.data()].map(|port| port.seen().accepted);
        let puts: Vec<_> = (0..THREADS).map(|n| sender.sends(&[round, n as u8])).collect();
        let begin = Barrier::new(THREADS);
        thread::scope(|scope| {
            for (n, (metadata, _)) in puts.iter().enumerate() {
                let (receiver, begin) = (&receiver, &begin);
                scope.spawn(move || {
                    let mut dest = [0; 2];
                    begin.wait();
                    receiver.get_into(metadata, &mut dest, FOREVER).unwrap();
                    assert_eq!(dest, [round, n as u8]);
                });
            }
        });
        for (_, token) in puts {
            drop(token.wait().unwrap());
        }
        let after = [proxy.control(), proxy.data()].map(|port| port.seen().accepted);
        let [asked, opened] = [0, 1].map(|port| after[port] - before[port]);
        // One asks for all; those that came while it asked may ask once more.
        assert!(asked <= 2, "{asked} times the peer was asked what it is");
        assert!(opened <= THREADS as u64, "{opened} connections");
        assert_eq!(receiver.health().peers.len(), 1);
    }
}

fn c3_a_connection_that_is_reset_is_one_error_and_no_verdict(on: &On) {
    for of_data in [true, false] {
        let proxy = Proxy::new();
        let (sender, receiver) = (on.behind(&proxy, &small()), on.relay(&small()));
        let port = if of_data { proxy.data() } else { proxy.control() };
        port.end_next(1, Ending::Reset);
        fails(&sender, &receiver);
        assert_eq!(port.seen().ended, 1);
        is_good_at_once_and_later(&sender, &receiver);
    }
}

fn c3_a_port_that_refuses_is_an_error_until_it_listens_again(on: &On) {
    for of_data in [true, false] {
        let proxy = Proxy::new();
        let (sender, receiver) = (on.behind(&proxy, &small()), on.relay(&small()));
        let port = if of_data { proxy.data() } else { proxy.control() };
        port.refuse();
        let (metadata, token) = sender.sends(b"out of reach");
        for _ in 0..3 {
            let got = receiver.get(&metadata).unwrap().wait();
            assert!(matches!(got, Err(Error::PeerFailed { .. })), "{got:?}");
        }
        port.accept();
        // The failures are told as soon as somebody listens, and they end the put.
        let ended = token.wait();
        assert!(matches!(ended, Err(Error::PeerFailed { .. })), "{ended:?}");
        is_good_at_once_and_later(&sender, &receiver);
    }
}

/// A get that fails by its peer, of which the sender hears.
#[track_caller]
fn fails(sender: &AtRest, receiver: &AtRest) {
    let (metadata, token) = sender.sends(b"in vain");
    let mut canary = Canary::new(7);
    let got = receiver.get_into(&metadata, canary.dest(), FOREVER);
    assert!(matches!(got, Err(Error::PeerFailed { .. })), "{got:?}");
    canary.is_untouched();
    let ended = token.wait();
    assert!(matches!(ended, Err(Error::PeerFailed { .. })), "{ended:?}");
}

#[track_caller]
fn is_good_at_once_and_later(sender: &AtRest, receiver: &AtRest) {
    sender.works_with(receiver);
    // Time passes, in which nothing may be held against the peer.
    thread::sleep(Duration::from_secs(1));
    sender.works_with(receiver);
    let health = receiver.health();
    assert_eq!((health.peers.len(), health.peers[0].state), (1, "good"));
    assert!(health.peers[0].last_error.is_some(), "it is remembered, for people");
}

fn c4_connections_that_were_closed_while_idle_cost_no_transfer(on: &On) {
    for ending in [Ending::Close, Ending::HalfClose, Ending::Reset] {
        let proxy = Proxy::new();
        // Long beside any pause in a transfer.
        proxy.data().end_idle(Duration::from_secs(2), ending);
        let (sender, receiver) = (on.behind(&proxy, &small()), on.relay(&small()));
        for cycle in 0..4 {
            sender.works_with(&receiver);
            assert_eq!(receiver.health().counters.relay.gets_done, cycle + 1);
            let accepted = proxy.data().seen().accepted;
            proxy.data().until(|seen| seen.ended >= accepted);
        }
        assert!(proxy.data().seen().ended >= 4, "{ending:?}: none was kept");
        assert_eq!(receiver.health().counters.relay.gets_failed, 0, "{ending:?}");
        assert_eq!(receiver.health().counters.relay.notes_untaken, 0, "{ending:?}");
    }
}

fn c6_a_killed_sender_fails_what_reads_from_it_and_nothing_else(on: &On) {
    let (dead, alive, receiver) = (on.peer(&[]), on.peer(&[]), on.peer(&[]));
    dead.works_with(&receiver);
    let sent = dead.put(json!({"size": SLOT, "fill": 2}));
    dead.stop(); // so that the read cannot be over before the kill
    let get = receiver.send_get(&sent.metadata);
    dead.kill();
    let got = receiver.answer(get);
    // From the same host's memory it may have been read in full before the kill.
    assert!(got["ok"] == true || got["kind"] == "PeerFailed", "{got}");
    // Its memory may be read until its death is noticed.
    eventually(json!("PeerFailed"), || {
        let got = receiver.get(&sent.metadata);
        assert!(got["ok"] == false || got["sha256"] == *sent.sha256, "{got}");
        got["kind"].clone()
    });
    alive.works_with(&receiver);
}

fn c6_a_frozen_sender_holds_a_get_no_longer_than_its_timeout(on: &On) {
    let (frozen, receiver) = (on.peer(&[]), on.peer(&[]));
    frozen.works_with(&receiver);
    let sent = frozen.put(json!({"size": SLOT, "seed": 4}));
    frozen.stop();
    // Who has mapped its memory does not need it; who is yet to meet it does.
    let receiver = if receiver.reads_memory() { on.peer(&[]) } else { receiver };
    let metadata = &sent.metadata;
    let got = receiver.ask(json!({"cmd": "get", "metadata": metadata, "timeout": 0.3}));
    assert_eq!(got["kind"], "TimedOut", "{got}");

    let get = receiver.send_get(metadata);
    eventually(json!(1), || receiver.health()["reading"].clone());
    let begun = Instant::now();
    assert_eq!(receiver.ask(json!({"cmd": "abort", "of": get}))["ok"], true);
    let got = receiver.answer(get);
    assert_eq!(got["kind"], "Aborted", "{got}");
    let own_limit = Config::default().read_timeout;
    assert!(begun.elapsed() < own_limit / 2, "it went on to its own deadline");
    frozen.resume();
    eventually(json!(0), || receiver.health()["reading"].clone());
    frozen.works_with(&receiver);
}

fn c6_a_sender_killed_in_the_middle_of_a_read_is_an_error_at_once(on: &On) {
    let proxy = Proxy::new();
    let (sender, sent) = long_put_behind(on, &proxy);
    let receiver = on.relay(&small().with_slot_size(LONG));
    let get = receiver.get(&metadata_of(&sent)).unwrap();
    let (tx, rx) = unbounded();
    get.attach(&tx, 0);
    proxy.data().until(|seen| seen.bytes_down == MIDDLE);
    assert!(rx.is_empty());
    sender.kill();
    proxy.data().resume(); // with what was under way, and then the end
    let got = rx.recv().unwrap().result;
    assert!(matches!(got, Err(Error::PeerFailed { .. })), "{got:?}");
    eventually((2, 0), || (receiver.health().receive_free, receiver.health().reading));
    let other = on.relay(&small());
    other.works_with(&receiver);
}

fn c6_a_sender_frozen_in_the_middle_of_a_read_ends_it_at_its_timeout(on: &On) {
    // Far longer than it needs to get to the middle.
    let timeout = Duration::from_secs(3);
    let proxy = Proxy::new();
    let (sender, sent) = long_put_behind(on, &proxy);
    let receiver = on.relay(&small().with_slot_size(LONG));
    let begun = Instant::now();
    let get = receiver.get_timeout(&metadata_of(&sent), timeout).unwrap();
    let (tx, rx) = unbounded();
    get.attach(&tx, 0);
    proxy.data().until(|seen| seen.bytes_down == MIDDLE);
    sender.stop();
    proxy.data().resume();
    let got = rx.recv().unwrap().result;
    assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
    assert!(begun.elapsed() >= timeout);
    eventually((2, 0), || (receiver.health().receive_free, receiver.health().reading));
    sender.resume();
    // It hears of the failure, and serves again.
    let ended = sender.wait(sent.tag);
    assert_eq!(ended["kind"], "PeerFailed", "{ended}");
    let sent = sender.put(json!({"size": 5000, "seed": 7}));
    drop(receiver.get(&metadata_of(&sent)).unwrap().wait().unwrap());
    assert_eq!(sender.wait(sent.tag)["ok"], true);
}

/// A peer with a put of `LONG` bytes, of which the proxy forwards no more than `MIDDLE`.
fn long_put_behind(on: &On, proxy: &Proxy) -> (Peer, Sent) {
    let size = LONG.to_string();
    let sender = on.peer(&["--advertise", &proxy.advertise(), "--slot-size", &size]);
    proxy.forward_to_peer(&sender);
    let sent = sender.put(json!({"size": LONG, "fill": 3}));
    proxy.data().down().stall_after(MIDDLE);
    (sender, sent)
}

fn c6_a_blackholed_address_is_an_error_and_no_wait_for_ever(on: &On) {
    let (sender, receiver) = (on.relay(&small()), on.relay(&small()));
    let blackhole = Blackhole::new();
    let (metadata, token) = sender.sends(b"x");
    let lost = moved_to(&blackhole.session_id(), &metadata);
    let got = receiver.get_timeout(&lost, Duration::from_millis(200)).unwrap().wait();
    assert!(matches!(got, Err(Error::TimedOut)), "{got:?}");
    // A get with all the time in the world ends when the connect does.
    let got = receiver.get(&lost).unwrap().wait();
    assert!(matches!(got, Err(Error::PeerFailed { .. })), "{got:?}");
    drop(receiver.get(&metadata).unwrap().wait().unwrap());
    drop(token.wait().unwrap());
}

fn c6_an_address_without_a_route_is_an_error_at_once(on: &On) {
    let Some(net) = Net::new() else { return };
    if net.blackhole("10.66.0.0/16").is_none() {
        return;
    }
    let (sender, receiver) = (on.peer_in(&net, &[]), on.peer_in(&net, &[]));
    let sent = sender.put(json!({"size": 1000, "seed": 1}));
    let mut lost = sent.metadata.clone();
    lost["session_id"] = "10.66.0.1:7000".into();
    let got = receiver.get(&lost);
    assert_eq!(got["kind"], "PeerFailed", "{got}");
    assert_eq!(receiver.get(&sent.metadata)["ok"], true);
    assert_eq!(sender.wait(sent.tag)["ok"], true);
}

fn c6_dead_and_frozen_peers_disturb_no_transfer_of_healthy_ones(on: &On) {
    let (dead, frozen) = (on.peer(&[]), on.peer(&[]));
    let (healthy, receiver) = (on.relay(&small()), on.relay(&small().with_transfer_threads(2)));
    let sent = [&dead, &frozen].map(|peer| peer.put(json!({"size": 1000, "seed": 3})));
    dead.kill();
    frozen.stop();
    let bad = sent.each_ref().map(metadata_of);
    let pattern = Pattern::new(&mut Random::new(0xdead), SLOT as usize);
    let (over, failed) = (AtomicBool::new(false), unbounded());
    thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                for metadata in &bad {
                    let timeout = Duration::from_millis(20);
                    let get = receiver.get_timeout(metadata, timeout).unwrap();
                    get.attach(&failed.0, 0);
                    let got = failed.1.recv().unwrap().result;
                    let expected = matches!(got, Err(Error::PeerFailed { .. } | Error::TimedOut));
                    assert!(expected, "{got:?}");
                }
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let (tx, rx) = unbounded();
        for round in 0..300 {
            let len = 1 + round * 811;
            let (metadata, token) = healthy.sends(pattern.of(round, len));
            receiver.get(&metadata).unwrap().attach(&tx, 0);
            let got = rx.recv().unwrap().result.unwrap();
            assert!(got[..] == *pattern.of(round, len), "bytes of something else");
            drop(token.wait().unwrap());
        }
        over.store(true, Ordering::Relaxed);
    });
    let counters = receiver.health().counters.relay;
    assert_eq!(counters.gets_done, 300);
    assert!(counters.gets_failed >= 2);
    frozen.resume();
    let ended = frozen.wait(sent[1].tag);
    assert_eq!(ended["kind"], "PeerFailed", "{ended}");
}
