//! What this machine allows a relay, and what to do about each limit:
//! `cargo run --release --example doctor [-- --json]`.
//!
//! Changes nothing. At its end it moves a few bytes between two relays of its own, so it exits with
//! an error only where no relay can work at all.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write},
    net::{TcpListener, ToSocketAddrs},
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::Parser;
use mooncake_relay::{Config, EmbeddedEngine, Relay, Tensor};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create, statvfs},
    process::{Resource, getpid, getrlimit, getuid},
    system::uname,
    thread::{CapabilitySet, CpuSet, capabilities, sched_getaffinity},
};
use serde::Serialize;

/// Says what this machine allows a relay, and what to do about each limit.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do, where something is to be done.
    remedy: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// It works; this is what bounds it, or what it lacks.
    Note,
    /// Something that a relay needs does not work.
    Bad,
}

type Look = fn() -> Seen;

/// Every check, in the order in which they are shown.
const CHECKS: &[(&str, Look)] = &[
    ("kernel", kernel),
    ("cpus", cpus),
    ("affinity", affinity),
    ("cpu quota", cpu_quota),
    ("clock", clock),
    ("memory", memory),
    ("file size", file_size),
    ("memlock", memlock),
    ("huge pages", huge_pages),
    ("/dev/shm", dev_shm),
    ("memfd seals", seals),
    ("descriptors", descriptors),
    ("namespaces", namespaces),
    ("ports", ports),
    ("host name", host_name),
    ("environment", environment),
    ("rdma", rdma),
    ("engines", engines),
    ("mooncake", mooncake),
    ("a transfer", transfer),
];

fn main() -> ExitCode {
    let args = Args::parse();
    let mut works = true;
    for (check, look) in CHECKS {
        let Seen(verdict, found, remedy) = look();
        works &= verdict != Verdict::Bad;
        let finding = Finding { check, verdict, found, remedy };
        let text = if args.json {
            serde_json::to_string(&finding).unwrap_or_default()
        } else {
            finding.text()
        };
        if writeln!(io::stdout(), "{text}").is_err() {
            break; // nobody reads on
        }
    }
    if works { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Finding {
    fn text(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Bad => "BAD",
        };
        let found = self.found.replace('\n', "\n                    ");
        let mut text = format!("{verdict:5} {:13} {found}", self.check);
        if let Some(remedy) = &self.remedy {
            text += &format!(
                "\n                    → {}",
                remedy.replace('\n', "\n                      ")
            );
        }
        text
    }
}

/// What a check came to.
struct Seen(Verdict, String, Option<String>);

fn ok(found: impl Display) -> Seen {
    Seen(Verdict::Ok, found.to_string(), None)
}

fn note(found: impl Display, remedy: impl Display) -> Seen {
    Seen(Verdict::Note, found.to_string(), Some(remedy.to_string()))
}

fn bad(found: impl Display, remedy: impl Display) -> Seen {
    Seen(Verdict::Bad, found.to_string(), Some(remedy.to_string()))
}

fn kernel() -> Seen {
    let release = uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let found = format!("Linux {release}, and 5.10 is enough");
    if version >= (5, 10) { ok(found) } else { bad(found, "a newer kernel: 5.10 or later") }
}

/// The CPUs that this process may use.
fn allowed() -> Vec<usize> {
    sched_getaffinity(Some(getpid())).map_or_else(
        |_| Vec::new(),
        |mask| (0..CpuSet::MAX_CPU).filter(|&core| mask.is_set(core)).collect(),
    )
}

fn cpus() -> Seen {
    let allowed = allowed().len();
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let there = text.lines().filter(|line| line.starts_with("processor")).count().max(allowed);
    let found = format!("{allowed} of {there} may be used by this process");
    match allowed {
        0 | 1 => note(
            found,
            "wait `auto` (the default) yields here in place of spinning; `spin` would wait for itself. \
             Two are faster: give the container or the process one more",
        ),
        2 | 3 => note(
            found,
            "enough for `auto` and `park`. `spin` takes a whole one for each relay and each caller that \
             waits: use it where there are more",
        ),
        _ => ok(found),
    }
}

fn affinity() -> Seen {
    let cores: Vec<_> = allowed().iter().map(ToString::to_string).collect();
    let found = format!("cores {} for transfer_cores and notifier_core", cores.join(","));
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let isolated = fs::read_to_string("/sys/devices/system/cpu/isolated").unwrap_or_default();
    let nodes = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    let found = format!("{found}; memory of NUMA nodes {}", nodes.unwrap_or("?").trim());
    match isolated.trim() {
        "" => ok(found),
        isolated => ok(format!("{found}; isolated for pinned threads: {isolated}")),
    }
}

fn cpu_quota() -> Seen {
    let quota = cgroups("cpu").find_map(|group| {
        let read = |name: &str| fs::read_to_string(group.join(name)).ok();
        let (quota, period) = match read("cpu.max") {
            Some(text) => {
                let mut words = text.split_whitespace().map(str::to_owned);
                (words.next()?, words.next()?)
            }
            None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
        };
        let quota: f64 = quota.trim().parse().ok().filter(|quota| *quota > 0.0)?;
        let period: f64 = period.trim().parse().ok()?;
        let stat = read("cpu.stat").unwrap_or_default();
        let throttled = stat.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        Some((quota / period, throttled.unwrap_or("0").trim().to_owned()))
    });
    match quota {
        None => ok("none: no cgroup bounds the processor time"),
        Some((cpus, throttled)) => note(
            format!("{cpus:.2} CPUs' worth of time; throttled {throttled} times so far"),
            "a process that has used it up stands still for the rest of 100 ms. Spinning uses it up: \
             `park`, or a higher quota (cpu.max; docker --cpus; limits.cpu)",
        ),
    }
}

fn clock() -> Seen {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(path).unwrap_or_else(|_| "unknown".to_owned());
    match source.trim() {
        fast @ ("tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page") => {
            ok(format!("{fast}: read without a system call"))
        }
        "unknown" => ok("the system does not say which"),
        slow => note(
            format!("{slow}: each look at the time is a system call"),
            "small transfers are slower by it: boot with clocksource=tsc if the machine's is reliable",
        ),
    }
}

fn memory() -> Seen {
    let available = number_of("/proc/meminfo", "MemAvailable").map(|kib| kib << 10);
    let headroom = cgroups("memory")
        .filter_map(|group| {
            let read =
                |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            let limit = read("memory.max").or_else(|| read("memory.limit_in_bytes"))?;
            let used = read("memory.current").or_else(|| read("memory.usage_in_bytes"))?;
            // Version 1 says "no limit" by a number that no machine has.
            (limit < 1 << 60).then(|| limit.saturating_sub(used))
        })
        .min();
    let Some(least) = available.into_iter().chain(headroom).min() else {
        return ok("the system does not say");
    };
    let config = Config::default();
    let needed = (config.slot_size as u64) * u64::from(config.credits) * 2;
    let of = if headroom == Some(least) { "the cgroup's limit leaves" } else { "available:" };
    let found = format!(
        "{of} {} MiB; a relay of the default size takes {} (slot_size × credits, for puts and for gets)",
        least >> 20,
        needed >> 20
    );
    if least >= 2 * needed {
        ok(found)
    } else {
        note(
            found,
            "fewer credits or smaller slots, or a higher limit (memory.max; docker --memory). Slots \
             count as this process's own memory",
        )
    }
}

fn file_size() -> Seen {
    match getrlimit(Resource::Fsize).current {
        None => ok("no limit (RLIMIT_FSIZE)"),
        Some(limit) => note(
            format!("{} MiB a file (RLIMIT_FSIZE), and slots are one", limit >> 20),
            "raise it (`ulimit -f unlimited`) if slot_size × credits is more",
        ),
    }
}

fn memlock() -> Seen {
    if capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK)) {
        return ok("CAP_IPC_LOCK: `lock_memory` may lock any amount");
    }
    match getrlimit(Resource::Memlock).current {
        None => ok("no limit (RLIMIT_MEMLOCK): `lock_memory` may lock any amount"),
        Some(limit) => note(
            format!("{} KiB may be locked; needed by `lock_memory` and by RDMA alone", limit >> 10),
            "for those: `ulimit -l unlimited`, memlock in limits.conf, docker --ulimit memlock=-1, or \
             CAP_IPC_LOCK",
        ),
    }
}

fn huge_pages() -> Seen {
    let number = |name| number_of("/proc/meminfo", name);
    let (Some(size), Some(all), Some(free)) =
        (number("Hugepagesize"), number("HugePages_Total"), number("HugePages_Free"))
    else {
        return note("this kernel has none", "leave `huge_pages` off, which is the default");
    };
    let free = free.saturating_sub(number("HugePages_Rsvd").unwrap_or(0));
    let found = format!("{free} free of {all} set aside, of {size} KiB each");
    if size != 2048 {
        return note(found, "`huge_pages` wants pages of 2 MiB: boot with default_hugepagesz=2M");
    }
    if free > 0 {
        return ok(found);
    }
    note(
        found,
        "only for `huge_pages`, which is off by default: `sysctl vm.nr_hugepages=N` as root",
    )
}

fn dev_shm() -> Seen {
    let size = statvfs("/dev/shm").map(|fs| (fs.f_blocks * fs.f_frsize) >> 20);
    let there = size.map_or_else(|_| "absent".to_owned(), |mib| format!("{mib} MiB"));
    ok(format!("{there}, and of no importance: slots are memfds, which are not in it"))
}

fn seals() -> Seen {
    let sealed = || -> io::Result<()> {
        let file: File =
            memfd_create("doctor", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?.into();
        file.set_len(4096)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        Ok(fcntl_add_seals(&file, seals)?)
    };
    match sealed() {
        Ok(()) => ok("a memfd can be made and sealed: peers can map slots, and write none"),
        Err(error) => bad(
            format!("a memfd cannot be made or sealed: {error}"),
            "a seccomp profile or an emulated kernel (gVisor) refuses it: allow memfd_create and fcntl",
        ),
    }
}

fn descriptors() -> Seen {
    let limit = getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(u64::MAX);
    let hard = limit.maximum.map_or_else(|| "no limit".to_owned(), |hard| hard.to_string());
    let served = (soft / 4).clamp(256, 1024);
    let found = format!(
        "{soft} (RLIMIT_NOFILE; up to {hard}): an embedded engine serves {served} connections, and each \
         peer takes a few"
    );
    if soft >= 1024 { ok(found) } else { note(found, "`ulimit -n 4096` before the process starts") }
}

fn namespaces() -> Seen {
    let of = |kind: &str, whose: &str| {
        let link = fs::read_link(format!("/proc/{whose}/ns/{kind}")).ok()?;
        Some(link.to_string_lossy().into_owned())
    };
    let own = |kind| of(kind, "self").unwrap_or_else(|| "?".to_owned());
    let found = format!(
        "user {}, {}, {}: shared memory goes between processes that have all of these in common, TCP \
         between others",
        getuid().as_raw(),
        own("net"),
        own("user")
    );
    // Only root may look at process 1.
    let apart = of("net", "1").is_some_and(|first| of("net", "self") != Some(first));
    if apart {
        return note(
            found,
            "this process is in a network namespace of its own: containers of one pod share theirs; \
             docker: --network container:NAME, or --network host",
        );
    }
    ok(found)
}

fn ports() -> Seen {
    if let Err(error) = TcpListener::bind("127.0.0.1:0") {
        return bad(
            format!("no port of 127.0.0.1 can be had: {error}"),
            "bring `lo` up (`ip link set lo up`), or let the sandbox pass sockets",
        );
    }
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ends = range.split_whitespace().filter_map(|end| end.parse::<u32>().ok());
    let (first, last) = (ends.next().unwrap_or(32_768), ends.next().unwrap_or(60_999));
    let free = (15_000..17_000_u16)
        .step_by(100)
        .filter(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    let found = format!(
        "an embedded engine takes 2, and what is not named comes from {first}–{last}; the real Mooncake \
         engine chooses 2 of 15000–17000 ({} of 20 tried are free)",
        free.count()
    );
    if last.saturating_sub(first) < 1000 {
        return note(
            found,
            "few: `sysctl net.ipv4.ip_local_port_range='32768 60999'`, or name ports",
        );
    }
    ok(found)
}

fn host_name() -> Seen {
    let name = uname().nodename().to_string_lossy().into_owned();
    let addresses: Vec<_> =
        (name.as_str(), 0).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        Some(address) => {
            ok(format!("{name} is {}: `bind(\"0.0.0.0:…\")` works as it is", address.ip()))
        }
        None => note(
            format!("{name} has no address but loopback"),
            "for peers on other hosts bind the address they reach, or \
             `builder(\"0.0.0.0:15000\").advertise(\"10.0.0.7\")`; within this host nothing is to do",
        ),
    }
}

fn environment() -> Seen {
    let set: Vec<_> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("MOONCAKE_") || name.starts_with("MC_"))
        .collect();
    match Config::from_env() {
        Err(error) => {
            note(format!("{}: {error}", set.join(", ")), "correct or unset that variable")
        }
        Ok(_) if set.is_empty() => ok("no MOONCAKE_RELAY_… variable is set: the defaults hold"),
        Ok(_) => ok(format!("set, and parsed: {}", set.join(", "))),
    }
}

fn rdma() -> Seen {
    let devices: Vec<_> = fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    if devices.is_empty() {
        return ok("no device (/sys/class/infiniband): TCP between hosts");
    }
    ok(format!("{}: the real Mooncake engine can use them, protocol `rdma`", devices.join(", ")))
}

fn engines() -> Seen {
    let built =
        [("embedded", cfg!(feature = "embedded")), ("mooncake", cfg!(feature = "mooncake"))];
    let there: Vec<_> = built.iter().filter(|one| one.1).map(|one| one.0).collect();
    match there.len() {
        2 => ok("embedded and mooncake are built in"),
        _ => {
            note(format!("built in: {}", there.join(", ")), "the others are features of the crate")
        }
    }
}

#[cfg(feature = "mooncake")]
fn mooncake() -> Seen {
    match mooncake_sys::load(&mooncake_sys::Options::default()) {
        Ok(library) => {
            let of = library.wheel_version().map_or_else(
                || "a built library".to_owned(),
                |version| format!("wheel {version}, by the adapter"),
            );
            ok(format!("{of} {}", library.path().display()))
        }
        // Every place that was looked at, and the commands that install it.
        Err(error) => {
            let text = error.to_string();
            let (looked, install) = text.rsplit_once('\n').unwrap_or((&text, ""));
            note(looked, format!("only for the real Mooncake engine: {install}"))
        }
    }
}

#[cfg(not(feature = "mooncake"))]
fn mooncake() -> Seen {
    note("not built in", "only for the real Mooncake engine: build with the feature `mooncake`")
}

fn transfer() -> Seen {
    let moved = || -> mooncake_relay::Result<String> {
        let config = Config::default().with_credits(1).with_slot_size(4096);
        let relay = || Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config);
        let (sender, receiver) = (relay()?, relay()?);
        let (metadata, put) = sender.put_bytes(&[7; 4096], Tensor::bytes(4096))?;
        let mut dest = [0; 4096];
        receiver.get_into(&metadata, &mut dest, Duration::from_secs(5))?;
        put.wait()?;
        let peers = receiver.health().peers;
        Ok(peers.first().map_or_else(String::new, |peer| peer.way.clone()))
    };
    match moved() {
        Ok(way) if way == "local" => ok("two relays moved 4 KiB by shared memory"),
        Ok(way) => note(
            format!("two relays moved 4 KiB by {way}, not by shared memory"),
            "it works, but slower: abstract Unix sockets or passing memfds is refused here (a sandbox?)",
        ),
        Err(error) => {
            bad(format!("two relays could not move 4 KiB: {error}"), "see what is BAD above")
        }
    }
}

/// A line `name: number` of a file in `/proc`.
fn number_of(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// This process's cgroup for that controller and its parents, as folders, of either version.
fn cgroups(controller: &str) -> impl Iterator<Item = std::path::PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let root = if controllers.is_empty() {
            "/sys/fs/cgroup".to_owned()
        } else if controllers.split(',').any(|one| one == controller) {
            format!("/sys/fs/cgroup/{controller}")
        } else {
            continue;
        };
        // In a container the path may be that of the host: then its root is this one's own.
        groups.extend(
            Path::new(path)
                .ancestors()
                .map(|group| Path::new(&root).join(group.strip_prefix("/").unwrap_or(group))),
        );
    }
    groups.into_iter()
}
