//! A Python process on the real Mooncake engine is a peer in both directions.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use serde_json::{Value, json};

use crate::common::{
    Random, eventually,
    peer::{Peer, Sent},
    within,
};

const SLOT: u64 = 1 << 20;
const TRANSFERS: usize = 200;
const WATCHDOG: Duration = Duration::from_secs(300);

#[test]
fn python_gets_what_we_put() {
    let Some((ours, python)) = pair("1") else { return };
    within(WATCHDOG, move || {
        one_by_one(&ours, &python, 0xa11ce);
        all_credits_are_back(&ours, &python, 1);
    });
}

#[test]
fn we_get_what_python_puts() {
    let Some((ours, python)) = pair("1") else { return };
    within(WATCHDOG, move || {
        one_by_one(&python, &ours, 0xb0b);
        all_credits_are_back(&ours, &python, 1);
    });
}

#[test]
fn both_ways_at_once_with_several_under_way() {
    let Some((ours, python)) = pair("4") else { return };
    within(WATCHDOG, move || {
        let (ours, python) = (Arc::new(ours), Arc::new(python));
        let (from, to) = (Arc::clone(&python), Arc::clone(&ours));
        let towards_us = thread::spawn(move || several_at_once(&from, &to, 0xca401));
        several_at_once(&ours, &python, 0xdaff0d);
        towards_us.join().unwrap();
        all_credits_are_back(&ours, &python, 4);
    });
}

fn pair(credits: &str) -> Option<(Peer, Peer)> {
    let flags = ["--slot-size", "1048576", "--credits", credits];
    let python = Peer::python(&[&flags[..], &["--engine-id", "python"]].concat())?;
    Some((Peer::start(&[&flags[..], &["--engine-id", "ours"]].concat()), python))
}

/// From one byte to the whole slot, the edges first.
fn sizes(seed: u64) -> impl Iterator<Item = Value> {
    let mut random = Random::new(seed);
    let edges = [1, 2, 4095, 4096, 4097, 65_536, SLOT - 1, SLOT];
    (0..TRANSFERS).map(move |i| {
        let size = edges.get(i).copied().unwrap_or_else(|| random.size(SLOT).max(1));
        json!({"size": size, "seed": i})
    })
}

fn one_by_one(from: &Peer, to: &Peer, seed: u64) {
    for bytes in sizes(seed) {
        let sent = from.put(bytes);
        let got = to.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
        let ended = from.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    }
}

/// The sender's credits are the only bound: eight puts are asked for ahead of the gets.
fn several_at_once(from: &Peer, to: &Peer, seed: u64) {
    let put = |bytes| from.send(json!({"cmd": "put", "bytes": bytes}));
    let finish = |(sent, get): (Sent, u64)| {
        let got = to.answer(get);
        assert_eq!(got["sha256"], *sent.sha256, "{got}");
        let ended = from.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    };
    let mut sizes = sizes(seed);
    let mut puts: Vec<u64> = sizes.by_ref().take(8).map(put).collect();
    let mut gets = VecDeque::new();
    while !puts.is_empty() {
        let sent = from.first_sent(&mut puts);
        let get = to.send_get(&sent.metadata);
        gets.push_back((sent, get));
        puts.extend(sizes.next().map(put));
        if gets.len() > 4 {
            finish(gets.pop_front().unwrap());
        }
    }
    gets.into_iter().for_each(finish);
}

fn all_credits_are_back(ours: &Peer, python: &Peer, credits: u64) {
    eventually((credits, Some(credits)), || ours.free());
    eventually((credits, None), || python.free());
}
