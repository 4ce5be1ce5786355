//! The machine, in words: a number without one says nothing.

use std::{fs, process::Command, thread, time::Duration};

use serde::Serialize;

#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    date: String,
    processor: String,
    cores: usize,
    memory: String,
    kernel: String,
    rustc: String,
    /// Who decides on how fast the cores run.
    governor: String,
    /// The rivals' versions.
    versions: Vec<String>,
    load_before: String,
    load_after: String,
    seconds: u64,
}

impl Machine {
    pub(crate) fn now() -> Self {
        let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        let unknown = || "none that the system sees".to_owned();
        Self {
            date: said("date", &["-u", "+%Y-%m-%d %H:%M UTC"]).unwrap_or_default(),
            processor: processor(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory: memory(),
            kernel: said("uname", &["-srm"]).unwrap_or_default(),
            rustc: said("rustc", &["-V"]).unwrap_or_default(),
            governor: fs::read_to_string(governor)
                .map_or_else(|_| unknown(), |text| text.trim().into()),
            versions: versions(),
            load_before: load(),
            load_after: String::new(),
            seconds: 0,
        }
    }

    pub(crate) fn end(&mut self, took: Duration) {
        self.load_after = load();
        self.seconds = took.as_secs();
    }

    pub(crate) fn sentence(&self) -> String {
        format!(
            "{}: {} cores of {}, {}, {}, {}; governor of the frequency: {}. Load average before {}, after {}; it \
             took {} s. {}.",
            self.date,
            self.cores,
            self.processor,
            self.memory,
            self.kernel,
            self.rustc,
            self.governor,
            self.load_before,
            self.load_after,
            self.seconds,
            self.versions.join(", "),
        )
    }
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The value of a line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line =
        text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
    Some(line.split_once(':')?.1.trim())
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |name| field(&text, name).unwrap_or("?");
    let virtual_one = text.contains(" hypervisor ");
    format!(
        "{} (family {}, model {}{})",
        of("model name"),
        of("cpu family"),
        of("model"),
        if virtual_one { ", in a virtual machine" } else { "" }
    )
}

fn memory() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        field(&text, "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map_or_else(
        || "memory unknown".to_owned(),
        |kib| format!("{} GiB", (kib + (1 << 19)) >> 20),
    )
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn versions() -> Vec<String> {
    let mut versions = Vec::new();
    let locked = include_str!("../Cargo.lock");
    let iceoryx2 = locked.split("name = \"iceoryx2\"\nversion = \"").nth(1);
    versions
        .extend(iceoryx2.and_then(|rest| rest.split('"').next()).map(|v| format!("iceoryx2 {v}")));
    let ucx = said("ucx_info", &["-v"]).unwrap_or_default();
    let ucx =
        ucx.lines().find_map(|line| line.split_once("ersion ").map(|(_, v)| v.trim().to_owned()));
    versions.extend(ucx.map(|version| format!("UCX {version}")));
    // The folders are named after what is in them.
    for (variable, name) in [("RIVALS_NIXL", "NIXL"), ("MOONCAKE_WHEEL", "Mooncake")] {
        let folder = std::env::var(variable).unwrap_or_default();
        versions.extend(folder.rsplit_once('-').map(|(_, version)| format!("{name} {version}")));
    }
    versions
}
