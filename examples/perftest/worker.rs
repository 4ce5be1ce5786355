//! A putting thread: its lanes, and the loops that are measured.

use std::{
    collections::VecDeque,
    fmt::Display,
    hint, mem, thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use mooncake_relay::{Error, Relay, Slot, Tensor, Token};

use crate::{
    Result,
    case::{Case, Mode},
    client, machine, pattern, row, stopped,
    wire::{self, Answer, Heard, Lane, gone},
};

/// What a round of a worker came to.
pub(crate) struct Round {
    pub(crate) times: Histogram<u64>,
    pub(crate) puts: u64,
    pub(crate) taken: Duration,
    pub(crate) unsent: u64,
}

pub(crate) struct Worker<'r> {
    case: &'r Case,
    relay: &'r Relay,
    number: usize,
    lanes: Vec<Way>,
    /// Of all lanes.
    pending: usize,
    looks: u32,
}

/// A lane, and what is under way on it.
struct Way {
    lane: Lane,
    puts: u64,
    pending: VecDeque<Put>,
}

struct Put {
    token: Token<Slot>,
    /// From when on it counts.
    since: Instant,
}

/// Looks at the lanes and at Ctrl-C come so often while a thread waits.
const TICK: Duration = Duration::from_millis(200);
/// Nothing takes longer unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long puts of an open loop that are overdue at its end are still made, if it lasted as long.
const OVERTIME: Duration = Duration::from_secs(2);
/// Sleeps end late: the rest of the time before a put is due is spent looking.
const EARLY: Duration = Duration::from_micros(200);
/// How long a thread with several lanes waits for the oldest put before it looks at the others.
const GLANCE: Duration = Duration::from_micros(50);

impl<'r> Worker<'r> {
    pub(crate) fn new(case: &'r Case, relay: &'r Relay, number: usize, lanes: Vec<Lane>) -> Self {
        let lanes =
            lanes.into_iter().map(|lane| Way { lane, puts: 0, pending: VecDeque::new() }).collect();
        Self { case, relay, number, lanes, pending: 0, looks: 0 }
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().map(|way| &way.lane)
    }

    /// A text as long as metadata to the first peer, and a line back.
    pub(crate) fn echo(&mut self) -> Result<Duration> {
        self.idle();
        let lane = &mut self.lanes[0].lane;
        let text = format!("{{\"cmd\":\"echo\",\"text\":\"{}\"}}", ".".repeat(480));
        let begun = Instant::now();
        lane.say(&text).map_err(|error| broken(lane, &error))?;
        match lane.hear(Some(Instant::now() + PATIENCE))? {
            Heard::Line(_) => Ok(begun.elapsed()),
            Heard::Nothing | Heard::End => Err(gone(lane.peer()).into()),
        }
    }

    /// Measures for so long.
    pub(crate) fn round(&mut self, begin: Instant, time: Duration) -> Result<Round> {
        machine::pin(&self.case.cores, self.number)?;
        thread::sleep(begin.saturating_duration_since(Instant::now()));
        let mut round =
            Round { times: row::histogram(), puts: 0, taken: Duration::ZERO, unsent: 0 };
        match self.case.mode {
            Mode::Latency => self.closed(time, &mut round)?,
            Mode::Throughput | Mode::Rate => self.open(time, &mut round)?,
        }
        Ok(round)
    }

    /// Whether the receivers got all that was put.
    pub(crate) fn finish(&mut self) -> Result<()> {
        for way in &mut self.lanes {
            let gets = client::sync(&mut way.lane)?;
            if gets != way.puts {
                let (puts, peer) = (way.puts, way.lane.peer());
                return Err(format!(
                    "{peer} got {gets} of {puts} puts whose tokens all ended well: report this"
                )
                .into());
            }
        }
        Ok(())
    }

    /// One put at a time.
    fn closed(&mut self, time: Duration, round: &mut Round) -> Result<()> {
        let begun = Instant::now();
        let most = self.case.count.unwrap_or(u64::MAX);
        for number in 0.. {
            let lane = number as usize % self.lanes.len();
            let slot = self.relay.acquire(self.case.size, PATIENCE)?;
            let slot = self.filled(slot, lane);
            self.idle();
            let since = Instant::now();
            self.put(slot, lane, since)?;
            let put = self.lanes[lane].pending.pop_front().expect("it was put just now");
            self.pending -= 1;
            self.wait(put.token, lane)?;
            let now = Instant::now();
            round.times.saturating_record((now - since).as_nanos() as u64);
            round.puts = number + 1;
            round.taken = now - begun;
            if round.taken >= time || round.puts >= most {
                break;
            }
        }
        Ok(())
    }

    /// Several at a time: as fast as they end, or one whenever one is due.
    fn open(&mut self, time: Duration, round: &mut Round) -> Result<()> {
        let begun = Instant::now();
        let end = begun + time;
        let most = self.case.count.unwrap_or(u64::MAX);
        let mut pace = self.case.rate.map(|rate| Pace::new(begun, rate, self.case, self.number));
        let mut checked = begun;
        loop {
            self.settle(round)?;
            let now = Instant::now();
            let due = pace.as_ref().map_or(now, |pace| pace.next);
            let over = round.puts + self.pending as u64 >= most || due >= end;
            if over || now >= end + time.min(OVERTIME) {
                break;
            }
            if now - checked > TICK {
                self.look_around()?;
                checked = now;
            }
            if due <= now && self.pending < self.case.outstanding {
                match self.relay.try_acquire(self.case.size) {
                    Ok(slot) => {
                        let lane = self.idlest();
                        let slot = self.filled(slot, lane);
                        let since = if pace.is_some() { due } else { Instant::now() };
                        self.put(slot, lane, since)?;
                        if let Some(pace) = &mut pace {
                            pace.step();
                        }
                        continue;
                    }
                    // Another thread has them: with none of our own under way nobody else wakes us.
                    Err(Error::Exhausted) if self.pending == 0 => thread::yield_now(),
                    Err(Error::Exhausted) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let blocked = due <= now || self.pending >= self.case.outstanding;
            self.pass(if blocked { now + TICK } else { due }, round)?;
        }
        // What was due and never made would be the worst of all.
        if let Some(pace) = &mut pace {
            let now = Instant::now();
            while pace.next < end && round.puts + (self.pending as u64) < most {
                round.times.saturating_record((now - pace.next).as_nanos() as u64);
                round.unsent += 1;
                pace.step();
            }
        }
        while self.pending > 0 {
            self.settle(round)?;
            let now = Instant::now();
            if now - checked > TICK {
                self.look_around()?;
                checked = now;
            }
            self.pass(now + TICK, round)?;
        }
        round.taken = begun.elapsed();
        Ok(())
    }

    /// Takes in every put that has ended.
    fn settle(&mut self, round: &mut Round) -> Result<()> {
        let mut drives = true;
        for lane in 0..self.lanes.len() {
            while let Some(put) = self.lanes[lane].pending.front_mut() {
                // To poll one token is to look at the engine for all of them.
                if !mem::take(&mut drives) && !put.token.is_done() {
                    break;
                }
                let Some(outcome) = put.token.poll() else { break };
                self.ended(lane, outcome, round)?;
            }
        }
        Ok(())
    }

    /// The oldest put of that lane.
    fn ended(
        &mut self,
        lane: usize,
        outcome: Result<Slot, Error>,
        round: &mut Round,
    ) -> Result<()> {
        let way = &mut self.lanes[lane];
        let put = way.pending.pop_front().expect("its outcome is here");
        self.pending -= 1;
        match outcome {
            Ok(_slot) => {
                round.times.saturating_record(put.since.elapsed().as_nanos() as u64);
                round.puts += 1;
                Ok(())
            }
            Err(error) => Err(why(&mut way.lane, &error)),
        }
    }

    /// Lets time pass until a put may have ended, and not beyond `until`.
    fn pass(&mut self, until: Instant, round: &mut Round) -> Result<()> {
        let now = Instant::now();
        let left = until.saturating_duration_since(now);
        let since = |lane: &usize| self.lanes[*lane].pending.front().map(|put| put.since);
        let oldest = (0..self.lanes.len()).filter(|lane| since(lane).is_some()).min_by_key(since);
        match oldest {
            None if left > EARLY => thread::sleep((left - EARLY).min(TICK)),
            // A sleep would end too late.
            _ if left <= EARLY => self.look_again(),
            Some(lane) => {
                // The put of another lane may end before it: in an open loop its time counts.
                let others = self.lanes.len() > 1 && self.case.mode == Mode::Rate;
                let most = if others { GLANCE } else { left - EARLY };
                let put = self.lanes[lane].pending.front_mut().expect("it is the oldest");
                if let Some(outcome) = put.token.wait_timeout(most.min(TICK)) {
                    self.ended(lane, outcome, round)?;
                }
            }
            None => {}
        }
        Ok(())
    }

    fn look_again(&mut self) {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(16) {
            thread::yield_now(); // the other side may need this core
        } else {
            hint::spin_loop();
        }
    }

    /// The lane with the fewest puts under way.
    fn idlest(&self) -> usize {
        let at = |number: usize| self.lanes[number].pending.len();
        (0..self.lanes.len())
            .min_by_key(|&number| (at(number), self.lanes[number].puts))
            .unwrap_or(0)
    }

    fn filled(&self, mut slot: Slot, lane: usize) -> Slot {
        if self.case.check {
            pattern::fill(&mut slot, self.number, self.lanes[lane].puts);
        }
        slot
    }

    fn put(&mut self, slot: Slot, lane: usize, since: Instant) -> Result<()> {
        let tensor = Tensor::bytes(slot.len());
        let (metadata, token) = self.relay.put(slot, tensor)?;
        let way = &mut self.lanes[lane];
        way.lane.say(&metadata).map_err(|error| broken(&mut way.lane, &error))?;
        way.puts += 1;
        way.pending.push_back(Put { token, since });
        self.pending += 1;
        Ok(())
    }

    /// Until that put has ended, whatever becomes of the other side.
    fn wait(&mut self, mut token: Token<Slot>, lane: usize) -> Result<()> {
        loop {
            match token.wait_timeout(TICK) {
                Some(Ok(_slot)) => return Ok(()),
                Some(Err(error)) => return Err(why(&mut self.lanes[lane].lane, &error)),
                None => self.look_around()?,
            }
        }
    }

    /// Whether there is any use in waiting on.
    fn look_around(&mut self) -> Result<()> {
        if stopped() {
            return Err(crate::STOPPED.into());
        }
        for way in &mut self.lanes {
            let gone = way.lane.is_gone();
            match way.lane.look()? {
                Heard::Nothing if !gone => {}
                // A receiver says nothing of its own accord, but why it gives up.
                Heard::Line(line) => return Err(told(line)),
                Heard::Nothing | Heard::End => return Err(wire::gone(way.lane.peer()).into()),
            }
        }
        Ok(())
    }

    fn idle(&self) {
        if self.case.idle_us > 0 {
            thread::sleep(Duration::from_micros(self.case.idle_us));
        }
    }
}

/// When the puts of an open loop are due: those of all threads together at the rate asked for.
struct Pace {
    begun: Instant,
    /// Seconds.
    first: f64,
    every: f64,
    number: u64,
    next: Instant,
}

impl Pace {
    fn new(begun: Instant, rate: f64, case: &Case, thread: usize) -> Self {
        let first = thread as f64 / rate;
        let next = begun + Duration::from_secs_f64(first);
        Self { begun, first, every: case.threads as f64 / rate, number: 0, next }
    }

    fn step(&mut self) {
        self.number += 1;
        let due = self.first + self.number as f64 * self.every; // no error adds up
        self.next = self.begun + Duration::from_secs_f64(due);
    }
}

/// Why a put failed: by its own error, and by what the receiver says, if it does.
fn why(lane: &mut Lane, error: &Error) -> Box<dyn std::error::Error + Send + Sync> {
    let peer = lane.peer().to_owned();
    match lane.hear(Some(Instant::now() + TICK)) {
        Ok(Heard::Line(line)) => told(line),
        Ok(Heard::End) => gone(&peer).into(),
        Ok(Heard::Nothing) | Err(_) => format!("a put to {peer} failed: {error}").into(),
    }
}

fn told(line: &str) -> Box<dyn std::error::Error + Send + Sync> {
    match serde_json::from_str(line) {
        Ok(Answer::Failed { error }) => format!("the receiver gave up: {error}").into(),
        _ => format!("the receiver says {line:?}: build both sides from one version").into(),
    }
}

/// The lane does not take a line: the receiver is gone, or has said why it gave up.
fn broken(lane: &mut Lane, error: &dyn Display) -> Box<dyn std::error::Error + Send + Sync> {
    match lane.look() {
        Ok(Heard::Line(line)) => told(line),
        _ => format!("{} ({error})", gone(lane.peer())).into(),
    }
}
