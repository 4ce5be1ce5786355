//! From the configuration of an embedded engine to its two open ports.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use rustix::{
    process::{Resource, getrlimit},
    system::uname,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    EmbeddedEngine, Staging,
    address::{Address, Advertised, resolve},
};
use crate::{
    error::{Error, Result},
    process,
};

/// The kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
/// How long the resolver may take over a name in the configuration.
const RESOLVE: Duration = Duration::from_secs(5);
/// What a queue of notes allocates at once: 170 bytes each.
const MOST_NOTES: usize = 1 << 20;

/// Configures an [`EmbeddedEngine`] before it listens.
///
/// ```
/// use mooncake_relay::EmbeddedEngine;
/// let engine = EmbeddedEngine::builder("127.0.0.1:0")
///     .advertise("node7.example:31000:31001") // what peers are told; an IPv6 host in brackets
///     .data_port(0) // any: the default
///     .max_connections(256)
///     .queued_notes(4096)
///     .allow_writes(false)
///     .local(true) // shared memory with this host's peers: the default
///     .connect_timeout(std::time::Duration::from_secs(2))
///     .stall_timeout(std::time::Duration::from_secs(10))
///     .bind()?;
/// assert_eq!(engine.session_id(), "node7.example:31000");
/// assert_ne!(engine.control_addr(), engine.data_addr()); // where it really listens
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing listens before `bind`"]
pub struct EmbeddedBuilder {
    listen: String,
    advertise: Option<String>,
    data_port: u16,
    pub(super) limits: Limits,
    pub(super) queued_notes: usize,
    pub(super) local: bool,
    pub(super) staging: Option<Staging>,
    pub(super) patience: Patience,
}

/// How long peers may keep us waiting, whatever the deadline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For a connection to be made.
    pub(super) connect: Duration,
    /// In the middle of something, without a byte.
    pub(super) stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { connect: Duration::from_secs(10), stall: Duration::from_secs(30) }
    }
}

/// What peers can make the server do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) allow_writes: bool,
    /// On each port.
    pub(super) connections: usize,
}

impl EmbeddedBuilder {
    pub(super) fn new(listen: &str) -> Self {
        Self {
            listen: listen.to_owned(),
            advertise: None,
            data_port: 0,
            limits: Limits { allow_writes: false, connections: connections() },
            queued_notes: 16_384,
            local: true,
            staging: None,
            patience: Patience::default(),
        }
    }

    /// Where peers reach this engine, if not where it listens: `host[:control port[:data port]]`.
    ///
    /// The ports are those that peers are told; they do not change where the engine listens. Unset,
    /// the host is the listening address if that is specific, or else this host's name if it
    /// resolves to an address that is not loopback.
    pub fn advertise(mut self, address: &str) -> Self {
        self.advertise = Some(address.to_owned());
        self
    }

    /// Which data port to listen on, at the address of the control port; 0, the default, for any.
    ///
    /// Choose one where a firewall or a port map must know it, or where a restarted process must be
    /// found again by real engines: those keep the data port of a session id for ever.
    pub fn data_port(mut self, port: u16) -> Self {
        self.data_port = port;
        self
    }

    /// Whether peers may write into what is published. By default they may not. Who reaches the
    /// data port may then change what a receiver is about to read.
    pub fn allow_writes(mut self, allow: bool) -> Self {
        self.limits.allow_writes = allow;
        self
    }

    /// Whether bytes and notifications go by shared memory between processes of this host, of one
    /// user and one network namespace. By default they do, and by TCP wherever that cannot be.
    pub fn local(mut self, local: bool) -> Self {
        self.local = local;
        self
    }

    /// Lets it serve a relay whose slots are in device memory, through pinned host memory of that
    /// size. By default such a relay cannot be made; one in host memory has no use for it.
    pub fn staging(mut self, staging: Staging) -> Self {
        self.staging = Some(staging);
        self
    }

    /// How many connections are held on each of the two ports.
    ///
    /// By default a quarter of the descriptors that this process may have, but 256 to 1024.
    /// Beyond that a new one is closed at once; none that exists is ever closed for it.
    pub fn max_connections(mut self, connections: usize) -> Self {
        self.limits.connections = connections;
        self
    }

    /// How many notifications wait for the relay; 16,384 by default.
    ///
    /// Beyond that a peer is told that its notification was not taken.
    pub fn queued_notes(mut self, notes: usize) -> Self {
        self.queued_notes = notes;
        self
    }

    /// How long nothing may answer when a peer is connected to, in one try or in several short ones
    /// together; 10 s by default.
    ///
    /// An address that swallows everything is then [`Error::PeerFailed`], long before a get's own
    /// deadline.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.patience.connect = timeout;
        self
    }

    /// How long a peer may be silent in the middle of something; 30 s by default.
    ///
    /// A peer that sends no byte of its answer for so long is [`Error::PeerFailed`], also where the
    /// get has no deadline. The server closes connections that stop in the middle of a request, and
    /// those that take no byte of an answer; not those that are idle between two requests, and not
    /// those that read a published slot, which its lease and its quarantine end.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.patience.stall = timeout;
        self
    }

    /// Opens both ports, at once or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a field that cannot work, `listen` and `advertise` among them, and
    /// [`Error::Io`] of the kind [`AddrInUse`](io::ErrorKind::AddrInUse) if somebody listens there.
    pub fn bind(self) -> Result<EmbeddedEngine> {
        process::enter()?;
        if self.limits.connections == 0 {
            return Err(Error::config("max_connections", "must be at least 1"));
        }
        self.staging.as_ref().map_or(Ok(()), Staging::check)?;
        let Patience { connect, stall } = self.patience;
        for (field, time) in [("connect_timeout", connect), ("stall_timeout", stall)] {
            if time.is_zero() {
                return Err(Error::config(field, "is zero: no peer could answer in it"));
            }
        }
        if !(1..=MOST_NOTES).contains(&self.queued_notes) {
            return Err(Error::config("queued_notes", format!("must be 1 to {MOST_NOTES}")));
        }
        let advertised = self.advertise.as_deref().map(Advertised::parse).transpose();
        let advertised =
            advertised.map_err(|error| Error::config("advertise", error.to_string()))?;
        let listen = find(&self.listen)?;
        let mut data = listen;
        data.set_port(self.data_port);
        let listeners = Listeners::open(listen, data)?;
        let (control, data) = listeners.addresses()?;
        let host = match advertised {
            Some(advertised) => check_host(advertised.host)?.to_owned(),
            None => own_host(&self.listen, control.ip())?,
        };
        let (control_port, data_port) =
            advertised.map_or((None, None), |told| (told.control_port, told.data_port));
        if control_port == Some(0) || data_port == Some(0) {
            return Err(Error::config("advertise", "peers cannot reach port 0"));
        }
        let endpoint = Endpoint {
            session_id: Address {
                host: &host,
                port: control_port.unwrap_or_else(|| control.port()),
            }
            .to_string(),
            data_port: data_port.unwrap_or_else(|| data.port()),
            host,
        };
        Ok(EmbeddedEngine::new(&self, endpoint, listeners, control, data))
    }
}

/// Peers must not be able to take all descriptors of the process that they are connected to.
fn connections() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (descriptors / 4).clamp(256, 1024) as usize
}

/// Where peers reach the engine.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) session_id: String,
    /// Without brackets.
    pub(super) host: String,
    pub(super) data_port: u16,
}

/// Both ports, open.
#[derive(Debug)]
pub(super) struct Listeners {
    pub(super) control: TcpListener,
    pub(super) data: TcpListener,
}

impl Listeners {
    pub(super) fn open(control: SocketAddr, data: SocketAddr) -> Result<Self> {
        Ok(Self { control: listen(control)?, data: listen(data)? })
    }

    fn addresses(&self) -> Result<(SocketAddr, SocketAddr)> {
        Ok((self.control.local_addr()?, self.data.local_addr()?))
    }
}

fn listen(addr: SocketAddr) -> Result<TcpListener> {
    try_listen(addr).map_err(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            Error::config("listen", format!("{addr} is not an address of this machine"))
        }
        io::ErrorKind::AddrInUse => Error::Io(io::Error::new(
            error.kind(),
            format!("{addr} is in use: listen on another port, or on port 0 for any"),
        )),
        kind => Error::Io(io::Error::new(kind, format!("listening on {addr}: {error}"))),
    })
}

fn try_listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // A named port may have connections of a predecessor that linger. For a port of the system's
    // choice it would allow one that another socket is about to listen on.
    socket.set_reuse_address(addr.port() != 0)?;
    socket.bind(&addr.into())?;
    // The connections inherit it, so that the port can be bound again while they linger.
    socket.set_reuse_address(true)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// The address to listen on. Of a name's, IPv4 comes first: real engines look for no other.
fn find(text: &str) -> Result<SocketAddr> {
    let wrong = |reason: String| Error::config("listen", format!("{text:?}: {reason}"));
    let address = Address::parse(text).map_err(|error| wrong(error.to_string()))?;
    let found = resolve(address.host, address.port, Instant::now() + RESOLVE);
    let found = found.map_err(|error| match error {
        Error::PeerFailed { reason, .. } => wrong(reason),
        other => wrong(format!("cannot resolve {}: {other}", address.host)),
    })?;
    let first = found.into_iter().min_by_key(SocketAddr::is_ipv6);
    first.ok_or_else(|| wrong("it has no address".to_owned()))
}

fn check_host(host: &str) -> Result<&str> {
    if host.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified()) {
        let reason = format!("{host} is no address that peers can reach: name this host");
        return Err(Error::config("advertise", reason));
    }
    Ok(host)
}

/// The host by which peers reach an engine that was told to listen at `listen`, which is `ip`.
fn own_host(listen: &str, ip: IpAddr) -> Result<String> {
    if !ip.is_unspecified() {
        // Without its zone an address of one link leads nowhere.
        let zone = Address::parse(listen).ok().and_then(|address| address.host.split_once('%'));
        return Ok(zone.map_or_else(|| ip.to_string(), |(_, zone)| format!("{ip}%{zone}")));
    }
    let system = uname();
    let name = system.nodename().to_string_lossy();
    let found = resolve(&name, 0, Instant::now() + RESOLVE).unwrap_or_default();
    if found.iter().any(|addr| !addr.ip().is_loopback() && !addr.ip().is_unspecified()) {
        return Ok(name.into_owned());
    }
    let reason = format!(
        "listening on {ip}, and this host's name {name:?} gives peers no address: set the host by \
         which they reach it"
    );
    Err(Error::config("advertise", reason))
}
