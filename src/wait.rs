//! How a thread passes the time until there is something to do.

use std::{
    fmt,
    hint::spin_loop,
    str::FromStr,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What whoever waits does with its core until something happens: the notifier, and callers in
/// `wait`, `wait_timeout` and `acquire`. Transfer threads always sleep while they have nothing to do; what the
/// embedded engine does over TCP follows it too. What each costs is in
/// [`guide::settings`](crate::guide::settings). Prints, and is parsed, in lower case.
///
/// ```
/// use mooncake_relay::WaitStrategy;
/// assert_eq!("park".parse::<WaitStrategy>()?, WaitStrategy::Park);
/// assert_eq!(WaitStrategy::default().to_string(), "auto");
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitStrategy {
    /// Spins for 50 µs, offering its core every few µs unless strangers take it for long, then sleeps
    /// until it is woken; where this process may use one core only, yields instead of spinning.
    #[default]
    Auto,
    /// Keeps it: the least latency, and a whole core for each relay's notifier and for each caller
    /// that waits.
    Spin,
    /// Offers it to others, and looks again; never sleeps.
    Yield,
    /// Sleeps at once until it is woken: the least use of the core.
    Park,
}

impl fmt::Display for WaitStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Spin => "spin",
            Self::Yield => "yield",
            Self::Park => "park",
        })
    }
}

impl FromStr for WaitStrategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Auto, Self::Spin, Self::Yield, Self::Park]
            .into_iter()
            .find(|strategy| strategy.to_string() == text)
            .ok_or_else(|| Error::config("wait", format!("{text:?} is not {STRATEGIES}")))
    }
}

pub(crate) const STRATEGIES: &str = "auto, spin, yield or park";

/// `time` after `now`, or about a hundred years if there is no such instant.
pub(crate) fn deadline_after(now: Instant, time: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    now + time.min(CENTURY)
}

/// A time as a number of nanoseconds, or the highest number.
pub(crate) fn nanos(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}

/// How long a spin lasts before its thread sleeps: longer than a hop between two cores, shorter
/// than what a sleeper's wake costs.
const GRACE: Duration = Duration::from_micros(50);

/// How many looks go by between two looks at the clock.
const LOOKS: u32 = 64;
/// The same where each is a system call.
const CALLS: u32 = 1;

/// A yield that takes so long has given the core to a stranger, for a whole slice.
const STRANGER: Duration = Duration::from_micros(100);

/// For how long nobody in this process yields after that.
const SHUN: Duration = Duration::from_millis(100);

/// Yields, unless strangers have taken the core for long just before. False: they have.
fn offer_core() -> bool {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    /// In nanoseconds since then. Publishes nothing: who reads an older value yields once more.
    static SHUNNED_UNTIL: AtomicU64 = AtomicU64::new(0);
    let since = |at: Instant| at.duration_since(*BEGIN).as_nanos() as u64;
    let before = Instant::now();
    if since(before) < SHUNNED_UNTIL.load(Ordering::Relaxed) {
        return false;
    }
    thread::yield_now();
    let after = Instant::now();
    let ours = after - before <= STRANGER;
    if !ours {
        SHUNNED_UNTIL.store(since(after + SHUN), Ordering::Relaxed);
    }
    ours
}

/// One stretch of having nothing to do.
#[derive(Debug)]
pub(crate) struct Idle {
    strategy: WaitStrategy,
    /// Whether somebody else may need this core in order to give us work.
    alone: bool,
    /// Whether each look is a system call.
    calls: bool,
    looks: u32,
    since: Option<Instant>,
}

impl Idle {
    /// `cores` is how many processors this process may use.
    pub(crate) fn new(strategy: WaitStrategy, cores: usize) -> Self {
        Self { strategy, alone: cores < 2, calls: false, looks: 0, since: None }
    }

    /// Of a thread each of whose looks is a system call: it offers its core more often, and sleeps at once
    /// where strangers have it, since whoever wakes it takes it from them.
    #[cfg(all(feature = "embedded", not(loom)))]
    pub(crate) fn of_calls(strategy: WaitStrategy, cores: usize) -> Self {
        Self { calls: true, ..Self::new(strategy, cores) }
    }

    /// There was something to do.
    pub(crate) fn reset(&mut self) {
        (self.looks, self.since) = (0, None);
    }

    /// Whether a pause is a spin, mostly, and gives the core to nobody.
    pub(crate) fn spins(&self) -> bool {
        match self.strategy {
            WaitStrategy::Spin => true,
            WaitStrategy::Auto => !self.alone,
            WaitStrategy::Yield | WaitStrategy::Park => false,
        }
    }

    /// Passes a moment. True: the thread had better sleep until it is woken.
    pub(crate) fn pause(&mut self) -> bool {
        match self.strategy {
            WaitStrategy::Park => return true,
            WaitStrategy::Spin => spin_loop(),
            WaitStrategy::Yield => thread::yield_now(),
            WaitStrategy::Auto if self.alone => {
                thread::yield_now();
                return self.grace_is_over();
            }
            WaitStrategy::Auto => {
                spin_loop();
                self.looks = self.looks.wrapping_add(1);
                let period = if self.calls { CALLS } else { LOOKS };
                if !self.looks.is_multiple_of(period) {
                    return false;
                }
                // The system may have put whom we wait for on this very core: without this it would
                // run only when the grace is over, and each hop would last that long.
                let ours = offer_core();
                return self.grace_is_over() || self.calls && !ours;
            }
        }
        false
    }

    fn grace_is_over(&mut self) -> bool {
        let now = Instant::now();
        now.duration_since(*self.since.get_or_insert(now)) >= GRACE
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::affinity;

    /// One thread's turns: how many of them ran out of grace before they came.
    fn turns(turn: &AtomicU32, mine: u32, turns: u32) -> u32 {
        let mut slept = 0;
        for number in (mine..turns).step_by(2) {
            let mut idle = Idle::new(WaitStrategy::Auto, 2);
            let mut over = false;
            while turn.load(Ordering::SeqCst) != number {
                over |= idle.pause();
            }
            slept += u32::from(over);
            turn.store(number + 1, Ordering::SeqCst);
        }
        slept
    }

    #[test]
    fn two_who_spin_on_one_core_hand_it_to_each_other() {
        const TURNS: u32 = 40;
        let core = affinity::allowed()[0];
        let batch = || {
            let turn = AtomicU32::new(0);
            let one = |mine| {
                affinity::pin(core).unwrap();
                turns(&turn, mine, TURNS)
            };
            thread::scope(|scope| {
                let other = scope.spawn(|| one(1));
                scope.spawn(|| one(0)).join().unwrap() + other.join().unwrap()
            })
        };
        // Whoever else wants the core may take it for longer than the grace: so more than one try.
        let begun = Instant::now();
        while batch() > TURNS / 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "each waits for the other's grace");
        }
    }

    #[test]
    fn a_deadline_too_far_to_say_is_a_hundred_years_away() {
        let now = Instant::now();
        assert!(deadline_after(now, Duration::MAX) > now + Duration::from_secs(1 << 31));
        assert_eq!(deadline_after(now, Duration::from_secs(1)), now + Duration::from_secs(1));
    }
}
