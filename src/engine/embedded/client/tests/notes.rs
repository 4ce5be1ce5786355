use super::*;

fn note() -> Notification {
    Notification::new("stage0_1f", "transfer_complete")
}

/// A control port that answers notifications with `reply`, and hands their bodies on.
fn with_notes(
    reply: &'static [u8],
) -> (mpsc::Receiver<Vec<u8>>, impl Fn(TcpStream, &State) + Send + Sync) {
    let (tx, notes) = mpsc::channel();
    let tx = Mutex::new(tx);
    let control = move |mut stream: TcpStream, state: &State| match control_request(&mut stream) {
        Some((1, _)) => {
            state.asked.fetch_add(1, Ordering::SeqCst);
            control_reply(&mut stream, 1, &state.descriptor.lock().unwrap().encode());
        }
        Some((2, json)) => {
            tx.lock().unwrap().send(json).unwrap();
            control_reply(&mut stream, 2, reply);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "one frame, then the end");
        }
        _ => {}
    };
    (notes, control)
}

const SUCCESS: &[u8] = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";
const BODY: &[u8] = br#"{"name":"stage0_1f","notify_msg":"transfer_complete"}"#;

#[test]
fn a_relay_is_told_over_the_kept_data_connection() {
    watched(|| {
        let (tx, notes) = mpsc::channel();
        let tx = Mutex::new(tx);
        let fake = Fake::new(PLAIN, Some(instance(1)), move |mut stream, _| {
            while let Some(header) = header(&mut stream) {
                assert_eq!(header.opcode, frame::NOTIFY);
                tx.lock().unwrap().send(take(&mut stream, header.size as usize)).unwrap();
                say(&mut stream, Status::Done);
            }
        });
        let client = started();
        for _ in 0..3 {
            client.notify(&fake.name(), &note(), soon()).unwrap();
            assert_eq!(notes.try_recv().unwrap(), BODY);
        }
        assert_eq!((fake.asked(), fake.connections()), (1, 1));
        let long = Notification::new(&"x".repeat(70_000), "transfer_complete");
        assert_eq!(client.notify(&fake.name(), &long, soon()).unwrap_err().kind(), "TooLarge");
        client.notify(&fake.name(), &note(), soon()).unwrap();
        assert_eq!(fake.connections(), 1);
    });
}

#[test]
fn a_relay_that_does_not_take_the_note_has_rejected_it() {
    watched(|| {
        let fake = Fake::new(PLAIN, Some(instance(1)), |mut stream, _| {
            let header = header(&mut stream).unwrap();
            take(&mut stream, header.size as usize);
            say(&mut stream, Status::Refused);
        });
        let client = started();
        let error = client.notify(&fake.name(), &note(), soon()).unwrap_err();
        assert_eq!(error.kind(), "Rejected");
    });
}

#[test]
fn a_real_engine_is_told_over_a_control_connection_read_to_its_end() {
    for version in [OLD, PLAIN] {
        watched(move || {
            let (notes, control) = with_notes(SUCCESS);
            let fake = Fake::with_control("127.0.0.1", version, None, serve_pattern, control);
            let client = started();
            for _ in 0..3 {
                client.notify(&fake.name(), &note(), soon()).unwrap();
                assert_eq!(notes.try_recv().unwrap(), BODY);
            }
            assert_eq!((fake.asked(), fake.connections()), (1, 0));
        });
    }
}

#[test]
fn a_note_goes_to_the_name_that_the_engine_gives_itself() {
    watched(|| {
        let (notes, control) = with_notes(SUCCESS);
        let named = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, control);
        let opened = Fake::new(PLAIN, None, serve_pattern);
        opened.state.descriptor.lock().unwrap().name = named.name();
        let client = started();
        client.notify(&opened.name(), &note(), soon()).unwrap();
        assert_eq!(notes.try_recv().unwrap(), BODY);
    });
}

#[test]
fn a_name_that_is_no_address_is_passed_over() {
    watched(|| {
        for name in ["stage zero", "no.such.host.invalid", "127.0.0.1:0"] {
            let (notes, control) = with_notes(SUCCESS);
            let fake = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, control);
            fake.state.descriptor.lock().unwrap().name = name.to_owned();
            started().notify(&fake.name(), &note(), soon()).unwrap();
            assert_eq!(notes.try_recv().unwrap(), BODY);
        }
    });
}

#[test]
fn a_reply_that_does_not_say_success_is_an_error() {
    for (reply, expected) in [
        (&br#"{"name":"","notify_msg":""}"#[..], "Rejected"),
        (b"{}", "Rejected"),
        (b"null", "PeerFailed"),
        (b"[\"\",\"success\"]", "PeerFailed"),
        (br#"{"name":"","notify_msg":{}}"#, "PeerFailed"),
        (b"", "PeerFailed"),
    ] {
        watched(move || {
            let (_notes, control) = with_notes(reply);
            let fake = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, control);
            let error = started().notify(&fake.name(), &note(), soon()).unwrap_err();
            assert_eq!(error.kind(), expected, "{error}");
        });
    }
}

#[test]
fn a_reply_to_another_request_is_no_success() {
    watched(|| {
        let fake =
            Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, |mut stream, state| {
                match control_request(&mut stream) {
                    Some((1, _)) => {
                        control_reply(&mut stream, 1, &state.descriptor.lock().unwrap().encode());
                    }
                    _ => control_reply(&mut stream, 3, SUCCESS),
                }
            });
        let error = started().notify(&fake.name(), &note(), soon()).unwrap_err();
        assert_eq!(error.kind(), "PeerFailed", "{error}");
    });
}
