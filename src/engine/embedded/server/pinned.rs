//! Pinned bytes as slices, for the length of one system call.
#![allow(unsafe_code)] // lends the bytes of a pinned slot

use std::slice;

use crate::engine::exports::Pin;

/// The bytes, to be sent.
pub(super) fn bytes(pin: &Pin) -> &[u8] {
    let span = pin.span();
    // SAFETY: the engine published only what is registered, so the bytes are mapped and
    // initialised, and stay so while the pin lives. The slot's owner has lent it until then, and
    // what peers write comes through `room`, on this thread too, so not while this slice lives.
    unsafe { slice::from_raw_parts(span.ptr.as_ptr(), span.len) }
}

/// The bytes, to be received into.
pub(super) fn room(pin: &mut Pin) -> &mut [u8] {
    let span = pin.span();
    // SAFETY: as in `bytes`. Other pins of these bytes belong to this thread, which holds one slice
    // at a time.
    unsafe { slice::from_raw_parts_mut(span.ptr.as_ptr(), span.len) }
}
