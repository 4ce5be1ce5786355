//! What is registered, and how many transfers touch it.

use std::{
    ffi::CString,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::RwLock;

use super::native::{Native, broken};
use crate::{
    error::{Error, Result},
    memory::Span,
    process,
};

#[derive(Debug, Default)]
pub(super) struct Spans {
    registered: RwLock<Vec<Arc<Registered>>>,
    /// Which device each is of that the processor cannot touch.
    devices: RwLock<Vec<(Span, CString)>>,
}

#[derive(Debug)]
struct Registered {
    span: Span,
    /// Transfers under way, from before they are submitted until they have ended.
    busy: AtomicUsize,
    /// It is being unregistered; changed under the lock.
    leaving: AtomicBool,
}

/// Memory that stays registered: one transfer's claim.
#[derive(Debug)]
pub(super) struct Lease(Arc<Registered>);

impl Drop for Lease {
    fn drop(&mut self) {
        // Release: who sees 0 sees what the transfer wrote, and unmaps it.
        self.0.busy.fetch_sub(1, Ordering::Release);
    }
}

impl Spans {
    /// What will be registered next is at that location.
    pub(super) fn locate(&self, span: Span, location: &str) -> Result<()> {
        let location = CString::new(location).map_err(|_| broken("a device's name with a NUL"))?;
        self.devices.write().push((span, location));
        Ok(())
    }

    /// # Safety
    ///
    /// The span stays mapped until it is unregistered with `Ok`, or the engine is destroyed. If the
    /// processor cannot touch it, [`Self::locate`] was told of it.
    #[allow(unsafe_code)] // hands it on to the engine
    pub(super) unsafe fn register(&self, native: &Native, span: Span, remote: bool) -> Result<()> {
        process::check()?;
        if span.len == 0 {
            return Err(Error::config("span", "memory of no length cannot be registered"));
        }
        let mut spans = self.registered.write();
        if spans.iter().any(|known| known.span.overlaps(span)) {
            return Err(Error::config("span", "this memory, or a part of it, is registered"));
        }
        let devices = self.devices.read();
        let device = devices.iter().find(|(known, _)| *known == span);
        let location = device.map_or(c"*", |(_, location)| location);
        // SAFETY: by this function's contract.
        unsafe { native.register(span, location, remote) }?;
        let (busy, leaving) = (AtomicUsize::new(0), AtomicBool::new(false));
        spans.push(Arc::new(Registered { span, busy, leaving }));
        Ok(())
    }

    /// Forgets it once no transfer touches it. After an error it may still be touched.
    pub(super) fn unregister(&self, native: &Native, span: Span, limit: Duration) -> Result<()> {
        process::check()?;
        let known = {
            let spans = self.registered.write();
            let known = spans.iter().find(|known| known.span == span);
            let known = known.ok_or_else(|| Error::config("span", "it is not registered"))?;
            known.leaving.store(true, Ordering::Relaxed);
            Arc::clone(known)
        };
        let deadline = Instant::now() + limit;
        while known.busy.load(Ordering::Acquire) > 0 {
            if Instant::now() >= deadline {
                let busy = known.busy.load(Ordering::Relaxed);
                return Err(broken(&format!(
                    "{busy} transfers still use this memory after {limit:?}, and none can be ended"
                )));
            }
            thread::sleep(Duration::from_micros(200)); // between two looks
        }
        let mut spans = self.registered.write();
        let Some(at) = spans.iter().position(|other| Arc::ptr_eq(other, &known)) else {
            return Err(Error::config("span", "it was unregistered meanwhile"));
        };
        native.unregister(span)?;
        spans.swap_remove(at);
        self.devices.write().retain(|(known, _)| *known != span);
        Ok(())
    }

    /// Claims the memory around `span` for a transfer.
    pub(super) fn lease(&self, span: Span) -> Result<Lease> {
        let spans = self.registered.read();
        let known = spans.iter().find(|known| {
            known.span.contains(span.addr(), span.len) && !known.leaving.load(Ordering::Relaxed)
        });
        let known = known.ok_or_else(|| Error::config("span", "it is not registered"))?;
        // Under the lock: `unregister` sees it, or we have seen that it is leaving.
        known.busy.fetch_add(1, Ordering::Relaxed);
        Ok(Lease(Arc::clone(known)))
    }

    /// How many transfers have claimed any of it.
    pub(super) fn busy(&self) -> usize {
        // Acquire: pairs with the end of a lease.
        let busy = |known: &Arc<Registered>| known.busy.load(Ordering::Acquire);
        self.registered.read().iter().map(busy).sum()
    }

    /// Where each span is that begins at `addr`.
    pub(super) fn at(&self, addr: u64) -> Option<Span> {
        self.registered.read().iter().map(|known| known.span).find(|span| span.addr() == addr)
    }

    pub(super) fn all(&self) -> Vec<Span> {
        self.registered.read().iter().map(|known| known.span).collect()
    }
}
