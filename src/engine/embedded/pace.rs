//! How whoever waits for an answer passes the time before it sleeps.
//!
//! The answer is there after some ten microseconds: who sleeps at once is woken for each, which takes
//! longer where his core went idle meanwhile. So he looks for a grace first, as the relay's own waits do. Each
//! look is a system call. The server sleeps at once: a wake takes the core from whoever looks, and looks of
//! its own would make it wait for its turn.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{
    affinity,
    wait::{Grace, Idle, WaitStrategy},
};

/// How many threads of this process look at this moment. It guards nothing: Relaxed.
static LOOKING: AtomicUsize = AtomicUsize::new(0);
/// How long they do, by how long the last answers took.
static GRACE: Grace = Grace::new(false);

/// Whether looks come before sleep, and on how many cores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    strategy: WaitStrategy,
    cores: usize,
}

impl Pace {
    /// That of a relay whose callers wait so.
    pub(super) fn of(strategy: WaitStrategy) -> Self {
        let strategy = match strategy {
            WaitStrategy::Park => WaitStrategy::Park,
            // Peers may be silent for ever: these threads always sleep in the end.
            WaitStrategy::Auto | WaitStrategy::Spin | WaitStrategy::Yield => WaitStrategy::Auto,
        };
        Self { strategy, cores: affinity::allowed().len() }
    }

    /// Whether it sleeps at once.
    pub(super) fn parks(self) -> bool {
        self.strategy == WaitStrategy::Park
    }

    /// How many threads may look at once: whom they wait for needs the other cores.
    fn most(self) -> usize {
        (self.cores / 2).max(1)
    }

    /// The beginning of a wait.
    pub(super) fn looks(self) -> Looks {
        let idle = Idle::of_calls(self.strategy, self.cores, &GRACE);
        Looks { idle, most: self.most(), looks: false }
    }
}

/// One wait, or one after another.
#[derive(Debug)]
pub(super) struct Looks {
    idle: Idle<'static>,
    most: usize,
    /// Whether this is one of them.
    looks: bool,
}

impl Looks {
    /// Passes a moment. True: the thread had better sleep until it is woken.
    pub(super) fn pause(&mut self) -> bool {
        if !self.begin() {
            return true;
        }
        let over = self.idle.pause();
        if over {
            self.end();
        }
        over
    }

    /// What was waited for has come.
    pub(super) fn reset(&mut self) {
        self.end();
        self.idle.reset();
    }

    /// Whether it may look.
    fn begin(&mut self) -> bool {
        if !self.looks {
            self.looks = true;
            if LOOKING.fetch_add(1, Ordering::Relaxed) >= self.most {
                self.end();
            }
        }
        self.looks
    }

    fn end(&mut self) {
        if self.looks {
            self.looks = false;
            LOOKING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Looks {
    fn drop(&mut self) {
        self.end();
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self { strategy: WaitStrategy::Park, cores: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_parks_sleeps_at_once_and_all_others_sleep_soon() {
        let pace = Pace::of(WaitStrategy::Park);
        assert!(pace.parks() && pace.looks().pause());
        for strategy in [WaitStrategy::Auto, WaitStrategy::Spin, WaitStrategy::Yield] {
            let pace = Pace::of(strategy);
            assert!(!pace.parks());
            let mut looks = pace.looks();
            assert!((0..10_000_000).any(|_| looks.pause()), "it never sleeps");
        }
    }

    #[test]
    fn no_more_threads_look_at_once_than_half_the_cores() {
        let pace = Pace::of(WaitStrategy::Auto);
        let mut all = vec![pace; pace.cores + 4].into_iter().map(Pace::looks).collect::<Vec<_>>();
        let looking = all.iter_mut().filter_map(|looks| looks.begin().then_some(())).count();
        assert!(looking <= pace.most(), "{looking}");
        drop(all);
        let given_back = |_| {
            std::thread::yield_now();
            pace.looks().begin()
        };
        assert!((0..1_000_000).any(given_back), "one has not given its place back");
    }
}
