//! Peers of the same user that write what they like into what they may write.

use std::{
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Error, Metadata, Relay};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::{
    WATCHDOG, at_rest,
    common::{Random, eventually, within},
    config, count, put,
    raw::{self, HEAD, Mapped, Reader, TAIL, pin_of, ring_of, say, secret_of, slot_of},
    relay, works,
};

/// A sender, an honest receiver that it has met, and a reader by hand.
fn met() -> (Relay, Relay, Reader) {
    let (sender, honest) = (relay(&config()), relay(&config()));
    works(&sender, &honest);
    let (metadata, _token) = put(&sender, b"for the instance");
    let reader = Reader::meet(metadata.instance().unwrap());
    sender.abort(&metadata).unwrap();
    eventually(2, || count(&sender, "local_peers"));
    (sender, honest, reader)
}

#[track_caller]
fn goes_on(sender: &Relay, honest: &Relay) {
    works(sender, honest);
    at_rest(sender);
    assert_eq!(count(honest, "reads_tcp"), 0);
}

#[test]
fn what_is_lent_cannot_be_written_by_who_it_is_lent_to() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        for fd in [&reader.slots, &reader.lines] {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a fresh mapping aliases nothing, if there is one.
            let mapped = unsafe {
                mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, fd.as_fd(), 0)
            };
            assert!(mapped.is_err(), "it was mapped to write");
            assert!(rustix::io::write(fd, b"scribble").is_err());
            assert!(rustix::fs::ftruncate(fd, 0).is_err());
        }
        // The id of a put stands nowhere in what is lent.
        let (metadata, token) = put(&sender, b"a secret");
        let secret = secret_of(&metadata).to_le_bytes();
        let mut lines = vec![0; 4096];
        rustix::io::pread(&reader.lines, &mut lines, 0).unwrap();
        assert!(!lines.windows(8).any(|bytes| bytes == secret));
        assert!(reader.answer.len() > 56);
        sender.abort(&metadata).unwrap();
        drop(token);
        goes_on(&sender, &honest);
    });
}

#[test]
fn a_ring_that_says_what_cannot_be_sends_its_writer_away_and_nobody_else() {
    within(WATCHDOG, || {
        let long = [(20_000_u32 - 4).to_le_bytes().to_vec(), vec![0; 20]].concat();
        let no_utf8 = [&8_u32.to_le_bytes()[..], &[0, 0, 4, 0], &[0xff; 4]].concat();
        let name_too_long = [&4_u32.to_le_bytes()[..], &[0, 0, 0xff, 0xff]].concat();
        let no_such_note = [&4_u32.to_le_bytes()[..], &[77, 0, 0, 0]].concat();
        let cases: [(&[u8], u64); 10] = [
            (&[], u64::MAX),
            (&[], 7),
            (&[], (64 << 10) + 8),
            (&[], 8), // a record of no length
            (&[0xff; 8], 8),
            (&long, 24),
            (&long, 64 << 10),
            (&no_utf8, 16),
            (&name_too_long, 8),
            (&no_such_note, 8),
        ];
        for (record, tail) in cases {
            let (sender, honest, reader) = met();
            reader.region.put(ring_of(2), record);
            reader.region.word(TAIL).store(tail, Ordering::SeqCst);
            // It is found out at the next look, and hears of it by the end of its socket.
            works(&sender, &honest);
            assert!(raw::hear(&reader.socket).0.is_empty(), "{record:?} {tail}");
            eventually(1, || count(&sender, "local_peers"));
            goes_on(&sender, &honest);
        }
    });
}

/// What a peer leaves that is killed between the two steps of its ring: the bell says that nobody
/// sleeps, and whoever sleeps was not woken.
fn steals_the_state(reader: &Reader, asleep: u32) {
    const STATE: u32 = 0b11;
    eventually(asleep, || reader.bell.futex().load(Ordering::SeqCst) & STATE);
    reader.bell.futex().fetch_and(!STATE, Ordering::SeqCst);
}

#[test]
fn a_peer_that_dies_in_the_middle_of_a_ring_is_missed_at_once_by_whoever_sleeps() {
    within(WATCHDOG, || {
        const ROUNDS: u32 = 12;
        const NOTIFIER: u32 = 1;
        const DRIVER: u32 = 2;
        let (sender, honest, first) = met();
        let instance = put(&sender, b"for the instance").0.instance().unwrap();
        drop(first);
        // Whoever sleeps looks up by itself after a second: so often that says nothing, so often in a
        // row that it does.
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            let reader = Reader::meet(instance);
            eventually(2, || count(&sender, "local_peers"));
            steals_the_state(&reader, NOTIFIER);
            drop(reader);
            eventually(1, || count(&sender, "local_peers"));
        }
        for _ in 0..ROUNDS {
            let reader = Reader::meet(instance);
            let (metadata, token) = put(&sender, b"read by who dies");
            let pin = reader.region.word(pin_of(slot_of(&metadata)));
            pin.store(secret_of(&metadata), Ordering::SeqCst);
            let waiting = thread::spawn(move || token.wait());
            steals_the_state(&reader, DRIVER);
            drop(reader);
            let ended = waiting.join().unwrap();
            assert!(matches!(ended, Err(Error::PeerFailed { .. })), "{ended:?}");
        }
        assert!(begun.elapsed() < Duration::from_secs(ROUNDS.into()), "{:?}", begun.elapsed());
        drop(honest);
    });
}

#[test]
fn notes_about_others_transfers_end_nothing() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        let (metadata, token) = put(&sender, b"not its own");
        let mut name = metadata.transfer_id().to_owned();
        let last = if name.ends_with('0') { '1' } else { '0' };
        name.pop();
        name.push(last);
        let mut record = (4 + name.len() as u32).to_le_bytes().to_vec();
        record.extend([0, 0]);
        record.extend((name.len() as u16).to_le_bytes());
        record.extend(name.as_bytes());
        let len = record.len().next_multiple_of(8) as u64;
        reader.region.put(ring_of(2), &record);
        reader.region.word(TAIL).store(len, Ordering::SeqCst);
        eventually(len, || {
            works(&sender, &honest);
            reader.region.word(HEAD).load(Ordering::SeqCst)
        });
        assert!(!token.is_done());
        assert!(
            sender.health().counters.relay.notes_late
                + sender.health().counters.relay.notes_unknown
                > 0
        );
        assert_eq!(&honest.get(&metadata).unwrap().wait().unwrap()[..], b"not its own");
        drop(token.wait().unwrap());
        goes_on(&sender, &honest);
    });
}

#[test]
fn a_pin_holds_up_what_its_writer_was_given_and_that_until_the_quarantine_is_over() {
    within(WATCHDOG, || {
        let sender = relay(&config().with_quarantine(Duration::from_secs(3)));
        let honest = relay(&config());
        let (metadata, token) = put(&sender, b"given to it");
        let reader = Reader::meet(metadata.instance().unwrap());
        let pin = |metadata: &Metadata, value| {
            reader.region.word(pin_of(slot_of(metadata))).store(value, Ordering::SeqCst);
        };
        // A guess, and the two values that mean something else.
        for value in [secret_of(&metadata) ^ 1, u64::MAX, 0] {
            let (metadata, token) = put(&sender, b"not given to it");
            pin(&metadata, value);
            sender.abort(&metadata).unwrap();
            assert_eq!(sender.health().quarantined.len(), 0);
            drop(token);
        }
        pin(&metadata, secret_of(&metadata));
        sender.abort(&metadata).unwrap();
        assert_eq!(sender.health().quarantined.len(), 1);
        drop(token);
        at_rest(&sender);
        assert_eq!(sender.health().counters.relay.quarantines_cut, 1);
        let pinned = reader.region.word(pin_of(slot_of(&metadata))).load(Ordering::SeqCst);
        assert_eq!(pinned, u64::MAX, "it can find out");
        goes_on(&sender, &honest);
    });
}

#[test]
fn a_reader_that_goes_with_a_pin_ends_that_put_at_once() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        let (given, token) = put(&sender, b"given to it");
        let (other, other_token) = put(&sender, b"not given to it");
        reader.region.word(pin_of(slot_of(&given))).store(secret_of(&given), Ordering::SeqCst);
        reader.region.word(pin_of(slot_of(&other))).store(7, Ordering::SeqCst);
        drop(reader);
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        assert!(!other_token.is_done());
        assert_eq!(&honest.get(&other).unwrap().wait().unwrap()[..], b"not given to it");
        drop(other_token.wait().unwrap());
        goes_on(&sender, &honest);
    });
}

#[test]
fn the_last_words_of_a_reader_are_heard() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        let (metadata, token) = put(&sender, b"read, and gone");
        let name = metadata.transfer_id();
        let mut record = (4 + name.len() as u32).to_le_bytes().to_vec();
        record.extend([0, 0]);
        record.extend((name.len() as u16).to_le_bytes());
        record.extend(name.as_bytes());
        reader.region.put(ring_of(2), &record);
        let len = record.len().next_multiple_of(8) as u64;
        reader.region.word(TAIL).store(len, Ordering::SeqCst);
        drop(reader); // without a ring of the bell
        drop(token.wait().unwrap());
        goes_on(&sender, &honest);
    });
}

#[test]
fn words_on_the_socket_after_the_meeting_end_it() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        say(&reader.socket, b"and another thing", &[]);
        eventually(1, || {
            works(&sender, &honest);
            count(&sender, "local_peers")
        });
        goes_on(&sender, &honest);
    });
}

#[test]
fn a_bell_that_anybody_writes_costs_no_transfer() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(0xbe11);
                while !over.load(Ordering::Relaxed) {
                    reader.bell.futex().store(random.next() as u32, Ordering::Relaxed);
                }
            });
            // A wake that it takes away is made up for within the second that anybody sleeps.
            for _ in 0..5 {
                works(&sender, &honest);
            }
            over.store(true, Ordering::Relaxed);
        });
        goes_on(&sender, &honest);
    });
}

#[test]
fn a_region_full_of_anything_costs_its_writers_transfers_at_most() {
    within(WATCHDOG, || {
        let (sender, honest, first) = met();
        let instance = sender.health().instance.parse().unwrap();
        let over = AtomicBool::new(false);
        let scribble = |region: &Mapped, random: &mut Random| {
            for _ in 0..2000 {
                // Words that mean something more often than others.
                let value = match random.next() % 4 {
                    0 => random.next(),
                    1 => random.next() % (66 << 10),
                    2 => u64::MAX,
                    _ => 0,
                };
                let offset = match random.next() % 3 {
                    0 => random.next() % 6 * 64,
                    _ => random.next() % (region.len as u64 / 8) * 8,
                };
                region.word(offset as usize).store(value, Ordering::Relaxed);
            }
        };
        thread::scope(|scope| {
            let over = &over;
            scope.spawn(move || {
                let mut random = Random::new(0x5c81bb1e);
                scribble(&first.region, &mut random);
                while !over.load(Ordering::Relaxed) {
                    let reader = Reader::meet(instance);
                    scribble(&reader.region, &mut random);
                }
            });
            for _ in 0..300 {
                works(&sender, &honest);
            }
            over.store(true, Ordering::Relaxed);
        });
        eventually(1, || count(&sender, "local_peers"));
        goes_on(&sender, &honest);
    });
}

#[test]
fn guests_who_say_nothing_keep_nobody_out() {
    within(WATCHDOG, || {
        let (sender, honest, reader) = met();
        let instance = sender.health().instance.parse().unwrap();
        let silent: Vec<_> = (0..200).map(|_| raw::dial(instance)).collect();
        works(&sender, &relay(&config()));
        drop((silent, reader));
        goes_on(&sender, &honest);
    });
}
