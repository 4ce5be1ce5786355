//! The [`Engine`] contract as functions, to be run against an engine of one's own.
//!
//! Each case is a public function; it takes what makes an engine, and panics if the engine breaks
//! its contract. Every call of `make` gives a fresh engine, not yet started; all of them are peers
//! of each other. [`engine_suite!`](crate::engine_suite) turns the cases into tests:
//!
//! ```
//! use std::sync::{Arc, atomic::{AtomicU32, Ordering}};
//! use mooncake_relay::{Engine, InProcessEngine, conformance};
//!
//! // Stands for an engine of your own.
//! fn make() -> Arc<dyn Engine> {
//!     static NEXT: AtomicU32 = AtomicU32::new(0);
//!     let name = format!("mine-{}", NEXT.fetch_add(1, Ordering::Relaxed));
//!     Arc::new(InProcessEngine::new(&name).expect("the name is new"))
//! }
//!
//! mooncake_relay::engine_suite!(mine, make); // in a file of `tests/`: `mine::…`, a test per case
//!
//! fn main() {
//!     conformance::a_note_is_reported_exactly_once(&make); // or one at a time
//! }
//! ```
//!
//! An engine that cannot keep a part of the contract, because what lies under it cannot, picks
//! its cases from [`CASES`] and says which it leaves out.
//!
//! # What the cases leave open
//!
//! - Bytes count as *proven* if the engine says `verified`, or if the stamp, read after them, is
//!   that put's. Where an engine cannot verify, a read of another put's bytes may succeed, and is
//!   refused by its stamp. In no case is it `Ok` and proven.
//! - An engine whose [`retract`](crate::Engine::retract) says `Unknown` may serve all that is
//!   registered, whether it is published or not, if it verifies none of it.
//! - A read that fails may keep its buffer, if it gives it back within the case.
//! - [`Retracted::Unknown`](crate::Retracted::Unknown) is accepted wherever the engine would have
//!   to know who reads. That a read under way is told cannot be arranged from outside; that
//!   nothing is delivered after [`Retracted::Quiet`](crate::Retracted::Quiet) can.
//! - [`unregister`](crate::Engine::unregister) of a span that was never registered may be an
//!   error or do nothing.
//! - A write may be refused or done, but not refused and done.
//!
//! The cases use host memory and loopback only. Each ends within a minute, or panics.

mod lifetimes;
mod locals;
mod notes;
mod peers;
mod reads;
mod registration;
mod side;

use std::{
    panic,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

pub use self::{lifetimes::*, notes::*, peers::*, reads::*, registration::*};
use crate::engine::Engine;

/// One case: gets what makes an engine, and panics if the engine breaks its contract.
pub type Case = fn(&dyn Fn() -> Arc<dyn Engine>);

/// Runs `f` on a thread of its own, and panics if it takes longer than `limit`.
///
/// # Panics
///
/// Also if `f` panics.
pub fn within<T: Send + 'static>(limit: Duration, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (tx, rx) = mpsc::sync_channel(1);
    let name = thread::current().name().unwrap_or("conformance").to_owned();
    let thread = thread::Builder::new()
        .name(name)
        .spawn(move || tx.send(f()))
        .expect("the system has a thread for a test");
    match rx.recv_timeout(limit) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still not done after {limit:?}: it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panicked) => panic::resume_unwind(panicked),
            Ok(_) => unreachable!("a thread that did not panic has sent its value"),
        },
    }
}

/// Calls the macro `$with` with `$args`, then a `;`, then the name of every case.
#[doc(hidden)]
#[macro_export]
macro_rules! __with_every_case {
    ($with:ident! $($args:tt)*) => {
        $crate::$with! { $($args)*;
            bytes_arrive_unchanged_at_every_size
            a_read_is_verified_or_its_stamp_is_right
            a_read_without_identity_is_served_but_not_verified
            a_part_of_a_publication_can_be_read
            an_identified_read_of_no_bytes_proves_the_identity
            a_read_of_another_put_is_never_proven
            a_read_outside_the_publication_is_refused
            what_is_not_published_is_not_served
            the_stamp_is_served_after_the_retraction_too
            read_into_fills_the_destination_or_declines
            read_many_answers_in_the_order_asked
            read_many_fails_what_fails_and_nothing_else
            two_peers_read_one_publication
            many_threads_read_at_once
            an_engine_reads_from_itself
            a_write_is_refused_or_done
            every_buffer_comes_back_exactly_once
            retract_is_quiet_when_nobody_reads
            nothing_is_served_after_a_retraction
            a_slot_published_anew_does_not_answer_for_the_put_before
            a_late_retraction_leaves_the_next_put_open
            no_byte_is_delivered_after_quiet
            a_cut_ends_the_reads_under_way
            unregister_waits_for_reads_or_ends_them
            delivered_bytes_outlive_the_senders_slot
            registering_nothing_is_an_error
            registering_what_is_registered_is_an_error
            a_span_can_be_registered_again
            unregistering_the_unknown_harms_nothing
            starting_twice_is_an_error
            a_restarted_engine_serves_only_its_new_instance
            stop_ends_a_read_that_waits
            an_unknown_peer_is_an_error
            a_dead_peer_is_an_error
            a_silent_peer_is_an_error_by_the_deadline
            a_deadline_that_has_passed_is_an_error
            a_distant_deadline_is_no_error
            a_living_peer_can_be_connected_to
            a_note_is_reported_exactly_once
            notes_of_one_thread_keep_their_order
            notes_of_many_threads_all_arrive
            texts_of_any_length_and_script_arrive_unchanged
            a_note_that_was_taken_is_never_lost
            a_note_to_an_unknown_peer_is_an_error
            an_engine_notifies_itself
            poll_reports_nothing_where_nothing_came
            a_polling_thread_hears_a_later_note
            the_doorbell_wakes_a_sleeper
        }
    };
}

/// Makes a module of tests, one for each case of [`conformance`](crate::conformance).
///
/// It takes the module's name and what makes an engine: a function or a closure that returns
/// `Arc<dyn Engine>`. Names in it are looked up where the macro is called.
#[macro_export]
macro_rules! engine_suite {
    ($module:ident, $make:expr) => {
        #[cfg(test)]
        mod $module {
            #[allow(unused_imports, reason = "the expression may name nothing")]
            use super::*;

            $crate::__with_every_case! { __tests_of_cases! ($make) }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests_of_cases {
    ($make:tt; $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::$case(&$make);
            }
        )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __list_of_cases {
    (; $($case:ident)*) => {
        /// Every case, with its name.
        pub const CASES: &[(&str, Case)] = &[$((stringify!($case), $case)),*];
    };
}

crate::__with_every_case! { __list_of_cases! }

/// How long a case may take; all of them together take a few seconds.
const LIMIT: Duration = Duration::from_secs(120);
