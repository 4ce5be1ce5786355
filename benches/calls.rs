//! How long does a call take on the thread that makes it, in transfers of 64 bytes on one host? Each call
//! is timed by itself: take off `base`, the two looks at the clock. `put` is of a slot that is filled, so
//! there is no copy in it.
//!
//! Who waits for a get at once reads it himself, and has no thread woken for it: that is the first row of
//! `submit`. The second has the wake of a transfer thread in it, since nobody waits.

mod common;

use std::{
    hint::{self, black_box},
    time::{Duration, Instant},
};

use criterion::Criterion;
use mooncake_relay::{Metadata, Relay, Slot, Tensor, Token};

use crate::common::{PATIENCE, embedded, measure};

const SIZE: usize = 64;

fn main() {
    measure(|criterion| {
        criterion.bench_function("calls/base: two looks at the clock", |bencher| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| Instant::now().elapsed()).sum());
        });
        let relays = [embedded(SIZE), embedded(SIZE)];
        each(criterion, &relays, "calls/put 64 B", |timed, receiver| {
            let (time, metadata, token) = timed;
            receiver.get_into(&metadata, &mut [0; SIZE], PATIENCE).expect("the sender lives");
            drop(token.wait().expect("it was acknowledged"));
            time
        });
        each(criterion, &relays, "calls/submit: get 64 B, its token", |timed, receiver| {
            let (_, metadata, put) = timed;
            let begun = Instant::now();
            let get = receiver.get(black_box(&metadata));
            let time = begun.elapsed();
            drop(get.and_then(Token::wait).expect("the sender lives"));
            drop(put.wait().expect("it was acknowledged"));
            time
        });
        each(criterion, &relays, "calls/submit: the same, a thread is woken", |timed, receiver| {
            let (_, metadata, put) = timed;
            let begun = Instant::now();
            let get = receiver.get(black_box(&metadata));
            let time = begun.elapsed();
            let mut get = get.expect("the relay is open");
            while !get.is_done() {
                hint::spin_loop();
            }
            drop(get.poll());
            drop(put.wait().expect("it was acknowledged"));
            time
        });
        each(
            criterion,
            &relays,
            "calls/get 64 B by a thread, until its token is done",
            |timed, receiver| {
                let (_, metadata, put) = timed;
                let begun = Instant::now();
                let mut get = receiver.get(black_box(&metadata)).expect("the relay is open");
                while !get.is_done() {
                    hint::spin_loop();
                }
                let time = begun.elapsed();
                drop(get.poll());
                drop(put.wait().expect("it was acknowledged"));
                time
            },
        );
    });
}

/// Transfers, of each of which `rest` returns what is to be counted. It gets how long the put took, the
/// metadata, as one has it who was sent it, and the put's token.
fn each(
    criterion: &mut Criterion,
    [sender, receiver]: &[Relay; 2],
    name: &str,
    rest: impl Fn((Duration, Metadata, Token<Slot>), &Relay) -> Duration,
) {
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|rounds| {
            let round = |_| {
                let slot = sender.try_acquire(SIZE).expect("its only slot is free");
                let tensor = Tensor::bytes(SIZE);
                let begun = Instant::now();
                let put = sender.put(slot, tensor);
                let time = begun.elapsed();
                let (metadata, token) = put.expect("a slot of its own");
                let metadata = metadata.to_string().parse().expect("it was just written");
                rest((time, metadata, token), receiver)
            };
            (0..rounds).map(round).sum()
        });
    });
}
