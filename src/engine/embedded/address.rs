//! `host:port` as text, and the socket addresses it stands for.

use std::{
    convert::Infallible,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs},
    sync::LazyLock,
    thread,
    time::Instant,
};

use crossbeam::{
    channel::{self, Receiver, Sender},
    select,
};
use rustix::net::{AddressFamily, SocketType, netdevice::name_to_index, socket};

use crate::error::{Error, Result};

/// The longest name that DNS knows; IPv6 with a zone is shorter.
const HOST_LIMIT: usize = 253;
/// A host in brackets, and two ports.
const TEXT_LIMIT: usize = HOST_LIMIT + 2 + 2 * 6;
/// Linux names an interface with at most 15 bytes.
const ZONE_LIMIT: usize = 15;
/// A hung resolver holds its thread for as long as it likes, so there are never more than these.
const LOOKUPS_AT_ONCE: usize = 16;
/// A name that stands for more addresses than these is not tried to its end.
const ADDRESSES_PER_NAME: usize = 8;

/// A host and a port. The text is `host:port`, with an IPv6 host in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address<'a> {
    /// A name, or an address without brackets.
    pub(super) host: &'a str,
    /// The port; 0 is for the caller to refuse.
    pub(super) port: u16,
}

impl<'a> Address<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, Malformed> {
        match split(text)? {
            (host, Some(port)) => Ok(Self { host, port: parse_port(port)? }),
            (host, None) if host.contains(':') && !text.starts_with('[') => {
                Err(Malformed::BareIpv6)
            }
            (_, None) => Err(Malformed::NoPort),
        }
    }
}

impl fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// What an engine says of where it is reached: `host[:control port[:data port]]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Advertised<'a> {
    /// A name, or an address without brackets.
    pub(super) host: &'a str,
    /// The control port, if it is another than the one listened on.
    pub(super) control_port: Option<u16>,
    /// The data port, likewise.
    pub(super) data_port: Option<u16>,
}

impl<'a> Advertised<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, Malformed> {
        let (host, ports) = split(text)?;
        let Some(ports) = ports else {
            return Ok(Self { host, control_port: None, data_port: None });
        };
        let (control, data) = match ports.split_once(':') {
            Some((control, data)) => (control, Some(data)),
            None => (ports, None),
        };
        let control_port = Some(parse_port(control)?);
        Ok(Self { host, control_port, data_port: data.map(parse_port).transpose()? })
    }
}

/// A host alone: a name, or an address; an IPv6 address with or without brackets.
pub(super) fn parse_host(text: &str) -> Result<&str, Malformed> {
    match split(text)? {
        (host, None) => Ok(host),
        (_, Some(_)) => Err(Malformed::PortAfterHost),
    }
}

/// Why a text is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("an address is at most {TEXT_LIMIT} bytes long")]
    TooLong,
    #[error("the host is missing: write host:port")]
    NoHost,
    #[error("a host is made of letters, digits, '.', '-' and '_', or is an IP address")]
    NotAHost,
    #[error("what stands in brackets is an IPv6 address, and only ':' and a port follow it")]
    Brackets,
    #[error("an IPv6 address before a port needs brackets: [::1]:7000")]
    BareIpv6,
    #[error("the port is missing: write host:port")]
    NoPort,
    #[error("a port is a number from 0 to 65535")]
    Port,
    #[error("a host alone is wanted, without a port")]
    PortAfterHost,
}

/// The addresses of `host`, found by `deadline`. Numeric ones need no resolver.
pub(super) fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    resolve_unless(&channel::never(), host, port, deadline)
}

/// As [`resolve`], and ends with [`Error::Closed`] once `cancelled` is disconnected.
pub(super) fn resolve_unless(
    cancelled: &Receiver<Infallible>,
    host: &str,
    port: u16,
    deadline: Instant,
) -> Result<Vec<SocketAddr>> {
    match numeric(host, port) {
        Some(found) => found.map(|address| vec![address]),
        None => look_up(cancelled, host, port, deadline, ask_system),
    }
}

type Lookup = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

fn ask_system(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.take(ADDRESSES_PER_NAME).collect())
}

/// Asks on a thread of its own, since a resolver knows no deadline.
fn look_up(
    cancelled: &Receiver<Infallible>,
    host: &str,
    port: u16,
    deadline: Instant,
    ask: Lookup,
) -> Result<Vec<SocketAddr>> {
    let left = || deadline.saturating_duration_since(Instant::now());
    select! {
        send(PERMITS.0, ()) -> _ => {}
        recv(cancelled) -> _ => return Err(Error::Closed),
        default(left()) => return Err(Error::TimedOut),
    }
    let permit = Permit;
    let (tx, answer) = channel::bounded(1);
    let name = host.to_owned();
    // If the thread cannot be had, the closure goes, and with it the permit.
    thread::Builder::new().name("relay-resolver".to_owned()).spawn(move || {
        let _permit = permit;
        // Nobody may be waiting any more.
        let _ = tx.send(ask(&name, port));
    })?;
    let failed = |reason: String| {
        let peer = Address { host, port }.to_string();
        Err(Error::peer_failed(&peer, format!("cannot resolve {host}: {reason}")))
    };
    select! {
        recv(answer) -> answer => match answer {
            Ok(Ok(found)) if found.is_empty() => failed("it has no address".to_owned()),
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => failed(error.to_string()),
            Err(_) => failed("the resolver broke off".to_owned()),
        },
        recv(cancelled) -> _ => Err(Error::Closed),
        default(left()) => Err(Error::TimedOut),
    }
}

/// A message in it is a lookup under way.
static PERMITS: LazyLock<(Sender<()>, Receiver<()>)> =
    LazyLock::new(|| channel::bounded(LOOKUPS_AT_ONCE));

struct Permit;

impl Drop for Permit {
    fn drop(&mut self) {
        let _ = PERMITS.1.try_recv();
    }
}

/// The address that `host` is, unless it is a name.
fn numeric(host: &str, port: u16) -> Option<Result<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(Ok(SocketAddr::new(ip, port)));
    }
    let (ip, zone) = host.split_once('%')?;
    let ip = ip.parse::<Ipv6Addr>().ok()?;
    Some(match scope_id(zone) {
        Ok(scope) => Ok(SocketAddrV6::new(ip, port, 0, scope).into()),
        Err(error) => {
            let peer = Address { host, port }.to_string();
            Err(Error::peer_failed(&peer, format!("no network interface {zone:?}: {error}")))
        }
    })
}

fn scope_id(zone: &str) -> io::Result<u32> {
    if let Ok(index) = zone.parse() {
        return Ok(index);
    }
    // Any socket will do for the question.
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(name_to_index(&any, zone)?)
}

/// The host, and what follows its `:`.
fn split(text: &str) -> Result<(&str, Option<&str>), Malformed> {
    if text.len() > TEXT_LIMIT {
        return Err(Malformed::TooLong);
    }
    if let Some(bracketed) = text.strip_prefix('[') {
        let (host, rest) = bracketed.split_once(']').ok_or(Malformed::Brackets)?;
        if !is_ipv6(host) {
            return Err(Malformed::Brackets);
        }
        return match rest.strip_prefix(':') {
            Some(ports) => Ok((host, Some(ports))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(Malformed::Brackets),
        };
    }
    if is_ipv6(text) {
        return Ok((text, None));
    }
    let (host, ports) = match text.split_once(':') {
        Some((host, ports)) => (host, Some(ports)),
        None => (text, None),
    };
    check_name(host)?;
    Ok((host, ports))
}

fn check_name(host: &str) -> Result<(), Malformed> {
    if host.is_empty() {
        return Err(Malformed::NoHost);
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if host.len() > HOST_LIMIT || !host.bytes().all(plain) {
        return Err(Malformed::NotAHost);
    }
    // Only digits and dots, but no address: a resolver would make something of it all the same.
    let digits = host.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if digits && host.parse::<Ipv4Addr>().is_err() {
        return Err(Malformed::NotAHost);
    }
    Ok(())
}

fn is_ipv6(host: &str) -> bool {
    let (ip, zone) = match host.split_once('%') {
        Some((ip, zone)) => (ip, Some(zone)),
        None => (host, None),
    };
    let plain = |b: u8| b.is_ascii_graphic() && !matches!(b, b'[' | b']' | b'%' | b'/' | b':');
    let zone_fits = |zone: &str| (1..=ZONE_LIMIT).contains(&zone.len()) && zone.bytes().all(plain);
    ip.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(zone_fits)
}

fn parse_port(text: &str) -> Result<u16, Malformed> {
    if text.is_empty() {
        return Err(Malformed::NoPort);
    }
    // More colons: an IPv6 address that does not happen to be one up to here.
    if text.contains(':') {
        return Err(Malformed::BareIpv6);
    }
    // `parse` alone would take a sign.
    if text.len() > 5 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Malformed::Port);
    }
    text.parse().map_err(|_| Malformed::Port)
}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;
