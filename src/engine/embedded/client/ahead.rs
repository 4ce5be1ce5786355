//! What was received ahead of its turn.

use std::time::Instant;

use super::socket::{Short, Socket};
use crate::engine::embedded::frame::Status;

/// So much of an answer comes by one call: a status, and all of a small body.
const LEN: usize = Status::LEN + (4 << 10);

/// The begin of an answer. It goes through this buffer, and not straight to where it is wanted: there no
/// byte may come before the status was looked at, whatever a peer sends behind one that declines.
#[derive(Debug)]
pub(super) struct Ahead {
    bytes: Box<[u8; LEN]>,
    start: usize,
    end: usize,
}

impl Ahead {
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The next status, and with it what has come of the `follow` bytes that may follow it.
    pub(super) fn status(
        &mut self,
        follow: usize,
        socket: &Socket,
        deadline: Instant,
    ) -> Result<[u8; Status::LEN], Short> {
        let had = self.end - self.start;
        if had < Status::LEN {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, had);
            let most = LEN.min(Status::LEN.saturating_add(follow));
            let least = Status::LEN - had;
            let room = &mut self.bytes[had..most];
            let got = socket.fill_at_least(least, room, had == 0, deadline);
            self.end += got.map_err(|short| Short { got: had + short.got, ..short })?;
        }
        let mut status = [0; Status::LEN];
        self.take(&mut status);
        Ok(status)
    }

    /// Takes what there is of the next bytes; how many.
    pub(super) fn take(&mut self, dest: &mut [u8]) -> usize {
        let len = dest.len().min(self.end - self.start);
        dest[..len].copy_from_slice(&self.bytes[self.start..self.start + len]);
        self.start += len;
        len
    }
}

impl Default for Ahead {
    fn default() -> Self {
        Self { bytes: Box::new([0; LEN]), start: 0, end: 0 }
    }
}
