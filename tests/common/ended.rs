//! How another program has ended: under a watchdog, with all that it said.

use std::{
    io::{self, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process_group};

use super::{SKIPPED, peer::found_engine};

pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// Runs a command to its end; whatever still runs of it after `limit` is killed, and that is an
    /// error. A test that it skips is named on stderr, with `name`.
    pub(crate) fn of(name: &str, command: &mut Command, limit: Duration) -> Result<Self, Failed> {
        let mut child = command
            .envs(found_engine())
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
            let _ = done.send(()); // nobody listens where it is late
            status
        });
        let late = watched.recv_timeout(limit).is_err();
        // Also on success: whoever is left of its children has no business any more. An error: none is.
        let _ = kill_process_group(group, Signal::KILL);
        let status = waits.join().expect("waiting does not panic")?;
        let [out, err] = [out, err].map(|reader| reader.join().expect("a reader"));
        for line in err.lines().filter(|line| line.starts_with(SKIPPED)) {
            // A test that was skipped says so, past whoever captures the output.
            writeln!(io::stderr(), "{name}: {line}")?;
        }
        let ended = Self { status, out, err };
        if late { Err(ended.told(&format!("still running after {limit:?}"))) } else { Ok(ended) }
    }

    /// As expected, and no thread of it or of its children has panicked.
    pub(crate) fn is_well(&self, expected: ExitStatus) -> Result<(), Failed> {
        self.is_as(expected)?;
        if self.err.contains("panicked at") { Err(self.told("something panicked")) } else { Ok(()) }
    }

    pub(crate) fn is_as(&self, expected: ExitStatus) -> Result<(), Failed> {
        if self.status == expected {
            return Ok(());
        }
        Err(self.told(&format!("ended with {}, not {expected}", self.status)))
    }

    pub(crate) fn told(&self, wrong: &str) -> Failed {
        format!("{wrong}\n--- stdout\n{}\n--- stderr\n{}", self.out, self.err).into()
    }
}

/// How a process ends that exits with `code`.
pub(crate) fn exited(code: i32) -> ExitStatus {
    ExitStatus::from_raw(code << 8)
}

/// Reads to the end, aside.
fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What it said before is what there is.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
