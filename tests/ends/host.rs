//! Relays in a C program: the ways in which that ends, and what it never dies of.

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::OnceLock,
    thread,
    time::Duration,
};

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::{
    Ended, WATCHDOG,
    common::{
        Random, SKIPPED,
        peer::{self, Peer},
        within,
    },
    exited, times,
};

const WAYS: [(&str, &str, i32); 6] = [
    ("m1_a_c_program_returns", "return", 7),
    ("m1_a_c_program_exits", "exit", 7),
    ("m1_a_c_program_ends_without_a_word", "at_once", 7),
    ("m1_a_thread_of_a_c_program_exits", "thread", 7),
    ("m1_a_c_program_unloads_the_library", "unloaded", 7),
    ("m1_the_last_thread_of_a_c_program_ends_after_main", "outlived", 0),
];

pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    let ways = WAYS.map(|(name, way, code)| Trial::test(name, move || ends(way, code)));
    let pipes = ["serve_local", "serve_tcp"].map(|way| {
        let name = format!("m1_a_c_program_outlives_its_peers_with_sigpipe_as_it_is_{way}");
        // Its lines are read without a limit.
        Trial::test(name, move || within(Duration::from_secs(600), move || peers_die(way)))
    });
    ways.into_iter().chain(pipes)
}

/// The program and the library, made once. `None`, said aloud: there is no C compiler.
fn host() -> Option<&'static (PathBuf, PathBuf)> {
    static HOST: OnceLock<Option<(PathBuf, PathBuf)>> = OnceLock::new();
    HOST.get_or_init(|| {
        let library = peer::library("ends_host", "tests/ends/host");
        let test = env::current_exe().unwrap();
        let program = test.with_file_name(format!("ends-host-{}", std::process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ends/host/host.c");
        let compiled = Command::new("cc")
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
            .arg(&program)
            .args([source, "-ldl"])
            .status();
        match compiled {
            Ok(status) => assert!(status.success(), "{source} does not compile"),
            Err(error) => {
                assert!(env::var_os("CI").is_none(), "cc: {error}");
                eprintln!("{SKIPPED}: no C program without cc: {error}");
                return None;
            }
        }
        // One file, whoever else makes it at this moment.
        let named = test.with_file_name("ends-host");
        fs::rename(&program, &named).unwrap();
        Some((named, library))
    })
    .as_ref()
}

fn ends(way: &str, code: i32) -> Result<(), Failed> {
    let Some((program, library)) = host() else { return Ok(()) };
    for _ in 0..times("MOONCAKE_RELAY_TEST_EXITS", 10) {
        let mut command = Command::new(program);
        Ended::of(way, command.arg(library).arg(way), WATCHDOG)?.is_well(exited(code))?;
    }
    Ok(())
}

/// A C program that answers line by line.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(way: &str) -> Option<Self> {
        let (program, library) = host()?;
        let mut child = Command::new(program)
            .arg(library)
            .arg(way)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self { child, input, output })
    }

    fn asks(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn answers(&mut self) -> String {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).unwrap();
        assert!(read > 0, "it has ended: {:?}", self.child.wait());
        line.trim_end().to_owned()
    }

    fn puts(&mut self, len: usize) -> Value {
        self.asks(&format!("put {len}"));
        serde_json::from_str(&self.answers()).unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Peers that read from it, and that it reads from, are killed in the middle of large transfers.
fn peers_die(way: &str) -> Result<(), Failed> {
    const LEN: usize = 8 << 20;
    let Some(mut program) = Program::start(way) else { return Ok(()) };
    let local: &[&str] = if way == "serve_tcp" { &["--no-local"] } else { &[] };
    let flags = [&["--slot-size", "8388608", "--credits", "4"][..], local].concat();
    let mut random = Random::new(0x51_69e);
    for round in 0..times("MOONCAKE_RELAY_TEST_KILLS", 8) {
        let peer = Peer::start(&flags);
        // Both have met.
        let sent = peer.put(json!({"size": LEN, "fill": 1}));
        program.asks(&format!("get {}", sent.metadata));
        assert_eq!(program.answers(), LEN.to_string(), "round {round}");
        for _ in 0..2 {
            let metadata = program.puts(LEN);
            peer.send_get(&metadata);
        }
        let sent = peer.put(json!({"size": LEN, "fill": 2}));
        program.asks(&format!("get {}", sent.metadata));
        // Only widens the window: it may be killed before, during or after any of them.
        thread::sleep(Duration::from_micros(random.next() % 15_000));
        peer.kill();
        let got = program.answers();
        assert!(["-1".to_owned(), LEN.to_string()].contains(&got), "round {round}: {got}");
        // A connection that was kept, and whose other end is gone.
        program.asks(&format!("get {}", sent.metadata));
        assert_eq!(program.answers(), "-1", "round {round}: nobody is there");
    }
    let peer = Peer::start(&flags);
    let metadata = program.puts(1000);
    let got = peer.get(&metadata);
    assert_eq!(got["ok"], true, "it goes on with others: {got}");
    peer.quit();
    Ok(())
}
