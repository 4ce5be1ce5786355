//! What client and server say to each other: lines of JSON over plain TCP connections.
//!
//! One connection for each receiving relay carries the case, and at the end the receiver's own
//! figures. One for each thread of the client and each relay, a *lane*, carries metadata. It is the
//! channel that a user would have of his own, so what it costs is measured beside.

use std::{
    fmt::Display,
    hint, io,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::WaitStrategy;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Result, case::Case, machine::Machine, row::Times, stopped};

/// Says that both ends speak alike.
pub(crate) const VERSION: u32 = 1;

/// How long either side waits for an answer to a control message.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What a connection begins with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "hello", rename_all = "lowercase")]
pub(crate) enum Hello {
    /// Make a relay for this case.
    Peer { version: u32, session: u64, peer: usize, case: Box<Case> },
    /// Metadata for that relay will come here.
    Lane { session: u64, peer: usize, lane: usize },
}

/// What the client asks of a server on a connection that is no lane.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase")]
pub(crate) enum Ask {
    /// Forget what was measured: the warm-up is over.
    Reset,
    /// What was measured.
    Report,
}

/// What a server answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "lowercase")]
pub(crate) enum Answer {
    Done,
    Ready {
        machine: Box<Machine>,
    },
    /// Of a lane: so many gets were good.
    Got {
        gets: u64,
    },
    Report {
        /// How long the receiver's own calls took.
        get: Times,
        /// Which way the bytes came.
        way: String,
        cpu_s: f64,
    },
    Failed {
        error: String,
    },
}

/// What a lane carries beside metadata: "answer this when all that came before is done".
pub(crate) const SYNC: &str = "{\"cmd\":\"sync\"}";

/// A longer line is no line of ours.
const LONGEST: usize = 64 << 10;

/// A connection, read line by line in the way of the wait strategy.
pub(crate) struct Lane {
    stream: TcpStream,
    peer: String,
    wait: WaitStrategy,
    out: Vec<u8>,
    /// What has come and was not taken: `read[at..end]`.
    read: Box<[u8]>,
    at: usize,
    end: usize,
}

/// What became of waiting for a line.
pub(crate) enum Heard<'a> {
    Line(&'a str),
    /// Nothing yet.
    Nothing,
    /// The other side has closed the connection.
    End,
}

impl Lane {
    pub(crate) fn new(stream: TcpStream, wait: WaitStrategy) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let peer = stream.peer_addr()?.to_string();
        let read = vec![0; 2 * LONGEST].into_boxed_slice();
        Ok(Self { stream, peer, wait, out: Vec::new(), read, at: 0, end: 0 })
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// From now on it is read in that way.
    pub(crate) fn read_by(&mut self, wait: WaitStrategy) {
        self.wait = wait;
    }

    /// Sends a line.
    pub(crate) fn say(&mut self, line: impl Display) -> io::Result<()> {
        use io::Write as _;
        self.out.clear();
        writeln!(self.out, "{line}")?;
        let mut sent = 0;
        while sent < self.out.len() {
            match send(&self.stream, &self.out[sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(len) => sent += len,
                Err(Errno::INTR) => {}
                // The other side is behind.
                Err(Errno::AGAIN) => self.ready(PollFlags::OUT)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(crate) fn tell(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.say(serde_json::to_string(message)?)
    }

    /// The next line, by then; `End` if there will be none.
    pub(crate) fn hear(&mut self, deadline: Option<Instant>) -> io::Result<Heard<'_>> {
        let mut looks = 0_u32;
        let mut since = None;
        loop {
            if let Some(end) = self.line()? {
                return self.taken(end);
            }
            match self.fill()? {
                Filled::End => return Ok(Heard::End),
                Filled::More => continue,
                Filled::Nothing => {}
            }
            looks = looks.wrapping_add(1);
            let sleeps = match self.wait {
                WaitStrategy::Spin => {
                    hint::spin_loop();
                    false
                }
                WaitStrategy::Park => true,
                WaitStrategy::Yield => {
                    thread::yield_now();
                    false
                }
                WaitStrategy::Auto => {
                    hint::spin_loop();
                    looks.is_multiple_of(16) && {
                        thread::yield_now();
                        since.get_or_insert_with(Instant::now).elapsed() >= GRACE
                    }
                }
            };
            if sleeps {
                self.ready(PollFlags::IN)?;
            }
            if sleeps || looks.is_multiple_of(256) {
                if stopped() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(Heard::Nothing);
                }
            }
        }
    }

    /// The next line if it is there already.
    pub(crate) fn look(&mut self) -> io::Result<Heard<'_>> {
        loop {
            if let Some(end) = self.line()? {
                return self.taken(end);
            }
            match self.fill()? {
                Filled::End => return Ok(Heard::End),
                Filled::More => {}
                Filled::Nothing => return Ok(Heard::Nothing),
            }
        }
    }

    /// An answer, or why there is none.
    pub(crate) fn answer<T: DeserializeOwned>(&mut self) -> Result<T> {
        let peer = self.peer.clone();
        match self.hear(Some(Instant::now() + PATIENCE))? {
            Heard::Line(line) => Ok(serde_json::from_str(line).map_err(|error| {
                format!("{peer} does not speak as a perftest server does ({error}): is it one?")
            })?),
            Heard::Nothing => Err(format!(
                "{peer} has not answered for {PATIENCE:?}: is it stopped, or is that no perftest \
                 server?"
            )
            .into()),
            Heard::End => Err(gone(&peer).into()),
        }
    }

    /// Asks, and takes a refusal for an error.
    pub(crate) fn ask(&mut self, message: &impl Serialize) -> Result<Answer> {
        self.tell(message).map_err(|error| format!("{}: {error}", gone(&self.peer)))?;
        self.expect()
    }

    pub(crate) fn expect(&mut self) -> Result<Answer> {
        match self.answer()? {
            Answer::Failed { error } => Err(format!("the server at {}: {error}", self.peer).into()),
            answer => Ok(answer),
        }
    }

    /// Where the first line ends, if all of it is there.
    fn line(&mut self) -> io::Result<Option<usize>> {
        let rest = &self.read[self.at..self.end];
        match rest.iter().position(|&byte| byte == b'\n') {
            Some(len) => Ok(Some(self.at + len)),
            None if rest.len() > LONGEST => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "a line without an end"))
            }
            None => Ok(None),
        }
    }

    fn taken(&mut self, end: usize) -> io::Result<Heard<'_>> {
        let line = &self.read[self.at..end];
        self.at = end + 1;
        str::from_utf8(line)
            .map(Heard::Line)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Takes in what has come.
    fn fill(&mut self) -> io::Result<Filled> {
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
        } else if self.at > LONGEST {
            self.read.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
        match recv(&self.stream, &mut self.read[self.end..], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Filled::End),
            Ok((len, _)) => {
                self.end += len;
                Ok(Filled::More)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Filled::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Sleeps until the socket is ready, and a moment at most.
    fn ready(&self, flags: PollFlags) -> io::Result<()> {
        let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        match poll(&mut [PollFd::new(&self.stream, flags)], Some(&moment)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

enum Filled {
    More,
    Nothing,
    End,
}

/// As long as a relay's own.
const GRACE: Duration = Duration::from_micros(50);

pub(crate) fn gone(peer: &str) -> String {
    format!(
        "the server at {peer} is gone: look at what it said last, and start it again (`perftest \
         server --listen HOST:PORT`)"
    )
}
