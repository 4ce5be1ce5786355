//! How long does a call take on the thread that makes it, a transfer of 64 bytes on one host being what
//! it belongs to? Each call is timed by itself, so that what the rest of a transfer takes is not in it:
//! take off `base`, which is the two looks at the clock, and for `put` and `get_into` nothing else, since
//! `put` copies no bytes. In `submit` no thread is woken: the caller waits for what he asks for at once,
//! as he did before, so that none has to be.

mod common;

use std::{
    hint::black_box,
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
        each(criterion, &relays, "calls/get_into 64 B", |(_, metadata, token), receiver| {
            let mut dest = [0; SIZE];
            let begun = Instant::now();
            let got = receiver.get_into(black_box(&metadata), &mut dest, PATIENCE);
            let time = begun.elapsed();
            got.expect("the sender lives");
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
