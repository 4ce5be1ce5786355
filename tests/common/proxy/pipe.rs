//! One way of one connection: what comes in, what of it goes out, and what stops it.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
};

use super::{DOWN, Ending, Limit, Rules, Seen, Then, WayRules};

pub(super) const ROOM: usize = 16 << 10;
/// What one connection may forward before the others have their turn.
pub(super) const TURN: usize = 16;

/// One way of one connection.
pub(super) struct Pipe {
    bytes: Box<[u8; ROOM]>,
    start: usize,
    end: usize,
    /// So many of these bytes are to be forwarded, whatever comes after them.
    judged: usize,
    framer: Option<Framer>,
    /// No more comes in, and the other side has been told so.
    ended: bool,
    pub(super) told: bool,
    limit: Option<Limit>,
    stalled_at: Option<u64>,
    /// What `poll` is to wait for.
    pub(super) waits: Waits,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Waits {
    pub(super) to_read: bool,
    pub(super) to_write: bool,
    pub(super) for_time: bool,
}

/// Why a connection is over.
pub(super) enum Over {
    Ended(Ending),
    /// One side has gone; the other hears of it by a reset.
    Broken,
    /// Both sides have said all.
    Done,
}

impl Pipe {
    pub(super) fn new(framer: Option<Framer>) -> Self {
        Self {
            bytes: Box::new([0; ROOM]),
            start: 0,
            end: 0,
            judged: 0,
            framer,
            ended: false,
            told: false,
            limit: None,
            stalled_at: None,
            waits: Waits::default(),
        }
    }

    pub(super) fn forward(
        &mut self,
        mut from: &TcpStream,
        to: &TcpStream,
        way: usize,
        rules: &mut Rules,
    ) -> Result<(), Over> {
        self.waits = Waits::default();
        for _ in 0..TURN {
            if self.is_stalled(&rules.ways[way]) {
                return Ok(());
            }
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            if !self.ended && self.end < ROOM {
                match from.read(&mut self.bytes[self.end..]) {
                    Ok(0) => self.ended = true,
                    Ok(len) => self.end += len,
                    Err(error) if is_early(&error) => self.waits.to_read = true,
                    Err(_) => return Err(Over::Broken),
                }
            }
            self.write_out(to, way, rules)?;
            if self.is_stalled(&rules.ways[way]) {
                self.waits = Waits::default();
                return Ok(());
            }
            if self.start == self.end && self.ended && !self.told {
                let _ = to.shutdown(Shutdown::Write); // an error where it has gone already
                self.told = true;
            }
            if self.told || self.waits.to_read || self.waits.to_write || self.waits.for_time {
                return Ok(());
            }
        }
        self.waits.to_read = !self.ended; // more to do, after the others
        self.waits.for_time = true;
        Ok(())
    }

    fn is_stalled(&self, rules: &WayRules) -> bool {
        rules.stalled || self.stalled_at == Some(rules.resumes)
    }

    fn write_out(&mut self, mut to: &TcpStream, way: usize, rules: &mut Rules) -> Result<(), Over> {
        while self.start < self.end {
            if self.judged == 0 {
                if !self.judge(rules) {
                    return Ok(());
                }
                continue; // nothing is left of a message that was swallowed
            }
            let own = &mut rules.ways[way];
            self.limit.take_if(|limit| limit.passes != own.passes);
            if self.limit.is_none() {
                self.limit = own.limits.pop_front();
            }
            if self.has_reached_its_limit(own)? {
                return Ok(());
            }
            let mut most = self.judged;
            if let Some(limit) = &self.limit {
                most = most.min(limit.left.try_into().unwrap_or(usize::MAX));
            }
            if let Some(rate) = &own.rate {
                most = most.min(rate.bytes as usize);
            }
            if most == 0 {
                self.waits.for_time = true;
                return Ok(());
            }
            match to.write(&self.bytes[self.start..self.start + most]) {
                Ok(len) => self.wrote(len, way, rules),
                Err(error) if is_early(&error) => {
                    self.waits.to_write = true;
                    return Ok(());
                }
                Err(_) => return Err(Over::Broken),
            }
            // At once: after the last byte of an answer no more may come.
            if self.has_reached_its_limit(&rules.ways[way])? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn has_reached_its_limit(&mut self, rules: &WayRules) -> Result<bool, Over> {
        let Some(Limit { then, .. }) = self.limit.take_if(|limit| limit.left == 0) else {
            return Ok(false);
        };
        match then {
            Then::Stall => self.stalled_at = Some(rules.resumes),
            Then::End(ending) => return Err(Over::Ended(ending)),
        }
        Ok(true)
    }

    /// Decides over the next bytes; `false` if there are too few to tell.
    fn judge(&mut self, rules: &mut Rules) -> bool {
        let bytes = &self.bytes[self.start..self.end];
        let Some(framer) = &mut self.framer else {
            self.judged = bytes.len();
            return true;
        };
        let (len, verdict) = framer.next(bytes, rules);
        match verdict {
            Verdict::Forward => self.judged = len,
            Verdict::Swallow => self.start += len,
            // A client that says no more has no message to be swallowed.
            Verdict::Hold if self.ended => self.judged = bytes.len(),
            Verdict::Hold => {
                // The room behind it is all there is.
                self.bytes.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                return false;
            }
        }
        true
    }

    fn wrote(&mut self, len: usize, way: usize, rules: &mut Rules) {
        self.start += len;
        self.judged -= len;
        if let Some(limit) = &mut self.limit {
            limit.left -= len as u64;
        }
        if let Some(rate) = &mut rules.ways[way].rate {
            rate.bytes -= len as f64;
        }
        let Seen { bytes_up, bytes_down, .. } = &mut rules.seen;
        *(if way == DOWN { bytes_down } else { bytes_up }) += len as u64;
    }
}

/// Finds where a client's messages begin.
pub(super) struct Framer {
    control: bool,
    head: [u8; 24],
    have: usize,
    left: u64,
    swallowing: bool,
}

enum Verdict {
    Forward,
    Swallow,
    Hold,
}

impl Framer {
    pub(super) fn new(control: bool) -> Self {
        Self { control, head: [0; 24], have: 0, left: 0, swallowing: false }
    }

    /// What happens to the first bytes of these, and to how many.
    fn next(&mut self, bytes: &[u8], rules: &mut Rules) -> (usize, Verdict) {
        let verdict = |swallow| if swallow { Verdict::Swallow } else { Verdict::Forward };
        if self.left > 0 {
            let len = bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.left -= len as u64;
            return (len, verdict(self.swallowing));
        }
        // The size is the first of a frame, and of a request on the data port.
        let whole = if self.control { 9 } else { 24 };
        let fresh = self.have == 0;
        if fresh && bytes.len() < whole && !rules.swallow.is_empty() {
            return (0, Verdict::Hold);
        }
        let len = bytes.len().min(whole - self.have);
        self.head[self.have..self.have + len].copy_from_slice(&bytes[..len]);
        self.have += len;
        if self.have < whole {
            return (len, Verdict::Forward);
        }
        self.have = 0;
        let size = u64::from_le_bytes(self.head[..8].try_into().unwrap());
        let kind = self.head[if self.control { 8 } else { 16 }];
        self.left = match kind {
            _ if self.control => size.saturating_sub(1),
            0xA0 => 32,                 // an identity
            0x01 | 0x81 | 0xA2 => size, // what is written, or a notification
            _ => 0,
        };
        let meant = |wanted: &Option<u8>| wanted.is_none_or(|wanted| wanted == kind);
        self.swallowing = fresh
            && len == whole
            && match rules.swallow.iter().position(meant) {
                Some(at) => rules.swallow.remove(at).is_some(),
                None => false,
            };
        rules.seen.swallowed += u64::from(self.swallowing);
        (len, verdict(self.swallowing))
    }
}

pub(super) fn is_early(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
