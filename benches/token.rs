//! What does a token cost, from its making to its outcome, on one thread?

mod common;

use std::hint::black_box;

use criterion::Criterion;
use crossbeam::channel::bounded;
use mooncake_relay::internal::Tokens;

fn main() {
    common::measure(token);
}

fn token(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("token");
    group.bench_function("base", |bencher| bencher.iter(|| black_box(black_box(0_u64))));

    let tokens = Tokens::<u64>::new();
    group.bench_function("make, complete, poll", |bencher| {
        bencher.iter(|| {
            let (completer, mut token) = Tokens::make(black_box(&tokens));
            completer.complete(Ok(black_box(7)));
            token.poll()
        });
    });
    group.bench_function("bounded(1) make, send, recv", |bencher| {
        bencher.iter(|| {
            let (tx, rx) = bounded::<mooncake_relay::Result<u64>>(black_box(1));
            tx.send(Ok(black_box(7))).expect("`rx` lives");
            rx.recv()
        });
    });

    let (completer, token) = Tokens::make(&tokens);
    group.bench_function("is_done", |bencher| bencher.iter(|| black_box(&token).is_done()));
    drop(completer);
    group.finish();
}
