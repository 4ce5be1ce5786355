//! Few chunks, and peers that are slow, silent or no relays of ours.

use std::{io::Write, net::TcpStream, thread, time::Duration};

use serde_json::{Value, json};

use crate::{
    CHUNK, Case, SLOT, at_rest,
    common::eventually,
    cuda, far, host, leaves_nothing, put,
    raw::{DONE, READ_V1, READ_V2, WRITE_V2, header, take},
    start,
    station::{Plan, bytes},
    tell, works,
};

pub(crate) const CASES: &[Case] = &[
    ("readers_that_take_nothing_keep_no_chunk_from_others", readers_that_take_nothing),
    ("senders_that_send_nothing_keep_no_chunk_from_others", senders_that_send_nothing),
    ("a_real_engine_s_reads_are_served", a_real_engine_s_reads_are_served),
    ("a_quarantine_ends_a_stuck_read", a_quarantine_ends_a_stuck_read),
];

fn data(of: &crate::common::peer::Peer) -> TcpStream {
    crate::raw::connect(of.ready()["data"].as_str().unwrap().parse().unwrap())
}

fn range(metadata: &Value) -> (u64, u64) {
    let number = |value: &Value| value.as_u64().unwrap();
    (number(&metadata["transfer_info"]["size"]), number(&metadata["mooncake"]["buffer_ptr"]))
}

/// Larger than all the buffers between two sockets.
const LARGE: usize = 24 << 20;

fn readers_that_take_nothing() {
    let plan = Plan { slot_size: LARGE, staging: Some((CHUNK, 2)), credits: 2, ..cuda() };
    let (sender, receiver) = (start(&far(plan)), start(&host()));
    let large = put(&sender, LARGE, 1);
    let (len, addr) = range(&large.metadata);
    let mut stuck: Vec<_> = (0..4).map(|_| data(&sender)).collect();
    for stream in &mut stuck {
        stream.write_all(&header(READ_V2, len, addr)).unwrap();
        // It is in the middle of the answer.
        assert_eq!(take(stream, 8), DONE);
    }
    for seed in 2..6 {
        works(&sender, &receiver, SLOT, seed);
    }
    // Whoever goes on gets the rest, from where it was.
    let expected = bytes(1, LARGE);
    for stream in &mut stuck {
        assert!(take(stream, LARGE) == expected, "bytes of something else");
    }
    drop(stuck);
    leaves_nothing(sender);
}

fn senders_that_send_nothing() {
    let plan = Plan { staging: Some((CHUNK, 2)), ..cuda() };
    let (receiver, good) = (start(&far(Plan { slot_size: LARGE, ..plan })), start(&host()));
    let begun = || {
        let asked = json!({"do": "calls", "name": "cuMemcpyHtoDAsync_v2"});
        tell(&receiver, asked)["calls"].as_u64().unwrap()
    };
    // As many as there are chunks.
    let stuck: Vec<_> = (0..2)
        .map(|n| {
            let peer = start(&Plan { slot_size: LARGE, ..host() });
            works(&peer, &receiver, SLOT, 1);
            let (before, sent) = (begun(), put(&peer, LARGE, 20 + n));
            let get = receiver.send_get(&sent.metadata);
            // It stops in the middle.
            eventually(true, || begun() > before + 2);
            peer.stop();
            // What was on its way has come, and nothing does any more.
            eventually(true, || {
                let before = begun();
                thread::sleep(Duration::from_millis(100)); // between two looks, not instead of one
                begun() == before
            });
            (peer, sent, get)
        })
        .collect();
    for seed in 3..6 {
        works(&good, &receiver, SLOT, seed);
    }
    for (peer, sent, get) in stuck {
        assert!(!receiver.has_answered(get));
        peer.resume();
        assert_eq!(receiver.answer(get)["sha256"], sent.sha256);
        assert_eq!(peer.wait(sent.tag)["ok"], true);
    }
    at_rest(&receiver, 4);
    leaves_nothing(receiver);
}

fn a_real_engine_s_reads_are_served() {
    let sender = start(&cuda());
    let sent = put(&sender, SLOT, 1);
    let ((len, addr), expected) = (range(&sent.metadata), bytes(1, SLOT));
    let mut stream = data(&sender);
    stream.write_all(&header(READ_V2, len, addr)).unwrap();
    assert_eq!(take(&mut stream, 8), DONE);
    assert!(take(&mut stream, SLOT) == expected, "bytes of something else");
    // A part of it, not on any boundary, and another right behind.
    stream.write_all(&header(READ_V1, 5, addr + 77)).unwrap();
    stream.write_all(&header(READ_V1, CHUNK as u64 + 9, addr + 1)).unwrap();
    assert_eq!(take(&mut stream, 5), expected[77..82]);
    assert!(take(&mut stream, CHUNK + 9) == expected[1..CHUNK + 10], "bytes of something else");
    // Nobody writes there.
    stream.write_all(&header(WRITE_V2, 8, addr)).unwrap();
    assert_eq!(take(&mut stream, 8), crate::raw::REFUSED);
    let aborted = sender.ask(json!({"cmd": "abort", "metadata": sent.metadata}));
    assert_eq!(aborted["ok"], true, "{aborted}");
    at_rest(&sender, 4);
    leaves_nothing(sender);
}

fn a_quarantine_ends_a_stuck_read() {
    let plan = Plan { slot_size: LARGE, credits: 1, quarantine_ms: 300, ..cuda() };
    let sender = start(&far(plan));
    let sent = put(&sender, LARGE, 1);
    let (len, addr) = range(&sent.metadata);
    let mut stream = data(&sender);
    stream.write_all(&header(READ_V2, len, addr)).unwrap();
    assert_eq!(take(&mut stream, 8), DONE);
    sender.ask(json!({"cmd": "abort", "metadata": sent.metadata}));
    assert_eq!(sender.wait(sent.tag)["kind"], "Aborted");
    at_rest(&sender, 1);
    let got = crate::raw::rest(&mut stream);
    assert!(got.len() < LARGE && got == bytes(1, LARGE)[..got.len()], "{} bytes", got.len());
    leaves_nothing(sender);
}
