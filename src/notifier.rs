//! Who polls the engine: the notifier thread, or a caller that waits.
//!
//! Whoever holds `driving` polls for everybody. A caller that waits takes it where it can, and the
//! notifier stands back meanwhile; the notifier alone keeps the time, whoever polls.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    core::{Core, State},
    doorbell::Sleeper,
    error::Error,
    gets::Handle,
    memory::Memory,
    puts::Seen,
    sync::atomic::{Ordering, fence},
    token::Driver,
    wait::{Grace, Idle, NAP_LEAST, NAP_MOST},
};

/// The longest the notifier sleeps.
const NAP: Duration = Duration::from_secs(1);
/// How often it asks after quarantined slots, full channels and reads that nobody wants.
const TICK: Duration = Duration::from_millis(1);
/// How often it looks at an engine that has no doorbell, and how seldom at most when no put is open.
const BLIND_LEAST: Duration = Duration::from_millis(1);
const BLIND_IDLE: Duration = Duration::from_millis(20);
/// The pause after a look at the engine that failed.
const AFTER_ERROR: Duration = Duration::from_millis(10);
/// How long the end of a lease waits for a driver's look at what came before it.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// How many looks whoever spins takes between two looks at the clock.
const LOOKS: u32 = 64;

/// What a look at the engine found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    Nothing,
    Something,
    Error,
}

impl<M: Memory> Core<M> {
    /// The notifier thread's life.
    pub(crate) fn notify(&self) {
        let grace = Grace::new(false);
        let mut idle = Idle::new(self.wait, self.cores, &grace);
        let mut tend_at = Instant::now() + NAP;
        let (mut slow_get, mut stood_back) = (false, false);
        let mut awaited = None;
        let mut now = Instant::now();
        // How many looks in a row it has taken spinning.
        let mut spun = 0_u32;
        while self.state() != State::Closed {
            let ticket = self.bell().ticket();
            let stands_back = self.drivers.load(Ordering::SeqCst) > 0;
            if mem::replace(&mut stood_back, stands_back) && !stands_back {
                // Others have waited meanwhile, and their time is not its own.
                idle.forget();
            }
            let hands = if stands_back { None } else { self.driving.try_lock() };
            let mut look = Look::Nothing;
            // Before the look: what came before the end of a lease counts, however long the rest takes.
            // It is as good some looks later where those are spins.
            if spun.is_multiple_of(LOOKS) {
                now = Instant::now();
            }
            if hands.is_some() {
                self.bell().disarm();
                look = self.look();
            }
            self.keep_time(now, hands.is_some(), &mut awaited);
            if now >= tend_at {
                tend_at = now + NAP;
                self.engine.tend();
                self.gets.make_way(now);
                self.watch_gets(&mut slow_get);
            }
            let spun_before = mem::take(&mut spun);
            match (look, &hands) {
                (Look::Something, _) => {
                    idle.reset();
                    continue;
                }
                (Look::Nothing, Some(_)) if !idle.pause() => {
                    spun = if idle.spins() { spun_before.wrapping_add(1) } else { 0 };
                    continue;
                }
                // Somebody takes one look and leaves without a word: sleeping now would be unarmed.
                (_, None) if !stands_back => {
                    std::thread::yield_now();
                    continue;
                }
                _ => {}
            }
            let ticket = match hands {
                None => ticket,
                Some(hands) => {
                    let ticket = self.bell().arm(Sleeper::Notifier);
                    if look == Look::Nothing && self.look() == Look::Something {
                        idle.reset();
                        continue;
                    }
                    drop(hands);
                    ticket
                }
            };
            let until = self.next_wake(look, &mut idle);
            self.notifier_sleeps.store(self.ticks(until), Ordering::SeqCst);
            // Partner: `wake_notifier_by`, which stores the one before it loads the other.
            if self.next_timer.load(Ordering::SeqCst) >= self.ticks(until)
                && self.state() != State::Closed
            {
                self.bell().sleep(ticket, Sleeper::Notifier, until);
            }
            self.notifier_sleeps.store(0, Ordering::SeqCst);
        }
    }

    /// Works, or waits, until `done` or `until`, or until the thread had better park.
    pub(crate) fn drive(&self, done: &dyn Fn() -> bool, until: Option<Instant>) {
        let _standing = Standing::begin(self);
        let mut idle = self.idle();
        let every = if idle.spins() { LOOKS } else { 1 };
        let mut looks = 0_u32;
        let passed = |looks: &mut u32| {
            *looks = looks.wrapping_add(1);
            looks.is_multiple_of(every) && until.is_some_and(|until| until <= Instant::now())
        };
        loop {
            if done() || passed(&mut looks) || self.state() != State::Open {
                return;
            }
            if let Some(hands) = self.driving.try_lock() {
                self.bell().disarm();
                let mut idle = self.idle_driving();
                let mut joined = self.joined.load(Ordering::Relaxed);
                while !done() && !passed(&mut looks) && self.state() == State::Open {
                    match self.look() {
                        Look::Something => idle.reset(),
                        Look::Nothing if !idle.pause() => {}
                        look => {
                            let now = self.joined.load(Ordering::Relaxed);
                            if now != joined && look != Look::Error {
                                // It looks for one more, whose wait begins now.
                                joined = now;
                                idle.forget();
                                continue;
                            }
                            let nap = idle.nap(NAP_LEAST, NAP_MOST);
                            self.sleep_driving(done, until, look, nap);
                            if until.is_some_and(|until| until <= Instant::now()) {
                                break;
                            }
                        }
                    }
                }
                idle.end(done());
                // What comes from now on wakes the notifier; what came just before is taken here.
                self.bell().arm(Sleeper::Notifier);
                self.look();
                drop(hands);
                return;
            }
            if idle.pause() {
                if self.engine.doorbell().is_none() {
                    // Nothing but the driver's next look will tell what comes for this one.
                    self.joined.fetch_add(1, Ordering::Relaxed);
                    self.bell().ring();
                }
                return;
            }
        }
    }

    /// The driver sleeps, and keeps driving: an event wakes it and nobody else.
    fn sleep_driving(
        &self,
        done: &dyn Fn() -> bool,
        until: Option<Instant>,
        look: Look,
        blind: Duration,
    ) {
        let ticket = self.bell().arm(Sleeper::Driver);
        if look != Look::Error && self.look() == Look::Something {
            return self.bell().disarm();
        }
        if !done() && self.state() == State::Open {
            let nap = match look {
                Look::Error => AFTER_ERROR,
                _ if self.engine.doorbell().is_none() => blind,
                _ => NAP,
            };
            let nap = Instant::now() + nap;
            let wake = until.map_or(nap, |until| until.min(nap));
            self.bell().sleep(ticket, Sleeper::Driver, wake);
        }
        self.bell().disarm();
    }

    /// One look at the engine, by whoever holds `driving`.
    fn look(&self) -> Look {
        let mut look = Look::Nothing;
        // An engine that panics here may panic in a caller's `wait`: the relay fails, not the caller.
        let polled = catch_unwind(AssertUnwindSafe(|| {
            self.engine.poll(&mut |event| {
                look = Look::Something;
                self.on_event(event);
            })
        }));
        let looks = self.looks.load(Ordering::Relaxed);
        self.looks.store(looks + 1, Ordering::Relaxed);
        match polled {
            Ok(Ok(())) => {
                if self.failing_polls.load(Ordering::Relaxed) > 0 {
                    self.failing_polls.store(0, Ordering::Relaxed);
                    *self.poll_failure.lock() = None;
                }
                look
            }
            Ok(Err(error)) => {
                self.counters.poll_errors.count();
                self.failing_polls.fetch_add(1, Ordering::Relaxed);
                *self.poll_failure.lock() = Some(error.to_string());
                tracing::debug!(%error, "the engine could not be polled");
                Look::Error
            }
            Err(_) => {
                self.fail("the engine panicked while it was polled");
                Look::Error
            }
        }
    }

    /// Ends what has run out of time by `now`. `looked`: this thread has looked at the engine since.
    fn keep_time(&self, now: Instant, looked: bool, awaited: &mut Option<Awaited>) {
        if self.visit_quarantine(now) > 0 {
            self.bell().ring();
        }
        self.tokens.backlog.flush();
        self.interrupt_reads();
        let ticks = self.ticks(now);
        if ticks < self.next_timer.load(Ordering::Relaxed) {
            return;
        }
        // Whoever adds a timer meanwhile has entered it before, or lowers the value after.
        self.next_timer.store(u64::MAX, Ordering::SeqCst);
        // Partner: the fence in `wake_notifier_by`.
        fence(Ordering::SeqCst);
        let is_due = |seen: &Seen| !seen.quarantined && seen.lease_ends <= ticks;
        let any_due = self.puts.each().any(|seen| is_due(&seen));
        let heard = if any_due && !looked {
            self.heard_until(ticks, awaited)
        } else {
            *awaited = None;
            ticks
        };
        if self.end_puts(|seen| seen.lease_ends <= heard, || Error::TimedOut) > 0 {
            // A driver may sleep until it hears of its own put.
            self.bell().ring();
        }
        self.expire_gets(now);
        let soon = ticks + TICK.as_nanos() as u64;
        let open = self.puts.each().filter(|seen| !seen.quarantined);
        let lease = open.map(|seen| if is_due(&seen) { soon } else { seen.lease_ends });
        let deadline = self.gets.next_deadline().map(|at| self.ticks(at).max(soon));
        if let Some(next) = lease.chain(deadline).min() {
            self.next_timer.fetch_min(next, Ordering::SeqCst);
        }
    }

    /// Up to when all that came has been heard, where a driver may hold the engine: a lease that ended
    /// later is not over yet, since its acknowledgement may lie there. 0: no lease is over.
    fn heard_until(&self, ticks: u64, awaited: &mut Option<Awaited>) -> u64 {
        if let Some(_hands) = self.driving.try_lock() {
            self.look();
            *awaited = None;
            return ticks;
        }
        let looks = self.looks.load(Ordering::Relaxed);
        let patience = LAST_LOOK.as_nanos() as u64;
        match *awaited {
            // The look under way may have begun too early; the one after it has not.
            Some(Awaited { since, look }) if looks >= look || ticks - since >= patience => {
                *awaited = None;
                since
            }
            Some(_) => 0,
            None => {
                *awaited = Some(Awaited { since: ticks, look: looks + 2 });
                // It may be asleep.
                self.bell().wake_all();
                0
            }
        }
    }

    /// Says once when gets wait long for a receive slot: whoever holds the slots must let go.
    fn watch_gets(&self, told: &mut bool) {
        let waits = self.gets.oldest().filter(|(_, since, reading)| {
            !reading && since.elapsed() >= NAP && self.receive.credits().free() == 0
        });
        if let Some((peer, since, _)) = waits.as_ref().filter(|_| !*told) {
            tracing::warn!(
                %peer,
                waited = ?since.elapsed(),
                "a get waits for a receive slot: all are held by tokens not taken or slots not dropped"
            );
        }
        *told = waits.is_some();
    }

    fn next_wake(&self, look: Look, idle: &mut Idle<'_>) -> Instant {
        let now = Instant::now();
        let mut wake = now + NAP;
        let quarantined = self.puts.quarantined() > 0 && self.state() == State::Open;
        let waits = quarantined || !self.tokens.backlog.is_empty();
        if waits || self.gets.any_to_interrupt() {
            wake = now + TICK;
        }
        if look == Look::Error {
            wake = wake.min(now + AFTER_ERROR);
        }
        if self.engine.doorbell().is_none() {
            let open = self.slots.credits().free() < self.puts.slots();
            let most = if open { NAP_MOST } else { BLIND_IDLE };
            wake = wake.min(now + idle.nap(BLIND_LEAST, most));
        }
        wake.min(self.instant(self.next_timer.load(Ordering::SeqCst)))
    }
}

impl<M: Memory> Driver for Core<M> {
    fn step(&self) {
        if let Some(_hands) = self.driving.try_lock() {
            self.look();
        }
    }

    fn help(&self, job: u64, done: &dyn Fn() -> bool, until: Option<Instant>) {
        if job == 0 {
            return self.drive(done, until);
        }
        if let Some(claim) = self.gets.claim(Handle::from_job(job), until) {
            return self.perform(claim);
        }
        // Another thread reads it, or no slot is free: looking on costs less than sleeping.
        self.gets.hurry();
        let mut idle = self.idle();
        let every = if idle.spins() { LOOKS } else { 1 };
        let mut looks = 0_u32;
        while !done() && !idle.pause() {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(every) && until.is_some_and(|until| until <= Instant::now()) {
                return;
            }
        }
    }

    fn nudge(&self) {
        self.wake_notifier_by(self.ticks(Instant::now()));
    }
}

/// What the end of a lease waits for: the look of that number, wanted since then.
struct Awaited {
    since: u64,
    look: u64,
}

/// A driver, or one who would be: the notifier stands back while it lives.
struct Standing<'a, M: Memory>(&'a Core<M>);

impl<'a, M: Memory> Standing<'a, M> {
    fn begin(core: &'a Core<M>) -> Self {
        core.drivers.fetch_add(1, Ordering::Relaxed);
        Self(core)
    }
}

impl<M: Memory> Drop for Standing<'_, M> {
    fn drop(&mut self) {
        let core = self.0;
        // A ring since the last look has woken the notifier, which stood back and sleeps unarmed.
        // SeqCst: either it sees here that nobody drives, or we see what the ring did.
        if core.drivers.fetch_sub(1, Ordering::SeqCst) == 1 && !core.bell().wakes_notifier() {
            core.bell().wake_all();
        }
    }
}

/// What the relay's threads run: `body`, and if it panics, the relay has failed.
pub(crate) fn supervise<M: Memory>(core: &Arc<Core<M>>, body: impl FnOnce(&Core<M>)) {
    if catch_unwind(AssertUnwindSafe(|| body(core))).is_err() {
        core.fail("a thread of the relay panicked");
    }
}

impl<M: Memory> Core<M> {
    /// Ends everything that is open: the relay has failed.
    #[cold]
    pub(crate) fn fail(&self, why: &str) {
        if self.advance(State::Failed) {
            tracing::error!("{why}");
            self.end_puts(|_| true, || self.failed());
            self.end_quarantined();
            self.end_gets(|_, _| true, || self.failed());
            self.slots.credits().wake_waiting();
            self.bell().wake_all();
        }
    }
}
