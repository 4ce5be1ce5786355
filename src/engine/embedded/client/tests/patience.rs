//! What ends before the deadline, because the peer is silent.

use super::{faults::blackhole, *};

fn patient(connect: Duration, stall: Duration) -> Client {
    let client = Client::new(Patience { connect, stall });
    client.start();
    client
}

const SHORT: Duration = Duration::from_millis(150);
const LONG: Duration = Duration::from_secs(3600);

fn far() -> Instant {
    Instant::now() + LONG
}

#[track_caller]
fn assert_failed(outcome: Result<Filled, ReadError>, why: &str) {
    let ReadError { error, buffer } = outcome.unwrap_err();
    assert!(buffer.is_some());
    let Error::PeerFailed { reason, .. } = error else { panic!("{error:?}") };
    assert!(reason.contains(why), "{reason}");
}

#[test]
fn connecting_to_a_peer_that_swallows_packets_ends_long_before_the_reads_deadline() {
    watched(|| {
        let (address, _held) = blackhole();
        let client = patient(SHORT, LONG);
        let remote = RemoteBuffer::new(&address.to_string(), BASE, 64);
        assert_failed(client.read(&remote, buffer(64), far()), "connect timed out after 150ms");
        // The read's own deadline is still what it was.
        let read = client.read(&remote, buffer(64), Instant::now() + SHORT / 10);
        assert!(matches!(read.unwrap_err().error, Error::TimedOut));
    });
}

#[test]
fn a_peer_that_stops_in_the_middle_of_a_body_fails_although_there_is_no_deadline() {
    watched(|| {
        let fake = Fake::new(PLAIN, None, |mut stream, _| {
            let size = header(&mut stream).unwrap().size as usize;
            say(&mut stream, Status::Done);
            stream.write_all(&pattern(size / 2)).unwrap();
            serve_silence(stream, 0);
        });
        let client = patient(LONG, SHORT);
        let read = client.read(&remote(&fake, 64), buffer(64), far());
        assert_failed(read, "reading the body: it was silent for 150ms");
    });
}

#[test]
fn a_peer_that_never_answers_fails_although_there_is_no_deadline() {
    watched(|| {
        let silent = Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, |stream, _| {
            serve_silence(stream, 0);
        });
        let client = patient(LONG, SHORT);
        let read = client.read(&remote(&silent, 64), buffer(64), far());
        assert_failed(read, "it was silent for 150ms");
    });
}

#[test]
fn a_peer_that_is_slow_and_goes_on_is_read_to_the_end() {
    watched(|| {
        // All of it takes longer than that; between two bytes there is much less time.
        let stall = Duration::from_secs(2);
        let mut tries = 0;
        while !reads_slowly(stall) {
            tries += 1;
            assert!(tries < 10, "too slow a machine to say anything");
        }
    });
}

/// Whether the peer's pauses were as short as they should be.
fn reads_slowly(stall: Duration) -> bool {
    let longest = Arc::new(Mutex::new(Duration::ZERO));
    let pauses = Arc::clone(&longest);
    let fake = Fake::new(PLAIN, None, move |mut stream, _| {
        let size = header(&mut stream).unwrap().size as usize;
        say(&mut stream, Status::Done);
        for byte in pattern(size) {
            let begun = Instant::now();
            thread::sleep(Duration::from_millis(300)); // it is slow
            let _ = stream.write_all(&[byte]);
            let mut longest = pauses.lock().unwrap();
            *longest = longest.max(begun.elapsed());
        }
    });
    let client = patient(LONG, stall);
    let read = client.read(&remote(&fake, 9), buffer(9), far());
    let in_time = *longest.lock().unwrap() < stall / 2;
    assert!(read.is_ok() || !in_time, "{:?}", read.map_err(|failed| failed.error));
    in_time
}

#[test]
fn those_who_wait_for_another_that_asks_share_its_failure() {
    const READERS: usize = 8;
    watched(|| {
        let client = Arc::new(patient(LONG, LONG));
        let asked = Arc::new(AtomicUsize::new(0));
        let dead = {
            let (client, asked) = (Arc::clone(&client), Arc::clone(&asked));
            Fake::with_control("127.0.0.1", PLAIN, None, serve_pattern, move |stream, state| {
                asked.fetch_add(1, Ordering::SeqCst);
                let name = &state.descriptor.lock().unwrap().name;
                let peer = client.peers.find(name).unwrap();
                // A second one that asks would find nobody to wait for it.
                while peer.waiting() < READERS - 1 && asked.load(Ordering::SeqCst) == 1 {
                    thread::yield_now();
                }
                drop(stream);
            })
        };
        thread::scope(|s| {
            for _ in 0..READERS {
                s.spawn(|| {
                    let read = client.read(&remote(&dead, 64), buffer(64), far());
                    assert_failed(read, "asking its control port");
                });
            }
        });
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    });
}
