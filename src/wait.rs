//! How a thread passes the time until there is something to do.

use std::{
    fmt,
    hint::spin_loop,
    str::FromStr,
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
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
    /// Spins for up to 100 µs, less where the last waits were longer, offering its core every few µs; then
    /// sleeps until it is woken, and at once while strangers take the cores for long. Where nothing would
    /// wake it, over the real Mooncake engine, it spins for up to 1.6 ms and then naps. Where this process
    /// may use one core only, it yields instead of spinning.
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

/// How long a spin lasts at most before its thread sleeps: a few times what a sleeper's wake takes, 18 to 50 µs.
const GRACE: Duration = Duration::from_micros(100);

/// The same of who looks at what wakes nobody: longer than it takes the real Mooncake engine to deliver a
/// notification, or a read of 1 MiB.
const BLIND_GRACE: Duration = Duration::from_micros(1600);

/// How often a grace is halved at most: no spin is shorter than a few hops between two cores.
const HALVINGS: u32 = 4;

/// The part of a blind wait that one of its sleeps lasts: so much later it ends than it might.
const NAP_SHARE: u32 = 32;

/// The shortest sleep that is worth its cost, and the longest of whoever waits for something.
pub(crate) const NAP_LEAST: Duration = Duration::from_micros(50);
pub(crate) const NAP_MOST: Duration = Duration::from_millis(4);

/// How many looks go by between two looks at the clock.
const LOOKS: u32 = 64;
/// The same where each is a system call.
const CALLS: u32 = 1;

/// A yield that takes so long has given the core to a stranger, for a whole slice: longer than the copy
/// that somebody may do here for whom we wait, a peer or a thread of the real Mooncake engine.
const STRANGER: Duration = Duration::from_millis(1);

/// For how long nobody in this process yields after that, nor spins.
const SHUN: Duration = Duration::from_millis(100);

/// Yields, unless strangers have taken the core for long just before. False: they have; they may well
/// have the core of whom we wait for, too, and who spins keeps him from this one. `blind`: of a wait whose
/// strangers are, mostly, the threads of an engine in this process, so that it tells others nothing.
fn offer_core(blind: bool) -> bool {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    /// In nanoseconds since then; and whether the last yield was long: one alone may be a whim of the
    /// system's. They publish nothing: who reads an older value yields once more.
    static SHUNNED_UNTIL: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
    static LONG: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];
    let kind = usize::from(blind);
    let (shunned_until, long) = (&SHUNNED_UNTIL[kind], &LONG[kind]);
    let since = |at: Instant| at.duration_since(*BEGIN).as_nanos() as u64;
    let before = Instant::now();
    if since(before) < shunned_until.load(Ordering::Relaxed) {
        return false;
    }
    thread::yield_now();
    let after = Instant::now();
    let ours = after - before <= STRANGER;
    if long.load(Ordering::Relaxed) == ours {
        long.store(!ours, Ordering::Relaxed);
        return true;
    }
    if !ours {
        shunned_until.store(since(after + SHUN), Ordering::Relaxed);
    }
    ours
}

/// How long the waits of some kind spin, by how the last ones ended: a spin that meets nothing is wasted.
#[derive(Debug)]
pub(crate) struct Grace {
    blind: bool,
    /// How often it is halved. Publishes nothing: who reads an older value spins longer, or shorter.
    halved: AtomicU32,
}

impl Grace {
    /// `blind`: what is waited for wakes nobody.
    pub(crate) const fn new(blind: bool) -> Self {
        Self { blind, halved: AtomicU32::new(0) }
    }

    const fn most(&self) -> Duration {
        if self.blind { BLIND_GRACE } else { GRACE }
    }

    fn now(&self) -> Duration {
        match FIXED.load(Ordering::Relaxed) {
            NOT_FIXED => self.most() / (1 << self.halved.load(Ordering::Relaxed)),
            fixed => Duration::from_micros(fixed),
        }
    }

    /// A wait has ended that has slept, or has met nothing. `met`: what it waited for has come.
    fn learn(&self, waited: Duration, met: bool) {
        let halved = self.halved.load(Ordering::Relaxed);
        // The wake is in it, too.
        if !met || waited > self.most() * 3 / 2 {
            self.halved.store((halved + 1).min(HALVINGS), Ordering::Relaxed);
        } else if halved > 0 {
            self.halved.store(0, Ordering::Relaxed);
        }
    }
}

const NOT_FIXED: u64 = u64::MAX;
/// The length of every grace, in microseconds.
static FIXED: AtomicU64 = AtomicU64::new(NOT_FIXED);

/// Has every wait of this process spin for so long, or for as long as it learns: for benches.
#[allow(unreachable_pub, reason = "benches reach it by `internal`")]
pub fn fix_grace(grace: Option<Duration>) {
    FIXED.store(grace.map_or(NOT_FIXED, |grace| grace.as_micros() as u64), Ordering::Relaxed);
}

/// One stretch of having nothing to do.
#[derive(Debug)]
pub(crate) struct Idle<'a> {
    strategy: WaitStrategy,
    /// Whether somebody else may need this core in order to give us work.
    alone: bool,
    /// Whether each look is a system call.
    calls: bool,
    grace: &'a Grace,
    looks: u32,
    since: Option<Instant>,
    slept: bool,
}

impl<'a> Idle<'a> {
    /// `cores` is how many processors this process may use.
    pub(crate) fn new(strategy: WaitStrategy, cores: usize, grace: &'a Grace) -> Self {
        let alone = cores < 2;
        Self { strategy, alone, calls: false, grace, looks: 0, since: None, slept: false }
    }

    /// Of a thread each of whose looks is a system call: it offers its core at each.
    #[cfg(all(feature = "embedded", not(loom)))]
    pub(crate) fn of_calls(strategy: WaitStrategy, cores: usize, grace: &'a Grace) -> Self {
        Self { calls: true, ..Self::new(strategy, cores, grace) }
    }

    /// There was something to do.
    pub(crate) fn reset(&mut self) {
        self.end(true);
        self.forget();
    }

    /// Another stretch begins, and nothing is learnt from this one.
    pub(crate) fn forget(&mut self) {
        (self.looks, self.since, self.slept) = (0, None, false);
    }

    /// The stretch is over. `met`: because there is something to do.
    pub(crate) fn end(&self, met: bool) {
        let Some(since) = self.since.filter(|_| self.slept || !met) else { return };
        let waited = since.elapsed();
        // Of one that was given up early nobody knows how long it would have been.
        if self.slept || waited > self.grace.now() / 2 {
            self.grace.learn(waited, met);
        }
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
        if self.slept {
            return true;
        }
        self.slept = match self.strategy {
            WaitStrategy::Park => true,
            WaitStrategy::Spin => {
                spin_loop();
                false
            }
            WaitStrategy::Yield => {
                thread::yield_now();
                false
            }
            WaitStrategy::Auto if self.alone => {
                thread::yield_now();
                self.grace_is_over()
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
                let ours = offer_core(self.grace.blind);
                // Who naps has nobody who wakes it, and takes threads of its own process for strangers.
                self.grace_is_over() || !ours && !self.grace.blind
            }
        };
        self.slept
    }

    /// How long a sleep lasts where nothing wakes us, if it is to be one of these.
    pub(crate) fn nap(&mut self, least: Duration, most: Duration) -> Duration {
        (self.waited() / NAP_SHARE).clamp(least, most)
    }

    fn grace_is_over(&mut self) -> bool {
        self.waited() >= self.grace.now()
    }

    fn waited(&mut self) -> Duration {
        let now = Instant::now();
        now - *self.since.get_or_insert(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity;

    static SPINS: Grace = Grace::new(false);

    /// One thread's turns: how many of them ran out of grace before they came.
    fn turns(turn: &AtomicU32, mine: u32, turns: u32) -> u32 {
        let mut slept = 0;
        for number in (mine..turns).step_by(2) {
            let mut idle = Idle::new(WaitStrategy::Auto, 2, &SPINS);
            let mut over = false;
            while turn.load(Ordering::SeqCst) != number {
                if idle.pause() {
                    over = true;
                    thread::yield_now();
                }
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
    fn spins_are_shorter_after_long_waits_and_as_long_as_ever_after_a_short_one() {
        for blind in [false, true] {
            let grace = Grace::new(blind);
            let most = grace.now();
            let mut last = most;
            for _ in 0..100 {
                grace.learn(most * 3, true);
                assert!(grace.now() <= last);
                last = grace.now();
            }
            assert!(last < most && !last.is_zero(), "{last:?}");
            grace.learn(most, true);
            assert_eq!(grace.now(), most);
        }
    }

    #[test]
    fn who_waits_for_less_than_a_spin_again_and_again_does_not_spin_for_all_of_it() {
        let grace = Grace::new(true);
        let slept = |_| {
            let mut idle = Idle::new(WaitStrategy::Auto, 2, &grace);
            let begun = Instant::now();
            let mut slept = false;
            while begun.elapsed() < BLIND_GRACE * 3 / 4 && !slept {
                slept = idle.pause();
            }
            idle.end(false);
            slept
        };
        // The second time, unless others have the core.
        assert!((0..1000).any(slept), "{:?}", grace.now());
    }

    #[test]
    fn a_wait_that_has_slept_sleeps_again_at_once_and_is_learnt_from() {
        let grace = Grace::new(true);
        let mut idle = Idle::new(WaitStrategy::Auto, 2, &grace);
        let begun = Instant::now();
        while !idle.pause() {}
        assert!(begun.elapsed() >= BLIND_GRACE && idle.pause());
        let [least, most] = [1, 20].map(Duration::from_micros);
        assert_eq!(idle.nap(least, most), most, "a part of the wait");
        let slept = Instant::now();
        while slept.elapsed() < BLIND_GRACE {
            thread::yield_now();
        }
        idle.reset();
        assert!(grace.now() < BLIND_GRACE && !idle.pause(), "the next one spins, for less");
    }

    #[test]
    fn a_deadline_too_far_to_say_is_a_hundred_years_away() {
        let now = Instant::now();
        assert!(deadline_after(now, Duration::MAX) > now + Duration::from_secs(1 << 31));
        assert_eq!(deadline_after(now, Duration::from_secs(1)), now + Duration::from_secs(1));
    }
}
