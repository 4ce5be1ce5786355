//! Peers that die, freeze, move or talk nonsense.

use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};

use super::*;

#[test]
fn a_kept_connection_that_the_peer_closed_is_replaced_once() {
    for by_reset in [false, true] {
        watched(move || {
            let (read, has_read) = mpsc::channel();
            let (tx, closed) = mpsc::channel();
            let ends = Mutex::new((has_read, tx));
            let fake = Fake::new(PLAIN, None, move |mut stream, _| {
                let header = header(&mut stream).unwrap();
                say(&mut stream, Status::Done);
                stream.write_all(&pattern(header.size as usize)).unwrap();
                let ends = ends.lock().unwrap();
                ends.0.recv().unwrap();
                if by_reset {
                    reset(stream);
                } else {
                    drop(stream);
                }
                ends.1.send(()).unwrap();
            });
            let client = started();
            for reads in 1..6 {
                let filled = client.read(&remote(&fake, 64), buffer(64), soon()).unwrap();
                assert!(filled.buffer.bytes().unwrap() == pattern(64));
                assert_eq!((fake.asked(), fake.connections()), (1, reads));
                read.send(()).unwrap();
                closed.recv().unwrap();
            }
        });
    }
}

#[test]
fn a_new_connection_that_ends_without_an_answer_is_not_tried_again() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            header(&mut stream);
        });
        let client = started();
        assert_eq!(kind(client.read(&remote(&fake, 64), buffer(64), soon())), "PeerFailed");
        assert_eq!(fake.connections(), 1);
        assert_eq!(kind(client.read(&remote(&fake, 64), buffer(64), soon())), "PeerFailed");
        assert_eq!((fake.asked(), fake.connections()), (2, 2), "the next call starts afresh");
    });
}

#[test]
fn a_peer_whose_data_port_moved_is_found_again() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            let header = header(&mut stream).unwrap();
            say(&mut stream, Status::Done);
            stream.write_all(&pattern(header.size as usize)).unwrap();
        });
        let client = started();
        client.read(&remote(&fake, 64), buffer(64), soon()).unwrap();
        // What a restart looks like: nobody listens on the old port any more.
        let old = fake.state.descriptor.lock().unwrap().data_port;
        fake.state.stopped.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(("127.0.0.1", old)));
        while TcpStream::connect(("127.0.0.1", old)).is_ok() {
            thread::yield_now();
        }
        fake.state.stopped.store(false, Ordering::SeqCst);
        fake.move_data(serve_pattern);
        let filled = client.read(&remote(&fake, 64), buffer(64), soon()).unwrap();
        assert!(filled.buffer.bytes().unwrap() == pattern(64));
        assert_eq!(fake.asked(), 2);
    });
}

#[test]
fn nobody_there_fails_at_once_and_does_not_stick() {
    watched(|| {
        // Bound, so that nobody else gets it, and not listening.
        let held = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&held, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(getsockname(&held).unwrap()).unwrap();
        let client = started();
        let nobody = RemoteBuffer::new(&address.to_string(), BASE, 64);
        assert_eq!(kind(client.read(&nobody, buffer(64), soon())), "PeerFailed");
        // The first connection to its control port is dropped, and then all is well.
        let refused = AtomicBool::new(false);
        let fake =
            Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, move |stream, state| {
                if refused.swap(true, Ordering::SeqCst) {
                    answer_control(stream, state);
                }
            });
        assert_eq!(kind(client.read(&remote(&fake, 64), buffer(64), soon())), "PeerFailed");
        client.read(&remote(&fake, 64), buffer(64), soon()).unwrap();
    });
}

#[test]
fn a_silent_peer_times_out_and_the_buffer_comes_back() {
    watched(|| {
        let client = started();
        let data = Fake::new(PLAIN, Some(instance(1)), serve_silence);
        let identified = remote(&data, 64).with_identity(identity(1));
        let before = Instant::now();
        assert_eq!(kind(client.read(&identified, buffer(64), shortly())), "TimedOut");
        assert_eq!(kind(client.read(&remote(&data, 64), buffer(64), shortly())), "TimedOut");
        assert_eq!(kind(client.write(&remote(&data, 64), buffer(64), shortly())), "TimedOut");
        let big = 64 << 20;
        assert_eq!(kind(client.write(&remote(&data, big), buffer(big), shortly())), "TimedOut");
        let note = Notification::new("id", "transfer_complete");
        let told = client.notify(&data.name(), &note, shortly());
        assert_eq!(told.unwrap_err().kind(), "TimedOut");
        let mut dest = [7; 64];
        let error = client.read_into(&identified, &mut dest, shortly()).unwrap().unwrap_err();
        assert_eq!((error.kind(), dest), ("TimedOut", [7; 64]));
        assert!(before.elapsed() >= Duration::from_millis(600), "each takes its time");

        let control = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, |stream, _| {
            serve_silence(stream, 0);
        });
        assert_eq!(kind(client.read(&remote(&control, 64), buffer(64), shortly())), "TimedOut");
        // Time that is over before it began makes no request.
        assert_eq!(kind(client.read(&remote(&data, 64), buffer(64), Instant::now())), "TimedOut");
    });
}

/// An address that swallows connection requests: the kernel's queue for it is full.
pub(super) fn blackhole() -> (SocketAddr, impl Sized) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queued.push(stream);
    }
    (address, (listener, queued))
}

#[test]
fn a_peer_that_swallows_packets_times_out() {
    watched(|| {
        let (address, _held) = blackhole();
        let client = started();
        let remote = RemoteBuffer::new(&address.to_string(), BASE, 64);
        assert_eq!(kind(client.read(&remote, buffer(64), shortly())), "TimedOut");
        let (stopped, read) = (Arc::new(started()), remote.clone());
        let stopper = Arc::clone(&stopped);
        let reader = thread::spawn(move || kind(stopped.read(&read, buffer(64), soon())));
        while stopper.operations.under_way() == 0 {
            thread::yield_now();
        }
        stopper.stop();
        assert_eq!(reader.join().unwrap(), "Closed");
    });
}

#[test]
fn a_peer_that_breaks_off_leaves_the_bytes_that_came_before() {
    for by_reset in [false, true] {
        watched(move || {
            let fake = Fake::new(PLAIN, Some(instance(1)), move |mut stream, _| {
                let header = header(&mut stream).unwrap();
                if header.opcode == frame::READ_IDENTIFIED {
                    taken_identity(&mut stream);
                }
                say(&mut stream, Status::Done);
                stream.write_all(&pattern(100)).unwrap();
                if by_reset {
                    reset(stream);
                }
            });
            let client = started();
            let remote = remote(&fake, 200);
            assert_eq!(kind(client.read(&remote, buffer(200), soon())), "PeerFailed");
            let mut dest = [7; 200];
            let remote = remote.with_identity(identity(1));
            let error = client.read_into(&remote, &mut dest, soon()).unwrap().unwrap_err();
            assert_eq!(error.kind(), "PeerFailed");
            assert!(dest[..100] == pattern(100) && dest[100..] == [7; 100]);
        });
    }
}

#[test]
fn an_answer_that_is_no_status_is_the_peers_failure_and_touches_nothing() {
    let magic = Status::Done.encode();
    let unknown = [9, 0, 0, 0, magic[4], magic[5], magic[6], magic[7]];
    for answer in [*b"HTTP/1.1", [0; 8], unknown] {
        watched(move || {
            let fake = Fake::new(PLAIN, Some(instance(1)), move |mut stream, _| {
                while stream.read(&mut [0; 4096]).is_ok_and(|got| got > 0) {
                    let _ = stream.write_all(&answer);
                    let _ = stream.write_all(&pattern(64));
                }
            });
            let client = started();
            let remote = remote(&fake, 64).with_identity(identity(1));
            assert_eq!(kind(client.read(&remote, buffer(64), soon())), "PeerFailed");
            let mut dest = [7; 64];
            let error = client.read_into(&remote, &mut dest, soon()).unwrap().unwrap_err();
            assert_eq!((error.kind(), dest), ("PeerFailed", [7; 64]));
            assert_eq!(fake.connections(), 2, "neither connection is kept");
        });
    }
}

#[test]
fn bytes_after_a_refusal_are_the_peers_failure_and_touch_nothing() {
    for status in [Status::Gone, Status::OtherInstance] {
        watched(move || {
            let fake = Fake::new(PLAIN, Some(instance(1)), move |mut stream, _| {
                while header(&mut stream).is_some() {
                    taken_identity(&mut stream);
                    let both = [&status.encode()[..], &pattern(64)].concat();
                    let _ = stream.write_all(&both);
                }
            });
            let client = started();
            let remote = remote(&fake, 64).with_identity(identity(1));
            for _ in 0..2 {
                let mut dest = [7; 64];
                let error = client.read_into(&remote, &mut dest, soon()).unwrap().unwrap_err();
                assert_eq!((error.kind(), dest), ("PeerFailed", [7; 64]));
            }
            assert_eq!(fake.connections(), 2, "what lies on the first is nobody's answer");
        });
    }
}

#[test]
fn a_status_of_another_request_is_the_peers_failure() {
    for status in [Status::Gone, Status::OtherInstance] {
        watched(move || {
            let fake = Fake::new(PLAIN, None, serve_status(status));
            let client = started();
            assert_eq!(kind(client.read(&remote(&fake, 64), buffer(64), soon())), "PeerFailed");
        });
    }
}

#[test]
fn a_peer_that_trickles_does_not_hold_a_read_beyond_its_deadline() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            header(&mut stream);
            say(&mut stream, Status::Done);
            while stream.write_all(&[1]).is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let client = started();
        let len = 1 << 20;
        assert_eq!(kind(client.read(&remote(&fake, len), buffer(len), shortly())), "TimedOut");
    });
}

#[test]
fn a_control_port_that_talks_nonsense_is_the_peers_failure() {
    let deep = [b"[".repeat(5000), b"]".repeat(5000)].concat();
    let frame = |kind: u8, json: &[u8]| {
        let len = (json.len() as u64 + 1).to_le_bytes();
        [&len[..], &[kind], json].concat()
    };
    let answers = [
        Vec::new(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        [0; 9].to_vec(),
        [0xff; 9].to_vec(),
        [&(1u64 << 20).to_le_bytes()[..], &[1], &[b' '; 100]].concat(), // cut off
        [&((1u64 << 20) + 1).to_le_bytes()[..], &[1]].concat(),
        frame(1, b""),
        frame(1, b"null"),
        frame(1, b"[]"),
        frame(1, b"{"),
        frame(1, b"{}"),
        frame(1, &deep),
        frame(1, br#"{"name":"a:1","protocol":"rdma","tcp_data_port":1}"#),
        frame(1, br#"{"name":"a:1","protocol":"tcp","tcp_data_port":0}"#),
        frame(1, br#"{"name":"a:1","protocol":"tcp","tcp_data_port":1,"tcp_data_host":"a b"}"#),
        frame(2, br#"{"name":"","notify_msg":"success"}"#),
        frame(b'{', b"}"),
    ];
    for answer in answers {
        watched(move || {
            let shown = String::from_utf8_lossy(&answer[..answer.len().min(60)]).into_owned();
            let control = move |mut stream: TcpStream, _: &State| {
                control_request(&mut stream);
                let _ = stream.write_all(&answer);
            };
            let fake = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, control);
            let client = started();
            let failed = kind(client.read(&remote(&fake, 64), buffer(64), soon()));
            assert_eq!(failed, "PeerFailed", "{shown:?}");
        });
    }
}

#[test]
fn eight_readers_of_a_restarted_peer_ask_it_once_or_twice() {
    watched(|| {
        let fake = Arc::new(Fake::new(PLAIN, Some(instance(1)), serve_pattern));
        let client = Arc::new(started());
        let first = remote(&fake, 64).with_identity(identity(1));
        client.read(&first, buffer(64), soon()).unwrap();
        for round in 2..12 {
            fake.become_instance(round);
            let before = fake.asked();
            let start = Arc::new(std::sync::Barrier::new(8));
            let readers = [(); 8].map(|()| {
                let (client, start) = (Arc::clone(&client), Arc::clone(&start));
                let remote = remote(&fake, 64).with_identity(identity(round));
                thread::spawn(move || {
                    start.wait();
                    client.read(&remote, buffer(64), soon()).unwrap().verified
                })
            });
            assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
            let asked = fake.asked() - before;
            // Whoever begins while it is being asked may want it asked once more, and all of them
            // are content with that.
            assert!((1..=2).contains(&asked), "{asked}");
        }
    });
}

#[test]
fn random_answers_end_in_an_error_and_nothing_else() {
    watched(|| {
        let round = Arc::new(AtomicUsize::new(1));
        // Half of the answers begin as they should.
        let answer = |round: usize, good: &[u8]| {
            let mut bytes = if round.is_multiple_of(2) { good.to_vec() } else { Vec::new() };
            let mut state = (round as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            for _ in 0..round % 100 {
                state ^= state << 13; // xorshift64
                state ^= state >> 7;
                state ^= state << 17;
                bytes.push(state as u8);
            }
            bytes
        };
        let (of_data, of_control) = (Arc::clone(&round), Arc::clone(&round));
        let fake = Fake::with_control(
            "127.0.0.1",
            PLAIN,
            Some(instance(1)),
            move |mut stream, _| {
                let _ = stream.read(&mut [0; 4096]);
                let round = of_data.load(Ordering::SeqCst);
                let _ = stream.write_all(&answer(round, &Status::Done.encode()));
            },
            move |mut stream, state| {
                let round = of_control.load(Ordering::SeqCst);
                if round.is_multiple_of(3) {
                    return answer_control(stream, state);
                }
                control_request(&mut stream);
                let _ = stream.write_all(&answer(round, &[40, 0, 0, 0, 0, 0, 0, 0, 1]));
            },
        );
        let client = started();
        let note = Notification::new("id", "transfer_complete");
        for this in 1..600 {
            round.store(this, Ordering::SeqCst);
            let remote = remote(&fake, 4096).with_identity(identity(1));
            let _ = kind(client.read(&remote, buffer(4096), soon()));
            // Eight good bytes are a good answer here.
            let _ = client.write(&remote, buffer(4096), soon());
            let _ = client.notify(&fake.name(), &note, soon());
        }
    });
}
