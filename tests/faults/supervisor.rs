//! Each case in a process of its own: what it leaves is seen, and what hangs is ended.

use std::{env, fs, process::Command, time::Duration};

use libtest_mimic::Failed;

use crate::{
    common::{
        ended::{Ended, exited},
        eventually,
    },
    on::{Case, On},
};

const CASE: &str = "MOONCAKE_RELAY_TEST_CASE";

/// The case that this process is for, if it is for one.
pub(crate) fn asked() -> Option<String> {
    env::var(CASE).ok()
}

/// Runs a case in this process, and looks at what it leaves.
pub(crate) fn run(on: &On, case: &Case) {
    let held = || Held::now(on.library_stays());
    let before = held();
    (case.run)(on);
    eventually(before, held);
    println!("done");
}

/// What a process holds.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Held {
    threads: usize,
    /// Of what kind each is, in order.
    descriptors: Vec<String>,
    /// Pools that are still mapped.
    pools: usize,
    in_dev_shm: usize,
}

impl Held {
    /// Without what a library that stays loaded starts and opens in its own time: then only threads
    /// with our names count, and no event descriptors, no local sockets and no files of the system's.
    fn now(library_stays: bool) -> Self {
        let counts = |kind: &String| !(library_stays && is_of_a_library(kind));
        let mut descriptors: Vec<_> = descriptors().into_iter().filter(counts).collect();
        descriptors.sort_unstable();
        let ours = |name: &String| {
            !library_stays || name.starts_with("relay-") || name.starts_with("mooncake-")
        };
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let in_dev_shm = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let relays = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().contains("relay");
        Self {
            threads: thread_names().iter().filter(|name| ours(name)).count(),
            descriptors,
            pools: maps.lines().filter(|line| line.contains("memfd:mooncake-relay")).count(),
            in_dev_shm: in_dev_shm.filter(relays).count(),
        }
    }
}

fn thread_names() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    // One may have ended by the second look.
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// What each descriptor is: a path, or a kind without its number.
fn descriptors() -> Vec<String> {
    let local = fs::read_to_string("/proc/self/net/unix").unwrap_or_default();
    let is_local =
        |number: &str| local.lines().any(|line| line.split_whitespace().nth(6) == Some(number));
    let kind = |entry: fs::DirEntry| {
        let name = fs::read_link(entry.path()).ok()?.display().to_string();
        match name.split_once(":[") {
            Some(("socket", number)) if is_local(number.trim_end_matches(']')) => {
                Some("local socket".to_owned())
            }
            Some((kind, _)) if kind != "anon_inode" => Some(kind.to_owned()),
            _ => Some(name),
        }
    };
    // The folder that is being read is open, too.
    let ours = |name: &String| !name.starts_with("/proc/");
    fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(kind).filter(ours).collect()
}

fn is_of_a_library(kind: &str) -> bool {
    kind == "local socket" || kind.starts_with("anon_inode:") || kind.starts_with("/sys/")
}

/// Runs a case in a process of its own. It fails if that does not end well within `limit`, or says
/// on stderr that a thread of it or of its children panicked.
pub(crate) fn watch(name: &str, limit: Duration) -> Result<(), Failed> {
    let mut command = Command::new(env::current_exe()?);
    Ended::of(name, command.env(CASE, name), limit)?.is_well(exited(0))
}
