//! The serving half: one thread that owns both ports and every connection to them.
//!
//! A connection moves at most [`TURN`] bytes, then the others have their turn. Nothing
//! blocks but `epoll_wait`, and that without a timeout while nothing has a deadline.

mod control;
mod data;
mod line;
mod pinned;
mod port;
mod staged;

use std::{
    collections::VecDeque,
    io, mem,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Token, Waker, event::Event, net::TcpStream};
use socket2::{SockRef, TcpKeepalive};
use tracing::{debug, error, warn};

use self::{
    control::ControlConnection,
    data::DataConnection,
    line::Line,
    port::{Kind, Port},
};
use super::{
    Shared,
    builder::Listeners,
    local::{DOOR, Door, Local},
    staging::Arrivals,
};
use crate::{
    engine::{Instance, Notification},
    error::Result,
};

/// How many bytes a connection moves before the others have their turn.
const TURN: usize = 1 << 20;
const SCRATCH: usize = 64 << 10;
/// How exactly deadlines are kept, and how long accepting rests when there are no descriptors.
const TICK: Duration = Duration::from_millis(100);
/// How many connections are accepted before those that exist have their turn.
const ACCEPTS: usize = 64;
/// A peer whose host is gone is noticed after about a minute, so that its connections do not pile up.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(30))
    .with_interval(Duration::from_secs(10))
    .with_retries(3);

const WAKER: Token = Token(0);
/// The tokens of connections follow those of the ports.
const FIRST: usize = 3;

/// What a turn may use.
struct Context<'a> {
    shared: &'a Shared,
    instance: Instance,
    scratch: &'a mut [u8; SCRATCH],
    /// How many bytes all other connections hold of requests that are not whole.
    held: usize,
    /// Where a copy from the device tells the loop that it is over, as `token`.
    arrivals: &'a Arc<Arrivals>,
    token: usize,
    /// Others wait for a chunk; whether it is this one's turn to have one.
    chunks_wanted: bool,
    chunk_granted: bool,
    /// Set where there was none.
    wants_chunk: bool,
}

impl Context<'_> {
    /// Whether there was room for the note.
    fn hear(&self, note: Notification) -> bool {
        let taken = self.shared.inbox.push(note);
        if !taken {
            self.shared.counters.notes_refused.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    fn refused(&self) {
        self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn served(&self, bytes: usize) {
        self.shared.counters.bytes_served.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// How a turn ended.
enum Turn {
    /// Until the next event.
    Wait,
    /// There is more to do.
    Again,
    Close,
}

/// A server that runs.
#[derive(Debug)]
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: JoinHandle<()>,
}

impl Server {
    pub(super) fn start(
        shared: Arc<Shared>,
        instance: Instance,
        listeners: Listeners,
    ) -> Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let stop = Arc::new(AtomicBool::new(false));
        let Listeners { control, data } = listeners;
        let mut ports = [Port::new(Kind::Control, control), Port::new(Kind::Data, data)];
        for port in &mut ports {
            poll.registry().register(&mut port.listener, port.kind.token(), Interest::READABLE)?;
        }
        let door = shared.local.start(instance, poll.registry(), shared.limits.connections);
        let serving = Loop {
            poll,
            door,
            stop: Arc::clone(&stop),
            shared,
            instance,
            ports,
            connections: Vec::new(),
            free: Vec::new(),
            turns: VecDeque::new(),
            scratch: Box::new([0; SCRATCH]),
            held: 0,
            tick: None,
            arrivals: Arc::new(Arrivals::new(Arc::clone(&waker))),
            waiting: VecDeque::new(),
        };
        let thread =
            thread::Builder::new().name("relay-server".to_owned()).spawn(move || serving.run())?;
        Ok(Self { stop, waker, thread })
    }

    /// Has it look for connections whose bytes were cut.
    pub(super) fn wake(&self) {
        // The kernel refuses only if the counter is full, and then the thread is awake anyway.
        let _ = self.waker.wake();
    }

    /// Closes both ports and every connection, and ends the thread, which never waits for a peer.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
        if self.thread.join().is_err() {
            error!("the server's thread had panicked");
        }
    }
}

enum Connection {
    Control(ControlConnection),
    Data(DataConnection),
}

impl Connection {
    fn kind(&self) -> Kind {
        match self {
            Self::Control(_) => Kind::Control,
            Self::Data(_) => Kind::Data,
        }
    }

    fn line(&mut self) -> &mut Line {
        match self {
            Self::Control(connection) => connection.line(),
            Self::Data(connection) => connection.line(),
        }
    }

    fn turn(&mut self, context: &mut Context<'_>) -> io::Result<Turn> {
        match self {
            Self::Control(connection) => connection.turn(context),
            Self::Data(connection) => connection.turn(context),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Control(connection) => Some(connection.deadline()),
            Self::Data(connection) => connection.deadline(),
        }
    }

    fn held(&self) -> usize {
        if let Self::Control(connection) = self { connection.held() } else { 0 }
    }

    fn yield_chunks(&mut self, now: Instant) {
        if let Self::Data(connection) = self {
            connection.yield_chunks(now);
        }
    }

    fn is_cut(&self) -> bool {
        matches!(self, Self::Data(connection) if connection.is_cut())
    }
}

struct Place {
    connection: Connection,
    /// Whether its token is among the turns.
    queued: bool,
}

struct Loop {
    poll: Poll,
    door: Option<Door>,
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    instance: Instance,
    ports: [Port; 2],
    connections: Vec<Option<Place>>,
    free: Vec<usize>,
    /// Who has something to do: connections and, while more may wait, ports.
    turns: VecDeque<Token>,
    scratch: Box<[u8; SCRATCH]>,
    held: usize,
    /// When to look at deadlines next; none if nothing has one.
    tick: Option<Instant>,
    arrivals: Arc<Arrivals>,
    /// Who waits for a chunk, by their places; first come, first served.
    waiting: VecDeque<usize>,
}

impl Drop for Loop {
    /// Also in a panic: nobody may go on believing that peers are served.
    fn drop(&mut self) {
        if !self.stop.load(Ordering::Acquire) {
            self.shared.failed.store(true, Ordering::Relaxed);
            self.shared.inbox.bell().ring();
        }
    }
}

impl Loop {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            match self.poll.poll(&mut events, self.timeout()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    error!(%error, "epoll failed: nothing is served any more");
                    break;
                }
            }
            for event in &events {
                self.heard(event);
            }
            if self.tick.is_some_and(|tick| tick <= Instant::now()) {
                self.look_at_deadlines();
            }
            for _ in 0..self.turns.len() {
                let Some(token) = self.turns.pop_front() else { break };
                match token.0.checked_sub(FIRST) {
                    Some(index) => self.turn(index, false),
                    None => self.accept(token),
                }
            }
            self.hand_out_chunks();
        }
        self.close_where(|_| true, "the relay was closed");
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.turns.is_empty() {
            return Some(Duration::ZERO);
        }
        self.tick.map(|tick| tick.saturating_duration_since(Instant::now()))
    }

    fn heard(&mut self, event: &Event) {
        let token = event.token();
        if token == WAKER {
            self.close_where(Connection::is_cut, "its bytes were cut");
            for token in self.arrivals.take() {
                self.queue(token);
            }
            return;
        }
        if Local::is_source(token.0) {
            return self.shared.local.source_event(token.0);
        }
        if token.0 >= DOOR {
            let Some(door) = &mut self.door else { return };
            door.heard(token, &self.shared.local);
            if door.waits() {
                self.tick.get_or_insert_with(|| Instant::now() + TICK);
            }
            return;
        }
        if let Some(index) = token.0.checked_sub(FIRST) {
            // An event may outlive its connection.
            let Some(Some(place)) = self.connections.get_mut(index) else { return };
            place.connection.line().heard(event);
            return self.queue(index);
        }
        self.turns.push_back(token);
    }

    /// The connection of that place, if there is still one, has something to do.
    fn queue(&mut self, index: usize) {
        if let Some(Some(place)) = self.connections.get_mut(index)
            && !mem::replace(&mut place.queued, true)
        {
            self.turns.push_back(Token(FIRST + index));
        }
    }

    /// Lets those who wait for a chunk have their turns, as long as there is one.
    fn hand_out_chunks(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let Some(stager) = self.shared.stager() else { return self.waiting.clear() };
        for _ in 0..self.waiting.len() {
            if stager.outgoing.free() == 0 {
                break;
            }
            let Some(index) = self.waiting.pop_front() else { break };
            self.turn(index, true);
        }
        // Slow peers give theirs back then.
        if !self.waiting.is_empty() {
            self.tick.get_or_insert_with(|| Instant::now() + TICK);
        }
    }

    /// `granted`: it has waited for a chunk, and may have one.
    fn turn(&mut self, index: usize, granted: bool) {
        let Some(Some(place)) = self.connections.get_mut(index) else { return };
        place.queued = false;
        self.held -= place.connection.held();
        let mut context = Context {
            shared: &self.shared,
            instance: self.instance,
            scratch: &mut self.scratch,
            held: self.held,
            arrivals: &self.arrivals,
            token: index,
            chunks_wanted: !self.waiting.is_empty(),
            chunk_granted: granted,
            wants_chunk: false,
        };
        let turn = place.connection.turn(&mut context).unwrap_or_else(|error| {
            debug!(peer = %place.connection.line().peer(), %error, "a connection broke");
            Turn::Close
        });
        if context.wants_chunk && !self.waiting.contains(&index) {
            self.waiting.push_back(index);
        }
        self.held += place.connection.held();
        match turn {
            Turn::Wait => {}
            Turn::Again => {
                self.queue(index);
            }
            Turn::Close => return self.close(index),
        }
        let Some(Some(place)) = self.connections.get(index) else { return };
        if self.tick.is_none() && place.connection.deadline().is_some() {
            self.tick = Some(Instant::now() + TICK);
        }
    }

    fn close(&mut self, index: usize) {
        let Some(place) = self.connections.get_mut(index).and_then(Option::take) else { return };
        self.free.push(index);
        self.held -= place.connection.held();
        self.ports[place.connection.kind() as usize].open -= 1;
        self.shared.counters.connections_open.fetch_sub(1, Ordering::Relaxed);
    }

    fn close_where(&mut self, over: impl Fn(&Connection) -> bool, reason: &str) {
        for index in 0..self.connections.len() {
            let Some(Some(place)) = self.connections.get_mut(index) else { continue };
            if over(&place.connection) {
                debug!(peer = %place.connection.line().peer(), reason, "connection closed");
                self.close(index);
            }
        }
    }

    fn look_at_deadlines(&mut self) {
        let now = Instant::now();
        let over = |connection: &Connection| connection.deadline().is_some_and(|at| at <= now);
        self.close_where(over, "its time is over");
        for port in &mut self.ports {
            if port.resting {
                port.resting = false;
                self.turns.push_back(port.kind.token());
            }
        }
        if let Some(door) = &mut self.door {
            door.tick(now, &self.shared.local);
        }
        if !self.waiting.is_empty() {
            for place in self.connections.iter_mut().flatten() {
                place.connection.yield_chunks(now);
            }
        }
        let mut places = self.connections.iter().flatten();
        let more = places.any(|place| place.connection.deadline().is_some())
            || self.door.as_ref().is_some_and(Door::waits)
            || !self.waiting.is_empty();
        self.tick = more.then(|| now + TICK);
    }

    fn accept(&mut self, token: Token) {
        let Some(port) = self.ports.iter().position(|port| port.kind.token() == token) else {
            return;
        };
        if self.ports[port].resting {
            return;
        }
        for _ in 0..ACCEPTS {
            match self.ports[port].listener.accept() {
                Ok((stream, peer)) => self.admit(port, stream, peer),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    // Above all EMFILE and ENFILE. The connections wait in the backlog.
                    _ => return self.rest(port, &error),
                },
            }
        }
        self.turns.push_back(token);
    }

    fn rest(&mut self, port: usize, error: &io::Error) {
        let port = &mut self.ports[port];
        port.resting = true;
        if port.may_complain() {
            warn!(%error, port = ?port.kind, "cannot accept connections for now");
        }
        self.tick.get_or_insert_with(|| Instant::now() + TICK);
    }

    fn admit(&mut self, port: usize, stream: TcpStream, peer: SocketAddr) {
        let limit = self.shared.limits.connections;
        let port = &mut self.ports[port];
        if port.open >= limit {
            self.shared.counters.connections_refused.fetch_add(1, Ordering::Relaxed);
            if port.may_complain() {
                warn!(%peer, port = ?port.kind, limit, "too many connections: a new one was closed");
            }
            return;
        }
        // Both are improvements only.
        let _ = stream.set_nodelay(true);
        let _ = SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE);
        let line = Line::new(stream, peer);
        let mut connection = match port.kind {
            Kind::Control => Connection::Control(ControlConnection::new(line)),
            Kind::Data => Connection::Data(DataConnection::new(line)),
        };
        let index = self.free.pop().unwrap_or(self.connections.len());
        let both = Interest::READABLE | Interest::WRITABLE;
        let stream = connection.line().stream();
        if let Err(error) = self.poll.registry().register(stream, Token(FIRST + index), both) {
            if index < self.connections.len() {
                self.free.push(index);
            }
            debug!(%peer, %error, "a connection could not be watched");
            return;
        }
        port.open += 1;
        if connection.deadline().is_some() {
            self.tick.get_or_insert_with(|| Instant::now() + TICK);
        }
        let place = Some(Place { connection, queued: false });
        match self.connections.get_mut(index) {
            Some(free) => *free = place,
            None => self.connections.push(place),
        }
        self.shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        self.shared.counters.connections_open.fetch_add(1, Ordering::Relaxed);
    }
}
