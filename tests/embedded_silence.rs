//! Peers of the embedded engine's server that fall silent.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod raw;

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{EmbeddedBuilder, EmbeddedEngine, Engine, Error};

use self::raw::*;

const STALL: Duration = Duration::from_millis(400);

fn impatient(stall: Duration) -> EmbeddedBuilder {
    EmbeddedEngine::builder("127.0.0.1:0").allow_writes(true).stall_timeout(stall)
}

fn published(stall: Duration, len: usize) -> Served {
    let served = Served::with(impatient(stall), len);
    served.engine.publish(&served.publication);
    served
}

fn read(data: &mut TcpStream, served: &Served) {
    data.write_all(&header(READ_V2, 4, served.addr())).unwrap();
    assert_eq!(take(data, 12), [DONE, &expected(0..4)].concat());
}

#[test]
fn a_connection_that_stops_in_the_middle_of_a_request_is_closed() {
    watched(|| {
        let served = published(STALL, 4096);
        let (addr, identity) = (served.addr(), served.publication.identity());
        let long = header(NOTIFY, 60_000, 0);
        let halves = [
            header(READ_V2, 4, addr)[..1].to_vec(),
            header(READ_V2, 4, addr)[..23].to_vec(),
            identified(&identity, 4, addr)[..55].to_vec(),
            note("a_b", "transfer_complete")[..40].to_vec(),
            [&long[..], &[b'x'; 40_000]].concat(),
            long,
            [&header(WRITE_V2, 4096, addr)[..], &[1; 100]].concat(),
            header(WRITE_V1, 4096, addr),
        ];
        let mut stopped: Vec<_> = halves.iter().map(|_| served.data()).collect();
        for data in &mut stopped {
            read(data, &served); // one that has behaved so far is no exception
        }
        for (data, half) in stopped.iter_mut().zip(&halves) {
            data.write_all(half).unwrap();
        }
        for data in &mut stopped {
            assert_eq!(rest(data), b"");
        }
        // What they would have written is nobody's any more.
        served.retract();
    });
}

#[test]
fn a_connection_that_is_idle_between_two_requests_stays_open() {
    watched(|| {
        let served = published(STALL, 4096);
        let (mut fresh, mut used) = (served.data(), served.data());
        read(&mut used, &served);
        thread::sleep(STALL * 4); // nothing happens
        read(&mut fresh, &served);
        read(&mut used, &served);
    });
}

#[test]
fn g5_a_request_that_comes_slowly_and_goes_on_is_served() {
    watched(|| {
        // All of it takes longer than that; between two parts there is much less time.
        let stall = Duration::from_secs(2);
        let served = published(stall, 4096);
        let mut tries = 0;
        while !asks_slowly(&served, stall) {
            tries += 1;
            assert!(tries < 10, "too slow a machine to say anything");
        }
    });
}

/// Whether the pauses were as short as they should be.
fn asks_slowly(served: &Served, stall: Duration) -> bool {
    let (mut data, mut longest) = (served.data(), Duration::ZERO);
    for part in header(READ_V2, 4, served.addr()).chunks(3) {
        let begun = Instant::now();
        let _ = data.write_all(part); // it may be closed
        thread::sleep(Duration::from_millis(300)); // it is slow
        longest = longest.max(begun.elapsed());
    }
    let mut answer = vec![0; 12];
    let answered = data.read_exact(&mut answer).is_ok();
    let in_time = longest < stall / 2;
    assert!(answered || !in_time, "it was closed, and the longest pause was {longest:?}");
    if answered {
        assert_eq!(answer, [DONE, &expected(0..4)].concat());
    }
    in_time
}

#[test]
fn a_reader_of_a_published_slot_may_pause_for_as_long_as_the_slots_owner_lets_it() {
    const LEN: usize = 32 << 20; // more than the sockets hold
    watched(|| {
        let served = published(STALL, LEN);
        let mut data = served.data();
        data.write_all(&header(READ_V2, LEN as u64, served.addr())).unwrap();
        assert_eq!(take(&mut data, 8), DONE);
        thread::sleep(STALL * 4); // it does not read on
        assert!(take(&mut data, LEN) == expected(0..LEN), "all of it");
    });
}

#[test]
fn a_peer_that_takes_no_answer_is_closed() {
    watched(|| {
        let served = published(STALL, 4096);
        let mut data = served.data();
        data.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        // Answers that no put is needed for: eight bytes each.
        let stamp = served.publication.stamp_span().addr();
        let many = header(READ_V1, 8, stamp).repeat(1000);
        let mut sent = 0;
        // A server that does not take them for a while is busy, or has no room for its answers: which
        // of the two, it says by the end.
        let closed = loop {
            match data.write(&many[sent % many.len()..]) {
                Ok(len) => sent += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => break error.kind(),
            }
        };
        assert!(matches!(closed, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{closed}");
        eventually("closed", || served.counter("connections_open") == 0);
        let _ = data.read(&mut [0; 64]);
        served.is_alive();
    });
}

#[test]
fn patience_without_any_time_is_refused_by_name() {
    let builder = || EmbeddedEngine::builder("127.0.0.1:0");
    for (expected, builder) in [
        ("stall_timeout", builder().stall_timeout(Duration::ZERO)),
        ("connect_timeout", builder().connect_timeout(Duration::ZERO)),
    ] {
        match builder.bind() {
            Err(Error::Config { field, .. }) => assert_eq!(field, expected),
            other => panic!("{other:?}"),
        }
    }
    let for_ever = builder().stall_timeout(Duration::MAX).connect_timeout(Duration::MAX);
    for_ever.bind().unwrap();
}
