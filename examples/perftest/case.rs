//! What one row is measured with. The client decides it, and tells the server.

use std::{fmt, time::Duration};

use clap::ValueEnum;
use mooncake_relay::{HugePages, WaitStrategy};
use serde::{Deserialize, Serialize};

/// All that a row was measured with; in `--json` it stands beside the numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) mode: Mode,
    /// Bytes a put.
    pub(crate) size: usize,
    /// The client's threads, which share its relay.
    pub(crate) threads: usize,
    /// How many puts of each thread may be under way.
    pub(crate) outstanding: usize,
    /// Relays that get.
    pub(crate) peers: usize,
    /// Slots of the client's relay.
    pub(crate) credits: u32,
    /// Puts a second, of all threads together; of an open loop only.
    pub(crate) rate: Option<f64>,
    /// How long both sides do nothing before each put.
    pub(crate) idle_us: u64,
    pub(crate) get: Get,
    pub(crate) check: bool,
    pub(crate) wait: WaitStrategy,
    pub(crate) transfer_threads: usize,
    pub(crate) cores: Vec<usize>,
    pub(crate) receiver_cores: Vec<usize>,
    pub(crate) engine: String,
    pub(crate) local: bool,
    pub(crate) protocol: String,
    pub(crate) device: String,
    pub(crate) huge_pages: HugePages,
    pub(crate) warm_up_s: f64,
    pub(crate) duration_s: f64,
    /// Puts of each thread, at most.
    pub(crate) count: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// One put at a time: a closed loop.
    Latency,
    /// Puts at a given rate, whether or not the ones before have ended: an open loop.
    #[value(skip)]
    Rate,
    /// As many puts as `--outstanding` allows, as fast as they end.
    Throughput,
}

/// How the receiver gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Get {
    /// `get_into` a buffer, one after another for each thread of the client.
    Into,
    /// `get`, and a slot by the token: several at once, on the relay's transfer threads.
    Token,
    /// `view`: looks at the sender's slot where it is, and copies nothing. Same host only.
    View,
}

/// What differs from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Axis {
    Size,
    Outstanding,
    Threads,
    Peers,
    Credits,
    TransferThreads,
}

impl Axis {
    /// What a sweep goes through if nothing else is said.
    pub(crate) fn values(self) -> &'static [usize] {
        match self {
            Self::Size => &[
                64,
                1 << 10,
                4 << 10,
                16 << 10,
                64 << 10,
                256 << 10,
                1 << 20,
                4 << 20,
                16 << 20,
                64 << 20,
            ],
            Self::Outstanding => &[1, 4, 16, 64, 256, 1024, 4096],
            Self::Threads | Self::TransferThreads => &[1, 2, 4, 8, 16],
            Self::Peers => &[1, 2, 4, 8, 16, 32, 64],
            Self::Credits => &[1, 4, 16, 64, 256, 1024],
        }
    }

    pub(crate) fn of(self, case: &Case) -> usize {
        match self {
            Self::Size => case.size,
            Self::Outstanding => case.outstanding,
            Self::Threads => case.threads,
            Self::Peers => case.peers,
            Self::Credits => case.credits as usize,
            Self::TransferThreads => case.transfer_threads,
        }
    }

    /// "4 KiB" of a size, else the number.
    pub(crate) fn show(self, value: usize) -> String {
        if self == Self::Size { size_name(value) } else { value.to_string() }
    }

    /// The word below a plot.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Size => "bytes a put",
            Self::Outstanding => "puts under way, a thread",
            Self::Threads => "putting threads",
            Self::Peers => "receiving relays",
            Self::Credits => "slots (credits)",
            Self::TransferThreads => "transfer threads of the receiver",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Size => "size",
            Self::Outstanding => "outstanding",
            Self::Threads => "threads",
            Self::Peers => "peers",
            Self::Credits => "credits",
            Self::TransferThreads => "workers",
        })
    }
}

impl Case {
    pub(crate) fn warm_up(&self) -> Duration {
        Duration::from_secs_f64(self.warm_up_s)
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.duration_s)
    }

    /// How a lane waits for metadata on so many cores. Where there are more lanes than cores, whoever
    /// spins keeps one from those who have something to do.
    pub(crate) fn lane_wait(&self, cores: usize) -> WaitStrategy {
        match self.wait {
            WaitStrategy::Auto if self.threads.saturating_mul(self.peers) > cores => {
                WaitStrategy::Park
            }
            wait => wait,
        }
    }

    /// How many words of metadata a lane has room for: all that may be under way.
    pub(crate) fn lane_words(&self) -> usize {
        self.outstanding.saturating_mul(96).clamp(8 << 10, 1 << 20)
    }

    pub(crate) fn slot_size(&self) -> usize {
        self.size.max(1)
    }

    /// Slots that a receiver needs: one for each thread that gets, or for gets under way.
    pub(crate) fn receive_credits(&self) -> u32 {
        let each = if self.get == Get::Token { self.outstanding.min(MOST_SLOTS) } else { 1 };
        self.threads.saturating_mul(each).min(65_536) as u32
    }

    /// How many gets of one lane are under way at once; those without a slot are queued.
    pub(crate) fn tokens(&self) -> usize {
        self.outstanding.clamp(1, MOST_TOKENS)
    }
}

/// Of a lane.
const MOST_SLOTS: usize = 64;
const MOST_TOKENS: usize = 4096;

/// "64 B", "4 KiB", "1 MiB".
pub(crate) fn size_name(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 30 && b.is_multiple_of(1 << 30) => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// "64", "4K", "4KiB", "1M", "2g".
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(format!("{text:?} is no size: give bytes, or as 64K, 4M")),
    };
    let number: usize = digits.parse().map_err(|_| format!("{text:?} is no size"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}
