//! What this machine allows, asked before anything is allocated.
//!
//! `fallocate` beyond a memory cgroup's limit is answered by the kernel with SIGKILL, and beyond
//! `RLIMIT_FSIZE` with SIGXFSZ, so both are compared first.

use std::{fs, path::Path};

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result};

/// Fails if `len` bytes of shared memory cannot be had, naming `field` and how much there is. Huge pages
/// were set aside before: what is left of other memory does not bound them.
pub(super) fn check(len: usize, field: &'static str, huge: bool) -> Result<()> {
    let len = len as u64;
    let mut limits = vec![("RLIMIT_FSIZE", getrlimit(Resource::Fsize).current)];
    if !huge {
        limits.push(("the memory available", available()));
        limits.push(("the memory cgroup's limit less its use", cgroup_headroom()));
    }
    for (what, limit) in limits {
        if let Some(limit) = limit.filter(|limit| len > *limit) {
            return Err(Error::config(
                field,
                format!(
                    "{len} bytes of shared memory are needed, but {what} is {limit}: configure \
                     fewer credits or smaller slots"
                ),
            ));
        }
    }
    Ok(())
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least head-room of this process's cgroup and its parents; `None` without a limit.
fn cgroup_headroom() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines().filter_map(headroom_of_hierarchy).min()
}

/// `line` is one of `/proc/self/cgroup`: `id:controllers:path`.
fn headroom_of_hierarchy(line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let (root, limit, usage) = if controllers.is_empty() {
        ("/sys/fs/cgroup", "memory.max", "memory.current")
    } else if controllers.split(',').any(|c| c == "memory") {
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    } else {
        return None;
    };
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    Path::new(path)
        .ancestors()
        .filter_map(|group| {
            let folder = Path::new(root).join(group.strip_prefix("/").unwrap_or(group));
            let limit = number(&folder.join(limit))?;
            Some(limit.saturating_sub(number(&folder.join(usage))?))
        })
        .min()
}
