//! Any order of acquire, put, get, abort, lease and death, beside a model that knows of each slot
//! where it is: every `Ok` has the bytes of its put, every end is the one that was caused, and no
//! credit is lost or made.
//!
//! The orders are the same in every run. `MOONCAKE_RELAY_TEST_ORDERS=5000` tries so many, and
//! others each time.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod model;
mod sides;
mod world;

use std::{env, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use self::{common::within, world::World};

/// What may happen next. A number chooses among what there is, so that every order makes sense.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Take a slot without waiting.
    Acquire,
    /// Let go of a slot, filled or not.
    Drop(u8),
    /// Put one; whether the token is kept.
    Put(u8, bool),
    /// Put one whose shape is wrong: the slot is free again.
    PutWrongly(u8),
    /// Look at a token, and take what it has.
    Take(u8),
    /// Drop a token, done or not.
    Abandon(u8),
    /// Get a put, whether it is still open or long over.
    Get(u8, u8),
    /// Begin a get that stops in the middle of its read.
    Begin(u8, u8),
    /// The read that stopped goes on.
    Finish(u8),
    /// The get whose read has stopped is aborted, or its sender is said to be gone.
    Give(u8, bool),
    /// The putter aborts.
    Abort(u8),
    /// A note of a put that is over.
    Late(u8, bool),
    /// A receiver dies, in the middle of a read or not, and another takes its place.
    Die(u8),
    /// The sender closes with all that it has open, and another takes its address.
    Restart,
    /// A put whose lease ends, with a reader in the middle or none.
    Expire(u8, bool),
}

fn acts() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => Just(Act::Acquire),
        1 => any::<u8>().prop_map(Act::Drop),
        6 => any::<(u8, bool)>().prop_map(|(slot, keep)| Act::Put(slot, keep)),
        1 => any::<u8>().prop_map(Act::PutWrongly),
        3 => any::<u8>().prop_map(Act::Take),
        1 => any::<u8>().prop_map(Act::Abandon),
        4 => any::<(u8, u8)>().prop_map(|(who, put)| Act::Get(who, put)),
        4 => any::<(u8, u8)>().prop_map(|(who, put)| Act::Begin(who, put)),
        3 => any::<u8>().prop_map(Act::Finish),
        1 => any::<(u8, bool)>().prop_map(|(who, abort)| Act::Give(who, abort)),
        2 => any::<u8>().prop_map(Act::Abort),
        2 => any::<(u8, bool)>().prop_map(|(put, ok)| Act::Late(put, ok)),
        1 => any::<u8>().prop_map(Act::Die),
        1 => Just(Act::Restart),
        1 => any::<(u8, bool)>().prop_map(|(who, reads)| Act::Expire(who, reads)),
    ]
}

fn run(acts: &[Act]) {
    let mut world = World::new();
    for act in acts {
        world.act(*act);
        world.is_as_the_model_says();
    }
    world.end();
}

#[test]
fn whatever_the_order_each_ok_has_its_bytes_and_each_credit_comes_back() {
    let more = env::var("MOONCAKE_RELAY_TEST_ORDERS").ok();
    let cases = more.as_ref().map_or(150, |more| more.parse().expect("a number of orders"));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    // A second for each order is more than ten times what it takes.
    within(Duration::from_secs(60 + u64::from(cases)), move || {
        let mut runner = match more {
            Some(_) => TestRunner::new(config),
            None => {
                let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
                TestRunner::new_with_rng(config, rng)
            }
        };
        let tried = runner.run(&vec(acts(), 1..80), |acts| {
            run(&acts);
            Ok(())
        });
        if let Err(failed) = tried {
            panic!("{failed}");
        }
    });
}

#[test]
fn a_slot_that_two_read_comes_back_once_after_both() {
    use Act::*;
    let begun = [Acquire, Put(0, true), Begin(0, 0), Begin(1, 0)];
    for ends in [
        vec![Finish(0), Finish(1), Take(0), Get(0, 0), Get(1, 0)],
        vec![Finish(0), Finish(1), Take(0), Put(0, true), Get(1, 0), Take(0), Acquire, Acquire],
        vec![Abandon(0), Finish(0), Finish(1), Acquire, Acquire, Acquire],
        vec![Abort(0), Acquire, Acquire, Acquire, Finish(1), Acquire, Finish(0)],
        vec![Finish(0), Take(0), Late(0, true), Die(1), Take(0)],
        vec![Die(0), Late(0, true), Acquire, Finish(1), Acquire],
        vec![Give(0, true), Give(1, false), Acquire, Acquire, Finish(0), Finish(1), Acquire],
        vec![Abandon(0), Restart, Acquire],
    ] {
        within(Duration::from_secs(60), move || run(&[&begun[..], &ends].concat()));
    }
}
