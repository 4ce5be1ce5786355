//! The two ports.

use std::{
    net::{self, Shutdown},
    time::{Duration, Instant},
};

use mio::{Token, net::TcpListener};
use socket2::SockRef;

/// How often one line is logged about what anybody can cause.
const COMPLAINT: Duration = Duration::from_secs(1);

/// Which of the two ports.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Control,
    Data,
}

impl Kind {
    pub(super) fn token(self) -> Token {
        Token(1 + self as usize)
    }
}

/// A listening socket.
pub(super) struct Port {
    pub(super) kind: Kind,
    pub(super) listener: TcpListener,
    /// How many connections there are.
    pub(super) open: usize,
    /// Out of descriptors: rests until the next tick.
    pub(super) resting: bool,
    complaint: Option<Instant>,
}

impl Port {
    pub(super) fn new(kind: Kind, listener: net::TcpListener) -> Self {
        let listener = TcpListener::from_std(listener);
        Self { kind, listener, open: 0, resting: false, complaint: None }
    }

    /// Whether it is time for another line in the log.
    pub(super) fn may_complain(&mut self) -> bool {
        let now = Instant::now();
        let due = self.complaint.is_none_or(|last| now.duration_since(last) >= COMPLAINT);
        if due {
            self.complaint = Some(now);
        }
        due
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // A forked child may hold the descriptor, and peers would wait there for ever.
        let _ = SockRef::from(&self.listener).shutdown(Shutdown::Both);
    }
}
