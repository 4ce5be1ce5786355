//! Reads from a peer on this host into slots on a device: straight from the peer's, where those are
//! on a device that is mapped here, or through chunks from its pages.
#![allow(unsafe_code)] // copies from a peer's device memory while it is mapped and pinned

use std::{sync::Arc, time::Instant};

use super::{
    page::Pages,
    shelf::{Borrowed, Bytes},
    source::{Hold, Source},
};
use crate::{
    engine::{Filled, ReadError, RemoteBuffer, embedded::staging::Landing},
    error::{Error, Result},
    memory::Span,
};

/// How a read ended, or the landing again if it must go by TCP.
type Read = Result<Result<Filled, ReadError>, Box<Landing>>;

/// A pin that is let go of when nobody copies any more.
#[derive(Debug)]
struct Held {
    source: Arc<Source>,
    hold: Hold,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.source.unpin(&self.hold);
    }
}

/// Copies `remote` to the slot of `landing`, which is as long.
pub(super) fn read(
    source: &Arc<Source>,
    remote: &RemoteBuffer,
    landing: Box<Landing>,
    deadline: Instant,
) -> Read {
    if matches!(source.bytes(), Bytes::Beyond) {
        return Err(landing);
    }
    let hold = match source.pin(remote, landing.span().addr(), 0) {
        Some(Ok(hold)) => hold,
        Some(Err(error)) => return Ok(landing.end(Err(error), (), deadline)),
        None => return Err(landing),
    };
    Ok(match source.bytes() {
        Bytes::Pages(pages) => staged(source, pages, &hold, *landing, deadline),
        Bytes::Device(memory) => straight(source, memory, hold, *landing, deadline),
        Bytes::Beyond => {
            source.unpin(&hold);
            landing.end(Err(source.failed()), (), deadline)
        }
    })
}

/// The peer has its slot back once the last byte is in a chunk.
fn staged(
    source: &Source,
    pages: &Pages,
    hold: &Hold,
    mut landing: Landing,
    deadline: Instant,
) -> Result<Filled, ReadError> {
    let copied = fill(source, pages, hold, &mut landing, deadline);
    let ended = source.ended(hold, copied);
    if ended.is_ok() {
        landing.count();
    }
    landing.end(ended.map(|()| true), (), deadline)
}

fn fill(
    source: &Source,
    pages: &Pages,
    hold: &Hold,
    landing: &mut Landing,
    deadline: Instant,
) -> Result<()> {
    let begin = hold.offset;
    while landing.left() > 0 {
        source.goes_on(hold, deadline)?;
        // What is wrong with the device, the landing says.
        let mut chunk = landing.chunk(deadline).ok_or(Error::TimedOut)?;
        let room = chunk.bytes_mut();
        let len = room.len().min(landing.left());
        pages.fill_by(source.copier(), begin + landing.got(), &mut room[..len]);
        landing.land(chunk, len);
    }
    Ok(())
}

/// One copy, from device to device.
fn straight(
    source: &Arc<Source>,
    memory: &Borrowed,
    hold: Hold,
    mut landing: Landing,
    deadline: Instant,
) -> Result<Filled, ReadError> {
    let Some(mapped) = memory.span() else {
        source.unpin(&hold);
        return landing.end(Err(source.failed()), (), deadline);
    };
    let len = landing.span().len;
    if len > 0 {
        // Inside what is mapped, as `find` has made sure of.
        let ptr = mapped.ptr.map_addr(|addr| addr.saturating_add(hold.offset));
        // SAFETY: the source has it mapped and is kept, by `Held` where the copy outlasts this call.
        unsafe { landing.copy_all(Span { ptr, len }) };
    }
    if !landing.settle(deadline) {
        let held = Held { source: Arc::clone(source), hold };
        return landing.end(Err(Error::TimedOut), held, deadline);
    }
    let ended = source.ended(&hold, Ok(()));
    landing.end(ended.map(|()| true), (), deadline)
}
