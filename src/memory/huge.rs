//! Huge pages: asked for, never assumed.

use std::{fmt, fs, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The size of a huge page.
pub(super) const HUGE_PAGE: usize = 2 << 20;

pub(crate) const CHOICES: &str = "off, prefer or require";

/// Whether a relay's slots are made of huge pages, which the machine's owner must have reserved
/// (`vm.nr_hugepages`). What they are good for is in [`guide::settings`](crate::guide::settings).
/// Prints, and is parsed, in lower case.
///
/// ```
/// use mooncake_relay::HugePages;
/// assert_eq!("prefer".parse::<HugePages>()?, HugePages::Prefer);
/// assert_eq!(HugePages::default().to_string(), "off");
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Pages of 4 KiB.
    #[default]
    Off,
    /// Huge pages for all slots if there are enough, else pages of 4 KiB for all; the log says so, and
    /// `health().huge_pages` which it is.
    Prefer,
    /// Huge pages, or [`Error::Config`] that says how many are missing.
    Require,
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Off => "off",
            Self::Prefer => "prefer",
            Self::Require => "require",
        })
    }
}

impl FromStr for HugePages {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Off, Self::Prefer, Self::Require]
            .into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or_else(|| Error::config(FIELD, format!("{text:?} is not {CHOICES}")))
    }
}

const FIELD: &str = "huge_pages";

/// Fails if there are not enough free for pools of these sizes; asked before any is allocated.
pub(crate) fn check_huge(pools: &[usize]) -> Result<()> {
    let needed: usize = pools.iter().map(|len| len.div_ceil(HUGE_PAGE)).sum();
    let pages = Pages::read().ok_or_else(|| {
        Error::config(FIELD, "this system has no huge pages: /proc/meminfo does not speak of them")
    })?;
    if pages.size != HUGE_PAGE {
        let reason = format!(
            "the system's huge pages have {} bytes, not {HUGE_PAGE}: boot with \
             default_hugepagesz=2M, or do without",
            pages.size
        );
        return Err(Error::config(FIELD, reason));
    }
    let free = pages.free();
    match needed.checked_sub(free) {
        None | Some(0) => Ok(()),
        Some(missing) => {
            let enough = pages.reserved.saturating_add(missing);
            let reason = format!(
                "the slots need {needed} huge pages of 2 MiB, and {free} are free (HugePages_Free \
                 less HugePages_Rsvd): reserve more (`sysctl vm.nr_hugepages={enough}`), configure \
                 fewer credits or smaller slots, or do not require huge pages"
            );
            Err(Error::config(FIELD, reason))
        }
    }
}

/// What a system call refused although [`check_huge`] found enough: others may have taken them since, or
/// this process may use fewer than the system has.
pub(super) fn refused(call: &str, len: usize, os: &std::io::Error) -> Error {
    let free = Pages::read().map_or(0, |pages| pages.free());
    let reason = format!(
        "{call} of {len} bytes in huge pages: {os}; {free} pages of 2 MiB are free now: reserve more \
         (`sysctl vm.nr_hugepages`), look at the limits of this process's cgroup (hugetlb) and NUMA \
         nodes, or do not require huge pages"
    );
    Error::config(FIELD, reason)
}

/// What `/proc` says of huge pages of the default size.
struct Pages {
    size: usize,
    /// All that the system has reserved.
    reserved: usize,
    free: usize,
    /// Of those free, promised to mappings.
    promised: usize,
    /// How many more the system may make when it is asked.
    surplus: usize,
}

impl Pages {
    fn read() -> Option<Self> {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let number = |name: &str| -> Option<usize> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().trim_end_matches("kB").trim().parse().ok()
        };
        let most = fs::read_to_string("/proc/sys/vm/nr_overcommit_hugepages").ok();
        let most = most.and_then(|text| text.trim().parse().ok()).unwrap_or(0_usize);
        Some(Self {
            size: number("Hugepagesize")?.checked_mul(1024)?,
            reserved: number("HugePages_Total")?,
            free: number("HugePages_Free")?,
            promised: number("HugePages_Rsvd")?,
            surplus: most.saturating_sub(number("HugePages_Surp")?),
        })
    }

    fn free(&self) -> usize {
        self.free.saturating_sub(self.promised).saturating_add(self.surplus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Host, Memory, Purpose};

    #[test]
    fn what_the_system_refuses_after_the_check_is_an_error_of_the_same_field() {
        // Half a million huge pages, which no machine has to spare.
        match Host::allocate(&(), 1 << 40, Purpose::Receive, true) {
            Err(Error::Config { field, reason }) => {
                assert_eq!(field, FIELD);
                assert!(reason.contains("vm.nr_hugepages"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
