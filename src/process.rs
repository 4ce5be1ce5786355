//! Whether this is the process that made what it has, or a child that was forked since.
//!
//! A forked child has its parent's relays and engines and none of their threads. Locks may be held for
//! ever there, and sockets, rings and doorbells are the parent's. So nothing of it is touched, and
//! nothing new is made: the queues of `parking_lot`, which all our locks share, still hold the parent's
//! threads.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// What the word is in the process that made it; 0 in a child.
const HERE: u32 = 1;
const PAGE: usize = 4096;

/// The word while nothing was made, so that nothing is anybody else's.
static NOTHING: AtomicU32 = AtomicU32::new(HERE);
/// Where the word is: in a page that the kernel wipes in a child, however that is forked.
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NOTHING).cast_mut());

const FORKED: &str = "this is a forked child, and its parent has relays or engines: they work there only, \
                      and none can be made here. Fork before the first is made, or start the child \
                      by exec, as `std::process::Command` does";

/// Whether this is the process that made what there is: two loads.
#[inline]
pub(crate) fn is_here() -> bool {
    let word = WORD.load(Ordering::Acquire);
    // SAFETY: it points to a static, or to a page that is never unmapped, and that was zeroed or wiped.
    let word = unsafe { &*word };
    // A child is born with it as it is.
    word.load(Ordering::Relaxed) == HERE
}

/// Fails in a forked child.
#[inline]
pub(crate) fn check() -> Result<()> {
    if is_here() { Ok(()) } else { Err(forked()) }
}

/// What whoever calls from a forked child is told.
#[cold]
pub(crate) fn forked() -> Error {
    Error::config("process", FORKED)
}

/// Before the first thing is made, and any other. Fails in a forked child of who has made one.
pub(crate) fn enter() -> Result<()> {
    let nothing = (&raw const NOTHING).cast_mut();
    if WORD.load(Ordering::Acquire) == nothing {
        let page = wiped_in_a_child().map_err(|errno| {
            let os = std::io::Error::from(errno);
            let kind = os.kind();
            let reason = format!(
                "a page that is wiped in a forked child (MADV_WIPEONFORK, Linux 4.14): {os}"
            );
            Error::Io(std::io::Error::new(kind, reason))
        })?;
        // No lock: a child that is forked meanwhile would have it held for ever.
        let entered = WORD.compare_exchange(nothing, page, Ordering::Release, Ordering::Relaxed);
        if entered.is_err() {
            // SAFETY: our own page, which nobody else knows of.
            let unmapped = unsafe { munmap(page.cast(), PAGE) };
            debug_assert!(unmapped.is_ok(), "a mapping of one's own can be unmapped");
        }
    }
    check()
}

/// The word of this process, in a page of its own.
fn wiped_in_a_child() -> rustix::io::Result<*mut AtomicU32> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), PAGE, access, MapFlags::PRIVATE) }?;
    // SAFETY: the page is our own, and nobody knows of it yet.
    if let Err(errno) = unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork) } {
        // SAFETY: as above.
        let unmapped = unsafe { munmap(page, PAGE) };
        debug_assert!(unmapped.is_ok(), "a mapping of one's own can be unmapped");
        return Err(errno);
    }
    // SAFETY: as above, and a page is aligned for a word.
    unsafe { page.cast::<AtomicU32>().write(AtomicU32::new(HERE)) };
    Ok(page.cast())
}
