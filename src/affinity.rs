//! Threads on the cores they were given.

use std::{
    io,
    sync::mpsc::sync_channel,
    thread::{self, JoinHandle},
};

use rustix::{
    process::getpid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

/// The cores that this process may use, in ascending order.
///
/// Linux keeps a mask per thread. That of the main thread is the process's as it was started; the
/// calling thread's counts too, so that neither loses a core by having pinned itself.
pub(crate) fn allowed() -> Vec<usize> {
    let masks = [Some(getpid()), None].map(sched_getaffinity);
    let cores = (0..CpuSet::MAX_CPU)
        .filter(|&core| masks.iter().flatten().any(|mask| mask.is_set(core)))
        .collect::<Vec<_>>();
    if !cores.is_empty() {
        return cores;
    }
    // The kernel refuses when it has more cores than a mask has bits.
    (0..thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// Lets the calling thread run on all of them, whatever it inherited from a pinned one. Where the system
/// refuses it stays as it is.
pub(crate) fn roam() {
    let mut mask = CpuSet::new();
    for core in allowed().into_iter().filter(|&core| core < CpuSet::MAX_CPU) {
        mask.set(core);
    }
    if let Err(error) = sched_setaffinity(None, &mask) {
        tracing::debug!(%error, "a thread stays where the one that made it runs");
    }
}

/// Starts a thread that pins itself to `core` before it runs `body`.
///
/// The caller's own affinity is never touched, and whatever `body` allocates lies near the core.
///
/// # Errors
///
/// The thread could not be made, or could not be pinned; then `body` does not run.
pub(crate) fn spawn(
    name: impl Into<String>,
    core: Option<usize>,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (tx, rx) = sync_channel(1);
    let thread = thread::Builder::new().name(name.into()).spawn(move || {
        let pinned = core.map_or(Ok(()), pin);
        let run = pinned.is_ok();
        // The spawner waits for it, so it is there.
        let _ = tx.send(pinned);
        if run {
            body();
        }
    })?;
    match rx.recv().expect("a new thread answers before it does anything that can fail") {
        Ok(()) => Ok(thread),
        Err(error) => {
            let _ = thread.join(); // it has nothing left to do
            Err(error)
        }
    }
}

/// Pins the calling thread.
pub(crate) fn pin(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        let reason =
            format!("core {core}: the highest that can be asked for is {}", CpuSet::MAX_CPU - 1);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(None, &mask)
        .map_err(|error| io::Error::new(error.kind(), format!("pinning to core {core}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_thread_runs_on_its_core_and_its_spawner_stays_where_it_was() {
        let before = sched_getaffinity(None).unwrap();
        let core = *allowed().last().unwrap();
        let (tx, rx) = channel();
        let body = move || {
            let name = thread::current().name().map(str::to_owned);
            tx.send((sched_getaffinity(None).unwrap(), name)).unwrap();
        };
        spawn("relay-test", Some(core), body).unwrap().join().unwrap();
        let (mask, name) = rx.recv().unwrap();
        assert!(mask.is_set(core) && mask.count() == 1);
        assert_eq!(name.as_deref(), Some("relay-test"));
        assert!(sched_getaffinity(None).unwrap() == before);
    }

    #[test]
    fn a_core_that_is_not_there_is_an_error_and_the_body_does_not_run() {
        let absent = (0..CpuSet::MAX_CPU).rev().find(|core| !allowed().contains(core)).unwrap();
        for core in [absent, 5000, usize::MAX] {
            let body = || panic!("ran");
            assert!(spawn("relay-test", Some(core), body).is_err(), "core {core}");
        }
    }

    #[test]
    fn a_pinned_caller_does_not_hide_the_other_cores() {
        let all = allowed();
        let seen = thread::spawn(|| {
            pin(allowed()[0]).unwrap();
            allowed()
        });
        assert_eq!(seen.join().unwrap(), all);
    }
}
