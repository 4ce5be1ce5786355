//! One put, two receivers, and a slot that is wanted again: whoever reads gets the bytes of that
//! put or hears that it is over, and no slot is handed out while anybody reads it.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[cfg(feature = "embedded")]
mod raw;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam::channel::bounded;
use mooncake_relay::{
    Config, Engine, Error, InProcessEngine, Metadata, Relay, Result, Slot, Tensor, Token,
};

use self::common::{Random, bytes::Pattern, eventually, hooked::Hooked, within};

const WATCHDOG: Duration = Duration::from_secs(600);
const ROUNDS: usize = 400;
const MOST: usize = 1 << 20;

fn in_process() -> InProcessEngine {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    InProcessEngine::new(&format!("receivers-{}", NEXT.fetch_add(1, Ordering::Relaxed))).unwrap()
}

#[test]
fn two_receivers_read_that_put_or_hear_that_it_is_over_in_one_process() {
    assert_eq!(two_receivers(|| Arc::new(in_process())), 0);
}

#[test]
fn two_receivers_read_that_put_or_hear_that_it_is_over_where_only_the_stamp_tells() {
    // Where only ranges are known, what is not published at that moment is refused.
    two_receivers(|| Hooked::over(Arc::new(in_process())).ranges_only().engine());
}

#[cfg(feature = "embedded")]
#[test]
fn two_receivers_read_that_put_or_hear_that_it_is_over_by_tcp() {
    let engine =
        || Arc::new(mooncake_relay::EmbeddedEngine::bind("127.0.0.1:0").unwrap()) as Arc<_>;
    assert_eq!(two_receivers(engine), 0);
}

/// How many gets were refused, and not stale.
fn two_receivers(engine: fn() -> Arc<dyn Engine>) -> u32 {
    within(WATCHDOG, move || {
        let config = |credits| Config::default().with_credits(credits).with_slot_size(MOST);
        // One slot, so that each put waits for the one before.
        let sender = Relay::new(engine(), &config(1).with_receive_credits(1)).unwrap();
        let receivers = [(); 2].map(|()| Relay::new(engine(), &config(2)).unwrap());
        let mut random = Random::new(0x2_5eed);
        let pattern = Pattern::new(&mut random, MOST);
        let (read, refused) = (AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|s| {
            let mut channels = Vec::new();
            let (pattern, read, refused) = (&pattern, &read, &refused);
            for receiver in &receivers {
                let (tx, rx) = bounded::<(usize, Metadata)>(2);
                channels.push(tx);
                s.spawn(move || {
                    for (round, metadata) in rx {
                        let expected = pattern.of(round, metadata.size());
                        match receive(receiver, &metadata, expected, round) {
                            Ok(()) => drop(read.fetch_add(1, Ordering::Relaxed)),
                            Err(Error::Stale { .. }) => {}
                            Err(Error::Rejected { .. }) => {
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(other) => panic!("round {round}: {other:?}"),
                        }
                    }
                });
            }
            for round in 0..ROUNDS {
                let len = random.size(MOST as u64).max(1) as usize;
                let mut slot = sender.acquire(len, WATCHDOG).unwrap();
                assert_eq!(sender.health().free, 0, "a slot that came back twice");
                slot.copy_from_slice(pattern.of(round, len));
                let (metadata, token) = sender.put(slot, Tensor::bytes(len)).unwrap();
                for channel in &channels {
                    channel.send((round, metadata.clone())).unwrap();
                }
                match round % 3 {
                    0 => drop(s.spawn(move || check(token, pattern.of(round, len)))),
                    1 => check(token, pattern.of(round, len)),
                    _ => drop(token),
                }
            }
            drop(channels);
        });
        let (read, refused) = (read.into_inner(), refused.into_inner());
        assert!(read >= ROUNDS as u32, "each put was read at least once: {read}");
        eventually((1, 0, 0), || {
            let health = sender.health();
            (health.free, health.published, health.quarantined.len())
        });
        // One note a put ended it; those of the other receiver came too late, and so did any that
        // was sent again since it was not seen to be taken.
        let late = u64::from(read + refused) - ROUNDS as u64;
        eventually((ROUNDS as u64, true), || {
            let untaken = |receiver: &Relay| receiver.health().counters.relay.notes_untaken;
            let again: u64 = receivers.iter().map(untaken).sum();
            let counters = sender.health().counters.relay;
            let as_told = (late..=late + again).contains(&counters.notes_late);
            (counters.puts_acknowledged, as_told)
        });
        for receiver in &receivers {
            eventually(2, || receiver.health().receive_free);
        }
        refused
    })
}

/// Nobody has touched the sender's bytes.
fn check(token: Token<Slot>, expected: &[u8]) {
    assert!(token.wait().unwrap()[..] == *expected, "the slot came back changed");
}

/// Gets those very bytes, or an error and nothing.
fn receive(relay: &Relay, metadata: &Metadata, expected: &[u8], round: usize) -> Result<()> {
    if round.is_multiple_of(2) {
        let got = relay.get(metadata)?.wait()?;
        assert!(got[..] == *expected, "round {round}: bytes of another put");
        return Ok(());
    }
    let mut dest = vec![0xC7; expected.len()];
    let outcome = relay.get_into(metadata, &mut dest, WATCHDOG).map(drop);
    match outcome {
        Ok(()) => assert!(dest == expected, "round {round}: bytes of another put"),
        Err(_) => assert!(dest.iter().all(|byte| *byte == 0xC7), "round {round}: written"),
    }
    outcome
}

/// A put of one relay that a stranger reads slowly, in raw bytes.
#[cfg(feature = "embedded")]
mod slow {
    use std::{io::Write, net::TcpStream, sync::LazyLock, time::Instant};

    use mooncake_relay::{EmbeddedEngine, Identity, Instance, Notification, TransferId};

    use super::*;
    use crate::raw::{DONE, GONE, connect, identified, rest, take};

    /// More than sockets hold.
    const LEN: usize = 64 << 20;
    const BYTE: u8 = 0x5A;

    /// A put that is being read: its sender, and the reader, which has seen the status.
    struct Read {
        relay: Relay,
        metadata: Metadata,
        token: Token<Slot>,
        reader: TcpStream,
    }

    impl Read {
        fn begin(config: Config) -> Self {
            let engine = Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap());
            let data = engine.data_addr();
            let config = config.with_credits(1).with_slot_size(LEN);
            let relay = Relay::new(engine, &config).unwrap();
            loop {
                let mut slot = relay.acquire(LEN, WATCHDOG).unwrap();
                slot.fill(BYTE);
                let (metadata, token) = relay.put(slot, Tensor::bytes(LEN)).unwrap();
                let json = serde_json::to_value(&metadata).unwrap();
                let addr = json["mooncake"]["buffer_ptr"].as_u64().unwrap();
                let identity = Identity {
                    instance: metadata.instance().unwrap(),
                    id: TransferId::of_name(metadata.transfer_id()).unwrap(),
                };
                let mut reader = connect(data);
                reader.write_all(&identified(&identity, LEN as u64, addr)).unwrap();
                let status = take(&mut reader, 8);
                if status == DONE {
                    break Self { relay, metadata, token, reader };
                }
                // A short lease may end before the first byte; that is no read.
                assert_eq!(status, GONE);
            }
        }

        /// `health` shows the put among the quarantined.
        fn is_quarantined(&self) {
            eventually(1, || self.relay.health().quarantined.len());
            let health = self.relay.health();
            let holder = &health.quarantined[0];
            assert_eq!((&*holder.id, holder.slot), (self.metadata.transfer_id(), 0));
            assert_eq!((health.free, health.published), (0, 0));
            // Nor is it lost from sight while the relay looks after it.
            for _ in 0..200 {
                assert!(self.relay.health().quarantined[0].age > holder.age);
            }
            assert!(matches!(self.relay.try_acquire(1), Err(Error::Exhausted)));
        }
    }

    #[track_caller]
    fn is_untouched(bytes: &[u8]) {
        static EXPECTED: LazyLock<Vec<u8>> = LazyLock::new(|| vec![BYTE; LEN]);
        assert!(*bytes == EXPECTED[..bytes.len()], "bytes of another put");
    }

    /// Takes the slot as soon as it can be had, and writes all over it.
    fn scribble(relay: &Relay) {
        relay.acquire(LEN, WATCHDOG).unwrap().fill(0xEE);
    }

    #[test]
    fn a_slot_whose_lease_ended_under_a_slow_read_is_handed_out_after_it() {
        within(WATCHDOG, || {
            let mut read = Read::begin(Config::default().with_lease(Duration::from_millis(500)));
            let outcome = read.token.wait_timeout(WATCHDOG).unwrap();
            assert!(matches!(outcome, Err(Error::TimedOut)), "{outcome:?}");
            read.is_quarantined();
            let Read { relay, reader, .. } = &mut read;
            thread::scope(|s| {
                let scribbling = s.spawn(|| scribble(relay));
                eventually(1, || relay.health().waiting);
                is_untouched(&take(reader, LEN));
                scribbling.join().unwrap();
            });
            let health = relay.health();
            assert_eq!((health.free, health.quarantined.len()), (1, 0));
            assert_eq!(health.counters.relay.quarantines_cut, 0);
        });
    }

    #[test]
    fn a_slow_read_is_cut_when_the_quarantine_is_over() {
        within(WATCHDOG, || {
            let mut read = Read::begin(Config::default().with_quarantine(Duration::from_secs(3)));
            read.relay.abort(&read.metadata).unwrap();
            let outcome = read.token.wait_timeout(WATCHDOG).unwrap();
            assert!(matches!(outcome, Err(Error::Aborted)), "{outcome:?}");
            read.is_quarantined();
            let Read { relay, reader, .. } = &mut read;
            scribble(relay);
            let got = rest(reader);
            is_untouched(&got);
            assert!(got.len() < LEN, "it was cut");
            let health = relay.health();
            assert_eq!((health.free, health.quarantined.len()), (1, 0));
            assert_eq!(health.counters.relay.quarantines_cut, 1);
            // And can be put again.
            let (metadata, token) = relay.put_bytes(b"again", Tensor::bytes(5)).unwrap();
            assert_eq!(&relay.get(&metadata).unwrap().wait().unwrap()[..], b"again");
            token.wait().unwrap();
        });
    }

    #[test]
    fn an_acknowledged_slot_is_the_callers_when_the_other_receiver_is_done() {
        within(WATCHDOG, || {
            let mut read = Read::begin(Config::default());
            let other = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
            other.start(&Instance::from_bytes([7; 16])).unwrap();
            let note = Notification::new(read.metadata.transfer_id(), "transfer_complete");
            let soon = Instant::now() + WATCHDOG;
            other.notify(read.metadata.session_id(), &note, soon).unwrap();
            read.is_quarantined();
            assert!(!read.token.is_done());
            // It is said once only.
            other.notify(read.metadata.session_id(), &note, soon).unwrap();
            eventually(1, || read.relay.health().counters.relay.notes_late);
            is_untouched(&take(&mut read.reader, LEN));
            let slot = read.token.wait().unwrap();
            is_untouched(&slot);
            drop(slot);
            assert_eq!(read.relay.health().free, 1);
        });
    }
}
