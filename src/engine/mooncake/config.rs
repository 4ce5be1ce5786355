//! What a Mooncake engine is opened with, and every text that C++ gets, checked before it sees it.

use std::{env, ffi::CString, fs, net::Ipv4Addr, path::PathBuf};

use crate::error::{Error, Result};

/// How a [`MooncakeEngine`](crate::MooncakeEngine) is opened.
///
/// ```
/// use mooncake_relay::MooncakeConfig;
/// let config = MooncakeConfig { hostname: "10.0.0.7".into(), ..MooncakeConfig::default() };
/// assert_eq!((&*config.metadata_server, &*config.protocol), ("P2PHANDSHAKE", "tcp"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MooncakeConfig {
    /// The name or address by which peers reach this host; default `127.0.0.1`. The engine listens
    /// on every address of the host, whatever stands here, on ports of its own choice. With a
    /// metadata server it may have a port, and is the name under which peers find it there. It is of
    /// IPv4 or a name; where `MC_USE_IPV6` is set in the environment, of IPv6 or a name.
    pub hostname: String,
    /// `P2PHANDSHAKE`, the default: peers ask each other. Or `etcd://`, `http://`, `https://` or
    /// `redis://` and a server, where the library was built with that.
    pub metadata_server: String,
    /// `tcp` (the default), `rdma` or `nvlink`.
    pub protocol: String,
    /// RDMA devices, with commas between them, as in `mlx5_0,mlx5_1`; empty for all. Nothing else
    /// takes any.
    pub device_name: String,
    /// The library, or the folder that holds `mooncake/` of the pip wheel. `None`: as
    /// [`mooncake_sys::load`] finds it, by `MOONCAKE_LIBRARY`, `MOONCAKE_WHEEL` and the usual places.
    pub library: Option<PathBuf>,
}

impl Default for MooncakeConfig {
    fn default() -> Self {
        Self {
            hostname: "127.0.0.1".to_owned(),
            metadata_server: P2P.to_owned(),
            protocol: "tcp".to_owned(),
            device_name: String::new(),
            library: None,
        }
    }
}

const P2P: &str = "P2PHANDSHAKE";
const SCHEMES: &[&str] = &["etcd", "http", "https", "redis"];
const PROTOCOLS: &[&str] = &["tcp", "rdma", "nvlink"];

/// The port that the engine reads into a name without one.
const DEFAULT_PORT: u16 = 12001;

/// The longest name that DNS knows, in brackets, and a port.
const NAME_LIMIT: usize = 253 + 2 + 6;
const SERVER_LIMIT: usize = 2048;

/// A configuration that C++ can be given.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) metadata_server: CString,
    /// `None`: peers ask each other.
    pub(super) scheme: Option<&'static str>,
    pub(super) name: CString,
    pub(super) protocol: CString,
    pub(super) devices: Vec<String>,
}

impl MooncakeConfig {
    pub(super) fn check(&self) -> Result<Checked> {
        let scheme = scheme_of(&self.metadata_server)?;
        let name = match scheme {
            // The engine chooses the port.
            None => host_of(&self.hostname)?.to_owned(),
            Some(_) if port_of(&self.hostname).is_some() => self.hostname.clone(),
            Some(_) => format!("{}:{DEFAULT_PORT}", self.hostname),
        };
        let name = plain(&name, NAME_LIMIT).map_err(|reason| Error::config("hostname", reason))?;
        if matches!(name.to_bytes(), b"0.0.0.0" | b"::" | b"[::]") {
            let reason = "it stands for every address: name the one by which peers reach this host";
            return Err(Error::config("hostname", reason));
        }
        check_family(&self.hostname)?;
        if !PROTOCOLS.contains(&self.protocol.as_str()) {
            let reason = format!("{:?} is not {}", self.protocol, PROTOCOLS.join(", "));
            return Err(Error::config("protocol", reason));
        }
        Ok(Checked {
            metadata_server: plain(&self.metadata_server, SERVER_LIMIT)
                .map_err(|reason| Error::config("metadata_server", reason))?,
            scheme,
            name,
            protocol: plain(&self.protocol, NAME_LIMIT)
                .map_err(|reason| Error::config("protocol", reason))?,
            devices: self.devices()?,
        })
    }

    fn devices(&self) -> Result<Vec<String>> {
        let refuse = |reason: String| Err(Error::config("device_name", reason));
        if self.device_name.is_empty() {
            return Ok(Vec::new());
        }
        if self.protocol != "rdma" {
            return refuse(format!("{} has no devices to choose from", self.protocol));
        }
        let mut names = Vec::new();
        for name in self.device_name.split(',').map(str::trim) {
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
            if name.is_empty() || name.len() > 64 || !name.chars().all(is_name) {
                return refuse(format!("{name:?} is no device's name"));
            }
            names.push(name.to_owned());
        }
        Ok(names)
    }
}

/// An engine has sockets of one family, whatever address it is given.
fn check_family(hostname: &str) -> Result<()> {
    let has_ipv6 = env::var_os("MC_USE_IPV6").is_some();
    let host = host_of(hostname)?.trim_matches(['[', ']']);
    let reason = if is_ipv6(host) && !has_ipv6 {
        "the engine has no IPv6 unless MC_USE_IPV6 is set in the environment"
    } else if host.parse::<Ipv4Addr>().is_ok() && has_ipv6 {
        "MC_USE_IPV6 is set in the environment, and the engine has no IPv4 then"
    } else {
        return Ok(());
    };
    Err(Error::config("hostname", reason))
}

/// The RDMA devices of this host.
pub(super) fn rdma_devices() -> Vec<String> {
    names_in("/sys/class/infiniband", "")
}

/// The matrix of network cards that the engine takes: these for every NUMA node, with none to fall
/// back on.
pub(super) fn nic_matrix(devices: &[String]) -> String {
    let mut nodes: Vec<_> = names_in("/sys/devices/system/node", "node")
        .iter()
        .filter_map(|name| name["node".len()..].parse::<u32>().ok())
        .collect();
    nodes.sort_unstable();
    if nodes.is_empty() {
        nodes.push(0);
    }
    let entries =
        nodes.iter().map(|node| (format!("cpu:{node}"), serde_json::json!([devices, []])));
    serde_json::Value::Object(entries.collect()).to_string()
}

fn names_in(folder: &str, prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
    names.sort();
    names
}

/// A peer's session id, as C++ may see it. Where peers ask each other it is an address.
pub(super) fn peer_name(peer: &str, p2p: bool) -> Result<CString> {
    let wrong = |reason: String| Error::metadata("session_id", reason);
    let name = plain(peer, NAME_LIMIT).map_err(wrong)?;
    if p2p {
        let (host, port) = peer.rsplit_once(':').unwrap_or((peer, ""));
        if port_of(peer).is_none() {
            return Err(wrong(format!("{port:?} is no port: write host:port")));
        }
        host_of(host).map_err(|_| wrong("its host is no name and no address".to_owned()))?;
    }
    Ok(name)
}

/// A text of a notification. Any script; C++ would cut it at a NUL.
pub(super) fn note_text(field: &'static str, text: &str) -> Result<CString> {
    const LIMIT: usize = 64 * 1024;
    if text.len() > LIMIT {
        return Err(Error::metadata(field, format!("longer than {LIMIT} bytes")));
    }
    CString::new(text).map_err(|_| Error::metadata(field, "it has a NUL in it"))
}

fn scheme_of(server: &str) -> Result<Option<&'static str>> {
    if server == P2P {
        return Ok(None);
    }
    let known = server.split_once("://").and_then(|(scheme, rest)| {
        SCHEMES.iter().copied().find(|known| *known == scheme).filter(|_| !rest.is_empty())
    });
    // C++ ends the process on a kind that it does not know.
    known.map(Some).ok_or_else(|| {
        let reason = format!("it is neither {P2P} nor a server with {}://", SCHEMES.join("://, "));
        Error::config("metadata_server", reason)
    })
}

/// Printable ASCII without spaces, not empty, not long.
fn plain(text: &str, limit: usize) -> Result<CString, String> {
    if text.is_empty() || text.len() > limit || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(format!("it is not 1 to {limit} printable ASCII characters without spaces"));
    }
    CString::new(text).map_err(|_| "it has a NUL in it".to_owned())
}

/// The host of `host` or `host:port`; of an IPv6 address, with its brackets if it has any.
fn host_of(text: &str) -> Result<&str> {
    let bare = text.matches(':').count() > 1 && !text.starts_with('[');
    let host = match text.rsplit_once(':') {
        Some((host, port)) if !bare && port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => text,
    };
    let address = host.strip_prefix('[').map(|rest| rest.strip_suffix(']'));
    let good = match address {
        Some(Some(inside)) => is_ipv6(inside),
        Some(None) => false,
        None if host.contains(':') => is_ipv6(host),
        None => {
            !host.is_empty()
                && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        }
    };
    if good { Ok(host) } else { Err(Error::config("hostname", "it is no name and no address")) }
}

/// An IPv6 address, with a zone or without.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').unwrap_or((text, "lo"));
    let is_zone = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    address.parse::<std::net::Ipv6Addr>().is_ok() && !zone.is_empty() && zone.bytes().all(is_zone)
}

fn port_of(text: &str) -> Option<u16> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.contains(':') && !host.starts_with('[');
    let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    port.parse().ok().filter(|port| digits && !bare && *port > 0)
}
