//! Whether a get will be read by who asks for it.
//!
//! To wake a thread costs more than a small read does, and the caller who waits at once reads his get
//! himself. So after some gets of that kind no thread is woken for the next: one looks by itself, soon
//! enough for a get that turns out to be of another kind, which ends the streak.

use std::time::{Duration, Instant};

/// So many gets make a streak.
const LONG: u32 = 8;
/// What is at once.
const PROMPT: Duration = Duration::from_micros(50);
/// How long the thread that looks by itself sleeps between two looks.
const NAP: Duration = Duration::from_millis(1);
/// After so many naps without a get it sleeps until it is woken.
const NAPS: u32 = 20;

/// Gets in a row for which somebody waited at once.
#[derive(Debug, Default)]
pub(super) struct Streak {
    gets: u32,
    /// A thread looks by itself.
    napping: bool,
}

impl Streak {
    /// Whether no thread needs to be woken for a new get.
    pub(super) fn stands_in(&self) -> bool {
        self.napping && self.is_long()
    }

    pub(super) fn is_napping(&self) -> bool {
        self.napping
    }

    fn is_long(&self) -> bool {
        self.gets >= LONG
    }

    /// Somebody waits for a get that was asked for at `since`, for the first time. True: at once.
    pub(super) fn waited(&mut self, since: Instant) -> bool {
        let prompt = since.elapsed() < PROMPT;
        if prompt {
            self.gets = self.gets.saturating_add(1);
        }
        prompt
    }

    /// A thread takes a get, which ends a streak.
    pub(super) fn taken(&mut self) {
        if self.is_long() {
            self.end();
        }
    }

    /// Nobody waited for a get, or so late that a thread might have read it meanwhile.
    pub(super) fn end(&mut self) {
        self.gets = 0;
    }
}

/// One thread's naps in a row.
#[derive(Debug, Default)]
pub(super) struct Naps {
    count: u32,
    /// The streak's length before this one.
    before: u32,
    naps: bool,
}

impl Naps {
    /// Until when the thread sleeps; `None`: until it is woken.
    pub(super) fn begin(&mut self, streak: &mut Streak, now: Instant) -> Option<Instant> {
        self.before = streak.gets;
        self.naps = streak.is_long() && !streak.napping && self.count < NAPS;
        streak.napping |= self.naps;
        self.naps.then(|| now + NAP)
    }

    pub(super) fn end(&mut self, streak: &mut Streak) {
        streak.napping &= !self.naps;
        self.count = if streak.gets == self.before { self.count + 1 } else { 0 };
    }
}
