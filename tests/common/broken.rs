//! An engine that breaks one rule of the contract.

use std::{
    mem,
    sync::Mutex,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Access, Doorbell, Engine, Error, Event, Filled, InProcessEngine, Instance, LocalBuffer,
    Notification, Publication, ReadError, RemoteBuffer, Result, Retracted, Span,
};

/// Which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None: what wraps it changes nothing.
    None,
    /// The last byte of a read is another.
    WrongByte,
    /// A byte behind the buffer is written.
    Overrun,
    /// `verified` is said of what was not.
    Unverified,
    /// `read_into` says `Ok` and wrote nothing.
    ReadsIntoNothing,
    /// The outcomes of `read_many` come in another order.
    ManyInReverse,
    /// The buffer of a failed read is lost.
    LostBuffer,
    /// A write is `Ok`, and was not done.
    WriteLies,
    /// More is served than was published.
    TooMuch,
    /// What was retracted goes on being served.
    KeepsServing,
    /// A retraction says `Quiet` while a read is under way.
    QuietTooEarly,
    /// A retraction says `Reading` when nobody reads.
    ReadingForNobody,
    /// `unregister` is `Ok` and does nothing.
    UnregisterLies,
    /// What was registered may be registered again.
    RegistersTwice,
    /// Two relays may start it.
    StartsTwice,
    /// No deadline is kept.
    NoDeadline,
    /// A note is reported twice.
    NoteTwice,
    /// A note is taken and lost.
    NoteLost,
    /// The notes of one poll come in reverse.
    NotesInReverse,
    /// Names are cut off.
    ShortNames,
    /// Whoever is unknown is said to have taken the note.
    UnknownTakesNotes,
    /// Its bell is never rung.
    SilentBell,
}

/// An in-process engine with a fault.
#[derive(Debug)]
pub(crate) struct Broken {
    inner: InProcessEngine,
    fault: Fault,
    silent: Doorbell,
    kept: Mutex<Vec<Notification>>,
}

impl Broken {
    pub(crate) fn new(inner: InProcessEngine, fault: Fault) -> Self {
        Self { inner, fault, silent: Doorbell::new(), kept: Mutex::default() }
    }

    fn deadline(&self, given: Instant) -> Instant {
        if self.fault == Fault::NoDeadline {
            Instant::now() + Duration::from_secs(3600)
        } else {
            given
        }
    }

    fn retracted(&self, truth: impl FnOnce() -> Retracted) -> Retracted {
        match self.fault {
            Fault::KeepsServing => Retracted::Quiet,
            Fault::QuietTooEarly => {
                let _ = truth();
                Retracted::Quiet
            }
            Fault::ReadingForNobody => {
                let _ = truth();
                Retracted::Reading
            }
            _ => truth(),
        }
    }
}

impl Engine for Broken {
    fn session_id(&self) -> &str {
        self.inner.session_id()
    }

    fn protocol(&self) -> &str {
        self.inner.protocol()
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        match self.inner.start(instance) {
            Err(_) if self.fault == Fault::StartsTwice => Ok(()),
            started => started,
        }
    }

    fn stop(&self, deadline: Instant) {
        self.inner.stop(deadline);
    }

    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        match unsafe { self.inner.register(span, access) } {
            Err(_) if self.fault == Fault::RegistersTwice => Ok(()),
            registered => registered,
        }
    }

    fn unregister(&self, span: Span) -> Result<()> {
        if self.fault == Fault::UnregisterLies { Ok(()) } else { self.inner.unregister(span) }
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        let mut remote = remote.clone();
        if self.fault == Fault::Unverified {
            remote.identity = None;
        }
        let mut filled = match self.inner.read(&remote, local, self.deadline(deadline)) {
            Ok(filled) => filled,
            Err(ReadError { error, buffer }) if self.fault == Fault::LostBuffer => {
                mem::forget(buffer);
                return Err(ReadError { error, buffer: None });
            }
            Err(error) => return Err(error),
        };
        filled.verified |= self.fault == Fault::Unverified;
        if self.fault == Fault::WrongByte
            && let Some(byte) = filled.buffer.bytes_mut().and_then(<[u8]>::last_mut)
        {
            *byte ^= 1;
        }
        if self.fault == Fault::Overrun {
            let Span { ptr, len } = filled.buffer.span();
            // SAFETY: the suite keeps a guard behind each buffer, for faults like this one.
            let behind = unsafe { ptr.add(len) };
            // SAFETY: as above; nobody else touches the guard while the buffer is lent.
            unsafe { behind.write(0) };
        }
        Ok(filled)
    }

    fn read_many(
        &self,
        reads: Vec<(RemoteBuffer, LocalBuffer)>,
        deadline: Instant,
    ) -> Vec<Result<Filled, ReadError>> {
        let outcomes = reads.into_iter().map(|(remote, local)| self.read(&remote, local, deadline));
        let mut outcomes: Vec<_> = outcomes.collect();
        if self.fault == Fault::ManyInReverse {
            outcomes.reverse();
        }
        outcomes
    }

    fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        if self.fault == Fault::ReadsIntoNothing {
            return Some(Ok(()));
        }
        self.inner.read_into(remote, dest, self.deadline(deadline))
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        match self.inner.write(remote, local, deadline) {
            Err(ReadError { error: Error::Rejected { .. }, buffer: Some(local) })
                if self.fault == Fault::WriteLies =>
            {
                Ok(local)
            }
            written => written,
        }
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        match self.inner.notify(peer, note, self.deadline(deadline)) {
            Err(Error::PeerFailed { .. }) if self.fault == Fault::UnknownTakesNotes => Ok(()),
            told => told,
        }
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        let mut notes = self.kept.lock().expect("no poll panics");
        self.inner.poll(&mut |event| match event {
            Event::Note(note) => notes.push(note),
            other => events(other),
        })?;
        if self.fault == Fault::NotesInReverse {
            notes.reverse();
        }
        for note in notes.drain(..) {
            match self.fault {
                Fault::NoteLost => {}
                Fault::NoteTwice => {
                    events(Event::Note(note.clone()));
                    events(Event::Note(note));
                }
                Fault::ShortNames => {
                    let short: String = note.name().chars().take(127).collect();
                    events(Event::Note(Notification::new(&short, note.message())));
                }
                _ => events(Event::Note(note)),
            }
        }
        Ok(())
    }

    fn publish(&self, slot: &Publication) {
        let mut slot = *slot;
        if self.fault == Fault::TooMuch {
            let span = slot.span();
            let span = Span { len: span.len.next_multiple_of(4096) + 4096, ..span };
            let (identity, stamp) = (slot.identity(), slot.stamp());
            // SAFETY: the fault: it says more than the relay said.
            slot =
                unsafe { Publication::new(slot.slot(), span, identity, stamp, slot.stamp_span()) };
        }
        self.inner.publish(&slot);
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        self.retracted(|| self.inner.retract(slot))
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        self.retracted(|| self.inner.cut(slot))
    }

    fn doorbell(&self) -> Option<&Doorbell> {
        if self.fault == Fault::SilentBell { Some(&self.silent) } else { self.inner.doorbell() }
    }
}
