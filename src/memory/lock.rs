//! Memory that the system must not swap out.
#![allow(unsafe_code)] // asks the system to lock pages

use std::{fs, io};

use rustix::{
    io::Errno,
    mm::mlock,
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};

use super::Span;
use crate::error::{Error, Result};

/// Fails if this process may not lock `len` bytes more; asked before they are allocated.
pub(crate) fn check_lock(len: usize) -> Result<()> {
    let sets = capabilities(None);
    if sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK)) {
        return Ok(());
    }
    match allowed() {
        Some(allowed) if allowed < len as u64 => Err(refused(len, Errno::NOMEM)),
        _ => Ok(()),
    }
}

/// Locks `spans`, which are mapped; they stay locked until they are unmapped.
pub(crate) fn lock(spans: &[Span]) -> Result<()> {
    let all = spans.iter().map(|span| span.len).sum();
    for span in spans {
        // SAFETY: locking changes no byte, and pages that nobody has mapped are an error.
        unsafe { mlock(span.ptr.as_ptr().cast(), span.len) }
            .map_err(|errno| refused(all, errno))?;
    }
    Ok(())
}

/// How many bytes more this process may lock; `None` without a limit.
fn allowed() -> Option<u64> {
    let limit = getrlimit(Resource::Memlock).current?;
    Some(limit.saturating_sub(locked().unwrap_or(0)))
}

/// `VmLck` of `/proc/self/status`, in bytes.
fn locked() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmLck:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn refused(needed: usize, errno: Errno) -> Error {
    let allowed = match allowed() {
        Some(allowed) => format!("{allowed} more are allowed (RLIMIT_MEMLOCK less what is locked)"),
        None => "no limit is set".to_owned(),
    };
    Error::config(
        "lock_memory",
        format!(
            "{needed} bytes of memory are to be locked, and {allowed}: {}. Raise the limit (`ulimit \
             -l`, or memlock in limits.conf or the container), give the process CAP_IPC_LOCK, \
             configure fewer credits or smaller slots, or do not lock",
            io::Error::from(errno)
        ),
    )
}
