//! What a number means nothing without.

use std::{fs, thread, time::Duration};

use rustix::{
    process::getpid,
    system::uname,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};

/// One of the two sides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Of the library.
    pub(crate) version: String,
    /// Whether the compiler optimised: without, times mean nothing.
    pub(crate) optimised: bool,
    pub(crate) cpu: String,
    /// Those that the process may use.
    pub(crate) cpus: usize,
    pub(crate) kernel: String,
    /// Of the last minute, when the row was measured.
    pub(crate) load: f64,
    pub(crate) memory_mib: u64,
}

impl Machine {
    pub(crate) fn here() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            optimised: !cfg!(debug_assertions),
            cpu: line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            cpus: allowed().len(),
            kernel: uname().release().to_string_lossy().into_owned(),
            load: load(),
            memory_mib: line_of("/proc/meminfo", "MemTotal")
                .and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok())
                .unwrap_or(0)
                >> 10,
        }
    }

    pub(crate) fn describe(&self) -> String {
        format!(
            "{}, {} CPUs for this process, Linux {}, load average {:.1}",
            self.cpu, self.cpus, self.kernel, self.load
        )
    }
}

fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(-1.0)
}

/// What stands behind the colon of the first line that begins so.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// What a process takes of the machine while a row is measured.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) threads: u64,
    /// Of those, the ones of relays and their engines; the others are perftest's own.
    pub(crate) relay_threads: u64,
    pub(crate) resident_kib: u64,
    pub(crate) mapped_kib: u64,
}

impl Usage {
    pub(crate) fn here() -> Self {
        let status = |name| line_of("/proc/self/status", name).unwrap_or_default();
        let number =
            |name| status(name).trim_end_matches("kB").trim().parse::<u64>().unwrap_or_default();
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let is_relays = |name: &String| name.starts_with("relay-");
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        Self {
            threads: number("Threads"),
            relay_threads: names.filter(is_relays).count() as u64,
            resident_kib: number("VmRSS"),
            mapped_kib: number("VmSize"),
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.threads += other.threads;
        self.relay_threads += other.relay_threads;
        self.resident_kib += other.resident_kib;
        self.mapped_kib += other.mapped_kib;
    }
}

/// The cores that this process may use.
pub(crate) fn allowed() -> Vec<usize> {
    match sched_getaffinity(Some(getpid())) {
        Ok(mask) => (0..CpuSet::MAX_CPU).filter(|&core| mask.is_set(core)).collect(),
        Err(_) => (0..thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Puts the calling thread on the core that thread `number` gets, if any was named.
pub(crate) fn pin(cores: &[usize], number: usize) -> Result<(), String> {
    let Some(&core) = cores.get(number % cores.len().max(1)) else { return Ok(()) };
    if !allowed().contains(&core) {
        return Err(format!(
            "core {core} is not one that this process may use ({:?}): name one of those, or start \
             it with `taskset`",
            allowed()
        ));
    }
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(None, &mask).map_err(|error| format!("pinning to core {core}: {error}"))
}

/// The processor time of this process.
pub(crate) fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
