use super::*;

#[test]
fn a_write_returns_once_the_peer_has_stored_it() {
    watched(|| {
        let stored = Arc::new(Mutex::new(Vec::new()));
        let store = Arc::clone(&stored);
        let fake = Fake::new(PLAIN, None, move |mut stream, _| {
            while let Some(header) = header(&mut stream) {
                assert_eq!((header.opcode, header.addr), (frame::WRITE_V2, BASE));
                *store.lock().unwrap() = take(&mut stream, header.size as usize);
                say(&mut stream, Status::Done);
            }
        });
        let client = started();
        for len in [1, 5000, 3_000_001] {
            let mut local = buffer(len);
            local.bytes_mut().unwrap().copy_from_slice(&pattern(len));
            client.write(&remote(&fake, len), local, soon()).unwrap();
            assert!(*stored.lock().unwrap() == pattern(len));
        }
        assert_eq!(fake.connections(), 1);
        client.write(&RemoteBuffer::new("127.0.0.1:1", BASE, 0), buffer(0), soon()).unwrap();
    });
}

#[test]
fn a_write_to_an_old_engine_is_acknowledged_by_a_read() {
    watched(|| {
        let (tx, stored) = mpsc::channel();
        let tx = Mutex::new(tx);
        let fake = Fake::new(OLD, None, move |mut stream, _| {
            let first = header(&mut stream).unwrap();
            assert_eq!((first.opcode, first.size), (frame::WRITE_V1, 5000));
            tx.lock().unwrap().send(take(&mut stream, 5000)).unwrap();
            let second = header(&mut stream).unwrap();
            assert_eq!((second.opcode, second.addr, second.size), (frame::READ_V1, BASE, 1));
            stream.write_all(&[0xEE]).unwrap();
        });
        let client = started();
        client.write(&remote(&fake, 5000), buffer(5000), soon()).unwrap();
        assert!(stored.try_recv().unwrap() == [0xEE; 5000]);
    });
}

#[test]
fn a_write_that_is_not_acknowledged_has_failed() {
    watched(|| {
        let old = Fake::new(OLD, None, |mut stream, _| {
            header(&mut stream);
            take(&mut stream, 5000);
        });
        let client = started();
        assert_eq!(kind(client.write(&remote(&old, 5000), buffer(5000), soon())), "PeerFailed");
        let new = Fake::new(PLAIN, None, |mut stream, _| {
            header(&mut stream);
            take(&mut stream, 5000);
        });
        assert_eq!(kind(client.write(&remote(&new, 5000), buffer(5000), soon())), "PeerFailed");
    });
}

#[test]
fn a_refusal_is_heard_while_the_body_is_being_sent() {
    // Much more than the sockets hold, and the peer reads none of it.
    let len = 64 << 20;
    for then_closes in [false, true] {
        watched(move || {
            let fake = Fake::new(PLAIN, None, move |mut stream, _| {
                header(&mut stream).unwrap();
                say(&mut stream, Status::Refused);
                if !then_closes {
                    // Held open until the client goes.
                    let mut polled =
                        [rustix::event::PollFd::new(&stream, rustix::event::PollFlags::RDHUP)];
                    let _ = rustix::event::poll(&mut polled, None);
                }
            });
            let client = started();
            assert_eq!(kind(client.write(&remote(&fake, len), buffer(len), soon())), "Rejected");
        });
    }
}

#[test]
fn done_before_the_body_was_sent_is_a_lie() {
    let len = 64 << 20;
    watched(move || {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            header(&mut stream).unwrap();
            say(&mut stream, Status::Done);
            let mut polled = [rustix::event::PollFd::new(&stream, rustix::event::PollFlags::RDHUP)];
            let _ = rustix::event::poll(&mut polled, None);
        });
        let client = started();
        assert_eq!(kind(client.write(&remote(&fake, len), buffer(len), soon())), "PeerFailed");
    });
}

#[test]
fn a_peer_that_dies_while_the_body_is_being_sent_has_failed() {
    let len = 64 << 20;
    watched(move || {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            header(&mut stream).unwrap();
            take(&mut stream, 1 << 20);
            reset(stream);
        });
        let client = started();
        assert_eq!(kind(client.write(&remote(&fake, len), buffer(len), soon())), "PeerFailed");
    });
}
