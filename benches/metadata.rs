//! What does a put's metadata cost as JSON text, there and back?

mod common;

use std::hint::black_box;

use criterion::Criterion;
use mooncake_relay::{DType, Metadata, Tensor};

fn main() {
    common::measure(metadata);
}

fn metadata(criterion: &mut Criterion) {
    let relay = common::in_process("metadata", 1 << 16);
    let tensor = Tensor::new(DType::Bfloat16, [8, 16, 128]);
    let (metadata, _token) = relay.put_bytes(&[0; 1 << 15], tensor).expect("its only slot is free");
    let text = metadata.to_string();

    let mut group = criterion.benchmark_group("metadata");
    group.bench_function("base", |bencher| bencher.iter(|| black_box(&*text).to_owned()));
    let decode = |text: &str| text.parse::<Metadata>().expect("it was just written");
    group.bench_function("encode", |bencher| bencher.iter(|| black_box(&metadata).to_string()));
    group.bench_function("decode", |bencher| bencher.iter(|| decode(black_box(&text))));
    group.bench_function("encode, decode", |bencher| {
        bencher.iter(|| decode(&black_box(&metadata).to_string()));
    });
    group.finish();
}
