//! The embedded engine in a process that has no descriptors left: a process of its own.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test")]

mod raw;

use std::{
    fs::File,
    io::{self, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    process::{Resource, getrlimit, setrlimit},
    time::{ClockId, clock_gettime},
};

use self::raw::*;

#[derive(Clone, Default)]
struct Lines(Arc<AtomicUsize>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
        self.0.fetch_add(lines, Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap()
}

#[test]
fn e7_without_descriptors_the_server_waits_quietly_and_then_accepts() {
    watched(|| {
        let lines = Lines::default();
        let writer = lines.clone();
        tracing_subscriber::fmt().with_writer(move || writer.clone()).init();
        let served = Served::published(64);
        served.is_alive();

        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(64);
        setrlimit(Resource::Nofile, limit).unwrap();
        let mut files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        // Room for clients, none for what the server accepts of them.
        files.truncate(files.len() - 8);
        let clients: Vec<_> =
            std::iter::from_fn(|| TcpStream::connect(served.engine.data_addr()).ok()).collect();
        assert!(!clients.is_empty());

        let (begun, before) = (Instant::now(), cpu());
        // Not synchronisation: this is the time in which a spinning server would show.
        thread::sleep(Duration::from_secs(2));
        let (spent, told) = (cpu() - before, lines.0.load(Ordering::Relaxed));
        let lasted = begun.elapsed();
        assert!(spent < lasted / 2, "{spent:?} of processor in {lasted:?}");
        assert!((1..=8 + lasted.as_secs() as usize).contains(&told), "{told} lines in {lasted:?}");

        drop((clients, files));
        served.is_alive();
    });
}
