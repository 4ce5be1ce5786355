//! What an engine serves at this moment, and who is reading it.
#![allow(unsafe_code)] // reads the stamp words

use std::{
    sync::{Arc, atomic::AtomicU64, atomic::Ordering},
    time::Instant,
};

use parking_lot::{Condvar, Mutex};

#[cfg(any(feature = "embedded", test))]
use super::TransferId;
use super::{Identity, Publication, Retracted};
use crate::memory::Span;

/// The table of published slots. The relay publishes and retracts; the engine's server pins.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    slots: Mutex<Vec<Option<Export>>>,
    quiet: Condvar,
}

#[derive(Debug)]
struct Export {
    publication: Publication,
    open: bool,
    cut: bool,
    readers: u32,
}

/// Why nothing is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another relay lived, or lives, at this address.
    OtherInstance,
    /// That put is over.
    Gone,
    /// The range is not inside what is published.
    Range,
}

impl Exports {
    /// Opens a slot, unless it is read of another relay's put: two relays would share the engine, and
    /// the pins of the one would be lost to the other.
    pub(crate) fn publish(&self, publication: &Publication) {
        let mut slots = self.slots.lock();
        let index = publication.slot as usize;
        if slots.len() <= index {
            slots.resize_with(index + 1, || None);
        }
        let instance = publication.identity.instance;
        let readers = match &slots[index] {
            Some(old) if old.readers > 0 && old.publication.identity.instance != instance => {
                return tracing::error!(slot = index, "not published: it is read of another relay");
            }
            old => old.as_ref().map_or(0, |old| old.readers),
        };
        slots[index] = Some(Export { publication: *publication, open: true, cut: false, readers });
    }

    pub(crate) fn retract(&self, publication: &Publication) -> Retracted {
        self.end(publication, false)
    }

    /// As `retract`; reads under way find [`Pin::is_cut`].
    pub(crate) fn cut(&self, publication: &Publication) -> Retracted {
        self.end(publication, true)
    }

    /// The put that is open in `slot` and has that random half of an id.
    #[cfg(feature = "embedded")]
    pub(crate) fn id(&self, slot: u32, random: u64) -> Option<TransferId> {
        let slots = self.slots.lock();
        let export = slots.get(slot as usize)?.as_ref()?;
        let id = export.publication.identity.id;
        (export.open && id.random == random).then_some(id)
    }

    fn end(&self, publication: &Publication, cut: bool) -> Retracted {
        let mut slots = self.slots.lock();
        let Some(Some(export)) = slots.get_mut(publication.slot as usize) else {
            return Retracted::Quiet;
        };
        if export.publication.identity != publication.identity {
            return Retracted::Quiet;
        }
        export.open = false;
        export.cut |= cut;
        if export.readers == 0 { Retracted::Quiet } else { Retracted::Reading }
    }

    /// Pins `len` bytes at `addr` of exactly that put.
    pub(crate) fn pin(
        self: &Arc<Self>,
        identity: &Identity,
        addr: u64,
        len: usize,
    ) -> Result<Pin, Refusal> {
        let mut slots = self.slots.lock();
        let export = slots
            .get_mut(identity.id.slot as usize)
            .and_then(Option::as_mut)
            .filter(|export| export.open && export.publication.identity.id == identity.id);
        // An empty table knows no instance; the engine compares instances first.
        let Some(export) = export else { return Err(Refusal::Gone) };
        if export.publication.identity.instance != identity.instance {
            return Err(Refusal::OtherInstance);
        }
        if !export.publication.span.contains(addr, len) {
            return Err(Refusal::Range);
        }
        Ok(self.pinned(export, addr, len))
    }

    /// Pins `len` bytes at `addr`, whichever put they belong to.
    pub(crate) fn pin_range(self: &Arc<Self>, addr: u64, len: usize) -> Result<Pin, Refusal> {
        let mut slots = self.slots.lock();
        slots
            .iter_mut()
            .flatten()
            .find(|export| export.open && len > 0 && export.publication.span.contains(addr, len))
            .map(|export| self.pinned(export, addr, len))
            .ok_or(Refusal::Range)
    }

    /// The stamp at `addr`: served from the slot's first publication on.
    pub(crate) fn stamp(&self, addr: u64, len: usize) -> Option<[u8; 8]> {
        let slots = self.slots.lock();
        let mut known = slots.iter().flatten().map(|export| export.publication.stamp_span);
        let span = known.find(|span| len == 8 && span.contains(addr, len))?;
        // SAFETY: the relay keeps the stamps mapped until `forget` took them out of this table,
        // aligns each to eight bytes, and writes them by atomic stores only.
        let word = unsafe { AtomicU64::from_ptr(span.ptr.as_ptr().cast()) };
        // Acquire: pairs with the store that retires a stamp before its slot is written again.
        Some(word.load(Ordering::Acquire).to_ne_bytes())
    }

    /// Ends every export inside `span` and waits until nobody reads it. False: `deadline` passed.
    pub(crate) fn forget(&self, span: Span, deadline: Instant) -> bool {
        let mut slots = self.slots.lock();
        let inside = |export: &Export| {
            export.publication.span.overlaps(span) || export.publication.stamp_span.overlaps(span)
        };
        for export in slots.iter_mut().flatten().filter(|export| inside(export)) {
            (export.open, export.cut) = (false, true);
        }
        while slots.iter().flatten().any(|export| inside(export) && export.readers > 0) {
            if self.quiet.wait_until(&mut slots, deadline).timed_out() {
                return false;
            }
        }
        for slot in slots.iter_mut() {
            if slot.as_ref().is_some_and(inside) {
                *slot = None;
            }
        }
        true
    }

    fn pinned(self: &Arc<Self>, export: &mut Export, addr: u64, len: usize) -> Pin {
        export.readers += 1;
        let base = export.publication.span;
        let offset = (addr - base.addr()) as usize;
        // SAFETY: the caller checked that `addr` and `len` lie inside the span.
        let ptr = unsafe { base.ptr.add(offset) };
        Pin { exports: Arc::clone(self), slot: export.publication.slot, span: Span { ptr, len } }
    }
}

/// A read under way: while it lives, the slot is not handed out again.
#[derive(Debug)]
pub(crate) struct Pin {
    exports: Arc<Exports>,
    slot: u32,
    span: Span,
}

impl Pin {
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Whether the owner wants its slot back now.
    pub(crate) fn is_cut(&self) -> bool {
        let slots = self.exports.slots.lock();
        matches!(slots.get(self.slot as usize), Some(Some(export)) if export.cut)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut slots = self.exports.slots.lock();
        if let Some(Some(export)) = slots.get_mut(self.slot as usize) {
            export.readers -= 1;
            if export.readers == 0 {
                self.exports.quiet.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Instance, TransferId};

    #[test]
    fn a_slot_that_is_read_of_one_relay_is_not_published_by_another() {
        let exports = Arc::new(Exports::default());
        let mut memory = [0; 64];
        let mut of = |instance: u8| Publication {
            slot: 0,
            span: Span::of(&mut memory),
            identity: Identity {
                instance: Instance::from_bytes([instance; 16]),
                id: TransferId { random: instance.into(), slot: 0, generation: 1 },
            },
            stamp: 1,
            stamp_span: Span::of(&mut []),
        };
        let (first, second) = (of(1), of(2));
        let pin = |put: &Publication| exports.pin(&put.identity, put.span.addr(), 64);
        exports.publish(&first);
        let pinned = pin(&first).unwrap();
        exports.publish(&second);
        assert_eq!(pin(&second).err(), Some(Refusal::Gone));
        assert_eq!(exports.retract(&first), Retracted::Reading);
        drop(pinned);
        exports.publish(&second);
        assert!(pin(&second).is_ok());
    }
}
