//! An engine that breaks one rule of the contract.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Doorbell, Engine, Error, Event, Filled, Notification, Publication, ReadError, Retracted, Span,
};

use super::hooked::Hooked;

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

/// That engine, with a fault.
pub(crate) fn broken(engine: Arc<dyn Engine>, fault: Fault) -> Arc<dyn Engine> {
    let engine = Hooked::over(engine);
    match fault {
        Fault::None => &engine,
        Fault::WrongByte => alter_reads(&engine, |filled| {
            if let Some(byte) = filled.buffer.bytes_mut().and_then(<[u8]>::last_mut) {
                *byte ^= 1;
            }
        }),
        Fault::Overrun => alter_reads(&engine, |filled| {
            let Span { ptr, len } = filled.buffer.span();
            // SAFETY: the suite keeps a guard behind each buffer, for faults like this one.
            let behind = unsafe { ptr.add(len) };
            // SAFETY: as above; nobody else touches the guard while the buffer is lent.
            unsafe { behind.write(0) };
        }),
        Fault::Unverified => {
            engine.ranges_only();
            alter_reads(&engine, |filled| filled.verified = true)
        }
        Fault::ReadsIntoNothing => engine.on_read_into(|_, _, _, _| Some(Ok(()))),
        Fault::ManyInReverse => engine.on_read_many(|next, reads, deadline| {
            let mut outcomes = next.read_many(reads, deadline);
            outcomes.reverse();
            outcomes
        }),
        Fault::LostBuffer => engine.on_read(|next, remote, local, deadline| {
            next.read(remote, local, deadline).map_err(|ReadError { error, buffer }| {
                mem::forget(buffer);
                ReadError { error, buffer: None }
            })
        }),
        Fault::WriteLies => engine.on_write(|next, remote, local, deadline| {
            match next.write(remote, local, deadline) {
                Err(ReadError { error: Error::Rejected { .. }, buffer: Some(local) }) => Ok(local),
                written => written,
            }
        }),
        Fault::TooMuch => engine.on_publish(|next, slot| {
            let span = slot.span();
            let span = Span { len: span.len.next_multiple_of(4096) + 4096, ..span };
            let (identity, stamp) = (slot.identity(), slot.stamp());
            // SAFETY: the fault: it says more than the relay said.
            let more =
                unsafe { Publication::new(slot.slot(), span, identity, stamp, slot.stamp_span()) };
            next.publish(&more);
        }),
        Fault::KeepsServing => {
            engine.on_retract(|_, _| Retracted::Quiet).on_cut(|_, _| Retracted::Quiet)
        }
        Fault::QuietTooEarly => answer(&engine, Retracted::Quiet),
        Fault::ReadingForNobody => answer(&engine, Retracted::Reading),
        Fault::UnregisterLies => engine.on_unregister(|_, _| Ok(())),
        Fault::RegistersTwice => engine.on_register(|next, span, access| {
            // SAFETY: the promise of whoever called `register` is passed on.
            let _ = unsafe { next.register(span, access) };
            Ok(())
        }),
        Fault::StartsTwice => engine.on_start(|next, instance| {
            let _ = next.start(instance);
            Ok(())
        }),
        Fault::NoDeadline => engine
            .on_read(|next, remote, local, _| next.read(remote, local, distant()))
            .on_read_into(|next, remote, dest, _| next.read_into(remote, dest, distant()))
            .on_notify(|next, peer, note, _| next.notify(peer, note, distant())),
        Fault::NoteTwice => engine.double_notes(),
        Fault::NoteLost => engine.drop_notes(..),
        Fault::NotesInReverse => engine.reverse_notes(),
        Fault::ShortNames => engine.on_poll(|next, events| {
            next.poll(&mut |event| match event {
                Event::Note(note) => {
                    let short: String = note.name().chars().take(127).collect();
                    events(Event::Note(Notification::new(&short, note.message())));
                }
                other => events(other),
            })
        }),
        Fault::UnknownTakesNotes => {
            engine.on_notify(|next, peer, note, deadline| match next.notify(peer, note, deadline) {
                Err(Error::PeerFailed { .. }) => Ok(()),
                told => told,
            })
        }
        Fault::SilentBell => engine.replace_bell(Some(Doorbell::new())),
    };
    engine.engine()
}

fn alter_reads(engine: &Hooked, alter: impl Fn(&mut Filled) + Send + Sync + 'static) -> &Hooked {
    engine.on_read(move |next, remote, local, deadline| {
        let mut filled = next.read(remote, local, deadline)?;
        alter(&mut filled);
        Ok(filled)
    })
}

fn answer(engine: &Hooked, instead: Retracted) -> &Hooked {
    engine
        .on_retract(move |next, slot| {
            let _ = next.retract(slot);
            instead
        })
        .on_cut(move |next, slot| {
            let _ = next.cut(slot);
            instead
        })
}

fn distant() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
