//! Peers of every kind, and what each pair of them must do.

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use serde_json::{Value, json};

use crate::common::{
    Random, eventually,
    peer::{Peer, RealEngine, Sent},
    place::Place,
};

const SLOT: u64 = 1 << 20;
const CREDITS: u64 = 4;
pub(crate) const WATCHDOG: Duration = Duration::from_secs(300);

/// What a peer is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Embedded,
    Mooncake,
    Python,
}

use Kind::{Embedded, Mooncake, Python};

pub(crate) fn start(
    kind: Kind,
    name: &str,
    place: &Place,
    host: &str,
    real: Option<&RealEngine>,
) -> Peer {
    let credits = CREDITS.to_string();
    let flags = ["--engine-id", name, "--slot-size", "1048576", "--credits", &credits];
    let listen = format!("{host}:0");
    let ours = |engine| {
        let own = ["--engine", engine, "--listen", &listen];
        Peer::start_in(place, &[&flags[..], &own].concat())
    };
    match kind {
        Embedded => ours("embedded"),
        Mooncake => ours("mooncake"),
        Python => {
            let real = real.expect("a Python peer has a wheel");
            Peer::python_in(place, real, &[&flags[..], &["--hostname", host]].concat())
        }
    }
}

/// So many transfers each way one by one, and as many both ways at once.
pub(crate) fn exchange(a: Peer, b: Peer, transfers: usize) {
    one_by_one(&a, &b, transfers, 0xa11ce);
    all_credits_are_back(&a, &b);
    one_by_one(&b, &a, transfers, 0xb0b);
    all_credits_are_back(&a, &b);

    let (a, b) = (Arc::new(a), Arc::new(b));
    let (from, to) = (Arc::clone(&b), Arc::clone(&a));
    let back = thread::spawn(move || several_at_once(&from, &to, transfers, 0xca401));
    several_at_once(&a, &b, transfers, 0xdaff0d);
    back.join().unwrap();
    all_credits_are_back(&a, &b);
}

/// From nothing to the whole slot, the edges first.
fn sizes(transfers: usize, seed: u64) -> impl Iterator<Item = Value> {
    let mut random = Random::new(seed);
    let edges = [0, 1, 2, 4095, 4096, 4097, 65_536, SLOT - 1, SLOT];
    (0..transfers).map(move |i| {
        let size = edges.get(i).copied().unwrap_or_else(|| random.size(SLOT).max(1));
        json!({"size": size, "seed": i})
    })
}

fn one_by_one(from: &Peer, to: &Peer, transfers: usize, seed: u64) {
    for bytes in sizes(transfers, seed) {
        let sent = from.put(bytes);
        let got = to.get(&sent.metadata);
        assert_eq!(got["sha256"], *sent.sha256, "{got} of {}", sent.metadata);
        let ended = from.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    }
}

/// The sender's credits are the only bound: eight puts are asked for ahead of the gets.
fn several_at_once(from: &Peer, to: &Peer, transfers: usize, seed: u64) {
    let put = |bytes| from.send(json!({"cmd": "put", "bytes": bytes}));
    let finish = |(sent, get): (Sent, u64)| {
        let got = to.answer(get);
        assert_eq!(got["sha256"], *sent.sha256, "{got} of {}", sent.metadata);
        let ended = from.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    };
    let mut sizes = sizes(transfers, seed);
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

/// Those to get into as well, where the peer tells: a Python peer has one kind.
fn all_credits_are_back(a: &Peer, b: &Peer) {
    for peer in [a, b] {
        eventually((CREDITS, CREDITS), || {
            let (free, receive_free) = peer.free();
            (free, receive_free.unwrap_or(CREDITS))
        });
    }
}
