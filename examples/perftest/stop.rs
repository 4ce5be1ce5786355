//! Ctrl-C: what is under way ends, what was measured stays.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Whether Ctrl-C was pressed.
pub(crate) fn stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

extern "C" fn note(_signal: c_int) {
    STOPPED.store(true, Ordering::Relaxed);
}

/// From now on Ctrl-C is noted, once; a second one ends the process as usual.
pub(crate) fn on_interrupt() {
    // SAFETY: an action of zeros is a valid one: no flags, an empty mask, the default.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note as extern "C" fn(c_int) as usize;
    action.sa_flags = libc::SA_RESETHAND; // and calls under way end with `EINTR`
    // SAFETY: the handler stores to an atomic, which a handler may do at any time.
    let failed = unsafe { libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut()) };
    debug_assert_eq!(failed, 0, "SIGINT can be handled");
}
