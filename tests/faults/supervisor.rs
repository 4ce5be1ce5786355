//! Each case in a process of its own: what it leaves is seen, and what hangs is ended.

use std::{
    env, fs,
    io::{self, Read, Write},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    common::{SKIPPED, eventually},
    on::{Case, On},
};

const CASE: &str = "MOONCAKE_RELAY_TEST_CASE";

/// The case that this process is for, if it is for one.
pub(crate) fn asked() -> Option<String> {
    env::var(CASE).ok()
}

/// Runs a case in this process, and looks at what it leaves.
pub(crate) fn run(on: &On, case: &Case) {
    let before = Held::now();
    (case.run)(on);
    eventually(before, Held::now);
    println!("done");
}

/// What a process holds.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Held {
    threads: usize,
    descriptors: usize,
    /// Pools that are still mapped.
    pools: usize,
    in_dev_shm: usize,
}

impl Held {
    fn now() -> Self {
        let count = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let in_dev_shm = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let ours = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().contains("relay");
        Self {
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
            pools: maps.lines().filter(|line| line.contains("mooncake-relay")).count(),
            in_dev_shm: in_dev_shm.filter(ours).count(),
        }
    }
}

/// Runs a case in a process of its own. It fails if that does not end well within `limit`, or says
/// on stderr that a thread of it or of its children panicked.
pub(crate) fn watch(name: &str, limit: Duration) -> Result<(), Failed> {
    let mut child = Command::new(env::current_exe()?)
        .env(CASE, name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let group = Pid::from_child(&child);
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let (done, watched) = mpsc::channel();
    let waits = thread::spawn(move || {
        let status = child.wait();
        let _ = done.send(());
        status
    });
    let late = watched.recv_timeout(limit).is_err();
    // Also on success: whoever is left of its children has no business any more.
    let _ = kill_process_group(group, Signal::KILL);
    let status = waits.join().expect("waiting does not panic")?;
    let (out, err) = (out.join().expect("a reader"), err.join().expect("a reader"));
    for line in err.lines().filter(|line| line.starts_with(SKIPPED)) {
        // A test that was skipped says so, past whoever captures the output.
        let _ = writeln!(io::stderr(), "{name}: {line}");
    }
    let wrong = if late {
        format!("still running after {limit:?}")
    } else if !status.success() {
        format!("ended with {status}")
    } else if err.contains("panicked at") {
        "passed, but something panicked".to_owned()
    } else {
        return Ok(());
    };
    Err(format!("{wrong}\n--- stdout\n{out}\n--- stderr\n{err}").into())
}

/// Reads to the end, aside.
fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
