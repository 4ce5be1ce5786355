//! The bytes of an answer that lie on a device: asked for chunk by chunk, one ahead of what is sent.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use tracing::warn;

use super::Context;
use crate::{
    engine::{
        embedded::staging::{Chunk, Copied, Stager},
        exports::Pin,
    },
    memory::Span,
};

/// How many chunks an answer has at a time: one that is sent, and the next.
const DEPTH: usize = 2;
/// Whoever has taken so long over a chunk gives it to whoever waits for one, and queues up again.
const PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Staged {
    stager: Arc<Stager>,
    pin: Arc<Pin>,
    /// The next to be sent, and what follows it.
    pieces: ArrayVec<Piece, DEPTH>,
    /// How far copies were asked for.
    asked: usize,
}

#[derive(Debug)]
struct Piece {
    start: usize,
    len: usize,
    /// Since when it is here, or else was asked for.
    since: Instant,
    copied: Arc<Copied>,
    /// Once it is here.
    chunk: Option<Chunk>,
}

impl Staged {
    pub(super) fn new(stager: &Arc<Stager>, pin: Pin) -> Self {
        let (stager, pin) = (Arc::clone(stager), Arc::new(pin));
        Self { stager, pin, pieces: ArrayVec::new(), asked: 0 }
    }

    pub(super) fn pin(&self) -> &Pin {
        &self.pin
    }

    pub(super) fn len(&self) -> usize {
        self.pin.span().len
    }

    /// What is there of the bytes from `offset` on, and begins to copy what follows. `None`: not yet;
    /// the server's loop looks again when it is.
    ///
    /// # Errors
    ///
    /// The device has failed: the peer sees the connection end.
    pub(super) fn at(
        &mut self,
        offset: usize,
        context: &mut Context<'_>,
    ) -> io::Result<Option<&[u8]>> {
        if self.pieces.first().is_some_and(|first| offset >= first.start + first.len) {
            self.pieces.remove(0);
        }
        if self.pieces.is_empty() {
            self.asked = offset;
        }
        while self.pieces.len() < DEPTH && self.asked < self.len() {
            let may = !context.chunks_wanted || (context.chunk_granted && self.pieces.is_empty());
            let Some(chunk) = may.then(|| self.stager.outgoing.try_take()).flatten() else { break };
            let len = self.stager.outgoing.size().min(self.len() - self.asked);
            // Inside the span, which is longer.
            let ptr = self.pin.span().ptr.map_addr(|addr| addr.saturating_add(self.asked));
            let (from, token) = (Span { ptr, len }, context.token);
            let copied = self.stager.copy(chunk, from, &self.pin, context.arrivals, token);
            let since = Instant::now();
            self.pieces.push(Piece { start: self.asked, len, since, copied, chunk: None });
            self.asked += len;
        }
        let Some(first) = self.pieces.first_mut() else {
            context.wants_chunk = true;
            return Ok(None);
        };
        if first.chunk.is_none() {
            match first.copied.take() {
                None => return Ok(None),
                Some(Ok(chunk)) => (first.since, first.chunk) = (Instant::now(), Some(chunk)),
                Some(Err(reason)) => {
                    warn!(reason, "a read was cut: its bytes could not be copied from the device");
                    return Err(io::Error::other(reason));
                }
            }
        }
        let bytes = first.chunk.as_ref().map_or(&[][..], Chunk::bytes);
        Ok(Some(&bytes[offset - first.start..first.len]))
    }

    /// Gives back the chunks of a slow peer: what it has not taken is copied again, in its turn.
    pub(super) fn yield_chunks(&mut self, now: Instant) {
        // What is still being copied is not the peer's doing.
        let slow = |first: &Piece| {
            first.chunk.is_some() && now.saturating_duration_since(first.since) >= PATIENCE
        };
        if self.pieces.first().is_some_and(slow) {
            self.pieces.clear();
        }
    }
}
