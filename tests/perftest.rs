//! The two tools among the examples: `perftest`, which measures, and `doctor`, which looks around.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
#![cfg(feature = "embedded")]

mod common;

use std::{
    env, fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{self, Child, Command, Output, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{
    peer::{example, exit_of, real_engine},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(180);
/// Seconds a row: enough for some puts on a busy machine, and no number here is looked at closer.
const SHORT: [&str; 4] = ["--duration", "0.05", "--warm-up", "0.02"];

#[test]
fn a_closed_loop_has_a_table_that_says_what_it_does_not_show() {
    let said = succeeds(&["--values", "0,64,4K", "--check"], &SHORT);
    for shown in ["Closed loop", "service time", "every byte checked", "p99.9", "0 B", "4 KiB"] {
        assert!(said.contains(shown), "{shown}: {said}");
    }
    assert_eq!(said.lines().filter(|line| line.ends_with("  local")).count(), 3, "{said}");
}

#[test]
fn an_open_loop_says_that_it_counts_from_when_a_put_was_due() {
    let said = succeeds(&["--rate", "2000", "--values", "64,64K"], &SHORT);
    assert!(said.contains("no coordinated omission") && said.contains("unsent"), "{said}");
    let help = succeeds(&["--help"], &[]);
    assert!(help.contains("coordinated omission is avoided"), "{help}");
}

#[test]
fn every_mode_prints_rows_of_json_with_all_they_were_measured_with() {
    for (flags, mode, way) in [
        (&["--size", "4K"][..], "latency", "local"),
        (&["--size", "4K", "--no-local"], "latency", "tcp"),
        (&["--size", "4K", "--parked"], "latency", "local"),
        (&["--size", "4K", "--rate", "500", "--threads", "2"], "rate", "local"),
        (&["--size", "64K", "--mode", "throughput", "--no-local"], "throughput", "tcp"),
        (&["--size", "4K", "--mode", "throughput", "--get", "token"], "throughput", "local"),
        (&["--size", "4K", "--mode", "throughput", "--get", "view"], "throughput", "local"),
        (
            &["--size", "4K", "--wait", "park", "--count", "3", "--duration", "60"],
            "latency",
            "local",
        ),
    ] {
        let rows = rows(&[flags, &["--check"]].concat());
        let [row] = &rows[..] else { panic!("{flags:?}: {rows:?}") };
        assert_eq!(row["case"]["mode"], mode, "{row}");
        assert_eq!(row["result"]["way"], way, "{row}");
        assert_eq!(row["case"]["check"], true, "{row}");
        let latency = &row["result"]["latency"];
        let puts = latency["count"].as_u64().unwrap();
        assert!(puts > 0 && (!flags.contains(&"--count") || puts == 3), "{row}");
        // All that were counted were got, and counted there.
        let unsent = row["result"]["unsent"].as_u64().unwrap();
        assert_eq!(row["result"]["get"]["count"].as_u64().unwrap() + unsent, puts, "{row}");
        let at = |name: &str| latency[name].as_u64().unwrap();
        assert!(at("min") <= at("p50") && at("p50") <= at("p999") && at("p999") <= at("max"));
        assert!(row["client"]["cpus"].as_u64().unwrap() > 0, "{row}");
    }
}

#[test]
fn a_sweep_goes_through_whatever_it_is_told() {
    for (axis, values) in [
        ("outstanding", [1, 64]),
        ("threads", [1, 3]),
        ("peers", [1, 3]),
        ("credits", [1, 8]),
        ("transfer-threads", [1, 4]),
        ("size", [1, 5000]),
    ] {
        let listed = values.map(|value| value.to_string()).join(",");
        let flags = ["--mode", "throughput", "--x", axis, "--values", &listed, "--check"];
        let rows = rows(&[&flags[..], &["--get", "token", "--runs", "2"]].concat());
        let of = axis.replace('-', "_");
        let swept: Vec<_> = rows.iter().map(|row| row["case"][&of].as_u64().unwrap()).collect();
        assert_eq!(swept, values, "{axis}: {rows:?}");
    }
}

#[test]
fn a_row_says_what_its_processes_take_each_of_them_once() {
    let flags = ["--mode", "throughput", "--size", "4K", "--peers", "4", "--transfer-threads", "3"];
    let of = |processes| {
        let [row] = &rows(&[&flags[..], &["--processes", processes]].concat())[..] else {
            panic!("one row")
        };
        let side = |name| {
            let usage = &row["result"][name];
            let at = |what| usage[what].as_u64().unwrap();
            assert!(at("threads") > at("relay_threads"), "{row}");
            assert!(at("mapped_kib") > at("resident_kib") && at("resident_kib") > 1000, "{row}");
            (at("relay_threads"), at("mapped_kib"))
        };
        [side("client_usage"), side("server_usage")]
    };
    let [[client, one], [_, four]] = [of("1"), of("4")];
    // Each embedded relay has a server and a notifier beside its workers.
    assert_eq!((client.0, one.0, four.0), (1 + 2, 4 * (3 + 2), 4 * (3 + 2)));
    assert!(
        one.1 < four.1,
        "relays of one process were counted as if each had one: {one:?} {four:?}"
    );
}

#[test]
fn metadata_goes_by_shared_memory_within_a_host_unless_it_is_told_otherwise() {
    let mode = ["--mode", "throughput", "--outstanding", "300", "--size", "64", "--check"];
    let closed = ["--size", "64", "--check", "--wait", "park"];
    for (flags, way) in [
        (&mode[..], "shared memory"),
        (&closed[..], "shared memory"),
        (&[&mode[..], &["--metadata-by-socket"]].concat(), "socket"),
        (&[&closed[..], &["--metadata-by-socket"]].concat(), "socket"),
    ] {
        let rows = rows(flags);
        assert_eq!(rows[0]["result"]["metadata"], way, "{rows:?}");
        assert!(rows[0]["result"]["latency"]["count"].as_u64().unwrap() > 0, "{rows:?}");
    }
}

#[test]
fn rows_are_saved_beside_the_table_and_a_plot_of_them_says_how_they_grow() {
    let (file, picture) = (Scratch::new("saved.jsonl"), Scratch::new("saved.svg"));
    let flags =
        ["--mode", "throughput", "--x", "threads", "--values", "1,2", "--save", file.path()];
    let said = succeeds(&flags, &SHORT);
    assert!(said.contains("resident") && said.contains("mapped"), "{said}");
    let said = succeeds(&["plot", "--out", picture.path(), file.path()], &[]);
    assert!(said.contains("most at threads") && said.contains("threads × 2"), "{said}");
    let svg = fs::read_to_string(picture.path()).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 5, "two of latency, one, two of memory: {svg}");
    assert_well_formed(&svg);
    let log = fails(&["--size", "64", "--save", "/nowhere/at/all"]);
    assert!(log.contains("--save"), "{log}");
}

#[test]
fn a_plot_lays_runs_over_each_other() {
    let files = [Scratch::new("a.jsonl"), Scratch::new("b.jsonl")];
    for (file, label) in files.iter().zip(["shared memory", "TCP & <others>"]) {
        let flags = ["--values", "64,4K", "--json", "--label", label];
        let way = if label == "shared memory" { &[][..] } else { &["--no-local"] };
        fs::write(file.path(), succeeds(&[&flags, way].concat(), &SHORT)).unwrap();
    }
    let picture = Scratch::new("plot.svg");
    let [a, b] = [&files[0], &files[1]].map(Scratch::path);
    succeeds(&["plot", "--out", picture.path(), a, b], &[]);
    let svg = fs::read_to_string(picture.path()).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 2 * 3, "p50, p99 and throughput of both: {svg}");
    for shown in ["shared memory", "TCP &amp; &lt;others&gt;", "latency, µs", "throughput, GB/s"] {
        assert!(svg.contains(shown), "{shown}: {svg}");
    }
    assert_well_formed(&svg);

    let nonsense = Scratch::new("nonsense.jsonl");
    fs::write(nonsense.path(), "{}\n").unwrap();
    for refused in [nonsense.path(), "nowhere.jsonl"] {
        let log = fails(&["plot", "--out", picture.path(), refused]);
        assert!(log.contains(refused), "{log}");
    }
}

#[test]
fn a_server_serves_client_after_client_and_one_that_dies_is_named() {
    let mut server = Running::start(&["server"]);
    let address = server.address.clone();
    for _ in 0..2 {
        let said = succeeds(&["client", &address, "--size", "4K", "--check"], &SHORT);
        assert!(said.trim_end().ends_with("local"), "{said}");
    }
    let log = fails(&["client", &address, "--size", "1G", "--threads", "16"]);
    assert!(log.contains("--memory") && log.contains("fewer"), "{log}");

    for mode in ["latency", "throughput"] {
        let client = client(&address, mode);
        server.child.kill().unwrap();
        server.child.wait().unwrap(); // its port is free from then on
        let output = within(WATCHDOG, move || client.wait_with_output().unwrap());
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{log}");
        assert!(log.contains(&address) && log.contains("perftest server --listen"), "{log}");
        server = Running::start(&["server", "--listen", &address]);
    }
}

#[test]
fn nobody_there_is_an_error_that_says_what_to_start() {
    for (flags, named) in [
        (&["client", "127.0.0.1:1"][..], "perftest server --listen"),
        (&["--engine", "pigeon"], "there is no engine"),
        (&["--cores", "100000"], "core 100000"),
        (&["--outstanding", "2"], "--mode throughput"),
        (&["--x", "threads", "--values", "0"], "0 threads"),
        (&["--mode", "throughput", "--get", "view", "--no-local"], "use get"),
    ] {
        let log = fails(flags);
        assert!(log.starts_with("perftest: ") && log.contains(named), "{named}: {log}");
    }
}

#[test]
fn ctrl_c_ends_a_run_and_its_server_goes_on() {
    for mode in ["latency", "throughput"] {
        let mut server = Running::start(&["server"]);
        let client = client(&server.address, mode);
        kill_process(Pid::from_child(&client), Signal::INT).unwrap();
        let output = within(WATCHDOG, move || client.wait_with_output().unwrap());
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{log}");
        assert!(log.contains("Ctrl-C"), "{log}");
        succeeds(&["client", &server.address, "--size", "4K", "--check"], &SHORT);
        // Not by SIGINT, which is ignored by what a shell has in the background.
        kill_process(Pid::from_child(&server.child), Signal::TERM).unwrap();
        assert_eq!(exit_of(&mut server.child).signal(), Some(Signal::TERM.as_raw()));
    }
}

#[cfg(feature = "mooncake")]
#[test]
fn the_real_engine_is_measured_too() {
    let Some(engine) = real_engine() else { return };
    let mut command = Command::new(example("perftest"));
    command.args(["--engine", "mooncake", "--size", "64K", "--check", "--json"]).args(SHORT);
    command.env("MOONCAKE_WHEEL", &engine.site);
    let said = good(run(command));
    let row: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (&row["case"]["engine"], &row["result"]["way"]),
        (&"mooncake".into(), &"tcp".into())
    );
}

#[test]
fn doctor_says_something_of_everything_and_a_remedy_with_each_limit() {
    let mut command = Command::new(example("doctor"));
    command.arg("--json");
    let json = good(run(command));
    let findings: Vec<Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let checks: Vec<_> = findings.iter().map(|one| one["check"].as_str().unwrap()).collect();
    for check in [
        "kernel",
        "cpus",
        "affinity",
        "cpu quota",
        "memory",
        "memlock",
        "huge pages",
        "/dev/shm",
        "memfd seals",
        "descriptors",
        "namespaces",
        "ports",
        "engines",
        "mooncake",
        "a transfer",
    ] {
        assert!(checks.contains(&check), "{check}: {json}");
    }
    for one in &findings {
        let (verdict, remedy) = (one["verdict"].as_str().unwrap(), &one["remedy"]);
        assert!(!one["found"].as_str().unwrap().is_empty(), "{one}");
        assert_eq!(verdict != "ok", remedy.is_string(), "{one}");
    }

    let text = good(run(Command::new(example("doctor"))));
    for check in checks {
        let has_line = |line: &str| line.get(6..).is_some_and(|rest| rest.starts_with(check));
        assert!(text.lines().any(has_line), "{check}: {text}");
    }
}

#[test]
fn doctor_sees_a_limit_that_is_set() {
    let mut command = Command::new("sh");
    command.arg("-c").arg("ulimit -n 512 && exec \"$1\"").arg("sh").arg(example("doctor"));
    command.env("MOONCAKE_RELAY_CREDITS", "many");
    let text = good(run(command));
    assert!(text.contains("512 (RLIMIT_NOFILE") && text.contains("ulimit -n 4096"), "{text}");
    assert!(text.contains("MOONCAKE_RELAY_CREDITS"), "{text}");
}

fn succeeds(flags: &[&str], more: &[&str]) -> String {
    let mut command = Command::new(example("perftest"));
    command.args(flags).args(more);
    good(run(command))
}

fn good(output: Output) -> String {
    let log = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && log.is_empty(), "{}: {log}\n{said}", output.status);
    said
}

fn fails(flags: &[&str]) -> String {
    let mut command = Command::new(example("perftest"));
    command.args(flags);
    let output = run(command);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{flags:?}: {log}");
    log
}

fn rows(flags: &[&str]) -> Vec<Value> {
    let more = if flags.contains(&"--duration") { &[][..] } else { &SHORT };
    let said = succeeds(&[flags, &["--json"]].concat(), more);
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn run(mut command: Command) -> Output {
    within(WATCHDOG, move || command.stdin(Stdio::null()).output().unwrap())
}

/// A client of that server that measures for longer than any test lasts, and has begun to.
fn client(address: &str, mode: &str) -> Child {
    let mut command = Command::new(example("perftest"));
    // The first row is short: when it is printed, the second is under way.
    command.args(["client", address, "--mode", mode, "--json", "--x", "size"]);
    command.args(["--values", &vec!["4K"; 10_000].join(",")[..]]).args(SHORT);
    let mut client =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(client.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    client.stdout = Some(out.into_inner());
    client
}

/// A server that is ended when it is dropped.
struct Running {
    child: Child,
    address: String,
}

impl Running {
    fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(example("perftest"))
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on ").unwrap().split(';').next().unwrap();
        Self { child, address: address.to_owned() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill(); // an error where it has ended
        let _ = self.child.wait();
    }
}

/// A file of this test's, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("relay-perftest-{}-{name}", process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Tags that open and close each other, none with one attribute twice.
fn assert_well_formed(xml: &str) {
    let mut open = Vec::new();
    for tag in xml.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
            continue;
        }
        let mut names: Vec<_> =
            tag.split('"').step_by(2).filter_map(|part| part.trim().strip_suffix('=')).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "an attribute twice: {tag}");
        if !tag.ends_with('/') {
            open.push(tag.split(' ').next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?}");
}
