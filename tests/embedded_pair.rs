//! Two embedded engines, one as the other's peer.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test")]

mod raw;

use std::time::{Duration, Instant};

use mooncake_relay::{
    EmbeddedEngine, Engine, Error, Identity, Instance, Notification, Publication, RemoteBuffer,
};

use self::raw::*;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn remote(served: &Served, len: usize) -> RemoteBuffer {
    RemoteBuffer::new(served.engine.session_id(), served.addr(), len)
        .with_identity(served.publication.identity())
}

fn getter() -> EmbeddedEngine {
    let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
    engine.start(&Instance::from_bytes(*b"another instance")).unwrap();
    engine
}

#[test]
fn what_is_published_is_read_and_acknowledged() {
    watched(|| {
        let (putter, getter) = (Served::published(3_000_000), getter());
        let peer = putter.engine.session_id();
        getter.connect(peer, soon()).unwrap();
        for len in [0, 1, 4096, 3_000_000] {
            let mut dest = vec![0; len];
            getter.read_into(&remote(&putter, len), &mut dest, soon()).unwrap().unwrap();
            assert!(dest == expected(0..len));
            getter.notify(peer, &Notification::new("id", "transfer_complete"), soon()).unwrap();
        }
        assert_eq!(putter.notes().len(), 4);
        getter.counters(&mut |name, value| {
            if name == "reads_tcp" {
                assert_eq!(value, 4);
            }
        });
        // One for what it is, one kept for everything else.
        assert_eq!(putter.counter("connections"), 2);
    });
}

#[test]
fn a_put_that_is_over_is_stale_and_its_connection_stays() {
    watched(|| {
        let (putter, getter) = (Served::published(64), getter());
        let mut dest = [0; 64];
        let mut read = |remote: &RemoteBuffer| {
            getter.read_into(remote, &mut dest, soon()).unwrap().map_err(|error| error.kind())
        };
        let good = remote(&putter, 64);
        assert_eq!(read(&good), Ok(()));
        putter.retract();
        assert_eq!(read(&good), Err("Stale"));
        putter.engine.publish(&putter.publication);
        let identity = putter.publication.identity();
        let other = Identity { instance: Instance::from_bytes([1; 16]), ..identity };
        assert_eq!(read(&good.clone().with_identity(other)), Err("Stale"));
        assert_eq!(read(&good), Ok(()));
        let mut outside = good;
        outside.ptr += 1;
        assert_eq!(read(&outside), Err("Rejected"));
    });
}

#[test]
fn a_peer_that_comes_back_under_its_name_is_read_again() {
    watched(|| {
        let (putter, getter) = (Served::published(64), getter());
        let mut dest = [0; 64];
        let mut read = |remote: &RemoteBuffer| {
            getter.read_into(remote, &mut dest, soon()).unwrap().map_err(|error| error.kind())
        };
        assert_eq!(read(&remote(&putter, 64)), Ok(()));
        putter.engine.stop(soon());
        assert_eq!(read(&remote(&putter, 64)), Err("PeerFailed"));

        let instance = Instance::from_bytes(*b"a later instance");
        putter.engine.start(&instance).unwrap();
        let first = putter.publication;
        let identity = Identity { instance, ..first.identity() };
        // SAFETY: as of the first, which ended with its relay.
        let publication = unsafe {
            Publication::new(first.slot(), first.span(), identity, 9, first.stamp_span())
        };
        putter.engine.publish(&publication);
        assert_eq!(read(&remote(&putter, 64)), Err("Stale"));
        assert_eq!(read(&remote(&putter, 64).with_identity(publication.identity())), Ok(()));
    });
}

#[test]
fn a_read_that_is_cut_is_an_error_of_its_peer() {
    watched(|| {
        let len = 256 << 20;
        let (putter, getter) = (Served::new(len), getter());
        let remote = remote(&putter, len);
        let mut dest = vec![0; len];
        // A read that is over before the cut is none that is cut.
        while std::thread::scope(|scope| {
            putter.engine.publish(&putter.publication);
            let before = putter.counter("bytes_served");
            let read = scope.spawn(|| getter.read_into(&remote, &mut dest, soon()).unwrap());
            eventually("it reads", || putter.counter("bytes_served") > before);
            let _ = putter.engine.cut(&putter.publication);
            putter.retract();
            match read.join().unwrap() {
                Ok(()) => true,
                Err(Error::PeerFailed { .. }) => false,
                Err(other) => panic!("{other:?}"),
            }
        }) {}
    });
}

#[test]
fn stopping_ends_the_reads_that_are_under_way() {
    watched(|| {
        let getter = getter();
        // Accepts, and never answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let remote = RemoteBuffer::new(&silent.local_addr().unwrap().to_string(), 1, 8)
            .with_identity(Served::new(8).publication.identity());
        std::thread::scope(|scope| {
            let read = scope.spawn(|| getter.read_into(&remote, &mut [0; 8], soon()).unwrap());
            let _asked = silent.accept().unwrap();
            getter.stop(soon());
            assert!(matches!(read.join().unwrap(), Err(Error::Closed)));
        });
        let late = Instant::now() + Duration::from_secs(1);
        let note = Notification::new("a", "b");
        assert!(matches!(getter.notify("127.0.0.1:9", &note, late), Err(Error::Closed)));
    });
}
