//! A sender and two receivers that do what they are told, and are compared with the model.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use mooncake_relay::{Error, Event, Metadata, Notification, Slot, Tensor, Token, TransferId};

use crate::{
    Act,
    common::eventually,
    model::{Outcome, Place, Put},
    sides::{Held, Reading, Receiver, Sender},
};

pub(crate) const CREDITS: usize = 3;
const LEN: usize = 64;
const FOREVER: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct World {
    /// `None` between two that have one address.
    sender: Option<Sender>,
    name: String,
    /// One whose leases and quarantines end soon.
    hasty: Sender,
    receivers: [Receiver; 2],
    /// Slots that the test has, and whether they are of the sender that there is.
    slots: Vec<(Slot, bool)>,
    puts: Vec<Entry>,
    value: u64,
    reading: Reading,
}

/// A put that was made, of whichever sender.
struct Entry {
    metadata: Metadata,
    /// What all of its bytes say.
    value: u64,
    token: Option<Token<Slot>>,
    put: Put,
    /// Whether its sender is the one that there is.
    current: bool,
}

impl World {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let reading = Reading::default();
        let name = format!("machine-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let world = Self {
            sender: Some(Sender::new(&name, FOREVER, &reading)),
            hasty: Sender::new(&format!("{name}-hasty"), SOON, &reading),
            name,
            receivers: [(); 2].map(|()| Receiver::new(&reading)),
            slots: Vec::new(),
            puts: Vec::new(),
            value: 0,
            reading,
        };
        world.receivers.iter().for_each(|receiver| receiver.meet(world.sender()));
        world
    }

    pub(crate) fn act(&mut self, act: Act) {
        match act {
            Act::Acquire => self.acquire(),
            Act::Drop(n) => drop(take(&mut self.slots, n)),
            Act::Put(n, keep) => {
                if let Some((slot, current)) = take(&mut self.slots, n) {
                    self.put(slot, current, keep);
                }
            }
            Act::PutWrongly(n) => {
                if let Some((slot, current)) = take(&mut self.slots, n) {
                    match self.sender().relay.put(slot, Tensor::bytes(LEN + 1)) {
                        Err(Error::Metadata { field: "shape", .. }) => {}
                        Err(Error::Config { .. }) => assert!(!current),
                        other => panic!("{other:?}"),
                    }
                }
            }
            Act::Take(n) => self.take_token(n),
            Act::Abandon(n) => {
                if let Some(entry) = self.with_token(n) {
                    entry.token = None;
                    entry.put.lose_token();
                }
            }
            Act::Get(who, n) => {
                if let Some(put) = self.any_put(n) {
                    self.get(usize::from(who) % 2, put);
                }
            }
            Act::Begin(who, n) => {
                if let Some(put) = self.any_put(n) {
                    self.begin(usize::from(who) % 2, put);
                }
            }
            Act::Finish(who) => self.finish(usize::from(who) % 2),
            Act::Give(who, abort) => self.give_up(usize::from(who) % 2, abort),
            Act::Abort(n) => self.abort(n),
            Act::Late(n, ok) => self.late(n, ok),
            Act::Die(who) => self.die(usize::from(who) % 2),
            Act::Restart => self.restart(),
            Act::Expire(who, reads) => self.expire(usize::from(who) % 2, reads),
        }
    }

    /// How many slots are where.
    #[track_caller]
    pub(crate) fn is_as_the_model_says(&self) {
        let at = |place| {
            let puts = self.puts.iter().filter(|entry| entry.current);
            puts.filter(|entry| entry.put.place == place).count()
        };
        let (open, quarantined) = (at(Place::Open), at(Place::Quarantined));
        let of_now = self.slots.iter().filter(|(_, current)| *current).count();
        let free = CREDITS - open - quarantined - at(Place::Token) - of_now;
        eventually((free, open, quarantined), || {
            let health = self.sender().relay.health();
            (health.free, health.published, health.quarantined.len())
        });
        eventually(CREDITS, || self.hasty.relay.health().free);
        for receiver in &self.receivers {
            let free = 2 - usize::from(receiver.held.is_some());
            eventually(free, || receiver.relay.health().receive_free);
        }
        for entry in &self.puts {
            if let Some(token) = &entry.token {
                eventually(entry.put.is_done(), || token.is_done());
            }
        }
    }

    /// Everybody lets go: all is free.
    pub(crate) fn end(mut self) {
        (0..2).for_each(|who| self.finish(who));
        for entry in &mut self.puts {
            entry.token = None;
        }
        self.slots.clear();
        let open = self.puts.iter().filter(|entry| entry.current && entry.put.place == Place::Open);
        let (open, relay) = (open.count(), &self.sender().relay);
        eventually((CREDITS - open, open), || (relay.health().free, relay.health().published));
        let closed = relay.close(PATIENCE);
        assert_eq!((closed.puts, closed.quarantined, closed.threads), (open, 0, 0));
        assert_eq!(relay.health().free, CREDITS);
        assert!(self.reading.lock().is_empty());
    }

    fn acquire(&mut self) {
        let free = self.sender().relay.health().free;
        match self.sender().relay.try_acquire(LEN) {
            Ok(slot) => {
                assert!(free > 0);
                self.slots.push((slot, true));
            }
            Err(Error::Exhausted) => assert_eq!(free, 0),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn put(&mut self, mut slot: Slot, current: bool, keep: bool) {
        self.value += 1;
        fill(&mut slot, self.value);
        let made = self.sender().relay.put(slot, Tensor::bytes(LEN));
        if !current {
            return assert!(matches!(made, Err(Error::Config { .. })), "another relay's slot");
        }
        let (metadata, token) = made.unwrap();
        let (token, put) = (keep.then_some(token), Put::new(keep));
        self.puts.push(Entry { metadata, value: self.value, token, put, current });
    }

    fn take_token(&mut self, n: u8) {
        let Some(entry) = self.with_token(n) else { return };
        let token = entry.token.as_mut().unwrap();
        let Some(result) = token.poll() else {
            return assert!(!entry.put.is_done(), "the token has nothing");
        };
        assert!(entry.put.is_done(), "{result:?}, which nothing has caused");
        let outcome = match &result {
            Ok(_) => Outcome::Slot,
            Err(Error::Aborted) => Outcome::Aborted,
            Err(Error::PeerFailed { .. }) => Outcome::PeerFailed,
            Err(Error::Closed) => Outcome::Closed,
            Err(other) => panic!("{other:?}"),
        };
        assert_eq!(Some(outcome), entry.put.outcome);
        entry.token = None;
        entry.put.lose_token();
        if let Ok(slot) = result {
            is_filled(&slot, entry.value);
            let current = entry.current;
            self.slots.push((slot, current));
        }
    }

    fn get(&mut self, who: usize, put: usize) {
        let entry = &self.puts[put];
        let got = self.receivers[who].relay.get(&entry.metadata).unwrap().wait();
        match got {
            Ok(slot) => {
                assert_eq!(entry.put.place, Place::Open, "a get of what is over");
                is_filled(&slot, entry.value);
            }
            Err(Error::Stale { .. }) => assert_ne!(entry.put.place, Place::Open),
            Err(other) => panic!("{other:?}"),
        }
        self.puts[put].put.end(Outcome::Slot);
    }

    fn begin(&mut self, who: usize, put: usize) {
        let metadata = self.puts[put].metadata.clone();
        if self.receivers[who].held.is_some() {
            return;
        }
        let is_open = self.puts[put].put.place == Place::Open;
        match self.receivers[who].begin(&metadata) {
            Ok((hold, gate, token)) => {
                assert!(is_open, "a read of what is over began");
                self.puts[put].put.readers += 1;
                self.receivers[who].held = Some(Held { hold, gate, put, token: Some(token) });
            }
            Err(Error::Stale { .. }) => assert!(!is_open),
            Err(other) => panic!("{other:?}"),
        }
    }

    fn finish(&mut self, who: usize) {
        let Some(Held { gate, put, token, .. }) = self.receivers[who].held.take() else { return };
        gate.open();
        let entry = &mut self.puts[put];
        entry.put.leave();
        if let Some(token) = token {
            is_filled(&token.wait().unwrap(), entry.value);
            entry.put.end(Outcome::Slot);
        }
    }

    /// A get ends while its read goes on; the sender is told, and has the slot back after the read.
    fn give_up(&mut self, who: usize, abort: bool) {
        let Receiver { engine, relay, held, .. } = &mut self.receivers[who];
        let Some(held) = held else { return };
        let Some(token) = held.token.take() else { return };
        let entry = &mut self.puts[held.put];
        if abort {
            relay.abort(&entry.metadata).unwrap();
            assert!(matches!(token.wait(), Err(Error::Aborted)));
        } else {
            engine.inject(Event::PeerGone(entry.metadata.instance().unwrap()));
            assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        }
        entry.put.end(Outcome::PeerFailed);
    }

    fn abort(&mut self, n: u8) {
        let Some(put) = self.any_put(n) else { return };
        let aborted = self.sender().relay.abort(&self.puts[put].metadata);
        let entry = &mut self.puts[put];
        match aborted {
            Ok(()) => assert_eq!(entry.put.place, Place::Open),
            Err(Error::Stale { .. }) => assert_ne!(entry.put.place, Place::Open),
            Err(other) => panic!("{other:?}"),
        }
        entry.put.end(Outcome::Aborted);
    }

    /// It says what was said long ago, or was never said of that put: nothing changes.
    fn late(&mut self, n: u8, ok: bool) {
        let Some(put) = self.any_put(n) else { return };
        let entry = &self.puts[put];
        if entry.put.place == Place::Open {
            return;
        }
        let text = if ok { "transfer_complete" } else { "transfer_failed" };
        let counted = || {
            let counters = self.sender().relay.health().counters.relay;
            counters.notes_late + counters.notes_unknown
        };
        let before = counted();
        let late = Notification::new(entry.metadata.transfer_id(), text);
        self.sender().engine.inject(Event::Note(late));
        eventually(before + 1, counted);
    }

    fn die(&mut self, who: usize) {
        self.break_read(who);
        let receiver = &mut self.receivers[who];
        assert_eq!(receiver.relay.close(PATIENCE).threads, 0);
        *receiver = Receiver::new(&self.reading);
        self.receivers[who].meet(self.sender());
    }

    fn restart(&mut self) {
        (0..2).for_each(|who| self.break_read(who));
        let open = self.puts.iter().filter(|entry| entry.put.place == Place::Open).count();
        let closed = self.sender().relay.close(PATIENCE);
        assert_eq!((closed.puts, closed.quarantined, closed.threads), (open, 0, 0));
        for entry in &mut self.puts {
            entry.put.end(Outcome::Closed);
            entry.current = false;
        }
        self.slots.iter_mut().for_each(|(_, current)| *current = false);
        self.sender = None;
        self.sender = Some(Sender::new(&self.name, FOREVER, &self.reading));
        self.receivers.iter().for_each(|receiver| receiver.meet(self.sender()));
    }

    /// The read of that receiver ends with its process.
    fn break_read(&mut self, who: usize) {
        let Some(Held { hold, gate, put, token }) = self.receivers[who].held.take() else { return };
        hold.dies.store(true, Ordering::SeqCst);
        gate.open();
        if let Some(token) = token {
            assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        }
        let died = Event::ReaderGone(id(&self.puts[put].metadata));
        self.sender().engine.inject(died);
        let entry = &mut self.puts[put];
        entry.put.leave();
        entry.put.end(Outcome::PeerFailed);
        self.is_as_the_model_says();
    }

    /// Nobody acknowledges, or the one who would is too slow: the slot is the sender's again.
    fn expire(&mut self, who: usize, reads: bool) {
        self.value += 1;
        let mut slot = self.hasty.relay.try_acquire(LEN).unwrap();
        fill(&mut slot, self.value);
        let (metadata, token) = self.hasty.relay.put(slot, Tensor::bytes(LEN)).unwrap();
        let receiver = &self.receivers[who];
        let reads = reads && receiver.held.is_none();
        let begun = reads.then(|| receiver.begin(&metadata));
        let ended = token.wait();
        assert!(matches!(ended, Err(Error::TimedOut)), "{ended:?}");
        eventually(CREDITS, || self.hasty.relay.health().free);
        let late = match begun {
            None => receiver.relay.get(&metadata).unwrap().wait(),
            // It took longer to begin than the lease lasted.
            Some(Err(error)) => Err(error),
            Some(Ok((_hold, gate, token))) => {
                for _ in 0..CREDITS {
                    self.hasty.relay.try_acquire(LEN).unwrap().fill(0);
                }
                gate.open();
                token.wait()
            }
        };
        assert!(matches!(late, Err(Error::Stale { .. })), "{late:?}");
    }

    fn with_token(&mut self, n: u8) -> Option<&mut Entry> {
        let mut with: Vec<_> = self.puts.iter_mut().filter(|entry| entry.token.is_some()).collect();
        let at = usize::from(n).checked_rem(with.len())?;
        Some(with.swap_remove(at))
    }

    fn any_put(&self, n: u8) -> Option<usize> {
        // Those that are open are mostly the last.
        let at = usize::from(n).checked_rem(self.puts.len())?;
        Some(self.puts.len() - 1 - at)
    }

    fn sender(&self) -> &Sender {
        self.sender.as_ref().unwrap()
    }
}

impl Drop for World {
    /// Where the test fails in the middle of a read, that must not look at memory that goes.
    fn drop(&mut self) {
        for held in self.receivers.iter().filter_map(|receiver| receiver.held.as_ref()) {
            held.hold.dies.store(true, Ordering::SeqCst);
            held.gate.open();
        }
    }
}

fn id(metadata: &Metadata) -> TransferId {
    TransferId::of_name(metadata.transfer_id()).unwrap()
}

fn take<T>(list: &mut Vec<T>, n: u8) -> Option<T> {
    let at = usize::from(n).checked_rem(list.len())?;
    Some(list.swap_remove(at))
}

fn fill(slot: &mut Slot, value: u64) {
    slot.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
}

#[track_caller]
fn is_filled(slot: &Slot, value: u64) {
    assert_eq!(slot.len(), LEN);
    let words = slot.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    for word in words {
        assert_eq!(word, value, "an `Ok` with the bytes of another put");
    }
}
