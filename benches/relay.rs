//! What does a whole transfer cost, by size: put, get into the caller's buffer, the put's token?
//!
//! `base` is two plain copies, which is what a transfer inside one process cannot do without; between
//! two processes it is the control channel, there and back, without a transfer.

mod common;

use std::hint::black_box;

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use mooncake_relay::{Relay, Slot, Tensor};

use crate::common::{PATIENCE, embedded, in_process, receiver, receiver::Receiver, size_name};

const SIZES: [usize; 5] = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20];
const LARGEST: usize = SIZES[SIZES.len() - 1];

fn main() {
    if !receiver::serve_if_asked() {
        common::measure(|criterion| {
            copies(criterion);
            let pair = ["sender", "receiver"].map(|name| in_process(name, LARGEST));
            one_process(criterion, "in one process, without sockets", &pair);
            drop(pair);
            let pair = [(); 2].map(|()| embedded(LARGEST));
            one_process(criterion, "in one process, over TCP", &pair);
            drop(pair);
            two_processes(criterion);
        });
    }
}

fn copies(criterion: &mut Criterion) {
    let (bytes, mut between, mut dest) = (vec![7; LARGEST], vec![0_u8; LARGEST], vec![0; LARGEST]);
    each_size(criterion, "base: two copies", |group, size| {
        group.bench_function(BenchmarkId::from_parameter(size_name(size)), |bencher| {
            bencher.iter(|| {
                between[..size].copy_from_slice(black_box(&bytes[..size]));
                dest[..size].copy_from_slice(black_box(&between[..size]));
                black_box(&mut dest);
            });
        });
    });
}

/// The copy into the slot, and out of it, are a part.
fn one_process(criterion: &mut Criterion, name: &str, [sender, receiver]: &[Relay; 2]) {
    let (bytes, mut dest) = (vec![7; LARGEST], vec![0; LARGEST]);
    each_size(criterion, name, |group, size| {
        group.bench_function(BenchmarkId::from_parameter(size_name(size)), |bencher| {
            bencher.iter(|| {
                let bytes = black_box(&bytes[..size]);
                let put = sender.put_bytes(bytes, Tensor::bytes(size));
                let (metadata, token) = put.expect("its only slot is free");
                receiver.get_into(&metadata, &mut dest, PATIENCE).expect("the sender lives");
                drop(token.wait().expect("it was acknowledged"));
                black_box(&mut dest);
            });
        });
    });
}

/// The metadata travels as text over the control channel; the slot is not filled anew.
fn two_processes(criterion: &mut Criterion) {
    let sender = embedded(LARGEST);
    let mut receiver = Receiver::start(LARGEST, None).expect("this program starts again");

    let text = ".".repeat(512);
    criterion.bench_function("in two processes, base: the control channel", |bencher| {
        bencher.iter(|| receiver.base(black_box(&text)).expect("the receiver lives"));
    });
    each_size(criterion, "in two processes, over TCP", |group, size| {
        group.bench_function(BenchmarkId::from_parameter(size_name(size)), |bencher| {
            let mut slot: Option<Slot> = Some(sender.try_acquire(size).expect("it is free"));
            bencher.iter(|| {
                let slot_of_last = slot.take().expect("the last round gave it back");
                let put = sender.put(slot_of_last, Tensor::bytes(size));
                let (metadata, token) = put.expect("a slot of its own");
                receiver.get(&metadata).expect("the receiver lives");
                slot = Some(token.wait().expect("it was acknowledged"));
            });
        });
    });
}

fn each_size(
    criterion: &mut Criterion,
    name: &str,
    mut bench: impl FnMut(&mut BenchmarkGroup<'_, WallTime>, usize),
) {
    let mut group = criterion.benchmark_group(name);
    for size in SIZES {
        group.throughput(Throughput::Bytes(size as u64));
        bench(&mut group, size);
    }
    group.finish();
}
