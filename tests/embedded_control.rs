//! The embedded engine's control port, spoken to in raw bytes.
#![cfg(feature = "embedded")]

mod raw;

use std::{io::Write, thread};

use mooncake_relay::EmbeddedEngine;

use self::raw::*;

#[test]
fn every_control_frame_is_answered_as_the_real_engine_does() {
    watched(|| {
        let served = Served::published(64);
        let skeleton =
            b"{\"local_gid\":\"\",\"local_lid\":0,\"local_nic_path\":\"\",\"payload\":\"\",\
            \"peer_nic_path\":\"\",\"qp_num\":[],\"reply_msg\":\"\"}\n";
        assert_eq!(ask(&mut served.control(), 0, b"{}"), skeleton);
        assert_eq!(ask(&mut served.control(), 3, b"{}\n"), b"{\"status\":\"success\"}\n");
        let note = b"{\"name\":\"req-7\",\"notify_msg\":\"done\"}\n";
        let taken = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";
        assert_eq!(ask(&mut served.control(), 2, note), taken);
        assert_eq!(served.notes(), [("req-7".to_owned(), "done".to_owned())]);

        let mut untyped = served.control();
        untyped.write_all(b"\x02\0\0\0\0\0\0\0{}").unwrap();
        let reply = rest(&mut untyped);
        assert_eq!(reply, [&(skeleton.len() as u64).to_le_bytes()[..], skeleton].concat());
    });
}

#[test]
fn the_descriptor_tells_where_the_data_port_is_and_what_is_registered() {
    watched(|| {
        let served = Served::published(64);
        let reply = ask(&mut served.control(), 1, b"{}");
        let descriptor: serde_json::Value = serde_json::from_slice(&reply).unwrap();
        assert_eq!(descriptor["name"], served.engine.session_id());
        assert_eq!(descriptor["protocol"], "tcp");
        assert_eq!(descriptor["tcp_data_host"], "127.0.0.1");
        assert_eq!(descriptor["tcp_data_port"], served.engine.data_addr().port());
        assert_eq!(descriptor["tcp_proto_version"], 2);
        assert_eq!(descriptor["buffers"][0]["addr"], served.addr());
        assert_eq!(descriptor["buffers"][0]["length"], 64);
        let instance = served.publication.identity().instance.to_string();
        assert_eq!(descriptor["relay"], serde_json::json!({"version": 1, "instance": instance}));
    });
}

#[test]
fn g5_a_control_frame_may_arrive_byte_by_byte_and_be_as_long_as_allowed() {
    watched(|| {
        let served = Served::published(64);
        let mut slow = served.control();
        for byte in frame(3, b"{}") {
            slow.write_all(&[byte]).unwrap();
            thread::yield_now();
        }
        assert!(rest(&mut slow).ends_with(b"{\"status\":\"success\"}\n"));

        let longest = [b"{}".to_vec(), vec![b' '; (1 << 20) - 3]].concat();
        assert_eq!(ask(&mut served.control(), 3, &longest), b"{\"status\":\"success\"}\n");
        served.is_alive();
    });
}

#[test]
fn g5_a_bad_control_frame_is_closed_without_a_reply() {
    watched(|| {
        let served = Served::published(64);
        let nested = [b"{\"name\":".to_vec(), vec![b'['; 500_000]].concat();
        let bad = [
            0u64.to_le_bytes().to_vec(),
            ((1u64 << 20) + 1).to_le_bytes().to_vec(),
            u64::MAX.to_le_bytes().to_vec(),
            frame(0x80, b"{}"),
            frame(1, b"{"),
            frame(3, b"nonsense"),
            frame(2, b"[\"a\",\"b\"]"),
            frame(2, b"{\"name\":5}"),
            frame(2, b"{\"name\":\"\xff\"}"),
            frame(2, &nested),
            frame(0, &nested),
        ];
        for bytes in bad {
            let mut stream = served.control();
            stream.write_all(&bytes).unwrap();
            assert_eq!(rest(&mut stream), b"");
        }
        assert_eq!(served.notes(), []);
        served.is_alive();
    });
}

#[test]
fn a_full_queue_of_notes_refuses_and_drained_takes_again() {
    watched(|| {
        let served = Served::with(EmbeddedEngine::builder("127.0.0.1:0").queued_notes(2), 8);
        let body = b"{\"name\":\"a\",\"notify_msg\":\"b\"}";
        let taken = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";
        for _ in 0..2 {
            assert_eq!(ask(&mut served.control(), 2, body), taken);
        }
        let refused = b"{\"name\":\"\",\"notify_msg\":\"\"}\n";
        assert_eq!(ask(&mut served.control(), 2, body), refused);
        let mut data = served.data();
        data.write_all(&note("a", "b")).unwrap();
        assert_eq!(rest(&mut data), REFUSED);
        assert_eq!(served.notes().len(), 2);
        assert_eq!(served.counter("notes_refused"), 2);
        assert_eq!(ask(&mut served.control(), 2, body), taken);
    });
}

#[test]
fn long_notes_cannot_take_more_than_a_bounded_memory() {
    watched(|| {
        let served = Served::new(8);
        let message = "m".repeat(1_000_000);
        let body = format!("{{\"notify_msg\":\"{message}\"}}");
        let taken = |_: &i32| {
            ask(&mut served.control(), 2, body.as_bytes())
                != b"{\"name\":\"\",\"notify_msg\":\"\"}\n"
        };
        let first = (0..40).filter(taken).count();
        assert!((10..20).contains(&first), "{first} MB were queued");
        assert_eq!(served.notes().len(), first);
        assert_eq!((0..40).filter(taken).count(), first);
    });
}

#[test]
fn a_control_client_that_is_silent_or_never_closes_is_let_go() {
    watched(|| {
        let served = Served::new(8);
        let (mut silent, mut lingering) = (served.control(), served.control());
        lingering.write_all(&frame(3, b"{}")).unwrap();
        assert_eq!(rest(&mut silent), b"");
        eventually("both are gone", || served.counter("connections_open") == 0);
        assert!(!rest(&mut lingering).is_empty());
    });
}
