//! What client and server say to each other: lines of JSON over plain TCP connections.
//!
//! One connection for each receiving relay carries the case, and at the end the receiver's own
//! figures. One for each thread of the client and each relay, a *lane*, carries metadata. It is the
//! channel that a user would have of his own, so what it costs is measured beside. Where both ends are
//! on one host, its lines go by memory that they share, and the connection says who has ended.

use std::{
    fmt::Display,
    hint, io,
    net::{SocketAddr, TcpStream},
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

use crate::{
    Result,
    case::Case,
    machine::{Machine, Usage},
    pipe::{self, Pipe},
    row::Times,
    stopped,
};

/// Says that both ends speak alike.
pub(crate) const VERSION: u32 = 2;

/// How long either side waits for an answer to a control message.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What a connection begins with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "hello", rename_all = "lowercase")]
pub(crate) enum Hello {
    /// Make a relay for this case.
    Peer { version: u32, session: u64, peer: usize, case: Box<Case> },
    /// Metadata for that relay will come here; or by shared memory, if the client, which is on this
    /// host, can open what it is then told of.
    Lane { session: u64, peer: usize, lane: usize, shares: bool },
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
    /// Of a lane that may share memory: where it is.
    Pipe {
        address: pipe::Address,
    },
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
        /// Of the process, which may have several relays.
        process: u32,
        cpu_s: f64,
        usage: Usage,
    },
    Failed {
        error: String,
    },
}

/// What a lane carries beside metadata: "answer this when all that came before is done".
pub(crate) const SYNC: &str = "{\"cmd\":\"sync\"}";
/// The client has opened the memory, or has not: the last line by the connection, or one of many.
pub(crate) const SHARED: &str = "{\"cmd\":\"shared\"}";
pub(crate) const APART: &str = "{\"cmd\":\"apart\"}";

/// A longer line is no line of ours.
const LONGEST: usize = 64 << 10;

/// A connection, read line by line in the way of the wait strategy.
pub(crate) struct Lane {
    stream: TcpStream,
    /// By which the lines go in place of the connection.
    pipe: Option<Pipe>,
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
        Ok(Self { stream, pipe: None, peer, wait, out: Vec::new(), read, at: 0, end: 0 })
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

    /// From now on the lines go by it.
    pub(crate) fn go_by(&mut self, pipe: Pipe) {
        self.pipe = Some(pipe);
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.pipe.is_some()
    }

    /// Whether the other end can be on this host: it has an address of ours.
    pub(crate) fn may_share(&self) -> bool {
        let of = |address: io::Result<SocketAddr>| address.map(|at| at.ip().to_canonical());
        match (of(self.stream.local_addr()), of(self.stream.peer_addr())) {
            (Ok(own), Ok(other)) => own == other || own.is_loopback() && other.is_loopback(),
            _ => false,
        }
    }

    /// Whether the other process has ended, told or not.
    pub(crate) fn is_gone(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        matches!(recv(&self.stream, &mut [0; 1], flags), Ok((0, _)) | Err(Errno::CONNRESET))
    }

    /// Sends a line.
    pub(crate) fn say(&mut self, line: impl Display) -> io::Result<()> {
        use io::Write as _;
        self.out.clear();
        write!(self.out, "{line}")?;
        if self.pipe.is_some() {
            let whole = (self.out.len() + 1).next_multiple_of(8);
            self.out.resize(whole - 1, b' ');
        }
        self.out.push(b'\n');
        if let Some(pipe) = &self.pipe {
            let (mut words, _) = self.out.as_chunks::<8>();
            while !words.is_empty() {
                let sent = pipe.write(words);
                words = &words[sent..];
                if sent == 0 {
                    if pipe.is_closed() || self.is_gone() {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                    pipe.sleep_until_room(&MOMENT); // the other side is behind
                }
            }
            return Ok(());
        }
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
        let mut sleeps = false;
        loop {
            if let Some(end) = self.line()? {
                return self.taken(end);
            }
            match self.fill()? {
                Filled::End => return Ok(Heard::End),
                Filled::More => continue,
                Filled::Nothing => {}
            }
            if sleeps && self.pipe.is_some() && self.is_gone() {
                return Ok(Heard::End);
            }
            looks = looks.wrapping_add(1);
            sleeps = match self.wait {
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
                    looks.is_multiple_of(if self.pipe.is_some() { 64 } else { 16 }) && {
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

    /// Takes what comes, until the end, and looks at none of it.
    pub(crate) fn drain(&mut self) {
        while matches!(self.hear(None), Ok(Heard::Line(_) | Heard::Nothing)) {}
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
            None if rest.len() >= LONGEST => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "a line without an end"))
            }
            None => Ok(None),
        }
    }

    fn taken(&mut self, end: usize) -> io::Result<Heard<'_>> {
        let line = &self.read[self.at..end];
        self.at = end + 1;
        str::from_utf8(line)
            .map(|line| Heard::Line(line.trim_end()))
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
        if let Some(pipe) = &self.pipe {
            let closed = pipe.is_closed(); // before the look: what was sent before counts
            let len = pipe.read(&mut self.read[self.end..]);
            self.end += len;
            return Ok(match len {
                0 if closed => Filled::End,
                0 => Filled::Nothing,
                _ => Filled::More,
            });
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
        if let Some(pipe) = &self.pipe {
            pipe.sleep_until_come(&MOMENT);
            return Ok(());
        }
        match poll(&mut [PollFd::new(&self.stream, flags)], Some(&MOMENT)) {
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

const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long whoever waits spins.
const GRACE: Duration = Duration::from_micros(50);

pub(crate) fn gone(peer: &str) -> String {
    format!(
        "the server at {peer} is gone: look at what it said last, and start it again (`perftest \
         server --listen HOST:PORT`)"
    )
}
