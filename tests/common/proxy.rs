//! A TCP proxy between a sender and its receivers, which misbehaves when a test says so.
//!
//! ```text
//! receiver ──► 127.0.0.1:C ──► control port of the sender
//!          ──► 127.0.0.1:D ──► data port             (advertised: "127.0.0.1:C:D")
//! ```
//!
//! Each change holds from the moment its call returns, also for connections that are open. One
//! thread moves all bytes, with 16 KiB of room for each connection and way: a way that is held up
//! soon holds up who sends. (What the kernels on both sides keep comes on top: some MiB.)

mod pipe;
mod pump;

use std::{
    collections::VecDeque,
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::write,
    net::{AddressFamily, SocketType, bind, getsockname, socket, sockopt::set_socket_reuseaddr},
};

use super::{peer::Peer, sockets};

/// Longer than anything takes on a busy machine: what it finds is a hang.
const PATIENCE: Duration = Duration::from_secs(60);
const CONTROL: usize = 0;
const DATA: usize = 1;
const UP: usize = 0;
const DOWN: usize = 1;

/// The status before the body in the answer to a read of version 2.
pub(crate) const STATUS: u64 = 8;
/// The kind of a notification, by port.
pub(crate) const NOTE_ON_CONTROL: u8 = 2;
pub(crate) const NOTE_ON_DATA: u8 = 0xA2;

/// How a client's connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As if the server had closed: what was forwarded arrives, then the end; writes fail later.
    Close,
    /// The end arrives, but what the client still writes is taken, and lost.
    HalfClose,
    /// A reset, which may overtake what was forwarded.
    Reset,
}

/// What tests can wait for, of one port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) accepted: u64,
    pub(crate) open: u64,
    /// Client to server; what is swallowed is not among them.
    pub(crate) bytes_up: u64,
    pub(crate) bytes_down: u64,
    /// Messages.
    pub(crate) swallowed: u64,
    /// Connections that were ended by a limit, a time or a command, at accept among them.
    pub(crate) ended: u64,
}

/// Dropping it closes all its connections.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    addrs: [SocketAddr; 2],
    thread: Option<JoinHandle<()>>,
}

/// One of the two ports, to be changed or watched.
#[derive(Clone, Copy)]
pub(crate) struct Port<'a> {
    shared: &'a Shared,
    port: usize,
}

/// One way of one port: from the clients up to the server, or down.
#[derive(Clone, Copy)]
pub(crate) struct Way<'a> {
    port: Port<'a>,
    way: usize,
}

impl Proxy {
    pub(crate) fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    pub(crate) fn at(ip: IpAddr) -> Self {
        let holders = [hold_port(ip), hold_port(ip)];
        let addrs = holders.each_ref().map(|held| getsockname(held).unwrap().try_into().unwrap());
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), wake });
        let pump = pump::Pump::new(Arc::clone(&shared), holders, addrs);
        let thread = thread::Builder::new().name("proxy".to_owned()).spawn(move || pump.run());
        let proxy = Self { shared, addrs, thread: Some(thread.unwrap()) };
        proxy.data().accept(); // returns once both ports listen
        proxy
    }

    /// For `EmbeddedBuilder::advertise` and the peer's `--advertise`.
    pub(crate) fn advertise(&self) -> String {
        let [control, data] = self.addrs;
        format!("{control}:{}", data.port())
    }

    pub(crate) fn control_addr(&self) -> SocketAddr {
        self.addrs[CONTROL]
    }

    pub(crate) fn data_addr(&self) -> SocketAddr {
        self.addrs[DATA]
    }

    /// Who really listens. Until then clients are reset.
    pub(crate) fn forward_to(&self, control: SocketAddr, data: SocketAddr) {
        self.shared.change(|ports| {
            ports[CONTROL].target = Some(control);
            ports[DATA].target = Some(data);
        });
    }

    /// Likewise, for a peer that was started with this proxy's `advertise`.
    pub(crate) fn forward_to_peer(&self, peer: &Peer) {
        let (control, data) = sockets::ports_of(peer.pid());
        self.forward_to(control, data);
    }

    pub(crate) fn control(&self) -> Port<'_> {
        Port { shared: &self.shared, port: CONTROL }
    }

    pub(crate) fn data(&self) -> Port<'_> {
        Port { shared: &self.shared, port: DATA }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.wake();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "the proxy's thread panicked");
    }
}

impl<'a> Port<'a> {
    pub(crate) fn up(self) -> Way<'a> {
        Way { port: self, way: UP }
    }

    pub(crate) fn down(self) -> Way<'a> {
        Way { port: self, way: DOWN }
    }

    /// Back to a proxy that only forwards; what is held up goes on.
    pub(crate) fn pass(self) {
        self.change(|rules| {
            rules.refusing = false;
            rules.at_accept.clear();
            rules.idle = None;
            rules.swallow.clear();
            for way in &mut rules.ways {
                way.rate = None;
                way.limits.clear();
                way.passes += 1;
                way.resume();
            }
        });
    }

    /// Holds both ways.
    pub(crate) fn stall(self) {
        self.change(|rules| rules.ways.iter_mut().for_each(|way| way.stalled = true));
    }

    pub(crate) fn resume(self) {
        self.change(|rules| rules.ways.iter_mut().for_each(WayRules::resume));
    }

    /// Nobody listens any more. The port stays ours, and open connections go on.
    pub(crate) fn refuse(self) {
        self.change(|rules| rules.refusing = true);
    }

    /// Listens again.
    pub(crate) fn accept(self) {
        self.change(|rules| rules.refusing = false);
    }

    /// Ends the next `count` connections as soon as they are made.
    pub(crate) fn end_next(self, count: usize, ending: Ending) {
        self.change(|rules| rules.at_accept.extend(vec![ending; count]));
    }

    /// Ends all connections that are open now.
    pub(crate) fn end_all(self, ending: Ending) {
        self.change(|rules| rules.end_all = Some(ending));
    }

    /// Ends, from now on, each connection over which nothing was forwarded for `limit`.
    pub(crate) fn end_idle(self, limit: Duration, ending: Ending) {
        self.change(|rules| rules.idle = Some((limit, ending)));
    }

    /// Drops the next `count` messages of clients, whole, and leaves their connections open.
    pub(crate) fn swallow(self, count: usize) {
        self.change(|rules| rules.swallow.extend(vec![None; count]));
    }

    /// Likewise, but only those of one kind: `NOTE_ON_DATA`, the opcode of another request, or on
    /// the control port the type of a frame.
    pub(crate) fn swallow_kind(self, kind: u8, count: usize) {
        self.change(|rules| rules.swallow.extend(vec![Some(kind); count]));
    }

    pub(crate) fn seen(self) -> Seen {
        self.shared.state.lock().ports[self.port].seen
    }

    /// Waits until what is seen is as wanted.
    #[track_caller]
    pub(crate) fn until(self, wanted: impl Fn(&Seen) -> bool) -> Seen {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.shared.state.lock();
        while !wanted(&state.ports[self.port].seen) {
            let late = self.shared.changed.wait_until(&mut state, deadline).timed_out();
            assert!(!late, "the proxy still sees {:?}", state.ports[self.port].seen);
        }
        state.ports[self.port].seen
    }

    fn change(self, how: impl FnOnce(&mut Rules)) {
        self.shared.change(|ports| how(&mut ports[self.port]));
    }
}

impl Way<'_> {
    /// At most so many bytes a second, all connections together.
    pub(crate) fn throttle(self, bytes_a_second: u64) {
        self.change(|way| way.rate = Some(Rate::new(bytes_a_second)));
    }

    /// Forwards nothing more, an end neither; connections stay open.
    pub(crate) fn stall(self) {
        self.change(|way| way.stalled = true);
    }

    /// Sends the rest of what was stalled, by a limit too.
    pub(crate) fn resume(self) {
        self.change(WayRules::resume);
    }

    /// The next connection that has something to forward stalls after exactly so many bytes of it;
    /// others go on. Called again, it holds for the one after that.
    pub(crate) fn stall_after(self, bytes: u64) {
        self.limit(bytes, Then::Stall);
    }

    /// Likewise, but that connection ends.
    pub(crate) fn end_after(self, bytes: u64, ending: Ending) {
        self.limit(bytes, Then::End(ending));
    }

    fn limit(self, left: u64, then: Then) {
        self.change(|way| way.limits.push_back(Limit { left, then, passes: way.passes }));
    }

    fn change(self, how: impl FnOnce(&mut WayRules)) {
        self.port.change(|rules| how(&mut rules.ways[self.way]));
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({})", self.advertise())
    }
}

/// What the test and the pump's thread share.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    ports: [Rules; 2],
    /// Counts changes.
    asked: u64,
    /// Up to which change the pump has listened, or closed, as it was told.
    done: u64,
    stop: bool,
}

#[derive(Default)]
struct Rules {
    target: Option<SocketAddr>,
    refusing: bool,
    at_accept: VecDeque<Ending>,
    end_all: Option<Ending>,
    idle: Option<(Duration, Ending)>,
    /// A message each: of this kind, or of any.
    swallow: VecDeque<Option<u8>>,
    ways: [WayRules; 2],
    seen: Seen,
}

#[derive(Default)]
struct WayRules {
    stalled: bool,
    /// Counts resumes: a connection that stalls by a limit does so until the next.
    resumes: u64,
    /// Counts passes: a limit that a connection has taken is void after the next.
    passes: u64,
    rate: Option<Rate>,
    limits: VecDeque<Limit>,
}

impl WayRules {
    fn resume(&mut self) {
        self.stalled = false;
        self.resumes += 1;
    }
}

#[derive(Clone, Copy)]
struct Limit {
    left: u64,
    then: Then,
    passes: u64,
}

#[derive(Clone, Copy)]
enum Then {
    Stall,
    End(Ending),
}

/// A bucket that fills with time, and never holds more than a twentieth of a second.
struct Rate {
    bytes_a_second: f64,
    filled: Instant,
    bytes: f64,
}

impl Rate {
    fn new(bytes_a_second: u64) -> Self {
        Self { bytes_a_second: bytes_a_second as f64, filled: Instant::now(), bytes: 0.0 }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        let most = (self.bytes_a_second / 20.0).max(1.0);
        self.bytes = (self.bytes + passed * self.bytes_a_second).min(most);
        self.filled = now;
    }
}

impl Shared {
    fn change(&self, how: impl FnOnce(&mut [Rules; 2])) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        how(&mut state.ports);
        state.asked += 1;
        let asked = state.asked;
        self.wake();
        while state.done < asked {
            let late = self.changed.wait_until(&mut state, deadline).timed_out();
            assert!(!late, "the proxy's thread hangs, or has panicked");
        }
    }

    fn wake(&self) {
        write(&self.wake, &1_u64.to_ne_bytes()).unwrap();
    }
}

/// A port of ours for as long as this lives: bound, so that no other gets it, and not listening,
/// so that another socket of ours may.
pub(crate) fn hold_port(ip: IpAddr) -> OwnedFd {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let held = socket(family, SocketType::STREAM, None).unwrap();
    set_socket_reuseaddr(&held, true).unwrap();
    bind(&held, &SocketAddr::new(ip, 0)).unwrap();
    held
}
