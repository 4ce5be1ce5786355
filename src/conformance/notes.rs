//! Cases: notifications.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};

use super::{
    LIMIT,
    side::{PATIENCE, Side, soon},
    within,
};
use crate::{Engine, Notification, doorbell::Sleeper};

/// A note that was taken is reported once, and says what was sent.
pub fn a_note_is_reported_exactly_once(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        for message in ["transfer_complete", "transfer_failed", "something else"] {
            let note = Notification::new("stage0_0123456789abcdef0123456789abcdef", message);
            teller.tell(&hearer, &note);
            assert_eq!(hearer.poll_until(1), [note], "the note was not reported once");
        }
        assert_nothing_more(&hearer, &teller);
    });
}

/// Notes that one thread sends one after another are reported in that order.
pub fn notes_of_one_thread_keep_their_order(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        for batch in 0..10 {
            let sent: Vec<_> = (0..20).map(|n| numbered(batch * 20 + n)).collect();
            for note in &sent {
                teller.tell(&hearer, note);
            }
            assert_eq!(hearer.poll_until(sent.len()), sent, "the notes came in another order");
        }
        assert_nothing_more(&hearer, &teller);
    });
}

/// Notes of many threads and of several peers all arrive, each once.
pub fn notes_of_many_threads_all_arrive(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, first) = Side::pair(make, 1, 4096);
    let second = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        let (threads, each) = (6, 50);
        let mut heard = thread::scope(|scope| {
            for thread in 0..threads {
                let teller = if thread % 2 == 0 { &first } else { &second };
                let hearer = &hearer;
                scope.spawn(move || {
                    for n in 0..each {
                        teller.tell(hearer, &numbered(thread * each + n));
                    }
                });
            }
            hearer.poll_until(threads * each)
        });
        assert_nothing_more(&hearer, &first);
        heard.sort_by(|a, b| a.name().cmp(b.name()));
        let sent: Vec<_> = (0..threads * each).map(numbered).collect();
        assert_eq!(heard, sent, "some notes are missing, or came twice");
    });
}

/// Names of 1 to 300 bytes and texts of any script arrive byte for byte.
pub fn texts_of_any_length_and_script_arrive_unchanged(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let mut notes: Vec<_> =
            (1..=300).map(|len| Notification::new(&"n".repeat(len), "transfer_complete")).collect();
        for text in
            ["Größe_7", "段階・零", "этап 0", "🦀🦀", "a\"b\\c/d", "a\tb\nc", "{\"x\":[1]}", " "]
        {
            notes.push(Notification::new(text, text));
            notes.push(Notification::new(&text.repeat(20), &text.repeat(30)));
        }
        for note in notes {
            teller.tell(&hearer, &note);
            let heard = hearer.poll_until(1);
            assert_eq!((heard.len(), heard[0].name()), (1, note.name()));
            assert_eq!(heard[0].message(), note.message());
        }
    });
}

/// However many notes wait to be polled: those that were taken are reported, in order.
///
/// An engine bounds its inbox by an error of `notify`, and not by losing what it took.
pub fn a_note_that_was_taken_is_never_lost(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let mut taken = Vec::new();
        for n in 0..5000 {
            let note = numbered(n);
            if teller.engine.notify(hearer.engine.session_id(), &note, soon()).is_err() {
                break;
            }
            taken.push(note);
        }
        assert!(!taken.is_empty(), "not one note was taken");
        assert!(hearer.poll_until(taken.len()) == taken, "a note that was taken is missing");
        // There is room again.
        assert_nothing_more(&hearer, &teller);
    });
}

/// A note to who is not there is an error, and does not come back.
pub fn a_note_to_an_unknown_peer_is_an_error(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        for name in ["", "nobody", "127.0.0.1:1"] {
            let told = teller.engine.notify(name, &numbered(0), soon());
            assert!(told.is_err(), "nobody can have taken it");
        }
        assert_eq!(teller.poll(), []);
        assert_nothing_more(&hearer, &teller);
    });
}

/// An engine is a peer of itself.
pub fn an_engine_notifies_itself(make: &dyn Fn() -> Arc<dyn Engine>) {
    let side = Side::new(make(), 1, 4096);
    within(LIMIT, move || {
        side.tell(&side, &numbered(1));
        assert_eq!(side.poll_until(1), [numbered(1)]);
        assert_nothing_more(&side, &side);
    });
}

/// `poll` returns at once, and without events if there are none.
pub fn poll_reports_nothing_where_nothing_came(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        for _ in 0..1000 {
            assert_eq!(hearer.poll(), []);
        }
        // Neither a read nor what its teller polls is an event.
        let publication = hearer.publish(0, &[1; 4096]);
        teller.get(&hearer.remote(&publication)).expect("it is published");
        teller.tell(&hearer, &numbered(1));
        assert_eq!(teller.poll(), []);
        assert_eq!(hearer.poll_until(1), [numbered(1)]);
        assert_eq!(hearer.poll(), []);
    });
}

/// A thread that polls hears a note that another thread sends later.
pub fn a_polling_thread_hears_a_later_note(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        thread::scope(|scope| {
            let (tx, polling) = mpsc::channel();
            let hearer = &hearer;
            let hearing = scope.spawn(move || {
                assert_eq!(hearer.poll(), []);
                tx.send(()).expect("the other thread listens");
                hearer.poll_until(1)
            });
            polling.recv().expect("the thread polls");
            teller.tell(hearer, &numbered(1));
            assert_eq!(hearing.join().expect("the poll does not panic"), [numbered(1)]);
        });
    });
}

/// Who armed the doorbell, polled, and sleeps is woken by a note. Holds for engines that have one.
pub fn the_doorbell_wakes_a_sleeper(make: &dyn Fn() -> Arc<dyn Engine>) {
    let (hearer, teller) = Side::pair(make, 1, 4096);
    within(LIMIT, move || {
        let Some(bell) = hearer.engine.doorbell() else { return };
        for round in 0..20 {
            thread::scope(|scope| {
                let mut ticket = bell.arm(Sleeper::Notifier);
                assert_eq!(hearer.poll(), []);
                scope.spawn(|| teller.tell(&hearer, &numbered(round)));
                let until = Instant::now() + PATIENCE;
                let heard = loop {
                    bell.sleep(ticket, Sleeper::Notifier, until);
                    assert!(Instant::now() < until, "nobody rang");
                    ticket = bell.arm(Sleeper::Notifier);
                    let heard = hearer.poll();
                    if !heard.is_empty() {
                        break heard;
                    }
                };
                bell.disarm();
                assert_eq!(heard, [numbered(round)]);
            });
        }
    });
}

impl Side {
    #[track_caller]
    fn tell(&self, hearer: &Self, note: &Notification) {
        let told = self.engine.notify(hearer.engine.session_id(), note, soon());
        told.expect("the peer lives and polls");
    }
}

fn numbered(n: usize) -> Notification {
    Notification::new(&format!("stage0_{n:032x}"), "transfer_complete")
}

/// Sends a last note, which comes after all others, and nothing with it.
#[track_caller]
fn assert_nothing_more(hearer: &Side, teller: &Side) {
    let last = Notification::new("last", "transfer_failed");
    teller.tell(hearer, &last);
    assert_eq!(hearer.poll_until(1), [last], "something was reported that was not sent");
    assert_eq!(hearer.poll(), [], "a note was reported twice");
}
