//! Other programs, with an end to how long they may take.

use std::{
    io::{self, Read},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// What a program said and how it ended.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Longest text that is kept of a program's output.
const MOST: u64 = 256 * 1024;

/// Runs a program to its end, or kills it after `limit`. Without standard input.
pub(crate) fn run(command: &mut Command, limit: Duration) -> io::Result<Outcome> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = end(&mut child, limit);
    let (stdout, stderr) = (stdout.join(), stderr.join());
    Ok(Outcome {
        status: status?,
        stdout: stdout.unwrap_or_default(),
        stderr: stderr.unwrap_or_default(),
    })
}

fn end(child: &mut Child, limit: Duration) -> io::Result<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            // An error only where it has just ended by itself.
            let _ = child.kill();
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no end after {limit:?}")));
        }
        thread::sleep(Duration::from_millis(2)); // std has no wait with a limit
    }
}

/// Reads all of a pipe on a thread, so that its writer never waits; keeps the beginning.
fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.by_ref().take(MOST).read_to_end(&mut bytes);
            let _ = io::copy(&mut pipe, &mut io::sink());
        }
        String::from_utf8_lossy(&bytes).trim().to_owned()
    })
}
