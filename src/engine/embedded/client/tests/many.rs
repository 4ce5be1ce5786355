//! Several requests at once.

use super::*;

/// A peer that answers one read, and then does `rest` with the connection.
fn kept(rest: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> (Fake, Client) {
    let fake = Fake::new(PLAIN, Some(instance(1)), move |mut stream, connection| {
        if connection == 0 {
            asked(&mut stream);
            say(&mut stream, Status::Done);
            stream.write_all(&pattern(64)).unwrap();
        }
        rest(stream, connection);
    });
    let client = started();
    client.read(&one(&fake), buffer(64), soon()).unwrap();
    (fake, client)
}

fn one(fake: &Fake) -> RemoteBuffer {
    remote(fake, 64).with_identity(identity(1))
}

fn reads(fake: &Fake, count: usize) -> Vec<(RemoteBuffer, LocalBuffer)> {
    (0..count).map(|_| (one(fake), buffer(64))).collect()
}

fn asked(stream: &mut TcpStream) -> Option<Header> {
    let header = header(stream)?;
    assert_eq!(header.opcode, frame::READ_IDENTIFIED);
    taken_identity(stream);
    Some(header)
}

fn kinds(outcomes: Vec<Result<Filled, ReadError>>) -> Vec<&'static str> {
    let kind = |outcome: Result<Filled, ReadError>| match outcome {
        Ok(filled) => {
            assert!(filled.verified && filled.buffer.bytes().unwrap() == pattern(64));
            "Ok"
        }
        failed => {
            let Err(ReadError { buffer: Some(buffer), .. }) = &failed else { panic!("{failed:?}") };
            assert_eq!(buffer.bytes().unwrap(), [0xEE; 64], "it is untouched");
            kind(failed)
        }
    };
    outcomes.into_iter().map(kind).collect()
}

#[test]
fn all_are_asked_for_before_any_is_answered_and_each_has_its_own_outcome() {
    watched(|| {
        let (fake, client) = kept(|mut stream, _| {
            for _ in 0..2 {
                for _ in 0..4 {
                    asked(&mut stream).unwrap();
                }
                for status in [Status::Done, Status::Gone, Status::Done, Status::OtherInstance] {
                    say(&mut stream, status);
                    if status == Status::Done {
                        stream.write_all(&pattern(64)).unwrap();
                    }
                }
            }
            serve_pattern(stream, 0);
        });
        for _ in 0..2 {
            let outcomes = client.read_many(reads(&fake, 4), soon());
            assert_eq!(kinds(outcomes), ["Ok", "Stale", "Ok", "Stale"]);
        }
        assert_eq!(kinds(client.read_many(reads(&fake, 1), soon())), ["Ok"]);
        assert_eq!(fake.connections(), 1);
    });
}

#[test]
fn what_a_broken_connection_leaves_open_is_asked_for_again() {
    // After how many answers it ends, and whether a status and half a body follow them.
    for (answers, half) in [(0, false), (2, false), (2, true)] {
        watched(move || {
            let (fake, client) = kept(move |mut stream, connection| {
                if connection > 0 {
                    return serve_pattern(stream, connection);
                }
                for _ in 0..4 {
                    asked(&mut stream).unwrap();
                }
                for _ in 0..answers {
                    say(&mut stream, Status::Done);
                    stream.write_all(&pattern(64)).unwrap();
                }
                if half {
                    say(&mut stream, Status::Done);
                    stream.write_all(&[0xEE; 32]).unwrap();
                }
            });
            let third = if half { "PeerFailed" } else { "Ok" };
            let outcomes = client.read_many(reads(&fake, 4), soon());
            assert_eq!(kinds(outcomes), ["Ok", "Ok", third, "Ok"]);
            assert_eq!(fake.connections(), 2);
        });
    }
}

#[test]
fn a_refusal_among_them_concerns_that_one_alone() {
    watched(|| {
        let (fake, client) = kept(|mut stream, connection| {
            if connection == 0 {
                for _ in 0..3 {
                    asked(&mut stream).unwrap();
                }
                say(&mut stream, Status::Done);
                stream.write_all(&pattern(64)).unwrap();
                return say(&mut stream, Status::Refused);
            }
            serve_pattern(stream, connection);
        });
        let mut reads = reads(&fake, 4);
        reads[2].0.len = 65; // its buffer is too short, and it is not asked for
        let outcomes = client.read_many(reads, soon());
        assert_eq!(kinds(outcomes), ["Ok", "Rejected", "TooLarge", "Ok"]);
    });
}

#[test]
fn ending_one_ends_the_call_and_fails_none_of_the_others() {
    watched(|| {
        let (tx, begun) = mpsc::channel();
        let tx = Mutex::new(tx);
        let (fake, client) = kept(move |mut stream, _| {
            for _ in 0..3 {
                asked(&mut stream).unwrap();
            }
            say(&mut stream, Status::Done);
            stream.write_all(&pattern(64)).unwrap();
            let _ = tx.lock().unwrap().send(());
            serve_silence(stream, 0);
        });
        let (client, reads) = (Arc::new(client), reads(&fake, 3));
        let span = reads[2].1.span();
        let ender = Arc::clone(&client);
        let ends = thread::spawn(move || {
            begun.recv().unwrap();
            assert!(ender.end_reads_into(span, soon()));
        });
        // Far sooner than the deadline, or the watchdog barks.
        let outcomes = client.read_many(reads, Instant::now() + Duration::from_secs(600));
        let kinds = kinds(outcomes);
        // The end may overtake the bytes of the first.
        assert!(matches!(kinds[0], "Ok" | "Aborted"), "{kinds:?}");
        assert_eq!(kinds[1..], ["Aborted", "Closed"]);
        ends.join().unwrap();
        assert_eq!(client.operations.under_way(), 0);
    });
}

#[test]
fn a_silent_peer_fails_them_all_by_the_deadline() {
    watched(|| {
        let (fake, client) = kept(serve_silence);
        let outcomes = client.read_many(reads(&fake, 3), shortly());
        assert_eq!(kinds(outcomes), ["TimedOut"; 3]);
    });
}

#[test]
fn an_answer_that_nobody_asked_for_ends_the_connection_and_no_read() {
    watched(|| {
        let (fake, client) = kept(|mut stream, connection| {
            if connection == 0 {
                for _ in 0..2 {
                    asked(&mut stream).unwrap();
                }
                let answer = [&Status::Done.encode()[..], &pattern(64)].concat();
                stream.write_all(&answer.repeat(3)).unwrap();
            }
            serve_pattern(stream, connection);
        });
        assert_eq!(kinds(client.read_many(reads(&fake, 2), soon())), ["Ok", "Ok"]);
        let other = remote(&fake, 64).with_identity(identity(1));
        client.read(&other, buffer(64), soon()).unwrap();
        assert!(fake.connections() <= 2);
    });
}

#[test]
fn notes_go_at_once_too_and_each_has_its_own_outcome() {
    watched(|| {
        let (fake, client) = kept(|mut stream, connection| {
            if connection == 0 {
                for n in 0..3 {
                    let header = header(&mut stream).unwrap();
                    assert_eq!(header.opcode, frame::NOTIFY);
                    let body = take(&mut stream, header.size as usize);
                    assert!(frame::parse_notification(&body).unwrap().name() == format!("id-{n}"));
                }
                say(&mut stream, Status::Done);
                return say(&mut stream, Status::Refused);
            }
            while let Some(header) = header(&mut stream) {
                take(&mut stream, header.size as usize);
                say(&mut stream, Status::Done);
            }
        });
        let notes: Vec<_> =
            (0..3).map(|n| Notification::new(&format!("id-{n}"), "transfer_complete")).collect();
        let told = client.notify_many(&fake.name(), &notes, soon());
        let kinds: Vec<_> = told
            .iter()
            .map(|told| told.as_ref().map_or_else(|error| error.kind(), |()| "Ok"))
            .collect();
        assert_eq!(kinds, ["Ok", "Rejected", "Ok"]);
    });
}
