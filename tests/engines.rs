//! The engine contract, for every engine; and the proof that its cases can fail.
#![cfg(feature = "conformance")]

mod common;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use mooncake_relay::{
    EmbeddedEngine, Engine, InProcessEngine,
    conformance::{self, Case, within},
    engine_suite,
};

use crate::common::broken::{Fault, broken};

engine_suite!(in_process, in_process_engine);
engine_suite!(in_process_with_writes, || Arc::new(fresh().allow_writes(true)));
engine_suite!(wrapped, || broken(in_process_engine(), Fault::None));
#[cfg(feature = "embedded")]
engine_suite!(embedded_local, || Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()));
#[cfg(feature = "embedded")]
engine_suite!(embedded_tcp, || tcp("127.0.0.1:0"));
#[cfg(feature = "embedded")]
engine_suite!(embedded_tcp_ipv6, || tcp(if common::has_ipv6() {
    "[::1]:0"
} else {
    "127.0.0.1:0"
}));
#[cfg(feature = "mooncake")]
engine_suite!(mooncake, mooncake_engine);

#[test]
fn every_broken_engine_fails_its_case() {
    let expected: &[(Fault, Case)] = &[
        (Fault::WrongByte, conformance::bytes_arrive_unchanged_at_every_size),
        (Fault::Overrun, conformance::bytes_arrive_unchanged_at_every_size),
        (Fault::Unverified, conformance::a_read_of_another_put_is_never_proven),
        (Fault::Unverified, conformance::a_slot_published_anew_does_not_answer_for_the_put_before),
        (Fault::Unverified, conformance::a_read_without_identity_is_served_but_not_verified),
        (Fault::ReadsIntoNothing, conformance::read_into_fills_the_destination_or_declines),
        (Fault::ManyInReverse, conformance::read_many_answers_in_the_order_asked),
        (Fault::LostBuffer, conformance::every_buffer_comes_back_exactly_once),
        (Fault::WriteLies, conformance::a_write_is_refused_or_done),
        (Fault::TooMuch, conformance::a_read_outside_the_publication_is_refused),
        (Fault::KeepsServing, conformance::nothing_is_served_after_a_retraction),
        (Fault::KeepsServing, conformance::a_cut_ends_the_reads_under_way),
        (Fault::ReadingForNobody, conformance::retract_is_quiet_when_nobody_reads),
        (Fault::UnregisterLies, conformance::a_span_can_be_registered_again),
        (Fault::RegistersTwice, conformance::registering_what_is_registered_is_an_error),
        (Fault::StartsTwice, conformance::starting_twice_is_an_error),
        (Fault::NoDeadline, conformance::a_deadline_that_has_passed_is_an_error),
        (Fault::NoteTwice, conformance::a_note_is_reported_exactly_once),
        (Fault::NoteLost, conformance::a_polling_thread_hears_a_later_note),
        (Fault::NotesInReverse, conformance::notes_of_one_thread_keep_their_order),
        (Fault::ShortNames, conformance::texts_of_any_length_and_script_arrive_unchanged),
        (Fault::UnknownTakesNotes, conformance::a_note_to_an_unknown_peer_is_an_error),
        (Fault::SilentBell, conformance::the_doorbell_wakes_a_sleeper),
    ];
    thread::scope(|scope| {
        for &(fault, case) in expected {
            scope.spawn(move || assert!(fails(fault, case), "{fault:?} was not noticed"));
        }
    });
}

#[test]
fn a_quiet_that_comes_too_early_is_noticed() {
    // It takes a read that is caught in the middle, so it is given more than one chance.
    let noticed =
        (0..10).any(|_| fails(Fault::QuietTooEarly, conformance::no_byte_is_delivered_after_quiet));
    assert!(noticed);
}

#[test]
fn what_hangs_is_noticed() {
    let hang = || within(Duration::from_millis(10), thread::park);
    assert!(catch_unwind(hang).is_err());
    assert_eq!(within(Duration::from_secs(60), || 7), 7);
}

#[test]
fn the_list_of_cases_names_each_once() {
    let mut names: Vec<_> = conformance::CASES.iter().map(|(name, _)| *name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

fn fails(fault: Fault, case: Case) -> bool {
    catch_unwind(AssertUnwindSafe(|| case(&|| broken(in_process_engine(), fault)))).is_err()
}

#[cfg(feature = "embedded")]
fn tcp(listen: &str) -> Arc<dyn Engine> {
    Arc::new(EmbeddedEngine::builder(listen).local(false).bind().expect("a free port"))
}

fn in_process_engine() -> Arc<dyn Engine> {
    Arc::new(fresh())
}

/// The real engine; where there is none, that is said aloud, and another stands in for it.
#[cfg(feature = "mooncake")]
fn mooncake_engine() -> Arc<dyn Engine> {
    match common::real::engine() {
        Some(engine) => Arc::new(engine),
        None => in_process_engine(),
    }
}

fn fresh() -> InProcessEngine {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("engine-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    InProcessEngine::new(&name).expect("the name is new")
}
