//! Other processes: the `peer` example, and the Python peer on the real engine.

use std::{
    collections::HashMap,
    env,
    ffi::OsStr,
    fmt::Display,
    fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{SKIPPED, eventually, place::Place};

/// Longer than any answer takes on a busy machine: what it finds is a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that is driven by JSON lines. Dropping it kills the process.
pub(crate) struct Peer {
    child: Child,
    input: Mutex<Option<ChildStdin>>,
    inbox: Arc<Inbox>,
    tags: AtomicU64,
    ready: Value,
}

/// A put that the other process has answered.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) tag: u64,
    pub(crate) metadata: Value,
    pub(crate) sha256: String,
}

#[derive(Default)]
struct Inbox {
    said: Mutex<Said>,
    changed: Condvar,
}

#[derive(Default)]
struct Said {
    answers: HashMap<u64, Value>,
    /// Lines without a tag: `ready`, `bye`, answers to what was no command.
    others: Vec<Value>,
    ended: bool,
}

impl Peer {
    /// The `peer` example with these flags.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_in(&Place::here(), flags)
    }

    /// The same, in another place.
    pub(crate) fn start_in(place: &Place, flags: &[&str]) -> Self {
        let mut command = place.command(example("peer"));
        if flags.contains(&"mooncake") {
            let real = real_engine().expect("whoever asks for the real engine has seen to it");
            command.env("MOONCAKE_WHEEL", &real.site);
        }
        Self::spawn(command.args(flags))
    }

    /// The same, here, with these variables too.
    pub(crate) fn start_with(flags: &[&str], variables: &[(&str, &OsStr)]) -> Self {
        let mut command = Command::new(example("peer"));
        Self::spawn(command.args(flags).envs(variables.iter().copied()))
    }

    /// The Python peer on the real engine. `None`, said aloud: it cannot be set up here.
    pub(crate) fn python(flags: &[&str]) -> Option<Self> {
        Some(Self::python_in(&Place::here(), real_engine()?, flags))
    }

    /// The same, in another place, and of that wheel.
    pub(crate) fn python_in(place: &Place, real: &RealEngine, flags: &[&str]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mooncake_peer.py");
        let mut command = place.command(&real.python);
        command.arg(script).args(flags).env("PYTHONPATH", &real.site);
        Self::spawn(command.env("MC_FORCE_TCP", "1"))
    }

    /// Whatever speaks these lines.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let output = BufReader::new(child.stdout.take().unwrap());
        let inbox = Arc::new(Inbox::default());
        let reader = Arc::clone(&inbox);
        thread::spawn(move || reader.fill(output));
        let input = Mutex::new(child.stdin.take());
        let mut peer = Self { child, input, inbox, tags: AtomicU64::new(1), ready: Value::Null };
        peer.ready = peer.other();
        assert_eq!(peer.ready["event"], "ready", "{:?}", peer.ready);
        peer
    }

    pub(crate) fn session_id(&self) -> &str {
        self.ready["session_id"].as_str().unwrap()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ready(&self) -> &Value {
        &self.ready
    }

    /// Sends a command under a new tag, and returns that.
    pub(crate) fn send(&self, mut command: Value) -> u64 {
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        command["tag"] = tag.into();
        self.send_line(&command.to_string());
        tag
    }

    pub(crate) fn send_line(&self, line: &str) {
        let mut input = self.input.lock();
        let input = input.as_mut().expect("the input is open");
        input.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// The answer to what was sent under `tag`.
    pub(crate) fn answer(&self, tag: u64) -> Value {
        self.inbox.wait(&format!("answer to {tag}"), |said| said.answers.remove(&tag))
    }

    /// Whether that answer has come.
    pub(crate) fn has_answered(&self, tag: u64) -> bool {
        self.inbox.said.lock().answers.contains_key(&tag)
    }

    /// The next line without a tag.
    pub(crate) fn other(&self) -> Value {
        self.inbox.wait("line", |said| (!said.others.is_empty()).then(|| said.others.remove(0)))
    }

    pub(crate) fn ask(&self, command: Value) -> Value {
        self.answer(self.send(command))
    }

    /// Puts, and expects that to work.
    pub(crate) fn put(&self, bytes: Value) -> Sent {
        self.sent(self.send(json!({"cmd": "put", "bytes": bytes})))
    }

    /// The answer to a put that is expected to work.
    pub(crate) fn sent(&self, tag: u64) -> Sent {
        self.first_sent(&mut vec![tag])
    }

    /// The first of these puts to be answered, which leaves the list: commands that wait for one
    /// thing get it in no order of ours.
    pub(crate) fn first_sent(&self, tags: &mut Vec<u64>) -> Sent {
        let (tag, answer) = self.inbox.wait("answer to a put", |said| {
            let at = tags.iter().position(|tag| said.answers.contains_key(tag))?;
            let tag = tags.swap_remove(at);
            Some((tag, said.answers.remove(&tag)?))
        });
        assert_eq!(answer["ok"], true, "{answer}");
        let sha256 = answer["sha256"].as_str().unwrap().to_owned();
        Sent { tag, metadata: answer["metadata"].clone(), sha256 }
    }

    /// Starts a get.
    pub(crate) fn send_get(&self, metadata: &Value) -> u64 {
        self.send(json!({"cmd": "get", "metadata": metadata}))
    }

    pub(crate) fn get(&self, metadata: &Value) -> Value {
        self.answer(self.send_get(metadata))
    }

    /// How the put with that tag ended.
    pub(crate) fn wait(&self, of: u64) -> Value {
        self.ask(json!({"cmd": "wait", "of": of}))
    }

    /// Free slots to put from, and, if it tells, to get into.
    pub(crate) fn free(&self) -> (u64, Option<u64>) {
        let answer = self.ask(json!({"cmd": "free_credits"}));
        (answer["free"].as_u64().unwrap(), answer["receive_free"].as_u64())
    }

    pub(crate) fn health(&self) -> Value {
        self.ask(json!({"cmd": "health"}))["health"].clone()
    }

    /// Its threads while no command runs; to be asked before the first.
    pub(crate) fn threads_of_its_own(&self) -> usize {
        self.free(); // answered by the thread that reads commands, once all others are there
        self.threads()
    }

    pub(crate) fn threads(&self) -> usize {
        self.count("task")
    }

    pub(crate) fn descriptors(&self) -> usize {
        self.count("fd")
    }

    fn count(&self, what: &str) -> usize {
        fs::read_dir(format!("/proc/{}/{what}", self.child.id())).unwrap().count()
    }

    /// SIGSTOP; returns when each of its threads has stopped.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        eventually(true, || {
            fs::read_dir(&tasks).unwrap().all(|task| {
                let stat = fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
            })
        });
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGKILL: no goodbye.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// Says `quit`, and expects `bye` and exit code 0.
    pub(crate) fn quit(self) {
        self.send_line(r#"{"cmd":"quit"}"#);
        self.expect_bye();
    }

    /// Ends the input instead.
    pub(crate) fn hang_up(self) {
        drop(self.input.lock().take());
        self.expect_bye();
    }

    fn expect_bye(mut self) {
        assert_eq!(self.other(), json!({"event": "bye"}));
        let status = exit_of(&mut self.child);
        assert!(status.success(), "the peer ended with {status}");
    }

    fn end(&mut self) {
        // By its handle, so no other process that got its number can be meant. Only an error
        // where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.end();
    }
}

impl Inbox {
    fn fill(&self, output: impl BufRead) {
        for line in output.lines().map_while(io::Result::ok) {
            let value: Value = serde_json::from_str(&line)
                .unwrap_or_else(|error| json!({"not JSON": line, "because": error.to_string()}));
            let mut said = self.said.lock();
            match value["tag"].as_u64() {
                Some(tag) => drop(said.answers.insert(tag, value)),
                None => said.others.push(value),
            }
            self.changed.notify_all();
        }
        self.said.lock().ended = true;
        self.changed.notify_all();
    }

    fn wait<T>(&self, what: &str, mut take: impl FnMut(&mut Said) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut said = self.said.lock();
        loop {
            if let Some(found) = take(&mut said) {
                return found;
            }
            assert!(!said.ended, "no {what}: the peer has ended");
            let late = self.changed.wait_until(&mut said, deadline).timed_out();
            assert!(!late, "no {what} within {PATIENCE:?}");
        }
    }
}

/// Waits for a child that is about to end.
pub(crate) fn exit_of(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "process {} does not end", child.id());
        thread::sleep(Duration::from_millis(1));
    }
}

/// An example, of the build that this test belongs to.
pub(crate) fn example(name: &str) -> PathBuf {
    built(name, name, &[format!("examples/{name}"), format!("examples/{name}.rs")])
}

/// An example that is a library, made of what is in that folder.
pub(crate) fn library(name: &str, folder: &str) -> PathBuf {
    built(name, &format!("lib{name}.so"), &[folder.to_owned()])
}

fn built(name: &str, file: &str, sources: &[String]) -> PathBuf {
    let test = env::current_exe().unwrap(); // <target>/<profile>/deps/<test>
    let profile = test.ancestors().nth(2).unwrap();
    let example = profile.join("examples").join(file);
    // `cargo test` has built the examples; `cargo test --test peers` has not.
    static BUILD: Mutex<()> = Mutex::new(());
    let _alone = BUILD.lock();
    if !is_fresh(&example, sources) {
        let profile_name = profile.file_name().unwrap().to_str().unwrap();
        let status = Command::new(env!("CARGO"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["build", "--quiet", "--all-features", "--example", name])
            .args(["--profile", if profile_name == "debug" { "dev" } else { profile_name }])
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "the example {name} does not build");
    }
    example
}

/// Whether it is there and younger than what it is built from.
fn is_fresh(example: &Path, sources: &[String]) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = ["src"].into_iter().chain(sources.iter().map(String::as_str));
    let changed = sources.map(|source| newest(&root.join(source))).max();
    example.exists() && changed <= Some(newest(example))
}

/// When a file, or anything in a folder, was changed last; long ago, if there is no such thing.
fn newest(path: &Path) -> SystemTime {
    match fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| newest(&entry.unwrap().path())).max(),
        Err(_) => fs::metadata(path).and_then(|file| file.modified()).ok(),
    }
    .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The real engine, as `tests/setup.sh` installs it.
#[derive(Debug)]
pub(crate) struct RealEngine {
    pub(crate) python: String,
    /// The folder that holds `mooncake/`.
    pub(crate) site: PathBuf,
}

static ENGINE: OnceLock<Result<RealEngine, String>> = OnceLock::new();
/// Set in a test's own child: the Python that its parent has found.
const FOUND: &str = "MOONCAKE_RELAY_TEST_PYTHON";

/// The variable that spares a child the search, where this process has searched.
pub(crate) fn found_engine() -> Option<(&'static str, &'static str)> {
    let real = ENGINE.get()?.as_ref().ok()?;
    Some((FOUND, &real.python))
}

/// `None`, said aloud: it cannot be set up here.
pub(crate) fn real_engine() -> Option<&'static RealEngine> {
    or_skip(ENGINE.get_or_init(|| set_up_wheel(WHEEL)).as_ref())
}

/// The wheel that everything is tested with.
const WHEEL: &str = "0.3.13.post1";

/// The wheel of another version, for its Python. `None`, said aloud: it cannot be set up here.
pub(crate) fn real_engine_of(version: &str) -> Option<RealEngine> {
    or_skip(set_up_wheel(version))
}

fn or_skip<T>(found: Result<T, impl Display>) -> Option<T> {
    match found {
        Ok(engine) => Some(engine),
        Err(reason) if env::var_os("CI").is_some() => panic!("{reason}"),
        Err(reason) => {
            // Past the test harness, which would swallow it: a skipped test says so.
            let _ = writeln!(io::stderr(), "{SKIPPED}, no real engine to test with: {reason}");
            None
        }
    }
}

fn set_up_wheel(version: &str) -> Result<RealEngine, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let site = root.join(format!("target/mooncake-{version}"));
    if let (WHEEL, Ok(python)) = (version, env::var(FOUND)) {
        return Ok(RealEngine { python, site });
    }
    let output = Command::new("sh")
        .arg(root.join("tests/setup.sh"))
        .arg(version)
        .output()
        .map_err(|error| format!("sh: {error}"))?;
    if output.status.success() {
        let python = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(RealEngine { python, site })
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}
