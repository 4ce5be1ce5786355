//! Few cores: one for everybody, with strangers on it, or only what others leave of it; and cores
//! that are asked for by name.

use std::{
    collections::BTreeMap,
    env, fs,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, Error, Relay, WaitStrategy};
use rustix::{
    process::getpid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use serde_json::json;

use crate::{
    ENGINES, WATCHDOG, cases,
    common::{SKIPPED, eventually, peer::Peer},
    local, put, small, works,
};

cases! {
    j1_cores_outside_the_allowed_set_are_refused_and_those_inside_are_used,
    j4_one_core_for_everybody_is_enough = 300,
    j4_one_core_with_four_busy_strangers_is_enough = 300,
    j4_what_others_leave_of_one_core_is_enough = 600,
    j4_one_core_for_two_processes_is_enough = 300,
    j8_no_call_changes_where_the_application_runs = 300,
}

/// The cores that this process may use.
fn allowed() -> Vec<usize> {
    let mask = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|core| mask.is_set(*core)).collect()
}

/// Everything that this process does from now on happens on its last core, as `taskset` would have
/// it: it has one thread yet.
fn keep_to_one_core() -> usize {
    let core = *allowed().last().unwrap();
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(Some(getpid()), &mask).unwrap();
    core
}

/// Where each thread of that name may run.
fn places(start: &str) -> BTreeMap<String, String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let place = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?.trim_end().to_owned();
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let id = task.file_name().into_string().ok()?;
        name.starts_with(start).then(|| (format!("{name} {id}"), list.trim().to_owned()))
    };
    tasks.filter_map(place).collect()
}

fn j1_cores_outside_the_allowed_set_are_refused_and_those_inside_are_used() {
    let all = allowed();
    // While there are others to be on: each where it was told to be, and no others.
    if let [_, .., last] = all[..] {
        let config = small().with_transfer_cores([last]).with_notifier_core(last);
        let relay = Relay::new(local(), &config.with_transfer_threads(2)).unwrap();
        works(&relay, &relay);
        for name in ["relay-worker", "relay-notifier"] {
            let places = places(name);
            assert!(!places.is_empty(), "{name}");
            assert!(places.values().all(|place| *place == last.to_string()), "{name}: {places:?}");
        }
        let server = places("relay-server");
        assert!(server.values().all(|place| *place != last.to_string()), "{server:?}");
    } else {
        eprintln!("{SKIPPED}: with one core nobody can be seen to be on it");
    }
    let core = keep_to_one_core();
    let absent = [5000, usize::MAX, CpuSet::MAX_CPU]
        .into_iter()
        .chain(all.iter().copied().find(|other| *other != core));
    for absent in absent {
        for (field, config) in [
            ("transfer_cores", small().with_transfer_cores([absent])),
            ("notifier_core", small().with_notifier_core(absent)),
        ] {
            match Relay::new(local(), &config).map(drop) {
                Err(Error::Config { field: told, .. }) => assert_eq!(told, field, "core {absent}"),
                other => panic!("core {absent}: {other:?}"),
            }
        }
    }
    for config in [small(), small().with_transfer_cores([core]).with_notifier_core(core)] {
        let relay = Relay::new(local(), &config.with_transfer_threads(2)).unwrap();
        works(&relay, &relay);
        let places = places("relay-");
        assert_eq!(places.len(), 4, "{places:?}");
        assert!(places.values().all(|place| *place == core.to_string()), "{places:?}");
    }
}

/// Threads of other programs that never let go of a core by themselves.
struct Strangers(Vec<Child>);

impl Strangers {
    /// `None`, said aloud: there is no `taskset`.
    fn on(core: usize, count: usize) -> Option<Self> {
        let start = |_| {
            Command::new("taskset")
                .args(["-c", &core.to_string(), "sh", "-c", "while :; do :; done"])
                .stdin(Stdio::null())
                .spawn()
        };
        let started: Result<_, _> = (0..count).map(start).collect();
        match started {
            Ok(children) => Some(Self(children)),
            Err(error) => {
                assert!(env::var_os("CI").is_none(), "no strangers without taskset: {error}");
                eprintln!("{SKIPPED}: no strangers without taskset: {error}");
                None
            }
        }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that could not begin was none.
            let gone = child.try_wait().unwrap();
            assert!(gone.is_none() || thread::panicking(), "a stranger had ended: {gone:?}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// Transfers in each way that there is, on each engine and with each strategy that sleeps or yields.
fn go_round(count: usize) {
    for (kind, make) in ENGINES {
        for wait in [WaitStrategy::Auto, WaitStrategy::Park, WaitStrategy::Yield] {
            let config = small().with_wait(wait).with_credits(4);
            let [a, b] = [(), ()].map(|()| Relay::new(make(), &config).unwrap());
            let begun = Instant::now();
            for n in 0..count {
                let (metadata, mut token) = put(&a, &[n as u8; 100]);
                match n % 4 {
                    // By the caller's thread, by a worker, by a channel, and with no wait at all.
                    0 => assert_eq!(b.get_into(&metadata, &mut [0; 100], WATCHDOG).unwrap(), 100),
                    1 => drop(b.get(&metadata).unwrap().wait().unwrap()),
                    2 => {
                        let (tx, rx) = crossbeam::channel::bounded(1);
                        b.get(&metadata).unwrap().attach(&tx, 0);
                        drop(rx.recv_timeout(WATCHDOG).unwrap().result.unwrap());
                    }
                    _ => {
                        let get = b.get(&metadata).unwrap();
                        eventually(true, || get.is_done());
                    }
                }
                assert!(token.wait_timeout(WATCHDOG).expect("it was acknowledged").is_ok());
            }
            println!("{kind}, {wait}: {count} transfers in {:?}", begun.elapsed());
            assert_eq!((a.health().free, b.health().receive_free), (4, 4));
        }
    }
}

fn j4_one_core_for_everybody_is_enough() {
    keep_to_one_core();
    go_round(300);
    // Those that never sleep make progress, too.
    let [a, b] =
        [(), ()].map(|()| Relay::new(local(), &small().with_wait(WaitStrategy::Spin)).unwrap());
    (0..3).for_each(|_| works(&a, &b));
}

fn j4_one_core_with_four_busy_strangers_is_enough() {
    let core = keep_to_one_core();
    if let Some(_strangers) = Strangers::on(core, 4) {
        go_round(12);
    }
}

/// Only when nobody else wants the core.
fn be_idle() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters live, and threads that this one makes inherit what it says.
    let done = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    assert_eq!(done, 0, "anybody may be idle");
}

fn j4_what_others_leave_of_one_core_is_enough() {
    let core = keep_to_one_core();
    be_idle();
    go_round(100);
    if let Some(_strangers) = Strangers::on(core, 1) {
        let [a, b] = [(), ()].map(|()| Relay::new(local(), &small()).unwrap());
        let begun = Instant::now();
        (0..4).for_each(|_| works(&a, &b));
        println!("beside a stranger: 4 transfers in {:?}", begun.elapsed());
    }
}

fn j4_one_core_for_two_processes_is_enough() {
    keep_to_one_core();
    for flags in [&["--slot-size", "4096"][..], &["--slot-size", "4096", "--no-local"]] {
        // It inherits the one core.
        let peer = Peer::start(flags);
        let relay = Relay::new(local(), &small()).unwrap();
        let begun = Instant::now();
        for n in 0..100_u64 {
            let sent = peer.put(json!({"size": 500, "fill": n}));
            let got = relay.get(&sent.metadata.to_string().parse().unwrap()).unwrap();
            assert_eq!(got.wait().unwrap()[..], [n as u8; 500]);
            assert_eq!(peer.wait(sent.tag)["ok"], true);
        }
        println!("{flags:?}: 100 transfers in {:?}", begun.elapsed());
        peer.quit();
    }
}

fn j8_no_call_changes_where_the_application_runs() {
    let core = *allowed().last().unwrap();
    let all = allowed().len();
    // Threads of the application's, made before: one anywhere, one on a core of its own.
    let (stop, stopped) = mpsc::channel::<()>();
    let mut keep = vec![stop];
    let before = thread::Builder::new().name("app-before".to_owned());
    before
        .spawn(move || {
            let _ = stopped.recv();
        })
        .unwrap();
    let (stop, stopped) = mpsc::channel::<()>();
    keep.push(stop);
    let pinned = thread::Builder::new().name("app-pinned".to_owned());
    pinned
        .spawn(move || {
            keep_thread_to(core);
            let _ = stopped.recv();
        })
        .unwrap();
    eventually(1, || places("app-pinned").values().filter(|it| **it == core.to_string()).count());
    // The other may not have begun yet, and has its name only then.
    eventually(2, || places("app-").len());
    let own = || (sched_getaffinity(None).unwrap(), sched_getaffinity(Some(getpid())).unwrap());
    let (mine, apps) = (own(), places("app-"));
    let unchanged = |call: &str| {
        assert!(own() == mine, "{call} has moved its caller");
        assert_eq!(places("app-"), apps, "{call}");
    };

    for (_, make) in ENGINES {
        let config: Config =
            small().with_slot_size(8 << 20).with_transfer_cores([core]).with_notifier_core(core);
        let engine = make();
        unchanged("an engine");
        let [a, b] = [engine, make()].map(|engine| Relay::new(engine, &config).unwrap());
        unchanged("new");
        let (metadata, token) = put(&a, &vec![1; 5 << 20]); // a second thread helps
        unchanged("put_bytes");
        b.get_into(&metadata, &mut vec![0; 5 << 20], WATCHDOG).unwrap();
        unchanged("get_into");
        drop(token.wait().unwrap());
        unchanged("wait");
        let slot = a.acquire(1, WATCHDOG).unwrap();
        let (metadata, mut token) = a.put(slot, mooncake_relay::Tensor::bytes(1)).unwrap();
        assert!(token.poll().is_none() && token.wait_timeout(Duration::ZERO).is_none());
        unchanged("put, poll and wait_timeout");
        if let Ok(view) = b.view(&metadata) {
            view.copy_to(&mut [0; 1]).unwrap();
            unchanged("view");
        }
        drop(b.get(&metadata).unwrap_or_else(|error| panic!("{error}")).wait());
        drop(token);
        let (tx, rx) = crossbeam::channel::unbounded();
        let (metadata, token) = put(&a, b"x");
        token.attach(&tx, 0);
        drop(b.get_as("r", &metadata).unwrap().wait().unwrap());
        drop(rx.recv().unwrap());
        unchanged("attach and get_as");
        let (metadata, token) = put(&a, b"x");
        a.abort(&metadata).unwrap();
        assert_eq!(b.cleanup("r"), 0);
        drop(token);
        drop((a.health(), b.health()));
        unchanged("abort, cleanup and health");
        a.close(WATCHDOG);
        unchanged("close");
        drop((a, b));
        unchanged("drop");
    }
    // Threads made after are where they would be without a relay.
    let after = thread::spawn(|| sched_getaffinity(None).unwrap().count()).join().unwrap();
    assert_eq!(after as usize, all);
}

/// Pins the calling thread.
fn keep_thread_to(core: usize) {
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(None, &mask).unwrap();
}
