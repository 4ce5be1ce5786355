//! Starting, stopping, and ending what is under way.

use super::{super::socket::Socket, *};

/// A peer that sends one byte of each body, tells of it, and then nothing more.
fn stuck() -> (Fake, mpsc::Receiver<()>) {
    let (tx, begun) = mpsc::channel();
    let tx = Mutex::new(tx);
    let fake = Fake::new(PLAIN, None, move |mut stream, _| {
        header(&mut stream);
        say(&mut stream, Status::Done);
        let _ = stream.write_all(&[1]);
        let _ = tx.lock().unwrap().send(());
        serve_silence(stream, 0);
    });
    (fake, begun)
}

#[test]
fn nothing_works_before_start_and_after_stop() {
    watched(|| {
        let fake = Fake::new(PLAIN, Some(instance(1)), serve_pattern);
        let client = Client::new(Patience::default());
        let remote = remote(&fake, 64).with_identity(identity(1));
        for _ in 0..3 {
            assert_eq!(kind(client.read(&remote, buffer(64), soon())), "Closed");
            assert_eq!(kind(client.write(&remote, buffer(64), soon())), "Closed");
            let error = client.read_into(&remote, &mut [0; 64], soon()).unwrap().unwrap_err();
            assert_eq!(error.kind(), "Closed");
            let note = Notification::new("id", "transfer_complete");
            assert_eq!(client.notify(&fake.name(), &note, soon()).unwrap_err().kind(), "Closed");
            assert_eq!(client.connect(&fake.name(), soon()).unwrap_err().kind(), "Closed");
            client.start();
            assert!(client.read(&remote, buffer(64), soon()).unwrap().verified);
            client.stop();
        }
        assert_eq!(fake.connections(), 3, "stop closes what was kept");
    });
}

#[test]
fn stop_ends_every_wait_at_once() {
    watched(|| {
        let (fake, begun) = stuck();
        let silent = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, |stream, _| {
            serve_silence(stream, 0);
        });
        let client = Arc::new(started());
        let mut waiting = Vec::new();
        for remote in [remote(&fake, 64), remote(&silent, 64), remote(&silent, 64)] {
            let client = Arc::clone(&client);
            waiting.push(thread::spawn(move || kind(client.read(&remote, buffer(64), soon()))));
        }
        begun.recv().unwrap();
        while client.operations.under_way() < 3 {
            thread::yield_now();
        }
        client.stop();
        for reader in waiting {
            assert_eq!(reader.join().unwrap(), "Closed");
        }
    });
}

#[test]
fn reads_into_a_span_are_ended_and_no_others() {
    watched(|| {
        let (fake, begun) = stuck();
        let client = Arc::new(started());
        let ended = buffer(4096);
        let span = ended.span();
        let read = |local: LocalBuffer, deadline| {
            let (client, remote) = (Arc::clone(&client), remote(&fake, 4096));
            thread::spawn(move || kind(client.read(&remote, local, deadline)))
        };
        let other = read(buffer(4096), Instant::now() + Duration::from_secs(3));
        let reader = read(ended, soon());
        begun.recv().unwrap();
        begun.recv().unwrap();
        let part = Span { ptr: span.ptr, len: 1 };
        assert!(client.end_reads_into(part, soon()));
        assert!(client.end_reads_into(part, Instant::now()), "it has let go");
        assert_eq!(reader.join().unwrap(), "Closed");
        assert_eq!(other.join().unwrap(), "TimedOut");
    });
}

#[test]
fn a_call_that_begins_while_another_is_waited_for_is_ended_too() {
    watched(|| {
        let operations = Operations::default();
        operations.start();
        let span = Span::of(&mut [0; 8]);
        let deadline = Instant::now() + Duration::from_secs(3600);
        let first = operations.begin(Some(span), deadline).unwrap();
        thread::scope(|scope| {
            let ending = scope.spawn(|| operations.end_into(span, deadline));
            while first.release().is_ok() {
                thread::yield_now();
            }
            let second = operations.begin(Some(span), deadline).unwrap();
            drop(first);
            while second.release().is_ok() {
                thread::yield_now();
            }
            drop(second);
            assert!(ending.join().unwrap());
        });
    });
}

#[test]
fn a_read_that_waits_while_another_asks_can_be_ended_by_itself() {
    watched(|| {
        let (tx, asked) = mpsc::channel();
        let tx = Mutex::new(tx);
        let silent =
            Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, move |stream, _| {
                tx.lock().unwrap().send(()).unwrap();
                serve_silence(stream, 0);
            });
        let client = Arc::new(started());
        let read = |local: LocalBuffer| {
            let (client, remote) = (Arc::clone(&client), remote(&silent, 64));
            thread::spawn(move || kind(client.read(&remote, local, soon())))
        };
        let (asking, waiting) = (buffer(64), buffer(64));
        let (of_asking, of_waiting) = (asking.span(), waiting.span());
        let asking = read(asking);
        asked.recv().unwrap();
        let waiting = read(waiting);
        while client.operations.under_way() < 2 {
            thread::yield_now();
        }
        assert!(client.end_reads_into(of_waiting, soon()));
        assert_eq!(waiting.join().unwrap(), "Closed");
        assert!(!asking.is_finished());
        assert!(client.end_reads_into(of_asking, soon()));
        assert_eq!(asking.join().unwrap(), "Closed");
    });
}

#[test]
fn a_call_that_was_ended_takes_up_no_other_wait() {
    let operations = Operations::default();
    operations.start();
    let operation = operations.begin(None, soon()).unwrap();
    let socket = Arc::new(
        Socket::open("127.0.0.1:1".parse().unwrap(), Patience::default(), Pace::default()).unwrap(),
    );
    operation.hold(&socket).unwrap();
    let cancelled = operation.cancelled();
    operations.stop();
    assert!(cancelled.recv_deadline(soon()).unwrap_err().is_disconnected());
    assert_eq!(operation.release().unwrap_err().kind(), "Closed");
    assert_eq!(operation.hold(&socket).unwrap_err().kind(), "Closed");
    assert!(operation.cancelled().recv().is_err());
    operations.start();
    assert_eq!(operation.hold(&socket).unwrap_err().kind(), "Closed", "it stays ended");
    assert!(operations.begin(None, soon()).unwrap().hold(&socket).is_ok());
}

#[test]
fn a_connection_to_an_earlier_relay_is_not_kept_for_the_later() {
    watched(|| {
        let (tx, asked) = mpsc::channel();
        let (go, may_answer) = mpsc::channel::<()>();
        let ends = Mutex::new((tx, may_answer));
        let fake = Arc::new(Fake::new(PLAIN, Some(instance(1)), move |mut stream, connection| {
            if connection > 0 {
                return serve_pattern(stream, connection);
            }
            header(&mut stream).unwrap();
            taken_identity(&mut stream);
            let (asked, may_answer) = &*ends.lock().unwrap();
            asked.send(()).unwrap();
            may_answer.recv().unwrap();
            say(&mut stream, Status::Done);
            stream.write_all(&pattern(64)).unwrap();
            assert!(header(&mut stream).is_none(), "closed, or used for the later relay");
            asked.send(()).unwrap();
        }));
        let client = Arc::new(started());
        let read = |byte| {
            let (client, remote) =
                (Arc::clone(&client), remote(&fake, 64).with_identity(identity(byte)));
            thread::spawn(move || client.read(&remote, buffer(64), soon()).unwrap().verified)
        };
        let earlier = read(1);
        asked.recv().unwrap();
        fake.become_instance(2);
        assert!(read(2).join().unwrap());
        go.send(()).unwrap();
        assert!(earlier.join().unwrap());
        asked.recv().unwrap();
    });
}

#[test]
fn whatever_races_with_stop_and_start_reads_all_or_is_closed() {
    watched(|| {
        let fake = Arc::new(Fake::new(PLAIN, Some(instance(1)), serve_pattern));
        let client = Arc::new(started());
        let done = Arc::new(AtomicBool::new(false));
        let readers = [1, 700, 70_000, 700_000].map(|len| {
            let (client, fake, done) = (Arc::clone(&client), Arc::clone(&fake), Arc::clone(&done));
            thread::spawn(move || {
                let remote = remote(&fake, len).with_identity(identity(1));
                let (mut local, mut reads) = (buffer(len), 0);
                while !done.load(Ordering::SeqCst) {
                    local = match client.read(&remote, local, soon()) {
                        Ok(filled) => {
                            assert!(
                                filled.verified && filled.buffer.bytes().unwrap() == pattern(len)
                            );
                            reads += 1;
                            filled.buffer
                        }
                        Err(ReadError { error, buffer }) => {
                            assert_eq!(error.kind(), "Closed");
                            buffer.unwrap()
                        }
                    };
                    local.bytes_mut().unwrap().fill(0);
                }
                reads
            })
        });
        for _ in 0..200 {
            client.stop();
            client.start();
            client.connect(&fake.name(), soon()).unwrap();
        }
        done.store(true, Ordering::SeqCst);
        let reads: usize = readers.map(|reader| reader.join().unwrap()).iter().sum();
        assert!(reads > 0);
        assert_eq!(client.operations.under_way(), 0);
    });
}

#[test]
fn no_more_connections_are_kept_than_the_limit() {
    watched(|| {
        let open = Arc::new(AtomicUsize::new(0));
        let (gate, count) = (Arc::new(std::sync::Barrier::new(20)), Arc::clone(&open));
        let fake = Fake::new(PLAIN, None, move |mut stream, _| {
            count.fetch_add(1, Ordering::SeqCst);
            while let Some(header) = header(&mut stream) {
                gate.wait();
                say(&mut stream, Status::Done);
                stream.write_all(&pattern(header.size as usize)).unwrap();
            }
            count.fetch_sub(1, Ordering::SeqCst);
        });
        let client = Arc::new(started());
        for _ in 0..3 {
            let readers = [(); 20].map(|()| {
                let (client, remote) = (Arc::clone(&client), remote(&fake, 64));
                thread::spawn(move || client.read(&remote, buffer(64), soon()).unwrap())
            });
            readers.into_iter().for_each(|reader| drop(reader.join().unwrap()));
            while open.load(Ordering::SeqCst) > 8 {
                thread::yield_now();
            }
            assert_eq!(open.load(Ordering::SeqCst), 8);
        }
        assert_eq!(fake.asked(), 1);
    });
}

#[test]
fn peers_that_are_not_used_are_forgotten() {
    let peers = Peers::default();
    let kept = peers.find("127.0.0.1:9").unwrap();
    let unused = Arc::downgrade(&peers.find("127.0.0.1:10").unwrap());
    for port in 1000..4000 {
        peers.find(&format!("127.0.0.1:{port}")).unwrap();
    }
    assert!(Arc::ptr_eq(&kept, &peers.find("127.0.0.1:9").unwrap()), "it is in use");
    assert!(unused.upgrade().is_none());
    let recent = peers.find("127.0.0.1:3999").unwrap();
    assert!(Arc::ptr_eq(&recent, &peers.find("127.0.0.1:3999").unwrap()));
}

#[test]
fn without_descriptors_idle_connections_make_room_and_then_the_error_is_ours() {
    // The client is in a process of its own, since the limit is the process's.
    const PEERS: &str = "MOONCAKE_RELAY_TEST_PEERS";
    let Ok(peers) = std::env::var(PEERS) else {
        let fakes = [(); 3].map(|()| Fake::new(PLAIN, None, serve_pattern));
        let peers = fakes.each_ref().map(Fake::name).join(" ");
        let (_, module) = module_path!().split_once("::").unwrap();
        let name = "without_descriptors_idle_connections_make_room_and_then_the_error_is_ours";
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", &format!("{module}::{name}")]).env(PEERS, peers);
        let ran = test.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
        return;
    };
    watched(move || {
        let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        let client = started();
        let reads = peers.split(' ').map(|peer| (RemoteBuffer::new(peer, BASE, 64), buffer(64)));
        let [first, second, third] = reads.collect::<Vec<_>>().try_into().unwrap();
        let read = |(remote, local)| client.read(&remote, local, soon());
        let mut hogs = Vec::new();
        let mut hog = || {
            while let Ok(file) = std::fs::File::open("/dev/null") {
                hogs.push(file);
            }
        };
        let _first = read(first).unwrap();
        hog();
        let _second = read(second).unwrap();
        client.peers.close_idle();
        hog();
        assert_eq!(kind(read(third)), "Io");
    });
}
