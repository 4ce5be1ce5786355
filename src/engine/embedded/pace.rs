//! How the engine's threads pass the time before they sleep.
//!
//! The answer to a request is there after some ten microseconds, and so is the next request after an
//! answer: a thread that sleeps at once is woken for each of them, which takes longer. So whoever
//! expects one looks for a grace first, as the relay's own waits do. Each look is a system call.

use crate::{
    affinity,
    wait::{Grace, Idle, WaitStrategy},
};

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

    /// The begin of a wait of a kind.
    pub(super) fn idle(self, grace: &Grace) -> Idle<'_> {
        Idle::of_calls(self.strategy, self.cores, grace)
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
        let (pace, grace) = (Pace::of(WaitStrategy::Park), Grace::new(false));
        assert!(pace.parks() && pace.idle(&grace).pause());
        for strategy in [WaitStrategy::Auto, WaitStrategy::Spin, WaitStrategy::Yield] {
            let pace = Pace::of(strategy);
            assert!(!pace.parks());
            let mut idle = pace.idle(&grace);
            while !idle.pause() {} // hangs if it never does
        }
    }
}
