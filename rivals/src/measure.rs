//! What is measured, and how a sender says it.

use std::{
    hint,
    io::{self, Write},
    thread,
};

use clap::Args;
use rustix::{
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};

/// Bytes, and how many transfers in each start.
pub(crate) const SIZES: [(usize, usize); 5] =
    [(64, 1000), (4 << 10, 1000), (64 << 10, 600), (1 << 20, 160), (64 << 20, 8)];
pub(crate) const LARGEST: usize = 64 << 20;

/// What one start does.
#[derive(Args, Clone, Debug)]
pub(crate) struct Plan {
    /// A tenth of the transfers.
    #[arg(long)]
    pub(crate) quick: bool,
    /// The cores of the sender's thread and of the receiver's.
    #[arg(long, value_delimiter = ',')]
    pub(crate) cores: Vec<usize>,
}

impl Plan {
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (usize, usize)> {
        let part = if self.quick { 10 } else { 1 };
        SIZES.into_iter().map(move |(size, count)| (size, (count / part).max(2)))
    }

    /// Pins the calling thread, if it is wanted: after everything else has its threads.
    pub(crate) fn pin(&self) {
        if let [own, _] = self.cores[..] {
            pin(own);
        }
    }
}

/// One row at one size, from one start. In microseconds.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Measured {
    pub(crate) row: String,
    pub(crate) size: usize,
    pub(crate) count: usize,
    /// Of the transfer: without the way of the request to a receiver that reads.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Of all that the sender waits for.
    pub(crate) whole: f64,
}

/// How often `count` transfers are tried before they count.
pub(crate) fn warm_up(count: usize) -> usize {
    (count / 10).max(2)
}

/// Measures one row at one size, and says it. `once` returns nanoseconds: of the transfer and of all.
pub(crate) fn measure(
    row: &str,
    (size, count): (usize, usize),
    mut once: impl FnMut() -> io::Result<[u64; 2]>,
) -> io::Result<()> {
    for _ in 0..warm_up(count) {
        once()?;
    }
    let times = (0..count).map(|_| once()).collect::<io::Result<Vec<_>>>()?;
    say(row, size, &times)
}

pub(crate) fn say(row: &str, size: usize, times: &[[u64; 2]]) -> io::Result<()> {
    let column = |which: usize| {
        let mut times: Vec<_> = times.iter().map(|both| both[which]).collect();
        times.sort_unstable();
        times
    };
    let (transfer, whole) = (column(0), column(1));
    let measured = Measured {
        row: row.to_owned(),
        size,
        count: times.len(),
        p50: percentile(&transfer, 50),
        p99: percentile(&transfer, 99),
        whole: percentile(&whole, 50),
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&measured)?)?;
    out.flush()
}

/// In microseconds, of sorted nanoseconds.
fn percentile(sorted: &[u64], part: usize) -> f64 {
    sorted[(sorted.len() * part / 100).min(sorted.len() - 1)] as f64 / 1e3
}

/// The `number`th transfer's bytes all have this value; so they are new, and in the sender's cache.
pub(crate) fn value(number: u64) -> u8 {
    (number % 251) as u8
}

/// The first byte and the last are those of that transfer.
pub(crate) fn check(bytes: &[u8], number: u64) {
    let value = value(number);
    let found = [bytes[0], bytes[bytes.len() - 1]];
    assert_eq!(found, [value; 2], "the bytes of transfer {number}");
}

/// Looks without a pause until something has come.
pub(crate) fn look<T>(mut once: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    let mut looks = 0_u32;
    loop {
        if let Some(come) = once()? {
            return Ok(come);
        }
        hint::spin_loop();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(64) {
            thread::yield_now(); // both ends may share a core
        }
    }
}

/// The cores that this process may use.
pub(crate) fn allowed() -> Vec<usize> {
    let mask = sched_getaffinity(None).expect("every thread has one");
    (0..CpuSet::MAX_CPU).filter(|&core| mask.is_set(core)).collect()
}

/// Pins the calling thread.
pub(crate) fn pin(core: usize) {
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(None, &mask).expect("an allowed core");
}

/// Nanoseconds of the clock that all processes share.
pub(crate) fn clock() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
