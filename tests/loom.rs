//! Every interleaving of the lock-free parts, within loom's preemption bound: `make loom`.
//!
//! Each model is shown to fail when an ordering it rests on is weakened: `CONTRIBUTING.md` lists the
//! mutations that were tried.
#![cfg(loom)]

#[path = "loom/life.rs"]
mod life;
#[path = "loom/shared.rs"]
mod shared;

use std::time::Duration;

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
use mooncake_relay::{
    Doorbell, Error, TransferId,
    internal::{Credits, Puts, Seen, Sleeper, Tokens, wakes},
};

#[test]
fn l1_a_waiter_gets_the_outcome() {
    loom::model(|| {
        let (completer, token) = Tokens::make(&Tokens::<u32>::new());
        let completing = thread::spawn(move || completer.complete(Ok(7)));
        assert_eq!(token.wait().unwrap(), 7);
        completing.join().unwrap();
    });
}

#[test]
fn a_poll_a_timeout_and_a_wait_give_the_outcome_once() {
    loom::model(|| {
        let (completer, mut token) = Tokens::make(&Tokens::<u32>::new());
        let completing = thread::spawn(move || completer.complete(Ok(7)));
        let first = token.poll();
        let outcome =
            first.or_else(|| token.wait_timeout(Duration::ZERO)).unwrap_or_else(|| token.wait());
        assert_eq!(outcome.unwrap(), 7);
        completing.join().unwrap();
    });
}

#[test]
fn a_token_whose_outcome_was_taken_has_no_other() {
    loom::model(|| {
        let (completer, mut token) = Tokens::make(&Tokens::<u32>::new());
        let completing = thread::spawn(move || completer.complete(Ok(7)));
        let polled = token.poll().is_some();
        if polled {
            assert!(token.is_done());
            assert!(token.wait_timeout(Duration::ZERO).is_none());
            assert!(matches!(token.wait(), Err(Error::Closed)));
        }
        completing.join().unwrap();
    });
}

#[test]
fn an_attached_channel_gets_exactly_one_message() {
    loom::model(|| {
        let (tx, rx) = loom::sync::mpsc::channel();
        let (completer, token) = Tokens::make(&Tokens::<u32>::new());
        let completing = thread::spawn(move || completer.complete(Ok(7)));
        token.attach(&tx, 1);
        let completion = rx.recv().unwrap();
        assert_eq!((completion.tag, completion.result.unwrap()), (1, 7));
        completing.join().unwrap();
        assert!(rx.try_recv().is_err());
    });
}

/// Counts its drops.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_dropped_token_drops_the_outcome_once() {
    loom::model(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let (completer, token) = Tokens::make(&Tokens::<Counted>::new());
        let value = Counted(Arc::clone(&drops));
        let completing = thread::spawn(move || completer.complete(Ok(value)));
        drop(token);
        completing.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_token_dropped_after_the_completer_has_left_drops_the_outcome_once() {
    loom::model(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let (completer, token) = Tokens::make(&Tokens::<Counted>::new());
        let value = Counted(Arc::clone(&drops));
        let completing = thread::spawn(move || completer.complete(Ok(value)));
        // loom would not begin with the other thread by itself.
        thread::yield_now();
        drop(token);
        completing.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_dropped_completer_closes_the_token() {
    loom::model(|| {
        let (completer, token) = Tokens::make(&Tokens::<u32>::new());
        let dropping = thread::spawn(move || drop(completer));
        assert!(matches!(token.wait(), Err(Error::Closed)));
        dropping.join().unwrap();
    });
}

#[test]
fn a_cell_is_used_again_only_after_both_ends_have_left() {
    loom::model(|| {
        let tokens = Tokens::<u32>::new();
        // Both of the first chunk's cells are out, so the next hand-off takes one that came back.
        let (_kept, _also_kept) = Tokens::make(&tokens);
        let (completer, token) = Tokens::make(&tokens);
        let completing = thread::spawn(move || completer.complete(Ok(7)));
        assert_eq!(token.wait().unwrap(), 7);
        let (completer, token) = Tokens::make(&tokens);
        let again = thread::spawn(move || completer.complete(Ok(8)));
        assert_eq!(token.wait().unwrap(), 8);
        completing.join().unwrap();
        again.join().unwrap();
    });
}

#[test]
fn a_cell_that_went_and_came_back_meanwhile_is_not_given_twice() {
    // One switch in the middle of a `make` is what it takes, and more make the model large.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(1);
    model.check(|| {
        let tokens = Tokens::<u32>::new();
        let other = Arc::clone(&tokens);
        let shuffling = thread::spawn(move || {
            let first = Tokens::make(&other);
            let second = Tokens::make(&other);
            drop(first);
            second
        });
        let mine = [Tokens::make(&tokens), Tokens::make(&tokens)];
        let all = mine.into_iter().chain([shuffling.join().unwrap()]);
        let (completers, claims): (Vec<_>, Vec<_>) = all.unzip();
        for (n, completer) in completers.into_iter().enumerate() {
            completer.complete(Ok(n as u32));
        }
        for (n, token) in claims.into_iter().enumerate() {
            assert_eq!(token.wait().unwrap(), n as u32);
        }
    });
}

#[test]
fn l1_two_threads_never_get_the_same_cell() {
    loom::model(|| {
        let tokens = Tokens::<u32>::new();
        let other = Arc::clone(&tokens);
        let making = thread::spawn(move || {
            let (completer, token) = Tokens::make(&other);
            completer.complete(Ok(1));
            assert_eq!(token.wait().unwrap(), 1);
        });
        let (completer, token) = Tokens::make(&tokens);
        completer.complete(Ok(2));
        assert_eq!(token.wait().unwrap(), 2);
        making.join().unwrap();
    });
}

const ID: TransferId = TransferId { random: 5, slot: 0, generation: 1 };

fn seen(id: TransferId) -> Seen {
    Seen { id, quarantined: false, lease_ends: 9, since: 1, request: 0 }
}

/// A slot's bytes: loom reports two owners at once, or an unordered pair of them.
struct Bytes(UnsafeCell<u32>);

// SAFETY: that is what the model checks.
unsafe impl Sync for Bytes {}
// SAFETY: as above.
unsafe impl Send for Bytes {}

impl Bytes {
    fn touch(&self) {
        // SAFETY: loom reports it if this is not exclusive.
        self.0.with_mut(|bytes| unsafe { *bytes += 1 });
    }

    fn look(&self) -> u32 {
        // SAFETY: as above, of who writes meanwhile.
        self.0.with(|bytes| unsafe { *bytes })
    }
}

#[test]
fn of_those_who_end_a_put_exactly_one_wins() {
    loom::model(|| {
        let shared = Arc::new((Puts::new(1), Bytes(UnsafeCell::new(0)), AtomicUsize::new(0)));
        shared.1.touch();
        shared.0.open(&seen(ID), 7_u32);
        let end = |shared: &(Puts<u32>, Bytes, AtomicUsize)| {
            if let Some(entry) = shared.0.claim(ID) {
                assert_eq!(entry, 7);
                shared.1.touch();
                shared.2.fetch_add(1, Ordering::Relaxed);
                shared.0.vacate(ID);
            }
        };
        let other = Arc::clone(&shared);
        let ending = thread::spawn(move || end(&other));
        end(&shared);
        ending.join().unwrap();
        assert_eq!(shared.2.load(Ordering::Relaxed), 1);
        assert!(shared.0.seen(0).is_none());
    });
}

#[test]
fn what_the_putter_wrote_is_seen_by_who_ends_the_put() {
    loom::model(|| {
        let shared = Arc::new((Puts::new(1), Bytes(UnsafeCell::new(0))));
        let other = Arc::clone(&shared);
        let ending = thread::spawn(move || {
            if let Some(entry) = other.0.claim(ID) {
                assert_eq!(entry, 7_u32);
                other.1.touch();
                other.0.vacate(ID);
            }
        });
        shared.1.touch();
        shared.0.open(&seen(ID), 7);
        ending.join().unwrap();
    });
}

#[test]
fn a_quarantined_slot_is_let_go_once_and_no_late_note_ends_it() {
    loom::model(|| {
        let shared = Arc::new((Puts::new(1), Bytes(UnsafeCell::new(0)), AtomicUsize::new(0)));
        shared.0.open(&seen(ID), 7_u32);
        let visit = |shared: &(Puts<u32>, Bytes, AtomicUsize)| {
            if let Some(entry) = shared.0.revisit(0) {
                assert_eq!(entry, 7);
                shared.1.touch();
                shared.2.fetch_add(1, Ordering::Relaxed);
                shared.0.vacate(ID);
            }
        };
        let other = Arc::clone(&shared);
        let visiting = thread::spawn(move || visit(&other));
        let entry = shared.0.claim(ID).unwrap();
        shared.1.touch();
        shared.0.quarantine(ID, entry);
        assert!(shared.0.claim(ID).is_none());
        visit(&shared);
        visiting.join().unwrap();
        assert_eq!(shared.2.load(Ordering::Relaxed), 1);
        assert_eq!(shared.0.quarantined(), 0);
        assert_eq!(shared.0.each_quarantined().count(), 0);
    });
}

#[test]
fn l1_a_late_note_never_ends_the_next_put_of_its_slot() {
    loom::model(|| {
        let puts = Arc::new(Puts::new(1));
        puts.open(&seen(ID), 7_u32);
        let late = Arc::clone(&puts);
        let doubled = thread::spawn(move || {
            for _ in 0..2 {
                if let Some(entry) = late.claim(ID) {
                    assert_eq!(entry, 7);
                    late.vacate(ID);
                }
            }
        });
        if let Some(entry) = puts.claim(ID) {
            assert_eq!(entry, 7);
            puts.vacate(ID);
            let next = TransferId { random: 6, slot: 0, generation: puts.next_generation(0) };
            puts.open(&seen(next), 8);
            doubled.join().unwrap();
            assert_eq!(puts.claim(next), Some(8));
        } else {
            doubled.join().unwrap();
        }
    });
}

#[test]
fn an_id_with_another_secret_ends_nothing() {
    loom::model(|| {
        let puts = Puts::new(1);
        puts.open(&seen(ID), 7_u32);
        assert!(puts.claim(TransferId { random: 6, ..ID }).is_none());
        assert!(puts.claim(TransferId { generation: 2, ..ID }).is_none());
        assert!(puts.claim(TransferId { slot: 1, ..ID }).is_none());
        assert_eq!(puts.claim(ID), Some(7));
    });
}

#[test]
fn what_is_seen_of_an_open_put_is_whole() {
    loom::model(|| {
        let puts = Arc::new(Puts::new(1));
        let other = Arc::clone(&puts);
        let looking = thread::spawn(move || {
            if let Some(now) = other.seen(0) {
                assert_eq!(now, seen(ID));
            }
        });
        puts.open(&seen(ID), 7_u32);
        looking.join().unwrap();
    });
}

#[test]
fn a_sleeper_sees_the_event_or_the_ringer_sees_the_sleeper() {
    loom::model(|| {
        let before = wakes();
        let shared = Arc::new((Doorbell::new(), AtomicUsize::new(0)));
        let other = Arc::clone(&shared);
        let ringing = thread::spawn(move || {
            other.1.store(1, Ordering::Relaxed);
            other.0.ring();
        });
        shared.0.arm(Sleeper::Notifier);
        let seen = shared.1.load(Ordering::Relaxed) == 1;
        ringing.join().unwrap();
        assert!(seen || wakes() > before, "it sleeps, and nobody rings again");
    });
}

/// Queues, and leaves with the credit that came.
fn wait_for_one_of(credits: &Arc<Credits>) -> impl FnOnce() -> Option<u32> + 'static {
    let credits = Arc::clone(credits);
    move || {
        let queued = credits.enqueue();
        while queued.credit().is_none() {
            thread::yield_now();
        }
        queued.leave()
    }
}

#[test]
fn l1_a_credit_that_comes_back_reaches_who_waits() {
    loom::model(|| {
        let credits = Arc::new(Credits::full(1));
        let credit = credits.try_take().unwrap();
        let waiting = thread::spawn(wait_for_one_of(&credits));
        credits.give_back(credit);
        assert_eq!(waiting.join().unwrap(), Some(0));
        assert_eq!((credits.free(), credits.waiting()), (0, 0));
    });
}

#[test]
fn who_finds_no_warm_credit_and_no_cold_one_finds_the_one_that_came_back_meanwhile() {
    loom::model(|| {
        let credits = Arc::new(Credits::with_warm(2, 1));
        let credit = credits.try_take().unwrap();
        let other = Arc::clone(&credits);
        let taking = thread::spawn(move || other.try_take());
        credits.give_back(credit);
        credits.take_cold();
        assert!(taking.join().unwrap().is_some(), "one was free all the while");
    });
}

#[test]
fn l1_a_cold_credit_that_comes_back_reaches_who_waits() {
    loom::model(|| {
        let credits = Arc::new(Credits::with_warm(2, 1));
        let [warm, cold] = [(); 2].map(|()| credits.try_take().unwrap());
        let waiting = thread::spawn(wait_for_one_of(&credits));
        credits.give_back(warm);
        credits.give_back(cold);
        assert!(waiting.join().unwrap().is_some());
        assert_eq!((credits.free(), credits.waiting()), (1, 0));
    });
}

#[test]
fn who_gives_up_waiting_leaves_the_credit_or_takes_it_along() {
    loom::model(|| {
        let credits = Arc::new(Credits::full(1));
        let credit = credits.try_take().unwrap();
        let other = Arc::clone(&credits);
        let giving_up = thread::spawn(move || other.enqueue().leave());
        credits.give_back(credit);
        let taken = giving_up.join().unwrap();
        assert_eq!(credits.free(), usize::from(taken.is_none()));
        assert_eq!(credits.waiting(), 0);
    });
}

#[test]
fn who_starves_gets_the_credit_or_hears_of_it() {
    loom::model(|| {
        let heard = Arc::new(AtomicUsize::new(0));
        let credits = Arc::new(Credits::full(1));
        let report = Arc::clone(&heard);
        credits.on_return(move || {
            report.fetch_add(1, Ordering::Relaxed);
        });
        let credit = credits.try_take().unwrap();
        let other = Arc::clone(&credits);
        let starving = thread::spawn(move || other.take_or_starve());
        credits.give_back(credit);
        let taken = starving.join().unwrap();
        assert!(taken.is_some() || heard.load(Ordering::Relaxed) > 0);
    });
}

#[test]
fn a_ring_before_the_sleeper_lies_down_makes_its_ticket_stale() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::new());
        // The notifier stands back; the driver that it stands back for leaves; an event comes.
        let ticket = bell.ticket();
        bell.arm(Sleeper::Notifier);
        let other = Arc::clone(&bell);
        thread::spawn(move || other.ring()).join().unwrap();
        assert_ne!(bell.ticket(), ticket, "the notifier would sleep through the event");
    });
}
