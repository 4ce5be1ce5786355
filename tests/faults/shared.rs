//! I: memory that two processes of one host share, or could.

use std::{fs, thread, time::Duration};

use mooncake_relay::Config;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde_json::{Value, json};

use crate::{
    common::{Random, eventually, place::Place},
    on::{On, Peer, cases, metadata_of},
};

cases! {
    Processes:
        i1_a_small_and_full_dev_shm_is_no_limit,
        i2_peers_that_are_killed_leave_no_memory_behind_and_take_nobody_elses = 120,
        i4_two_processes_of_one_address_read_each_other_rightly = 300,
        i6_who_cannot_be_traced_is_read_all_the_same,
        i9_memory_has_no_name_that_anybody_could_remove;
}

fn i1_a_small_and_full_dev_shm_is_no_limit(on: &On) {
    const SMALL: usize = 4 << 20;
    let size = (2 * SMALL).to_string();
    let Some(place) = Place::with_dev_shm(SMALL) else { return };
    let flags = ["--slot-size", &*size];
    let peers = [(); 2].map(|()| on.peer_in(&place, &flags));
    let moves = |seed| {
        for (from, to) in [(&peers[0], &peers[1]), (&peers[1], &peers[0])] {
            let sent = from.put(json!({"size": 2 * SMALL, "seed": seed}));
            let got = to.get(&sent.metadata);
            assert_eq!(got["sha256"], *sent.sha256, "{got}");
            assert_eq!(from.wait(sent.tag)["ok"], true);
        }
    };
    moves(1);
    // Each is in a namespace of its own.
    for peer in &peers {
        let file = format!("/proc/{}/root/dev/shm/full", peer.pid());
        assert!(fs::write(&file, vec![1; SMALL + 1]).is_err(), "there was room left");
    }
    moves(2);
}

/// Entries of /dev/shm that a relay might have made.
fn in_dev_shm() -> usize {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().contains("mooncake")).count()
}

/// Whether a local socket of that name is there.
fn is_there(socket: &str) -> bool {
    fs::read_to_string("/proc/net/unix").unwrap().contains(socket)
}

fn i2_peers_that_are_killed_leave_no_memory_behind_and_take_nobody_elses(on: &On) {
    let before = in_dev_shm();
    let (alive, receiver) = (on.peer(&[]), on.peer(&[]));
    alive.works_with(&receiver);
    let mut random = Random::new(0x12);
    for _ in 0..on.full_or(20, 10) {
        let victim = on.peer(&[]);
        let sent = victim.put(json!({"size": 200_000, "fill": 2}));
        let get = receiver.send_get(&sent.metadata);
        thread::sleep(Duration::from_micros(random.below(2000))); // when it dies is what varies
        victim.kill();
        let got = receiver.answer(get);
        assert!(got["sha256"] == *sent.sha256 || got["ok"] == false, "{got}");
        assert_eq!(in_dev_shm(), before);
        if let Some(socket) = sent.metadata["relay"]["local"]["socket"].as_str() {
            eventually(false, || is_there(socket));
        }
        // Whoever lives keeps what it has.
        alive.works_with(&receiver);
    }
}

fn i4_two_processes_of_one_address_read_each_other_rightly(on: &On) {
    const THREADS: usize = 4;
    let each = on.full_or(2000, 200) / (2 * THREADS);
    let flags = ["--credits", "8", "--transfer-threads", "2"];
    let (a, b) = (on.peer(&flags), on.peer(&flags));
    // Addresses are chosen alike in both, so that one of the other's may well be one here.
    thread::scope(|s| {
        for thread in 0..THREADS {
            for (from, to) in [(&a, &b), (&b, &a)] {
                s.spawn(move || {
                    for n in 0..each {
                        let seed = thread * each + n;
                        let sent = from.put(json!({"size": seed * 997 % 262_144, "seed": seed}));
                        let got = to.get(&sent.metadata);
                        assert_eq!(got["sha256"], *sent.sha256, "{got}");
                        assert_eq!(from.wait(sent.tag)["ok"], true);
                    }
                });
            }
        }
    });
    // Which way it was is told: all of it by one.
    for peer in [&a, &b] {
        let all = (THREADS * each) as u64;
        assert_eq!(peer.health()["counters"]["gets_done"], json!(all));
        let [local, tcp] = ["reads_local", "reads_tcp"].map(|way| reads(peer, way));
        println!("{local:?} by shared memory, {tcp:?} by TCP");
        if let (Some(local), Some(tcp)) = (local, tcp) {
            let by_flag = if on.flags(&[]).contains(&"--no-local") { tcp } else { local };
            assert_eq!((by_flag, local + tcp), (all, all));
        }
    }
}

fn reads(peer: &Peer, way: &str) -> Option<u64> {
    peer.health()["counters"].get(way).and_then(Value::as_u64)
}

fn i6_who_cannot_be_traced_is_read_all_the_same(on: &On) {
    // Of the case's own process: nobody may look into its memory or its descriptors by /proc.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap();
    let hidden = on.relay(&Config::default().with_slot_size(262_144));
    let peer = on.peer(&[]);
    for round in 0..3_u8 {
        let sent = peer.put(json!({"size": 100_000, "fill": round}));
        assert_eq!(hidden.get(&metadata_of(&sent)).unwrap().wait().unwrap()[..], [round; 100_000]);
        assert_eq!(peer.wait(sent.tag)["ok"], true);
        let (metadata, token) = hidden.sends(&[round; 100_000]);
        let got = peer.get(&serde_json::to_value(&metadata).unwrap());
        assert_eq!((&got["ok"], &got["size"]), (&json!(true), &json!(100_000)), "{got}");
        assert_eq!(token.wait().unwrap()[..], [round; 100_000]);
    }
    drop((hidden, peer));
    set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
}

fn i9_memory_has_no_name_that_anybody_could_remove(on: &On) {
    let (a, b, c) = (on.peer(&[]), on.peer(&[]), on.peer(&[]));
    let sent = [1, 2].map(|seed| a.put(json!({"size": 200_000, "seed": seed})));
    // No file that a cleaner could find is mapped: what a relay shares was never in a folder.
    let maps = fs::read_to_string(format!("/proc/{}/maps", a.pid())).unwrap();
    let named = |line: &&str| {
        line.split_whitespace().nth(1).is_some_and(|rights| rights.ends_with('s'))
            && !line.contains("/memfd:")
            && !line.contains("/dev/zero")
            && line.contains('/')
    };
    let found: Vec<_> = maps.lines().filter(named).collect();
    assert!(found.is_empty(), "{found:?}");
    for (sent, reader) in sent.iter().zip([&b, &c]) {
        let got = reader.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
        assert_eq!(a.wait(sent.tag)["ok"], true);
    }
    // Also by who comes after its first reader has gone.
    drop(b);
    a.works_with(&c);
    let late = on.peer(&[]);
    a.works_with(&late);
}
