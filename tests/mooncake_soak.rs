//! Ten thousand transfers and ten thousand notifications between two processes over the real engine:
//! every byte and every text arrives as it was sent, and nothing is left of them.
//!
//! By `--valgrind` this program runs itself under valgrind, once with few rounds and once with three
//! times as many, and compares what each has left: `make mooncake-valgrind`.
#![cfg(feature = "mooncake")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    env,
    io::{self, BufRead, BufReader, Lines, Write},
    iter,
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Trial};
use mooncake_relay::{
    Config, Engine, Metadata, MooncakeConfig, MooncakeEngine, Notification, Relay, Tensor,
};

use crate::common::{eventually, peer::exit_of, real, within};

const WATCHDOG: Duration = Duration::from_secs(900);
/// No single step takes longer, also under valgrind.
const PATIENCE: Duration = Duration::from_secs(60);
const ROUNDS: u32 = 10_000;
/// What valgrind compares.
const FEW: u32 = 1000;
const MANY: u32 = 3 * FEW;

fn main() -> ExitCode {
    let args: Vec<_> = env::args().skip(1).collect();
    let rounds = |text: &String| text.parse().expect("a number of rounds");
    match &args[..] {
        [flag, wheel] if flag == "--other" => other(named(wheel)),
        [flag, wheel, number] if flag == "--rounds" => soak(&named(wheel), rounds(number)),
        [flag] if flag == "--valgrind" => return valgrind(),
        _ => {
            let trial =
                Trial::test("b13_ten_thousand_transfers_and_texts_arrive_as_they_were_sent", {
                    || {
                        let Some(config) = real::config() else { return Ok(()) };
                        within(WATCHDOG, move || soak(&config, ROUNDS));
                        Ok(())
                    }
                });
            return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
        }
    }
    ExitCode::SUCCESS
}

fn named(wheel: &str) -> MooncakeConfig {
    MooncakeConfig { library: Some(wheel.into()), ..MooncakeConfig::default() }
}

fn settings() -> Config {
    Config::default().with_slot_size(4096).with_credits(2)
}

/// The side that asks: texts there and back, then tensors there and back.
fn soak(config: &MooncakeConfig, rounds: u32) {
    let engine = MooncakeEngine::open(config).unwrap();
    let mut other = Other::start(config, engine.session_id());
    let begun = Instant::now();
    // Before there is a relay, which would take every notification.
    for round in 0..rounds {
        let note = Notification::new(&format!("note {round}"), &text(round));
        engine.notify(&other.session_id, &note, Instant::now() + PATIENCE).unwrap();
        assert_eq!(heard(&engine), note, "round {round}");
    }
    let told = begun.elapsed();

    let enough = Notification::new(ENOUGH, "");
    engine.notify(&other.session_id, &enough, Instant::now() + PATIENCE).unwrap();
    let relay = Relay::new(Arc::new(engine), &settings()).unwrap();
    // Two transfers a round: from the other process, and back.
    for round in 0..rounds.div_ceil(2) {
        let bytes = text(round).into_bytes();
        let metadata: Metadata = other.hear().parse().unwrap();
        let got = relay.get(&metadata).unwrap().wait().unwrap();
        assert_eq!(got[..], bytes[..], "round {round}");
        let (metadata, token) = relay.put_bytes(&got, Tensor::bytes(got.len())).unwrap();
        other.say(&metadata.to_string());
        token.wait().unwrap();
    }
    other.end();
    let moved = begun.elapsed() - told;

    eventually((2, 2), || (relay.health().free, relay.health().receive_free));
    let counters = relay.health().counters.engine;
    assert_eq!(counters["batches"], counters["batches_freed"]);
    assert_eq!((counters["batches_parked"], counters["notes_refused"]), (0, 0));
    println!("{rounds} texts there and back in {told:.1?}, {rounds} transfers in {moved:.1?}");
}

/// The side that answers.
fn other(config: MooncakeConfig) {
    let engine = MooncakeEngine::open(&config).unwrap();
    println!("{}", engine.session_id());
    let mut lines = io::stdin().lines().map_while(io::Result::ok);
    let peer = lines.next().unwrap();
    let echoes = iter::repeat_with(|| heard(&engine)).take_while(|note| note.name() != ENOUGH);
    for note in echoes {
        engine.notify(&peer, &note, Instant::now() + PATIENCE).unwrap();
    }
    let relay = Relay::new(Arc::new(engine), &settings()).unwrap();
    for round in 0.. {
        let bytes = text(round).into_bytes();
        let (metadata, token) = relay.put_bytes(&bytes, Tensor::bytes(bytes.len())).unwrap();
        println!("{metadata}");
        let Some(line) = lines.next() else { break };
        token.wait().unwrap();
        let back: Metadata = line.parse().unwrap();
        assert_eq!(relay.get(&back).unwrap().wait().unwrap()[..], bytes[..], "round {round}");
    }
}

/// The name of the note after which texts come no more.
const ENOUGH: &str = "enough";

/// 1 to 300 bytes, some of them of other scripts.
fn text(round: u32) -> String {
    let len = 1 + round as usize * 7 % 300;
    let scripts = ["slot", "größe", "張量", "тензор", "🥮"];
    let mut text: String =
        scripts.iter().cycle().skip(round as usize % 5).copied().take(80).collect();
    let mut end = len;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.push_str(&"x".repeat(len - end));
    text
}

/// The next notification; there is one at most.
fn heard(engine: &MooncakeEngine) -> Notification {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(note) = engine.connection().get_notifies().unwrap().pop() {
            return note;
        }
        assert!(Instant::now() < deadline, "no notification came back");
        thread::yield_now();
    }
}

/// The other process.
struct Other {
    child: Child,
    to: Option<ChildStdin>,
    from: Lines<BufReader<ChildStdout>>,
    session_id: String,
}

impl Other {
    fn start(config: &MooncakeConfig, own: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .arg("--other")
            .arg(config.library.as_ref().unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take(), child.stdout.take().unwrap());
        let from = BufReader::new(from).lines();
        let mut other = Self { child, to, from, session_id: String::new() };
        other.session_id = other.hear();
        other.say(own);
        other
    }

    fn say(&mut self, line: &str) {
        writeln!(self.to.as_mut().unwrap(), "{line}").unwrap();
    }

    fn hear(&mut self) -> String {
        self.from.next().expect("the other process ended early").unwrap()
    }

    /// It ends by itself, and without a complaint.
    fn end(mut self) {
        drop(self.to.take());
        assert!(exit_of(&mut self.child).success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Only an error where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes and blocks that were left, by valgrind's kinds.
type Left = [(&'static str, u64, u64); 4];
const KINDS: [&str; 4] = ["definitely lost", "indirectly lost", "possibly lost", "still reachable"];
/// What may differ: a thread that has not ended yet is a block of a few hundred bytes. A leak of one
/// block in ten rounds, or a byte in each, is more.
const BLOCKS: u64 = (MANY - FEW) as u64 / 10;
const BYTES: u64 = (MANY - FEW) as u64;

fn valgrind() -> ExitCode {
    let Some(config) = real::config() else { return ExitCode::FAILURE };
    let [few, many] = [FEW, MANY].map(|rounds| left_after(&config, rounds));
    println!("{:16} {:>24} {:>24}", "", format!("{FEW} rounds"), format!("{MANY} rounds"));
    let mut grows = false;
    for ((kind, bytes, blocks), (_, more, more_blocks)) in few.into_iter().zip(many) {
        let shown = |bytes, blocks| format!("{bytes} bytes in {blocks}");
        println!("{kind:16} {:>24} {:>24}", shown(bytes, blocks), shown(more, more_blocks));
        grows |= more > bytes + BYTES || more_blocks > blocks + BLOCKS;
    }
    if grows {
        println!("what is left grows with the rounds");
        return ExitCode::FAILURE;
    }
    println!("nothing grows with the rounds");
    ExitCode::SUCCESS
}

/// What valgrind calls a wrong access.
const FAULTS: [&str; 4] = ["Invalid read", "Invalid write", "Use of uninit", "Conditional jump"];

fn left_after(config: &MooncakeConfig, rounds: u32) -> Left {
    let output = Command::new("valgrind")
        .args([
            "--leak-check=full",
            "--show-leak-kinds=all",
            "--fair-sched=yes",
            "--num-callers=30",
        ])
        .arg(env::current_exe().unwrap())
        .arg("--rounds")
        .arg(config.library.as_ref().unwrap())
        .arg(rounds.to_string())
        .output()
        .unwrap_or_else(|error| {
            panic!("valgrind: {error}; install it (Debian, Ubuntu: `apt-get install valgrind`)")
        });
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}", output.status);
    print!("{}", String::from_utf8_lossy(&output.stdout));
    // The wheel has faults of its own, such as padding that it sends; ours would be another matter.
    let faults = text.split("\n==").collect::<Vec<_>>();
    let faults = faults.split(|line| line.trim_end().ends_with("=="));
    for fault in faults.filter(|fault| FAULTS.iter().any(|kind| fault.concat().contains(kind))) {
        let frames = fault.concat();
        let top = frames.split("alloc'd").next().unwrap_or_default();
        assert!(!top.contains("mooncake_relay") && !top.contains("mooncake_sys"), "{frames}");
    }
    KINDS.map(|kind| {
        let line = text.lines().find(|line| line.contains(&format!("{kind}:")));
        let (_, amounts) = line.and_then(|line| line.split_once(": ")).unwrap_or_default();
        let mut numbers =
            amounts.split_whitespace().filter_map(|word| word.replace(',', "").parse::<u64>().ok());
        (kind, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    })
}
