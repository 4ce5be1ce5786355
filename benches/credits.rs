//! What does taking a credit and giving it back cost, when nobody else wants one?

mod common;

use std::hint::black_box;

use criterion::Criterion;
use crossbeam::queue::ArrayQueue;
use mooncake_relay::internal::Credits;

fn main() {
    common::measure(credits);
}

fn credits(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("credits");
    group.bench_function("base", |bencher| bencher.iter(|| black_box(0_u32)));

    let credits = Credits::full(2);
    group.bench_function("take, give back", |bencher| {
        bencher.iter(|| {
            let credit = black_box(&credits).try_take().expect("two are free");
            credits.give_back(black_box(credit));
        });
    });

    let queue = ArrayQueue::new(2);
    for credit in 0..2_u32 {
        queue.push(credit).expect("there is room for two");
    }
    group.bench_function("ArrayQueue pop, push", |bencher| {
        bencher.iter(|| {
            let credit = black_box(&queue).pop().expect("two are there");
            queue.push(black_box(credit)).expect("one was taken");
        });
    });

    let relay = common::in_process("credits", 64);
    group.bench_function("Relay try_acquire, drop", |bencher| {
        bencher.iter(|| black_box(&relay).try_acquire(64).expect("its only slot is free"));
    });
    group.finish();
}
