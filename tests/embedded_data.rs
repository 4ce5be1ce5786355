//! The embedded engine's data port, spoken to in raw bytes.
#![cfg(feature = "embedded")]

mod raw;

use std::{
    io::{Read, Write},
    net::Shutdown,
    thread,
};

use mooncake_relay::{EmbeddedEngine, Engine, Identity, Instance, Retracted, TransferId};

use self::raw::*;

#[test]
fn reads_of_both_versions_are_served_in_turn_on_one_connection() {
    watched(|| {
        let served = Served::published(100_000);
        let mut data = served.data();
        let mut asked = Vec::new();
        let mut answered = Vec::new();
        for (opcode, start, len) in [(READ_V2, 0, 100_000), (READ_V1, 7, 9), (READ_V2, 99_999, 1)] {
            asked.extend(header(opcode, len, served.addr() + start));
            if opcode == READ_V2 {
                answered.extend(DONE);
            }
            answered.extend(expected(start as usize..(start + len) as usize));
        }
        data.write_all(&asked).unwrap();
        assert_eq!(take(&mut data, answered.len()), answered, "pipelined");
        for byte in &asked {
            data.write_all(&[*byte]).unwrap();
        }
        assert_eq!(take(&mut data, answered.len()), answered, "in pieces");
        for _ in 0..1000 {
            data.write_all(&asked[24..48]).unwrap();
            assert_eq!(take(&mut data, 9), expected(7..16));
        }
        data.write_all(&asked).unwrap();
        data.shutdown(Shutdown::Write).unwrap();
        assert_eq!(rest(&mut data), answered, "half-closed");
        assert_eq!(served.counter("bytes_served"), 3 * 100_010 + 9000);
    });
}

#[test]
fn a_range_that_is_not_wholly_published_is_refused() {
    watched(|| {
        let served = Served::published(4096);
        let (start, end) = (served.addr(), served.addr() + 4096);
        let stamp = served.publication.stamp_span().addr();
        let bad = [
            (8, start - 8),
            (8, start - 4),
            (8, end - 4),
            (8, end),
            (4097, start),
            (0, start),
            (u64::MAX, start),
            (16, u64::MAX - 8),
            (u64::MAX - start + 2, start),
            (1, 0),
            (9, stamp),
            (4, stamp),
        ];
        for (size, addr) in bad {
            let mut data = served.data();
            data.write_all(&header(READ_V2, size, addr)).unwrap();
            assert_eq!(rest(&mut data), REFUSED, "{size} at {addr:#x}");
            let mut data = served.data();
            data.write_all(&header(READ_V1, size, addr)).unwrap();
            assert_eq!(rest(&mut data), b"", "{size} at {addr:#x}");
        }
        served.retract();
        let mut data = served.data();
        data.write_all(&header(READ_V2, 8, start)).unwrap();
        assert_eq!(rest(&mut data), REFUSED, "retracted");
        assert_eq!(served.counter("refused"), 25);
    });
}

#[test]
fn unknown_opcodes_are_refused() {
    watched(|| {
        let served = Served::published(64);
        for opcode in [0x02, 0x07, 0x7f, 0x83, 0xA1, 0xA3, 0xff] {
            let mut data = served.data();
            data.write_all(&header(opcode, 8, served.addr())).unwrap();
            let answer = if opcode < 0x80 { &b""[..] } else { REFUSED };
            assert_eq!(rest(&mut data), answer, "{opcode:#x}");
        }
        served.is_alive();
    });
}

#[test]
fn the_status_of_a_refusal_arrives_although_the_body_is_still_being_sent() {
    watched(|| {
        let served = Served::published(64);
        let mut data = served.data();
        data.write_all(&header(WRITE_V2, 64 << 20, served.addr())).unwrap();
        let mut body = data.try_clone().unwrap();
        let writer = thread::spawn(move || body.write_all(&vec![1; 64 << 20]).is_err());
        assert_eq!(take(&mut data, 8), REFUSED);
        let mut more = Vec::new();
        let _ = data.read_to_end(&mut more);
        assert_eq!(more, b"");
        writer.join().unwrap();
        served.is_alive();
    });
}

#[test]
fn a_stamp_is_served_from_the_first_publication_on() {
    watched(|| {
        let served = Served::new(64);
        let span = served.publication.stamp_span();
        // SAFETY: the test's own memory, aligned, and nothing reads it at this moment.
        unsafe { span.ptr.cast::<u64>().write(0x1122_3344_5566_7788) };
        let request = header(READ_V2, 8, span.addr());
        let mut data = served.data();
        data.write_all(&request).unwrap();
        assert_eq!(rest(&mut data), REFUSED);
        served.engine.publish(&served.publication);
        let mut data = served.data();
        for _ in 0..2 {
            data.write_all(&request).unwrap();
            let stamp = 0x1122_3344_5566_7788u64.to_le_bytes();
            assert_eq!(take(&mut data, 16), [DONE, &stamp].concat());
            served.retract();
        }
    });
}

#[test]
fn an_identified_read_is_served_only_while_that_very_put_is_published() {
    watched(|| {
        let served = Served::published(100);
        let identity = served.publication.identity();
        let other_id = TransferId { generation: 2, ..identity.id };
        let other_slot = TransferId { slot: 99, ..identity.id };
        let other_instance = Instance::from_bytes([1; 16]);
        let mut data = served.data();
        let mut read = |identity: &Identity, size: u64, addr: u64, answer: &[u8]| {
            data.write_all(&identified(identity, size, addr)).unwrap();
            assert_eq!(take(&mut data, answer.len()), answer);
        };
        let whole = [DONE, &expected(0..100)].concat();
        read(&identity, 100, served.addr(), &whole);
        read(&Identity { id: other_id, ..identity }, 100, served.addr(), GONE);
        read(&Identity { id: other_slot, ..identity }, 100, served.addr(), GONE);
        let stranger = Identity { instance: other_instance, ..identity };
        read(&stranger, 100, served.addr(), OTHER_INSTANCE);
        read(&identity, 0, served.addr(), DONE);
        read(&identity, 1, served.addr() + 99, &[DONE, &expected(99..100)].concat());
        served.retract();
        read(&identity, 100, served.addr(), GONE);
        served.engine.publish(&served.publication);
        read(&identity, 100, served.addr(), &whole);

        data.write_all(&identified(&identity, 101, served.addr())).unwrap();
        assert_eq!(rest(&mut data), REFUSED, "more than was put");
    });
}

#[test]
fn notes_on_a_data_connection_are_taken_and_answered() {
    watched(|| {
        let served = Served::published(64);
        let mut data = served.data();
        let long = "x".repeat(60_000);
        let sent = [("stage0_1f", "transfer_complete"), ("", ""), (&long, "y"), ("z", &long)];
        for (name, message) in sent {
            data.write_all(&note(name, message)).unwrap();
            assert_eq!(take(&mut data, 8), DONE);
        }
        data.write_all(&header(READ_V2, 1, served.addr())).unwrap();
        assert_eq!(take(&mut data, 9), [DONE, &expected(0..1)].concat());
        let heard = served.notes();
        assert!(heard.iter().map(|(name, text)| (&name[..], &text[..])).eq(sent));

        let body = b"{\"name\":[]}";
        let bad = [&header(NOTIFY, body.len() as u64, 0), &body[..]].concat();
        for bad in [bad, header(NOTIFY, 0, 0), header(NOTIFY, (64 << 10) + 1, 0)] {
            let mut data = served.data();
            data.write_all(&bad).unwrap();
            assert_eq!(rest(&mut data), REFUSED);
        }
        assert_eq!(served.notes(), []);
    });
}

#[test]
fn writes_are_refused_unless_allowed() {
    watched(|| {
        let served = Served::published(64);
        for (opcode, answer) in [(WRITE_V1, &b""[..]), (WRITE_V2, REFUSED)] {
            let mut data = served.data();
            data.write_all(&[&header(opcode, 4, served.addr())[..], b"evil"].concat()).unwrap();
            assert_eq!(rest(&mut data), answer);
        }
        served.is_alive();
    });
}

#[test]
fn allowed_writes_arrive_in_what_is_published_and_nowhere_else() {
    watched(|| {
        let builder = EmbeddedEngine::builder("127.0.0.1:0").allow_writes(true);
        let served = Served::with(builder, 2 << 20);
        served.engine.publish(&served.publication);
        let mut data = served.data();
        let body: Vec<u8> = (0..1_500_000).map(|index| (index / 7) as u8).collect();
        let request = header(WRITE_V2, body.len() as u64, served.addr() + 5);
        data.write_all(&[&request[..], &body].concat()).unwrap();
        assert_eq!(take(&mut data, 8), DONE);
        data.write_all(&[&header(WRITE_V1, 2, served.addr())[..], b"v1"].concat()).unwrap();
        data.write_all(&header(READ_V1, body.len() as u64 + 5, served.addr())).unwrap();
        let after = take(&mut data, body.len() + 5);
        assert_eq!((&after[..2], &after[5..]), (&b"v1"[..], &body[..]));

        let stamp = served.publication.stamp_span().addr();
        for (size, addr) in [(8, stamp), (0, served.addr()), (1, served.addr() + (2 << 20))] {
            let mut data = served.data();
            data.write_all(&header(WRITE_V2, size, addr)).unwrap();
            assert_eq!(rest(&mut data), REFUSED);
        }
        // Cut short: the pin goes with the connection.
        data.write_all(&[&header(WRITE_V2, 100, served.addr())[..], b"half"].concat()).unwrap();
        drop(data);
        served.retract();
    });
}

#[test]
fn silent_and_half_spoken_peers_do_not_hold_up_a_read() {
    watched(|| {
        let served = Served::published(1 << 16);
        let (mut silent, mut half) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            silent.extend([served.control(), served.data()]);
            let (mut control, mut data) = (served.control(), served.data());
            control.write_all(&frame(3, b"{}")[..10]).unwrap();
            data.write_all(&header(READ_V2, 1, served.addr())[..23]).unwrap();
            half.extend([control, data]);
        }
        for _ in 0..100 {
            served.is_alive();
        }
        // What was half said can still be finished.
        half[1].write_all(&[0]).unwrap();
        assert_eq!(take(&mut half[1], 9), [DONE, &expected(0..1)].concat());
    });
}

#[test]
fn a_slow_reader_is_told_of_by_retract_and_done_when_it_has_read() {
    watched(|| {
        let len = 64 << 20;
        let served = Served::published(len);
        let mut data = served.data();
        data.write_all(&identified(&served.publication.identity(), len as u64, served.addr()))
            .unwrap();
        assert_eq!(take(&mut data, 8), DONE);
        assert_eq!(served.engine.retract(&served.publication), Retracted::Reading);
        served.engine.publish(&served.publication);
        served.is_alive();
        assert_eq!(served.engine.retract(&served.publication), Retracted::Reading);
        let period = expected(0..PERIOD);
        assert!(take(&mut data, len).chunks(PERIOD).all(|chunk| chunk == period));
        served.retract();
    });
}

#[test]
fn a_cut_drops_the_slow_reader_and_frees_the_slot() {
    watched(|| {
        let len = 64 << 20;
        let served = Served::published(len);
        let (mut slow, mut other) = (served.data(), served.data());
        slow.write_all(&header(READ_V2, len as u64, served.addr())).unwrap();
        assert_eq!(take(&mut slow, 8), DONE);
        assert_eq!(served.engine.cut(&served.publication), Retracted::Reading);
        served.retract();
        assert!(rest(&mut slow).len() < len);
        served.engine.publish(&served.publication);
        other.write_all(&header(READ_V1, 3, served.addr())).unwrap();
        assert_eq!(take(&mut other, 3), expected(0..3));
    });
}

#[test]
fn unregistering_ends_the_reads_of_that_memory() {
    watched(|| {
        let len = 64 << 20;
        let served = Served::published(len);
        let mut slow = served.data();
        slow.write_all(&header(READ_V2, len as u64, served.addr())).unwrap();
        assert_eq!(take(&mut slow, 8), DONE);
        served.engine.unregister(served.publication.span()).unwrap();
        assert!(rest(&mut slow).len() < len);
        served.engine.publish(&served.publication);
        let mut data = served.data();
        data.write_all(&header(READ_V2, 1, served.addr())).unwrap();
        assert_eq!(rest(&mut data), REFUSED, "published, but not registered");
    });
}
