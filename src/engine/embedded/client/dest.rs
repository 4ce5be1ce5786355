//! Where the bytes of a read go.

use std::time::Instant;

use super::{
    ahead::Ahead,
    socket::{Fault, Short, Socket},
};
use crate::{engine::embedded::staging::Landing, memory::Span};

/// The caller's bytes, or a slot on a device.
#[derive(Debug)]
pub(super) enum Dest<'a> {
    Host(&'a mut [u8]),
    Device(&'a mut Landing),
}

impl Dest<'_> {
    pub(super) fn span(&mut self) -> Span {
        match self {
            Self::Host(bytes) => Span::of(bytes),
            Self::Device(landing) => landing.span(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(landing) => landing.span().len,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many of its bytes may come through a buffer of ours.
    pub(super) fn front(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            // They go into chunks.
            Self::Device(_) => 0,
        }
    }

    /// Receives all of it, of which `ahead` has the first bytes. Of a device's, the last copies may be
    /// under way afterwards.
    pub(super) fn fill(
        &mut self,
        ahead: &mut Ahead,
        socket: &Socket,
        deadline: Instant,
    ) -> Result<(), Short> {
        match self {
            Self::Host(bytes) => {
                let got = ahead.take(bytes);
                socket.fill(&mut bytes[got..], deadline)
            }
            Self::Device(landing) => land(landing, socket, deadline),
        }
    }
}

fn land(landing: &mut Landing, socket: &Socket, deadline: Instant) -> Result<(), Short> {
    while landing.left() > 0 {
        let got = landing.got();
        let short = |fault| Short { got, fault };
        if !socket.has_more() {
            // Others have the chunks while this peer is silent.
            if !landing.settle(deadline) {
                return Err(short(Fault::Deadline));
            }
            socket.wait_for_more(deadline).map_err(short)?;
        }
        let Some(mut chunk) = landing.chunk(deadline) else {
            let fault = if landing.has_failed() { Fault::Device } else { Fault::Deadline };
            return Err(short(fault));
        };
        let room = chunk.bytes_mut();
        let len = room.len().min(landing.left());
        let (got, ended) = socket.receive(&mut room[..len], deadline);
        landing.land(chunk, got);
        ended.map_err(|fault| Short { got: landing.got(), fault })?;
    }
    Ok(())
}
