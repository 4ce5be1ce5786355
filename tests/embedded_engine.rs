//! Ports, connections and memory of the embedded engine, from bind to drop.
#![cfg(feature = "embedded")]

mod common;
mod raw;

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::Instant,
};

use mooncake_relay::{Access, EmbeddedEngine, Engine, Error, Span};

use self::raw::*;

#[test]
fn a_data_port_that_was_chosen_is_the_one_that_listens() {
    watched(|| {
        let free = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        let chosen = free.data_addr();
        drop(free);
        let engine = EmbeddedEngine::builder("127.0.0.1:0").data_port(chosen.port()).bind();
        // Another process may have been given it since.
        match engine {
            Ok(engine) => assert_eq!(engine.data_addr(), chosen),
            Err(Error::Io(error)) => assert_eq!(error.kind(), ErrorKind::AddrInUse),
            Err(other) => panic!("{other}"),
        }
    });
}

#[test]
fn hundreds_of_connections_are_served_on_each_port() {
    watched(|| {
        let served = Served::published(64);
        let controls: Vec<_> = (0..300).map(|_| served.control()).collect();
        let mut data: Vec<_> = (0..300).map(|_| served.data()).collect();
        for _ in 0..2 {
            for stream in &mut data {
                stream.write_all(&header(READ_V2, 2, served.addr())).unwrap();
            }
            for stream in &mut data {
                assert_eq!(take(stream, 10), [DONE, &expected(0..2)].concat());
            }
        }
        for mut control in controls {
            assert_eq!(ask(&mut control, 3, b"{}"), b"{\"status\":\"success\"}\n");
        }
    });
}

#[test]
fn a_connection_beyond_the_limit_is_closed_and_none_that_exists_suffers() {
    watched(|| {
        let served = Served::with(EmbeddedEngine::builder("127.0.0.1:0").max_connections(3), 64);
        served.engine.publish(&served.publication);
        let mut held: Vec<_> = (0..3).map(|_| served.data()).collect();
        let read = |stream: &mut TcpStream| -> io::Result<()> {
            stream.write_all(&header(READ_V2, 2, served.addr()))?;
            stream.read_exact(&mut [0; 10])
        };
        for stream in &mut held {
            read(stream).unwrap();
        }
        for _ in 0..50 {
            assert!(read(&mut served.data()).is_err());
        }
        for stream in &mut held {
            read(stream).unwrap();
        }
        held.clear();
        eventually("there is room again", || read(&mut served.data()).is_ok());
    });
}

#[test]
fn a_thousand_connections_of_random_bytes_do_no_harm() {
    watched(|| {
        let served = Served::published(4096);
        let mut state = 1u64;
        let mut random = move || {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for round in 0..500 {
            let len = random() % 3000;
            let mut bytes: Vec<u8> = (0..len).map(|_| random() as u8).collect();
            if let (1, Some(head)) = (round % 2, bytes.get_mut(..24)) {
                // Nearly right, so that more than the first look is tried.
                let opcodes = [READ_V1, READ_V2, WRITE_V2, READ_IDENTIFIED, NOTIFY];
                let opcode = opcodes[random() as usize % opcodes.len()];
                let addr = served.addr() + random() % 5000;
                head.copy_from_slice(&header(opcode, random() % 5000, addr));
            }
            for mut stream in [served.control(), served.data()] {
                let _ = stream.write_all(&bytes);
                if round % 3 == 0 {
                    let _ = stream.shutdown(Shutdown::Write);
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            }
        }
        served.is_alive();
        served.retract();
    });
}

#[test]
fn memory_is_registered_once_and_unregistered_once() {
    let served = Served::new(64);
    let span = served.publication.span();
    let inner = Span { ptr: span.ptr, len: 1 };
    let empty = Span { ptr: span.ptr, len: 0 };
    for span in [span, inner, empty] {
        // SAFETY: never freed.
        let again = unsafe { served.engine.register(span, Access::Local) };
        assert!(matches!(again, Err(Error::Config { field: "span", .. })));
    }
    served.engine.unregister(span).unwrap();
    assert!(matches!(served.engine.unregister(span), Err(Error::Config { .. })));
}

#[test]
fn stopping_closes_everything_and_the_same_ports_are_bound_again() {
    watched(|| {
        let served = Served::published(64);
        let (control, data) = (served.engine.control_addr(), served.engine.data_addr());
        let instance = served.publication.identity().instance;
        let second = served.engine.start(&instance);
        assert!(matches!(second, Err(Error::Config { field: "engine", .. })));
        let mut held = [served.control(), served.data()];
        served.is_alive();
        served.engine.stop(Instant::now() + PATIENCE);
        for stream in &mut held {
            assert_eq!(rest(stream), b"");
        }
        for addr in [control, data] {
            assert_eq!(TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        }
        assert_eq!(served.counter("connections_open"), 0);
        for _ in 0..3 {
            served.engine.start(&instance).unwrap();
            served.is_alive();
            served.engine.stop(Instant::now() + PATIENCE);
        }
        drop(served);
        let text = control.to_string();
        let again = EmbeddedEngine::bind(&text).unwrap();
        assert_eq!(again.session_id(), text);
    });
}

#[test]
fn a_port_that_is_taken_is_an_error_at_once_that_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    match EmbeddedEngine::bind(&address) {
        Err(Error::Io(error)) => {
            assert_eq!(error.kind(), ErrorKind::AddrInUse);
            assert!(error.to_string().contains(&address), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_that_cannot_work_name_their_field() {
    let builder = EmbeddedEngine::builder;
    let wrong = [
        (builder("nonsense"), "listen"),
        (builder("127.0.0.1"), "listen"),
        (builder("127.0.0.1:99999"), "listen"),
        (builder("::1:0"), "listen"),
        (builder("no-such-host.invalid:0"), "listen"),
        (builder("203.0.113.1:0"), "listen"),
        (builder("127.0.0.1:0").advertise(""), "advertise"),
        (builder("127.0.0.1:0").advertise("a b"), "advertise"),
        (builder("127.0.0.1:0").advertise("host:x"), "advertise"),
        (builder("127.0.0.1:0").advertise("host:0"), "advertise"),
        (builder("127.0.0.1:0").advertise("0.0.0.0"), "advertise"),
        (builder("127.0.0.1:0").advertise("[::]:5"), "advertise"),
        (builder("127.0.0.1:0").max_connections(0), "max_connections"),
        (builder("127.0.0.1:0").queued_notes(0), "queued_notes"),
    ];
    for (builder, expected) in wrong {
        match builder.clone().bind() {
            Err(Error::Config { field, .. }) => assert_eq!(field, expected, "{builder:?}"),
            other => panic!("{builder:?}: {other:?}"),
        }
    }
}

#[test]
fn what_is_advertised_is_what_peers_are_told() {
    watched(|| {
        let builder = EmbeddedEngine::builder("127.0.0.1:0").advertise("relay.example:7000:7001");
        let served = Served::with(builder, 8);
        assert_eq!(served.engine.session_id(), "relay.example:7000");
        let reply = ask(&mut served.control(), 1, b"{}");
        let descriptor: serde_json::Value = serde_json::from_slice(&reply).unwrap();
        assert_eq!(descriptor["name"], "relay.example:7000");
        assert_eq!(descriptor["tcp_data_host"], "relay.example");
        assert_eq!(descriptor["tcp_data_port"], 7001);
        let host = EmbeddedEngine::builder("0.0.0.0:0").advertise("[fd00::1]").bind().unwrap();
        assert_eq!(host.session_id(), format!("[fd00::1]:{}", host.control_addr().port()));
    });
}

#[test]
fn ipv6_is_served_and_bracketed() {
    if !common::has_ipv6() {
        return;
    }
    watched(|| {
        let served = Served::with(EmbeddedEngine::builder("[::1]:0"), 8);
        served.engine.publish(&served.publication);
        let port = served.engine.control_addr().port();
        assert_eq!(served.engine.session_id(), format!("[::1]:{port}"));
        served.is_alive();
    });
}
