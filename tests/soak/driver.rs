//! Starts the processes, passes their metadata on, well and badly, and stops and kills them.

use std::{
    collections::{BTreeMap, VecDeque},
    env,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam::channel::{Sender, bounded};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Random, peer::real_engine};

const KINDS: [&str; 4] = ["local", "local", "tcp", "mooncake"];
/// How many lines wait for a process that does not read; the rest is lost, as on any bad channel.
const WAITING: usize = 256;
/// How much old metadata is kept, to be told again.
const OLD: usize = 256;

/// What all share.
#[derive(Default)]
struct Soak {
    /// By place; `None` while nobody is there.
    inputs: Mutex<Vec<Option<Sender<String>>>>,
    old: Mutex<VecDeque<String>>,
    random: Mutex<Option<Random>>,
    wrong: Mutex<Vec<String>>,
    /// The last that each life of each process said of itself.
    lives: Mutex<BTreeMap<String, Value>>,
    faults: Faults,
}

#[derive(Default)]
struct Faults {
    kills: AtomicU64,
    stops: AtomicU64,
    doubled: AtomicU64,
    lost: AtomicU64,
    old: AtomicU64,
}

/// One life of one process.
struct Life {
    child: Child,
    threads: Vec<JoinHandle<()>>,
    /// It said that all is free.
    ended: Arc<AtomicBool>,
}

pub(crate) fn soak(time: Duration) {
    let library = real_engine().map(|real| real.site.to_str().unwrap().to_owned());
    let kinds =
        KINDS.map(|kind| if kind == "mooncake" && library.is_none() { "tcp" } else { kind });
    let library = library.unwrap_or_default();
    let seed = u64::from(std::process::id()) << 32 | u64::from(time.as_secs() as u32) | 1;
    let soak = Arc::new(Soak::default());
    *soak.random.lock() = Some(Random::new(seed));
    soak.inputs.lock().resize_with(kinds.len(), || None);
    let mut born = 0;
    let mut start = |place: usize| {
        born += 1;
        soak.start(place, kinds[place], &format!("w{place}-{born}"), seed ^ born << 16, &library)
    };
    let mut lives: Vec<_> = (0..kinds.len()).map(&mut start).collect();

    let end = Instant::now() + time;
    while Instant::now() < end && soak.wrong.lock().is_empty() {
        thread::sleep(Duration::from_millis(100 + soak.below(900))); // between two blows
        let place = soak.below(kinds.len() as u64) as usize;
        let pid = Pid::from_child(&lives[place].child);
        if soak.below(3) == 0 {
            soak.faults.kills.fetch_add(1, Ordering::Relaxed);
            soak.inputs.lock()[place] = None;
            if let Err(status) = lives[place].kill() {
                soak.wrong.lock().push(format!("{} had ended with {status}", kinds[place]));
            }
            lives[place] = start(place);
        } else {
            soak.faults.stops.fetch_add(1, Ordering::Relaxed);
            kill_process(pid, Signal::STOP).unwrap();
            thread::sleep(Duration::from_millis(soak.below(700))); // how long it stands
            kill_process(pid, Signal::CONT).unwrap();
        }
    }
    // Their writers pass on what waits, and end.
    soak.inputs.lock().fill_with(|| None);
    let mut all_ended = true;
    for mut life in lives {
        let status = wait_long(&mut life.child);
        life.threads.drain(..).for_each(|thread| thread.join().unwrap());
        all_ended &= status && life.ended.load(Ordering::Relaxed);
    }
    soak.report(time, &kinds);
    let wrong = soak.wrong.lock();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(all_ended, "a process ended without saying that all is free");
    for (place, kind) in kinds.iter().enumerate() {
        assert!(soak.gets_at(place) > 0, "no get of the {kind} one at {place} ended well");
    }
}

fn wait_long(child: &mut Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(180);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        thread::sleep(Duration::from_millis(10)); // between two looks
    }
    panic!("process {} does not end", child.id())
}

impl Soak {
    fn below(&self, limit: u64) -> u64 {
        self.random.lock().as_mut().unwrap().below(limit)
    }

    fn start(
        self: &Arc<Self>,
        place: usize,
        kind: &str,
        name: &str,
        seed: u64,
        library: &str,
    ) -> Life {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--worker", kind, name, &seed.to_string(), library])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let (input, lines) = bounded::<String>(WAITING);
        let ended = Arc::new(AtomicBool::new(false));
        let writer = thread::spawn(move || {
            for line in lines {
                // Killed: its lines are lost.
                if writeln!(to, "{line}").is_err() {
                    return;
                }
            }
        });
        let (soak, said_so) = (Arc::clone(self), Arc::clone(&ended));
        let name = name.to_owned();
        let reader = thread::spawn(move || {
            // A line may be cut by a kill.
            for line in from.lines().map_while(Result::ok) {
                soak.hear(&name, &line, &said_so);
            }
        });
        self.inputs.lock()[place] = Some(input);
        Life { child, threads: vec![writer, reader], ended }
    }

    fn hear(&self, name: &str, line: &str, ended: &AtomicBool) {
        match line.split_once(' ') {
            Some(("put", put)) => self.pass_on(put),
            Some(("stats", stats)) => {
                // A line may be cut by a kill.
                if let Ok(stats) = serde_json::from_str(stats) {
                    self.lives.lock().insert(name.to_owned(), stats);
                }
            }
            Some(("end", text)) => {
                let mut end: Value = serde_json::from_str(text).unwrap();
                let mut stats = end["stats"].take();
                stats["counters"] = end["counters"].take();
                self.lives.lock().insert(name.to_owned(), stats);
                ended.store(true, Ordering::Relaxed);
            }
            Some(("wrong", what)) => self.wrong.lock().push(format!("{name}: {what}")),
            _ => {}
        }
    }

    /// To one process, mostly; to two, to nobody, and what is old, too.
    fn pass_on(&self, put: &str) {
        if !put.ends_with('}') {
            return; // cut by a kill
        }
        let told = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        match self.below(20) {
            0 => return told(&self.faults.lost),
            1 => {
                told(&self.faults.doubled);
                self.tell(put);
            }
            2 => {
                let old = self.old.lock();
                if let Some(line) = old.get(self.below(OLD as u64) as usize) {
                    told(&self.faults.old);
                    self.tell(line);
                }
            }
            _ => {}
        }
        self.tell(put);
        let mut old = self.old.lock();
        old.truncate(OLD - 1);
        old.push_front(put.to_owned());
    }

    fn tell(&self, put: &str) {
        let inputs = self.inputs.lock();
        let place = self.below(inputs.len() as u64) as usize;
        if let Some(input) = &inputs[place] {
            // Full: it does not read, and the put's lease ends.
            let _ = input.try_send(format!("get {put}"));
        }
    }

    /// Gets that ended well, of all lives at that place.
    fn gets_at(&self, place: usize) -> u64 {
        let (lives, start) = (self.lives.lock(), format!("w{place}-"));
        let of_place = lives.iter().filter(|(name, _)| name.starts_with(&start));
        of_place.filter_map(|(_, life)| life["gets"].as_u64()).sum()
    }

    fn report(&self, time: Duration, kinds: &[&str]) {
        let lives = self.lives.lock();
        let sum = |of: &str| lives.values().filter_map(|life| life[of].as_u64()).sum::<u64>();
        let Faults { kills, stops, doubled, lost, old } = &self.faults;
        let [kills, stops, doubled, lost, old] =
            [kills, stops, doubled, lost, old].map(|count| count.load(Ordering::Relaxed));
        println!(
            "{time:?}: {} puts, {} gets done, {:.1} GB of them; {} lives, {kills} kills, {stops} stops, \
             metadata {doubled} times doubled, {lost} lost, {old} old",
            sum("puts"),
            sum("gets"),
            sum("bytes") as f64 / 1e9,
            lives.len(),
        );
        let mut ends = BTreeMap::<&str, u64>::new();
        for (kind, count) in lives.values().filter_map(|life| life["ends"].as_object()).flatten() {
            *ends.entry(kind).or_default() += count.as_u64().unwrap_or(0);
        }
        println!("ends: {ends:?}");
        for (place, kind) in kinds.iter().enumerate() {
            // Lives long enough to say something: each began without a connection.
            let start = format!("w{place}-");
            let of_place = |name: &str| name.starts_with(&start);
            let lives = lives.iter().filter(|(name, _)| of_place(name)).map(|(_, life)| life);
            let enough =
                lives.filter(|life| life["timed"].as_u64().is_some_and(|timed| timed >= 100));
            let (mut p50, mut p999): (Vec<_>, Vec<_>) =
                enough.map(|life| (life["p50_us"].as_u64(), life["p999_us"].as_u64())).unzip();
            p50.sort_unstable();
            p999.sort_unstable();
            let middle =
                |all: &[Option<u64>]| all.get(all.len() / 2).copied().flatten().unwrap_or(0);
            println!(
                "{kind}: gets of {} lives of 100 and more: the median p50 is {} µs, the median p99.9 {} µs, \
                 the worst p99.9 {} µs",
                p50.len(),
                middle(&p50),
                middle(&p999),
                p999.last().copied().flatten().unwrap_or(0),
            );
        }
    }
}

impl Life {
    /// How it had ended before, if it had.
    fn kill(&mut self) -> Result<(), ExitStatus> {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        // They end with its pipes.
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        if status.signal() == Some(Signal::KILL.as_raw()) { Ok(()) } else { Err(status) }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // Only an error where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
