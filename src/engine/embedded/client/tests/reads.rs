use super::*;

#[test]
fn a_plain_read_fills_the_buffer_over_one_kept_connection() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, serve_pattern);
        let client = started();
        for len in [1, 100, 4096, 3_000_001] {
            let filled = client.read(&remote(&fake, len), buffer(len), soon()).unwrap();
            assert!(!filled.verified);
            assert!(filled.buffer.bytes().unwrap() == pattern(len));
        }
        assert_eq!((fake.asked(), fake.connections()), (1, 1));
        let mut counters = Vec::new();
        client.counters(&mut |name, value| counters.push((name, value)));
        let bytes = 1 + 100 + 4096 + 3_000_001;
        let expected = [
            ("reads_tcp", 4),
            ("notes_tcp", 0),
            ("bytes_read_tcp", bytes),
            ("reconnects", 0),
            ("descriptor_fetches", 1),
        ];
        assert_eq!(counters, expected);
    });
}

#[test]
fn a_read_from_an_old_engine_takes_one_connection_each() {
    watched(|| {
        let fake = Fake::new(OLD, None, |mut stream, _| {
            let header = header(&mut stream).unwrap();
            assert_eq!(header.opcode, frame::READ_V1);
            stream.write_all(&pattern(header.size as usize)).unwrap();
        });
        let client = started();
        client.connect(&fake.name(), soon()).unwrap();
        assert_eq!(fake.connections(), 0);
        for _ in 0..3 {
            let filled = client.read(&remote(&fake, 5000), buffer(5000), soon()).unwrap();
            assert!(!filled.verified && filled.buffer.bytes().unwrap() == pattern(5000));
        }
        assert_eq!((fake.asked(), fake.connections()), (1, 3));
    });
}

#[test]
fn an_identified_read_carries_the_identity_and_is_verified() {
    watched(|| {
        let fake = Fake::new(PLAIN, Some(instance(1)), |mut stream, _| {
            while let Some(header) = header(&mut stream) {
                assert_eq!((header.opcode, header.addr), (frame::READ_IDENTIFIED, BASE));
                assert_eq!(taken_identity(&mut stream), identity(1));
                say(&mut stream, Status::Done);
                stream.write_all(&pattern(header.size as usize)).unwrap();
            }
        });
        let client = started();
        client.connect(&fake.name(), soon()).unwrap();
        while fake.connections() == 0 {
            thread::yield_now(); // connect has opened it, and it will be accepted
        }
        let remote = remote(&fake, 5000).with_identity(identity(1));
        let filled = client.read(&remote, buffer(5000), soon()).unwrap();
        assert!(filled.verified && filled.buffer.bytes().unwrap() == pattern(5000));
        let mut dest = vec![0; 5000];
        client.read_into(&remote, &mut dest, soon()).unwrap().unwrap();
        assert!(dest == pattern(5000));
        assert_eq!((fake.asked(), fake.connections()), (1, 1));
    });
}

#[test]
fn what_the_peer_no_longer_holds_is_stale_and_costs_no_connection() {
    for status in [Status::Gone, Status::OtherInstance] {
        watched(move || {
            let fake = Fake::new(PLAIN, Some(instance(1)), serve_status(status));
            let client = started();
            let remote = remote(&fake, 64).with_identity(identity(1));
            assert_eq!(kind(client.read(&remote, buffer(64), soon())), "Stale");
            let mut dest = [7; 64];
            let error = client.read_into(&remote, &mut dest, soon()).unwrap().unwrap_err();
            assert_eq!((error.kind(), dest), ("Stale", [7; 64]));
            assert_eq!(fake.connections(), 1);
        });
    }
}

#[test]
fn what_the_peer_refuses_is_rejected_and_ends_the_connection() {
    for identified in [false, true] {
        watched(move || {
            let instance = identified.then(|| instance(1));
            let fake = Fake::new(PLAIN, instance, serve_status(Status::Refused));
            let client = started();
            let mut remote = remote(&fake, 64);
            remote.identity = identified.then(|| identity(1));
            for connections in 1..3 {
                assert_eq!(kind(client.read(&remote, buffer(64), soon())), "Rejected");
                assert_eq!((fake.asked(), fake.connections()), (1, connections));
            }
            let mut dest = [7; 64];
            let into = client.read_into(&remote, &mut dest, soon());
            let error = into.map(|it| it.unwrap_err().kind());
            assert_eq!((error, dest), (identified.then_some("Rejected"), [7; 64]));
        });
    }
}

#[test]
fn an_old_engine_refuses_by_closing() {
    watched(|| {
        let fake = Fake::new(OLD, None, |mut stream, _| {
            header(&mut stream);
        });
        let client = started();
        assert_eq!(kind(client.read(&remote(&fake, 64), buffer(64), soon())), "Rejected");
    });
}

#[test]
fn an_identity_that_the_peer_cannot_check_is_left_to_the_relay() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, serve_pattern);
        let client = started();
        let remote = remote(&fake, 64).with_identity(identity(1));
        assert!(client.read_into(&remote, &mut [0; 64], soon()).is_none());
        assert_eq!(fake.connections(), 0);
        let filled = client.read(&remote, buffer(64), soon()).unwrap();
        assert!(!filled.verified && filled.buffer.bytes().unwrap() == pattern(64));
    });
}

#[test]
fn nothing_to_read_needs_a_peer_only_for_its_identity() {
    watched(|| {
        let client = started();
        let nobody = RemoteBuffer::new("127.0.0.1:1", BASE, 0);
        assert!(!client.read(&nobody, buffer(0), soon()).unwrap().verified);
        let plain = Fake::new(PLAIN, None, |_, _| panic!("no data traffic"));
        let remote_plain = remote(&plain, 0).with_identity(identity(1));
        assert!(!client.read(&remote_plain, buffer(0), soon()).unwrap().verified);
        assert_eq!(plain.connections(), 0);
        let relay = Fake::new(PLAIN, Some(instance(1)), serve_pattern);
        let remote_relay = remote(&relay, 0).with_identity(identity(1));
        assert!(client.read(&remote_relay, buffer(0), soon()).unwrap().verified);
        let gone = Fake::new(PLAIN, Some(instance(1)), serve_status(Status::Gone));
        let remote_gone = remote(&gone, 0).with_identity(identity(1));
        assert_eq!(kind(client.read(&remote_gone, buffer(0), soon())), "Stale");
    });
}

#[test]
fn metadata_of_an_earlier_relay_is_stale_without_a_data_request() {
    watched(|| {
        let fake = Fake::new(PLAIN, Some(instance(2)), |_, _| panic!("no data request"));
        let client = started();
        let old = remote(&fake, 64).with_identity(identity(1));
        assert_eq!(kind(client.read(&old, buffer(64), soon())), "Stale");
        assert_eq!(fake.asked(), 1, "it was asked just now");
        assert_eq!(kind(client.read(&old, buffer(64), soon())), "Stale");
        assert_eq!(fake.asked(), 2, "asked once more, since it might have changed");
        let error = client.read_into(&old, &mut [0; 64], soon()).unwrap().unwrap_err();
        assert_eq!(error.kind(), "Stale");
        assert_eq!(fake.connections(), 0);
    });
}

#[test]
fn metadata_of_a_later_relay_makes_the_client_ask_again() {
    watched(|| {
        let fake = Fake::new(PLAIN, Some(instance(1)), serve_pattern);
        let client = started();
        let remote = |byte| remote(&fake, 64).with_identity(identity(byte));
        assert!(client.read(&remote(1), buffer(64), soon()).unwrap().verified);
        fake.become_instance(2);
        assert!(client.read(&remote(2), buffer(64), soon()).unwrap().verified);
        assert!(client.read(&remote(2), buffer(64), soon()).unwrap().verified);
        // The connection to the earlier relay is not used for the later one.
        assert_eq!((fake.asked(), fake.connections()), (2, 2));
        assert_eq!(kind(client.read(&remote(1), buffer(64), soon())), "Stale");
    });
}

#[test]
fn a_length_that_does_not_fit_reads_nothing() {
    let client = started();
    let remote = RemoteBuffer::new("127.0.0.1:1", BASE, 64);
    assert_eq!(kind(client.read(&remote, buffer(63), soon())), "TooLarge");
    assert_eq!(kind(client.write(&remote, buffer(63), soon())), "TooLarge");
}

#[test]
fn a_peer_is_reached_over_ipv6_and_by_name() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        return eprintln!("SKIPPED, no IPv6 on loopback: {error}");
    }
    watched(|| {
        let fake = Fake::at("::1", PLAIN, Some(instance(1)), serve_pattern);
        assert!(fake.name().starts_with("[::1]:"));
        let client = started();
        let remote = remote(&fake, 64).with_identity(identity(1));
        assert!(client.read(&remote, buffer(64), soon()).unwrap().verified);

        let fake = Fake::new(PLAIN, None, serve_pattern);
        fake.state.descriptor.lock().unwrap().data_host = Some("127.0.0.1".to_owned());
        let name = format!("localhost:{}", fake.control.port());
        let remote = RemoteBuffer::new(&name, BASE, 64);
        let filled = client.read(&remote, buffer(64), soon()).unwrap();
        assert!(filled.buffer.bytes().unwrap() == pattern(64));
    });
}

#[test]
fn a_session_id_that_is_no_address_is_the_metadatas_fault() {
    let client = started();
    for peer in ["", "host", "::1:80", "127.0.0.1:0", "a\nb:80", &"x".repeat(5000)] {
        let remote = RemoteBuffer::new(peer, BASE, 64);
        assert_eq!(kind(client.read(&remote, buffer(64), soon())), "Metadata");
        assert_eq!(client.connect(peer, soon()).unwrap_err().kind(), "Metadata");
    }
}
