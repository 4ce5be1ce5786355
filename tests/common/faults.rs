//! What can go wrong in an engine, each as one line of a test:
//!
//! ```ignore
//! let engine = Hooked::new("a");
//! engine.ranges_only().delay(Call::Read, Duration::from_millis(3), 0x5eed).double_notes();
//! let gate = engine.hang(Call::Read, ..);
//! ```
//!
//! Faults add up, as hooks do. Where one takes `calls`, those are the calls meant of the ones that
//! come to it from then on, the first being 0: `..` is every call, `2..=2` the third alone.

use std::{
    mem,
    ops::RangeBounds,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Engine, Error, Event, Filled, Notification, ReadError, RemoteBuffer, Result, Retracted,
};
use parking_lot::Mutex;

use super::{
    Random,
    gate::Gate,
    hooked::{Call, Hooked},
};

/// Which calls, from 0.
pub(crate) trait Calls: RangeBounds<usize> + Send + Sync + 'static {}

impl<R: RangeBounds<usize> + Send + Sync + 'static> Calls for R {}

/// Counts the calls; whether this one is meant.
fn meant(calls: impl Calls) -> impl Fn() -> bool + Send + Sync + 'static {
    let next = AtomicUsize::new(0);
    move || calls.contains(&next.fetch_add(1, Ordering::SeqCst))
}

/// Any call.
impl Hooked {
    /// Each `call` begins up to `most` late.
    pub(crate) fn delay(&self, call: Call, most: Duration, seed: u64) -> &Self {
        let random = Mutex::new(Random::new(seed));
        self.before(call, move || {
            let micros = random.lock().below(most.as_micros() as u64 + 1);
            thread::sleep(Duration::from_micros(micros)); // the fault itself
            Ok(())
        })
    }

    /// These calls fail, and do nothing else: a read hands its buffer back untouched.
    pub(crate) fn fail(
        &self,
        call: Call,
        calls: impl Calls,
        error: impl Fn() -> Error + Send + Sync + 'static,
    ) -> &Self {
        let meant = meant(calls);
        self.before(call, move || if meant() { Err(error()) } else { Ok(()) })
    }

    /// These calls begin when the gate is opened, whatever their deadline.
    pub(crate) fn hang(&self, call: Call, calls: impl Calls) -> Gate {
        let (gate, way) = Gate::pair();
        let meant = meant(calls);
        self.before(call, move || {
            if meant() {
                way.pass();
            }
            Ok(())
        });
        gate
    }
}

/// Reads.
impl Hooked {
    /// It knows ranges and no identities, so that the relay must read the stamp.
    pub(crate) fn ranges_only(&self) -> &Self {
        self.on_read(|next, remote, local, deadline| {
            if remote.len == 0 {
                // An empty range says nothing; whose it is, the stamp tells.
                return Ok(Filled { buffer: local, verified: false });
            }
            let mut range = remote.clone();
            range.identity = None;
            next.read(&range, local, deadline)
        })
    }

    /// These reads fill the first half of their buffer and fail.
    pub(crate) fn break_off(
        &self,
        calls: impl Calls,
        error: impl Fn() -> Error + Send + Sync + 'static,
    ) -> &Self {
        let meant = meant(calls);
        self.on_read(move |next, remote, local, deadline| {
            if !meant() {
                return next.read(remote, local, deadline);
            }
            let half = remote.len / 2;
            let before = local.bytes().unwrap()[half..].to_vec();
            let mut buffer = next.read(remote, local, deadline)?.buffer;
            buffer.bytes_mut().unwrap()[half..].copy_from_slice(&before);
            Err(ReadError { error: error(), buffer: Some(buffer) })
        })
    }

    /// These reads are `Ok` and not verified, and a bit of their first byte is wrong.
    pub(crate) fn flip(&self, calls: impl Calls) -> &Self {
        self.flip_if(|_| true, calls)
    }

    /// As [`Self::flip`], but of the reads of a stamp alone.
    pub(crate) fn flip_stamp(&self, calls: impl Calls) -> &Self {
        self.flip_if(is_stamp, calls)
    }

    fn flip_if(&self, which: fn(&RemoteBuffer) -> bool, calls: impl Calls) -> &Self {
        let meant = meant(calls);
        self.on_read(move |next, remote, local, deadline| {
            let wrong = which(remote) && meant();
            let mut filled = next.read(remote, local, deadline)?;
            if wrong {
                filled.verified = false;
                if let Some(first) = filled.buffer.bytes_mut().unwrap().first_mut() {
                    *first ^= 1;
                }
            }
            Ok(filled)
        })
    }

    /// Until the gate is opened, each read times out at its deadline without its buffer, and a thread
    /// goes on writing into that, as an engine does that cannot cancel.
    pub(crate) fn keep_writing(&self) -> Gate {
        let (gate, way) = Gate::pair();
        self.on_read(move |next, remote, mut local, deadline| {
            if !way.enter() {
                return next.read(remote, local, deadline);
            }
            way.spawn(move |way| {
                let mut stroke = 0_u8;
                loop {
                    stroke = stroke.wrapping_add(1).max(1);
                    local.bytes_mut().unwrap().fill(stroke);
                    // A pause, so that the machine can do something else too.
                    if way.wait_until(Instant::now() + Duration::from_micros(200)) {
                        return;
                    }
                }
            });
            way.wait_until(deadline);
            Err(ReadError { error: Error::TimedOut, buffer: None })
        });
        gate
    }
}

/// Notes. A sender's engine drops and doubles what it sends; the others are of the engine that polls.
impl Hooked {
    /// These notes are said to be taken, and never arrive.
    pub(crate) fn drop_notes(&self, calls: impl Calls) -> &Self {
        let meant = meant(calls);
        self.on_notify(
            move |next, peer, note, deadline| {
                if meant() { Ok(()) } else { next.notify(peer, note, deadline) }
            },
        )
    }

    /// Each note that is taken is sent once more.
    pub(crate) fn double_notes(&self) -> &Self {
        self.on_notify(|next, peer, note, deadline| {
            next.notify(peer, note, deadline)?;
            let _ = next.notify(peer, note, deadline);
            Ok(())
        })
    }

    /// Notes that have come are reported once the gate is opened, in their order; as long as it is
    /// shut, each counts as entered.
    pub(crate) fn hold_notes(&self) -> Gate {
        let (gate, way) = Gate::pair();
        gate.when_opened(self.ringer());
        let held = Mutex::new(Vec::new());
        self.on_poll(move |next, events| {
            let polled = each_note(next, events, |note, _| {
                held.lock().push(note);
                way.enter();
            });
            if way.is_open() {
                let released = mem::take(&mut *held.lock());
                released.into_iter().map(Event::Note).for_each(events);
            }
            polled
        });
        gate
    }

    /// Of each two notes the second is reported first; the last of an odd number stays away.
    pub(crate) fn reverse_notes(&self) -> &Self {
        let waiting = Mutex::new(None);
        self.on_poll(move |next, events| {
            each_note(next, events, |note, events| {
                // No lock is held over `events`: it may call this engine.
                let Some(first) = waiting.lock().take() else {
                    *waiting.lock() = Some(note);
                    return;
                };
                events(Event::Note(note));
                events(Event::Note(first));
            })
        })
    }

    /// The next poll reports a note that nobody has sent.
    pub(crate) fn inject_note(&self, note: Notification) {
        self.inject(Event::Note(note));
    }
}

/// The ends of what is published and registered; [`Hooked::fail`] has `unregister`'s.
impl Hooked {
    /// Until the gate is opened, each `retract` ends the put and then says `answer`.
    pub(crate) fn answer_retract(&self, answer: Retracted) -> Gate {
        let (gate, way) = Gate::pair();
        self.on_retract(move |next, slot| {
            let truth = next.retract(slot);
            if way.enter() { answer } else { truth }
        });
        gate
    }

    /// As [`Self::answer_retract`], of `cut`.
    pub(crate) fn answer_cut(&self, answer: Retracted) -> Gate {
        let (gate, way) = Gate::pair();
        self.on_cut(move |next, slot| {
            let truth = next.cut(slot);
            if way.enter() { answer } else { truth }
        });
        gate
    }

    /// It cannot end a put nor know who reads it, as Mooncake cannot: the range is served until the
    /// slot is published anew, also while its owner writes it. For [`Self::ranges_only`].
    pub(crate) fn knows_no_readers(&self) -> &Self {
        self.on_retract(|_, _| Retracted::Unknown).on_cut(|_, _| Retracted::Unknown)
    }
}

/// Notes with texts that no relay sends.
pub(crate) fn odd_notes() -> Vec<Notification> {
    let long = "n".repeat(64 << 10);
    let names = ["", "\0", "_", "t_", "\u{fffd}\u{202e}\u{feff}", "{\"name\":\"\\", &long];
    let messages = ["transfer_complete", "transfer_failed", "TRANSFER_COMPLETE", "", "\0\n"];
    let pairs = names.iter().flat_map(|name| messages.iter().map(move |text| (name, text)));
    pairs.map(|(name, text)| Notification::new(name, text)).collect()
}

/// The relay reads a stamp by eight bytes of nothing else.
fn is_stamp(remote: &RemoteBuffer) -> bool {
    remote.len == 8 && remote.identity.is_none() && remote.stamp.is_none()
}

/// Polls, and hands notes to `note`, with what reports them.
fn each_note(
    engine: &Hooked,
    events: &mut dyn FnMut(Event),
    mut note: impl FnMut(Notification, &mut dyn FnMut(Event)),
) -> Result<()> {
    engine.poll(&mut |event| match event {
        Event::Note(heard) => note(heard, events),
        other => events(other),
    })
}
