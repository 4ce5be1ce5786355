//! Cases: what a read delivers, and what it refuses.

use std::{sync::Arc, thread, time::Instant};

use super::{
    LIMIT,
    side::{Side, assert_same, bytes_of, pattern, soon},
    within,
};
use crate::{Engine, Instance, RemoteBuffer, Retracted};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A read delivers what was published, whatever its size.
pub fn bytes_arrive_unchanged_at_every_size(make: &dyn Fn() -> Arc<dyn Engine>) {
    let largest = 5 * MIB + 3;
    let sizes = [1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1]
        .into_iter()
        .chain([MIB - 1, MIB, MIB + 1, 3 * MIB, largest]);
    let (sender, receiver) = Side::pair(make, 1, largest);
    within(LIMIT, move || {
        for size in sizes {
            let bytes = pattern(size as u64, size);
            let publication = sender.publish(0, &bytes);
            let got = receiver.get(&sender.remote(&publication)).expect("it is published");
            assert_same(&got, &bytes);
            let _ = sender.retract(&publication);
        }
    });
}

/// A read says `verified`, or the stamp that it can read afterwards is that put's.
pub fn a_read_is_verified_or_its_stamp_is_right(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 2, 4096);
    within(LIMIT, move || {
        for slot in [0, 1, 1, 0] {
            let publication = sender.publish(slot, &pattern(slot.into(), 4096));
            let remote = sender.remote(&publication);
            let filled = receiver.read(&remote, soon()).expect("it is published");
            if !filled.verified {
                let addr = publication.stamp_span().addr();
                let stamp = receiver.stamp(&remote.peer, addr).expect("stamps are served");
                assert_eq!(stamp, publication.stamp(), "the stamp is not that put's");
            }
            drop(filled);
            let _ = sender.retract(&publication);
        }
    });
}

/// Who names no identity, as a Python receiver, is served and told that nothing was verified.
pub fn a_read_without_identity_is_served_but_not_verified(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let bytes = pattern(3, 4000);
        let publication = sender.publish(0, &bytes);
        let remote = anonymous(&sender.remote(&publication));
        let filled = receiver.read(&remote, soon()).expect("it is published");
        assert!(!filled.verified, "there was no identity to verify");
        assert_same(bytes_of(&filled), &bytes);
    });
}

/// A range inside a publication is served.
pub fn a_part_of_a_publication_can_be_read(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 8192);
    within(LIMIT, move || {
        let bytes = pattern(4, 8192);
        let publication = sender.publish(0, &bytes);
        for (start, len) in [(0, 1), (1, 4096), (4096, 4096), (8191, 1)] {
            let mut remote = sender.remote(&publication);
            (remote.ptr, remote.len) = (remote.ptr + start as u64, len);
            let got = receiver.get(&remote).expect("it is inside what is published");
            assert_same(&got, &bytes[start..start + len]);
        }
    });
}

/// A read of no bytes is `Ok` while that put is published, and not proven afterwards.
pub fn an_identified_read_of_no_bytes_proves_the_identity(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let publication = sender.publish(0, &[]);
        let remote = sender.remote(&publication);
        assert_same(&receiver.get(&remote).expect("it is published"), &[]);
        let _ = sender.retract(&publication);
        assert!(receiver.get(&remote).is_err(), "the put is over");
    });
}

/// Metadata of another generation, another id, another slot or another instance proves nothing.
pub fn a_read_of_another_put_is_never_proven(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 2, 4096);
    within(LIMIT, move || {
        let publication = sender.publish(0, &pattern(5, 4096));
        let right = sender.remote(&publication);
        let identity = publication.identity();
        let mut wrong = [identity; 5];
        wrong[0].id.generation += 1;
        wrong[1].id.generation -= 1;
        wrong[2].id.random ^= 1;
        wrong[3].id.slot = 1;
        wrong[4].instance = Instance::from_bytes([0; 16]);
        for (index, identity) in wrong.into_iter().enumerate() {
            let mut remote = right.clone().with_identity(identity);
            // The stamp is a hash of the identity, so that metadata has another stamp.
            remote.stamp.as_mut().expect("the suite's remotes have a stamp").value ^= 1;
            assert!(receiver.get(&remote).is_err(), "wrong identity {index} was proven");
        }
        receiver.get(&right).expect("the right one is served all the same");
    });
}

/// Not a byte in front of, behind, across or far from a publication is served.
///
/// An engine that cannot know who reads, and so cannot bound it to what is published, refuses what
/// is not registered, and verifies nothing.
pub fn a_read_outside_the_publication_is_refused(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 3, 8192);
    within(LIMIT, move || {
        // In the middle of registered memory: only the publication's bounds can refuse.
        let publication = sender.publish(1, &pattern(6, 4096));
        let right = sender.remote(&publication);
        let start = right.ptr;
        let registered = [
            (start - 1, 4096),
            (start + 1, 4096),
            (start, 4097),
            (start - 1, 4098),
            (start - 1, 1),
            (start + 4096, 1),
            (sender.slot(0).addr(), 4096),
            (sender.slot(2).addr(), 4096),
        ];
        let nowhere = [(0, 16), (u64::MAX, 1), (u64::MAX - 3, 64), (u64::MAX - 4095, 4096)];
        let mut served = Vec::new();
        for (ptr, len) in registered.into_iter().chain(nowhere) {
            let mut remote = right.clone();
            (remote.ptr, remote.len) = (ptr, len);
            let offset = ptr.wrapping_sub(start) as i64;
            for remote in [anonymous(&remote), remote] {
                let identified = remote.identity.is_some();
                let Ok(filled) = receiver.read(&remote, soon()) else { continue };
                let what = format!("{len} bytes at {offset} (identified: {identified})");
                assert!(!filled.verified, "{what} were verified");
                assert!(!nowhere.contains(&(ptr, len)), "{what} were served");
                served.push(what);
            }
        }
        receiver.get(&right).expect("the publication itself is served all the same");
        let cannot_know = sender.retract(&publication) == Retracted::Unknown;
        assert!(served.is_empty() || cannot_know, "served: {served:#?}");
    });
}

/// Memory that is registered, but not published, is not served; or not verified, by an engine that
/// cannot know who reads.
pub fn what_is_not_published_is_not_served(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let prepared = sender.prepare(0, &pattern(7, 4096));
        let remote = sender.remote(&prepared);
        let by_identity = receiver.read(&remote, soon());
        let by_range = receiver.read(&anonymous(&remote), soon());
        let cannot_know = sender.retract(&prepared) == Retracted::Unknown;
        for (read, how) in [(by_identity, "identity"), (by_range, "range")] {
            let Ok(filled) = read else { continue };
            assert!(cannot_know, "it was served by its {how}");
            assert!(!filled.verified, "it was verified by its {how}");
        }
    });
}

/// A stamp is served from the slot's first publication on, and never says what is over.
pub fn the_stamp_is_served_after_the_retraction_too(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let publication = sender.publish(0, &pattern(8, 4096));
        let (peer, addr) = (sender.engine.session_id(), publication.stamp_span().addr());
        let stamp = || receiver.stamp(peer, addr).expect("stamps are served");
        assert_eq!(stamp(), publication.stamp());
        let _ = sender.retract(&publication);
        assert_ne!(stamp(), publication.stamp(), "the stamp was retired");
        let next = sender.publish(0, &pattern(9, 4096));
        assert_eq!(stamp(), next.stamp());
    });
}

/// `read_into` fills the whole destination, or declines, or fails and leaves it as it was.
pub fn read_into_fills_the_destination_or_declines(make: &dyn Fn() -> Arc<dyn Engine>) {
    let size = 2 * MIB + 5;
    let (sender, receiver) = Side::pair(make, 1, size);
    within(LIMIT, move || {
        let bytes = pattern(10, size);
        let publication = sender.publish(0, &bytes);
        let right = sender.remote(&publication);
        let mut dest = vec![0xa5; size];
        match receiver.engine.read_into(&right, &mut dest, soon()) {
            None => {}
            Some(read) => {
                read.expect("it is published");
                assert_same(&dest, &bytes);
            }
        }
        let mut other = publication.identity();
        other.id.random ^= 1;
        let refused = [right.clone().with_identity(other), anonymous(&right)];
        for remote in refused {
            dest.fill(0xa5);
            let read = receiver.engine.read_into(&remote, &mut dest, soon());
            assert!(!matches!(read, Some(Ok(()))), "`Some(Ok)` means that it was verified");
            assert!(dest.iter().all(|byte| *byte == 0xa5), "it wrote before it had verified");
        }
    });
}

/// `read_many` answers each read by its own outcome, in the order asked.
pub fn read_many_answers_in_the_order_asked(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 4, 8192);
    within(LIMIT, move || {
        let sizes = [100, 8192, 1, 4096];
        let bytes: Vec<_> = sizes.iter().map(|size| pattern(*size as u64, *size)).collect();
        let publications: Vec<_> =
            (0..).zip(&bytes).map(|(slot, bytes)| sender.publish(slot, bytes)).collect();
        let mut remotes: Vec<_> = publications.iter().map(|one| sender.remote(one)).collect();
        remotes[1].ptr = 0; // refused, and the others are not
        let (lent, reads): (Vec<_>, Vec<_>) = remotes
            .iter()
            .map(|remote| {
                let (index, buffer) = receiver.lend(remote.len);
                (index, (remote.clone(), buffer))
            })
            .unzip();
        let outcomes = receiver.engine.read_many(reads, soon());
        assert_eq!(outcomes.len(), sizes.len(), "an outcome for each read");
        for (at, (index, outcome)) in lent.into_iter().zip(outcomes).enumerate() {
            match receiver.returned(index, outcome) {
                Ok(filled) if at != 1 => assert_same(bytes_of(&filled), &bytes[at]),
                Err(_) if at == 1 => {}
                wrong => panic!("read {at} was answered by {wrong:?}"),
            }
        }
        assert!(receiver.engine.read_many(Vec::new(), soon()).is_empty());
    });
}

/// Reads that fail among those of one `read_many` fail alone, and each by its own reason.
pub fn read_many_fails_what_fails_and_nothing_else(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 8, 4096);
    within(LIMIT, move || {
        let bytes: Vec<_> = (0..8).map(|seed| pattern(seed, 4096)).collect();
        let publications: Vec<_> =
            (0..).zip(&bytes).map(|(slot, bytes)| sender.publish(slot, bytes)).collect();
        let mut remotes: Vec<_> = publications.iter().map(|one| sender.remote(one)).collect();
        // Once it has answered it is as ready as it will be.
        assert_same(&receiver.get(&remotes[0]).expect("it is published"), &bytes[0]);
        let mut others = [publications[1].identity(), publications[5].identity()];
        others[0].id.random ^= 1;
        others[1].instance = Instance::from_bytes([1; 16]);
        remotes[1] = remotes[1].clone().with_identity(others[0]);
        remotes[3].ptr = 0;
        remotes[5] = remotes[5].clone().with_identity(others[1]);
        let ask = |deadline: Instant| {
            let lent: Vec<_> = remotes.iter().map(|remote| receiver.lend(remote.len)).collect();
            let (indices, buffers): (Vec<_>, Vec<_>) = lent.into_iter().unzip();
            let reads = remotes.iter().cloned().zip(buffers).collect();
            let outcomes = receiver.engine.read_many(reads, deadline);
            assert_eq!(outcomes.len(), remotes.len(), "an outcome for each read");
            let outcomes = indices.into_iter().zip(outcomes);
            outcomes.map(|(index, read)| receiver.returned(index, read)).collect::<Vec<_>>()
        };
        for _ in 0..3 {
            for (at, outcome) in ask(soon()).into_iter().enumerate() {
                match outcome {
                    Ok(filled) if !matches!(at, 1 | 3 | 5) => {
                        assert_same(bytes_of(&filled), &bytes[at]);
                    }
                    // Where the engine cannot tell, the stamp will.
                    Ok(filled) if at != 3 => assert!(!filled.verified, "read {at} is proven"),
                    Err(_) if matches!(at, 1 | 3 | 5) => {}
                    wrong => panic!("read {at} was answered by {wrong:?}"),
                }
            }
        }
        let late = ask(Instant::now());
        assert!(late.iter().all(Result::is_err), "their deadline had passed: {late:?}");
    });
}

/// Two peers read one publication, at once and one after the other.
pub fn two_peers_read_one_publication(make: &dyn Fn() -> Arc<dyn Engine>) {
    let size = MIB + 1;
    let (sender, first) = Side::pair(make, 1, size);
    let second = Side::new(make(), 1, size);
    within(LIMIT, move || {
        let bytes = pattern(11, size);
        let publication = sender.publish(0, &bytes);
        let remote = sender.remote(&publication);
        thread::scope(|scope| {
            for receiver in [&first, &second] {
                scope.spawn(|| {
                    for _ in 0..10 {
                        assert_same(&receiver.get(&remote).expect("it is published"), &bytes);
                    }
                });
            }
        });
    });
}

/// Many threads read through one engine at once, large and small, and none gets another's bytes.
pub fn many_threads_read_at_once(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (small, large) = (16_384, 2_424_832);
    let (sender, receiver) = Side::pair(make, 8, large);
    within(LIMIT, move || {
        thread::scope(|scope| {
            for slot in 0..8 {
                let (sender, receiver) = (&sender, &receiver);
                scope.spawn(move || {
                    for round in 0..20 {
                        let size = if (slot + round) % 2 == 0 { small } else { large };
                        let bytes = pattern(u64::from(slot * 1000 + round), size);
                        let publication = sender.publish(slot, &bytes);
                        let remote = sender.remote(&publication);
                        assert_same(&receiver.get(&remote).expect("it is published"), &bytes);
                        let _ = sender.retract(&publication);
                    }
                });
            }
        });
    });
}

/// An engine is a peer of itself.
pub fn an_engine_reads_from_itself(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 1, 64 * KIB);
    within(LIMIT, move || {
        let bytes = pattern(12, 64 * KIB);
        let publication = side.publish(0, &bytes);
        assert_same(&side.get(&side.remote(&publication)).expect("it is published"), &bytes);
    });
}

/// After a write that is `Ok` the peer has the bytes; after one that is refused it has its own.
pub fn a_write_is_refused_or_done(make: &dyn Fn() -> Arc<dyn Engine>) {
    let size = MIB + 1;
    let (owner, writer) = Side::pair(make, 1, size);
    within(LIMIT, move || {
        let (before, after) = (pattern(13, size), pattern(14, size));
        let publication = owner.publish(0, &before);
        let (_, mut buffer) = writer.lend(size);
        buffer.bytes_mut().expect("the suite lends host memory").copy_from_slice(&after);
        let written = writer.engine.write(&owner.remote(&publication), buffer, soon());
        let _ = owner.retract(&publication);
        let expected = if written.is_ok() { &after } else { &before };
        assert_same(&owner.contents(&publication), expected);

        let (_, buffer) = writer.lend(size);
        let late = writer.engine.write(&owner.remote(&publication), buffer, soon());
        assert!(late.is_err(), "what is not published is not written");
        assert_same(&owner.contents(&publication), expected);
    });
}

/// However a read ends, its buffer comes back once, and nothing is written behind it.
pub fn every_buffer_comes_back_exactly_once(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (sender, receiver) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let publication = sender.publish(0, &pattern(15, 4096));
        let right = sender.remote(&publication);
        let mut other = publication.identity();
        other.instance = Instance::from_bytes([1; 16]);
        let mut outside = right.clone();
        outside.ptr += 1;
        let mut nobody = right.clone();
        nobody.peer = "nobody".into();
        // More rounds than there are buffers: one that is lost is missed at once.
        for _ in 0..8 {
            let now = Instant::now();
            let _ = receiver.read(&right, soon()).map(drop);
            let _ = receiver.read(&right, now).map(drop);
            let _ = receiver.read(&outside, soon()).map(drop);
            let _ = receiver.read(&nobody, soon()).map(drop);
            let _ = receiver.read(&right.clone().with_identity(other), soon()).map(drop);
            let (_, buffer) = receiver.lend(4096);
            let _ = receiver.engine.write(&outside, buffer, soon()).map(drop);
        }
        drop(receiver); // checks it
    });
}

/// What a receiver that knows no identities would ask for.
fn anonymous(remote: &RemoteBuffer) -> RemoteBuffer {
    RemoteBuffer::new(&remote.peer, remote.ptr, remote.len)
}
